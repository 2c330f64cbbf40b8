"""Medusa heads: every published format gives the recorded logits, and a wrong checkpoint says what is wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig
from hf_specdec.candidate_generators.medusa.network import MedusaHeads, fitting_heads, load_medusa
from hf_specdec.checkpoints.checkpoint import Checkpoint
from tests.models import VOCAB_SIZE, tiny_llama


FIXTURES = Path(__file__).parents[1] / "fixtures" / "medusa"

# Heads, layers, whether the target's lm_head is used.
FORMATS = {
    "v01_heads_pt": (5, 1, False),
    "v01_two_layers_pt": (2, 2, False),
    "v2_shared_lm_head_safetensors": (3, 1, True),
    "merged_v1": (2, 1, False),
    "vllm_converted": (3, 1, False),
    "vllm_original_lm_head": (3, 1, False),
    "vllm_truncated_vocab": (3, 2, False),
}
WITHOUT_MAP = [name for name in FORMATS if name != "vllm_truncated_vocab"]
GIVEN = SpeculativeConfig("medusa", "given")
ORIGINAL = "medusa_lm_head.safetensors"
CONVERTED = "model.safetensors"


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "target").eval()


def settings(folder, **changes) -> SpeculativeConfig:
    return SpeculativeConfig(method="medusa", model=str(folder), **changes)


def expected(name):
    return load_file(FIXTURES / name / "expected.safetensors")


def close(logits, reference):
    """Equal to 1e-4, and -inf in the same places."""
    return torch.allclose(logits, reference, rtol=0, atol=1e-4)


class TestFormats:
    @pytest.mark.parametrize("name", FORMATS)
    def test_recorded_logits(self, target, name):
        heads, recorded = load_medusa(settings(FIXTURES / name), target), expected(name)
        assert (heads.num_heads, heads.num_layers, heads.lm_heads is None) == FORMATS[name]
        states = recorded["hidden_states"]
        with torch.no_grad():
            for lm_head in (target.lm_head, target.lm_head.weight):
                assert close(heads(states, lm_head), recorded["medusa_logits"])
            assert close(heads(states[:, -1], target.lm_head, num_heads=2), recorded["medusa_logits"][:2, :, -1])
            assert close(heads(states[0, -1], target.lm_head), recorded["medusa_logits"][:, 0, -1])
            best = heads.top_tokens(states, 10, target.lm_head)
        assert torch.equal(best, recorded["medusa_logits"].topk(10, dim=-1).indices)
        if "top1" in recorded:
            assert torch.equal(best[:, 0, -1, 0], recorded["top1"])

    @pytest.mark.parametrize("name", FORMATS)
    def test_hidden_states_and_logits_of_the_target(self, target, name):
        """The heads read what the target's own head reads, behind the final norm."""
        recorded = expected(name)
        folder = FIXTURES / name if name == "merged_v1" else FIXTURES / "target"
        model = AutoModelForCausalLM.from_pretrained(folder) if name == "merged_v1" else target
        with torch.no_grad():
            states = model.get_decoder()(recorded["input_ids"]).last_hidden_state
            assert close(states, recorded["hidden_states"])
            assert close(model.lm_head(states), recorded["base_logits"])

    def test_safetensors_are_preferred(self, target, tmp_path):
        shutil.copytree(FIXTURES / "v01_heads_pt", tmp_path, dirs_exist_ok=True)
        load_medusa(settings(FIXTURES / "v2_shared_lm_head_safetensors"), target).save(tmp_path)
        assert load_medusa(settings(tmp_path), target).num_heads == 3

    @pytest.mark.parametrize("name", WITHOUT_MAP)
    def test_saved_heads_are_the_same(self, target, tmp_path, name):
        heads, recorded = load_medusa(settings(FIXTURES / name), target), expected(name)
        accuracies = [[0.5, 0.25]] * heads.num_heads
        heads.save(tmp_path / "deeper", base_model="some/target", accuracies=accuracies)
        again = load_medusa(settings(tmp_path / "deeper"), target)
        with torch.no_grad():
            found = again(recorded["hidden_states"], target.lm_head)
            assert torch.equal(found, heads(recorded["hidden_states"], target.lm_head))
        assert (again.base_model, again.accuracies) == ("some/target", accuracies)

    @pytest.mark.parametrize(("own", "num_layers"), [(True, 1), (True, 2), (False, 1)])
    def test_published_layout(self, tmp_path, own, num_layers):
        heads = MedusaHeads(8, 20, num_heads=2, num_layers=num_layers, own_lm_heads=own, bias=False)
        heads.save(tmp_path, base_model="some/target")
        config = json.loads((tmp_path / "config.json").read_text())
        assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, num_layers)
        assert config["base_model_name_or_path"] == "some/target"
        assert config.get("version") == (None if own else "2")
        tensors = load_file(tmp_path / ORIGINAL)
        # Other readers count on the biases.
        blocks = {f"{i}.{j}.linear.{part}" for i in range(2) for j in range(num_layers) for part in ("weight", "bias")}
        assert tensors.keys() == (blocks | {f"{i}.{num_layers}.weight" for i in range(2)} if own else blocks)

    def test_cut_vocabulary_cannot_be_saved(self, target, tmp_path):
        heads = load_medusa(settings(FIXTURES / "vllm_truncated_vocab"), target)
        with pytest.raises(SpecConfigError, match="token_map"):
            heads.save(tmp_path)

    def test_logit_scale(self, target, tmp_path):
        folder = changed("vllm_converted", tmp_path, config={"logit_scale": 0.5})
        heads, recorded = load_medusa(settings(folder), target), expected("vllm_converted")
        with torch.no_grad():
            assert close(heads(recorded["hidden_states"]), 0.5 * recorded["medusa_logits"])
            # The published layout has no scale.
            heads.save(tmp_path / "saved")
            again = load_medusa(settings(tmp_path / "saved"), target)
            assert close(again(recorded["hidden_states"]), 0.5 * recorded["medusa_logits"])

    def test_only_the_heads_of_a_merged_checkpoint_are_read(self, target, monkeypatch):
        read, original = [], Checkpoint.read
        monkeypatch.setattr(Checkpoint, "read", lambda self, name, *a: read.append(name) or original(self, name, *a))
        load_medusa(settings(FIXTURES / "merged_v1"), target)
        assert len(read) == 6
        assert all(name.startswith("medusa_head.") for name in read)

    def test_dtype_and_device(self, target):
        assert (
            load_medusa(settings(FIXTURES / "merged_v1", dtype="bfloat16"), target).weights[0].dtype == torch.bfloat16
        )
        heads = load_medusa(settings(FIXTURES / "merged_v1", device="cpu"), target)
        assert heads.lm_heads.device.type == "cpu"

    def test_heads_of_another_dtype_draft_for_the_target(self, target):
        recorded = expected("v2_shared_lm_head_safetensors")
        config = settings(FIXTURES / "v2_shared_lm_head_safetensors", dtype="bfloat16")
        with torch.no_grad():
            logits = load_medusa(config, target)(recorded["hidden_states"], target.lm_head)
        assert logits.dtype == torch.float32
        assert (logits - recorded["medusa_logits"]).abs().max() < 0.5


class TestUntrained:
    def test_blocks_are_the_identity(self):
        heads, states = MedusaHeads(8, 20, num_heads=3, own_lm_heads=False), torch.randn(2, 5, 8)
        lm_head = torch.nn.Linear(8, 20, bias=False)
        assert torch.equal(heads(states, lm_head), lm_head(states).expand(3, -1, -1, -1))

    def test_own_lm_heads_start_from_the_targets(self):
        heads, states = MedusaHeads(8, 20, num_heads=3, num_layers=2), torch.randn(4, 8)
        lm_head = torch.randn(20, 8)
        heads.start_from(lm_head)
        assert torch.allclose(heads(states), (states @ lm_head.T).expand(3, -1, -1), atol=1e-5)

    @pytest.mark.parametrize("options", [{}, {"num_layers": 3}, {"own_lm_heads": False}, {"one_lm_head": True}])
    def test_every_weight_has_a_gradient(self, options):
        heads = MedusaHeads(8, 20, num_heads=2, **options)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_()
        heads(torch.randn(3, 4, 8), torch.randn(20, 8)).square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in heads.parameters())

    @pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"own_lm_heads": False}, {"one_lm_head": True}])
    def test_stacked_heads_are_the_equation(self, options):
        heads = MedusaHeads(6, 9, num_heads=3, **options)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_()
            states, lm_head = torch.randn(4, 6), torch.randn(9, 6)
            logits = heads(states, lm_head)
            for head in range(3):
                stream = states
                for weight, bias in zip(heads.weights, heads.biases):
                    stream = stream + torch.nn.functional.silu(stream @ weight[head].T + bias[head])
                rows = lm_head if heads.lm_heads is None else heads.lm_heads[min(head, len(heads.lm_heads) - 1)]
                assert torch.allclose(logits[head], stream @ rows.T, atol=1e-4, rtol=1e-4)


def changed(name, folder, file=CONVERTED, drop=(), put=None, config=None):
    """A copy of a fixture with other tensors or settings."""
    shutil.copytree(FIXTURES / name, folder, dirs_exist_ok=True)
    tensors = load_file(folder / file)
    for key in drop:
        del tensors[key]
    save_file({**tensors, **(put or {})}, folder / file)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    return folder


V2 = {"name": "v2_shared_lm_head_safetensors", "file": ORIGINAL}
CUT = "vllm_truncated_vocab"
WRONG = {
    "gap_in_the_numbering": (
        {**V2, "drop": ["1.0.linear.weight", "1.0.linear.bias"]},
        r"lacks 2 tensors.*1\.0\.linear",
    ),
    "head_without_bias": ({**V2, "drop": ["2.0.linear.bias"]}, r"lacks 1 tensors.*2\.0\.linear\.bias"),
    "head_without_lm_head": (
        {"name": "vllm_converted", "drop": ["lm_heads.1.weight"]},
        r"lacks 1.*lm_heads\.1\.weight",
    ),
    "lm_head_without_block": ({"name": "vllm_converted", "drop": ["blocks.2.layers.0.weight"]}, r"lacks 1.*blocks\.2"),
    "merged_without_block": (
        {"name": "merged_v1", "drop": ["medusa_head.0.0.linear.weight"]},
        r"lacks 1 tensors.*medusa_head\.0\.0\.linear\.weight",
    ),
    "no_token_map": ({"name": CUT, "drop": ["medusa_heads.token_map"]}, "lacks 1 tensors of a cut vocabulary"),
    "block_of_another_shape": (
        {**V2, "put": {"1.0.linear.weight": torch.zeros(64, 32)}},
        r"1\.0\.linear\.weight of the shape \[64, 32\].*\[64, 64\]",
    ),
    "bias_of_another_shape": ({**V2, "put": {"0.0.linear.bias": torch.zeros(63)}}, r"\[63\].*\[64\]"),
    "lm_heads_of_different_sizes": (
        {"name": "vllm_converted", "put": {"lm_heads.2.weight": torch.zeros(250, 64)}},
        r"lm_heads\.2\.weight of the shape \[250, 64\].*\[256, 64\]",
    ),
    "lm_head_of_another_width": (
        {"name": "vllm_converted", "put": {"lm_heads.0.weight": torch.zeros(256, 32)}},
        r"\[256, 32\].*\[256, 64\]",
    ),
    "token_map_of_another_size": (
        {"name": CUT, "put": {"medusa_heads.token_map": torch.arange(60)}},
        r"token_map, .* 64 different tokens, got torch.int64 of the shape \[60\]",
    ),
    "lm_head_smaller_than_its_map": (
        {"name": CUT, "put": {"medusa_heads.lm_heads.1.weight": torch.zeros(63, 64)}},
        r"lm_heads\.1\.weight of the shape \[63, 64\].*\[64, 64\]",
    ),
    "token_map_beyond_the_vocabulary": (
        {
            "name": CUT,
            "put": {
                "medusa_heads.token_map": torch.arange(200, 264),
                "medusa_heads.lm_heads.0.weight": torch.zeros(64, 64),
            },
        },
        r"draft the token 263 \(`token_map`\), the target has 256",
    ),
    "cut_vocabulary_of_another_target": (
        {"name": CUT, "config": {"vocab_size": 32000}},
        "vocabulary of 32000 tokens, and LlamaForCausalLM has 256",
    ),
    "int8_block": (
        {**V2, "put": {"1.0.linear.weight": torch.zeros(64, 64, dtype=torch.int8)}},
        r"1\.0\.linear\.weight is stored as int8",
    ),
    "bool_bias": ({**V2, "put": {"1.0.linear.bias": torch.zeros(64) > 0}}, r"1\.0\.linear\.bias is stored as bool"),
    "complex_lm_head": (
        {"name": "vllm_converted", "put": {"lm_heads.1.weight": torch.zeros(256, 64) + 0j}},
        r"lm_heads\.1\.weight is stored as complex64",
    ),
    "scalar_block": (
        {**V2, "put": {"0.0.linear.weight": torch.tensor(1.0)}},
        r"0\.0\.linear\.weight must be a matrix, and has the shape \[\]",
    ),
    "scalar_second_block": (
        {**V2, "put": {"1.0.linear.weight": torch.tensor(1.0)}},
        r"of the shape \[\].*\[64, 64\]",
    ),
    "scalar_lm_head": (
        {"name": "vllm_converted", "put": {"lm_heads.0.weight": torch.tensor(1.0)}},
        r"lm_heads\.0\.weight must be a matrix",
    ),
    "block_of_a_far_head": (
        {**V2, "put": {"99999999.0.linear.weight": torch.zeros(64, 64)}},
        "has 7 tensors.*100000000 Medusa heads with 1 layers need at least 100000000",
    ),
    "block_of_a_far_layer": (
        {**V2, "put": {"0.99999999.linear.weight": torch.zeros(64, 64)}},
        "has 7 tensors.*3 Medusa heads with 100000000 layers need at least 300000000",
    ),
    "lm_head_of_a_far_head": (
        {"name": "vllm_converted", "put": {"lm_heads.99999999.weight": torch.zeros(256, 64)}},
        "100000000 Medusa heads with 1 layers need",
    ),
    "repeated_tokens": (
        {"name": CUT, "put": {"medusa_heads.token_map": torch.zeros(64, dtype=torch.long)}},
        "token_map, which must hold the ids of 64 different tokens, got 1, from 0 on",
    ),
    "negative_tokens": (
        {"name": CUT, "put": {"medusa_heads.token_map": torch.arange(-4, 60)}},
        "token_map, which must hold the ids of 64 different tokens, got 64, from -4 on",
    ),
    "fractional_tokens": (
        {"name": CUT, "put": {"medusa_heads.token_map": torch.arange(64.0)}},
        "token_map, which must hold the ids of 64 different tokens, got torch.float32",
    ),
    "complex_tokens": (
        {"name": CUT, "put": {"medusa_heads.token_map": torch.arange(64) + 0j}},
        "token_map, which must hold the ids of 64 different tokens, got torch.complex64",
    ),
    "scalar_token_map": (
        {"name": CUT, "put": {"medusa_heads.token_map": torch.tensor(3)}},
        r"token_map, .*got torch.int64 of the shape \[\]",
    ),
    "base_model_that_is_no_name": (
        {**V2, "config": {"base_model_name_or_path": 5}},
        "`base_model_name_or_path`=5 in its config.json, which must be a name",
    ),
    "logit_scale_that_is_no_number": (
        {**V2, "config": {"logit_scale": "abc"}},
        "`logit_scale`='abc' in its config.json, which must be a positive number",
    ),
    "logit_scale_of_zero": ({**V2, "config": {"logit_scale": 0}}, "`logit_scale`=0 .*positive number"),
    "logit_scale_of_nan": ({**V2, "config": {"logit_scale": float("nan")}}, "`logit_scale`=nan .*positive number"),
    "logit_scale_beyond_floats": ({**V2, "config": {"logit_scale": 10**400}}, "`logit_scale`.*positive number"),
    "cut_vocabulary_that_is_no_size": (
        {"name": CUT, "config": {"truncated_vocab_size": "5"}},
        "`truncated_vocab_size`='5' in its config.json, which must be a positive integer",
    ),
    "negative_cut_vocabulary": ({"name": CUT, "config": {"truncated_vocab_size": -5}}, "=-5 .*positive integer"),
    "vocabulary_that_is_no_size": ({"name": CUT, "config": {"vocab_size": [256]}}, "`vocab_size`.*positive integer"),
    "shared_lm_head_that_is_no_flag": (
        {"name": "vllm_original_lm_head", "config": {"original_lm_head": "yes"}},
        "`original_lm_head`='yes' in its config.json, which must be true or false",
    ),
    "accuracies_that_are_no_table": ({**V2, "config": {"medusa_accuracies": 3}}, "`medusa_accuracies`=3 "),
    "accuracies_above_one": ({**V2, "config": {"medusa_accuracies": [[1.5]] * 3}}, "medusa_accuracies.*1.5"),
    "accuracies_of_other_heads": ({**V2, "config": {"medusa_accuracies": [[0.5]] * 2}}, "each of the 3 heads"),
}


class Malice:
    """What a malicious pickle does when it is loaded."""

    def __reduce__(self):
        return (open, ("should_not_exist", "w"))


class TestErrors:
    @pytest.mark.parametrize("name", WRONG)
    def test_wrong_checkpoint(self, target, tmp_path, name):
        change, message = WRONG[name]
        with pytest.raises(CheckpointFormatError, match=message):
            load_medusa(settings(changed(folder=tmp_path, **change)), target)

    @pytest.mark.parametrize("name", WITHOUT_MAP)
    def test_another_width(self, name):
        with pytest.raises(CheckpointFormatError, match="hidden size 64, and LlamaForCausalLM has 32"):
            load_medusa(settings(FIXTURES / name), tiny_llama())

    @pytest.mark.parametrize("name", ["v01_heads_pt", "vllm_original_lm_head", "merged_v1"])
    @pytest.mark.parametrize("size", [100, 241, 272, 1000])
    def test_another_vocabulary(self, name, size):
        model = tiny_llama(hidden_size=64, vocab_size=size)
        with pytest.raises(CheckpointFormatError, match=f"vocabulary of 256 tokens, and LlamaForCausalLM has {size}"):
            load_medusa(settings(FIXTURES / name), model)

    def test_the_message_names_the_base_model(self):
        with pytest.raises(CheckpointFormatError, match="not for 'target'"):
            load_medusa(settings(FIXTURES / "v01_heads_pt"), tiny_llama())

    def test_a_checkpoint_of_something_else(self, target):
        with pytest.raises(CheckpointFormatError, match="holds no Medusa heads.*model.safetensors"):
            load_medusa(settings(FIXTURES / "target"), target)

    def test_no_weights(self, target, tmp_path):
        (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
        with pytest.raises(CheckpointFormatError, match="none of the weight files.*medusa_lm_head.safetensors"):
            load_medusa(settings(tmp_path), target)

    def test_pickled_code_is_not_run(self, target, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "config.json").write_text('{"medusa_num_heads": 1}')
        torch.save({"0.0.linear.weight": Malice()}, tmp_path / "medusa_lm_head.pt")
        with pytest.raises(CheckpointFormatError, match="could run code"):
            load_medusa(settings(tmp_path), target)
        assert not (tmp_path / "should_not_exist").exists()

    def test_no_model(self, target):
        with pytest.raises(SpecConfigError, match="spec_model"):
            load_medusa(SpeculativeConfig(method="medusa"), target)

    def test_quantization(self, target):
        with pytest.raises(SpecConfigError, match="quantization"):
            load_medusa(settings(FIXTURES / "merged_v1", quantization="4bit"), target)


class TestPaddedVocabulary:
    """Rows of padding and added tokens: the same tokenizer, another number of rows."""

    @pytest.mark.parametrize("size", [250, 260])
    @pytest.mark.parametrize("name", ["v01_heads_pt", "vllm_original_lm_head", "merged_v1"])
    def test_cut_or_padded(self, name, size):
        model = tiny_llama(hidden_size=64, vocab_size=size)
        heads, recorded = load_medusa(settings(FIXTURES / name), model), expected(name)
        with torch.no_grad():
            logits = heads(recorded["hidden_states"])
            best = heads.top_tokens(recorded["hidden_states"], 10)
        assert logits.shape[-1] == size
        common = min(size, 256)
        assert close(logits[..., :common], recorded["medusa_logits"][..., :common])
        assert (logits[..., common:] == -torch.inf).all()
        assert best.max() < common
        assert torch.equal(best, logits.topk(10).indices)

    @pytest.mark.parametrize("size", [250, 256, 260])
    @pytest.mark.parametrize("name", ["v01_heads_pt", "vllm_original_lm_head", "vllm_truncated_vocab"])
    def test_heads_that_are_passed_fit_as_loaded_ones(self, target, name, size):
        """What was loaded for one vocabulary is used with another, and keeps its own."""
        model = tiny_llama(hidden_size=64, vocab_size=size)
        stored, recorded = load_medusa(settings(FIXTURES / name), target), expected(name)["hidden_states"]
        before = {key: value.shape for key, value in stored.state_dict().items()}
        if stored.token_map is not None and stored.token_map.max() >= size:
            with pytest.raises(SpecConfigError, match=r"draft the token 25\d \(`token_map`\), the target has 250"):
                fitting_heads(stored, GIVEN, model)
            return
        fitted = fitting_heads(stored, GIVEN, model)
        assert (fitted is stored) == (size == 256)
        assert torch.equal(fitted(recorded), load_medusa(settings(FIXTURES / name), model)(recorded))
        assert fitted.top_tokens(recorded, 10).max() < size
        assert fitted.weights is stored.weights
        assert {key: value.shape for key, value in stored.state_dict().items()} == before
        assert stored(recorded).shape[-1] == stored.vocab_size == 256

    def test_heads_of_another_vocabulary_are_not_passed(self):
        with pytest.raises(SpecConfigError, match="vocabulary of 68 tokens, and LlamaForCausalLM has 64"):
            fitting_heads(MedusaHeads(32, 68, 2), GIVEN, tiny_llama())
        heads = fitting_heads(MedusaHeads(32, 1000, 2, own_lm_heads=False), GIVEN, tiny_llama())
        assert (heads.vocab_size, heads.lm_head_size) == (64, 64)

    def test_fitted_heads_can_be_saved(self, tmp_path):
        model = tiny_llama(vocab_size=62)
        heads = fitting_heads(MedusaHeads(32, VOCAB_SIZE, 2), GIVEN, model)
        heads.save(tmp_path)
        assert load_medusa(settings(tmp_path), model).lm_heads.shape == (2, 62, 32)

    def test_any_vocabulary_without_own_lm_heads(self, tmp_path):
        MedusaHeads(32, 10, num_heads=2, own_lm_heads=False).save(tmp_path)
        model = tiny_llama()
        logits = load_medusa(settings(tmp_path), model)(torch.randn(1, 32), model.lm_head)
        assert logits.shape == (2, 1, VOCAB_SIZE)
