"""Combined drafting: the text is the target's whoever drafts, and who is asked late drafts as well as ever."""

import copy
import json
import pickle
import random
from dataclasses import field, make_dataclass
from itertools import count as counting
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from typer.testing import CliRunner

from hf_specdec import (
    CandidateGenerator,
    SpecConfigError,
    SpeculativeConfig,
    Speculator,
    cli,
    forget_speculators,
    load_speculator,
    record,
    register_candidate_generator,
)
from hf_specdec.candidate_generators import unregister_candidate_generator
from hf_specdec.candidate_generators.combined import generator as combined
from hf_specdec.candidate_generators.combined.combination import part_configs
from hf_specdec.candidate_generators.combined.merge import merged
from hf_specdec.candidate_generators.combined.policy import DrafterChoice
from hf_specdec.control import ControlProfile
from hf_specdec.control.acceptance import PastRates, RowOutcome
from hf_specdec.drafts import DraftTree
from hf_specdec.errors import MissingDependencyError
from hf_specdec.method import parts_of, resolve_candidate_generator
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from tests.helpers.distribution import (
    V,
    sample,
)
from tests.helpers.methods import demo_inputs, demo_target, needs_library, plain_text, settings_of
from tests.helpers.pairs import every_pair


RETRIEVAL = ["ngram", pytest.param("suffix", marks=needs_library)]


def pair(method, retrieval="ngram", **options):
    return settings_of(f"{retrieval}+{method}", **options)


@pytest.fixture(scope="module")
def target():
    return demo_target()


@pytest.fixture
def inputs():
    return demo_inputs


@pytest.fixture
def plain():
    return lambda batch_size: plain_text(batch_size, 24)


def decide(monkeypatch, pattern):
    """Whoever drafts is said by the pattern, `pattern(row, cycle)` or one value a cycle again and again."""
    cycles, asked = counting(), []
    rule = pattern if callable(pattern) else lambda row, cycle: pattern[cycle % len(pattern)]

    def asks(choice, rows, probs, num_retrieved, lengths, num_unread):
        cycle = next(cycles)
        asked.append([bool(rule(row, cycle)) and length > 0 for row, length in zip(rows, lengths)])
        return asked[-1]

    monkeypatch.setattr(DrafterChoice, "asks", asks)
    return asked


def in_turns(row, cycle):
    """All retrieved, all drafted, and mixed in two ways."""
    return (cycle % 4 == 1) or (cycle % 4 > 1 and (row + cycle) % 2)


def generated(target, inputs, **arguments):
    with record(trace=True) as made:
        text = target.generate(**inputs, **{"do_sample": False, "max_new_tokens": 24, **arguments})
    return text, made.calls[0] if made.calls else None


class TestGreedy:
    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("retrieval", RETRIEVAL)
    def test_own_choice(self, target, inputs, plain, retrieval, batch_size):
        for _ in range(2):
            ours, call = generated(target, inputs(batch_size), speculative=pair("eagle3", retrieval))
            assert torch.equal(ours, plain(batch_size))
            assert call.stats.method == f"{retrieval}+eagle3"
            assert call.stats.num_accepted_tokens > 10

    @needs_library
    def test_trees_of_both(self, target, inputs, plain, monkeypatch):
        decide(monkeypatch, in_turns)
        options = {"suffix_decoding_use_tree_spec": True, "suffix_decoding_max_spec_factor": 4.0}
        options |= {"draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 8}
        ours, call = generated(target, inputs(3), speculative=pair("eagle", "suffix", **options))
        assert torch.equal(ours, plain(3))
        branching = [row for cycle in call.cycles for row in cycle.rows if len(set(row.parents)) < len(row.parents)]
        assert branching


class TestSampling:
    @pytest.mark.parametrize(("method", "draws"), [(None, False), ("greedy", False), ("probabilistic", True)])
    def test_drafts_are_drawn_only_on_request(self, target, inputs, method, draws, monkeypatch):
        made, make = [], Speculator.candidate_generator
        monkeypatch.setattr(
            Speculator, "candidate_generator", lambda *arguments: made.append(make(*arguments)) or made[-1]
        )
        speculative = pair("draft_model", draft_sample_method=method)
        sample(target, inputs(1), max_new_tokens=6, speculative=speculative)
        assert made[0].samples_drafts is draws


class TestToldLate:
    def test_much_is_handed_over_before_it_is_asked_for(self, target, inputs, plain, monkeypatch):
        monkeypatch.setattr(combined, "_MOST_UNREAD_TOKENS", 20)
        for pattern in ([0, 0, 0, 1], in_turns):
            with monkeypatch.context() as patch:
                decide(patch, pattern)
                assert torch.equal(generated(target, inputs(3), speculative=pair("eagle3"))[0], plain(3))

    def test_nothing_is_read_for_who_is_never_asked(self, target, inputs, monkeypatch):
        decide(monkeypatch, [0])
        monkeypatch.setattr("hf_specdec.drafting.entries.DraftEntries.read", None)
        text, call = generated(target, inputs(1), speculative=pair("eagle3"))
        assert call.stats.notes[-1] == "eagle3: 0 tokens accepted from 0 drafts"

    @given(st.data())
    @settings(max_examples=40)
    def test_joined_commits(self, data):
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


class TestMerging:
    @given(st.data())
    @settings(max_examples=60)
    def test_each_row_has_its_own_draft(self, data):
        num_rows = data.draw(st.integers(1, 4))
        from_model = data.draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))

        def trees(branching):
            tokens, parents = [], []
            for _ in range(num_rows):
                size = data.draw(st.integers(0, 5))
                tokens.append(data.draw(st.lists(st.integers(0, V - 1), min_size=size, max_size=size)))
                low = -1 if branching else None
                parents.append([data.draw(st.integers(low, i - 1)) if branching else i - 1 for i in range(size)])
            return DraftTree.from_lists(tokens, parents=parents)

        retrieved, drafted = trees(data.draw(st.booleans())), trees(data.draw(st.booleans()))
        draft = merged(retrieved, drafted, from_model)
        for row, is_drafted in enumerate(from_model):
            source = drafted if is_drafted else retrieved
            assert draft.token_lists()[row] == source.token_lists()[row]
            assert draft.parent_lists()[row] == source.parent_lists()[row]
        assert draft.is_chain or not (retrieved.is_chain and drafted.is_chain)

    def test_retrieved_trees_beside_drawn_chains_are_chains(self):
        retrieved = DraftTree.from_lists([[1, 2, 3, 4], [5]], parents=[[-1, -1, 0, 2], [-1]])
        probs = torch.full((2, 2, V), 1 / V)
        drafted = DraftTree.chain(torch.tensor([[0, 1], [2, 3]]), [2, 2], probs)
        draft = merged(retrieved, drafted, [False, True])
        assert draft.is_chain
        assert draft.token_lists() == [[1, 3, 4], [2, 3]]
        assert draft.probs[0].argmax(-1).tolist() == [1, 3, 4]
        assert draft.probs[0].sum(-1).tolist() == [1.0, 1.0, 1.0] == draft.probs[0].amax(-1).tolist()
        assert torch.equal(draft.probs[1, :2], probs[1])


class TestRatings:
    text = [7, 8, 9, 1, 2, 3, 4, 5, 6, 1, 2, 3]

    def rated(self, method, rooms, **options):
        config = SpeculativeConfig(method, **options)
        kind = resolve_candidate_generator(method)
        target = SimpleNamespace(config=LlamaConfig(vocab_size=100))
        session = Session(len(rooms), 100, torch.device("cpu"))
        generator = kind(config, kind.load(config, target), session)
        generator.prefill(Prompt(torch.tensor([self.text] * len(rooms)), [0] * len(rooms)))
        step = DraftStep(list(range(len(rooms))), torch.tensor([3] * len(rooms)), [12] * len(rooms), rooms)
        return generator.propose(step), generator.acceptance_probs

    def test_ngram(self):
        draft, probs = self.rated("ngram", [10, 2, 0])
        assert draft.token_lists() == [[4, 5, 6, 1, 2, 3], [4, 5], []]
        assert probs[0] == pytest.approx([0.75**depth for depth in range(1, 7)])
        assert probs[1:] == [pytest.approx([0.75, 0.75**2]), []]

    @needs_library
    @pytest.mark.parametrize("use_tree_spec", [False, True])
    def test_suffix(self, use_tree_spec):
        draft, probs = self.rated("suffix", [10, 2, 0], suffix_decoding_use_tree_spec=use_tree_spec)
        assert list(map(len, probs)) == draft.max_depths() == [3, 2, 0]
        # Seen once before: the end of the text counts as another occurrence.
        assert probs[0] == pytest.approx([0.5, 0.5, 0.5])
        assert probs[1] == probs[0][:2]


class World:
    """Rows with known costs and acceptance, in which a choice is made in each cycle.

    Args:
        draft_seconds (`float`): Beside a verification of 1.
        accepted (`float`): Of the second drafter, in the mean: all of its 4 tokens or none.
        retrieved (`list[tuple[float, float]]`): Score and true acceptance of the retrieved drafts, again and again.
    """

    def __init__(self, draft_seconds, accepted, retrieved, profile=None, num_rows=1, seed=0):
        self.draft_seconds, self.accepted, self.retrieved = draft_seconds, accepted, retrieved
        self.choice = DrafterChoice(profile or ControlProfile(), num_rows, 4)
        self.rows, self.seconds, self.tokens, self.num_asked = list(range(num_rows)), 0.0, 0.0, 0
        self.random = random.Random(seed)

    def run(self, num_cycles):
        for cycle in range(num_cycles):
            score, truth = self.retrieved[cycle % len(self.retrieved)]
            probs = [[score / 8] * 8 for _ in self.rows]
            asked = self.choice.asks(self.rows, probs, 8, [4] * len(self.rows), 0)
            self.num_asked += any(asked)
            accepted = 4 * (self.random.random() < self.accepted / 4)
            counts = [1 + (accepted if is_asked else truth) for is_asked in asked]
            self.choice.observe_cycle(len(self.rows), 8, 1.0, sum(counts))
            if any(asked):
                outcomes = [RowOutcome(row, 4, 4, accepted, accepted + 1) for row in self.rows if asked[row]]
                self.choice.observe_draft(outcomes, len(self.rows), 4, self.draft_seconds, None)
            for row in self.rows:
                self.choice.observe_retrieved(row, probs[row], truth)
            self.tokens += sum(1 + (self.accepted if is_asked else truth) for is_asked in asked)
            self.seconds += 1.0 + self.draft_seconds * any(asked)
        self.choice.close()
        return self

    def best(self):
        """Tokens per second of the best choice for each kind of cycle: never, always or where it promises more."""
        truths, cost, gain = [t for _, t in self.retrieved], self.draft_seconds, self.accepted
        values = []
        for which in range(2 ** len(truths)):
            asked = [which >> index & 1 for index in range(len(truths))]
            tokens = sum(1 + (gain if a else t) for a, t in zip(asked, truths))
            values.append(tokens / sum(1 + cost * a for a in asked))
        return max(values)


class TestChoice:
    # Costs and acceptance matter two by two.
    @every_pair(
        draft_seconds=[0.05, 0.5, 1.0, 4.0],
        accepted=[0.1, 1.0, 3.0],
        retrieved=[[(0.0, 0.0)], [(6.0, 6.0)], [(0.0, 0.0), (5.0, 5.0)], [(4.0, 0.4)]],
    )
    def test_speed_is_that_of_the_best_choice(self, draft_seconds, accepted, retrieved):
        speeds = []
        for seed in range(5):
            profile = ControlProfile()
            World(draft_seconds, accepted, retrieved, profile, seed=seed).run(40)
            world = World(draft_seconds, accepted, retrieved, profile, seed=seed + 100).run(300)
            speeds.append(world.tokens / world.seconds)
        assert median(speeds) > 0.93 * world.best()

    def test_score_that_promises_too_much_is_not_trusted(self):
        world = World(0.1, 2.0, [(6.0, 0.2)]).run(40)
        assert world.num_asked > 30

    def test_copied_text_asks_nobody(self):
        assert World(0.1, 3.0, [(7.0, 7.0)]).run(100).num_asked == 0

    def test_what_it_has_not_read_must_be_worth_reading(self):
        profile = ControlProfile(accepted=PastRates([0.75] * 4, [60.0] * 4))
        before = DrafterChoice(profile, 1, 4)
        for reading in (None, None, None, (500, 5.0)):
            before.observe_cycle(1, 4, 1.0, 1)
            before.observe_draft([RowOutcome(0, 4, 4, 4, 4)], 1, 4, 0.1, reading)
        before.close()
        choice = DrafterChoice(profile, 1, 4)
        for _ in range(100):
            choice.observe_cycle(1, 0, 1.0, 1)
        waited = 0
        while not choice.asks([0], [[]], 0, [4], 500)[0]:
            waited += 1
        # Each cycle without it loses some 2 tokens of a second each, and reading the text costs 5.
        assert 2 <= waited <= 3
        assert choice.asks([0], [[]], 0, [4], 0) == [True]

    @pytest.mark.parametrize("num_cycles", [30, 600])
    def test_drafter_that_has_become_good_is_found_again(self, num_cycles):
        profile = ControlProfile()
        assert World(1.0, 0.0, [(0.0, 0.0)], profile).run(200).num_asked < 20
        # In one long call, or in many short ones.
        asked = sum(World(1.0, 4.0, [(0.0, 0.0)], profile).run(num_cycles).num_asked for _ in range(600 // num_cycles))
        assert asked > 200

    def test_rows_with_good_drafts_keep_them(self):
        choice = DrafterChoice(ControlProfile(), 3, 4)
        assert choice.asks([0, 1, 2], [[0.9] * 8, [], [0.1]], 8, [4, 4, 4], 1) == [False, True, True]
        assert choice.asks([0, 1, 2], [[0.9] * 8, [], [0.1]], 8, [4, 0, 4], 1) == [False, False, True]


class TestSettings:
    def test_names(self):
        assert parts_of("prompt_lookup+deepseek_mtp") == ("ngram", "mtp")
        config = SpeculativeConfig.resolve("prompt_lookup+assistant_model", model="folder")
        assert (config.method, config.model) == ("ngram+draft_model", "folder")
        assert resolve_candidate_generator("ngram+eagle3") is resolve_candidate_generator("ngram+eagle3")

    @pytest.mark.parametrize(
        ("name", "match"),
        [
            ("ngram+toyy", "Unknown spec_method='toyy'"),
            ("sufix+eagle3", "Unknown spec_method='sufix'. Did you mean 'suffix'"),
            ("ngram+", "Unknown spec_method=''"),
            ("ngram+auto", "Unknown spec_method='auto'"),
            ("eagle3+ngram", "Write 'ngram+eagle3'"),
            ("eagle3+medusa", "names two that draft everywhere"),
            ("ngram+suffix", "names two that retrieve"),
            ("ngram+ngram", "names one method twice"),
            ("eagle+eagle", "names one method twice"),
            ("ngram+suffix+eagle3", "names 3"),
        ],
    )
    def test_what_cannot_be_combined(self, name, match):
        for spelling in (name, {"method": name}):
            with pytest.raises(SpecConfigError, match=match.replace("+", r"\+")):
                SpeculativeConfig.resolve(spelling, model="folder")

    def test_registered_names_have_no_plus(self):
        with pytest.raises(SpecConfigError, match="would be read as a combination"):
            register_candidate_generator("my+method", CandidateGenerator)

    def test_settings_of_both_methods(self, tmp_path):
        given = {
            "method": "ngram+eagle3",
            "model": "folder",
            "num_speculative_tokens": 3,
            "retrieval_num_speculative_tokens": 9,
            "prompt_lookup_max": 4,
            "aux_layer_ids": [0, 1],
            "rejection_sample_method": "block",
        }
        config = SpeculativeConfig.from_dict(given)
        assert config.to_dict() == given
        assert SpeculativeConfig.resolve(json.dumps(given)) == config == copy.deepcopy(config)
        assert pickle.loads(pickle.dumps(config)) == config
        assert hash(config) == hash(SpeculativeConfig.from_dict(given))
        assert config.compute_hash() != config.replace(prompt_lookup_max=5).compute_hash()
        config.save_pretrained(tmp_path)
        assert SpeculativeConfig.from_pretrained(tmp_path) == config
        retrieval, model = part_configs(config)
        assert retrieval.to_dict() == {
            "method": "ngram", "num_speculative_tokens": 9, "prompt_lookup_max": 4, "rejection_sample_method": "block"
        }  # fmt: skip
        assert model == SpeculativeConfig(
            "eagle3", "folder", num_speculative_tokens=3, aux_layer_ids=[0, 1], rejection_sample_method="block",
            draft_sample_method="greedy",
        )  # fmt: skip
        assert config.replace(method="eagle3").to_dict().keys() == {
            "method", "model", "num_speculative_tokens", "rejection_sample_method"
        }  # fmt: skip

    def test_options_are_those_of_the_parts(self):
        options = SpeculativeConfig("ngram+eagle3", "folder", prompt_lookup_max=4, aux_layer_ids=[0, 1]).options
        assert options.prompt_lookup_max == options.retrieval.prompt_lookup_max == 4
        assert options.aux_layer_ids == options.model.aux_layer_ids == (0, 1)
        assert pickle.loads(pickle.dumps(options)) == options == copy.deepcopy(options)
        with pytest.raises(AttributeError, match=r"'ngram\+eagle3' have no `max_tree_depth`"):
            _ = options.max_tree_depth

    @pytest.mark.parametrize(
        ("settings", "match"),
        [
            ({"suffix_decoding_max_tree_depth": 9}, "belongs to method 'suffix', got method='ngram\\+eagle3'"),
            ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min=5"),
            ({"prompt_lookup_mx": 3}, "Did you mean 'prompt_lookup_max'"),
        ],
    )
    def test_wrong_settings(self, settings, match):
        with pytest.raises(SpecConfigError, match=match):
            SpeculativeConfig("ngram+eagle3", "folder", **settings)

    def test_token_trees_are_for_the_second_method(self):
        assert SpeculativeConfig("ngram+eagle3", "folder", speculative_token_tree=[(0,), (1,)])
        with pytest.raises(SpecConfigError, match="belongs to the methods that draft trees"):
            SpeculativeConfig("ngram+draft_model", "folder", speculative_token_tree=[(0,), (1,)])

    def test_lengths(self, target):
        session = Session(1, 500, torch.device("cpu"))
        for options, lengths in (
            ({}, (24, 4)),
            ({"num_speculative_tokens": 2}, (24, 2)),
            ({"retrieval_num_speculative_tokens": 3, "num_speculative_tokens": 5}, (3, 5)),
        ):
            generator = load_speculator(target, **pair("eagle3", **options)).candidate_generator(session)
            found = (generator.retrieval.num_speculative_tokens, generator.model.num_speculative_tokens)
            assert found == lengths
            assert generator.num_speculative_tokens == max(lengths)

    def test_parts_share_what_is_loaded(self, target):
        forget_speculators(target)
        both = load_speculator(target, **pair("eagle3"))
        alone = load_speculator(target, settings_of("eagle3"))
        assert both.resources.model is alone.resources
        assert both.resources.retrieval is None
        assert load_speculator(target, **pair("eagle3")).resources is both.resources
        other = load_speculator(target, **pair("eagle3", num_speculative_tokens=2))
        assert other.resources is both.resources

    def test_loaded_draft_model(self, target, inputs, plain):
        network = load_speculator(target, settings_of("eagle3")).resources
        speculator = load_speculator(target, "ngram+eagle3", draft_model=network)
        assert speculator.resources.model is network
        assert torch.equal(generated(target, inputs(1), spec_method="ngram+eagle3", assistant=network)[0], plain(1))
        with pytest.raises(SpecConfigError, match="method='medusa' cannot draft with a"):
            load_speculator(target, "ngram+medusa", draft_model=network)

    def test_options_of_one_name(self):
        class Twin(CandidateGenerator):
            options_class = make_dataclass("Options", [("prompt_lookup_max", int, field(default=1))], frozen=True)

        register_candidate_generator("twin", Twin)
        try:
            with pytest.raises(SpecConfigError, match="both methods have an option `prompt_lookup_max`"):
                SpeculativeConfig("ngram+twin")
        finally:
            unregister_candidate_generator("twin")

    def test_missing_library(self, target, monkeypatch):
        monkeypatch.setattr("hf_specdec.candidate_generators.suffix.generator.MIN_LIBRARY_VERSION", "999")
        forget_speculators(target)
        with pytest.raises(MissingDependencyError, match="needs the package arctic-inference"):
            load_speculator(target, **pair("eagle3", "suffix"))


class TestUse:
    def test_statistics_by_part(self, target, inputs, monkeypatch):
        decide(monkeypatch, [0, 1])
        _, call = generated(target, inputs(1), speculative=pair("eagle3"))
        found = [note for note in call.stats.notes if "tokens accepted from" in note]
        assert [note.split(":")[0] for note in found] == ["ngram", "eagle3"]
        accepted = [int(note.split(": ")[1].split()[0]) for note in found]
        assert sum(accepted) == call.stats.num_accepted_tokens
        assert sum(row.num_accepted for cycle in call.cycles[1::2] for row in cycle.rows) == accepted[1]

    def test_calls_teach_the_next_one(self, target, inputs, monkeypatch):
        forget_speculators(target)
        speculator = load_speculator(target, **pair("eagle3"))
        generated(target, inputs(1), assistant=speculator, repetition_penalty=1.5)
        known = speculator.resources.profile
        assert known.accepted.means
        assert known.latency.verify
        assert known.latency.draft
        assert known.latency.reading.sizes
        assert load_speculator(target, **pair("eagle3")).resources.profile is known

    def test_saved_drafter(self, target, inputs, plain, tmp_path):
        speculator = load_speculator(target, **pair("eagle3", num_speculative_tokens=2, prompt_lookup_max=3))
        folder = speculator.save_pretrained(tmp_path / "saved")
        again = load_speculator(target, str(folder))
        assert again.config.replace(model=None) == speculator.config.replace(model=None)
        assert torch.equal(generated(target, inputs(1), spec_model=str(folder))[0], plain(1))
        assert "n-gram speculation and EAGLE-3 head" in (folder / "README.md").read_text().lower().replace(
            "eagle-3", "EAGLE-3"
        )

    def test_command_line(self):
        results = [
            CliRunner().invoke(cli.app, ["generate", "--json", "-n", "16", "--method", method, "def read(path):\n"])
            for method in ("off", "ngram+eagle3")
        ]
        plain, ours = (json.loads(result.stdout) for result in results)
        assert ours["stats"]["method"] == "ngram+eagle3"
        assert ours["token_ids"] == plain["token_ids"]
