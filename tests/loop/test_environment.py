"""Environment variables: switches take the words that transformers takes."""

import pytest
from transformers.utils.import_utils import ENV_VARS_TRUE_VALUES

from hf_specdec import SpecConfigError, SpeculativeConfig, environment
from hf_specdec.environment import is_switched_on, kernel_choice


def test_words_for_true_are_those_of_transformers():
    assert {word.upper() for word in environment._TRUE} == ENV_VARS_TRUE_VALUES


@pytest.mark.parametrize("default", [True, False])
def test_switches(monkeypatch, default):
    name = "HF_SPECDEC_CHECK"
    for value in ("1", "true", "True", "TRUE", "yes", "YES", "on", " On "):
        monkeypatch.setenv(name, value)
        assert is_switched_on("CHECK", default=default)
    for value in ("0", "false", "FALSE", "no", "off", "2"):
        monkeypatch.setenv(name, value)
        assert not is_switched_on("CHECK", default=default)
    for value in ("", "  "):
        monkeypatch.setenv(name, value)
        assert is_switched_on("CHECK", default=default) == default
    monkeypatch.delenv(name)
    assert is_switched_on("CHECK", default=default) == default


@pytest.mark.parametrize(("value", "is_adaptive"), [("off", False), ("False", False), ("no", False), ("yes", True)])
def test_adaptive_lengths(monkeypatch, value, is_adaptive):
    monkeypatch.setenv("HF_SPECDEC_ADAPTIVE", value)
    assert SpeculativeConfig("ngram").is_adaptive == is_adaptive


def test_kernels(monkeypatch):
    for value, choice in (("", "auto"), ("Torch", "torch"), ("TRITON", "triton")):
        monkeypatch.setenv("HF_SPECDEC_KERNELS", value)
        assert kernel_choice() == choice
    for value in ("0", "off", "cuda"):
        monkeypatch.setenv("HF_SPECDEC_KERNELS", value)
        with pytest.raises(SpecConfigError, match=f"got '{value}'. Unset it"):
            kernel_choice()
