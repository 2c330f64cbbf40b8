"""Every method with a network: how it is named, loaded once, passed as an object and refused, whatever it drafts."""

from __future__ import annotations

import pytest
import torch

from hf_specdec import SpecConfigError, forget_speculators, load_speculator, record
from tests.helpers.distribution import sample
from tests.helpers.levels import full, in_full
from tests.helpers.methods import (
    CHECKPOINTS,
    EVERYTHING,
    OTHER_CHECKPOINTS,
    demo_inputs,
    demo_target,
    draws,
    plain_text,
    settings_of,
)
from tests.helpers.models import tiny_llama


NEW = 16
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
    """Checkpoints are read alike, whatever is drafted with them."""
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


@full
@pytest.mark.parametrize("row", [row for row in ROWS if draws(row) and ("tree" in row or "denoising" in row)])
def test_drawn_drafts_are_chains_and_say_so(row):
    settings = settings_of(row, draft_sample_method="probabilistic")
    with record(trace=True) as made:
        sample(demo_target(), demo_inputs(2), max_new_tokens=10, speculative=settings)
        demo_target().generate(**demo_inputs(2), **GREEDY, speculative=settings)
    sampled, greedy = made.calls
    note = "chosen, not drawn" if "denoising" in row else "draws chains"
    assert any(note in line for line in sampled.stats.notes)
    assert greedy.stats.notes == []
    drafts = [trace for cycle in sampled.cycles for trace in cycle.rows]
    assert all(trace.parents == list(range(-1, len(trace.draft_tokens) - 1)) for trace in drafts)
    if "adaptive" in row:
        assert len({len(trace.draft_tokens) for trace in drafts}) > 1
