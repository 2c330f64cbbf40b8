"""Requests that arrive at an engine, are cancelled or fail, in drawn orders; none may notice the others."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria

from hf_specdec import generate_many
from hf_specdec.loop.loop import DecodingLoop
from tests.helpers.models import VOCAB_SIZE


ANY_ORDER = settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

NGRAM = {"spec_method": "ngram", "num_speculative_tokens": 4}


def prompt(index: int, length: int = 5) -> list[int]:
    """A random prompt for the tiny models."""
    generator = torch.Generator().manual_seed(index)
    return torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist()


def said_alone(model, tokens: list[int], **settings) -> list[int]:
    """What plain generation says; greedily, where the settings do not say otherwise."""
    output = model.generate(torch.tensor([tokens]), **{"do_sample": False, "max_new_tokens": 12, **settings})
    return output[0, len(tokens) :].tolist()


def sampled_alone(model, tokens: list[int], seed: int, **settings) -> list[int]:
    """What `generate()` with this package draws after a seed."""
    torch.manual_seed(seed)
    return said_alone(model, tokens, **{"do_sample": True, **NGRAM, **settings})


def run_many(model, requests, batch_size: int = 3, **settings) -> list:
    """Results of greedy requests, in order."""
    settings = {"do_sample": False, "max_new_tokens": 12, **NGRAM, **settings}
    return list(generate_many(model, requests, batch_size, in_order=True, **settings))


class Raises(StoppingCriteria):
    """Fails at one token of a request."""

    def __init__(self, at_token: int = 2):
        self.calls, self.at_token = 0, at_token

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == self.at_token:
            raise ZeroDivisionError
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Trouble:
    """Fails a method of loops when it is called for the nth time."""

    def __init__(self, monkeypatch, name: str, error: Exception, times: tuple[int, ...]):
        self.calls, original = 0, getattr(DecodingLoop, name)

        def failing(loop, *args, **kwargs):
            self.calls += 1
            output = original(loop, *args, **kwargs)
            # Late: what it does is done in part.
            if self.calls in times:
                raise error
            return output

        monkeypatch.setattr(DecodingLoop, name, failing)


def arrivals(count: int, num_kinds: int):
    """A number of requests in a row: their kind, cycles before the next one, and what befalls them."""
    befalls = st.sampled_from(["", "", "", "", "cancelled", "fails"])
    one = st.tuples(st.integers(0, num_kinds - 1), st.integers(0, 3), befalls)
    return st.lists(one, min_size=count, max_size=count)


def check_each_for_itself(reader, engine, requests: list[dict], alone: list[list[int]], arrived: list[tuple]) -> None:
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
        if fate == "fails" and len(alone[kind]) > 1:
            assert isinstance(own.error, ZeroDivisionError)
        elif own.finish_reason == "cancelled":
            assert fate == "cancelled"
            assert own.tokens == alone[kind][: len(own.tokens)]
        else:
            assert own.error is None
            assert own.tokens == alone[kind]
    engine.close()
