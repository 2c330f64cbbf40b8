"""Hidden states of a model's forwards, collected at the boundaries of its layers.

Shapes: R rows, T tokens of a forward, H hidden size.
"""

from __future__ import annotations

from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from ..errors import UnsupportedModelError
from ..target_facts import decoder_layers, layers_owner


@contextmanager
def captured_states(model: torch.nn.Module, keys: tuple, joined: bool = False):
    """Collects hidden states of the forwards inside: yields the dict that each forward puts them into.

    Args:
        model (`PreTrainedModel`): A decoder-only model.
        keys (`tuple`): Which states, each of the shape `(R, T, H)`. A number is a boundary: i is the residual stream
            that enters decoder layer i, and the number of layers stands for what enters the final norm. "last" is the
            output of the decoder after its final norm, which the head reads.
        joined (`bool`): The forwards of the model read one text in chunks; when the block ends, the dict holds the
            states of the whole. Otherwise it holds those of the last forward.

    Raises:
        UnsupportedModelError: The model has no such boundary, or its layers cannot be found.
    """
    with StateTaps(model, keys).captured(joined) as states:
        yield states


class StateTaps:
    """Places in a model where the states of `captured_states` are found, for those who capture them repeatedly."""

    def __init__(self, model: torch.nn.Module, keys: tuple[int | str, ...]):
        self.model = model
        self.keys = keys
        self._taps = [(key, module, enters) for key in keys for module, enters in _taps(model, key)]

    @contextmanager
    def captured(self, joined: bool = False):
        states: dict = {}
        chunks: dict[Any, list] = {key: [] for key in self.keys}
        handles = []
        try:
            for key, module, enters in self._taps:
                store = _Store(states, key)
                if enters:
                    handles.append(module.register_forward_pre_hook(store.on_entering, with_kwargs=True))
                else:
                    handles.append(module.register_forward_hook(store.on_leaving))
            if joined and self.keys:
                handles.append(self.model.register_forward_hook(_Collector(states, chunks)))
            yield states
            states |= {key: torch.cat(parts, dim=1) for key, parts in chunks.items() if len(parts) > 1}
        finally:
            for handle in handles:
                handle.remove()


class _Store:
    """Hooks that put a state into the dict under its key."""

    def __init__(self, states: dict, key):
        self.states, self.key = states, key
        # Another thread may run a call of its own on the same model.
        self.thread = get_ident()

    def on_entering(self, module, args, kwargs=None):
        # Without keyword arguments torch calls it in another thread, while this one takes it back.
        if get_ident() != self.thread:
            return
        state = kwargs.get("hidden_states")
        self._put(next(filter(torch.is_tensor, (*args, *kwargs.values()))) if state is None else state, module)

    def on_leaving(self, module, args, output):
        self._put(output if torch.is_tensor(output) else output[0], module)

    def _put(self, state: torch.Tensor, module: torch.nn.Module) -> None:
        if get_ident() != self.thread:
            return
        if state.dim() != 3:
            raise UnsupportedModelError(
                f"{type(module).__name__} works on states of the shape {list(state.shape)}, where a drafter reads one "
                "vector for every token. Use a drafter that reads no hidden states, such as spec_method='ngram'."
            )
        self.states[self.key] = state


class _Collector:
    """Hook after a forward of the whole model, in which a layer may have run more than once."""

    def __init__(self, states: dict, chunks: dict):
        self.states, self.chunks, self.thread = states, chunks, get_ident()

    def __call__(self, module, args, output):
        if get_ident() == self.thread:
            for key, parts in self.chunks.items():
                parts.append(self.states[key])


def _taps(model: torch.nn.Module, key) -> list[tuple[torch.nn.Module, bool]]:
    """The modules that see a state, and whether it enters or leaves them; the last one to see it counts."""
    if key == "last":
        _check_head(model)
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


def _check_head(model: torch.nn.Module) -> None:
    """Refuses heads that are more than one matrix after the decoder: what they read is not the decoder's output."""
    head = model.get_output_embeddings()
    is_plain = any(child is head for child in model.children()) and model.config.model_type not in _NOT_PLAIN_HEADS
    if not is_plain:
        raise UnsupportedModelError(
            f"{type(model).__name__} transforms its last hidden state before its output embeddings, and drafters that "
            "read this state are made for models that do not. Use a drafter that reads none, such as "
            "spec_method='ngram'."
        )


def _decoder(model: torch.nn.Module) -> torch.nn.Module:
    """The module whose output the head reads."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    # Some models take themselves or their head for it.
    has_head = any(module is head for module in decoder.modules())
    return layers_owner(model, decoder_layers(model)) if has_head else decoder


# Their output embeddings are a part of their own, with a transformation in front.
_NOT_PLAIN_HEADS = ("electra", "modernbert-decoder")

# Names of decoders for their final norm.
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f", "layer_norm")
