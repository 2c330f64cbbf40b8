"""Attention of the nodes of a draft tree over the slots of a cache: committed tokens, and each node's ancestors.

    score[i, s] = scale * <query_i, key_s>                  softcap * tanh(score / softcap) where there is a soft cap
    output_i    = sum_s exp(score[i, s]) value_s / (sum_s exp(score[i, s]) + exp(sink)),     s visible to node i

The keys are split among several programs (Dao et al. 2023, "Flash-Decoding"), so that one row with a long text fills
a GPU; the program that ends last adds their parts up. The query heads of a group share the tile that reads their keys.

Shapes: B rows, H query heads, K key/value heads, G = H / K, T nodes that look, N nodes that are seen, W = ceil(N / 64)
words of bits, S slots, D head size, V value size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..transfers import kept_on_device
from ._triton import computable, tl, triton
from .launching import arrivals, begin_early, early_launch, ends_last
from .tiles import attention_tile, count_splits, gpu_of


# Ancestors are bits of one integer, where nothing else is said.
MAX_NODES = 64

MAX_HEAD_SIZE = 256


@dataclass(frozen=True)
class Beginning:
    """The first slots of texts that are seen from a later slot on only, beside these."""

    starts: torch.LongTensor  # (B,): where the texts begin
    count: int  # how many slots of each are seen, as far as windows reach; not by layers that see chunks
    most_seen: int  # committed slots of a row that are seen at most, these included


@dataclass(frozen=True)
class SlotTree:
    """Visibility among the nodes, without a mask. Node j of a row lies in slot `length + j`."""

    lengths: torch.LongTensor  # (B,): committed slots of each row, its padding included
    starts: torch.LongTensor  # (B,): first slot of each row that is not padding, or the first one that is seen
    # (B | 1, T, W): bit `j % 64` of word `j // 64` of entry i: node j is seen by the i-th of the nodes that look, such
    # as itself and its ancestors. `None`: the nodes are a chain of any length, in which padding sees itself alone.
    ancestors: torch.LongTensor | None = None
    # (N,) or (B, N): edges to the first node, which has depth 0. `None`: those of a chain.
    depths: torch.LongTensor | None = None
    num_queries: int = 0  # T, the last of the nodes, which look; not 0 in a chain
    beginning: Beginning | None = None  # slots in front of `starts` that are seen as well

    def __post_init__(self) -> None:
        if self.ancestors is not None:
            object.__setattr__(self, "num_queries", self.ancestors.shape[1])

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.num_queries if self.depths is None else self.depths.shape[-1]


def pack_words(seen: torch.BoolTensor) -> torch.LongTensor:
    """Words of bits `(..., T, W)` of the relation `(..., T, N)`, whose entry `[i, j]` says whether i sees j."""
    places = torch.arange(64, device=seen.device)
    words = [(part.long() << places[: part.shape[-1]]).sum(-1) for part in seen.split(64, dim=-1)]
    return torch.stack(words, dim=-1) if len(words) > 1 else words[0][..., None]


@kept_on_device
def own_bits(count: int, device: torch.device) -> torch.LongTensor:
    """Words `(N, W)` of nodes that see themselves alone; not to be written to."""
    return pack_words(torch.eye(count, dtype=torch.bool, device=device))


def visible_slots(tree: SlotTree, slots: int, window: int = 0, chunk: int = 0) -> torch.BoolTensor:
    """Mask `(B, T, slots)` of the first slots that each node sees."""
    count, nodes, rows, device = tree.num_queries, tree.num_nodes, len(tree.lengths), tree.lengths.device
    lengths, starts = tree.lengths[:, None], tree.starts[:, None]
    slot, places = torch.arange(slots, device=device), lengths + torch.arange(nodes, device=device)
    if tree.ancestors is None:
        # Padding in front of a chain sees itself alone.
        itself = slot == places[..., None]
        visible = (slot >= starts)[:, None] & (slot <= places[..., None])
    else:
        itself = None
        node = torch.arange(nodes, device=device)
        seen = (tree.ancestors[..., node // 64] >> node % 64 & 1).bool().expand(rows, -1, -1)
        visible = ((slot >= starts) & (slot < lengths))[:, None].repeat(1, count, 1)
        visible.scatter_(2, places[:, None].expand(-1, count, -1), seen)
    if window or chunk or tree.beginning is not None:
        depths = torch.arange(nodes, device=device) if tree.depths is None else tree.depths
        positions = (lengths - starts + depths).expand(rows, -1)
        of_nodes = positions[:, nodes - count :]
        positions = (slot - starts).scatter_(1, places, positions)
        if window or chunk:
            oldest = (of_nodes - window + 1).clamp(min=0) if window else of_nodes // chunk * chunk
            visible &= positions[:, None] >= oldest[..., None]
        if tree.beginning is not None and not chunk:
            is_near = (of_nodes[..., None] - positions[:, None] < window) if window else True
            first, count = tree.beginning.starts[:, None], tree.beginning.count
            visible |= ((slot >= first) & (slot < first + count) & (slot < starts))[:, None] & is_near
    return visible if itself is None else visible | itself


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
    key_stride, value_stride,
    scale, softcap,
    HEAD_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Adds a block of slots to the running softmax sums (Milakov and Gimelshein 2018, "Online normalizer")."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    key_place, value_place = tl.arange(0, query.shape[1]), tl.arange(0, sums.shape[1])
    key = tl.load(
        key_ptr + slots[None, :] * key_stride + key_place[:, None],
        mask=is_slot[None, :] & (key_place[:, None] < HEAD_SIZE),
        other=0.0,
    )
    scores = tl.dot(query, computable(key), input_precision="ieee") * scale
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
    value = computable(value)
    sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return sums, total * shrink + tl.sum(weights, axis=1), new_highest


# What changes from cycle to cycle is not compiled in; a kernel of its own for multiples of 16 would not pay.
@triton.jit(
    do_not_specialize=[
        *("ancestors_stride_b", "ancestors_stride_t", "depths_stride_b"),
        *("span", "num_first", "num_queries", "num_nodes", "num_splits"),
    ],
    do_not_specialize_on_alignment=["lengths_ptr", "starts_ptr", "texts_ptr", "ancestors_ptr", "depths_ptr"],
)
def _tree_attention_kernel(
    query_ptr,  # [B, H, T, D]
    key_ptr,  # [B, K, S, D]
    value_ptr,  # [B, K, S, V]
    sinks_ptr,  # [H], or None
    lengths_ptr,  # [B]
    starts_ptr,  # [B]
    texts_ptr,  # [B], or None for no beginning
    ancestors_ptr,  # [B, T, W], or None for a chain
    depths_ptr,  # [B, N], or None for a chain
    output_ptr,  # [B, T, H, V]
    partial_ptr,  # [B, H, T, splits, V], or None where there is one split
    mass_ptr,  # [B, H, T, splits], log 2 of the weights of each part, likewise
    arrivals_ptr,  # [B, K, tiles], parts that have ended, likewise
    query_stride_b, query_stride_h, query_stride_t, key_stride_b, key_stride_h, key_stride_s, value_stride_b,
    value_stride_h, value_stride_s, ancestors_stride_b, ancestors_stride_t, depths_stride_b,
    scale, softcap, span, num_first, num_queries, num_nodes, num_splits,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, HEAD_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_LINES: tl.constexpr,  # of a tile whose parts are added up at a time
    IS_WINDOW: tl.constexpr, IS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    # A program: one row and key/value head, one tile of its G * T queries, one part of the slots.
    begin_early(IS_EARLY)
    IS_CHAIN: tl.constexpr = ancestors_ptr is None
    split = tl.program_id(1)
    row = (tl.program_id(2) // KV_HEADS).to(tl.int64)
    kv_head = (tl.program_id(2) % KV_HEADS).to(tl.int64)
    first_line = tl.program_id(0) * BLOCK_M
    lines = first_line + tl.arange(0, BLOCK_M)
    is_line = lines < GROUPS * num_queries
    query_of_line = lines % num_queries
    head = kv_head * GROUPS + lines // num_queries
    node_of_line = num_nodes - num_queries + query_of_line

    length = tl.load(lengths_ptr + row).to(tl.int32)
    start = tl.load(starts_ptr + row).to(tl.int32)
    if IS_CHAIN:
        depth = node_of_line
    else:
        depths_ptr += row * depths_stride_b
        depth = tl.load(depths_ptr + node_of_line).to(tl.int32)
        ancestors_ptr += row * ancestors_stride_b + query_of_line * ancestors_stride_t
    oldest = _oldest_slot(length - start + depth, start, span, IS_WINDOW, IS_CHUNK)

    place = tl.arange(0, BLOCK_D)
    query = tl.load(
        query_ptr
        + row * query_stride_b
        + head[:, None] * query_stride_h
        + query_of_line[:, None] * query_stride_t
        + place[None, :],
        mask=is_line[:, None] & (place[None, :] < HEAD_SIZE),
        other=0.0,
    )
    query = computable(query)
    key_ptr += row * key_stride_b + kv_head * key_stride_h
    value_ptr += row * value_stride_b + kv_head * value_stride_h

    sums = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Not minus infinity, from which nothing could be subtracted.
    highest = tl.full([BLOCK_M], -1e30, dtype=tl.float32)

    # The nodes that a chain's tile looks from: all of them where it has several heads.
    lowest = first_line % num_queries
    is_of_one_head = lowest + BLOCK_M <= num_queries
    lowest = tl.where(is_of_one_head, lowest, 0)

    # The committed slots of this part. No node sees any before those that the first node sees.
    first = _oldest_slot(length - start + lowest if IS_CHAIN else length - start, start, span, IS_WINDOW, IS_CHUNK)
    part = tl.cdiv(tl.maximum(tl.cdiv(length - first, BLOCK_N), 0), num_splits) * BLOCK_N
    begin = first + split * part
    end = tl.minimum(begin + part, length)
    for block in tl.range(begin, end, BLOCK_N):
        slots = block + tl.arange(0, BLOCK_N)
        is_slot = slots < end
        visible = is_slot[None, :] & (slots[None, :] >= oldest[:, None])
        sums, total, highest = _attend(
            sums, total, highest, query, key_ptr, value_ptr, slots.to(tl.int64), is_slot, visible,
            key_stride_s, value_stride_s, scale, softcap,
            HEAD_SIZE, VALUE_SIZE, HAS_SOFTCAP,
        )  # fmt: skip

    if texts_ptr is not None:
        # In the last part, like the nodes: the others are as long as can be.
        text = tl.load(texts_ptr + row).to(tl.int32)
        end = tl.where(split == num_splits - 1, tl.minimum(text + num_first, start), text)
        for block in tl.range(text, end, BLOCK_N):
            slots = block + tl.arange(0, BLOCK_N)
            is_slot = slots < end
            visible = is_slot[None, :] & is_line[:, None]
            if IS_WINDOW:
                visible = visible & (slots[None, :] > (length + depth - span)[:, None])
            sums, total, highest = _attend(
                sums, total, highest, query, key_ptr, value_ptr, slots.to(tl.int64), is_slot, visible,
                key_stride_s, value_stride_s, scale, softcap,
                HEAD_SIZE, VALUE_SIZE, HAS_SOFTCAP,
            )  # fmt: skip

    # The nodes, in the last part.
    first_node, last_node = 0, num_nodes
    if IS_CHAIN:
        # Neither those after the tile, nor padding and what has left the window; but padding sees itself.
        last_node = tl.where(is_of_one_head, lowest + BLOCK_M, num_nodes)
        first_node = tl.minimum(tl.maximum(first - length, 0), lowest) // BLOCK_N * BLOCK_N
    for block in tl.range(first_node, tl.where(split == num_splits - 1, last_node, 0), BLOCK_N):
        nodes = block + tl.arange(0, BLOCK_N)
        is_node = nodes < num_nodes
        slots = length + nodes
        if IS_CHAIN:
            is_real = (slots >= start)[None, :] & (slots[None, :] >= oldest[:, None])
            visible = is_node[None, :] & (nodes[None, :] <= node_of_line[:, None])
            visible = visible & (is_real | (nodes[None, :] == node_of_line[:, None]))
        else:
            bits = tl.load(ancestors_ptr + block // 64, mask=is_line, other=0)[:, None] >> (nodes % 64)[None, :]
            visible = is_node[None, :] & ((bits & 1) != 0)
            if IS_WINDOW or IS_CHUNK:
                node_depth = tl.load(depths_ptr + nodes, mask=is_node, other=0).to(tl.int32)
                visible = visible & ((length + node_depth)[None, :] >= oldest[:, None])
        sums, total, highest = _attend(
            sums, total, highest, query, key_ptr, value_ptr, slots.to(tl.int64), is_node, visible,
            key_stride_s, value_stride_s, scale, softcap,
            HEAD_SIZE, VALUE_SIZE, HAS_SOFTCAP,
        )  # fmt: skip

    value_place = tl.arange(0, BLOCK_V)
    is_output = is_line[:, None] & (value_place[None, :] < VALUE_SIZE)
    HEADS: tl.constexpr = KV_HEADS * GROUPS
    if partial_ptr is not None:
        # A part may have nothing that a node sees; nobody reads its sums.
        is_empty = total == 0
        total = tl.where(is_empty, 1.0, total)
        mass = tl.where(is_empty, float("-inf"), highest + tl.log2(total))
        places = ((row * HEADS + head) * num_queries + query_of_line) * num_splits + split
        tl.store(mass_ptr + places, mass, mask=is_line)
        tl.store(
            partial_ptr + places[:, None] * VALUE_SIZE + value_place[None, :],
            sums / total[:, None],
            mask=is_output & (is_empty == 0)[:, None],
        )
        if ends_last(arrivals_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), num_splits):
            for line in tl.range(0, BLOCK_M, BLOCK_LINES):
                _add_parts(
                    partial_ptr, mass_ptr, sinks_ptr, output_ptr,
                    first_line + line + tl.arange(0, BLOCK_LINES), row, kv_head, num_queries, num_splits,
                    KV_HEADS, GROUPS, VALUE_SIZE, BLOCK_V,
                )  # fmt: skip
    else:
        if sinks_ptr is not None:
            total += _sink_weight(sinks_ptr, head, highest, is_line)
        sums /= total[:, None]
        places = (row * num_queries + query_of_line) * HEADS + head
        tl.store(output_ptr + places[:, None] * VALUE_SIZE + value_place[None, :], sums, mask=is_output)


@triton.jit
def _sink_weight(sinks_ptr, head, highest, mask):
    """Weight of a head's sink relative to the score `highest`; infinite where it outweighs everything."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.exp2(tl.load(sinks_ptr + head, mask=mask, other=0.0).to(tl.float32) * LOG2_E - highest)


@triton.jit
def _add_parts(
    partial_ptr,  # [B, H, T, splits, V]
    mass_ptr,  # [B, H, T, splits]
    sinks_ptr,  # [H], or None
    output_ptr,  # [B, T, H, V]
    lines,  # [L], of the row and key/value head
    row, kv_head, num_queries, num_splits,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, VALUE_SIZE: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # So many are read at a time.
    BLOCK_PARTS: tl.constexpr = 4
    HEADS: tl.constexpr = KV_HEADS * GROUPS
    is_line = lines < GROUPS * num_queries
    head, query = kv_head * GROUPS + lines // num_queries, lines % num_queries
    # From the first line of the row, in 32 bits: there are many of them.
    partial_ptr += row * HEADS * num_queries * num_splits * VALUE_SIZE
    mass_ptr += row * HEADS * num_queries * num_splits
    places = (head.to(tl.int32) * num_queries + query) * num_splits
    value_place = tl.arange(0, BLOCK_V)
    sums = tl.zeros([lines.shape[0], BLOCK_V], dtype=tl.float32)
    total = tl.zeros([lines.shape[0]], dtype=tl.float32)
    highest = tl.full([lines.shape[0]], -1e30, dtype=tl.float32)
    for first in tl.range(0, num_splits, BLOCK_PARTS):
        # One after the other, so that no thread needs the numbers of another one.
        for offset in tl.static_range(BLOCK_PARTS):
            part = first + offset
            is_part = is_line & (part < num_splits)
            mass = tl.load(mass_ptr + places + part, mask=is_part, other=float("-inf"), cache_modifier=".cg")
            values = tl.load(
                partial_ptr + (places + part)[:, None] * VALUE_SIZE + value_place[None, :],
                mask=is_part[:, None] & (value_place < VALUE_SIZE)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_highest = tl.maximum(highest, mass)
            weight = tl.exp2(mass - new_highest)
            shrink = tl.exp2(highest - new_highest)
            highest = new_highest
            # Where a part has seen nothing, nobody has written its sums.
            values = tl.where((mass > float("-inf"))[:, None], values, 0.0)
            sums = sums * shrink[:, None] + values * weight[:, None]
            total = total * shrink + weight
    if sinks_ptr is not None:
        total += _sink_weight(sinks_ptr, head, highest, is_line)
    places = (row * num_queries + query) * HEADS + head
    tl.store(
        output_ptr + places[:, None] * VALUE_SIZE + value_place[None, :],
        sums / tl.where(is_line, total, 1.0)[:, None],
        mask=is_line[:, None] & (value_place[None, :] < VALUE_SIZE),
    )


def tree_attention_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: SlotTree,
    scale: float | None = None,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attention `(B, T, H, V)` of the nodes, queries `(B, H, T, D)`, over slots `(B, K, S, D)` and `(B, K, S, V)`.

    The slots of a row include those of its nodes. The default `scale` is 1 / sqrt(D); `sinks` are `(H,)`. In a
    `window` a node sees its own position and the `window - 1` before it, in a `chunk` the positions of its own chunk.
    """
    rows, heads, queries, size = query.shape
    kv_heads, slots, value_size = key.shape[1], key.shape[2], value.shape[-1]
    query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
    words = depths = None
    strides = 0, 0, 0
    if tree.ancestors is not None:
        words, depths = tree.ancestors.expand(rows, -1, -1), tree.depths.expand(rows, -1)
        strides = *words.stride()[:2], depths.stride(0)
    scale = size**-0.5 if scale is None else float(scale)
    lines = heads // kv_heads * queries
    block_d, block_v = (max(16, triton.next_power_of_2(width)) for width in (size, value_size))
    gpu = gpu_of(query.device)
    span = window or chunk
    beginning = None if chunk else tree.beginning
    limits = [limit for limit in (span, 0 if beginning is None else beginning.most_seen) if limit]
    read = min([slots, *(limit + queries for limit in limits)])
    bytes_read = rows * kv_heads * read * query.element_size() * (size + value_size)
    tile = attention_tile(gpu, query.element_size(), max(block_d, block_v), lines, bytes_read)
    block_m = min(tile.queries, max(16, triton.next_power_of_2(lines)))
    tiles = triton.cdiv(lines, block_m)
    if num_splits is None:
        written = 4 * block_m * block_v / (query.element_size() * (block_d + block_v))
        num_splits = count_splits(tiles * kv_heads * rows, read, written, tile, gpu.processors)
    output = query.new_empty((rows, queries, heads, value_size))
    partial = mass = ended = None
    if num_splits > 1:
        parts = rows, heads, queries, num_splits
        partial, mass = (query.new_empty(shape, dtype=torch.float32) for shape in ((*parts, value_size), parts))
        ended = arrivals(rows * kv_heads * tiles, query.device)
    with torch.cuda.device_of(query):
        _tree_attention_kernel[(tiles, num_splits, rows * kv_heads)](
            query, key, value, sinks, tree.lengths, tree.starts, None if beginning is None else beginning.starts,
            words, depths, output, partial, mass, ended,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *strides,
            scale, float(softcap), span, 0 if beginning is None else beginning.count, queries, tree.num_nodes,
            num_splits, KV_HEADS=kv_heads, GROUPS=heads // kv_heads, HEAD_SIZE=size, VALUE_SIZE=value_size,
            BLOCK_M=block_m, BLOCK_N=tile.slots, BLOCK_D=block_d, BLOCK_V=block_v,
            BLOCK_LINES=max(1, min(block_m, 512 * tile.warps // block_v)),
            IS_WINDOW=window > 0, IS_CHUNK=chunk > 0, HAS_SOFTCAP=softcap > 0,
            num_warps=tile.warps, num_stages=tile.stages, **early_launch(query),
        )  # fmt: skip
    return output
