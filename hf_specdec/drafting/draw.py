"""How the tokens of a draft are chosen from the logits of its network.

They are the best ones ([`Draw`]), those of them that the grammars of the rows allow ([`MaskedDraw`]), or they are
chosen after the call's logits processors, in most cases at random ([`SteeredDraw`]). A draw is of one cycle, and so is
how deep its drafts may be ([`DepthLimits`]).

Shapes: R rows that are drafted for, F nodes of a level, W candidates of each, C candidates of a whole tree, K tokens
of a chain, V vocabulary of the target, U that of the draft.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ..kernels.best import best_log_probs, best_tokens
from ..logits.grammar.masks import GrowingMasks
from ..logits.sampling import drawn
from ..transfers import kept_tensor


# Nodes (R, F) that are read, and their parents, nodes (F,) or (R, F) of the level before or a slice of them.
Nodes = tuple[torch.LongTensor, "torch.LongTensor | slice"]


class DepthLimits:
    """Largest depth of each row's draft, `(R,)`; on the host, if `deepest` is left out, else maybe unknown.

    Nodes are expanded while the probability of their path exceeds `threshold`, or their own one if it is `by_token`; 0
    for any. With `deepest` drafts are grown to this depth whatever the limits are, as in a graph. Without, the host
    waits for the device to learn which rows end, and forwards that no row needs are not launched.
    """

    def __init__(
        self, depths: torch.Tensor | None, threshold: float = 0, deepest: int | None = None, by_token: bool = False
    ):
        self.depths: torch.Tensor | None = depths
        self.threshold = threshold
        self.by_token = by_token
        self.waits: bool = deepest is None
        self.deepest: int = int(depths.max()) if deepest is None else deepest

    def stop_low_confidence(self, log_probs: torch.FloatTensor, depth: int) -> None:
        """Ends rows at `depth` where no node that would be expanded is probable enough by its `(R, F)`."""
        if not self.threshold:
            return
        is_probable = (log_probs.amax(1) > math.log(self.threshold)).to(self.depths.device)
        self.depths = torch.where(is_probable, self.depths, self.depths.clamp(max=depth))
        if self.waits:
            self.deepest = int(self.depths.max())

    def within(self, log_probs: torch.FloatTensor, sizes: list[int]) -> torch.FloatTensor:
        """Log-probabilities `(R, C)` of candidates level by level, -inf for those too deep for their row."""
        if self.waits and int(self.depths.min()) == self.deepest:
            return log_probs
        depths = self.depths.to(log_probs.device, non_blocking=True)
        ends = kept_tensor(tuple(sizes), depths.device)[depths.clamp(0, len(sizes) - 1)]
        places = torch.arange(log_probs.shape[1], device=log_probs.device)
        return log_probs.masked_fill(places >= ends[:, None], -math.inf)


class Draw:
    """The best tokens. `token_ids` `(U,)` are the target's ids of the draft's tokens, where these are others."""

    is_plain = True  # a token is the best by its logits, whatever was chosen before it
    # The distributions (R, K, V) that the tokens so far were sampled from, if they were.
    all_probs: torch.FloatTensor | None = None

    def __init__(self, token_ids: torch.LongTensor | None = None):
        self.token_ids = token_ids

    def candidates(
        self, logits: torch.Tensor, width: int, log_probs: torch.FloatTensor | None, nodes: Nodes | None = None
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        """Ids `(R, F * W)` of continuations by logits `(R, F, U)`; log-probabilities, if those of nodes are given."""
        if log_probs is None:
            tokens = best_tokens(logits) if width == 1 else logits.topk(width).indices.flatten(1)
        else:
            if logits.is_cpu:
                values, tokens = F.log_softmax(logits, -1, dtype=torch.float32).topk(width)
            else:
                values, tokens = best_log_probs(logits, width)
            tokens, log_probs = tokens.flatten(1), (log_probs[..., None] + values).flatten(1)
        return tokens if self.token_ids is None else self.token_ids[tokens], log_probs


class MaskedDraw(Draw):
    """The best tokens that grammars allow, whose masks are made on the host."""

    is_plain = False

    def __init__(self, masks: GrowingMasks, token_ids: torch.LongTensor | None = None):
        super().__init__(token_ids)
        self.masks = masks

    def candidates(
        self, logits: torch.Tensor, width: int, log_probs: torch.FloatTensor | None, nodes: Nodes | None = None
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        if nodes is not None:
            self.masks.follow(*nodes)
        tokens, log_probs = super().candidates(self.masks.apply(logits, self.token_ids), width, log_probs)
        # Where nothing may follow there is no distribution.
        return tokens, None if log_probs is None else log_probs.nan_to_num(nan=-math.inf, neginf=-math.inf)


@dataclass(eq=False)
class SteeredDraw(Draw):
    """Tokens of chains, sampled from the draft's processed distributions, or the best ones of these."""

    # Makes scores (R, V) of logits and the tokens so far, as the target's are processed.
    process: Callable[[torch.Tensor, list[torch.LongTensor]], torch.Tensor]
    uniforms: torch.Tensor | None  # (R, K): random numbers, where tokens are sampled
    # A network's logits over the target's vocabulary.
    target_logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    device: torch.device | None = None  # where the random numbers are
    reads_tokens: bool = False  # scores may depend on the tokens so far
    tokens: list[torch.LongTensor] = field(default_factory=list)  # (R,) each
    probs: list[torch.FloatTensor] = field(default_factory=list)  # (R, V) each: what tokens were sampled from

    is_plain = False
    token_ids = None

    def choose_at_once(self, logits: torch.Tensor) -> torch.LongTensor:
        """Adds tokens `(R, K)` by logits `(R, K, U)`, where nothing depends on those before."""
        scores = self._scores(logits)
        return torch.stack([self.choose(scores[:, depth]) for depth in range(scores.shape[1])], dim=1)

    def candidates(
        self, logits: torch.Tensor, width: int, log_probs: torch.FloatTensor | None, nodes: Nodes | None = None
    ) -> tuple[torch.LongTensor, torch.FloatTensor | None]:
        scores = self._scores(logits[:, 0])
        tokens = self.choose(scores)[:, None]
        if log_probs is not None:
            probs = scores.softmax(-1) if self.uniforms is None else self.probs[-1]
            log_probs = log_probs + probs.gather(1, tokens).log().to(log_probs.device)
        return tokens, log_probs

    def _scores(self, logits: torch.Tensor) -> torch.FloatTensor:
        """Processed scores `(..., V)` of logits `(..., U)` after the tokens so far, where the random numbers are."""
        logits = logits if self.target_logits is None else self.target_logits(logits)
        return self.process(logits if self.device is None else logits.to(self.device), self.tokens)

    def choose(self, scores: torch.FloatTensor) -> torch.LongTensor:
        """Adds the next token of each row by its scores `(R, V)`; returns the tokens `(R,)`."""
        if self.uniforms is None:
            tokens = best_tokens(scores)
        else:
            tokens, probs = drawn(scores, self.uniforms[:, len(self.tokens)])
            self.probs.append(probs)
        self.tokens.append(tokens)
        return tokens

    @property
    def all_probs(self) -> torch.FloatTensor | None:
        return torch.stack(self.probs, dim=1) if self.probs else None
