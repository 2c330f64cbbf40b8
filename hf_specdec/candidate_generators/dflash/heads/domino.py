"""Domino: corrections of a block's logits by all of its tokens before (arXiv:2605.29707).

With y the network's output at a position and t_0 ... t the tokens before it, t_0 the anchor,

    logits + V silu(U [y; s])        s: a GRU after the embeddings of t_0 ... t

So draft tokens may be chosen or drawn: the logits of a position are those of its distribution given the tokens before.

Shapes: R rows, N blocks, K positions that predict, h hidden size, U vocabulary of the draft, G size of the state s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ....checkpoints.schema import COUNT, INDEX, Key, Tensor
from .. import DominoTraining
from ..recipe import Blocks, DFlashRecipe
from . import BlockHead, CorrectedWalk, FormatRow, HeadConfig, Walk, projector


if TYPE_CHECKING:
    from ..formats import DFlashReader
    from ..network import DFlashConfig, DFlashNetwork


@dataclass(frozen=True)
class DominoConfig(HeadConfig):
    """Sizes of Domino's corrections, named as in its configs."""

    gru_hidden_dim: int  # G
    emb_dim: int  # rank of the corrections
    pure_draft_prefix_len: int = 0  # first drafts of a block that are not corrected

    grows_trees = False
    takes_steps = False
    uses_last_output = False
    kind = "a Domino draft"
    what = "Domino's corrections"
    architecture = "DominoDraftModel"
    kinds: ClassVar[tuple[str, ...]] = ("domino",)
    marks: ClassVar[tuple[str, ...]] = ("architectures=.*Domino.*",)
    keys: ClassVar[tuple[Key, ...]] = (
        Key("gru_hidden_dim", COUNT, size="g"),
        Key("emb_dim", COUNT, size="e"),
        Key("pure_draft_prefix_len", INDEX, 0),
    )
    table: ClassVar[tuple[Tensor, ...]] = (
        Tensor("prefix_gru.weight_ih_l0", "3g h", kind),
        Tensor("prefix_gru.weight_hh_l0", "3g g", kind),
        Tensor("embed_proj.0.weight", "e *", kind),
        Tensor("embed_proj.2.weight", "* e", kind),
    )
    names: ClassVar[Mapping[str, str]] = {"prefix_gru.": "prefix_gru.", "embed_proj.": "embed_proj."}
    # Early files have the head around them.
    spellings: ClassVar[Mapping[str, str]] = {"logit_head.": ""}
    token_tables: ClassVar[tuple[str, ...]] = ("embed_proj.2.weight",)
    formats: ClassVar[tuple[FormatRow, ...]] = (
        ("domino", "SpecForge, hf_specdec", (*marks, *projector("domino")), ("prefix_gru.|logit_head.",)),
    )

    def module(self, config: DFlashConfig) -> DominoHead:
        return DominoHead(config, self)

    @classmethod
    def predicts_next(cls, reader: DFlashReader) -> bool:
        return reader.setting("shift_label")

    def entries(self, config: DFlashConfig) -> dict[str, Any]:
        return {"projector_type": "domino", "shift_label": config.predicts_next, **asdict(self)}


class DominoWalk(CorrectedWalk):
    """A walk that reads its tokens with the GRU."""

    _state: torch.Tensor | None = None

    def correction(self, tokens: torch.LongTensor) -> torch.Tensor | None:
        # Tokens of the positions that are not corrected are read, too.
        embedded = self.block.network.embed(tokens[:, None])[:, 0]
        self._state = self.head.next_state(embedded, self._state)
        if self.position < self.head.first:
            return None
        output = self.block.output[:, self.position]
        return self.head.embed_proj(torch.cat((output, self._state.to(output)), dim=-1))


class DominoHead(BlockHead):
    """The corrections; new ones add next to nothing."""

    walk_class: ClassVar[type[Walk]] = DominoWalk

    def __init__(self, config: DFlashConfig, sizes: DominoConfig):
        super().__init__()
        self.first: int = sizes.pure_draft_prefix_len
        # Only its weights: cells are computed one at a time.
        self.prefix_gru: nn.GRU = nn.GRU(config.hidden_size, sizes.gru_hidden_dim, bias=False)
        last = nn.Linear(sizes.emb_dim, config.draft_vocab_size, bias=False)
        # Of zeros alone the other parts would learn nothing at first.
        nn.init.normal_(last.weight, std=1e-3)
        self.embed_proj: nn.Sequential = nn.Sequential(
            nn.Linear(config.hidden_size + sizes.gru_hidden_dim, sizes.emb_dim, bias=False), nn.SiLU(), last
        )

    def states(self, embedded: torch.Tensor) -> torch.Tensor:
        """The states `(N, K, G)` after each token of N blocks, by their embeddings `(N, K, h)`, the anchors' first."""
        states: list[torch.Tensor] = []
        for position in range(embedded.shape[1]):
            states.append(self.next_state(embedded[:, position], states[-1] if states else None))
        return torch.stack(states, dim=1)

    def next_state(self, embedded: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """The state `(R, G)` after another token, by its embedding `(R, h)`; without a state, after the first one."""
        if state is None:
            state = embedded.new_zeros((len(embedded), self.prefix_gru.hidden_size))
        return torch.gru_cell(embedded, state, self.prefix_gru.weight_ih_l0, self.prefix_gru.weight_hh_l0)


class DominoRecipe(DominoTraining, DFlashRecipe):
    """A Domino draft, which begins as a DFlash draft: its corrections add next to nothing. They learn with the layers,
    from the text's own tokens before each mask.
    """

    @property
    def head(self) -> DominoConfig:
        return DominoConfig(self.gru_hidden_dim, self.emb_dim, self.pure_draft_prefix_len)

    def predictions(
        self, network: DFlashNetwork, blocks: Blocks
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        head: Any = network.block_head
        output, tokens, anchors = blocks.output, blocks.reading.tokens, blocks.anchors
        count, size = output.shape[2:]
        places = anchors[..., None] + 1 + torch.arange(count, device=anchors.device)
        # Past the end of a row there is nothing to predict.
        before = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1).flatten(1))
        states = head.states(network.embed(before).view(-1, count, size)).view(*output.shape[:3], -1)
        is_corrected = (torch.arange(count, device=output.device) >= head.first).to(output)
        read = torch.cat((output, states, is_corrected[:, None].expand(*output.shape[:3], 1)), dim=-1)

        def logits(rows: torch.Tensor) -> torch.Tensor:
            return network.logits(rows[:, :size]) + rows[:, -1:] * head.embed_proj(rows[:, :-1])

        return read, logits
