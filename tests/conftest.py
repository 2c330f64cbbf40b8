"""Settings that must be made before anything else is imported; fixtures of all tests are in `helpers/fixtures.py`."""

from __future__ import annotations

import gc
import logging
import os

from tests.helpers import budget


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Lengths that are chosen by what pays differ from run to run; tests of them set "auto".
os.environ.setdefault("HF_SPECDEC_ADAPTIVE", "0")

# What torchao, which transformers imports where it is installed, says of itself.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)

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
