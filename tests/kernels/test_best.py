"""The best tokens: the kernel finds what torch finds, the first of equal ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.kernels.best import _best_triton, _ranked_triton, best_log_probs, best_tokens


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 3),
    vocab_size=st.sampled_from([1, 7, 2048, 4097, 9000]),
    numbers=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_kernel(device, rows, vocab_size, numbers, dtype, seed):
    """Few different numbers, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-numbers, 1, (rows, vocab_size), generator=generator).to(dtype)
    scores[scores == -1] = -torch.inf
    found = _best_triton(scores.to(device))
    assert found.dtype == torch.long
    assert torch.equal(found.cpu(), scores.argmax(-1))


@pytest.mark.smoke
def test_vocabularies_of_many_parts(device):
    """Twice: the first launch leaves nothing behind. Some rows are parts of wider ones."""
    scores = torch.randn((2, 3, 130000), generator=torch.Generator().manual_seed(0))
    scores[0, 1, 129999] = scores[1, 2, 70000] = 50
    scores[1, 0, 5] = torch.nan
    scores[0, 2] = -torch.inf
    for width in (130000, 128256):
        part = scores[..., :width]
        for _ in range(2):
            assert torch.equal(_best_triton(part.to(device)).cpu(), part.argmax(-1))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 3),
    vocab_size=st.sampled_from([3, 40, 2048, 2050, 5000]),
    count=st.integers(1, 10),
    numbers=st.sampled_from([2, 10**6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_ranks(device, rows, vocab_size, count, numbers, dtype, seed):
    """Also of few different numbers, and where most tokens are impossible."""
    count, generator = min(count, vocab_size), torch.Generator().manual_seed(seed)
    logits = (torch.randint(numbers, (rows, vocab_size), generator=generator) / numbers * 8).to(dtype)
    logits[-1, 1:] = -torch.inf
    values, tokens = (found.cpu() for found in _ranked_triton(logits.to(device), count))
    expected, _ = logits.float().log_softmax(-1).topk(count)
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
    every = logits.float().log_softmax(-1)
    torch.testing.assert_close(every.gather(1, tokens), expected, rtol=1e-4, atol=1e-4)
    # Of equal ones the first, and none twice.
    assert all(len(set(row)) == count for row in tokens.tolist())
    for row, best in zip(every.tolist(), tokens.tolist()):
        assert best == sorted(range(vocab_size), key=lambda token: (-row[token], token))[:count]


def test_ranks_of_large_vocabularies(device):
    """Twice: the first launch leaves nothing behind. What is not a number is not drafted."""
    logits = torch.randn((1, 2, 140000), generator=torch.Generator().manual_seed(0))
    logits[0, 1, 7] = torch.nan
    expected = logits.nan_to_num(-torch.inf).log_softmax(-1).topk(10)
    for _ in range(2):
        values, tokens = _ranked_triton(logits.to(device), 10)
        assert torch.equal(tokens.cpu(), expected[1])
        torch.testing.assert_close(values.cpu(), expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)])
def test_on_a_cpu(shape):
    scores = torch.randn(shape).bfloat16()
    assert torch.equal(best_tokens(scores), scores.argmax(-1))
    values, tokens = best_log_probs(scores, 2)
    assert torch.equal(values, scores.float().log_softmax(-1).gather(-1, tokens))
    assert torch.equal(tokens[..., 0], scores.argmax(-1))


@pytest.mark.parametrize("compile_for", [80, 90, 100, 120, "gfx942"], indirect=True)
def test_kernel_compiles(compile_for):
    with compile_for() as kernels:
        _best_triton(torch.empty((16, 128256), dtype=torch.bfloat16))
        for vocab_size in (32000, 151936):
            _ranked_triton(torch.empty((1, 10, vocab_size), dtype=torch.bfloat16), 10)
    assert len(kernels) == 3
