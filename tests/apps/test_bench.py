from __future__ import annotations

import json
import sys
import threading
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from hf_specdec import cli, demo
from hf_specdec.bench import decoders, engine, figures, prompts, report
from hf_specdec.bench.decoders import Decoder, load_decoders, plain_decoder, read_spec, stock_decoders
from hf_specdec.bench.engine import Call, Measurement, find_differences, run_round, time_call, warm_up
from hf_specdec.bench.prompts import Batch, Prompt, make_batches, read_prompts
from hf_specdec.errors import MissingDependencyError, SpecConfigError
from hf_specdec.metrics import SpecDecodingStats


GREEDY = {"do_sample": False}
PLAIN = {**GREEDY, **plain_decoder().arguments}
SPECS = ("ngram", "draft_model", "eagle3,k=2", "eagle3,num_speculative_tokens=3")


def invoke(*arguments, exit_code=0):
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="hf-specdec")
    assert result.exit_code == exit_code, result.output
    return result


def bench(*arguments, exit_code=0):
    return invoke("bench", "-n", 8, "--num-prompts", 1, *arguments, exit_code=exit_code)


@pytest.fixture(scope="module")
def target():
    return demo.load_target()


@pytest.fixture(scope="module")
def batches():
    return make_batches(demo.load_tokenizer(), demo.prompts()[-2:], 1, 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds the JSON and the charts of a run."""
    folder = tmp_path_factory.mktemp("bench")
    specs = [part for spec in SPECS for part in ("--spec", spec)]
    result = bench(
        *specs, "--rounds", 2, "--batch-sizes", "2,1", "--plot", folder / "charts", "-o", folder / "out.json"
    )
    (folder / "table.txt").write_text(result.stdout)
    return folder


@pytest.fixture
def found(folder):
    return json.loads((folder / "out.json").read_text())


# The command


def test_measures_every_method_beside_both_baselines(found):
    rows = {(row["batch_size"], row["method"]): row for row in found["rows"]}
    own = ("ngram", "draft_model", "eagle3_k2", "eagle3_k3")
    assert list(rows) == [
        *((1, name) for name in ("plain", "none", "stock_prompt_lookup", "stock_draft_model", *own)),
        *((2, name) for name in ("plain", "none", *own)),
    ]
    for (size, name), row in rows.items():
        plain = rows[size, "plain"]
        assert row["identical"]
        assert row["first_differences"] == {}
        assert row["num_texts"] == row["same_texts"] == 2 * 2 * size  # rounds, kinds, rows
        assert row["num_tokens"] == plain["num_tokens"]
        assert row["spread"]["tokens_per_second"]["n"] == row["spread"]["speedup"]["n"] == 2
        for key, spread in row["spread"].items():
            assert spread["n"] > 0
            if spread["spread"] == "range":
                assert spread["low"] <= row[key] <= spread["high"]
        assert row["cycle_seconds"]["p50"] <= row["cycle_seconds"]["p95"] <= row["cycle_seconds"]["p99"]
        assert row["kinds"].keys() == {"edit", "complete"}
        assert sum(kind["num_tokens"] for kind in row["kinds"].values()) == row["num_tokens"]
        if name in own:
            assert row["accepted_per_position"] == sorted(row["accepted_per_position"], reverse=True)
            assert len(row["accepted_per_position"]) == len(row["accepted_per_position_spread"])
            assert 1 <= row["mean_acceptance_length"] <= len(row["accepted_per_position"]) + 1
            assert 0 < row["draft_share"] < 1
    assert rows[1, "plain"]["speedup"] == rows[1, "none"]["speedup_over_none"] == 1.0
    assert rows[1, "none"]["accepted_per_position"] == []
    assert rows[1, "none"]["mean_acceptance_length"] == 1.0
    assert rows[1, "plain"]["mean_acceptance_length"] == 1.0
    assert rows[1, "eagle3_k2"]["settings"]["num_speculative_tokens"] == 2
    assert rows[1, "stock_draft_model"]["settings"]["num_assistant_tokens"] == 5
    assert rows[1, "stock_draft_model"]["mean_acceptance_length"] > 1.0
    assert rows[1, "draft_model"]["draft_bytes"] == rows[1, "stock_draft_model"]["draft_bytes"] > 0


def test_says_what_could_not_run_and_what_was_measured(found):
    asked = found["settings"]
    assert {(row["method"], row["batch_size"]) for row in found["unavailable"]} == {
        ("stock_prompt_lookup", 2),
        ("stock_draft_model", 2),
    }
    assert all("one row" in row["reason"] for row in found["unavailable"])
    assert asked["batch_sizes"] == asked["batch_size"] == [1, 2]
    assert asked["prompts"] == {"remove_docstring": "edit", "class": "complete"}
    assert asked["repeated_prompts"] == {"1": 0, "2": 2}
    assert (asked["rounds"], asked["rounds_asked"], asked["interrupted"]) == (2, 2, False)
    assert found["environment"]["dtype"] == "float32"


def test_table_shows_both_batch_sizes_and_the_reasons(folder):
    text = " ".join((folder / "table.txt").read_text().split())
    for part in ("Batch size 1", "Batch size 2", "eagle3_k3", "speed-up by kind", "4/4", "median", "repeated"):
        assert part in text
    assert "stock_prompt_lookup, stock_draft_model cannot run at batch size 2: transformers' assisted" in text


def test_card_takes_the_figures(folder):
    text = invoke("card", demo.drafter_path("eagle3"), "--bench", folder / "out.json").stdout
    assert "| decoding | batch size | tokens/s |" in text
    assert text.count("| eagle3_k2 |") == text.count("| plain |") == 2
    assert "stock_" not in text


def test_charts_are_pictures(folder):
    from matplotlib.image import imread

    names = {path.name for path in (folder / "charts").iterdir()}
    assert names == {"speedup_by_kind.png", "acceptance_by_position.png", "tokens_per_second.png"}
    for name in names:
        height, width, _ = (picture := imread(folder / "charts" / name)).shape
        assert width >= 1000
        assert height >= 400
        assert picture[..., :3].std() > 0.02  # not blank


def test_sampled_runs_and_one_kind(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("def read_json(path):\n")
    options = ("--spec", "ngram", "--no-stock", "--rounds", 1, "--temperature", 0.8, "--raw", "--prompts", file)
    found = json.loads(bench(*options, "--json", "--plot", tmp_path).stdout)
    assert [row["method"] for row in found["rows"]] == ["plain", "none", "ngram"]
    assert all(row["identical"] is None for row in found["rows"])
    assert found["settings"]["decoding"] == "sampled (temperature 0.8)"
    assert found["settings"]["batch_size"] == 1
    assert (tmp_path / "tokens_per_second.png").is_file()


def test_says_what_was_switched_off():
    options = ("--spec", "ngram,disable_by_batch_size=1", "--no-stock", "--rounds", 1, "--batch-sizes", "2")
    text = " ".join(bench(*options).stdout.split())
    assert "ngram at batch size 2: no drafts: 2 rows are more than disable_by_batch_size=1." in text


def test_an_interrupt_keeps_complete_rounds(monkeypatch):
    complete = engine.run_round

    def run_round(model, ways, found, *args):
        if found.rounds:
            raise KeyboardInterrupt
        return complete(model, ways, found, *args)

    monkeypatch.setattr(engine, "run_round", run_round)
    result = bench("--spec", "ngram", "--no-stock", "--rounds", 3, exit_code=130)
    assert "1 of 3 rounds: interrupted." in " ".join(result.stdout.split())
    monkeypatch.setattr(engine, "run_round", lambda *args: run_round(None, [], SimpleNamespace(rounds=[1])))
    assert "Interrupted" in bench("--spec", "ngram", "--no-stock", exit_code=130).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch-sizes", "0,2"), "--batch-sizes must be numbers"),
        (("--batch-sizes", "one"), "--batch-sizes must be numbers"),
        (("--spec", "eagle7"), "Did you mean 'eagle'"),
        (("--spec", "ngram,k"), "no key=value"),
        (("--spec", "ngram,draft_tokens=3"), "draft_tokens"),
        (("--spec", "{ngram"), "no JSON"),
        (("--prompts", "nowhere.jsonl"), "cannot be read"),
        (("--target", "some/model"), "--prompts is missing"),
        (("--temperature", "0", "--top-p", "0.5"), "greedy"),
        (("--temperature", "0", "--sample"), "exclude each other"),
        (("--output", "nowhere/out.json"), "no folder"),
        (("-n", "3000", "--prompts", "long.txt"), "context of 2048"),
    ],
)
def test_wrong_requests(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.txt").write_text("def f():\n")
    assert message in " ".join(bench(*arguments, exit_code=2).stderr.split())


def test_charts_are_refused_before_the_target_is_loaded_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(demo, "load_target", lambda *args: pytest.fail("the target was loaded"))
    assert "pip install matplotlib" in bench("--plot", tmp_path, exit_code=2).stderr


# Figures


def test_medians_and_spreads():
    assert figures.median_and_range([3.0, 1.0, 2.0]) == figures.Figure(2.0, 1.0, 3.0, 3, "rounds", "range")
    spread = figures.median_and_quartiles([1.0, 2.0, 3.0, 4.0, 5.0], "calls")
    assert spread == figures.Figure(3.0, 2.0, 4.0, 5, "calls", "quartiles")
    assert figures.percentiles(range(101)) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}


def test_pooled_ratios_weigh_calls_by_their_size():
    pooled = figures.pooled([1, 27, 0], [10, 30, 0], "drafts")
    # One of the two calls may be drawn twice.
    assert pooled == figures.Figure(0.7, 0.1, 0.9, 40, "drafts", "bootstrap")
    assert figures.pooled([1, 9, 0], [10, 10, 0]).n == 2
    assert figures.pooled([0], [0]) is None
    assert figures.pooled([3], [4]) == figures.Figure(0.75, 0.75, 0.75, 1, "calls", "bootstrap")


def test_interval_is_about_two_errors_of_a_ratio_on_each_side():
    drafted = np.random.default_rng(1).integers(1, 50, 200)
    accepted = np.random.default_rng(2).binomial(drafted, np.random.default_rng(3).beta(6, 3, 200))
    pooled = figures.pooled(accepted, drafted)
    # Linearised (Cochran, Sampling Techniques, section 6.3).
    error = np.sqrt(np.square(accepted - pooled.value * drafted).mean() / 200) / drafted.mean()
    assert pooled.high - pooled.value == pytest.approx(1.96 * error, rel=0.15)
    assert pooled.value - pooled.low == pytest.approx(1.96 * error, rel=0.15)


def known_call(seconds, tokens, **stats):
    stats = SpecDecodingStats(**stats) if stats else None
    call = Call([tokens], seconds, stats, first_token_seconds=seconds / 10, cycle_seconds=[0.1, 0.3])
    call.mean_acceptance_length = 1.0 if stats is None else stats.mean_acceptance_length
    return call


def test_figures_of_known_calls():
    counts = {"batch_size": 1, "num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 6}
    counts |= {"num_reached_tokens": 7, "num_accepted_tokens_per_pos": [2, 2, 1, 1], "num_row_cycles": 2}
    counts |= {"num_committed_tokens": 9, "draft_seconds": 0.5}
    batches = [Batch(("one",), "edit", {}, 9), Batch(("two",), "list", {}, 9)]
    text, other = [7] * 9, [7] * 8 + [8]

    def one_round(seconds):
        drafted = [known_call(seconds, text, **counts), known_call(seconds, other, **counts)]
        return {1: {"plain": [known_call(6.0, text), known_call(3.0, text)], "ngram": drafted}}

    measured = Measurement({1: batches}, [one_round(1.0), one_round(2.0), one_round(3.0)])
    ways = [plain_decoder(), Decoder("ngram", {})]
    plain, row = report.make_rows(demo_weights(), ways, measured, greedy=True)
    assert plain["tokens_per_second"] == 18 / 9
    assert plain["mean_acceptance_length"] == 1.0
    assert row["tokens_per_second"] == 18 / 4
    assert row["speedup"] == 9 / 4
    assert row["spread"]["speedup"] == {"low": 1.5, "high": 4.5, "n": 3, "over": "rounds", "spread": "range"}
    assert row["kinds"]["edit"]["speedup"] == 3.0
    assert row["kinds"]["list"]["speedup"] == 1.5
    assert row["first_token_seconds"] == pytest.approx(0.2)
    assert row["mean_acceptance_length"] == 4.0
    assert row["acceptance_rate"] == 6 / 7
    assert row["draft_acceptance_rate"] == 0.75
    assert row["accepted_per_position"] == [1.0, 1.0, 0.5, 0.5]
    assert row["draft_share"] == pytest.approx(0.5 * 6 / 12)
    assert row["cycle_seconds"] == {"p50": 0.2, "p95": 0.3, "p99": 0.3, "n": 12, "over": "cycles"}
    assert (row["identical"], row["same_texts"], row["num_texts"]) == (False, 3, 6)
    assert row["first_differences"] == {"two": 8}
    # The same text once more says nothing new of acceptance; other texts do.
    sampled = report.make_rows(demo_weights(), ways, measured, greedy=False)[1]
    assert row["spread"]["mean_acceptance_length"]["n"] == 4
    assert sampled["spread"]["mean_acceptance_length"]["n"] == 12


def demo_weights():
    return SimpleNamespace(parameters=list, buffers=list)


# Prompts


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return str(path)


def texts(*arguments):
    return [prompt.text for prompt in read_prompts(*arguments)]


def test_text_files_have_paragraphs_or_lines(tmp_path):
    assert texts(write(tmp_path / "a.txt", "one\ntwo\n")) == ["one", "two"]
    assert texts(write(tmp_path / "a.txt", "\none\n  two\n \n\n  three\n")) == ["one\n  two", "  three"]


@settings(max_examples=25)
@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=12))
def test_json_keeps_every_text(tmp_path_factory, expected):
    folder = tmp_path_factory.mktemp("prompts")
    lines = "".join(json.dumps({"prompt": text}) + "\n" for text in expected)
    assert texts(write(folder / "a.jsonl", lines)) == expected
    assert texts(write(folder / "a.json", json.dumps(expected))) == expected
    named = read_prompts(write(folder / "a.data", lines))
    assert len({prompt.name for prompt in named}) == len(expected)


def test_records_say_more_than_their_text(tmp_path):
    records = [
        {"question_id": 81, "category": "writing", "turns": ["first", "second"], "reference": ["none"]},
        {"name": "own", "kind": "code", "prompt": "text", "max_new_tokens": 5},
        {"question": "why?"},
    ]
    file = write(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, records)))
    assert read_prompts(file, 32) == [
        Prompt("81", "first", "writing", 32),
        Prompt("own", "text", "code", 5),
        Prompt("prompt 3", "why?", "prompt", 32),
    ]
    assert [prompt.max_new_tokens for prompt in read_prompts(file, 4)] == [4, 4, 4]


def test_so_many_of_each_kind():
    assert [prompt.kind for prompt in read_prompts("demo", 256, 2)] == ["edit", "edit", "complete", "complete"]
    assert all(prompt.max_new_tokens <= 200 for prompt in read_prompts("demo", 200))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: no JSON"),
        ('{"category": "a"}', "line 1: a prompt is a text"),
        ('{"prompt": " "}', "line 1: a prompt is a text"),
        ('{"turns": []}', "line 1: a prompt is a text"),
        ('{"prompt": "a", "max_new_tokens": true}', "`max_new_tokens` must be a number"),
        ('{"prompt": "a", "name": "x"}\n{"prompt": "b", "name": "x"}', "two prompts named 'x'"),
    ],
)
def test_wrong_prompts(content, message, tmp_path):
    with pytest.raises(SpecConfigError, match=message):
        read_prompts(write(tmp_path / "a.jsonl", content))


def test_chat_template_is_not_given_special_tokens_twice():
    tokenizer = demo.load_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<answer>' }}"
    (prompt,) = prompts.as_chat([Prompt("one", "text")], tokenizer)
    assert prompt.text == "<user>text<answer>"
    (batch,) = make_batches(tokenizer, [prompt], add_special_tokens=False)
    assert tokenizer.decode(batch.inputs["input_ids"][0]) == prompt.text


QUESTIONS = [
    {"question_id": 1, "category": "roleplay", "turns": ["one", "more"]},
    {"question_id": 2, "category": "rag", "turns": ["two"]},
]


@contextmanager
def serving(content):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/question.jsonl"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def spec_bench(monkeypatch, tmp_path):
    """The questions are served by this machine; `serve(content)` is a context."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    content = "\n".join(map(json.dumps, QUESTIONS)).encode()
    monkeypatch.setattr(prompts, "SPEC_BENCH_SHA256", sha256(content).hexdigest())

    @contextmanager
    def serve(content=content):
        with serving(content) as url:
            monkeypatch.setattr(prompts, "SPEC_BENCH_URL", url)
            yield

    return serve


def test_spec_bench_is_downloaded_once(spec_bench):
    expected = [Prompt("1", "one", "mt_bench", 256), Prompt("2", "two", "rag", 256)]
    with spec_bench():
        assert read_prompts("spec-bench") == expected
    assert read_prompts("spec-bench") == expected


def test_spec_bench_that_cannot_be_had_says_where_it_goes(spec_bench, monkeypatch, tmp_path):
    from huggingface_hub import constants

    with spec_bench(b"another file"), pytest.raises(SpecConfigError, match="another file"):
        read_prompts("spec-bench")
    with pytest.raises(SpecConfigError, match="cannot be downloaded"):
        read_prompts("spec-bench")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SpecConfigError, match="HF_HUB_OFFLINE") as error:
        read_prompts("spec-bench")
    path = tmp_path / "hf_specdec" / "spec_bench" / "question.jsonl"
    assert str(path) in str(error.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(QUESTIONS[0]))
    assert len(read_prompts("spec-bench")) == 1


# Ways of decoding


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ngram", "ngram"),
        ("user/head", "user/head"),
        ('{"method": "ngram"}', {"method": "ngram"}),
        ("ngram,k=4", {"method": "ngram", "num_speculative_tokens": 4}),
        ("method=eagle3, model=user/head", {"method": "eagle3", "model": "user/head"}),
        ("user/head,revision=1234567,k=2", {"model": "user/head", "revision": "1234567", "num_speculative_tokens": 2}),
        ("ngram,revision=null", {"method": "ngram", "revision": None}),
        (
            "user/head,k=auto,num_draft_nodes=19",
            {"model": "user/head", "num_speculative_tokens": "auto", "num_draft_nodes": 19},
        ),
        ("eagle3", {"method": "eagle3", "model": "own"}),
        ("eagle3,k=2", {"method": "eagle3", "model": "own", "num_speculative_tokens": 2}),
        ("eagle3,model=user/head", {"method": "eagle3", "model": "user/head"}),
        ("suffix+eagle3", {"method": "suffix+eagle3", "model": "own"}),
        ('{"method": "eagle3"}', {"method": "eagle3", "model": "own"}),
    ],
)
def test_spec_in_all_spellings(text, expected):
    assert read_spec(text, {"eagle3": {"method": "eagle3", "model": "own"}}) == expected


def test_names_differ_where_methods_do_not(target):
    specs = ["ngram", {"method": "ngram", "num_speculative_tokens": 3}, "ngram"]
    names = [decoder.name for decoder in load_decoders(target, specs)[0]]
    assert names == ["ngram_1", "ngram_k3", "ngram_2"]


def test_missing_packages_may_be_left_out_or_not(target, monkeypatch):
    def load_speculator(model, config=None, **settings):
        raise MissingDependencyError("Run: pip install it")

    monkeypatch.setattr(decoders, "load_speculator", load_speculator)
    assert load_decoders(target, [read_spec("suffix")], skip_missing=True) == ([], {"suffix": "Run: pip install it"})
    with pytest.raises(MissingDependencyError):
        load_decoders(target, [read_spec("suffix")])


def test_weights_shared_with_the_target_are_not_the_drafters(target):
    (eagle,), _ = load_decoders(target, [demo.settings()["eagle"]])
    network, embedding = eagle.network, target.get_input_embeddings().weight
    everything = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    own = eagle.draft_bytes(target)
    network.shared = target.get_input_embeddings()
    try:
        assert own <= everything
        assert eagle.draft_bytes(target) == own < own + embedding.nbytes
    finally:
        del network.shared


def test_draft_length_of_stock_is_that_of_the_method_and_ours_is_untouched(target):
    methods, _ = load_decoders(target, [{**demo.settings()["draft_model"], "num_speculative_tokens": 3}])
    before = methods[0].network.generation_config.num_assistant_tokens
    lookup, assisted = stock_decoders(methods)
    assert lookup.arguments["prompt_lookup_num_tokens"] == 10
    assistant = assisted.arguments["assistant_model"]
    assert assistant.generation_config.num_assistant_tokens == 3
    assert assistant.get_input_embeddings() is methods[0].network.get_input_embeddings()
    assert methods[0].network.generation_config.num_assistant_tokens == before


@pytest.mark.parametrize("method", ["suffix", "suffix+eagle"])
def test_every_round_begins_without_earlier_texts(target, batches, method):
    pytest.importorskip("arctic_inference")
    (decoder,), _ = load_decoders(target, [read_spec(method, demo.settings())])
    network, caches = decoder.network, []
    for _ in range(2):
        decoder.forget_texts(target)
        resources = decoder.speculator.resources
        cache = resources.retrieval if "+" in method else resources
        assert not cache.cached_requests
        time_call(target, batches[0], {**GREEDY, **decoder.arguments})
        assert len(cache.cached_requests) == 1
        caches.append(cache)
    assert caches[0] is not caches[1]
    assert decoder.network is network is decoder.speculator.generator_class.network(decoder.speculator.resources)


# Measuring


def test_a_call_is_timed_and_counted(target, batches):
    (ngram,), _ = load_decoders(target, ["ngram"])
    plain = time_call(target, batches[0], PLAIN)
    drafted = time_call(target, batches[0], {**GREEDY, **ngram.arguments})
    assert drafted.tokens == plain.tokens
    assert len(plain.cycle_seconds) == len(plain.tokens[0]) - 1
    assert len(drafted.cycle_seconds) == drafted.stats.num_target_forwards - 1
    for call in (plain, drafted):
        assert 0 < call.first_token_seconds < call.seconds
        assert sum(call.cycle_seconds) < call.seconds - call.first_token_seconds
        assert call.memory_bytes is None
    assert plain.stats is None


def test_plain_generation_stays_plain_with_settings_in_the_generation_config(target, batches):
    target.generation_config.speculative = {"method": "ngram"}
    try:
        assert time_call(target, batches[0], PLAIN).stats is None
    finally:
        del target.generation_config.speculative


def test_sampled_texts_depend_on_the_seed_of_the_round(target, batches):
    sampling = {**PLAIN, "do_sample": True, "temperature": 1.5}
    first, again, other = (time_call(target, batches[0], sampling, seed) for seed in (1, 1, 2))
    assert first.tokens == again.tokens != other.tokens


def test_what_cannot_run_is_found_while_warming_up(target, batches):
    broken = Decoder("stock_mtp", {"spec_method": "off", "use_mtp": True}, max_batch_size=1)
    own = Decoder("own", {"speculative": {"method": "ngram"}, "num_beams": 2})
    steps = []
    ways = [plain_decoder(), broken, own]
    two = make_batches(demo.load_tokenizer(), demo.prompts()[-2:], 2, 8)
    refused = warm_up(target, ways, {1: batches, 2: two}, GREEDY, lambda: steps.append(1))
    assert refused[1].keys() == refused[2].keys() == {"stock_mtp", "own"}
    assert "mtp" in refused[1]["stock_mtp"]
    assert "one row" in refused[2]["stock_mtp"]
    assert "Beam search" in refused[1]["own"]
    assert len(steps) == 6
    with pytest.raises(SpecConfigError, match="Plain generation at batch size 1 fails"):
        warm_up(target, [Decoder("plain", own.arguments)], {1: batches}, GREEDY, lambda: None)


def test_each_way_begins_in_turn(monkeypatch):
    order = []
    monkeypatch.setattr(
        engine, "time_call", lambda model, batch, given, seed: order.append((batch, given["way"], seed))
    )
    ways = [Decoder(name, {"way": name}) for name in "abc"]
    found = Measurement({1: ["x", "y"], 2: ["z"]}, refused={2: {"b": "why"}})
    for seed in (5, 6):
        found.rounds.append(run_round(None, ways, found, GREEDY, seed, lambda: None))
    names = ["".join(name for text, name, _ in order if text == batch) for batch in "xyz"]
    assert names == ["abcbca", "bcacab", "acca"]
    assert [seed for _, _, seed in order] == [5] * 8 + [6] * 8


def test_rounds_end_with_the_time(monkeypatch):
    clock, seeds = [0.0], []

    def run_round(model, ways, found, arguments, seed, on_step):
        clock[0] += 10.0
        seeds.append(seed)
        return {}

    monkeypatch.setattr(engine, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(engine, "run_round", run_round)
    for limit, count in ((None, 5), (35.0, 3), (0.0, 1)):
        found = engine.measure(None, [], {}, 5, GREEDY, seed=7, max_seconds=limit)
        assert len(found.rounds) == count
    assert seeds[:5] == [7, 8, 9, 10, 11]


def test_differences_are_found_by_prompt():
    batches = [Batch(("one", "two", "three"), "edit", {}, 3)]
    plain = [Call([[1, 2, 3], [1, 2, 3], [1, 2, 3]], 1.0)]
    other = [Call([[1, 2, 3], [1, 9, 3], [1, 2]], 1.0)]
    assert find_differences(plain, other, batches) == {"two": 1, "three": 2}


def test_batches_are_filled_with_prompts_of_their_kind():
    some = [Prompt(name, name * 3, kind, 8) for name, kind in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y"))]
    found = make_batches(demo.load_tokenizer(), some, 2, fill=True)
    assert [batch.names for batch in found] == [("a", "b"), ("c", "a"), ("d", "d")]
    left = make_batches(demo.load_tokenizer(), some, 2)
    assert [batch.names for batch in left] == [("a", "b"), ("c",), ("d",)]
