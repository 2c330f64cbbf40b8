"""A mixture of experts over the few tokens of a cycle: every expert that a token is sent to reads its weights once.

    p = softmax(logits),   e_1, .., e_k = the experts of the largest p,   w_j = p_{e_j}, or that over their sum
    y = sum_j w_j down_{e_j} (act(gate_{e_j} x) * up_{e_j} x) + sigmoid(g . x) shared(x), if there is a shared expert

Five launches: the choice of the experts, the pairs of each expert, both halves with the activation, the product back,
and the sum. Nothing is sorted, and the host knows nothing of it. The shared expert is an MLP, which runs before.

Shapes: M tokens, E experts, k of them for each token, S = M k pairs of a token and an expert, H hidden size, I inner
width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ._triton import computable, tl, triton
from .gates import SILU, activated


# Tokens above which products are bound by arithmetic, so that libraries are faster.
MOST_TOKENS = 512


class Routing(NamedTuple):
    """The way from logits to the weights of the chosen experts."""

    top_k: int  # k
    normalizes: bool = True  # weights are divided by their sum
    rounds: bool = False  # then they are rounded to the dtype of the logits; otherwise they stay in float32


class Shared(NamedTuple):
    """An expert that every token goes through, by a gate of its own."""

    output: torch.Tensor  # (M, H): of the expert, before the gate
    gate: torch.Tensor  # (1, H): g, the weights of the gate


def mixture_triton(
    hidden: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    kind: str = SILU,
    shared: Shared | None = None,
) -> torch.Tensor:
    """The outputs `(M, H)` of the experts for at most `MOST_TOKENS` tokens, by the router's logits `(M, E)`, on a GPU.

    Weights are `(E, 2 I, H)` and `(E, H, I)`. Outputs are rounded to the dtype after each product, after the
    activation, and after the sum, which is taken in float32; what a shared expert adds wherever torch rounds.
    """
    (num_tokens, size), (num_experts, _, inner), top_k = hidden.shape, down.shape, routing.top_k
    num_pairs = num_tokens * top_k
    hidden, logits = hidden.contiguous(), logits.contiguous()
    added = (None, None, None) if shared is None else (hidden, *(part.contiguous() for part in shared))
    experts = logits.new_empty((num_tokens, top_k), dtype=torch.int32)
    weights = logits.new_empty((num_tokens, top_k), dtype=logits.dtype if routing.rounds else torch.float32)
    pairs = experts.new_empty((num_experts, num_pairs))
    counts = experts.new_empty(num_experts)
    active, products = hidden.new_empty((num_pairs, inner)), hidden.new_empty((num_pairs, size))
    output = torch.empty_like(hidden)
    # Tiles as high as the tokens are many: none has more pairs with one expert.
    rows = min(max(triton.next_power_of_2(num_tokens), 16), 64)
    tile = {"BLOCK_ROWS": rows, "BLOCK_COLUMNS": 64, "BLOCK_DEPTH": 32 if hidden.dtype == torch.float32 else 64}
    tile |= {"num_warps": 4, "num_stages": 2 if torch.version.hip else 3}
    block = min(1024, triton.next_power_of_2(size))
    with torch.cuda.device_of(hidden):
        _route_kernel[(num_tokens,)](
            logits, experts, weights, num_experts,
            TOP_K=top_k, NORMALIZES=routing.normalizes, BLOCK_K=triton.next_power_of_2(top_k),
            BLOCK_E=triton.next_power_of_2(num_experts), num_warps=1,
        )  # fmt: skip
        _group_kernel[(num_experts,)](
            experts, pairs, counts, num_pairs, BLOCK=min(1024, triton.next_power_of_2(num_pairs)), num_warps=4
        )
        _products_kernel[(triton.cdiv(inner, 64), num_experts)](
            hidden, gate_up, pairs, counts, active, num_pairs,
            DEPTH=size, WIDTH=inner, PAIRS_OF_ROW=top_k, KIND=kind, **tile,
        )  # fmt: skip
        _products_kernel[(triton.cdiv(size, 64), num_experts)](
            active, down, pairs, counts, products, num_pairs,
            DEPTH=inner, WIDTH=size, PAIRS_OF_ROW=1, KIND=None, **tile,
        )  # fmt: skip
        _sum_kernel[(num_tokens, triton.cdiv(size, block))](
            products, weights, *added, output,
            SIZE=size, TOP_K=top_k, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return output


@triton.jit
def _route_kernel(
    logits_ptr,  # [M, E]
    experts_ptr,  # [M, k], written
    weights_ptr,  # [M, k], written
    E,
    TOP_K: tl.constexpr, NORMALIZES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # A program: a token.
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_E)
    choice = tl.arange(0, BLOCK_K)
    logits = tl.load(logits_ptr + token * E + index, mask=index < E, other=-float("inf")).to(tl.float32)
    largest = tl.max(logits, axis=0)
    total = tl.sum(tl.exp(logits - largest), axis=0)
    experts = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.max(logits, axis=0)
        # Where all is NaN none is equal: an expert that there is has to be read all the same.
        expert = tl.minimum(tl.min(tl.where(logits == best, index, BLOCK_E), axis=0), E - 1)
        experts = tl.where(choice == place, expert, experts)
        weights = tl.where(choice == place, tl.exp(best - largest) / total, weights)
        logits = tl.where(index == expert, -float("inf"), logits)
    if NORMALIZES:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(experts_ptr + token * TOP_K + choice, experts, mask=choice < TOP_K)
    tl.store(weights_ptr + token * TOP_K + choice, weights.to(weights_ptr.dtype.element_ty), mask=choice < TOP_K)


@triton.jit
def _group_kernel(
    experts_ptr,  # [S]
    pairs_ptr,  # [E, S], written: the pairs of each expert, as many as there are
    counts_ptr,  # [E], written
    S,
    BLOCK: tl.constexpr,
):
    # A program: an expert.
    expert = tl.program_id(0)
    count = 0
    for start in range(0, S, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_own = (tl.load(experts_ptr + pair, mask=pair < S, other=-1) == expert).to(tl.int32)
        place = count + tl.cumsum(is_own, axis=0) - 1
        tl.store(pairs_ptr + expert.to(tl.int64) * S + place, pair, mask=is_own > 0)
        count += tl.sum(is_own, axis=0)
    tl.store(counts_ptr + expert, count)


@triton.jit
def _products_kernel(
    inputs_ptr,  # [M, DEPTH], or [S, DEPTH]
    weights_ptr,  # [E, WIDTH, DEPTH]; with a gate [E, 2 WIDTH, DEPTH]
    pairs_ptr,  # [E, S]
    counts_ptr,  # [E]
    outputs_ptr,  # [S, WIDTH], written
    S,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, PAIRS_OF_ROW: tl.constexpr,
    KIND: tl.constexpr,  # of the gate's activation, or None
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
):  # fmt: skip
    # A program: some columns of an expert, for all of its pairs.
    DTYPE: tl.constexpr = outputs_ptr.dtype.element_ty
    expert = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = column < WIDTH
    count = tl.load(counts_ptr + expert)
    IS_GATED: tl.constexpr = KIND is not None
    weights_ptr += expert * (2 if IS_GATED else 1) * WIDTH * DEPTH
    of_column = column.to(tl.int64)[None, :] * DEPTH
    for start in range(0, count, BLOCK_ROWS):
        place = start + tl.arange(0, BLOCK_ROWS)
        is_row = place < count
        pair = tl.load(pairs_ptr + expert * S + place, mask=is_row, other=0).to(tl.int64)
        of_row = (pair // PAIRS_OF_ROW)[:, None] * DEPTH
        sums = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        others = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
        for depth in range(0, DEPTH, BLOCK_DEPTH):
            inner = depth + tl.arange(0, BLOCK_DEPTH)
            is_inner = inner < DEPTH
            states = tl.load(inputs_ptr + of_row + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
            is_weight = is_inner[:, None] & is_column[None, :]
            weights = tl.load(weights_ptr + of_column + inner[:, None], mask=is_weight, other=0.0)
            states = computable(states)
            sums += tl.dot(states, computable(weights), input_precision="ieee")
            if IS_GATED:
                halves = tl.load(weights_ptr + WIDTH * DEPTH + of_column + inner[:, None], mask=is_weight, other=0.0)
                others += tl.dot(states, computable(halves), input_precision="ieee")
        result = sums.to(DTYPE)
        if IS_GATED:
            active = activated(result.to(tl.float32), KIND).to(DTYPE).to(tl.float32)
            result = (active * others.to(DTYPE).to(tl.float32)).to(DTYPE)
        tl.store(
            outputs_ptr + pair[:, None] * WIDTH + column[None, :], result, mask=is_row[:, None] & is_column[None, :]
        )


@triton.jit
def _sum_kernel(
    products_ptr,  # [M, k, H]
    weights_ptr,  # [M, k]
    hidden_ptr,  # [M, H], or None without a shared expert, like the next two
    shared_ptr,  # [M, H]
    gate_ptr,  # [H]
    output_ptr,  # [M, H], written
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program: a block of a token.
    DTYPE: tl.constexpr = output_ptr.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        product = tl.load(products_ptr + pair * SIZE + place, mask=place < SIZE, other=0.0).to(tl.float32)
        weighted = product * tl.load(weights_ptr + pair).to(tl.float32)
        if weights_ptr.dtype.element_ty != tl.float32:
            weighted = weighted.to(DTYPE).to(tl.float32)
        total += weighted
    if shared_ptr is not None:
        terms = tl.zeros([BLOCK], tl.float32)
        for start in range(0, SIZE, BLOCK):
            index = start + tl.arange(0, BLOCK)
            state = tl.load(hidden_ptr + token * SIZE + index, mask=index < SIZE, other=0.0).to(tl.float32)
            terms += state * tl.load(gate_ptr + index, mask=index < SIZE, other=0.0).to(tl.float32)
        # Rounded wherever torch rounds.
        share = tl.sigmoid(tl.sum(terms, axis=0).to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
        shared = tl.load(shared_ptr + token * SIZE + place, mask=place < SIZE, other=0.0).to(tl.float32)
        total = total.to(DTYPE).to(tl.float32) + (share * shared).to(DTYPE).to(tl.float32)
    tl.store(output_ptr + token * SIZE + place, total.to(DTYPE), mask=place < SIZE)
