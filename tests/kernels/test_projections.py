"""Linear layers over the same few tokens: one kernel computes what each of them does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_specdec.kernels import projections
from hf_specdec.kernels.gates import GELU_TANH, SILU
from hf_specdec.kernels.tiles import Gpu
from hf_specdec.layers import llama
from tests.kernels import references
from tests.kernels.conftest import SHARED_MEMORY, watched
from tests.kernels.test_layers import CLOSE, drawn


class Wrapped(torch.Tensor):
    """Weights of another class, as quantised ones are."""


half_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def drawn_linears(dtype, widths, size, has_bias):
    """States of a few tokens, and layers that read them."""
    hidden = drawn(2, 3, size, dtype=dtype)
    weights = [drawn(width, size, dtype=dtype, seed=1 + place) * size**-0.5 for place, width in enumerate(widths)]
    return hidden, [(weight, drawn(len(weight), dtype=dtype, seed=9) if has_bias else None) for weight in weights]


def moved(linears, device):
    return [tuple(part if part is None else part.to(device) for part in linear) for linear in linears]


@half_dtypes
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("widths", "size"), [((64, 64), 128), ((96, 32, 32), 192), ((64, 128, 64), 64)])
def test_products(dtype, has_bias, widths, size, device):
    hidden, linears = drawn_linears(dtype, widths, size, has_bias)
    found = projections.products(hidden.to(device), moved(linears, device))
    for output, linear in zip(found, linears, strict=True):
        assert output.dtype == dtype
        torch.testing.assert_close(output.cpu(), F.linear(hidden, *linear), **CLOSE[dtype])


@half_dtypes
@pytest.mark.parametrize("kind", [SILU, GELU_TANH])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated_products(dtype, kind, has_bias, device):
    hidden, linears = drawn_linears(dtype, (96, 96), 128, has_bias)
    found = projections.gated_product(hidden.to(device), *moved(linears, device), kind)
    expected = references.gated(*(F.linear(hidden, *linear) for linear in linears), kind)
    torch.testing.assert_close(found.cpu(), expected, **CLOSE[dtype])


def test_what_is_taken(device, monkeypatch):
    monkeypatch.setattr(llama._triton, "CHOICE", "triton")
    hidden, linears = drawn_linears(torch.bfloat16, (64, 32), 64, False)
    hidden, linears = hidden.to(device), moved(linears, device)
    with torch.no_grad():
        assert projections.takes(hidden, linears)
        assert not projections.takes(hidden.float(), [(weight.float(), None) for weight, _ in linears])
        assert not projections.takes(hidden.repeat(11, 1, 1), linears)
        assert not projections.takes(hidden[..., :40], [(weight[:, :40], None) for weight, _ in linears])
        assert not projections.takes(hidden, [linears[0], (linears[1][0][:20], None)])
        assert not projections.takes(hidden, [linears[0], (linears[1][0].as_subclass(Wrapped), None)])
        assert not projections.takes(hidden, [linears[0], (linears[1][0], hidden[0, 0, :32])])


@pytest.mark.smoke
def test_layers_run_through_it(device, monkeypatch):
    """Queries, keys and values together, and the halves of an MLP; hooked layers by their own calls."""
    launches = watched(monkeypatch, (projections, "_launch"))
    monkeypatch.setattr(llama._triton, "CHOICE", "triton")
    parts = [torch.nn.Linear(64, width, bias=False).bfloat16().to(device) for width in (64, 32, 32)]
    mlp = llama.GatedMLP(*parts[:1] * 2, torch.nn.Linear(64, 64).bfloat16().to(device), torch.nn.SiLU())
    hidden = drawn(1, 5, 64, dtype=torch.bfloat16).to(device)
    with torch.no_grad():
        for part, output in zip(parts, llama.project_together(parts, hidden), strict=True):
            torch.testing.assert_close(output, part(hidden), **CLOSE[torch.bfloat16])
        expected = mlp.down_proj(references.gated(parts[0](hidden), parts[0](hidden), SILU))
        torch.testing.assert_close(mlp(hidden), expected, **CLOSE[torch.bfloat16])
        assert len(launches) == 2
        parts[0].register_forward_hook(lambda module, given, output: 2 * output)
        assert torch.equal(llama.project_together(parts, hidden)[0], parts[0](hidden))
        assert len(launches) == 2


@pytest.mark.parametrize(
    ("compile_for", "tokens"), [(80, 64), (90, 16), (100, 64), (120, 1)], indirect=["compile_for"]
)
def test_kernels_compile(compile_for, tokens, request, monkeypatch):
    gpu = Gpu(132, SHARED_MEMORY[request.node.callspec.params["compile_for"]])
    monkeypatch.setattr(projections, "gpu_of", lambda device: gpu)
    x = torch.empty(tokens, 4096, dtype=torch.bfloat16)
    linears = [(torch.empty(width, 4096, dtype=torch.bfloat16), None) for width in (4096, 1024, 1024)]
    with compile_for() as kernels:
        projections.products(x, linears)
        projections.gated_product(x, *linears[1:], SILU)
    assert len(kernels) == 2
    for kernel in kernels:
        assert "cp.async" in kernel.asm["ptx"]
