"""A transformers that does not do what decoding relies on is told by what fails, before anything is decoded."""

import re

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.generation import GenerationMixin

from hf_specdec import MissingDependencyError
from hf_specdec.target import contract
from tests.helpers.paths import ROOT


def without_a_cache(self, input_ids=None, other_name=None):
    """A forward."""


def all_arguments(self, input_ids, **kwargs):
    return {"input_ids": input_ids, **kwargs}


BROKEN = [
    (LlamaForCausalLM, "forward", without_a_cache, "no argument of a forward takes a cache"),
    (GenerationMixin, "_prefill", lambda self, ids, *given: self(ids, logits_to_keep=1), "leaves no keys and values"),
    (GenerationMixin, "prepare_inputs_for_generation", all_arguments, "more than one token"),
    (DynamicCache, "get_seq_length", lambda self: 1 / 0, "ZeroDivisionError"),
]


def test_broken_transformers_is_named(monkeypatch):
    for owner, name, other, what in BROKEN:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            with pytest.raises(MissingDependencyError, match=what):
                contract.check_transformers()
    # Trying draws no random numbers.
    before = torch.get_rng_state()
    contract.check_transformers()
    assert torch.equal(torch.get_rng_state(), before)


def test_versions_are_those_of_the_package_and_its_tests():
    def text(*path):
        return ROOT.joinpath(*path).read_text(encoding="utf-8")

    major, minor = contract.NEWEST.split(".")
    assert f'"transformers>={contract.OLDEST},<{major}.{int(minor) + 1}"' in text("pyproject.toml")
    assert f"transformers=={contract.OLDEST}." in text(".ci", "run")
    assert re.search(r"^transformers==(\d+\.\d+)", text("constraints.txt"), re.MULTILINE)[1] == contract.NEWEST
