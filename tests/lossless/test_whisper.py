"""Whisper's own `generate()`: languages, prompts, timestamps, and audio that is longer than a window."""

from __future__ import annotations

import pytest
import torch

import hf_specdec
from tests.helpers.encoder_decoders import ready, whisper
from tests.helpers.levels import full, split


LONG = {"input_features": torch.randn(2, 16, 130, generator=torch.Generator().manual_seed(0))}
WHOLE = {**LONG, "attention_mask": torch.ones(2, 130), "return_timestamps": True}
GERMAN = {"language": "de", "task": "transcribe"}
NEW = {"max_new_tokens": 24}
THRESHOLDS = {"temperature": (0.0,), "logprob_threshold": -1.0, "no_speech_threshold": 0.6}
THRESHOLDS |= {"compression_ratio_threshold": 1.35}

CALLS = {
    "language_is_detected": {},
    "language": GERMAN,
    "prompt": {**GERMAN, "prompt_ids": torch.tensor([94, 20, 21, 22])},
    "timestamps": {**GERMAN, "return_timestamps": True},
    "long": WHOLE,
    "long_with_the_last_text": {**WHOLE, "condition_on_prev_tokens": True},
    "long_with_thresholds": {**WHOLE, **THRESHOLDS},
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


@pytest.mark.parametrize("name", split(CALLS, short=["timestamps", "long_with_the_last_text"]))
def test_transcripts_equal_plain_generate(target, name):
    model, source = target
    call = {**source, **CALLS[name], **NEW}
    with hf_specdec.record() as made:
        torch.manual_seed(0)
        method = "ngram" if name == "timestamps" else "recycling"
        text = model.generate(**call, spec_method=method, num_speculative_tokens="fixed")
    calls = made.calls
    torch.manual_seed(0)
    assert torch.equal(text, model.generate(**call))
    assert sum(call.stats.num_accepted_tokens for call in calls) > 0
    if name.startswith("long"):
        # One call of the loop for each window.
        assert len(calls) > 1
    if "thresholds" not in name:
        assert not any("wait" in note for call in calls for note in call.stats.notes)


@full
def test_outputs_in_parts_and_calls_of_the_function(target):
    model, source = target
    call = {**source, **GERMAN, **NEW, "return_dict_in_generate": True, "output_scores": True}
    # Ours has a field less than it has attributes, because Whisper cuts all fields into rows.
    expected, output = model.generate(**call), model.generate(**call, spec_method="recycling")
    assert output.keys() == expected.keys()
    assert torch.equal(output.sequences, expected.sequences)
    for mine, own in zip(output.scores, expected.scores, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-3, atol=1e-3)
    # Without the patched method.
    text = hf_specdec.generate(model, **source, **GERMAN, **NEW, spec_method="ngram")
    assert torch.equal(text, model.generate(**source, **GERMAN, **NEW))
