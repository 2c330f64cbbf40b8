"""The GPU benchmark runs as a whole on a CPU, its models write what they must, and it sees what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import gpu as benchmark
import gpu_checks
import gpu_first
import gpu_models
import pytest

from hf_specdec import demo
from hf_specdec.bench.prompts import make_batches
from tests.helpers.levels import full, slow
from tests.helpers.paths import BENCHMARKS


pytestmark = full


def run_program(path, *arguments) -> dict:
    """The report of a run of the tiny models."""
    command = [sys.executable, BENCHMARKS / "gpu.py", "--sizes", "tiny", "--json", path, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def run_here(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", *map(str, arguments)])
    benchmark.main()


def test_program(tmp_path, monkeypatch):
    json_file, table_file = tmp_path / "out.json", tmp_path / "out.md"
    arguments = ["--sections", "verification", "decoding", "--sides", "transformers", "no drafts", "ngram"]
    arguments += ["eagle3, chain", "--batch-sizes", 1, "--nodes", 1, 8, "--rounds", 1, "--device", "cpu"]
    report = run_program(json_file, *arguments, "--markdown", table_file)
    assert not report["failures"]
    assert not report["not_run"]
    [verified], [decoded] = report["verification"], report["decoding"]
    assert [(row["shape"], row["nodes"]) for row in verified["rows"]] == [("none", 1), ("chain", 8), ("tree", 8)]
    rows = {row["side"]: row for row in decoded["rows"]}
    assert {name for name, row in rows.items() if row["same_rows"] == 1} == set(rows) - {"ours: eagle3, chain of 3"}
    assert rows[benchmark.NO_DRAFTS]["tokens_per_cycle"] == 1 < rows["ours: ngram"]["tokens_per_cycle"]
    assert all(f"| {name} |" in table_file.read_text() for name in rows)
    run_here(monkeypatch, "--read", json_file, "--markdown", tmp_path / "again.md")
    assert (tmp_path / "again.md").read_text() == table_file.read_text()


@slow
def test_whole_program(tmp_path):
    report = run_program(tmp_path / "out.json", "--device", "cpu")
    found = {check["what"]: check["is_right"] for check in report["checks"]}
    assert found.pop("kernels", None) is None
    assert len(found) == 2 * len(gpu_checks.drafts())
    assert all(found.values())
    for case in report["decoding"]:
        ours = {row["side"] for row in case["rows"] if row["side"].startswith("ours")}
        assert ours == {benchmark.NO_DRAFTS, *(f"ours: {drafter.name}" for drafter in gpu_models.DRAFTERS)}


@pytest.mark.gpu
def test_program_on_a_gpu(tmp_path, gpu):
    sides = ("transformers", "no drafts", "ngram", "eagle3, tree")
    report = run_program(tmp_path / "out.json", "--device", gpu, "--sides", *sides)
    assert all(check["is_right"] is not False for check in report["checks"])
    assert "tree_attention, bfloat16" in {check["what"] for check in report["checks"]}


def test_wrong_texts_are_seen(target):
    batches = make_batches(demo.load_tokenizer(), demo.prompts()[-1:], 1, 8)
    settings = {"method": "medusa", "model": demo.drafter_path("medusa"), "num_speculative_tokens": 3}
    right = gpu_checks.check_text("right", target, settings, batches)
    wrong = gpu_checks.check_text("wrong", target, settings | gpu_models.synthetic(4.0), batches)
    assert right.is_right
    assert wrong.is_right is False
    assert "bug in " in wrong.detail


def test_smoke_on_graphs(tmp_path, tapes, monkeypatch):
    every = gpu_first.one_of_each_method()
    monkeypatch.setattr(gpu_first, "one_of_each_method", lambda: {name: every[name] for name in ("ngram", "mtp")})
    with pytest.raises(SystemExit) as ended:
        run_here(monkeypatch, "--smoke", "--json", tmp_path / "out.json")
    assert ended.value.code == 0
    parts = json.loads((tmp_path / "out.json").read_text())["parts"]
    assert [part["status"] for part in parts] == ["skipped", "passed", "passed", "passed"]
    cycle = parts[-1]["found"]
    assert cycle["graphs"] == cycle["draft_graphs"] == "on"
    assert min(cycle["replays"], cycle["draft_replays"], cycle["captures"][0]) > 0


def test_first_figures(tmp_path, tapes, monkeypatch):
    sides = (benchmark.PLAIN, benchmark.NO_DRAFTS, "ours: eagle3, chain")
    fewer = {"FIRST_SIDES": sides, "LAST_SIDES": (), "WAYS_NODES": (1, 16), "PROFILED_DRAFTS": sides[2:]}
    for name, value in fewer.items():
        monkeypatch.setattr(gpu_first, name, value)
    # There are no kernels that could.
    monkeypatch.setattr(gpu_first.early, "launches_early", lambda tensor: True)
    with pytest.raises(SystemExit) as ended:
        run_here(monkeypatch, "--first", "--new-tokens", 24, "--json", tmp_path / "out.json")
    assert ended.value.code == 0
    report = json.loads((tmp_path / "out.json").read_text())
    found = {part["part"]: part["found"] for part in report["parts"]}
    assert len(found) == 12
    for side in sides[1:]:
        assert found[f"decoding: {side}"]["to_plain"] > 0
        assert found[f"decoding: {side}"]["graphs"] == "on"
    assert found["kernels of a replay"]["num_kernels"] > 20
    assert found["memory of graphs"]["num_graphs"] > 0
