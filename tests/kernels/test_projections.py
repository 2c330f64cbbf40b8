"""Linear layers over the same few tokens: one kernel computes what each of them does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hf_specdec.kernels import _triton, norms, projections
from hf_specdec.kernels.gates import GELU_TANH, SILU
from hf_specdec.kernels.norms import Norm
from hf_specdec.kernels.tiles import Gpu
from hf_specdec.layers import llama
from hf_specdec.layers.plan import Normed, norm_of, plan_layers, way_of
from tests.helpers.layer_references import CLOSE, drawn, gated, to
from tests.helpers.levels import in_full, when_slow
from tests.kernels.conftest import SHARED_MEMORY, watched


BF16, F16 = torch.bfloat16, torch.float16


class Wrapped(torch.Tensor):
    """Weights of another class, as quantised ones are."""


def drawn_linears(dtype, widths, size, has_bias):
    """States of a few tokens, and layers that read them."""
    hidden = drawn(2, 3, size, dtype=dtype)
    weights = [drawn(width, size, dtype=dtype, seed=1 + place) * size**-0.5 for place, width in enumerate(widths)]
    return hidden, [(weight, drawn(len(weight), dtype=dtype, seed=9) if has_bias else None) for weight in weights]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("widths", "size", "has_bias", "kind", "dtype"),
    [
        ((96, 32, 32), 192, True, SILU, BF16),
        *in_full(((64, 64), 128, False, GELU_TANH, F16), ((64, 128, 64), 64, True, GELU_TANH, F16)),
    ],
)
def test_products(widths, size, has_bias, kind, dtype, device):
    hidden, linears = drawn_linears(dtype, widths, size, has_bias)
    there, given = hidden.to(device), to(linears, device)
    expected = [F.linear(hidden, *linear) for linear in linears]
    for output, product in zip(projections.products_triton(there, given), expected, strict=True):
        assert output.dtype == dtype
        torch.testing.assert_close(output.cpu(), product, **CLOSE[dtype])
    # The halves of an MLP.
    weight, bias = linears[0]
    up = weight.flip(0).contiguous(), bias
    found = projections.gated_product_triton(there, given[0], to(up, device), kind)
    gates = gated(expected[0], F.linear(hidden, *up), kind)
    torch.testing.assert_close(found.cpu(), gates, **CLOSE[dtype])
    # A product is rounded before it is added to the stream; the squares are those of the rounded sum.
    stream = drawn(2, 3, widths[0], dtype=dtype, seed=5)
    total, squares = projections.added_product_triton(there, given[0], stream.to(device))
    assert total.dtype == dtype
    torch.testing.assert_close(total.cpu(), stream + expected[0], **CLOSE[dtype])
    found = total.cpu().float().square().sum(-1).flatten()
    torch.testing.assert_close(squares.sum(0).cpu(), found, rtol=1e-4, atol=1e-4)


GEMMA, OLMO = {"offset": 1.0, "rounds_last": True}, {"rounds_last": True}


@pytest.mark.parametrize(
    ("norm", "parts", "dtype"),
    [(GEMMA, 3, BF16), *in_full(({}, 1, BF16), ({}, 70, F16), (OLMO, 3, F16), (GEMMA, 1, F16))],
    ids=str,
)
def test_products_of_an_unnormed_stream(norm, parts, dtype, device):
    """Products read a stream whose norm nobody has computed."""
    stream, linears = drawn_linears(dtype, (96, 32, 64), 128, False)
    norm = Norm(drawn(128, dtype=dtype, seed=7), 1e-5, **norm)
    squares = drawn(parts, 6, dtype=torch.float32, seed=8).abs()
    squares *= stream.float().square().sum(-1).flatten() / squares.sum(0)
    expected = norm(stream)
    x = projections.Unnormed(*to((stream, squares, norm), device))
    for output, linear in zip(projections.products_triton(x, to(linears, device)), linears, strict=True):
        torch.testing.assert_close(output.cpu(), F.linear(expected, *linear), **CLOSE[dtype])
    gate, up = linears[0], (linears[0][0].flip(0).contiguous(), None)
    found = projections.gated_product_triton(x, *to([gate, up], device), SILU)
    expected_gate = gated(F.linear(expected, *gate), F.linear(expected, *up), SILU)
    torch.testing.assert_close(found.cpu(), expected_gate, **CLOSE[dtype])


def test_what_is_taken(monkeypatch):
    hidden, (first, (second, _)) = drawn_linears(torch.bfloat16, (64, 32), 64, False)
    left = [
        [(weight[:, :40].contiguous(), None) for weight in (first[0], second)],
        [first, (second[:20], None)],
        [first, (second.T.contiguous().T, None)],
        [first, (second.as_subclass(Wrapped), None)],
        [first, (second, hidden[0, 0, :32])],
        [first, (second.half(), None)],
        [first],
    ]
    assert [projections.takes_linears(linears) for linears in left] == [False] * len(left)
    assert projections.takes_linears([first, (second, None)])
    monkeypatch.setattr(projections, "_LEAST_ALONE", 0)
    assert projections.takes_linears([first])
    states = hidden, hidden.float(), hidden.repeat(11, 1, 1)
    assert [projections.takes_tokens(x) for x in states] == [True, False, False]


class Sizes:
    """Of a layer, as configs have them."""

    hidden_size, rms_norm_eps = 64, 1e-5
    num_attention_heads, num_key_value_heads, head_dim = 4, 2, 16


@pytest.mark.parametrize("hooked", [None, "o_proj", *in_full("mlp", "self_attn", "post_attention_layernorm")])
def test_layers_of_four_products(hooked, device, monkeypatch):
    """Streams are added and normed inside of products, but next to modules that somebody hooks into."""
    torch.manual_seed(0)
    layers = []
    for index in range(2):
        both = [llama.RMSNorm(64, 1e-5) for _ in range(2)]
        layers.append(llama.DecoderLayer(llama.RotaryAttention(Sizes, index), llama.GatedMLP(64, 128), *both))
    hidden, angles = drawn(1, 5, 64, dtype=torch.bfloat16), (drawn(1, 5, 1, 16), drawn(1, 5, 1, 16, seed=3))
    seen = []
    for layer in layers:
        layer.bfloat16()
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            torch.nn.init.normal_(norm.weight)
        parts = dict(layer.named_modules())
        if hooked is not None:
            name = next(name for name in parts if name.endswith(hooked))
            parts[name].register_forward_hook(lambda module, given, output: seen.append(given) or 2 * output)

    def run(stream, angles):
        following = layers[0].input_layernorm
        plans = plan_layers(layers, Normed(norm_of(following)), way_of(stream), stream.dtype)
        read = plans[0].norms["input_layernorm"](stream)
        for layer, plan in zip(layers, plans):
            stream, read = layer.advance(plan, stream, read, angles, None, None)
        return stream, read

    angles = tuple(angle.bfloat16() for angle in angles)
    with torch.no_grad():
        expected = run(hidden, angles)
        for layer in layers:
            layer.to(device)
        launches = watched(monkeypatch, (projections, "_launch"), (norms, "add_norm_triton"))
        monkeypatch.setattr(_triton, "CHOICE", "triton")
        monkeypatch.setattr(projections, "_LEAST_ALONE", 0)
        found = run(hidden.to(device), tuple(angle.to(device) for angle in angles))
    for mine, others in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), others, rtol=5e-2, atol=5e-2)
    assert len(seen) == (0 if hooked is None else 4)
    if hooked is None:
        # The first norm has no product in front of it, and the last one is asked for by itself.
        assert (launches.count("_launch"), launches.count("add_norm_triton")) == (8, 2)


@pytest.mark.parametrize(
    ("compile_for", "tokens"),
    [*in_full((90, 16), (80, 64)), *when_slow((100, 64), (120, 1))],
    indirect=["compile_for"],
)
def test_kernels_compile(compile_for, tokens, request, monkeypatch):
    gpu = Gpu(132, SHARED_MEMORY[request.node.callspec.params["compile_for"]])
    monkeypatch.setattr(projections, "gpu_of", lambda device: gpu)
    x = torch.empty(tokens, 4096, dtype=torch.bfloat16)
    linears = [(torch.empty(width, 4096, dtype=torch.bfloat16), None) for width in (4096, 1024, 1024)]
    with compile_for() as kernels:
        projections.products_triton(x, linears)
        projections.gated_product_triton(x, *linears[1:], SILU)
        stream, squares = projections.added_product_triton(x, linears[0], x)
        unnormed = projections.Unnormed(stream, squares, Norm(x[0], 1e-5))
        projections.products_triton(unnormed, linears)
        projections.gated_product_triton(unnormed, *linears[1:], SILU)
    assert len(kernels) == 5
    for kernel in kernels:
        assert "cp.async" in kernel.asm["ptx"]
        # The states of all tokens go through shared memory in vectors; the norm's weights may go one by one.
        assert kernel.asm["ptx"].count("st.shared.b16") <= 1
