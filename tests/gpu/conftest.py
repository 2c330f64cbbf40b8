"""The devices on which captures are tried, and graphs on tapes in the place of CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from hf_specdec import demo, forget_speculators
from hf_specdec.target.graphs import forget_graphs
from tests.helpers.tape import TapeBackend, spoil_inputs, tape_everything


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """The check of a class of models waits in a cycle, once in a process."""
    monkeypatch.setenv("HF_SPECDEC_CHECK", "0")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device(request.param)


@pytest.fixture
def gpu() -> torch.device:
    """For tests that are marked `gpu`."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda")


@pytest.fixture
def tapes(monkeypatch) -> list[TapeBackend]:
    """Captures onto tapes. Whatever a replay reads must have been filled for it."""
    spoil_inputs(monkeypatch)
    yield tape_everything(monkeypatch)
    forget_graphs()
    forget_speculators()


@pytest.fixture
def backends(device, request):
    """Captures onto tapes, on a GPU into graphs."""
    if device.type == "cpu":
        request.getfixturevalue("tapes")


@pytest.fixture(scope="module")
def target():
    """The demo's target."""
    return demo.load_target(torch.float32)
