"""Mixers that read a verification's tokens as one chunk of their number."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.decoding.chunks import own_chunks
from hf_specdec.decoding.recurrent import mixers
from hf_specdec.decoding.recurrent_state import RecurrentState
from tests.architectures import tiny_model


# Mixers whose functions read in chunks: the gated delta rule, Mamba-2 beside attention.
CHUNKED = ["qwen3_next", "falcon_h1"]
TOKENS = 5


class _LongestSum(TorchDispatchMode):
    """Sees how many tokens, padding included, a mixer sums up the decays of."""

    def __init__(self):
        super().__init__()
        self.length = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.cumsum.default:
            self.length = max(self.length, args[0].shape[args[1]])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CHUNKED)
def test_a_few_tokens_are_not_padded(name):
    model = tiny_model(name)
    module = mixers(model)[0]
    hidden = torch.randn(2, TOKENS, 64, generator=torch.Generator().manual_seed(0))

    def read() -> tuple[torch.Tensor, RecurrentState, int]:
        state = RecurrentState()
        with torch.no_grad(), _LongestSum() as longest:
            output = module(hidden_states=hidden, cache_params=state, attention_mask=None)
        return output, state, longest.length

    expected, after, padded = read()
    with own_chunks(model, [module]).in_place():
        assert "forward" in vars(module)
        found, own_after, own = read()
    assert "forward" not in vars(module)
    assert (own, own < padded) == (TOKENS, True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    for key, state in after.recurrent_states.items():
        torch.testing.assert_close(own_after.recurrent_states[key], state, rtol=1e-4, atol=1e-3)


def test_calls_share_a_mixer_and_leave_it_as_it_was():
    model = tiny_model("qwen3_next")
    module = mixers(model)[0]
    first, second = (own_chunks(model, [module]).in_place() for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "forward" in vars(module)
    second.__exit__(None, None, None)
    assert "forward" not in vars(module)


@pytest.mark.parametrize("name", ["mamba", "lfm2"])
def test_mixers_without_chunks_and_replaced_forwards_stay(name):
    model = tiny_model(name)
    module = mixers(model)[0]
    with own_chunks(model, [module]).in_place():
        assert "forward" not in vars(module)
    model = tiny_model("qwen3_next")
    chunked = mixers(model)[0]
    chunked.forward = theirs = lambda *args, **kwargs: None
    with own_chunks(model, [chunked]).in_place():
        assert vars(chunked)["forward"] is theirs
    assert vars(chunked)["forward"] is theirs
