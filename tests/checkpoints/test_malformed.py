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
from transformers import AutoModelForCausalLM

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig, UnsupportedModelError
from hf_specdec.candidate_generators.draft_model.network import load_draft_model
from hf_specdec.checkpoints.loading import checkpoint_errors, loads_checkpoint
from hf_specdec.errors import CheckpointAccessError
from hf_specdec.hub.detect import detect_checkpoint
from tests.helpers.heads import (
    FIXTURES,
    HEADS,
    WITH_LAYERS,
    copy_of,
    load,
    loaded_target,
    method_of,
    weights_of,
)
from tests.helpers.levels import in_full
from tests.helpers.models import tiny_llama


EAGLE3, DFLASH = "eagle/eagle3_llama", "dflash/qwen3_random_b8"
SHORT = (EAGLE3, DFLASH, "medusa/v01_heads_pt", "mlp_speculator/tied_plain", "demo/mtp", "mtp/deepseek_v3")
MODELS = {f"model/{path.parent.name}": path for path in sorted(FIXTURES.glob("*/*/target"))[:3]}
# Folders of what is made malformed.
CASES = {**HEADS, **dict(list(WITH_LAYERS.items())[:4]), **MODELS}

NUMBERS = [0, -1, 1, 2, 2**31, 10**9, 10**18, 10**300, 0.5, float("nan"), float("inf"), -float("inf")]
OTHERS = json.loads('[null, true, false, "", "x", "8", [], {}, [1], ["x"], [[1]], {"a": 1}, [1000000000], [-1, 0]]')
OTHERS += ["x" * 100_000, [None]]
OTHERS += [json.loads("[" * depth + "]" * depth) for depth in (5, 300)]
MORE_KEYS = (
    "rope_scaling rope_parameters layer_types sliding_window quantization_config dflash_config eagle_config "
    "transformer_layer_config text_config d2t num_nextn_predict_layers auto_map block_size head_dim num_experts "
    "architectures model_type torch_dtype dtype id2label"
).split()
DTYPES = [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.float64]


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
        far, filling = (
            f"{name.rpartition('.')[0]}.{draw.randrange(10**9)}.weight",
            draw.choice([torch.nan, torch.inf, 0.0]),
        )
        tensors |= draw.choice(
            [
                {},
                {name: tensor, "extra.weight": torch.ones(2, 2)},
                {name: tensor.flatten()[: max(1, tensor.numel() // 2)]},
                {name: tensor.to(draw.choice(DTYPES))},
                {name: tensor[:0]},
                {name: torch.full_like(tensor.float(), filling)},
                {name: tensor.new_zeros(())},
                {name: tensor[None]},
                {far: tensor},
            ]
        )
    return {key: tensor.contiguous() for key, tensor in tensors.items()}


def changed_bytes(draw, content):
    """Cut off, changed in the header or anywhere, or of a header of another length."""
    kind, size = draw.randrange(4), min(struct.unpack("<Q", content[:8])[0], len(content) - 8)
    if kind == 0:
        return content[: draw.choice([0, draw.randrange(len(content))])]
    if kind == 1:
        return struct.pack("<Q", draw.choice([0, 2**62, len(content) * 10, 3])) + content[8:]
    content = bytearray(content)
    for _ in range(4):
        content[draw.randrange(8, 8 + size) if kind == 2 else draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def malform(seed, name, folder):
    draw = random.Random(f"{seed} {name}")
    weights = weights_of(copy_of(CASES[name], folder))
    kind = draw.choice(["config", "config", "config", "tensors", "tensors", "bytes"])
    if kind == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(changed_config(draw, config)))
    elif kind == "tensors" and weights.suffix == ".safetensors":
        save_file(changed_tensors(draw, load_file(weights)), weights, metadata={"format": "pt"})
    elif kind == "tensors":
        torch.save(changed_tensors(draw, torch.load(weights, weights_only=True)), weights)
    else:
        weights.write_bytes(changed_bytes(draw, weights.read_bytes()))


def memory():
    """Most bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *((name, seed) for name in SHORT for seed in (0, 1)),
        *in_full(
            *((name, 2) for name in CASES if name not in SHORT), *((name, seed) for name in SHORT for seed in (3, 4))
        ),
    ],
)
def test_malformed(tmp_path, name, seed):
    folder, method = tmp_path / "head", "draft_model" if name in MODELS else method_of(name)
    malform(seed, name, folder)
    target = loaded_target(HEADS[EAGLE3] if random.Random(seed).random() < 0.1 else CASES[name])
    before, said = memory(), []
    for step in (lambda: detect_checkpoint(folder), lambda: load(method, folder, target)):
        try:
            step()
        except (CheckpointFormatError, SpecConfigError, UnsupportedModelError) as error:
            said.append(str(error))
    assert all(len(text) < 4000 for text in said)
    assert memory() - before < 500 * 2**20


@pytest.mark.parametrize("error", [KeyError("x"), TypeError("y" * 1000), *in_full(RecursionError(), EOFError())])
def test_every_error_of_a_loader_becomes_one_of_this_package(error):
    with pytest.raises(CheckpointFormatError, match="'user/head' cannot be loaded") as caught:
        with checkpoint_errors("user/head"):
            raise error
    assert caught.value.__cause__ is error
    assert len(str(caught.value)) < 450
    assert type(error).__name__ in str(caught.value)

    @loads_checkpoint
    def load(config, target_model):
        raise error

    with pytest.raises(CheckpointFormatError, match=f"'head' cannot be loaded.*{type(error).__name__}"):
        load(SpeculativeConfig("eagle", "head"), None)


@pytest.mark.parametrize("error", [MemoryError(), *in_full(KeyboardInterrupt(), SystemExit(), SpecConfigError("x"))])
def test_errors_that_are_not_the_checkpoints_stay(error):
    with pytest.raises(type(error)) as caught, checkpoint_errors("user/head"):
        raise error
    assert caught.value is error


def test_errors_of_the_network():
    with pytest.raises(CheckpointAccessError, match="cannot be reached: .*refused"), checkpoint_errors("user/head"):
        raise ConnectionError("refused")
    assert issubclass(CheckpointAccessError, OSError)


# Sizes in a config are bounded by the file before anything is built


def draft_model_with(folder, changes, **sizes):
    tiny_llama(**sizes).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **changes}))
    return load_draft_model(SpeculativeConfig("draft_model", str(folder)), tiny_llama())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**5),
        ("vocab_size", 10**12),
        *in_full(("num_hidden_layers", 0), ("hidden_size", 10**9), ("head_dim", 2**31)),
    ],
)
def test_sizes_of_whole_models(tmp_path, key, value):
    with pytest.raises(CheckpointFormatError, match=f"has `{key}`={value} in its config.json.*no such model"):
        draft_model_with(tmp_path, {key: value})


def test_large_numbers_that_are_no_sizes(tmp_path):
    numbers = {"eos_token_id": [2**20], "rope_theta": 10**11, "seed": 2**31 - 1, "num_parameters": 8_030_261_248}
    numbers |= {"model_max_length": 10**30, "total_flos": 10**20}
    assert draft_model_with(tmp_path, numbers, max_position_embeddings=1_000_000).num_parameters() > 0


def test_settings_that_fail_only_when_they_are_used(tmp_path):
    copy_of("mtp/qwen3_5", tmp_path, {"text_config.rope_parameters.mrope_section": []})
    with pytest.raises(CheckpointFormatError, match=f"'{tmp_path}' cannot be loaded.*IndexError"):
        load("draft_model", tmp_path, loaded_target(WITH_LAYERS["mtp/qwen3_5"]))


# Weights that can draft nothing are loaded, with one warning

NOT_FINITE, ZEROS = r"tensors with NaN or infinite values \(", r"matrices of zeros alone \("


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        (EAGLE3, torch.nan, NOT_FINITE),
        (DFLASH, 0.0, ZEROS),
        *in_full(("mlp_speculator/untied_plain", torch.inf, NOT_FINITE)),
    ],
)
def test_dead_weights_are_one_warning(tmp_path, warnings, name, value, what):
    def change(tensors):
        dead = [key for key, tensor in tensors.items() if tensor.is_floating_point() and tensor.dim() == 2][:5]
        return tensors | {key: torch.full_like(tensors[key], value) for key in dead}

    folder = copy_of(name, tmp_path / "head", change=change)
    load(method_of(name), folder, loaded_target(HEADS[name]))
    (warning,) = warnings
    assert str(folder) in warning
    assert pytest.approx(5, abs=1) == int(warning.split(" has ")[1].split()[0])
    assert re.search(what, warning)


def test_ordinary_weights_are_no_warning(warnings):
    """Nor are those that cannot be examined, and those that may be zero."""
    for name in ("eagle/eagle1_llama", "medusa/vllm_converted", "mlp_speculator/tied_plain"):
        load(method_of(name), HEADS[name], loaded_target(HEADS[name]))
    weight = torch.nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
    network = torch.nn.ParameterDict({"weight": weight, "biases": torch.zeros(2, 2), "lora_B": torch.zeros(2, 2)})
    config = SpeculativeConfig("draft_model", "user/draft")
    assert loads_checkpoint(lambda config, target: network)(config, tiny_llama()) is network
    assert warnings == []


def test_the_targets_stay_as_they_are():
    """Checkpoints that failed, all of the above, have left nothing behind."""
    target = loaded_target(HEADS[EAGLE3])
    again = AutoModelForCausalLM.from_pretrained(target.config.name_or_path)
    for (name, one), (_, other) in zip(target.state_dict().items(), again.state_dict().items()):
        assert torch.equal(one, other), name
