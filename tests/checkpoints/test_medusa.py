"""Medusa heads: every published format gives the recorded logits, and heads fit targets with other padding."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec import SpecConfigError, SpeculativeConfig
from hf_specdec.candidate_generators.medusa.network import MedusaHeads, fitting_heads
from tests.helpers import heads as fixtures
from tests.helpers.heads import FIXTURES, copy_of, tensors_of
from tests.helpers.models import VOCAB_SIZE, tiny_llama


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


@pytest.fixture(scope="module")
def target():
    return fixtures.loaded_target(FIXTURES / "medusa" / "v01_heads_pt")


def load(folder, target, **settings):
    """A fixture by its name, or what is in a folder."""
    folder = fixtures.HEADS[f"medusa/{folder}"] if isinstance(folder, str) else folder
    return fixtures.load("medusa", folder, target, **settings)


def expected(name):
    return fixtures.expected_of(f"medusa/{name}")


def close(logits, reference):
    """Equal to 1e-4, and -inf in the same places."""
    return torch.allclose(logits, reference, rtol=0, atol=1e-4)


class TestFormats:
    @pytest.mark.parametrize("name", FORMATS)
    def test_recorded_logits(self, target, name):
        heads, recorded = load(name, target), expected(name)
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
        """The heads read what the target's own head reads, after the final norm."""
        recorded = expected(name)
        folder = FIXTURES / "medusa" / name if name == "merged_v1" else FIXTURES / "medusa" / "target"
        model = AutoModelForCausalLM.from_pretrained(folder) if name == "merged_v1" else target
        with torch.no_grad():
            states = model.get_decoder()(recorded["input_ids"]).last_hidden_state
            assert close(states, recorded["hidden_states"])
            assert close(model.lm_head(states), recorded["base_logits"])

    def test_safetensors_are_preferred(self, target, tmp_path):
        shutil.copytree(FIXTURES / "medusa" / "v01_heads_pt", tmp_path, dirs_exist_ok=True)
        load("v2_shared_lm_head_safetensors", target).save(tmp_path)
        assert load(tmp_path, target).num_heads == 3

    @pytest.mark.parametrize("name", WITHOUT_MAP)
    def test_saved_heads_are_the_same(self, target, tmp_path, name):
        heads, recorded = load(name, target), expected(name)
        accuracies = [[0.5, 0.25]] * heads.num_heads
        heads.save(tmp_path / "deeper", base_model="some/target", accuracies=accuracies)
        again = load(tmp_path / "deeper", target)
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
        tensors = tensors_of(tmp_path)
        # Other readers count on the biases.
        blocks = {f"{i}.{j}.linear.{part}" for i in range(2) for j in range(num_layers) for part in ("weight", "bias")}
        assert tensors.keys() == (blocks | {f"{i}.{num_layers}.weight" for i in range(2)} if own else blocks)

    def test_logit_scale(self, target, tmp_path):
        folder = copy_of("medusa/vllm_converted", tmp_path, {"logit_scale": 0.5})
        heads, recorded = load(folder, target), expected("vllm_converted")
        with torch.no_grad():
            assert close(heads(recorded["hidden_states"]), 0.5 * recorded["medusa_logits"])
            # The published layout has no scale.
            heads.save(tmp_path / "saved")
            again = load(tmp_path / "saved", target)
            assert close(again(recorded["hidden_states"]), 0.5 * recorded["medusa_logits"])

    def test_heads_of_another_dtype_draft_for_the_target(self, target):
        recorded = expected("v2_shared_lm_head_safetensors")
        with torch.no_grad():
            heads = load("v2_shared_lm_head_safetensors", target, dtype="bfloat16")
            logits = heads(recorded["hidden_states"], target.lm_head)
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


class TestPaddedVocabulary:
    """Rows of padding and added tokens: the same tokenizer, another number of rows."""

    @pytest.mark.parametrize("size", [250, 260])
    @pytest.mark.parametrize("name", ["v01_heads_pt", "vllm_original_lm_head", "merged_v1"])
    def test_cut_or_padded(self, name, size):
        model = tiny_llama(hidden_size=64, vocab_size=size)
        heads, recorded = load(name, model), expected(name)
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
        """Heads that were loaded for one vocabulary are used with another, and keep their own."""
        model = tiny_llama(hidden_size=64, vocab_size=size)
        stored, recorded = load(name, target), expected(name)["hidden_states"]
        before = {key: value.shape for key, value in stored.state_dict().items()}
        if stored.token_map is not None and stored.token_map.max() >= size:
            with pytest.raises(SpecConfigError, match=r"draft the token 25\d \(`token_map`\), the target has 250"):
                fitting_heads(stored, GIVEN, model)
            return
        fitted = fitting_heads(stored, GIVEN, model)
        assert (fitted is stored) == (size == 256)
        assert torch.equal(fitted(recorded), load(name, model)(recorded))
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
        assert load(tmp_path, model).lm_heads.shape == (2, 62, 32)

    def test_any_vocabulary_without_own_lm_heads(self, tmp_path):
        MedusaHeads(32, 10, num_heads=2, own_lm_heads=False).save(tmp_path)
        model = tiny_llama()
        logits = load(tmp_path, model)(torch.randn(1, 32), model.lm_head)
        assert logits.shape == (2, 1, VOCAB_SIZE)
