"""The contract between the loop and every method, from both sides: every order that it allows, and no other.

`checked` watches what a method is told, by the loop and by all that stands in between: adaptive lengths, combinations,
transformers' own loop. `Text` tells a method what the contract allows, in drawn orders.
"""

from __future__ import annotations

from contextlib import closing
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria

from hf_specdec import Commit, DraftStep, DraftTree, Prompt, Session, Speculator, generate_many, record
from hf_specdec.candidate_generators.combined.generator import Combination
from hf_specdec.control import SpeculationController
from hf_specdec.target.states import captured_states
from tests.helpers.calls import GREEDY, PROMPT, inputs, plain, requests, texts_alone
from tests.helpers.levels import full
from tests.helpers.methods import demo_target, fresh_speculator, settings_of


# Of calls, and of the text that is told in other orders.
NEW, LENGTH = 13, 20
CALL = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
PAUSED_UNTIL_A_ROW_ENDS = {"num_speculative_tokens_per_batch_size": [[1, 2, 2], [3, 99, 0]]}

# ------------------------------------------------------------------------------------------------------ being watched


class Watch:
    """Everything one generator was told so far."""

    def __init__(self):
        self.num_rows: int | None = None
        self.has_observed = self.is_drafting = self.is_closed = self.is_full = False
        self.num_accepted = 0

    def prefill(self, prompt: Prompt) -> None:
        assert self.num_rows is None
        assert not self.is_closed
        self.num_rows = len(prompt.starts)
        assert len(prompt.input_ids) == self.num_rows

    def observe(self, commit: Commit, keys: tuple) -> None:
        self._in_the_call(commit.rows)
        assert len(commit.tokens) == len(commit.token_lists) == len(commit.num_accepted) == self.num_rows
        assert commit.tokens.shape[1] == max(commit.counts)
        assert set(commit.hidden_states) >= set(keys)
        assert all(states.shape[:2] == commit.tokens.shape for states in commit.hidden_states.values())
        for tokens, accepted, row in zip(commit.token_lists, commit.num_accepted, commit.tokens.tolist()):
            assert 0 <= accepted <= len(tokens) > 0
            assert row[: len(tokens)] == tokens
            assert self.is_drafting or accepted == 0
        self.has_observed, self.is_drafting = True, False
        self.num_accepted += sum(commit.num_accepted)

    def propose(self, step: DraftStep) -> None:
        self._in_the_call(step.rows)
        assert self.has_observed
        assert not self.is_drafting
        assert not (self.is_full and max(step.max_draft_tokens))
        assert len(step.lengths) == len(step.max_draft_tokens) == len(step.anchor_tokens) == self.num_rows
        self.is_drafting, self.is_full = True, max(step.max_draft_tokens) == 0

    def keep_rows(self, keep: list[int]) -> None:
        assert self.num_rows is not None
        assert not self.is_closed
        assert not self.is_drafting
        assert len(keep) == len(set(keep))
        assert all(0 <= index < self.num_rows for index in keep)
        assert 0 < len(keep) <= self.num_rows
        self.num_rows = len(keep)

    def join(self, other: Watch, numbers: dict[int, int]) -> None:
        for one in (self, other):
            assert one.has_observed
            assert not one.is_drafting
            assert not one.is_closed
        assert len(numbers) == len(set(numbers.values())) == other.num_rows
        self.num_rows += other.num_rows
        self.is_full = False

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True

    def _in_the_call(self, rows: list[int]) -> None:
        assert not self.is_closed
        assert len(rows) == self.num_rows
        assert len(rows) == len(set(rows))


def checked(generator_class: type, watches: list[Watch]) -> type:
    """The class, whose instances check the order in which they are called."""
    if issubclass(generator_class, Combination):
        parts = tuple(checked(part, watches) for part in generator_class.parts)
        generator_class = type(generator_class.__name__, (generator_class,), {"parts": parts})

    class Checked(generator_class):
        def __init__(self, *args):
            self.watch = Watch()
            watches.append(self.watch)
            super().__init__(*args)

        def prefill(self, prompt):
            self.watch.prefill(prompt)
            super().prefill(prompt)

        def observe(self, commit):
            self.watch.observe(commit, self.target_hidden_states)
            super().observe(commit)

        def propose(self, step):
            self.watch.propose(step)
            draft = super().propose(step)
            check_draft(draft, step, self.num_speculative_tokens, self.num_draft_nodes)
            return draft

        def keep_rows(self, keep):
            self.watch.keep_rows(keep)
            super().keep_rows(keep)

        def join(self, other, numbers):
            self.watch.join(other.watch, numbers)
            super().join(other, numbers)

        def close(self):
            self.watch.close()
            super().close()

    return Checked


def check_draft(draft: DraftTree, step: DraftStep, longest: int, num_nodes: int) -> None:
    assert draft.batch_size == len(step.rows)
    assert draft.size <= num_nodes
    for depth, room in zip(draft.max_depths(), step.max_draft_tokens):
        assert depth <= min(room, longest)
    for tokens, parents in zip(draft.token_lists(), draft.parent_lists()):
        assert len(tokens) == len(parents)
        assert all(0 <= token < demo_target().config.vocab_size for token in tokens)
        assert all(-1 <= parent < node for node, parent in enumerate(parents))


def watched_speculator(name: str, **options) -> tuple[Speculator, list[Watch]]:
    speculator, watches = fresh_speculator(settings_of(name, **options)), []
    generator_class = checked(speculator.generator_class, watches)
    return Speculator(speculator.config, generator_class, speculator.resources, target=demo_target()), watches


def generated(speculator, batch_size=3, **arguments):
    with record() as made:
        text = demo_target().generate(**{**CALL, **inputs(batch_size), **arguments}, assistant=speculator)
    return text, made.calls[0].stats


def plain_text(**settings) -> torch.LongTensor:
    return plain(3, max_new_tokens=NEW, **settings)


class TestInCalls:
    @full
    def test_rows_end_while_it_is_paused_from_the_start(self, row):
        """Rows end before the generator has been told anything."""
        ends = int(plain_text()[1, PROMPT + 1])
        speculator, watches = watched_speculator(row, **PAUSED_UNTIL_A_ROW_ENDS)
        text, stats = generated(speculator, eos_token_id=ends)
        assert torch.equal(text, plain_text(eos_token_id=ends))
        assert stats.num_accepted_tokens > 0
        assert watches
        assert all(watch.is_closed for watch in watches)

    @full
    def test_pauses_while_rows_end(self, row, monkeypatch):
        chosen = []

        def limits(controller, rows, num_unread, num_left):
            chosen.append((0, 0, 3, 0, 2, 4)[len(chosen) % 6])
            controller.num_cycles += 1
            return [min(chosen[-1], controller.most)] * len(rows)

        monkeypatch.setattr(SpeculationController, "limits", limits)
        ends = int(plain_text()[0, PROMPT + 3])
        speculator, watches = watched_speculator(row, num_speculative_tokens="auto")
        text, stats = generated(speculator, eos_token_id=ends)
        assert torch.equal(text, plain_text(eos_token_id=ends))
        assert stats.num_draft_tokens > 0
        assert all(watch.is_closed for watch in watches)

    def test_rows_join_while_it_pauses(self, row, monkeypatch):
        """Also before it has been told anything, and then what has been said since the prompts is told late."""
        chosen = []

        def limits(controller, rows, num_unread, num_left):
            chosen.append(0 if len(chosen) % 8 < 7 else 3)
            controller.num_cycles += 1
            return [min(chosen[-1], controller.most)] * len(rows)

        monkeypatch.setattr(SpeculationController, "limits", limits)
        speculator, watches = watched_speculator(row, num_speculative_tokens="auto")
        results = list(generate_many(demo_target(), requests()[:7], 3, in_order=True, assistant=speculator, **GREEDY))
        assert [result.tokens for result in results] == texts_alone()[:7]
        assert sum(result.stats.num_draft_tokens for result in results) > 0
        assert all(watch.is_closed for watch in watches)

    def test_error_in_the_middle_leaves_nothing_behind(self, row):
        class Fails(StoppingCriteria):
            num_calls = 0

            def __call__(self, input_ids, scores, **kwargs):
                self.num_calls += 1
                if self.num_calls == 5:
                    raise RuntimeError("in the middle")
                return torch.zeros(len(input_ids), dtype=torch.bool)

        target = demo_target()
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules())
        speculator, watches = watched_speculator(row)
        with pytest.raises(RuntimeError, match="in the middle"):
            generated(speculator, stopping_criteria=[Fails()])
        assert all(watch.is_closed for watch in watches)
        assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules())
        text, _ = generated(speculator)
        assert torch.equal(text, plain_text())

    @full
    def test_transformers_own_loop(self, row, monkeypatch):
        target = demo_target()
        speculator, watches = watched_speculator(row)
        with closing(speculator.candidate_generator()) as generator:
            monkeypatch.setattr(target, "_get_candidate_generator", lambda *args, **kwargs: generator)
            text = target.generate(**inputs(1), **CALL, prompt_lookup_num_tokens=2)
            assert torch.equal(text, plain(1, max_new_tokens=NEW))
        assert sum(watch.num_accepted for watch in watches) > 0
        assert all(watch.is_closed for watch in watches)


# ----------------------------------------------------------------------------------------------------- being told


@cache
def target_states() -> dict:
    """The states of the text, for every key that a drafter may ask for: `(3, L, H)`."""
    target, text = demo_target(), plain(3, max_new_tokens=LENGTH)
    mask = inputs(3)["attention_mask"]
    mask = torch.cat([mask, mask.new_ones((3, LENGTH))], dim=1)
    keys = (*range(target.config.num_hidden_layers + 1), "last")
    with torch.no_grad(), captured_states(target, keys) as states:
        target(text, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    return states


class Text:
    """Plays the loop for one generator: its text is what the target writes, whatever is drafted."""

    def __init__(self, speculator: Speculator):
        self.text, self.starts = plain(3, max_new_tokens=LENGTH), inputs(3)["attention_mask"].argmax(1).tolist()
        self.rows, self.ends = [0, 1, 2], [PROMPT] * 3
        self.generator = speculator.candidate_generator(Session(3, self.text.shape[1], demo_target().device))

    def states(self, rows: list[int], places: torch.LongTensor) -> dict:
        keys, states = self.generator.target_hidden_states, target_states()
        return {key: states[key][torch.tensor(rows)[:, None], places] for key in keys}

    def prefill(self) -> None:
        prompt = self.text[:, :PROMPT]
        places = torch.arange(PROMPT).expand(3, -1)
        self.generator.prefill(Prompt(prompt, self.starts, self.states([0, 1, 2], places)))

    @property
    def room(self) -> list[int]:
        """Tokens that each row may still draft."""
        return [self.text.shape[1] - self.ends[row] - 1 for row in self.rows]

    def observe(self, counts: list[int], accepted: list[int] | None = None) -> None:
        first = torch.tensor([self.ends[row] for row in self.rows])[:, None]
        places = (first + torch.arange(max(counts))).clamp(max=self.text.shape[1] - 1)
        tokens = self.text[torch.tensor(self.rows)[:, None], places]
        lists = [row[:count] for row, count in zip(tokens.tolist(), counts)]
        states = self.states(self.rows, places - 1)
        self.generator.observe(Commit(list(self.rows), tokens, lists, accepted or [0] * len(counts), states))
        for row, count in zip(self.rows, counts):
            self.ends[row] += count

    def propose(self, limits: list[int]) -> DraftTree:
        anchors = torch.tensor([int(self.text[row, self.ends[row] - 1]) for row in self.rows])
        lengths = [self.ends[row] - self.starts[row] for row in self.rows]
        return self.generator.propose(DraftStep(list(self.rows), anchors, lengths, limits))

    def num_right(self, draft: DraftTree) -> list[int]:
        """Number of tokens of each row's draft that the target agrees with."""
        counts = []
        for row, tokens, parents in zip(self.rows, draft.token_lists(), draft.parent_lists()):
            node, count = -1, 0
            for place, (token, parent) in enumerate(zip(tokens, parents)):
                if parent == node and token == int(self.text[row, self.ends[row] + count]):
                    node, count = place, count + 1
            counts.append(count)
        return counts

    def keep_rows(self, keep: list[int]) -> None:
        self.rows = [self.rows[index] for index in keep]
        self.generator.keep_rows(keep)


three = st.lists(st.integers(0, 5), min_size=3, max_size=3)
steps = st.one_of(
    st.tuples(st.just("draft"), three, st.booleans()),
    st.tuples(st.just("tell"), three),
    st.tuples(st.just("end"), st.integers(0, 2)),
)


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.usefixtures("no_gradients")
class TestInEveryOrder:
    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(first_ends=st.booleans(), orders=st.lists(steps, max_size=8))
    def test_it_drafts(self, row, first_ends, orders):
        speculator, watches = watched_speculator(row)
        text = Text(speculator)
        text.prefill()
        if first_ends:
            text.keep_rows([2, 1])
        text.observe([1] * len(text.rows))
        for kind, *what in orders:
            num_rows = len(text.rows)
            if min(text.room) < 7:
                break
            if kind == "end" and num_rows > 1:
                # The last row takes the place of the one that leaves.
                keep = list(range(num_rows - 1))
                if what[0] < len(keep):
                    keep[what[0]] = num_rows - 1
                text.keep_rows(keep)
            elif kind == "tell":
                text.observe([max(count, 1) for count in what[0][:num_rows]])
            elif kind == "draft":
                limits = [max(limit, int(not any(what[0][:num_rows]))) for limit in what[0][:num_rows]]
                right = text.num_right(text.propose(limits))
                # What was accepted may be cut.
                counts = [max(count, 1) if what[1] else count + 1 for count in right]
                text.observe(counts, list(map(min, right, counts)))
        text.generator.close()
        assert all(watch.is_closed for watch in watches)

    @full
    def test_it_may_be_closed_at_once(self, row):
        speculator, watches = watched_speculator(row)
        Text(speculator).generator.close()
        assert all(watch.is_closed for watch in watches)

    def test_told_late_and_of_fewer_rows_it_drafts_as_well(self, row):
        """Against one that was told everything at once, and drafts at the same places."""
        told, late = Text(fresh_speculator(settings_of(row))), Text(fresh_speculator(settings_of(row)))
        told.prefill()
        told.observe([1, 1, 1])
        late.prefill()
        late.keep_rows([2, 1])
        for text in (told, late):
            for _ in range(8):
                text.observe([1] * len(text.rows))
        told.keep_rows([2, 1])
        late.observe([1, 1])
        same = total = 0
        for _ in range(6):
            drafts = [text.propose([2] * len(text.rows)) for text in (told, late)]
            for ours, theirs in zip(*(draft.token_lists() for draft in drafts)):
                same, total = same + (ours == theirs), total + 1
            for text in (told, late):
                text.observe([1, 1])
        # Products of other widths may round a near tie to the other side.
        assert same >= total - 2
