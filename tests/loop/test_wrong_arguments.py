"""Arguments that are no model and no method: what was given, and what to give."""

import pytest
import torch

import hf_specdec
from hf_specdec import SpecConfigError
from tests.helpers.models import tiny_llama


@pytest.mark.parametrize(
    ("wrap", "remedy"),
    [
        (lambda model: torch.nn.DataParallel(model), "pass the model inside, `model.module`"),
        (lambda model: None, "got NoneType. Load one"),
        (lambda model: torch.nn.Linear(2, 2), "got Linear. Load one"),
    ],
)
def test_what_is_no_model_of_transformers(wrap, remedy):
    given = wrap(tiny_llama())
    for call in (
        lambda: hf_specdec.generate(given, torch.ones(1, 3, dtype=torch.long), spec_method="ngram"),
        lambda: hf_specdec.load_speculator(given, "ngram"),
        lambda: hf_specdec.generate_many(given, [[1, 2]], 1, spec_method="ngram"),
    ):
        with pytest.raises(SpecConfigError, match=remedy):
            call()


def test_a_compiled_model():
    with pytest.raises(SpecConfigError, match="`model._orig_mod`"):
        hf_specdec.generate(torch.compile(tiny_llama()), torch.ones(1, 3, dtype=torch.long), spec_method="ngram")


@pytest.mark.parametrize(("name", "meant"), [("OFF", "off"), ("Ngram", "ngram"), ("AUTO", "auto")])
def test_methods_in_another_case(name, meant):
    with pytest.raises(SpecConfigError, match=f"Did you mean '{meant}'.*Choose from: .*ngram.*, auto, off"):
        tiny_llama().generate(torch.ones(1, 3, dtype=torch.long), spec_method=name)
