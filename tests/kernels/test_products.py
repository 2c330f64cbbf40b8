"""The fastest products of linear layers: measured once for a machine, remembered in a file, used where they win."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from hf_specdec.kernels import few_rows, products
from hf_specdec.kernels.products import fast_products, prepare_products, product, widened_linear
from hf_specdec.layers.llama import project
from hf_specdec.target import lean
from tests.helpers.levels import in_full
from tests.helpers.models import TINY, prompts, scripted_for, tiny_llama


pytestmark = pytest.mark.skipif(not few_rows.has_kernel(), reason="needs numba")

GREEDY = {**prompts(1), "max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPECDEC_PROFILES", str(tmp_path))
    monkeypatch.setattr(products, "measures", True)
    monkeypatch.setattr(products, "_LEAST_BYTES", 1000)
    for name in ("ways_of_shapes", "_known"):
        monkeypatch.setattr(products, name, {})
    monkeypatch.setattr(products, "_prepared", type(products._prepared)())


@pytest.fixture
def measured(monkeypatch):
    """Shapes that have been measured; the kernel is said to win from two to four rows, widening from 33 to 64."""
    seen = []

    def measure(weights):
        seen.append((tuple(weights[0].shape), len(weights)))
        return "011100000200"

    monkeypatch.setattr(products, "_measure", measure)
    return seen


@pytest.fixture
def rows_of_ways(monkeypatch):
    """Rows of the products that torch, the kernel, and torch with widened weights have computed."""

    def watched(way, rows):
        return lambda x, *given: rows.append(x.numel() // x.shape[-1]) or way(x, *given)

    seen = [[] for _ in products._WAYS]
    monkeypatch.setattr(products, "_WAYS", tuple(map(watched, products._WAYS, seen)))
    return seen


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


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64, bias=False), nn.Linear(64, 32), nn.Linear(4, 4))


def test_each_shape_is_measured_once_on_a_machine(measured, monkeypatch):
    model = small_model()
    before = attributes(model)
    for again in (model, model, small_model()):
        prepare_products(again)
    assert measured == [((32, 64), 2), ((64, 32), 1)]
    assert attributes(model) == before
    ways, file = dict(products.ways_of_shapes), products._file()
    # As in another process, which has the file, or a damaged one.
    wrong_entry = json.dumps({"format": 2, "ways": {"float32 32x64 1": "01", "float32 64x32 1": 5}})
    for content in (None, wrong_entry, "{", "", "[]", '{"format": 4}', "[" * 100_000):
        monkeypatch.setattr(products, "_known", {})
        monkeypatch.setattr(products, "ways_of_shapes", {})
        measured.clear()
        if content is not None:
            file.write_text(content)
        prepare_products(small_model())
        assert len(measured) == (0 if content is None else 2)
        assert products.ways_of_shapes == ways != {}
        assert set(json.loads(file.read_text())["ways"]) == {"float32 32x64 1", "float32 64x32 1"}


def test_every_way_computes_what_it_wins(measured, rows_of_ways):
    model, threads = small_model(), torch.get_num_threads()
    prepare_products(model)
    weight, bias = model[0].weight, model[0].bias
    for rows in (1, 2, 4, 5, 16, 17, 33, 64, 65, 100, 128, 300):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(product(x, weight, bias), F.linear(x, weight, bias))
    assert rows_of_ways[1:] == [[2, 4], [33, 64]]
    # Left to torch: a shape that nobody knows, training, and another number of threads.
    x = torch.randn(3, 4)
    assert torch.equal(product(x, model[3].weight, model[3].bias), model[3](x))
    with torch.enable_grad():
        product(torch.randn(3, 64), weight).sum().backward()
    assert weight.grad is not None
    torch.set_num_threads(threads + 1)
    try:
        product(torch.randn(3, 64), weight)
    finally:
        torch.set_num_threads(threads)
    assert rows_of_ways[1] == [2, 4]


def test_widened_weights(monkeypatch):
    """The exact numbers, rounded once, however the weights are cut."""
    monkeypatch.setattr(products, "_WIDENED_BYTES", 4 * 48 * 10)
    for dtype, has_bias in ((torch.bfloat16, True), (torch.float16, False)):
        x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((2, 5, 48), (33, 48), (33,)))
        bias = bias if has_bias else None
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        found = widened_linear(x, weight, bias)
        assert (found.shape, found.dtype) == (exact.shape, dtype)
        torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=1e-5)


# Layers of models


def test_layers_of_draft_networks_and_of_a_models_own_forward(measured, rows_of_ways):
    """Layers take the fast ways inside, and nothing of the model stays changed."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64, bias=False))
    prepare_products(model)
    x, before = torch.randn(3, 64), attributes(model)
    expected = model(x)
    assert not rows_of_ways[1]
    torch.testing.assert_close(project(model[0], x), model[0](x))
    with fast_products(model):
        with fast_products(model):
            torch.testing.assert_close(model(x), expected)
        torch.testing.assert_close(model(x), expected)
        assert rows_of_ways[1] == [3] * 5
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
    assert len(rows_of_ways[1]) == 6
    model[1].register_forward_hook(lambda *call: None)
    project(model[1], x[:, :32])
    assert len(rows_of_ways[1]) == 6


@pytest.mark.parametrize("kind", ["grouped_mm", *in_full("eager", "batched_mm")])
def test_experts(measured, rows_of_ways, kind):
    """The matrices of experts, chosen one by one or multiplied in groups; in batches torch computes."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "intermediate_size": 24, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**{**TINY, **sizes}, experts_implementation=kind)).eval()
    tokens = torch.arange(3)[None]
    expected = model(tokens).logits
    prepare_products(model)
    assert ((48, 32), 4) in measured
    before = attributes(model)
    with fast_products(model):
        torch.testing.assert_close(model(tokens).logits, expected)
    num_linear = 5  # of attention, and lm_head
    assert (len(rows_of_ways[1]) > num_linear) == (kind != "batched_mm")
    assert attributes(model) == before


@pytest.mark.parametrize("is_lean", [True, *in_full(False)])
def test_a_call_of_generate(measured, rows_of_ways, monkeypatch, is_lean):
    """All of a small target's layers, also in its own forward, and the same greedy text."""
    target = tiny_llama()
    plain = target.generate(**GREEDY)
    if not is_lean:
        monkeypatch.setattr(lean, "has_lean_forward", lambda model: False)
    assert drafted(target, plain)
    assert not rows_of_ways[1]
    prepare_products(target)
    assert drafted(target, plain)
    assert rows_of_ways[1].count(4) > 3
    rows_of_ways[1].clear()
    assert torch.equal(target.generate(**GREEDY), plain)
    assert not rows_of_ways[1]
