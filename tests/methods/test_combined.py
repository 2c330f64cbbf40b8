"""Combined drafting: whoever drafts the text is the target's, and who is asked late drafts as well as ever."""

from __future__ import annotations

import pickle
import random
from dataclasses import field, make_dataclass
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import (
    CandidateGenerator,
    SpecConfigError,
    SpeculativeConfig,
    forget_speculators,
    load_speculator,
    register_candidate_generator,
)
from hf_specdec.candidate_generators import unregister_candidate_generator
from hf_specdec.candidate_generators.combined import generator as combined
from hf_specdec.candidate_generators.combined.generator import merged, part_configs
from hf_specdec.candidate_generators.combined.policy import DrafterChoice
from hf_specdec.control import ControlProfile
from hf_specdec.control.controller import SpeculationController
from hf_specdec.control.rates import RowOutcome
from hf_specdec.drafts import DraftTree
from hf_specdec.protocol import Commit, Session
from tests.helpers.distribution import V
from tests.helpers.levels import full
from tests.helpers.methods import demo_inputs, demo_target, settings_of
from tests.helpers.own_drafts import drafted_call


def load(**options):
    return load_speculator(demo_target(), **settings_of("ngram+eagle3", **options))


def drafted(batch_size):
    """The record of a greedy call, whose text must be plain generation's."""
    speculative = settings_of("ngram+eagle3")
    return drafted_call(demo_target(), demo_inputs(batch_size), {"speculative": speculative}, max_new_tokens=20)[1]


def decide(monkeypatch, rule):
    """Whoever drafts is said by `rule(row, cycle)`."""
    cycles = count()

    def asks(choice, rows, probs, num_retrieved, lengths, num_unread):
        cycle = next(cycles)
        return [bool(rule(row, cycle)) and length > 0 for row, length in zip(rows, lengths)]

    monkeypatch.setattr(DrafterChoice, "asks", asks)


def test_statistics_by_part(monkeypatch):
    decide(monkeypatch, lambda row, cycle: cycle % 2)
    call = drafted(1)
    found = [note for note in call.stats.notes if "tokens accepted from" in note]
    assert [note.split(":")[0] for note in found] == ["ngram", "eagle3"]
    accepted = [int(note.split(": ")[1].split()[0]) for note in found]
    assert sum(accepted) == call.stats.num_accepted_tokens
    assert sum(row.num_accepted for cycle in call.cycles[1::2] for row in cycle.rows) == accepted[1] > 0
    # Nothing is read for who is never asked.
    decide(monkeypatch, lambda row, cycle: False)
    monkeypatch.setattr("hf_specdec.drafting.slots.DraftEntries.read", None)
    assert drafted(1).stats.notes[-1] == "eagle3: 0 tokens accepted from 0 drafts"


def test_long_commits_are_handed_over_before_the_drafter_is_asked(monkeypatch):
    monkeypatch.setattr(combined, "_MOST_UNREAD_TOKENS", 20)
    # All retrieved, all drafted, and mixed in two ways.
    decide(monkeypatch, lambda row, cycle: (cycle % 4 == 1) or (cycle % 4 > 1 and (row + cycle) % 2))
    assert drafted(3).stats.num_accepted_tokens > 10


@given(st.data())
def test_joined_commits(data):
    num_rows, num_commits = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    texts, commits = [[] for _ in range(num_rows)], []
    for _ in range(num_commits):
        counts = data.draw(st.lists(st.integers(1, 4), min_size=num_rows, max_size=num_rows))
        width = max(counts) + data.draw(st.integers(0, 1))
        tokens = torch.randint(1, 50, (num_rows, width))
        lists = [row[:count] for row, count in zip(tokens.tolist(), counts)]
        states = {key: tokens[..., None] * factor + torch.zeros(3) for key, factor in (("last", 1), (2, 10))}
        commits.append(Commit(list(range(num_rows)), tokens, lists, [0] * num_rows, states))
        for text, new in zip(texts, lists):
            text += new
    joined = Commit.joined(commits)
    assert joined.token_lists == texts
    for row, text in enumerate(texts):
        assert joined.tokens[row, : len(text)].tolist() == text
        assert joined.hidden_states["last"][row, : len(text), 1].tolist() == text
        assert joined.hidden_states[2][row, : len(text), 0].tolist() == [10 * token for token in text]
    assert joined.tokens.shape == joined.hidden_states[2].shape[:2]


@given(st.data())
def test_each_row_has_its_own_draft(data):
    from_model = data.draw(st.lists(st.booleans(), min_size=1, max_size=4))

    def trees(branching):
        sizes = [data.draw(st.integers(0, 5)) for _ in from_model]
        tokens = [[data.draw(st.integers(0, V - 1)) for _ in range(size)] for size in sizes]
        parents = [[data.draw(st.integers(-1, i - 1)) if branching else i - 1 for i in range(size)] for size in sizes]
        return DraftTree.from_lists(tokens, parents=parents)

    retrieved, drafted = trees(data.draw(st.booleans())), trees(data.draw(st.booleans()))
    draft = merged(retrieved, drafted, from_model)
    for row, is_drafted in enumerate(from_model):
        source = drafted if is_drafted else retrieved
        assert draft.token_lists()[row] == source.token_lists()[row]
        assert draft.parent_lists()[row] == source.parent_lists()[row]
    assert draft.is_chain or not (retrieved.is_chain and drafted.is_chain)


def test_retrieved_trees_beside_drawn_chains_are_chains():
    retrieved = DraftTree.from_lists([[1, 2, 3, 4], [5]], parents=[[-1, -1, 0, 2], [-1]])
    probs = torch.full((2, 2, V), 1 / V)
    drafted = DraftTree.chain(torch.tensor([[0, 1], [2, 3]]), [2, 2], probs)
    draft = merged(retrieved, drafted, [False, True])
    assert draft.is_chain
    assert draft.token_lists() == [[1, 3, 4], [2, 3]]
    assert draft.probs[0].argmax(-1).tolist() == [1, 3, 4]
    assert draft.probs[0].sum(-1).tolist() == [1.0, 1.0, 1.0] == draft.probs[0].amax(-1).tolist()
    assert torch.equal(draft.probs[1, :2], probs[1])


def asked_share(draft_seconds, accepted, score=0.0, truth=0.0):
    """The share of cycles in which the second drafter is asked, for a row of known costs and acceptance.

    A draft takes `draft_seconds` beside a verification of 1, and of its 4 tokens all or none are accepted, `accepted`
    in the mean. The retrieved drafts have a score, and in truth another acceptance.
    """
    choice, generator, num_asked = DrafterChoice(ControlProfile(), 1, 4), random.Random(0), 0
    for _ in range(300):
        probs = [score / 8] * 8
        (is_asked,) = choice.asks([0], [probs], 8, [4], 0)
        count = 4 * (generator.random() < accepted / 4)
        choice.observe_cycle(1, 8, 1.0, 1 + (count if is_asked else truth))
        if is_asked:
            choice.observe_draft([RowOutcome(0, 4, 4, count, count + 1)], 1, 4, draft_seconds, None)
        choice.ratings[0].observe(sum(probs), truth)
        num_asked += is_asked
    return num_asked / 300


def test_who_pays_is_asked():
    for draft_seconds, accepted in ((0.05, 1.0), (0.5, 3.0), (1.0, 3.0)):
        assert asked_share(draft_seconds, accepted) > 0.6
        # Scores that promise too much are not trusted, and copied text asks nobody.
        assert asked_share(draft_seconds, accepted, 6.0, 0.2) > 0.8
        assert asked_share(draft_seconds, accepted, 7.0, 7.0) == 0
    for draft_seconds, accepted in ((0.5, 0.1), (4.0, 1.0), (4.0, 3.0)):
        assert asked_share(draft_seconds, accepted) < 0.15
    # Rows with good drafts keep them.
    choice = DrafterChoice(ControlProfile(), 3, 4)
    assert choice.asks([0, 1, 2], [[0.9] * 8, [], [0.1]], 8, [4, 4, 4], 1) == [False, True, True]
    assert choice.asks([0, 1, 2], [[0.9] * 8, [], [0.1]], 8, [4, 0, 4], 1) == [False, False, True]


@pytest.mark.parametrize(
    ("draft_cost", "first", "rate", "later"),
    [(0.1, 3, 0.9, range(4, 13)), (0.3, 2, 0.3, range(1, 2)), (0.9, 1, 0.95, range(1, 2))],
)
def test_a_draft_model_drafts_as_many_tokens_as_pay(draft_cost, first, rate, later):
    choice = DrafterChoice(ControlProfile(draft_cost=draft_cost), 1, 12)
    generator = random.Random(0)
    assert choice.choose_depth(1) == first
    for _ in range(100):
        depth = choice.choose_depth(1)
        count = next((place for place in range(depth) if generator.random() > rate), depth)
        choice.observe_cycle(1, depth, 1.0, 1 + count)
        choice.observe_draft([RowOutcome(0, depth, depth, count, count + 1)], 1, depth, draft_cost * depth, None)
    assert choice.choose_depth(1) in later
    # Those of other drafters, and of calls whose lengths do not adapt, are as long as there is room for.
    assert DrafterChoice(ControlProfile(), 1, 12).choose_depth(1) == 12
    assert DrafterChoice(ControlProfile(draft_cost=draft_cost), 1, 12, adapts=False).choose_depth(1) == 12


def test_reading_late_is_no_time_of_a_draft(monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_ADAPTIVE", "1")
    decide(monkeypatch, lambda row, cycle: cycle == 3)
    readings = []
    observe = SpeculationController.observe

    def watched(controller, outcomes, num_nodes, draft_seconds, verify_seconds, reading=None, num_drafted=None):
        readings.append(reading)
        observe(controller, outcomes, num_nodes, draft_seconds, verify_seconds, reading, num_drafted)

    monkeypatch.setattr(SpeculationController, "observe", watched)
    call = drafted(1)
    assert call.stats.num_accepted_tokens > 0
    # The prompt is read by both, by the second one with what was committed before it was asked.
    by_retrieval, *_, by_model = (
        num for num, _ in filter(None, readings) if num > demo_inputs(1)["input_ids"].shape[1]
    )
    assert by_retrieval < by_model


@full
def test_wrong_settings():
    class Twin(CandidateGenerator):
        options_class = make_dataclass("Options", [("prompt_lookup_max", int, field(default=1))], frozen=True)

    register_candidate_generator("twin", Twin)
    for name, settings, match in (
        ("eagle3+ngram", {}, "Write 'ngram.eagle3'"),
        ("ngram+suffix", {}, "names two that retrieve"),
        ("ngram+twin", {}, "both methods have an option `prompt_lookup_max`"),
        ("ngram+eagle3", {"suffix_decoding_max_tree_depth": 9}, "belongs to method 'suffix', got method='ngram.eagle"),
    ):
        with pytest.raises(SpecConfigError, match=match):
            SpeculativeConfig.resolve(name, model="folder", **settings)
    unregister_candidate_generator("twin")
    with pytest.raises(SpecConfigError, match="would be read as a combination"):
        register_candidate_generator("my+method", CandidateGenerator)


def test_own_methods_whose_options_have_no_default_and_whose_rows_are_bounded():
    class Own(CandidateGenerator):
        options_class = make_dataclass("Options", [("wanted", int)], frozen=True)
        longest_row = property(lambda self: (self.options.wanted, "wanted"))

    register_candidate_generator("own", Own)
    assert SpeculativeConfig("ngram+own", wanted=7).options.parts[1].wanted == 7
    assert Own(SpeculativeConfig("own", wanted=7)).longest_row == (7, "wanted")
    unregister_candidate_generator("own")


@full
def test_settings_of_both_methods(tmp_path):
    lengths = {"num_speculative_tokens": 3, "retrieval_num_speculative_tokens": 9}
    shared = {"rejection_sample_method": "block"}
    given = {"method": "ngram+eagle3", "model": "folder", **lengths, "prompt_lookup_max": 4, **shared}
    config = SpeculativeConfig.from_dict(given)
    assert config.to_dict() == given
    assert pickle.loads(pickle.dumps(config)) == config
    config.save_pretrained(tmp_path)
    assert SpeculativeConfig.from_pretrained(tmp_path) == config
    assert part_configs(config) == (
        SpeculativeConfig("ngram", num_speculative_tokens=9, prompt_lookup_max=4, **shared),
        # Drafts are drawn on request only.
        SpeculativeConfig("eagle3", "folder", num_speculative_tokens=3, draft_sample_method="greedy", **shared),
    )
    # The options of one part are not those of another method.
    assert "prompt_lookup_max" not in config.replace(method="eagle3").to_dict()
    assert config.options.prompt_lookup_max == config.options.parts[0].prompt_lookup_max == 4
    for own, expected in (({}, (24, 4)), (lengths, (9, 3))):
        generator = load(**own).candidate_generator(Session(1, 500, torch.device("cpu")))
        assert (generator.retrieval.num_speculative_tokens, generator.model.num_speculative_tokens) == expected
        assert generator.num_speculative_tokens == max(expected)


@full
def test_parts_share_what_is_loaded_and_learnt():
    forget_speculators(demo_target())
    both, alone = load(), load_speculator(demo_target(), settings_of("eagle3")).resources
    assert both.resources.model is alone
    assert load(num_speculative_tokens=2).resources is both.resources
    assert load_speculator(demo_target(), "ngram+eagle3", draft_model=alone).resources.model is alone
    with pytest.raises(SpecConfigError, match="method='medusa' cannot draft with a"):
        load_speculator(demo_target(), "ngram+medusa", draft_model=alone)
    # Calls teach the next one.
    drafted_call(demo_target(), demo_inputs(1), {"assistant": both}, repetition_penalty=1.5)
    known = load().resources.profile
    assert all((known.accepted, known.latency.verify, known.latency.draft, known.latency.reading.sizes))
