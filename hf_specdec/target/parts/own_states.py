"""Layers that keep their recurrent states elsewhere than in transformers' caches, over the states of a call.

RecurrentGemma's blocks keep the last inputs of their convolution and the state of their linear recurrence as
attributes, and RWKV's model passes a list of tensors through all blocks. xLSTM and MiniMax-01 have caches of their own
classes: the model of the former gives its tensors to the blocks, that of the latter is asked by its linear attention.
During a call all of them work on a [`RecurrentState`]: on that of the slot cache while prompts are read, on a
[`Reading`] of it while drafts are verified. Nothing is kept in the modules.

Shapes: R rows, T tokens, W channels; H heads, K size of keys, V size of values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import Cache

from ...errors import UnsupportedModelError
from ...target_facts import cache_name_among, decoder_layers
from ..cache import SlotCache
from .linear_attention import read_gated_nodes, read_nodes
from .recurrent_state import Reading, RecurrentState


# ------------------------------------------------------------------------------------------------------ RecurrentGemma


def _recurrent_gemma_block(block: Any, state: RecurrentState, *args: Any, **kwargs: Any) -> Any:
    """The block's own code, on a twin of it that has the states of the call."""
    nodes, layer = state.nodes, block.conv_1d
    unit = _twin(block.rg_lru, recurrent_states=state.get_recurrent_state())
    twin = _twin(block, rg_lru=unit, conv1d_state=state.get_conv_state())
    if nodes is None:
        output = type(block).forward(twin, *args, **kwargs)
        state.conv_states[0], state.recurrent_states[0] = twin.conv1d_state, unit.recurrent_states
        return output

    def convolution(inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = layer.weight, layer.bias
        windows = nodes.windows(state.update_conv_state(inputs), weight.shape[-1])
        return (windows * weight).sum(-1) + bias[:, None]

    def scan(hidden_states, recurrent_gate, reset, recurrent_states):
        gate, inputs = (recurrent_gate * ~reset).float(), hidden_states.float()
        states = nodes.walk(recurrent_states, lambda node, before: gate[:, node] * before + inputs[:, node])
        state.update_recurrent_state(torch.stack(states, dim=-1))
        return torch.stack(states, dim=1).to(hidden_states.dtype), recurrent_states

    vars(unit)["_rnn_scan"], vars(twin)["conv_1d"] = scan, convolution
    return type(block).forward(twin, *args, **kwargs)


def _twin(module: nn.Module, **changes: Any) -> Any:
    """A module with the same parts and weights, and attributes of its own."""
    twin = object.__new__(type(module))
    vars(twin).update({**vars(module), **changes})
    return twin


# ---------------------------------------------------------------------------------------------------------------- RWKV


def _rwkv_block(block: nn.Module, own: RecurrentState, *args: Any, **kwargs: Any) -> Any:
    """The block's own code around time mixing and channel mixing (arXiv 2305.13048) on the states of the call."""

    def time_mixing(hidden: torch.Tensor, state: Any = None, use_cache: bool = True) -> tuple[torch.Tensor, Any]:
        return _time_mixing(block.attention, own, hidden), state

    def channel_mixing(hidden: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        return _channel_mixing(block.feed_forward, own, hidden), state

    return type(block).forward(_twin(block, attention=time_mixing, feed_forward=channel_mixing), *args, **kwargs)


def state_tensors(model: Any, rows: list[dict[int, RecurrentState]]) -> list[torch.Tensor]:
    """The states of some rows as RWKV's model returns them: five tensors of shape `(R, W, layers)`."""
    layers = [[row[number] for row in rows] for number in sorted(rows[0])]
    attended, mixed = (
        [torch.cat([row.conv_states[part][..., 0] for row in layer]) for layer in layers] for part in (0, 1)
    )
    averages = [torch.cat([row.recurrent_states[0] for row in layer]) for layer in layers]
    return [torch.stack(mixed, -1), torch.stack(attended, -1), *torch.stack(averages, -1).unbind(2)]


def _time_mixing(module: Any, state: RecurrentState, hidden: torch.Tensor) -> torch.Tensor:
    shifted = _shifted(state, hidden, 0)
    key = module.key(torch.lerp(shifted, hidden, module.time_mix_key))
    value = module.value(torch.lerp(shifted, hidden, module.time_mix_value))
    receptance = module.receptance(torch.lerp(shifted, hidden, module.time_mix_receptance))
    return module.output(torch.sigmoid(receptance) * _weighted_values(module, state, key, value))


def _channel_mixing(module: Any, state: RecurrentState, hidden: torch.Tensor) -> torch.Tensor:
    shifted = _shifted(state, hidden, 1)
    key = module.key(torch.lerp(shifted, hidden, module.time_mix_key))
    receptance = module.receptance(torch.lerp(shifted, hidden, module.time_mix_receptance))
    return torch.sigmoid(receptance) * module.value(torch.square(torch.relu(key)))


def _shifted(state: RecurrentState, hidden: torch.Tensor, part: int) -> torch.Tensor:
    """The input `(R, T, W)` in front of each one, zeros in front of the first of a text."""
    inputs = hidden.mT
    seen = F.pad(state.update_conv_state(inputs, state_idx=part, conv_kernel_size=1), (1, 0))
    if state.nodes is None or state.nodes.is_chain:
        return seen[..., -inputs.shape[-1] - 1 : -1].mT
    return state.nodes.windows(seen, 2)[..., 0].mT


def _weighted_values(module: Any, state: RecurrentState, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The mean `(R, T, W)` of all values so far, weighted by their keys and by their age.

    The state `(R, W, 3)` has its numerator and denominator, both over the exponential of the third.
    """
    start = state.get_recurrent_state()
    if start is None:
        zeros = torch.zeros_like(key[:, 0], dtype=torch.float32)
        start = torch.stack([zeros, zeros, zeros - 1e30], dim=-1)
    if state.nodes is None:
        attention = vars(sys.modules[type(module).__module__])["rwkv_linear_attention"]
        parts = list(start.unbind(-1))
        output, parts = attention(module.time_decay, module.time_first, key, value, state=parts, return_state=True)
        state.update_recurrent_state(torch.stack(parts, dim=-1))
        return output
    decay, keys, values, before = -torch.exp(module.time_decay), key.float(), value.float(), []

    def step(node: int, parent: torch.Tensor) -> torch.Tensor:
        before.append(parent)
        return _added(*parent.unbind(-1), decay, keys[:, node], values[:, node])

    states = state.nodes.walk(start, step)
    state.update_recurrent_state(torch.stack(states, dim=-1))
    parents = torch.stack(before, dim=1).unbind(-1)
    # The newest key has a weight of its own.
    numerator, denominator, _ = _added(*parents, 0.0, keys + module.time_first, values).unbind(-1)
    return (numerator / denominator).to(key.dtype)


def _added(numerator, denominator, exponent, decay, key, value) -> torch.Tensor:
    """The state with one value more; its exponent is the largest, so that nothing overflows."""
    largest = torch.maximum(exponent + decay, key)
    old, new = torch.exp(exponent + decay - largest), torch.exp(key - largest)
    return torch.stack([old * numerator + new * value, old * denominator + new, largest], dim=-1)


# --------------------------------------------------------------------------------------------------------------- xLSTM


class StatesOfBlocks:
    """Stands for xLSTM's cache over the slots of a call: its blocks are given itself, and nothing is written to it."""

    # Nothing is cut off a prompt for what it might hold.
    is_linear = ()

    def __init__(self, slots: SlotCache):
        self.slots = slots
        self.seqlen_offset = 0

    @property
    def rnn_state(self) -> StatesOfBlocks:
        return self

    def __getitem__(self, number: int) -> StatesOfBlocks:
        return self

    def __len__(self) -> int:
        # The model copies as many tensors as there are from what a block returns.
        return 0


def _xlstm_block(block: Any, own: RecurrentState, x: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
    """The block's own code, on a memory `(R, H, K, V + 1)`, with its normaliser in the last column, and a maximum."""
    memory, largest = own.get_recurrent_state(state_idx=0), own.get_recurrent_state(state_idx=1)
    if own.nodes is None:
        start = None if memory is None else (memory[..., :-1], memory[..., -1], largest)
        x, (values, keys, largest) = type(block).forward(block, x, start)
        # As the model's cache, in the dtype of its states.
        own.update_recurrent_state(torch.cat([values, keys[..., None]], dim=-1).to(x.dtype), state_idx=0)
        own.update_recurrent_state(largest.to(x.dtype), state_idx=1)
        own.num_read += x.shape[1]
        return x, state
    visible, layer = own.nodes.on(x.device), block.mlstm_layer

    def backend(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        # The package xlstm has other names for them.
        query, key, value, gate, forget = (part.float() for part in (*args, *kwargs.values())[:5])
        means, memories, maxima = read_gated_nodes(
            query * query.shape[-1] ** -0.5,
            key,
            value,
            gate,
            F.logsigmoid(forget),
            memory.float(),
            largest.float(),
            visible,
            layer.mlstm_backend.config.eps,
        )
        own.update_recurrent_state(memories, state_idx=0)
        own.update_recurrent_state(maxima[:, :, None], state_idx=1)
        return means.to(x.dtype), None

    twin = _twin(block, mlstm_layer=_twin(layer, mlstm_backend=backend))
    return type(block).forward(twin, x)[0], state


def _xlstm_cache(model: Any, rows: list[dict[int, RecurrentState]]) -> Any:
    """The states of some rows in a cache of the model's own class."""
    weight = model.get_input_embeddings().weight
    cache = _cache_class(model)(model.config, len(rows), dtype=weight.dtype, device=weight.device)
    for number in rows[0]:
        memory, largest = (torch.cat([row[number].recurrent_states[part] for row in rows]) for part in (0, 1))
        cache.rnn_state[number] = memory[..., :-1].contiguous(), memory[..., -1].contiguous(), largest
    return cache


# ---------------------------------------------------------------------------------------------------------- MiniMax-01


class _LinearCache:
    """Stands for the model's cache before the code of a linear attention."""

    def __init__(self, own: RecurrentState):
        self.own = own

    def get_linear_cache(self, number: int) -> torch.Tensor | None:
        return self.own.get_recurrent_state()

    def set_linear_cache(self, number: int, state: torch.Tensor) -> None:
        self.own.update_recurrent_state(state)


def _lightning_attention(
    module: Any, own: RecurrentState, hidden_states: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, Any]:
    """The module's own code, and for several nodes its linear attention (arXiv 2501.08313) with a constant decay."""
    if own.nodes is None:
        cache_name = cache_name_among(kwargs)
        return type(module).forward(module, hidden_states, **{**kwargs, cache_name: _LinearCache(own)})
    inputs = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (module.num_attention_heads, -1))
    query, key, value = (part.transpose(1, 2).float() for part in inputs.chunk(3, dim=-1))
    decay = -module.slope_rate.float().expand(len(query), -1, query.shape[2], -1)
    start = own.get_recurrent_state().float()
    output, states = read_nodes(query, key, value, decay, start, own.nodes.on(query.device))
    own.update_recurrent_state(states)
    output = module.norm(output.transpose(1, 2).flatten(2).to(hidden_states.dtype))
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * output), None


def _minimax_slots(model: Any, slots: SlotCache) -> SlotCache:
    """The slots, which the model takes as they are of its own class too."""
    twin = object.__new__(_slots_as(_cache_class(model)))
    # What is written to one of them is in both.
    twin.__dict__ = slots.__dict__
    return twin


def _minimax_cache(model: Any, rows: list[dict[int, RecurrentState]]) -> Any:
    """The states of some rows in a cache of the model's own class."""
    cache = _cache_class(model)()
    for number in rows[0]:
        cache.set_linear_cache(number, torch.cat([row[number].recurrent_states[0] for row in rows]))
    return cache


@lru_cache(maxsize=4)
def _slots_as(cache_class: type) -> type:
    return type(f"SlotsAs{cache_class.__name__}", (SlotCache, cache_class), {"__len__": Cache.__len__})


def _cache_class(model: Any) -> Any:
    """The class of cache that the code of a model's type has."""
    names = vars(sys.modules[type(model).__module__])
    return next(names[name] for name in ("xLSTMCache", "MiniMaxCache") if name in names)


# ----------------------------------------------------------------------------------------------------- in their places


class _Own(NamedTuple):
    """A class of layers that keep their states elsewhere.

    Attributes:
        run (`Callable`): Its code, on a layer and the state of the call.
        parts (`tuple[str, ...]`): Names of parts that are not called as modules.
        returned (`Callable`, *optional*): What plain generation returns for a cache, of a model and the states of all
            rows; `None` for one of transformers' caches.
        passed (`Callable`, *optional*): What the model takes for a cache, where that cannot be the slots themselves.
    """

    run: Callable[..., Any]
    parts: tuple[str, ...]
    returned: Callable[..., Any] | None = None
    passed: Callable[[nn.Module, SlotCache], Any] | None = None


# By the names of classes.
_OWN = {
    "RecurrentGemmaRecurrentBlock": _Own(_recurrent_gemma_block, ("rg_lru", "conv_1d")),
    "RwkvBlock": _Own(_rwkv_block, ("attention", "feed_forward"), state_tensors),
    "xLSTMBlock": _Own(_xlstm_block, ("mlstm_layer",), _xlstm_cache, lambda model, slots: StatesOfBlocks(slots)),
    "MiniMaxLightningAttention": _Own(_lightning_attention, (), _minimax_cache, _minimax_slots),
}


def keeps_own_state(module: nn.Module) -> bool:
    """Tells a layer that keeps its recurrent state elsewhere than in a cache."""
    return type(module).__name__ in _OWN


def own_layers(model: nn.Module) -> dict[nn.Module, int]:
    """Such layers of a model, with their numbers."""
    if not any(map(keeps_own_state, model.modules())):
        return {}
    layers = enumerate(decoder_layers(model))
    return {module: number for number, layer in layers for module in layer.modules() if keeps_own_state(module)}


def passed_cache(model: nn.Module, slots: SlotCache) -> Any:
    """Slots as the forward of a model with a recurrent state takes them."""
    own = _own_of(model)
    return slots if own is None or own.passed is None else own.passed(model, slots)


def returned_cache(model: nn.Module, rows: list[dict[int, RecurrentState]]) -> Any:
    """What plain generation returns, with the states of all rows; `None` where that is one of transformers' caches."""
    own = _own_of(model)
    return None if own is None or own.returned is None else own.returned(model, rows)


def _own_of(model: nn.Module) -> _Own | None:
    return next((_OWN[type(layer).__name__] for layer in own_layers(model)), None)


def check_own_layer(module: nn.Module) -> None:
    """
    Raises:
        UnsupportedModelError: Such a layer, or a part of it with weights, has a forward that knows of no state.
    """
    parts = [module, *(getattr(module, name) for name in _OWN[type(module).__name__].parts)]
    if not all(isinstance(vars(part).get("forward"), (OverStates, type(None))) for part in parts):
        raise UnsupportedModelError(
            f"A part of {type(module).__name__} has got a forward of its own, as offloading gives it, which cannot be "
            "told the recurrent state of the call. Load the model without offloading, or leave the speculative "
            "arguments out to use plain generate()."
        )


class OverStates:
    """Takes the place of such a layer's forward.

    Args:
        module (`nn.Module`): The layer.
        number (`int`): The one of its state in a cache.
    """

    def __init__(self, module: nn.Module, number: int):
        self.module = module
        self.number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kinds = Reading, SlotCache, StatesOfBlocks
        holders = (value for value in (*args, *kwargs.values()) if isinstance(value, kinds))
        holder = next(holders, None)
        if holder is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        holder = holder.slots if isinstance(holder, StatesOfBlocks) else holder
        state = holder.prefilled_state(self.number) if isinstance(holder, SlotCache) else holder
        return _OWN[type(self.module).__name__].run(self.module, state, *args, **kwargs)
