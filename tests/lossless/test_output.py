"""Outputs of `generate(return_dict_in_generate=True)`: plain generation's fields, their shapes and their values."""

import pytest
import torch
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdec import SpecDecodingStats, record
from hf_specdec.decoding import ended_rows, loop
from hf_specdec.decoding.cache import fill_cache
from hf_specdec.decoding.ended_rows import EndedRows
from tests.helpers.caches import CACHE
from tests.helpers.models import VOCAB_SIZE, prompts, scripted_for
from tests.helpers.pairs import every_pair


PROMPT = 7
SETTINGS = {"do_sample": False, "max_new_tokens": 20, "return_dict_in_generate": True}
ALL = {"output_scores": True, "output_logits": True, "output_hidden_states": True}

# One forward over several tokens, or several rows, rounds differently from one over a single token.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def both(model):
    def both(batch_size, tree=None, accuracy=0.9, **settings):
        inputs = prompts(batch_size)
        text = model.generate(**inputs, do_sample=False, max_new_tokens=30)
        plain = model.generate(**inputs, **{**SETTINGS, **settings})
        speculator = scripted_for(text, inputs, accuracy=accuracy, tree=tree)
        ours = model.generate(**inputs, **{**SETTINGS, **settings}, assistant=speculator)
        assert torch.equal(ours.sequences, plain.sequences)
        return plain, ours

    return both


def unfinished(plain, eos):
    """Rows that had not ended before each step, as a mask of shape `(steps, B)`."""
    generated = plain.sequences[:, PROMPT:]
    ended = torch.isin(generated, torch.tensor(eos)).cumsum(1) > 0
    before = torch.nn.functional.pad(ended, (1, 0))[:, :-1]
    return ~before.T


def assert_steps_close(ours, plain, going):
    """Equality up to rounding; rows that have ended hold zeros."""
    assert type(ours) is type(plain) is tuple
    assert len(ours) == len(plain) == len(going)
    for mine, its, rows in zip(ours, plain, going):
        assert mine.dtype == its.dtype
        assert mine.shape == its.shape
        torch.testing.assert_close(mine[rows], its[rows], **CLOSE)
        assert not mine[~rows].any()


@every_pair(
    settings={
        "unprocessed": {},
        "walk": {"repetition_penalty": 1.4},
        "at_once": {"suppress_tokens": [9, 10]},
        "unknown_processor": {"logits_processor": [lambda input_ids, scores: scores * 0.5]},
    },
    eos={"all_to_the_end": [63], "rows_end_apart": [6, 15]},
    tree={"chain": None, "ragged_tree": "random"},
    batch_size=[1, 3],
)
def test_every_field(both, batch_size, tree, eos, settings):
    plain, ours = both(batch_size, tree, eos_token_id=eos, **ALL, **settings)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert set(ours.keys()) == {*plain.keys(), "speculative"}
    going = unfinished(plain, eos)
    assert_steps_close(ours.scores, plain.scores, going)
    assert_steps_close(ours.logits, plain.logits, going)
    assert len(ours.hidden_states) == len(plain.hidden_states)
    for mine, its, rows in zip(ours.hidden_states, plain.hidden_states, going):
        assert_steps_close(mine, its, [rows] * len(mine))


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_hidden_states"])
def test_one_field_alone(both, name):
    plain, ours = both(2, **{name: True})
    assert set(ours.keys()) == {*plain.keys(), "speculative"}
    assert sum(getattr(ours, field) is not None for field in ("scores", "logits", "hidden_states")) == 1


def test_without_fields(both):
    plain, ours = both(2)
    assert set(ours.keys()) == {*plain.keys(), "speculative"}
    assert type(ours.speculative) is SpecDecodingStats
    assert ours.scores is ours.logits is ours.hidden_states is ours.attentions is None


@pytest.mark.parametrize("name", ALL)
def test_fields_without_a_dict_are_ignored_as_in_plain(model, name):
    inputs = prompts(1)
    settings = {"do_sample": False, "max_new_tokens": 8, name: True}
    ours = model.generate(**inputs, **settings, spec_method="ngram")
    assert torch.is_tensor(ours)
    assert torch.equal(ours, model.generate(**inputs, **settings))


def test_one_token(both):
    plain, ours = both(2, max_new_tokens=1, **ALL)
    assert len(ours.scores) == len(ours.logits) == len(ours.hidden_states) == 1
    torch.testing.assert_close(ours.scores[0], plain.scores[0], **CLOSE)


def test_sampled_scores_are_the_distributions_that_were_drawn_from(model):
    inputs = prompts(2)
    torch.manual_seed(0)
    output = model.generate(
        **inputs, do_sample=True, top_k=5, max_new_tokens=20, spec_method="ngram", **ALL, return_dict_in_generate=True
    )
    scores = torch.stack(output.scores, dim=1)
    assert scores.shape == (2, 20, VOCAB_SIZE)
    assert (scores.isfinite().sum(-1) == 5).all()
    assert scores.gather(2, output.sequences[:, PROMPT:, None]).isfinite().all()
    # The scores are those of the text: the model, shown the whole of it, says the same.
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    new = torch.arange(20) + positions[:, -1:] + 1
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 20), value=1)
    with torch.no_grad():
        logits = model(output.sequences, attention_mask=mask, position_ids=torch.cat([positions, new], dim=1)).logits
    torch.testing.assert_close(torch.stack(output.logits, dim=1), logits[:, PROMPT - 1 : -1], **CLOSE)


def test_rows_that_have_ended_are_not_read_on(model):
    """Whatever is returned, no forward is made for their padding."""
    inputs = prompts(3)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=30)

    def num_forwards(**settings):
        settings = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": [6, 15], **settings}
        with record() as made:
            model.generate(**inputs, **settings, assistant=scripted_for(text, inputs, accuracy=0.9))
        return made.calls[0].stats.num_target_forwards

    alone = num_forwards()
    assert num_forwards(return_dict_in_generate=True) == alone
    assert num_forwards(return_dict_in_generate=True, **ALL) == alone


def test_slots_become_the_returned_cache_layer_by_layer(model, monkeypatch):
    """At no time are there two copies of all keys, also where rows have ended before others."""
    num_left = []

    def watched(cache, layers):
        def seen():
            for layer in layers:
                num_left.append(sum(bool(slots.buffers) for slots in target.cache.layers))
                yield layer

        fill_cache(cache, seen())

    class Watched(EndedRows):
        def __init__(self, *args):
            nonlocal target
            super().__init__(*args)
            target = self._target

    target = None
    monkeypatch.setattr(ended_rows, "fill_cache", watched)
    monkeypatch.setattr(loop, "EndedRows", Watched)
    inputs = prompts(3)
    text = model.generate(**inputs, do_sample=False, max_new_tokens=30)
    settings = {**SETTINGS, "eos_token_id": [6, 15]}
    output = model.generate(**inputs, **settings, assistant=scripted_for(text, inputs, accuracy=0.9))
    assert num_left == list(range(model.config.num_hidden_layers, 0, -1))
    assert output[CACHE].get_seq_length() == output.sequences.shape[1] - 1


def test_returned_tensors_are_the_users_own(model):
    """A later call must not change them."""
    inputs = prompts(2)
    call = {**inputs, **SETTINGS, **ALL, "spec_method": "ngram"}
    first = model.generate(**call)
    kept = [first.sequences.clone(), first.scores[3].clone(), first[CACHE].layers[0].keys.clone()]
    model.generate(**{**call, **prompts(2, seed=4)})
    now = [first.sequences, first.scores[3], first[CACHE].layers[0].keys]
    assert all(torch.equal(a, b) for a, b in zip(kept, now))
