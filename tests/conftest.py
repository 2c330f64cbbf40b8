"""Settings that must be made before anything else is imported; fixtures of all tests are in `helpers/fixtures.py`."""

from __future__ import annotations

import gc
import os

from tests.helpers import budget


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# It has kernels for GPUs, and says of each that it cannot be loaded.
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
# Lengths that are chosen by what pays differ from run to run; tests of them set "auto".
os.environ.setdefault("HF_SPECDEC_ADAPTIVE", "0")

pytest_addoption = budget.pytest_addoption


def pytest_configure(config):
    config.pluginmanager.register(budget.Budget(config), "hf_specdec_budget")
    # The process that hands out tests to those of `-n` runs none, and needs not import torch.
    if not getattr(config.option, "numprocesses", None):
        config.pluginmanager.import_plugin("tests.helpers.fixtures")


def pytest_collection_modifyitems(config, items):
    """Puts the smoke tests first on a GPU."""
    if "gpu" in (config.option.markexpr or "").replace("not gpu", ""):
        items.sort(key=lambda item: item.get_closest_marker("smoke") is None)


def pytest_collection():
    # Collected tests stay, and garbage collection would look through them again and again.
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
