"""Matches of the end of a text: the kernel says what a comparison token by token says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.kernels.matches import _lengths_torch, _lengths_triton
from tests.kernels.conftest import every_gpu


@st.composite
def texts_of_rows(draw):
    """Few different tokens, so that they match; after the rows' ends lies anything."""
    size = draw(st.one_of(st.integers(1, 12), st.just(300)))
    token = st.integers(0, draw(st.integers(0, 2)))
    rows = [draw(st.lists(token, min_size=size, max_size=size)) for _ in range(draw(st.integers(1, 3)))]
    lengths = [draw(st.integers(0, size)) for _ in rows]
    return torch.tensor(rows), torch.tensor(lengths), draw(st.sampled_from([1, 3, 64]))


def compared(texts, lengths, most):
    found = torch.zeros_like(texts)
    for row, (text, length) in enumerate(zip(texts.tolist(), lengths.tolist())):
        for place in range(length - 1):
            while found[row, place] < min(most, place + 1):
                back = int(found[row, place])
                if text[place - back] != text[length - 1 - back]:
                    break
                found[row, place] += 1
    return found


@given(texts_of_rows())
def test_reference(case):
    assert torch.equal(_lengths_torch(*case), compared(*case))


@pytest.mark.smoke
def test_a_text_of_many_blocks(device):
    texts = torch.randint(0, 3, (2, 2500), generator=torch.Generator().manual_seed(0))
    texts[0, 2000:2300] = texts[0, 100:400]
    lengths = torch.tensor([2300, 2499])
    found = _lengths_triton(texts.to(device), lengths.to(device), 64).cpu()
    assert torch.equal(found, _lengths_torch(texts, lengths, 64))
    assert found[0, 399] == 64


@every_gpu
def test_kernel_compiles(compile_for):
    with compile_for():
        _lengths_triton(torch.zeros((2, 1025), dtype=torch.long), torch.full((2,), 900), 64)
