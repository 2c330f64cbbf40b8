"""Products of linear layers on a CPU: by the rule of the processor, in layers and in models' own forwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from hf_specdec.kernels import few_rows, products
from hf_specdec.kernels.products import Rule, fast_products, product, rule_of
from hf_specdec.layers.plan import project
from hf_specdec.target import lean
from tests.helpers.levels import in_full
from tests.helpers.models import TINY, prompts, scripted_for, tiny_llama


pytestmark = pytest.mark.skipif(not few_rows.has_kernel(), reason="needs numba")

GREEDY = {**prompts(1), "max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def rule(monkeypatch):
    """The kernel multiplies two to four rows; more go through widened weights, if there are any."""
    monkeypatch.setattr(products, "is_used", True)
    monkeypatch.setattr(products, "LEAST_BYTES", 1000)
    monkeypatch.setattr(products, "rule_of", lambda dtype: Rule(range(2, 5), widens=dtype != torch.float32))
    monkeypatch.setattr(products, "_own_forwards", type(products._own_forwards)())


@pytest.fixture
def rows_of_ways(monkeypatch):
    """Rows of the products that the kernel, and torch with widened weights, have computed."""
    seen = {}
    for name in ("linears", "_widened_linear"):
        rows, way = seen.setdefault(name, []), getattr(products, name)
        monkeypatch.setattr(
            products, name, lambda x, *args, rows=rows, way=way: rows.append(x.numel() // x.shape[-1]) or way(x, *args)
        )
    return tuple(seen.values())


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def attributes(model):
    """The modules' own, which must not change."""
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def drafted(target, plain):
    """Whether drafts of three tokens have given the text of plain generation."""
    ours = target.generate(**GREEDY, assistant=scripted_for(plain, prompts(1), k=3))
    return torch.equal(ours, plain)


def test_rules_of_processors(monkeypatch):
    """By who has made the processor, and whether it multiplies numbers of 16 bits."""
    rows = {}
    for name, is_intel, multiplies in (("epyc", False, True), ("xeon", True, True), ("old", True, False)):
        monkeypatch.setattr(products, "is_intel", lambda is_intel=is_intel: is_intel)
        monkeypatch.setattr(products, "multiplies", lambda dtype, multiplies=multiplies: multiplies)
        rules = [rule_of.__wrapped__(dtype) for dtype in (torch.float32, torch.bfloat16)]
        rows[name] = [(rule.rows[0], rule.rows[-1], rule.widens) for rule in rules]
    assert rows == {
        "epyc": [(1, 32, False), (1, 8, False)],
        "xeon": [(4, 32, False), (1, 5, False)],
        "old": [(4, 32, False), (1, 128, True)],
    }


def test_every_way_computes_what_the_rule_says(rows_of_ways):
    by_kernel, widened = rows_of_ways
    layer = nn.Linear(64, 32)
    for dtype in (torch.float32, torch.bfloat16):
        weight, bias = layer.weight.to(dtype), layer.bias.to(dtype)
        for rows in (1, 2, 4, 5, 33):
            x = torch.randn(rows, 64).to(dtype)
            torch.testing.assert_close(product(x, weight, bias), F.linear(x, weight, bias))
    assert (by_kernel, widened) == ([2, 4, 2, 4], [1, 5, 33])
    # Left to torch: a small matrix, training, nothing, and everything if the user says so.
    x = torch.randn(3, 64)
    assert torch.equal(product(x, layer.weight[:3]), F.linear(x, layer.weight[:3]))
    with torch.enable_grad():
        product(x, layer.weight).sum().backward()
    assert layer.weight.grad is not None
    assert product(x[:0], layer.weight).shape == (0, 32)
    products.is_used = False
    product(x, layer.weight)
    assert by_kernel == [2, 4, 2, 4]


def test_tiles_where_the_processor_has_them(monkeypatch):
    """More rows than the other kernel multiplies, for matrices that fit."""
    calls = []
    monkeypatch.setattr(products, "rule_of", lambda dtype: Rule(range(1, 3), range(3, 9)))
    monkeypatch.setattr(products, "linears", lambda x, matrices, in_tiles: calls.append((len(x), in_tiles)) or x)
    monkeypatch.setattr(products, "fits_tiles", lambda matrices: len(matrices[0][0]) >= 16)
    for rows in (2, 3, 8, 9):
        for outputs in (15, 16):
            product(torch.ones(rows, 64), torch.ones(outputs, 64))
    assert calls == [(2, False), (2, False), (3, True), (8, True)]


def test_widened_weights(monkeypatch):
    """The exact numbers, rounded once, however the weights are cut."""
    monkeypatch.setattr(products, "_WIDENED_BYTES", 4 * 48 * 10)
    for dtype, has_bias in ((torch.bfloat16, True), (torch.float16, False)):
        x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 5, 48), (33, 48), (33,)))
        bias = bias if has_bias else None
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        found = products._widened_linear(x, weight, bias)
        assert (found.shape, found.dtype) == (exact.shape, dtype)
        torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)


# Layers of models


def test_layers_of_draft_networks_and_of_a_models_own_forward(rows_of_ways):
    """Layers take the fast ways inside, and nothing of the model stays changed."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64, bias=False))
    x, before = torch.randn(3, 64), attributes(model)
    expected = model(x)
    assert not rows_of_ways[0]
    torch.testing.assert_close(project(model[0], x), model[0](x))
    with fast_products(model):
        with fast_products(model):
            torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(model(x), expected)
        assert rows_of_ways[0] == [3] * 5
    assert attributes(model) == before
    assert torch.equal(model(x), expected)
    with pytest.raises(RuntimeError), fast_products(model):
        model(torch.randn(3, 5))
    assert attributes(model) == before
    # Forwards and hooks of users stay.
    model[0].forward = lambda x: x[:, :32]
    with fast_products(model):
        model(x)
    assert "forward" in vars(model[0])
    assert len(rows_of_ways[0]) == 6
    model[1].register_forward_hook(lambda *call: None)
    project(model[1], x[:, :32])
    assert len(rows_of_ways[0]) == 6


@pytest.mark.parametrize("kind", ["grouped_mm", *in_full("eager", "batched_mm")])
def test_experts(rows_of_ways, kind):
    """The matrices of experts, chosen one by one or multiplied in groups; in batches torch computes."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "intermediate_size": 24, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**{**TINY, **sizes}, experts_implementation=kind)).eval()
    tokens = torch.arange(3)[None]
    expected = model(tokens).logits
    before = attributes(model)
    with fast_products(model):
        torch.testing.assert_close(model(tokens).logits, expected)
    num_linear = 5  # of attention, and lm_head
    assert (len(rows_of_ways[0]) > num_linear) == (kind != "batched_mm")
    assert attributes(model) == before


@pytest.mark.parametrize("is_lean", [True, *in_full(False)])
def test_a_call_of_generate(rows_of_ways, monkeypatch, is_lean):
    """All of a small target's layers, also in its own forward, and the same greedy text."""
    target = tiny_llama()
    plain = target.generate(**GREEDY)
    if not is_lean:
        monkeypatch.setattr(lean, "has_lean_forward", lambda model: False)
    assert not rows_of_ways[0]
    assert drafted(target, plain)
    assert rows_of_ways[0].count(4) > 3
    rows_of_ways[0].clear()
    assert torch.equal(target.generate(**GREEDY), plain)
    assert not rows_of_ways[0]
