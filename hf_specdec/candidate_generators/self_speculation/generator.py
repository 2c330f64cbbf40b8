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
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from ...drafting.chain import SteeredChain
from ...drafting.graphs import graph_depth
from ...drafts import DraftTree
from ...errors import SpecConfigError
from ...protocol import DeviceCommit, DraftStep, Session
from ...target.following import Choose, Following
from ...target.own_layers import OwnDrafts, check_can_draft
from ...target_facts import decoder_layers
from ...validation import Options, draft_sample_method_field, setting
from ..base import CandidateGenerator


if TYPE_CHECKING:
    from ...settings import SpeculativeConfig
    from ...target.graphs import CallGraphs


@dataclass(frozen=True)
class EarlyExitOptions(Options):
    """Options of `spec_method="early_exit"`.

    Raises:
        SpecConfigError: A value is out of range.
    """

    early_exit_layer: int | None = setting(
        None,
        "Layers that draft, the first ones; also `assistant_early_exit`, as in transformers. Left out, a quarter.",
        least=1,
        engine_names={"assistant_early_exit": 0},
    )
    draft_sample_method: Literal["greedy", "probabilistic"] | None = draft_sample_method_field("probabilistic")


@dataclass(frozen=True)
class SparseKVOptions(Options):
    """Options of `spec_method="sparse_kv"`.

    Raises:
        SpecConfigError: A value is out of range.
    """

    sparse_kv_window: int = setting(512, "Last tokens of a text that drafts see.", least=1)
    sparse_kv_sinks: int = setting(4, "First tokens of a text that drafts see beside them.", least=0)
    draft_sample_method: Literal["greedy", "probabilistic"] | None = draft_sample_method_field("probabilistic")


class SelfSpeculation(CandidateGenerator):
    """Drafts chains with the target's own layers.

    Attributes:
        drafts (`OwnDrafts`): Which of them, over which slots.
    """

    default_num_speculative_tokens = 4
    most_speculative_tokens: int | None = 12
    loaded_by: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def load(cls, config: SpeculativeConfig, target_model: torch.nn.Module) -> int:
        """The number of the target's layers.

        Raises:
            UnsupportedModelError: They cannot be run one by one.
        """
        check_can_draft(target_model)
        return len(decoder_layers(target_model))

    def __init__(self, config: SpeculativeConfig, resources: int, session: Session):
        super().__init__(config, resources, session)
        sampler = session.sampler
        is_greedy = sampler is None or sampler.is_greedy or self.options.draft_sample_method == "greedy"
        self.samples_drafts: bool | None = not is_greedy
        self.check_sampled_length()
        self.drafts: OwnDrafts = self.own_drafts(self.options, resources)
        self._own_graphs: CallGraphs | None = None
        self._step: DraftStep | None = None  # that of the last draft

    @staticmethod
    def own_drafts(options: Any, num_layers: int) -> OwnDrafts:
        """The layers and slots that draft with these options, of a target with so many layers."""
        raise NotImplementedError

    def propose(self, step: DraftStep) -> DraftTree:
        session = self.session
        if session.target is None:
            raise SpecConfigError(
                f"{type(self).__name__} drafts with the keys and values of the target, which transformers' own "
                "assisted decoding does not hand over. Pass it to generate() as `assistant`, or name `spec_method`."
            )
        depths = self.draft_depths(step)
        count = max(depths, default=0)
        if count == 0:
            self._step = None
            return DraftTree.empty(len(step.rows), session.device)
        self._step = step
        depth = graph_depth(step.depth, self.num_speculative_tokens)
        following = self._draft_at_once(step.rows, step.lengths, step.anchor_tokens, depth)
        if following is not None:
            return self._drafted(following, depths)
        chain = SteeredChain(session.sampler, step.rows, step.lengths, self.samples_drafts)
        tokens = step.anchor_tokens
        with self.drafts.begin(session.target, count) as next_logits:
            for _ in range(count):
                tokens = chain.choose(chain.scores(next_logits(tokens).to(session.device)))
        return chain.draft(depths)

    @property
    def drafts_ahead(self) -> bool:
        return self._step is not None and self._graphs is not None and self._choice(self._step.rows) is not None

    def draft_ahead(self, commit: DeviceCommit) -> DraftTree | None:
        if not commit.target_is_free:
            return None
        count = graph_depth(commit.depth, self.num_speculative_tokens)
        following = self._draft_at_once(commit.rows, self._step.lengths, commit.anchors, count, commit.counts)
        return following and self._drafted(following, commit.max_draft_tokens)

    def _drafted(self, following: Following, depths: list[int]) -> DraftTree:
        return DraftTree.chain(following.tokens.to(self.session.device), probs=following.probs).shortened(depths)

    def _draft_at_once(
        self,
        rows: list[int],
        lengths: list[int],
        anchors: torch.LongTensor,
        count: int,
        more: torch.LongTensor | None = None,
    ) -> Following | None:
        """A draft of this depth from one graph; `None` where each token is chosen by itself.

        Args:
            rows, lengths: Those of [`DraftStep`].
            more (`torch.LongTensor` of shape `(B,)`, *optional*): By how much rows are longer than the host knows.
        """
        graphs = self._graphs
        choose = None if graphs is None else self._choice(rows)
        if choose is None:
            return None
        before = [length - 1 for length in lengths]
        keys = None if choose.stack is None else self.session.sampler.uniforms.keys(rows, before)
        return self.drafts.at_once(self.session.target, graphs, anchors, choose, count, keys, more)

    def _choice(self, rows: list[int]) -> Choose | None:
        """The way in which graphs choose tokens; `None` where they cannot."""
        sampler = self.session.sampler
        stack = sampler.in_graphs(rows)
        if stack is None or not (self.samples_drafts or (sampler.is_greedy and not stack)):
            return None
        size = sampler.vocab_size
        return Choose(size, size, size, stack if self.samples_drafts else None)

    @property
    def _graphs(self) -> CallGraphs | None:
        """Those of the target, for drafts; `None` where its forwards run without, or elsewhere."""
        target = self.session.target
        if target is None or target.graphs is None or target.graphs.why_eager is not None:
            return None
        if self._own_graphs is None and target.model.device == self.session.device:
            self._own_graphs = target.graphs.beside()
            self.session.draft_graphs.append(self._own_graphs)
        return self._own_graphs


class EarlyExitCandidateGenerator(SelfSpeculation):
    """Drafts with the target's first layers."""

    options_class = EarlyExitOptions

    @staticmethod
    def own_drafts(options: EarlyExitOptions, num_layers: int) -> OwnDrafts:
        layer = options.early_exit_layer
        if layer is None:
            layer = max(num_layers // 4, 1)
        if layer >= num_layers:
            raise SpecConfigError(
                f"`early_exit_layer`={layer} leaves nothing out of a target with {num_layers} layers. Name one from 1 "
                f"to {num_layers - 1}."
            )
        return OwnDrafts(layer)


class SparseKVCandidateGenerator(SelfSpeculation):
    """Drafts with all layers of the target, over the beginning and the end of its slots."""

    options_class = SparseKVOptions

    @staticmethod
    def own_drafts(options: SparseKVOptions, num_layers: int) -> OwnDrafts:
        return OwnDrafts(None, options.sparse_kv_sinks, options.sparse_kv_window)
