"""num_speculative_tokens="auto" in generate(): what is chosen is followed, and the text is the same whatever it is."""

from __future__ import annotations

import pytest
import torch

from hf_specdec import SpecConfigError, SpeculativeConfig, forget_speculators, load_speculator, record
from hf_specdec.candidate_generators.adaptive import AdaptiveCandidateGenerator
from hf_specdec.candidate_generators.base import CandidateGenerator
from hf_specdec.control import ControlProfile, SpeculationController
from hf_specdec.drafts import DraftTree
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from tests.helpers.methods import demo_inputs, demo_target, settings_of
from tests.helpers.models import prompts, tiny_llama


@pytest.fixture
def target():
    return demo_target()


def auto(method, **settings):
    return settings_of(method, num_speculative_tokens="auto", **settings)


def follow(monkeypatch, lengths):
    """Lets the controller choose these lengths, again and again."""
    chosen = []

    def limits(controller, rows, num_unread, num_left):
        length = lengths[len(chosen) % len(lengths)]
        chosen.append(length)
        return [min(length, controller.most)] * len(rows)

    monkeypatch.setattr("hf_specdec.control.controller.SpeculationController.limits", limits)
    return chosen


@pytest.mark.parametrize(("method", "batch_size"), [("ngram", 1), ("draft_model", 3), ("eagle3", 3)])
def test_greedy_text_is_that_of_plain_generation(target, method, batch_size):
    settings = {**demo_inputs(batch_size), "max_new_tokens": 40, "do_sample": False}
    plain = target.generate(**settings)
    for _ in range(2):
        with record() as r:
            assert torch.equal(target.generate(**settings, speculative=auto(method)), plain)
        assert any(note.startswith("adaptive length: ") for note in r.calls[0].stats.notes)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_sampled_text_does_not_depend_on_what_is_chosen(target, method, monkeypatch):
    texts = []
    for lengths in ([0], [4], [2, 0, 0, 5]):
        with monkeypatch.context() as patch:
            follow(patch, lengths)
            torch.manual_seed(7)
            texts.append(
                target.generate(**demo_inputs(3), max_new_tokens=24, do_sample=True, speculative=auto(method)).tolist()
            )
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_drafts_are_as_good_after_a_pause(target, method, monkeypatch):
    """A drafter that was told late drafts what one that always drafts would have drafted at the same place."""
    settings = {**demo_inputs(1), "max_new_tokens": 32, "do_sample": False}

    def drafts(lengths):
        with monkeypatch.context() as patch:
            follow(patch, lengths)
            with record(trace=True) as r:
                text = target.generate(**settings, speculative=auto(method))
        length, found = settings["input_ids"].shape[1] + 1, {}
        for cycle in r.calls[0].cycles:
            (row,) = cycle.rows
            found[length] = row.draft_tokens
            length += len(row.committed_tokens)
        return found, text

    always, text = drafts([1])
    sometimes, again = drafts([0, 0, 0, 1])
    assert torch.equal(text, again)
    common = [place for place, tokens in sometimes.items() if tokens and always.get(place)]
    assert len(common) >= 2
    assert all(sometimes[place] == always[place] for place in common)


class Scripted(CandidateGenerator):
    """Drafts the token 1 always, and keeps what it is told."""

    def __init__(self, batch_size):
        self.session = Session(batch_size, 100, torch.device("cpu"))
        self.config, self.num_speculative_tokens = None, 4
        self.commits, self.steps = [], []

    def propose(self, step):
        self.steps.append(step)
        return DraftTree.from_lists([[1] * most for most in step.max_draft_tokens])

    def observe(self, commit):
        self.commits.append(commit)


def commit_of(rows, start, width, num_accepted=0):
    tokens = torch.arange(start, start + len(rows) * width).view(len(rows), width)
    states = {"last": tokens[..., None].float()}
    return Commit(rows, tokens, tokens.tolist(), [num_accepted] * len(rows), states)


def test_what_is_committed_during_a_pause_comes_as_one_commit(monkeypatch):
    follow(monkeypatch, [2, 0, 0, 0, 3])
    inner = Scripted(2)
    generator = AdaptiveCandidateGenerator(inner, SpeculationController(4, 2))
    generator.prefill(Prompt(torch.zeros(2, 3, dtype=torch.long), [0, 0]))
    generator.observe(commit_of([0, 1], 0, 1))
    step = DraftStep([0, 1], torch.tensor([0, 1]), [4, 4], [4, 4])
    for start, width, accepted in ((10, 3, 2), (20, 1, 0), (30, 1, 0)):
        generator.propose(step)
        generator.observe(commit_of([0, 1], start, width, accepted))
    assert len(inner.commits) == 2
    # The second row has finished.
    generator.keep_rows([0])
    step = DraftStep([0], torch.tensor([30]), [9], [4])
    generator.propose(step)
    generator.observe(commit_of([0], 40, 1))
    assert len(inner.commits) == 2
    generator.propose(step)
    assert inner.commits[2].rows == [0]
    assert inner.commits[2].token_lists == [[20, 30, 40]]
    assert inner.commits[2].tokens.tolist() == [[20, 30, 40]]
    assert inner.commits[2].hidden_states["last"].tolist() == [[[20.0], [30.0], [40.0]]]
    assert [step.max_draft_tokens for step in inner.steps] == [[2, 2], [3]]


def test_the_room_of_a_row_bounds_its_limit(monkeypatch):
    follow(monkeypatch, [4])
    inner = Scripted(2)
    generator = AdaptiveCandidateGenerator(inner, SpeculationController(4, 2))
    generator.propose(DraftStep([0, 1], torch.tensor([0, 1]), [4, 4], [1, 0]))
    assert inner.steps[0].max_draft_tokens == [1, 0]
    generator.observe(commit_of([0, 1], 0, 1))
    draft = generator.propose(DraftStep([0, 1], torch.tensor([0, 1]), [5, 5], [0, 0]))
    assert draft.size == 0
    assert len(inner.steps) == 1


def test_a_fixed_length_gets_the_methods_own_generator(target):
    speculator = load_speculator(target, "ngram", num_speculative_tokens=3)
    generator = speculator.candidate_generator(Session(1, 100, torch.device("cpu")))
    assert not isinstance(generator, AdaptiveCandidateGenerator)
    assert generator.config is speculator.config


def test_auto_may_draft_more_than_the_default(target):
    speculator = load_speculator(target, auto("draft_model"))
    generator = speculator.candidate_generator(Session(1, 100, torch.device("cpu")))
    assert generator.num_speculative_tokens > speculator.generator_class.default_num_speculative_tokens
    assert generator.controller.usual == speculator.generator_class.default_num_speculative_tokens


@pytest.mark.parametrize(("device", "length"), [("cpu", 15), ("meta", 24)])
def test_a_first_call_begins_with_as_many_nodes_as_are_cheap(target, device, length):
    speculator = load_speculator(target, auto("ngram"))
    generator = speculator.candidate_generator(Session(1, 100, torch.device(device)))
    assert generator.controller.usual == length
    assert generator.num_speculative_tokens >= 24


def test_a_given_tree_is_cut_at_the_chosen_depth(target, monkeypatch):
    settings = {**demo_inputs(1), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**settings)
    monkeypatch.setattr("hf_specdec.control.tree_size.TreeSize.cut", lambda trees, draft, *given: draft)
    follow(monkeypatch, [1, 0, 2])
    tree = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
    with record(trace=True) as r:
        text = target.generate(**settings, speculative=auto("eagle3", speculative_token_tree=tree))
    assert torch.equal(text, plain)
    sizes = [len(cycle.rows[0].draft_tokens) for cycle in r.calls[0].cycles]
    assert sizes[:4] == [2, 0, 4, 2]


def test_the_batch_size_rule_stands_above(model):
    inputs = prompts(3)
    with record() as r:
        model.generate(
            **inputs,
            max_new_tokens=6,
            do_sample=False,
            speculative={"method": "ngram", "num_speculative_tokens": "auto", "disable_by_batch_size": 2},
        )
    assert r.calls[0].stats.notes == ["no drafts: 3 rows are more than disable_by_batch_size=2"]


def test_calls_teach_each_other_until_they_are_forgotten():
    model = tiny_llama()
    settings = {"max_new_tokens": 20, "do_sample": False, "spec_method": "ngram", "num_speculative_tokens": "auto"}
    model.generate(**prompts(1), **settings)
    speculator = load_speculator(model, "ngram", num_speculative_tokens="auto")
    assert speculator.profile.latency.verify
    assert load_speculator(model, "ngram", num_speculative_tokens="auto").profile is speculator.profile
    assert load_speculator(model, "ngram").profile is not speculator.profile
    stored = speculator.profile.to_dict()
    forget_speculators(model)
    fresh = load_speculator(model, "ngram", num_speculative_tokens="auto")
    assert not fresh.profile.latency.verify
    fresh.profile = ControlProfile.from_dict(stored)
    assert fresh.profile.to_dict().keys() == stored.keys()
    model.generate(**prompts(1), max_new_tokens=8, do_sample=False, assistant=fresh)


def test_the_setting_is_a_number_or_auto():
    config = SpeculativeConfig(method="ngram", num_speculative_tokens="auto")
    assert config.fixed_length is None
    assert SpeculativeConfig.from_dict(config.to_dict()) == config
    assert config.replace(num_speculative_tokens=3).fixed_length == 3
    with pytest.raises(SpecConfigError, match="must be 'auto', 'fixed', an integer from 1 .* got 'atuo'"):
        SpeculativeConfig(method="ngram", num_speculative_tokens="atuo")
    with pytest.raises(SpecConfigError, match="from 1 to 1024, got 0"):
        SpeculativeConfig(method="ngram", num_speculative_tokens=0)


class TestTheDefault:
    """Lengths adapt where nothing else is said, and nowhere where that would change a text."""

    @pytest.fixture(autouse=True)
    def by_default(self, monkeypatch):
        monkeypatch.delenv("HF_SPECDEC_ADAPTIVE")

    def test_drawn_drafts_have_one_text_for_a_seed(self, model):
        settings = {"method": "draft_model", "draft_sample_method": "probabilistic"}
        speculator = load_speculator(model, settings, draft_model=tiny_llama(1))
        assert not speculator.is_adaptive
        assert load_speculator(model, {"method": "draft_model"}, draft_model=tiny_llama(1)).is_adaptive

    def test_block_verification_stays(self, model):
        settings = {"method": "draft_model", "rejection_sample_method": "block"}
        with record() as made:
            model.generate(
                **prompts(1),
                max_new_tokens=8,
                do_sample=True,
                assistant=load_speculator(model, settings, draft_model=tiny_llama(1)),
            )
        assert made.calls[0].stats.rejection_sample_method == "block"

    def test_an_environment_without_it(self, model, monkeypatch):
        speculator = load_speculator(model, "ngram")
        monkeypatch.setenv("HF_SPECDEC_ADAPTIVE", "0")
        # Decided when it was made.
        assert speculator.is_adaptive
        assert not load_speculator(model, "ngram").is_adaptive
        assert not load_speculator(model, "auto").is_adaptive

    def test_a_profile_that_nothing_would_read_is_refused(self):
        with pytest.raises(SpecConfigError, match="`control_profile`='x' is for"):
            SpeculativeConfig("eagle3", "a/b", control_profile="x", speculative_token_tree=[[0], [1]])
        SpeculativeConfig("eagle3", "a/b", control_profile="x")

    def test_the_factor_of_a_suffix_tree_that_is_given_stays(self, model):
        pytest.importorskip("arctic_inference")
        for given, used in ((None, 2.0), (1.0, 1.0)):
            speculator = load_speculator(model, {"method": "suffix", "suffix_decoding_max_spec_factor": given})
            assert speculator.at_full_length().config.options.max_spec_factor == used

    def test_a_length_by_batch_size_may_be_longer_than_usual(self, model):
        settings = {"num_speculative_tokens": "auto", "num_speculative_tokens_per_batch_size": {1: 16}}
        load_speculator(model, "draft_model", **settings, draft_model=tiny_llama(1))

    def test_one_profile_for_auto_and_nothing(self, model):
        assert (
            load_speculator(model, "ngram").profile
            is load_speculator(model, "ngram", num_speculative_tokens="auto").profile
        )
