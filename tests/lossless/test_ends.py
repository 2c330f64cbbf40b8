"""Ends of texts: end tokens, lengths, stop strings and criteria, wherever in a draft they come."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.calls import PROMPT, assert_same, depths_of, drafted, inputs, plain, traces_of
from tests.helpers.levels import full, in_full
from tests.helpers.methods import demo_tokenizer


def new_tokens(batch_size: int) -> list[list[int]]:
    return plain(batch_size)[:, PROMPT:].tolist()


def test_rows_that_end_apart(row):
    ends = new_tokens(3)[0][1], new_tokens(3)[1][8]
    # The first row is the first to end, the last one goes on.
    assert [min(map(text.index, {*ends}.intersection(text)), default=None) for text in new_tokens(3)] == [1, 8, None]
    call = assert_same(row, 3, eos_token_id=ends)
    assert len({len(cycle.rows) for cycle in call.cycles}) > 1


@pytest.mark.parametrize("place", [3, *in_full(1)])
@pytest.mark.as_users_run
def test_end_token_inside_a_draft(row, place):
    text = new_tokens(1)[0]
    ours, _ = drafted(row, 1, eos_token_id=text[place])
    assert ours[0, PROMPT:].tolist() == text[: text.index(text[place]) + 1]


@pytest.mark.parametrize("max_new_tokens", [4, *in_full(2)])
@pytest.mark.as_users_run
def test_max_new_tokens(row, max_new_tokens):
    ours, call = drafted(row, 2, max_new_tokens=max_new_tokens)
    assert torch.equal(ours, plain(2)[:, : PROMPT + max_new_tokens])
    # The target's own token needs room, too.
    room = max(max_new_tokens - 2, 0)
    assert all(depth <= room for trace in traces_of(call) for depth in depths_of(trace))


@full
def test_max_model_len(row):
    longest = PROMPT + 6
    ours, call = drafted(row, 2, options={"max_model_len": longest})
    assert torch.equal(ours, plain(2))
    lengths = [int(mask.sum()) + 1 for mask in inputs(2)["attention_mask"]]
    beyond = []
    for trace in traces_of(call):
        assert lengths[trace.row] + max(depths_of(trace), default=-len(ours[0])) <= longest
        beyond.append(lengths[trace.row] >= longest)
        lengths[trace.row] += len(trace.committed_tokens)
    assert call.stats.num_draft_tokens > 0
    assert any(beyond)


@pytest.mark.as_users_run
def test_stop_strings(row):
    words = demo_tokenizer().batch_decode([text[5:7] for text in new_tokens(3)[:2]])
    assert_same(row, 3, stop_strings=tuple(words), tokenizer=demo_tokenizer(), eos_token_id=1)


def ends_early(input_ids, scores):
    return (input_ids[:, PROMPT:] == new_tokens(2)[0][6]).any(1)


@pytest.mark.as_users_run
def test_custom_stopping_criterion(row):
    assert_same(row, 2, stopping_criteria=(ends_early,), eos_token_id=1, max_new_tokens=14)
