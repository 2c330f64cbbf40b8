"""Acceptance rules in whole `generate()` calls: distribution, rates, what they cannot be combined with.

Their definitions are tested in tests/loop/test_block_rules.py.
"""

import json
import math

import pytest
import torch
import transformers
from transformers import LogitsProcessor, StoppingCriteria

from hf_specdec import SpecConfigError, SpecDecError, SpeculativeConfig, Speculator, generate_many, record
from hf_specdec.logits import rules
from hf_specdec.logits.randomness import RowUniforms
from hf_specdec.logits.rules import acceptance_rule
from hf_specdec.metrics import SpecDecodingStats
from tests.helpers.architectures import tiny_model
from tests.helpers.distribution import (
    P_VALUE,
    draft_model,
    exact_distribution,
    no_drafts,
    sampled_counts,
    scripted_rows,
)
from tests.helpers.distribution import SETTINGS as PROCESSORS
from tests.helpers.levels import full, in_full
from tests.helpers.models import VOCAB_SIZE, nothing_runs, prompts, scripted_for, tiny_llama
from tests.helpers.sampled import sampled_speculator
from tests.helpers.statistics import chi_square_pvalue


BLOCK = {"rejection_sample_method": "block"}
TYPICAL = {"rejection_sample_method": "typical"}
SAMPLING = {"do_sample": True, "max_new_tokens": 24, "temperature": 0.8, "top_k": 20}
TREE = (-1, -1, 0, 0, 2, 2, 4)
SHAPES = (None, TREE, "random")


def synthetic(length=None, **settings):
    length = {} if length is None else {"synthetic_acceptance_length": length}
    return {"rejection_sample_method": "synthetic", **length, **settings}


RULES = {"block": BLOCK, "typical": TYPICAL, "synthetic": synthetic(3)}


def with_rule(speculator: Speculator, **settings) -> Speculator:
    """The speculator under another acceptance rule."""
    config = SpeculativeConfig.resolve(speculator.config, **settings)
    return Speculator(config, speculator.generator_class, speculator.resources)


def sample(model, inputs, speculator, seed=0, **settings):
    transformers.set_seed(seed)
    return model.generate(**inputs, **{**SAMPLING, **settings}, assistant=speculator)


@pytest.fixture(scope="module")
def inputs():
    return prompts(3)


@pytest.fixture(scope="module")
def text(model, inputs):
    """Our own loop without drafts."""
    return sample(model, inputs, no_drafts())


@pytest.fixture(scope="module")
def greedy_text(model, inputs):
    return model.generate(**inputs, max_new_tokens=40, do_sample=False)


# Block verification

DRAWN = {
    "chain": lambda **rule: sampled_speculator(3, **rule),
    "chain_processed": lambda **rule: sampled_speculator(3, processed=True, **rule),
    # Rows draft chains of different lengths, each ended by a token of its own.
    "ragged_chain": lambda **rule: draft_model(draft_confidence_threshold=0.3, **rule),
}
OTHERS = [("chain", "top_p"), ("ragged_chain", "repetition_penalty_and_top_p")]


@pytest.mark.parametrize(("drafter", "processors"), [("chain_processed", "repetition_penalty"), *in_full(*OTHERS)])
def test_block_keeps_the_joint_distribution(drafter, processors):
    settings = PROCESSORS[processors]
    counts, stats = sampled_counts(settings, DRAWN[drafter](**BLOCK))
    assert chi_square_pvalue(counts, exact_distribution(settings)) > P_VALUE
    assert stats.rejection_sample_method == "block"
    assert stats.num_accepted_tokens > 200


def test_block_judges_chosen_drafts_and_trees_as_standard(model, inputs, text):
    """Processors that read tokens judge so too: they see every node here, and the accepted path alone there."""
    settings = {"eos_token_id": [5, 9], "return_dict_in_generate": True, "output_scores": True}
    for walk in ({}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 9}):
        for tree in SHAPES:
            speculator = scripted_for(text, inputs, accuracy=0.9, tree=tree)
            standard = sample(model, inputs, speculator, **settings, **walk)
            block = sample(model, inputs, with_rule(speculator, **BLOCK), **settings, **walk)
            assert torch.equal(block.sequences, standard.sequences)
            assert block.speculative.num_accepted_tokens == standard.speculative.num_accepted_tokens > 5
            for ours, theirs in zip(block.scores, standard.scores, strict=True):
                assert torch.allclose(ours, theirs, atol=1e-4)
    drawn = sample(model, inputs, sampled_speculator(widths=(2, 1), **BLOCK))
    assert torch.equal(drawn, sample(model, inputs, sampled_speculator(widths=(2, 1))))
    # Its texts repeat with the seed, and without a row's neighbours.
    speculator = sampled_speculator(4, widths=(1, 1, 1, 1), **BLOCK)
    first, together = {name: value[:1, 2:] for name, value in inputs.items()}, sample(model, inputs, speculator)
    assert torch.equal(sample(model, inputs, speculator), together)
    assert torch.equal(sample(model, first, speculator), together[:1, 2:])
    # The rule can be combined with processors that must see one position after the other.
    call = {**inputs, **SAMPLING, "logits_processor": [lambda input_ids, scores: scores]}
    output = model.generate(**call, speculative={"method": "ngram", **BLOCK}, return_dict_in_generate=True)
    assert output.speculative.rejection_sample_method == "standard"


# Typical acceptance


@full
def test_typical_draws_nothing_and_is_standard_for_greedy_targets(model, inputs, greedy_text):
    counts, stats = sampled_counts(PROCESSORS["plain"], with_rule(scripted_rows(), **TYPICAL), num_rows=500)
    assert chi_square_pvalue(counts, exact_distribution(PROCESSORS["plain"])) < 1e-6
    assert not stats.is_lossless
    for tree in (None, TREE):
        speculator = with_rule(scripted_for(greedy_text, inputs, tree=tree), **TYPICAL)
        assert torch.equal(sample(model, inputs, speculator), sample(model, inputs, speculator, seed=1))
    output = sample(model, inputs, speculator, do_sample=False, max_new_tokens=40, return_dict_in_generate=True)
    assert torch.equal(output.sequences, greedy_text)
    assert output.speculative.rejection_sample_method == "standard"
    assert output.speculative.is_lossless


# Synthetic acceptance

LONG = {"max_new_tokens": 200, "temperature": 1.0, "top_k": 0}


def full_drafts(call, depth):
    """Accepted tokens of the rows of all cycles in which the path of first children was at least `depth` long."""
    for row in [row for cycle in call.cycles for row in cycle.rows]:
        length, node = 0, -1
        for index, parent in enumerate(row.parents):
            if parent == node:
                length, node = length + 1, index
        if length >= depth:
            yield row.num_accepted


@pytest.mark.parametrize(
    ("batch_size", "tree", "do_sample"), [(4, TREE, True), *in_full((1, None, True), (4, None, False))]
)
def test_synthetic_reaches_its_mean_length(model, batch_size, tree, do_sample):
    """Drafts are ones that the target would never accept."""
    length, inputs = 3.4, prompts(batch_size)
    speculator = with_rule(scripted_for(inputs["input_ids"], inputs, k=6, tree=tree), **synthetic(length))
    with record(trace=True) as made:
        sample(model, inputs, speculator, do_sample=do_sample, **LONG)
    accepted = list(full_drafts(made.calls[0], 3))
    assert set(accepted) == {2, 3}
    deviation = math.sqrt(0.4 * 0.6 / len(accepted))
    assert abs(sum(accepted) / len(accepted) - (length - 1)) < 4 * deviation
    # The last cycle of a row is cut.
    assert made.calls[0].stats.mean_acceptance_length == pytest.approx(length, abs=4 * deviation + 0.1)


@full
@pytest.mark.parametrize("tree", SHAPES, ids=["chain", "tree", "ragged_tree"])
def test_synthetic_is_followed_by_the_choice_of_the_target(model, tree):
    """Wrong tokens were accepted, and the cache holds them: what follows is the target's answer to them."""
    inputs = prompts(2)
    speculator = with_rule(scripted_for(inputs["input_ids"], inputs, k=6, tree=tree), **synthetic(2.5))
    with record(trace=True) as made:
        output = sample(model, inputs, speculator, do_sample=False, max_new_tokens=60)
    for row, start in enumerate((inputs["attention_mask"] == 0).sum(1).tolist()):
        with torch.no_grad():
            best = model(output[row : row + 1, start:]).logits[0].argmax(-1)
        best = torch.cat([torch.zeros(start + 1, dtype=torch.long), best])
        position = inputs["input_ids"].shape[1]
        assert output[row, position] == best[position]
        for trace in [trace for cycle in made.calls[0].cycles for trace in cycle.rows if trace.row == row]:
            position += len(trace.committed_tokens)
            if len(trace.committed_tokens) > trace.num_accepted:
                assert output[row, position] == best[position]
    assert made.calls[0].stats.num_accepted_tokens > 30


@full
def test_synthetic_ends_seeds_and_lengths(model):
    inputs = prompts(1)
    text = torch.cat([inputs["input_ids"], torch.full((1, 60), 33)], dim=1)
    speculator = with_rule(scripted_for(text, inputs, k=4, accuracy=1.0), **synthetic(4))
    output = sample(model, inputs, speculator, eos_token_id=33, max_new_tokens=40, do_sample=False)
    # It ends inside the accepted tokens.
    assert (output == 33).sum() == 1
    assert output[0, -1] == 33
    # Greedy calls draw from torch's generator.
    speculator = with_rule(scripted_for(inputs["input_ids"], inputs), **synthetic(2.5))
    outputs = [sample(model, inputs, speculator, seed=seed, do_sample=False) for seed in (0, 0, 1)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    drafts = scripted_for(inputs["input_ids"], inputs, k=5)
    sample(model, inputs, with_rule(drafts, **synthetic(6)))
    for length in (6.5, 7):
        with nothing_runs(model), pytest.raises(SpecConfigError, match="drafts of at least 6 tokens, got.*most 5.*6"):
            sample(model, inputs, with_rule(drafts, **synthetic(length)))


# What cannot be combined, and what is shown to criteria


class Unknown(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class StopAt(StoppingCriteria):
    """Ends a row after a token, and remembers what it was shown."""

    def __init__(self, token=-1):
        self.token, self.shown = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append((input_ids[0].tolist(), None if scores is None else len(scores)))
        return input_ids[:, -1] == self.token


EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


@EVERY_RULE
def test_rules_refuse_what_reads_one_position_after_the_other(model, inputs, text, rule):
    speculator = with_rule(scripted_for(inputs["input_ids"], inputs), **rule)
    with nothing_runs(model), pytest.raises(SpecConfigError, match=r"\(Unknown\).*Use .*='standard'"):
        sample(model, inputs, speculator, logits_processor=[Unknown()])
    bloom, two = tiny_model("bloom"), prompts(2, padding=False)
    with nothing_runs(bloom), pytest.raises(SpecConfigError, match="the order of its cache.*Use .*='standard'"):
        sample(bloom, two, speculator)
    assert sample(bloom, prompts(1), speculator).shape == (1, 7 + 24)
    if rule is not RULES["synthetic"]:
        drafter = sampled_speculator(**rule) if rule is BLOCK else with_rule(scripted_for(text, inputs), **rule)
        with pytest.raises(SpecDecError, match="no token to draw"):
            sample(model, inputs, drafter, suppress_tokens=list(range(VOCAB_SIZE)))


@full
@EVERY_RULE
def test_criteria_of_one_row_see_every_position(model, rule):
    inputs = prompts(1)
    text = sample(model, inputs, no_drafts())
    drafters = [sampled_speculator(4, widths=(1,) * 4), scripted_for(text, inputs, tree="random")]
    for speculator in (with_rule(drafter, **rule) for drafter in drafters):
        for with_scores in (False, True):
            wanted = {"return_dict_in_generate": True, "output_scores": with_scores, "no_repeat_ngram_size": 9}

            def run(criterion, speculator=speculator, wanted=wanted):
                output = sample(model, inputs, speculator, stopping_criteria=[criterion], **wanted)
                return output.sequences[0].tolist()

            whole = run(StopAt())
            assert len(whole) == 7 + 24
            for position in range(10, 20, 3):
                criterion = StopAt(whole[position])
                output = run(criterion)
                ends = range(8, len(output) + 1)
                assert output == whole[: whole.index(whole[position], 7) + 1]
                assert criterion.shown == [(output[:end], end - 7 if with_scores else None) for end in ends]


# Which rule, and what the output says of it

NOTES = {"block": [], "typical": ["changes the distribution"], "synthetic": ["the text is meaningless"]}


@pytest.mark.parametrize("name", ["typical", *in_full("block", "synthetic")])
def test_the_output_says_which_rule_it_was(model, inputs, text, name, monkeypatch):
    warnings = []
    monkeypatch.setattr(rules.logger, "warning_once", warnings.append)
    speculator = sampled_speculator(4, widths=(1,) * 4, **RULES[name])
    stats = sample(model, inputs, speculator, return_dict_in_generate=True).speculative
    assert stats.rejection_sample_method == name
    assert stats.is_lossless == (name == "block")
    for texts in (stats.notes, warnings):
        assert len(texts) == len(NOTES[name])
        assert all(note in one for note, one in zip(NOTES[name], texts))
    as_dict = json.loads(json.dumps(stats.to_dict()))
    for key in ("rejection_sample_method", "is_lossless", "notes"):
        assert as_dict[key] == getattr(stats, key)
    assert f"[sampled, {name} acceptance]" in str(stats)
    assert all(note in str(stats) for note in stats.notes)
    # Batches without drafts are decoded plainly.
    speculator = sampled_speculator(disable_by_batch_size=2, **RULES[name])
    output = sample(model, inputs, speculator, return_dict_in_generate=True)
    assert torch.equal(output.sequences, text)
    assert output.speculative.rejection_sample_method == "standard"


@full
def test_standard_needs_no_word_and_every_name_has_its_rule(model, inputs):
    stats = sample(model, inputs, sampled_speculator(), return_dict_in_generate=True).speculative
    assert (stats.rejection_sample_method, stats.is_lossless, stats.notes) == ("standard", True, [])
    assert "[sampled]" in str(stats)
    for name in ("standard", *RULES):
        rule = acceptance_rule(SpeculativeConfig(method="ngram", **RULES.get(name, {})), True, RowUniforms(0), None)
        assert rule.name == name
        assert SpecDecodingStats(rejection_sample_method=name).is_lossless == (rule.note is None)
        assert rule.judges_whole_drafts == (name != "standard")


@full
def test_a_model_that_is_trained_writes_its_own_text(inputs):
    model, settings = tiny_llama().train(), {"do_sample": True, "max_new_tokens": 4}
    assert sample(model, inputs, sampled_speculator(**BLOCK), return_dict_in_generate=True).speculative.is_lossless
    for rule in (TYPICAL, synthetic(3)):
        with pytest.raises(SpecConfigError, match="off policy"):
            sample(model, inputs, sampled_speculator(**rule))
        (result,) = generate_many(model, [inputs["input_ids"][0]], **settings, assistant=sampled_speculator(**rule))
        assert "off policy" in str(result.error)
