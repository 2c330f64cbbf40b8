"""The next draft is launched before the host reads what was accepted, and is that which would be launched later."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import StoppingCriteria

from hf_specdec import generate_many, record
from hf_specdec.candidate_generators.combined.policy import DrafterChoice
from hf_specdec.candidate_generators.ngram.texts import LookupRule
from hf_specdec.control.controller import Choice, SpeculationController
from hf_specdec.logits.rules import StandardRule
from hf_specdec.logits.sampling import DraftSampler
from hf_specdec.many.engine import Engine
from hf_specdec.many.requests import RequestReader, seed_of
from hf_specdec.target.graphs import CallGraphs
from hf_specdec.target.model_slots import ModelSlots
from hf_specdec.transfers import PendingRead
from tests.helpers.caches import CACHE
from tests.helpers.levels import full, in_full, split
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.tiny_drafters import COMBINED_DRAFTERS, DRAWN_DRAFTERS, GREEDY_DRAFTERS, SELF_DRAFTERS, tiny_drafter


pytestmark = pytest.mark.usefixtures("tapes")

ON_THE_HOST = ("recycling", "adaptive", "medusa, measured", "mlp_speculator, fixed", "mlp_speculator, static tree")
GREEDY = [name for name in GREEDY_DRAFTERS if name not in (*ON_THE_HOST, "dflash, denoising", "dflash, domino")]
SAMPLED = {"do_sample": True, "temperature": 4.0, "top_k": 40}
# Random drafts are hardly ever those of a greedy target.
SYNTHETIC = {"rejection_sample_method": "synthetic", "rejection_sample_options": 2.0}
AUTO = {"num_speculative_tokens": "auto"}
AHEAD = "target draft read"


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """Runs of graphs, of the target and of drafts, and reads by the host, in their order."""
    noted: list[str] = []
    run, get = CallGraphs.run, PendingRead.get

    def noting(self, key, *args, **more):
        before = self.num_replays
        captured = run(self, key, *args, **more)
        # Verifications have whole numbers of nodes as the first part of their keys, and say how they judge.
        noted.extend(["target" if type(key[0]) is int and len(key) > 2 else "draft"] * (self.num_replays - before))
        return captured

    monkeypatch.setattr(CallGraphs, "run", noting)
    monkeypatch.setattr(PendingRead, "get", lambda self: noted.append("read") or get(self))
    return noted


def drafted_ahead(events: list[str]) -> int:
    """Drafts that are launched between a verification and the reading of its verdict."""
    return " ".join(events).count(AHEAD)


def verified_ahead(events: list[str]) -> int:
    """Verdicts that the host reads when the verification after theirs has been launched."""
    # The first verdict of all is that on the prompt.
    read = [index for index, event in enumerate(events) if event == "read" and "target" in events[:index]]
    return sum(events[:index].count("target") > number for number, index in enumerate(read, start=1))


def plain(inputs, new_tokens=24, **arguments) -> list[list[int]]:
    return tiny_llama().generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **arguments).tolist()


def both(case, inputs, settings=None, limits=None, **arguments):
    """Outputs of a call with graphs and of one without, which say the same; `limits` are for `choose`."""
    outputs = []
    for enforce_eager in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if limits:
                choose(patch, limits)
            model = tiny_llama()
            drafter = tiny_drafter(model, case, enforce_eager=enforce_eager, **(settings or {}))
            torch.manual_seed(0)
            arguments = {"max_new_tokens": 24, "return_dict_in_generate": True, "do_sample": False, **arguments}
            outputs.append(model.generate(**inputs, **arguments, assistant=drafter))
    output, eager = outputs
    assert output.sequences.tolist() == eager.sequences.tolist()
    # Without graphs, trees are cut to what pays where lengths are chosen.
    if limits is None:
        assert output.speculative.num_accepted_tokens == eager.speculative.num_accepted_tokens
    return output, eager


def traced(case, inputs, **arguments):
    """Text, cycles and statistics of a call with graphs, which are those of one without."""
    with record(trace=True) as made:
        output, _ = both(case, inputs, max_new_tokens=20, **arguments)
    cycles, eager_cycles = (call.cycles for call in made.calls)
    assert cycles == eager_cycles
    return output.sequences.tolist(), cycles, output.speculative


def choose(patch, limits: list[list[int]]) -> None:
    """Lets controllers choose these limits of rows, again and again."""
    chosen = itertools.cycle(Choice(max(rows), dict(enumerate(rows))) for rows in limits)
    patch.setattr(SpeculationController, "_choose", lambda *args: next(chosen))


def depth(parents: list[int]) -> int:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return max(depths)


class TestDraftIsLaunchedBeforeTheVerdictIsRead:
    @pytest.mark.parametrize("case", split(GREEDY, short=["ngram", "dflash"]))
    def test_greedy(self, case, events):
        text, cycles, stats = traced(case, prompts(3))
        assert text == plain(prompts(3), 20)
        assert stats.num_draft_graph_replays <= stats.num_target_forwards
        # Not at the beginning, nor near the end, where the depth of a draft depends on what is accepted.
        assert drafted_ahead(events) >= len(cycles) - 2 * stats.num_spec_tokens - 5 > 3

    @pytest.mark.parametrize("case", [*in_full("eagle3"), *split(DRAWN_DRAFTERS, short=["draft model, drawn"])])
    def test_sampling(self, case, events, monkeypatch):
        """Random numbers are those of the place, which the device picks by what was accepted, inside of graphs."""
        calls, numbers = [], DraftSampler.numbers
        monkeypatch.setattr(DraftSampler, "numbers", lambda *given: calls.append(given) or numbers(*given))
        _, cycles, stats = traced(case, prompts(3), **SAMPLED)
        assert stats.num_accepted_tokens > 0
        assert drafted_ahead(events) > 2
        # Those of the call without graphs.
        num_drafts = sum(any(row.draft_tokens for row in cycle.rows) for cycle in cycles)
        assert len(calls) == (num_drafts if "drawn" in case else 0)

    @pytest.mark.parametrize("case", ["draft model", *in_full("eagle3, dynamic tree", "mtp, layers", "dflash, tree")])
    def test_lengths_that_change_from_cycle_to_cycle(self, case, events):
        """They are chosen before the launch."""
        limits = [[3, 1, 2], [2, 2, 2], [0, 0, 0], [3, 3, 3], [3, 3, 3]]
        with record(trace=True) as made:
            output, _ = both(case, prompts(3), AUTO, limits, max_new_tokens=36)
        assert output.sequences.tolist() == plain(prompts(3), 36)
        assert drafted_ahead(events) > 0
        assert {depth(row.parents) for call in made.calls for cycle in call.cycles for row in cycle.rows} >= {0, 1, 2}

    @pytest.mark.parametrize("case", ["draft model", *in_full("draft model, states", "eagle3, dynamic tree")])
    def test_rows_end_apart(self, case, events):
        """A draft of rows of which one has ended is made anew."""
        texts = [row[7:] for row in plain(prompts(4), 20)]
        ends = {"eos_token_id": [texts[0][5], texts[2][9]], "pad_token_id": 0}
        text, cycles, _ = traced(case, prompts(4), **ends)
        assert text == plain(prompts(4), 20, **ends)
        assert len({len(cycle.rows) for cycle in cycles}) > 1
        assert drafted_ahead(events) > 0

    def test_all_of_a_draft_is_accepted(self, events):
        """Drafted tokens that the draft model reads again."""
        output, _ = both("the target itself", prompts(2))
        assert output.sequences.tolist() == plain(prompts(2))
        assert output.speculative.num_accepted_tokens == output.speculative.num_draft_tokens > 0
        assert f"{AHEAD} {AHEAD}" in " ".join(events)

    @full
    def test_after_a_pause_in_which_much_was_committed(self, events, monkeypatch):
        """What is fed token by token lies after the text, where a draft that is launched ahead would begin."""
        limits = itertools.cycle([[12, 12], [12, 12], [0, 0]])
        monkeypatch.setattr(SpeculationController, "limits", lambda *args: next(limits))
        settings = {**AUTO, "draft_confidence_threshold": 0.0}
        stats = both("the target itself", prompts(2), settings, max_new_tokens=96)[0].speculative
        assert drafted_ahead(events) > 0
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0

    @full
    def test_lookup_that_cannot_be_captured(self, events, monkeypatch):
        """The host looks up then, and the target goes on in graphs."""
        draft, calls = LookupRule.draft, []

        def fail_once(*args):
            calls.append(args)
            if len(calls) == 1:
                raise RuntimeError("no memory")
            return draft(*args)

        monkeypatch.setattr(LookupRule, "draft", fail_once)
        stats = both("ngram", prompts(3))[0].speculative
        assert stats.num_accepted_tokens > 0
        assert "capturing failed" in stats.draft_graphs
        assert events.count("draft") == 0 < events.count("target")

    def test_lookups_are_counted_when_the_host_knows_them(self, events):
        """Drafts of graphs as those of the host."""
        output, eager = both("ngram", prompts(2))
        assert "draft" in events
        for name in ("num_lookups", "num_lookup_hits", "num_draft_tokens", "num_accepted_tokens"):
            assert getattr(output.speculative, name) == getattr(eager.speculative, name) > 0

    @pytest.mark.parametrize(
        ("case", "sampling", "batch_size"),
        [("early_exit", SAMPLED, 1), *in_full(("early_exit", {}, 3), ("sparse_kv", {}, 1), ("sparse_kv", SAMPLED, 3))],
    )
    def test_drafts_in_graphs_of_the_target(self, case, sampling, batch_size, events):
        """They are launched ahead unless something of the verification is read later, as in a call that is traced."""
        output, eager = both(case, prompts(batch_size), **sampling)
        stats = output.speculative
        assert stats.num_accepted_tokens > 0
        assert stats.num_draft_graph_replays <= stats.num_target_forwards == eager.speculative.num_target_forwards
        # Of a single row the verification is, too.
        assert (verified_ahead(events) if batch_size == 1 else drafted_ahead(events)) > 2
        events.clear()
        traced(case, prompts(batch_size), **sampling)
        assert drafted_ahead(events) == verified_ahead(events) == 0


def ask(patch, rule) -> None:
    """Lets combinations ask their second part where `rule(row, cycle)` says so."""

    def asks(choice, rows, *given):
        cycle = next(vars(choice).setdefault("cycles", itertools.count()))
        return [rule(row, cycle) for row in rows]

    patch.setattr(DrafterChoice, "asks", asks)


COMBINED = split(COMBINED_DRAFTERS, short=["ngram+medusa"])


class TestCombinations:
    """The draft of the part with a network is launched ahead where it is probably the one that is asked for."""

    @pytest.mark.parametrize("case", COMBINED)
    def test_as_the_part_alone(self, case, events, monkeypatch):
        ask(monkeypatch, lambda row, cycle: True)
        output, _ = both(case, prompts(3), max_new_tokens=20)
        assert output.sequences.tolist() == plain(prompts(3), 20)
        stats = output.speculative
        assert stats.num_draft_graph_replays <= stats.num_target_forwards
        assert drafted_ahead(events) >= stats.num_target_forwards - 2 * stats.num_spec_tokens - 6 > 3

    @pytest.mark.parametrize("case", COMBINED)
    def test_rows_whose_drafts_are_retrieved(self, case, events, monkeypatch):
        """The draft that was launched is as good for other rows as for those that were expected to ask."""
        ask(monkeypatch, lambda row, cycle: (row + cycle) % 3 > 0)
        _, found, stats = traced(case, prompts(3))
        assert {row.drafter for cycle in found for row in cycle.rows} == set(stats.method.split("+"))
        # What is drafted by the target is not launched ahead in a call that is traced.
        assert (drafted_ahead(events) > 3) == ("early_exit" not in case)

    @pytest.mark.parametrize("case", COMBINED)
    def test_cycles_whose_drafts_are_retrieved(self, case, events, monkeypatch):
        """A draft that was launched for nothing leaves no trace; where that is frequent, none is launched."""
        ask(monkeypatch, lambda row, cycle: cycle % 7 < 5)
        output, _ = both(case, prompts(2), max_new_tokens=40)
        assert output.sequences.tolist() == plain(prompts(2), 40)
        assert drafted_ahead(events) > 3
        events.clear()
        ask(monkeypatch, lambda row, cycle: cycle % 2 == 0)
        both(case, prompts(2), max_new_tokens=40)
        assert drafted_ahead(events) <= 1

    def test_without_a_grammar_as_the_other_part_alone(self, events):
        output, eager = both("grammar+ngram", prompts(2), max_new_tokens=48)
        assert output.sequences.tolist() == plain(prompts(2), 48)
        assert drafted_ahead(events) > 3
        for name in ("num_lookups", "num_draft_tokens", "notes"):
            assert getattr(output.speculative, name) == getattr(eager.speculative, name)

    @full
    @pytest.mark.parametrize("case", ["ngram+draft model", "suffix+medusa"])
    def test_lengths_that_change_from_cycle_to_cycle(self, case, events, monkeypatch):
        ask(monkeypatch, lambda row, cycle: cycle % 9 < 8)
        both(case, prompts(2), AUTO, [[3, 2], [2, 2], [1, 1]], max_new_tokens=40)
        assert drafted_ahead(events) > 3


def random_requests(count: int) -> list[list[int]]:
    return torch.randint(3, 60, (count, 6), generator=torch.Generator().manual_seed(0)).tolist()


class TestRequests:
    @full
    @pytest.mark.parametrize("case", ["draft model, drawn", "eagle3, drawn", "mlp_speculator, drawn", "dflash, drawn"])
    def test_a_row_without_room_after_others_have_ended(self, case):
        """Nothing is asked of rows that were there when there was room for drafts."""
        speculator = tiny_drafter(model := tiny_llama(), case)
        arguments = {"do_sample": True, "temperature": 4.0, "in_order": True, "assistant": speculator}
        for more in range(1, 6):
            requests = [{"input_ids": [5, 9, 7], "max_new_tokens": 6 + count, "seed": more} for count in (0, more)]
            results = list(generate_many(model, requests, 2, **arguments))
            assert [result.error for result in results] == [None, None]
            assert [len(result.tokens) for result in results] == [6, 6 + more]

    @full
    @pytest.mark.parametrize("case", ["eagle3, drawn", "draft model, drawn"])
    def test_rows_that_are_judged_again(self, case, events, monkeypatch):
        """One row has no token to draw when the next drafts have been launched; the others go on with theirs."""
        judge, found = StandardRule.judge, []
        requests = [
            {"input_ids": tokens, "max_new_tokens": 20, "seed": index}
            for index, tokens in enumerate(random_requests(3))
        ]

        def judge_nothing(self, draft, scores, keys):
            acceptance = judge(self, draft, scores, keys)
            seeds, places = map(torch.as_tensor, (keys.seeds, keys.positions))
            acceptance.tokens.masked_fill_(((seeds == seed_of(0)) & (places > 14))[:, None], -1)
            return acceptance

        for rule in (judge, judge_nothing):
            monkeypatch.setattr(StandardRule, "judge", rule)
            speculator = tiny_drafter(model := tiny_llama(), case)
            arguments = {"do_sample": True, "temperature": 4.0, "in_order": True, "assistant": speculator}
            found.append(list(generate_many(model, requests, 3, **arguments)))
        assert drafted_ahead(events) > 0
        assert "no token to draw" in str(found[1][0].error)
        assert [result.error for result in found[1][1:]] == [None, None]
        assert [result.tokens for result in found[0][1:]] == [result.tokens for result in found[1][1:]]

    @pytest.mark.parametrize(("case", "changed"), [("draft model", 0), *in_full(("early_exit", 2))])
    def test_rows_with_processors_of_their_own(self, case, changed, events):
        """Their drafts are those of their own scores, whoever came first; where none has any, a draft is one graph."""
        found = []
        requests = [{"input_ids": tokens, "max_new_tokens": 24} for tokens in random_requests(3)]
        requests[changed] |= {"repetition_penalty": 1.5, "max_new_tokens": 8}
        for enforce_eager in (False, True):
            speculator = tiny_drafter(model := tiny_llama(), case, enforce_eager=enforce_eager)
            arguments = {"do_sample": False, "in_order": True, "assistant": speculator}
            results = list(generate_many(model, requests, 3, **arguments))
            found.append([(result.tokens, result.stats.num_accepted_tokens) for result in results])
        assert found[0] == found[1]
        assert "draft" in events


# Of a single row, the verification of a draft that was launched ahead is launched, too.
QUICK = ["ngram", "medusa", "eagle3, static tree", "draft model, drawn"]


class TestNextVerificationIsLaunchedBeforeTheVerdictIsRead:
    @pytest.mark.parametrize("case", split([*GREEDY, *DRAWN_DRAFTERS, *SELF_DRAFTERS], short=QUICK))
    def test_drafts(self, case, events):
        settings, arguments = ({}, SAMPLED) if case in DRAWN_DRAFTERS else (SYNTHETIC, {})
        output, eager = both(case, prompts(1), settings, **arguments)
        stats = output.speculative
        assert stats.num_accepted_tokens > (0 if case in DRAWN_DRAFTERS else 3)
        assert stats.num_target_forwards == eager.speculative.num_target_forwards
        # Not near the end, where the depth of a draft depends on what is accepted.
        assert verified_ahead(events) >= stats.num_target_forwards - 2 * stats.num_spec_tokens - 3
        assert verified_ahead(events) > 2

    # EAGLE's own shape on a CPU has a threshold, and how deep such a draft is has to be read.
    @pytest.mark.parametrize(
        "case", split([*(case for case in GREEDY if case != "eagle3"), *SELF_DRAFTERS], short=["draft model"])
    )
    def test_lengths_that_change_from_cycle_to_cycle(self, case, events):
        """Those of the next cycle are chosen before the verdict."""
        output, eager = both(case, prompts(1), {**SYNTHETIC, **AUTO}, [[2], [1], [2], [2]], max_new_tokens=60)
        stats = output.speculative
        assert stats.num_accepted_tokens == eager.speculative.num_accepted_tokens > 9
        assert stats.num_draft_tokens >= eager.speculative.num_draft_tokens
        # No forward was for nothing.
        assert stats.num_target_forwards == eager.speculative.num_target_forwards
        assert stats.num_draft_graph_replays < stats.num_target_forwards
        assert verified_ahead(events) >= stats.num_target_forwards - 2 * stats.num_spec_tokens - 3
        assert verified_ahead(events) > 5

    @full
    @pytest.mark.parametrize("case", ["draft model", "early_exit"])
    def test_graphs_draft_as_deep_as_was_chosen(self, case, monkeypatch):
        """Each token of a draft costs a forward, so those that nobody asked for are not drafted."""
        depths, run = [], CallGraphs.run

        def noting(self, key, *args, **more):
            if isinstance(key[0], type) and issubclass(key[0], ModelSlots):
                depths.append(next(part for part in key[2:] if type(part) is int))
            return run(self, key, *args, **more)

        monkeypatch.setattr(CallGraphs, "run", noting)
        output, _ = both(case, prompts(1), AUTO, [[7]], max_new_tokens=60)
        assert output.speculative.num_spec_tokens == 12
        assert len(depths) > 9
        # One graph serves lengths of 7 and 8, also at the end of the text, where there is room for less.
        assert set(depths) == {8}

    @pytest.mark.parametrize("arguments", [{}, *in_full({"do_sample": True, "temperature": 4.0})])
    def test_cycles_without_drafts(self, arguments, events):
        output, _ = both("no drafts", prompts(1), **arguments)
        assert output.speculative.num_target_forwards == 24
        # All verdicts but the last one's.
        assert verified_ahead(events) == 22

    def test_logits_that_are_kept(self, events):
        """They lie in the memory of the graph, which the verification after it would overwrite."""
        output, eager = both("eagle3", prompts(1), output_logits=True, max_new_tokens=12)
        torch.testing.assert_close(output.logits, eager.logits)
        assert verified_ahead(events) == 0

    def test_a_rest_between_drafts(self, events):
        """The verification after it is launched ahead, too, unless the drafter has text to read first."""
        limits = [[3], [0], [0], [0], [2], [0]]
        output, _ = both("the target itself", prompts(1), AUTO, limits, max_new_tokens=80)
        assert output.sequences.tolist() == plain(prompts(1), 80)
        stats = output.speculative
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 10
        # Of the call with graphs.
        assert stats.num_target_forwards == 1 + events.count("target")
        assert verified_ahead(events) > 10

    @pytest.mark.parametrize(
        ("case", "end"),
        [("draft model", "stopping_criteria"), *in_full(("eagle3", "eos_token_id"), ("no drafts", "eos_token_id"))],
    )
    def test_a_row_that_ends(self, case, end, events):
        """The forward after it is for nothing; the cache that is returned knows nothing of it."""
        model, inputs, length = tiny_llama(), prompts(1), 7
        settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
        text = model.generate(**inputs, **settings).sequences[0, length:].tolist()
        ends = {"eos_token_id": text[13]} if end == "eos_token_id" else {"stopping_criteria": [Full(length + 14)]}
        alone = model.generate(**inputs, **settings, **ends)
        output, eager = both(case, inputs, **settings, **ends)
        assert output.sequences.tolist() == alone.sequences.tolist()
        assert output.sequences.shape[1] < length + 24
        forwards = output.speculative.num_target_forwards
        assert forwards == eager.speculative.num_target_forwards + 1 == events.count("target") + 1
        more = {"input_ids": torch.cat([alone.sequences, torch.tensor([[9, 7]])], dim=1), "max_new_tokens": 5}
        texts = [
            model.generate(**more, do_sample=False, **{CACHE: cache}).tolist()
            for cache in (output[CACHE], alone[CACHE])
        ]
        assert texts[0] == texts[1]

    @pytest.mark.parametrize(
        ("case", "asked"),
        [
            ("eagle3", {}),
            *in_full(("eagle3", {"top_logprobs": 2})),
            *in_full(*((case, {}) for case in ("draft model", "medusa", "mtp, layers", *SELF_DRAFTERS))),
        ],
    )
    def test_a_row_that_another_one_joins(self, case, asked, events):
        """And leaves again; the first one was alone before, and is so afterwards."""
        model, prompt, other = tiny_llama(), [5, 9, 7, 11], [8, 3, 14]
        reader = RequestReader(model, {"max_new_tokens": 40, "do_sample": False}, num_places=2)
        engine = Engine(tiny_drafter(model, case), reader)
        rows = [reader.row(0, prompt, asked), reader.row(1, other, {"max_new_tokens": 7})]
        engine.add(rows[0])
        for _ in range(5):
            engine.step()
        alone = verified_ahead(events)
        engine.add(rows[1])
        while not rows[1].has_ended:
            engine.step()
        together = verified_ahead(events)
        while not engine.is_idle:
            engine.step()
        engine.close()
        assert [row.error for row in rows] == [None, None]
        assert [prompt + rows[0].tokens] == plain({"input_ids": torch.tensor([prompt])}, 40)
        assert [other + rows[1].tokens] == plain({"input_ids": torch.tensor([other])}, 7)
        assert len(rows[0].logprobs) == (40 if asked else 0)
        assert [alone > 2, verified_ahead(events) > together] == [not asked, not asked]


class Full(StoppingCriteria):
    """A criterion of the user's: enough tokens, whatever they are."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([len(row) >= self.length for row in input_ids])
