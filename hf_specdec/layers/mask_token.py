"""The token of masks, the places that a draft network is to fill."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..errors import SpecConfigError
from ..target_facts import num_embeddings


# Spellings of a tokenizer's mask token, if the checkpoint does not name it.
_SPELLINGS = ("<|MASK|>", "<mask>", "[MASK]", "<MASK>")


def tokenizer_of(target_model: nn.Module) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer, where it has one that can be loaded."""
    name = target_model.config.name_or_path
    try:
        return AutoTokenizer.from_pretrained(name) if name else None
    except Exception:  # noqa: BLE001 - a stranger's files may trip anything
        return None


def mask_token_in(tokenizer: PreTrainedTokenizerBase | None, spelling: str | None = None) -> int | None:
    """The id of what a tokenizer has for masks, spelled like this or as usual; `None` where it has nothing."""
    if tokenizer is None:
        return None
    vocabulary = tokenizer.get_vocab()
    spellings = (spelling, *_SPELLINGS)
    return next((vocabulary[s] for s in spellings if s in vocabulary), tokenizer.mask_token_id)


def mask_token_for(target: PreTrainedModel, wanted: int | None = None) -> int:
    """The token of the masks of a new draft: the one wanted, the tokenizer's, or the first id after its tokens.

    Where the embedding has no such row, it is the end-of-sequence token, rarely an anchor and never in between.
    """
    num_tokens = num_embeddings(target.get_input_embeddings())
    if wanted is not None:
        if not 0 <= wanted < num_tokens:
            raise SpecConfigError(
                f"`mask_token_id` must be from 0 to {num_tokens - 1}, the tokens that the target's embedding has, got "
                f"{wanted}."
            )
        return wanted
    tokenizer = tokenizer_of(target)
    token = mask_token_in(tokenizer)
    if token is None and tokenizer is not None:
        token = max(tokenizer.get_vocab().values()) + 1
    if token is None or token >= num_tokens:
        ends = target.generation_config.eos_token_id
        token = ends[0] if isinstance(ends, Sequence) else ends
    return token or 0
