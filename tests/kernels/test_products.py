"""The faster product of linear layers: measured once for a machine, remembered in a file, and used where it wins."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from hf_specdec.diagnosis import checks
from hf_specdec.kernels import few_rows, products
from hf_specdec.kernels.few_rows import MOST_ROWS
from hf_specdec.kernels.products import prepare_products, product
from hf_specdec.layers.llama import project
from tests.models import prompts, scripted_for, tiny_llama


pytestmark = pytest.mark.skipif(not few_rows.HAS_LLVM, reason="needs llvmlite")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_SPECDEC_PROFILES", str(tmp_path))
    monkeypatch.setattr(products, "measures", True)
    monkeypatch.setattr(products, "_LEAST_BYTES", 1000)
    for name in ("wins_of_shapes", "_known"):
        monkeypatch.setattr(products, name, {})
    monkeypatch.setattr(products, "_prepared", type(products._prepared)())


@pytest.fixture
def measured(monkeypatch):
    """Shapes that have been measured; the kernel is said to win from two to four rows."""
    seen = []

    def measure(weights):
        seen.append((tuple(weights[0].shape), len(weights)))
        return [2 <= rows <= 4 for rows in range(MOST_ROWS + 1)]

    monkeypatch.setattr(products, "_measure", measure)
    return seen


@pytest.fixture
def kernel_rows(monkeypatch):
    """Rows of the products that the kernel has computed."""
    rows = []
    monkeypatch.setattr(products, "linear", lambda x, *given: rows.append(len(x)) or few_rows.linear(x, *given))
    return rows


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64, bias=False), nn.Linear(64, 32), nn.Linear(4, 4))


@torch.inference_mode()
def test_each_shape_is_measured_once(measured):
    model = small_model()
    prepare_products(model)
    assert measured == [((32, 64), 2), ((64, 32), 1)]
    prepare_products(model)
    prepare_products(small_model())
    assert len(measured) == 2


@torch.inference_mode()
def test_another_process_reads_the_file(measured, monkeypatch):
    prepare_products(small_model())
    wins = dict(products.wins_of_shapes)
    monkeypatch.setattr(products, "_known", {})
    monkeypatch.setattr(products, "wins_of_shapes", {})
    prepare_products(small_model())
    assert len(measured) == 2
    assert products.wins_of_shapes == wins != {}


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format": 1}', '{"format": 0, "wins": {}}', "[" * 100_000, None])
@torch.inference_mode()
def test_damaged_files(measured, content):
    file = products._file()
    if content is None:
        content = json.dumps({"format": 1, "wins": {"float32 32x64 1": "01", "float32 64x32 1": 5}})
    file.write_text(content)
    prepare_products(small_model())
    assert len(measured) == 2
    assert set(json.loads(file.read_text())["wins"]) == {"float32 32x64 1", "float32 64x32 1"}


@torch.inference_mode()
def test_another_model_of_known_shapes(measured, monkeypatch):
    """What the file says of the shapes of one model counts for the next one, too."""
    prepare_products(small_model())
    wins = dict(products.wins_of_shapes)
    monkeypatch.setattr(products, "_known", {})
    monkeypatch.setattr(products, "wins_of_shapes", {})
    prepare_products(nn.Linear(64, 32))
    prepare_products(nn.Linear(32, 64))
    assert products.wins_of_shapes == wins


@torch.inference_mode()
@pytest.mark.parametrize("change", [lambda weight: TwoTensor(weight, weight), torch.Tensor.to_sparse_csr])
def test_weights_that_are_no_plain_numbers(measured, change):
    layer = nn.Linear(64, 32)
    layer.weight = nn.Parameter(change(layer.weight.detach()), requires_grad=False)
    prepare_products(layer)
    assert measured == []


@torch.inference_mode()
def test_layers_of_draft_networks_and_targets(measured, kernel_rows):
    linear = nn.Linear(64, 32)
    prepare_products(linear)
    x = torch.randn(3, 64)
    torch.testing.assert_close(project(linear, x), linear(x))
    assert kernel_rows == [3]
    linear.register_forward_hook(lambda *call: None)
    assert torch.equal(project(linear, x), linear(x))
    assert kernel_rows == [3]


@torch.inference_mode()
def test_a_call_through_the_kernel(measured, kernel_rows):
    """All of a small target's layers, and the same greedy text."""
    target = tiny_llama()
    settings = {**prompts(1), "max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**settings)
    assert torch.equal(target.generate(**settings, assistant=scripted_for(plain, prompts(1), k=3)), plain)
    assert not kernel_rows
    prepare_products(target)
    assert torch.equal(target.generate(**settings, assistant=scripted_for(plain, prompts(1), k=3)), plain)
    assert len(kernel_rows) > 3


@torch.inference_mode()
def test_a_folder_that_cannot_be_written(measured, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_SPECDEC_PROFILES", str(tmp_path / "file"))
    prepare_products(small_model())
    assert len(products.wins_of_shapes) == 2


@torch.inference_mode()
def test_the_kernel_computes_what_it_wins(measured, kernel_rows):
    model = small_model()
    prepare_products(model)
    weight, bias = model[0].weight, model[0].bias
    for rows in (1, 2, 4, 5, 16, 17, 100):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(product(x, weight, bias), F.linear(x, weight, bias))
    assert kernel_rows == [2, 4]
    # Of a shape that nobody knows.
    x = torch.randn(3, 4)
    assert torch.equal(product(x, model[3].weight, model[3].bias), model[3](x))


@torch.inference_mode()
def test_with_another_number_of_threads_torch_computes(measured, kernel_rows):
    model, before = small_model(), torch.get_num_threads()
    prepare_products(model)
    torch.set_num_threads(before + 1)
    try:
        product(torch.randn(3, 64), model[0].weight)
        assert kernel_rows == []
        prepare_products(model)
        product(torch.randn(3, 64), model[0].weight)
    finally:
        torch.set_num_threads(before)
    assert kernel_rows == [3]


def test_training_is_left_to_torch(measured, kernel_rows):
    model = small_model()
    prepare_products(model)
    product(torch.randn(3, 64), model[0].weight).sum().backward()
    assert model[0].weight.grad is not None
    assert kernel_rows == []


def test_a_measurement():
    """Which of them wins is the machine's affair."""
    wins = products._measure([torch.randn(64, 32)])
    assert len(wins) == MOST_ROWS + 1
    assert wins[0] is False
    assert set(wins) <= {True, False}


@torch.inference_mode()
def test_nothing_is_measured_where_it_is_switched_off(measured, monkeypatch):
    monkeypatch.setattr(products, "measures", False)
    prepare_products(small_model())
    assert measured == []
    assert not products._file().exists()


@torch.inference_mode()
def test_the_model_stays_as_it_is(measured):
    model = small_model()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    prepare_products(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_doctor_says_where_the_kernel_is_faster_or_missing(measured, monkeypatch):
    target = tiny_llama()
    (finding,) = checks.product_findings(target)
    num_shapes = len({tuple(seen) for seen, _ in measured})
    assert finding.status == "ok"
    assert f"for {num_shapes} of {num_shapes} shapes" in finding.found
    monkeypatch.setattr(checks, "HAS_LLVM", False)
    (finding,) = checks.product_findings(target)
    assert "llvmlite is not installed" in finding.found
    assert "hf-specdec[fast]" in finding.remedy
