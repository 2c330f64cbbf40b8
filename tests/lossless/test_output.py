"""Outputs of `generate(return_dict_in_generate=True)`: plain generation's fields, their shapes and their values."""

import pytest
import torch
from transformers.generation import GenerateDecoderOnlyOutput

from tests.helpers.caches import CACHE
from tests.helpers.levels import full, in_full
from tests.helpers.models import VOCAB_SIZE, prompts, scripted_for


PROMPT = 7
CALL = {"do_sample": False, "max_new_tokens": 20}
SETTINGS = {**CALL, "return_dict_in_generate": True}
ALL = {"output_scores": True, "output_logits": True, "output_hidden_states": True}

# One forward over several tokens, or several rows, rounds differently from one over a single token.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def both(model):
    def both(batch_size, tree=None, accuracy=0.9, **settings):
        inputs = prompts(batch_size)
        text = model.generate(**inputs, do_sample=False, max_new_tokens=30)
        plain = model.generate(**inputs, **{**SETTINGS, **settings})
        speculator = scripted_for(text, inputs, accuracy=accuracy, tree=tree)
        ours = model.generate(**inputs, **{**SETTINGS, **settings}, assistant=speculator)
        assert torch.equal(ours.sequences, plain.sequences)
        assert isinstance(ours, GenerateDecoderOnlyOutput)
        assert set(ours.keys()) == {*plain.keys(), "speculative"}
        return plain, ours

    return both


def assert_steps_close(ours, plain, going):
    """Equality up to rounding; rows that have ended hold zeros."""
    assert type(ours) is type(plain) is tuple
    assert len(ours) == len(plain) == len(going)
    for mine, its, rows in zip(ours, plain, going):
        assert mine.dtype == its.dtype
        assert mine.shape == its.shape
        torch.testing.assert_close(mine[rows], its[rows], **CLOSE)
        assert not mine[~rows].any()


# All at once, by a walk along the path, and with rows that stay together.
VERIFIED = {
    "unprocessed": {},
    "walk": {"repetition_penalty": 1.4},
    "at_once": {"suppress_tokens": [9, 10]},
    "unknown_processor": {"logits_processor": [lambda input_ids, scores: scores * 0.5]},
}


@pytest.mark.parametrize("name", ["walk", "unknown_processor", *in_full("unprocessed", "at_once")])
def test_every_field(both, name):
    for batch_size, tree, eos in ((3, "random", [6, 15]), (3, None, [6, 15]), (1, "random", [63])):
        plain, ours = both(batch_size, tree, eos_token_id=eos, **ALL, **VERIFIED[name])
        # Rows that had not ended before each step, as a mask of shape `(steps, B)`.
        ended = torch.isin(plain.sequences[:, PROMPT:], torch.tensor(eos)).cumsum(1) > 0
        going = ~torch.nn.functional.pad(ended, (1, 0))[:, :-1].T
        assert_steps_close(ours.scores, plain.scores, going)
        assert_steps_close(ours.logits, plain.logits, going)
        assert len(ours.hidden_states) == len(plain.hidden_states)
        for mine, its, rows in zip(ours.hidden_states, plain.hidden_states, going):
            assert_steps_close(mine, its, [rows] * len(mine))


@full
def test_single_fields_and_none(both, model):
    for wanted in ({}, *({name: True} for name in ALL)):
        _, ours = both(2, **wanted)
        assert sum(getattr(ours, field) is not None for field in ("scores", "logits", "hidden_states")) == len(wanted)
        # Without a dict they are ignored as in plain generation.
        text = model.generate(**prompts(1), **CALL, **wanted, spec_method="ngram")
        assert torch.equal(text, model.generate(**prompts(1), **CALL))


def test_sampled_scores_are_the_distributions_that_were_drawn_from(model):
    inputs = prompts(2)
    torch.manual_seed(0)
    output = model.generate(**inputs, **{**SETTINGS, "do_sample": True}, top_k=5, spec_method="ngram", **ALL)
    scores = torch.stack(output.scores, dim=1)
    assert scores.shape == (2, 20, VOCAB_SIZE)
    assert (scores.isfinite().sum(-1) == 5).all()
    assert scores.gather(2, output.sequences[:, PROMPT:, None]).isfinite().all()
    # A later call changes nothing of what was returned.
    keys = output[CACHE].layers[0].keys
    kept = keys.clone()
    model.generate(**prompts(2, seed=4), **SETTINGS, spec_method="ngram")
    assert torch.equal(keys, kept)
    # The scores are those of the text: the model, shown the whole of it, says the same.
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 20), value=1)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(output.sequences, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(torch.stack(output.logits, dim=1), logits[:, PROMPT - 1 : -1], **CLOSE)


@full
def test_rows_that_have_ended_are_not_read_on(model):
    """Whatever is returned, no forward is made for their padding."""
    inputs = prompts(3)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=30)
    counts = []
    for wanted in ({}, ALL):
        how = {"assistant": scripted_for(text, inputs, accuracy=0.9), "eos_token_id": [6, 15]}
        output = model.generate(**inputs, **SETTINGS, **how, **wanted)
        counts.append(output.speculative.num_target_forwards)
    assert len(set(counts)) == 1
