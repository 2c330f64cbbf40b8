"""The best tokens: the kernel finds what torch finds, the first of equal ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.kernels.best import _best_triton, _ranked_triton, best_log_probs, best_tokens
from tests.helpers.levels import full
from tests.kernels.conftest import every_gpu


@pytest.mark.smoke
def test_best_of_a_large_vocabulary(device):
    """Rows that are parts of wider ones, with equal scores and nothing possible; what is no number is not ranked."""
    scores = torch.randn((2, 2, 130000), generator=torch.Generator().manual_seed(0))
    scores[0, 1, 129999] = scores[1, 1, 70000] = scores[1, 1, 90000] = 50
    scores[1, 0, 5] = torch.nan
    expected = scores[1:, :1].nan_to_num(-torch.inf).log_softmax(-1).topk(10)
    # Twice: the first launch leaves nothing behind.
    for _ in range(2):
        values, tokens = _ranked_triton(scores[1:, :1].to(device), 10)
        assert torch.equal(tokens.cpu(), expected[1])
        torch.testing.assert_close(values.cpu(), expected[0], rtol=1e-4, atol=1e-4)
    scores[0, 0] = -torch.inf
    for width in (130000, 128256):
        part = scores[..., :width]
        assert torch.equal(_best_triton(part.to(device)).cpu(), part.argmax(-1))


@full
@given(
    rows=st.integers(1, 3),
    vocab_size=st.sampled_from([3, 40, 2048, 2050, 5000]),
    count=st.integers(1, 10),
    numbers=st.sampled_from([2, 10**6]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_ranked_tokens(device, rows, vocab_size, count, numbers, dtype, seed):
    """Also of few different numbers, and where most tokens are impossible."""
    count, generator = min(count, vocab_size), torch.Generator().manual_seed(seed)
    logits = (torch.randint(numbers, (rows, vocab_size), generator=generator) / numbers * 8).to(dtype)
    logits[-1, 1:] = -torch.inf
    values, tokens = (found.cpu() for found in _ranked_triton(logits.to(device), count))
    every = logits.float().log_softmax(-1)
    expected, _ = every.topk(count)
    for found in (values, every.gather(1, tokens)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # Of equal ones the first.
    for row, best in zip(every.tolist(), tokens.tolist()):
        assert best == sorted(range(vocab_size), key=lambda token: (-row[token], token))[:count]


def test_public_functions():
    for shape in ((5,), (2, 3, 5)):
        scores = torch.randn(shape).bfloat16()
        assert torch.equal(best_tokens(scores), scores.argmax(-1))
        values, tokens = best_log_probs(scores, 2)
        assert torch.equal(values, scores.float().log_softmax(-1).gather(-1, tokens))
        assert torch.equal(tokens[..., 0], scores.argmax(-1))


@every_gpu
def test_kernels_compile(compile_for):
    with compile_for() as kernels:
        _best_triton(torch.empty((16, 128256), dtype=torch.bfloat16))
        for vocab_size in (32000, 151936):
            _ranked_triton(torch.empty((1, 10, vocab_size), dtype=torch.bfloat16), 10)
    assert len(kernels) == 3
