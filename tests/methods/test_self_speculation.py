"""The target as its own draft model: its first layers over its own slots, or all layers over a few of them."""

import copy

import pytest
import torch

from hf_specdec import (
    SpecConfigError,
    SpeculativeConfig,
    UnsupportedModelError,
    generate_many,
    load_speculator,
    record,
)
from hf_specdec.decoding.functional import ReadAhead
from hf_specdec.decoding.graphs import forget_graphs
from hf_specdec.drafts import chain_topology, static_topology
from hf_specdec.layers.llama import DecoderLayer
from hf_specdec.method import names_without_weights
from tests.helpers.caches import CACHE
from tests.helpers.distribution import NUM_ROWS, P_VALUE, SETTINGS, exact_distribution, sampled_counts, small_model
from tests.helpers.models import nothing_runs, prompts, tiny_gpt2, tiny_llama, tiny_mistral
from tests.helpers.statistics import chi_square_pvalue
from tests.helpers.tape import spoil_inputs, tape_everything


GREEDY = {"max_new_tokens": 24, "do_sample": False}
EXIT = {"method": "early_exit", "early_exit_layer": 1, "num_speculative_tokens": 3}
SPARSE = {"method": "sparse_kv", "sparse_kv_window": 6, "sparse_kv_sinks": 2, "num_speculative_tokens": 3}


def first_layers(model, count):
    """A model of the first layers alone."""
    part = copy.deepcopy(model)
    part.model.layers = part.model.layers[:count]
    part.config.num_hidden_layers = count
    return part


def drafts_of(target, inputs, settings, **arguments):
    """Each draft with its row and the text before it; checks that the text is plain generation's."""
    plain = target.generate(**inputs, **GREEDY, **arguments)
    with record(trace=True) as made:
        ours = target.generate(**inputs, **GREEDY, **arguments, speculative=settings)
    assert torch.equal(ours, plain)
    starts = (inputs["attention_mask"] == 0).sum(1).tolist()
    lengths = [inputs["input_ids"].shape[1] + 1] * len(ours)
    found = []
    for cycle in made.calls[0].cycles:
        for row in cycle.rows:
            if row.draft_tokens:
                found.append((ours[row.row, starts[row.row] : lengths[row.row]], row.draft_tokens))
            lengths[row.row] += len(row.committed_tokens)
    return found, made.calls[0].stats


@pytest.mark.parametrize("make", [tiny_llama, lambda: tiny_mistral(sliding_window=4)], ids=["llama", "sliding"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_first_layers_draft_what_they_would_alone(make, batch_size):
    target = make()
    part = first_layers(target, 1)
    found, stats = drafts_of(target, prompts(batch_size), EXIT)
    assert len(found) > 5
    for text, draft in found:
        whole = torch.cat([text, torch.tensor(draft[:-1], dtype=torch.long)])[None]
        with torch.no_grad():
            assert draft == part(whole).logits[0, len(text) - 1 :].argmax(-1).tolist()
    assert stats.num_draft_tokens > stats.num_accepted_tokens


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_verification_goes_on_from_the_drafts(batch_size, monkeypatch):
    """The first layer reads each node once, the last one the whole draft; the drafts and the text stay the same."""
    target, nodes = tiny_llama(), []
    advance = DecoderLayer.advance

    def watched(self, stream, *arguments):
        nodes.append((self.self_attn.layer_idx, stream.shape[1]))
        return advance(self, stream, *arguments)

    monkeypatch.setattr(DecoderLayer, "advance", watched)
    found, stats = drafts_of(target, prompts(batch_size), EXIT)
    nodes_of_first, nodes_of_last = ([count for layer, count in nodes if layer == own] for own in (0, 1))
    assert set(nodes_of_first) == {1}
    assert max(nodes_of_last) == 4
    assert sum(nodes_of_first) == sum(nodes_of_last)
    monkeypatch.setattr(ReadAhead, "fits", lambda *arguments: False)
    again, others = drafts_of(target, prompts(batch_size), EXIT)
    assert [draft for _, draft in found] == [draft for _, draft in again]
    assert stats.num_accepted_tokens == others.num_accepted_tokens > 0


def test_what_else_is_verified_is_read_from_the_beginning(monkeypatch):
    """Other tokens than those that were drafted, in a tree or in other rows."""
    target, inputs = tiny_llama(), prompts(1, padding=False)
    state = torch.zeros(1, 2, 32)
    ahead, chain = ReadAhead(1, torch.tensor([[5, 6]]), state), chain_topology(2, target.device)
    assert ahead.fits(torch.tensor([[5, 6, 7]]), chain)
    assert ahead.fits(torch.tensor([[5]]), chain_topology(0, target.device))
    assert not ahead.fits(torch.tensor([[5, 7, 7]]), chain)
    assert not ahead.fits(torch.tensor([[5, 6, 7], [5, 6, 7]]), chain)
    assert not ahead.fits(torch.tensor([[5, 6, 7]]), static_topology((-1, -1), target.device))
    settings = {"method": "ngram+early_exit", "early_exit_layer": 1, "num_speculative_tokens": 3}
    plain = target.generate(**inputs, **GREEDY)
    assert torch.equal(target.generate(**inputs, **GREEDY, speculative=settings), plain)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_sparse_drafts_see_the_first_and_the_last_tokens(batch_size):
    """What the model says where all others are masked."""
    target = tiny_llama()
    found, stats = drafts_of(target, prompts(batch_size, length=14), SPARSE)
    assert len(found) > 5
    assert stats.acceptance_rate < 1
    for text, draft in found:
        whole, last = torch.cat([text, torch.tensor(draft[:-1], dtype=torch.long)]), len(text) - 1
        size = len(whole)
        # Keys and values of the committed text are those of the whole model; drafts see some of them.
        hidden = torch.ones(size, size, dtype=torch.bool).triu(1)
        hidden[last:, 2 : max(last - 6, 2)] = True
        mask = torch.zeros(size, size).masked_fill(hidden, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits = target(whole[None], attention_mask=mask[None, None]).logits
        assert draft == logits[0, last:].argmax(-1).tolist()


def test_a_window_as_long_as_the_text_is_the_target_itself():
    _, stats = drafts_of(tiny_llama(), prompts(3), {**SPARSE, "sparse_kv_window": 64})
    assert stats.acceptance_rate == 1


def test_the_slots_stay_those_of_the_committed_text():
    """The cache that a call returns is plain generation's, whatever drafts have written."""
    target, inputs = tiny_llama(), prompts(2, padding=False)
    wanted = {"return_dict_in_generate": True, **GREEDY}
    plain = target.generate(**inputs, **wanted)
    for settings in (EXIT, SPARSE):
        ours = target.generate(**inputs, **wanted, speculative=settings)
        assert torch.equal(ours.sequences, plain.sequences)
        for own, other in zip(ours[CACHE].layers, plain[CACHE].layers):
            # Products of several rows round differently.
            torch.testing.assert_close(own.keys, other.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(own.values, other.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize(
    "settings", [EXIT, {**SPARSE, "sparse_kv_window": 1, "sparse_kv_sinks": 1}], ids=["exit", "kv"]
)
def test_sampling(settings, method, monkeypatch):
    target = small_model()
    if settings is EXIT:
        # It has one layer; a second one that adds little.
        target = tiny_llama(
            seed=5, vocab_size=6, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, initializer_range=0.4,
        )  # fmt: skip
        monkeypatch.setattr("tests.helpers.distribution.small_model", lambda: target)
    speculator = load_speculator(target, {**settings, "draft_sample_method": method})
    counts, stats = sampled_counts(SETTINGS["top_p"], speculator)
    assert chi_square_pvalue(counts, exact_distribution(SETTINGS["top_p"])) > P_VALUE
    assert stats.num_accepted_tokens > 0.1 * NUM_ROWS


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 4.0, "top_k": 40}], ids=["best", "drawn"])
@pytest.mark.parametrize("settings", [EXIT, SPARSE], ids=["exit", "kv"])
def test_a_draft_is_one_graph_of_the_target(settings, sampling, monkeypatch):
    """It is the same without graphs, where drafts over a part of the slots read copies of them."""
    spoil_inputs(monkeypatch)
    tape_everything(monkeypatch)
    found, arguments = [], {**GREEDY, "return_dict_in_generate": True, **sampling}
    for enforce_eager in (False, True):
        target = tiny_llama()
        torch.manual_seed(1)
        with record(trace=True) as made:
            speculative = {**settings, "enforce_eager": enforce_eager}
            output = target.generate(**prompts(3), **arguments, speculative=speculative)
        found.append((output.sequences.tolist(), made.calls[0].cycles))
        if not enforce_eager:
            stats, num_drafts = output.speculative, sum(any(row.draft_tokens for row in c.rows) for c in found[0][1])
    forget_graphs()
    assert found[0] == found[1]
    assert stats.num_accepted_tokens > 0
    verifications = stats.num_target_forwards - 1
    assert stats.num_graph_replays == verifications
    assert stats.num_draft_graph_replays >= num_drafts
    assert stats.draft_graphs == "on"


def test_states_of_all_layers_can_be_returned():
    found, _ = drafts_of(tiny_llama(), prompts(2), EXIT, output_hidden_states=True)
    assert found


def test_spelled_as_in_transformers():
    target, inputs = tiny_llama(num_hidden_layers=3), prompts(2)
    plain = target.generate(**inputs, **GREEDY)
    arguments = {**GREEDY, "return_dict_in_generate": True, "spec_method": "early_exit", "num_speculative_tokens": 3}
    outputs = [
        target.generate(**inputs, **arguments, **own)
        for own in ({"assistant_early_exit": 2}, {"speculative": {"early_exit_layer": 2}}, {"assistant_early_exit": 1})
    ]
    assert all(torch.equal(output.sequences, plain) for output in outputs)
    accepted = [output.speculative.num_accepted_tokens for output in outputs]
    assert accepted[0] == accepted[1] > accepted[2]


def test_spelled_as_in_transformers_for_many_requests():
    target = tiny_llama(num_hidden_layers=3)
    requests = [prompts(1, length=length, padding=False)["input_ids"][0].tolist() for length in (5, 9, 7)]
    accepted = []
    for arguments in ({"assistant_early_exit": 2}, {"speculative": {"early_exit_layer": 2}}):
        arguments = {**GREEDY, **arguments, "spec_method": "early_exit", "num_speculative_tokens": 3}
        results = generate_many(target, requests, batch_size=2, in_order=True, **arguments)
        found = list(results)
        accepted.append(sum(result.stats.num_accepted_tokens for result in found))
        for request, result in zip(requests, found):
            plain = target.generate(torch.tensor([request]), attention_mask=torch.ones(1, len(request)), **GREEDY)
            assert result.tokens == plain[0, len(request) :].tolist()
    assert accepted[0] == accepted[1] > 0


@pytest.mark.parametrize("is_named", [False, True])
def test_the_layer_of_no_drafter(monkeypatch, is_named):
    target = tiny_llama(num_hidden_layers=3)
    if is_named:
        monkeypatch.setattr(target.generation_config, "speculative", {"method": "ngram"}, raising=False)
    with pytest.raises(SpecConfigError, match="a drafter that the run names"):
        generate_many(target, [[1, 2]], assistant_early_exit=1, **GREEDY)
    arguments = {**GREEDY, "spec_method": "early_exit"}
    result = next(generate_many(target, [{"input_ids": [1, 2], "assistant_early_exit": 1}], **arguments))
    assert "is for all requests" in str(result.error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spec_method": "ngram", "assistant_early_exit": 1}, "belongs to method 'early_exit', got method='ngram'"),
        (
            {"spec_method": "early_exit", "assistant_early_exit": 2},
            "`early_exit_layer`=2 leaves nothing out.*2 layers",
        ),
        ({"spec_method": "early_exit", "assistant_early_exit": 0}, "early_exit_layer.*at least 1, got 0"),
        ({"spec_method": "sparse_kv", "spec_model": "some/model"}, "drafts without"),
        ({"assistant": "loaded", "assistant_early_exit": 1}, "`assistant` is a loaded Speculator"),
    ],
)
def test_errors(arguments, message):
    target = tiny_llama()
    if arguments.get("assistant") == "loaded":
        arguments = {**arguments, "assistant": load_speculator(target, "ngram")}
    with nothing_runs(target), pytest.raises(SpecConfigError, match=message):
        target.generate(**prompts(1), **GREEDY, **arguments)


def test_targets_whose_layers_cannot_be_run():
    target = tiny_gpt2()
    with nothing_runs(target), pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel cannot draft for itself"):
        target.generate(**prompts(1), **GREEDY, spec_method="early_exit")


class Packed(torch.nn.Module):
    """A linear layer whose weights are no floats, as quantised ones are."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().amax() / 127
        self.register_buffer("codes", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, hidden):
        return torch.nn.functional.linear(hidden, self.codes.to(hidden.dtype) * self.scale)


def test_quantised_layers_draft():
    target = tiny_llama()
    target.model.layers[0].mlp.down_proj = Packed(target.model.layers[0].mlp.down_proj)
    target.lm_head = Packed(target.lm_head)
    _, stats = drafts_of(target, prompts(3), {**SPARSE, "sparse_kv_window": 64})
    assert stats.acceptance_rate == 1
    assert drafts_of(target, prompts(3), EXIT)[0]


def test_weights_that_are_loaded_for_each_forward():
    accelerate = pytest.importorskip("accelerate")
    target = accelerate.cpu_offload(tiny_llama(), execution_device=torch.device("cpu"))
    for settings in (EXIT, SPARSE):
        with pytest.raises(UnsupportedModelError, match="cannot draft for itself: its weights are loaded"):
            target.generate(**prompts(1), **GREEDY, speculative=settings)


def test_transformers_own_assisted_decoding_hands_over_no_slots():
    target, inputs = tiny_llama(), prompts(1)
    generator = load_speculator(target, EXIT).candidate_generator()
    generator.get_candidates(inputs["input_ids"], is_first_iteration=True)
    with pytest.raises(SpecConfigError, match="keys and values of the target"):
        generator.get_candidates(inputs["input_ids"])


def test_nothing_chooses_them_unasked():
    names = names_without_weights()
    assert names
    assert not any("early_exit" in name or "sparse_kv" in name for name in names)


def test_settings_have_one_form():
    assert SpeculativeConfig(method="layerskip", assistant_early_exit=3) == SpeculativeConfig(
        method="early_exit", early_exit_layer=3
    )
