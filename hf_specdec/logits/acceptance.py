"""Acceptance rules: which draft tokens are kept, and the one token that the target adds to them.

Random numbers come in as tensors and integers go out, so another implementation of a rule can be held against this one
by equality. These leave the target's distribution as it is:

- `follow`, `reject_chain`, `reject_tree`, which have kernels and stand in `kernels/acceptance.py`.
- `reject_block`: block verification of drawn chains (Sun et al. 2024, arXiv:2403.10444).

And these do not:

- `accept_typical`: typical acceptance (Cai et al. 2024, arXiv:2401.10774, section 2.3.1).
- `accept_synthetic`: given acceptance rates, whatever the tokens are.

Shapes: B rows, N draft nodes, T = N + 1 verified nodes (node 0 is the anchor, node i + 1 is draft node i),
V vocabulary. In the equations p is the target's and q the draft's distribution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..drafts import DraftTree
from ..kernels.acceptance import Acceptance, check_probs, family, recovered_probs, tree_path
from ..kernels.best import best_tokens
from ..kernels.indexing import arange, pick, rows_at, widest_float
from ..kernels.sampling import sample_from_probs


def with_successors(tokens: torch.LongTensor, logits: torch.Tensor, count: int) -> torch.LongTensor:
    """Each node's token, and after it the ids of the largest logits there, best first.

    Args:
        tokens (`torch.LongTensor` of shape `(B, T)`): The nodes' tokens.
        logits (`torch.Tensor` of shape `(B, T, V)`): The logits after them.
        count (`int`): K, successors that are wanted, at most V.

    Returns:
        `torch.LongTensor` of shape `(B, T, 1 + K)`: -1 where nothing else is possible.
    """
    best = logits.topk(count)
    return torch.cat([tokens[..., None], best.indices.masked_fill(best.values == -torch.inf, -1)], dim=-1)


def reject_block(
    draft: DraftTree,
    target_probs: torch.FloatTensor,
    accept_uniforms: torch.FloatTensor,
    target_uniforms: torch.FloatTensor,
) -> Acceptance:
    """Block verification of a chain (Sun et al. 2024, Algorithm 2): accepts at least as much as `reject_chain`.

    With P and h of [`block_thresholds`], the first n draft tokens are accepted for the largest n with u_n < h_n; a
    test that fails does not end the draft. The new token is drawn from norm(max(P_n p_n - q_n, 0)), and from p_n
    after the last draft token.

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
        return Acceptance.of_new_tokens(sample_from_probs(target_probs, target_uniforms))
    check_probs(draft)
    ratios, thresholds = block_thresholds(draft, target_probs)
    depths = arange(draft.size + 1, target_probs.device)
    # Strict: a prefix of target probability 0 is rejected, also by the number 0.
    num_accepted = ((accept_uniforms < thresholds) * depths[1:]).amax(1)
    path = torch.minimum(depths, num_accepted[:, None])

    recovered = recovered_probs(draft, target_probs, num_accepted, ratios)
    new_tokens = sample_from_probs(recovered, pick(target_uniforms, num_accepted))
    return Acceptance.of_path(draft.tokens.clamp(min=0), num_accepted, path, new_tokens)


def block_thresholds(draft: DraftTree, target_probs: torch.FloatTensor) -> tuple[torch.FloatTensor, torch.FloatTensor]:
    """Ratios and thresholds with which `reject_block` tests a chain's tokens.

    With p_i and q_i the distributions after draft tokens x_1 to x_i, and P_0 = 1:

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
    precision = widest_float(tokens.device)
    target_prob = target_probs[:, :-1].gather(-1, tokens[..., None]).squeeze(-1).to(precision)
    assert draft.probs is not None, "chains without probabilities"
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
    # Where both parts vanish the distributions agree, and the token is right.
    thresholds = torch.where(both == 0, 1.0, excess / both)
    depths = arange(draft.size + 1, tokens.device)[1:]
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
    # Marked as `sample_from_probs` does: a distribution without any token (NaN, or all impossible).
    best = best.masked_fill(~(probs.gather(-1, best[..., None]).squeeze(-1) > 0), -1)
    if draft.size == 0:
        return Acceptance.of_new_tokens(best)
    entropy = -(probs * (probs + 1e-5).log()).sum(-1)
    limits = ((-entropy).exp() * alpha).clamp(max=threshold)

    tokens = draft.tokens.clamp(min=0)
    parents = draft.topology.parents[..., 1:].expand_as(tokens)
    token_log_probs = log_probs.flatten(1).gather(1, parents * scores.shape[-1] + tokens)
    valid = arange(draft.size, tokens.device) < draft.num_nodes[:, None]
    accepted = (token_log_probs.exp() > limits.gather(1, parents)) & valid
    num_accepted, path = tree_path(draft, _best_path(draft, accepted, token_log_probs))
    return Acceptance.of_path(tokens, num_accepted, path, pick(best, path[:, -1]))


def _best_path(draft: DraftTree, accepted: torch.BoolTensor, log_probs: torch.FloatTensor) -> torch.BoolTensor:
    """Mask `(B, N)` of the longest path of accepted nodes from the anchor, among equals the likeliest."""
    ancestors = draft.topology.ancestors[..., 1:, 1:].expand(*accepted.shape, draft.size)
    reached = ~(ancestors & ~accepted[:, None, :]).any(-1)
    lengths = draft.topology.depths[..., 1:] * reached
    summable = log_probs.masked_fill(~accepted, 0.0).to(widest_float(accepted.device))
    likelihood = torch.where(ancestors, summable[:, None, :], 0.0).sum(-1)
    last = likelihood.masked_fill(lengths < lengths.amax(1, keepdim=True), -torch.inf).argmax(1)
    return rows_at(ancestors, last) & reached.gather(1, last[:, None])


def accept_synthetic(
    draft: DraftTree, rates: torch.FloatTensor, accept_uniforms: torch.FloatTensor, node_tokens: torch.LongTensor
) -> Acceptance:
    """Accepts at given rates along the path of first children, whatever the tokens are. The text means nothing.

    Args:
        draft (`DraftTree`): The drafts.
        rates (`torch.FloatTensor` of shape `(D,)`):
            Entry i is the probability that a draft token at depth i + 1 is accepted if its parent is; 0 further down.
        accept_uniforms (`torch.FloatTensor` of shape `(B, D)`): Number in [0, 1) of the test at each depth.
        node_tokens (`torch.LongTensor` of shape `(B, T)`): The target's choice after each verified node.

    Returns:
        `Acceptance`: The accepted path, and its tokens with the target's choice after them.
    """
    if draft.size == 0:
        return Acceptance.of_new_tokens(node_tokens)
    first_child, _ = family(draft)
    wanted = (accept_uniforms < rates).cumprod(1).sum(1)
    node = torch.zeros_like(draft.num_nodes)
    path = node[:, None].repeat(1, draft.size + 1)
    for depth in range(min(draft.size, rates.numel())):
        child = pick(first_child, node)
        node = torch.where((child > 0) & (depth < wanted), child, node)
        path[:, depth + 1 :] = node[:, None]
    num_accepted = (path.diff(dim=1) > 0).sum(1)
    return Acceptance.of_path(draft.tokens.clamp(min=0), num_accepted, path, pick(node_tokens, node))
