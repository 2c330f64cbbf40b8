"""Draft models loaded by name: tokenizers that are compared, data types, quantization, and broken checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    LlamaModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_specdec import CheckpointFormatError, SpecConfigError, UnsupportedModelError, load_speculator
from hf_specdec.candidate_generators.draft_model import generator
from hf_specdec.candidate_generators.draft_model.vocabularies import is_one_tokenizer
from hf_specdec.checkpoints import quantised
from tests.helpers.levels import full, in_full
from tests.helpers.models import VOCAB_SIZE, nothing_runs, prompts, tiny_llama
from tests.helpers.own_drafts import GREEDY, perturbed, with_draft_model


WIDE = {"hidden_size": 64, "initializer_range": 0.3}
TEXTS = {
    "code": "def add(left, right): return left + right\nclass Node: def __init__(self, value): self.value = value\n",
    "prose": "the quick brown fox jumps over the lazy dog while seventeen wizards quietly boil jars of murky liquid ",
}


def trained_tokenizer(name: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator([TEXTS[name]] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    code, special = trained_tokenizer("code"), trained_tokenizer("code")
    special.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    marked = {f"{token}!": index for token, index in code.get_vocab().items()}
    disjoint = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(marked, unk_token="<unk>!")))
    made = {
        "target": (tiny_llama(), code),
        "same": (perturbed(tiny_llama()), code),
        "larger": (tiny_llama(seed=1, vocab_size=70), code),
        "special": (perturbed(tiny_llama()), special),
        "other": (tiny_llama(seed=1), trained_tokenizer("prose")),
        "disjoint": (perturbed(tiny_llama()), disjoint),
        "bare": (perturbed(tiny_llama()), None),
        "bare_larger": (tiny_llama(seed=1, vocab_size=70), None),
        # Four-bit layers on CPU come in blocks of 64 inputs.
        "wide": (tiny_llama(**WIDE), None),
    }
    for name, (network, tokenizer) in made.items():
        network.save_pretrained(root / name)
        if tokenizer:
            tokenizer.save_pretrained(root / name)
    return {name: str(root / name) for name in made}


@pytest.fixture
def load(folders):
    return lambda name: transformers.AutoModelForCausalLM.from_pretrained(folders[name])


def draft_from(folder, **settings):
    return {"speculative": {"method": "draft_model", "model": str(folder), **settings}}


def drafted(target, folder, **settings):
    """Statistics of a call with a draft model from a folder; the text must be plain generation's."""
    call = {**prompts(2), **GREEDY, "max_new_tokens": 12}
    output = target.generate(**call, **draft_from(folder, **settings), return_dict_in_generate=True)
    assert torch.equal(output.sequences, target.generate(**call))
    return output.speculative


@pytest.mark.parametrize(
    ("target", "draft", "settings"),
    [
        ("target", "larger", {}),
        *in_full(("target", "special", {}), ("bare", "bare", {}), ("target", "other", {"draft_vocabulary": "same"})),
    ],
)
def test_tokenizers_that_are_the_same(folders, load, target, draft, settings):
    target = load(target)
    stats = drafted(target, folders[draft], **settings)
    assert stats.num_draft_tokens > 0
    assert not any("tokens are in both" in note for note in stats.notes)
    # A model that was loaded before knows its tokenizer, too.
    with_draft_model(target, load(draft), prompts(2), settings, max_new_tokens=12)


def test_files_tell_equal_tokenizers(folders, load, monkeypatch):
    """Nothing of a large vocabulary is loaded where its files are the same, but for the template of chats."""
    assert not any(is_one_tokenizer(folders["target"], folders[name]) for name in ("special", "other", "bare"))
    assert not is_one_tokenizer("no/such-repository", folders["target"])
    settings = Path(folders["same"], "tokenizer_config.json")
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": "{{ messages }}"}))
    monkeypatch.setattr(generator, "load_tokenizer", lambda *args: pytest.fail("it was loaded"))
    monkeypatch.setattr(generator, "draft_tokenizer", lambda *args: pytest.fail("it was loaded"))
    assert drafted(load("target"), folders["same"]).num_draft_tokens > 0


def test_different_tokenizers_are_noticed(folders, load):
    names = [set(trained_tokenizer(name).get_vocab()) for name in ("code", "prose")]
    assert f"{len(names[0] & names[1])} tokens are in both" in drafted(load("target"), folders["other"]).notes[0]
    with pytest.raises(CheckpointFormatError, match="without a common token") as error:
        drafted(load("target"), folders["disjoint"])
    assert folders["target"] in str(error.value)
    assert folders["disjoint"] in str(error.value)


@full
def test_different_sizes_without_tokenizers_are_refused(folders, load):
    """transformers makes up a tokenizer of special tokens for some bare models; that compares nothing."""
    with pytest.raises(CheckpointFormatError, match=r"64 and 70 tokens.*draft_vocabulary"):
        drafted(load("bare"), folders["bare_larger"])
    drafted(load("bare"), folders["bare_larger"], draft_vocabulary="same")


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("of_target", "setting", "expected"),
    [(BF16, None, BF16), *in_full((FP32, "bfloat16", BF16), (BF16, FP32, FP32), (BF16, "auto", FP32))],
)
def test_dtype(folders, load, of_target, setting, expected):
    target = load("target").to(of_target)
    speculator = load_speculator(target, draft_from(folders["same"], dtype=setting)["speculative"])
    assert speculator.resources.model.dtype == expected
    assert not speculator.resources.model.training
    output = target.generate(**prompts(2), **GREEDY, assistant=speculator, return_dict_in_generate=True)
    assert output.speculative.num_accepted_tokens > 0


def with_other_sizes(folder):
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 64', '"intermediate_size": 48'))


def encoder_decoder(folder):
    T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1)).save_pretrained(folder)


# What breaks a draft model's folder, and what the error says about it.
BREAKS = {
    "other_shapes": (with_other_sizes, "mismatched"),
    "no_head": (lambda folder: LlamaModel.from_pretrained(folder).save_pretrained(folder), "lm_head.weight"),
    "encoder_decoder": (encoder_decoder, "encoder-decoder"),
}


@pytest.mark.parametrize("kind", ["no_head", *in_full("other_shapes", "encoder_decoder")])
def test_broken_checkpoints_are_refused(load, tmp_path, kind):
    target, (spoil, reason) = load("target"), BREAKS[kind]
    load("same").save_pretrained(tmp_path)
    spoil(tmp_path)
    with nothing_runs(target), pytest.raises(CheckpointFormatError, match=f"draft model.*{reason}") as error:
        target.generate(**prompts(1), **GREEDY, **draft_from(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert len(str(error.value)) < 500


@full
def test_wrong_models_and_settings_are_refused(model, load, tmp_path):
    config = OpenAIGPTConfig(vocab_size=VOCAB_SIZE, n_embd=16, n_layer=2, n_head=2)
    OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="OpenAIGPTLMHeadModel.*draft model"):
        drafted(load("target"), tmp_path)
    with pytest.raises(SpecConfigError, match="loaded draft model.*quantization"):
        load_speculator(model, {"method": "draft_model", "quantization": "4bit"}, draft_model=model)


needs_bitsandbytes = pytest.mark.skipif(not quantised.is_bitsandbytes_available(), reason="needs bitsandbytes")


@needs_bitsandbytes
@pytest.mark.parametrize("name", ["bitsandbytes_4bit", *in_full("bitsandbytes_fp4", "bitsandbytes_8bit")])
def test_quantization(folders, name, caplog):
    target = tiny_llama(**WIDE)
    with caplog.at_level(logging.WARNING, logger="bitsandbytes"):
        assert drafted(target, folders["wide"], quantization=name).acceptance_rate > 0.25
    draft = load_speculator(target, draft_from(folders["wide"], quantization=name)["speculative"]).resources.model
    assert draft.config.quantization_config is not None
    assert type(draft.model.layers[0].mlp.up_proj).__module__.startswith("bitsandbytes")
    assert not [record for record in caplog.records if "will be cast" in record.getMessage()]


@full
@needs_bitsandbytes
def test_compute_dtype_of_quantized_layers(folders):
    for dtype, expected in ((None, torch.bfloat16), ("auto", torch.bfloat16), ("float32", torch.float32)):
        settings = draft_from(folders["wide"], quantization="4bit", dtype=dtype)["speculative"]
        layer = load_speculator(tiny_llama(**WIDE).to(torch.bfloat16), settings).resources.model.model.layers[0]
        assert layer.mlp.up_proj.compute_dtype == expected
