"""Code that numba compiles: once for all threads and processes, kept on disk; and what runs where numba is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hf_specdec.kernels.compiled import compiled
from tests.helpers.levels import full, slow
from tests.helpers.paths import ROOT


numba = pytest.importorskip("numba")
llvm = pytest.importorskip("llvmlite.binding")

PRODUCTS = """
import sys
import torch
from hf_specdec.kernels import few_rows

def check(dtype, rows=5):
    x, weight, bias = torch.randn(rows, 100).to(dtype), torch.randn(70, 100).to(dtype), torch.randn(70).to(dtype)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert few_rows.takes(x, [(weight, bias)])
    torch.testing.assert_close(few_rows.linears(x, [(weight, bias)]), exact.to(dtype))
"""
SCANS = """
import numpy as np
from hf_specdec.candidate_generators.recycling.generator import SuccessorTable
from hf_specdec.drafts import TokenTree
from hf_specdec.kernels import text

tokens = np.random.default_rng(0).integers(0, 5, 500).astype(np.int32)
table = SuccessorTable(5)
table.learn_text(tokens.tolist())
answers = repr([text.best_matches(tokens[:size], 4, limit, first) for size in (0, 1, 200, 500) for limit in (2, 500)
                for first in (False, True)])
answers += repr((table.successors.tolist(), table.fill(TokenTree.from_paths([(0,), (1,), (0, 4), (1, 0)]), 3)))
"""


def start(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def output_of(process, seconds=300):
    """What a process has printed; one that hangs is killed with its children."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"The process was still running after {seconds} s: {process.communicate()[1]}")
    assert process.returncode == 0, errors
    return output, errors


@full
def test_without_numba_torch_and_python_compute_and_one_warning_says_so():
    """It is imported when it is needed, and not before."""
    code = """
import hf_specdec.loader
from hf_specdec.kernels.products import has_large_matrices
assert not has_large_matrices(torch.nn.Linear(8, 8))
assert "numba" not in sys.modules
sys.modules["numba"] = None
for _ in range(2):
    assert not has_large_matrices(torch.nn.Linear(1000, 1000))
"""
    output, errors = output_of(start(PRODUCTS + code + SCANS + "print(answers)"))
    known = {}
    exec(SCANS, known)
    assert output == known["answers"] + "\n"
    assert errors.count("numba cannot be imported") == 1
    assert "pip install numba" in errors


@slow
@pytest.mark.parametrize(("lanes", "missing"), [(4, ("avx", "fma", "f16c", "amx")), (8, ("avx512", "avx10"))])
def test_vectors_of_the_width_that_numba_compiles_for(lanes, missing):
    features = llvm.get_host_cpu_features()
    if not features.get({8: "avx512f", 4: "avx2"}[lanes]):
        pytest.skip("Vectors of this processor are no wider.")
    flattened = [f"{'+' if has and not name.startswith(missing) else '-'}{name}" for name, has in features.items()]
    code = """
from hf_specdec.kernels import _few_rows
for dtype in (torch.float32, torch.bfloat16):
    for rows in range(1, 7):
        check(dtype, rows)
matrix = torch.ones(16, 32).bfloat16()
assert _few_rows.LANES > 4 or not few_rows.fits_tiles([(matrix, None)])
print(_few_rows.LANES)
"""
    assert output_of(start(PRODUCTS + code, NUMBA_CPU_FEATURES=",".join(flattened)))[0] == f"{lanes}\n"


@slow
def test_threads_and_processes_share_what_one_has_compiled(tmp_path):
    at_once = """
from concurrent.futures import ThreadPoolExecutor
from hf_specdec.kernels import _few_rows
compiled, entry = [], _few_rows.entry
_few_rows.entry = lambda dtype: compiled.append(dtype) or entry(dtype)
with ThreadPoolExecutor(4) as pool:
    list(pool.map(check, [torch.float32] * 4))
print(len(compiled), answers)
"""
    started = [start(PRODUCTS + SCANS + at_once, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    first, second = (output_of(process)[0] for process in started)
    assert first == second
    assert first.startswith("1 ")
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")}
    assert files
    later = """
check(torch.float32)
print(len(compilations.buffer), answers)
"""
    events = """
from numba.core import event
compilations = event.RecordingListener()
event.register("numba:compile", compilations)
"""
    third = output_of(start(PRODUCTS + events + SCANS + later, NUMBA_CACHE_DIR=str(tmp_path)))[0]
    assert third == "0 " + first.removeprefix("1 ")
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")} == files


@full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_for_what_another_thread_compiles():
    """What is compiled is small, and no thread computes: OpenMP may hang in children of its processes."""
    code = """
import os, threading
import numba, torch
from hf_specdec.kernels import _few_rows, few_rows

def entry(dtype):
    is_inside.set()
    return numba.njit("int64(int64)")(lambda number: 2 * number)

_few_rows.entry, is_inside = entry, threading.Event()
thread = threading.Thread(target=few_rows._kernel, args=[torch.float32])
thread.start()
assert is_inside.wait(30)
child = os.fork()
if not child:
    is_there = torch.float32 in few_rows._kernels
    os._exit(0 if is_there and few_rows._kernel(torch.bfloat16)[0](4) == 8 else 1)
assert os.waitpid(child, 0)[1] == 0
thread.join()
assert few_rows._kernel(torch.float32)[0](4) == 8
"""
    output_of(start(code), seconds=60)


def double(number):
    return 2 * number


def test_code_that_cannot_be_kept_is_compiled_all_the_same(monkeypatch):
    """There is no room, or no folder that can be written to."""

    def no_room(*arguments):
        raise OSError("No space left on device")

    for name, fault in (("IndexDataCacheFile.save", no_room), ("CacheImpl._locator_classes", [])):
        monkeypatch.setattr(f"numba.core.caching.{name}", fault)
        assert compiled("int64(int64)")(double)(4) == 8
