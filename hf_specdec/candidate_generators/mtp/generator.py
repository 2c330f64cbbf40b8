"""MTP: the target's own multi-token-prediction layers draft.

DeepSeek-V3 (arXiv:2412.19437, section 2.2) and its successors have them; what a layer computes is in
[`~candidate_generators.mtp.network`]. Two ways lead to more than one draft token:

    reuse   one layer again and again, each time with the token it has drafted and the state it has left. Checkpoints
            with one layer are run like this; trees can be drafted, see [`~candidate_generators.autoregressive`]
    chain   layer j drafts token j + 1, as the layers were trained, see [`~candidate_generators.mtp.entries`]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from ...checkpoints.files import RepoFiles
from ...drafting.entries import DraftEntries
from ...drafting.growth import DynamicTree
from ...drafting.shape import ExtrapolationOptions, draft_shape, growth_option
from ...drafts import TokenTree
from ...errors import SpecConfigError
from ...protocol import Session
from ...target_facts import CACHE_READERS, reads_target_cache
from ...validation import setting
from ..autoregressive import AutoregressiveCandidateGenerator
from ..draft_model.network import load_draft_model
from .assistant import AssistantCandidateGenerator, lending_layers
from .entries import LayerEntries
from .network import fitting_network, load_mtp, placed


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig


@dataclass(frozen=True)
class MtpOptions(ExtrapolationOptions):
    """Options of `spec_method="mtp"`.

    Raises:
        SpecConfigError: A value is out of range.
    """

    draft_min_path_prob: float = setting(
        0.0,
        "A row's draft is not continued after nodes whose probability, along the whole path, is at most "
        "this. 0 always drafts the full depth.",
        least=0,
        most=1,
        published=True,
    )
    mode: Literal["chain", "reuse"] | None = setting(
        None,
        "`chain` drafts one token with each MTP layer, `reuse` all of them with the first layer, trees "
        "among them. Left out, `chain` where the checkpoint has several layers.",
        key="mtp_mode",
        published=True,
    )


class MtpCandidateGenerator(AutoregressiveCandidateGenerator):
    """Drafts with MTP layers: chains, and with one layer trees as well."""

    options_class = MtpOptions
    default_num_speculative_tokens = 3
    loaded_by: ClassVar[tuple[str, ...]] = (
        "model",
        "revision",
        "subfolder",
        "cache_dir",
        "dtype",
        "device",
        "quantization",
    )

    @classmethod
    def load(
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: torch.nn.Module | None = None
    ) -> torch.nn.Module:
        if draft_model is not None:
            if not reads_target_cache(draft_model):
                return fitting_network(draft_model, config, target_model)
            lending_layers(target_model)
            return draft_model
        if config.model is not None and RepoFiles.of(config).config.get("model_type") in CACHE_READERS:
            lending_layers(target_model)
            return load_draft_model(config, target_model)
        return load_mtp(config, target_model)

    @classmethod
    def loaded_from(cls, config: SpeculativeConfig, target_model: torch.nn.Module) -> SpeculativeConfig | None:
        is_stored = config.model or getattr(target_model.config, "_name_or_path", None)
        return placed(config, target_model) if is_stored else None

    def __new__(cls, config: SpeculativeConfig, resources: torch.nn.Module, session: Session) -> Any:
        """Makes the generator of a call: another one for an assistant that reads the target's keys and values."""
        if reads_target_cache(resources):
            return AssistantCandidateGenerator(config, resources, session)
        return super().__new__(cls)

    def plan_drafts(self) -> TokenTree | DynamicTree:
        num_layers = self.network.config.num_layers
        self.mode = self.options.mode or ("chain" if num_layers > 1 else "reuse")
        if self.mode == "chain":
            return self._layer_chain(num_layers)
        length, vocab_size = self.default_num_speculative_tokens, self.network.needs.vocab_size
        return draft_shape(self.config, vocab_size, self.session, self.chain_only_reason, length)

    def make_entries(self, **slots: Any) -> DraftEntries:
        if self.mode == "chain":
            return LayerEntries(self.network, self.plan.max_depth, **slots)
        return DraftEntries(self.network, **slots, num_layers=1)

    def _layer_chain(self, num_layers: int) -> TokenTree:
        """A chain with a token of each layer.

        Raises:
            SpecConfigError: The settings ask for a tree.
        """
        branching = growth_option(self.config)
        if self.config.speculative_token_tree:
            branching = "speculative_token_tree"
        if branching:
            raise SpecConfigError(
                f"`{branching}` is about trees, and the {num_layers} MTP layers draft a chain, one token each. Leave "
                "it out, or set mtp_mode='reuse' to draft with the first layer alone."
            )
        length = self.config.fixed_length or num_layers
        if length > num_layers:
            self.session.notes.append(
                f"{num_layers} draft tokens instead of {length}: each of the MTP layers drafts one; mtp_mode='reuse' "
                "drafts more"
            )
        return TokenTree.chain(min(length, num_layers))
