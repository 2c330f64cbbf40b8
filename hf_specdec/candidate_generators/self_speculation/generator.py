"""The target drafts for itself, over its own keys and values; nothing is kept from cycle to cycle.

Early exit: the first E layers, the final norm and the head write a few tokens, and the whole model verifies them.
LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710) trains models for it; transformers has it as `assistant_early_exit`.

Sparse-KV self-speculation: all layers, which see the first S slots of a text and the last W (the pattern of
StreamingLLM, Xiao et al. 2023, arXiv:2309.17453; as a draft in MagicDec, Chen et al. 2024, arXiv:2408.11049). It reads
all weights for every draft token, so it pays where reading keys and values takes most of a forward's time: long texts,
and many rows of them.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ...drafting.draw import DepthLimits, Draw
from ...drafting.growth import DraftNodes, grow
from ...drafting.state import Entries, NetworkState
from ...drafts import DraftTree
from ...errors import SpecConfigError
from ...protocol import DeviceCommit, Session
from ...settings import SpeculativeConfig
from ...settings.checks import Options, draft_sample_method_field, is_int, setting
from ...settings.spellings import SPARSE_KV_WINDOW
from ...target.graphs import CallGraphs
from ...target.model import SlotModel
from ...target_facts import decoder_layers
from ..networks import OverTargetGenerator
from .own_layers import OwnSlots, check_can_draft


@dataclass(frozen=True)
class EarlyExitOptions(Options):
    """Options of `spec_method="early_exit"`."""

    early_exit_layer: int | None = setting(
        None,
        "Layers that draft, the first ones; also `assistant_early_exit`, as in transformers. Default: a quarter.",
        least=1,
        engine_names={"assistant_early_exit": 0},
    )
    draft_sample_method: Literal["greedy", "probabilistic"] | None = draft_sample_method_field("probabilistic")

    def own_part(self, num_layers: int) -> tuple[int | None, ...]:
        """The layers and slots that draft, as [`OwnSlots`] takes them; the target has so many layers."""
        layer = max(num_layers // 4, 1) if self.early_exit_layer is None else self.early_exit_layer
        if layer >= num_layers:
            raise SpecConfigError(
                f"`early_exit_layer`={layer} leaves nothing out of a target with {num_layers} layers. Name one from 1 "
                f"to {num_layers - 1}."
            )
        return (layer,)


@dataclass(frozen=True)
class SparseKVOptions(Options):
    """Options of `spec_method="sparse_kv"`."""

    sparse_kv_window: tuple[int, int] = setting(
        SPARSE_KV_WINDOW,
        "How many of the first and of the last tokens of a text drafts see; a number alone counts the last ones.",
        normalize=lambda window: (SPARSE_KV_WINDOW[0], window) if is_int(window) else window,
        least=0,
    )
    draft_sample_method: Literal["greedy", "probabilistic"] | None = draft_sample_method_field("probabilistic")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sparse_kv_window) != 2 or self.sparse_kv_window[1] < 1:
            raise SpecConfigError(
                f"`sparse_kv_window` must be how many first tokens and how many last ones, of these at least 1, got "
                f"{list(self.sparse_kv_window)}."
            )

    def own_part(self, num_layers: int) -> tuple[int | None, ...]:
        """All layers, over the beginning and the end of the slots."""
        return (None, *self.sparse_kv_window)


class SelfSpeculation(OverTargetGenerator):
    """Drafts chains with the target's own layers."""

    default_num_speculative_tokens = 4
    most_speculative_tokens: int | None = 12
    default_sample_method = "probabilistic"
    loaded_by: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def load(cls, config: SpeculativeConfig, target_model: torch.nn.Module) -> int:
        """The number of the target's layers, which must run one by one."""
        check_can_draft(target_model)
        return len(decoder_layers(target_model))

    def __init__(self, config: SpeculativeConfig, resources: int, session: Session):
        super().__init__(config, resources, session)
        self.part: tuple[int | None, ...] = self.options.own_part(resources)
        self._slots: OwnSlots | None = None

    def lent_slots(self, target: SlotModel, lengths: list[int]) -> OwnSlots:
        if self._slots is None:
            self._slots = OwnSlots(target, *self.part)
        return self._slots.of_rows(lengths)

    def close(self) -> None:
        super().close()
        self._slots = None

    def draft(self, state: NetworkState, new: Entries, limits: DepthLimits, draw: Draw) -> DraftNodes:
        slots = state.slots
        slots.begin(new.counts, limits.deepest)
        with slots.drafting():
            logits = slots.read(new.tokens, [1] * len(new.tokens)).logits[:, -1]
            return grow(self.plan, slots.step, logits.new_empty((len(logits), 0)), logits, limits, draw)

    # Graphs of the target, for drafts

    def make_graphs(self) -> CallGraphs | None:
        target = self.session.target
        if target is None or target.graphs is None or target.graphs.why_eager is not None:
            return None
        return target.graphs.beside() if target.model.device == self.session.device else None

    @property
    def graph_key(self) -> tuple[Any, ...]:
        return (*super().graph_key, *self.part)

    @property
    def num_ahead(self) -> int:
        return super().num_ahead + self.session.target.most_committed

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        return super().draft_ahead(commit) if commit.target_is_free else None


class EarlyExitCandidateGenerator(SelfSpeculation):
    """Drafts with the target's first layers."""

    options_class = EarlyExitOptions


class SparseKVCandidateGenerator(SelfSpeculation):
    """Drafts with all layers of the target, over the beginning and the end of its slots."""

    options_class = SparseKVOptions
