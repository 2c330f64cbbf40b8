"""A made-up block head, all of it: candidates are scored by the token before, as a table of rank r has learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from hf_specdec.candidate_generators.dflash.heads import BlockHead, HeadConfig, size_field
from hf_specdec.candidate_generators.dflash.heads.walks import Block, CandidateWalk, best_tokens_of
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.checkpoints.schema import COUNT, Tensor


class PairsHead(BlockHead):
    def __init__(self, config, sizes):
        super().__init__(config, sizes)
        self.before = nn.Embedding(config.vocab_size, sizes.rank)
        self.after = nn.Embedding(config.vocab_size, sizes.rank)

    def begin(self, block: Block) -> CandidateWalk:
        values, tokens = best_tokens_of(block.logits, self.sizes.count)
        first = block.anchors[:, None, None].expand(-1, 1, tokens.shape[2])
        before = self.before(torch.cat((first, tokens[:, :-1]), dim=1))
        return CandidateWalk(block, tokens, values[:, :, None] + before @ self.after(tokens).transpose(-1, -2))


@dataclass(frozen=True)
class PairsConfig(HeadConfig):
    """Sizes: rank, and candidates of a position."""

    rank: int = size_field(COUNT, "z")
    count: int = size_field(COUNT, default=4)

    head_class = PairsHead
    kind = "a draft with pairs"
    what = "a table of pairs"
    architecture = "PairsDraftModel"
    kinds = ("pairs",)
    marks = ("architectures=PairsDraftModel",)
    prefix = "pairs_"
    names: ClassVar = {"pairs.": ""}
    table = (Tensor("(before|after).weight", "* z", kind),)
    token_tables = ("before.weight", "after.weight")


class PairsRecipe(DFlashRecipe):
    head = PairsConfig(6)

    def further_loss(self, network, blocks):
        counting = blocks.counting
        scores = network.block_head.before(blocks.before[counting]) @ network.block_head.after.weight.T
        return nn.functional.cross_entropy(scores, blocks.labels[counting])
