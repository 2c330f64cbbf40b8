"""Mixtures of experts: the kernels compute what the references do, and what transformers' own blocks do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from hf_specdec.kernels import _triton, experts
from hf_specdec.kernels.experts import Routing, Shared, mixture_triton
from hf_specdec.kernels.gates import GELU_TANH, SILU
from hf_specdec.layers import experts as layers
from tests.helpers.layer_references import CLOSE, drawn, mixture, to
from tests.helpers.levels import in_full
from tests.kernels.conftest import every_gpu, watched


F32, F16, BF16 = CLOSE
CLOSE_SUMS = {**CLOSE, BF16: {"atol": 6e-2, "rtol": 6e-2}}


def drawn_mixture(dtype, tokens=5, num_experts=6, size=40, inner=24):
    """Hidden states, logits, and weights of both products."""
    shapes = (tokens, size), (tokens, num_experts), (num_experts, 2 * inner, size), (num_experts, size, inner)
    hidden, logits, gate_up, down = (drawn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    return hidden, logits, gate_up * 0.15, down * 0.15


MIXED = Routing(3, normalizes=False, rounds=True)


@pytest.mark.parametrize(
    ("routing", "kind", "tokens", "size", "inner", "dtype"),
    [
        # More than a tile of tokens, columns and depth, none of them whole.
        (Routing(2), SILU, 33, 72, 80, F32),
        (MIXED, GELU_TANH, 5, 40, 24, BF16),
        *in_full((MIXED, SILU, 5, 40, 24, F16), (Routing(1, rounds=True), GELU_TANH, 5, 40, 24, F32)),
        *in_full((Routing(2), SILU, 1, 64, 64, F32), (Routing(2), SILU, 70, 16, 130, BF16)),
    ],
)
def test_mixtures(routing, kind, tokens, size, inner, dtype, device):
    given = drawn_mixture(dtype, tokens, 6, size, inner)
    found = mixture_triton(*to(given, device), routing, kind)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), mixture(*given, routing, kind), **CLOSE_SUMS[dtype])


@pytest.mark.parametrize(("size", "dtype"), [(40, BF16), *in_full((1100, F32), (1100, BF16), (40, F16))])
def test_shared_experts(size, dtype, device):
    """The gate opens for one token and closes for another."""
    given = drawn_mixture(dtype, tokens=2, num_experts=2, size=size)
    hidden, down = given[0], given[3]
    down /= size / 40
    shared = Shared(drawn(2, size, dtype=dtype, seed=4), (hidden[:1] - hidden[1:]) * 2 / size)
    gates = F.linear(hidden, shared.gate).flatten()
    assert gates[0] > 1
    assert gates[1] < -1
    found = mixture_triton(*to(given, device), Routing(1), shared=to(shared, device))
    expected = mixture(*given, Routing(1), shared=shared)
    torch.testing.assert_close(found.cpu(), expected, **CLOSE_SUMS[dtype])


@pytest.mark.smoke
def test_experts_without_tokens_equal_logits_and_logits_without_numbers(device):
    """The first of equal experts is chosen; the weights of the others are not read."""
    hidden, logits, gate_up, down = drawn_mixture(torch.float32)
    logits[:] = torch.tensor([0.0, 2.0, 2.0, 2.0, -1.0, 1.0])
    expected = mixture(hidden, logits + torch.arange(6, 0, -1) * 1e-4, gate_up, down, Routing(2))
    for weights in (gate_up, down):
        weights[[0, 3, 4, 5]] = torch.nan
    found = mixture_triton(*to((hidden, logits, gate_up, down), device), Routing(2))
    torch.testing.assert_close(found.cpu(), expected, atol=1e-3, rtol=1e-3)
    # Experts that there are get a token that chooses none.
    hidden, logits, gate_up, down = to(drawn_mixture(torch.float32), device)
    logits[1] = torch.nan
    found = mixture_triton(hidden, logits, gate_up, down, Routing(2)).cpu()
    assert found[1].isnan().all()
    assert not found[[0, 2, 3, 4]].isnan().any()


def test_blocks_with_shared_experts(device, monkeypatch):
    """Hooks of the shared expert and of its gate run with the whole block; without any, kernels compute both."""
    monkeypatch.setattr(_triton, "CHOICE", "triton")
    sizes = {"hidden_size": 40, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32, "num_experts": 6}
    block = Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**sizes, num_experts_per_tok=2)).to(device)
    for seed, weight in enumerate(block.parameters()):
        weight.data = 0.3 * drawn(*weight.shape, seed=seed).to(device)
    hidden = drawn(1, 5, 40).to(device)
    expected, called, launched = block(hidden), [], watched(monkeypatch, (experts, "mixture_triton"))
    for hooked in ([], [block.shared_expert, block.shared_expert_gate]):
        for part in hooked:
            part.register_forward_hook(lambda part, read, output: called.append(part))
        with torch.no_grad():
            found = layers.MixtureOfExperts.of(block)(hidden)
        assert called == hooked
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert launched == ["mixture_triton"]


@every_gpu
def test_kernels_compile(compile_for, request):
    dtype = torch.float32 if request.node.callspec.params["compile_for"] == 100 else torch.bfloat16
    hidden, logits = torch.empty(64, 2048, dtype=dtype), torch.empty(64, 128, dtype=dtype)
    gate_up = torch.empty(1, 2 * 768, 2048, dtype=dtype).expand(128, -1, -1)
    down = torch.empty(1, 2048, 768, dtype=dtype).expand(128, -1, -1)
    with compile_for() as kernels:
        mixture_triton(hidden, logits, gate_up, down, Routing(8, rounds=True))
        mixture_triton(hidden, logits, gate_up, down, Routing(8, rounds=True), shared=Shared(hidden, hidden[:1]))
    assert len(kernels) == 10
