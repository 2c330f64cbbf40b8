"""Sampling: the text depends on the seed alone, and has the target's exact distribution.

The distribution of the first tokens is enumerated with the target and transformers' own processors, and compared by
chi-square with the texts of many rows of one prompt. Seeds are fixed, so the p-values are too.
"""

import pytest
import torch
from transformers import LogitsProcessor

from hf_specdec import SpecDecError, record
from hf_specdec.kernels.sampling import sample_from_probs
from hf_specdec.logits import rules, verifier
from hf_specdec.logits.verifier import take_nodes
from tests.helpers.distribution import (
    NUM_ROWS,
    P_VALUE,
    SAMPLING,
    SETTINGS,
    V,
    exact_distribution,
    no_drafts,
    sample,
    sampled_counts,
    scripted_rows,
)
from tests.helpers.levels import full, in_full
from tests.helpers.models import VOCAB_SIZE, prompts, scripted_for
from tests.helpers.sampled import sampled_speculator
from tests.helpers.statistics import chi_square_pvalue


P_WRONG = 1e-6
TREE = (-1, -1, 0, 0, 1, 3, 3)
# Without effect, but every position must be shown to it.
WALK = {"no_repeat_ngram_size": 30}


@pytest.fixture(scope="module")
def inputs():
    return prompts(3)


@pytest.fixture(scope="module")
def text(model, inputs):
    """Our own loop without drafts."""
    return sample(model, inputs, assistant=no_drafts())


# One seed, one text: whatever is drafted, and whoever shares the batch


def test_text_is_the_same_for_every_draft(model, inputs, text):
    for number, k in enumerate((1, 2, 5, 8)):
        for tree in (None, TREE, "random"):
            accuracy = (0.0, 0.5, 0.9)[(number + bool(tree)) % 3]
            speculator = scripted_for(text, inputs, k=k, accuracy=accuracy, tree=tree, seed=3)
            for walk in ({}, WALK, {"logits_processor": [lambda input_ids, scores: scores]}):
                with record() as made:
                    assert torch.equal(sample(model, inputs, assistant=speculator, **walk), text)
                assert accuracy < 0.9 or made.calls[0].stats.num_accepted_tokens > 10


@full
def test_text_is_the_same_for_every_warper(model, inputs):
    for warper in (
        {"min_p": 0.05},
        {"typical_p": 0.7},
        {"epsilon_cutoff": 0.02},
        {"eta_cutoff": 0.05},
        {"top_h": 0.5},
        {"suppress_tokens": [3, 9]},
        {"renormalize_logits": True, "top_p": 0.6},
    ):
        settings = {"top_k": 0, "temperature": 1.0, **warper}
        alone = sample(model, inputs, assistant=no_drafts(), **settings)
        speculator = scripted_for(alone, inputs, accuracy=0.9, tree="random")
        for walk in ({}, WALK):
            assert torch.equal(sample(model, inputs, assistant=speculator, **settings, **walk), alone)


def test_text_is_the_same_in_every_batch(model, inputs, text):
    alone = {name: value[:1, 2:] for name, value in inputs.items()}
    for speculator in (no_drafts(), scripted_for(text[:1, 2:], alone, accuracy=0.8)):
        assert torch.equal(sample(model, alone, assistant=speculator), text[:1, 2:])
    padded = {name: torch.nn.functional.pad(value[:2], (5, 0)) for name, value in inputs.items()}
    assert torch.equal(sample(model, padded, spec_method="ngram")[:, 5:], text[:2])
    # Rows that end apart.
    eos = [int(text[0, 10]), int(text[1, 14]), int(text[2, 12])]
    ended = sample(model, inputs, eos_token_id=eos, assistant=no_drafts())
    for tree in (None, "random"):
        speculator = scripted_for(text, inputs, accuracy=0.9, tree=tree)
        assert torch.equal(sample(model, inputs, eos_token_id=eos, assistant=speculator), ended)
    for row in range(3):
        end = next(i for i, token in enumerate(text[row, 7:].tolist()) if token in eos)
        assert torch.equal(ended[row, : 7 + end + 1], text[row, : 7 + end + 1])


@full
def test_drawn_drafts_and_calls_without_drafts_repeat_with_the_seed(model, inputs, text):
    for widths in ((1, 1, 1, 1), (2, 2, 1)):
        first, *others = (
            sample(model, inputs, assistant=sampled_speculator(4, widths=widths), **walk) for walk in ({}, {}, WALK)
        )
        assert all(torch.equal(first, other) for other in others)
    texts = [sample(model, inputs, seed=seed, spec_method="ngram") for seed in range(5)]
    assert len({tuple(text.flatten().tolist()) for text in texts}) == 5
    torch.manual_seed(0)
    calls = [model.generate(**inputs, **SAMPLING, spec_method="ngram") for _ in range(2)]
    assert torch.equal(calls[0], text)
    assert not torch.equal(calls[0], calls[1])


class Nothing(LogitsProcessor):
    """Leaves no token possible after a while."""

    def __call__(self, input_ids, scores):
        return scores if input_ids.shape[1] < 12 else torch.full_like(scores, float("-inf"))


@full
def test_no_token_is_left(model, inputs, text):
    for speculator in (no_drafts(), scripted_for(text, inputs), sampled_speculator()):
        for settings in ({"logits_processor": [Nothing()]}, {"suppress_tokens": list(range(VOCAB_SIZE))}):
            with pytest.raises(SpecDecError, match="no token to draw"):
                sample(model, inputs, assistant=speculator, **settings)


WAYS = {
    "greedy": {"do_sample": False},
    "greedy, suppressed tokens": {"do_sample": False, "suppress_tokens": [3, 5]},
    "sampled": {"top_k": 0},
    "warped": {"top_k": 40, "top_p": 0.8},
}


@pytest.mark.parametrize("name", ["warped", *in_full(*list(WAYS)[:3])])
def test_judging_along_the_path_alone(model, inputs, name, monkeypatch):
    """Verdicts off the path have no say: a text is the same without them."""
    plain = sample(model, inputs, assistant=no_drafts(), **WAYS[name])
    walks, run, accepted = [], verifier._Walk.run, []
    monkeypatch.setattr(verifier._Walk, "run", lambda walk: walks.append(walk) or run(walk))
    for scores_of_a_step in (0, 10**12):
        monkeypatch.setattr(verifier, "_SCORES_OF_A_STEP", scores_of_a_step)
        monkeypatch.setattr(verifier, "_PROCESSED_OF_A_STEP", scores_of_a_step)
        speculator = scripted_for(plain, inputs, accuracy=0.7, tree=TREE, seed=3)
        with record() as made:
            assert torch.equal(sample(model, inputs, assistant=speculator, **WAYS[name]), plain)
        accepted.append(made.calls[0].stats.num_accepted_tokens)
        # No step is cheap enough for the second one.
        assert bool(walks) == (scores_of_a_step == 0)
        walks.clear()
    assert accepted[0] == accepted[1] > 10


# Exact distributions


class Shift(LogitsProcessor):
    """An unknown processor that depends on the last token."""

    def __call__(self, input_ids, scores):
        return scores + 0.7 * (torch.arange(V) == (input_ids[:, -1:] + 1) % V)


# Chosen drafts leave the text of a seed as it is, so that few of them are compared here.
DRAFTERS = {
    "no_drafts": no_drafts,
    "one_hot_chain": scripted_rows,
    "one_hot_tree": lambda: scripted_rows((-1, -1, 0, 0, 1, 1)),
    "sampled_chain": lambda: sampled_speculator(3),
    "sampled_chain_processed": lambda: sampled_speculator(3, processed=True),
    "sampled_tree": lambda: sampled_speculator(3, widths=(3, 2)),
    "sampled_tree_processed": lambda: sampled_speculator(3, widths=(2, 2, 1), processed=True),
}
# Settings that are judged at once, and settings that read tokens, for which paths are walked.
AT_ONCE, WALKED = list(SETTINGS)[:4], list(SETTINGS)[4:]
EVERY = {**SETTINGS, "unknown_processor": {"top_k": 0, "logits_processor": [Shift()]}}
SHORT = [("no_drafts", "top_p"), ("sampled_chain", WALKED[1]), ("sampled_tree", "top_k")]
SHORT += [("one_hot_tree", "unknown_processor")]
PAIRS = [(drafter, some[number % len(some)]) for number, drafter in enumerate(DRAFTERS) for some in (AT_ONCE, WALKED)]
PAIRS += [(drafter, "unknown_processor") for drafter in ("sampled_chain", "sampled_tree")]


@pytest.mark.parametrize(("drafter", "setting"), [*SHORT, *in_full(*(pair for pair in PAIRS if pair not in SHORT))])
def test_joint_distribution(drafter, setting):
    counts, stats = sampled_counts(EVERY[setting], DRAFTERS[drafter]())
    assert chi_square_pvalue(counts, exact_distribution(EVERY[setting])) > P_VALUE
    assert drafter == "no_drafts" or stats.num_accepted_tokens > 0.1 * NUM_ROWS


@pytest.mark.parametrize(("widths", "walk"), [((3, 2), {}), *in_full(((1, 1, 1), {}), ((3, 2), WALK))])
def test_drafts_that_lie_about_their_distribution_are_noticed(widths, walk):
    settings = {**SETTINGS["plain"], **walk}
    counts, _ = sampled_counts(settings, sampled_speculator(3, widths=widths, claim="uniform"))
    assert chi_square_pvalue(counts, exact_distribution(settings)) < P_WRONG


@pytest.mark.parametrize("name", ["one_hot_tree", *in_full("one_hot_chain")])
def test_a_new_draw_where_the_path_ends_is_noticed(name, monkeypatch):
    """The token after the path must be the draw that led out of the tree, not another one."""

    def judge(rule, draft, scores, rows, positions):
        accepted = right_judge(rule, draft, scores, rows, positions)
        last = accepted.num_accepted[:, None]
        probs = take_nodes(scores.softmax(-1), accepted.path.gather(1, last))
        accepted.tokens.scatter_(1, last, sample_from_probs(probs, torch.rand(last.shape, generator=generator)))
        return accepted

    right_judge = rules.StandardRule.judge
    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(rules.StandardRule, "judge", judge)
    wrong, _ = sampled_counts(SETTINGS["plain"], DRAFTERS[name]())
    assert chi_square_pvalue(wrong, exact_distribution(SETTINGS["plain"])) < P_WRONG
