"""The choice between kernel and reference."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hf_specdec.errors import MissingDependencyError, SpecConfigError
from hf_specdec.kernels import _triton
from hf_specdec.kernels._triton import use_triton


ON_CPU, ON_GPU = SimpleNamespace(is_cuda=False), SimpleNamespace(is_cuda=True)


def test_the_choice_follows_the_device(monkeypatch):
    monkeypatch.setattr(_triton, "CHOICE", "auto")
    monkeypatch.setattr(_triton, "HAS_TRITON", True)
    assert use_triton(ON_GPU, None, ON_GPU)
    assert not use_triton(ON_GPU, None, ON_CPU)


def test_without_triton_the_references_run_and_say_so_once(monkeypatch):
    warnings = []
    monkeypatch.setattr(_triton, "CHOICE", "auto")
    monkeypatch.setattr(_triton, "HAS_TRITON", False)
    monkeypatch.setattr(_triton.logger, "warning_once", warnings.append)
    assert not use_triton(ON_CPU)
    assert not warnings
    assert not use_triton(ON_GPU)
    assert "pip install triton" in warnings[0]


def test_a_choice_of_the_user(monkeypatch):
    monkeypatch.setattr(_triton, "CHOICE", "torch")
    assert not use_triton(ON_GPU)
    monkeypatch.setattr(_triton, "CHOICE", "triton")
    monkeypatch.setattr(_triton, "HAS_TRITON", True)
    assert use_triton(ON_GPU)
    monkeypatch.setattr(_triton, "IS_INTERPRETED", True)
    assert use_triton(ON_CPU)
    monkeypatch.setattr(_triton, "IS_INTERPRETED", False)
    with pytest.raises(SpecConfigError, match="not on a GPU. Move the model there"):
        use_triton(ON_CPU)
    monkeypatch.setattr(_triton, "HAS_TRITON", False)
    with pytest.raises(MissingDependencyError, match="not installed. Install it"):
        use_triton(ON_GPU)


def test_an_unknown_choice_is_an_error_of_the_import():
    environment = os.environ | {"HF_SPECDEC_KERNELS": "cuda"}
    run = subprocess.run([sys.executable, "-c", "import hf_specdec"], env=environment, capture_output=True, text=True)
    assert "SpecConfigError: HF_SPECDEC_KERNELS must be" in run.stderr
    assert "got 'cuda'" in run.stderr


def test_the_package_runs_without_triton():
    """Runs in a process of its own, with the choice made in the environment."""
    code = """
import sys
sys.modules["triton"] = None
import importlib, pkgutil, torch
from hf_specdec import kernels
for module in pkgutil.iter_modules(kernels.__path__):
    importlib.import_module(f"hf_specdec.kernels.{module.name}")
from hf_specdec.kernels.sampling import sample_from_probs
print(kernels._triton.HAS_TRITON, kernels._triton.CHOICE, *sample_from_probs(torch.eye(3), torch.zeros(3)).tolist())
"""
    environment = os.environ | {"HF_SPECDEC_KERNELS": "torch"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "torch", "0", "1", "2"]
