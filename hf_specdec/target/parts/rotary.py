"""Rotary embeddings whose frequencies change with the length of the text, over several tokens of one forward.

Such an embedding ("dynamic", "longrope") takes its frequencies from the last position that a forward reads, and keeps
some of them for the forwards after it. Plain generation reads one token at a time, so each has the frequencies of the
length that the longest row has then. Verifications give every node those, for the length at which plain generation
would read it.

Shapes: R rows, T nodes, A numbers of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ...errors import UnsupportedModelError
from ...threads import OwnForwards
from ..forward import Part, SlotNodes


_KINDS = ("dynamic", "longrope")

# Tokens `(R, T)` of the text in plain generation when it reads the nodes, for the forward that runs in this thread.
_lengths: ContextVar[torch.LongTensor | None] = ContextVar("_lengths", default=None)


def changing_rotary(model: nn.Module, prompt_lengths: list[int], max_new_tokens: int) -> ChangingRotary | None:
    """The rotary embeddings of a target, if a call may change their frequencies; `None` if it cannot.

    Args:
        model (`PreTrainedModel`): The target.
        prompt_lengths (`list[int]`): Positions of each row before generation, padding not counted.
        max_new_tokens (`int`): Positions that generation may add.

    Raises:
        UnsupportedModelError: Its embeddings cannot be told the lengths.
    """
    config = model.config.get_text_config(decoder=True)
    # The last token is not read.
    longest = max(prompt_lengths) + max_new_tokens - 1
    # Of all layers, or one dict for each layer type.
    known = getattr(config, "rope_parameters", None) or {}
    changes, again = False, None
    for parameters in [known] if "rope_type" in known else known.values():
        kind = parameters.get("rope_type") if isinstance(parameters, dict) else None
        if kind not in _KINDS:
            continue
        limit = config.max_position_embeddings
        if kind == "longrope":
            limit = parameters["original_max_position_embeddings"]
        if longest > limit and (kind == "dynamic" or min(prompt_lengths) <= limit):
            changes = True
            again = limit if kind == "longrope" and _reads_again(model) else again
    if not changes:
        return None
    modules = [module for module in model.modules() if _is_changing(module)]
    if not modules:
        raise UnsupportedModelError(
            f"The config of {type(model).__name__} has a rotary embedding whose frequencies change with the length of "
            "the text, and none of its modules is known as one. Set `max_new_tokens` so that no row gets to "
            f"{longest} tokens, or leave the speculative arguments out to use plain generate()."
        )
    # Another call may have put its own in the place of the class's.
    if not all(isinstance(vars(module).get("forward"), (_Embedding, type(None))) for module in modules):
        raise UnsupportedModelError(
            f"The rotary embedding of {type(model).__name__} changes its frequencies with the length of the text, and "
            "has got a forward of its own, as offloading gives it, which cannot be told the lengths. Set "
            f"`max_new_tokens` so that no row gets to {longest} tokens, or leave the speculative arguments out to use "
            "plain generate()."
        )
    return ChangingRotary(modules, prompt_lengths, again)


def check_constant_rotary(model: nn.Module, prompt_lengths: list[int], max_new_tokens: int) -> None:
    """Refuses texts during which frequencies would change, for calls whose rows do not begin together.

    Raises:
        UnsupportedModelError: A row may get past the position where they change; the arguments are those of
            [`changing_rotary`].
    """
    if changing_rotary(model, prompt_lengths, max_new_tokens) is not None:
        raise UnsupportedModelError(
            f"The rotary embedding of {type(model).__name__} changes with the length of the longest text that is "
            f"read, and a request may reach {max(prompt_lengths) + max_new_tokens} tokens, where it does. Set "
            "`max_new_tokens` so that requests stay below, or use generate(), where all rows begin together."
        )


def _reads_again(model: nn.Module) -> bool:
    """Tells models whose generation drops the cache where the frequencies change."""
    code = inspect.unwrap(type(model).prepare_inputs_for_generation).__code__
    return "original_max_position_embeddings" in {*code.co_names, *code.co_consts}


def _is_changing(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    return any(kind in _KINDS for kind in (kinds.values() if isinstance(kinds, dict) else [kinds]))


class ChangingRotary(Part):
    """Rotary embeddings of a target during one call.

    Args:
        modules (`list[nn.Module]`): The embeddings, after the prompts have been read.
        positions (`list[int]`): Position of each row's next token.
        read_again_at (`int`, *optional*): Tokens of a text, padding among them, in front of the one at which plain
            generation reads all of it again.
    """

    why_eager = "its rotary embedding changes with the length of the text"

    def __init__(self, modules: list[nn.Module], positions: list[int], read_again_at: int | None = None):
        self.read_again_at = read_again_at
        # In plain generation all rows go on together, and the longest one says the length.
        self._leads = [max(positions) - position for position in positions]
        self._lengths = [max(positions)] * len(positions)
        self._longest = max(positions)
        self._embeddings = [_Embedding(module) for module in modules]
        self._forwards = OwnForwards((one.module, one) for one in self._embeddings)

    def reading(self, nodes: SlotNodes) -> AbstractContextManager[None]:
        """Gives the nodes, inside the block, the frequencies of their own lengths."""
        if nodes.topology is None:
            return nullcontext()
        return self._reading(nodes.positions + nodes.positions.new_tensor(self._leads)[:, None] + 1)

    def as_of(self, position: int, row: int, shape: torch.Size) -> AbstractContextManager[None]:
        """Gives tokens of a shape `(R, T)`, inside the block, the frequencies of one row's token at a position."""
        return self._reading(torch.full(shape, position + self._leads[row] + 1, device="cpu"))

    @contextmanager
    def _reading(self, lengths: torch.LongTensor) -> Iterator[None]:
        token = _lengths.set(lengths)
        try:
            with self._forwards.in_place():
                yield
        finally:
            _lengths.reset(token)

    def commit(self, counts: list[int], path: torch.LongTensor | None) -> None:
        """Takes note of how many tokens of each row were kept."""
        self._lengths = [length + count for length, count in zip(self._lengths, counts)]
        self._longest = max(self._longest, *self._lengths)

    def keep_rows(self, keep: list[int]) -> None:
        self._leads = [self._leads[row] for row in keep]
        self._lengths = [self._lengths[row] for row in keep]

    def close(self) -> None:
        """Leaves the embeddings as plain generation does: as of the last token that was read."""
        for one in self._embeddings:
            one.move_to(self._longest)


class _Embedding:
    """Takes the place of an embedding's forward."""

    def __init__(self, module: nn.Module):
        self.module = module
        # Frequencies are put in the place of others, which stay as they are, or follow from the length alone.
        self._buffers = dict(module._buffers)
        self._values = {name: value for name, value in vars(module).items() if name.endswith("max_seq_len_cached")}
        self._types = tuple(module.rope_type) if isinstance(module.rope_type, dict) else ()

    def __call__(self, x: torch.Tensor, position_ids: torch.LongTensor, *layer_type: Any, **named: Any) -> Any:
        of_class, lengths = type(self.module).forward, _lengths.get()
        if lengths is None or lengths.shape[-1] != position_ids.shape[-1]:
            return of_class(self.module, x, position_ids, *layer_type, **named)
        angles: tuple[torch.Tensor, ...] = ()
        for length in sorted(set(lengths.flatten().tolist())):
            self._set(x, length, *layer_type, **named)
            # Without the change of the frequencies, which looks at the positions.
            own = inspect.unwrap(of_class)(self.module, x, position_ids, *layer_type, **named)
            here = (lengths == length)[..., None].to(x.device)
            # Positions that all rows share come once.
            angles = tuple(torch.where(here, new, old) for new, old in zip(own, angles or own))
        return angles

    def _set(self, x: torch.Tensor, length: int, *layer_type: Any, **named: Any) -> None:
        """Has the frequencies that plain generation has for a text of this length."""
        self.module._buffers.update(self._buffers)
        for name, value in self._values.items():
            setattr(self.module, name, value)
        type(self.module).forward(self.module, x, torch.tensor([[length - 1]], device=x.device), *layer_type, **named)

    def move_to(self, length: int) -> None:
        buffer = next(buffer for buffer in self._buffers.values() if buffer is not None)
        for layer_type in self._types or (None,):
            self._set(buffer[:1], length, *([] if layer_type is None else [layer_type]))
