"""Medusa heads: every published format gives the recorded logits, and heads fit targets with other padding."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec import SpecConfigError, SpeculativeConfig
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.checkpoints.loading import load as load_network
from tests.helpers import heads as fixtures
from tests.helpers.heads import FIXTURES, HEADS, copy_of, loaded_target, tensors_of
from tests.helpers.levels import in_full
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
GIVEN = SpeculativeConfig("medusa", "given")


@pytest.fixture(scope="module", autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def target():
    return loaded_target(FIXTURES / "medusa" / "v01_heads_pt")


def load(folder, target, **settings):
    """A fixture by its name, or what is in a folder."""
    return fixtures.load(
        "medusa", HEADS[f"medusa/{folder}"] if isinstance(folder, str) else folder, target, **settings
    )


def expected(name):
    return fixtures.expected_of(f"medusa/{name}")


def close(logits, reference):
    """Equal to 1e-4, and -inf in the same places."""
    return torch.allclose(logits, reference, rtol=0, atol=1e-4)


def test_recorded_logits(target, tmp_path):
    """The heads read what the target's own head reads, after the final norm."""
    for name, parts in FORMATS.items():
        heads, recorded = load(name, target), expected(name)
        assert (heads.num_heads, heads.num_layers, heads.lm_heads is None) == parts
        states, logits = recorded["hidden_states"], recorded["medusa_logits"]
        model = AutoModelForCausalLM.from_pretrained(HEADS[f"medusa/{name}"]) if name == "merged_v1" else target
        found = model.get_decoder()(recorded["input_ids"]).last_hidden_state
        assert close(found, states)
        assert close(model.lm_head(found), recorded["base_logits"])
        for lm_head in (target.lm_head, target.lm_head.weight):
            assert close(heads(states, lm_head), logits)
        assert close(heads(states[:, -1], target.lm_head, num_heads=2), logits[:2, :, -1])
        assert close(heads(states[0, -1], target.lm_head), logits[:, 0, -1])
        if "top1" in recorded:
            assert torch.equal(heads(states, target.lm_head).argmax(-1)[:, 0, -1], recorded["top1"])
        if name == "vllm_truncated_vocab":
            continue  # no place in the layout
        accuracies = [[0.5, 0.25]] * heads.num_heads
        heads.save(tmp_path / name, base_model="some/target", accuracies=accuracies)
        again = load(tmp_path / name, target)
        assert torch.equal(again(states, target.lm_head), heads(states, target.lm_head))
        assert (again.base_model, again.accuracies) == ("some/target", accuracies)


def test_published_layout(tmp_path):
    for own, num_layers in ((True, 2), (True, 1), (False, 1)):
        heads = MedusaHeads(8, 20, num_heads=2, num_layers=num_layers, own_lm_heads=own, bias=False)
        heads.save(tmp_path, base_model="some/target")
        config = json.loads((tmp_path / "config.json").read_text())
        assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, num_layers)
        assert config["base_model_name_or_path"] == "some/target"
        assert config.get("version") == (None if own else "2")
        # Other readers count on the biases.
        names = {f"{i}.{j}.linear.{part}" for i in range(2) for j in range(num_layers) for part in ("weight", "bias")}
        assert tensors_of(tmp_path).keys() == names | (
            {f"{i}.{num_layers}.weight" for i in range(2)} if own else set()
        )


def test_logit_scale(target, tmp_path):
    recorded = expected("vllm_converted")
    heads = load(copy_of("medusa/vllm_converted", tmp_path, {"logit_scale": 0.5}), target)
    # The published layout has no scale.
    heads.save(tmp_path / "saved")
    for one in (heads, load(tmp_path / "saved", target)):
        assert close(one(recorded["hidden_states"]), 0.5 * recorded["medusa_logits"])


def test_stacked_heads_are_the_equation():
    states, lm_head = torch.randn(4, 6), torch.randn(9, 6)
    for options in ({"num_layers": 2}, {}, {"own_lm_heads": False}, {"one_lm_head": True}):
        heads = MedusaHeads(6, 9, num_heads=3, **options)
        # Untrained heads predict what the target does.
        if options.get("own_lm_heads", True):
            heads.lm_heads[:] = lm_head
        assert torch.allclose(heads(states, lm_head), (states @ lm_head.T).expand(3, -1, -1), atol=1e-5)
        for parameter in heads.parameters():
            parameter.normal_()
        with torch.enable_grad():
            logits = heads(states, lm_head)
            logits.square().sum().backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in heads.parameters())
        for head in range(3):
            stream = states
            for weight, bias in zip(heads.weights, heads.biases):
                stream = stream + torch.nn.functional.silu(stream @ weight[head].T + bias[head])
            rows = lm_head if heads.lm_heads is None else heads.lm_heads[min(head, len(heads.lm_heads) - 1)]
            assert torch.allclose(logits[head], stream @ rows.T, atol=1e-4, rtol=1e-4)


# Rows of padding and added tokens: the same tokenizer, another number of rows


@pytest.mark.parametrize("name", ["v01_heads_pt", "vllm_truncated_vocab", *in_full("merged_v1")])
def test_vocabulary_is_cut_or_padded(target, name):
    """Heads that are passed fit as loaded ones do, and keep their own vocabulary."""
    for size in (250, 256, 260):
        model = tiny_llama(hidden_size=64, vocab_size=size)
        stored, recorded = load(name, target), expected(name)
        states, common = recorded["hidden_states"], min(size, 256)
        before = {key: value.shape for key, value in stored.state_dict().items()}
        if stored.token_map is not None and stored.token_map.max() >= size:
            with pytest.raises(SpecConfigError, match=r"draft the token 25\d \(`token_map`\), the target has 250"):
                load_network(MedusaHeads, GIVEN, model, stored)
            continue
        fitted = load_network(MedusaHeads, GIVEN, model, stored)
        assert (fitted is stored) == (size == 256)
        logits, best = fitted(states), fitted.short_logits(states).topk(10).indices
        best = best if fitted.token_map is None else fitted.token_map[best]
        assert torch.equal(logits, load(name, model)(states))
        assert logits.shape[-1] == size
        assert close(logits[..., :common], recorded["medusa_logits"][..., :common])
        assert (logits[..., common:] == -torch.inf).all()
        assert best.max() < common
        assert stored.token_map is not None or torch.equal(best, logits.topk(10).indices)
        assert {key: value.shape for key, value in stored.state_dict().items()} == before
        assert stored(states).shape[-1] == stored.vocab_size == 256


def test_heads_without_own_lm_heads_have_any_vocabulary(tmp_path):
    with pytest.raises(SpecConfigError, match="vocabulary of 68 tokens, and LlamaForCausalLM has 64"):
        load_network(MedusaHeads, GIVEN, tiny_llama(), MedusaHeads(32, 68, 2))
    heads = MedusaHeads(32, 1000, 2, own_lm_heads=False)
    assert load_network(MedusaHeads, GIVEN, tiny_llama(), heads).vocab_size == VOCAB_SIZE
    heads.save(tmp_path)
    assert load(tmp_path, tiny_llama())(torch.randn(1, 32), tiny_llama().lm_head).shape == (2, 1, VOCAB_SIZE)
