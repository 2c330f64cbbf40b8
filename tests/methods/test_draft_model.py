"""Draft models: the text is plain generation's, drafts are the model's own, and drawn drafts keep the distribution."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BartForCausalLM, WhisperForCausalLM

from hf_specdec import SpecConfigError, UnsupportedModelError, load_speculator, record
from hf_specdec.decoding.target import SlotModel
from tests.helpers.architectures import tiny_model
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
from tests.helpers.statistics import chi_square_pvalue


# How a draft model is made of the target, and how much of its drafts is accepted at the least and the most.
KINDS = {
    "itself": (copy.deepcopy, (1, 1)),
    "near": (perturbed, (0.4, 0.95)),
    "far": (lambda model: perturbed(model, 0.2), (0.01, 0.7)),
    "unrelated": (lambda model: tiny_llama(seed=3, num_hidden_layers=1), (0, 0.2)),
}


@pytest.mark.parametrize(
    ("kind", "k", "batch_size"),
    [("itself", 3, 1), ("near", 6, 4), *in_full(("itself", 6, 4), ("near", 1, 4), ("far", 5, 4), ("unrelated", 3, 4))],
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
    with_draft_model(model, tiny_llama(seed=4, vocab_size=48), prompts(3), {"same_tokenizer": True}, **settings)


@full
@pytest.mark.parametrize("begin", [{"bos_token_id": 5}, {}, {"eos_token_id": [7, 8]}], ids=["bos", "none", "eos"])
def test_prompts_of_embeddings_alone(model, begin):
    """The draft model reads what has been generated, after what a text of its own begins with."""
    inputs, draft, read = prompts(3), perturbed(model), []
    for name, value in begin.items():
        setattr(draft.config, name, value)
    draft.register_forward_pre_hook(lambda *args: read.append(args[2]["input_ids"].tolist()), with_kwargs=True)
    call = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach(), **GREEDY}
    call["attention_mask"] = inputs["attention_mask"]
    output = model.generate(**call, assistant=draft, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.generate(**call))
    first = begin.get("bos_token_id", begin.get("eos_token_id", [0])[0])
    assert read[:2] == [[[first]] * 3, output.sequences[:, :1].tolist()]
    # From the first cycle on.
    assert output.speculative.num_cycles_without_drafts.get("nothing_found", 0) == 0


@pytest.mark.parametrize("sign", [1, -1], ids=["all_accepted", "all_rejected"])
def test_tokens_fed_in_each_cycle(model, sign, monkeypatch):
    draft, shapes = copy.deepcopy(model), []
    with torch.no_grad():
        # With the sign turned, its best token is the target's least likely one.
        draft.lm_head.weight.mul_(sign)
    for kind in {SlotModel, *SlotModel.__subclasses__()}:
        if "forward" in vars(kind):

            def counted(self, tokens, topology, run=kind.forward, **wanted):
                if self.model is draft:
                    shapes.append(tuple(tokens.shape))
                return run(self, tokens, topology, **wanted)

            monkeypatch.setattr(kind, "forward", counted)
    options = {"num_speculative_tokens": 3}
    _, call = with_draft_model(model, draft, prompts(1), options, max_new_tokens=13 if sign > 0 else 8)
    if sign > 0:
        assert call.stats.num_accepted_tokens == 9
        assert shapes == [(1, 1), (1, 1), (1, 1)] + 2 * [(1, 2), (1, 1), (1, 1)]
    else:
        assert call.stats.num_accepted_tokens == 0
        # Room for 3, 3, 3, 3, 3, 2, 1 and 0 draft tokens after the tokens 1, 2, ...
        assert shapes == [(1, 1)] * (3 * 4 + 2 + 1)


SLOT_COUNTERS = ("bloom", "gpt_neo")


def make(name: str, seed: int = 0):
    return tiny_llama(seed=seed) if name == "llama" else tiny_model(name, vocab_size=VOCAB_SIZE, initializer_range=0.3)


@pytest.mark.parametrize(
    ("target", "draft", "batch_size"),
    [
        ("llama", "gemma3_text", 3),
        ("llama", "bloom", 3),
        *in_full(
            *(("llama", draft, 3) for draft in ("gpt2", "mistral", "qwen3", "gemma2", "gpt_neo")),
            *(("llama", draft, 1) for draft in SLOT_COUNTERS),
            *((target, "itself", 3) for target in ("mistral", *SLOT_COUNTERS)),
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


@pytest.mark.parametrize("batch_size", [3, *in_full(1)])
def test_recurrent_draft_forgets_rejected_tokens(batch_size):
    target, inputs = tiny_model("xlstm"), prompts(batch_size, padding=False)
    _, call = with_draft_model(target, copy.deepcopy(target), inputs, pad_token_id=0)
    assert call.stats.num_accepted_tokens == call.stats.num_draft_tokens > 0
    with_draft_model(target, perturbed(target), inputs, pad_token_id=0)


@pytest.mark.parametrize("name", ["gemma2", *in_full("gpt2")])
def test_the_draft_model_is_left_unchanged(model, name):
    draft = make(name)
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
    [(resized, 80), (tiny_llama, 48), *in_full((resized, 48), (tiny_llama, 80), (tiny_gpt2, 48), (tiny_gpt2, 80))],
)
def test_vocabulary_of_another_width(model, make, width):
    draft, inputs = make(vocab_size=width), prompts(3)
    text, call = with_draft_model(model, draft, inputs, {"same_tokenizer": True})
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
    for length in (31, 32, 33):
        _, call = with_draft_model(model, tiny_gpt2(n_positions=32), prompts(1, length=length), max_new_tokens=4)
        assert call.stats.num_drafts == 0
        assert len(call.stats.notes) == 1
    counts_slots = tiny_model("gpt_neo", vocab_size=VOCAB_SIZE, max_position_embeddings=5)
    with_draft_model(model, counts_slots, prompts(2, length=9), max_new_tokens=4)
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
    assert model.generate(**prompts(1), do_sample=False, **settings).shape[1] == 11


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ("top_p", {"draft_sample_method": "probabilistic", "draft_confidence_threshold": 0.7}),
        ("repetition_penalty_and_top_p", {"draft_sample_method": "probabilistic", "vocab_size": 4}),
        *in_full(
            ("top_p", {"draft_sample_method": "greedy", "draft_confidence_threshold": 0.4}),
            ("top_k", {"draft_sample_method": "greedy", "vocab_size": 4}),
            ("top_k", {"draft_sample_method": "probabilistic", "vocab_size": 9}),
        ),
    ],
)
def test_joint_distribution(settings, options):
    counts, stats = sampled_counts(SETTINGS[settings], draft_model(same_tokenizer=True, **options))
    assert chi_square_pvalue(counts, exact_distribution(SETTINGS[settings])) > P_VALUE
    assert stats.num_accepted_tokens > 0.1 * NUM_ROWS
    if "draft_confidence_threshold" in options:
        assert stats.num_draft_tokens < 0.9 * 3 * stats.num_drafts
    elif options["draft_sample_method"] == "probabilistic":
        # Of the target itself all are accepted; ratios computed over other shapes may miss 1 by rounding.
        itself = load_speculator(small_model(), draft_model=small_model(), num_speculative_tokens=3)
        assert sampled_counts(SETTINGS[settings], itself)[1].acceptance_rate > 0.9999


@pytest.mark.parametrize("batch_size", [4, *in_full(1)])
def test_improbable_tokens_end_a_draft(model, batch_size):
    draft, inputs, threshold = perturbed(model, 0.2), prompts(batch_size), 0.6
    options = {"num_speculative_tokens": 6, "draft_confidence_threshold": threshold}
    text, call = with_draft_model(model, draft, inputs, options, max_new_tokens=40)
    sizes = set()
    for trace, so_far in drafts_in(call, inputs, text):
        drafted = trace.draft_tokens
        sizes.add(len(drafted))
        if drafted:
            probs = logits_along(draft, so_far, drafted).softmax(-1)
            confidences = probs.gather(1, torch.tensor(drafted)[:, None])[:, 0].tolist()
            assert all(confidence > threshold - 1e-4 for confidence in confidences[:-1])
        row_length = text.shape[1] - int((inputs["attention_mask"][trace.row] == 0).sum())
        if len(drafted) < min(6, row_length - len(so_far) - 1):
            # The improbable token itself stays.
            assert confidences[-1] < threshold + 1e-4
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


@pytest.mark.parametrize("batch_size", [4, *in_full(1)])
def test_all_drafts_of_a_copy_are_accepted(target, batch_size):
    name, model, source = target
    drafts = [copy.deepcopy(model)]
    if name in DECODERS:
        drafts.append(decoder_of(model, DECODERS[name]))
    inputs = {key: value[:batch_size] for key, value in source.items()}
    # What the target has read is not read again.
    drafts[0].get_encoder().forward = None
    for draft in drafts:
        text, stats = drafted(model, draft, inputs)
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 2 * batch_size
        # The decoder alone is handed the encoder's output under its own name for it, also where rows end.
        ends = {"eos_token_id": int(text[0, 7]), "pad_token_id": 0}
        assert drafted(model, draft, inputs, **ends)[1].num_accepted_tokens > 0 or batch_size == 1


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
    model, source = tiny_encoder_decoder("bart")
    # Texts without the source are drafted, too.
    assert drafted(model, tiny_llama(vocab_size=99), source)[1].num_draft_tokens > 0
    whisper, sounds = tiny_encoder_decoder("whisper")
    _, stats = drafted(whisper, model, sounds)
    assert stats.notes == ["no drafts: the draft model's own encoder reads `input_ids`, which the call does not have"]
    with pytest.raises(UnsupportedModelError, match="has no encoder. Use a decoder-only draft model"):
        tiny_llama(vocab_size=99).generate(source["input_ids"], spec_model=model, max_new_tokens=4)
    narrow, _ = text_model("bart", hidden_size=32)
    with pytest.raises(UnsupportedModelError, match="reads states of 32 numbers, and the encoder .* returns 64"):
        model.generate(**source, spec_model=decoder_of(narrow, BartForCausalLM), max_new_tokens=4)
