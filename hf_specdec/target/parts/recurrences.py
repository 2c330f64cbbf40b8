"""Recurrences in closed form over the nodes of a verification, in the place of transformers' functions.

transformers' mixers call functions of their modules that read a text from its beginning to its end, in chunks of 64 to
256 tokens to which they pad what there is, and return the state at its end. The functions here, which have the same
arguments, read a handful of nodes of which each continues its parent, chains or trees, and return what the state after
any of them follows from. A mixer is run with the same code and these functions. Most are linear attention with decays:

    state_i = decay_i * state_parent(i) + key_i x written_i,    output_i = query_i . state_i

of which the gated delta rule (arXiv 2412.06464) writes beta * (value - what the state says of the key), with a decay
for each channel in Kimi's form (arXiv 2510.26692), and Mamba-2 (arXiv 2405.21060) the value itself. Products of decays
along a way through the tree are differences of their sums from the root on, so that a matrix of who descends from whom
takes the place of causality.

Shapes: R rows, H heads, H' heads that divide H, G groups of heads, T nodes, K size of keys, V size of values, N states
of a channel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import CellType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

from ...threads import Lock, OwnForwards
from ..forward import running
from .recurrent_state import Reading


def _reading() -> Reading:
    """What the mixer that runs in this thread reads."""
    forward = running.get()
    assert forward is not None, "mixers have these functions in forwards of the loop alone"
    return forward.reading


@dataclass
class DecayedSums:
    """Values from which the states after all nodes follow, without these states."""

    start: torch.Tensor  # the state in front of the nodes, (R, H, K, V)
    keys: torch.Tensor  # what each node adds, (R, H, T, K) and (R, H, T, V)
    written: torch.Tensor
    decays: torch.Tensor  # logarithms, summed up from the root on, (R, H, T, 1 | K)
    visible: torch.BoolTensor  # of `Nodes`, (1 | R, 1, T, T)
    has_values_first: bool = False  # the model keeps states as (R, H, V, K)

    def to(self, *args: Any) -> DecayedSums:
        """Itself: what a mixer does with the state after its last token."""
        return self

    def after(self, last: torch.LongTensor) -> torch.Tensor:
        """The states `(R, ...)` after node `last` `(R,)` of each row and its ancestors."""
        last = last.to(self.keys.device, non_blocking=True)
        rows = torch.arange(len(last), device=last.device)
        decay = self.decays[rows, :, last][:, :, None]
        kept = self.visible.expand(len(last), -1, -1, -1)[rows, :, last]
        weights = (decay - self.decays).masked_fill(~kept[..., None], float("-inf")).exp()
        state = self.start * decay.exp().mT + (self.keys * weights).mT @ self.written
        return state.mT if self.has_values_first else state


def read_nodes(
    query: torch.Tensor,  # (R, H, T, K) as the key, float32 like all others
    key: torch.Tensor,
    value: torch.Tensor,  # what is written, or by the delta rule aimed at, (R, H, T, V)
    decay: torch.Tensor,  # logarithms, (R, H, T, 1 | K)
    start: torch.Tensor,  # the state in front of the nodes, (R, H, K, V)
    visible: torch.BoolTensor,  # of `Nodes`, (1 | R, 1, T, T)
    beta: torch.Tensor | None = None,  # rates of the delta rule, (R, H, T, 1); without them the values are written
) -> tuple[torch.Tensor, DecayedSums]:
    """Outputs `(R, H, T, V)` of all nodes, each by the state in front of them and its ancestors, and their states."""
    total = visible.to(decay.dtype) @ decay
    # The decay on the way from node j to node i, which has to be an ancestor: nothing may overflow elsewhere.
    between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(~visible[..., None], float("-inf")).exp()
    by_channel = between.shape[-1] > 1

    def scores(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if by_channel:
            return (left[..., :, None, :] * right[..., None, :, :] * between).sum(-1)
        return left @ right.mT * between[..., 0]

    from_start = total.exp()
    if beta is not None:
        rated = key * beta
        # What a node writes depends on what its ancestors have written; parents come first.
        value = torch.linalg.solve_triangular(
            scores(rated, key), value * beta - (rated * from_start) @ start, upper=False, unitriangular=True
        )
    output = (query * from_start) @ start + scores(query, key) @ value
    return output, DecayedSums(start, key, value, total, visible)


def delta_rule(
    query: torch.Tensor,  # (R, T, H', K), as the key
    key: torch.Tensor,
    value: torch.Tensor,  # (R, T, H, V)
    g: torch.Tensor,  # logarithms of the decays, (R, T, H) or (R, T, H, K)
    beta: torch.Tensor,  # (R, T, H)
    initial_state: torch.Tensor | None = None,  # (R, H, K, V)
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, DecayedSums]:
    """The gated delta rule."""
    query, key, g, beta = (part.float().transpose(1, 2) for part in (query, key, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    values = value.float().transpose(1, 2)
    if query.shape[1] != values.shape[1]:
        query, key = (part.repeat_interleave(values.shape[1] // query.shape[1], dim=1) for part in (query, key))
    output, states = read_nodes(
        query * query.shape[-1] ** -0.5,
        key,
        values,
        g[..., None] if g.dim() == 3 else g,
        initial_state.float(),
        _reading().nodes.on(query.device),
        beta[..., None],
    )
    return output.transpose(1, 2).to(value.dtype).contiguous(), states


def mamba2_scan(
    hidden_states: torch.Tensor,  # (R, T, H, V)
    dt: torch.Tensor,  # (R, T, H)
    A: torch.Tensor,  # (H,)
    B: torch.Tensor,  # (R, T, G, K), as C
    C: torch.Tensor,
    chunk_size: int = 0,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,  # (R, H, V, K)
    dt_softplus: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, DecayedSums]:
    """Mamba-2's state space. Limits on time steps are left out, as they are where one token is read."""
    dt = _time_steps(dt, dt_bias, dt_softplus)
    step = dt.float().transpose(1, 2)[..., None]
    inputs = hidden_states.float().transpose(1, 2)
    heads = inputs.shape[1] // B.shape[2]
    key, query = (part.float().transpose(1, 2).repeat_interleave(heads, dim=1) for part in (B, C))
    decay, visible = step * A.float()[:, None, None], _reading().nodes.on(key.device)
    output, states = read_nodes(query, key, inputs * step, decay, initial_states.float().mT, visible)
    states.has_values_first = True
    if D is not None:
        output = output + inputs * D[:, None, None]
    return output.transpose(1, 2).contiguous(), states


def _time_steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def mamba_scan(
    hidden_states: torch.Tensor,  # (R, channels, T), as dt and z
    dt: torch.Tensor,
    A: torch.Tensor,  # (channels, N)
    B: torch.Tensor,  # (R, N, T), as C
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba-1's selective scan, from the state of the cache; with the states of all nodes, `(R, channels, N, T)`."""
    reading = _reading()
    dt = _time_steps(dt, None if delta_bias is None else delta_bias[..., None], delta_softplus)
    inputs, dt = hidden_states.float(), dt.float()
    start = reading.recurrent_states[0].float()
    if start.dim() == 4:
        # Some mixers are made of several, of which each scans by itself.
        start = start[:, reading.num_scans]
    reading.num_scans += 1
    # Nodes come first: one after the other continues its parent.
    steps, written = dt.movedim(-1, 0)[..., None], (dt * inputs).movedim(-1, 0)[..., None]
    decays, written = (steps * A.float()).exp(), written * B.float().movedim(-1, 0)[:, :, None]
    states = reading.nodes.walk(start, lambda node, before: torch.addcmul(written[node], decays[node], before))
    # Nodes are outside of channels, so that whole states are copied and multiplied.
    kept = torch.stack(states, dim=1)
    output = (kept @ C.float().mT[..., None])[..., 0].mT
    if D is not None:
        output = output + inputs * D[:, None]
    if z is not None:
        output = output * F.silu(z)
    return output, kept.movedim(1, -1)


def convolution(
    hidden_states: torch.Tensor,  # the inputs of the nodes after earlier ones, (R, channels, past + T)
    weight: torch.Tensor,  # (channels, size)
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """A causal convolution of each channel, `(R, channels, T)`."""
    nodes, size = _reading().nodes, weight.shape[-1]
    inputs = hidden_states.to(weight.dtype)
    if nodes.is_chain:
        output = F.conv1d(inputs[..., -(nodes.count + size - 1) :], weight[:, None], bias, groups=len(weight))
    else:
        output = (nodes.windows(inputs, size) * weight[:, None]).sum(-1)
        output = output if bias is None else output + bias[:, None]
    return (output if activation is None else ACT2FN[activation](output)).to(hidden_states.dtype)


# By the names of the functions whose places they take.
_CONVOLUTIONS: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": convolution}
_SCANS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba_selective_scan": mamba_scan,
}

_of_models: WeakKeyDictionary[nn.Module, OwnForwards] = WeakKeyDictionary()
_of_models_lock = Lock()


def reads_nodes(module: nn.Module, has_inputs: bool, has_state: bool) -> bool:
    """Tells a mixer that can read all nodes at once; it keeps inputs of convolutions, a recurrent state, or both."""
    # A forward of the module's own may be anything, unless another call has put it there.
    replaced, forward = vars(module).get("forward"), inspect.unwrap(type(module).forward)
    is_own = replaced is not None and getattr(replaced, "func", None) is not _over_nodes
    if is_own or not isinstance(forward, FunctionType):
        return False
    names = {name for name in forward.__code__.co_names if name in forward.__globals__}
    return not (has_inputs and names.isdisjoint(_CONVOLUTIONS)) and not (has_state and names.isdisjoint(_SCANS))


def over_nodes(model: nn.Module, mixers: list[nn.Module]) -> OwnForwards:
    """Forwards with which some mixers of a model read the nodes of verifications; all other calls get the class's."""
    with _of_models_lock:
        forwards = _of_models.get(model)
        # The user may have put others in their places.
        if forwards is None or [mixer for mixer, _, _ in forwards.places] != mixers:
            forwards = _of_models[model] = OwnForwards((mixer, partial(_over_nodes, mixer)) for mixer in mixers)
        return forwards


def _over_nodes(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of a mixer's forward."""
    of_class, forward = type(module).forward, running.get()
    reading = None if forward is None else forward.readings.get(module.layer_idx)
    if forward is None or not isinstance(reading, Reading):
        return of_class(module, *args, **kwargs)
    forward.reading = reading
    return _with_functions_here(of_class)(module, *args, **kwargs)


@lru_cache(maxsize=256)
def _with_functions_here(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward in whose code the functions here have the places of those of the same names, and its wrappers."""
    inner = getattr(forward, "__wrapped__", None)
    scope, cells = forward.__globals__, forward.__closure__
    if inner is None:
        scope = {**scope, **_CONVOLUTIONS, **_SCANS}
    else:
        changed = _with_functions_here(inner)
        replaced = [CellType(changed) if cell.cell_contents is inner else cell for cell in cells or ()]
        if all(cell.cell_contents is not changed for cell in replaced):
            return changed
        cells = tuple(replaced)
    copied = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, cells)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied
