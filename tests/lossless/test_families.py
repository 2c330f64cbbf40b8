"""Every architecture: greedy speculation over chains and trees equals `generate()`, and its hidden states are those
that transformers records.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_specdec
from hf_specdec import UnsupportedModelError
from hf_specdec.decoding.profile import model_profile
from tests.helpers.architectures import (
    ALONE,
    CHAINS_ONLY,
    LAYERS,
    RECURRENT,
    UNSUPPORTED,
    empty_model,
    supported,
    tiny_model,
    with_images,
)
from tests.helpers.architectures import unsupported as unsupported_types
from tests.helpers.caches import CACHE
from tests.helpers.families import (
    MIXED,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    RECORDS_OUTPUTS,
    SCALED,
    TOKENS,
    TREE,
    WITHOUT,
    WITHOUT_LAST,
    Case,
    assert_boundaries,
    assert_ragged_acceptance,
    implementations,
    outputs_and_states,
)
from tests.helpers.levels import full, in_full
from tests.helpers.scripted import scripted_speculator


# Kinds of mask, positions and cache, and the types that stand for them in `make test`. Those with an encoder are in
# test_encoder_decoder.py, those that read images in test_multimodal.py.
FAMILIES = {
    "learned positions": ["gpt2"],
    "positions counted from the mask": ["opt"],
    "one key head": ["gpt_bigcode"],
    "grouped key heads, rotary positions": ["llama"],
    "a decoder made of an encoder": ["bert"],
    "alibi": ["bloom", "falcon-alibi"],
    "softcapped logits": ["gemma2"],
    "attention sinks": ["gpt_oss"],
    "latent keys and values": ["deepseek_v3"],
    "indexed keys": ["deepseek_v32"],
    "mixture of experts": ["qwen3_moe"],
    "sliding window": ["mistral"],
    "sliding and full layers": ["gemma3_text"],
    "windows by slot": ["gpt_neo"],
    "chunked attention": ["llama4_text"],
    "layers that share keys and values": ["gemma4_text"],
    "several streams of states": ["hy_v4"],
    "state space": ["mamba2"],
    "state space beside attention in a layer": ["falcon_h1"],
    "state space and shared attention layers": ["zamba2"],
    "gated delta rule and attention": ["qwen3_next"],
    "delta rule and latent attention": ["kimi_linear"],
    "lightning attention": ["minimax"],
    "linear recurrence and local attention": ["recurrent_gemma"],
    "convolutions": ["lfm2"],
    "convolutions in attention": ["zaya"],
    "xLSTM": ["xlstm"],
    "RWKV": ["rwkv"],
}
SHORT = [name for names in FAMILIES.values() for name in names if name in supported()]
CHAIN, BRANCHES = {"num_speculative_tokens": 5}, {"num_speculative_tokens": 3, "tree": TREE}


def assert_same_text(case: Case, batch_size: int, script: dict):
    output = case.speculate(batch_size, **script)
    assert output.sequences.tolist() == case.expected(batch_size).tolist(), (batch_size, script)
    return output.speculative


@pytest.mark.parametrize("name", [*SHORT, *in_full(*(name for name in supported() if name not in SHORT))])
def test_greedy_matches_generate(name):
    # Rows that wait for each other accept little in a few tokens.
    case = Case(name, tiny_model(name), new_tokens=NEW_TOKENS if name in CHAINS_ONLY else 8)
    before = implementations(case.model)
    # All batches for those that stand for others, otherwise the one with the most padding, and trees without any.
    batch_sizes = {1} if name in ALONE else set(PROMPT_LENGTHS) if name in SHORT else {4}
    for batch_size in batch_sizes:
        assert_ragged_acceptance(assert_same_text(case, batch_size, CHAIN), case.new_tokens)
    if name in CHAINS_ONLY:
        with pytest.raises(UnsupportedModelError, match="Draft without branches"):
            case.speculate(4, **BRANCHES)
    else:
        for batch_size in batch_sizes - {2} | {1}:
            assert_ragged_acceptance(assert_same_text(case, batch_size, BRANCHES), case.new_tokens)
    assert implementations(case.model) == before


# A plain type, a recurrent one, and two exceptions.
STATES = ["llama", "qwen3_next", "gemma3n_text", "bert"]


@pytest.mark.parametrize("name", [*STATES, *in_full(*(name for name in supported() if name not in STATES))])
def test_hidden_states_are_those_that_transformers_records(name):
    model = tiny_model(name)
    if name in WITHOUT:
        with pytest.raises(UnsupportedModelError, match=WITHOUT[name]):
            outputs_and_states(model, (1,), input_ids=TOKENS)
        return
    assert_boundaries(model, name not in MIXED, int(name in RECORDS_OUTPUTS), input_ids=TOKENS)
    if name in WITHOUT_LAST:
        with pytest.raises(UnsupportedModelError, match="transforms its last hidden state"):
            outputs_and_states(model, ("last",), input_ids=TOKENS)
        return
    # The last state is what the head reads.
    read = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: read.append(args[0]))
    _, states = outputs_and_states(model, ("last",), input_ids=TOKENS)
    handle.remove()
    scale = read[-1].norm() / states["last"].norm()
    assert name in SCALED or scale == 1
    torch.testing.assert_close(read[-1], scale * states["last"])


# Types that read images too, and layers of one kind alone.
OTHERS = {name: {} for name in with_images()}
OTHERS |= {name: {"layer_types": (3 * LAYERS[name])[:3]} for name in LAYERS if name in supported()}


@full
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_and_layers_read_text(name):
    """Chains in a batch of equal lengths, and trees in one with padding."""
    changes = OTHERS[name]
    case = Case(name, tiny_model(name, **changes), new_tokens=12 if name in CHAINS_ONLY | RECURRENT else 9)
    trees = model_profile(case.model).supports_trees
    for batch_size in (2, 4) if changes else (4,):
        stats = assert_same_text(case, batch_size, BRANCHES if trees and batch_size == 4 else CHAIN)
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    new = case.expected(4)[0, -case.new_tokens :].tolist()
    assert len(set(new)) > 3, "the text is too dull to show a wrong position"


# The other way through the attention interface, for every kind of mask, bias and head grouping.
EAGER = ["gpt_oss", *in_full(*"falcon falcon_h1 gemma2 gemma3_text gpt2 llama mistral mpt phi3 qwen3".split())]


@pytest.mark.parametrize("name", EAGER)
def test_eager_attention(name):
    case = Case(name, tiny_model(name, attn_implementation="eager"))
    assert_same_text(case, 2, CHAIN)
    assert_same_text(case, 4, CHAIN if name in CHAINS_ONLY else BRANCHES)


@pytest.mark.parametrize(
    "name", ["gemma3_text", *in_full("llama", "gpt2", "gemma4_text", "llama4_text", "deepseek_v32")]
)
def test_another_tree_for_every_row(name):
    assert_same_text(Case(name, tiny_model(name)), 4, {"num_speculative_tokens": 6, "tree": "random"})


@pytest.mark.parametrize("name", ["gemma3_text", *in_full("llama", "gemma4_text", "gpt_oss", "deepseek_v32")])
def test_cache_goes_from_call_to_call(name):
    """From a speculative call to a plain one and on to a speculative one."""
    case = Case(name, tiny_model(name))
    tokens, expected, cache = case.prompts(1)["input_ids"], case.expected(1), None
    script = scripted_speculator(expected, [0], case.vocab_size)
    for assistant, new_tokens in ((script, 9), (None, 4), (script, NEW_TOKENS - 13)):
        output = case.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            **{CACHE: cache},
            assistant=assistant,
            max_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        tokens, cache = output.sequences, output[CACHE]
    assert output.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("name", [unsupported_types()[0], *in_full(*unsupported_types()[1:])])
def test_unsupported_architectures_say_why(name):
    with pytest.raises(UnsupportedModelError, match=UNSUPPORTED[name][0]):
        hf_specdec.generate(empty_model(name), torch.ones((1, 4), dtype=torch.long), spec_method="ngram")


@full
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache` are set")
def test_forward_of_a_user_around_that_of_its_class():
    class Around(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, past_key_values=None, **kwargs):
            return super().forward(input_ids, position_ids=position_ids, past_key_values=past_key_values, **kwargs)

    torch.manual_seed(0)
    model = Around(tiny_model("llama").config).eval()
    settings = {"max_new_tokens": 20, "do_sample": False}
    tokens = torch.tensor([[5, 6, 7, 5, 6]])
    expected = model.generate(tokens, **settings)
    assert torch.equal(model.generate(tokens, **settings, assistant=scripted_speculator(expected, [0], 99)), expected)


@full
def test_model_that_leaves_the_cache_empty_is_refused():
    class Forgetful(LlamaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, **kwargs):
            return super().forward(input_ids)

    model = Forgetful(tiny_model("llama").config)
    with pytest.raises(UnsupportedModelError, match="no keys and values of the prompt"):
        model.generate(torch.ones((1, 4), dtype=torch.long), spec_method="ngram", max_new_tokens=4)
