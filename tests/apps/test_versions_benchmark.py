"""`benchmarks/overhead.py --against`: two versions asked in turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import versions
from rich.console import Console


class Answering:
    """A worker that takes the given seconds, one after the other, the warm-up first."""

    def __init__(self, seconds, texts=((1, 2),), cycles=4, log=None, name=""):
        self.seconds, self.texts, self.cycles = list(seconds), list(map(list, texts)), cycles
        self.log, self.name = log, name

    def run(self, side, batch_size):
        if self.log is not None:
            self.log.append(self.name)
        return {"seconds": self.seconds.pop(0), "cycles": self.cycles, "texts": self.texts}


def test_ratios_are_those_of_a_round():
    log = []
    workers = [Answering([9, 1, 3, 4], log=log, name="this"), Answering([9, 2, 2, 4], log=log, name="other")]
    found = versions._compare_side(workers, "ngram", 1, rounds=3)
    assert found.ratio == [1.0, 0.5, 1.5]
    assert found.cycle_ms == 250.0
    assert found.same_texts
    # Each begins in turn.
    assert log == ["this", "other"] + ["this", "other", "other", "this", "this", "other"]


@pytest.mark.parametrize("change", [{"texts": [(1, 3)]}, {"cycles": 5}])
def test_other_texts_are_said(change):
    workers = [Answering([1, 1]), Answering([1, 1], **change)]
    found = versions._compare_side(workers, "ngram", 1, rounds=1)
    assert not found.same_texts
    console = Console(width=120)
    with console.capture() as capture:
        console.print(versions._table([found], Path("before"), 1))
    assert "NO" in capture.get()


def test_folders_without_a_version(tmp_path):
    with pytest.raises(SystemExit, match="--against wants a folder that holds a version of hf_specdec, got "):
        versions.compare(tmp_path, 1, 24, Console())


def test_a_version_that_fails(tmp_path):
    """The message goes to stderr; the comparison ends."""
    package = tmp_path / "hf_specdec"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('broken')")
    worker = versions.Worker(tmp_path, 24, [[1]])
    with pytest.raises(SystemExit, match="has failed"):
        worker.run("ngram", 1)
    worker.close()
