"""Options of suffix decoding, and what is said where its library is missing; none of it needs the library."""

import importlib
import importlib.metadata
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import LlamaConfig

import hf_specdec.candidate_generators.suffix as suffix_package
from hf_specdec import SpeculativeConfig
from hf_specdec.candidate_generators.suffix import generator as suffix
from hf_specdec.candidate_generators.suffix.generator import SuffixCandidateGenerator, SuffixOptions
from hf_specdec.errors import MissingDependencyError
from tests.helpers.paths import DOCS


def test_options_at_the_edges():
    SuffixOptions(max_tree_depth=2, max_cached_requests=0, max_spec_factor=0, min_token_prob=0, max_cached_tokens=0)
    SuffixOptions(max_spec_factor=np.float32(2), min_token_prob=1, max_cached_tokens=np.int64(10**9))


def pretend_version(monkeypatch, version):
    def find(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)


@pytest.mark.parametrize(
    ("version", "found"),
    [
        (None, "it is not installed"),
        ("0.0.4", "arctic-inference 0.0.4 is installed, which is too old"),
        ("0.3.0", "arctic-inference 0.3.0 cannot be imported"),
    ],
)
def test_missing_package(version, found, monkeypatch):
    pretend_version(monkeypatch, version)
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(MissingDependencyError) as caught:
        SuffixCandidateGenerator.load(SpeculativeConfig("suffix"), SimpleNamespace(config=LlamaConfig()))
    assert found in str(caught.value)
    assert "pip install 'arctic-inference>=0.1.1'" in str(caught.value)
    assert "C++20 compiler and CMake" in str(caught.value)
    assert "spec_method='ngram'" in str(caught.value)


def test_import_does_not_need_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    monkeypatch.delitem(sys.modules, suffix.__name__)
    # The import binds the new module in its package; this restores the old one.
    monkeypatch.setattr(suffix_package, "generator", suffix)
    again = importlib.import_module(suffix.__name__)
    assert again is not suffix
    assert again.SuffixOptions().max_tree_depth == 24


def test_documented_defaults():
    page = (DOCS / "suffix.md").read_text(encoding="utf-8")
    keys = {field.metadata["key"]: field.default for field in SuffixOptions.__dataclass_fields__.values()}
    assert len(keys) == 6
    for key, default in keys.items():
        assert key.startswith("suffix_decoding_")
        assert f"| `{key}` | `{default!r}` |" in page
