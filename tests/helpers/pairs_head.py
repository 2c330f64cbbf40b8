"""A made-up block head, all of it: candidates are scored by the token before, as a table of rank r has learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from hf_specdec.candidate_generators.dflash.heads import Block, BlockHead, HeadConfig
from hf_specdec.candidate_generators.dflash.heads.candidates import CandidateWalk, best_tokens_of
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.checkpoints.schema import COUNT, Key, Tensor


@dataclass(frozen=True)
class PairsConfig(HeadConfig):
    """Sizes: rank, and candidates of a position."""

    rank: int
    count: int = 4

    kind = "a draft with pairs"
    what = "a table of pairs"
    architecture = "PairsDraftModel"
    kinds = ("pairs",)
    marks = ("architectures=PairsDraftModel",)
    keys = (Key("pairs_rank", COUNT, size="z"), Key("pairs_count", COUNT, 4))
    names: ClassVar = {"pairs.": ""}
    table = (Tensor("(before|after).weight", "* z", kind),)
    token_tables = ("before.weight", "after.weight")

    def module(self, config):
        return PairsHead(config, self)

    @classmethod
    def read(cls, reader):
        return cls(reader.sizes["z"], reader.setting("pairs_count"))

    def entries(self, config):
        return {"pairs_rank": self.rank, "pairs_count": self.count}


class PairsHead(BlockHead):
    def __init__(self, config, sizes):
        super().__init__()
        self.count = sizes.count
        self.before = nn.Embedding(config.vocab_size, sizes.rank)
        self.after = nn.Embedding(config.vocab_size, sizes.rank)

    def begin(self, block: Block) -> CandidateWalk:
        values, tokens = best_tokens_of(block.logits, self.count)
        first = block.anchors[:, None, None].expand(-1, 1, tokens.shape[2])
        before = self.before(torch.cat((first, tokens[:, :-1]), dim=1))
        return CandidateWalk(block, tokens, values[:, :, None] + before @ self.after(tokens).transpose(-1, -2))


class PairsRecipe(DFlashRecipe):
    head = PairsConfig(6)

    def further_loss(self, network, blocks):
        rows, columns, masks = counting = blocks.counting
        before = blocks.reading.tokens[rows, blocks.anchors[rows, columns] + 1 + masks]
        scores = network.block_head.before(before) @ network.block_head.after.weight.T
        return nn.functional.cross_entropy(scores, blocks.labels[counting])
