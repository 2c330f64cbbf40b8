"""A transformers that does not do what decoding relies on is told by what fails, before anything is decoded."""

import re
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaForCausalLM
from transformers.generation import GenerationMixin

from hf_specdec import MissingDependencyError
from hf_specdec.decoding import contract
from tests.helpers.levels import full
from tests.helpers.paths import ROOT


FIRST_CALLS = """
import hf_specdec, torch, transformers, transformers.cache_utils
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import GenerationMixin
sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes))
{change}
for attempt in range(2):
    try:
        model.generate(torch.ones((1, 4), dtype=torch.long), spec_method="ngram", max_new_tokens=2)
    except hf_specdec.MissingDependencyError as error:
        print(error)
"""


@full
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("del GenerationMixin._prefill", "AttributeError: 'LlamaForCausalLM' object has no attribute '_prefill'"),
        ("del transformers.cache_utils.CacheLayerMixin", "ImportError: cannot import name 'CacheLayerMixin'"),
    ],
)
def test_first_call_names_what_is_missing(change, what):
    code = [sys.executable, "-c", FIRST_CALLS.format(change=change)]
    # It is no better the second time.
    first, second = subprocess.run(code, capture_output=True, text=True, check=True).stdout.splitlines()
    assert first == second
    assert first.startswith(f"transformers {transformers.__version__} does not work as hf_specdec relies on ({what}")
    assert f"Versions {contract.OLDEST} to {contract.NEWEST} do: pip install" in first


def without_a_cache(self, input_ids=None, other_name=None):
    """A forward."""


BROKEN = [
    (LlamaForCausalLM, "forward", without_a_cache, "no argument of a forward takes a cache"),
    (GenerationMixin, "_prefill", lambda self, ids, *given: self(ids, logits_to_keep=1), "leaves no keys and values"),
    (
        GenerationMixin,
        "prepare_inputs_for_generation",
        lambda self, input_ids, **kwargs: {"input_ids": input_ids, **kwargs},
        "more than one token",
    ),
    (DynamicCache, "get_seq_length", lambda self: 1 / 0, "ZeroDivisionError"),
]


def test_broken_transformers_is_named(monkeypatch):
    for owner, name, other, what in BROKEN:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            with pytest.raises(MissingDependencyError, match=what):
                contract.check_transformers()
    # Trying draws no random numbers.
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    contract.check_transformers()
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(("version", "is_told"), [("5.99.0", True), (f"{contract.NEWEST}.7", False)])
def test_newer_version_is_told_once(monkeypatch, warnings, version, is_told):
    monkeypatch.setattr(contract.transformers, "__version__", version)
    for _ in range(2):
        contract.check_transformers()
    expected = f"transformers {version} is newer than all versions that hf_specdec was tested with"
    assert [line.startswith(expected) for line in warnings] == [True] * is_told


def test_versions_are_those_of_the_package_and_its_tests():
    def text(*path):
        return ROOT.joinpath(*path).read_text(encoding="utf-8")

    major, minor = contract.NEWEST.split(".")
    assert f'"transformers>={contract.OLDEST},<{major}.{int(minor) + 1}"' in text("pyproject.toml")
    assert f"transformers=={contract.OLDEST}." in text(".ci", "run")
    assert re.search(r"^transformers==(\d+\.\d+)", text("constraints.txt"), re.MULTILINE)[1] == contract.NEWEST
