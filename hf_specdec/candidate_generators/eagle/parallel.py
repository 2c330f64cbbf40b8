"""P-EAGLE: all tokens of a chain from one forward of the head (Hui et al. 2026, arXiv:2602.01469).

The places of the tokens that are not known are entries of their own, each with the mask token and a state that was
trained in the place of the target's. They follow the new entries of their row, see all that is before them, and are
forgotten. The tokens do not depend on each other.

Shapes: R active rows, T new entries, K drafted tokens, h hidden size of the head, U its vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ...drafting.entries import DraftEntries
from ...drafting.slots import Entries
from ...transfers import last_of_each, upload


if TYPE_CHECKING:
    from .network import Eagle3Network


class MaskedReading:
    """Reads new entries and masks after them in one forward.

    Args:
        network (`Eagle3Network`): A head with `mask_hidden`.
    """

    def __init__(self, network: Eagle3Network):
        self.network: Eagle3Network = network
        self.mask_token: int | None = network.config.mask_token_id
        self.mask_state: torch.Tensor = network.mask_state()

    def read(self, entries: DraftEntries, new: Entries, num_masks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Keeps the new entries and forgets the masks.

        Args:
            entries (`DraftEntries`): Of the rows.
            new (`Entries`): New entries, padded on the right.
            num_masks (`int`): K - 1.

        Returns:
            States `(R, h)` that each row's last entry hands on, and logits `(R, K, U)` there and at the masks.
        """
        counts = upload(new.counts, entries.device)
        hidden = F.pad(entries.states_of(new), (0, 0, 0, num_masks))
        tokens = F.pad(new.tokens.to(entries.device), (0, num_masks))
        is_mask = torch.arange(tokens.shape[1], device=entries.device) >= counts[:, None]
        tokens = tokens.masked_fill(is_mask, self.mask_token)
        hidden = torch.where(is_mask[..., None], self.mask_state, hidden)
        states, output = entries.read(tokens, hidden, new.counts)
        places = counts[:, None] - 1 + torch.arange(num_masks + 1, device=entries.device)
        output = output.gather(1, places[..., None].expand(-1, -1, output.shape[2]))
        return last_of_each(states, new.counts), self.network.logits(output)

    def read_masks(self, entries: DraftEntries, num_rows: int, num_masks: int) -> torch.Tensor:
        """Logits `(R, K - 1, U)` of masks alone, where all entries have been read."""
        tokens = torch.full((num_rows, num_masks), self.mask_token, device=entries.device)
        _, output = entries.read(tokens, self.mask_state.expand(num_rows, num_masks, -1), [0] * num_rows)
        return self.network.logits(output)
