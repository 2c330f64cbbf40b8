"""Rotary embeddings whose frequencies change with the length of the text.

Such an embedding takes its frequencies from the last position that a forward reads: "longrope" has others above
`original_max_position_embeddings`, "dynamic" others for every length above `max_position_embeddings`. Plain generation
reads one token at a time, all rows together, so each token has the frequencies of the length that the longest row has
then. Here drafts end in front of the place where frequencies change, above that of "dynamic" nothing is drafted, and
rows advance by the same number of tokens: so one length goes for all nodes of a forward.

Phi-3 and its kin drop their cache when the text fills `original_max_position_embeddings` slots, and read all of it
with the frequencies of long texts. So does the target, in front of the cycle that follows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ref

import torch
from torch import nn

from ...errors import UnsupportedModelError
from ...threads import OwnForwards
from ..cache import SlotCache
from ..forward import Part, SlotForward, running, told
from .adapters import RowInputs


if TYPE_CHECKING:
    from ..model import SlotModel

_KINDS = {"dynamic", "longrope"}
_ORIGINAL = "original_max_position_embeddings"


def rotary_changes(model: nn.Module, positions: list[int], max_new_tokens: int) -> set[tuple[str, int]]:
    """Kinds of embeddings that may change in a call whose rows go on at `positions`, and above which lengths."""
    config = model.config.get_text_config(decoder=True)
    # The last token is not read.
    longest, changes = max(positions) + max_new_tokens - 1, set()
    # Of all layers, or one dict for each layer type.
    settings = getattr(config, "rope_parameters", None) or {}
    for parameters in [settings] if "rope_type" in settings else settings.values():
        kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
        if kind == "dynamic" and longest > config.max_position_embeddings:
            changes.add((kind, config.max_position_embeddings))
        if kind == "longrope" and longest > parameters[_ORIGINAL] >= min(positions):
            changes.add((kind, parameters[_ORIGINAL]))
    # Another call may have put its own in the place of the class's.
    forwards = [vars(module).get("forward") for module in _embeddings(model)] if changes else [None]
    if not forwards or any(getattr(forward, "func", _at_length) is not _at_length for forward in forwards if forward):
        problem = (
            "has got a forward of its own, as offloading gives it" if forwards else "is in no module that is known"
        )
        raise UnsupportedModelError(
            f"The rotary embedding of {type(model).__name__} changes its frequencies with the length of the text, and "
            f"{problem}, so that it cannot be told the length. Set `max_new_tokens` so that no row gets to {longest} "
            "tokens, or leave the speculative arguments out to use plain generate()."
        )
    return changes


def check_constant_rotary(model: nn.Module, positions: list[int], max_new_tokens: int) -> None:
    """Refuses texts during which frequencies would change, for calls whose rows do not begin together."""
    if rotary_changes(model, positions, max_new_tokens):
        raise UnsupportedModelError(
            f"The rotary embedding of {type(model).__name__} changes with the length of the longest text that is "
            f"read, and a request may reach {max(positions) + max_new_tokens} tokens, where it does. Set "
            "`max_new_tokens` so that requests stay below, or use generate(), where all rows begin together."
        )


def _embeddings(model: nn.Module) -> list[nn.Module]:
    kinds = ((module, getattr(module, "rope_type", None)) for module in model.modules())
    return [
        module for module, kind in kinds if _KINDS.intersection(kind.values() if isinstance(kind, dict) else [kind])
    ]


class ChangingRotary(Part):
    """The embeddings of a target whose prompts have been read, up to `position` in the longest row."""

    why_eager: ClassVar[str | None] = "its rotary embedding changes with the length of the text"
    why_equal: ClassVar[str | None] = "the target's rotary embedding changes with the length of the longest row"

    def __init__(self, target: SlotModel, position: int, changes: set[tuple[str, int]], is_known: bool):
        """Of a text that is known all of it was given as left-padded tokens, so that it can be read again."""
        self._target, model = ref(target), target.model
        # The longest row may have ended, and there may be padding in front of it.
        self._padding = target.cache.get_seq_length() - position
        self._places = [limit + self._padding for _, limit in changes]  # slots in front of which drafts end
        self.longest_drafted: int | None = min((limit for kind, limit in changes if kind == "dynamic"), default=None)
        if self.longest_drafted is not None:
            self.note: str | None = (
                f"Nothing is drafted above {self.longest_drafted} tokens, where each changes the target's rotary "
                "embedding."
            )
        self._forwards = OwnForwards((module, partial(_at_length, module)) for module in _embeddings(model))
        # Where plain generation reads the whole text again.
        self.read_again_at: int | None = None
        name, code = _ORIGINAL, inspect.unwrap(type(model).prepare_inputs_for_generation).__code__
        if name not in {*code.co_names, *code.co_consts}:
            return
        place: int = getattr(model.config, name)
        if target.cache.get_seq_length() > place:
            return
        if not is_known:
            raise UnsupportedModelError(
                f"{type(model).__name__} reads the whole text again where its rotary embedding changes, at "
                f"{place} tokens, and this call, which may get there, has not given all of it as left-padded tokens. "
                "Do so, or set `max_new_tokens` so that it stays below."
            )
        self.read_again_at = place
        self._places.append(place)

    @contextmanager
    def reading(self, nodes: SlotForward) -> Iterator[None]:
        if not (lengths := self._target().cache.lengths):
            # Plain generation's own forward.
            yield
            return
        nodes.text_length = max(lengths) - self._padding + 1
        with told(nodes), self._forwards.in_place():
            yield

    def depths(self, depths: list[int], more: int) -> list[int]:
        length = max(self._target().cache.lengths)
        # Below 0 where rows may have come to the place by then.
        rooms = [place - 1 - length - more for place in self._places if length < place]
        if self.longest_drafted is not None and length >= self.longest_drafted + self._padding:
            rooms.append(0)
        return [min([depth, *rooms]) for depth in depths]

    def prepare(self, prefix: Callable[[int, list[int]], torch.LongTensor]) -> int:
        target, place = self._target(), self.read_again_at
        if max(target.cache.lengths) != place:
            return 0
        num_rows = len(target.cache.lengths)
        again = copy(target)
        again.cache = again.forward_cache = SlotCache(place)
        again.parts = [part for part in target.parts if isinstance(part, (RowInputs, ChangingRotary))]
        again.prefill(prefix(place, list(range(num_rows))), target.starts)
        for layer, layer_again in zip(target.cache.layers, again.cache.layers):
            for buffer, states in zip(layer.buffers, layer_again.buffers):
                buffer[:num_rows, :, :place] = states[:, :, :place]
        return 1


def _at_length(module: nn.Module, x: torch.Tensor, position_ids: torch.LongTensor, *args: Any, **kwargs: Any) -> Any:
    """Forward of an embedding, with the frequencies of the length that it is told."""
    of_class, forward = type(module).forward, running.get()
    if forward is None or forward.text_length is None:
        return of_class(module, x, position_ids, *args, **kwargs)
    of_class(module, x, torch.tensor([[forward.text_length - 1]], device=x.device), *args, **kwargs)
    # Without its wrapper, which looks at the positions, they stay.
    return inspect.unwrap(of_class)(module, x, position_ids, *args, **kwargs)
