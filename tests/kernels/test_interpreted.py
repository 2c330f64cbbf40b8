"""Runs the tests of the kernels in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.levels import in_full


@pytest.mark.parametrize("level", ["not full", *in_full("full")])
def test_device_tests_pass_in_the_interpreter(level):
    """All that take the device "cpu", but not this one again."""
    pytest.importorskip("triton")
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", f"--ignore={__file__}", "-k", "cpu"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-m", f"{level} and not slow and not gpu", Path(__file__).parent],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
