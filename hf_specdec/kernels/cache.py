"""Writing new slots of a key/value cache, and moving the accepted ones to the front.

    write:   buffer[b, :, start_b + t] = states[b, :, t]
    move:    buffer[b, :, start_b + m] = buffer[b, :, start_b + path[b, m]]

Keys and values of a layer are written by one launch; one launch moves those of all layers of equal shape.

Shapes: B allocated rows, R active ones in front, H heads, C slots, D head size, T new slots, M nodes of a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..transfers import RowNumbers, kept_on_device, upload
from ._triton import tl, triton, use_triton


@dataclass
class WritePlan:
    """Slots that the next forward writes, the same for all layers."""

    columns: int  # slots that attention reads: the longest row with its new nodes
    offset: int | None  # first slot, when it is the same for all rows, up to `columns`
    firsts: RowNumbers | None = None  # (R,): first slot of each row; `None` in a prefill
    nodes: int = 0  # T, where `firsts` are given
    layers: Sequence[Any] = ()  # those of the cache, with room for the slots, once all of them have buffers
    # `firsts` on devices, as far as they have been asked for.
    device_starts: dict[torch.device, torch.LongTensor] = field(default_factory=dict)
    _flat_indices: dict = field(default_factory=dict)

    def starts(self, device: torch.device) -> torch.LongTensor:
        """First slot of each row on `device`, `(R,)`."""
        if device not in self.device_starts:
            self.device_starts[device] = upload(self.firsts, device)
        return self.device_starts[device]

    def flat_index(self, heads: int, capacity: int, device: torch.device) -> torch.LongTensor:
        """Index of every (row, head, node) in a buffer `(B, H, C, D)` on `device`, seen as `(B * H * C, D)`."""
        key = (heads, capacity, device)
        if key not in self._flat_indices:
            slots = self.starts(device)[:, None] + torch.arange(self.nodes, device=device)
            self._flat_indices[key] = flat_slots(slots, heads, capacity)
        return self._flat_indices[key]


def flat_slots(slots: torch.LongTensor, heads: int, capacity: int) -> torch.LongTensor:
    """Slots `(R, M)` of every head as indices `(R * H * M,)` into a buffer `(B, H, C, D)` seen as `(B * H * C, D)`."""
    rows = slots.shape[0]
    base = torch.arange(rows * heads, device=slots.device).view(rows, heads, 1) * capacity
    return (base + slots[:, None, :]).reshape(-1)


def write_slots(buffers: Sequence[torch.Tensor], states: Sequence[torch.Tensor], plan: WritePlan) -> None:
    """Writes states `(R, H, T, D)` of a layer, one or two such as keys and values, to their slots in its buffers."""
    run = _write_triton if use_triton(*states) else _write_torch
    run(buffers, states, plan)


def _write_torch(buffers, states, plan):
    for buffer, new in zip(buffers, states):
        _, heads, _, size = new.shape
        index = plan.flat_index(heads, buffer.shape[2], buffer.device)
        # Under autocast a row's states may come in several dtypes.
        buffer.view(-1, size).index_copy_(0, index, new.reshape(-1, size).to(buffer.dtype))


@triton.jit
def _write_block(
    buffer_ptr,  # [H, C, D], of the row
    states_ptr,  # [H, T, D], of the row
    states_stride_h, states_stride_t,
    head, start, nodes, num_nodes, capacity,
    SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, BLOCK_D)
    mask = (nodes[:, None] < num_nodes) & (place[None, :] < SIZE)
    read = states_ptr + head * states_stride_h + nodes[:, None] * states_stride_t + place[None, :]
    written = buffer_ptr + (head * capacity + start + nodes[:, None]) * SIZE + place[None, :]
    tl.store(written, tl.load(read, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_nodes"])
def _write_kernel(
    first_ptr,  # [B, H, C, D]
    first_states_ptr,  # [R, H, T, D]
    second_ptr,  # [B, H, C, V], or None
    second_states_ptr,  # [R, H, T, V]
    starts_ptr,  # [R]
    first_stride_b, first_stride_h, first_stride_t, second_stride_b, second_stride_h, second_stride_t,
    num_nodes, capacity,
    HEADS: tl.constexpr, FIRST_SIZE: tl.constexpr, SECOND_SIZE: tl.constexpr, FIRST_BLOCK: tl.constexpr,
    SECOND_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # A program: one row and head, a block of its new slots.
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    nodes = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    start = tl.load(starts_ptr + row)
    _write_block(
        first_ptr + row * HEADS * capacity * FIRST_SIZE, first_states_ptr + row * first_stride_b,
        first_stride_h, first_stride_t, head, start, nodes, num_nodes, capacity, FIRST_SIZE, FIRST_BLOCK,
    )  # fmt: skip
    if second_ptr is not None:
        _write_block(
            second_ptr + row * HEADS * capacity * SECOND_SIZE, second_states_ptr + row * second_stride_b,
            second_stride_h, second_stride_t, head, start, nodes, num_nodes, capacity, SECOND_SIZE, SECOND_BLOCK,
        )  # fmt: skip


def _write_triton(buffers, states, plan):
    states = [new if new.stride(-1) == 1 else new.contiguous() for new in states]
    first, second = states[0], states[-1]
    rows, heads, nodes, size = first.shape
    block_t = min(16, triton.next_power_of_2(nodes))
    with torch.cuda.device_of(first):
        _write_kernel[(rows * heads, triton.cdiv(nodes, block_t))](
            buffers[0], first, buffers[1] if len(states) == 2 else None, second, plan.starts(first.device),
            *first.stride()[:3], *second.stride()[:3], nodes, buffers[0].shape[2],
            HEADS=heads, FIRST_SIZE=size, SECOND_SIZE=second.shape[-1],
            FIRST_BLOCK=triton.next_power_of_2(size), SECOND_BLOCK=triton.next_power_of_2(second.shape[-1]),
            BLOCK_T=block_t, num_warps=4,
        )  # fmt: skip


def move_slots(buffers: Sequence[torch.Tensor], starts: torch.LongTensor, path: torch.LongTensor) -> None:
    """Copies the nodes of a path `(R, M)` to the front of new slots, from `starts` `(R,)` on, in all buffers."""
    run = _move_triton if use_triton(path, *buffers) else _move_torch
    run(buffers, starts, path)


def _move_torch(buffers, starts, path):
    steps = torch.arange(path.shape[1], device=path.device)
    indices: dict = {}
    for buffer in buffers:
        _, heads, capacity, size = buffer.shape
        key = (heads, capacity, buffer.device)
        if key not in indices:
            places = (starts[:, None] + nodes for nodes in (path, steps))
            indices[key] = [flat_slots(slots.to(buffer.device), heads, capacity) for slots in places]
        read, written = indices[key]
        flat = buffer.view(-1, size)
        flat.index_copy_(0, written, flat[read])


@triton.jit(do_not_specialize=["num_steps"])
def _move_kernel(
    buffers_ptr,  # [buffers], addresses of [B, H, C, D]
    starts_ptr,  # [R]
    path_ptr,  # [R, M]
    num_steps, capacity,
    HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    # A program: one buffer, row and head, a block of its head size.
    buffer_ptr = tl.load(buffers_ptr + tl.program_id(0)).to(tl.pointer_type(DTYPE))
    # Whatever torch allocates begins at a multiple of more than that.
    buffer_ptr = tl.multiple_of(buffer_ptr, 16)
    row = (tl.program_id(1) // HEADS).to(tl.int64)
    head = (tl.program_id(1) % HEADS).to(tl.int64)
    step = tl.arange(0, BLOCK_M)
    place = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    node = tl.load(path_ptr + row * num_steps + step, mask=step < num_steps, other=0)
    # Nodes that lie in place stay there.
    mask = ((step < num_steps) & (node != step))[:, None] & (place < SIZE)[None, :]
    buffer_ptr += ((row * HEADS + head) * capacity + tl.load(starts_ptr + row)) * SIZE
    states = tl.load(buffer_ptr + node[:, None] * SIZE + place[None, :], mask=mask)
    # Another thread may hold what this one overwrites.
    tl.debug_barrier()
    tl.store(buffer_ptr + step[:, None] * SIZE + place[None, :], states, mask=mask)


def _move_triton(buffers, starts, path):
    groups: dict = {}
    for buffer in buffers:
        # Sizes and strides are those of the first of a group.
        groups.setdefault((buffer.device, buffer.dtype, buffer.shape[1:]), []).append(buffer)
    rows, steps = path.shape
    for (device, dtype, (heads, capacity, size)), alike in groups.items():
        block_d = min(64, triton.next_power_of_2(size))
        grid = (len(alike), rows * heads, triton.cdiv(size, block_d))
        with torch.cuda.device_of(alike[0]):
            _move_kernel[grid](
                _addresses(tuple(buffer.data_ptr() for buffer in alike), device),
                starts.to(device), path.to(device).contiguous(), steps, capacity,
                HEADS=heads, SIZE=size, BLOCK_M=triton.next_power_of_2(steps), BLOCK_D=block_d,
                # The type that numbers of this size are copied as.
                DTYPE={1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[dtype.itemsize], num_warps=4,
            )  # fmt: skip


@kept_on_device
def _addresses(addresses: tuple[int, ...], device: torch.device) -> torch.LongTensor:
    return upload(addresses, device)
