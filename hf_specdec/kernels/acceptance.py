"""Acceptance of draft tokens by the target's own choices, and by rejection sampling.

Every verified node decides by itself which of its children is accepted, if any; the path goes from the anchor to the
accepted child, and on, until a node accepts none. That node adds the new token.

- `follow`: a node accepts the child that carries the target's choice at this node. Exact for every draft that does not
  depend on these choices.
- `reject`, for chains that of Leviathan et al. 2023 (arXiv:2211.17192, Algorithm 1), for trees recursive rejection
  sampling (Jeon et al. 2024, arXiv:2402.14160; Chen et al. 2024, arXiv:2402.12374, Algorithm 2): a node tries its
  children x_1, x_2, ... in turn. With p the target's distribution after the node and q that which its children were
  drawn from,

      accept x_k  iff  u_k q_k(x_k) < p_k(x_k),      p_1 = p,  q_1 = q
      p_{k+1} = norm(max(p_k - q_k, 0)),             q_{k+1} = norm(q_k without x_k)

  and the new token is drawn from what p has become.

The kernels use that only three numbers change from child to child. With P_k = sum max(p - c_k q, 0), Q_k the sum of q
without x_1 .. x_{k-1}, c_1 = 0, P_1 = Q_1 = 1:

      p_k = max(p - c_k q, 0) / P_k,      q_k = q / Q_k,      c_{k+1} = c_k + P_k / Q_k

A difference that was cut at 0 stays below 0, because c only grows; and a rejected token is such a place. So the
distributions after rejections are never written to memory, and all nodes are judged at once.

Shapes: B rows, N draft nodes, T = N + 1 verified nodes (node 0 is the anchor, node i + 1 is draft node i),
V vocabulary, C = ceil(V / `BLOCK_SIZE`) blocks of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..drafts import DraftTree
from . import _triton
from ._triton import tl, triton, use_triton
from .indexing import arange, distributions_at, nowhere, pick
from .launching import arrivals, ends_last
from .sampling import BLOCK_SIZE, BLOCKS_PER_PROGRAM, find_block, first_above, sample_from_probs, sample_torch


# Ids of the vocabulary that one program reads at once to sum up a distribution.
IDS_PER_STEP = 4096


@dataclass
class Acceptance:
    """The outcome of one verification; a row commits `num_accepted + 1` tokens."""

    num_accepted: torch.LongTensor  # (B,): accepted draft tokens, without the recovered or bonus token
    # (B, T): verified nodes from the anchor (entry 0, node 0) along the accepted draft nodes (entries 1 to
    # `num_accepted`); further entries repeat the last one.
    path: torch.LongTensor
    # (B, T): committed tokens: the accepted draft tokens, then the target's new token at index `num_accepted`, then
    # zeros.
    tokens: torch.LongTensor

    @classmethod
    def of_new_tokens(cls, new_tokens: torch.LongTensor) -> Acceptance:
        """The outcome without drafts: the new tokens, of shape `(B, 1)`, alone."""
        path = torch.zeros_like(new_tokens)
        return cls(path[:, 0], path, new_tokens)

    @classmethod
    def of_path(cls, tokens: torch.Tensor, counts: torch.Tensor, path: torch.Tensor, new: torch.Tensor) -> Acceptance:
        """The outcome of draft tokens `(B, N)`, `counts` of those along the path accepted, and new ones `(B,)`."""
        along_path = F.pad(tokens.gather(1, (path[:, 1:] - 1).clamp_(min=0)), (0, 1))
        committed = along_path * (arange(path.shape[1], path.device) < counts[:, None])
        return cls(counts, path, committed.scatter_(1, counts[:, None], new[:, None]))


def follow(draft: DraftTree, node_tokens: torch.LongTensor) -> Acceptance:
    """Follows the target's choices `(B, T)`, greedy or drawn, from each node to the child that carries its token.

    Of siblings with the same token the first is followed, whatever is below the others.
    """
    if draft.size == 0:
        return Acceptance.of_new_tokens(node_tokens)
    is_plain = node_tokens.is_cpu and _triton.CHOICE != "triton"
    run = _follow_torch if is_plain or not use_triton(draft.tokens, node_tokens) else _follow_triton
    return run(draft, node_tokens)


def reject(
    draft: DraftTree,
    target_probs: torch.FloatTensor,
    accept_uniforms: torch.FloatTensor,
    target_uniforms: torch.FloatTensor,
) -> Acceptance:
    """Recursive rejection sampling of draft tokens that were drawn from `draft.probs`, siblings without replacement.

    p is `(B, T, V)`, u `(B, N)`, and the numbers that draw new tokens `(B, T)`. Children are tried in index order;
    siblings hold equal rows of `draft.probs`: what the first was drawn from.
    """
    if draft.size == 0:
        return Acceptance.of_new_tokens(sample_from_probs(target_probs, target_uniforms))
    check_probs(draft)
    if use_triton(draft.tokens, target_probs):
        run = _reject_triton
    else:
        run = _reject_chain_torch if draft.is_chain else _reject_tree_torch
    return run(draft, target_probs, accept_uniforms, target_uniforms)


def _follow_torch(draft, node_tokens) -> Acceptance:
    steps = arange(draft.size + 1, node_tokens.device)
    valid = steps[:-1] < draft.num_nodes[:, None]
    if draft.is_chain:
        followed = (draft.tokens == node_tokens[:, :-1]) & valid
        num_accepted = followed.cumprod(1, dtype=torch.long).sum(1)
        path = torch.minimum(steps, num_accepted[:, None])
    else:
        parents = draft.topology.parents[..., 1:].expand_as(draft.tokens)
        followed = (draft.tokens == node_tokens.gather(1, parents)) & valid
        siblings = parents[:, :, None] == parents[:, None, :]
        earlier_twin = (siblings.tril(-1) & followed[:, None, :]).any(-1)
        followed &= ~earlier_twin
        ancestors = draft.topology.ancestors[..., 1:, 1:]
        num_accepted, path = tree_path(draft, ~(ancestors & ~followed[:, None, :]).any(-1))
    is_committed = steps <= num_accepted[:, None]
    return Acceptance(num_accepted, path, node_tokens.gather(1, path) * is_committed)


def _reject_chain_torch(draft, target_probs, accept_uniforms, target_uniforms) -> Acceptance:
    tokens = draft.tokens.clamp(min=0)
    target_prob = target_probs[:, :-1].gather(-1, tokens[..., None]).squeeze(-1)
    draft_prob = draft.probs.gather(-1, tokens[..., None]).squeeze(-1)
    steps = arange(draft.size + 1, tokens.device)
    valid = steps[:-1] < draft.num_nodes[:, None]
    # Strict and multiplied out: a token of target probability 0 is rejected, also by the number 0.
    passes = (accept_uniforms * draft_prob < target_prob) & valid
    num_accepted = passes.cumprod(1, dtype=torch.long).sum(1)
    path = torch.minimum(steps, num_accepted[:, None])

    new_tokens = sample_torch(recovered_probs(draft, target_probs, num_accepted), pick(target_uniforms, num_accepted))
    return Acceptance.of_path(tokens, num_accepted, path, new_tokens)


def recovered_probs(
    draft: DraftTree,
    target_probs: torch.FloatTensor,
    num_accepted: torch.LongTensor,
    ratios: torch.FloatTensor | None = None,
) -> torch.FloatTensor:
    """Unnormalised distribution `(B, V)` of the token that follows the accepted part of a chain.

    max(ratio p - q, 0) after a rejection, with ratios `(B, N)` of 1 by default, and p after the last draft token.
    """
    rejected = num_accepted < draft.num_nodes
    target = distributions_at(target_probs, num_accepted)
    drafted = distributions_at(draft.probs, num_accepted.clamp(max=draft.size - 1))
    scaled = target
    if ratios is not None:
        ratio = pick(F.pad(ratios, (1, 0), value=1.0), num_accepted).masked_fill_(~rejected, 1.0)
        scaled = ratio[:, None].to(target) * target
    residual = (scaled - drafted.masked_fill_(~rejected[:, None], 0.0)).clamp_(min=0)
    # Where both differ by rounding only nothing is left; then p itself is right to the same rounding.
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)


def _reject_tree_torch(draft, target_probs, accept_uniforms, target_uniforms) -> Acceptance:
    first_child, next_sibling = family(draft)
    tokens = draft.tokens.clamp(min=0)
    on_path = torch.zeros_like(tokens, dtype=torch.bool)
    node = torch.zeros_like(draft.num_nodes)
    candidate = pick(first_child, node)
    target = distributions_at(target_probs, node)
    drafted = distributions_at(draft.probs, (candidate - 1).clamp_(min=0))

    for _ in range(draft.size):
        tried = candidate > 0
        if nowhere(tried):
            break
        draft_node = (candidate - 1).clamp_(min=0)
        token = pick(tokens, draft_node)
        passes = pick(accept_uniforms, draft_node) * pick(drafted, token) < pick(target, token)
        accepted, rejected = tried & passes, tried & ~passes

        residual, has_residual = _normalize((target - drafted).clamp_(min=0))
        remaining, has_remaining = _normalize(drafted.scatter(1, token[:, None], 0.0))
        # Nothing left of p - q: rejected by rounding only, p stands. Nothing left of q: no sibling was drawn from it.
        target = torch.where((rejected & has_residual)[:, None], residual, target)
        sibling = pick(next_sibling, candidate) * (has_residual & has_remaining)

        on_path.scatter_(1, draft_node[:, None], (pick(on_path, draft_node) | accepted)[:, None])
        node = torch.where(accepted, candidate, node)
        candidate = torch.where(accepted, pick(first_child, candidate), sibling * tried)
        target = torch.where(accepted[:, None], distributions_at(target_probs, node), target)
        children = distributions_at(draft.probs, (candidate - 1).clamp_(min=0))
        drafted = torch.where(accepted[:, None], children, remaining)

    num_accepted, path = tree_path(draft, on_path)
    return Acceptance.of_path(tokens, num_accepted, path, sample_torch(target, pick(target_uniforms, node)))


def tree_path(draft: DraftTree, on_path: torch.BoolTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
    """`num_accepted` and `path` of a tree from the mask `(B, N)` of the nodes on one path from the anchor."""
    nodes = arange(draft.size + 1, on_path.device)[1:] * on_path
    # Nodes off the path write the anchor's index to the anchor's place.
    depths = draft.topology.depths[..., 1:] * on_path
    path = F.pad(torch.zeros_like(nodes), (1, 0)).scatter_(1, depths, nodes)
    return on_path.sum(1), path.cummax(1).values


def family(draft: DraftTree) -> tuple[torch.LongTensor, torch.LongTensor]:
    """First child and next sibling of each verified node, both `(B, T)`, 0 where there is none."""
    nodes = arange(draft.size + 1, draft.tokens.device)
    exists = (nodes > 0) & (nodes <= draft.num_nodes[:, None])
    parents = draft.topology.parents
    is_child = parents[..., None, :] == nodes[:, None]
    is_later_sibling = (parents[..., None, :] == parents[..., :, None]).triu(1)
    # argmax finds the first, and gives 0 where there is none.
    first_child = (is_child & exists[:, None, :]).byte().argmax(-1)
    next_sibling = (is_later_sibling & exists[:, None, :]).byte().argmax(-1)
    return first_child, next_sibling


def _normalize(weights: torch.FloatTensor) -> tuple[torch.FloatTensor, torch.BoolTensor]:
    """Divides `(B, V)` in place by the row sums; rows of zeros stay, and the mask `(B,)` tells which are not."""
    total = weights.sum(-1, keepdim=True)
    has_mass = total > 0
    return weights.div_(total.masked_fill_(~has_mass, 1.0)), has_mass.squeeze(1)


def check_probs(draft: DraftTree) -> None:
    """Raises a `ValueError` if draft tokens come without the distributions that they were drawn from."""
    if draft.probs is None:
        raise ValueError(
            "Rejection sampling needs the distributions that the draft tokens were drawn from, but the draft has "
            "`probs=None`. Use `follow` for draft tokens that were not drawn at random."
        )


@triton.jit
def _follow_kernel(
    draft_tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N] or [N], -1: the anchor
    num_nodes_ptr,  # [B]
    node_tokens_ptr,  # [B, T]
    num_accepted_ptr,  # [B], written
    path_ptr,  # [B, T], written
    committed_ptr,  # [B, T], written
    stride_parents,
    N,
    BLOCK_T: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_T)
    is_node = index < tl.minimum(tl.load(num_nodes_ptr + row), N)
    tokens = tl.load(draft_tokens_ptr + row * N + index, mask=is_node, other=0)
    parents = tl.load(parents_ptr + row * stride_parents + index, mask=is_node, other=-2)

    path = tl.zeros([BLOCK_T], tl.int32)
    committed = tl.zeros([BLOCK_T], tl.int64)
    depth = -1
    child = 0
    while child < BLOCK_T:
        depth += 1
        token = tl.load(node_tokens_ptr + row * (N + 1) + child)
        path = tl.where(index >= depth, child, path)
        committed = tl.where(index == depth, token, committed)
        # Children come after their parent, so that every walk ends.
        is_followed = (parents + 1 == child) & (index >= child) & (tokens == token)
        child = tl.min(tl.where(is_followed, index + 1, BLOCK_T), axis=0)

    tl.store(num_accepted_ptr + row, depth)
    tl.store(path_ptr + row * (N + 1) + index, path, mask=index <= N)
    tl.store(committed_ptr + row * (N + 1) + index, committed, mask=index <= N)


def _follow_triton(draft, node_tokens) -> Acceptance:
    acceptance, (tokens, parents, num_nodes) = _empty_acceptance(node_tokens), _tree_tensors(draft)
    with torch.cuda.device_of(node_tokens):
        _follow_kernel[(draft.batch_size,)](
            tokens, parents, num_nodes, node_tokens.contiguous(), acceptance.num_accepted, acceptance.path,
            acceptance.tokens, parents.stride(0), draft.size, BLOCK_T=triton.next_power_of_2(draft.size + 1),
            num_warps=1,
        )  # fmt: skip
    return acceptance


@triton.jit
def _residual(
    target_ptr,  # [V]
    draft_ptr,  # [V], unread where scale is 0
    scale, ids, V,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """max(p - scale q, 0) at some ids, and q there; NaN stays NaN."""
    target = tl.load(target_ptr + ids, mask=ids < V, other=0.0).to(DTYPE)
    num_drafted = tl.where(scale > 0, V, 0)
    draft = tl.load(draft_ptr + ids, mask=ids < num_drafted, other=0.0).to(DTYPE)
    # One rounding, in all kernels: what is positive here must be positive there.
    difference = tl.fma(tl.zeros_like(draft) - scale.to(DTYPE), draft, target)
    return tl.where(difference < 0, 0.0, difference), draft


@triton.jit
def _judge_kernel(
    draft_tokens_ptr,  # [B, N]
    parents_ptr,  # [B, N] or [N], -1: the anchor
    num_nodes_ptr,  # [B]
    draft_probs_ptr,  # [B, N, V]
    target_probs_ptr,  # [B, T, V]
    accept_uniforms_ptr,  # [B, N]
    next_node_ptr,  # [B, T], written: the accepted child as a verified node, T if there is none
    first_child_ptr,  # [B, T], written: the draft node whose q belongs to the children
    scale_ptr,  # [B, T], written: c of the distribution p_k that is left
    stride_parents,
    N, V,
    DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1)
    index = tl.arange(0, BLOCK_N)
    parents_ptr += row * stride_parents
    draft_tokens_ptr += row * N
    is_node = index < tl.minimum(tl.load(num_nodes_ptr + row), N)
    parents = tl.load(parents_ptr + index, mask=is_node, other=-2)
    # Children come after their parent, so that every walk ends.
    is_child = (parents + 1 == node) & (index >= node)
    first = tl.min(tl.where(is_child, index, BLOCK_N), axis=0)
    target_ptr = target_probs_ptr + (row * (N + 1) + node) * V
    draft_ptr = draft_probs_ptr + (row * N + first) * V

    scale = tl.full([], 0.0, tl.float64)
    target_mass = tl.full([], 1.0, tl.float64)  # P_k
    draft_mass = tl.full([], 1.0, tl.float64)  # Q_k
    next_node = N + 1
    child = first
    while child < BLOCK_N:
        token = tl.maximum(tl.load(draft_tokens_ptr + child), 0)
        draft_prob = tl.load(draft_ptr + token).to(tl.float64)
        target_prob = tl.load(target_ptr + token).to(tl.float64) - scale * draft_prob
        uniform = tl.load(accept_uniforms_ptr + row * N + child).to(tl.float64)
        # Strict and multiplied out: a token of target probability 0 is rejected, also by the number 0.
        if uniform * draft_prob * target_mass < target_prob * draft_mass:
            next_node = child + 1
            child = BLOCK_N
        else:
            next_scale = scale + target_mass / draft_mass
            target_sums = tl.zeros([BLOCK_V], DTYPE)
            draft_sums = tl.zeros([BLOCK_V], DTYPE)
            for start in range(0, V, BLOCK_V):
                ids = start + tl.arange(0, BLOCK_V)
                residual, draft = _residual(target_ptr, draft_ptr, next_scale, ids, V, DTYPE)
                for sibling in range(first, child + 1):
                    is_sibling = tl.load(parents_ptr + sibling) + 1 == node
                    tried = tl.where(is_sibling, tl.maximum(tl.load(draft_tokens_ptr + sibling), 0), V)
                    draft = tl.where(ids == tried, 0.0, draft)
                target_sums += residual
                draft_sums += draft
            target_mass = tl.sum(target_sums, axis=0).to(tl.float64)
            draft_mass = tl.sum(draft_sums, axis=0).to(tl.float64)
            # Nothing left of p - q: rejected by rounding only, p stands. Nothing left of q: no sibling was drawn
            # from it.
            scale = tl.where(target_mass > 0, next_scale, scale)
            sibling = tl.min(tl.where(is_child & (index > child), index, BLOCK_N), axis=0)
            child = tl.where((target_mass > 0) & (draft_mass > 0), sibling, BLOCK_N)

    place = row * (N + 1) + node
    tl.store(next_node_ptr + place, next_node)
    tl.store(first_child_ptr + place, first)
    tl.store(scale_ptr + place, scale)


@triton.jit
def _commit_kernel(
    draft_tokens_ptr,  # [B, N]
    draft_probs_ptr,  # [B, N, V]
    target_probs_ptr,  # [B, T, V]
    target_uniforms_ptr,  # [B, T]
    next_node_ptr,  # [B, T]
    first_child_ptr,  # [B, T]
    scale_ptr,  # [B, T]
    sums_ptr,  # [B, C]
    arrivals_ptr,  # [B], programs that have ended
    num_accepted_ptr,  # [B], written
    path_ptr,  # [B, T], written
    committed_ptr,  # [B, T], written
    N, V, C,
    BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    # A program: a row, and some blocks of the vocabulary. All walk along the path, to where a token is drawn.
    DTYPE: tl.constexpr = sums_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_T)
    path = tl.zeros([BLOCK_T], tl.int32)
    committed = tl.zeros([BLOCK_T], tl.int64)
    depth = 0
    last = 0
    node = tl.load(next_node_ptr + row * (N + 1))
    while node <= N:
        token = tl.maximum(tl.load(draft_tokens_ptr + row * N + node - 1), 0)
        committed = tl.where(index == depth, token, committed)
        depth += 1
        path = tl.where(index >= depth, node, path)
        last = node
        node = tl.load(next_node_ptr + row * (N + 1) + node)

    place = row * (N + 1) + last
    scale = tl.load(scale_ptr + place)
    target_ptr = target_probs_ptr + place * V
    draft_ptr = draft_probs_ptr + (row * N + tl.load(first_child_ptr + place)) * V
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ids = blocks[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    # A checker takes what only a kernel may call for a function that raises.
    residual, _ = _residual(target_ptr, draft_ptr, scale, ids, V, DTYPE)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(sums_ptr + row * C + blocks, tl.sum(residual, axis=1), mask=blocks < C)
    if ends_last(arrivals_ptr + row, tl.num_programs(1)):
        uniform = tl.load(target_uniforms_ptr + place).to(tl.float64)
        block, rest, has_law = find_block(sums_ptr + row * C, uniform, C, BLOCK_C)
        chosen = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        inside, __ = _residual(target_ptr, draft_ptr, scale, chosen, V, DTYPE)
        inside = inside.to(tl.float64)
        choice = block * BLOCK_SIZE + first_above(inside, tl.cumsum(inside, axis=0), rest)
        committed = tl.where(index == depth, tl.where(has_law, choice, -1), committed)
        tl.store(num_accepted_ptr + row, depth)
        tl.store(path_ptr + row * (N + 1) + index, path, mask=index <= N)
        tl.store(committed_ptr + row * (N + 1) + index, committed, mask=index <= N)


def _reject_triton(draft, target_probs, accept_uniforms, target_uniforms) -> Acceptance:
    (rows, num_nodes, vocab_size), device = target_probs.shape, target_probs.device
    num_blocks = triton.cdiv(vocab_size, BLOCK_SIZE)
    precision = torch.promote_types(torch.promote_types(target_probs.dtype, draft.probs.dtype), torch.float32)
    acceptance, (tokens, parents, valid_nodes) = _empty_acceptance(target_uniforms), _tree_tensors(draft)
    next_node, first_child = torch.empty((2, rows, num_nodes), dtype=torch.int32, device=device)
    scale = torch.empty_like(next_node, dtype=torch.float64)
    sums = target_probs.new_empty((rows, num_blocks), dtype=precision)
    probs, decisions = (draft.probs.contiguous(), target_probs.contiguous()), (next_node, first_child, scale)
    with torch.cuda.device_of(target_probs):
        _judge_kernel[(rows, num_nodes)](
            tokens, parents, valid_nodes, *probs, accept_uniforms.contiguous(), *decisions, parents.stride(0),
            draft.size, vocab_size, DTYPE=tl.float64 if precision == torch.float64 else tl.float32,
            BLOCK_N=triton.next_power_of_2(draft.size),
            BLOCK_V=min(IDS_PER_STEP, triton.next_power_of_2(vocab_size)), num_warps=8,
        )  # fmt: skip
        _commit_kernel[rows, triton.cdiv(num_blocks, BLOCKS_PER_PROGRAM)](
            tokens, *probs, target_uniforms.contiguous(), *decisions, sums, arrivals(rows, device),
            acceptance.num_accepted, acceptance.path, acceptance.tokens, draft.size, vocab_size, num_blocks,
            BLOCKS=BLOCKS_PER_PROGRAM, BLOCK_T=triton.next_power_of_2(num_nodes),
            BLOCK_C=triton.next_power_of_2(num_blocks), BLOCK_SIZE=BLOCK_SIZE, num_warps=4,
        )  # fmt: skip
    return acceptance


def _tree_tensors(draft: DraftTree) -> tuple[torch.Tensor, ...]:
    """Tokens and parents `(B, N)`, and the numbers of valid nodes `(B,)`."""
    parents = draft.parents.contiguous().expand_as(draft.tokens)
    return draft.tokens.contiguous(), parents, draft.num_nodes.contiguous()


def _empty_acceptance(values: torch.Tensor) -> Acceptance:
    """An outcome to be written, for verified nodes `(B, T)`."""
    shapes = values.shape[:1], values.shape, values.shape
    return Acceptance(*(torch.empty(shape, dtype=torch.long, device=values.device) for shape in shapes))
