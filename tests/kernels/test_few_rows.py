"""Products over few rows: those of torch, up to the order of the sums, in every shape, dtype and number of threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from hf_specdec.kernels import few_rows
from hf_specdec.kernels._triton import DTYPES
from hf_specdec.kernels.few_rows import linears
from tests.helpers.levels import in_full, split


pytest.importorskip("numba")

SIZES = st.integers(1, 70) | st.sampled_from([128, 300])


def takes(x, weight, bias=None):
    return few_rows.takes(x, [(weight, bias)])


def linear(x, weight, bias=None, in_tiles=False):
    return linears(x, [(weight, bias)], in_tiles)


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


@pytest.mark.parametrize("dtype", split(DTYPES, DTYPES[::2]), ids=str)
@given(rows=st.integers(1, 20), inputs=SIZES, outputs=SIZES, has_bias=st.booleans(), seed=st.integers(0, 99))
def test_any_product(dtype, rows, inputs, outputs, has_bias, seed):
    x, weight = random(rows, inputs, dtype=dtype, seed=seed), random(outputs, inputs, dtype=dtype, seed=seed + 1)
    bias = random(outputs, dtype=dtype, seed=seed + 2) if has_bias else None
    assert takes(x, weight, bias)
    assert_rounded(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("threads", [2, *in_full(1)])
def test_large_matrices_side_by_side(threads):
    """More than a thread takes at a time."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in DTYPES[::2]:
            x, sizes = random(2, 3, 640, dtype=dtype, seed=0), (64, 1, 555, 800)
            weights = [random(size, 640, dtype=dtype, seed=size) for size in sizes]
            biases = [random(size, dtype=dtype, seed=size) if size % 2 else None for size in sizes]
            found = linears(x, list(zip(weights, biases)))
            assert found.shape == (2, 3, sum(sizes))
            for part, weight, bias in zip(found.split(sizes, dim=-1), weights, biases, strict=True):
                assert torch.equal(part, linear(x, weight, bias))
                assert_rounded(part, x, weight, bias)
    finally:
        torch.set_num_threads(before)


@given(
    rows=st.integers(1, 70) | st.integers(257, 300),
    depth=st.integers(1, 12),
    outputs=st.integers(16, 100),
    more=st.integers(16, 40),
    has_bias=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_any_product_in_tiles(rows, depth, outputs, more, has_bias, threads, seed):
    """With AMX, whose tiles torch uses, too: neither disturbs the other."""
    dtype, inputs = torch.bfloat16, 32 * depth
    x, weight = random(rows, inputs, dtype=dtype, seed=seed), random(outputs, inputs + 7, dtype=dtype, seed=seed + 1)
    weight, other = weight[:, 3 : 3 + inputs], random(more, inputs, dtype=dtype, seed=seed + 3)
    bias = random(outputs, dtype=dtype, seed=seed + 2) if has_bias else None
    if not few_rows.fits_tiles([(weight, bias), (other, None)]):
        pytest.skip("needs a processor with AMX")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = F.linear(x, other)
        for _ in range(2):
            first, second = linears(x, [(weight, bias), (other, None)], in_tiles=True).split([outputs, more], dim=-1)
            assert_rounded(first, x, weight, bias)
            assert_rounded(second, x, other, None)
            assert torch.equal(F.linear(x, other), expected)
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_tiles():
    weight = torch.ones(16, 32).bfloat16()
    for left in (weight.float(), weight[:, :31], weight[:, :16], weight[:15]):
        assert not few_rows.fits_tiles([(left, None)])
    assert not few_rows.fits_tiles([(weight, None), (weight[:15], None)])
    # A row does not see others, of which some are not numbers, and numbers that are none stay none.
    if few_rows.fits_tiles([(weight, None)]):
        x = torch.ones(7, 32).bfloat16()
        x[2, 5], x[4, 31] = torch.nan, torch.inf
        found = linear(x, weight, in_tiles=True)
        assert found[2].isnan().all()
        assert found[4].isposinf().all()
        assert (found[[0, 1, 3, 5, 6]] == 32).all()


def test_strides_shapes_and_numbers_that_are_none():
    for dtype in DTYPES[::2]:
        x, weight = random(40, 6, dtype=dtype, seed=0).t(), random(9, 100, dtype=dtype, seed=1)[2:, 5:45]
        assert not x.is_contiguous()
        assert takes(x, weight)
        found = linear(x, weight)
        assert torch.equal(found, linear(x.contiguous(), weight.contiguous()))
        for shape in ((6, 40), (2, 3, 40), (1, 1, 6, 40)):
            assert torch.equal(linear(x.reshape(shape), weight), found.view(*shape[:-1], 7))
        assert torch.equal(linear(x[0], weight), linear(x[:1], weight)[0])
        # With another default device.
        with torch.device("meta"):
            assert torch.equal(linear(x, weight), found)
        x, weight = torch.zeros(3, 33, dtype=dtype), torch.ones(4, 33, dtype=dtype)
        x[0, 0], x[1, 32], x[2, 5] = torch.nan, torch.inf, -torch.inf
        found = linear(x, weight)
        assert found[0].isnan().all()
        assert found[1].isposinf().all()
        assert found[2].isneginf().all()


def test_what_is_left_to_torch(monkeypatch):
    x, weight = torch.ones(2, 8), torch.ones(3, 8)
    assert takes(x, weight)
    left = [
        (torch.ones(0, 8), weight),
        (x, weight.to_sparse_csr()),
        (x, TwoTensor(weight, weight)),
        (x, weight, torch.ones(1)),
        (x.double(), weight.double()),
        (x.bfloat16(), weight),
        (x, torch.ones(8, 3).t()),
        (x, weight.to("meta")),
        (x, weight, torch.ones(3).bfloat16()),
        (x, torch.ones(3, 4)),
        (x, torch.nn.Parameter(weight)),
    ]
    assert [takes(*given) for given in left] == [False] * len(left)
    with torch.no_grad():
        assert takes(*left[-1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not takes(x, weight)
    monkeypatch.setattr(few_rows, "has_kernel", lambda dtype: False)
    assert not takes(x, weight)
