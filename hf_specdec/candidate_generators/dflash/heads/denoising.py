"""Several denoising steps over one block: the most confident tokens stay, the others are predicted again.

This is the drafting of masked diffusion (MaskGIT, Chang et al. 2022, arXiv:2202.04200, section 3.2) for the blocks of
DFlash (arXiv:2602.06036), whose own way is a single step. A token that is kept carries its value and its confidence
on; it may still be masked again when more confident ones turn up. The anchor is no part of the state: it is never
masked.

The outcome is a function of the logits, bit for bit: a schedule of integers, booleans instead of a look at the ids
(a predicted token may equal the mask's id), the first id among equal logits, the first position among equal
confidences, and per position a result that does not depend on the rows around it.

Shapes: R rows, K masked positions of a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ....drafting.prefixes import by_chunks, confidences
from ....kernels.best import best_tokens


def keep_counts(num_positions: int, num_steps: int) -> tuple[int, ...]:
    """Number of positions that are known after each step: `ceil(K * (i + 1) / n)`; steps past K change nothing."""
    counts = [-(-num_positions * step // num_steps) for step in range(1, num_steps + 1)]
    return tuple(counts[: counts.index(num_positions) + 1])


class Denoising:
    """The state of the blocks of a batch between the steps; of new ones nothing is known."""

    def __init__(self, rows: int, num_positions: int, mask_token_id: int, device: torch.device | str):
        self.mask_token_id = mask_token_id  # what the draft sees at positions that are not settled
        # (R, K) each: what was last predicted at each position, and whether the next step sees it.
        self.tokens: torch.Tensor = torch.full((rows, num_positions), mask_token_id, device=device)
        self.settled: torch.Tensor = torch.zeros_like(self.tokens, dtype=torch.bool)
        # The probability that it was predicted with. What the last step fills in has none: nobody ranks it.
        self.confidences: torch.Tensor = torch.zeros_like(self.tokens, dtype=torch.float32)

    @property
    def inputs(self) -> torch.LongTensor:
        """Tokens `(R, K)` that the draft reads after the anchor."""
        return torch.where(self.settled, self.tokens, self.mask_token_id)

    def update(self, logits: torch.Tensor, keep: int, ids: torch.LongTensor | None = None) -> None:
        """One step: predicts the unknown positions by logits `(R, K, V)`, then keeps the most confident of all.

        Where logits are no distribution (NaN, an infinity, nothing but minus infinity), the first largest entry is
        taken, NaN being largest, with confidence 0. `ids` are the target's of the draft's, if others.
        """
        num_positions = self.tokens.shape[1]
        if logits.shape[:2] != self.tokens.shape or not 0 <= keep <= num_positions:
            raise ValueError(
                f"A block of shape {tuple(self.tokens.shape)} takes logits of shape (R, K, V) and keeps 0 to "
                f"{num_positions} positions, got {tuple(logits.shape)} and {keep}."
            )
        predicted = by_chunks(best_tokens, logits)
        self.take(predicted if ids is None else ids[predicted], keep, lambda: confidences(logits))

    def take(self, predicted: torch.LongTensor, keep: int, confidences: Callable[[], torch.FloatTensor]) -> None:
        """One step by predicted tokens `(R, K)`; their `confidences` `(R, K)` are asked for where any are dropped."""
        self.tokens = torch.where(self.settled, self.tokens, predicted)
        if keep == self.tokens.shape[1]:
            self.settled = torch.ones_like(self.settled)
            return
        self.confidences = torch.where(self.settled, self.confidences, confidences())
        # Not topk: it leaves open which of equal ones it takes.
        order = self.confidences.sort(dim=1, descending=True, stable=True).indices
        self.settled = torch.zeros_like(self.settled).scatter_(1, order[:, :keep], True)
