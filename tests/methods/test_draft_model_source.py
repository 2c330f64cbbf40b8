"""Draft models for targets with an encoder: with the same encoder, with their own, and without one."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BartForCausalLM, WhisperForCausalLM

from hf_specdec import UnsupportedModelError, record
from tests.helpers.encoder_decoders import changed, text_model, tiny_model
from tests.helpers.levels import full, in_full
from tests.helpers.models import tiny_llama


NEW = 16
DECODERS = {"bart": BartForCausalLM, "whisper": WhisperForCausalLM}


def decoder_of(model, model_class) -> torch.nn.Module:
    """The model's decoder alone."""
    alone = model_class(copy.deepcopy(model.config)).eval()
    alone.model.decoder.load_state_dict(model.model.decoder.state_dict())
    alone.get_output_embeddings().load_state_dict(model.get_output_embeddings().state_dict())
    return alone


def drafted(model, draft, inputs, **settings):
    """Text and statistics of a call with the draft model; the text must be plain generation's."""
    call = {**inputs, "max_new_tokens": NEW, "do_sample": False, **settings}
    with record() as made:
        text = model.generate(**call, spec_model=draft, num_speculative_tokens=4)
    assert torch.equal(text, model.generate(**call))
    return text, made.calls[0].stats


@pytest.fixture(scope="module", params=["bart", *in_full("t5", "whisper")])
def target(request):
    return request.param, *tiny_model(request.param)


@pytest.mark.parametrize("batch_size", [4, *in_full(1)])
def test_all_drafts_of_a_copy_are_accepted(target, batch_size):
    """With the target's encoder output, from the first token on and for every row."""
    name, model, source = target
    drafts = [copy.deepcopy(model)]
    if name in DECODERS:
        drafts.append(decoder_of(model, DECODERS[name]))
    inputs = {key: value[:batch_size] for key, value in source.items()}
    # What the target has read is not read again.
    drafts[0].get_encoder().forward = None
    for draft in drafts:
        _, stats = drafted(model, draft, inputs)
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 2 * batch_size


def test_rows_end_where_a_decoder_alone_drafts():
    """It is handed the encoder's output under its own name for it."""
    model, source = tiny_model("bart")
    plain = model.generate(**source, max_new_tokens=NEW, do_sample=False)
    end = next(token for token in plain[2].tolist() if (plain == token).sum() == 1)
    text, stats = drafted(model, decoder_of(model, BartForCausalLM), source, eos_token_id=end, pad_token_id=0)
    assert (text == 0).any()
    assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize("rows_end", [True, *in_full(False)])
def test_an_encoder_of_its_own_reads_each_source_once(target, rows_end):
    name, model, source = target
    settings = {}
    if rows_end:
        # One row after the other, as they come to these tokens.
        text = model.generate(**source, max_new_tokens=NEW, do_sample=False)
        settings = {"eos_token_id": [int(text[0, 7]), int(text[1, 10])], "pad_token_id": 0}
    draft, read = changed(model, 0.02), []
    draft.get_encoder().register_forward_hook(lambda module, args, output: read.append(output[0].shape))
    _, stats = drafted(model, draft, source, **settings)
    assert len(read) == 1
    assert read[0][0] == 4
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@full
def test_drawn_drafts_and_drafts_of_a_folder(tmp_path, target):
    name, model, source = target
    torch.manual_seed(0)
    call = {**source, "max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 2}
    with record() as made:
        assert len(model.generate(**call, spec_model=changed(model, 0.02), num_speculative_tokens=4)) == 8
    assert made.calls[0].stats.num_accepted_tokens > 16
    model.save_pretrained(tmp_path)
    stats = drafted(model, str(tmp_path), source)[1]
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


@full
def test_models_that_do_not_fit():
    model, source = tiny_model("bart")
    # Texts without the source are drafted, too.
    assert drafted(model, tiny_llama(vocab_size=99), source)[1].num_draft_tokens > 0
    _, stats = drafted(*(tiny_model(name)[0] for name in ("whisper", "bart")), tiny_model("whisper")[1])
    assert stats.notes == ["no drafts: the draft model's own encoder reads `input_ids`, which the call does not have"]
    with pytest.raises(UnsupportedModelError, match="has no encoder. Use a decoder-only draft model"):
        tiny_llama(vocab_size=99).generate(source["input_ids"], spec_model=model, max_new_tokens=4)
    narrow, _ = text_model("bart", hidden_size=32)
    with pytest.raises(UnsupportedModelError, match="reads states of 32 numbers, and the encoder .* returns 64"):
        model.generate(**source, spec_model=decoder_of(narrow, BartForCausalLM), max_new_tokens=4)
