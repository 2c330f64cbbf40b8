"""Rows that join: what a request gets in a full batch is what it gets alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from hf_specdec import generate_many
from hf_specdec.loop.cycle import Cycle
from hf_specdec.loop.loop import DecodingLoop
from hf_specdec.many.engine import Engine
from hf_specdec.many.requests import RequestReader
from tests.helpers.arrivals import ANY_ORDER, arrivals, check_each_for_itself
from tests.helpers.calls import GREEDY, LENGTHS, requests, texts_alone
from tests.helpers.levels import full, in_full, slow, split, when_slow
from tests.helpers.methods import demo_target, fresh_speculator, settings_of
from tests.helpers.models import tiny_llama
from tests.helpers.tape import spoil_inputs, tape_everything
from tests.helpers.tiny_drafters import GREEDY_DRAFTERS, tiny_drafter


# Kind of each request, cycles before the next one, and what befalls it.
MIXED = [
    *((3, 0, ""), (0, 2, ""), (2, 0, "cancelled"), (7, 1, ""), (5, 0, "fails"), (1, 3, ""), (8, 0, "")),
    *((4, 1, ""), (9, 0, "fails"), (11, 2, ""), (6, 0, "cancelled"), (10, 1, ""), (3, 0, "")),
]


def many(speculator, given: list[dict], batch_size: int = 3, **settings) -> list:
    call = {**GREEDY, **settings}
    results = list(generate_many(demo_target(), given, batch_size, in_order=True, assistant=speculator, **call))
    assert not [result.error for result in results if result.error]
    return results


@pytest.mark.as_users_run
def test_requests_that_join_are_decoded_as_alone(row):
    speculator = fresh_speculator(settings_of(row))
    run = generate_many(demo_target(), requests()[:7], 3, in_order=True, assistant=speculator, **GREEDY)
    results = list(run)
    assert [result.tokens for result in results] == texts_alone()[:7]
    assert {result.finish_reason for result in results} == {"length"}
    num_tokens = sum(new for _, new in LENGTHS[:7])
    assert sum(result.stats.num_committed_tokens for result in results) == run.stats.num_committed_tokens == num_tokens


def test_as_many_tokens_are_accepted_as_alone(row):
    speculator = fresh_speculator(settings_of(row)).at_full_length()
    together = many(speculator, requests()[:7])
    # Trees may depend on the number of places.
    apart = [many(fresh_speculator(settings_of(row)).at_full_length(), [own])[0] for own in requests()[:3]]
    counts = [[result.stats.num_accepted_tokens for result in results] for results in (together[:3], apart)]
    assert counts[0] == counts[1]
    assert sum(result.stats.num_accepted_tokens for result in together) > 0


@pytest.mark.parametrize("case", split(GREEDY_DRAFTERS, short=["mtp, layers", "dflash, corrections"]))
def test_prompts_of_one_token_join(case):
    """Nothing has been read of them by then, as drafts with layers, heads and stages of other shapes know."""
    model, lengths = tiny_llama(), ((5, 20), (1, 12), (4, 20), (1, 12), (1, 20))
    given = [{"input_ids": torch.arange(3, 3 + length), "max_new_tokens": new} for length, new in lengths]
    texts = [model.generate(**{**GREEDY, **one, "input_ids": one["input_ids"][None]})[0] for one in given]
    results = list(generate_many(model, given, 2, in_order=True, assistant=tiny_drafter(model, case), **GREEDY))
    assert [result.error for result in results] == [None] * len(given)
    assert [result.tokens for result in results] == [text[-new:].tolist() for text, (_, new) in zip(texts, lengths)]
    assert sum(result.stats.num_draft_tokens for result in results) > 0


@full
def test_requests_bound_their_drafts(row):
    own = [{"spec_method": "off"}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 1}, {}]
    given = [{**request, **own[index % 4]} for index, request in enumerate(requests())]
    results = many(fresh_speculator(settings_of(row)).at_full_length(), given)
    assert [result.tokens for result in results] == texts_alone()
    for index, result in enumerate(results):
        stats = result.stats
        assert index % 4 > 1 or stats.num_draft_tokens == 0
        assert index % 4 > 2 or stats.num_accepted_tokens <= stats.num_drafts
    assert sum(result.stats.num_accepted_tokens for result in results[3::4]) > 0


@full
def test_sampled_texts_depend_on_the_request_alone(row):
    own, given = settings_of(row), requests()[:5]
    first = many(fresh_speculator(own), given, do_sample=True)
    other = many(fresh_speculator(own), given[::-1], 2, do_sample=True)[::-1]
    assert [result.tokens for result in first] == [result.tokens for result in other]
    assert [result.tokens for result in first] != texts_alone()[:5]


@full
def test_drawn_drafts_depend_on_the_request_alone(row):
    drawn = {**settings_of(row), "draft_sample_method": "probabilistic", "num_speculative_tokens": 3}
    given = requests()[:7]
    first = many(fresh_speculator(drawn), given, do_sample=True, temperature=0.7)
    other = many(fresh_speculator(drawn), given[::-1], 2, do_sample=True, temperature=0.7)[::-1]
    assert [result.tokens for result in first] == [result.tokens for result in other]
    assert sum(result.stats.num_accepted_tokens for result in first) > 0


@full
def test_requests_join_where_forwards_are_graphs(row, monkeypatch):
    """Slots and buffers that outlive a call have room for rows that come later."""
    tape_everything(monkeypatch)
    spoil_inputs(monkeypatch)
    speculator = fresh_speculator(settings_of(row))
    run = generate_many(demo_target(), requests()[:7], 3, in_order=True, assistant=speculator, **GREEDY)
    assert [result.tokens for result in run] == texts_alone()[:7]
    assert run.stats.num_graph_replays > 0


@full
def test_long_prompt_is_read_in_chunks_while_others_end(row, monkeypatch):
    """It joins a loop without rows, where forwards are graphs."""
    tape_everything(monkeypatch)
    reader = RequestReader(demo_target(), dict(GREEDY), num_places=3)
    engine = Engine(fresh_speculator(settings_of(row)), reader, chunk_size=2)
    rows = [reader.row(number, *reader.read(requests()[number])) for number in (1, 9, 4)]
    for one in rows:
        engine.add(one)
        engine.step()
    while not engine.is_idle:
        engine.step()
    assert [one.tokens for one in rows] == [texts_alone()[number] for number in (1, 9, 4)]
    assert [one.error for one in rows] == [None] * 3


@pytest.mark.parametrize("name", [*in_full("verify"), *when_slow("join", "commit")])
def test_others_go_on_where_one_fails(row, monkeypatch, name):
    """What they have said is read again, by drafters of all kinds."""
    tape_everything(monkeypatch)
    owner = Cycle if name == "commit" else DecodingLoop
    calls, original = [], getattr(owner, name)

    def failing(one, *args):
        calls.append(one)
        output = original(one, *args)
        if len(calls) == 2:
            raise RuntimeError(name)
        return output

    monkeypatch.setattr(owner, name, failing)
    speculator = fresh_speculator(settings_of(row))
    # Several requests join at once where that is possible.
    asked = requests()[: 7 if name == "verify" else None]
    results = list(generate_many(demo_target(), asked, 3, in_order=True, assistant=speculator, **GREEDY))
    assert len(calls) > 2
    failed = [str(result.error) for result in results if result.error is not None]
    # None where newcomers that cannot join together do so each for itself, or where all have ended by then.
    assert failed in ([name], [])
    assert all(result.error is not None or result.tokens == text for result, text in zip(results, texts_alone()))


def check_arrivals(row, arrived: list[tuple[int, int, str]], places: int) -> None:
    reader = RequestReader(demo_target(), dict(GREEDY), num_places=places)
    engine = Engine(fresh_speculator(settings_of(row)), reader, chunk_size=16)
    check_each_for_itself(reader, engine, requests(), texts_alone(), arrived)


@full
@pytest.mark.as_users_run
def test_arrivals_cancellations_and_errors(row):
    """In an order in which requests of all kinds come one after the other and several at once, end, leave and fail."""
    check_arrivals(row, MIXED, places=3)


@slow
@pytest.mark.parametrize("places", [1, 3, 8])
@ANY_ORDER
@given(arrived=arrivals(40, len(LENGTHS)))
def test_many_arrivals_cancellations_and_errors(row, places, arrived):
    check_arrivals(row, arrived, places)
