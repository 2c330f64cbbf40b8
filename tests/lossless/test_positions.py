"""Positions: models that count for themselves, masked rows, and rotary frequencies that change."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch

from hf_specdec import SpecConfigError, UnsupportedModelError, generate_many
from hf_specdec.target.parts.rotary import ChangingRotary, rotary_changes
from tests.helpers.architectures import CHAINS_ONLY, tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.families import TOKENS, Case, assert_drafts_change_nothing, assert_ragged_acceptance
from tests.helpers.images import text_model
from tests.helpers.levels import full, in_full, split
from tests.helpers.models import VOCAB_SIZE, prompts, scripted_for, tiny_llama
from tests.helpers.scripted import scripted_speculator


TREE = (-1, -1, 0, 0, 1, 2, 5)
SETTINGS = {"do_sample": False, "max_new_tokens": 20}


# Each counts in a way of its own.
@pytest.mark.parametrize("name", ["paligemma", "kosmos-2.5", *in_full("exaone4_5", "hyperclovax_vision_v2")])
def test_models_that_count_positions_themselves(name):
    model = text_model(name)
    for batch_size, padding in ((1, False), (2, False), (3, True)):
        inputs = prompts(batch_size, length=9, padding=padding)
        plain = assert_drafts_change_nothing(model, inputs, **SETTINGS)
        assert len(set(plain[:, -20:].flatten().tolist())) > 4, "the text is too dull to show a wrong position"
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@full
def test_positions_of_kosmos():
    model, inputs = text_model("kosmos-2.5"), prompts(1, length=9)
    # Its embedding gives a padding token in the text a position of its own.
    settings = {**SETTINGS, "sequence_bias": [[[1], 5.0]]}
    assert 1 in assert_drafts_change_nothing(model, inputs, **settings)[0, 9:-1].tolist()
    # It takes a view of positions, also as a draft model.
    text, settings = model.text_model, {**SETTINGS, "pad_token_id": 0}
    for padding in (False, True):
        inputs = prompts(2, length=9, padding=padding)
        plain = text.generate(**inputs, **settings)
        assert torch.equal(text.generate(**inputs, **settings, assistant=deepcopy(text)), plain)


def scripted_on(plain: torch.LongTensor, inputs: dict, vocab_size: int = VOCAB_SIZE, **script):
    """A scripted speculator whose texts are what each row sees, one token at least."""
    settings = {"num_speculative_tokens": 4, "accuracy": 0.8, **script}
    speculator = scripted_speculator(plain, [0] * len(plain), vocab_size, **settings)
    width = inputs["input_ids"].shape[1]
    rows = zip(inputs["input_ids"], inputs["attention_mask"].bool())
    seen = [tokens[mask].tolist() or tokens[-1:].tolist() for tokens, mask in rows]
    speculator.resources.texts[:] = [[*row, *text[width:]] for row, text in zip(seen, plain.tolist())]
    return speculator


# Rotary positions, windows, chunks, learned positions counted by the model, biases by distance, recurrent states, and
# windows by slot.
SHORT = ["llama", "gpt2", "qwen3_next"]
REST = "mistral llama4_text opt bloom mpt gpt_neo gemma3_text".split()


@pytest.mark.parametrize("name", [*SHORT, *in_full(*REST)])
def test_rows_of_padding_alone(name):
    model = tiny_model(name)
    vocab_size = model.config.get_text_config().vocab_size
    input_ids = torch.randint(3, vocab_size, (3, 14), generator=torch.Generator().manual_seed(2))
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    inputs["attention_mask"][1], inputs["attention_mask"][2, :5] = 0, 0
    plain = model.generate(**inputs, **SETTINGS)
    for tree in (None,) if name in CHAINS_ONLY else (None, TREE, "random"):
        how = scripted_on(plain, inputs, vocab_size, tree=tree)
        output = model.generate(**inputs, **SETTINGS, assistant=how, return_dict_in_generate=True)
        assert output.sequences.tolist() == plain.tolist(), tree
        assert_ragged_acceptance(output.speculative, 16)


def test_masks_that_hide_more_than_the_beginning_are_refused_before_the_first_forward():
    model, forwards = deepcopy(tiny_llama()), []
    model.register_forward_pre_hook(lambda *args: forwards.append(args))
    inputs = prompts(2, length=7, padding=False)
    for row, token in ((0, 6), (1, 3)):
        mask = torch.ones_like(inputs["input_ids"])
        mask[row, token] = 0
        with pytest.raises(SpecConfigError, match=f"hides.*row {row} at token {token}.*Pad prompts on the left"):
            model.generate(**{**inputs, "attention_mask": mask}, **SETTINGS, spec_method="ngram")
    with pytest.raises(SpecConfigError, match=r"`attention_mask`.*got the shape \[1, 1, 7, 7\]"):
        model.generate(prompts(1)["input_ids"], attention_mask=torch.ones(1, 1, 7, 7), spec_method="ngram")
    assert not forwards


def test_a_chat_goes_on_from_its_cache():
    model, settings = tiny_llama(), {**SETTINGS, "return_dict_in_generate": True}
    inputs, turn = prompts(3), prompts(3, length=5, seed=3, padding=False)
    first = model.generate(**inputs, **settings)
    answers = torch.ones_like(first.sequences[:, 7:])
    whole = {
        "input_ids": torch.cat([first.sequences, turn["input_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["attention_mask"], answers, turn["attention_mask"]], dim=1),
    }
    caches = [deepcopy(first[CACHE]) for _ in range(3)]
    plain = model.generate(**whole, **settings, **{CACHE: caches[0]})
    for tree in (None, TREE):
        how = scripted_for(first.sequences, inputs, accuracy=0.8, tree=tree)
        ours = model.generate(**inputs, **settings, assistant=how)
        assert ours.sequences.tolist() == first.sequences.tolist()
        caches.append(ours[CACHE])
    for tree, cache in zip((None, TREE, None, TREE), caches[1:]):
        how = scripted_on(plain.sequences, whole, tree=tree)
        again = model.generate(**whole, **settings, **{CACHE: cache}, assistant=how)
        assert again.sequences.tolist() == plain.sequences.tolist()
        assert_ragged_acceptance(again.speculative, 16)


# Rotary frequencies that change with the length: texts equal generate(), or the call is refused

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
    ("mistral", LONG, [25, 20], 30, True),
    ("phi3", LONG, [25, 21], 30, False),
    ("gemma3_text", {}, [14], 1000, False),
]


def test_calls_in_which_rotary_frequencies_change():
    for name, changes, prompt_lengths, new_tokens, is_crossed in CALLS:
        assert bool(rotary_changes(tiny_model(name, **changes), prompt_lengths, new_tokens)) == is_crossed


CHANGES = {"llama": DYNAMIC, "phi3": LONG, "internlm3": DYNAMIC, "mistral": LONG, "minicpm3": long_rope(size=4)}


@pytest.mark.parametrize("name", split(CHANGES, short=["llama", "phi3"]))
def test_changing_rotary_frequencies(name):
    """Every token has the frequencies that the longest row has in plain generation at its step."""
    case = Case(name, tiny_model(name, **CHANGES[name]), new_tokens=24)
    static = Case(name, tiny_model(name, max_position_embeddings=80), new_tokens=24)
    for batch_size in (1, 4):
        expected = case.expected(batch_size).tolist()
        assert expected != static.expected(batch_size).tolist(), "the change makes no difference"
        for script in ({"num_speculative_tokens": 5}, {"num_speculative_tokens": 3, "tree": TREE}):
            output = case.speculate(batch_size, **script)
            assert output.sequences.tolist() == expected
            assert_ragged_acceptance(output.speculative, case.new_tokens)
            notes = " ".join(output.speculative.notes)
            assert ("Nothing is drafted above 20 tokens" in notes) == (CHANGES[name] is DYNAMIC)
            assert ("The rows wait for the slowest one" in notes) == (batch_size > 1)
        # What the call leaves in the model is what plain generation leaves.
        assert case.generate(batch_size).tolist() == expected
    # A call that ends before the change.
    script = scripted_speculator(case.expected(4), case.starts(4), case.vocab_size)
    assert case.generate(4, max_new_tokens=7, assistant=script).tolist() == case.expected(4)[:, : 14 + 7].tolist()


@pytest.mark.parametrize("limit", [20, *in_full(13, 14)])
def test_texts_that_are_read_again_where_frequencies_change(monkeypatch, limit):
    """Before the prompt ends, with the first new token, and later; rows end before that, at it, and after it."""
    case = Case("phi3", tiny_model("phi3", **long_rope(limit=limit)))
    reads, prepare = [], ChangingRotary.prepare
    monkeypatch.setattr(
        ChangingRotary, "prepare", lambda rotary, prefix: reads.append(prepare(rotary, prefix)) or reads[-1]
    )
    for batch_size in (1, 4):
        ends = case.expected(batch_size)[:, 14 + 4 : 14 + 12 : 4].flatten().tolist()
        for eos in (None, ends):
            expected = case.generate(batch_size, eos_token_id=eos)
            script = scripted_speculator(case.expected(batch_size), case.starts(batch_size), case.vocab_size)
            output = case.generate(batch_size, eos_token_id=eos, assistant=script)
            assert output.tolist() == expected.tolist()
    assert bool(sum(reads)) == (limit > 13)


def test_changes_of_rotary_frequencies_that_cannot_be_followed_are_refused():
    case = Case("llama", tiny_model("llama", **DYNAMIC))
    with pytest.raises(UnsupportedModelError, match="changes with the length"):
        generate_many(case.model, case.prompts(1)["input_ids"].tolist(), max_new_tokens=40, spec_method="ngram")
    embedding = case.model.model.rotary_emb
    embedding.forward = partial(type(embedding).forward, embedding)
    with pytest.raises(UnsupportedModelError, match="has got a forward of its own.*no row gets to 21 tokens"):
        case.model.generate(**case.prompts(1), spec_method="ngram", max_new_tokens=8)
    case.model.model.rotary_emb = torch.nn.Identity()
    with pytest.raises(UnsupportedModelError, match="is in no module that is known"):
        rotary_changes(case.model, [14], 8)
    model = tiny_model("phi3", **LONG)
    embeds = model.get_input_embeddings()(TOKENS)
    with pytest.raises(UnsupportedModelError, match="reads the whole text again.*at 20 tokens"):
        model.generate(inputs_embeds=embeds, spec_method="ngram", max_new_tokens=16)
