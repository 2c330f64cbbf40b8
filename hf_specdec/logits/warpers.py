"""transformers' warpers that sort the whole vocabulary, without the sort.

On a GPU those that transformers applies one after the other are a few kernels together. On a CPU the most probable
tokens nearly always decide which tokens top-p and typical decoding keep. So only these are put in order; rows that
need more are left to transformers' own warper.

Shapes: R rows, V vocabulary, C tokens that are put in order.
"""

from __future__ import annotations

import torch
from transformers.generation import logits_process as hf
from transformers.generation.logits_process import LogitsProcessor

from ..kernels import warpers as kernels


# C: the first that are put in order.
_FIRST = 1024

# The first tokens `(R, C)`, which of them are kept, and rows `(R,)` where that does not say all.
FirstTokens = tuple[torch.LongTensor, torch.BoolTensor, torch.BoolTensor]


class _WithoutSort:
    """transformers' warper for the first tokens in its order; others are looked at only in rows that need more."""

    def __init__(self, warper: LogitsProcessor):
        self.warper = warper
        self._first = _FIRST_OF[type(warper)]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores `(R, V)` of which those of tokens that are not kept are the warper's `filter_value`."""
        # On a GPU asking which rows need more would be a wait.
        if scores.device.type != "cpu" or scores.shape[-1] <= _FIRST:
            return self.warper(input_ids, scores)
        tokens, is_kept, needs_more = self._first(self.warper, scores)
        kept = scores.gather(-1, tokens).masked_fill_(~is_kept, self.warper.filter_value)
        warped = torch.full_like(scores, self.warper.filter_value).scatter_(-1, tokens, kept)
        if needs_more.any():
            warped[needs_more] = self.warper(input_ids[needs_more], scores[needs_more])
        return warped


def _most_probable(warper: LogitsProcessor, scores: torch.FloatTensor) -> FirstTokens:
    """Keeps the most probable tokens, until their probability is `top_p`."""
    first = scores.topk(_FIRST)
    probs = (first.values - scores.logsumexp(-1, keepdim=True)).exp_()
    is_kept = probs.cumsum(-1) - probs < warper.top_p
    is_kept[:, : warper.min_tokens_to_keep] = True
    # Of equally probable tokens at the border the sort decides which are kept.
    count = is_kept.sum(-1, keepdim=True)
    last = first.values.gather(-1, count - 1)
    next_one = first.values.gather(-1, count.clamp(max=_FIRST - 1))
    is_tied = (last == next_one) & (last > -torch.inf)
    return first.indices, is_kept, is_tied[:, 0]


def _most_typical(warper: LogitsProcessor, scores: torch.FloatTensor) -> FirstTokens:
    """Keeps the tokens whose information is nearest to the entropy, until their probability is `mass`."""
    log_probs = scores.log_softmax(-1)
    probs = log_probs.exp()
    entropy = -(log_probs * probs).nansum(-1, keepdim=True)
    first = (log_probs + entropy).abs_().topk(_FIRST, largest=False)
    before = (probs.gather(-1, first.indices).cumsum(-1) < warper.mass).sum(-1, keepdim=True)
    # The token with which they reach it, and those that are as near as that one.
    farthest = first.values.gather(-1, before.clamp_(max=_FIRST - 1))
    is_kept = first.values <= farthest
    is_kept[:, : warper.min_tokens_to_keep] = True
    return first.indices, is_kept, is_kept[:, -1]


_FIRST_OF = {hf.TopPLogitsWarper: _most_probable, hf.TypicalLogitsWarper: _most_typical}


def without_sort(processor: LogitsProcessor) -> LogitsProcessor | _WithoutSort:
    """The processor itself, or what does the same in less time on a CPU."""
    # Of a whole distribution all tokens are kept, however small.
    if type(processor) not in _FIRST_OF or getattr(processor, "top_p", 0.0) >= 1:
        return processor
    return _WithoutSort(processor)


# What can be applied together, in this order, and what each of them is told.
TOGETHER = {
    hf.TemperatureLogitsWarper: "temperature",
    hf.TopKLogitsWarper: "top_k",
    hf.TopPLogitsWarper: "top_p",
    hf.MinPLogitsWarper: "min_p",
}


class Warpers:
    """transformers' warpers in the order of a `Warping`: applied together where there are kernels for them."""

    def __init__(self, warpers: list[LogitsProcessor]):
        self.warpers = warpers
        settings = {(name := TOGETHER[type(warper)]): getattr(warper, name) for warper in warpers}
        self.warping: kernels.Warping = kernels.Warping(**settings)
        self._one_by_one = list(map(without_sort, warpers))

    def __call__(self, input_ids: torch.LongTensor | None, scores: torch.Tensor) -> torch.FloatTensor:
        """Scores `(R, V)` in float32, of scores or logits that stay as they are."""
        if kernels.can_warp(scores):
            return kernels.warped_triton(scores, self.warping)
        scores = scores.float()
        for warper in self._one_by_one:
            scores = warper(input_ids, scores)
        return scores


Run = list[LogitsProcessor | Warpers | _WithoutSort]


def and_then(run: Run, processor: LogitsProcessor) -> Run:
    """Processors that make of scores what those of a run and one more make of them, in less time."""
    is_plain = (
        type(processor) in TOGETHER
        and getattr(processor, "min_tokens_to_keep", 1) == 1
        and getattr(processor, "filter_value", -torch.inf) == -torch.inf
        and getattr(processor, "top_p", 0.0) < 1
    )
    if not is_plain:
        return [*run, without_sort(processor)]
    order = list(TOGETHER)
    if run and isinstance(run[-1], Warpers):
        warpers = run[-1].warpers
        if order.index(type(warpers[-1])) < order.index(type(processor)):
            return [*run[:-1], Warpers([*warpers, processor])]
    return [*run, Warpers([processor])]
