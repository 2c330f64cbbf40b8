"""The GPU benchmark runs as a whole on a CPU, its models write what they must, and it sees what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import gpu
import gpu_checks
import gpu_first
import gpu_models
import pytest
import torch
from rich.console import Console

from hf_specdec import demo
from hf_specdec.bench.prompts import make_batches
from hf_specdec.decoding.graphs import forget_graphs
from tests.helpers.levels import full, slow
from tests.helpers.paths import BENCHMARKS
from tests.helpers.tape import tape_everything


pytestmark = full
CPU = torch.device("cpu")


def run_program(*arguments, **environment) -> subprocess.CompletedProcess:
    command = [sys.executable, BENCHMARKS / "gpu.py", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture
def taped(monkeypatch):
    tape_everything(monkeypatch)
    yield
    forget_graphs()


def test_program(tmp_path, monkeypatch):
    json_file, table_file = tmp_path / "out.json", tmp_path / "out.md"
    sides = ("transformers", "no drafts", "ngram", "eagle3, chain")
    settings = ("--batch-sizes", 1, "--nodes", 1, 8, "--rounds", 1, "--device", "cpu")
    files = ("--json", json_file, "--markdown", table_file)
    sections = ("--sections", "verification", "decoding")
    done = run_program("--sizes", "tiny", *sections, "--sides", *sides, *settings, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(json_file.read_text())
    assert not report["failures"]
    assert not report["not_run"]
    [verified], [decoded] = report["verification"], report["decoding"]
    assert [(row["shape"], row["nodes"]) for row in verified["rows"]] == [("none", 1), ("chain", 8), ("tree", 8)]
    rows = {row["side"]: row for row in decoded["rows"]}
    named = [f"ours: {name}" for name in ("no drafts", "ngram, transformers' rule", "ngram", "eagle3, chain of 3")]
    assert list(rows) == [gpu.PLAIN, gpu.LOOKUP, gpu.ASSISTED, *named, gpu.COMPILED]
    assert {name for name, row in rows.items() if row["same_rows"] == 1} == set(rows) - {"ours: eagle3, chain of 3"}
    assert rows[gpu.NO_DRAFTS]["tokens_per_cycle"] == 1 < rows["ours: ngram"]["tokens_per_cycle"]
    tables = table_file.read_text()
    assert all(f"| {name} |" in tables for name in rows)
    again = ["--read", json_file, "--markdown", tmp_path / "again.md", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, again)])
    gpu.main()
    assert (tmp_path / "again.md").read_text() == tables


@slow
def test_whole_program(tmp_path):
    json_file = tmp_path / "out.json"
    done = run_program("--sizes", "tiny", "--device", "cpu", "--json", json_file)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(json_file.read_text())
    found = {check["what"]: check["is_right"] for check in report["checks"]}
    assert found.pop("kernels", None) is None
    assert len(found) == 2 * len(gpu_checks.drafts())
    assert all(found.values())
    for case in report["decoding"]:
        ours = {row["side"] for row in case["rows"] if row["side"].startswith("ours")}
        assert ours == {gpu.NO_DRAFTS, *(f"ours: {drafter.name}" for drafter in gpu_models.DRAFTERS)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_program_on_a_gpu(tmp_path):
    json_file = tmp_path / "out.json"
    sides = ("transformers", "no drafts", "ngram", "eagle3, tree")
    done = run_program("--sizes", "tiny", "--device", "cuda", "--sides", *sides, "--json", json_file)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(json_file.read_text())
    assert all(check["is_right"] is not False for check in report["checks"])
    assert "tree_attention, bfloat16" in {check["what"] for check in report["checks"]}
    for case in report["verification"]:
        for row in case["rows"]:
            assert 0 < row["target_work"]
            assert row["gap"] >= 0


def test_wrong_texts_are_seen():
    target = demo.load_target()
    batches = make_batches(demo.load_tokenizer(), demo.prompts()[-1:], 1, 8)
    settings = {"method": "medusa", "model": demo.drafter_path("medusa"), "num_speculative_tokens": 3}
    right = gpu_checks.check_text("right", target, settings, batches)
    wrong = gpu_checks.check_text("wrong", target, settings | gpu_models.synthetic(4.0), batches)
    assert right.is_right
    assert wrong.is_right is False
    assert "bug in " in wrong.detail


def first_run(tmp_path, kind="smoke", *arguments) -> gpu_first.FirstRun:
    options = gpu.parse_options([f"--{kind}", "--device", "cpu", "--json", str(tmp_path / "out.json"), *arguments])
    return gpu_first.FirstRun(kind, options, Console(quiet=True))


def written(tmp_path) -> dict:
    return json.loads((tmp_path / "out.json").read_text())


def statuses(report: dict) -> dict[str, str]:
    return {part["part"]: part["status"] for part in report["parts"]}


def test_smoke_on_graphs(tmp_path, taped, monkeypatch):
    every = gpu_first.one_of_each_method()
    monkeypatch.setattr(gpu_first, "one_of_each_method", lambda: {name: every[name] for name in ("ngram", "mtp")})
    arguments = ["gpu.py", "--smoke", "--device", "cpu", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 0
    report = written(tmp_path)
    assert statuses(report) == {
        "kernel: kernels": "skipped",
        "text: ngram": "passed",
        "text: mtp": "passed",
        "captured cycle": "passed",
    }
    cycle = report["parts"][-1]["found"]
    assert cycle["graphs"] == cycle["draft_graphs"] == "on"
    assert cycle["replays"] > 0
    assert cycle["draft_replays"] > 0
    assert cycle["captures"][0] > 0


def test_first_figures(tmp_path, taped, monkeypatch):
    sides = (gpu.PLAIN, gpu.NO_DRAFTS, "ours: eagle3, chain")
    monkeypatch.setattr(gpu_first, "FIRST_SIDES", sides)
    monkeypatch.setattr(gpu_first, "LAST_SIDES", ())
    monkeypatch.setattr(gpu_first, "WAYS_NODES", (1, 16))
    drafts = ("ours: eagle3, chain", "ours: draft_model")
    monkeypatch.setattr(gpu_first, "PROFILED_DRAFTS", drafts)
    # There are no kernels that could.
    monkeypatch.setattr(gpu_first.early, "launches_early", lambda tensor: True)
    run = first_run(tmp_path, "first", "--new-tokens", "24")
    assert run.run(gpu_first.first_parts(run.options, CPU)) == 0
    report = written(tmp_path)
    found = {part["part"]: part["found"] for part in report["parts"]}
    assert list(found) == [
        "models",
        *(f"decoding: {side}" for side in sides),
        "kernels of a replay",
        "ways of a forward",
        *(f"kernels of a draft: {side}" for side in drafts),
        "attention",
        "products",
        "drawn tokens",
        "first calls and captures",
        "memory of graphs",
    ]
    for side in sides[1:]:
        assert found[f"decoding: {side}"]["to_plain"] > 0
        assert found[f"decoding: {side}"]["graphs"] == "on"
    assert found["kernels of a replay"]["num_kernels"] > 20
    assert found["memory of graphs"]["num_graphs"] > 0
