"""EAGLE: a decoder layer that extrapolates the target's hidden states drafts chains and trees from them.

EAGLE-1 (Li et al. 2024, arXiv:2401.15077) has static trees, EAGLE-2 (arXiv:2406.16858, section 4) grows a tree from
the draft's own confidence, EAGLE-3 (arXiv:2503.01840) has another network. The checkpoint decides the network
([`~candidate_generators.eagle.network`]); every network but P-EAGLE's drafts every shape, see
[`~candidate_generators.autoregressive`].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...drafting.chain import CapturedDrawing, SteeredChain
from ...drafting.entries import DraftEntries
from ...drafting.growth import DepthLimits, DynamicTree
from ...drafting.positions import Positions
from ...drafting.shape import ExtrapolationOptions, draft_shape
from ...drafting.slots import Entries
from ...drafts import DraftTree, TokenTree
from ...errors import SpecConfigError
from ...kernels.best import best_tokens
from ...protocol import DraftStep, Session
from ...validation import MOST_DRAFT_TOKENS, parallel_drafting_field, setting
from ..autoregressive import AutoregressiveCandidateGenerator
from .network import EagleNetwork, fitting_network, load_eagle
from .parallel import MaskedReading


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
    parallel_drafting: bool | None = parallel_drafting_field()


class EagleCandidateGenerator(AutoregressiveCandidateGenerator):
    """Drafts chains, static and dynamic trees; small batches get a dynamic tree where the settings name no shape.

    With P-EAGLE heads it is a [`ParallelEagleCandidateGenerator`].
    """

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
        "parallel_drafting",
    )

    @classmethod
    def load(
        cls, config: SpeculativeConfig, target_model: torch.nn.Module, draft_model: EagleNetwork | None = None
    ) -> EagleNetwork:
        network = (
            load_eagle(config, target_model)
            if draft_model is None
            else fitting_network(draft_model, config, target_model)
        )
        is_parallel, wanted = network.config.mask_token_id is not None, config.options.parallel_drafting
        if wanted not in (None, is_parallel):
            does = "all tokens at once, with mask tokens" if is_parallel else "one token after the other"
            raise SpecConfigError(
                f"`parallel_drafting`={wanted}, and this head was trained to draft {does}. Leave it out, or pass "
                "another head."
            )
        return network

    def __new__(cls, config: SpeculativeConfig, resources: EagleNetwork, session: Session) -> EagleCandidateGenerator:
        is_parallel = resources.config.mask_token_id is not None
        return super().__new__(ParallelEagleCandidateGenerator if is_parallel else cls)

    def plan_drafts(self) -> TokenTree | DynamicTree:
        return draft_shape(
            self.config,
            self.network.config.draft_vocab_size,
            self.session,
            self.chain_only_reason,
            self.default_num_speculative_tokens,
            prefers_trees=True,
        )


class ParallelEagleCandidateGenerator(EagleCandidateGenerator):
    """Drafts chains with P-EAGLE heads, all tokens at once, see [`~candidate_generators.eagle.parallel`]."""

    def plan_drafts(self) -> TokenTree | DynamicTree:
        self.masked: MaskedReading = MaskedReading(self.network)
        config, reason = self.network.config, "the head drafts all tokens at once"
        return draft_shape(self.config, config.draft_vocab_size, self.session, reason, config.num_parallel_tokens)

    def propose(self, step: DraftStep) -> DraftTree:
        limits = DepthLimits(torch.tensor(self.draft_depths(step), device="cpu"), self.threshold)
        if limits.deepest <= 0:
            # There will never be room again for the rows that are here.
            self.pending = self._step = None
            return DraftTree.empty(len(step.rows), self.session.device)
        new, self._step = self._take_pending(), step
        drawn = self._sample_in_a_graph(new, step, limits) if self.samples_drafts else None
        if drawn is not None:
            return drawn
        logits, device = self._logits_at_once(new, limits), self.session.device
        masks = None if self.samples_drafts else self.growing_masks(step, limits.depths.tolist())
        if masks is not None:
            positions = Positions(logits, self.network.token_ids)
            nodes = positions.grow(self.shape, step.anchor_tokens, limits, masks)
            return nodes.draft(self.plan, limits.depths.tolist(), device)
        if self.samples_drafts:
            chain = SteeredChain(self.session.sampler, step.rows, step.lengths)
            for depth in range(limits.deepest):
                chain.choose(chain.scores(self.network.target_logits(logits[:, depth]).to(device)))
            return chain.draft(limits.depths.tolist())
        if self.threshold:
            paths = logits.log_softmax(-1, dtype=torch.float32).max(-1).values.cumsum(1)
            for depth in range(1, limits.deepest):
                limits.stop_low_confidence(paths[:, depth - 1 : depth], depth)
        return self._best_chain(logits, limits.depths.tolist())

    def _drafted(self, output: tuple[Any, ...], plan: TokenTree | DynamicTree, depths: list[int]) -> DraftTree:
        return self._best_chain(output[1], depths)

    def _best_chain(self, logits: torch.Tensor, depths: list[int]) -> DraftTree:
        tokens = self.network.target_ids(best_tokens(logits))
        return DraftTree.chain(tokens.to(self.session.device)).shortened(depths)

    def _launch(self, new: Entries, depths: list[int], depth: int | None) -> Any:
        num_masks = self.plan.max_depth - 1
        key, read = (
            ((), partial(self.masked.read, num_masks=num_masks)) if new.keys is None else self._drawn_by_a_graph()
        )
        new = new._replace(limits=[self.plan.max_depth] * len(depths))
        return self.entries.replay(("masks", num_masks, *key), new, self.most_committed, num_masks, read)

    def _captured_chain(self, drawing: CapturedDrawing, entries: DraftEntries, inputs: Entries) -> tuple[Any, ...]:
        chain = drawing.chain(inputs.keys, inputs.counts, self.plan.max_depth)
        hidden, logits = self.masked.read(entries, inputs, self.plan.max_depth - 1)
        for after in logits.unbind(1):
            chain.choose(chain.scores(self.network.target_logits(after)))
        return hidden, logits[:, 0], *chain.stacked(), None

    def _logits_at_once(self, new: Entries | None, limits: DepthLimits) -> torch.Tensor:
        """Logits `(R, K, U)` of the first tokens of the drafts, after new entries."""
        num_masks = limits.deepest - 1
        if new is None:
            # What was committed has been read.
            assert self.logits is not None, "nothing has been committed"
            logits = self.logits[:, None]
            masks = self.masked.read_masks(self.entries, len(logits), num_masks) if num_masks else logits[:, :0]
            return torch.cat((logits, masks), dim=1)
        replayed = self._launch(new, limits.depths.tolist(), None)
        self.hidden, logits = replayed or self.masked.read(self.entries, new, num_masks)
        self.logits = logits[:, 0]
        return logits[:, : limits.deepest]
