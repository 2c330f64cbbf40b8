"""Rotary embeddings whose frequencies change with the length: texts equal `generate()`, or the call is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hf_specdec import UnsupportedModelError, generate_many
from hf_specdec.decoding.reading_again import ReadingAgain
from hf_specdec.decoding.rotary import changing_rotary, check_constant_rotary
from tests.helpers.architectures import tiny_model
from tests.helpers.families import TOKENS, TREE, Case, assert_ragged_acceptance
from tests.helpers.levels import in_full
from tests.helpers.scripted import scripted_speculator


ROPE = {"rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"max_position_embeddings": 20, "rope_parameters": {"rope_type": "dynamic", **ROPE}}


def long_rope(size: int = 8, limit: int = 20) -> dict:
    rope = {"short_factor": [1.0] * size, "long_factor": [4.0] * size, **ROPE}
    limits = {"original_max_position_embeddings": limit}
    return {"max_position_embeddings": 80, **limits, "rope_parameters": {"rope_type": "longrope", **limits, **rope}}


LONG = long_rope()
# Type, config values, lengths of prompts, new tokens, and whether the change falls into the call.
CALLS = [
    ("llama", DYNAMIC, [4, 14], 7, False),
    ("llama", DYNAMIC, [4, 14], 8, True),
    ("llama", DYNAMIC, [30], 1, True),
    ("mistral", LONG, [14], 7, False),
    ("mistral", LONG, [14], 8, True),
    ("phi3", LONG, [25, 21], 30, False),
    ("mistral", LONG, [25, 20], 30, True),
    ("llama", {}, [14], 1000, False),
    ("gemma3_text", {}, [14], 1000, False),
]


def test_calls_in_which_it_changes():
    for name, changes, prompt_lengths, new_tokens, is_crossed in CALLS:
        model = tiny_model(name, **changes)
        assert (changing_rotary(model, prompt_lengths, new_tokens) is not None) == is_crossed
        if is_crossed:
            with pytest.raises(UnsupportedModelError, match="use generate"):
                check_constant_rotary(model, prompt_lengths, new_tokens)
        else:
            check_constant_rotary(model, prompt_lengths, new_tokens)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", DYNAMIC),
        ("phi3", LONG),
        *in_full(("internlm3", DYNAMIC), ("mistral", LONG), ("minicpm3", long_rope(size=4))),
    ],
    ids=["llama", "phi3", "internlm3", "mistral", "minicpm3"],
)
def test_greedy_matches_generate(name, changes):
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
    # A call that ends before the change.
    script = scripted_speculator(case.expected(4), case.starts(4), case.vocab_size)
    assert case.generate(4, max_new_tokens=7, assistant=script).tolist() == case.expected(4)[:, : 14 + 7].tolist()


@pytest.mark.parametrize("limit", [20, *in_full(13, 14)])
def test_texts_that_are_read_again_where_it_changes(monkeypatch, limit):
    """Before the prompt ends, with the first new token, and later; rows end before that, at it, and after it."""
    case = Case("phi3", tiny_model("phi3", **long_rope(limit=limit)))
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


def test_what_cannot_be_followed_is_refused():
    case = Case("llama", tiny_model("llama", **DYNAMIC))
    with pytest.raises(UnsupportedModelError, match="changes with the length"):
        generate_many(case.model, case.prompts(1)["input_ids"].tolist(), max_new_tokens=40, spec_method="ngram")
    embedding = case.model.model.rotary_emb
    embedding.forward = partial(type(embedding).forward, embedding)
    with pytest.raises(UnsupportedModelError, match="has got a forward of its own.*no row gets to 21 tokens"):
        case.model.generate(**case.prompts(1), spec_method="ngram", max_new_tokens=8)
    assert changing_rotary(case.model, [14], 7) is None
    case.model.model.rotary_emb = torch.nn.Identity()
    with pytest.raises(UnsupportedModelError, match="none of its modules is known as one"):
        changing_rotary(case.model, [14], 8)
    model = tiny_model("phi3", **LONG)
    embeds = model.get_input_embeddings()(TOKENS)
    with pytest.raises(UnsupportedModelError, match="reads the whole text again.*at 20 tokens"):
        model.generate(inputs_embeds=embeds, spec_method="ngram", max_new_tokens=16)
