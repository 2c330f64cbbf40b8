"""Malformed checkpoints: each loads, or ends in an error of this package that names it, and fills no memory."""

from __future__ import annotations

import json
import random
import re
import resource
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig, UnsupportedModelError
from hf_specdec.candidate_generators.draft_model.network import load_draft_model
from hf_specdec.checkpoints.loading import checkpoint_errors
from hf_specdec.errors import CheckpointAccessError
from hf_specdec.hub.detect import detect_checkpoint
from tests.helpers.heads import (
    HEADS,
    WITH_LAYERS,
    copy_of,
    load,
    loaded_target,
    method_of,
    put,
    weights_of,
)
from tests.helpers.levels import in_full
from tests.helpers.models import tiny_llama


EAGLE3, DFLASH = "eagle/eagle3_llama", "dflash/qwen3_random_b8"
SHORT = (EAGLE3, DFLASH, "medusa/v01_heads_pt", "mlp_speculator/tied_plain", "demo/mtp", "mtp/deepseek_v3")
# Folders of what is made malformed.
CASES = {**HEADS, **dict(list(WITH_LAYERS.items())[:4])}

NUMBERS = [0, -1, 1, 2, 2**31, 10**9, 10**18, 10**300, 0.5, float("nan"), float("inf"), -float("inf")]
OTHERS = json.loads('[null, true, false, "", "x", "8", [], {}, [1], ["x"], [[1]], {"a": 1}, [1000000000], [-1, 0]]')
OTHERS += ["x" * 100_000, [None]]
OTHERS += [json.loads("[" * depth + "]" * depth) for depth in (5, 300)]
DTYPES = [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.float64]


MORE_KEYS = (
    "rope_scaling rope_parameters layer_types sliding_window quantization_config dflash_config eagle_config "
    "transformer_layer_config text_config d2t num_nextn_predict_layers auto_map block_size head_dim num_experts "
    "architectures model_type torch_dtype dtype id2label"
).split()


def changed_config(draw, config):
    """One or two values replaced, removed or added, at the top or inside."""
    for _ in range(draw.randrange(1, 3)):
        place = draw.choice([config, *(value for value in config.values() if isinstance(value, dict))])
        key = draw.choice(sorted(place) or ["x"]) if draw.random() < 0.85 else draw.choice(MORE_KEYS)
        if draw.random() < 0.15:
            place.pop(key, None)
        elif isinstance(place.get(key), list) and draw.random() < 0.3:
            place[key] = place[key] * draw.randrange(3) + draw.choice([[], [10**9], ["x"], [-5]])
        else:
            place[key] = draw.choice(NUMBERS if draw.random() < 0.6 else OTHERS)
    return config


def changed_tensors(draw, tensors):
    """One or two that are missing, too many, or of another name, shape, dtype or value."""
    for _ in range(draw.randrange(1, 3)):
        name = draw.choice(sorted(tensors))
        tensor = tensors.pop(name)
        filled = torch.full_like(tensor.float(), draw.choice([torch.nan, torch.inf, 0.0]))
        shapes = [tensor.flatten()[: max(1, tensor.numel() // 2)], tensor[:0], tensor.new_zeros(()), tensor[None]]
        kept = draw.choice([*shapes, tensor.to(draw.choice(DTYPES)), filled, None])
        far = f"{name.rpartition('.')[0]}.{draw.randrange(10**9)}.weight"
        changes = [{far: tensor}, {name: tensor, "extra.weight": torch.ones(2, 2)}, {}]
        tensors |= draw.choice(changes) if kept is None else {name: kept}
    return {key: tensor.contiguous() for key, tensor in tensors.items()}


def changed_bytes(draw, content):
    """Cut off, of a header of another length, or changed in the header or anywhere."""
    size, content = min(struct.unpack("<Q", content[:8])[0], len(content) - 8), bytearray(content)
    kind = draw.randrange(4)
    if kind == 0:
        return content[: draw.choice([0, draw.randrange(len(content))])]
    if kind == 1:
        content[:8] = struct.pack("<Q", draw.choice([0, 2**62, len(content) * 10, 3]))
    for _ in range(4 * (kind > 1)):
        content[draw.randrange(8, 8 + size) if kind == 2 else draw.randrange(len(content))] = draw.randrange(256)
    return content


def malform(seed, name, folder):
    draw = random.Random(f"{seed} {name}")
    weights, config = weights_of(copy_of(CASES[name], folder)), folder / "config.json"
    kind = draw.choice(["config", "config", "config", "tensors", "tensors", "bytes"])
    if kind == "config":
        config.write_text(json.dumps(changed_config(draw, json.loads(config.read_text()))))
    elif kind == "tensors" and weights.suffix == ".safetensors":
        save_file(changed_tensors(draw, load_file(weights)), weights, metadata={"format": "pt"})
    elif kind == "tensors":
        torch.save(changed_tensors(draw, torch.load(weights, weights_only=True)), weights)
    else:
        weights.write_bytes(changed_bytes(draw, weights.read_bytes()))


def said_by(step, *arguments):
    """The message of the package's error that a step ends in, if there is one."""
    try:
        step(*arguments)
    except (CheckpointFormatError, SpecConfigError, UnsupportedModelError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *((name, (0, 1)) for name in SHORT),
        *in_full(*((name, (2,)) for name in CASES if name not in SHORT), *((name, (3, 4)) for name in SHORT)),
    ],
)
def test_malformed(tmp_path, name, seeds):
    for seed in seeds:
        folder, method = tmp_path / str(seed), method_of(name)
        malform(seed, name, folder)
        target = loaded_target(HEADS[EAGLE3] if random.Random(seed).random() < 0.1 else CASES[name])
        # Most that this process has had.
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for step, arguments in ((detect_checkpoint, (folder,)), (load, (method, folder, target))):
            assert len(said_by(step, *arguments)) < 4000
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 2**10


def test_errors_of_a_loader():
    for error in (KeyError("x"), TypeError("y" * 1000), RecursionError(), EOFError()):
        kind = type(error).__name__
        with pytest.raises(CheckpointFormatError, match=f"'user/head' cannot be loaded.*{kind}") as caught:
            with checkpoint_errors("user/head"):
                raise error
        assert caught.value.__cause__ is error
        assert len(str(caught.value)) < 450
    # Not the checkpoint's.
    for error in (MemoryError(), KeyboardInterrupt(), SystemExit(), SpecConfigError("x")):
        with pytest.raises(type(error)) as caught, checkpoint_errors("user/head"):
            raise error
        assert caught.value is error
    with pytest.raises(CheckpointAccessError, match="cannot be reached: .*refused"), checkpoint_errors("user/head"):
        raise ConnectionError("refused")
    assert issubclass(CheckpointAccessError, OSError)


def test_sizes_of_whole_models(tmp_path):
    tiny_llama(max_position_embeddings=1_000_000).save_pretrained(tmp_path)
    settings, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "config.json"

    def load_with(**changes):
        file.write_text(json.dumps({**settings, **changes}))
        return load_draft_model(SpeculativeConfig("draft_model", str(tmp_path)), tiny_llama())

    sizes = {"num_hidden_layers": 10**5, "vocab_size": 10**12, "hidden_size": 10**9, "head_dim": 2**31}
    for key, value in (*sizes.items(), ("num_hidden_layers", 0)):
        with pytest.raises(CheckpointFormatError, match=f"has `{key}`={value} in its config.json.*no such model"):
            load_with(**{key: value})
    with pytest.raises(CheckpointFormatError, match=f"'{tmp_path}'.*`sliding_window`=.*must be an integer"):
        load_with(sliding_window=10**30)
    # Large numbers that are no sizes.
    numbers = {"eos_token_id": [2**20], "rope_theta": 10**11, "seed": 2**31 - 1, "num_parameters": 8_030_261_248}
    assert load_with(model_max_length=10**30, total_flos=10**20, **numbers).num_parameters() > 0


def test_dead_weights_are_one_warning(tmp_path, warnings):
    load("eagle3", HEADS[EAGLE3], loaded_target(HEADS[EAGLE3]))
    assert warnings == []
    for value, what in ((torch.nan, r"tensors with NaN or infinite values \("), (0.0, r"matrices of zeros alone \(")):
        change = put("midlayer.mlp.up_proj.weight", lambda weight, value=value: torch.full_like(weight, value))
        folder = copy_of(EAGLE3, tmp_path / str(value), change=change)
        load("eagle3", folder, loaded_target(HEADS[EAGLE3]))
        assert str(folder) in warnings[-1]
        assert re.search(what, warnings[-1])
    assert len(warnings) == 2
