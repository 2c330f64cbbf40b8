"""The candidate selector of DFlash 2: positions keep their k best tokens, whose scores depend on the token before.

    score_j(p -> c) = L_j[c] + (A[p] * P y_j) . S[c]         for the k tokens c with the largest logits L_j

A and S are codebooks of the target's tokens, P y_j is the projected output of position j, p the token that was chosen
at position j - 1, and at first the anchor. A draft is a walk through these scores, from left to right.

Shapes: R rows, K positions, k candidates of each, F nodes of a level, h hidden size, r rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ....checkpoints.schema import COUNT, Tensor, count_up_to
from ....errors import SpecConfigError
from ....target_facts import hidden_size
from ....training.recipe import sum_over_chunks
from .. import DFlash2Training
from ..recipe import Blocks, DFlashRecipe
from . import BlockHead, FormatRow, HeadConfig, size_field
from .walks import Block, CandidateWalk, Walk, best_tokens_of


if TYPE_CHECKING:
    from ..formats import DFlashReader
    from ..network import DFlashConfig, DFlashNetwork


_CODEBOOKS = ("predecessor_codebook", "successor_codebook")
_SHOWN = ("candidate_selector.",)


class CandidateSelector(BlockHead):
    """Scores of candidates; a new one adds next to nothing to their logits."""

    def __init__(self, config: DFlashConfig, sizes: SelectorConfig):
        super().__init__(config, sizes)
        shape = config.vocab_size, sizes.rank
        self.predecessor_codebook: nn.Parameter = nn.Parameter(torch.randn(shape))
        # Of zeros alone the other parts would learn nothing at first.
        self.successor_codebook: nn.Parameter = nn.Parameter(1e-3 * torch.randn(shape))
        self.hidden_projection: nn.Linear = nn.Linear(config.hidden_size, sizes.rank, bias=False)

    def begin(self, block: Block) -> Walk:
        if block.grammar is not None:
            return MaskedSelection(block)
        values, tokens = best_tokens_of(block.logits, self.sizes.top_k)
        if (known := block.known) is not None:
            # Whichever candidate is chosen where a token is known, it is this one.
            tokens = torch.where(known.settled[..., None], known.tokens[..., None], tokens)
        first = block.anchors[:, None, None].expand(-1, 1, tokens.shape[2])
        steps = self.scores(tokens, torch.cat((first, tokens[:, :-1]), dim=1), block.output)
        return CandidateWalk(block, tokens, values.float()[:, :, None] + steps)

    def scores(self, tokens: torch.LongTensor, before: torch.LongTensor, output: torch.Tensor) -> torch.FloatTensor:
        """Scores `(..., p, k)` of tokens `(..., k)` after other tokens `(..., p)`, by outputs `(..., h)`."""
        projected = self.hidden_projection(output)[..., None, :]
        before, after = self.predecessor_codebook[before] * projected, self.successor_codebook[tokens]
        return before.float() @ after.float().transpose(-1, -2)


class MaskedSelection(Walk):
    """A walk whose candidates are the best tokens that grammars allow after each token before."""

    is_independent = False

    def __init__(self, block: Block):
        super().__init__(block)
        assert block.grammar is not None, "masks without a grammar"
        self._masks = block.grammar()

    def step(
        self, tokens: torch.LongTensor, hidden: torch.Tensor, parents: torch.LongTensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._masks.follow(tokens, parents)
        return super().step(tokens, hidden, parents)

    def logits(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Logits `(R, F, V)` of the position after tokens `(R, F)`, -inf for all but the candidates of each."""
        masked, output = self._masks.apply(super().logits(tokens)), self.block.output[:, self.position]
        values, candidates = best_tokens_of(masked, self.head.sizes.top_k)
        scores = values.float() + self.head.scores(candidates, tokens[..., None], output[:, None])[..., 0, :]
        return scores.new_full(masked.shape, -torch.inf).scatter_(-1, candidates, scores)


@dataclass(frozen=True)
class SelectorConfig(HeadConfig):
    """Sizes of the selector, named as in its configs without their `selector_`."""

    rank: int = size_field(COUNT, "s")  # r
    top_k: int = size_field(count_up_to(256))  # k

    head_class: ClassVar[type[BlockHead]] = CandidateSelector
    suits_trees = True
    takes_untrained_steps = False
    # DFlash 2 was trained on transformers' states, of which the last one is normed.
    reads_normed_states = True
    has_own_scales = True
    looks_ahead_in_windows = True
    kind = "a DFlash 2 draft"
    what = "a candidate selector"
    architecture = "DFlash2DraftModel"
    kinds: ClassVar[tuple[str, ...]] = ("dflash2",)
    marks: ClassVar[tuple[str, ...]] = ("architectures=.*DFlash2.*",)
    excludes: ClassVar[tuple[str, ...]] = ("predicts_next", "has_own_vocabulary")
    table: ClassVar[tuple[Tensor, ...]] = (
        Tensor("(predecessor|successor)_codebook", "* s", kind),
        Tensor("hidden_projection.weight", "s h", kind),
    )
    prefix = "selector_"
    names: ClassVar[Mapping[str, str]] = {"candidate_selector.": ""}
    spellings: ClassVar[Mapping[str, str]] = {f"candidate_selector.{name}.weight": name for name in _CODEBOOKS}
    token_tables: ClassVar[tuple[str, ...]] = _CODEBOOKS
    formats: ClassVar[tuple[FormatRow, ...]] = (
        ("dflash2-speculators", "speculators", ("speculators_model_type=dflash2",), _SHOWN),
        ("dflash2", "z-lab, inco, hf_specdec", marks, _SHOWN),
    )

    @classmethod
    def read(cls, reader: DFlashReader) -> SelectorConfig:
        # Configs of speculators may leave it out.
        usual = 16 if reader.is_speculators else None
        return cls(reader.sizes["s"], reader.setting("selector_top_k") or usual or reader.value("selector_top_k"))


class DFlash2Recipe(DFlash2Training, DFlashRecipe):
    """A DFlash 2 draft, which begins as a DFlash draft: its convolutions change nothing, its selector next to nothing.
    The selector learns beside the tokens, from the candidates after the text's own token, where the right one is among
    them.
    """

    head_config: ClassVar[type[HeadConfig]] = SelectorConfig

    def check(self, target: PreTrainedModel) -> None:
        super().check(target)
        size = hidden_size(target)
        if size % self.conv_group_size:
            raise SpecConfigError(
                f"`conv_group_size` must divide {size}, the hidden size of {type(target).__name__}, got "
                f"{self.conv_group_size}."
            )

    def further_loss(self, network: DFlashNetwork, blocks: Blocks) -> torch.Tensor:
        selector, counting = network.block_head, blocks.counting
        before, output, labels = (part[counting] for part in (blocks.before, blocks.output, blocks.labels))
        weights = self.head_decay ** counting[2]

        def chunk_loss(part: slice) -> torch.Tensor:
            values, tokens = best_tokens_of(network.logits(output[part]), self.selector_top_k)
            scores = values.float() + selector.scores(tokens, before[part, None], output[part])[:, 0]
            # Where none is right, nothing is learned.
            is_right = tokens == labels[part, None]
            return -(weights[part] * (scores.log_softmax(-1) * is_right).sum(-1)).sum()

        losses = sum_over_chunks(chunk_loss, len(labels), network.config.draft_vocab_size)
        return self.selector_weight * losses / weights.sum()
