"""Launches of a cycle, as benchmarks/launches.py counts them: within the aims, and no more than there have been."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.models import tiny_llama
from tests.other_device import DEVICE, move, other_device


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

pytest.importorskip("triton")

import launches
from launches import AIMS, DEMO, Counts, LaunchCounter


# By model, method and batch: kernels of a layer, in the graphs of the drafter and outside of graphs; uploads, replays.
COUNTS = {
    (DEMO, "ngram", 8): (12, 0, 2, 2, 1),
    (DEMO, "eagle3", 1): (12, 426, 8, 2, 2),
    (DEMO, "eagle3", 8): (12, 165, 8, 2, 2),
    (DEMO, "draft_model", 8): (12, 239, 4, 3, 2),
    ("qwen3", "ngram", 1): (12, 0, 2, 2, 1),
    ("gemma2", "ngram", 1): (12, 0, 2, 2, 1),
}


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """The check of a class of models waits in a cycle, once in a process."""
    monkeypatch.setenv("HF_SPECDEC_CHECK", "0")


@pytest.mark.parametrize("case", COUNTS, ids=lambda case: " ".join(map(str, case)))
def test_a_cycle_launches_no_more_than_before(case):
    row, cycles = launches.count(*case)
    assert len(cycles) >= 3
    found = (row.per_layer, row.draft, row.outside, row.uploads, row.replays)
    assert all(one <= other for one, other in zip(found, COUNTS[case])), found
    assert row.copies_to_host == row.waits == 1
    # The one wait is for the verdict.
    assert set(row.missed) == {"waits"}


def test_operations_count_as_their_kernels():
    with other_device() as waits, LaunchCounter(waits).attached(tiny_llama()) as counter:
        numbers, found = move(torch.ones(2, 4, 6, 16)), Counts()
        with counter.into(found):
            numbers.transpose(1, 2).reshape(2, 24, 16)[:, 1:]
            (numbers + 1).sort()
            torch.empty(3, device=DEVICE)
            torch.nn.functional.scaled_dot_product_attention(numbers, numbers, numbers, is_causal=True)
            torch.arange(3, device=DEVICE)
            torch.ones(3) + torch.ones(3)
            torch.tensor([1]).to(DEVICE, non_blocking=True)
        with counter.into(None):
            numbers + 1
    assert found.kernels == {"clone": 1, "add": 1, "sort": 3, "scaled_dot_product_attention": 1, "arange": 1}
    assert found.uploads == 1
    assert not waits


def test_figures_in_a_file(tmp_path, monkeypatch):
    file = tmp_path / "launches.json"
    monkeypatch.setattr(sys, "argv", ["launches.py", "--models", "llama", "--json", str(file)])
    launches.main()
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["aims"] == AIMS
    [row] = content["rows"]
    assert {"model", "method", "batch", "draft", *AIMS} <= row.keys()
    assert (row["model"], row["method"], row["batch"]) == ("llama", "ngram", 1)
