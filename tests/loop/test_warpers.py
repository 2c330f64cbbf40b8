"""Warpers without a sort keep what transformers' own keep."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessorList

from hf_specdec.logits import warpers
from hf_specdec.logits.processors import ProcessorStack
from hf_specdec.logits.warpers import Warpers, and_then, without_sort


V = 200
WARPERS = {
    "top-p": lambda amount, least: hf.TopPLogitsWarper(amount, min_tokens_to_keep=least),
    "typical": lambda amount, least: hf.TypicalLogitsWarper(amount, min_tokens_to_keep=least),
}
NO_TOKENS = torch.empty((3, 0), dtype=torch.long)


@pytest.fixture(autouse=True)
def few_first(monkeypatch):
    """Looks at so few first that some rows need more."""
    monkeypatch.setattr(warpers, "_FIRST", 24)


def random_scores(seed, sharpness, is_coarse=False, masked=0):
    scores = torch.randn((3, V), generator=torch.Generator().manual_seed(seed)) * sharpness
    # As in half precision, many tokens are equally probable.
    scores = scores.round() if is_coarse else scores
    scores[:, :masked] = -torch.inf
    return scores


@pytest.mark.parametrize("name", WARPERS)
@settings(max_examples=80)
@given(
    seed=st.integers(0, 1000),
    amount=st.floats(0.05, 0.999),
    least=st.integers(1, 5),
    sharpness=st.floats(0.1, 12.0),
    masked=st.integers(0, 190),
)
def test_the_same_tokens(name, seed, amount, least, sharpness, masked):
    warper, scores = WARPERS[name](amount, least), random_scores(seed, sharpness, masked=masked)
    expected, found = warper(NO_TOKENS, scores.clone()), without_sort(warper)(NO_TOKENS, scores.clone())
    differ = (expected != found).nonzero()
    # Sums in another order may differ in the last bit, and a token's turn with them.
    assert len(differ) <= 1
    assert torch.allclose(expected.softmax(-1), found.softmax(-1), atol=0.06 if len(differ) else 1e-6)


@pytest.mark.parametrize("name", WARPERS)
@settings(max_examples=40)
@given(seed=st.integers(0, 1000), amount=st.floats(0.05, 0.99), sharpness=st.floats(0.3, 6.0))
def test_the_same_of_equally_probable_tokens(name, seed, amount, sharpness):
    warper, scores = WARPERS[name](amount, 1), random_scores(seed, sharpness, is_coarse=True)
    expected, found = warper(NO_TOKENS, scores.clone()), without_sort(warper)(NO_TOKENS, scores.clone())
    assert torch.equal(expected, found)


def test_rows_that_need_more_are_left_to_transformers():
    scores = torch.stack([torch.arange(V, dtype=torch.float32) * 3, torch.zeros(V), torch.zeros(V)])
    asked = []

    class Watched(hf.TopPLogitsWarper):
        def __call__(self, input_ids, scores):
            asked.append(len(scores))
            return super().__call__(input_ids, scores)

    warper = without_sort(hf.TopPLogitsWarper(0.9))
    warper.warper = Watched(0.9)
    found = warper(NO_TOKENS, scores)
    assert asked == [2]
    assert torch.equal(found, hf.TopPLogitsWarper(0.9)(NO_TOKENS, scores))


@pytest.mark.parametrize("name", WARPERS)
def test_scores_that_are_no_numbers_leave_no_token(name):
    scores = torch.full((1, V), torch.nan)
    found = without_sort(WARPERS[name](0.9, 1))(NO_TOKENS[:1], scores)
    assert not (found.softmax(-1) > 0).any()


def test_all_of_a_distribution_is_kept():
    scores = torch.zeros(1, V).index_fill_(1, torch.tensor([3]), 30.0)
    assert without_sort(hf.TopPLogitsWarper(1.0))(NO_TOKENS[:1], scores).isfinite().all()


def test_only_what_is_exactly_transformers_own():
    class Own(hf.TopPLogitsWarper):
        pass

    own, top_k = Own(0.9), hf.TopKLogitsWarper(5)
    assert without_sort(own) is own
    assert without_sort(top_k) is top_k
    stack = ProcessorStack(LogitsProcessorList([hf.TopPLogitsWarper(0.5), Own(0.9)]))
    assert stack.unknown_names == ["Own"]


def test_a_small_vocabulary_is_sorted():
    warper, scores = hf.TopPLogitsWarper(0.7), random_scores(0, 2.0)[:, :20]
    assert torch.equal(without_sort(warper)(NO_TOKENS, scores), warper(NO_TOKENS, scores))


def warpers_of(**settings) -> list:
    kinds = (hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper)
    names = ("temperature", "top_k", "top_p", "min_p")
    return [kind(settings[name]) for kind, name in zip(kinds, names) if name in settings]


def test_those_that_follow_each_other_are_applied_together():
    temperature, top_k, top_p, min_p = warpers_of(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    penalty = hf.RepetitionPenaltyLogitsProcessor(1.2)
    first = reduce(and_then, [temperature, top_k, top_p, min_p], [])
    second = reduce(and_then, [penalty, temperature, top_p, top_k, min_p], [])
    assert [kind.warping for kind in first] == [(0.7, 5, 0.9, 0.1)]
    assert second[0] is penalty
    assert [kind.warping for kind in second[1:]] == [(0.7, None, 0.9, None), (1.0, 5, None, 0.1)]


@pytest.mark.parametrize(
    "processor",
    [
        hf.TopKLogitsWarper(5, filter_value=-1e9),
        hf.TopKLogitsWarper(5, min_tokens_to_keep=2),
        hf.TopPLogitsWarper(0.9, min_tokens_to_keep=2),
        hf.TopPLogitsWarper(1.0),
        hf.MinPLogitsWarper(0.1, filter_value=-1e9),
        type("Own", (hf.TemperatureLogitsWarper,), {})(0.7),
    ],
)
def test_those_of_other_settings_are_not(processor):
    run = reduce(and_then, [hf.TemperatureLogitsWarper(0.7), processor], [])
    assert len(run) == 2
    assert not isinstance(run[1], Warpers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_they_are_applied_one_after_the_other(dtype):
    warpers = warpers_of(temperature=0.7, top_k=50, top_p=0.9, min_p=0.02)
    logits = random_scores(0, 3.0).to(dtype)
    before = logits.clone()
    found = ProcessorStack(LogitsProcessorList(warpers)).all_nodes(logits)
    assert found.dtype == torch.float32
    assert torch.equal(found, LogitsProcessorList(warpers)(NO_TOKENS, logits.float()))
    assert torch.equal(logits, before)
