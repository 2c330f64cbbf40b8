"""Sampling: the text depends on the seed alone, and has the target's exact distribution; and other acceptance rules.

The distribution of the first tokens is enumerated with the target and transformers' own processors, and compared by
chi-square with the texts of many rows of one prompt. Seeds are fixed, so the p-values are too. The definitions of
acceptance rules are tested in tests/loop/test_acceptance.py.
"""

import json
from functools import partial

import pytest
import torch

from hf_specdec import SpecConfigError, SpecDecError, SpeculativeConfig, Speculator, generate_many, record
from hf_specdec.loop import judging
from hf_specdec.loop.walk import Walk
from tests.helpers.architectures import tiny_model
from tests.helpers.chi_square import chi_square_pvalue
from tests.helpers.distribution import (
    NUM_ROWS,
    P_VALUE,
    SETTINGS,
    V,
    draft_model,
    exact_distribution,
    no_drafts,
    sample,
    sampled_counts,
    scripted_rows,
)
from tests.helpers.levels import full, in_full, split
from tests.helpers.models import VOCAB_SIZE, nothing_runs, prompts, scripted_for, tiny_llama
from tests.helpers.sampled import sampled_speculator


P_WRONG = 1e-6
TREE = (-1, -1, 0, 0, 2, 2, 4)
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
    for number, k in enumerate((1, 6)):
        for tree in (None, TREE, "random"):
            accuracy = (0.0, 0.5, 0.9)[(number + bool(tree)) % 3]
            speculator = scripted_for(text, inputs, k=k, accuracy=accuracy, tree=tree, seed=3)
            for walk in ({}, WALK, {"logits_processor": [lambda input_ids, scores: scores]}):
                with record() as made:
                    assert torch.equal(sample(model, inputs, assistant=speculator, **walk), text)
                assert accuracy < 0.9 or made.calls[0].stats.num_accepted_tokens > 10


WARPERS = [{"min_p": 0.05}, {"typical_p": 0.7}, {"epsilon_cutoff": 0.02}, {"eta_cutoff": 0.05}, {"top_h": 0.5}]
WARPERS += [{"suppress_tokens": [3, 9]}, {"renormalize_logits": True, "top_p": 0.6}]


@full
def test_text_is_the_same_for_every_warper(model, inputs):
    for warper in WARPERS:
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
def test_no_token_is_left(model, inputs, text):
    def nothing(input_ids, scores):
        return scores if input_ids.shape[1] < 12 else torch.full_like(scores, float("-inf"))

    for speculator in (no_drafts(), scripted_for(text, inputs), sampled_speculator()):
        for settings in ({"logits_processor": [nothing]}, {"suppress_tokens": list(range(VOCAB_SIZE))}):
            with pytest.raises(SpecDecError, match="no token to draw"):
                sample(model, inputs, assistant=speculator, **settings)


WAYS = {
    "greedy": {"do_sample": False},
    "greedy, suppressed tokens": {"do_sample": False, "suppress_tokens": [3, 5]},
    "sampled": {"top_k": 0},
    "warped": {"top_k": 40, "top_p": 0.8},
}


@pytest.mark.parametrize("name", split(WAYS, short=["warped"]))
def test_judging_along_the_path_alone(model, inputs, name, monkeypatch):
    """Verdicts off the path have no say: a text is the same without them."""
    plain = sample(model, inputs, assistant=no_drafts(), **WAYS[name])
    walks, run, accepted = [], Walk.wait, []
    monkeypatch.setattr(Walk, "wait", lambda walk: walks.append(walk) or run(walk))
    for scores_of_a_step in (0, 10**12):
        monkeypatch.setattr(judging, "_SCORES_OF_A_STEP", scores_of_a_step)
        monkeypatch.setattr(judging, "_PROCESSED_OF_A_STEP", scores_of_a_step)
        speculator = scripted_for(plain, inputs, accuracy=0.7, tree=TREE, seed=3)
        with record() as made:
            assert torch.equal(sample(model, inputs, assistant=speculator, **WAYS[name]), plain)
        accepted.append(made.calls[0].stats.num_accepted_tokens)
        # No step is cheap enough for the second one.
        assert bool(walks) == (scores_of_a_step == 0)
        walks.clear()
    assert accepted[0] == accepted[1] > 10


# Exact distributions


def unknown_processor(input_ids, scores):
    """Depends on the last token."""
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
EVERY = {**SETTINGS, "unknown_processor": {"top_k": 0, "logits_processor": [unknown_processor]}}
SHORT = [("no_drafts", "top_p"), ("sampled_chain", WALKED[1]), ("sampled_tree", "top_k")]
SHORT += [("one_hot_tree", "unknown_processor")]
PAIRS = [(drafter, some[number % len(some)]) for number, drafter in enumerate(DRAFTERS) for some in (AT_ONCE, WALKED)]
PAIRS += [(drafter, "unknown_processor") for drafter in ("sampled_chain", "sampled_tree")]


@pytest.mark.parametrize(("drafter", "setting"), split(PAIRS, SHORT))
def test_joint_distribution(drafter, setting):
    counts, stats = sampled_counts(EVERY[setting], DRAFTERS[drafter]())
    assert chi_square_pvalue(counts, exact_distribution(EVERY[setting])) > P_VALUE
    assert drafter == "no_drafts" or stats.num_accepted_tokens > 0.1 * NUM_ROWS


@pytest.mark.parametrize(("widths", "walk"), in_full(((3, 2), {}), ((1, 1, 1), {}), ((3, 2), WALK)))
def test_drafts_that_lie_about_their_distribution_are_noticed(widths, walk):
    settings = {**SETTINGS["plain"], **walk}
    counts, _ = sampled_counts(settings, sampled_speculator(3, widths=widths, claim="uniform"))
    assert chi_square_pvalue(counts, exact_distribution(settings)) < P_WRONG


# Other acceptance rules

BLOCK = {"rejection_sample_method": "block"}
TYPICAL = {"rejection_sample_method": "typical"}
SHAPES = (None, TREE, "random")


def synthetic(length: float) -> dict:
    return {"rejection_sample_method": "synthetic", "rejection_sample_options": length}


RULES = {"block": BLOCK, "typical": TYPICAL, "synthetic": synthetic(3)}


def with_rule(speculator: Speculator, **settings) -> Speculator:
    """The speculator under another acceptance rule."""
    config = SpeculativeConfig.resolve(speculator.config, **settings)
    return Speculator(config, speculator.generator_class, speculator.resources)


# In the last one rows draft chains of different lengths, each ended by a token of its own.
BLOCK_DRAFTS = [
    (partial(sampled_speculator, 3, processed=True), "repetition_penalty"),
    (partial(sampled_speculator, 3), "top_p"),
    (partial(draft_model, draft_confidence_threshold=0.3), "repetition_penalty_and_top_p"),
]


@pytest.mark.parametrize(("drafter", "processors"), [*in_full(*BLOCK_DRAFTS[1:]), BLOCK_DRAFTS[0]])
def test_block_keeps_the_joint_distribution(drafter, processors):
    settings = SETTINGS[processors]
    counts, stats = sampled_counts(settings, drafter(**BLOCK))
    assert chi_square_pvalue(counts, exact_distribution(settings)) > P_VALUE
    assert stats.rejection_sample_method == "block"
    assert stats.num_accepted_tokens > 200


def test_block_judges_chosen_drafts_and_trees_as_standard(model, inputs, text):
    """Processors that read tokens judge so too: they see every node here, and the accepted path alone there."""
    settings = {"eos_token_id": [5, 9], "return_dict_in_generate": True, "output_scores": True}
    for walk in ({}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 9}):
        for tree in SHAPES:
            speculator = scripted_for(text, inputs, accuracy=0.9, tree=tree)
            standard = sample(model, inputs, assistant=speculator, **settings, **walk)
            block = sample(model, inputs, assistant=with_rule(speculator, **BLOCK), **settings, **walk)
            assert torch.equal(block.sequences, standard.sequences)
            assert block.speculative.num_accepted_tokens == standard.speculative.num_accepted_tokens > 5
            for ours, theirs in zip(block.scores, standard.scores, strict=True):
                assert torch.allclose(ours, theirs, atol=1e-4)
    drawn = sample(model, inputs, assistant=sampled_speculator(widths=(2, 1), **BLOCK))
    assert torch.equal(drawn, sample(model, inputs, assistant=sampled_speculator(widths=(2, 1))))
    # Its texts repeat with the seed, and without a row's neighbours.
    speculator = sampled_speculator(4, widths=(1, 1, 1, 1), **BLOCK)
    first = {name: value[:1, 2:] for name, value in inputs.items()}
    together = sample(model, inputs, assistant=speculator)
    assert torch.equal(sample(model, inputs, assistant=speculator), together)
    assert torch.equal(sample(model, first, assistant=speculator), together[:1, 2:])


@full
def test_typical_draws_nothing_and_is_standard_for_greedy_targets(model, inputs):
    counts, stats = sampled_counts(SETTINGS["plain"], with_rule(scripted_rows(), **TYPICAL), num_rows=500)
    assert chi_square_pvalue(counts, exact_distribution(SETTINGS["plain"])) < P_WRONG
    assert not stats.is_lossless
    text = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    for tree in (None, TREE):
        speculator = with_rule(scripted_for(text, inputs, tree=tree), **TYPICAL)
        one, other = (sample(model, inputs, assistant=speculator, seed=seed) for seed in (0, 1))
        assert torch.equal(one, other)
    settings = {"do_sample": False, "max_new_tokens": 40, "return_dict_in_generate": True}
    output = sample(model, inputs, assistant=speculator, **settings)
    assert torch.equal(output.sequences, text)
    assert output.speculative.is_lossless


@full
@pytest.mark.parametrize("tree", SHAPES, ids=["chain", "tree", "ragged_tree"])
def test_synthetic_is_followed_by_the_choice_of_the_target(model, tree):
    """Wrong tokens were accepted, and the cache holds them: what follows is the target's answer to them."""
    inputs = prompts(2)
    speculator = with_rule(scripted_for(inputs["input_ids"], inputs, k=6, tree=tree), **synthetic(2.5))
    with record(trace=True) as made:
        output = sample(model, inputs, assistant=speculator, do_sample=False, max_new_tokens=60)
    for row, start in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        best = model(output[row : row + 1, start:]).logits[0].argmax(-1)
        best = torch.cat([torch.zeros(start + 1, dtype=torch.long), best])
        position = inputs["input_ids"].shape[1]
        assert output[row, position] == best[position]
        for trace in [trace for cycle in made.calls[0].cycles for trace in cycle.rows if trace.row == row]:
            position += len(trace.committed_tokens)
            if len(trace.committed_tokens) > trace.num_accepted:
                assert output[row, position] == best[position]
    assert made.calls[0].stats.num_accepted_tokens > 30


# What cannot be combined, and what is shown to criteria


def test_rules_refuse_what_reads_one_position_after_the_other(model, inputs, text):
    bloom = tiny_model("bloom")
    for rule in RULES.values():
        speculator = with_rule(scripted_for(inputs["input_ids"], inputs), **rule)
        with nothing_runs(model), pytest.raises(SpecConfigError, match=r"Use .*='standard'"):
            sample(model, inputs, assistant=speculator, logits_processor=[unknown_processor])
        with nothing_runs(bloom), pytest.raises(SpecConfigError, match="the order of its cache.*Use .*='standard'"):
            sample(bloom, prompts(2, padding=False), assistant=speculator)
        assert sample(bloom, prompts(1), assistant=speculator).shape == (1, 7 + 24)
        # Batches without drafts are decoded plainly.
        off = sampled_speculator(num_speculative_tokens_per_batch_size={1: 0}, **rule)
        output = sample(model, inputs, assistant=off, return_dict_in_generate=True)
        assert torch.equal(output.sequences, text)
        assert output.speculative.rejection_sample_method == "standard"


@full
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_criteria_of_one_row_see_every_position(model, rule):
    inputs = prompts(1)
    text = sample(model, inputs, assistant=no_drafts())
    drafters = [sampled_speculator(4, widths=(1,) * 4), scripted_for(text, inputs, tree="random")]
    for speculator in (with_rule(drafter, **rule) for drafter in drafters):
        for with_scores in (False, True):
            wanted = {"return_dict_in_generate": True, "output_scores": with_scores, "no_repeat_ngram_size": 9}

            def run(last, speculator=speculator, wanted=wanted):
                """The text up to a token, and what the criterion that ends it was shown."""
                shown = []

                def is_last(input_ids, scores):
                    shown.append((input_ids[0].tolist(), None if scores is None else len(scores)))
                    return input_ids[:, -1] == last

                output = sample(model, inputs, assistant=speculator, stopping_criteria=[is_last], **wanted)
                return output.sequences[0].tolist(), shown

            whole, _ = run(-1)
            assert len(whole) == 7 + 24
            for last in whole[10:20:3]:
                output, shown = run(last)
                assert output == whole[: whole.index(last, 7) + 1]
                assert shown == [(output[:end], end - 7 if with_scores else None) for end in range(8, len(output) + 1)]


@full
def test_the_output_says_which_rule_it_was(model, inputs):
    for name in ("standard", *RULES):
        speculator = sampled_speculator(4, widths=(1,) * 4, **RULES.get(name, {}))
        stats = sample(model, inputs, assistant=speculator, return_dict_in_generate=True).speculative
        assert stats.rejection_sample_method == name
        assert stats.is_lossless == (name in ("standard", "block"))
        assert bool(stats.notes) == (not stats.is_lossless)
        as_dict = json.loads(json.dumps(stats.to_dict()))
        assert (as_dict["rejection_sample_method"], as_dict["is_lossless"]) == (name, stats.is_lossless)


@full
def test_a_model_that_is_trained_writes_its_own_text(inputs):
    model, settings = tiny_llama().train(), {"do_sample": True, "max_new_tokens": 4}
    output = sample(model, inputs, assistant=sampled_speculator(**BLOCK), return_dict_in_generate=True)
    assert output.speculative.is_lossless
    for rule in (TYPICAL, synthetic(3)):
        with pytest.raises(SpecConfigError, match="off policy"):
            sample(model, inputs, assistant=sampled_speculator(**rule))
        (result,) = generate_many(model, [inputs["input_ids"][0]], **settings, assistant=sampled_speculator(**rule))
        assert "off policy" in str(result.error)
