"""`hf-specdec bench`: what it measures, the figures of known calls, prompts and settings in all spellings."""

from __future__ import annotations

import json
from hashlib import sha256
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from hf_specdec import cli, demo
from hf_specdec.bench import engine, figures, prompts, report
from hf_specdec.bench.decoders import Decoder, plain_decoder, read_spec
from hf_specdec.bench.engine import Call, Measurement
from hf_specdec.bench.prompts import Batch, Prompt, read_prompts
from hf_specdec.errors import SpecConfigError
from hf_specdec.metrics import SpecDecodingStats
from tests.helpers.levels import full


def bench(*arguments, code=0):
    command = ["bench", "-n", "8", "--num-prompts", "1", *map(str, arguments)]
    result = CliRunner().invoke(cli.app, command, prog_name="hf-specdec")
    assert result.exit_code == code, result.output
    return " ".join((result.stdout if code == 0 else result.output).split())


@full
def test_every_method_is_measured_beside_both_baselines(tmp_path):
    out = tmp_path / "out.json"
    specs = ("--spec", "ngram", "--spec", "draft_model", "--spec", "eagle3,k=2")
    text = bench(*specs, "--rounds", 2, "--batch-sizes", "2,1", "--plot", tmp_path / "charts", "-o", out)
    found = json.loads(out.read_text())
    rows = {(row["batch_size"], row["method"]): row for row in found["rows"]}
    own, stock = ("ngram", "draft_model", "eagle3"), ("stock_prompt_lookup", "stock_draft_model")
    both = ("plain", "none", *own)
    assert rows.keys() == {*((size, name) for size in (1, 2) for name in both), (1, stock[0]), (1, stock[1])}
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
    assert all(part in text for part in ("Batch size 1", "Batch size 2", "eagle3"))
    # Charts, and a model card that takes the figures.
    assert len([*(tmp_path / "charts").glob("*.png")]) == 3
    card = CliRunner().invoke(cli.app, ["card", demo.drafter_path("eagle3"), "--bench", str(out)]).stdout
    assert card.count("| eagle3 |") == card.count("| plain |") == 2


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
    measured, ways = Measurement({1: batches}, rounds), [plain_decoder(), Decoder("ngram", {})]
    weights = SimpleNamespace(parameters=list, buffers=list)
    plain, row = report.make_rows(weights, ways, measured, greedy=True)
    assert (plain["tokens_per_second"], plain["mean_acceptance_length"]) == (18 / 9, 1.0)
    assert (row["tokens_per_second"], row["speedup"]) == (18 / 4, 9 / 4)
    assert row["spread"]["speedup"] == {"low": 1.5, "high": 4.5, "n": 3, "over": "rounds", "spread": "range"}
    assert [row["kinds"][kind]["speedup"] for kind in ("edit", "list")] == [3.0, 1.5]
    assert (row["mean_acceptance_length"], row["acceptance_rate"], row["draft_acceptance_rate"]) == (4.0, 6 / 7, 0.75)
    assert row["accepted_per_position"] == [1.0, 1.0, 0.5, 0.5]
    assert row["draft_share"] == pytest.approx(0.5 * 6 / 12)
    assert row["cycle_seconds"] == {"p50": 0.2, "p95": 0.3, "p99": 0.3, "n": 12, "over": "cycles"}
    assert (row["identical"], row["same_texts"], row["num_texts"]) == (False, 3, 6)
    assert row["first_differences"] == {"two": 8}
    # Calls weigh by their size, and one of the two may be drawn twice.
    pooled = figures.pooled([1, 27, 0], [10, 30, 0], "drafts")
    assert pooled == figures.Figure(0.7, 0.1, 0.9, 40, "drafts", "bootstrap")


def test_settings_in_all_spellings():
    own = {"method": "eagle3", "model": "own"}
    for text, expected in {
        "ngram": "ngram",
        '{"method": "ngram"}': {"method": "ngram"},
        "ngram,k=4": {"method": "ngram", "num_speculative_tokens": 4},
        "user/head,revision=1234567,k=auto": {
            "model": "user/head",
            "revision": "1234567",
            "num_speculative_tokens": "auto",
        },
        "eagle3": own,
        "eagle3,k=2": {**own, "num_speculative_tokens": 2},
        "eagle3, model=user/head": {"method": "eagle3", "model": "user/head"},
        "suffix+eagle3": {"method": "suffix+eagle3", "model": "own"},
    }.items():
        assert read_spec(text, {"eagle3": own}) == expected, text


@full
def test_runs_that_end_early_or_are_refused(monkeypatch, tmp_path):
    complete, short = engine.run_round, ("--spec", "ngram,disable_by_batch_size=1", "--no-stock")

    def run_round(model, ways, found, *args):
        if found.rounds:
            raise KeyboardInterrupt
        return complete(model, ways, found, *args)

    monkeypatch.setattr(engine, "run_round", run_round)
    said = bench(*short, "--rounds", 3, "--batch-sizes", 2, "--temperature", 0.8, code=130)
    assert "1 of 3 rounds: interrupted." in said
    assert "ngram at batch size 2: no drafts: 2 rows are more than disable_by_batch_size=1." in said
    (tmp_path / "long.txt").write_text("def f():\n")
    for arguments, message in (
        (("--batch-sizes", "0,2"), "--batch-sizes must be numbers"),
        (("--spec", "eagle7"), "Did you mean 'eagle'"),
        (("-n", "3000", "--prompts", tmp_path / "long.txt"), "context of 2048"),
    ):
        assert message in bench(*arguments, code=2)


@full
def test_prompts_of_files_and_of_spec_bench(tmp_path, monkeypatch):
    def read(name, content):
        (tmp_path / name).write_text(content)
        return read_prompts(str(tmp_path / name), 32)

    assert [prompt.text for prompt in read("a.txt", "\none\n  two\n \n\n  three\n")] == ["one\n  two", "  three"]
    assert read("a.jsonl", '\n{"name": "own", "prompt": "x"}') == [Prompt("own", "x", "prompt", 32)]
    for content, message in (("", "has no prompts"), ('{"prompt": "a"}\n{"prompt"', "line 2: no JSON")):
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
