"""Runs the tests of the kernels in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.levels import in_full


# The full ones in two processes, each a test that one worker runs.
ATTENTION = ["test_tree_attention.py", "test_generate.py"]


@pytest.mark.parametrize(("level", "part"), [("short", "all"), *in_full(("full", "attention"), ("full", "others"))])
def test_device_tests_pass_in_the_interpreter(level, part):
    """All that take the device "cpu"."""
    pytest.importorskip("triton")
    folder = Path(__file__).parent
    files = [folder / name for name in ATTENTION] if part == "attention" else [folder]
    ignored = [f"--ignore={folder / name}" for name in ATTENTION] if part == "others" else []
    chosen = "full and not slow and not gpu" if level == "full" else "not full and not slow and not gpu"
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", chosen, "-k", "cpu", *ignored]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
