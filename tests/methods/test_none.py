"""The loop without drafts is this package's loop: it gives plain generation's text, is counted, and drafts nothing."""

from __future__ import annotations

import pytest
import torch
from transformers import pipeline

from hf_specdec import SpecConfigError, demo, generate_many, record
from tests.helpers.levels import full, in_full
from tests.helpers.methods import demo_inputs, demo_target, plain_text


NEW = 24
GREEDY = {"do_sample": False, "max_new_tokens": NEW}


@pytest.mark.parametrize(
    "arguments",
    [
        {"spec_method": "none", "num_speculative_tokens": "auto"},
        *in_full({"speculative": {"method": "none"}}, {"speculative": "none", "num_speculative_tokens": 4}),
        # No drafts for any number of rows.
        *in_full(
            {"speculative": {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 3, 0], [4, 9, 0]]}}
        ),
    ],
    ids=str,
)
def test_greedy_text_and_counts(arguments):
    with record(trace=True) as made:
        text = demo_target().generate(**demo_inputs(3), **GREEDY, **arguments)
    assert torch.equal(text, plain_text(3, NEW))
    (call,), is_named = made.calls, "none" in str(arguments)
    stats, why = call.stats, "not_asked" if is_named else "batch_size"
    assert (stats.method, stats.num_drafts, stats.num_draft_tokens) == ("none" if is_named else "ngram", 0, 0)
    assert stats.mean_acceptance_length == 1
    assert stats.num_cycles_without_drafts == {why: stats.num_target_forwards - 1}
    assert {cycle.why_empty for cycle in call.cycles} == {why}
    assert not is_named or stats.notes == []


def test_sampled_text_is_that_of_a_call_with_drafts():
    """A position's number depends on the seed and the place alone, whoever drafts."""
    settings = {"do_sample": True, "max_new_tokens": 12, "temperature": 0.9}
    for seed in range(3):
        texts = []
        for method in ("none", "ngram"):
            torch.manual_seed(seed)
            texts.append(demo_target().generate(**demo_inputs(2), **settings, spec_method=method))
        assert torch.equal(*texts)


@full
def test_pipeline_and_many_requests():
    target, tokenizer = demo_target(), demo.load_tokenizer()
    run, prompt = pipeline("text-generation", model=target, tokenizer=tokenizer), demo.prompts()[0].text
    with record() as made:
        found = run(prompt, **GREEDY, speculative="none")
    assert found == run(prompt, **GREEDY)
    assert [call.stats.method for call in made.calls] == ["none"]
    requests = [row[row != tokenizer.pad_token_id].tolist() for row in demo_inputs(3)["input_ids"]]
    alone = [target.generate(torch.tensor([row]), **GREEDY)[0, len(row) :].tolist() for row in requests]
    for arguments in ({"spec_method": "none"}, {"spec_method": "off"}, {}):
        with record() as made:
            results = list(generate_many(target, requests, 2, in_order=True, **GREEDY, **arguments))
        assert [result.tokens for result in results] == alone
        assert {call.stats.method for call in made.calls} == {"none"}
    # Some of many may say it, too.
    requests = [{"input_ids": requests[0], "spec_method": name} for name in ("none", "off")]
    with record() as made:
        results = list(generate_many(target, requests, 2, spec_method="ngram", **GREEDY))
    assert [result.tokens for result in results] == [alone[0]] * 2
    assert sum(call.stats.num_draft_tokens for call in made.calls) == 0
    with pytest.raises(SpecConfigError, match="'none' drafts nothing beside another method. Leave it out."):
        target.generate(**demo_inputs(1), **GREEDY, spec_method="none+ngram")
