"""Times of cycles: the thread's time where that tells more, and nothing where a graph was captured."""

from __future__ import annotations

from math import isnan
from time import perf_counter, sleep, thread_time

import pytest
import torch

from hf_specdec.control import LatencyModel
from hf_specdec.control.clock import CycleClock, CycleTimes, clock_of
from hf_specdec.decoding.graphs import CallGraphs


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_one_thread_is_timed_without_what_others_do(one_thread):
    assert clock_of(torch.device("cpu")) is thread_time
    clock = CycleClock(torch.device("cpu"))
    clock.begin()
    sleep(0.05)
    clock.drafted()
    times = clock.end()
    assert times.draft < 0.02
    assert times.rest < 0.02
    assert times.reading is None


def test_a_draft_that_ran_ahead_belongs_to_the_next_cycle():
    clock, seconds = CycleClock(torch.device("cpu")), 0.0
    clock.now = lambda: seconds
    clock.begin()
    seconds += 1.0
    clock.drafted()
    seconds += 2.0
    with clock.ahead():
        seconds += 4.0
    assert clock.end() == CycleTimes(rest=2.0, draft=1.0)
    clock.begin()
    clock.drafted()
    seconds += 3.0
    assert clock.end() == CycleTimes(rest=3.0, draft=4.0)
    clock.begin()
    clock.drafted()
    assert clock.end() == CycleTimes(rest=0.0, draft=0.0)


def test_a_capture_for_the_next_draft_leaves_its_cycle_without_times():
    clock = CycleClock(torch.device("cpu"))
    clock.begin()
    clock.drafted()
    with clock.ahead():
        CallGraphs.all_captures += 1
    assert isnan(clock.end().rest)
    for is_spoilt in (True, False):
        clock.begin()
        clock.drafted()
        times = clock.end()
        assert isnan(times.draft) == isnan(times.rest) == is_spoilt


def test_several_threads_are_timed_on_the_wall(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert clock_of(torch.device("cpu")) is perf_counter
    assert clock_of(torch.device("meta")) is perf_counter


def test_a_cycle_with_a_capture_has_no_times():
    clock, latency = CycleClock(torch.device("cpu")), LatencyModel()
    clock.begin()
    clock.read()
    clock.drafted()
    CallGraphs.all_captures += 1
    times = clock.end()
    assert isnan(times.draft)
    assert isnan(times.rest)
    assert isnan(times.reading)
    latency.observe_draft(1, 3, times.draft, (8, times.reading))
    latency.observe_verification(1, 4, times.rest)
    assert not latency.draft
    assert not latency.verify
    assert not latency.reading.sizes
    clock.begin()
    assert clock.end().draft is None
