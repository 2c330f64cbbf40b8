"""`hf-specdec bench`: what it measures, the figures of known calls, prompts and settings in all spellings."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import pytest
import run
from typer.testing import CliRunner

from hf_specdec import SpeculativeConfig, cli, demo
from hf_specdec.bench import decoders, engine, figures, prompts, report
from hf_specdec.bench.decoders import Decoder, load_decoders, plain_decoder, read_spec, stock_decoders
from hf_specdec.bench.engine import Call, Measurement, find_differences, run_round, time_call, warm_up
from hf_specdec.bench.prompts import Batch, Prompt, make_batches, read_prompts
from hf_specdec.errors import MissingDependencyError, SpecConfigError
from hf_specdec.metrics import SpecDecodingStats
from tests.helpers.levels import full


GREEDY = {"do_sample": False}
PLAIN = {**GREEDY, **plain_decoder().arguments}


def bench(*arguments, code=0):
    command = ["bench", "-n", "8", "--num-prompts", "1", *map(str, arguments)]
    result = CliRunner().invoke(cli.app, command, prog_name="hf-specdec")
    assert result.exit_code == code, result.output
    return " ".join((result.stdout if code == 0 else result.output).split())


@pytest.fixture(scope="module")
def batches():
    return make_batches(demo.load_tokenizer(), demo.prompts()[-2:], 1, 8)


def test_every_method_is_measured_beside_both_baselines(tmp_path):
    out = tmp_path / "out.json"
    specs = ("--spec", "ngram", "--spec", "draft_model", "--spec", "eagle3,k=2")
    text = bench(*specs, "--rounds", 2, "--batch-sizes", "2,1", "--plot", tmp_path / "charts", "-o", out)
    found = json.loads(out.read_text())
    rows = {(row["batch_size"], row["method"]): row for row in found["rows"]}
    own = ("ngram", "draft_model", "eagle3")
    assert list(rows) == [
        *((1, name) for name in ("plain", "none", "stock_prompt_lookup", "stock_draft_model", *own)),
        *((2, name) for name in ("plain", "none", *own)),
    ]
    for (size, name), row in rows.items():
        assert (row["identical"], row["first_differences"]) == (True, {})
        assert row["num_texts"] == row["same_texts"] == 2 * 2 * size  # rounds, kinds, rows
        assert row["num_tokens"] == rows[size, "plain"]["num_tokens"]
        assert row["num_tokens"] == sum(kind["num_tokens"] for kind in row["kinds"].values())
        assert row["spread"]["tokens_per_second"]["n"] == row["spread"]["speedup"]["n"] == 2
        assert row["cycle_seconds"]["p50"] <= row["cycle_seconds"]["p95"] <= row["cycle_seconds"]["p99"]
        if name in own:
            assert row["accepted_per_position"] == sorted(row["accepted_per_position"], reverse=True)
            assert 1 <= row["mean_acceptance_length"] <= len(row["accepted_per_position"]) + 1
            assert 0 < row["draft_share"] < 1
    assert rows[1, "plain"]["speedup"] == rows[1, "none"]["speedup_over_none"] == 1.0
    assert rows[1, "none"]["mean_acceptance_length"] == rows[1, "plain"]["mean_acceptance_length"] == 1.0
    assert rows[1, "stock_draft_model"]["mean_acceptance_length"] > 1.0
    assert rows[1, "draft_model"]["draft_bytes"] == rows[1, "stock_draft_model"]["draft_bytes"] > 0
    unavailable = {(row["method"], row["batch_size"]) for row in found["unavailable"]}
    assert unavailable == {("stock_prompt_lookup", 2), ("stock_draft_model", 2)}
    assert found["settings"]["prompts"] == {"remove_docstring": "edit", "class": "complete"}
    for part in ("Batch size 1", "Batch size 2", "eagle3", "speed-up by kind", "4/4", "median", "repeated"):
        assert part in text
    # Charts, and a model card that takes the figures.
    names = {"speedup_by_kind.png", "acceptance_by_position.png", "tokens_per_second.png"}
    assert {path.name for path in (tmp_path / "charts").iterdir()} == names
    card = CliRunner().invoke(cli.app, ["card", demo.drafter_path("eagle3"), "--bench", str(out)]).stdout
    assert card.count("| eagle3 |") == card.count("| plain |") == 2


@full
def test_sampled_runs_and_interrupts(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("def read_json(path):\n")
    short = ("--spec", "ngram", "--no-stock")
    found = json.loads(
        bench(*short, "--rounds", 1, "--temperature", 0.8, "--raw", "--prompts", tmp_path / "prompts.txt", "--json")
    )
    assert [(row["method"], row["identical"]) for row in found["rows"]] == [
        (name, None) for name in ("plain", "none", "ngram")
    ]
    assert found["settings"]["decoding"] == "sampled (temperature 0.8)"
    options = ("--spec", "ngram,disable_by_batch_size=1", "--no-stock", "--rounds", 1, "--batch-sizes", "2")
    assert "ngram at batch size 2: no drafts: 2 rows are more than disable_by_batch_size=1." in bench(*options)
    complete = engine.run_round

    def run_round(model, ways, found, *args):
        if found.rounds:
            raise KeyboardInterrupt
        return complete(model, ways, found, *args)

    monkeypatch.setattr(engine, "run_round", run_round)
    assert "1 of 3 rounds: interrupted." in bench(*short, "--rounds", 3, code=130)
    monkeypatch.setattr(engine, "run_round", lambda *args: run_round(None, [], SimpleNamespace(rounds=[1])))
    assert "Interrupted" in bench(*short, code=130)


@full
def test_wrong_requests(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.txt").write_text("def f():\n")
    for arguments, message in (
        (("--batch-sizes", "0,2"), "--batch-sizes must be numbers"),
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
    ):
        assert message in bench(*arguments, code=2)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(demo, "load_target", lambda *args: pytest.fail("the target was loaded"))
    assert "pip install matplotlib" in bench("--plot", tmp_path, code=2)


# ------------------------------------------------------------------------------------------------------------- figures


def test_medians_spreads_and_pooled_ratios():
    assert figures.median_and_range([3.0, 1.0, 2.0]) == figures.Figure(2.0, 1.0, 3.0, 3, "rounds", "range")
    spread = figures.median_and_quartiles([1.0, 2.0, 3.0, 4.0, 5.0], "calls")
    assert spread == figures.Figure(3.0, 2.0, 4.0, 5, "calls", "quartiles")
    assert figures.percentiles(range(101)) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    # Calls weigh by their size, and one of the two may be drawn twice.
    assert figures.pooled([1, 27, 0], [10, 30, 0], "drafts") == figures.Figure(
        0.7, 0.1, 0.9, 40, "drafts", "bootstrap"
    )
    assert figures.pooled([0], [0]) is None
    drafted = np.random.default_rng(1).integers(1, 50, 200)
    accepted = np.random.default_rng(2).binomial(drafted, np.random.default_rng(3).beta(6, 3, 200))
    pooled = figures.pooled(accepted, drafted)
    # Linearised (Cochran, Sampling Techniques, section 6.3).
    error = np.sqrt(np.square(accepted - pooled.value * drafted).mean() / 200) / drafted.mean()
    assert pooled.high - pooled.value == pytest.approx(1.96 * error, rel=0.15)
    assert pooled.value - pooled.low == pytest.approx(1.96 * error, rel=0.15)


def test_figures_of_known_calls():
    def call(seconds, tokens, **stats):
        made = Call([tokens], seconds, SpecDecodingStats(**stats) if stats else None, seconds / 10, [0.1, 0.3])
        made.mean_acceptance_length = made.stats.mean_acceptance_length if stats else 1.0
        return made

    counts = {"batch_size": 1, "num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 6}
    counts |= {"num_reached_tokens": 7, "num_accepted_tokens_per_pos": [2, 2, 1, 1], "num_row_cycles": 2}
    counts |= {"num_committed_tokens": 9, "draft_seconds": 0.5}
    batches = [Batch(("one",), "edit", {}, 9), Batch(("two",), "list", {}, 9)]
    text, other = [7] * 9, [7] * 8 + [8]
    rounds = [
        {1: {"plain": [call(6.0, text), call(3.0, text)], "ngram": [call(s, one, **counts) for one in (text, other)]}}
        for s in (1.0, 2.0, 3.0)
    ]
    measured, ways = Measurement({1: batches}, rounds), [plain_decoder(), Decoder("ngram", {})]
    weights = SimpleNamespace(parameters=list, buffers=list)
    plain, row = report.make_rows(weights, ways, measured, greedy=True)
    assert (plain["tokens_per_second"], plain["mean_acceptance_length"]) == (18 / 9, 1.0)
    assert (row["tokens_per_second"], row["speedup"]) == (18 / 4, 9 / 4)
    assert row["spread"]["speedup"] == {"low": 1.5, "high": 4.5, "n": 3, "over": "rounds", "spread": "range"}
    assert [row["kinds"][kind]["speedup"] for kind in ("edit", "list")] == [3.0, 1.5]
    assert row["first_token_seconds"] == pytest.approx(0.2)
    assert (row["mean_acceptance_length"], row["acceptance_rate"], row["draft_acceptance_rate"]) == (4.0, 6 / 7, 0.75)
    assert row["accepted_per_position"] == [1.0, 1.0, 0.5, 0.5]
    assert row["draft_share"] == pytest.approx(0.5 * 6 / 12)
    assert row["cycle_seconds"] == {"p50": 0.2, "p95": 0.3, "p99": 0.3, "n": 12, "over": "cycles"}
    assert (row["identical"], row["same_texts"], row["num_texts"]) == (False, 3, 6)
    assert row["first_differences"] == {"two": 8}
    # The same text once more says nothing new of acceptance; other texts do.
    sampled = report.make_rows(weights, ways, measured, greedy=False)[1]
    assert row["spread"]["mean_acceptance_length"]["n"] == 4
    assert sampled["spread"]["mean_acceptance_length"]["n"] == 12
    plain = [Call([[1, 2, 3], [1, 2, 3], [1, 2, 3]], 1.0)]
    other = [Call([[1, 2, 3], [1, 9, 3], [1, 2]], 1.0)]
    names = [Batch(("one", "two", "three"), "edit", {}, 3)]
    assert find_differences(plain, other, names) == {"two": 1, "three": 2}


# ------------------------------------------------------------------------------------------------------------- prompts


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return str(path)


@full
def test_prompts_of_files(tmp_path):
    for content, expected in (
        ("one\ntwo\n", ["one", "two"]),
        ("\none\n  two\n \n\n  three\n", ["one\n  two", "  three"]),
    ):
        assert [prompt.text for prompt in read_prompts(write(tmp_path / "a.txt", content))] == expected
    records = [
        {"question_id": 81, "category": "writing", "turns": ["first", "second"], "reference": ["none"]},
        {"name": "own", "kind": "code", "prompt": "text", "max_new_tokens": 5},
        {"question": "why?"},
    ]
    assert read_prompts(write(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, records))), 32) == [
        Prompt("81", "first", "writing", 32),
        Prompt("own", "text", "code", 5),
        Prompt("prompt 3", "why?", "prompt", 32),
    ]
    assert [prompt.text for prompt in read_prompts(write(tmp_path / "a.json", '["one", "two\\n"]'))] == [
        "one",
        "two\n",
    ]
    assert [prompt.kind for prompt in read_prompts("demo", 256, 2)] == ["edit", "edit", "complete", "complete"]
    for content, message in (
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: no JSON"),
        ('{"prompt": " "}', "line 1: a prompt is a text"),
        ('{"turns": []}', "line 1: a prompt is a text"),
        ('{"prompt": "a", "max_new_tokens": true}', "`max_new_tokens` must be a number"),
        ('{"prompt": "a", "name": "x"}\n{"prompt": "b", "name": "x"}', "two prompts named 'x'"),
    ):
        with pytest.raises(SpecConfigError, match=message):
            read_prompts(write(tmp_path / "a.jsonl", content))


@full
def test_batches_of_prompts():
    tokenizer = demo.load_tokenizer()
    some = [Prompt(name, name * 3, kind, 8) for name, kind in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y"))]
    found = [batch.names for batch in make_batches(tokenizer, some, 2, fill=True)]
    assert found == [("a", "b"), ("c", "a"), ("d", "d")]
    assert [batch.names for batch in make_batches(tokenizer, some, 2)] == [("a", "b"), ("c",), ("d",)]
    # A chat template is not given special tokens twice.
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '<answer>' }}"
    (prompt,) = prompts.as_chat([Prompt("one", "text")], tokenizer)
    assert prompt.text == "<user>text<answer>"
    (batch,) = make_batches(tokenizer, [prompt], add_special_tokens=False)
    assert tokenizer.decode(batch.inputs["input_ids"][0]) == prompt.text


@full
def test_spec_bench_is_downloaded_once(monkeypatch, tmp_path):
    from huggingface_hub import constants

    content = json.dumps({"question_id": 1, "category": "rag", "turns": ["one", "more"]}).encode()
    served = tmp_path / "served.jsonl"
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(prompts, "SPEC_BENCH_SHA256", sha256(content).hexdigest())
    monkeypatch.setattr(prompts, "SPEC_BENCH_URL", served.as_uri())
    with pytest.raises(SpecConfigError, match="cannot be downloaded"):
        read_prompts("spec-bench")
    served.write_bytes(b"another file")
    with pytest.raises(SpecConfigError, match="another file"):
        read_prompts("spec-bench")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SpecConfigError, match="HF_HUB_OFFLINE") as error:
        read_prompts("spec-bench")
    assert str(tmp_path / "hf_specdec" / "spec_bench" / "question.jsonl") in str(error.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    served.write_bytes(content)
    for _ in range(2):
        assert read_prompts("spec-bench") == [Prompt("1", "one", "rag", 256)]
        served.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- ways of decoding


def test_settings_in_all_spellings():
    head, own = "user/head", {"method": "eagle3", "model": "own"}
    for text, expected in {
        "ngram": "ngram",
        head: head,
        '{"method": "ngram"}': {"method": "ngram"},
        "ngram,k=4": {"method": "ngram", "num_speculative_tokens": 4},
        "method=eagle3, model=user/head": {"method": "eagle3", "model": head},
        "user/head,revision=1234567,k=2": {"model": head, "revision": "1234567", "num_speculative_tokens": 2},
        "ngram,revision=null": {"method": "ngram", "revision": None},
        "user/head,k=auto,num_draft_nodes=9": {"model": head, "num_speculative_tokens": "auto", "num_draft_nodes": 9},
        "eagle3": own,
        "eagle3,k=2": {**own, "num_speculative_tokens": 2},
        "eagle3,model=user/head": {"method": "eagle3", "model": head},
        "suffix+eagle3": {"method": "suffix+eagle3", "model": "own"},
        '{"method": "eagle3"}': own,
    }.items():
        assert read_spec(text, {"eagle3": own}) == expected, text


@full
def test_decoders_and_their_baselines(target, monkeypatch):
    specs = ["ngram", {"method": "ngram", "num_speculative_tokens": 3}, "ngram"]
    assert [decoder.name for decoder in load_decoders(target, specs)[0]] == ["ngram_1", "ngram_k3", "ngram_2"]
    # Weights that are shared with the target are not the drafter's.
    (eagle,), _ = load_decoders(target, [demo.settings()["eagle"]])
    own = eagle.draft_bytes(target)
    eagle.network.shared = target.get_input_embeddings()
    try:
        assert eagle.draft_bytes(target) == own
    finally:
        del eagle.network.shared
    # The draft length of transformers' own is that of the method, and ours is untouched.
    methods, _ = load_decoders(target, [{**demo.settings()["draft_model"], "num_speculative_tokens": 3}])
    before = methods[0].network.generation_config.num_assistant_tokens
    assistant = stock_decoders(methods)[1].arguments["assistant_model"]
    assert assistant.generation_config.num_assistant_tokens == 3
    assert assistant.get_input_embeddings() is methods[0].network.get_input_embeddings()
    assert methods[0].network.generation_config.num_assistant_tokens == before

    def load_speculator(model, config=None, **settings):
        raise MissingDependencyError("Run: pip install it")

    monkeypatch.setattr(decoders, "load_speculator", load_speculator)
    assert load_decoders(target, [read_spec("suffix")], skip_missing=True) == ([], {"suffix": "Run: pip install it"})
    with pytest.raises(MissingDependencyError):
        load_decoders(target, [read_spec("suffix")])


@full
@pytest.mark.parametrize("method", ["suffix", "suffix+eagle"])
def test_every_round_begins_without_earlier_texts(target, batches, method):
    (decoder,), _ = load_decoders(target, [read_spec(method, demo.settings())])
    caches = []
    for _ in range(2):
        decoder.forget_texts(target)
        resources = decoder.speculator.resources
        caches.append(resources.retrieval if "+" in method else resources)
        assert not caches[-1].cached_requests
        time_call(target, batches[0], {**GREEDY, **decoder.arguments})
        assert len(caches[-1].cached_requests) == 1
    assert caches[0] is not caches[1]


# ----------------------------------------------------------------------------------------------------------- measuring


@full
def test_a_call_is_timed_and_counted(target, batches):
    (ngram,), _ = load_decoders(target, ["ngram"])
    drafted = time_call(target, batches[0], {**GREEDY, **ngram.arguments})
    target.generation_config.speculative = {"method": "ngram"}
    try:
        plain = time_call(target, batches[0], PLAIN)
    finally:
        del target.generation_config.speculative
    assert plain.stats is None
    assert drafted.tokens == plain.tokens
    assert len(plain.cycle_seconds) == len(plain.tokens[0]) - 1
    assert len(drafted.cycle_seconds) == drafted.stats.num_target_forwards - 1
    for call in (plain, drafted):
        assert 0 < call.first_token_seconds < call.seconds
        assert sum(call.cycle_seconds) < call.seconds - call.first_token_seconds
    sampling = {**PLAIN, "do_sample": True, "temperature": 1.5}
    first, again, other = (time_call(target, batches[0], sampling, seed) for seed in (1, 1, 2))
    assert first.tokens == again.tokens != other.tokens


@full
def test_what_cannot_run_is_found_while_warming_up(target, batches):
    broken = Decoder("stock_mtp", {"spec_method": "off", "use_mtp": True}, max_batch_size=1)
    own = Decoder("own", {"speculative": {"method": "ngram"}, "num_beams": 2})
    two = make_batches(demo.load_tokenizer(), demo.prompts()[-2:], 2, 8)
    refused = warm_up(target, [plain_decoder(), broken, own], {1: batches, 2: two}, GREEDY, lambda: None)
    assert refused[1].keys() == refused[2].keys() == {"stock_mtp", "own"}
    assert "one row" in refused[2]["stock_mtp"]
    assert "Beam search" in refused[1]["own"]
    with pytest.raises(SpecConfigError, match="Plain generation at batch size 1 fails"):
        warm_up(target, [Decoder("plain", own.arguments)], {1: batches}, GREEDY, lambda: None)


def test_each_way_begins_in_turn_until_the_time_is_over(monkeypatch):
    order, clock = [], [0.0]

    def time_call(model, batch, given, seed):
        order.append((batch, given["way"], seed))

    monkeypatch.setattr(engine, "time_call", time_call)
    found = Measurement({1: ["x", "y"], 2: ["z"]}, refused={2: {"b": "why"}})
    for seed in (5, 6):
        ways = [Decoder(name, {"way": name}) for name in "abc"]
        found.rounds.append(run_round(None, ways, found, GREEDY, seed, lambda: None))
    names = ["".join(name for text, name, _ in order if text == batch) for batch in "xyz"]
    assert names == ["abcbca", "bcacab", "acca"]
    assert [seed for _, _, seed in order] == [5] * 8 + [6] * 8

    def ten_seconds(*args):
        clock[0] += 10.0
        return {}

    monkeypatch.setattr(engine, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(engine, "run_round", ten_seconds)
    for limit, count in ((None, 5), (35.0, 3), (0.0, 1)):
        assert len(engine.measure(None, [], {}, 5, GREEDY, seed=7, max_seconds=limit).rounds) == count


# ------------------------------------------------------------------------------------------------- benchmarks/run.py


@full
def test_cases_of_the_benchmarks(tmp_path, monkeypatch):
    for name, case in run.CASES.items():
        arguments = run.command(case, None)
        specs = [text for option, text in zip(arguments, arguments[1:]) if option == "--spec"]
        assert len(specs) == len(case.specs), name
        for text in specs:
            method = SpeculativeConfig.resolve(read_spec(text, demo.settings())).method
            assert method == json.loads(text)["method"]
    (tmp_path / "prompts.txt").write_text("def add(one, two):")
    short = ["--prompts", str(tmp_path / "prompts.txt"), "--rounds", "1", "-n", "4", "--no-stock"]
    run.main(["medusa", "mtp", "--output", str(tmp_path / "out.json"), *short])
    for name in ("medusa", "mtp"):
        rows = json.loads((tmp_path / f"out-{name}.json").read_text())["rows"]
        # Beside the two baselines.
        assert len(rows) == 2 + len(run.CASES[name].specs)
    with pytest.raises(SystemExit):
        run.main(["nothing"])
