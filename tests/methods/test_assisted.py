"""Candidate generators as `assistant=`, and driven by transformers' own assisted decoding."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from transformers.generation.candidate_generator import CandidateGenerator as HfCandidateGenerator

import hf_specdec
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
from tests.helpers.threads import in_threads


NEW = 16
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
COUNTS = ("method", "batch_size", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_target_forwards")
every_method = pytest.mark.parametrize("name", METHODS)


@pytest.fixture(autouse=True)
def decided(monkeypatch):
    """Fixes who drafts in a combination, which otherwise depends on measured times."""

    def asks(choice, rows, probs, num_retrieved, lengths, num_unread):
        return [length > 0 and len(ours) < 2 for ours, length in zip(probs, lengths)]

    monkeypatch.setattr(DrafterChoice, "asks", asks)


def run(assistant, batch_size=1, target=None, **settings):
    """Text and counts of a call."""
    target = target or demo_target()
    with record() as made:
        text = target.generate(**demo_inputs(batch_size), **{**GREEDY, **settings}, assistant=assistant)
    stats = made.calls[0].stats
    return text, {name: getattr(stats, name) for name in COUNTS}, stats


def num_hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class TestAsAssistant:
    @pytest.mark.parametrize(
        ("name", "batch_size"),
        [*(pytest.param(*row.values, 3, marks=row.marks) for row in (*METHODS, *COMBINATIONS[-2:])), ("eagle3", 1)],
    )
    def test_is_as_good_as_the_speculator(self, name, batch_size):
        text, counts, _ = run(fresh_speculator(settings_of(name)), batch_size)
        generator = fresh_speculator(settings_of(name)).candidate_generator()
        assert isinstance(generator, HfCandidateGenerator)
        again, same, _ = run(generator, batch_size)
        assert torch.equal(text, plain_text(batch_size, NEW))
        assert torch.equal(again, text)
        assert same == counts
        assert counts["num_accepted_tokens"] > 0

    @pytest.mark.parametrize("name", ["ngram", "eagle3", "draft_model"])
    def test_sampling(self, name):
        texts = []
        for make in (lambda speculator: speculator, Speculator.candidate_generator):
            torch.manual_seed(5)
            text, counts, _ = run(make(fresh_speculator(settings_of(name))), 4, do_sample=True, max_new_tokens=12)
            texts.append((text.tolist(), counts))
        assert texts[0] == texts[1]

    @pytest.mark.parametrize("name", ["ngram", "eagle3", "draft_model", "ngram+eagle3"])
    def test_adaptive_length(self, name, monkeypatch):
        def limits(controller, rows, num_unread, num_left):
            controller.num_cycles += 1
            return [(0, 2, 3)[controller.num_cycles % 3]] * len(rows)

        monkeypatch.setattr(SpeculationController, "limits", limits)
        results = []
        for make in (lambda speculator: speculator, Speculator.candidate_generator):
            speculator = fresh_speculator(settings_of(name, num_speculative_tokens="auto"))
            text, counts, stats = run(make(speculator), 3)
            assert torch.equal(text, plain_text(3, NEW))
            assert any(note.startswith("adaptive length") for note in stats.notes)
            results.append(counts)
        assert results[0] == results[1]
        assert results[0]["num_accepted_tokens"] > 0

    @pytest.mark.parametrize("name", ["ngram", "eagle3", "ngram+medusa"])
    def test_length_by_batch_size(self, name):
        settings = settings_of(name, num_speculative_tokens_per_batch_size=[[1, 2, 3], [3, 99, 1]])
        results = [run(make(fresh_speculator(settings)), 3) for make in (lambda s: s, Speculator.candidate_generator)]
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1] == results[1][1]

    def test_batch_size_rule_and_notes_of_the_speculator(self):
        speculator = fresh_speculator(settings_of("ngram", disable_by_batch_size=2))
        speculator.note = "chosen by hand"
        _, counts, stats = run(speculator.candidate_generator(), 3)
        assert counts["num_draft_tokens"] == 0
        assert stats.notes == ["chosen by hand", "no drafts: 3 rows are more than disable_by_batch_size=2"]

    @pytest.mark.parametrize("name", ["ngram", "eagle3"])
    def test_belongs_to_one_call(self, name):
        generator = fresh_speculator(settings_of(name)).candidate_generator()
        run(generator)
        for batch_size in (1, 3):
            with pytest.raises(SpecConfigError, match="has been used. A candidate generator belongs to one call"):
                run(generator, batch_size)

    def test_a_request_that_is_refused_does_not_use_it_up(self):
        generator = fresh_speculator(settings_of("ngram")).candidate_generator()
        with pytest.raises(SpecConfigError, match="num_beams"):
            run(generator, num_beams=2)
        run(generator)

    def test_of_two_threads_one_gets_it(self):
        generator = fresh_speculator(settings_of("ngram")).candidate_generator()

        def call():
            try:
                return run(generator)[0].tolist()
            except SpecConfigError as error:
                return str(error)

        outcomes = in_threads(call, call)
        assert sorted("has been used" in outcome for outcome in outcomes if isinstance(outcome, str)) == [True]
        assert plain_text(1, NEW).tolist() in outcomes

    def test_no_other_settings_beside_it(self):
        generator = fresh_speculator(settings_of("ngram")).candidate_generator()
        with pytest.raises(SpecConfigError, match="together with other speculative arguments"):
            demo_target().generate(**demo_inputs(1), **GREEDY, assistant=generator, num_speculative_tokens=3)


class Repeating(CandidateGenerator):
    """A drafter of the user's own: drafts the row's last tokens again."""

    default_num_speculative_tokens = 3

    def prefill(self, prompt: Prompt) -> None:
        self.texts = {row: list(tokens) for row, tokens in enumerate(prompt.token_lists)}

    def observe(self, commit: Commit) -> None:
        for row, tokens in zip(commit.rows, commit.token_lists):
            self.texts[row] += tokens

    def propose(self, step: DraftStep) -> DraftTree:
        drafts = [self.texts[row][-4:-1][:depth] for row, depth in zip(step.rows, self.draft_depths(step))]
        return DraftTree.from_lists(drafts, self.session.device)


class TestOfTheUsersOwn:
    @pytest.fixture
    def model(self):
        return tiny_llama(seed=3, initializer_range=0.3)

    def ways(self, model):
        config = SpeculativeConfig("repeating")
        return {
            "nothing": Repeating(),
            "settings": Repeating(config),
            "everything": Repeating(config, None, Session(4, 100, model.device)),
            "speculator": load_speculator(model, "repeating").candidate_generator(),
            "shared": load_speculator(model, "repeating"),
        }

    @pytest.fixture(autouse=True)
    def registered(self):
        register_candidate_generator("repeating", Repeating)
        yield
        unregister_candidate_generator("repeating")

    @pytest.mark.parametrize("do_sample", [False, True])
    def test_batches(self, model, do_sample):
        inputs = {**prompts(4), "max_new_tokens": 40, "do_sample": do_sample}

        def generated(**speculative):
            torch.manual_seed(1)
            with record() as made:
                text = model.generate(**inputs, **speculative)
            return text, made.calls[0].stats.num_accepted_tokens

        text, accepted = generated(spec_method="repeating")
        assert accepted > 0
        if not do_sample:
            assert torch.equal(text, model.generate(**inputs))
        for assistant in self.ways(model).values():
            again, same = generated(assistant=assistant)
            assert torch.equal(again, text)
            assert same == accepted

    def test_no_settings_mean_defaults(self):
        assert SpeculativeConfig("repeating").to_dict() == {"method": "repeating"}
        with pytest.raises(SpecConfigError, match="top_k"):
            SpeculativeConfig("repeating", top_k=3)

    def test_a_session_for_other_rows(self, model):
        generator = Repeating(None, None, Session(2, 100, model.device))
        with pytest.raises(SpecConfigError, match="made for 2 rows, and the batch has 4"):
            model.generate(**prompts(4), **GREEDY, assistant=generator)

    def test_the_class_itself(self, model):
        with pytest.raises(SpecConfigError, match=r"got the class Repeating. Pass an instance, such as Repeating\(\)"):
            model.generate(**prompts(1), **GREEDY, assistant=Repeating)

    def test_a_constructor_of_its_own(self, model):
        class Bare(Repeating):
            def __init__(self, first):
                self.first = first

        inputs = prompts(4)
        output = model.generate(**inputs, **GREEDY, assistant=Bare(1), return_dict_in_generate=True)
        assert torch.equal(output.sequences, model.generate(**inputs, **GREEDY))
        assert output.speculative.num_accepted_tokens > 0
        assert output.speculative.method == "candidate_generator"

    @pytest.mark.parametrize(
        ("draft", "found"),
        [
            ([[1], [2]], "a list"),
            (DraftTree.from_lists([[1]]), "one of 1"),
        ],
    )
    def test_drafts_that_are_none(self, model, draft, found):
        class Wrong(CandidateGenerator):
            closed = 0

            def propose(self, step):
                return draft

            def close(self):
                self.closed += 1

        generator = Wrong()
        with pytest.raises(SpecConfigError, match=f"of `step.rows`, and has returned {found}"):
            model.generate(**prompts(2), **GREEDY, assistant=generator)
        assert generator.closed == 1

    def test_it_is_closed_where_the_call_cannot_begin(self, model):
        class Demanding(Repeating):
            target_hidden_states = (99,)
            closed = 0

            def close(self):
                self.closed += 1

        generator = Demanding()
        with pytest.raises(UnsupportedModelError, match="boundaries"):
            model.generate(**prompts(2), **GREEDY, assistant=generator)
        assert generator.closed == 1

    def test_speculators_go_to_other_processes(self, model):
        speculator = load_speculator(model, "repeating")
        assert speculator.target is model
        again = pickle.loads(pickle.dumps(speculator))
        assert again.target is None
        text = model.generate(**prompts(2), **GREEDY)
        assert torch.equal(model.generate(**prompts(2), **GREEDY, assistant=again), text)

    def test_public_names(self):
        for name in ("CandidateGenerator", "Commit", "DraftStep", "DraftTree", "Prompt", "Session"):
            assert name in hf_specdec.__all__
            assert getattr(hf_specdec, name).__doc__

    def test_two_methods_without_options_combine(self, model):
        class Rating(Repeating):
            estimates_acceptance = True

            @property
            def acceptance_probs(self):
                return [[] for _ in self.texts]

        register_candidate_generator("rating", Rating)
        try:
            text = model.generate(**prompts(2), **GREEDY, spec_method="rating+repeating")
        finally:
            unregister_candidate_generator("rating")
        assert torch.equal(text, model.generate(**prompts(2), **GREEDY))


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
        demo_target().generate(**(inputs or demo_inputs(1)), **GREEDY, assistant=fresh_speculator(settings))
    return [cycle.rows[0].num_accepted for cycle in made.calls[0].cycles]


class TestInTransformersOwnLoop:
    @every_method
    def test_same_cycles_as_in_ours(self, name):
        target, settings = demo_target(), chains_of(name)
        before = num_hooks(target)
        if exemption(name, "test_transformers_own_loop"):
            with pytest.raises(SpecConfigError, match="does not hand over"):
                assisted(fresh_speculator(settings).candidate_generator())
            return
        text, accepted = assisted(fresh_speculator(settings).candidate_generator())
        assert torch.equal(text, plain_text(1, NEW))
        assert accepted == our_counts(settings)
        assert sum(accepted) > 0
        assert num_hooks(target) == before

    @pytest.mark.parametrize("name", ["ngram", "eagle3", "dflash"])
    def test_left_padding(self, name):
        inputs, settings = {key: value[:1] for key, value in demo_inputs(2).items()}, chains_of(name)
        assert not inputs["attention_mask"].all()
        _, accepted = assisted(fresh_speculator(settings).candidate_generator(), inputs=inputs)
        assert accepted == our_counts(settings, inputs)

    @pytest.mark.parametrize("name", ["ngram", "eagle3"])
    def test_adaptive_length(self, name, monkeypatch):
        # Nothing may depend on how fast this machine is.
        monkeypatch.setattr(SpeculationController, "limits", lambda controller, rows, *sizes: [3] * len(rows))
        generator = fresh_speculator(settings_of(name, num_speculative_tokens="auto")).candidate_generator()
        text, accepted = assisted(generator, max_new_tokens=60)
        assert torch.equal(text, plain_text(1, 60))
        assert sum(accepted) > 0
        generator.close()

    @pytest.mark.parametrize("name", ["ngram", "eagle3", "medusa"])
    def test_sampling(self, name):
        torch.manual_seed(0)
        speculator = fresh_speculator(settings_of(name))
        text, _ = assisted(speculator.candidate_generator(), do_sample=True, max_new_tokens=12)
        assert text.shape == plain_text(1, 12).shape

    def test_states_before_the_final_norm_are_captured(self):
        target = demo_target()
        generator = fresh_speculator(chains_of("eagle3")).candidate_generator(Session(1, 100, target.device))
        assert target.config.num_hidden_layers in generator.target_hidden_states

    def test_what_the_host_does_not_hand_over_is_an_error_where_the_target_is_not_known(self):
        known = fresh_speculator(chains_of("eagle3"))
        unknown = Speculator(known.config, known.generator_class, known.resources)
        with pytest.raises(UnsupportedModelError, match="load_speculator"):
            assisted(unknown.candidate_generator())

    def test_a_target_that_is_not_decoded(self):
        other = copy.deepcopy(demo_target())
        generator = fresh_speculator(chains_of("eagle")).candidate_generator()
        with pytest.raises(UnsupportedModelError, match="another model is decoded"):
            assisted(generator, other)
        generator.close()
        assert num_hooks(demo_target()) == num_hooks(other)

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_hooks_leave_also_where_the_forward_fails(self, error):
        target, calls = demo_target(), []
        before = num_hooks(target)

        def fail(*forward):
            calls.append(forward)
            if len(calls) == 4:
                raise error("stop")

        generator = fresh_speculator(chains_of("eagle3")).candidate_generator()
        handle = target.model.layers[2].register_forward_pre_hook(fail)
        try:
            with pytest.raises(error, match="stop"):
                assisted(generator)
        finally:
            handle.remove()
        if error is KeyboardInterrupt:
            # torch does not tell hooks of it.
            generator.close()
        assert num_hooks(target) == before

    def test_threads_capture_in_their_own_forwards(self):
        """The target runs in another thread between a request and its forward."""
        target, settings = demo_target(), chains_of("eagle3")
        generator = fresh_speculator(settings).candidate_generator()

        def forward_elsewhere(*forward):
            if threading.current_thread() is threading.main_thread():
                in_threads(lambda: target(torch.tensor([[3, 4]])))

        handle = target.model.layers[0].register_forward_pre_hook(forward_elsewhere)
        try:
            _, accepted = assisted(generator)
        finally:
            handle.remove()
        assert accepted == our_counts(settings)

    @pytest.mark.parametrize("name", ["ngram", "eagle3"])
    def test_belongs_to_one_call(self, name):
        generator = fresh_speculator(settings_of(name)).candidate_generator()
        assisted(generator)
        with pytest.raises(SpecConfigError, match="belongs to one call"):
            assisted(generator)
        with pytest.raises(SpecConfigError, match="belongs to one call"):
            run(generator)
        generator.close()
        generator.close()
        with pytest.raises(SpecConfigError, match="belongs to one call"):
            assisted(generator)

    def test_a_drafter_of_the_users_own(self):
        length = plain_text(1, NEW).shape[1]
        for generator in (Repeating(), Repeating(None, None, Session(1, length, demo_target().device))):
            text, accepted = assisted(generator)
            assert torch.equal(text, plain_text(1, NEW))
            assert sum(accepted) > 0

    def test_a_batch(self):
        generator = Repeating()
        with pytest.raises(SpecConfigError, match="takes one row, and the batch has 2"):
            generator.get_candidates(torch.ones((2, 3), dtype=torch.long))

    def test_a_host_that_hands_over_no_states(self):
        generator = Speculator(*self.parts("medusa")).candidate_generator()
        with pytest.raises(UnsupportedModelError, match="hands over none"):
            generator.get_candidates(torch.ones((1, 3), dtype=torch.long))

    def parts(self, name):
        speculator = fresh_speculator(settings_of(name))
        return speculator.config, speculator.generator_class, speculator.resources


class NeedsOutputs(HfCandidateGenerator):
    requires_model_outputs = True


def test_a_foreign_generator_that_reads_outputs_is_refused():
    with pytest.raises(SpecConfigError, match="NeedsOutputs reads outputs of the target"):
        run(NeedsOutputs())
