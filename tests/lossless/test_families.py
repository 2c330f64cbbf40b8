"""Every architecture that keeps keys and values: greedy speculation equals plain `generate()`, and its hidden states
are those that transformers records.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_specdec
from hf_specdec import UnsupportedModelError
from hf_specdec.decoding.profile import model_profile
from hf_specdec.decoding.reading_again import ReadingAgain
from hf_specdec.decoding.rotary import changing_rotary, check_constant_rotary
from tests.helpers.architectures import (
    ALONE,
    CHAINS_ONLY,
    LAYERS,
    NOT_BUILT,
    RECURRENT,
    SPECIAL,
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
from tests.helpers.scripted import scripted_speculator


# Both ways through the attention interface, for every kind of mask, bias and head grouping.
EAGER = ["falcon", "falcon_h1", "gemma2", "gemma3_text", "gpt2", "gpt_oss", "llama", "mistral", "mpt", "phi3", "qwen3"]

# Layers of every kind.
CONTINUED = ["llama", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v32", "qwen3_next", "falcon_h1", "lfm3"]


@pytest.fixture(scope="module", params=supported())
def case(request) -> Case:
    # Rows that wait for each other accept little in a few tokens.
    new_tokens = NEW_TOKENS if request.param in CHAINS_ONLY else 8
    return Case(request.param, tiny_model(request.param), new_tokens=new_tokens)


def batch_sizes(case: Case) -> tuple[int, ...]:
    """All batches for some models of every kind, otherwise the one with the most padding."""
    if case.name in ALONE:
        return (1,)
    return tuple(PROMPT_LENGTHS) if case.name in (*EAGER, *CONTINUED) else (4,)


def test_chains_equal_plain_generate(case):
    before = implementations(case.model)
    for batch_size in batch_sizes(case):
        output = case.speculate(batch_size, num_speculative_tokens=5)
        assert output.sequences.tolist() == case.expected(batch_size).tolist()
        assert_ragged_acceptance(output.speculative, case.new_tokens)
    assert implementations(case.model) == before


@pytest.mark.thinned(2)
def test_trees_equal_plain_generate(case):
    if case.name in CHAINS_ONLY:
        with pytest.raises(UnsupportedModelError, match="Draft without branches"):
            case.speculate(4, num_speculative_tokens=3, tree=TREE)
        return
    # Another way through the masks than in a batch.
    for batch_size in {1, *batch_sizes(case)} - {2}:
        output = case.speculate(batch_size, num_speculative_tokens=3, tree=TREE)
        assert output.sequences.tolist() == case.expected(batch_size).tolist()
        assert_ragged_acceptance(output.speculative, case.new_tokens)


def test_hidden_states(case):
    name, model = case.name, case.model
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


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", with_images())
def test_models_with_images_read_text(name):
    """Text models of these are tried by themselves in more ways."""
    check_short_texts(name, (4,))


@pytest.mark.parametrize("name", [name for name in LAYERS if name in supported()])
def test_other_layers(name):
    check_short_texts(name, (2, 4), layer_types=(3 * LAYERS[name])[:3])


def check_short_texts(name, batch_sizes, **changes):
    """Chains in a batch of equal lengths, and trees in one with padding, equal plain generation."""
    case = Case(name, tiny_model(name, **changes), new_tokens=12 if name in CHAINS_ONLY | RECURRENT else 9)
    scripts = {2: {"num_speculative_tokens": 5}, 4: {"num_speculative_tokens": 3, "tree": TREE}}
    if not model_profile(case.model).supports_trees:
        scripts[4] = scripts[2]
    for batch_size in batch_sizes:
        output = case.speculate(batch_size, **scripts[batch_size])
        assert output.sequences.tolist() == case.expected(batch_size).tolist()
        assert 0 < output.speculative.num_accepted_tokens < output.speculative.num_draft_tokens
    assert len(set(case.expected(4)[0, -case.new_tokens :].tolist())) > 3, (
        "the text is too dull to show a wrong position"
    )


@pytest.mark.parametrize("name", EAGER)
def test_eager_attention(name):
    case = Case(name, tiny_model(name, attn_implementation="eager"))
    chain, tree = {"num_speculative_tokens": 5}, {"num_speculative_tokens": 3, "tree": TREE}
    for batch_size, script in ((2, chain), (4, chain if name in CHAINS_ONLY else tree)):
        output = case.speculate(batch_size, **script)
        assert output.sequences.tolist() == case.expected(batch_size).tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "gemma4_text", "llama4_text", "deepseek_v32"])
def test_trees_of_their_own_for_every_row(name):
    case = Case(name, tiny_model(name))
    output = case.speculate(4, num_speculative_tokens=6, tree="random")
    assert output.sequences.tolist() == case.expected(4).tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v32"])
def test_cache_can_be_continued(name):
    """A cache goes from a speculative call to a plain one and on to a speculative one."""
    case = Case(name, tiny_model(name))
    prompt, expected = case.prompts(1), case.expected(1)
    script = scripted_speculator(expected, [0], case.vocab_size)
    tokens, cache = prompt["input_ids"], None
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


@pytest.mark.parametrize("name", unsupported_types())
def test_unsupported_architectures_say_why(name):
    with pytest.raises(UnsupportedModelError, match=UNSUPPORTED[name][0]):
        hf_specdec.generate(empty_model(name), torch.ones((1, 4), dtype=torch.long), spec_method="ngram")


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache` are set")
@pytest.mark.parametrize("has_old_name", [True, False])
def test_forward_of_a_users_own_around_that_of_its_class(has_old_name):
    class Around(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, **kwargs):
            return super().forward(input_ids, position_ids=position_ids, **kwargs)

    class AroundWithCache(LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, past_key_values=None, **kwargs):
            return super().forward(input_ids, position_ids=position_ids, past_key_values=past_key_values, **kwargs)

    torch.manual_seed(0)
    model = (AroundWithCache if has_old_name else Around)(tiny_model("llama").config).eval()
    settings = {"max_new_tokens": 20, "do_sample": False}
    tokens = torch.tensor([[5, 6, 7, 5, 6]])
    expected = model.generate(tokens, **settings)
    assert torch.equal(model.generate(tokens, **settings, assistant=scripted_speculator(expected, [0], 99)), expected)


def test_model_that_leaves_the_cache_empty_is_refused():
    class Forgetful(LlamaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, **kwargs):
            return super().forward(input_ids)

    model = Forgetful(tiny_model("llama").config)
    with pytest.raises(UnsupportedModelError, match="no keys and values of the prompt"):
        model.generate(torch.ones((1, 4), dtype=torch.long), spec_method="ngram", max_new_tokens=4)


ROPE = {"rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"max_position_embeddings": 20, "rope_parameters": {"rope_type": "dynamic", **ROPE}}
LONG = {
    "max_position_embeddings": 80,
    "original_max_position_embeddings": 20,
    "rope_parameters": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 20,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        **ROPE,
    },
}


SHORT_HEADS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONG_ANEW = {**LONG, "rope_parameters": {**LONG["rope_parameters"], **SHORT_HEADS}}


@pytest.mark.parametrize(
    ("name", "changes", "prompt_lengths", "new_tokens", "is_crossed"),
    [
        ("llama", DYNAMIC, [4, 14], 7, False),
        ("llama", DYNAMIC, [4, 14], 8, True),
        ("llama", DYNAMIC, [30], 1, True),
        ("mistral", LONG, [14], 7, False),
        ("mistral", LONG, [14], 8, True),
        ("phi3", LONG, [25, 21], 30, False),
        ("mistral", LONG, [25, 20], 30, True),
        ("llama", {}, [14], 1000, False),
        ("gemma3_text", {}, [14], 1000, False),
    ],
)
def test_calls_in_which_the_rotary_embedding_changes(name, changes, prompt_lengths, new_tokens, is_crossed):
    model = tiny_model(name, **changes)
    assert (changing_rotary(model, prompt_lengths, new_tokens) is not None) == is_crossed
    if is_crossed:
        with pytest.raises(UnsupportedModelError, match="use generate"):
            check_constant_rotary(model, prompt_lengths, new_tokens)
    else:
        check_constant_rotary(model, prompt_lengths, new_tokens)


def test_a_rotary_embedding_that_is_in_no_module_is_refused():
    model = tiny_model("llama", **DYNAMIC)
    model.model.rotary_emb = torch.nn.Identity()
    with pytest.raises(UnsupportedModelError, match="none of its modules is known as one"):
        changing_rotary(model, [14], 8)


def test_a_rotary_embedding_with_a_forward_of_its_own_is_refused_where_it_changes():
    case = Case("llama", tiny_model("llama", **DYNAMIC))
    embedding = case.model.model.rotary_emb
    embedding.forward = partial(type(embedding).forward, embedding)
    with pytest.raises(UnsupportedModelError, match="has got a forward of its own.*no row gets to 21 tokens"):
        case.model.generate(**case.prompts(1), spec_method="ngram", max_new_tokens=8)
    assert changing_rotary(case.model, [14], 7) is None


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama", DYNAMIC), ("internlm3", DYNAMIC), ("mistral", LONG), ("minicpm3", LONG_ANEW), ("phi3", LONG)],
    ids=["llama", "internlm3", "mistral", "minicpm3", "phi3"],
)
def test_rotary_embeddings_that_change_in_the_call(name, changes):
    """Every token has the frequencies that the longest row has in plain generation at its step."""
    case = Case(name, tiny_model(name, **changes), new_tokens=24)
    static = Case(name, tiny_model(name, max_position_embeddings=80), new_tokens=24)
    for batch_size in (1, 4):
        expected = case.expected(batch_size).tolist()
        assert expected != static.expected(batch_size).tolist(), "the change makes no difference"
        for script in ({"num_speculative_tokens": 5}, {"num_speculative_tokens": 3, "tree": TREE}):
            output = case.speculate(batch_size, **script)
            assert output.sequences.tolist() == expected
            assert_ragged_acceptance(output.speculative, case.new_tokens)
        # What the call leaves in the model is what plain generation leaves.
        assert case.generate(batch_size).tolist() == expected


@pytest.mark.parametrize("limit", [13, 14, 20])
def test_texts_that_are_read_again_where_the_rotary_embedding_changes(monkeypatch, limit):
    """Before the prompt ends, with the first new token, and later; rows end before that, at it, and after it."""
    changes = {"original_max_position_embeddings": limit}
    changes = {**LONG, **changes, "rope_parameters": {**LONG["rope_parameters"], **changes}}
    case = Case("phi3", tiny_model("phi3", **changes))
    reads, read = [], ReadingAgain.read

    def counted(again, rows):
        reads.append(read(again, rows))
        return reads[-1]

    monkeypatch.setattr(ReadingAgain, "read", counted)
    for batch_size in (1, 4):
        ends = case.expected(batch_size)[:, 14 + 4 : 14 + 12 : 4].flatten().tolist()
        for eos in (None, ends):
            expected = case.generate(batch_size, eos_token_id=eos)
            script = scripted_speculator(case.expected(batch_size), case.starts(batch_size), case.vocab_size)
            output = case.generate(batch_size, eos_token_id=eos, assistant=script)
            assert output.tolist() == expected.tolist()
    assert bool(sum(reads)) == (limit > 13)


def test_texts_that_cannot_be_read_again_are_refused():
    model = tiny_model("phi3", **LONG)
    embeds = model.get_input_embeddings()(TOKENS)
    with pytest.raises(UnsupportedModelError, match="reads the whole text again.*at 20 tokens"):
        model.generate(inputs_embeds=embeds, spec_method="ngram", max_new_tokens=16)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_plain_calls_after_one_in_which_the_rotary_embedding_changed(name):
    """A dynamic embedding keeps frequencies for the forwards after it."""
    changes = DYNAMIC if name == "llama" else LONG
    tokens = torch.randint(3, 90, (1, 24), generator=torch.Generator().manual_seed(2))
    texts = []
    for drafts in (False, True):
        case = Case(name, tiny_model(name, **changes))
        expected = tiny_model(name, **changes).generate(**case.prompts(1), max_new_tokens=24, do_sample=False)
        script = {"assistant": scripted_speculator(expected, [0], case.vocab_size)} if drafts else {}
        case.model.generate(**case.prompts(1), max_new_tokens=24, do_sample=False, **script)
        texts.append(case.model.generate(tokens, max_new_tokens=12, do_sample=False).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("name", "changes"), [("llama", DYNAMIC), ("phi3", LONG)])
def test_below_the_change_of_the_rotary_embedding(name, changes):
    case = Case(name, tiny_model(name, **changes))
    expected = case.expected(4)[:, : 14 + 7]
    speculator = scripted_speculator(expected, [0, 9, 5, 2], case.vocab_size)
    output = case.model.generate(**case.prompts(4), assistant=speculator, max_new_tokens=7, do_sample=False)
    assert output.tolist() == expected.tolist()


def test_exceptions_are_few_and_listed_once():
    assert not UNSUPPORTED.keys() & NOT_BUILT.keys()
    assert not (UNSUPPORTED.keys() | NOT_BUILT.keys()) & SPECIAL.keys()
    assert len(supported()) >= 60
