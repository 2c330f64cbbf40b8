"""The target as its own draft model: its first layers over its own slots, or all layers over a few of them."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch

from hf_specdec import SpecConfigError, generate_many, record
from hf_specdec.drafts import chain_topology, static_topology
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.layers.llama import DecoderLayer
from hf_specdec.target.graphs import forget_graphs
from hf_specdec.target.lean import EnteredNodes
from tests.helpers.levels import full, in_full
from tests.helpers.models import nothing_runs, prompts, tiny_gpt2, tiny_llama, tiny_mistral
from tests.helpers.own_drafts import GREEDY, assert_own_drafts, drafted_call, drafts_in
from tests.helpers.tape import spoil_inputs, tape_everything


EXIT = {"method": "early_exit", "early_exit_layer": 1, "num_speculative_tokens": 3}
SPARSE = {"method": "sparse_kv", "sparse_kv_window": [2, 6], "num_speculative_tokens": 3}
EXITS = {"spec_method": "early_exit"}
SETTINGS = {"exit": EXIT, "kv": SPARSE}
MODELS = {"llama": tiny_llama, "sliding": lambda: tiny_mistral(sliding_window=4)}


@pytest.mark.parametrize(("name", "batch_size"), [("llama", 3), *in_full(("llama", 1), ("sliding", 3))])
def test_first_layers_draft_what_they_would_alone(name, batch_size):
    target, inputs = MODELS[name](), prompts(batch_size)
    first = copy.deepcopy(target)
    first.model.layers = first.model.layers[:1]
    first.config.num_hidden_layers = 1
    text, call = drafted_call(target, inputs, {"speculative": EXIT})
    assert_own_drafts(first, inputs, text, call)
    assert call.stats.num_draft_tokens > call.stats.num_accepted_tokens


def test_verification_goes_on_from_the_drafts(monkeypatch):
    """The first layer reads each node once, the last one the whole draft; the drafts and the text stay the same."""
    target, nodes = tiny_llama(), []
    drafted_call(target, prompts(3), {"speculative": EXIT})  # how the target goes on is checked once
    advance = DecoderLayer.advance

    def watched(self, plan, stream, *arguments):
        nodes.append((self.self_attn.layer_idx, stream.shape[1]))
        return advance(self, plan, stream, *arguments)

    monkeypatch.setattr(DecoderLayer, "advance", watched)
    _, call = drafted_call(target, prompts(3), {"speculative": EXIT})
    nodes_of_first, nodes_of_last = ([count for layer, count in nodes if layer == own] for own in (0, 1))
    assert set(nodes_of_first) == {1}
    assert max(nodes_of_last) == 4
    assert sum(nodes_of_first) == sum(nodes_of_last)
    monkeypatch.setattr(EnteredNodes, "fits", lambda *arguments: False)
    _, again = drafted_call(target, prompts(3), {"speculative": EXIT})
    assert call.cycles == again.cycles
    assert call.stats.num_accepted_tokens > 0


def test_other_tokens_than_those_drafted_are_read_from_the_beginning():
    target = tiny_llama()
    ahead, chain = EnteredNodes(1, torch.tensor([[5, 6]]), torch.zeros(1, 2, 32)), chain_topology(2, target.device)
    assert ahead.fits(torch.tensor([[5, 6, 7]]), chain)
    assert ahead.fits(torch.tensor([[5]]), chain_topology(0, target.device))
    assert not ahead.fits(torch.tensor([[5, 7, 7]]), chain)
    assert not ahead.fits(torch.tensor([[5, 6, 7], [5, 6, 7]]), chain)
    assert not ahead.fits(torch.tensor([[5, 6, 7]]), static_topology((-1, -1), target.device))
    drafted_call(target, prompts(1, padding=False), {"speculative": {**EXIT, "method": "ngram+early_exit"}})


def test_sparse_drafts_see_the_first_and_the_last_tokens():
    target, inputs = tiny_llama(), prompts(3, length=14)
    text, call = drafted_call(target, inputs, {"speculative": SPARSE})
    assert call.stats.acceptance_rate < 1
    for trace, so_far in drafts_in(call, inputs, text):
        draft = trace.draft_tokens
        whole, last = torch.cat([so_far, torch.tensor(draft[:-1], dtype=torch.long)]), len(so_far) - 1
        # Keys and values of the committed text are those of the whole model; drafts see some of them.
        hidden = torch.ones(len(whole), len(whole), dtype=torch.bool).triu(1)
        hidden[last:, 2 : max(last - 6, 2)] = True
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = target(whole[None], attention_mask=mask[None, None]).logits
        assert draft == logits[0, last:].argmax(-1).tolist()[: len(draft)]


@pytest.mark.parametrize(("name", "draws"), [("exit", True), *in_full(("kv", False), ("kv", True))])
def test_a_draft_is_one_graph_of_the_target(name, draws, monkeypatch):
    """It is the same without graphs, where drafts over a part of the slots read copies of them."""
    spoil_inputs(monkeypatch)
    tape_everything(monkeypatch)
    sampling = {"do_sample": True, "temperature": 4.0, "top_k": 40} if draws else {}
    found = []
    for enforce_eager in (False, True):
        torch.manual_seed(1)
        arguments = {**GREEDY, **sampling, "speculative": {**SETTINGS[name], "enforce_eager": enforce_eager}}
        with record(trace=True) as made:
            text = tiny_llama().generate(**prompts(3), **arguments)
        found.append((text.tolist(), made.calls[0].cycles, made.calls[0].stats))
    forget_graphs()
    (_, cycles, stats), eager = found
    assert found[0][:2] == eager[:2]
    assert stats.num_accepted_tokens > 0
    assert stats.num_graph_replays == stats.num_target_forwards - 1
    assert stats.num_draft_graph_replays >= sum(any(row.draft_tokens for row in cycle.rows) for cycle in cycles)
    assert stats.draft_graphs == "on"


@full
def test_spelled_as_in_transformers():
    target, inputs = tiny_llama(num_hidden_layers=3), prompts(2, padding=False)
    rows, text, accepted = inputs["input_ids"].tolist(), target.generate(**inputs, **GREEDY)[:, 7:].tolist(), []
    for own in ({"assistant_early_exit": 2}, {"speculative": {"early_exit_layer": 2}}):
        own |= {**EXITS, "num_speculative_tokens": 3}
        accepted.append(drafted_call(target, inputs, own)[1].stats.num_accepted_tokens)
        results = list(generate_many(target, rows, batch_size=2, in_order=True, **GREEDY, **own))
        assert [result.tokens for result in results] == text
        accepted.append(sum(result.stats.num_accepted_tokens for result in results))
    assert len(set(accepted)) == 1
    assert accepted[0] > drafted_call(target, inputs, {"speculative": EXIT})[1].stats.num_accepted_tokens


@full
def test_wrong_settings_and_targets():
    target = tiny_llama()
    with nothing_runs(target), pytest.raises(SpecConfigError, match="`early_exit_layer`=2 leaves nothing out"):
        target.generate(**prompts(1), **GREEDY, **EXITS, assistant_early_exit=2)
    with pytest.raises(SpecConfigError, match="a drafter that the run names"):
        generate_many(target, [[1, 2]], assistant_early_exit=1, **GREEDY)
    result = next(generate_many(target, [{"input_ids": [1, 2], "assistant_early_exit": 1}], **GREEDY, **EXITS))
    assert "is for all requests" in str(result.error)
    offloaded = accelerate.cpu_offload(tiny_llama(), execution_device=torch.device("cpu"))
    for other, message in ((tiny_gpt2(), "GPT2LMHeadModel cannot draft"), (offloaded, "its weights are loaded")):
        with pytest.raises(UnsupportedModelError, match=message):
            other.generate(**prompts(1), **GREEDY, speculative=EXIT)
