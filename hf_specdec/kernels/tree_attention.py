"""Attention of the nodes of a draft tree over the slots of a cache: committed tokens, and each node's ancestors.

    score[i, s] = scale * <query_i, key_s>                  softcap * tanh(score / softcap) where there is a soft cap
    output_i    = sum_s exp(score[i, s]) value_s / (sum_s exp(score[i, s]) + exp(sink)),     s visible to node i

The keys are split among several programs (Dao et al. 2023, "Flash-Decoding"), so that one row with a long text fills
a GPU; a second kernel adds their parts up. The query heads of a group share the tile that reads their keys.

Shapes: B rows, H query heads, K key/value heads, G = H / K, T nodes (at most 64), S slots, D head size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ._triton import needs_upcast, tl, triton, use_triton


# Ancestors are bits of one integer.
MAX_NODES = 64

MAX_HEAD_SIZE = 256

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class SlotTree:
    """Visibility among the nodes, without a mask. Node j of a row lies in slot `length + j`.

    Attributes:
        lengths (`torch.LongTensor` of shape `(B,)`): Committed slots of each row, its padding included.
        starts (`torch.LongTensor` of shape `(B,)`): First slot of each row that is not padding.
        ancestors (`torch.LongTensor` of shape `(T,)` or `(B, T)`): Bit j of entry i: node j is i or one of its
            ancestors.
        depths (`torch.LongTensor` of shape `(T,)` or `(B, T)`): Edges to the first node, which has depth 0.
    """

    lengths: torch.LongTensor
    starts: torch.LongTensor
    ancestors: torch.LongTensor
    depths: torch.LongTensor


def pack_ancestors(ancestors: torch.BoolTensor) -> torch.LongTensor:
    """Bits `(..., T)` of the relation `(..., T, T)`, whose entry `[i, j]` says whether i sees j."""
    places = torch.arange(ancestors.shape[-1], device=ancestors.device)
    return (ancestors.long() << places).sum(-1)


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: SlotTree,
    scale: float | None = None,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the nodes over the slots.

    Args:
        query (`torch.Tensor` of shape `(B, H, T, D)`): Of each node; bfloat16, float16 or float32.
        key (`torch.Tensor` of shape `(B, K, S, D)`): Slots of each row, those of its nodes included.
        value (`torch.Tensor` of shape `(B, K, S, V)`): Likewise.
        tree (`SlotTree`): Which slots a node sees.
        scale (`float`, *optional*): Factor of the scores, 1 / sqrt(D) if not given.
        window (`int`): A node sees its own position and the `window - 1` before it. 0: all.
        chunk (`int`): A node sees the positions of its own chunk of this size. 0: all.
        softcap (`float`): Bound of the scores. 0: none.
        sinks (`torch.Tensor` of shape `(H,)`, *optional*): Scores that take part in each sum and have no value.

    Returns:
        `torch.Tensor` of shape `(B, T, H, V)`. Sums are made in float32.
    """
    run = _tree_attention_triton if use_triton(query, key, value) else _tree_attention_torch
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    return run(query, key, value, tree, scale, window, chunk, float(softcap), sinks)


def _tree_attention_torch(query, key, value, tree, scale, window, chunk, softcap, sinks):
    rows, heads, nodes, size = query.shape
    kv_heads, slots = key.shape[1:3]
    query = query.float().reshape(rows, kv_heads, -1, size)
    scores = (query @ key.float().transpose(-1, -2) * scale).view(rows, heads, nodes, slots)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible_slots(tree, slots, window, chunk)[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(rows, heads, nodes, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :slots].view(rows, kv_heads, -1, slots)
    output = (weights @ value.float()).view(rows, heads, nodes, -1)
    return output.transpose(1, 2).contiguous().to(value.dtype)


def visible_slots(tree: SlotTree, slots: int, window: int = 0, chunk: int = 0) -> torch.BoolTensor:
    """Mask `(B, T, S)` of the first `slots` slots that each node sees."""
    nodes = tree.depths.shape[-1]
    lengths, starts = tree.lengths[:, None], tree.starts[:, None]
    depths, ancestors = (bits.expand(len(lengths), nodes) for bits in (tree.depths, tree.ancestors))
    slot = torch.arange(slots, device=lengths.device).expand(len(lengths), -1)
    node = slot - lengths
    is_node = (node >= 0) & (node < nodes)
    node = node.clamp(0, nodes - 1)
    committed = (slot >= starts) & (slot < lengths)
    visible = committed[:, None] | (is_node[:, None] & (ancestors[..., None] >> node[:, None] & 1).bool())
    positions = torch.where(is_node, lengths + depths.gather(1, node), slot) - starts
    oldest = _oldest_position(lengths - starts + depths, window, chunk)
    return visible & (positions[:, None] >= oldest[..., None])


def _oldest_position(positions, window, chunk):
    """The first position that a node at `positions` may see."""
    if window:
        return (positions - window + 1).clamp(min=0)
    return positions // chunk * chunk if chunk else torch.zeros_like(positions)


@triton.jit
def _oldest_slot(positions, start, span, IS_WINDOW: tl.constexpr, IS_CHUNK: tl.constexpr):
    """The first slot that a node at `positions` may see, in a row whose text begins at slot `start`."""
    if IS_WINDOW:
        return start + tl.maximum(positions - span + 1, 0)
    elif IS_CHUNK:
        return start + positions // span * span
    else:
        return start + positions * 0


@triton.jit
def _attend(
    sums,  # [M, V], value sums so far, relative to `highest`
    total,  # [M], sum of the weights so far
    highest,  # [M], highest score so far, in units of log 2
    query,  # [M, D]
    key_ptr,  # of the row and head
    value_ptr,
    slots,  # [N]
    is_slot,  # [N]
    visible,  # [M, N]
    key_stride,
    value_stride,
    scale,
    softcap,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Adds a block of slots to the running softmax sums (Milakov and Gimelshein 2018, "Online normalizer")."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    key_place, value_place = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    key = tl.load(
        key_ptr + slots[None, :] * key_stride + key_place[:, None],
        mask=is_slot[None, :] & (key_place[:, None] < HEAD_SIZE),
        other=0.0,
    )
    if UPCAST:
        key = key.to(tl.float32)
    scores = tl.dot(query, key, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        # tanh, which Triton has on some devices only.
        scores = softcap * (2 / (1 + tl.exp2(scores / softcap * (-2 * LOG2_E))) - 1)
    scores = tl.where(visible, scores * LOG2_E, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    value = tl.load(
        value_ptr + slots[:, None] * value_stride + value_place[None, :],
        mask=is_slot[:, None] & (value_place[None, :] < VALUE_SIZE),
        other=0.0,
    )
    if UPCAST:
        value = value.to(tl.float32)
    sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return sums, total * shrink + tl.sum(weights, axis=1), new_highest


# What changes from cycle to cycle is not compiled in; a kernel of its own for multiples of 16 would not pay.
@triton.jit(do_not_specialize=["ancestors_stride_b", "depths_stride_b", "span", "num_nodes", "num_splits"])
def _tree_attention_kernel(
    query_ptr,  # [B, H, T, D]
    key_ptr,  # [B, K, S, D]
    value_ptr,  # [B, K, S, V]
    sinks_ptr,  # [H], unread if not HAS_SINKS
    lengths_ptr,  # [B]
    starts_ptr,  # [B]
    ancestors_ptr,  # [B, T]
    depths_ptr,  # [B, T]
    output_ptr,  # [B, T, H, V], unwritten if IS_SPLIT
    partial_ptr,  # [B, H, T, splits, V], unwritten if not IS_SPLIT
    mass_ptr,  # [B, H, T, splits], log 2 of the weights of each part, unwritten if not IS_SPLIT
    query_stride_b,
    query_stride_h,
    query_stride_t,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    ancestors_stride_b,
    depths_stride_b,
    scale,
    softcap,
    span,
    num_nodes,
    num_splits,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_WINDOW: tl.constexpr,
    IS_CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # A program: one row and key/value head, one tile of its G * T queries, one part of the slots.
    split = tl.program_id(1)
    row = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    kv_head = (tl.program_id(2) % KV_HEADS).to(tl.int64)
    lines = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_line = lines < GROUPS * num_nodes
    node = lines % num_nodes
    head = kv_head * GROUPS + lines // num_nodes

    length = tl.load(lengths_ptr + row).to(tl.int32)
    start = tl.load(starts_ptr + row).to(tl.int32)
    ancestors = tl.load(ancestors_ptr + row * ancestors_stride_b + node)
    depth = tl.load(depths_ptr + row * depths_stride_b + node).to(tl.int32)
    oldest = _oldest_slot(length - start + depth, start, span, IS_WINDOW, IS_CHUNK)

    place = tl.arange(0, BLOCK_D)
    query = tl.load(
        query_ptr
        + row * query_stride_b
        + head[:, None] * query_stride_h
        + node[:, None] * query_stride_t
        + place[None, :],
        mask=is_line[:, None] & (place[None, :] < HEAD_SIZE),
        other=0.0,
    )
    if UPCAST:
        query = query.to(tl.float32)
    key_ptr += row * key_stride_b + kv_head * key_stride_h
    value_ptr += row * value_stride_b + kv_head * value_stride_h

    sums = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Not minus infinity, from which nothing could be subtracted.
    highest = tl.full([BLOCK_M], -1e30, dtype=tl.float32)

    # The committed slots of this part. No node sees any before those that the first node sees.
    first = _oldest_slot(length - start, start, span, IS_WINDOW, IS_CHUNK)
    part = tl.cdiv(tl.cdiv(length - first, BLOCK_N), num_splits) * BLOCK_N
    begin = first + split * part
    end = tl.minimum(begin + part, length)
    for block in tl.range(begin, end, BLOCK_N):
        slots = block + tl.arange(0, BLOCK_N)
        is_slot = slots < end
        visible = is_slot[None, :] & (slots[None, :] >= oldest[:, None])
        sums, total, highest = _attend(
            sums, total, highest, query, key_ptr, value_ptr, slots.to(tl.int64), is_slot, visible,
            key_stride_s, value_stride_s, scale, softcap,
            HEAD_SIZE, VALUE_SIZE, BLOCK_D, BLOCK_V, HAS_SOFTCAP, UPCAST,
        )  # fmt: skip

    # The nodes, in the last part.
    nodes_here = tl.where(split == num_splits - 1, num_nodes, 0)
    for block in tl.range(0, nodes_here, BLOCK_N):
        nodes = block + tl.arange(0, BLOCK_N)
        is_node = nodes < num_nodes
        bits = ancestors[:, None] >> tl.minimum(nodes, 63)[None, :].to(tl.int64)
        node_depth = tl.load(depths_ptr + row * depths_stride_b + nodes, mask=is_node, other=0).to(tl.int32)
        visible = is_node[None, :] & ((bits & 1) != 0) & ((length + node_depth)[None, :] >= oldest[:, None])
        slots = (length + nodes).to(tl.int64)
        sums, total, highest = _attend(
            sums, total, highest, query, key_ptr, value_ptr, slots, is_node, visible,
            key_stride_s, value_stride_s, scale, softcap,
            HEAD_SIZE, VALUE_SIZE, BLOCK_D, BLOCK_V, HAS_SOFTCAP, UPCAST,
        )  # fmt: skip

    value_place = tl.arange(0, BLOCK_V)
    is_output = is_line[:, None] & (value_place[None, :] < VALUE_SIZE)
    HEADS: tl.constexpr = KV_HEADS * GROUPS
    if IS_SPLIT:
        # A part may have nothing that a node sees.
        is_empty = total == 0
        total = tl.where(is_empty, 1.0, total)
        sums /= total[:, None]
        mass = tl.where(is_empty, float("-inf"), highest + tl.log2(total))
        places = ((row * HEADS + head) * num_nodes + node) * num_splits + split
        tl.store(mass_ptr + places, mass, mask=is_line)
        tl.store(partial_ptr + places[:, None] * VALUE_SIZE + value_place[None, :], sums, mask=is_output)
    else:
        if HAS_SINKS:
            total += _sink_weight(sinks_ptr, head, highest, is_line)
        sums /= total[:, None]
        places = (row * num_nodes + node) * HEADS + head
        tl.store(output_ptr + places[:, None] * VALUE_SIZE + value_place[None, :], sums, mask=is_output)


@triton.jit
def _sink_weight(sinks_ptr, head, highest, mask):
    """Weight of a head's sink relative to the score `highest`; infinite where it outweighs everything."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.exp2(tl.load(sinks_ptr + head, mask=mask, other=0.0).to(tl.float32) * LOG2_E - highest)


@triton.jit(do_not_specialize=["num_nodes", "num_splits"])
def _add_parts_kernel(
    partial_ptr,  # [B, H, T, splits, V]
    mass_ptr,  # [B, H, T, splits]
    sinks_ptr,  # [H], unread if not HAS_SINKS
    output_ptr,  # [B, T, H, V]
    num_nodes,
    num_splits,
    HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    # A program: one query.
    query = tl.program_id(0).to(tl.int64)
    node, head, row = query % num_nodes, query // num_nodes % HEADS, query // num_nodes // HEADS
    partial_ptr += query * num_splits * VALUE_SIZE
    mass_ptr += query * num_splits
    part, place = tl.arange(0, MAX_SPLITS), tl.arange(0, BLOCK_V)
    mass = tl.load(mass_ptr + part, mask=part < num_splits, other=float("-inf"))
    # At least the node itself is seen.
    highest = tl.max(mass, axis=0)
    total = tl.sum(tl.exp2(mass - highest), axis=0)
    sums = tl.zeros([BLOCK_V], dtype=tl.float32)
    for first in tl.range(0, num_splits, BLOCK_P):
        parts = first + tl.arange(0, BLOCK_P)
        weights = tl.exp2(tl.load(mass_ptr + parts, mask=parts < num_splits, other=float("-inf")) - highest)
        values = tl.load(
            partial_ptr + parts[:, None] * VALUE_SIZE + place[None, :],
            mask=(parts[:, None] < num_splits) & (place[None, :] < VALUE_SIZE),
            other=0.0,
        )
        sums += tl.sum(values * weights[:, None], axis=0)
    if HAS_SINKS:
        total += _sink_weight(sinks_ptr, head, highest, True)
    tl.store(
        output_ptr + ((row * num_nodes + node) * HEADS + head) * VALUE_SIZE + place,
        sums / total,
        mask=place < VALUE_SIZE,
    )


def _tree_attention_triton(query, key, value, tree, scale, window, chunk, softcap, sinks, num_splits=None):
    rows, heads, nodes, size = query.shape
    kv_heads, slots, value_size = key.shape[1], key.shape[2], value.shape[-1]
    query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
    ancestors, depths = (bits.expand(rows, nodes) for bits in (tree.ancestors, tree.depths))
    lines = heads // kv_heads * nodes
    block_d, block_v = (max(16, triton.next_power_of_2(width)) for width in (size, value_size))
    max_m, block_n, num_warps, num_stages = _TILES[query.element_size()][max(64, block_d, block_v)]
    block_m = min(max_m, max(16, triton.next_power_of_2(lines)))
    tiles = triton.cdiv(lines, block_m)
    span = window or chunk
    if num_splits is None:
        read = min(slots, span + nodes) if span else slots
        num_splits = _count_splits(tiles * kv_heads * rows, read, _processors(query.device))
    output = query.new_empty((rows, nodes, heads, value_size))
    is_split = num_splits > 1
    parts = (rows, heads, nodes, num_splits) if is_split else (0,)
    partial = query.new_empty((*parts, value_size), dtype=torch.float32)
    mass = query.new_empty(parts, dtype=torch.float32)
    with torch.cuda.device_of(query):
        _tree_attention_kernel[(tiles, num_splits, rows * kv_heads)](
            query, key, value, sinks, tree.lengths, tree.starts, ancestors, depths, output, partial, mass,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], ancestors.stride(0), depths.stride(0),
            scale, softcap, span, nodes, num_splits,
            KV_HEADS=kv_heads, GROUPS=heads // kv_heads, HEAD_SIZE=size, VALUE_SIZE=value_size,
            BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_V=block_v,
            IS_WINDOW=window > 0, IS_CHUNK=chunk > 0, HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None,
            IS_SPLIT=is_split, UPCAST=needs_upcast(query),
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        if is_split:
            _add_parts_kernel[(rows * heads * nodes,)](
                partial, mass, sinks, output, nodes, num_splits,
                HEADS=heads, VALUE_SIZE=value_size, BLOCK_V=block_v, BLOCK_P=16, MAX_SPLITS=_MAX_SPLITS,
                HAS_SINKS=sinks is not None, num_warps=4,
            )  # fmt: skip
    return output


# By bytes of a number and head size: most queries of a tile, slots of a block, warps, stages of the pipeline. They are
# the largest without spills, within 99 KiB of shared memory, which every GPU from compute capability 8.0 on has.
_TILES = {
    2: {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (32, 32, 4, 2)},
    4: {64: (32, 32, 8, 2), 128: (16, 16, 4, 2), 256: (16, 16, 4, 2)},
}

_MAX_SPLITS = 64

# Slots that a program should at least read, for its part to outweigh what it writes.
_MIN_SLOTS = 256


def _count_splits(programs: int, slots: int, processors: int) -> int:
    """Parts of the keys, so that there are up to two programs for every processor of the GPU."""
    return max(1, min(2 * processors // programs, triton.cdiv(slots, _MIN_SLOTS), _MAX_SPLITS))


@lru_cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU. The interpreter works through its programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
