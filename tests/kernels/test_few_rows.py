"""Products over few rows: those of torch, up to the order of the sums, in every shape, dtype and number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from hf_specdec.kernels import few_rows
from hf_specdec.kernels.few_rows import DTYPES, linear, linears, takes


numba = pytest.importorskip("numba")
llvm = pytest.importorskip("llvmlite.binding")

SIZES = st.integers(1, 70) | st.sampled_from([128, 300])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(found, x, weight, bias):
    """Every number is the exact one, rounded to the dtype, but for what sums in float32 lose."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    lost = terms * torch.finfo(torch.float32).eps * (8 + x.shape[-1] / 4)
    rounding = exact.abs() * torch.finfo(found.dtype).eps / 2 if found.dtype != torch.float32 else 0
    # The smallest numbers of float16 are further apart than its precision says.
    least = torch.finfo(found.dtype).tiny * torch.finfo(found.dtype).eps
    assert found.dtype == weight.dtype
    assert bool(((found.double() - exact).abs() <= lost + rounding + least).all())


@every_dtype
@settings(max_examples=60)
@given(rows=st.integers(1, 20), inputs=SIZES, outputs=SIZES, has_bias=st.booleans(), seed=st.integers(0, 99))
def test_any_product(dtype, rows, inputs, outputs, has_bias, seed):
    x, weight = random(rows, inputs, dtype=dtype, seed=seed), random(outputs, inputs, dtype=dtype, seed=seed + 1)
    bias = random(outputs, dtype=dtype, seed=seed + 2) if has_bias else None
    assert takes(x, weight, bias)
    assert_rounded(linear(x, weight, bias), x, weight, bias)


@every_dtype
def test_large_matrices(dtype, threads):
    x, weight = random(5, 1000, dtype=dtype, seed=0), random(3001, 1000, dtype=dtype, seed=1)
    assert_rounded(linear(x, weight), x, weight, None)


@every_dtype
def test_several_matrices_side_by_side(dtype, threads):
    x = random(2, 3, 640, dtype=dtype, seed=0)
    matrices = [(random(n, 640, dtype=dtype, seed=n), random(n, dtype=dtype, seed=n) if n % 2 else None) for n in
                (64, 1, 555, 800)]  # fmt: skip
    found = linears(x, matrices)
    assert found.shape == (2, 3, 64 + 1 + 555 + 800)
    for part, matrix in zip(found.split([len(weight) for weight, _ in matrices], dim=-1), matrices, strict=True):
        assert torch.equal(part, linear(x, *matrix))


@every_dtype
def test_strides(dtype):
    x, weight = random(40, 6, dtype=dtype, seed=0).t(), random(9, 100, dtype=dtype, seed=1)[2:, 5:45]
    assert not x.is_contiguous()
    assert takes(x, weight)
    assert torch.equal(linear(x, weight), linear(x.contiguous(), weight.contiguous()))


def test_shapes_of_x():
    weight = random(7, 20, dtype=torch.float32, seed=0)
    for shape in ((20,), (1, 20), (2, 3, 20), (1, 1, 4, 20)):
        assert linear(random(*shape, dtype=torch.float32, seed=1), weight).shape == (*shape[:-1], 7)


@every_dtype
def test_what_is_no_number(dtype):
    x, weight = torch.zeros(3, 33, dtype=dtype), torch.ones(4, 33, dtype=dtype)
    x[0, 0], x[1, 32], x[2, 5] = torch.nan, torch.inf, -torch.inf
    found = linear(x, weight)
    assert found[0].isnan().all()
    assert found[1].isposinf().all()
    assert found[2].isneginf().all()


def test_halves_are_rounded_to_even():
    # 1 + 2^-8 lies between two numbers of bfloat16, and so does 1 + 3 * 2^-8.
    x = torch.tensor([[1.0, 2**-8], [1.0, 3 * 2**-8]]).bfloat16()
    assert linear(x, torch.ones(1, 2).bfloat16()).flatten().tolist() == [1.0, 1.015625]


def test_whatever_the_default_device_is():
    x, weight = random(4, 50, dtype=torch.float32, seed=0), random(90, 50, dtype=torch.float32, seed=1)
    expected = linear(x, weight)
    with torch.device("meta"):
        assert torch.equal(linear(x, weight), expected)


def test_calls_of_several_threads():
    x, weight = random(4, 500, dtype=torch.float32, seed=0), random(900, 500, dtype=torch.float32, seed=1)
    expected = linear(x, weight)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: linear(x, weight), range(40)):
            assert torch.equal(found, expected)


def test_what_is_left_to_torch(monkeypatch):
    x, weight = torch.ones(2, 8), torch.ones(3, 8)
    assert takes(x, weight)
    assert not takes(torch.ones(0, 8), weight)
    assert not takes(x, weight.to_sparse_csr())
    assert not takes(x, TwoTensor(weight, weight))
    assert not takes(x, weight, torch.ones(1))
    assert not takes(x.double(), weight.double())
    assert not takes(x.bfloat16(), weight)
    assert not takes(x, torch.ones(8, 3).t())
    assert not takes(x, weight.to("meta"))
    assert not takes(x, weight, torch.ones(3).bfloat16())
    assert not takes(x, torch.ones(3, 4))
    parameter = torch.nn.Parameter(weight)
    assert not takes(x, parameter)
    with torch.no_grad():
        assert takes(x, parameter)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not takes(x, weight)
    monkeypatch.setattr(few_rows, "has_kernel", lambda dtype: False)
    assert not takes(x, weight)


PRODUCTS = """
import sys
import torch
from hf_specdec.kernels import few_rows

def check(dtype, rows=5):
    x, weight, bias = torch.randn(rows, 100).to(dtype), torch.randn(70, 100).to(dtype), torch.randn(70).to(dtype)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert few_rows.takes(x, weight, bias)
    torch.testing.assert_close(few_rows.linear(x, weight, bias), exact.to(dtype))
"""


def start(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", PRODUCTS + code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process):
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output, errors


@pytest.mark.parametrize(("lanes", "missing"), [(8, ("avx512", "avx10")), (4, ("avx", "fma", "f16c"))], ids=[8, 4])
def test_vectors_of_the_width_that_numba_compiles_for(lanes, missing):
    features = llvm.get_host_cpu_features()
    if not features.get({8: "avx512f", 4: "avx2"}[lanes]):
        pytest.skip("Vectors of this processor are no wider.")
    flattened = [f"{'+' if has and not name.startswith(missing) else '-'}{name}" for name, has in features.items()]
    code = """
from hf_specdec.kernels import _few_rows
for dtype in filter(few_rows.has_kernel, few_rows.DTYPES):
    for rows in range(1, 8):
        check(dtype, rows)
print(_few_rows.LANES)
"""
    assert output_of(start(code, NUMBA_CPU_FEATURES=",".join(flattened)))[0] == f"{lanes}\n"


def test_first_uses_at_once_and_code_on_disk(tmp_path):
    at_once = """
from concurrent.futures import ThreadPoolExecutor
from hf_specdec.kernels import _few_rows
compiled, entry = [], _few_rows.entry
_few_rows.entry = lambda dtype: compiled.append(dtype) or entry(dtype)
with ThreadPoolExecutor(4) as pool:
    list(pool.map(check, [torch.float32] * 4))
print(len(compiled))
"""
    for process in [start(at_once, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]:
        assert output_of(process)[0] == "1\n"
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")}
    assert len(files) == 2
    later = """
from numba.core import event
compilations = event.RecordingListener()
event.register("numba:compile", compilations)
check(torch.float32)
print(len(compilations.buffer))
"""
    assert output_of(start(later, NUMBA_CACHE_DIR=str(tmp_path)))[0] == "0\n"
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.nb?")} == files


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_waits_for_what_another_thread_compiles(tmp_path):
    code = """
import os, threading, time
thread = threading.Thread(target=check, args=[torch.float32])
thread.start()
while few_rows._compiling.acquire(blocking=False):
    few_rows._compiling.release()
    time.sleep(0.001)
child = os.fork()
torch.set_num_threads(1)
if child:
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
for dtype in (torch.float32, torch.bfloat16):
    check(dtype)
sys.stdout.flush()
os._exit(0)
"""
    output_of(start(code, NUMBA_CACHE_DIR=str(tmp_path)))


def test_folders_that_cannot_be_written_to(monkeypatch, tmp_path):
    """The folder of the user is the next after that of the package; without any the code is compiled all the same."""
    read_only = [str(Path(few_rows.__file__).parent)]
    temporary_file = tempfile.TemporaryFile

    def file_in(*args, dir, **kwargs):
        if dir.startswith(tuple(read_only)):
            raise PermissionError(dir)
        return temporary_file(*args, dir=dir, **kwargs)

    monkeypatch.setattr(tempfile, "TemporaryFile", file_in)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x, weight = random(3, 50, dtype=torch.float32, seed=0), random(20, 50, dtype=torch.float32, seed=1)
    expected = linear(x, weight)
    for num_files in (2, 2):
        monkeypatch.setattr(few_rows, "_kernels", {})
        assert torch.equal(linear(x, weight), expected)
        assert len(list(tmp_path.rglob("*.nb?"))) == num_files
        read_only.append(str(tmp_path))


def test_numba_is_imported_when_it_is_needed_and_torch_serves_without_it():
    code = """
import hf_specdec.loader
from hf_specdec.kernels.products import prepare_products
prepare_products(torch.nn.Linear(8, 8))
assert "numba" not in sys.modules
sys.modules["numba"] = None
large = torch.nn.Linear(1000, 1000)
for _ in range(2):
    prepare_products(large)
    assert not few_rows.takes_weight(large.weight)
"""
    _, errors = output_of(start(code))
    assert errors.count("numba cannot be imported") == 1
