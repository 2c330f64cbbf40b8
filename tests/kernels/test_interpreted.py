"""Runs the tests of the kernels in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs in the interpreter already")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_in_the_interpreter(which):
    """All that take the device "cpu", in one process."""
    pytest.importorskip("triton")
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", f"not gpu and {which}", "-k", "cpu"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, Path(__file__).parent],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
