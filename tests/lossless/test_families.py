"""Every architecture: greedy speculation over chains and trees equals `generate()`, and its hidden states are those
that transformers records.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_specdec
from hf_specdec import UnsupportedModelError
from hf_specdec.target.facts import model_profile
from tests.helpers.architectures import (
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
from tests.helpers.levels import full, in_full, split
from tests.helpers.scripted import scripted_speculator


# Kinds of mask, positions and cache, and the types that stand for them in `make test`. Those with an encoder are in
# test_encoder_decoder.py, those that read images in test_multimodal.py.
FAMILIES = {
    "learned positions": ["gpt2"],
    "positions counted from the mask": ["opt"],
    "grouped key heads, rotary positions": ["llama"],
    "a decoder made of an encoder": ["bert"],
    "alibi": ["bloom"],
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
    "state space": ["mamba2"],
    "state space beside attention in a layer": ["falcon_h1"],
    "gated delta rule and attention": ["qwen3_next"],
    "convolutions": ["lfm2"],
}
SHORT = [name for names in FAMILIES.values() for name in names if name in supported()]
REST = [name for name in supported() if name not in SHORT]
CHAIN, BRANCHES = {"num_speculative_tokens": 5}, {"num_speculative_tokens": 3, "tree": TREE}


def assert_same_text(case: Case, batch_size: int, script: dict):
    output = case.speculate(batch_size, **script)
    assert output.sequences.tolist() == case.expected(batch_size).tolist(), (batch_size, script)
    return output.speculative


@pytest.mark.parametrize("name", [*SHORT, *in_full(*REST)])
def test_greedy_matches_generate(name):
    # Rows that wait for each other accept little in a few tokens.
    case = Case(name, tiny_model(name), new_tokens=NEW_TOKENS if name in CHAINS_ONLY else 8)
    before = implementations(case.model)
    # All batches for those that stand for others, otherwise the one with the most padding, and trees without any.
    batch_sizes = set(PROMPT_LENGTHS) if name in SHORT else {4}
    for batch_size in batch_sizes:
        assert_ragged_acceptance(assert_same_text(case, batch_size, CHAIN), case.new_tokens)
    if name in CHAINS_ONLY:
        with pytest.raises(UnsupportedModelError, match="Draft without branches"):
            case.speculate(4, **BRANCHES)
    else:
        for batch_size in batch_sizes - {2} | {1}:
            assert_ragged_acceptance(assert_same_text(case, batch_size, BRANCHES), case.new_tokens)
    assert implementations(case.model) == before


@pytest.mark.parametrize("name", split(supported(), short=["llama", "qwen3_next"]))
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
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: read.append(args[0]))
    _, states = outputs_and_states(model, ("last",), input_ids=TOKENS)
    scale = read[-1].norm() / states["last"].norm()
    assert name in SCALED or scale == 1
    torch.testing.assert_close(read[-1], scale * states["last"])


# Types that read images too, and layers of one kind alone.
OTHERS = {name: {} for name in with_images()}
OTHERS |= {name: {"layer_types": (3 * LAYERS[name])[:3]} for name in LAYERS if name in supported()}


@full
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_and_layers_read_text(name):
    changes = OTHERS[name]
    case = Case(name, tiny_model(name, **changes), new_tokens=12 if name in CHAINS_ONLY | RECURRENT else 9)
    trees = model_profile(case.model).supports_trees
    for batch_size in (2, 4) if changes else (4,):
        stats = assert_same_text(case, batch_size, BRANCHES if trees and batch_size == 4 else CHAIN)
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    new = case.expected(4)[0, -case.new_tokens :].tolist()
    assert len(set(new)) > 3, "the text is too dull to show a wrong position"


# The other way through the attention interface, for every kind of mask, bias and head grouping.
EAGER = "falcon falcon_h1 gemma2 gemma3_text gpt2 llama mistral mpt phi3 qwen3".split()


@pytest.mark.parametrize("name", ["gpt_oss", *in_full(*EAGER)])
def test_eager_attention(name):
    case = Case(name, tiny_model(name, attn_implementation="eager"))
    assert_same_text(case, 2, CHAIN)
    assert_same_text(case, 4, CHAIN if name in CHAINS_ONLY else BRANCHES)


KINDS_OF_CACHE = "llama gpt2 gpt_oss gemma4_text llama4_text deepseek_v32".split()


@pytest.mark.parametrize("name", ["gemma3_text", *in_full(*KINDS_OF_CACHE)])
def test_another_tree_for_every_row_and_caches_that_go_from_call_to_call(name):
    case = Case(name, tiny_model(name))
    assert_same_text(case, 4, {"num_speculative_tokens": 6, "tree": "random"})
    # From a speculative call to a plain one and on to a speculative one.
    tokens, expected, cache = case.prompts(1)["input_ids"], case.expected(1), None
    script = scripted_speculator(expected, [0], case.vocab_size)
    for assistant, new_tokens in ((script, 9), (None, 4), (script, NEW_TOKENS - 13)):
        call = {"attention_mask": torch.ones_like(tokens), CACHE: cache, "return_dict_in_generate": True}
        call |= {"max_new_tokens": new_tokens, "do_sample": False, "assistant": assistant}
        output = case.model.generate(tokens, **call)
        tokens, cache = output.sequences, output[CACHE]
    assert output.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("name", split(unsupported_types(), short=unsupported_types()[:1]))
def test_unsupported_architectures_say_why(name):
    with pytest.raises(UnsupportedModelError, match=UNSUPPORTED[name][0]):
        hf_specdec.generate(empty_model(name), torch.ones((1, 4), dtype=torch.long), spec_method="ngram")


@full
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache` are set")
def test_forwards_of_users_that_keep_and_lose_the_cache():
    class Around(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, past_key_values=None, **kwargs):
            return super().forward(input_ids, position_ids=position_ids, past_key_values=past_key_values, **kwargs)

    class Forgetful(LlamaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, **kwargs):
            return super().forward(input_ids)

    torch.manual_seed(0)
    config, settings = tiny_model("llama").config, {"max_new_tokens": 20, "do_sample": False}
    model, tokens = Around(config).eval(), torch.tensor([[5, 6, 7, 5, 6]])
    expected = model.generate(tokens, **settings)
    assert torch.equal(model.generate(tokens, **settings, assistant=scripted_speculator(expected, [0], 99)), expected)
    with pytest.raises(UnsupportedModelError, match="no keys and values of the prompt"):
        Forgetful(config).generate(tokens, **settings, spec_method="ngram")
