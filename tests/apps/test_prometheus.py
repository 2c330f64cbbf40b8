"""Prometheus scrapes what the calls did: every counter and histogram, while they run and from many threads."""

from __future__ import annotations

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
from tests.helpers.levels import full
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
        # Without an address nobody else can connect.
        assert server.server_address[0] == ADDRESS
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


def generate(model, batch_size=1, **settings):
    return model.generate(**prompts(batch_size), **SETTINGS, spec_method="ngram", **settings)


def check(value, calls):
    """Compares everything that was scraped of a method and model with the statistics of its calls."""
    stats = SpecDecodingStats.total(call.stats for call in calls)
    assert value("spec_decode_num_calls_total") == len(calls)
    assert value("spec_decode_num_drafts_total") == stats.num_drafts
    assert value("spec_decode_num_draft_tokens_total") == stats.num_draft_tokens
    assert value("spec_decode_num_accepted_tokens_total") == stats.num_accepted_tokens > 0
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
        assert value(f"spec_decode_{name}_seconds_count") == len(seconds) > 0
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
            generate(model, batch_size)
        check(Series(scrape(address)), made.calls)
        generate(model, num_speculative_tokens="auto")
        model.generate(**prompts(2), **SETTINGS, assistant=tree)
        scraped = scrape(address)
    check(Series(scraped), made.calls[:3])
    check(Series(scraped, method="scripted"), made.calls[3:])


def test_calls_of_threads_and_calls_that_fail(model, registry):
    def fail(input_ids, scores):
        if input_ids.shape[1] > 12:
            raise ZeroDivisionError
        return scores

    with record(timings=True, all_threads=True) as made:
        in_threads(*[lambda: [generate(model, 2) for _ in range(4)]] * 2)
        assert len(made.calls) == 8
        check(series(registry), made.calls)
        with pytest.raises(ZeroDivisionError):
            generate(model, logits_processor=[fail])
    assert made.calls[8].timings
    check(series(registry), made.calls)


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
    seen, late = [], CollectorRegistry()

    def look(delivered):
        seen.append(series(registry)("generation_tokens_total"))
        if delivered == 5:
            metrics.enable(late)
        if delivered == 20:
            prometheus.remove_listener(prometheus._enabled[registry])

    generate(model, streamer=EachColumn(look))
    # A cycle is counted at its end, after the streamer.
    known = [value for value in seen if value]
    assert known == sorted(known)
    assert len(set(known)) > 5
    assert known[-1] < 25
    # Who listens when a call begins hears all of it, and who begins or ends in the middle is told of whole calls.
    generate(model)
    assert series(registry)("generation_tokens_total") == 25
    assert series(registry)("spec_decode_num_calls_total") == 1
    assert series(late)("generation_tokens_total") == 25
    metrics.disable(late)


def test_registries(model, registry):
    with served() as address:
        generate(model)
        assert Series(scrape(address))("generation_tokens_total") == 25
        assert series(REGISTRY)("generation_tokens_total") == 25
    assert not parse(generate_latest(REGISTRY).decode())
    # The other one has counted the same call. Enabled twice it counts once and keeps its name.
    assert series(registry)("generation_tokens_total") == 25
    metrics.enable(registry, model_name="mine")
    metrics.enable(registry)
    generate(model)
    assert series(registry, model_name="mine")("generation_tokens_total") == 25
    # Enabled again it begins at zero.
    metrics.disable(registry)
    metrics.disable(registry)
    metrics.enable(registry)
    assert series(registry)("generation_tokens_total") is None
    generate(model)
    assert series(registry)("generation_tokens_total") == 25


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


@full
class TestLabelsAreBounded:
    def test_models(self, registry, monkeypatch):
        monkeypatch.setattr(prometheus, "_MOST_MODELS", 2)
        for name in ("a", "b", "c", "d", "a"):
            model = tiny_llama()
            model.config._name_or_path = name
            generate(model)
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

    @pytest.mark.parametrize("name", ["caf\udce9", "n" * 10**6], ids=["no_text", "long"])
    def test_names_of_models_that_cannot_be_served_as_they_are(self, registry, name):
        with metrics.begin_call(SpecDecodingStats(method="ngram"), name):
            pass
        assert len(generate_latest(registry)) < 10**5


def test_wrong_arguments():
    registry = CollectorRegistry()
    with pytest.raises(SpecConfigError, match="must be a prometheus_client.CollectorRegistry, got 'mine'"):
        metrics.enable("mine")
    with pytest.raises(SpecConfigError, match="`registry` must be"):
        metrics.start_http_server(0, registry=8000)
    for name in ("", 3):
        with pytest.raises(SpecConfigError, match="`model_name` must be a name"):
            metrics.enable(registry, model_name=name)
    for port in (-1, 70000, "8000", True, 80.0):
        with pytest.raises(SpecConfigError, match="`port` must be an integer from 0 to 65535, got"):
            metrics.start_http_server(port)
    for addr in ("", " ", 3, b"127.0.0.1", ["::1"], "no such host", "x" * 300, "\ud800", "a\0b"):
        with pytest.raises(SpecConfigError, match="addr"):
            metrics.start_http_server(0, addr=addr, registry=registry)


def test_addresses_and_names_that_are_taken():
    registry, other = CollectorRegistry(), CollectorRegistry()
    with served(addr=None, registry=registry) as address:
        port = int(address.split(":")[-1].split("/")[0])
        with pytest.raises(SpecConfigError, match=f"cannot be served at {ADDRESS}:{port}: .*in use"):
            metrics.start_http_server(port, registry=other)
    # Nobody listens then.
    assert not metrics.begin_call(SpecDecodingStats(), "model").observers
    Counter("hf_specdec_spec_decode_num_calls", "Another's.", registry=other)
    for _ in range(2):
        with pytest.raises(SpecConfigError, match="does not take the metrics: Duplicated"):
            metrics.start_http_server(0, registry=other)
    assert [metric.name for metric in other.collect()] == ["hf_specdec_spec_decode_num_calls"]


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


@full
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
