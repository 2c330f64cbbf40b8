"""Stacks of processors say what the host's list would, for every node, and warpers without a sort keep the same."""

from __future__ import annotations

import inspect
from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessorList

from hf_specdec.logits import warpers
from hf_specdec.logits.processors import ProcessorStack
from hf_specdec.logits.warpers import Warpers, and_then, without_sort
from tests.helpers.levels import in_full


V = 200
WARPERS = {
    "top-p": lambda amount, least: hf.TopPLogitsWarper(amount, min_tokens_to_keep=least),
    "typical": lambda amount, least: hf.TypicalLogitsWarper(amount, min_tokens_to_keep=least),
}
TEMPERATURE, TOP_K = hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(5)
TOP_P, MIN_P = hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.1)
NO_TOKENS = torch.empty((3, 0), dtype=torch.long)


@pytest.fixture(autouse=True)
def few_first(monkeypatch):
    """Looks at so few first that some rows need more."""
    monkeypatch.setattr(warpers, "_FIRST", 24)


def random_scores(seed, sharpness, is_coarse=False, masked=0):
    """Scores of three rows; in half precision, many tokens are equally probable."""
    scores = torch.randn((3, V), generator=torch.Generator().manual_seed(seed)) * sharpness
    scores = scores.round() if is_coarse else scores
    scores[:, :masked] = -torch.inf
    return scores


@pytest.mark.parametrize(
    ("name", "is_coarse"), [("top-p", False), ("typical", True), *in_full(("top-p", True), ("typical", False))]
)
@given(
    seed=st.integers(0, 1000),
    amount=st.floats(0.05, 0.999),
    least=st.integers(1, 5),
    sharpness=st.floats(0.1, 12.0),
    masked=st.integers(0, 190),
)
def test_the_same_tokens_are_kept(name, is_coarse, seed, amount, least, sharpness, masked):
    if is_coarse:
        amount, least, sharpness, masked = min(amount, 0.99), 1, max(sharpness / 2, 0.3), 0
    warper, scores = WARPERS[name](amount, least), random_scores(seed, sharpness, is_coarse, masked)
    expected, found = warper(NO_TOKENS, scores.clone()), without_sort(warper)(NO_TOKENS, scores.clone())
    differ = (expected != found).nonzero()
    # Sums in another order may differ in the last bit, and a token's turn with them.
    assert len(differ) <= (0 if is_coarse else 1)
    assert torch.allclose(expected.softmax(-1), found.softmax(-1), atol=0.06 if len(differ) else 1e-6)


class Watched(hf.TopPLogitsWarper):
    """A user's own kind, which counts the rows that it is asked about."""

    rows = 0

    def __call__(self, input_ids, scores):
        self.rows += len(scores)
        return super().__call__(input_ids, scores)


def test_rows_that_need_more_are_left_to_transformers_and_so_are_own_kinds():
    scores = torch.stack([torch.arange(V, dtype=torch.float32) * 3, torch.zeros(V), torch.zeros(V)])
    warper, watched = without_sort(hf.TopPLogitsWarper(0.9)), Watched(0.9)
    warper.warper = watched
    assert torch.equal(warper(NO_TOKENS, scores), hf.TopPLogitsWarper(0.9)(NO_TOKENS, scores))
    assert watched.rows == 2
    # What others keep under the name of a setting is theirs.
    own = Watched(0.9)
    own.top_p = None
    for kept in (watched, TOP_K, own):
        assert without_sort(kept) is kept
    assert ProcessorStack(LogitsProcessorList([hf.TopPLogitsWarper(0.5), watched])).unknown_names == ["Watched"]
    # A vocabulary may be small, a distribution kept whole, or none.
    for make in WARPERS.values():
        found = without_sort(make(0.9, 1))(NO_TOKENS[:1], torch.full((1, V), torch.nan))
        assert not (found.softmax(-1) > 0).any()
    scores = torch.zeros(1, V).index_fill_(1, torch.tensor([3]), 30.0)
    assert without_sort(hf.TopPLogitsWarper(1.0))(NO_TOKENS[:1], scores).isfinite().all()
    scores = random_scores(0, 2.0)[:, :20]
    assert torch.equal(without_sort(TOP_P)(NO_TOKENS, scores), TOP_P(NO_TOKENS, scores))


def test_warpers_that_follow_each_other_are_applied_together():
    penalty = hf.RepetitionPenaltyLogitsProcessor(1.2)
    first = reduce(and_then, [TEMPERATURE, TOP_K, TOP_P, MIN_P], [])
    second = reduce(and_then, [penalty, TEMPERATURE, TOP_P, TOP_K, MIN_P], [])
    assert [kind.warping for kind in first] == [(0.7, 5, 0.9, 0.1)]
    assert second[0] is penalty
    assert [kind.warping for kind in second[1:]] == [(0.7, None, 0.9, None), (1.0, 5, None, 0.1)]
    for apart in (
        hf.TopKLogitsWarper(5, filter_value=-1e9),
        hf.TopKLogitsWarper(5, min_tokens_to_keep=2),
        hf.TopPLogitsWarper(0.9, min_tokens_to_keep=2),
        hf.TopPLogitsWarper(1.0),
        hf.MinPLogitsWarper(0.1, filter_value=-1e9),
        type("OwnTemperature", (hf.TemperatureLogitsWarper,), {})(0.7),
    ):
        run = reduce(and_then, [TEMPERATURE, apart], [])
        assert len(run) == 2
        assert not isinstance(run[1], Warpers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *in_full(torch.float32)])
def test_on_a_cpu_warpers_are_applied_one_after_the_other(dtype):
    given_warpers = LogitsProcessorList([TEMPERATURE, hf.TopKLogitsWarper(50), TOP_P, hf.MinPLogitsWarper(0.02)])
    logits = random_scores(0, 3.0).to(dtype)
    before = logits.clone()
    found = ProcessorStack(given_warpers).all_nodes(logits)
    assert found.dtype == torch.float32
    assert torch.equal(found, given_warpers(NO_TOKENS, logits.float()))
    assert torch.equal(logits, before)


def test_rows_of_nodes_are_processed_with_their_texts_and_a_processor_that_asks_for_more_is_refused(monkeypatch):
    processors = LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(1.5), hf.TemperatureLogitsWarper(0.5)])
    sequences, logits = [torch.tensor([1, 2, 2]), torch.tensor([3, 0, 1])], torch.linspace(-1, 2, 8).repeat(2, 1)
    expected = processors(torch.stack(sequences), logits)
    asking = LogitsProcessorList([type("Asking", (), {"__call__": lambda self, input_ids, scores, step: scores})()])
    with pytest.raises(ValueError, match="required parameters"):
        ProcessorStack(asking).rows(sequences, logits, [0, 1])
    stack = ProcessorStack(processors)
    # Signatures are not read for every node.
    monkeypatch.setattr(inspect, "signature", lambda *_: pytest.fail("a signature was read"))
    assert torch.equal(stack.rows(sequences, logits, [0, 1]), expected)
    ragged = stack.rows([sequences[0], sequences[1][:2]], logits, [0, 1])
    assert torch.equal(ragged[0], expected[0])
