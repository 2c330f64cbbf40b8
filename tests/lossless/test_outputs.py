"""Everything read and shown beside the text: processors, scores, states and streamers."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from tests.helpers.calls import PROMPT, assert_same, drafted, inputs, plain
from tests.helpers.levels import full, in_full
from tests.helpers.methods import demo_target


# One forward over several tokens rounds differently from one over a single token.
CLOSE = {"rtol": 1e-3, "atol": 1e-3}


def without_the_last(input_ids, scores):
    """A processor that nobody knows, so that rows stay together: the last token comes never again at once."""
    return scores.scatter(1, input_ids[:, -1:], float("-inf"))


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}, id="walk"),
        *in_full(pytest.param({"logits_processor": (without_the_last,)}, id="unknown")),
    ],
)
@pytest.mark.as_users_run
def test_processors(row, settings):
    assert_same(row, 3, **settings)


class Events(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


@pytest.mark.as_users_run
def test_streamer(row):
    events = Events()
    text, _ = drafted(row, 2, streamer=events)
    assert torch.equal(text, plain(2))
    new = text[:, PROMPT:]
    # A prompt comes whole, and then a token of each row.
    assert torch.equal(torch.tensor(events.seen[0]).view(2, -1), inputs(2)["input_ids"])
    assert [torch.tensor(tokens).flatten().tolist() for tokens in events.seen[1:-1]] == new.T.tolist()
    assert events.seen[-1] == "end"


def test_scores_and_states(row):
    wanted = {f"output_{name}": True for name in ("scores", "logits", "hidden_states")}
    wanted |= {"return_dict_in_generate": True, "max_new_tokens": 8}
    its, (ours, call) = plain(2, **wanted), drafted(row, 2, **wanted)
    assert torch.equal(ours.sequences, its.sequences)
    assert set(ours.keys()) == {*its.keys(), "speculative"}
    assert ours.speculative.num_accepted_tokens == call.stats.num_accepted_tokens
    for name in ("scores", "logits"):
        mine, theirs = (torch.stack(getattr(output, name)) for output in (ours, its))
        torch.testing.assert_close(mine, theirs, **CLOSE)
    for mine, theirs in zip(ours.hidden_states, its.hidden_states, strict=True):
        for layer, reference in zip(mine, theirs, strict=True):
            torch.testing.assert_close(layer, reference, **CLOSE)


@full
@pytest.mark.as_users_run
def test_target_is_left_as_it_was(row):
    target = demo_target()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    state = torch.get_rng_state()
    drafted(row, 1, max_new_tokens=6)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
