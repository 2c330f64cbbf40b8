"""Log lines have the figures of their interval, and none that was not asked for is written."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from contextlib import contextmanager

import pytest

from hf_specdec import SpecConfigError, SpecDecodingStats, metrics, record
from hf_specdec.metrics import log_line
from tests.helpers.levels import full, in_full
from tests.helpers.models import prompts
from tests.helpers.threads import in_threads


LINE = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: (?P<length>[\d.]+), "
    r"Accepted throughput: (?P<accepted_rate>[\d.]+) tokens/s, Drafted throughput: (?P<drafted_rate>[\d.]+) tokens/s, "
    r"Accepted: (?P<accepted>\d+) tokens, Drafted: (?P<drafted>\d+) tokens, "
    r"Per-position acceptance rate: (?P<positions>[-\d., ]+), Avg Draft acceptance rate: (?P<rate>[\d.]+)%, "
    r"Generation throughput: (?P<throughput>[\d.]+) tokens/s"
    r"(, Cycles without drafts: (?P<without>\d+) \((?P<reasons>.+)\))?"
)


@pytest.fixture(autouse=True)
def _silent_afterwards():
    yield
    metrics.log_every(None)


@pytest.fixture
def lines(caplog):
    """The lines so far, parsed."""

    def parsed():
        own = [entry for entry in caplog.records if entry.name == "hf_specdec.metrics"]
        assert all(entry.levelno == logging.INFO for entry in own)
        return [LINE.fullmatch(entry.getMessage()).groupdict() for entry in own]

    return parsed


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when it is told to."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(log_line, "perf_counter", lambda: Clock.now)
    return Clock


@contextmanager
def call(stats):
    with metrics.begin_call(stats, "model") as progress:
        stats.num_committed_tokens += stats.batch_size
        progress.end_prefill()
        yield progress


def cycle(progress, stats, clock, seconds, accepted=2, drafted=4):
    clock.now += seconds
    stats.count(num_nodes=drafted, max_depth=drafted, num_accepted=accepted, num_committed=accepted + 1)
    progress.end_cycle()


def test_figures_of_an_interval(lines, clock):
    metrics.log_every(10)
    stats = SpecDecodingStats(batch_size=1)
    with call(stats) as progress:
        for accepted in (2, 1, 0):
            cycle(progress, stats, clock, 3, accepted)
        assert lines() == []
        stats.count_without_drafts("length_limit")
        cycle(progress, stats, clock, 1, 0, 0)
        (line,) = lines()
        # A long draft makes no long line.
        cycle(progress, stats, clock, 10, 17, 17)
    assert line == {
        "length": "1.75",  # 7 tokens in 4 verifications, the prefill's not counted
        "accepted_rate": "0.30",
        "drafted_rate": "1.20",
        "accepted": "3",
        "drafted": "12",
        "positions": "0.667, 0.333, 0.000, 0.000",
        "rate": "25.0",
        "throughput": "0.80",
        "without": "1",
        "reasons": "length_limit 1",
    }
    assert lines()[1]["positions"] == ", ".join(["1.000"] * 16 + ["..."])


def test_interval_without_any_draft(lines, clock):
    metrics.log_every(10)
    stats = SpecDecodingStats(batch_size=2)
    with call(stats) as progress:
        stats.count_without_drafts("batch_size")
        stats.count(0, 0, 0, 1)
        cycle(progress, stats, clock, 10, 0, 0)
    (line,) = lines()
    assert (line["length"], line["positions"], line["rate"], line["reasons"]) == ("1.00", "-", "0.0", "batch_size 1")


def test_intervals_do_not_overlap_and_can_be_changed(lines, clock):
    metrics.log_every(10)
    stats = SpecDecodingStats(batch_size=1)
    with call(stats) as progress:
        for _ in range(9):
            cycle(progress, stats, clock, 5)
        assert [line["accepted"] for line in lines()] == ["4"] * 4
        metrics.log_every(7)
        cycle(progress, stats, clock, 5)
        assert len(lines()) == 5
        metrics.log_every(None)
        cycle(progress, stats, clock, 500)
    assert [line["accepted"] for line in lines()[:5]] == ["4"] * 5
    assert len(lines()) == 5


def test_pauses_between_calls_do_not_count(lines, clock):
    metrics.log_every(10)
    for _ in range(2):
        clock.now += 1000
        stats = SpecDecodingStats(batch_size=1)
        with call(stats) as progress:
            cycle(progress, stats, clock, 2)
    # Logged by the second call's prefill: 5 tokens in the 2 seconds of the first call.
    assert [line["throughput"] for line in lines()] == ["2.50"]
    metrics.log_every(None)
    # The rest of the second call.
    assert [line["throughput"] for line in lines()] == ["2.50", "1.50"]


def test_calls_at_the_same_time_share_the_time(lines, clock):
    metrics.log_every(10)
    one, two = SpecDecodingStats(batch_size=1), SpecDecodingStats(batch_size=1)
    with call(one) as first, call(two) as second:
        cycle(first, one, clock, 5)
        cycle(second, two, clock, 5)
    (line,) = lines()
    assert (line["throughput"], line["length"]) == ("0.80", "3.00")


def test_real_calls_of_threads(model, lines):
    metrics.log_every(1e-9)
    with record(all_threads=True) as made:
        call = {**prompts(2), "do_sample": False, "max_new_tokens": 20, "spec_method": "ngram"}
        in_threads(*[lambda: model.generate(**call)] * 2)
    metrics.log_every(None)
    total = SpecDecodingStats.total(recorded.stats for recorded in made.calls)
    assert len(lines()) > 2
    assert sum(int(line["accepted"]) for line in lines()) == total.num_accepted_tokens
    assert sum(int(line["drafted"]) for line in lines()) == total.num_draft_tokens
    without = sum(int(line["without"] or 0) for line in lines())
    assert without == sum(total.num_cycles_without_drafts.values()) > 0


@full
def test_seconds(monkeypatch):
    for seconds in (0, -1, float("nan"), float("inf"), "10", True):
        with pytest.raises(SpecConfigError, match="`seconds` must be a number above 0"):
            metrics.log_every(seconds)
    for value in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv("HF_SPECDEC_LOG_INTERVAL", value)
        with pytest.raises(SpecConfigError, match=f"HF_SPECDEC_LOG_INTERVAL='{value}' is no number of seconds"):
            log_line.log_as_environment_says()
    for value in ("", "0"):
        monkeypatch.setenv("HF_SPECDEC_LOG_INTERVAL", value)
        log_line.log_as_environment_says()
        assert log_line._active is None
    monkeypatch.setenv("HF_SPECDEC_LOG_INTERVAL", "2.5")
    log_line.log_as_environment_says()
    assert log_line._active.seconds == 2.5


PROGRAM = """
import logging, sys
from hf_specdec import SpecDecodingStats, metrics
exec(sys.argv[1])
stats = SpecDecodingStats()
with metrics.begin_call(stats, "model") as progress:
    stats.count(1, 1, 1, 2)
    progress.end_prefill()
"""


@pytest.mark.parametrize(
    ("configuration", "line"),
    [
        ("", "SpecDecoding metrics: Mean"),
        *in_full(
            ("logging.basicConfig()", "INFO:hf_specdec.metrics:SpecDecoding metrics: Mean"),
            ("logging.basicConfig(level='ERROR')", "INFO:hf_specdec.metrics:SpecDecoding metrics: Mean"),
            ("logging.getLogger('hf_specdec.metrics').setLevel('WARNING')", None),
        ),
    ],
    ids=["not_configured", "configured", "level_of_others", "switched_off"],
)
def test_a_line_is_written_once(configuration, line, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_LOG_INTERVAL", "1e-9")
    run = subprocess.run([sys.executable, "-c", PROGRAM, configuration], capture_output=True, text=True, check=True)
    written = run.stderr.splitlines()
    assert len(written) == (line is not None)
    assert all(text.startswith(line) for text in written)
