"""The GPU benchmark runs on a CPU, its models write what they must, and it sees what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gpu as benchmark
import gpu_checks
import gpu_kernels
import gpu_models
import pytest

from hf_specdec import demo
from hf_specdec.bench.prompts import make_batches
from tests.helpers import layer_references
from tests.helpers.levels import full, slow


pytestmark = full


def run_here(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: Any, device: str = "cpu") -> dict[str, Any]:
    """The report of a run of the tiny models."""
    words = ["--size", "tiny", "--device", device, "--json", path, *arguments]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    report = json.loads(path.read_text(encoding="utf-8"))
    assert ended.value.code == report["exit_code"]
    return report


def table(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["table"] == name]


def test_speeds_beside_the_baselines(tmp_path, tapes, monkeypatch):
    sides = ("plain", "none", "transformers: assistant model", "eagle3, chain of 3", "ngram")
    monkeypatch.setattr(benchmark, "FIRST_SIDES", sides)
    parts = ["batch 1: " + side for side in sides] + ["verification, context 64, batch 1"]
    report = run_here(monkeypatch, tmp_path / "out.json", "--batch-sizes", 1, "--parts", *parts)
    assert report["exit_code"] == 0, report["parts"]
    verified = table(report, "verification")
    assert [(row["draft"], row["nodes"]) for row in verified] == [
        ("none", 1),
        ("chain, 8 nodes", 8),
        ("tree, 8 nodes", 8),
    ]
    assert all(row["cycle_ms"] > row["target_ms"] > 0 and row["to_weights"] > 0 for row in verified)
    rows = {row["side"]: row for row in table(report, "decoding")}
    assert set(sides) <= set(rows)
    assert {side for side, row in rows.items() if row["same_texts"] == 1} == set(rows) - {"eagle3, chain of 3"}
    assert rows["none"]["tokens_per_cycle"] == 1 < rows["ngram"]["tokens_per_cycle"]
    # Also of sides that were measured before their baselines.
    assert rows["plain"]["to_none"] == pytest.approx(1 / rows["none"]["to_plain"])
    assert rows["none"]["to_fastest_of_transformers"] <= rows["none"]["to_plain"]
    assert rows["none"]["graphs"] == "on"
    cycles = {row["side"]: row for row in table(report, "cycles")}
    assert cycles["none"]["network_ms"] == 0 < cycles["none"]["target_ms"]
    assert min(cycles["eagle3, chain of 3"][part] for part in ("network_ms", "target_ms", "outside_ms")) > 0


def test_what_graphs_consist_of(tmp_path, tapes, monkeypatch):
    monkeypatch.setattr(benchmark, "WAYS_NODES", (1, 16))
    # There are no kernels that could.
    monkeypatch.setattr(benchmark.launching, "launches_early", lambda tensor: True)
    parts = ("kernels of a verification", "ways of", "kernels of a draft: eagle3, chain", "captures", "memory")
    report = run_here(monkeypatch, tmp_path / "out.json", "--parts", *parts)
    assert [part["status"] for part in report["parts"]] == ["passed"] * 6, report["parts"]
    kernels = table(report, "kernels")
    assert {row["of"] for row in kernels} == {"verification of 16 nodes", "eagle3, chain of 3"}
    assert all(row["ms"] > 0 for row in kernels)
    assert {row["nodes"] for row in table(report, "ways of a forward")} == {1, 16}
    first, *others = table(report, "first calls and captures")
    assert first["captures"] + others[0]["captures"] > others[-1]["captures"] == 0
    assert table(report, "memory of graphs")[0]["graphs"] > 0


def test_kernels_by_themselves_and_a_run_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "tree_attention_triton", layer_references.tree_attention)
    path, parts = tmp_path / "out.json", ["attention", "products", "drawn tokens", "tests, kernels"]
    late = run_here(monkeypatch, path, "--parts", *parts, "--max-minutes", 0)
    assert late["exit_code"] == benchmark.EXIT_INCOMPLETE
    assert {part["detail"] for part in late["parts"]} == {benchmark.LATE}
    report = run_here(monkeypatch, path, "--parts", *parts, "--resume")
    assert report["exit_code"] == 0
    found = {part["part"]: part["status"] for part in report["parts"]}
    assert found == {"models": "passed", **dict.fromkeys(parts[:3], "passed"), "tests, kernels": "skipped"}
    assert all(row["torch_us"] > 0 for part in parts[:3] for row in table(report, part))
    again = run_here(monkeypatch, path, "--parts", *parts, "--resume")
    assert len(table(again, "products")) == len(table(report, "products"))


def test_wrong_texts_are_seen(target):
    batches = make_batches(demo.load_tokenizer(), demo.prompts()[-1:], 1, 8)
    settings = {"method": "medusa", "model": demo.drafter_path("medusa"), "num_speculative_tokens": 3}
    assert gpu_checks.check_text("right", target, settings, batches)["ties"] == 0
    with pytest.raises(AssertionError, match="wrong: bug in "):
        gpu_checks.check_text("wrong", target, settings | gpu_models.synthetic(4.0), batches)


def test_smoke_on_graphs(tmp_path, tapes, monkeypatch):
    every = gpu_checks.drafts()
    few = {name: every[name] for name in ("ngram, tree", "mtp, tree")}
    monkeypatch.setattr(benchmark, "drafts", lambda: few)
    report = run_here(monkeypatch, tmp_path / "out.json", "--smoke")
    assert [part["status"] for part in report["parts"]] == ["passed", "passed", "skipped"]
    assert {row["graphs"] for row in table(report, "texts")} == {"on"}


@slow
def test_all_ways_of_decoding_and_all_texts(tmp_path, monkeypatch):
    parts = ("decoding", "texts, lean")
    report = run_here(monkeypatch, tmp_path / "out.json", "--batch-sizes", 1, "--parts", *parts)
    assert not [part for part in report["parts"] if part["status"] == "failed"]
    sides = {row["side"] for row in table(report, "decoding")}
    assert {drafter.name for drafter in gpu_models.DRAFTERS} <= sides
    assert len(table(report, "texts")) == len(gpu_checks.drafts())


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, gpu, monkeypatch):
    parts = ("texts, quick", "decoding, batch 1: ", "kernels of a verification", "attention")
    report = run_here(monkeypatch, tmp_path / "out.json", "--batch-sizes", 1, "--parts", *parts, device=str(gpu))
    assert not [part for part in report["parts"] if part["status"] == "failed"]
