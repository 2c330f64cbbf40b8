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
from dataclasses import dataclass

import torch

from ...kernels.best import best_tokens


# Logits that are turned into float32 at once: on a CPU what its caches hold, elsewhere what memory can spare.
_CHUNK_SIZE = 1 << 26
_CHUNK_SIZES = {"cpu": 1 << 20}


def keep_counts(num_positions: int, num_steps: int) -> tuple[int, ...]:
    """Number of positions that are known after each step: `ceil(K * (i + 1) / n)`.

    Args:
        num_positions (`int`): K.
        num_steps (`int`): n. With more steps than positions the later ones would change nothing, and are left out.
    """
    counts = [-(-num_positions * step // num_steps) for step in range(1, num_steps + 1)]
    return tuple(counts[: counts.index(num_positions) + 1])


@dataclass
class Denoising:
    """The state of the blocks of a batch between the steps.

    ```python
    state = Denoising.start(rows, num_positions, mask_token_id, device)
    for keep in keep_counts(num_positions, num_steps):
        state.update(draft(state.inputs), keep)
    drafts = state.tokens
    ```

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, K)`): What was last predicted at each position.
        known (`torch.BoolTensor` of shape `(R, K)`): Which of them the next step sees.
        confidences (`torch.FloatTensor` of shape `(R, K)`): The probability that each was predicted with. What the
            last step fills in has none: nobody ranks it.
        mask_token_id (`int`): What the draft sees at the other positions.
    """

    tokens: torch.LongTensor
    known: torch.BoolTensor
    confidences: torch.FloatTensor
    mask_token_id: int

    @classmethod
    def start(cls, rows: int, num_positions: int, mask_token_id: int, device: torch.device | str) -> Denoising:
        """Blocks of which nothing is known."""
        shape = rows, num_positions
        return cls(
            torch.full(shape, mask_token_id, dtype=torch.long, device=device),
            torch.zeros(shape, dtype=torch.bool, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            mask_token_id,
        )

    @property
    def inputs(self) -> torch.LongTensor:
        """Tokens `(R, K)` that the draft reads after the anchor."""
        return torch.where(self.known, self.tokens, self.mask_token_id)

    def update(self, logits: torch.Tensor, keep: int, ids: torch.LongTensor | None = None) -> None:
        """One step: predicts the unknown positions, then keeps the `keep` most confident of all.

        Args:
            logits (`torch.Tensor` of shape `(R, K, V)`): Of the draft, in any floating dtype. Where they are no
                distribution (NaN, an infinity, nothing but minus infinity), the first largest entry is taken, NaN
                being largest, with confidence 0.
            keep (`int`): 0 to K.
            ids (`torch.LongTensor` of shape `(V,)`, *optional*): The target's id of each of the draft's, if others.

        Raises:
            ValueError: A shape or `keep` does not fit the state.
        """
        num_positions = self.tokens.shape[1]
        if logits.shape[:2] != self.tokens.shape or not 0 <= keep <= num_positions:
            raise ValueError(
                f"A block of shape {tuple(self.tokens.shape)} takes logits of shape (R, K, V) and keeps 0 to "
                f"{num_positions} positions, got {tuple(logits.shape)} and {keep}."
            )
        predicted = _by_chunks(best_tokens, logits)
        self.take(predicted if ids is None else ids[predicted], keep, lambda: confidences(logits))

    def take(self, predicted: torch.LongTensor, keep: int, confidences: Callable[[], torch.FloatTensor]) -> None:
        """One step by predicted tokens `(R, K)`; their `confidences` `(R, K)` are asked for where any are dropped."""
        self.tokens = torch.where(self.known, self.tokens, predicted)
        if keep == self.tokens.shape[1]:
            self.known = torch.ones_like(self.known)
            return
        self.confidences = torch.where(self.known, self.confidences, confidences())
        # Not topk: it leaves open which of equal ones it takes.
        order = self.confidences.sort(dim=1, descending=True, stable=True).indices
        self.known = torch.zeros_like(self.known).scatter_(1, order[:, :keep], True)


def confidences(logits: torch.Tensor) -> torch.FloatTensor:
    """The largest probability of each position, in float32: `(R, K, V)` to `(R, K)`. Never NaN."""
    return _by_chunks(_largest_probability, logits).nan_to_num_(nan=0.0)


def _largest_probability(logits: torch.Tensor) -> torch.FloatTensor:
    # Against the exponential of a difference of large numbers (the maximum and the logsumexp) this is exact at 1000,
    # and unlike a plain sum the kernels of softmax compute a row alike whatever is around it.
    return logits.softmax(-1, dtype=torch.float32).amax(-1)


def _by_chunks(function, logits: torch.Tensor) -> torch.Tensor:
    """`function` of positions `(P, V)` to `(P,)`, applied to `(R, K, V)` without turning all of it into float32."""
    size = _CHUNK_SIZES.get(logits.device.type, _CHUNK_SIZE)
    chunks = logits.flatten(0, 1).split(max(1, size // logits.shape[-1]))
    return torch.cat([function(chunk) for chunk in chunks]).view(logits.shape[:2])
