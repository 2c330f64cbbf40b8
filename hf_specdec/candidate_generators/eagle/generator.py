"""EAGLE: a decoder layer that extrapolates the target's hidden states drafts chains and trees from them.

EAGLE-1 (Li et al. 2024, arXiv:2401.15077) has static trees, EAGLE-2 (arXiv:2406.16858, section 4) grows a tree from
the draft's own confidence, EAGLE-3 (arXiv:2503.01840) has another network. The checkpoint decides the network
([`~candidate_generators.eagle.network`]); every network but P-EAGLE's drafts every shape, see
[`~candidate_generators.networks`].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ...checkpoints.loading import LOADED_BY, load
from ...drafting.growth import DynamicTree
from ...drafting.shape import ExtrapolationOptions, draft_shape
from ...drafting.slots import DRAFT_STATE, DraftEntries
from ...drafting.state import Entries, NetworkState
from ...drafts import TokenTree
from ...settings import SpeculativeConfig
from ...settings.checks import MOST_DRAFT_TOKENS, parallel_drafting_field, setting
from ...transfers import upload
from ..networks import AutoregressiveCandidateGenerator
from .network import EagleNetwork


@dataclass(frozen=True)
class EagleOptions(ExtrapolationOptions):
    """Options of `spec_method="eagle"` and `spec_method="eagle3"`."""

    aux_layer_ids: tuple[int, ...] | None = setting(
        None,
        "Which states of the target an EAGLE-3 head reads: k is what enters its decoder layer k, the "
        "number of its layers what leaves the last one. Default: what the checkpoint says.",
        least=0,
        most=MOST_DRAFT_TOKENS,
        published=True,
    )
    parallel_drafting: bool | None = parallel_drafting_field()


class EagleCandidateGenerator(AutoregressiveCandidateGenerator):
    """Drafts chains, static and dynamic trees; small batches get a dynamic tree where the settings name no shape.

    P-EAGLE heads (Hui et al. 2026, arXiv:2602.01469) draft chains, all tokens from one forward.
    """

    options_class = EagleOptions
    default_num_speculative_tokens = 4
    loaded_by: ClassVar[tuple[str, ...]] = (*LOADED_BY, "aux_layer_ids", "parallel_drafting")

    @classmethod
    def load(
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: EagleNetwork | None = None
    ) -> EagleNetwork:
        return load(EagleNetwork, config, target_model, draft_model)

    def shape(self) -> TokenTree | DynamicTree:
        config = self.network.config
        reason, length = self.chain_only_reason, self.default_num_speculative_tokens
        self.drafts_whole: bool = config.mask_token_id is not None
        self.has_steps: bool = not self.drafts_whole
        if self.drafts_whole:
            self.mask_state: torch.Tensor = self.network.mask_state()
            reason, length = "the head drafts all tokens at once", config.num_parallel_tokens
        return draft_shape(self.config, config.draft_vocab_size, self.session, reason, length, not self.drafts_whole)

    def logits_at_once(self, state: NetworkState, new: Entries, count: int) -> torch.Tensor:
        return masked_logits(state.slots, new, self.mask_state, count)


def masked_logits(slots: DraftEntries, new: Entries, mask_state: torch.Tensor, count: int) -> torch.Tensor:
    """Reads and keeps new entries; logits `(R, count, U)` after the last one of each row and at masks after it."""
    # Masks see all that is before them, and are forgotten; a state was trained in the place of the target's.
    ends = upload(new.counts, slots.device)[:, None]
    hidden = F.pad(slots.network.fuse(new.states), (0, 0, 0, count - 1))
    tokens = F.pad(new.tokens.to(slots.device), (0, count - 1))
    is_mask = torch.arange(tokens.shape[1], device=slots.device) >= ends
    tokens = tokens.masked_fill(is_mask, slots.network.config.mask_token_id)
    hidden = torch.where(is_mask[..., None], mask_state, hidden)
    _, output = slots.read(Entries(tokens, {DRAFT_STATE: hidden}, new.counts))
    places = (ends - 1 + torch.arange(count, device=slots.device))[..., None]
    return slots.network.logits(output.gather(1, places.expand(-1, -1, output.shape[2])), slots.cache)
