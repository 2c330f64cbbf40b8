"""Requests that arrive at an engine, are cancelled or fail, in drawn orders; none may notice the others."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria

from hf_specdec.many.engine import Engine
from hf_specdec.many.requests import RequestReader


ANY_ORDER = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


class Raises(StoppingCriteria):
    """Fails at the second token of a request."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError
        return torch.zeros(len(input_ids), dtype=torch.bool)


def arrivals(count: int, num_kinds: int):
    """A number of requests in a row: their kind, cycles before the next one, and what befalls them."""
    befalls = st.sampled_from(["", "", "", "", "cancelled", "fails"])
    one = st.tuples(st.integers(0, num_kinds - 1), st.integers(0, 3), befalls)
    return st.lists(one, min_size=count, max_size=count)


def check_each_for_itself(
    reader: RequestReader,
    engine: Engine,
    requests: list[dict],
    alone: list[list[int]],
    arrived: list[tuple[int, int, str]],
) -> None:
    """Of all that can happen to its neighbours a request notices nothing.

    Args:
        requests, alone: The kinds of requests, and what plain generation says to each.
        arrived: What [`arrivals`] has drawn.
    """
    rows, ended = [], []
    for index, (kind, pause, fate) in enumerate(arrived):
        tokens, own = reader.read(requests[kind])
        if fate == "fails":
            own["stopping_criteria"] = [Raises()]
        rows.append(reader.row(index, tokens, own))
        engine.add(rows[index])
        for _ in range(pause):
            ended += engine.step()
        if fate == "cancelled" and rows[index] not in ended:
            engine.cancel(rows[index])
    while not engine.is_idle:
        ended += engine.step()
    ended += engine.step()
    assert sorted(map(id, ended)) == sorted(map(id, rows))
    for own, (kind, _, fate) in zip(rows, arrived):
        if isinstance(own.error, ZeroDivisionError):
            assert fate == "fails"
        elif own.finish_reason == "cancelled":
            assert fate == "cancelled"
            assert own.tokens == alone[kind][: len(own.tokens)]
        else:
            assert own.error is None
            assert own.tokens == alone[kind]
    engine.close()
