"""Prometheus scrapes what the calls did: every counter and histogram, while they run and from many threads."""

import os
import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from transformers.generation.streamers import BaseStreamer

from hf_specdec import SpecConfigError, SpecDecodingStats, metrics, record
from hf_specdec.metrics import prometheus
from tests.helpers.models import prompts, scripted_for, tiny_llama
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
        yield f"http://{ADDRESS}:{server.server_port}/metrics"
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


def scrape(address):
    with urllib.request.urlopen(address) as answer:
        return parse(answer.read().decode())


class Series:
    """The values of one method and model."""

    def __init__(self, scraped, method="ngram", model_name="LlamaForCausalLM"):
        self.scraped, self.labels = scraped, {"method": method, "model_name": model_name}

    def __call__(self, name, **labels):
        return self.scraped.get((f"hf_specdec_{name}", *sorted({**self.labels, **labels}.items())))


def series(registry, **labels):
    return Series(parse(generate_latest(registry).decode()), **labels)


def total(calls):
    stats = SpecDecodingStats()
    for call in calls:
        stats.add(call.stats)
    return stats


def check(value, calls):
    """Compares everything that was scraped of a method and model with the statistics of its calls."""
    stats = total(calls)
    assert value("spec_decode_num_calls_total") == len(calls)
    assert value("spec_decode_num_drafts_total") == stats.num_drafts
    assert value("spec_decode_num_draft_tokens_total") == stats.num_draft_tokens
    assert value("spec_decode_num_accepted_tokens_total") == stats.num_accepted_tokens
    assert value("spec_decode_num_reached_tokens_total") == stats.num_reached_tokens
    assert value("spec_decode_num_verifications_total") == stats.num_row_cycles
    assert value("spec_decode_num_target_forwards_total") == stats.num_target_forwards
    assert value("spec_decode_num_lookups_total") == stats.num_lookups
    assert value("spec_decode_num_lookup_hits_total") == stats.num_lookup_hits
    assert value("spec_decode_num_spec_tokens") == calls[-1].stats.num_spec_tokens
    assert value("generation_tokens_total") == stats.num_committed_tokens
    for position, count in enumerate(stats.num_accepted_tokens_per_pos):
        assert (value("spec_decode_num_accepted_tokens_per_pos_total", position=str(position)) or 0) == count
    for reason in ("batch_size", "does_not_pay", "length_limit", "max_model_len", "nothing_found"):
        count = value("spec_decode_num_cycles_without_drafts_total", reason=reason)
        assert count == stats.num_cycles_without_drafts.get(reason)
    for depth in range(1, 9):
        at_most = sum(stats.num_drafts_per_depth[:depth])
        assert value("spec_decode_speculation_length_bucket", le=f"{depth}.0") == at_most
    assert value("spec_decode_speculation_length_count") == stats.num_drafts

    timings = [timing for call in calls for timing in call.timings]
    for name, seconds in (
        ("cycle", [timing.seconds for timing in timings]),
        ("draft", [timing.draft_seconds for timing in timings]),
        ("verify", [timing.verify_seconds for timing in timings]),
    ):
        assert value(f"spec_decode_{name}_seconds_count") == len(seconds)
        assert value(f"spec_decode_{name}_seconds_sum") == pytest.approx(sum(seconds))
        slow = sum(second > 0.001 for second in seconds)
        assert value(f"spec_decode_{name}_seconds_bucket", le="0.001") == len(seconds) - slow
    assert value("time_to_first_token_seconds_count") == len(calls)
    first_tokens = sum(call.stats.time_to_first_token for call in calls)
    assert value("time_to_first_token_seconds_sum") == pytest.approx(first_tokens)


def test_scraped_from_a_server(model):
    registry = CollectorRegistry()
    text = model.generate(**prompts(2), do_sample=False, max_new_tokens=40)
    tree = scripted_for(text, prompts(2), accuracy=0.7, tree=(-1, -1, 0, 1, 1))
    with served(registry=registry) as address, record(timings=True) as made:
        assert {name for name, *_ in scrape(address)} == {"hf_specdec_loaded_drafters", "hf_specdec_loaded_bytes"}
        for batch_size in (1, 3):
            model.generate(**prompts(batch_size), **SETTINGS, spec_method="ngram")
        check(Series(scrape(address)), made.calls)
        model.generate(**prompts(1), **SETTINGS, spec_method="ngram", num_speculative_tokens="auto")
        model.generate(**prompts(2), **SETTINGS, assistant=tree)
        scraped = scrape(address)
    check(Series(scraped), made.calls[:3])
    check(Series(scraped, method="scripted"), made.calls[3:])
    assert total(made.calls[:3]).num_accepted_tokens > 0
    assert total(made.calls[3:]).num_accepted_tokens > 0


def test_default_registry(model):
    with served() as address:
        model.generate(**prompts(1), **SETTINGS, spec_method="ngram")
        assert Series(scrape(address))("generation_tokens_total") == 25
        assert Series(parse(generate_latest(REGISTRY).decode()))("generation_tokens_total") == 25
    assert not parse(generate_latest(REGISTRY).decode())


def test_two_registries_count_the_same_call(model, registry):
    other = CollectorRegistry()
    metrics.enable(other, model_name="served")
    try:
        model.generate(**prompts(1), **SETTINGS, spec_method="ngram")
    finally:
        metrics.disable(other)
    assert series(registry)("generation_tokens_total") == 25
    assert series(other, model_name="served")("generation_tokens_total") is None


def test_enabled_twice_counts_once_and_keeps_the_name(model, registry):
    metrics.enable(registry, model_name="mine")
    metrics.enable(registry)
    model.generate(**prompts(1), **SETTINGS, spec_method="ngram")
    assert series(registry, model_name="mine")("generation_tokens_total") == 25


def test_begins_at_zero_when_enabled_again(model, registry):
    model.generate(**prompts(1), **SETTINGS, spec_method="ngram")
    metrics.disable(registry)
    metrics.disable(registry)
    metrics.enable(registry)
    assert series(registry)("generation_tokens_total") is None
    model.generate(**prompts(1), **SETTINGS, spec_method="ngram")
    assert series(registry)("generation_tokens_total") == 25


class EachColumn(BaseStreamer):
    """Calls a function at each delivery of tokens."""

    def __init__(self, function):
        self.function, self.delivered = function, -1

    def put(self, value):
        self.delivered += 1
        self.function(self.delivered)

    def end(self):
        """Nothing."""


def test_counts_while_the_call_runs(model, registry):
    seen = []
    streamer = EachColumn(lambda delivered: seen.append(series(registry)("generation_tokens_total")))
    model.generate(**prompts(1), **SETTINGS, spec_method="ngram", streamer=streamer)
    # A cycle is counted at its end, after the streamer.
    known = [value for value in seen if value]
    assert known == sorted(known)
    assert len(set(known)) > 5
    assert known[-1] < 25
    assert series(registry)("generation_tokens_total") == 25


def test_listening_begins_and_ends_with_a_call(model, registry):
    """Calls that run when listening begins or ends: the one that began in it is counted, to its end."""
    late = CollectorRegistry()

    def change(delivered):
        if delivered == 5:
            metrics.enable(late)
            prometheus.remove_listener(prometheus._enabled[registry])

    model.generate(**prompts(1), **SETTINGS, spec_method="ngram", streamer=EachColumn(change))
    model.generate(**prompts(1), **SETTINGS, spec_method="ngram")
    assert series(registry)("generation_tokens_total") == 25
    assert series(registry)("spec_decode_num_calls_total") == 1
    assert series(late)("generation_tokens_total") == 25
    metrics.disable(late)


def test_failed_call_counts_what_it_did(model, registry):
    def fail(input_ids, scores):
        if input_ids.shape[1] > 12:
            raise ZeroDivisionError
        return scores

    with record(timings=True) as made, pytest.raises(ZeroDivisionError):
        model.generate(**prompts(1), **SETTINGS, spec_method="ngram", logits_processor=[fail])
    assert made.calls[0].timings
    check(series(registry), made.calls)


def test_threads(model, registry):
    def generate():
        for _ in range(4):
            model.generate(**prompts(2), **SETTINGS, spec_method="ngram")

    with record(timings=True, all_threads=True) as made:
        in_threads(generate, generate)
    assert len(made.calls) == 8
    check(series(registry), made.calls)


def test_documentation_has_every_metric_and_no_other(registry):
    families = {family.name: family.type for family in registry.collect()}
    text = (DOCS / "metrics.md").read_text()
    rows = re.findall(r"^\| `(hf_specdec_\w+)` \| (counter|gauge|histogram) \|", text, re.MULTILINE)
    assert {name.removesuffix("_total"): kind for name, kind in rows} == families
    queries = " ".join(re.findall(r"```promql\n(.*?)```", text, re.DOTALL))
    endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"]}
    samples = {f"{name}{ending}" for name, kind in families.items() for ending in endings[kind]}
    assert set(re.findall(r"hf_specdec_\w+", queries)) <= samples


class TestLabelsAreBounded:
    def test_models(self, registry, monkeypatch):
        monkeypatch.setattr(prometheus, "_MOST_MODELS", 2)
        for name in ("a", "b", "c", "d", "a"):
            model = tiny_llama()
            model.config._name_or_path = name
            model.generate(**prompts(1), **SETTINGS, spec_method="ngram")
        found = {name: series(registry, model_name=name)("generation_tokens_total") for name in "abcd"}
        assert found == {"a": 50, "b": 25, "c": None, "d": None}
        assert series(registry, model_name="other")("generation_tokens_total") == 50

    def test_positions_and_reasons(self, registry, monkeypatch):
        monkeypatch.setattr(prometheus, "_MOST_REASONS", 1)
        stats = SpecDecodingStats(method="deep")
        with metrics.begin_call(stats, "model") as progress:
            progress.end_prefill()
            stats.count(num_nodes=100, max_depth=100, num_accepted=100, num_committed=101)
            for reason in ("one", "two", "three"):
                stats.count_without_drafts(reason)
            progress.end_cycle()
        value = series(registry, method="deep", model_name="model")
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        assert [value(name, position=str(position)) for position in (0, 63, 64)] == [1, 1, None]
        assert value("spec_decode_num_accepted_tokens_total") == 100
        assert value("spec_decode_speculation_length_bucket", le="64.0") == 0
        assert value("spec_decode_speculation_length_bucket", le="+Inf") == 1
        name = "spec_decode_num_cycles_without_drafts_total"
        assert [value(name, reason=reason) for reason in ("one", "two", "three", "other")] == [1, None, None, 2]


class TestWrongArguments:
    def test_registry(self):
        with pytest.raises(SpecConfigError, match="must be a prometheus_client.CollectorRegistry, got 'mine'"):
            metrics.enable("mine")
        with pytest.raises(SpecConfigError, match="`registry` must be"):
            metrics.start_http_server(0, registry=8000)

    @pytest.mark.parametrize("name", ["", 3])
    def test_model_name(self, name):
        with pytest.raises(SpecConfigError, match="`model_name` must be a name"):
            metrics.enable(CollectorRegistry(), model_name=name)

    @pytest.mark.parametrize("port", [-1, 70000, "8000", True, 80.0])
    def test_port(self, port):
        with pytest.raises(SpecConfigError, match="`port` must be an integer from 0 to 65535, got"):
            metrics.start_http_server(port)

    @pytest.mark.parametrize("addr", ["", " ", 3, b"127.0.0.1", ["::1"], "no such host", "x" * 300, "\ud800", "a\0b"])
    def test_address(self, addr):
        with pytest.raises(SpecConfigError, match="addr"):
            metrics.start_http_server(0, addr=addr, registry=CollectorRegistry())

    def test_without_an_address_nobody_else_can_connect(self):
        registry = CollectorRegistry()
        server, _ = metrics.start_http_server(0, addr=None, registry=registry)
        try:
            assert server.server_address[0] == ADDRESS
        finally:
            server.shutdown()
            server.server_close()
            metrics.disable(registry)

    def test_names_that_are_taken(self):
        registry = CollectorRegistry()
        Counter("hf_specdec_spec_decode_num_calls", "Another's.", registry=registry)
        for _ in range(2):
            with pytest.raises(SpecConfigError, match="does not take the metrics: Duplicated"):
                metrics.start_http_server(0, registry=registry)
        assert [metric.name for metric in registry.collect()] == ["hf_specdec_spec_decode_num_calls"]

    @pytest.mark.parametrize("name", ["caf\udce9", "n" * 10**6])
    def test_names_of_models_that_cannot_be_served_as_they_are(self, name):
        registry = CollectorRegistry()
        metrics.enable(registry)
        try:
            with metrics.begin_call(SpecDecodingStats(method="ngram"), name):
                pass
            assert len(generate_latest(registry)) < 10**5
        finally:
            metrics.disable(registry)

    def test_port_in_use(self):
        registry, other = CollectorRegistry(), CollectorRegistry()
        with served(registry=registry) as address:
            port = int(address.split(":")[-1].split("/")[0])
            with pytest.raises(SpecConfigError, match=f"cannot be served at {ADDRESS}:{port}: .*in use"):
                metrics.start_http_server(port, registry=other)
        # Nobody listens then.
        assert not metrics.begin_call(SpecDecodingStats(), "model").observers


PROGRAM = """
import os, urllib.request
import torch
import hf_specdec.loaded  # before the forks
from hf_specdec import SpecDecodingStats, load_speculator, metrics
from tests.helpers.models import tiny_llama

model = tiny_llama()
speculator = load_speculator(model, "suffix")

for num_cycles in (5, 7):
    if os.fork() == 0:
        metrics.enable()
        stats = SpecDecodingStats(method="ngram")
        with metrics.begin_call(stats, "model") as progress:
            progress.end_prefill()
            for _ in range(num_cycles):
                stats.count(num_nodes=3, max_depth=3, num_accepted=2, num_committed=3)
                progress.end_cycle()
        os._exit(0)
    os.wait()
server, thread = metrics.start_http_server(0)
print(urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics").read().decode(), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(os.name == "nt", reason="processes of POSIX")
def test_processes_are_summed_up(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    value = Series(parse(done.stdout), model_name="model")
    assert value("spec_decode_num_calls_total") == 2
    assert value("spec_decode_num_accepted_tokens_total") == 24
    assert value("spec_decode_num_accepted_tokens_per_pos_total", position="1") == 12
    assert value("spec_decode_cycle_seconds_count") == 12
    loaded = [count for (name, *_), count in parse(done.stdout).items() if name == "hf_specdec_loaded_drafters"]
    assert loaded == [1, 1, 1]
