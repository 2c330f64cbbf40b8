"""Settings of a head's config: unknown ones are one warning by name, and numbers have limits that name the file."""

import json

import pytest

from hf_specdec import CheckpointFormatError, load_speculator
from tests.helpers.heads import copy_of, folder_of, load, loaded_target, method_of, put
from tests.helpers.models import tiny_llama


EAGLE3, DFLASH2, MEDUSA = "eagle/eagle3_llama", "dflash/dflash2_full_b8", "medusa/v2_shared_lm_head_safetensors"


@pytest.mark.parametrize(
    ("name", "config", "keys"),
    [
        (EAGLE3, {"draft_note": "x"}, ["draft_note"]),
        (EAGLE3, {"eagle_config": {"trained_by": "me", "trained_on": 3}}, ["trained_by", "trained_on"]),
        (DFLASH2, {"dflash_config.note": "x"}, ["dflash_config.note"]),
        (MEDUSA, {"medusa_author": "me"}, ["medusa_author"]),
        ("demo/mtp", {"mtp_note": [1]}, ["mtp_note"]),
    ],
)
def test_unknown_keys_are_one_warning(tmp_path, warnings, name, config, keys):
    folder = copy_of(name, tmp_path / "head", config)
    for _ in range(2):
        load(method_of(name), folder, loaded_target(folder_of(name)))
    (line,) = (line for line in warnings if "not known here" in line)
    assert str(folder) in line
    assert all(f"{key}`" in line for key in keys)


@pytest.mark.parametrize("value", [10**30, 10**400, 1e300])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        (DFLASH2, "input_embedding_scale"),
        (DFLASH2, "output_multiplier"),
        (EAGLE3, "rope_theta"),
        (EAGLE3, "logit_scale"),
        ("dflash/dspark_vanilla_b5", "rms_norm_eps"),
    ],
)
def test_numbers_have_limits(tmp_path, name, key, value):
    folder = copy_of(name, tmp_path / "head", {key: value})
    with pytest.raises(CheckpointFormatError, match=f"`{key}`=.*a positive number of at most") as caught:
        load(method_of(name), folder, loaded_target(folder_of(name)))
    assert str(folder) in str(caught.value)


def test_the_window_of_a_draft_model(tmp_path):
    tiny_llama(seed=1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 10**30}))
    with pytest.raises(CheckpointFormatError, match="`sliding_window`=.*must be an integer") as caught:
        load_speculator(tiny_llama(), "draft_model", model=str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["midlayer.hidden_norm.weight", "norm.weight"])
def test_a_norm_of_two_dimensions(tmp_path, name):
    folder = copy_of(EAGLE3, tmp_path / "head", None, put(name, lambda tensor: tensor[None]))
    with pytest.raises(CheckpointFormatError, match=rf"{name} of the shape \[1, 64\]"):
        load("eagle3", folder, loaded_target(folder_of(EAGLE3)))
