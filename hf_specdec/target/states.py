"""Hidden states of a model's forwards, collected at the boundaries of its layers.

A key names a state. A number is a boundary: i is the residual stream that enters decoder layer i, and the number of
layers stands for what enters the final norm. "last" is the output of the final norm, which the head reads.

Shapes: R rows, T tokens of a forward, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..target_facts import decoder_layers, layers_owner


# Their output embeddings are a part of their own, with a transformation in front.
_NOT_PLAIN_HEADS = ("electra", "modernbert-decoder")

# Names of decoders for their final norm.
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "layer_norm")


@contextmanager
def captured_states(
    model: nn.Module, keys: tuple[int | str, ...], joined: bool = False
) -> Iterator[dict[int | str, torch.Tensor]]:
    """Yields the dict that each forward inside of the block puts its states into, see [`StateTaps.captured`]."""
    with StateTaps(model, keys).captured(joined) as states:
        yield states


class StateTaps:
    """Places in a model where the states with these keys are found, for those who capture them repeatedly."""

    def __init__(self, model: nn.Module, keys: tuple[int | str, ...]):
        self.model = model
        self.keys = keys
        self._taps = [(key, module, enters) for key in keys for module, enters in _taps(model, key)]

    @contextmanager
    def captured(self, joined: bool = False) -> Iterator[dict[int | str, torch.Tensor]]:
        """Yields the dict of the last forward's states `(R, T, H)`; if joined, of all forwards when the block ends."""
        states: dict[int | str, torch.Tensor] = {}
        chunks: dict[int | str, list[torch.Tensor]] = {key: [] for key in self.keys}
        with ExitStack() as hooks:
            for key, module, enters in self._taps:
                store = _Store(states, key, chunks)
                if enters:
                    handle = module.register_forward_pre_hook(store.on_entering, with_kwargs=True)
                else:
                    handle = module.register_forward_hook(store.on_leaving)
                hooks.callback(handle.remove)
            if joined and self.keys:
                # A layer may run more than once in a forward, so chunks are collected after it.
                store = _Store(states, self.keys[0], chunks)
                hooks.callback(self.model.register_forward_hook(store.on_end_of_forward).remove)
            yield states
            states |= {key: torch.cat(parts, dim=1) for key, parts in chunks.items() if len(parts) > 1}


class _Store:
    """Hooks that put a state into the dict under its key, in forwards of the thread that has made them."""

    def __init__(self, states: dict[Any, torch.Tensor], key: int | str, chunks: dict[Any, list[torch.Tensor]]):
        self.states = states
        self.key = key
        self.chunks = chunks
        self.thread = get_ident()

    def on_entering(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        # Torch calls it without keyword arguments in another thread, while this one takes it back.
        if get_ident() == self.thread:
            state = kwargs.get("hidden_states")
            self._put(next(filter(torch.is_tensor, (*args, *kwargs.values()))) if state is None else state, module)

    def on_leaving(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if get_ident() == self.thread:
            self._put(output if torch.is_tensor(output) else output[0], module)

    def on_end_of_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if get_ident() == self.thread:
            for key, parts in self.chunks.items():
                parts.append(self.states[key])

    def _put(self, state: torch.Tensor, module: nn.Module) -> None:
        if state.dim() != 3:
            raise UnsupportedModelError(
                f"{type(module).__name__} works on states of the shape {list(state.shape)}, where a drafter reads one "
                "vector for every token. Use a drafter that reads no hidden states, such as spec_method='ngram'."
            )
        self.states[self.key] = state


def _taps(model: nn.Module, key: int | str) -> list[tuple[nn.Module, bool]]:
    """The modules that see a state, and whether it enters or leaves them; the last one to see it counts."""
    if isinstance(key, str):
        return [(_decoder(model), False)]
    layers = decoder_layers(model)
    if not 0 <= key <= len(layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(layers)} decoder layers, so its hidden states can be captured at the "
            f"boundaries 0 to {len(layers)}, and {key} was asked for. Use a drafter that was made for this model."
        )
    if key < len(layers):
        # What enters a layer, not what leaves the one before: some models add to the stream in between.
        return [(layers[key], True)]
    norms = (getattr(layers_owner(model, layers), name, None) for name in _FINAL_NORMS)
    return [(layers[-1], False), *((norm, True) for norm in norms if norm is not None)]


def _decoder(model: nn.Module) -> nn.Module:
    """The module whose output the head reads. Heads must be one matrix after it."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if all(child is not head for child in model.children()) or model.config.model_type in _NOT_PLAIN_HEADS:
        raise UnsupportedModelError(
            f"{type(model).__name__} transforms its last hidden state before its output embeddings, and drafters that "
            "read this state are made for models that do not. Use a drafter that reads none, such as "
            "spec_method='ngram'."
        )
    # Some models take themselves or their head for their decoder.
    has_head = any(module is head for module in decoder.modules())
    return layers_owner(model, decoder_layers(model)) if has_head else decoder
