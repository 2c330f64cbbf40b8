"""Runs the tests of each kernel in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


HERE = Path(__file__).parent
FILES = sorted({path.name for path in HERE.glob("test_*.py")} - {"test_interpreted.py", "test_dispatch.py"})


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs in the interpreter already")
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file):
    pytest.importorskip("triton")
    options = ["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not gpu and not slow"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, HERE / file],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
