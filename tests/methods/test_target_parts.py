"""Parts that drafters share with their target are the target's present ones, in whatever form it has them."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from hf_specdec import demo, forget_speculators, generate_many, load_speculator
from hf_specdec.layers.draft_network import TargetParts, is_copy
from tests.helpers.methods import fresh_speculator, settings_of
from tests.hub.test_loaded import HEADS


METHODS = [*HEADS, "suffix+eagle3", "ngram", "suffix"]
OWN_SETTINGS = ["recycling", "medusa static tree", "eagle3 tree", "dflash", "draft_model re-encoded", "mtp"]
SHORT = {"do_sample": False, "max_new_tokens": 2}
TOKENS = torch.arange(1, 40)[None]
CALL = {"do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def shared_target():
    return demo.load_target()


@pytest.fixture
def target(shared_target):
    """A target of the test's own, which may be changed."""
    return copy.deepcopy(shared_target)


def speculation(method):
    model = HEADS.get(method.rpartition("+")[2])
    return {"method": method, **({"model": model} if model else {})}


def decoded(target, **settings):
    """Text, and how many draft tokens were accepted."""
    output = target.generate(TOKENS, **CALL, **settings)
    return output.sequences.tolist(), output.speculative.num_accepted_tokens


@pytest.mark.parametrize("method", METHODS)
def test_another_default_device(method, shared_target):
    """Tensors that are made on the way have places of their own; the user's own code has the user's default."""
    settings = {"speculative": speculation(method), "eos_token_id": None}
    if method == "suffix+eagle3":
        # Which of them drafts is decided by the clock.
        settings["speculative"]["retrieval_num_speculative_tokens"] = 1
    places = []

    def noted(input_ids, scores):
        places.append(torch.empty(0).device.type)
        return scores

    forget_speculators(shared_target)
    expected = decoded(shared_target, **settings, logits_processor=[noted])
    forget_speculators(shared_target)
    with torch.device("meta"):
        places.clear()
        found = decoded(shared_target, **settings, logits_processor=[noted])
        shared_target.generate(
            TOKENS, max_new_tokens=2, eos_token_id=None, spec_method="off", logits_processor=[noted]
        )
        assert set(places) == {"meta"}
    assert found[0] == expected[0]
    assert method == "suffix+eagle3" or found == expected
    # Nothing of that call is left over.
    forget_speculators(shared_target)
    assert decoded(shared_target, **settings)[0] == expected[0]


@pytest.mark.parametrize("name", OWN_SETTINGS)
def test_many_requests_with_another_default_device(name, shared_target):
    speculator = fresh_speculator(settings_of(name), shared_target)
    run = partial(generate_many, shared_target, [[5, 9, 9, 4], [7, 8], [3, 1, 4]], assistant=speculator)
    run = partial(run, max_new_tokens=8, batch_size=2)
    expected = sorted(output.tokens for output in run())
    with torch.device("meta"):
        assert sorted(output.tokens for output in run()) == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_that_torch_has_packed(target):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = torch.ao.quantization.quantize_dynamic(target, {torch.nn.Linear}, dtype=torch.qint8)
    # Its rounding depends on what else is in a forward, so that texts may differ.
    accepted = {method: decoded(packed, speculative=speculation(method))[1] for method in METHODS}
    assert min(accepted[method] for method in ("mtp", "eagle3", "dflash", "draft_model")) > 0


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
    @pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "dflash"])
    def test_other_modules(self, method, target):
        network = load_speculator(target, method, model=HEADS[method]).resources
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

    def test_medusa_reads_the_present_head(self, target):
        resources = load_speculator(target, "medusa", model=HEADS["medusa"]).resources
        target.set_output_embeddings(copy.deepcopy(target.get_output_embeddings()))
        assert resources.target.head is target.get_output_embeddings()

    @pytest.mark.parametrize("method", ["eagle3", "mtp", "dflash", "medusa"])
    def test_other_weights_and_another_type(self, method, target):
        held = load_speculator(target, **speculation(method))
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

    @pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
    def test_adapters(self, target):
        peft = pytest.importorskip("peft")
        network = load_speculator(target, "mtp", model=HEADS["mtp"]).resources
        hidden = torch.randn(1, 2, target.config.hidden_size)
        rows, logits = network.embed(TOKENS), network.logits(hidden)
        settings = peft.LoraConfig(target_modules=["embed_tokens", "lm_head", "q_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(target, settings).eval()
        assert torch.equal(network.embed(TOKENS), target.get_input_embeddings()(TOKENS))
        assert torch.equal(network.logits(hidden), target.get_output_embeddings()(hidden))
        assert not torch.allclose(network.embed(TOKENS), rows)
        assert not torch.allclose(network.logits(hidden), logits)
        plain = adapted.generate(input_ids=TOKENS, **CALL).sequences
        ours = adapted.generate(input_ids=TOKENS, **CALL, spec_method="mtp", spec_model=HEADS["mtp"])
        assert torch.equal(ours.sequences, plain)
        with adapted.disable_adapter():
            assert torch.equal(network.embed(TOKENS), rows)
            torch.testing.assert_close(network.logits(hidden), logits)


class TestParts:
    def test_the_last_ones_remain(self, target):
        parts = TargetParts(target)
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        del target
        assert parts.embedding is embedding
        assert parts.head is head

    def test_they_can_be_pickled(self, target):
        parts = TargetParts(target)
        again = pickle.loads(pickle.dumps(parts))
        assert torch.equal(again.embed(TOKENS), parts.embed(TOKENS))
        assert copy.deepcopy(parts) is parts

    def test_scaling_is_left_out(self):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, num_key_value_heads=1, head_dim=8, vocab_size=64))
        embedding = model.get_input_embeddings()
        rows = F.embedding(TOKENS, embedding.weight)
        assert not torch.allclose(embedding(TOKENS), rows)
        assert torch.equal(TargetParts(model).embed(TOKENS), rows)
        adapter = Louder(embedding, 1.0)
        model.set_input_embeddings(adapter)
        torch.testing.assert_close(TargetParts(model).embed(TOKENS), rows)

    def test_what_is_packed_is_no_copy(self, target):
        weight = target.get_input_embeddings().weight
        assert is_copy(weight.clone(), weight)
        assert not is_copy(weight, lambda: weight)

    def test_there_are_no_others(self, target):
        with pytest.raises(AttributeError, match="has no part 'tail'"):
            getattr(TargetParts(target), "tail")  # noqa: B009 - an attribute is what is asked for
