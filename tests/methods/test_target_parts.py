"""Parts that drafters share with their target are the target's present ones, in whatever form it has them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from hf_specdec import generate_many, load_speculator
from hf_specdec.layers.draft_network import TargetParts
from tests.helpers.levels import full, in_full
from tests.helpers.methods import CHECKPOINTS, demo_target, fresh_speculator, settings_of


TOKENS = torch.arange(1, 40)[None]
CALL = {"do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True}


@pytest.fixture
def target():
    """A target of the test's own, which may be changed."""
    return copy.deepcopy(demo_target())


def decoded(target, **settings):
    """Text, and how many draft tokens were accepted."""
    output = target.generate(TOKENS, **CALL, **settings)
    return output.sequences.tolist(), output.speculative.num_accepted_tokens


@pytest.mark.parametrize(
    "name",
    [
        "eagle3 tree",
        *in_full("dflash", "medusa", "mlp_speculator", "mtp", "ngram", "recycling", "suffix+eagle3"),
        *in_full("draft_model re-encoded"),
    ],
)
def test_another_default_device(name):
    """Tensors that are made on the way have places of their own; the user's own code has the user's default."""
    settings, places = settings_of(name), []
    if name == "suffix+eagle3":
        # Which of them drafts is decided by the clock.
        settings["retrieval_num_speculative_tokens"] = 1

    def noted(input_ids, scores):
        places.append(torch.empty(0).device.type)
        return scores

    def called():
        speculator = fresh_speculator(settings)
        call = {"assistant": speculator, "eos_token_id": None, "logits_processor": [noted]}
        text, num_accepted = decoded(demo_target(), **call)
        requests = [[5, 9, 9, 4], [7, 8], [3, 1, 4]]
        outputs = generate_many(demo_target(), requests, assistant=speculator, max_new_tokens=8, batch_size=2)
        return text, "+" in name or num_accepted, sorted(output.tokens for output in outputs)

    expected = called()
    places.clear()
    with torch.device("meta"):
        assert called() == expected
        demo_target().generate(TOKENS, max_new_tokens=2, spec_method="off", logits_processor=[noted])
    assert set(places) == {"meta"}
    # Nothing of that call is left over.
    assert called() == expected


class Louder(torch.nn.Module):
    """Stands in the place of a module, as an adapter does."""

    def __init__(self, module, factor):
        super().__init__()
        self.base_layer, self.factor = module, factor

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, *args):
        return self.factor * self.base_layer(*args)


class TestChangesAfterLoading:
    @pytest.mark.parametrize("method", ["eagle3", "mtp", *in_full("eagle", "dflash")])
    def test_other_modules(self, method, target):
        network = load_speculator(target, method, model=CHECKPOINTS[method]).resources
        hidden = torch.randn(2, 3, target.config.hidden_size)
        rows, logits = network.embed(TOKENS), network.logits(hidden)
        uses_head = method == "mtp" or network.lm_head is None
        target.set_input_embeddings(Louder(target.get_input_embeddings(), 2.0))
        target.set_output_embeddings(Louder(target.get_output_embeddings(), 3.0))
        torch.testing.assert_close(network.embed(TOKENS), 2 * rows)
        torch.testing.assert_close(network.logits(hidden), (3 if uses_head else 1) * logits)
        for find, put in (
            (target.get_input_embeddings, target.set_input_embeddings),
            (target.get_output_embeddings, target.set_output_embeddings),
        ):
            put(find().base_layer)
        assert torch.equal(network.embed(TOKENS), rows)
        assert torch.equal(network.logits(hidden), logits)

    @pytest.mark.parametrize("method", ["eagle3", *in_full("mtp", "dflash", "medusa")])
    def test_other_weights_and_another_type(self, method, target):
        held = load_speculator(target, settings_of(method))
        before = decoded(target, assistant=held)
        weights = {name: tensor.clone() for name, tensor in target.state_dict().items()}
        with torch.no_grad():
            target.get_input_embeddings().weight.mul_(-1)
        plain = target.generate(TOKENS, **CALL).sequences.tolist()
        assert decoded(target, assistant=held)[0] == plain
        target.load_state_dict(weights)
        assert decoded(target, assistant=held) == before
        target.to(torch.float64)
        plain = target.generate(TOKENS, **CALL).sequences.tolist()
        assert decoded(target, assistant=held)[0] == plain


class TestParts:
    @full
    def test_held_copied_and_pickled(self, target):
        parts = TargetParts(target)
        assert copy.deepcopy(parts) is parts
        assert torch.equal(pickle.loads(pickle.dumps(parts)).bind_embedding()(TOKENS), parts.bind_embedding()(TOKENS))
        embedding = target.get_input_embeddings()
        # The last one remains.
        del target
        assert parts.embedding is embedding

    def test_scaling_is_left_out(self):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_key_value_heads=1, head_dim=8, vocab_size=64))
        embedding = model.get_input_embeddings()
        rows = F.embedding(TOKENS, embedding.weight)
        assert not torch.allclose(embedding(TOKENS), rows)
        assert torch.equal(TargetParts(model).bind_embedding()(TOKENS), rows)
        model.set_input_embeddings(Louder(embedding, 1.0))
        torch.testing.assert_close(TargetParts(model).bind_embedding()(TOKENS), rows)
