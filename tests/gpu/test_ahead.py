"""The next draft is launched before the host reads what was accepted, and is that which would be launched later."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import StoppingCriteria

from hf_specdec import SpeculativeConfig, generate_many, load_speculator, record
from hf_specdec.candidate_generators.none.generator import NoDrafts
from hf_specdec.control.controller import Choice, SpeculationController
from hf_specdec.decoding import graphs
from hf_specdec.decoding.graphs import CallGraphs
from hf_specdec.logits.randomness import CapturedUniforms
from hf_specdec.logits.rules import StandardRule
from hf_specdec.logits.sampling import DraftSampler
from hf_specdec.many.engine import Engine
from hf_specdec.many.requests import RequestReader, seed_of
from hf_specdec.speculator import Speculator
from hf_specdec.transfers import PendingRead
from tests.helpers.caches import CACHE
from tests.helpers.levels import full, in_full, split
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.tape import spoil_inputs, tape_everything
from tests.helpers.tiny_drafters import (
    SPARSE,
    dflash,
    draft_model,
    eagle3,
    medusa,
    method,
    mlp_speculator,
    mtp,
    peagle,
)
from tests.methods.test_dflash import SELECTOR


DYNAMIC = {"draft_tree_depth": 3, "draft_tree_top_k": 2, "num_draft_nodes": 6}
TREE = [(0,), (1,), (0, 0), (1, 0)]
LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
CASES = {
    "ngram": (method, {"name": "ngram", "num_speculative_tokens": 3}),
    "ngram, chains": (method, {"name": "ngram", **LOOKUP, "num_speculative_tokens": 3}),
    "draft model": (draft_model, {"num_speculative_tokens": 3}),
    "draft model, masks": (draft_model, {"mask_token": 3, "num_speculative_tokens": 3}),
    "draft model, states": (draft_model, {"mask_token": 3, "reads_states": True, "num_speculative_tokens": 3}),
    "medusa": (medusa, {"num_speculative_tokens": "fixed"}),
    "mlp_speculator": (mlp_speculator, {"num_speculative_tokens": 2}),
    "mlp_speculator, tree": (mlp_speculator, {"mlp_speculator_num_candidates": 4, "num_speculative_tokens": "fixed"}),
    "eagle3": (eagle3, {"num_speculative_tokens": 3}),
    "eagle3, static tree": (eagle3, {"speculative_token_tree": TREE}),
    "eagle3, dynamic tree": (eagle3, {**DYNAMIC, "num_speculative_tokens": "fixed"}),
    "mtp, layers": (mtp, {"num_speculative_tokens": "fixed"}),
    "mtp, two layers": (mtp, {"num_speculative_tokens": 2}),
    "dflash": (dflash, {"num_speculative_tokens": "fixed"}),
    "dflash, tree": (dflash, {"num_draft_nodes": 6, "num_speculative_tokens": "fixed"}),
    "dflash, corrections": (dflash, {"predicts_next": True, "markov_rank": 3, "num_speculative_tokens": "fixed"}),
}
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
CONFIDENT = {"predicts_next": True, "markov_rank": 3, "has_confidence": True, "confidence_with_markov": True}
DRAWN = {
    "draft model, drawn": (draft_model, {"num_speculative_tokens": 3}),
    "draft model, masks, drawn": (draft_model, {"mask_token": 3, "num_speculative_tokens": 3}),
    "draft model, states, drawn": (draft_model, {"mask_token": 3, "reads_states": True, "num_speculative_tokens": 3}),
    "eagle3, drawn": (eagle3, {"num_speculative_tokens": 3, **PROBABILISTIC}),
    "peagle, drawn": (peagle, {"num_speculative_tokens": 3, **PROBABILISTIC}),
    "mtp, drawn": (mtp, {"num_speculative_tokens": "fixed", **PROBABILISTIC}),
    "mlp_speculator, drawn": (mlp_speculator, {"num_speculative_tokens": 3, **PROBABILISTIC}),
    "dflash, drawn": (dflash, {"num_speculative_tokens": "fixed", **PROBABILISTIC}),
    "dflash, confident, drawn": (dflash, {"network": CONFIDENT, "num_speculative_tokens": "fixed", **PROBABILISTIC}),
    "dflash, selector, drawn": (dflash, {"network": SELECTOR, "num_speculative_tokens": "fixed", **PROBABILISTIC}),
}
# Drafts in graphs of the target, which take the memory of its verifications.
OWN = {
    "early_exit": (method, {"name": "early_exit", "early_exit_layer": 1, "num_speculative_tokens": 3}),
    "sparse_kv": (method, {"name": "sparse_kv", **SPARSE, "num_speculative_tokens": 3}),
}
NEW_TOKENS = 20
SAMPLED = {"do_sample": True, "temperature": 4.0, "top_k": 40}


@pytest.fixture(autouse=True)
def on_tapes(monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_CHECK", "0")
    spoil_inputs(monkeypatch)
    tape_everything(monkeypatch)
    yield
    graphs.forget_graphs()


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


def calls(case, inputs, **arguments):
    """Text, drafts and statistics of a call with graphs, and of one without."""
    found = []
    for enforce_eager in (False, True):
        make, settings = CASES[case]
        speculator = make(**settings, enforce_eager=enforce_eager)(None, inputs)(model := tiny_llama())
        torch.manual_seed(0)
        with record(trace=True) as made:
            arguments = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, **arguments}
            output = model.generate(**inputs, **arguments, assistant=speculator)
        found.append((output.sequences.tolist(), made.calls[0].cycles, output.speculative))
    return found


def choose(monkeypatch, *limits: list[int]) -> None:
    """Lets controllers choose these limits of rows, again and again."""
    chosen = itertools.cycle(Choice(max(rows), max(rows), dict(enumerate(rows))) for rows in limits)
    monkeypatch.setattr(SpeculationController, "_choose", lambda *args: next(chosen))


def depth(parents: list[int]) -> int:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return max(depths)


@pytest.mark.parametrize("case", split(CASES, short=["ngram", "draft model", "dflash"]))
def test_draft_is_launched_before_the_verdict_is_read(case, events):
    inputs = prompts(3)
    plain = tiny_llama().generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False).tolist()
    (text, cycles, stats), (eager_text, eager_cycles, eager_stats) = calls(case, inputs, do_sample=False)
    assert text == eager_text == plain
    assert cycles == eager_cycles
    assert stats.num_accepted_tokens == eager_stats.num_accepted_tokens
    assert stats.num_draft_graph_replays <= stats.num_target_forwards
    order = " ".join(events)
    # Not at the beginning, nor near the end, where the depth of a draft depends on what is accepted.
    assert order.count("target draft read") >= len(cycles) - 2 * stats.num_spec_tokens - 5 > 3


@pytest.mark.parametrize("case", ["draft model", *in_full("eagle3, dynamic tree", "mtp, layers", "dflash, tree")])
def test_other_limits_than_those_that_it_was_made_for(case, events, monkeypatch):
    """Lengths are chosen from cycle to cycle, before the launch."""
    choose(monkeypatch, [3, 1, 2], [2, 2, 2], [0, 0, 0], [3, 3, 3], [3, 3, 3])
    inputs, arguments = prompts(3), {"max_new_tokens": 36, "do_sample": False}
    plain = tiny_llama().generate(**inputs, **arguments).tolist()
    make, settings = CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, case, (make, {**settings, "num_speculative_tokens": "auto"}))
        (text, cycles, _), (eager_text, eager_cycles, _) = calls(case, inputs, **arguments)
    assert text == eager_text == plain
    assert "target draft read" in " ".join(events)
    # The calls have taken the limits in turn, the second one from where the first one had ended.
    depths = {depth(row.parents) for cycle in (*cycles, *eager_cycles) for row in cycle.rows}
    assert depths >= {0, 1, 2}


@pytest.mark.parametrize("case", ["draft model", *in_full("draft model, states", "eagle3, dynamic tree")])
def test_rows_that_end_apart(case, events):
    """A draft of rows of which one has ended is made anew."""
    inputs = prompts(4)
    texts = tiny_llama().generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)[:, 7:].tolist()
    ends = {"eos_token_id": [texts[0][5], texts[2][9]], "pad_token_id": 0, "do_sample": False}
    plain = tiny_llama().generate(**inputs, max_new_tokens=NEW_TOKENS, **ends).tolist()
    (text, cycles, stats), (_, eager_cycles, _) = calls(case, inputs, **ends)
    assert text == plain
    assert cycles == eager_cycles
    assert len({len(cycle.rows) for cycle in cycles}) > 1
    assert "target draft read" in " ".join(events)


@pytest.mark.parametrize(
    ("case", "sampling", "batch_size"),
    [("early_exit", SAMPLED, 1), *in_full(("early_exit", {}, 3), ("sparse_kv", {}, 1), ("sparse_kv", SAMPLED, 3))],
)
def test_drafts_in_graphs_of_the_target(case, sampling, batch_size, events):
    """They are launched ahead unless something of the verification is read later, as in a call that is traced."""
    inputs, arguments = prompts(batch_size), {"do_sample": False, **sampling}
    output, eager = with_and_without_graphs(of_case(case, inputs), inputs, **arguments)
    assert output.sequences.tolist() == eager.sequences.tolist()
    stats, eager_stats = output.speculative, eager.speculative
    assert stats.num_accepted_tokens == eager_stats.num_accepted_tokens > 0
    assert stats.num_draft_graph_replays <= stats.num_target_forwards == eager_stats.num_target_forwards
    # Of a single row the verification is, too.
    launched = verified_ahead(events) if batch_size == 1 else " ".join(events).count("target draft read")
    assert launched > 2
    events.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, case, OWN[case])
        (text, cycles, _), (eager_text, eager_cycles, _) = calls(case, inputs, **arguments)
    assert text == eager_text
    assert cycles == eager_cycles
    assert "target draft read" not in " ".join(events)
    assert verified_ahead(events) == 0


@pytest.mark.parametrize("case", ["eagle3", *in_full("draft model", "medusa", "mtp, layers", "dflash", *OWN)])
def test_rows_that_join(case, events):
    """Requests of several lengths, of which new ones take the places of those that have ended."""
    model, (make, settings) = tiny_llama(), {**CASES, **OWN}[case]
    drawn = torch.randint(3, 60, (7, 6), generator=torch.Generator().manual_seed(0)).tolist()
    requests = [
        {"input_ids": tokens[: 4 + index % 3], "max_new_tokens": 12 + 5 * (index % 4)}
        for index, tokens in enumerate(drawn)
    ]
    speculator = make(**settings)(None, prompts(3))(model)
    results = generate_many(model, requests, 3, in_order=True, do_sample=False, assistant=speculator)
    for request, result in zip(requests, results):
        prompt, most = torch.tensor([request["input_ids"]]), request["max_new_tokens"]
        plain = model.generate(prompt, max_new_tokens=most, do_sample=False)
        assert result.tokens == plain[0, len(request["input_ids"]) :].tolist()
    assert "target draft read" in " ".join(events)


def test_lookups_are_counted_when_the_host_knows_them(events):
    """Drafts of graphs as those of the host."""
    output, eager = with_and_without_graphs(of_case("ngram", prompts(2)), prompts(2), do_sample=False)
    assert "draft" in events
    for name in ("num_lookups", "num_lookup_hits", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(output.speculative, name) == getattr(eager.speculative, name) > 0


def test_a_target_that_samples(events):
    """Drafts of the best tokens wait for nothing that is drawn."""
    arguments = {"do_sample": True, "temperature": 0.7, "top_k": 12}
    (text, cycles, _), (eager_text, eager_cycles, _) = calls("eagle3", prompts(2), **arguments)
    assert text == eager_text
    assert cycles == eager_cycles
    assert " ".join(events).count("target draft read") > 3


@pytest.mark.parametrize("case", split(DRAWN, short=["draft model, drawn"]))
def test_drawn_drafts(case, events):
    """Random numbers are those of the place, which the device picks by what was accepted, inside of graphs."""
    draws, draw = [], DraftSampler.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, case, DRAWN[case])
        patch.setattr(DraftSampler, "draw", lambda *given: draws.append(given[-1]) or draw(*given))
        (text, cycles, stats), (eager_text, eager_cycles, _) = calls(case, prompts(3), **SAMPLED)
    assert text == eager_text
    assert cycles == eager_cycles
    assert stats.num_accepted_tokens > 0
    assert " ".join(events).count("target draft read") > 2
    # Those of the call without graphs.
    assert len(draws) == sum(max(len(row.draft_tokens) for row in cycle.rows) for cycle in eager_cycles)


@full
@pytest.mark.parametrize("case", ["draft model, drawn", "eagle3, drawn", "mlp_speculator, drawn", "dflash, drawn"])
def test_a_row_without_room_after_others_have_ended(case):
    """Nothing is asked of rows that were there when there was room for drafts."""
    make, settings = DRAWN[case]
    speculator = make(**settings)(None, prompts(3))(model := tiny_llama())
    arguments = {"do_sample": True, "temperature": 4.0, "in_order": True, "assistant": speculator}
    for more in range(1, 6):
        requests = [{"input_ids": [5, 9, 7], "max_new_tokens": 6 + count, "seed": more} for count in (0, more)]
        results = list(generate_many(model, requests, 2, **arguments))
        assert [result.error for result in results] == [None, None]
        assert [len(result.tokens) for result in results] == [6, 6 + more]


@full
@pytest.mark.parametrize("case", ["eagle3, drawn", "draft model, drawn"])
def test_rows_that_are_judged_again(case, events, monkeypatch):
    """One row has no token to draw when the next drafts have been launched; the others go on with theirs."""
    drawn, found = torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(0)).tolist(), []
    requests = [{"input_ids": tokens, "max_new_tokens": 20, "seed": index} for index, tokens in enumerate(drawn)]
    judge, (make, settings) = StandardRule.judge, DRAWN[case]

    def judge_nothing(self, draft, scores, rows, positions):
        acceptance = judge(self, draft, scores, rows, positions)
        if isinstance(self.uniforms, CapturedUniforms):
            seeds, _, places = self.uniforms.keys
        else:
            seeds, _, places = map(torch.tensor, self.uniforms.keys(rows, positions))
        acceptance.tokens.masked_fill_(((seeds == seed_of(0)) & (places > 14))[:, None], -1)
        return acceptance

    for rule in (judge, judge_nothing):
        monkeypatch.setattr(StandardRule, "judge", rule)
        speculator = make(**settings)(None, prompts(3))(model := tiny_llama())
        arguments = {"do_sample": True, "temperature": 4.0, "in_order": True, "assistant": speculator}
        found.append(list(generate_many(model, requests, 3, **arguments)))
    assert "target draft read" in " ".join(events)
    assert "no token to draw" in str(found[1][0].error)
    assert [result.error for result in found[1][1:]] == [None, None]
    assert [result.tokens for result in found[0][1:]] == [result.tokens for result in found[1][1:]]


@pytest.mark.parametrize(("method", "changed"), [("draft_model", 0), *in_full(("early_exit", 2))])
def test_rows_with_processors_of_their_own(changed, method, events):
    """Their drafts are those of their own scores, whoever came first; where none has any, a draft is one graph."""
    drawn, found = torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(0)).tolist(), []
    requests = [{"input_ids": tokens, "max_new_tokens": 24} for tokens in drawn]
    requests[changed] |= {"repetition_penalty": 1.5, "max_new_tokens": 8}
    makers = {"draft_model": {"draft_model": tiny_llama(seed=1), "same_tokenizer": True}, "early_exit": {}}
    for enforce_eager in (False, True):
        settings = {"num_speculative_tokens": 3, "enforce_eager": enforce_eager, **makers[method]}
        speculator = load_speculator(model := tiny_llama(), None if "draft_model" in settings else method, **settings)
        arguments = {"do_sample": False, "in_order": True, "assistant": speculator}
        results = list(generate_many(model, requests, 3, **arguments))
        found.append([(result.tokens, result.stats.num_accepted_tokens) for result in results])
    assert found[0] == found[1]
    assert "draft" in events


def test_all_of_a_draft_is_accepted(events):
    """A draft model that is the target, whose drafted tokens it reads again."""
    model, inputs = tiny_llama(), prompts(2)
    plain = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    speculator = load_speculator(model, draft_model=tiny_llama(), same_tokenizer=True, num_speculative_tokens=3)
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(**inputs, **arguments, assistant=speculator)
    assert output.sequences.tolist() == plain.tolist()
    stats = output.speculative
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert "target draft read target draft read" in " ".join(events)


# Of a single row, the verification of a draft that was launched ahead is launched, too.

SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0}


def verified_ahead(events: list[str]) -> int:
    """Verdicts that the host reads when the verification after theirs has been launched."""
    read = [index for index, event in enumerate(events) if event == "read"]
    return sum(events[:index].count("target") > number for number, index in enumerate(read, start=1))


def with_and_without_graphs(make_speculator, inputs, **arguments):
    """Outputs of two calls that nobody traces."""
    arguments = {"max_new_tokens": 24, "return_dict_in_generate": True, **arguments}
    for enforce_eager in (False, True):
        model = tiny_llama()
        torch.manual_seed(0)
        yield model.generate(**inputs, **arguments, assistant=make_speculator(model, enforce_eager))


def of_case(case, inputs, **others):
    make, settings = {**CASES, **DRAWN, **OWN}[case]
    settings = {**settings, **others}
    return lambda model, enforce_eager: make(**settings, enforce_eager=enforce_eager)(None, inputs)(model)


VERIFIED = ("ngram", "draft model", "medusa", "eagle3, static tree", "mtp, layers", "draft model, drawn", "early_exit")


@pytest.mark.parametrize("case", split([*CASES, *DRAWN, *OWN], short=VERIFIED))
def test_the_next_verification_is_launched_before_the_verdict_is_read(case, events):
    inputs = prompts(1)
    # Random drafts are hardly ever those of a greedy target.
    others, arguments = ({}, SAMPLED) if case in DRAWN else (SYNTHETIC, {"do_sample": False})
    output, eager = with_and_without_graphs(of_case(case, inputs, **others), inputs, **arguments)
    assert output.sequences.tolist() == eager.sequences.tolist()
    stats = output.speculative
    assert stats.num_accepted_tokens == eager.speculative.num_accepted_tokens > 3
    assert stats.num_target_forwards == eager.speculative.num_target_forwards
    # Not near the end, where the depth of a draft depends on what is accepted.
    assert verified_ahead(events) >= stats.num_target_forwards - 2 * stats.num_spec_tokens - 3
    assert verified_ahead(events) > 2


# EAGLE's own shape on a CPU has a threshold, and how deep such a draft is has to be read.
@pytest.mark.parametrize("case", split([*(case for case in CASES if case != "eagle3"), *OWN], short=["draft model"]))
def test_lengths_that_are_chosen_from_cycle_to_cycle(case, events, monkeypatch):
    """Those of the next cycle are chosen before the verdict, and its verification is launched, too."""
    inputs, others = prompts(1), {**SYNTHETIC, "num_speculative_tokens": "auto"}
    calls = with_and_without_graphs(of_case(case, inputs, **others), inputs, max_new_tokens=60, do_sample=False)
    outputs = []
    for _ in range(2):
        choose(monkeypatch, [2], [1], [2], [2])
        outputs.append(next(calls))
    output, eager = outputs
    assert output.sequences.tolist() == eager.sequences.tolist()
    stats = output.speculative
    assert stats.num_accepted_tokens == eager.speculative.num_accepted_tokens > 9
    # Without graphs, trees are cut to what pays.
    assert stats.num_draft_tokens >= eager.speculative.num_draft_tokens
    # No forward was for nothing.
    assert stats.num_target_forwards == eager.speculative.num_target_forwards
    assert stats.num_draft_graph_replays < stats.num_target_forwards
    near_the_end = 2 * stats.num_spec_tokens + 3
    assert verified_ahead(events) >= stats.num_target_forwards - near_the_end
    assert verified_ahead(events) > 5


@full
@pytest.mark.parametrize("case", ["draft model", "early_exit"])
def test_graphs_draft_as_deep_as_was_chosen(case, monkeypatch):
    """Each token of a draft costs a forward, so those that nobody asked for are not drafted."""
    choose(monkeypatch, [7])
    depths, run = [], CallGraphs.run

    def noting(self, key, *args, **more):
        if key[0] == "continue":
            depths.append(key[1])
        return run(self, key, *args, **more)

    monkeypatch.setattr(CallGraphs, "run", noting)
    make, inputs = of_case(case, prompts(1), num_speculative_tokens="auto"), prompts(1)
    output, _ = with_and_without_graphs(make, inputs, max_new_tokens=60, do_sample=False)
    assert output.speculative.num_spec_tokens == 12
    assert len(depths) > 9
    # One graph serves lengths of 7 and 8, also at the end of the text, where there is room for less.
    assert set(depths) == {8}


def no_drafts(model, enforce_eager):
    return Speculator(SpeculativeConfig(method="none", enforce_eager=enforce_eager), NoDrafts, None)


@pytest.mark.parametrize("arguments", [{"do_sample": False}, *in_full({"do_sample": True, "temperature": 4.0})])
def test_cycles_without_drafts(arguments, events):
    output, eager = with_and_without_graphs(no_drafts, prompts(1), **arguments)
    assert output.sequences.tolist() == eager.sequences.tolist()
    assert output.speculative.num_target_forwards == len(output.sequences[0]) - prompts(1)["input_ids"].shape[1] == 24
    # All verdicts but the last one's.
    assert verified_ahead(events) == 22


def test_a_rest_between_drafts(events, monkeypatch):
    """The verification after it is launched ahead, too, unless the drafter has text to read first."""
    choose(monkeypatch, [3], [0], [0], [0], [2], [0])
    model, inputs = tiny_llama(), prompts(1)
    plain = model.generate(**inputs, max_new_tokens=80, do_sample=False)
    # The target itself, all of whose drafts are accepted.
    speculator = load_speculator(model, draft_model=tiny_llama(), same_tokenizer=True, num_speculative_tokens="auto")
    arguments = {"max_new_tokens": 80, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(**inputs, **arguments, assistant=speculator)
    assert output.sequences.tolist() == plain.tolist()
    stats = output.speculative
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 10
    verdicts = 1 + sum(event == "read" for event in events)
    assert verdicts == stats.num_target_forwards == 1 + events.count("target")
    assert verified_ahead(events) > 10


class Full(StoppingCriteria):
    """A criterion of the user's: enough tokens, whatever they are."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([len(row) >= self.length for row in input_ids])


@pytest.mark.parametrize(
    ("case", "end"),
    [("draft model", "stopping_criteria"), *in_full(("eagle3", "eos_token_id"), ("no drafts", "eos_token_id"))],
)
def test_a_row_that_ends(case, end, events):
    """The forward after it is for nothing; the cache that is returned knows nothing of it."""
    model, inputs, length = tiny_llama(), prompts(1), prompts(1)["input_ids"].shape[1]
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    text = model.generate(**inputs, **settings).sequences[0, length:].tolist()
    ends = {"eos_token_id": text[13]} if end == "eos_token_id" else {"stopping_criteria": [Full(length + 14)]}
    plain = model.generate(**inputs, **settings, **ends)
    make = no_drafts if case == "no drafts" else of_case(case, inputs)
    output, eager = with_and_without_graphs(make, inputs, **settings, **ends)
    assert output.sequences.tolist() == eager.sequences.tolist() == plain.sequences.tolist()
    assert output.sequences.shape[1] < length + 24
    stats = output.speculative
    assert stats.num_target_forwards == eager.speculative.num_target_forwards + 1 == events.count("target") + 1
    assert stats.num_accepted_tokens == eager.speculative.num_accepted_tokens
    more = {"input_ids": torch.cat([plain.sequences, torch.tensor([[9, 7]])], dim=1), "max_new_tokens": 5}
    texts = [
        model.generate(**more, do_sample=False, **{CACHE: cache}).tolist() for cache in (output[CACHE], plain[CACHE])
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("case", "asked"), [("draft model", {}), *in_full(("eagle3", {"top_logprobs": 2}))])
def test_a_row_that_another_one_joins(case, asked, events):
    """And leaves again; the first one was alone before, and is so afterwards."""
    model, arguments = tiny_llama(), {"max_new_tokens": 40, "do_sample": False}
    long, short = ([5, 9, 7, 11], [8, 3, 14])
    texts = [
        model.generate(torch.tensor([prompt]), **{**arguments, "max_new_tokens": most})[0, len(prompt) :].tolist()
        for prompt, most in ((long, 40), (short, 7))
    ]
    make, settings = CASES[case]
    reader = RequestReader(model, arguments, num_places=2)
    engine = Engine(model, make(**settings)(None, prompts(2))(model), reader, 2)
    rows = [reader.row(0, long, asked), reader.row(1, short, {"max_new_tokens": 7})]
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
    assert [row.tokens for row in rows] == texts
    assert len(rows[0].logprobs) == (40 if asked else 0)
    assert [alone > 2, verified_ahead(events) > together] == [not asked, not asked]
