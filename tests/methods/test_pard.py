"""PARD: a draft model that drafts all tokens of a cycle from one forward with masks."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_specdec import CheckpointFormatError, SpecConfigError, load_speculator, record
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from tests.helpers.architectures import tiny_model
from tests.helpers.by_hand import rows_of
from tests.helpers.distribution import P_VALUE, SETTINGS, V, exact_distribution, sampled_counts, small_model
from tests.helpers.heads import copy_of
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import FIXTURES
from tests.helpers.statistics import chi_square_pvalue


FOLDER = FIXTURES / "draft_model" / "published" / "pard"
MASK, K = 158, 6


@cache
def target():
    model = AutoModelForCausalLM.from_pretrained(FOLDER / "target").eval()
    model.generation_config.pad_token_id = None
    return model


@cache
def expected():
    return load_file(FOLDER / "expected.safetensors")


def speculator(**settings):
    return load_speculator(target(), model=str(FOLDER), same_tokenizer=True, **settings)


def test_detection():
    found = detect_checkpoint(FOLDER)
    assert (found.method, found.format, found.problems) == ("draft_model", "pard", ())


@torch.no_grad()
def test_official_run_cycle_by_cycle():
    """Theirs drafts before the target has read the prompt, so that its first anchor is the prompt's last token."""
    generator = speculator(num_speculative_tokens=K).candidate_generator(Session(1, 200, torch.device("cpu")))
    prompt, text = expected()["input_ids"], expected()["generate.output_ids"][0].tolist()
    length = prompt.shape[1]
    generator.prefill(Prompt(prompt[:, :-1], [0]))
    committed, num_accepted = text[length - 1 : length], 0
    for cycle, accepted in enumerate(expected()["generate.accepted"].tolist()):
        generator.observe(Commit([0], torch.tensor([committed]), [committed], [num_accepted]))
        anchor = torch.tensor(committed[-1:])
        draft = generator.propose(DraftStep([0], anchor, [length], [K])).token_lists()[0]
        if f"r{cycle}.draft_tokens" in expected():
            assert draft == expected()[f"r{cycle}.draft_tokens"][0].tolist()
        rest = text[length : length + K]
        assert next((i for i, (ours, right) in enumerate(zip(draft, rest)) if ours != right), len(rest)) == accepted
        committed, num_accepted = text[length : length + accepted + 1], accepted
        length += accepted + 1
        if length >= len(text):
            break
    assert cycle > 8


@torch.no_grad()
def test_logits_of_a_round():
    generator = speculator(num_speculative_tokens=K).candidate_generator(Session(1, 200, torch.device("cpu")))
    prompt = expected()["input_ids"]
    generator.prefill(Prompt(prompt[:, :-1], [0]))
    generator.observe(Commit([0], prompt[:, -1:], prompt[:, -1:].tolist(), [0]))
    logits = generator._feed_pending(K - 1)
    torch.testing.assert_close(logits[0], expected()["r0.draft_logits"], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 3}, {"draft_confidence_threshold": 0.6}])
def test_ragged_batches_have_plain_text_and_the_drafts_of_single_rows(settings):
    prompt = expected()["input_ids"]
    rows = [prompt[0], prompt[0, 3:], prompt[0, 5:]]
    padded = torch.stack([torch.nn.functional.pad(row, (prompt.shape[1] - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(prompt.shape[1]) >= prompt.shape[1] - len(row) for row in rows]).long()
    inputs = {"input_ids": padded, "attention_mask": mask}
    greedy = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None, "pad_token_id": 0}
    plain = target().generate(**inputs, **greedy)
    with record(trace=True) as made:
        ours = target().generate(**inputs, **greedy, assistant=speculator(**settings))
    assert torch.equal(ours, plain)
    # More than one token of a cycle is accepted.
    assert made.calls[0].stats.num_accepted_tokens > 1.5 * made.calls[0].stats.num_drafts
    for row, tokens in enumerate(rows):
        with record(trace=True) as alone:
            target().generate(
                tokens[None],
                attention_mask=torch.ones_like(tokens)[None],
                **greedy,
                assistant=speculator(**settings),
            )
        found, single = rows_of(made.calls[0], row), rows_of(alone.calls[0])
        assert [(trace.draft_tokens, trace.num_accepted) for trace in found] == [
            (trace.draft_tokens, trace.num_accepted) for trace in single
        ]


def small_pard():
    """A draft model of random weights with a mask, for the target whose distribution is enumerated."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=V + 1, **sizes, pard_token=V, bos_token_id=None, eos_token_id=None)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def small_drafter(model, method):
    settings = {"num_speculative_tokens": 3, "draft_sample_method": method, "same_tokenizer": True}
    return load_speculator(model, "draft_model", draft_model=small_pard(), **settings)


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
def test_samples_keep_the_distribution(name, method):
    model = small_model()
    drafter = small_drafter(model, method)
    assert drafter.resources.mask_token == V
    counts, stats = sampled_counts(SETTINGS[name], drafter)
    assert chi_square_pvalue(counts, exact_distribution(SETTINGS[name])) > P_VALUE
    assert stats.num_accepted_tokens > 300


def test_default_lengths():
    session = Session(1, 200, torch.device("cpu"))
    assert speculator(num_speculative_tokens="fixed").candidate_generator(session).num_speculative_tokens == 8
    assert speculator(num_speculative_tokens=12).candidate_generator(session).num_speculative_tokens == 12


@pytest.mark.parametrize(("token", "is_mask"), [(-1, False), (None, False), (0, True)])
def test_what_the_mask_token_says(tmp_path, token, is_mask):
    folder = copy_of(FOLDER, tmp_path / "draft", {"pard_token": token})
    drafter = load_speculator(target(), method="draft_model", model=str(folder), same_tokenizer=True)
    assert drafter.resources.mask_token == (token if is_mask else None)


def test_serving_engines_say_it_in_the_settings():
    settings = {"method": "draft_model", "model": str(FOLDER), "same_tokenizer": True, "num_speculative_tokens": 12}
    drafters = {
        wanted: load_speculator(target(), {**settings, "parallel_drafting": wanted}) for wanted in (True, False)
    }
    assert drafters[True].resources.mask_token == MASK
    assert drafters[False].resources.mask_token is None
    assert drafters[True].config.to_vllm()["parallel_drafting"] is True
    with pytest.raises(SpecConfigError, match="`parallel_drafting`=True.*no `pard_token`"):
        load_speculator(small_model(), "draft_model", draft_model=small_model(), parallel_drafting=True)


@pytest.mark.parametrize("token", [160, -2, "158", 2.5])
def test_mask_tokens_that_are_none(tmp_path, token):
    folder = copy_of(FOLDER, tmp_path / "draft", {"pard_token": token})
    assert "`pard_token`=" in detect_checkpoint(folder).problems[0]
    with pytest.raises(CheckpointFormatError, match="`pard_token`=.*token by token"):
        load_speculator(target(), method="draft_model", model=str(folder), same_tokenizer=True)


def test_with_a_recurrent_draft():
    """Its state forgets the masks: it drafts what it would if its whole text were read anew."""
    draft = tiny_model("falcon_h1")
    draft.config.pard_token = 3
    model, inputs = tiny_llama(vocab_size=draft.config.vocab_size), prompts(2)
    greedy = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None}
    plain = model.generate(**inputs, **greedy)
    drafter = load_speculator(model, "draft_model", draft_model=draft, num_speculative_tokens=4, same_tokenizer=True)
    with record(trace=True) as made:
        assert torch.equal(model.generate(**inputs, **greedy, assistant=drafter), plain)
    start, length = int((inputs["attention_mask"][0] == 0).sum()), inputs["input_ids"].shape[1] + 1
    for trace in rows_of(made.calls[0])[:6]:
        text = torch.cat([plain[0, start:length], torch.full((3,), 3)])
        with torch.no_grad():
            assert (
                trace.draft_tokens == draft(text[None]).logits[0, -4:].argmax(-1).tolist()[: len(trace.draft_tokens)]
            )
        length += trace.num_accepted + 1
