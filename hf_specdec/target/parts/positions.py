"""Positions that a decoder counts by itself, where its forward takes no position ids.

Such decoders number the tokens of a forward by the slots of their cache. That is wrong for branches, and for rows of
different lengths: while a verification runs, they are told the position of every node in the place of what they count.

- Embeddings of positions (BART, Marian, Pegasus, M2M-100, ...) are asked for the range that the nodes need, by their
  own forward, and every node gets its own out of it.
- A bias by distance (T5, UMT5, LongT5, ...) is looked up with the distances of nodes and slots.

Shapes: R rows, T nodes, S slots, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch

from ...errors import UnsupportedModelError
from ...target_facts import forward_arguments
from ...threads import OwnForwards
from ..forward import Part, SlotForward, running


class PositionCounter(Part):
    """Positions that an embedding counts itself, by transformers' `create_position_ids_from_input_ids`."""

    why_eager: ClassVar[str | None] = "its positions depend on the tokens"

    def __init__(self, embedding: torch.nn.Module):
        self.embedding = embedding

    @classmethod
    def of(cls, model: torch.nn.Module) -> PositionCounter | None:
        """Counter of a model's positions; `None` where it has none."""
        modules = (module for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids"))
        return next(map(cls, modules), None)

    def reading(self, nodes: SlotForward) -> AbstractContextManager[None]:
        """Has each node at the position that its token has when it is read alone after the slots in front of it."""
        if nodes.topology is not None:
            count = self.embedding.create_position_ids_from_input_ids
            tokens, slots = nodes.tokens.reshape(-1, 1), nodes.slots.reshape(-1, 1)
            nodes.positions = count(tokens, self.embedding.padding_idx, slots).view(nodes.tokens.shape)
        return nullcontext()


class CountedPositions(Part):
    """The modules of a decoder that count positions: embeddings of them, and attention with a bias by distance."""

    def __init__(self, embeddings: list[torch.nn.Module], biases: list[torch.nn.Module]):
        self._vectors = OwnForwards([(module, partial(_vectors, module)) for module in embeddings])
        self._biases = OwnForwards([(module, partial(_bias, module)) for module in biases], "compute_bias")

    @classmethod
    def of(cls, model: torch.nn.Module) -> CountedPositions | None:
        """Those of a model; `None` where its decoder has none, or some that are not known."""
        modules = list(model.get_decoder().modules()) if hasattr(model, "get_decoder") else []
        # They take the length of what is in the cache, and embed no tokens.
        embeddings = [
            module
            for module, names in ((module, set(forward_arguments(type(module)))) for module in modules)
            if not names.isdisjoint(_PAST_LENGTHS) and names.isdisjoint({"attention_mask", "token_type_ids"})
        ]
        biases = [
            module
            for module in modules
            if getattr(module, "has_relative_attention_bias", False) and hasattr(module, "compute_bias")
        ]
        # Where others have put a forward of their own (offloading), nothing can be told.
        has_others = any("forward" in vars(module) for module in embeddings)
        return cls(embeddings, biases) if (embeddings or biases) and not has_others else None

    @contextmanager
    def reading(self, nodes: SlotForward) -> Iterator[None]:
        """Inside of the block the decoder's forward, in this thread, places these nodes."""
        if nodes.topology is None:
            yield
            return
        is_as_counted = nodes.topology.is_chain and len(set(nodes.rows.lengths)) == 1
        with self._vectors.in_place(), nullcontext() if is_as_counted else self._biases.in_place():
            if not self._vectors.are_in_place:
                raise UnsupportedModelError(
                    "The embedding of positions has got a forward of its own since the first speculative call, as "
                    "offloading gives it, and cannot be told where drafts stand. Offload the model before that."
                )
            yield


# Names of the argument for the number of tokens in the cache: since transformers 5.24, and before.
_PAST_LENGTHS = ("cache_length", "past_key_values_length")


def _vectors(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of an embedding of positions: vectors `(R, T, H)` of the nodes that it is told, else its own output."""
    of_class, nodes = type(module).forward, running.get()
    if nodes is None:
        return of_class(module, *args, **kwargs)
    arguments = inspect.signature(of_class).bind(module, *args, **kwargs).arguments
    past_length = next(name for name in _PAST_LENGTHS if name in forward_arguments(type(module)))
    # Positions that nodes of as many depths may have, told without waiting for the device.
    firsts = [length + lead for length, lead in zip(nodes.rows.lengths, nodes.rows.leads)]
    first, last = min(firsts), max(firsts) + nodes.tokens.shape[1] - 1
    if (limit := nodes.rows.max_position) is not None:
        first, last = min(first, limit), min(last, limit)
    width, padding = last + 1 - first, getattr(module, "padding_idx", None)
    call: dict[str, Any] = {past_length: first}
    for name, value in list(arguments.items())[1:]:
        # Arguments that say how many positions are wanted, for one row of them.
        if name in ("position_ids", past_length):
            continue
        if name == "input_ids_shape" or not (value is None or torch.is_tensor(value)):
            value = torch.Size((1, width))
        elif value is not None and value.is_floating_point():
            value = value[:1, :1].expand(1, width, *value.shape[2:])
        elif value is not None:
            # No padding, which would have no position.
            value = value.new_full((1, width), 1 + (padding or 0))
        call[name] = value
    table = of_class(module, **call)
    vectors = table.reshape(-1, table.shape[-1])[nodes.positions - first]
    if hasattr(module, "create_position_ids_from_input_ids") and padding is not None:
        # These give padding no position, wherever it stands.
        of_padding = {name: nodes.tokens.new_full((1, 1), padding) for name in call if name == "input_ids"}
        vectors = torch.where((nodes.tokens == padding)[..., None], of_class(module, **of_padding), vectors)
    return vectors


def _bias(module: torch.nn.Module, query_length: int, key_length: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Bias `(R, heads, T, S)` of T5's attention by the distances of nodes, in the place of its `compute_bias`."""
    nodes = running.get()
    if nodes is None:
        return type(module).compute_bias(module, query_length, key_length, *args, **kwargs)
    # Nodes stand where they would as text, in slots that are filled already and in those of the nodes.
    device = nodes.tokens.device
    slots, lengths = torch.arange(key_length, device=device), nodes.rows.lengths_on(device)[:, None]
    node = (slots - lengths).clamp(0, nodes.slots.shape[1] - 1)
    slots = torch.where(slots < lengths, slots, nodes.slots.gather(1, node))
    to_bucket = module._relative_position_bucket
    settings = {
        "bidirectional": False,
        "num_buckets": module.relative_attention_num_buckets,
        "max_distance": module.relative_attention_max_distance,
    }
    # UMT5 asks itself for these.
    settings = {name: value for name, value in settings.items() if name in inspect.signature(to_bucket).parameters}
    buckets = to_bucket(slots[:, None] - nodes.slots[..., None], **settings)
    return module.relative_attention_bias(buckets).permute(0, 3, 1, 2)
