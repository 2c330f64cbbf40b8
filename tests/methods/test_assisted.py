"""Candidate generators as `assistant=`, and driven by transformers' own assisted decoding."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch

from hf_specdec import (
    CandidateGenerator,
    Commit,
    DraftStep,
    DraftTree,
    Prompt,
    Session,
    SpecConfigError,
    SpeculativeConfig,
    Speculator,
    UnsupportedModelError,
    load_speculator,
    record,
    register_candidate_generator,
)
from hf_specdec.candidate_generators import unregister_candidate_generator
from hf_specdec.candidate_generators.combined.policy import DrafterChoice
from hf_specdec.control import SpeculationController
from tests.helpers.levels import full, in_full
from tests.helpers.methods import (
    COMBINATIONS,
    METHODS,
    chains_of,
    demo_inputs,
    demo_target,
    exemption,
    fresh_speculator,
    plain_text,
    settings_of,
)
from tests.helpers.models import prompts, tiny_llama


NEW = 16
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
COUNTS = ("method", "batch_size", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_target_forwards")
OTHERS = [row for row in METHODS if row.values[0] != "ngram"]


@pytest.fixture(autouse=True)
def decided(monkeypatch):
    """Fixes who drafts in a combination and how much, which otherwise depends on measured times."""

    def asks(choice, rows, probs, num_retrieved, lengths, num_unread):
        return [length > 0 and len(ours) < 2 for ours, length in zip(probs, lengths)]

    def limits(controller, rows, num_unread, num_left):
        controller.num_cycles += 1
        return [(0, 2, 3)[controller.num_cycles % 3]] * len(rows)

    monkeypatch.setattr(DrafterChoice, "asks", asks)
    monkeypatch.setattr(SpeculationController, "limits", limits)


def run(assistant, batch_size=1, **settings):
    call = {**demo_inputs(batch_size), **GREEDY, **settings, "assistant": assistant, "return_dict_in_generate": True}
    output = demo_target().generate(**call)
    return output.sequences, output.speculative


def generator_of(name, **settings):
    return fresh_speculator(settings_of(name, **settings)).candidate_generator()


def num_hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


AUTO, BY_ROWS = {"num_speculative_tokens": "auto"}, {"num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 99, 1]]}


@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        ("eagle3", AUTO, {}),
        *in_full(
            ("ngram", {}, {}),
            *(pytest.param(*row.values, {}, {}, marks=row.marks) for row in (*OTHERS, *COMBINATIONS[-2:])),
            *((name, {}, {"do_sample": True}) for name in ("eagle3", "draft_model")),
            ("ngram+eagle3", AUTO, {}),
            *((name, BY_ROWS, {}) for name in ("eagle3", "ngram+medusa")),
        ),
    ],
)
def test_a_generator_drafts_as_its_speculator_does(name, options, settings):
    results = []
    for make in (lambda speculator: speculator, Speculator.candidate_generator):
        torch.manual_seed(5)
        text, stats = run(make(fresh_speculator(settings_of(name, **options))), 3, **settings)
        results.append((text.tolist(), {count: getattr(stats, count) for count in COUNTS}))
    assert results[0] == results[1]
    assert stats.num_accepted_tokens > 0
    assert settings or torch.equal(text, plain_text(3, NEW))
    is_adaptive = "num_speculative_tokens" in options
    assert any(note.startswith("adaptive length") for note in stats.notes) == is_adaptive


def test_a_generator_belongs_to_one_call():
    generator = generator_of("eagle3")
    # Requests that are refused do not use it up.
    for wrong, match in (({"num_beams": 2}, "num_beams"), ({"num_speculative_tokens": 3}, "together with other spec")):
        with pytest.raises(SpecConfigError, match=match):
            run(generator, **wrong)
    run(generator)
    other = generator_of("eagle3")
    assisted(other)
    for call, used in ((run, generator), (partial(run, batch_size=3), generator), (run, other), (assisted, other)):
        with pytest.raises(SpecConfigError, match="A candidate generator belongs to one call"):
            call(used)
    other.close()
    with pytest.raises(SpecConfigError, match="belongs to one call"):
        assisted(other)


# Drafters of the user's own


class Repeating(CandidateGenerator):
    default_num_speculative_tokens = 3

    def prefill(self, prompt: Prompt) -> None:
        self.texts = {row: list(tokens) for row, tokens in enumerate(prompt.token_lists)}

    def observe(self, commit: Commit) -> None:
        for row, tokens in zip(commit.rows, commit.token_lists):
            self.texts[row] += tokens

    def propose(self, step: DraftStep) -> DraftTree:
        drafts = [self.texts[row][-4:-1][:depth] for row, depth in zip(step.rows, self.draft_depths(step))]
        return DraftTree.from_lists(drafts, self.session.device)


@pytest.mark.parametrize("do_sample", [False, *in_full(True)])
def test_ways_to_pass_a_drafter(do_sample):
    model = tiny_llama(seed=3, initializer_range=0.3)

    class Bare(Repeating):
        def __init__(self, first):
            self.first = first

    def generated(**speculative):
        torch.manual_seed(1)
        with record() as made:
            text = model.generate(**prompts(4), max_new_tokens=30, do_sample=do_sample, **speculative)
        return text, made.calls[0].stats.num_accepted_tokens

    register_candidate_generator("repeating", Repeating)
    text, accepted = generated(spec_method="repeating")
    assert accepted > 0
    assert do_sample or torch.equal(text, model.generate(**prompts(4), max_new_tokens=30, do_sample=False))
    config, speculator = SpeculativeConfig("repeating"), load_speculator(model, "repeating")
    ways = [Repeating(), Repeating(config), Repeating(config, None, Session(4, 100, model.device)), Bare(1)]
    # Speculators go to other processes.
    ways += [speculator.candidate_generator(), speculator, pickle.loads(pickle.dumps(speculator))]
    unregister_candidate_generator("repeating")
    assert (speculator.target, ways[-1].target) == (model, None)
    for assistant in ways:
        again, same = generated(assistant=assistant)
        assert torch.equal(again, text)
        assert same == accepted


class Wrong(Repeating):
    """One that cannot draft in the call, and must be closed."""

    def __init__(self, draft=None, hidden_states=()):
        super().__init__()
        self.propose, self.target_hidden_states, self.closed = lambda step: draft, hidden_states, 0

    def close(self):
        self.closed += 1


@full
def test_drafters_that_are_refused():
    model = tiny_llama()
    for generator, message in (
        (Wrong([[1], [2]]), "of `step.rows`, and has returned a list"),
        (Wrong(DraftTree.from_lists([[1]])), "of `step.rows`, and has returned one of 1"),
        (Wrong(hidden_states=(99,)), "boundaries"),
        (Repeating, r"got the class Repeating. Pass an instance, such as Repeating\(\)"),
        (Repeating(None, None, Session(4, 100, model.device)), "made for 4 rows, and the batch has 2"),
    ):
        with pytest.raises((SpecConfigError, UnsupportedModelError), match=message):
            model.generate(**prompts(2), **GREEDY, assistant=generator)
        assert getattr(generator, "closed", 1) == 1


# Transformers' own loop


def assisted(generator, target=None, inputs=None, **settings):
    """Text and accepted counts of transformers' own assisted decoding with our generator."""
    target = target or demo_target()
    accepted, update = [], generator.update_candidate_strategy

    def watched(input_ids, scores, num_matches):
        accepted.append(int(num_matches))
        update(input_ids, scores, num_matches)

    generator.update_candidate_strategy = watched
    target._get_candidate_generator = lambda *args, **kwargs: generator
    try:
        text = target.generate(**(inputs or demo_inputs(1)), **{**GREEDY, **settings}, prompt_lookup_num_tokens=2)
    finally:
        del target._get_candidate_generator
        del generator.update_candidate_strategy
    # The first forward reads the prompt.
    assert accepted.pop(0) == 0
    return text, accepted


def our_counts(settings, inputs=None):
    with record(trace=True) as made:
        text = demo_target().generate(**(inputs or demo_inputs(1)), **GREEDY, assistant=fresh_speculator(settings))
    return text, [cycle.rows[0].num_accepted for cycle in made.calls[0].cycles]


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        ("eagle3", True),
        *in_full(*(pytest.param(*row.values, False, marks=row.marks) for row in METHODS), ("dflash", True)),
    ],
)
def test_cycles_of_transformers_own_loop_are_those_of_ours(name, padded):
    target, settings, before = demo_target(), chains_of(name), num_hooks(demo_target())
    inputs = {key: value[:1] for key, value in demo_inputs(2 if padded else 1).items()}
    assert inputs["attention_mask"].all() != padded
    if exemption(name, "test_transformers_own_loop"):
        with pytest.raises(SpecConfigError, match="does not hand over"):
            assisted(fresh_speculator(settings).candidate_generator())
        return
    generator = fresh_speculator(settings).candidate_generator()
    text, accepted = assisted(generator, inputs=inputs)
    assert generator.assisted_side._start == (inputs["attention_mask"] == 0).sum()
    ours, counts = our_counts(settings, inputs)
    assert torch.equal(text, ours)
    assert padded or torch.equal(text, plain_text(1, NEW))
    assert accepted == counts
    assert sum(accepted) > 0
    assert num_hooks(target) == before


@full
def test_hosts_that_do_not_hand_over_the_states():
    known, other = fresh_speculator(chains_of("eagle3")), copy.deepcopy(demo_target())
    unknown = Speculator(known.config, known.generator_class, known.resources).candidate_generator()
    with pytest.raises(UnsupportedModelError, match="load_speculator"):
        assisted(unknown)
    generator, before = known.candidate_generator(), num_hooks(demo_target())
    with pytest.raises(UnsupportedModelError, match="another model is decoded"):
        assisted(generator, other)
    generator.close()
    assert num_hooks(demo_target()) == before


def test_hooks_leave_also_where_the_forward_fails():
    target, calls = demo_target(), []
    before = num_hooks(target)

    def fail(*forward):
        calls.append(forward)
        if len(calls) == 4:
            raise RuntimeError("stop")

    handle = target.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        assisted(fresh_speculator(chains_of("eagle3")).candidate_generator())
    handle.remove()
    assert num_hooks(target) == before
