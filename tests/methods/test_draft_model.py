"""Draft models: the text is plain generation's, drafts are the model's own, and drawn drafts keep the distribution."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BartForCausalLM, WhisperForCausalLM

from hf_specdec import SpecConfigError, UnsupportedModelError, load_speculator, record
from hf_specdec.logits.sampling import DraftSampler
from hf_specdec.protocol import Prompt, Session
from tests.helpers.architectures import tiny_model
from tests.helpers.chi_square import chi_square_pvalue
from tests.helpers.distribution import (
    NUM_ROWS,
    P_VALUE,
    SETTINGS,
    draft_model,
    exact_distribution,
    sampled_counts,
    small_model,
)
from tests.helpers.encoder_decoders import changed, text_model
from tests.helpers.encoder_decoders import tiny_model as tiny_encoder_decoder
from tests.helpers.levels import full, in_full
from tests.helpers.models import VOCAB_SIZE, prompts, tiny_gpt2, tiny_llama
from tests.helpers.own_drafts import GREEDY, drafts_in, logits_along, perturbed, with_draft_model


# How a draft model is made of the target, and how much of its drafts is accepted at the least and the most.
KINDS = {
    "itself": (copy.deepcopy, (1, 1)),
    "near": (perturbed, (0.4, 0.95)),
    "far": (lambda model: perturbed(model, 0.2), (0.01, 0.7)),
    "unrelated": (lambda model: tiny_llama(seed=3, num_hidden_layers=1), (0, 0.2)),
}


@pytest.mark.parametrize(
    ("kind", "k", "batch_size"),
    [("near", 6, 4), *in_full(("itself", 3, 1), ("itself", 6, 4), ("far", 5, 4), ("unrelated", 3, 4))],
)
def test_greedy_matches_generate(model, kind, k, batch_size):
    make, (low, high) = KINDS[kind]
    draft, inputs = make(model), prompts(batch_size)
    new = 1 + 4 * (k + 1)
    text, call = with_draft_model(model, draft, inputs, {"num_speculative_tokens": k}, max_new_tokens=new)
    assert low <= call.stats.acceptance_rate <= high
    assert max(len(trace.draft_tokens) for trace, _ in drafts_in(call, inputs, text)) == k
    if kind == "itself":
        assert call.stats.num_target_forwards == 1 + 4


def test_rows_that_end_apart(model):
    plain = model.generate(**prompts(4), **GREEDY)
    ends = [int(plain[0, 12]), int(plain[2, 18])]
    with_draft_model(model, perturbed(model), prompts(4), eos_token_id=ends, pad_token_id=0)


def test_penalties_reach_the_draft(model):
    _, call = with_draft_model(model, copy.deepcopy(model), prompts(3), repetition_penalty=1.4)
    assert call.stats.acceptance_rate == 1
    # Also where it lacks some of the tokens.
    settings = {"repetition_penalty": 1.3, "suppress_tokens": [60, 61]}
    with_draft_model(model, tiny_llama(seed=4, vocab_size=48), prompts(3), {"draft_vocabulary": "same"}, **settings)


SLOT_COUNTERS = ("bloom", "gpt_neo")


def make(name: str, seed: int = 0):
    return tiny_llama(seed=seed) if name == "llama" else tiny_model(name, vocab_size=VOCAB_SIZE, initializer_range=0.3)


@pytest.mark.parametrize(
    ("target", "draft", "batch_size"),
    [
        ("llama", "gemma3_text", 3),
        *in_full(
            *(("llama", draft, 3) for draft in ("gpt2", *SLOT_COUNTERS)),
            *((target, "itself", 3) for target in SLOT_COUNTERS),
            # Rows are held to equal lengths: some commit accepted draft tokens only, and no new one.
            *((target, "llama", 3) for target in SLOT_COUNTERS),
        ),
    ],
)
def test_any_draft_for_any_target(target, draft, batch_size):
    inputs, first = prompts(batch_size), make(target)
    second = perturbed(first) if draft == "itself" else make(draft, seed=2)
    _, call = with_draft_model(first, second, inputs, pad_token_id=0)
    # Slots say nothing of rows that differ in length; of gpt_neo's drafts for another target none is accepted.
    has_note = any("tells positions from the order of its cache" in note for note in call.stats.notes)
    assert has_note == (batch_size > 1 and (target in SLOT_COUNTERS or draft == "bloom"))


def test_recurrent_draft_forgets_rejected_tokens():
    target, inputs = tiny_model("mamba2"), prompts(3, padding=False)
    _, call = with_draft_model(target, copy.deepcopy(target), inputs, pad_token_id=0)
    assert call.stats.num_accepted_tokens == call.stats.num_draft_tokens > 0
    with_draft_model(target, perturbed(target), inputs, pad_token_id=0)


@full
def test_the_draft_model_is_left_unchanged(model):
    draft = make("gemma2")
    draft.generation_config.update(num_assistant_tokens=7, temperature=0.3, max_length=9, eos_token_id=5)

    def state():
        weights = [tensor.tolist() for tensor in draft.state_dict().values()]
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in draft.modules()]
        settings = draft.config.to_dict(), draft.generation_config.to_dict(), draft.config._attn_implementation
        return weights, hooks, settings, draft.training, sorted(vars(draft))

    before = state()
    for do_sample in (False, True):
        model.generate(**prompts(2), max_new_tokens=12, do_sample=do_sample, assistant=draft)
    assert state() == before


def resized(vocab_size: int):
    draft = tiny_llama()
    draft.resize_token_embeddings(vocab_size, mean_resizing=False)
    if vocab_size > VOCAB_SIZE:
        with torch.no_grad():
            # Padding rows that the draft would often choose.
            draft.lm_head.weight[VOCAB_SIZE:] = draft.lm_head.weight[: vocab_size - VOCAB_SIZE] * 3
    return draft


@pytest.mark.parametrize(
    ("make", "width"),
    [(resized, 80), *in_full((tiny_llama, 48), (resized, 48), (tiny_gpt2, 80))],
)
def test_vocabulary_of_another_width(model, make, width):
    draft, inputs = make(vocab_size=width), prompts(3)
    text, call = with_draft_model(model, draft, inputs, {"draft_vocabulary": "same"})
    assert (inputs["input_ids"] >= 48).any()
    drafted = [token for trace, _ in drafts_in(call, inputs, text) for token in trace.draft_tokens]
    assert max(drafted) < min(width, VOCAB_SIZE)
    if make is resized and width > VOCAB_SIZE:
        assert call.stats.acceptance_rate == 1


@pytest.mark.parametrize("limit", ["max_position_embeddings", *in_full("max_model_len")])
def test_rows_beyond_the_context_go_on_without_drafts(model, limit):
    draft = tiny_gpt2(n_positions=32) if limit == "max_position_embeddings" else perturbed(model)
    options = {} if limit == "max_position_embeddings" else {"max_model_len": 32}
    inputs = prompts(4, length=40, padding=False)
    for row, length in enumerate((40, 20, 32, 6)):
        inputs["attention_mask"][row, : 40 - length] = 0
        inputs["input_ids"][row, : 40 - length] = 0
    text, call = with_draft_model(model, draft, inputs, options, max_new_tokens=40)
    drafts = [(trace, so_far) for trace, so_far in drafts_in(call, inputs, text) if trace.draft_tokens]
    assert {trace.row for trace, _ in drafts} == {1, 3}
    assert max(len(so_far) for _, so_far in drafts) > 25
    assert max(len(so_far) + len(trace.draft_tokens) for trace, so_far in drafts) == 32
    (note,) = call.stats.notes
    assert "32 tokens" in note
    assert limit in note


@full
def test_prompts_at_and_beyond_the_context(model):
    for length in (31, 33):
        _, call = with_draft_model(model, tiny_gpt2(n_positions=32), prompts(1, length=length), max_new_tokens=4)
        assert (call.stats.num_drafts, len(call.stats.notes)) == (0, 1)
    # A text may fill the position table of the target, and that of the draft.
    target = tiny_gpt2(n_positions=32)
    for draft in (perturbed(target), tiny_gpt2(n_positions=64), tiny_llama()):
        _, call = with_draft_model(target, draft, prompts(3), max_new_tokens=None, max_length=32)
        assert call.stats.num_drafts > 0
    with pytest.raises(SpecConfigError, match="`max_model_len`=32 is longer than the draft model's context of 20"):
        load_speculator(model, draft_model=tiny_gpt2(n_positions=20), max_model_len=32)
    # More sampled tokens than there are numbers.
    settings = {"max_new_tokens": 4, "assistant": tiny_llama(seed=1), "num_speculative_tokens": 300}
    with pytest.raises(SpecConfigError, match="at most 256.*got 300.*draft_sample_method='greedy'"):
        model.generate(**prompts(1), do_sample=True, **settings)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ("top_p", {"draft_sample_method": "probabilistic", "draft_confidence_threshold": 0.7}),
        *in_full(
            ("repetition_penalty_and_top_p", {"draft_sample_method": "probabilistic", "vocab_size": 4}),
            ("top_p", {"draft_sample_method": "greedy", "draft_confidence_threshold": 0.4}),
            ("top_k", {"draft_sample_method": "greedy", "vocab_size": 4}),
            ("top_k", {"draft_sample_method": "probabilistic", "vocab_size": 9}),
        ),
    ],
)
def test_joint_distribution(settings, options):
    counts, stats = sampled_counts(SETTINGS[settings], draft_model(draft_vocabulary="same", **options))
    assert chi_square_pvalue(counts, exact_distribution(SETTINGS[settings])) > P_VALUE
    assert stats.num_accepted_tokens > 0.1 * NUM_ROWS
    if "draft_confidence_threshold" in options:
        assert stats.num_draft_tokens < 0.9 * 3 * stats.num_drafts
    elif options["draft_sample_method"] == "probabilistic":
        # Of the target itself all are accepted; ratios computed over other shapes may miss 1 by rounding.
        itself = load_speculator(small_model(), draft_model=small_model(), num_speculative_tokens=3)
        assert sampled_counts(SETTINGS[settings], itself)[1].acceptance_rate > 0.9999


def test_the_first_tokens_of_a_vocabulary_alone(model):
    size, inputs = VOCAB_SIZE // 2, prompts(1)
    tokens, options = inputs["input_ids"], {"draft_vocabulary_size": size, "num_speculative_tokens": 4}
    speculator = load_speculator(model, draft_model=model, **options)
    generator = speculator.candidate_generator(
        Session(1, 50, torch.device("cpu"), DraftSampler(None, None, VOCAB_SIZE))
    )
    generator.prefill(Prompt(tokens[:, :-1], [0], {}))
    logits = generator.state.slots.read_last(tokens[:, -1:], [1])
    # Its lm_head computes no others.
    assert logits.shape == (1, size)
    torch.testing.assert_close(logits, logits_along(model, tokens[0], [0])[:, :size])
    with record(trace=True) as calls:
        model.generate(**inputs, **GREEDY, assistant=speculator)
    rows = [row for cycle in calls.calls[0].cycles for row in cycle.rows]
    assert max(token for row in rows for token in row.draft_tokens) < size
    assert calls.calls[0].stats.num_accepted_tokens > 0


def test_lengths_that_adapt_end_with_improbable_tokens(model, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_ADAPTIVE", "1")

    def threshold(**settings):
        speculator = load_speculator(model, draft_model=perturbed(model, 0.2), **settings)
        session = Session(1, 50, torch.device("cpu"), DraftSampler(None, None, VOCAB_SIZE))
        generator = speculator.candidate_generator(session)
        return getattr(generator, "generator", generator).threshold

    assert threshold() == threshold(num_speculative_tokens="auto") == 0.5
    # Also of as many tokens as lengths that adapt may come to.
    assert threshold(num_speculative_tokens=12) == 0.0
    assert threshold(num_speculative_tokens=4) == threshold(draft_confidence_threshold=0.0) == 0.0
    assert threshold(draft_confidence_threshold=0.3) == 0.3


@full
def test_improbable_tokens_end_a_draft(model):
    draft, inputs, sizes = perturbed(model, 0.2), prompts(4), set()
    options = {"num_speculative_tokens": 6, "draft_confidence_threshold": 0.6}
    text, call = with_draft_model(model, draft, inputs, options, max_new_tokens=40)
    for trace, so_far in drafts_in(call, inputs, text):
        sizes.add(len(trace.draft_tokens))
        if trace.draft_tokens:
            sureness = logits_along(draft, so_far, trace.draft_tokens).softmax(-1).amax(-1)
            assert (sureness[:-1] > 0.6 - 1e-4).all()
            row_length = text.shape[1] - int((inputs["attention_mask"][trace.row] == 0).sum())
            # The improbable token itself stays.
            assert sureness[-1] < 0.6 + 1e-4 or len(sureness) == min(6, row_length - len(so_far) - 1)
    assert len(sizes) > 2


# Targets with an encoder: drafts with the same encoder, with one of their own, and without one

NEW = 16
DECODERS = {"bart": BartForCausalLM, "whisper": WhisperForCausalLM}


def decoder_of(model, model_class) -> torch.nn.Module:
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
    return request.param, *tiny_encoder_decoder(request.param)


def test_all_drafts_of_a_copy_are_accepted(target):
    name, model, inputs = target
    drafts = [copy.deepcopy(model)]
    if name in DECODERS:
        drafts.append(decoder_of(model, DECODERS[name]))
    # What the target has read is not read again.
    drafts[0].get_encoder().forward = None
    for draft in drafts:
        text, stats = drafted(model, draft, inputs)
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 8
        # The decoder alone is handed the encoder's output under its own name for it, also where rows end.
        ends = {"eos_token_id": int(text[0, 7]), "pad_token_id": 0}
        assert drafted(model, draft, inputs, **ends)[1].num_accepted_tokens > 0


def test_an_encoder_of_its_own_reads_each_source_once(target):
    _, model, source = target
    # Rows end one after the other, as they come to these tokens.
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
    _, model, source = target
    call = {**source, "max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 2}
    with record() as made:
        assert len(model.generate(**call, spec_model=changed(model, 0.02), num_speculative_tokens=4)) == 8
    assert made.calls[0].stats.num_accepted_tokens > 16
    model.save_pretrained(tmp_path)
    assert drafted(model, str(tmp_path), source)[1].acceptance_rate == 1


@full
def test_models_that_do_not_fit():
    model, source = tiny_encoder_decoder("bart")
    # Texts without the source are drafted, too.
    assert drafted(model, tiny_llama(vocab_size=99), source)[1].num_draft_tokens > 0
    whisper, sounds = tiny_encoder_decoder("whisper")
    assert "no drafts: the draft model's own encoder reads" in drafted(whisper, model, sounds)[1].notes[0]
    with pytest.raises(UnsupportedModelError, match="has no encoder. Use a decoder-only draft model"):
        tiny_llama(vocab_size=99).generate(source["input_ids"], spec_model=model, max_new_tokens=4)
    narrow, _ = text_model("bart", hidden_size=32)
    with pytest.raises(UnsupportedModelError, match="reads states of 32 numbers, and the encoder .* returns 64"):
        model.generate(**source, spec_model=decoder_of(narrow, BartForCausalLM), max_new_tokens=4)
