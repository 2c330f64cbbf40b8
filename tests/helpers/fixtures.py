"""Fixtures of all tests, and settings of the processes that run them."""

from __future__ import annotations

import logging

import hypothesis
import pytest
import torch
from transformers.utils import generic
from transformers.utils import logging as transformers_logging

import hf_specdec  # noqa: F401 - teaches generate() the speculative arguments
from hf_specdec import modules
from hf_specdec.kernels import products, tree_attention
from hf_specdec.target import attention
from hf_specdec.target import model as target
from tests.helpers import layer_references
from tests.helpers.models import letter_tokenizer, tiny_llama, tiny_mistral


# The last bits of logits would differ from machine to machine.
products.is_used = False

# Small models on a shared machine are slower with more.
torch.set_num_threads(1)

# A busy machine is slower at times. Tests that need more examples say so, and are `full`.
hypothesis.settings.register_profile("hf_specdec", deadline=None, max_examples=25)
hypothesis.settings.load_profile("hf_specdec")


@pytest.fixture(autouse=True)
def as_talkative_as_before():
    """Programs that a test calls may quieten transformers and the package for good."""
    loggers = [logging.getLogger(name) for name in ("transformers", "hf_specdec")]
    levels, shows_progress = [logger.level for logger in loggers], transformers_logging.is_progress_bar_enabled()
    yield
    for logger, level in zip(loggers, levels):
        logger.setLevel(level)
    if shows_progress and not transformers_logging.is_progress_bar_enabled():
        transformers_logging.enable_progress_bar()


@pytest.fixture(autouse=True)
def nothing_kept():
    """What is kept of shared models knows nothing of what a test puts in the place of the package's functions."""
    modules._kept.clear()


@pytest.fixture(autouse=True)
def no_old_name_of_the_cache(monkeypatch):
    """Outputs answer to their old names, too, and say so once in a log that nobody reads here."""
    if hasattr(generic, "_rename_kwargs_for_bc"):
        monkeypatch.setattr(generic.logger, "warning_once", pytest.fail, raising=False)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def sliding_model():
    return tiny_mistral()


@pytest.fixture(scope="session")
def tokenizer():
    return letter_tokenizer()


@pytest.fixture
def with_kernel(monkeypatch):
    """Attention from a tree and not from a mask, as on a GPU; the operations themselves run as their references."""
    for module in (attention, target):
        monkeypatch.setattr(module, "use_triton", lambda *tensors: True)
    monkeypatch.setattr(tree_attention, "tree_attention_triton", layer_references.tree_attention)


@pytest.fixture
def warnings():
    """Warnings of the package, also those that another test has seen."""
    lines = []

    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    handler, logger = Lines(logging.WARNING), logging.getLogger("hf_specdec")
    logger.addHandler(handler)
    transformers_logging.warning_once.cache_clear()
    yield lines
    logger.removeHandler(handler)
