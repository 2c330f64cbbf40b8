"""Malformed checkpoints: each loads, or ends in an error of this package that names it, without waiting or growing.

`HF_SPECDEC_MALFORMED` sets how many are made of each fixture.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import struct

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_specdec import CheckpointFormatError, SpecConfigError, SpecDecError, SpeculativeConfig, UnsupportedModelError
from hf_specdec.candidate_generators.draft_model.network import load_draft_model
from hf_specdec.checkpoints.loading import checkpoint_errors, loads_checkpoint
from hf_specdec.errors import CheckpointAccessError
from hf_specdec.hub.detect import detect_checkpoint
from tests.helpers.heads import (
    FIXTURES,
    HEADS,
    WITH_LAYERS,
    both,
    copy_of,
    load,
    loaded_target,
    method_of,
    put,
    weights_of,
    without,
)
from tests.helpers.models import tiny_llama


EAGLE3, DFLASH = "eagle/eagle3_llama", "dflash/qwen3_random_b8"
COUNT = int(os.environ.get("HF_SPECDEC_MALFORMED", "4"))
# Method and folder of what is made malformed.
CASES = {name: (method_of(name), folder) for name, folder in [*HEADS.items(), *list(WITH_LAYERS.items())[:4]]}
CASES |= {f"model/{path.parent.name}": ("draft_model", path) for path in sorted(FIXTURES.glob("*/*/target"))[:3]}

NUMBERS = [0, -1, 1, 2, 3, 2**31, 10**9, 10**18, 10**300, 0.5, float("nan"), float("inf"), -float("inf")]
OTHERS = [
    None,
    True,
    False,
    "",
    "x",
    "8",
    "x" * 100_000,
    [],
    {},
    [1],
    ["x"],
    [[1]],
    {"a": 1},
    [10**9],
    [-1, 0],
    [None],
]
MORE_KEYS = (
    "rope_scaling rope_parameters layer_types sliding_window quantization_config dflash_config eagle_config "
    "transformer_layer_config text_config d2t num_nextn_predict_layers auto_map block_size head_dim num_experts "
    "architectures model_type torch_dtype dtype id2label"
).split()


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


def changed_config(draw, config):
    """One or two values replaced, removed or added, at the top or inside."""
    for _ in range(draw.randrange(1, 3)):
        places = [config, *(value for value in config.values() if isinstance(value, dict))]
        place = draw.choice(places)
        key = draw.choice(sorted(place) or ["x"]) if draw.random() < 0.85 else draw.choice(MORE_KEYS)
        action = draw.randrange(8)
        if action == 0:
            place.pop(key, None)
        elif action == 1:
            place[key] = nested(draw.choice([5, 300]))
        elif action == 2 and isinstance(place.get(key), list):
            place[key] = place[key] * draw.randrange(3) + draw.choice([[], [10**9], ["x"], [-5]])
        else:
            place[key] = draw.choice(NUMBERS if draw.random() < 0.6 else OTHERS)
    return config


def changed_tensors(draw, tensors):
    tensors = dict(tensors)
    for _ in range(draw.randrange(1, 3)):
        name = draw.choice(sorted(tensors))
        tensor = tensors[name]
        match draw.randrange(9):
            case 0:
                del tensors[name]
            case 1:
                tensors["extra.weight"] = torch.ones(2, 2)
            case 2:
                tensors[name] = tensor.flatten()[: max(1, tensor.numel() // 2)]
            case 3:
                kinds = [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.float64]
                tensors[name] = tensor.to(draw.choice(kinds))
            case 4:
                tensors[name] = tensor[:0]
            case 5:
                tensors[name] = torch.full_like(tensor.float(), draw.choice([float("nan"), float("inf"), 0.0]))
            case 6:
                tensors[name] = tensor.new_zeros(())
            case 7:
                tensors[name] = tensor[None]
            case 8:
                tensors[f"{name.rpartition('.')[0]}.{draw.randrange(10**9)}.weight"] = tensors.pop(name)
        if not tensors:
            break
    return {key: tensor.contiguous() for key, tensor in tensors.items()}


def changed_bytes(draw, path):
    content = bytearray(path.read_bytes())
    match draw.randrange(5):
        case 0:
            content = content[: draw.randrange(len(content))]
        case 1:
            for _ in range(5):
                content[draw.randrange(len(content))] = draw.randrange(256)
        case 2:
            content[:8] = struct.pack("<Q", draw.choice([0, 2**62, len(content) * 10, 3]))
        case 3:
            size = struct.unpack("<Q", content[:8])[0] if path.suffix == ".safetensors" else 100
            for _ in range(3):
                content[8 + draw.randrange(max(1, min(size, len(content) - 8)))] = draw.randrange(256)
        case 4:
            content = bytearray(b"")
    path.write_bytes(bytes(content))


def changed_files(draw, folder, weights):
    """Index files that lie, and configs that are none."""
    match draw.randrange(4):
        case 0:
            names = list(load_file(weights)) if weights.suffix == ".safetensors" else ["a"]
            other = draw.choice([weights.name, "none.safetensors", "../x.safetensors", 5, None])
            index = {
                "weight_map": dict.fromkeys(names, weights.name) | {draw.choice(names): other, "more": weights.name}
            }
            weights.rename(folder / "part.safetensors") if draw.random() < 0.3 else None
            (folder / "model.safetensors.index.json").write_text(json.dumps(draw.choice([index, {}, [], index])))
            (folder / "model.safetensors").unlink(missing_ok=True) if draw.random() < 0.5 else None
        case 1:
            (folder / "config.json").write_text(
                draw.choice(["", "[", "null", "[1]", "{", '{"a": ' + "9" * 5000 + "}"])
            )
        case 2:
            (folder / "config.json").write_text('{"a": ' * 50_000 + "1" + "}" * 50_000)
        case 3:
            (folder / "tokenizer.json").write_text(draw.choice(["", "[]", '{"model": 3}', "{}"]))
            (folder / "tokenizer_config.json").write_text(draw.choice(["", "[]", '{"tokenizer_class": 3}', "{}"]))


def malform(seed, name, folder):
    draw = random.Random(f"{seed} {name}")
    weights = weights_of(copy_of(CASES[name][1], folder))
    kind = draw.choice(["config", "config", "config", "tensors", "tensors", "bytes", "files"])
    if kind == "config":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(changed_config(draw, config)))
    elif kind == "tensors" and weights.suffix == ".safetensors":
        save_file(changed_tensors(draw, load_file(weights)), weights, metadata={"format": "pt"})
    elif kind == "tensors":
        torch.save(changed_tensors(draw, torch.load(weights, weights_only=True)), weights)
    elif kind == "bytes":
        changed_bytes(draw, weights)
    else:
        changed_files(draw, folder, weights)
    return kind


def memory():
    """Most bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("seed", range(COUNT))
@pytest.mark.parametrize("name", CASES)
def test_malformed(tmp_path, name, seed):
    folder, (method, source) = tmp_path / "head", CASES[name]
    malform(seed, name, folder)
    target = loaded_target(HEADS[EAGLE3] if random.Random(seed).random() < 0.1 else source)
    before, said = memory(), []
    for step in (lambda: detect_checkpoint(folder), lambda: load(method, folder, target)):
        try:
            step()
        except (CheckpointFormatError, SpecConfigError, UnsupportedModelError) as error:
            said.append(str(error))
    assert all(len(text) < 4000 for text in said)
    assert memory() - before < 500 * 2**20


class TestTheBoundary:
    @pytest.mark.parametrize(
        "error", [KeyError("x"), TypeError("y" * 1000), RecursionError(), EOFError(), Exception("z")]
    )
    def test_everything_becomes_an_error_of_this_package(self, error):
        with pytest.raises(CheckpointFormatError, match="'user/head' cannot be loaded") as caught:
            with checkpoint_errors("user/head"):
                raise error
        assert caught.value.__cause__ is error
        assert len(str(caught.value)) < 450
        assert type(error).__name__ in str(caught.value)

    @pytest.mark.parametrize(
        "error", [KeyboardInterrupt(), SystemExit(), MemoryError(), torch.OutOfMemoryError("x"), SpecConfigError("x")]
    )
    def test_what_is_not_the_checkpoints_stays(self, error):
        with pytest.raises(type(error)) as caught, checkpoint_errors("user/head"):
            raise error
        assert caught.value is error

    @pytest.mark.parametrize("error", [ConnectionError("refused"), TimeoutError("slow")])
    def test_the_network(self, error):
        with (
            pytest.raises(CheckpointAccessError, match="cannot be reached: .*refused|slow"),
            checkpoint_errors("user/head"),
        ):
            raise error
        assert issubclass(CheckpointAccessError, OSError)
        assert not issubclass(HfHubHTTPError, SpecDecError)

    def test_loaders_are_inside(self, tmp_path):
        @loads_checkpoint
        def load(config, target_model):
            raise AttributeError("'list' object has no attribute 'get'")

        with pytest.raises(CheckpointFormatError, match="'head' cannot be loaded.*AttributeError"):
            load(SpeculativeConfig("eagle", "head"), None)


class TestPublishedSizes:
    """Sizes in a config are bounded by the file before anything is built."""

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("num_hidden_layers", 10**9),
            ("num_hidden_layers", 10**5),
            ("num_hidden_layers", 0),
            ("hidden_size", 10**9),
            ("head_dim", 2**31),
            ("vocab_size", 10**12),
            ("max_position_embeddings", 10**12),
        ],
    )
    def test_whole_models(self, tmp_path, key, value):
        tiny_llama().save_pretrained(tmp_path)
        settings = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**settings, key: value}))
        with pytest.raises(CheckpointFormatError, match=f"has `{key}`={value} in its config.json.*no such model"):
            load_draft_model(SpeculativeConfig("draft_model", str(tmp_path)), tiny_llama())

    def test_what_fails_only_when_it_is_used(self, tmp_path):
        copy_of("mtp/qwen3_5", tmp_path, {"text_config.rope_parameters.mrope_section": []})
        with pytest.raises(CheckpointFormatError, match=f"'{tmp_path}' cannot be loaded.*IndexError"):
            load("draft_model", tmp_path, loaded_target(WITH_LAYERS["mtp/qwen3_5"]))

    def test_large_numbers_that_are_no_sizes(self, tmp_path):
        tiny_llama(max_position_embeddings=1_000_000).save_pretrained(tmp_path)
        settings = json.loads((tmp_path / "config.json").read_text())
        more = {"eos_token_id": [2**20], "rope_theta": 10**11, "seed": 2**31 - 1, "num_parameters": 8_030_261_248}
        more |= {"model_max_length": 10**30, "total_flos": 10**20}
        (tmp_path / "config.json").write_text(json.dumps({**settings, **more}))
        assert load_draft_model(SpeculativeConfig("draft_model", str(tmp_path)), tiny_llama()).num_parameters() > 0


class TestDeadWeights:
    """Weights that can draft nothing are loaded, with one warning."""

    @pytest.fixture
    def warnings(self, monkeypatch):
        seen = []
        monkeypatch.setattr("hf_specdec.checkpoints.loading.logger.warning", seen.append)
        return seen

    def test_weights_of_eight_bits_and_untrained_parts(self, warnings):
        """Weights that cannot be examined are no reason to fail, and those that may be zero none to warn."""
        network = torch.nn.ParameterDict(
            {
                "weight": torch.nn.Parameter(torch.ones(2, 2).to(torch.float8_e4m3fn), requires_grad=False),
                "biases": torch.zeros(2, 2),
                "lora_B": torch.zeros(2, 2),
            }
        )
        config = SpeculativeConfig("draft_model", "user/draft")
        assert loads_checkpoint(lambda config, target: network)(config, tiny_llama()) is network
        assert warnings == []

    @pytest.mark.parametrize(
        ("value", "what"),
        [
            (float("nan"), r"tensors with NaN or infinite values \("),
            (float("inf"), r"tensors with NaN or infinite values \("),
            (0.0, r"matrices of zeros alone \("),
        ],
    )
    @pytest.mark.parametrize("name", [EAGLE3, DFLASH, "mlp_speculator/untied_plain"])
    def test_one_warning(self, tmp_path, warnings, name, value, what):
        def change(tensors):
            dead = [key for key, tensor in tensors.items() if tensor.is_floating_point() and tensor.dim() == 2][:5]
            return tensors | {key: torch.full_like(tensors[key], value) for key in dead}

        folder = copy_of(name, tmp_path / "head", change=change)
        load(method_of(name), folder, loaded_target(HEADS[name]))
        (warning,) = warnings
        assert str(folder) in warning
        assert pytest.approx(5, abs=1) == int(warning.split(" has ")[1].split()[0])
        assert re.search(what, warning)

    @pytest.mark.parametrize("name", ["eagle/eagle1_llama", "medusa/vllm_converted", "mlp_speculator/tied_plain"])
    def test_ordinary_weights_say_nothing(self, warnings, name):
        load(method_of(name), HEADS[name], loaded_target(HEADS[name]))
        assert warnings == []

    def test_one_number_is_enough(self, tmp_path, warnings):
        model = tiny_llama()
        model.lm_head.weight.data[3, 4] = float("nan")
        model.save_pretrained(tmp_path)
        load_draft_model(SpeculativeConfig("draft_model", str(tmp_path)), tiny_llama())
        assert "1 tensors with NaN or infinite values (lm_head.weight)" in warnings[0]


@pytest.mark.parametrize(("scale", "is_refused"), [(1.0, False), (2.0, True)])
def test_an_embedding_as_lm_head(tmp_path, scale, is_refused):
    """The flag is mostly copied from targets; with another embedding it would be another computation."""
    name = "eagle/eagle3_speculators"
    target = loaded_target(HEADS[name])
    embedding = target.get_input_embeddings().weight.detach() * scale
    config = {"transformer_layer_config.tie_word_embeddings": True, "draft_vocab_size": None}
    change = both(without("lm_head", "d2t", "t2d"), put("embed_tokens.weight", embedding))
    folder = copy_of(name, tmp_path / "head", config, change)
    if is_refused:
        with pytest.raises(CheckpointFormatError, match="`tie_word_embeddings`=true.*an embedding of its own"):
            load("eagle3", folder, target)
    else:
        assert load("eagle3", folder, target).lm_head is None


def test_the_targets_stay_as_they_are():
    """Checkpoints that failed, all of the above, have left nothing behind."""
    target = loaded_target(HEADS[EAGLE3])
    again = AutoModelForCausalLM.from_pretrained(target.config.name_or_path)
    for (name, one), (_, other) in zip(target.state_dict().items(), again.state_dict().items()):
        assert torch.equal(one, other), name
