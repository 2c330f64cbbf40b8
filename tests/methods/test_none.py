"""The loop without drafts is this package's loop: it gives plain generation's text, is counted, and drafts nothing."""

from __future__ import annotations

import pytest
import torch
from transformers import pipeline

import hf_specdec
from hf_specdec import SpecConfigError, demo, load_speculator, record
from hf_specdec.loaded import record_of
from tests.helpers.methods import CHECKPOINTS, demo_inputs, demo_target, plain_text


NEW = 24
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


def undrafted(num_rows: int, **arguments):
    with record(trace=True) as made:
        text = demo_target().generate(**demo_inputs(num_rows), **GREEDY, **arguments)
    (call,) = made.calls
    return text, call


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(
    "arguments",
    [
        {"spec_method": "none"},
        {"speculative": "none"},
        {"speculative": {"method": "none"}},
        {"spec_method": "none", "num_speculative_tokens": 4},
        {"spec_method": "none", "num_speculative_tokens": "auto"},
    ],
    ids=str,
)
def test_greedy_text_and_counts(num_rows, arguments):
    text, call = undrafted(num_rows, **arguments)
    assert torch.equal(text, plain_text(num_rows, NEW))
    stats = call.stats
    assert (stats.method, stats.num_drafts, stats.num_draft_tokens, stats.num_spec_tokens) == ("none", 0, 0, 0)
    assert stats.num_cycles_without_drafts == {"not_asked": stats.num_target_forwards - 1}
    assert stats.mean_acceptance_length == 1
    assert stats.notes == []
    assert {cycle.why_empty for cycle in call.cycles} == {"not_asked"}


def test_nothing_is_loaded_or_learnt():
    target = demo.load_target()
    speculator = load_speculator(target, "none", num_speculative_tokens="auto")
    assert not speculator.is_adaptive
    assert speculator.resources is None
    assert speculator.profile is None
    assert all(entry.network is None for entry in record_of(target).loaded)


def test_seed_by_seed_it_samples_as_a_drafting_call_does():
    """A position's number depends on the seed and the place alone, whoever drafts."""
    settings = {"do_sample": True, "max_new_tokens": 12, "temperature": 0.9}
    for seed in range(3):
        texts = []
        for method in ("none", "ngram"):
            torch.manual_seed(seed)
            texts.append(demo_target().generate(**demo_inputs(2), **settings, spec_method=method))
        assert torch.equal(*texts)


def test_pipeline_and_many_requests():
    target, tokenizer = demo_target(), demo.load_tokenizer()
    run = pipeline("text-generation", model=target, tokenizer=tokenizer)
    prompt = demo.prompts()[0].text
    with record() as made:
        found = run(prompt, **GREEDY, speculative="none")
    assert found == run(prompt, **GREEDY)
    assert [call.stats.method for call in made.calls] == ["none"]
    requests = [row[row != tokenizer.pad_token_id].tolist() for row in demo_inputs(3)["input_ids"]]
    for arguments in ({"spec_method": "none"}, {"spec_method": "off"}, {}):
        with record() as made:
            results = list(hf_specdec.generate_many(target, requests, 2, **GREEDY, **arguments))
        for result, row in zip(results, requests):
            alone = target.generate(torch.tensor([row]), **GREEDY)[0, len(row) :]
            assert result.tokens == alone.tolist()
        assert {call.stats.method for call in made.calls} == {"none"}


def test_a_request_among_others_may_say_it():
    row = demo_inputs(1)["input_ids"][0].tolist()
    requests = [{"input_ids": row, "spec_method": name} for name in ("none", "off")]
    with record() as made:
        results = list(hf_specdec.generate_many(demo_target(), requests, 2, spec_method="ngram", **GREEDY))
    assert [result.error for result in results] == [None, None]
    assert sum(call.stats.num_draft_tokens for call in made.calls) == 0


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_no_drafts_for_any_number_of_rows(method):
    settings = {"method": method, "num_speculative_tokens_per_batch_size": {1: 0}}
    if method in CHECKPOINTS:
        settings["model"] = CHECKPOINTS[method]
    for lengths in ({1: 0}, {1: 0, 4: 0}, [[1, 3, 0], [4, 9, 0]]):
        text, call = undrafted(2, speculative={**settings, "num_speculative_tokens_per_batch_size": lengths})
        assert torch.equal(text, plain_text(2, NEW))
        assert (call.stats.method, call.stats.num_draft_tokens) == (method, 0)
        assert set(call.stats.num_cycles_without_drafts) == {"batch_size"}


@pytest.mark.parametrize("method", ["none+ngram", "suffix+none", "grammar+none"])
def test_it_is_combined_with_nothing(method):
    with pytest.raises(SpecConfigError, match="'none' drafts nothing beside another method. Leave it out."):
        demo_target().generate(**demo_inputs(1), **GREEDY, spec_method=method)
