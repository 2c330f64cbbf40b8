"""EAGLE: a decoder layer that extrapolates the target's hidden states drafts chains and trees from them.

EAGLE-1 (Li et al. 2024, arXiv:2401.15077) has static trees, EAGLE-2 (arXiv:2406.16858, section 4) grows a tree from
the draft's own confidence, EAGLE-3 (arXiv:2503.01840) has another network. The checkpoint decides the network
([`~candidate_generators.eagle.network`]); every network drafts every shape, see
[`~candidate_generators.autoregressive`].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from ...drafting.growth import DynamicTree
from ...drafting.shape import ExtrapolationOptions, draft_shape
from ...drafts import TokenTree
from ...validation import MOST_DRAFT_TOKENS, setting
from ..autoregressive import AutoregressiveCandidateGenerator
from .network import EagleNetwork, fitting_network, load_eagle


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


@dataclass(frozen=True)
class EagleOptions(ExtrapolationOptions):
    """Options of `spec_method="eagle"` and `spec_method="eagle3"`.

    Raises:
        SpecConfigError: A value is out of range.
    """

    aux_layer_ids: tuple[int, ...] | None = setting(
        None,
        "Which states of the target an EAGLE-3 head reads: k is what enters its decoder layer k, the "
        "number of its layers what leaves the last one. Left out, what the checkpoint says.",
        least=0,
        most=MOST_DRAFT_TOKENS,
        published=True,
    )


class EagleCandidateGenerator(AutoregressiveCandidateGenerator):
    """Drafts chains, static and dynamic trees; small batches get a dynamic tree where the settings name no shape."""

    options_class = EagleOptions
    default_num_speculative_tokens = 4
    loaded_by: ClassVar[tuple[str, ...]] = (
        "model",
        "revision",
        "subfolder",
        "cache_dir",
        "dtype",
        "device",
        "quantization",
        "aux_layer_ids",
    )

    @classmethod
    def load(
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: EagleNetwork | None = None
    ) -> EagleNetwork:
        if draft_model is None:
            return load_eagle(config, target_model)
        return fitting_network(draft_model, config, target_model)

    def plan_drafts(self) -> TokenTree | DynamicTree:
        return draft_shape(
            self.config,
            self.network.config.draft_vocab_size,
            self.session,
            self.chain_only_reason,
            self.default_num_speculative_tokens,
            prefers_trees=True,
        )
