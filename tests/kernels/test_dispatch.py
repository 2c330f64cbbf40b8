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
from tests.helpers.levels import full


ON_CPU, ON_GPU = SimpleNamespace(is_cuda=False), SimpleNamespace(is_cuda=True)


def test_the_choice_of_the_user_or_of_the_device(monkeypatch):
    def choose(choice, has_triton=True, is_interpreted=False):
        values = {"CHOICE": choice, "HAS_TRITON": has_triton, "IS_INTERPRETED": is_interpreted}
        for name, value in values.items():
            monkeypatch.setattr(_triton, name, value)

    choose("auto")
    assert use_triton(ON_GPU, None, ON_GPU)
    assert not use_triton(ON_GPU, None, ON_CPU)
    choose("auto", has_triton=False)
    assert not use_triton(ON_GPU)
    choose("torch")
    assert not use_triton(ON_GPU)
    choose("triton", is_interpreted=True)
    assert use_triton(ON_CPU)
    choose("triton")
    assert use_triton(ON_GPU)
    with pytest.raises(SpecConfigError, match="not on a GPU"):
        use_triton(ON_CPU)
    choose("triton", has_triton=False)
    with pytest.raises(MissingDependencyError):
        use_triton(ON_GPU)


@full
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
