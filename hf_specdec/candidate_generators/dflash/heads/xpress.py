"""XPress: a small causal network refines the tokens of a block in several passes (arXiv:2608.02438).

With y_k the outputs of all B positions of a block, the anchor's included, g their mean, and p_k the token before
position k,

    x_k = W [H y_k; G g; W_1[p_k]]              x_k += sum_{j <= k} L[:, k, j] * x_j              x_k += mlp(x_k)
    logits_k + W_2 x_k

The tokens begin as the best ones of the logits, and every pass predicts all of them anew from those of the pass before
(Jacobi iteration). After B - 1 passes they are those that left-to-right decoding would choose; drafts have fewer. No
distribution goes with them, so that they are chosen, never drawn.

Shapes: R rows, B positions of a block, n the first of them, h hidden size, r rank, U vocabulary of the draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ....checkpoints.schema import COUNT, Key, Tensor
from ....drafting.state import Entries
from ....kernels.best import best_tokens
from ....layers.llama import GatedMLP
from ....transfers import upload
from ..network import DFlashConfig
from . import BLOCK, BlockHead, FormatRow, HeadConfig, size_field
from .walks import Memory, Walk


_SHOWN = ("xpress_head.|refiner_head.",)


class RefinedWalk(Walk):
    """Tokens of a block that several passes refine."""

    def best(self) -> torch.LongTensor:
        block, first = self.block, self.block.memory["tokens"]
        tokens = self._chosen(block.logits)
        for _ in range(self.head.sizes.num_passes):
            added = self.head(block.whole, torch.cat((first, tokens[:, :-1]), dim=1))
            tokens = self._chosen(block.logits + added[:, 1:])
        return tokens

    def _chosen(self, logits: torch.Tensor) -> torch.LongTensor:
        return self.block.network.target_ids(best_tokens(self.block.allowed_first(logits)))


class XPressHead(BlockHead):
    """The network that refines; a new one changes nothing."""

    walk_class: type[Walk] = RefinedWalk

    def __init__(self, config: DFlashConfig, sizes: XPressConfig):
        super().__init__(config, sizes)
        size, rank, inner = config.hidden_size, sizes.rank, sizes.mlp_hidden
        self.w1: nn.Embedding = nn.Embedding(config.vocab_size, rank)
        self.down_h: nn.Linear = nn.Linear(size, rank, bias=False)
        self.down_g: nn.Linear = nn.Linear(size, rank, bias=False)
        self.in_proj: nn.Linear = nn.Linear(3 * rank, rank, bias=False)
        # L: weights for each channel and pair of positions.
        self.mix: nn.ParameterDict = nn.ParameterDict({"L": torch.zeros(rank, config.block_size, config.block_size)})
        self.mlp: GatedMLP = GatedMLP(rank, inner)
        self.w2: nn.Linear = nn.Linear(rank, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.w2.weight)

    def forward(self, output: torch.Tensor, previous: torch.LongTensor) -> torch.Tensor:
        """Added to logits of the first positions, `(R, n, U)`, by outputs `(R, B, h)` and tokens before `(R, n)`."""
        count = previous.shape[1]
        mean = self.down_g(output.mean(1, keepdim=True)).expand(-1, count, -1)
        states = self.in_proj(torch.cat((self.down_h(output[:, :count]), mean, self.w1(previous)), dim=-1))
        mixing = self.mix["L"][:, :count, :count].tril()
        states = states + torch.einsum("rkj,bjr->bkr", mixing, states)
        return self.w2(states + self.mlp(states))

    def begin_text(self, prompts: torch.LongTensor, device: torch.device) -> Memory:
        # Its last two tokens; the second is the anchor.
        return {"tokens": F.pad(prompts, (max(2 - prompts.shape[1], 0), 0))[:, -2:].to(device)}

    def remember(self, kept: Memory, fused: torch.Tensor, new: Entries) -> Memory:
        if kept:
            tokens = torch.cat((kept["tokens"], new.tokens.to(fused.device)), dim=1)
            first = upload(new.counts, tokens.device)[:, None]
            kept["tokens"] = tokens.gather(1, first + torch.arange(2, device=tokens.device))
        return kept


@dataclass(frozen=True)
class XPressConfig(HeadConfig):
    """Sizes of the refinement, named as in its configs without their `xpress_`."""

    rank: int = size_field(COUNT, "x")  # r
    mlp_hidden: int = size_field(COUNT, "i")
    num_passes: int = size_field(BLOCK, default=6, also="num_jacobi_passes")  # in which tokens are predicted anew

    head_class: ClassVar[type[BlockHead]] = XPressHead
    draws = False
    grows_trees = False
    takes_steps = False
    chooses_together = True
    needs_whole_block = True
    kind = "an XPress draft"
    what = "XPress's refinement"
    architecture = "Qwen3XPressModel"
    kinds: ClassVar[tuple[str, ...]] = ("xpress",)
    marks: ClassVar[tuple[str, ...]] = ("architectures=.*XPress.*",)
    excludes: ClassVar[tuple[str, ...]] = ("predicts_next",)
    keys: ClassVar[tuple[Key, ...]] = (Key("xpress_block_size block_size", BLOCK, 16, size="b"),)
    table: ClassVar[tuple[Tensor, ...]] = (
        Tensor("w1.weight", "* x", kind),
        Tensor("mix.L", "x b b", kind),
        Tensor("mlp.up_proj.weight", "i x", kind),
    )
    notes = "xpress_mlp_ratio xpress_topc"
    prefix = "xpress_"
    block_size_key = "xpress_block_size"
    names: ClassVar[Mapping[str, str]] = {"xpress_head.": ""}
    # Those of speculators.
    spellings: ClassVar[Mapping[str, str]] = {
        "refiner_head.token_embed.": "w1.",
        "refiner_head.readout.": "w2.",
        "refiner_head.mix_l": "mix.L",
        "refiner_head.mlp_gate.": "mlp.gate_proj.",
        "refiner_head.mlp_up.": "mlp.up_proj.",
        "refiner_head.mlp_down.": "mlp.down_proj.",
        "refiner_head.": "",
    }
    token_tables: ClassVar[tuple[str, ...]] = ("w1.weight", "w2.weight")
    formats: ClassVar[tuple[FormatRow, ...]] = (
        ("xpress", "XPress, speculators, hf_specdec", (*marks, "speculators_model_type=xpress"), _SHOWN),
    )
