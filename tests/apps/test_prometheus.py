"""Prometheus scrapes what the calls did, while they run and from threads; log lines have their interval's figures."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from transformers.generation.streamers import BaseStreamer

from hf_specdec import SpecConfigError, SpecDecodingStats, metrics, record
from hf_specdec.metrics import log_line, prometheus
from tests.helpers.levels import full
from tests.helpers.models import prompts, scripted_for
from tests.helpers.paths import DOCS
from tests.helpers.threads import in_threads


SETTINGS = {"do_sample": False, "max_new_tokens": 25}
ADDRESS = "127.0.0.1"


@pytest.fixture
def registry():
    registry = CollectorRegistry()
    metrics.enable(registry)
    yield registry
    metrics.disable(registry)


@contextmanager
def served(**arguments):
    server, thread = metrics.start_http_server(0, **arguments)
    try:
        # Without an address nobody else can connect.
        assert server.server_address[0] == ADDRESS
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        metrics.disable(arguments.get("registry"))


def parse(text):
    """Values by name and labels, but for the times at which series were created."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    own = [sample for sample in samples if sample.name.startswith("hf_specdec_") and "_created" not in sample.name]
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in own}


def scrape(port):
    with urllib.request.urlopen(f"http://{ADDRESS}:{port}/metrics") as answer:
        return parse(answer.read().decode())


class Series:
    def __init__(self, scraped, method="ngram", model_name="LlamaForCausalLM"):
        self.scraped, self.labels = scraped, {"method": method, "model_name": model_name}

    def __call__(self, name, **labels):
        return self.scraped.get((f"hf_specdec_{name}", *sorted({**self.labels, **labels}.items())))


def series(registry, **labels):
    return Series(parse(generate_latest(registry).decode()), **labels)


def generate(model, batch_size=1, **settings):
    return model.generate(**prompts(batch_size), **SETTINGS, spec_method="ngram", **settings)


def check(value, calls):
    stats = SpecDecodingStats.total(call.stats for call in calls)
    for name in ("drafts", "draft_tokens", "accepted_tokens", "reached_tokens", "lookups", "lookup_hits"):
        assert value(f"spec_decode_num_{name}_total") == getattr(stats, f"num_{name}"), name
    assert stats.num_accepted_tokens > 0
    for name, expected in (
        ("spec_decode_num_target_forwards_total", stats.num_target_forwards),
        ("spec_decode_num_verifications_total", stats.num_row_cycles),
        ("spec_decode_num_calls_total", len(calls)),
        ("spec_decode_num_spec_tokens", calls[-1].stats.num_spec_tokens),
        ("generation_tokens_total", stats.num_committed_tokens),
        ("time_to_first_token_seconds_count", len(calls)),
        ("time_to_first_token_seconds_sum", sum(call.stats.time_to_first_token for call in calls)),
        ("spec_decode_speculation_length_count", stats.num_drafts),
    ):
        assert value(name) == pytest.approx(expected), name
    for position, count in enumerate(stats.num_accepted_tokens_per_pos):
        assert (value("spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) or 0) == count
    for reason in ("batch_size", "does_not_pay", "length_limit", "max_model_len", "nothing_found"):
        count = value("spec_decode_num_cycles_without_drafts_total", reason=reason)
        assert count == stats.num_cycles_without_drafts.get(reason)
    for depth in range(1, 9):
        at_most = sum(stats.num_drafts_per_depth[:depth])
        assert value("spec_decode_speculation_length_bucket", le=f"{depth}.0") == at_most
    timings = [timing for call in calls for timing in call.timings]
    for name, attribute in (("cycle", "seconds"), ("draft", "draft_seconds"), ("verify", "verify_seconds")):
        seconds = [getattr(timing, attribute) for timing in timings]
        assert value(f"spec_decode_{name}_seconds_count") == len(seconds) > 0
        assert value(f"spec_decode_{name}_seconds_sum") == pytest.approx(sum(seconds))
        fast = sum(second <= 0.001 for second in seconds)
        assert value(f"spec_decode_{name}_seconds_bucket", le="0.001") == fast


def test_scraped_from_a_server(model):
    registry = CollectorRegistry()
    text = model.generate(**prompts(2), do_sample=False, max_new_tokens=40)
    tree = scripted_for(text, prompts(2), accuracy=0.7, tree=(-1, -1, 0, 1, 1))
    with served(registry=registry) as port, record(timings=True) as made:
        assert {name for name, *_ in scrape(port)} == {"hf_specdec_loaded_drafters", "hf_specdec_loaded_bytes"}
        for batch_size in (1, 3):
            generate(model, batch_size)
        check(Series(scrape(port)), made.calls)
        generate(model, num_speculative_tokens="auto")
        model.generate(**prompts(2), **SETTINGS, assistant=tree)
        scraped = scrape(port)
    check(Series(scraped), made.calls[:3])
    check(Series(scraped, method="scripted"), made.calls[3:])


def test_calls_of_threads_and_calls_that_fail(model, registry):
    def fail(input_ids, scores):
        return scores if input_ids.shape[1] < 13 else 1 / 0

    with record(timings=True, all_threads=True) as made:
        in_threads(*[lambda: [generate(model, 2) for _ in range(4)]] * 2)
        check(series(registry), made.calls)
        with pytest.raises(ZeroDivisionError):
            generate(model, logits_processor=[fail])
    assert made.calls[8].timings
    check(series(registry), made.calls)


def test_counts_while_the_call_runs(model, registry):
    seen, late = [], CollectorRegistry()

    class Looks(BaseStreamer):
        def put(self, value):
            seen.append(series(registry)("generation_tokens_total"))
            if len(seen) == 6:
                metrics.enable(late)

        def end(self):
            """Nothing."""

    generate(model, streamer=Looks())
    # A cycle is counted at its end, before the streamer shows it.
    known = [value for value in seen if value]
    assert known == sorted(known)
    assert (len(set(known)) > 5, known[-1]) == (True, 25)
    # Who listens when a call begins hears all of it.
    generate(model)
    for one, calls in ((registry, 2), (late, 1)):
        found = series(one)
        assert (found("generation_tokens_total"), found("spec_decode_num_calls_total")) == (25 * calls, calls)
    metrics.disable(late)


def test_registries(model, registry):
    with served() as port:
        generate(model)
        assert Series(scrape(port))("generation_tokens_total") == 25
    # The other one has counted the same call. Enabled twice it counts once and keeps its name.
    assert series(registry)("generation_tokens_total") == 25
    metrics.enable(registry, model_name="mine")
    metrics.enable(registry)
    generate(model)
    assert series(registry, model_name="mine")("generation_tokens_total") == 25


def test_labels_are_bounded(registry, monkeypatch):
    monkeypatch.setattr(prometheus, "_MOST_MODELS", 2)
    monkeypatch.setattr(prometheus, "_MOST_REASONS", 1)
    for name in ("n" * 10**6, "caf\udce9", "c", "d"):
        stats = SpecDecodingStats(method="deep")
        with metrics.begin_call(stats, name) as progress:
            stats.count(num_nodes=100, max_depth=100, num_accepted=100, num_committed=101)
            for reason in ("one", "two", "three"):
                stats.count_without_drafts(reason)
            progress.end_prefill()
    # Names that cannot be served as they are, too.
    assert len(generate_latest(registry)) < 10**6
    value = series(registry, method="deep", model_name="other")
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(name, position=str(position)) for position in (0, 63, 64)] == [2, 2, None]
    assert value("spec_decode_num_accepted_tokens_total") == 200
    assert [value("spec_decode_speculation_length_bucket", le=most) for most in ("64.0", "+Inf")] == [0, 2]
    name = "spec_decode_num_cycles_without_drafts_total"
    assert [value(name, reason=reason) for reason in ("one", "three", "other")] == [2, None, 4]


def test_wrong_arguments_and_addresses_that_are_taken(monkeypatch):
    registry, other = CollectorRegistry(), CollectorRegistry()

    def refused(message, function, *args, **kwargs):
        with pytest.raises(SpecConfigError, match=message):
            function(*args, **kwargs)

    refused("must be a prometheus_client.CollectorRegistry, got 'mine'", metrics.enable, "mine")
    for port in (70000, "8000", True):
        refused("`port` must be an integer from 0 to 65535, got", metrics.start_http_server, port)
    refused("`seconds` must be a number above 0", metrics.log_every, 0)
    monkeypatch.setenv("HF_SPECDEC_LOG_INTERVAL", "-1")
    refused("HF_SPECDEC_LOG_INTERVAL='-1' is no number of seconds", log_line.log_as_environment_says)
    for addr in ("", b"127.0.0.1", "x" * 300, "\ud800", "a\0b"):
        refused("addr", metrics.start_http_server, 0, addr=addr, registry=registry)
    with served(addr=None, registry=registry) as port:
        refused(f"cannot be served at {ADDRESS}:{port}: .*in use", metrics.start_http_server, port, registry=other)
    # Nobody listens then.
    assert not metrics.begin_call(SpecDecodingStats(), "model").observers
    Counter("hf_specdec_spec_decode_num_calls", "Another's.", registry=other)
    refused("does not take the metrics: Duplicated", metrics.start_http_server, 0, registry=other)


PROCESSES = """
import os, urllib.request
from hf_specdec import SpecDecodingStats, metrics

for num_cycles in (5, 7):
    if os.fork() == 0:
        metrics.enable()
        stats = SpecDecodingStats(method="ngram")
        with metrics.begin_call(stats, "model") as progress:
            for _ in range(num_cycles):
                stats.count(num_nodes=3, max_depth=3, num_accepted=2, num_committed=3)
                progress.end_cycle()
        os._exit(0)
    os.wait()
server, thread = metrics.start_http_server(0)
print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics").read().decode(), flush=True)
os._exit(0)
"""


@full
def test_processes_are_summed_up(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", PROCESSES], capture_output=True, text=True, check=True)
    value = Series(parse(done.stdout), model_name="model")
    assert value("spec_decode_num_calls_total") == 2
    assert value("spec_decode_num_accepted_tokens_total") == 24
    assert value("spec_decode_num_accepted_tokens_per_pos_total", position="1") == 12


@full
def test_documentation_has_every_metric_and_no_other(registry):
    families = {family.name: family.type for family in registry.collect()}
    text = (DOCS / "metrics.md").read_text()
    rows = re.findall(r"^\| `(hf_specdec_\w+)` \| (counter|gauge|histogram) \|", text, re.MULTILINE)
    assert {name.removesuffix("_total"): kind for name, kind in rows} == families
    queries = " ".join(re.findall(r"```promql\n(.*?)```", text, re.DOTALL))
    endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}
    samples = {f"{name}{ending}" for name, kind in families.items() for ending in endings[kind]}
    assert set(re.findall(r"hf_specdec_\w+", queries)) <= samples


# Log lines

LINE = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: (?P<length>[\d.]+), "
    r"Accepted throughput: (?P<accepted_rate>[\d.]+) tokens/s, Drafted throughput: (?P<drafted_rate>[\d.]+) tokens/s, "
    r"Accepted: (?P<accepted>\d+) tokens, Drafted: (?P<drafted>\d+) tokens, "
    r"Per-position acceptance rate: (?P<positions>[-\d., ]+), Avg Draft acceptance rate: (?P<rate>[\d.]+)%, "
    r"Generation throughput: (?P<throughput>[\d.]+) tokens/s"
    r"(, Cycles without drafts: (?P<without>\d+) \((?P<reasons>.+)\))?"
)


@pytest.fixture
def lines(caplog):

    def parsed(figure=None):
        own = [entry.getMessage() for entry in caplog.records if entry.name == "hf_specdec.metrics"]
        found = [LINE.fullmatch(line).groupdict() for line in own]
        return found if figure is None else [line[figure] for line in found]

    yield parsed
    metrics.log_every(None)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(log_line, "perf_counter", lambda: Clock.now)
    return Clock


@contextmanager
def call(clock):
    """A call, whose cycles are made by the function that is given."""
    stats = SpecDecodingStats(batch_size=1, num_committed_tokens=1)
    with metrics.begin_call(stats, "model") as progress:
        progress.end_prefill()

        def cycle(seconds, accepted=2, drafted=4, reason=None):
            clock.now += seconds
            if reason is not None:
                stats.count_without_drafts(reason)
            stats.count(num_nodes=drafted, max_depth=drafted, num_accepted=accepted, num_committed=accepted + 1)
            progress.end_cycle()

        yield cycle


def test_log_lines_have_the_figures_of_their_interval(lines, clock):
    metrics.log_every(10)
    with call(clock) as cycle:
        for accepted in (2, 1, 0):
            cycle(3, accepted)
        assert lines() == []
        cycle(1, 0, 0, "length_limit")
    # 7 tokens in 4 verifications, the prefill's not counted.
    rates = {"length": "1.75", "accepted_rate": "0.30", "drafted_rate": "1.20", "rate": "25.0", "throughput": "0.80"}
    counts = {"accepted": "3", "drafted": "12", "positions": "0.667, 0.333, 0.000, 0.000"}
    assert lines() == [{**rates, **counts, "without": "1", "reasons": "length_limit 1"}]
    # An interval without any draft, and a long draft, which makes no long line.
    with call(clock) as cycle:
        cycle(10, 0, 0, "batch_size")
        cycle(10, 17, 17)
    assert lines("positions")[1:] == ["-", ", ".join(["1.000"] * 16 + ["..."])]
    metrics.log_every(None)
    # Pauses between calls do not count: 5 tokens in the 2 seconds of the first, and then the rest of the second.
    metrics.log_every(10)
    for _ in range(2):
        with call(clock) as cycle:
            cycle(2)
        clock.now += 1000
    metrics.log_every(None)
    assert lines("throughput")[3:] == ["2.50", "1.50"]
    # Calls at the same time share it.
    metrics.log_every(10)
    with call(clock) as first, call(clock) as second:
        first(5)
        second(5)
    assert (lines("throughput")[5:], lines("length")[5:]) == (["0.80"], ["3.00"])
