"""Sampling: the text depends on the seed alone, and has the target's exact distribution.

The distribution of the first tokens is enumerated with the target and transformers' own processors, and compared by
chi-square with the texts of many rows of one prompt. Seeds are fixed, so the p-values are too.
"""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor

from hf_specdec import SpecDecError, record
from hf_specdec.kernels.acceptance import Acceptance
from hf_specdec.kernels.sampling import sample_from_probs
from hf_specdec.logits import rules, verifier
from hf_specdec.logits.verifier import take_nodes
from tests.helpers.distribution import (
    NUM_ROWS,
    P_VALUE,
    PROMPT,
    SAMPLING,
    SETTINGS,
    V,
    exact_distribution,
    no_drafts,
    sample,
    sampled_counts,
    scripted_rows,
    small_model,
)
from tests.helpers.models import VOCAB_SIZE, prompts, scripted_for
from tests.helpers.pairs import every_pair
from tests.helpers.sampled import sampled_speculator
from tests.helpers.statistics import chi_square_pvalue


@pytest.fixture(scope="module")
def inputs():
    return prompts(3)


@pytest.fixture(scope="module")
def text(model, inputs):
    """Our own loop without drafts."""
    return sample(model, inputs, assistant=no_drafts())


class TestOneSeedOneText:
    """Sampled tokens are the same whatever is drafted, and whoever shares the batch."""

    @every_pair(
        k=[1, 2, 5, 8],
        tree={"chain": None, "tree": (-1, -1, 0, 0, 1, 3, 3), "ragged_tree": "random"},
        accuracy=[0.0, 0.5, 0.9],
    )
    def test_every_draft(self, model, inputs, text, k, tree, accuracy):
        with record() as made:
            ours = sample(
                model, inputs, assistant=scripted_for(text, inputs, k=k, accuracy=accuracy, tree=tree, seed=3)
            )
        assert torch.equal(ours, text)
        assert accuracy < 0.9 or made.calls[0].stats.num_accepted_tokens > 10

    @pytest.mark.parametrize(
        "walk", [{"no_repeat_ngram_size": 30}, {"logits_processor": [lambda input_ids, scores: scores]}]
    )
    def test_both_ways_of_verification_agree(self, model, inputs, text, walk):
        """Processors without effect that must be shown every position."""
        for tree in (None, "random"):
            speculator = scripted_for(text, inputs, accuracy=0.9, tree=tree)
            assert torch.equal(sample(model, inputs, assistant=speculator, **walk), text)

    @pytest.mark.parametrize(
        "warper",
        [
            {"min_p": 0.05},
            {"typical_p": 0.7},
            {"epsilon_cutoff": 0.02},
            {"eta_cutoff": 0.05},
            {"top_h": 0.5},
            {"suppress_tokens": [3, 9]},
            {"renormalize_logits": True, "top_p": 0.6},
        ],
        ids=lambda warper: next(iter(warper)),
    )
    def test_every_warper_both_ways(self, model, inputs, warper):
        settings = {"top_k": 0, "temperature": 1.0, **warper}
        alone = sample(model, inputs, assistant=no_drafts(), **settings)
        speculator = scripted_for(alone, inputs, accuracy=0.9, tree="random")
        assert torch.equal(sample(model, inputs, assistant=speculator, **settings), alone)
        walked = sample(model, inputs, assistant=speculator, **settings, no_repeat_ngram_size=30)
        assert torch.equal(walked, alone)

    @pytest.mark.parametrize("accuracy", [None, 0.8])
    def test_batch_composition(self, model, inputs, text, accuracy):
        start = 2
        alone = {name: value[:1, start:] for name, value in inputs.items()}
        speculator = no_drafts() if accuracy is None else scripted_for(text[:1, start:], alone, accuracy=accuracy)
        assert torch.equal(sample(model, alone, assistant=speculator), text[:1, start:])
        padded = {name: torch.nn.functional.pad(value[:2], (5, 0)) for name, value in inputs.items()}
        assert torch.equal(sample(model, padded, spec_method="ngram")[:, 5:], text[:2])

    @pytest.mark.parametrize("walk", [{}, {"no_repeat_ngram_size": 30}], ids=["at_once", "walk"])
    @pytest.mark.parametrize("widths", [(1, 1, 1, 1), (2, 2, 1)])
    def test_sampled_drafts_repeat_with_the_seed(self, model, inputs, widths, walk):
        first = sample(model, inputs, assistant=sampled_speculator(4, widths=widths))
        again = sample(model, inputs, assistant=sampled_speculator(4, widths=widths), **walk)
        assert torch.equal(first, again)

    def test_rows_that_end_apart(self, model, inputs, text):
        eos = [int(text[0, 10]), int(text[1, 14]), int(text[2, 12])]
        alone = sample(model, inputs, eos_token_id=eos, assistant=no_drafts())
        for tree in (None, "random"):
            speculator = scripted_for(text, inputs, accuracy=0.9, tree=tree)
            assert torch.equal(sample(model, inputs, eos_token_id=eos, assistant=speculator), alone)
        for row in range(3):
            end = next(i for i, token in enumerate(text[row, 7:].tolist()) if token in eos)
            assert torch.equal(alone[row, : 7 + end + 1], text[row, : 7 + end + 1])

    def test_seeds_matter(self, model, inputs, text):
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


def test_no_token_is_left(model, inputs, text):
    walk = {"logits_processor": [Nothing()]}
    for speculator in (no_drafts(), scripted_for(text, inputs), sampled_speculator()):
        with pytest.raises(SpecDecError, match="no token to draw"):
            sample(model, inputs, assistant=speculator, **walk)
        with pytest.raises(SpecDecError, match="no token to draw"):
            sample(model, inputs, assistant=speculator, suppress_tokens=list(range(VOCAB_SIZE)))


class Shift(LogitsProcessor):
    """An unknown processor that depends on the last token."""

    def __call__(self, input_ids, scores):
        return scores + 0.7 * (torch.arange(V) == (input_ids[:, -1:] + 1) % V)


# Chosen drafts leave the text of a seed as it is (`TestOneSeedOneText`), so that few of them are compared here.
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


class TestExactDistribution:
    @pytest.mark.parametrize(
        ("drafter", "setting"),
        [(drafter, some[number % len(some)]) for number, drafter in enumerate(DRAFTERS) for some in (AT_ONCE, WALKED)],
    )
    def test_joint_distribution(self, drafter, setting):
        counts, stats = sampled_counts(SETTINGS[setting], DRAFTERS[drafter]())
        assert chi_square_pvalue(counts, exact_distribution(SETTINGS[setting])) > P_VALUE
        assert drafter == "no_drafts" or stats.num_accepted_tokens > 0.1 * NUM_ROWS

    @pytest.mark.parametrize("name", ["one_hot_tree", "sampled_chain", "sampled_tree"])
    def test_unknown_processor(self, name):
        settings = {"top_k": 0, "logits_processor": [Shift()]}
        counts, _ = sampled_counts(settings, DRAFTERS[name]())
        assert chi_square_pvalue(counts, exact_distribution(settings)) > P_VALUE

    @pytest.mark.parametrize("name", ["one_hot_tree", "sampled_chain", "sampled_tree_processed"])
    def test_walk_without_effect(self, name):
        """The path that walks, under settings which the other path handles: the very same texts."""
        walk = {**SETTINGS["top_k"], "no_repeat_ngram_size": 30}
        counts, at_once = (
            sampled_counts(settings, DRAFTERS[name](), num_rows=300)[0] for settings in (walk, SETTINGS["top_k"])
        )
        assert torch.equal(counts, at_once)

    @pytest.mark.parametrize("walk", [{}, {"no_repeat_ngram_size": 30}], ids=["at_once", "walk"])
    @pytest.mark.parametrize("widths", [(1, 1, 1), (3, 2)], ids=["chain", "tree"])
    def test_fails_for_drafts_that_lie_about_their_distribution(self, widths, walk):
        liar = sampled_speculator(3, widths=widths, claim="uniform")
        settings = {**SETTINGS["plain"], **walk}
        counts, _ = sampled_counts(settings, liar)
        assert chi_square_pvalue(counts, exact_distribution(settings)) < 1e-6

    def test_fails_for_a_wrong_rule(self, monkeypatch):
        """Drafts that are accepted wherever the target gives them any probability."""
        right, stats = sampled_counts(SETTINGS["plain"], sampled_speculator(3))

        def accept_all(draft, target_probs, accept_uniforms, target_uniforms):
            return right_rule(draft, target_probs, torch.zeros_like(accept_uniforms), target_uniforms)

        right_rule = rules.reject_chain
        monkeypatch.setattr(rules, "reject_chain", accept_all)
        wrong, _ = sampled_counts(SETTINGS["plain"], sampled_speculator(3))
        exact = exact_distribution(SETTINGS["plain"])
        assert chi_square_pvalue(right, exact) > P_VALUE
        assert chi_square_pvalue(wrong, exact) < 1e-6

    def test_fails_for_siblings_judged_by_one_distribution(self, monkeypatch):
        """Siblings drawn without replacement, but verified as if all were drawn from the first one's distribution."""

        def count():
            return sampled_counts(SETTINGS["plain"], sampled_speculator(3, widths=(4,)), count=2)[0]

        exact, right = exact_distribution(SETTINGS["plain"], 2), count()
        monkeypatch.setattr(rules, "reject_tree", plain_reject_tree)
        assert torch.equal(count(), right)
        monkeypatch.setattr(rules, "reject_tree", partial(plain_reject_tree, replaces=True))
        wrong = count()
        assert chi_square_pvalue(right, exact) > P_VALUE
        assert chi_square_pvalue(wrong, exact) < 1e-6

    @pytest.mark.parametrize("name", ["one_hot_chain", "one_hot_tree"])
    def test_fails_for_a_new_draw_where_the_path_ends(self, name, monkeypatch):
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
        assert chi_square_pvalue(wrong, exact_distribution(SETTINGS["plain"])) < 1e-6

    def test_acceptance_rate_is_the_overlap_of_the_distributions(self):
        """Leviathan et al. 2023, Corollary 3.6: the probability of acceptance is sum_x min(p(x), q(x))."""
        inputs = torch.tensor([PROMPT]).repeat(NUM_ROWS, 1)
        torch.manual_seed(0)
        with record(trace=True) as made:
            small_model().generate(
                inputs, attention_mask=torch.ones_like(inputs), do_sample=True, top_k=0, max_new_tokens=5,
                assistant=sampled_speculator(2, widths=(1, 1)),
            )  # fmt: skip
        first = made.calls[0].cycles[0]
        accepted = sum(row.num_accepted >= 1 for row in first.rows)
        joint = exact_distribution(SETTINGS["plain"], 2)
        target = joint / joint.sum(1, keepdim=True)
        generator = torch.Generator().manual_seed(0)
        draft = torch.randn((V, V), generator=generator).double().softmax(-1)
        overlap = (joint.sum(1) * torch.minimum(target, draft).sum(1)).sum().item()
        deviation = (overlap * (1 - overlap) / NUM_ROWS) ** 0.5
        # Four standard deviations of a binomial count.
        assert abs(accepted / NUM_ROWS - overlap) < 4 * deviation


def plain_reject_tree(draft, target_probs, accept_uniforms, target_uniforms, replaces: bool = False) -> Acceptance:
    """Recursive rejection sampling of one row after the other; `replaces` forgets that drawn siblings are gone."""
    rows = []
    numbers = (value.numpy() for value in (draft.probs, target_probs, accept_uniforms))
    for tokens, parents, distributions, targets, uniforms in zip(draft.token_lists(), draft.parent_lists(), *numbers):
        path, node = [0], 0
        target = targets[0]
        while True:
            distribution, chosen = None, None
            for child in (child for child, parent in enumerate(parents) if parent == node - 1):
                distribution = distributions[child].copy() if distribution is None else distribution
                if uniforms[child] * distribution[tokens[child]] < target[tokens[child]]:
                    chosen = child + 1
                    break
                target = np.maximum(target - distribution, 0)
                target /= target.sum()
                if not replaces:
                    distribution[tokens[child]] = 0
                    distribution /= distribution.sum()
            if chosen is None:
                break
            path, node, target = [*path, chosen], chosen, targets[chosen]
        rows.append((path, [tokens[n - 1] for n in path[1:]], target))
    counts = [len(path) - 1 for path, _, _ in rows]
    ends = torch.tensor([path[-1] for path, _, _ in rows])[:, None]
    distributions = torch.stack([torch.from_numpy(target) for _, _, target in rows])
    new = sample_from_probs(distributions, target_uniforms.gather(1, ends)[:, 0]).tolist()
    size = draft.size + 1
    return Acceptance(
        torch.tensor(counts),
        torch.tensor([path + [path[-1]] * (size - len(path)) for path, _, _ in rows]),
        torch.tensor([kept + [last] + [0] * (size - len(kept) - 1) for (_, kept, _), last in zip(rows, new)]),
    )


def test_the_small_model_is_a_fair_test():
    """Distributions that are neither flat nor nearly one-hot, and that differ from the drafts'."""
    joint = exact_distribution(SETTINGS["plain"], 2)
    distribution = joint.sum(1)
    assert 0.3 < distribution.max() < 0.8
    assert distribution.min() > 0.005


class TestJudgingAlongThePath:
    """Verdicts off the path have no say: a text is the same without them."""

    SETTINGS = {
        "greedy": {"do_sample": False},
        "greedy, suppressed tokens": {"do_sample": False, "suppress_tokens": [3, 5]},
        "sampled": {"top_k": 0},
        "warped": {"top_k": 40, "top_p": 0.8},
    }

    @pytest.mark.parametrize("name", SETTINGS)
    def test_same_text(self, model, inputs, name, monkeypatch):
        plain = sample(model, inputs, assistant=no_drafts(), **self.SETTINGS[name])
        walks, run, accepted = [], verifier._Walk.run, []
        monkeypatch.setattr(verifier._Walk, "run", lambda walk: walks.append(walk) or run(walk))
        for scores_of_a_step in (0, 10**12):
            monkeypatch.setattr(verifier, "_SCORES_OF_A_STEP", scores_of_a_step)
            monkeypatch.setattr(verifier, "_PROCESSED_OF_A_STEP", scores_of_a_step)
            speculator = scripted_for(plain, inputs, accuracy=0.7, tree=(-1, -1, 0, 0, 1, 3, 3), seed=3)
            with record() as made:
                assert torch.equal(sample(model, inputs, assistant=speculator, **self.SETTINGS[name]), plain)
            accepted.append(made.calls[0].stats.num_accepted_tokens)
            # No step is cheap enough for the second one.
            assert bool(walks) == (scores_of_a_step == 0)
            walks.clear()
        assert accepted[0] == accepted[1] > 10
