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


# A key, the module that sees its state, and whether the state enters or leaves it; the last one to see it counts.
Tap = tuple[int | str, nn.Module, bool]


@contextmanager
def captured_states(
    model: nn.Module, keys: tuple[int | str, ...], joined: bool = False, taps: list[Tap] | None = None
) -> Iterator[dict[int | str, torch.Tensor]]:
    """Yields the last forward's states `(R, T, H)` in this thread; if joined, of all forwards when the block ends."""
    states: dict[int | str, torch.Tensor] = {}
    chunks: dict[int | str, list[torch.Tensor]] = {key: [] for key in keys}
    thread = get_ident()

    def hook(key: int | str, module: nn.Module, enters: bool) -> Any:
        def see(module: nn.Module, args: tuple[Any, ...], seen: Any = None) -> None:
            # Torch calls it without keyword arguments in another thread, while this one takes it back.
            if get_ident() != thread:
                return
            if enters:
                state = seen.get("hidden_states")
                state = next(filter(torch.is_tensor, (*args, *seen.values()))) if state is None else state
            else:
                state = seen if torch.is_tensor(seen) else seen[0]
            if state.dim() != 3:
                raise UnsupportedModelError(
                    f"{type(module).__name__} works on states of the shape {list(state.shape)}, where a drafter reads "
                    "one vector for every token. Use a drafter that reads no hidden states, such as "
                    "spec_method='ngram'."
                )
            states[key] = state

        # `seen` are its keyword arguments, or its output.
        return module.register_forward_pre_hook(see, with_kwargs=True) if enters else module.register_forward_hook(see)

    def on_end_of_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if get_ident() == thread:
            for key, parts in chunks.items():
                parts.append(states[key])

    with ExitStack() as hooks:
        for tap in state_taps(model, keys) if taps is None else taps:
            hooks.callback(hook(*tap).remove)
        if joined and keys:
            # A layer may run more than once in a forward, so chunks are collected after it.
            hooks.callback(model.register_forward_hook(on_end_of_forward).remove)
        yield states
        states |= {key: torch.cat(parts, dim=1) for key, parts in chunks.items() if len(parts) > 1}


def state_taps(model: nn.Module, keys: tuple[int | str, ...]) -> list[Tap]:
    """Where the states with these keys are found."""
    taps: list[Tap] = []
    for key in keys:
        if isinstance(key, str):
            # The module whose output the head reads. Heads must be one matrix after it.
            decoder, head = model.get_decoder(), model.get_output_embeddings()
            if all(child is not head for child in model.children()) or model.config.model_type in _NOT_PLAIN_HEADS:
                raise UnsupportedModelError(
                    f"{type(model).__name__} transforms its last hidden state before its output embeddings, and "
                    "drafters that read this state are made for models that do not. Use a drafter that reads none, "
                    "such as spec_method='ngram'."
                )
            # Some models take themselves or their head for their decoder.
            has_head = any(module is head for module in decoder.modules())
            decoder = layers_owner(model, decoder_layers(model)) if has_head else decoder
            taps.append((key, decoder, False))
            continue
        layers = decoder_layers(model)
        if not 0 <= key <= len(layers):
            raise UnsupportedModelError(
                f"{type(model).__name__} has {len(layers)} decoder layers, so its hidden states can be captured at "
                f"the boundaries 0 to {len(layers)}, and {key} was asked for. Use a drafter that was made for this "
                "model."
            )
        if key < len(layers):
            # What enters a layer, not what leaves the one before: some models add to the stream in between.
            taps.append((key, layers[key], True))
        else:
            norms = (getattr(layers_owner(model, layers), name, None) for name in _FINAL_NORMS)
            taps += [(key, layers[-1], False), *((key, norm, True) for norm in norms if norm is not None)]
    return taps
