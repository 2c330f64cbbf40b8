"""Whisper's own `generate()`: languages, prompts, timestamps, and audio that is longer than a window."""

from __future__ import annotations

import pytest
import torch

import hf_specdec

from .encoder_decoders import ready, whisper


LONG = {"input_features": torch.randn(2, 16, 130, generator=torch.Generator().manual_seed(0))}
WHOLE = {"attention_mask": torch.ones(2, 130)}
GERMAN = {"language": "de", "task": "transcribe"}

CALLS = {
    "language_is_detected": {},
    "language": GERMAN,
    "prompt": {**GERMAN, "prompt_ids": torch.tensor([94, 20, 21, 22])},
    "timestamps": {**GERMAN, "return_timestamps": True},
    "long": {**LONG, **WHOLE, "return_timestamps": True},
    "long_with_the_last_text": {**LONG, **WHOLE, "return_timestamps": True, "condition_on_prev_tokens": True},
    "long_with_thresholds": {
        **LONG,
        **WHOLE,
        "return_timestamps": True,
        "temperature": (0.0,),
        "logprob_threshold": -1.0,
        "no_speech_threshold": 0.6,
        "compression_ratio_threshold": 1.35,
    },
}


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    model, source = whisper(vocab_size=200, init_std=0.3)
    ready(model)
    settings = {
        "eos_token_id": 2,
        "no_timestamps_token_id": 100,
        "suppress_tokens": [7, 8],
        "begin_suppress_tokens": [9],
        "lang_to_id": {"<|en|>": 90, "<|de|>": 91},
        "task_to_id": {"transcribe": 92, "translate": 93},
        "is_multilingual": True,
        "prev_sot_token_id": 94,
        "max_initial_timestamp_index": 10,
    }
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model, source


def transcribed(target, name, **speculative):
    model, source = target
    torch.manual_seed(0)
    with hf_specdec.record() as made:
        output = model.generate(**{**source, **CALLS[name]}, max_new_tokens=24, **speculative)
    return output, made.calls


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("method", ["ngram", "recycling"])
def test_transcripts_equal_plain_generate(target, name, method):
    text, calls = transcribed(target, name, spec_method=method, num_speculative_tokens="fixed")
    assert torch.equal(text, transcribed(target, name)[0])
    assert sum(call.stats.num_accepted_tokens for call in calls) > 0
    if name.startswith("long"):
        # One call of the loop for each window.
        assert len(calls) > 1
    if "thresholds" not in name:
        assert not any("wait" in note for call in calls for note in call.stats.notes)


def test_outputs_in_parts(target):
    model, source = target
    call = {**source, **GERMAN, "max_new_tokens": 24, "return_dict_in_generate": True, "output_scores": True}
    # Ours has a field less than it has attributes, because Whisper cuts all fields into rows.
    expected, output = model.generate(**call), model.generate(**call, spec_method="recycling")
    assert output.keys() == expected.keys()
    assert torch.equal(output.sequences, expected.sequences)
    for mine, own in zip(output.scores, expected.scores, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-3, atol=1e-3)


def test_without_the_patched_method(target):
    model, source = target
    call = {**source, **GERMAN, "max_new_tokens": 24}
    assert torch.equal(hf_specdec.generate(model, **call, spec_method="ngram"), model.generate(**call))


def test_attentions_for_the_times_of_tokens_are_refused(target):
    model, source = target
    model.generation_config.alignment_heads = [[0, 0]]
    try:
        with pytest.raises(hf_specdec.SpecConfigError, match="output_attentions"):
            model.generate(**source, **GERMAN, return_token_timestamps=True, max_new_tokens=4, spec_method="ngram")
    finally:
        del model.generation_config.alignment_heads
