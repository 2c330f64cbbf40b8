"""Warm-up: what calls would have had to capture is there before the first one; on a CPU nothing is missing."""

from __future__ import annotations

from copy import copy

import pytest
import torch

from hf_specdec import SpecConfigError, load_speculator, record, warm_up
from tests.helpers.levels import full, split
from tests.helpers.methods import demo_inputs, settings_of
from tests.helpers.models import prompts, tiny_llama


SETTINGS = {
    "ngram": {},
    **{method: {"num_speculative_tokens": 3} for method in ("eagle3", "dflash", "mlp_speculator", "draft_model")},
    "mtp": {"draft_tree_depth": 3, "draft_tree_top_k": 2, "num_draft_nodes": 4},
    "medusa": {"num_draft_nodes": 6},
}
CALLS = {"prompt_length": 24, "max_new_tokens": 16, "sampling": False}


def generate(target, **arguments):
    inputs = {name: values[:, -20:] for name, values in demo_inputs(1).items()}
    return target.generate(
        **inputs, **{"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, **arguments}
    )


@pytest.mark.parametrize("method", split(SETTINGS, short=["eagle3"]))
def test_calls_after_it_capture_nothing(method, target, tapes):
    settings = settings_of(method, **SETTINGS[method])
    done = warm_up(target, settings, **CALLS)
    assert done.graphs == "on"
    assert done.num_graph_captures > 0
    assert (done.num_draft_graph_captures > 0) == (method != "ngram")
    output = generate(target, speculative=settings)
    stats = output.speculative
    assert output.sequences.tolist() == generate(target).sequences.tolist()
    assert (stats.num_graph_captures, stats.num_draft_graph_captures) == (0, 0)
    # All but the prefill.
    assert stats.num_graph_replays == stats.num_target_forwards - 1


@full
def test_fewer_rows_too(tapes):
    """Rows that end, and smaller batches."""
    model, calls = tiny_llama(), []
    settings = {"prompt_length": 10, "max_new_tokens": 12, "sampling": False, "on_call": lambda: calls.append(1)}
    done = warm_up(model, batch_sizes=[3, 2], **settings)
    assert done.num_calls == len(calls) == 3  # 4, 2, 1
    for rows in (3, 2, 1):
        call = {**prompts(rows), "max_new_tokens": 12, "do_sample": False}
        end = int(model.generate(**call)[0, 10])
        with record() as made:
            model.generate(**call, spec_method="ngram", eos_token_id=end, pad_token_id=0)
        stats = made.calls[0].stats
        assert stats.num_graph_captures == 0
        assert stats.num_graph_replays == stats.num_target_forwards - 1


@full
def test_sampling_too(target, tapes):
    """Tokens of drafts that are drawn one after the other come from graphs of their own."""
    speculator = load_speculator(target, settings_of("eagle3 chain", draft_sample_method="probabilistic"))
    for sampling in (False, True):
        assert warm_up(target, speculator, **{**CALLS, "sampling": sampling}).num_draft_graph_captures > 0
    stats = generate(target, do_sample=True, assistant=speculator).speculative
    assert stats.num_graph_captures == stats.num_draft_graph_captures == 0


def test_on_a_cpu_there_is_nothing_to_capture():
    torch.manual_seed(5)
    model, state = tiny_llama(), torch.get_rng_state()
    with record() as made:
        done = warm_up(model, prompt_length=10, max_new_tokens=4)
    assert done.graphs == "off: not on a CUDA device"
    assert done.num_calls == 2
    assert done.num_graph_captures == done.num_draft_graph_captures == 0
    # Nobody is told, no random number is used up.
    assert not made.calls
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_sizes": []}, "`batch_sizes` must be a list of integers of at least 1"),
        ({"prompt_length": 0}, "`prompt_length` must be an integer of at least 1"),
        ({"max_new_tokens": 1}, "`max_new_tokens` must be an integer of at least 2"),
    ],
)
def test_numbers_that_are_too_small(arguments, message):
    with pytest.raises(SpecConfigError, match=message):
        warm_up(tiny_llama(), **arguments)


@full
def test_nothing_is_remembered(target, caplog):
    """Neither texts nor costs nor how little of such drafts is accepted."""
    speculator = load_speculator(target, settings_of("medusa", num_speculative_tokens="auto"))
    retrieval = load_speculator(target, "suffix")
    pair = load_speculator(target, settings_of("ngram+medusa"))
    profiles = speculator.profile, pair.resources.profile
    before = list(map(vars, map(copy, profiles)))
    with caplog.at_level("WARNING", logger="hf_specdec"):
        warm_up(target, speculator, batch_sizes=[16], **CALLS)
        for other in (retrieval, pair):
            warm_up(target, other, **CALLS)
        warm_up(target, settings_of("eagle3"), batch_sizes=[64], prompt_length=8, max_new_tokens=8, sampling=False)
    assert list(map(vars, profiles)) == before
    assert (speculator.profile, pair.resources.profile) == profiles
    assert retrieval.resources.num_cached_tokens == 0
    assert "hardly pays" not in caplog.text
