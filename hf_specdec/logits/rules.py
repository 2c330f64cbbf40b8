"""Acceptance rules, of which `rejection_sample_method` chooses the one that judges the drafts of a call.

`standard` decides position by position, so the verifier can also apply it node by node. The others judge a draft as a
whole: they need the target's processed scores after all of its nodes. Random numbers come in as tensors and integers
go out, so another implementation of a rule can be held against this one by equality.

- `standard`: `follow` and `reject` of kernels/acceptance.py. Exact.
- `block`: block verification of drawn chains (Sun et al. 2024, arXiv:2403.10444). Exact.
- `typical`: typical acceptance (Cai et al. 2024, arXiv:2401.10774, section 2.3.1). Changes the distribution.
- `synthetic`: given acceptance rates, whatever the tokens are. The text is meaningless.

Shapes: R active rows, N draft nodes, T = N + 1 verified nodes (node 0 is the anchor, node i + 1 is draft node i),
V vocabulary, D rates. In the equations p is the target's and q the draft's distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from transformers.utils import logging

from ..drafts import DraftTree
from ..errors import SpecConfigError
from ..kernels.acceptance import Acceptance, check_probs, family, follow, recovered_probs, reject, tree_path
from ..kernels.best import best_tokens
from ..kernels.indexing import arange, pick, rows_at, widest_float
from ..kernels.sampling import sample_from_probs
from ..settings import SpeculativeConfig
from ..settings.spellings import TYPICAL_ACCEPTANCE
from .processors import ProcessorStack
from .randomness import ACCEPT, TARGET, RowKeys, RowUniforms


logger = logging.get_logger(__name__)


class StandardRule:
    """Follows the target's own choices; rejection sampling for drafts that were drawn."""

    name: ClassVar[str] = "standard"
    judges_whole_drafts: ClassVar[bool] = False  # a node's fate depends on nodes after or beside it
    note: ClassVar[str | None] = None  # what becomes of the text, if it is not the target's any more

    def __init__(self, uniforms: RowUniforms | None, *settings: Any):
        self.samples: bool = uniforms is not None
        self.uniforms: RowUniforms | None = uniforms  # those that the rule reads
        self.settings = settings

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for rules that judge alike, their random numbers apart."""
        return type(self), self.samples, *self.settings

    def keys(self, rows: list[int], positions: list[int]) -> RowKeys | None:
        """The keys of the random numbers of rows whose next tokens have these positions, if the rule reads any."""
        return None if self.uniforms is None else self.uniforms.keys(rows, positions)

    def judge(self, draft: DraftTree, scores: torch.Tensor, keys: RowKeys | None) -> Acceptance:
        """Judges which nodes of the rows' drafts the target accepts, by its processed scores `(R, T, V)`."""
        if not self.samples or draft.probs is None:
            return follow(draft, self.choices(draft, scores, keys))
        # A chain has one test at a position, which is not tested again before it is committed.
        accept_uniforms = keys.at(ACCEPT, draft.size) if draft.is_chain else keys.for_nodes(draft.size)
        return reject(draft, scores.softmax(-1), accept_uniforms, keys.at_depths(TARGET, draft.topology))

    def choices(self, draft: DraftTree, scores: torch.Tensor, keys: RowKeys | None) -> torch.LongTensor:
        """The target's own token after each node, `(R, T)`."""
        if not self.samples:
            return best_tokens(scores)
        return sample_from_probs(scores.softmax(-1), keys.at_depths(TARGET, draft.topology))


class BlockRule(StandardRule):
    """Block verification of drawn chains, see `reject_block`; other drafts are judged as `standard` does."""

    name = "block"
    judges_whole_drafts = True

    def judge(self, draft: DraftTree, scores: torch.Tensor, keys: RowKeys | None) -> Acceptance:
        if draft.probs is None or not draft.is_chain:
            return super().judge(draft, scores, keys)
        # By node and not by position: a position that a later test gave up is judged again in the next cycle.
        accept_uniforms, target_uniforms = keys.for_nodes(draft.size), keys.at_depths(TARGET, draft.topology)
        return reject_block(draft, scores.softmax(-1), accept_uniforms, target_uniforms)


class TypicalRule(StandardRule):
    """Typical acceptance (Cai et al. 2024, section 2.3.1). Draws no numbers.

    Draft token x is accepted iff p(x) > min(threshold, alpha exp(-H)), H = -sum_y p(y) log(p(y) + 1e-5). Of the paths
    whose tokens are all accepted the longest wins, among equals that of the largest sum of log p, then the first. The
    new token is the best one of p.
    """

    name = "typical"
    judges_whole_drafts = True
    note: ClassVar[str | None] = "typical acceptance changes the distribution of the text"

    def __init__(self, uniforms: RowUniforms | None, threshold: float, alpha: float):
        super().__init__(uniforms, threshold, alpha)
        self.uniforms = None

    def judge(self, draft: DraftTree, scores: torch.Tensor, keys: RowKeys | None) -> Acceptance:
        threshold, alpha = self.settings
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
        # The longest path of accepted nodes from the anchor, among equals the likeliest.
        ancestors = draft.topology.ancestors[..., 1:, 1:].expand(*accepted.shape, draft.size)
        reached = ~(ancestors & ~accepted[:, None, :]).any(-1)
        lengths = draft.topology.depths[..., 1:] * reached
        summable = token_log_probs.masked_fill(~accepted, 0.0).to(widest_float(accepted.device))
        likelihood = torch.where(ancestors, summable[:, None, :], 0.0).sum(-1)
        last = likelihood.masked_fill(lengths < lengths.amax(1, keepdim=True), -torch.inf).argmax(1)
        on_path = rows_at(ancestors, last) & reached.gather(1, last[:, None])
        num_accepted, path = tree_path(draft, on_path)
        return Acceptance.of_path(tokens, num_accepted, path, pick(best, path[:, -1]))


class SyntheticRule(StandardRule):
    """Accepts the first i + 1 draft tokens with the probability `rates[i]`, also for a greedy target."""

    name = "synthetic"
    judges_whole_drafts = True
    note: ClassVar[str | None] = "synthetic acceptance: the text is meaningless, only the time counts"

    def __init__(self, uniforms: RowUniforms | None, accept_uniforms: RowUniforms, rates: tuple[float, ...]):
        super().__init__(uniforms, rates)
        self.uniforms = accept_uniforms
        self.rates: torch.Tensor = torch.tensor(conditional_rates(rates), device=accept_uniforms.device)

    def judge(self, draft: DraftTree, scores: torch.Tensor, keys: RowKeys | None) -> Acceptance:
        accept_uniforms = keys.at(ACCEPT, len(self.rates))
        return accept_synthetic(draft, self.rates, accept_uniforms, self.choices(draft, scores, keys))


@dataclass(frozen=True)
class CapturedJudge:
    """Judges drafts of one kind inside of the graph that verifies them, where nothing of the host is asked for."""

    rule: StandardRule
    stack: ProcessorStack  # processors that run in graphs
    is_drawn: bool  # drafts come with the distributions that they were drawn from
    is_chain: bool  # drafts are chains; told of drawn ones alone, to which it matters
    keys: RowKeys | None  # of the rows that are judged now, for a rule that reads random numbers

    @property
    def settings(self) -> tuple[Any, ...] | None:
        """Whatever else a graph has built in; `None` where the target's best tokens decide, of which there is one."""
        is_plain = type(self.rule) is StandardRule and not self.rule.samples and not self.stack
        return None if is_plain else (self.rule.signature, self.stack.signature)

    def judge(self, draft: DraftTree, logits: torch.Tensor, keys: RowKeys) -> Acceptance:
        """Judges drafts by logits `(R, T, V)`, with keys of the graph; a token that could not be drawn is -1."""
        needs_scores = self.rule.samples or bool(self.stack)
        return self.rule.judge(draft, self.stack.all_nodes(logits) if needs_scores else logits, keys)


def acceptance_rule(
    config: SpeculativeConfig | None,
    depth: int,  # most tokens of a draft
    draws: bool | None,  # drafts are drawn; `None`: they may be
    uniforms: RowUniforms | None,  # none for a greedy target
    new_uniforms: Callable[[], RowUniforms],  # where a greedy call needs some
    is_training: bool = False,
) -> StandardRule:
    """The rule of one call. For a greedy target `block` and `typical` are the standard rule."""
    name, options = "standard", None
    if config is not None:
        name, options = config.rejection_sample_method, config.rejection_sample_options
    rule = StandardRule(uniforms)
    if name == "synthetic":
        rates = rates_of_length(options) if isinstance(options, float) else options
        if isinstance(options, float) and depth < len(rates):
            raise SpecConfigError(
                f"`rejection_sample_options`={options} needs drafts of at least {len(rates)} tokens, got {depth} at "
                f"most. Raise `num_speculative_tokens`, or ask for at most {depth + 1} tokens."
            )
        rule = SyntheticRule(uniforms, uniforms or new_uniforms(), rates)
    elif name == "block" and uniforms is not None and draws is not False:
        rule = BlockRule(uniforms)
    elif name == "typical" and uniforms is not None:
        rule = TypicalRule(uniforms, *(options if isinstance(options, tuple) else TYPICAL_ACCEPTANCE))
    if rule.note and is_training:
        raise SpecConfigError(
            f"rejection_sample_method='{rule.name}' is not for a model in training mode: its text would be off policy "
            f"({rule.note}). Use 'standard' or 'block', or call model.eval() if nothing is trained on the text."
        )
    if rule.note:
        logger.warning_once(f"rejection_sample_method='{rule.name}': {rule.note}.")
    return rule


def rates_of_length(length: float) -> tuple[float, ...]:
    """Unconditional acceptance rates that commit `length` tokens per verification: 1, 1, .., then the fraction."""
    whole, fraction = divmod(length - 1, 1)
    return (1.0,) * int(whole) + ((fraction,) if fraction else ())


def conditional_rates(rates: tuple[float, ...]) -> list[float]:
    """Acceptance rates of draft tokens whose predecessor is accepted, from rates for the first 1, 2, ... tokens."""
    return [rate / before if before else 0.0 for before, rate in zip((1.0, *rates), rates)]


def reject_block(
    draft: DraftTree,
    target_probs: torch.FloatTensor,
    accept_uniforms: torch.FloatTensor,  # (R, N), of the draft tokens' tests: all are used, and none may be again
    target_uniforms: torch.FloatTensor,  # (R, T), of the draw after each node
) -> Acceptance:
    """Block verification of a chain (Sun et al. 2024, Algorithm 2): accepts at least as much as `reject`.

    With P and h of [`block_thresholds`], the first n draft tokens are accepted for the largest n with u_n < h_n; a
    test that fails does not end the draft. The new token is drawn from norm(max(P_n p_n - q_n, 0)), and from p_n
    after the last draft token. A draft may end where its own tokens made the drafter stop.
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

    P and h are `(R, N)`, in float64 where the device has it; h is 0 at padding, where P means nothing.
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


def accept_synthetic(
    draft: DraftTree,
    rates: torch.FloatTensor,  # (D,): a draft token at depth i + 1 is accepted so often if its parent is
    accept_uniforms: torch.FloatTensor,  # (R, D), of the tests
    node_tokens: torch.LongTensor,  # (R, T): the target's choices
) -> Acceptance:
    """Accepts at given rates along the path of first children, whatever the tokens are."""
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
