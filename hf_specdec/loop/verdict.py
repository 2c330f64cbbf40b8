"""What a verification has come to.

Shapes: R active rows, T verified nodes, M most committed tokens of a row, K best tokens after a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import SpecDecError
from ..kernels.acceptance import Acceptance


@dataclass
class Verdict:
    """Outcome of one verification."""

    token_lists: list[list[int]]  # committed tokens of each row, cut where the row ends
    counts: list[int]  # how many they are
    num_accepted: list[int]  # draft tokens among them
    # Verified nodes `(R, M)` that the tokens were predicted from, the anchor first, and the committed tokens `(R, M)`;
    # from a row's number of tokens on both are padding.
    path: torch.LongTensor
    tokens: torch.LongTensor
    # `(R, T, 1 + K)` of `with_successors`, on the host, if they came with the verdict; nodes of padding may follow.
    successors: torch.LongTensor | None = None

    @property
    def is_whole(self) -> bool:
        """Tells whether every row keeps the target's own token after what it has accepted: none was cut."""
        return all(count > accepted for count, accepted in zip(self.counts, self.num_accepted))


class Pending(Protocol):
    """A verification that is being judged, and of which criteria have seen nothing yet.

    `acceptance` is what is accepted, where the device knows it before the host does. `wait` is called once.
    """

    acceptance: Acceptance | None

    def wait(self) -> Verdict: ...


def check_drawn(tokens: list[int]) -> list[int]:
    """The tokens; raises a `SpecDecError` where one could not be drawn."""
    if min(tokens) < 0:
        raise SpecDecError(
            "The target's scores have no token to draw: they hold NaN, or processors left no token possible. Check "
            "the logits processors, and the model's dtype for overflow."
        )
    return tokens
