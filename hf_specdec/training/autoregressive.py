"""The recipe of networks that draft from a state of their own, one token after the other: EAGLE heads and MTP layers.

A network learns on what it drafts from (EAGLE-3's training-time test, Li et al. 2025, arXiv:2503.01840, section 3.1;
for EAGLE-1 this is HASS, arXiv:2408.15766). A cycle begins at every anchor t of a row. Its step 0 is the entry of
token t + 1 with the target's state of token t; step s is that of token t + 1 + s with the state that step s - 1 of the
same cycle fed back, at position t + s. It sees step 0 of the anchors up to t, and the steps 1 to s of its own cycle:
what drafting sees. Step s predicts token t + 2 + s, and its loss is weighted with `head_decay`^s.

A network that drafts all tokens at once (P-EAGLE, Hui et al. 2026, arXiv:2602.01469) has the mask token and its state
in the steps after the first, in the place of the text's token and of what was fed back.

Shapes as in `recipe.py`; U tokens that the draft knows, h its hidden size, C cycles of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ..target.masks import FULL, Span
from .reading import IGNORED, GrowingCache, Reading
from .recipe import Recipe, best_tokens


class AutoregressiveRecipe(Recipe):
    """The loss and measure of a [`DraftNetwork`] that goes on from a state of its own, in cycles of steps."""

    ttt_steps: int
    intermediate_size: int
    head_decay: float
    kl_weight: float
    noise: float = 0.0  # width of the range around 0 from which noise is added to the target's states

    muon = True
    target_hidden_states: ClassVar[tuple[int | str, ...]] = ("last",)
    num_drafts = 4

    def step_loss(self, fed: torch.Tensor, token_loss: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Completes the loss of a step by states `(N, h)` fed back, and the target's `(N, H)` that they stand for."""
        return token_loss

    def losses(self, network: Any, reading: Reading) -> Iterator[torch.Tensor]:
        anchors = reading.cycle_anchors()
        if not anchors.numel():
            return
        states = _fused(network, reading, anchors)
        states = states + self.noise * (torch.rand_like(states) - 0.5) if self.noise else states
        weights = self.head_decay ** torch.arange(self.ttt_steps, dtype=torch.float32)
        weights = (weights / weights.sum()).tolist()
        num_logits = reading.vocab_size if network.token_ids is None else len(network.token_ids)
        labels = reading.labels_at(anchors, self.ttt_steps)
        if network.token_ids is not None:
            # By the draft's ids; those that it does not know do not count.
            draft_ids = labels.new_full((network.config.vocab_size,), IGNORED)
            draft_ids[network.token_ids] = torch.arange(len(network.token_ids), device=labels.device)
            labels = draft_ids[labels.clamp(min=0)].masked_fill(labels == IGNORED, IGNORED)
        for step, (fed, output) in enumerate(walk_cycles(network, reading.tokens, states, anchors, self.ttt_steps)):
            rows, _ = counting = (labels[step] != IGNORED).nonzero(as_tuple=True)
            if len(rows):
                # The target's state that the step stands for is there.
                places = rows * reading.tokens.shape[1] + anchors[counting] + step + 1
                loss = self.token_loss(
                    reading,
                    network.logits,
                    output[counting],
                    labels[step][counting],
                    places,
                    num_logits,
                    token_ids=network.token_ids,
                )
                yield weights[step] * self.step_loss(fed[counting], loss, reading.flat_states()[places])

    def drafts(self, network: Any, reading: Reading, anchors: torch.LongTensor) -> torch.LongTensor:
        states = _fused(network, reading, anchors)
        cycles = walk_cycles(network, reading.tokens, states, anchors, self.num_drafts)
        best = torch.stack([best_tokens(network.logits, output) for _, output in cycles])
        return network.target_ids(best)[:, None]


def _fused(network: Any, reading: Reading, anchors: torch.LongTensor) -> torch.Tensor:
    """Fuses the target's states up to the last anchor."""
    last = int(anchors.max())
    return network.fuse({key: state[:, : last + 1] for key, state in reading.states.items()})


def walk_cycles(
    network: Any,
    tokens: torch.LongTensor,  # (B, T)
    states: torch.Tensor,  # (B, T, h), fused
    anchors: torch.LongTensor,
    num_steps: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields both outputs `(B, C, h)` of the network for each step of the cycles at anchors `(B, C)` of rows."""
    # Steps that lead out of a row mean nothing. Later entries are seen by no anchor.
    width = int(anchors.max()) + 1
    cache, seen = GrowingCache(), torch.arange(width, device=tokens.device)
    causal = None
    if network.spans != (FULL,):
        causal = _within(network.spans, seen <= seen[:, None], seen[None], seen[None])
    read = network(tokens[:, 1 : width + 1], states[:, :width], seen[None], causal, cache)
    hidden, output = (part.gather(1, anchors[..., None].expand(-1, -1, part.shape[-1])) for part in read)
    yield hidden, output
    earlier = seen <= anchors[..., None]
    own_cycle = torch.eye(anchors.shape[1], dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
    places = seen.expand(len(tokens), -1)
    mask_token = getattr(network.config, "mask_token_id", None)
    for step in range(1, num_steps):
        if mask_token is None:
            next_tokens = tokens.gather(1, (anchors + step + 1).clamp(max=tokens.shape[1] - 1))
        else:
            next_tokens, hidden = torch.full_like(anchors, mask_token), network.mask_state().expand_as(hidden)
        places = torch.cat((places, anchors + step), dim=1)
        mask = _within(network.spans, torch.cat((earlier, *[own_cycle] * step), dim=2), anchors + step, places)
        hidden, output = network(next_tokens, hidden, anchors + step, mask, cache)
        yield hidden, output


def _within(spans: Sequence[Span], mask: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor) -> Any:
    """Limits a mask `(B, T, S)` to each of the spans, by positions `(B, T)` and `(B, S)`: `(B, 1, T, S)`."""

    def limited(span: Span) -> torch.Tensor:
        far = span.hidden(queries[..., None], keys[:, None])
        return (mask if far is None else mask & ~far)[:, None]

    return limited(spans[0]) if len(spans) == 1 else {span: limited(span) for span in spans}
