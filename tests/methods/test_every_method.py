"""Methods by their names and objects: those with a network, none at all, and one of the user's own."""

from __future__ import annotations

import pytest
import torch

from hf_specdec import SpecConfigError, demo, forget_speculators, generate_many, grammar, load_speculator, record
from tests.helpers.levels import full, in_full
from tests.helpers.methods import (
    CHECKPOINTS,
    EVERYTHING,
    OTHER_CHECKPOINTS,
    demo_inputs,
    demo_target,
    plain_text,
    settings_of,
)
from tests.helpers.models import tiny_llama
from tests.helpers.own_methods import registered


NEW = 24
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
ROWS = [name for row in EVERYTHING for name in row.values if "+" not in name]
# Settings that loading reads.
READ = {"dflash": {"dflash_mask_token_id": 7}, "eagle3": {"aux_layer_ids": [0, 1, 2]}, "medusa": {"dtype": "bfloat16"}}

NETWORKS = [name for name in CHECKPOINTS if name != "draft_model"]
every_method = pytest.mark.parametrize("method", ["eagle3", *in_full(*sorted(set(CHECKPOINTS) - {"eagle3"}))])


def network_of(method):
    speculator = load_speculator(demo_target(), settings_of(method))
    return speculator.generator_class.network(speculator.resources)


@every_method
def test_the_method_is_read_from_the_checkpoint_which_is_loaded_once(method):
    forget_speculators(demo_target())
    settings = settings_of(method)
    first = load_speculator(demo_target(), {name: settings[name] for name in settings if name != "method"})
    assert first.method == method
    for row in ROWS:
        if row.partition(" ")[0] == method and row not in OTHER_CHECKPOINTS:
            assert load_speculator(demo_target(), settings_of(row)).resources is first.resources
    if method in READ:
        assert load_speculator(demo_target(), settings_of(method, **READ[method])).resources is not first.resources


@every_method
def test_network_passed_as_an_object(method):
    network = network_of(method)
    for arguments in ({"spec_model": network}, {"spec_method": method, "assistant": network}, {"assistant": network}):
        with record() as made:
            text = demo_target().generate(**demo_inputs(2), **GREEDY, **arguments)
        assert torch.equal(text, plain_text(2, NEW))
        assert made.calls[0].stats.method == method
        assert made.calls[0].stats.num_accepted_tokens > 0


@full
@pytest.mark.parametrize("method", NETWORKS)
def test_objects_that_do_not_fit(method):
    network = network_of(method)
    other = "medusa" if method == "mlp_speculator" else "mlp_speculator"
    for target, arguments, match in (
        (demo_target(), {"method": other, "draft_model": network}, f"is for method='{method}'"),
        (demo_target(), {"method": method, "draft_model": torch.nn.Linear(2, 2)}, "network of the class .* a Linear"),
        (tiny_llama(), {"draft_model": network}, "hidden size 256, and LlamaForCausalLM has 32"),
    ):
        with pytest.raises(SpecConfigError, match=match):
            load_speculator(target, **arguments)


# The loop without drafts is this package's loop


@pytest.mark.parametrize("method", ["none", *in_full("ngram")])
def test_greedy_text_and_counts(method):
    """Of no method, or of one that drafts for no number of rows."""
    options = {"num_speculative_tokens_per_batch_size": [[1, 9, 0]]} if method == "ngram" else {}
    with record(trace=True) as made:
        text = demo_target().generate(**demo_inputs(3), **GREEDY, speculative={"method": method, **options})
    assert torch.equal(text, plain_text(3, NEW))
    (call,), why = made.calls, "batch_size" if options else "not_asked"
    assert (call.stats.method, call.stats.num_drafts, call.stats.num_draft_tokens) == (method, 0, 0)
    assert call.stats.num_cycles_without_drafts == {why: call.stats.num_target_forwards - 1}
    assert {cycle.why_empty for cycle in call.cycles} == {why}


# The page "Write your own method": its examples are run as they are written


@pytest.fixture(params=["followers", "next_states"])
def own_method(request):
    with registered(request.param) as own:
        yield own


def test_texts_of_an_own_method_in_batches(own_method):
    loaded = load_speculator(demo_target(), own_method.name, num_speculative_tokens=2)
    with record() as made:
        for settings in ({"spec_method": own_method.name, "num_speculative_tokens": 2}, {"assistant": loaded}):
            text = demo_target().generate(**demo_inputs(4), **GREEDY, **settings)
            assert torch.equal(text, plain_text(4, NEW))
    assert all(call.stats.num_accepted_tokens > 10 for call in made.calls)


def test_an_instance_of_an_own_method_serves_a_call():
    with registered("followers") as own:
        text = demo_target().generate(**demo_inputs(4), **GREEDY, assistant=own.generator_class())
    assert torch.equal(text, plain_text(4, NEW))


def test_rows_that_join_an_own_method(own_method):
    rows = [row[mask.bool()].tolist() for row, mask in zip(*demo_inputs(4).values())]
    call = {**GREEDY, "spec_method": own_method.name, "num_speculative_tokens": 2}
    results = list(generate_many(demo_target(), rows, 2, in_order=True, **call))
    assert [result.tokens for result in results] == plain_text(4, NEW)[:, -NEW:].tolist()
    assert sum(result.stats.num_accepted_tokens for result in results) > 10


def test_an_own_network_drafts_trees_within_a_grammar():
    constraint = grammar(regex="(a|b|[0-9]){12}", tokenizer=demo.load_tokenizer())
    with registered("next_states") as own:
        arguments = {**demo_inputs(2), **GREEDY, "logits_processor": [constraint]}
        plain = demo_target().generate(**arguments)
        output = demo_target().generate(**arguments, spec_method=own.name, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    assert output.speculative.num_draft_tokens > 0
