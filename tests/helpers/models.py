"""Tiny models of random weights and prompts for them."""

from __future__ import annotations

import string
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_specdec import Speculator
from tests.helpers.scripted import scripted_speculator


VOCAB_SIZE = 64
LETTERS = string.digits + string.ascii_letters + "_-"

# Weights large enough that the models' choices are clear and their text varies.
TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_llama(seed: int = 0, **settings) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **settings})).eval()
    model.generation_config.pad_token_id = 0
    return model


def tiny_mistral(seed: int = 0, sliding_window: int = 8, **settings) -> MistralForCausalLM:
    """A model of the kind with sliding-window attention in all layers."""
    torch.manual_seed(seed)
    config = MistralConfig(**{**TINY, "sliding_window": sliding_window, **settings})
    model = MistralForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def tiny_gpt2(seed: int = 0, **settings) -> GPT2LMHeadModel:
    """Learned positions, and a forward that takes token types."""
    torch.manual_seed(seed)
    shared = {name: TINY[name] for name in ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, **shared, **settings})).eval()
    model.generation_config.pad_token_id = 0
    return model


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One character for each of the ids 0 to 63; id 0, "0", is the padding."""
    tokenizer = Tokenizer(models.WordLevel({letter: token for token, letter in enumerate(LETTERS)}, unk_token="1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", padding_side="left")


def prompts(batch_size: int, length: int = 7, seed: int = 0, padding: bool = True) -> dict[str, torch.Tensor]:
    """Random prompts of shape `(B, length)`; with `padding` row i has `B - 1 - i` columns of it on the left."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, VOCAB_SIZE, (batch_size, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    if padding:
        for row in range(batch_size):
            attention_mask[row, : batch_size - 1 - row] = 0
        input_ids[attention_mask == 0] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def scripted_for(text: torch.LongTensor, inputs: dict[str, torch.Tensor], k: int = 5, **options) -> Speculator:
    """A scripted speculator that knows `text`, an output of `generate(**inputs)`."""
    starts = (inputs["attention_mask"] == 0).sum(1).tolist()
    return scripted_speculator(text, starts, VOCAB_SIZE, num_speculative_tokens=k, **options)


@contextmanager
def nothing_runs(model):
    """Fails if a forward of the model runs inside."""

    def refuse(*args):
        raise AssertionError("The model ran.")

    hook = model.register_forward_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()
