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

from ....checkpoints.schema import COUNT, INDEX, Tensor
from .. import DominoTraining
from ..recipe import Blocks, DFlashRecipe
from . import BlockHead, FormatRow, HeadConfig, projector, size_field
from .walks import CorrectedWalk, Walk


if TYPE_CHECKING:
    from ..formats import DFlashReader
    from ..network import DFlashConfig, DFlashNetwork


class DominoHead(BlockHead):
    """The corrections; new ones add next to nothing."""

    walk_class: type[Walk] = CorrectedWalk

    def __init__(self, config: DFlashConfig, sizes: DominoConfig):
        super().__init__(config, sizes)
        # Only its weights: cells are computed one at a time.
        self.prefix_gru: nn.GRU = nn.GRU(config.hidden_size, sizes.gru_hidden_dim, bias=False)
        last = nn.Linear(sizes.emb_dim, config.draft_vocab_size, bias=False)
        # Of zeros alone the other parts would learn nothing at first.
        nn.init.normal_(last.weight, std=1e-3)
        self.embed_proj: nn.Sequential = nn.Sequential(
            nn.Linear(config.hidden_size + sizes.gru_hidden_dim, sizes.emb_dim, bias=False), nn.SiLU(), last
        )

    def correction(self, walk: CorrectedWalk, tokens: torch.LongTensor) -> torch.Tensor | None:
        # Tokens of the positions that are not corrected are read, too.
        embedded = walk.block.network.embed(tokens[:, None])[:, 0]
        walk.state = self.next_state(embedded, walk.state)
        if walk.position < self.sizes.pure_draft_prefix_len:
            return None
        output = walk.block.output[:, walk.position]
        return self.embed_proj(torch.cat((output, walk.state.to(output)), dim=-1))

    def next_state(self, embedded: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """The state `(R, G)` after another token, by its embedding `(R, h)`; without a state, after the first one."""
        if state is None:
            state = embedded.new_zeros((len(embedded), self.prefix_gru.hidden_size))
        return torch.gru_cell(embedded, state, self.prefix_gru.weight_ih_l0, self.prefix_gru.weight_hh_l0)


@dataclass(frozen=True)
class DominoConfig(HeadConfig):
    """Sizes of Domino's corrections, named as in its configs."""

    gru_hidden_dim: int = size_field(COUNT, "g")  # G
    emb_dim: int = size_field(COUNT, "e")  # rank of the corrections
    pure_draft_prefix_len: int = size_field(INDEX, default=0)  # first drafts of a block that are not corrected

    head_class: ClassVar[type[BlockHead]] = DominoHead
    grows_trees = False
    takes_steps = False
    uses_last_output = False
    kind = "a Domino draft"
    what = "Domino's corrections"
    architecture = "DominoDraftModel"
    kinds: ClassVar[tuple[str, ...]] = ("domino",)
    marks: ClassVar[tuple[str, ...]] = ("architectures=.*Domino.*",)
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

    @classmethod
    def predicts_next(cls, reader: DFlashReader) -> bool:
        return reader.setting("shift_label")

    def entries(self, config: DFlashConfig) -> dict[str, Any]:
        return {"projector_type": "domino", "shift_label": config.predicts_next, **asdict(self)}


class DominoRecipe(DominoTraining, DFlashRecipe):
    """A Domino draft, which begins as a DFlash draft: its corrections add next to nothing. They learn with the layers,
    from the text's own tokens before each mask.
    """

    head_config: ClassVar[type[HeadConfig]] = DominoConfig

    def predictions(
        self, network: DFlashNetwork, blocks: Blocks
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        head: Any = network.block_head
        output, (count, size) = blocks.output, blocks.output.shape[2:]
        states: list[torch.Tensor] = []
        for embedded in network.embed(blocks.before.flatten(0, 1)).unbind(1):
            states.append(head.next_state(embedded, states[-1] if states else None))
        is_corrected = (torch.arange(count, device=output.device) >= head.sizes.pure_draft_prefix_len).to(output)
        read_states = torch.stack(states, dim=1).view(*output.shape[:3], -1)
        read = torch.cat((output, read_states, is_corrected[:, None].expand(*output.shape[:3], 1)), dim=-1)

        def logits(rows: torch.Tensor) -> torch.Tensor:
            return network.logits(rows[:, :size]) + rows[:, -1:] * head.embed_proj(rows[:, :-1])

        return read, logits
