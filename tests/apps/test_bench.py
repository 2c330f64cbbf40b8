"""`hf-specdec bench`: what it measures, the figures of known calls, and prompts."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard, constants
from typer.testing import CliRunner

from hf_specdec import cli, demo
from hf_specdec.bench import engine, prompts, report
from hf_specdec.bench.decoders import Decoder
from hf_specdec.bench.engine import Call, Measurement
from hf_specdec.bench.prompts import Batch, Prompt, read_prompts
from hf_specdec.errors import SpecConfigError
from hf_specdec.hub.publish import write_card
from hf_specdec.metrics import SpecDecodingStats
from tests.helpers.levels import full


def bench(*arguments, code=0, only_stdout=False):
    command = ["bench", "-n", "8", "--num-prompts", "1", *map(str, arguments)]
    result = CliRunner().invoke(cli.app, command, prog_name="hf-specdec")
    assert result.exit_code == code, result.output
    return " ".join((result.stdout if code == 0 or only_stdout else result.output).split())


@full
def test_every_method_is_measured_beside_the_baselines(tmp_path):
    out, head = tmp_path / "out.json", tmp_path / "head"
    drafters = ("-d", "ngram", "-d", "draft_model", "-d", "eagle3,num_speculative_tokens=2")
    text = bench("demo", *drafters, "--rounds", 2, "-b", 2, "-b", 1, "--max-seconds", 500, "-o", out)
    found = json.loads(out.read_text())
    rows = {(row["batch_size"], row["method"]): row for row in found["rows"]}
    own, stock = ("ngram", "draft_model", "eagle3"), ("stock_prompt_lookup", "stock_draft_model")
    both = ("plain", "none", *own)
    assert rows.keys() == {
        *((size, name) for size in (1, 2) for name in (*both, "stock_static")),
        (1, stock[0]),
        (1, stock[1]),
    }
    for (size, name), row in rows.items():
        assert (row["identical"], row["first_differences"]) == (True, {})
        assert row["num_texts"] == row["same_texts"] == 2 * 2 * size  # rounds, kinds, rows
        assert row["num_tokens"] == rows[size, "plain"]["num_tokens"]
        assert row["num_tokens"] == sum(kind["num_tokens"] for kind in row["kinds"].values())
        if name in own:
            assert 1 <= row["mean_acceptance_length"] <= len(row["accepted_per_position"]) + 1
            assert 0 < row["draft_share"] < 1
    assert rows[1, "plain"]["speedup"] == rows[1, "none"]["speedup_over_none"] == 1.0
    assert rows[1, "none"]["mean_acceptance_length"] == rows[1, "plain"]["mean_acceptance_length"] == 1.0
    assert rows[1, "stock_draft_model"]["mean_acceptance_length"] > 1.0
    assert {(row["method"], row["batch_size"]) for row in found["unavailable"]} == {(name, 2) for name in stock}
    assert all(part in text for part in ("Batch size 1", "Batch size 2", "eagle3", "the fastest at batch size 1 is"))
    # A model card that takes the figures.
    shutil.copytree(demo.drafter_path("eagle3"), head)
    card = ModelCard(write_card(head, report=found).read_text())
    assert card.text.count("| eagle3 |") == card.text.count("| plain |") == 2


@full
def test_without_a_model_the_toy_and_all_its_drafters():
    text = bench("--max-seconds", 1, "-n", 4)
    assert text.startswith("No MODEL is given: this is the embedded toy model 'demo'")
    assert all(name in text for name in demo.settings())


def test_texts_that_differ_are_an_error(monkeypatch):
    faithful = engine.time_call

    def time_call(model, batch, arguments, seed=0):
        call = faithful(model, batch, arguments, seed)
        if "assistant" in arguments:
            call.tokens[0][3] += 1
        return call

    monkeypatch.setattr(engine, "time_call", time_call)
    arguments = ("demo", "-d", "ngram", "-p", "import os\nimport ", "--rounds", 1)
    rows = json.loads(bench(*arguments, "--json", code=1, only_stdout=True))["rows"]
    same = {row["method"]: row["identical"] for row in rows}
    assert {name: same[name] for name in ("plain", "none", "ngram")} == {"plain": True, "none": False, "ngram": False}
    assert all(same[name] for name in same if name.startswith("stock_"))
    assert next(row for row in rows if row["method"] == "ngram")["first_differences"] == {"prompt 1": 3}


def test_figures_of_known_calls():
    def call(seconds, tokens, **stats):
        made = Call([tokens], seconds, SpecDecodingStats(**stats) if stats else None, seconds / 10, [0.1, 0.3])
        made.mean_acceptance_length = made.stats.mean_acceptance_length if stats else 1.0
        return made

    counts = {"batch_size": 1, "num_drafts": 2, "num_draft_tokens": 8, "num_accepted_tokens": 6}
    counts |= {"num_reached_tokens": 7, "num_accepted_tokens_per_pos": [2, 2, 1, 1], "num_row_cycles": 2}
    counts |= {"num_committed_tokens": 9, "draft_seconds": 0.5}
    batches, rounds = [Batch(("one",), "edit", {}, 9), Batch(("two",), "list", {}, 9)], []
    text, other = [7] * 9, [7] * 8 + [8]
    for seconds in (1.0, 2.0, 3.0):
        drafted = [call(seconds, one, **counts) for one in (text, other)]
        rounds.append({1: {"plain": [call(6.0, text), call(3.0, text)], "ngram": drafted}})
    measured, ways = Measurement({1: batches}, rounds), [Decoder("plain", {}), Decoder("ngram", {})]
    weights = SimpleNamespace(parameters=list, buffers=list)
    plain, row = report.make_rows(weights, ways, measured, greedy=True)
    assert (plain["tokens_per_second"], plain["mean_acceptance_length"]) == (18 / 9, 1.0)
    assert (row["tokens_per_second"], row["speedup"]) == (18 / 4, 9 / 4)
    assert row["spread"]["speedup"] == {"low": 1.5, "high": 4.5, "n": 3}
    assert [row["kinds"][kind]["speedup"] for kind in ("edit", "list")] == [3.0, 1.5]
    assert (row["mean_acceptance_length"], row["acceptance_rate"], row["draft_acceptance_rate"]) == (4.0, 6 / 7, 0.75)
    assert row["accepted_per_position"] == [1.0, 1.0, 0.5, 0.5]
    assert row["draft_share"] == pytest.approx(0.5 * 6 / 12)
    assert row["cycle_seconds"] == {"p50": 0.2, "p95": 0.3, "p99": 0.3, "n": 12}
    assert (row["identical"], row["same_texts"], row["num_texts"]) == (False, 3, 6)
    assert row["first_differences"] == {"two": 8}
    # Calls weigh by their size.
    assert (report.pooled([1, 27, 0], [10, 30, 0]), report.pooled([0], [0])) == (0.7, None)


@full
def test_runs_that_end_early_or_are_refused(monkeypatch, tmp_path):
    complete, short = (
        engine.run_round,
        ("demo", "-d", "ngram", "--set", "num_speculative_tokens_per_batch_size=[[2, 2, 0]]"),
    )

    def run_round(model, ways, found, *args):
        if found.rounds:
            raise KeyboardInterrupt
        return complete(model, ways, found, *args)

    monkeypatch.setattr(engine, "run_round", run_round)
    said = bench(*short, "--rounds", 3, "--batch-size", 2, "--temperature", 0.8, "--seed", 1, code=130)
    assert "1 of 3 rounds: interrupted." in said
    assert "ngram at batch size 2: length by batch size: at most 0.0 draft tokens a cycle" in said
    (tmp_path / "long.txt").write_text("def f():\n")
    for arguments, message in (
        (("-b", "0"), "Invalid value for '--batch-size'"),
        (("-d", "eagle7"), "Did you mean 'eagle'"),
        (("-n", "3000", "--prompts", tmp_path / "long.txt"), "context of 2048"),
        (("--check", "--recommend"), "Leave one of them out"),
        (("--check", "--sample"), "--check compares greedy texts"),
        (("-o", "nowhere/out.json"), "there is no folder"),
    ):
        assert message in bench("demo", *arguments, code=2)


@full
def test_prompts_of_files_and_of_spec_bench(tmp_path, monkeypatch):
    def read(name, content):
        (tmp_path / name).write_text(content)
        return read_prompts(str(tmp_path / name), 32)

    assert [prompt.text for prompt in read("a.txt", "\none\n  two\n \n\n  three\n")] == ["one\n  two", "  three"]
    assert read("a.jsonl", '\n{"name": "own", "prompt": "x"}') == [Prompt("own", "x", "prompt", 32)]
    # A chat, in the form of ShareGPT, and a list of prompts.
    chat = [{"from": "system", "value": "s"}, {"from": "human", "value": "y"}, {"from": "gpt", "value": "z"}]
    records = [{"conversations": chat}, {"content": "v", "name": "w"}]
    assert [prompt.text for prompt in read("a.json", json.dumps(records, indent=1))] == ["y", "v"]
    for content, message in (
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{"prompt"', "Line 2 of .* is no JSON"),
        ('{"prompt": "a"}\n\n{"messages": [{"role": "assistant", "content": "x"}, 3]}', "Line 3 of .* is no prompt"),
    ):
        with pytest.raises(SpecConfigError, match=message):
            read("a.jsonl", content)
    # The one that is downloaded, once.
    content, served = b'{"question_id": 1, "category": "rag", "turns": ["one", "more"]}', tmp_path / "served.jsonl"
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(prompts, "SPEC_BENCH_SHA256", sha256(content).hexdigest())
    monkeypatch.setattr(prompts, "SPEC_BENCH_URL", served.as_uri())
    for offline, found, message in ((True, content, "HF_HUB_OFFLINE"), (False, b"another file", "another file")):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        served.write_bytes(found)
        with pytest.raises(SpecConfigError, match=message):
            read_prompts("spec-bench")
    served.write_bytes(content)
    for _ in range(2):
        assert read_prompts("spec-bench") == [Prompt("1", "one", "rag", 256)]
        served.unlink(missing_ok=True)
