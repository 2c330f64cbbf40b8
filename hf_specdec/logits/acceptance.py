"""Acceptance rules: which draft tokens are kept, and the one token that the target adds to them.

Random numbers come in as tensors and integers go out, so another implementation of a rule can be held against this one
by equality. These leave the target's distribution as it is:

- `follow`: the target chooses a token at every node (its argmax, or one draw), and the path goes where the choices
  lead. Exact for every draft that does not depend on these choices.
- `reject_chain`: Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1, for draft tokens drawn from known
  distributions.
- `reject_tree`: the same over siblings drawn without replacement (recursive rejection sampling: Jeon et al. 2024,
  arXiv:2402.14160; Chen et al. 2024, arXiv:2402.12374, Algorithm 2).
- `reject_block`: block verification of drawn chains (Sun et al. 2024, arXiv:2403.10444).

And these do not:

- `accept_typical`: typical acceptance (Cai et al. 2024, arXiv:2401.10774, section 2.3.1).
- `accept_synthetic`: given acceptance rates, whatever the tokens are.

Shapes: B rows, N draft nodes, T = N + 1 verified nodes (node 0 is the anchor, node i + 1 is draft node i),
V vocabulary. In the equations p is the target's and q the draft's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from ..drafts import DraftTree


# Entries of the vocabulary that `sample_from_probs` first treats as one.
BLOCK_SIZE = 256


@dataclass
class Acceptance:
    """The outcome of one verification; a row commits `num_accepted + 1` tokens.

    Attributes:
        num_accepted (`torch.LongTensor` of shape `(B,)`):
            Accepted draft tokens, without the recovered or bonus token.
        path (`torch.LongTensor` of shape `(B, T)`):
            Verified nodes from the anchor (entry 0, node 0) along the accepted draft nodes (entries 1 to
            `num_accepted`); further entries repeat the last one.
        tokens (`torch.LongTensor` of shape `(B, T)`):
            Committed tokens: the accepted draft tokens, then the target's new token at index `num_accepted`, then
            zeros.
    """

    num_accepted: torch.LongTensor
    path: torch.LongTensor
    tokens: torch.LongTensor


def best_tokens(scores: torch.Tensor) -> torch.LongTensor:
    """The id of the highest score, the first of equal ones: scores of shape `(..., V)` to ids of shape `(...)`."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    # torch's own is not vectorised on CPU: 0.11 ms for 6 x 32k in float32, 0.64 in bfloat16, against 0.01 and 0.02.
    return torch.from_numpy(np.asarray(scores.float().numpy().argmax(-1)))


def sample_from_probs(probs: torch.FloatTensor, uniform: torch.FloatTensor) -> torch.LongTensor:
    """Draws one id per distribution by its inverse CDF: the smallest id whose cumulative sum exceeds uniform * total.

    An id of probability 0 is never returned. A row's id does not depend on the rows around it. Cumulative sums are
    taken in float64 over blocks of the vocabulary, then inside one block, so that the tail of a vocabulary of any
    size is drawn with its own probabilities.

    Args:
        probs (`torch.FloatTensor` of shape `(..., V)`): Probabilities, or weights with any positive sum.
        uniform (`torch.FloatTensor` of shape `(...)`): Numbers in [0, 1), best in float64.

    Returns:
        `torch.LongTensor` of shape `(...)`: The ids; -1 for a row without a positive finite sum (all zero, or with
        NaN or infinity), which no embedding accepts as a token.
    """
    vocab_size = probs.shape[-1]
    precision = _widest_float(probs.device)
    masses = _block_sums(probs).to(precision)
    cumulative = masses.cumsum(-1)
    total = cumulative[..., -1]
    threshold = (uniform.to(precision) * total).unsqueeze(-1)
    block = _first_above(masses, cumulative, threshold).unsqueeze(-1)
    rest = threshold - (cumulative - masses).gather(-1, block)

    ids = block * BLOCK_SIZE + _arange(min(BLOCK_SIZE, vocab_size), probs.device)
    weights = probs.gather(-1, ids.clamp(max=vocab_size - 1)).to(precision).masked_fill_(ids >= vocab_size, 0.0)
    choice = block.squeeze(-1) * BLOCK_SIZE + _first_above(weights, weights.cumsum(-1), rest)
    return choice.masked_fill_(~((total > 0) & (total < torch.inf)), -1)


def follow(draft: DraftTree, node_tokens: torch.LongTensor) -> Acceptance:
    """Follows the target's own choices: from each node to the child that carries the node's token, while there is one.

    Greedy decoding with argmax choices. With one draw per node from the target's processed distribution, exact
    sampling for every draft that was made without looking at these draws: the committed tokens are the draws
    themselves. Of siblings with the same token the first is followed, whatever is below the others.

    Args:
        draft (`DraftTree`): The drafts; `probs` are not used.
        node_tokens (`torch.LongTensor` of shape `(B, T)`): The target's choice after each verified node.

    Returns:
        `Acceptance`: The accepted path and the committed tokens.
    """
    if draft.size == 0:
        return _nothing_accepted(node_tokens)
    valid = _arange(draft.size, node_tokens.device) < draft.num_nodes[:, None]
    if draft.is_chain:
        followed = (draft.tokens == node_tokens[:, :-1]) & valid
        num_accepted, path = _chain_path(followed)
    else:
        parents = draft.topology.parents[..., 1:].expand_as(draft.tokens)
        followed = (draft.tokens == node_tokens.gather(1, parents)) & valid
        siblings = parents[:, :, None] == parents[:, None, :]
        earlier_twin = (siblings.tril(-1) & followed[:, None, :]).any(-1)
        followed &= ~earlier_twin
        ancestors = draft.topology.ancestors[..., 1:, 1:]
        num_accepted, path = _tree_path(draft, ~(ancestors & ~followed[:, None, :]).any(-1))
    is_committed = _arange(draft.size + 1, node_tokens.device) <= num_accepted[:, None]
    return Acceptance(num_accepted, path, node_tokens.gather(1, path) * is_committed)


def reject_chain(
    draft: DraftTree,
    target_probs: torch.FloatTensor,
    accept_uniforms: torch.FloatTensor,
    target_uniforms: torch.FloatTensor,
) -> Acceptance:
    """Rejection sampling of a chain (Leviathan et al. 2023, Algorithm 1).

    Draft token x is accepted iff u q(x) < p(x). The new token is drawn from norm(max(p - q, 0)) after a rejection and
    from p behind the last draft token.

    Args:
        draft (`DraftTree`): Chains with `probs`, the distributions the tokens were drawn from.
        target_probs (`torch.FloatTensor` of shape `(B, T, V)`): The target's processed distribution after each node.
        accept_uniforms (`torch.FloatTensor` of shape `(B, N)`): Number in [0, 1) of each draft token's test.
        target_uniforms (`torch.FloatTensor` of shape `(B, T)`): Number in [0, 1) of the draw after each node.

    Returns:
        `Acceptance`: The accepted path and the committed tokens.
    """
    if draft.size == 0:
        return _nothing_accepted(sample_from_probs(target_probs, target_uniforms))
    _check_probs(draft)
    tokens = draft.tokens.clamp(min=0)
    target_prob = target_probs[:, :-1].gather(-1, tokens[..., None]).squeeze(-1)
    draft_prob = draft.probs.gather(-1, tokens[..., None]).squeeze(-1)
    valid = _arange(draft.size, tokens.device) < draft.num_nodes[:, None]
    # Strict and multiplied out: a token of target probability 0 is rejected, also by the number 0.
    num_accepted, path = _chain_path((accept_uniforms * draft_prob < target_prob) & valid)

    rejected = num_accepted < draft.num_nodes
    target = _distributions_at(target_probs, num_accepted)
    drafted = _distributions_at(draft.probs, num_accepted.clamp(max=draft.size - 1))
    residual = (target - drafted.masked_fill_(~rejected[:, None], 0.0)).clamp_(min=0)
    # p and q that differ by rounding only leave nothing; then p itself is right to the same rounding.
    recovered = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    new_tokens = sample_from_probs(recovered, target_uniforms.gather(1, num_accepted[:, None]).squeeze(1))
    return _accepted(tokens, num_accepted, path, new_tokens)


def reject_tree(
    draft: DraftTree,
    target_probs: torch.FloatTensor,
    accept_uniforms: torch.FloatTensor,
    target_uniforms: torch.FloatTensor,
) -> Acceptance:
    """Recursive rejection sampling of trees whose siblings, in index order, were drawn without replacement.

    From the anchor on, the children x of a node are tried in turn: x is accepted iff u q(x) < p(x); else
    p <- norm(max(p - q, 0)) and q <- norm(q without x), and the next sibling is tried. The new token is drawn from
    what p is when no child is left.

    Args:
        draft (`DraftTree`):
            Trees with `probs`: entry i is the distribution that node i was drawn from before its earlier siblings
            were removed, so siblings hold equal rows.
        target_probs (`torch.FloatTensor` of shape `(B, T, V)`): The target's processed distribution after each node.
        accept_uniforms (`torch.FloatTensor` of shape `(B, N)`):
            Number in [0, 1) of each draft token's test, a separate one for each sibling.
        target_uniforms (`torch.FloatTensor` of shape `(B, T)`): Number in [0, 1) of the draw after each node.

    Returns:
        `Acceptance`: The accepted path and the committed tokens.
    """
    if draft.size == 0:
        return _nothing_accepted(sample_from_probs(target_probs, target_uniforms))
    _check_probs(draft)
    first_child, next_sibling = _family(draft)
    tokens = draft.tokens.clamp(min=0)
    on_path = torch.zeros_like(tokens, dtype=torch.bool)
    node = torch.zeros_like(draft.num_nodes)
    candidate = _pick(first_child, node)
    target = _distributions_at(target_probs, node)
    drafted = _distributions_at(draft.probs, (candidate - 1).clamp_(min=0))

    for _ in range(draft.size):
        tried = candidate > 0
        if tried.device.type == "cpu" and not tried.any():
            break
        draft_node = (candidate - 1).clamp_(min=0)
        token = _pick(tokens, draft_node)
        passes = _pick(accept_uniforms, draft_node) * _pick(drafted, token) < _pick(target, token)
        accepted, rejected = tried & passes, tried & ~passes

        residual, has_residual = _normalize((target - drafted).clamp_(min=0))
        remaining, has_remaining = _normalize(drafted.scatter(1, token[:, None], 0.0))
        # Nothing left of p - q: rejected by rounding only, p stands. Nothing left of q: no sibling was drawn from it.
        target = torch.where((rejected & has_residual)[:, None], residual, target)
        sibling = _pick(next_sibling, candidate) * (has_residual & has_remaining)

        on_path.scatter_(1, draft_node[:, None], (_pick(on_path, draft_node) | accepted)[:, None])
        node = torch.where(accepted, candidate, node)
        candidate = torch.where(accepted, _pick(first_child, candidate), sibling * tried)
        target = torch.where(accepted[:, None], _distributions_at(target_probs, node), target)
        children = _distributions_at(draft.probs, (candidate - 1).clamp_(min=0))
        drafted = torch.where(accepted[:, None], children, remaining)

    num_accepted, path = _tree_path(draft, on_path)
    return _accepted(tokens, num_accepted, path, sample_from_probs(target, _pick(target_uniforms, node)))


def reject_block(
    draft: DraftTree,
    target_probs: torch.FloatTensor,
    accept_uniforms: torch.FloatTensor,
    target_uniforms: torch.FloatTensor,
) -> Acceptance:
    """Block verification of a chain (Sun et al. 2024, Algorithm 2): accepts at least as much as `reject_chain`.

    With P and h of [`block_thresholds`], the first n draft tokens are accepted for the largest n with u_n < h_n; a
    test that fails does not end the draft. The new token is drawn from norm(max(P_n p_n - q_n, 0)), and from p_n
    behind the last draft token.

    Args:
        draft (`DraftTree`):
            Chains with `probs`, the distributions the tokens were drawn from. A draft may end where its own tokens
            made the drafter stop.
        target_probs (`torch.FloatTensor` of shape `(B, T, V)`): The target's processed distribution after each node.
        accept_uniforms (`torch.FloatTensor` of shape `(B, N)`):
            Number in [0, 1) of each draft token's test. All of them are used, so none may be used again.
        target_uniforms (`torch.FloatTensor` of shape `(B, T)`): Number in [0, 1) of the draw after each node.

    Returns:
        `Acceptance`: The accepted path and the committed tokens.
    """
    if draft.size == 0:
        return _nothing_accepted(sample_from_probs(target_probs, target_uniforms))
    _check_probs(draft)
    ratios, thresholds = block_thresholds(draft, target_probs)
    depths = _arange(draft.size + 1, target_probs.device)
    # Strict: a prefix of target probability 0 is rejected, also by the number 0.
    num_accepted = ((accept_uniforms < thresholds) * depths[1:]).amax(1)
    path = torch.minimum(depths, num_accepted[:, None])

    rejected = num_accepted < draft.num_nodes
    ratio = _pick(F.pad(ratios, (1, 0), value=1.0), num_accepted).masked_fill_(~rejected, 1.0)
    target = _distributions_at(target_probs, num_accepted)
    drafted = _distributions_at(draft.probs, num_accepted.clamp(max=draft.size - 1))
    residual = (ratio[:, None].to(target) * target - drafted.masked_fill_(~rejected[:, None], 0.0)).clamp_(min=0)
    # P_n p_n and q_n that differ by rounding only leave nothing; then p_n itself is right to the same rounding.
    recovered = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    new_tokens = sample_from_probs(recovered, _pick(target_uniforms, num_accepted))
    return _accepted(draft.tokens.clamp(min=0), num_accepted, path, new_tokens)


def block_thresholds(draft: DraftTree, target_probs: torch.FloatTensor) -> tuple[torch.FloatTensor, torch.FloatTensor]:
    """What `reject_block` tests a chain's tokens with.

    With p_i and q_i the laws behind draft tokens x_1 to x_i, and P_0 = 1:

        P_i = min(1, P_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i))
        R_i = sum_y max(P_i p_i(y) - q_i(y), 0)
        h_i = R_i / (R_i + 1 - P_i)               h_i = P_i for the last draft token of a row

    Args:
        draft (`DraftTree`): Chains with `probs`, at least one node wide.
        target_probs (`torch.FloatTensor` of shape `(B, T, V)`): The target's processed distribution after each node.

    Returns:
        P and h, both of shape `(B, N)` in float64 where the device has it; h is 0 at padding, where P means nothing.
    """
    tokens = draft.tokens.clamp(min=0)
    precision = _widest_float(tokens.device)
    target_prob = target_probs[:, :-1].gather(-1, tokens[..., None]).squeeze(-1).to(precision)
    draft_prob = draft.probs.gather(-1, tokens[..., None]).squeeze(-1).to(precision)
    # A drawn token has q > 0, but for rounding; the bound keeps 0 / 0 at the 0 of its numerator.
    steps = target_prob.log() - draft_prob.clamp(min=torch.finfo(precision).tiny).log()
    total = steps.cumsum(1)
    # A sum that is cut at 0 after every step is the plain sum less its highest value so far.
    log_ratios = total - total.cummax(1).values.clamp(min=0)
    ratios, shortfall = log_ratios.exp(), -log_ratios.expm1()

    inner = ratios[:, :-1, None].to(target_probs.dtype) * target_probs[:, 1:-1] - draft.probs[:, 1:]
    excess = F.pad(inner.clamp_(min=0).sum(-1), (0, 1)).to(precision)
    both = excess + shortfall
    # Where both parts vanish the laws agree, and the token is right.
    thresholds = torch.where(both == 0, 1.0, excess / both)
    depths = _arange(draft.size + 1, tokens.device)[1:]
    thresholds = torch.where(depths == draft.num_nodes[:, None], ratios, thresholds)
    return ratios, thresholds.masked_fill(depths > draft.num_nodes[:, None], 0.0)


def accept_typical(draft: DraftTree, scores: torch.FloatTensor, threshold: float, alpha: float) -> Acceptance:
    """Typical acceptance (Cai et al. 2024, section 2.3.1). Changes the distribution.

    Draft token x is accepted iff p(x) > min(threshold, alpha exp(-H)), H = -sum_y p(y) log(p(y) + 1e-5). Of the paths
    whose tokens are all accepted the longest wins, among equals that of the largest sum of log p, then the first. The
    new token is the best one of p.

    Args:
        draft (`DraftTree`): The drafts; `probs` are not used.
        scores (`torch.FloatTensor` of shape `(B, T, V)`): The target's processed scores after each node: p = softmax.
        threshold (`float`): Probability that is always enough.
        alpha (`float`): Factor of exp(-H).

    Returns:
        `Acceptance`: The accepted path and the committed tokens.
    """
    log_probs = scores.log_softmax(-1)
    probs = log_probs.exp()
    best = best_tokens(scores)
    # Marked as `sample_from_probs` does: a law without any token (NaN, or all impossible).
    best = best.masked_fill(~(probs.gather(-1, best[..., None]).squeeze(-1) > 0), -1)
    if draft.size == 0:
        return _nothing_accepted(best)
    entropy = -(probs * (probs + 1e-5).log()).sum(-1)
    limits = ((-entropy).exp() * alpha).clamp(max=threshold)

    tokens = draft.tokens.clamp(min=0)
    parents = draft.topology.parents[..., 1:].expand_as(tokens)
    token_log_probs = log_probs.flatten(1).gather(1, parents * scores.shape[-1] + tokens)
    valid = _arange(draft.size, tokens.device) < draft.num_nodes[:, None]
    accepted = (token_log_probs.exp() > limits.gather(1, parents)) & valid
    num_accepted, path = _tree_path(draft, _best_path(draft, accepted, token_log_probs))
    return _accepted(tokens, num_accepted, path, _pick(best, path[:, -1]))


def _best_path(draft: DraftTree, accepted: torch.BoolTensor, log_probs: torch.FloatTensor) -> torch.BoolTensor:
    """Mask `(B, N)` of the longest path of accepted nodes from the anchor, among equals the likeliest."""
    ancestors = draft.topology.ancestors[..., 1:, 1:].expand(*accepted.shape, draft.size)
    reached = ~(ancestors & ~accepted[:, None, :]).any(-1)
    lengths = draft.topology.depths[..., 1:] * reached
    summable = log_probs.masked_fill(~accepted, 0.0).to(_widest_float(accepted.device))
    likelihood = torch.where(ancestors, summable[:, None, :], 0.0).sum(-1)
    last = likelihood.masked_fill(lengths < lengths.amax(1, keepdim=True), -torch.inf).argmax(1)
    return _rows_at(ancestors, last) & reached.gather(1, last[:, None])


def accept_synthetic(
    draft: DraftTree, rates: torch.FloatTensor, accept_uniforms: torch.FloatTensor, node_tokens: torch.LongTensor
) -> Acceptance:
    """Accepts at given rates along the path of first children, whatever the tokens are. The text means nothing.

    Args:
        draft (`DraftTree`): The drafts.
        rates (`torch.FloatTensor` of shape `(D,)`):
            Entry i is the chance that a draft token at depth i + 1 is accepted if its parent is; 0 further down.
        accept_uniforms (`torch.FloatTensor` of shape `(B, D)`): Number in [0, 1) of the test at each depth.
        node_tokens (`torch.LongTensor` of shape `(B, T)`): The target's choice after each verified node.

    Returns:
        `Acceptance`: The accepted path, and its tokens with the target's choice behind them.
    """
    if draft.size == 0:
        return _nothing_accepted(node_tokens)
    first_child, _ = _family(draft)
    wanted = (accept_uniforms < rates).cumprod(1).sum(1)
    node = torch.zeros_like(draft.num_nodes)
    path = node[:, None].repeat(1, draft.size + 1)
    for depth in range(min(draft.size, rates.numel())):
        child = _pick(first_child, node)
        node = torch.where((child > 0) & (depth < wanted), child, node)
        path[:, depth + 1 :] = node[:, None]
    num_accepted = (path.diff(dim=1) > 0).sum(1)
    return _accepted(draft.tokens.clamp(min=0), num_accepted, path, _pick(node_tokens, node))


def _nothing_accepted(new_tokens: torch.LongTensor) -> Acceptance:
    """The outcome without drafts: the new tokens, of shape `(B, 1)`, alone."""
    path = torch.zeros_like(new_tokens)
    return Acceptance(path[:, 0], path, new_tokens)


def _accepted(tokens, num_accepted, path, new_tokens) -> Acceptance:
    """The outcome of accepted draft tokens, picked from `tokens` `(B, N)` along the path, and new tokens `(B,)`."""
    along_path = F.pad(tokens.gather(1, (path[:, 1:] - 1).clamp_(min=0)), (0, 1))
    committed = along_path * (_arange(path.shape[1], path.device) < num_accepted[:, None])
    return Acceptance(num_accepted, path, committed.scatter_(1, num_accepted[:, None], new_tokens[:, None]))


def _chain_path(accepted: torch.BoolTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
    """`num_accepted` and `path` of a chain whose nodes passed or failed `(B, N)` each on its own."""
    num_accepted = accepted.cumprod(1, dtype=torch.long).sum(1)
    return num_accepted, torch.minimum(_arange(accepted.shape[1] + 1, accepted.device), num_accepted[:, None])


def _tree_path(draft: DraftTree, on_path: torch.BoolTensor) -> tuple[torch.LongTensor, torch.LongTensor]:
    """`num_accepted` and `path` of a tree from the mask `(B, N)` of the nodes on one path from the anchor."""
    nodes = _arange(draft.size + 1, on_path.device)[1:] * on_path
    # Nodes off the path write the anchor's index to the anchor's place.
    depths = draft.topology.depths[..., 1:] * on_path
    path = F.pad(torch.zeros_like(nodes), (1, 0)).scatter_(1, depths, nodes)
    return on_path.sum(1), path.cummax(1).values


def _family(draft: DraftTree) -> tuple[torch.LongTensor, torch.LongTensor]:
    """First child and next sibling of each verified node, both `(B, T)`, 0 where there is none."""
    nodes = _arange(draft.size + 1, draft.tokens.device)
    exists = (nodes > 0) & (nodes <= draft.num_nodes[:, None])
    parents = draft.topology.parents
    is_child = parents[..., None, :] == nodes[:, None]
    is_later_sibling = (parents[..., None, :] == parents[..., :, None]).triu(1)
    # argmax finds the first, and gives 0 where there is none.
    first_child = (is_child & exists[:, None, :]).byte().argmax(-1)
    next_sibling = (is_later_sibling & exists[:, None, :]).byte().argmax(-1)
    return first_child, next_sibling


def _first_above(weights, cumulative, threshold) -> torch.LongTensor:
    """First entry of positive weight whose cumulative sum exceeds the threshold, along the last dimension.

    Where rounding leaves none, the entry of the largest weight. The weights are asked too because a parallel
    cumulative sum may grow by rounding at an entry of weight 0.
    """
    is_above = (cumulative > threshold) & (weights > 0)
    return weights.masked_fill(is_above, torch.inf).argmax(-1)


def _block_sums(probs: torch.FloatTensor) -> torch.FloatTensor:
    """Sums over blocks of `BLOCK_SIZE` ids in float32 or better; the last block may be shorter."""
    dtype = torch.promote_types(probs.dtype, torch.float32)
    num_whole, num_left = divmod(probs.shape[-1], BLOCK_SIZE)
    whole, left = probs.split([num_whole * BLOCK_SIZE, num_left], dim=-1)
    sums = whole.unflatten(-1, (num_whole, BLOCK_SIZE)).sum(-1, dtype=dtype)
    if num_left == 0:
        return sums
    return torch.cat([sums, left.sum(-1, keepdim=True, dtype=dtype)], dim=-1)


def _distributions_at(probs: torch.FloatTensor, index: torch.LongTensor) -> torch.FloatTensor:
    """A copy `(B, V)`, in float32 or better, of entry `index[b]` of each row of `(B, nodes, V)`."""
    return _rows_at(probs, index).to(torch.promote_types(probs.dtype, torch.float32))


def _rows_at(values: torch.Tensor, index: torch.LongTensor) -> torch.Tensor:
    """A copy `(B, X)` of entry `index[b]` of each row of `(B, nodes, X)`."""
    batch_size, num_nodes = values.shape[:2]
    # Whole rows of a matrix are copied faster than by indexing with two tensors.
    return values.flatten(0, 1).index_select(0, _arange(batch_size, values.device) * num_nodes + index)


def _normalize(weights: torch.FloatTensor) -> tuple[torch.FloatTensor, torch.BoolTensor]:
    """Divides `(B, V)` in place by the row sums; rows of zeros stay, and the mask `(B,)` tells which are not."""
    total = weights.sum(-1, keepdim=True)
    has_mass = total > 0
    return weights.div_(total.masked_fill_(~has_mass, 1.0)), has_mass.squeeze(1)


def _pick(values: torch.Tensor, index: torch.LongTensor) -> torch.Tensor:
    """Entry `index[b]` of each row of `(B, X)`."""
    return values.gather(1, index[:, None]).squeeze(1)


def _check_probs(draft: DraftTree) -> None:
    if draft.probs is None:
        raise ValueError(
            "Rejection sampling needs the distributions that the draft tokens were drawn from, but the draft has "
            "`probs=None`. Use `follow` for draft tokens that were not drawn at random."
        )


def _widest_float(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


@lru_cache(maxsize=256)
def _arange(size: int, device: torch.device) -> torch.LongTensor:
    return torch.arange(size, device=device)
