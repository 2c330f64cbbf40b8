"""The encoder's side of a call: read once, seen by the decoder in every forward.

Rows that join a call may have longer or shorter sources. Those are padded on the right, to the longest of the rows
that are there, and the model's own mask hides the padding.

Shapes: B rows, N tokens or frames of the source, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.utils import ModelOutput

from ...errors import SpecConfigError
from ...transfers import select_rows
from ..cache import SlotCache


@dataclass
class Source:
    """Sources of the rows of a call, as a model's decoder sees them.

    Attributes:
        inputs (`dict`): Arguments of every forward of the model: the encoder's output `(B, N, H)` and its mask.
        keys (`EncoderDecoderCache`, *optional*): With the keys and values that cross-attention makes of the encoder's
            output, once the prompts have been read.
        given (`dict`): What the encoder has read: its arguments as `generate()` was given them, each `(B, N, ...)`.
        token_lists (`list[list[int]]`, *optional*): Its tokens in each row, where the decoder writes the same ones.
        lengths (`list[int]`): Places of each row's source, of which all have N where nothing has joined.
    """

    inputs: dict[str, Any]
    keys: EncoderDecoderCache | None = None
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    token_lists: list[list[int]] | None = None
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.lengths:
            self.lengths = [self.states.shape[1]] * len(self.states)

    @classmethod
    def of_call(cls, model: torch.nn.Module, model_kwargs: dict[str, Any], given: dict[str, Any]) -> Source:
        """That of a prepared call.

        Args:
            model (`PreTrainedModel`): With an encoder.
            model_kwargs (`dict`): As `generate()` has prepared them, with the encoder's output.
            given (`dict`): What the encoder has read, of fewer rows where there are several sequences of each.
        """
        inputs = {name: model_kwargs[name] for name in ("encoder_outputs", "attention_mask") if name in model_kwargs}
        num_rows = len(inputs["encoder_outputs"][0])
        given = {
            name: value.repeat_interleave(num_rows // len(value), dim=0)
            for name, value in given.items()
            if torch.is_tensor(value)
        }
        tokens = given.get("input_ids")
        return cls(inputs, given=given, token_lists=_token_lists(model, tokens, inputs.get("attention_mask")))

    @property
    def states(self) -> torch.Tensor:
        """The encoder's output `(B, N, H)`, which a decoder without an encoder may take under another name."""
        encoded = self.inputs.get("encoder_outputs")
        return self.inputs["encoder_hidden_states"] if encoded is None else encoded[0]

    def with_slots(self, slots: SlotCache) -> EncoderDecoderCache:
        """The cache of the whole decoder, with self-attention in these slots."""
        if self.keys is None or self.keys.self_attention_cache is not slots:
            crossed = DynamicCache() if self.keys is None else self.keys.cross_attention_cache
            self.keys = EncoderDecoderCache(slots, crossed)
        return self.keys

    def without_keys(self) -> Source:
        """The same without keys and values: what others than the target itself read of it."""
        return replace(self, keys=None)

    def of_rows(self, rows: Sequence[int]) -> Source:
        """The sources of these rows, in this order, as far as the longest of them."""
        lengths = [self.lengths[row] for row in rows]
        num_rows, longest = self.states.shape[:2]
        most = max(lengths)

        def chosen(value: torch.Tensor) -> torch.Tensor:
            value = select_rows(value, rows) if value.dim() and len(value) == num_rows else value
            return value[:, :most] if value.dim() > 1 and value.shape[1] == longest else value

        keys = None
        if self.keys is not None:
            layers = [[select_rows(part, rows)[:, :, :most] for part in layer] for layer in _crossed(self.keys)]
            keys = _with_crossed(self.keys, layers)
        return Source(
            _mapped(chosen, [self.inputs]),
            keys,
            {name: select_rows(value, rows) for name, value in self.given.items()},
            None if self.token_lists is None else [self.token_lists[row] for row in rows],
            lengths,
        )

    @staticmethod
    def check_joining(parts: Sequence[Source]) -> None:
        """Checks that sources can stand beside each other.

        Raises:
            SpecConfigError: They differ in length, and not all have a mask.
        """
        sizes = {part.states.shape[1] for part in parts}
        masked = {part.has_mask for part in parts}
        if len(masked) > 1 or (len(sizes) > 1 and not all(masked)):
            raise SpecConfigError(
                f"Sources of {', '.join(map(str, sorted(sizes)))} places cannot stand beside each other without masks "
                "that tell them from padding. Pass `attention_mask` with every request, sources of one size, or "
                "batch_size=1."
            )

    @property
    def has_mask(self) -> bool:
        """Tells whether the decoder is told where a source ends."""
        encoded = self.inputs.get("encoder_outputs")
        return any(name.endswith("attention_mask") for name in self.inputs) or (
            isinstance(encoded, dict) and "attention_mask" in encoded
        )

    @classmethod
    def joined(cls, parts: Sequence[Source]) -> Source:
        """The sources of several calls of one model, in this order.

        Raises:
            SpecConfigError: They differ in length, and not all have a mask.
        """
        cls.check_joining(parts)
        caches, keys = [part.keys for part in parts if part.keys is not None], None
        if caches:
            layers = [[side_by_side(own) for own in zip(*layer)] for layer in zip(*map(_crossed, caches))]
            keys = _with_crossed(caches[0], layers)
        has_tokens = all(part.token_lists is not None for part in parts)
        return cls(
            _mapped(lambda *values: side_by_side(values), [part.inputs for part in parts]),
            keys,
            {name: side_by_side([part.given[name] for part in parts]) for name in _in_all(parts)},
            [tokens for part in parts for tokens in part.token_lists or ()] if has_tokens else None,
            [length for part in parts for length in part.lengths],
        )


def _in_all(parts: Sequence[Source]) -> list[str]:
    """Names of the arguments that the encoders of all calls have read."""
    return [name for name in parts[0].given if all(name in part.given for part in parts)]


def side_by_side(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of several tensors `(B_i, ...)` in one, with zeros after the shorter ones in every other dimension."""
    shape = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values))]
    if all(list(value.shape[1:]) == shape for value in values):
        return torch.cat(list(values))
    joined = values[0].new_zeros((sum(map(len, values)), *shape))
    first = 0
    for value in values:
        joined[(slice(first, first + len(value)), *map(slice, value.shape[1:]))] = value
        first += len(value)
    return joined


def _crossed(cache: EncoderDecoderCache) -> list[tuple[torch.Tensor, ...]]:
    """Keys and values of cross-attention `(B, heads, N, D)` in each layer; of layers without it none."""
    layers = cache.cross_attention_cache.layers
    return [(layer.keys, layer.values) if layer.is_initialized else () for layer in layers]


def _with_crossed(cache: EncoderDecoderCache, layers: list[list[torch.Tensor]]) -> EncoderDecoderCache:
    crossed = DynamicCache()
    for index, layer in enumerate(layers):
        if layer:
            crossed.update(*layer, index)
    return EncoderDecoderCache(cache.self_attention_cache, crossed)


def _mapped(function: Callable[..., torch.Tensor], values: list[Any]) -> Any:
    """The same structure with what a function makes of the tensors in these places of all values."""
    first = values[0]
    if torch.is_tensor(first):
        return function(*values)
    if isinstance(first, dict):
        parts = {name: _mapped(function, [value[name] for value in values]) for name in first}
        return type(first)(**parts) if isinstance(first, ModelOutput) else parts
    if isinstance(first, (tuple, list)):
        return type(first)(_mapped(function, list(parts)) for parts in zip(*values))
    return first


def _token_lists(
    model: torch.nn.Module, tokens: torch.Tensor | None, mask: torch.Tensor | None
) -> list[list[int]] | None:
    """Each row's tokens without padding; `None` where encoder and decoder do not read the same table of tokens."""
    if tokens is None or not _shares_tokens(model):
        return None
    if mask is None or mask.shape != tokens.shape:
        return tokens.tolist()
    return [row[seen].tolist() for row, seen in zip(tokens, mask.bool())]


def _shares_tokens(model: torch.nn.Module) -> bool:
    """Tells whether encoder and decoder embed tokens by the same weights, which is how they come to agree in them."""
    try:
        tables = [part.get_input_embeddings().weight for part in (model.get_encoder(), model.get_decoder())]
    except (AttributeError, NotImplementedError):
        return False
    return tables[0] is tables[1]
