"""DSpark: corrections of a block's logits by its tokens, and a head that foresees how many are kept.

What is drafted at a position depends on the tokens t before it, since something is added to its logits
(arXiv:2607.05147); y is the network's output there:

    vanilla     W_2 W_1[t]
    gated       W_2 (sigmoid(G [y; e]) * e)        e = W_1[t]
    rnn         W_2 tanh(o)                        g, c, o = J [s; e; y]
                                                   s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)

So draft tokens may be chosen or drawn: the logits of a position are those of its distribution given the tokens before.

The confidence head estimates the probability that a draft token is accepted once those before it are, from y and, in
most drafts, e.

Shapes: R rows, K positions that predict, h hidden size, U vocabulary of the draft, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ....checkpoints.schema import FLAG, INDEX, Key, Tensor, keys
from . import HEAD, BlockHead, FormatRow, HeadConfig, size_field
from .walks import Block, CorrectedWalk, Walk


if TYPE_CHECKING:
    from ..formats import DFlashReader
    from ..network import DFlashConfig


_TABLE = f"{HEAD}markov_w1.weight"

# Tensors that tell the types of corrections apart.
_TYPES = {"gated": "gate_proj", "rnn": "joint_proj"}


class MarkovHead(BlockHead):
    """The corrections, and the confidence head."""

    def __init__(self, config: DFlashConfig, sizes: MarkovConfig):
        super().__init__(config, sizes)
        rank, size = sizes.rank, config.hidden_size
        if rank:
            self.markov_w1: nn.Embedding = nn.Embedding(config.vocab_size, rank)
            self.markov_w2: nn.Linear = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if sizes.type == "gated":
            self.gate_proj: nn.Linear = nn.Linear(size + rank, rank)
        if sizes.type == "rnn":
            self.joint_proj: nn.Linear = nn.Linear(2 * rank + size, 3 * rank)
        if sizes.has_confidence:
            width = size + rank if sizes.confidence_with_markov else size
            self.confidence_head: nn.ModuleDict = nn.ModuleDict({"proj": nn.Linear(width, 1)})

    def begin(self, block: Block) -> Walk:
        return (CorrectedWalk if self.sizes.rank else Walk)(block)

    def correction(self, walk: CorrectedWalk, tokens: torch.LongTensor) -> torch.Tensor:
        output, row = walk.block.output[:, walk.position], self.markov_w1(tokens)
        if self.sizes.type == "gated":
            row = self.gate_proj(torch.cat((output, row), dim=-1)).sigmoid() * row
        if self.sizes.type == "rnn":
            state = torch.zeros_like(row) if walk.state is None else walk.state
            gate, candidate, row = self.joint_proj(torch.cat((state, row, output), dim=-1)).chunk(3, dim=-1)
            walk.state, row = torch.lerp(candidate.tanh(), state, gate.sigmoid()), row.tanh()
        return self.markov_w2(row)

    def confidence_logits(self, block: Block, tokens: torch.LongTensor) -> torch.Tensor:
        """Log-odds `(R, n)` that tokens `(R, n)` are accepted once those before are."""
        read = block.output[:, : tokens.shape[1]]
        if self.sizes.confidence_with_markov:
            before = torch.cat((block.anchors[:, None], tokens[:, :-1]), dim=1)
            read = torch.cat((read, self.markov_w1(before)), dim=-1)
        return self.confidence_head["proj"](read)[..., 0].float()


@dataclass(frozen=True)
class MarkovConfig(HeadConfig):
    """Sizes of DSpark's heads."""

    rank: int = size_field(INDEX, default=0)  # of the table of corrections by the token before; 0: there are none
    type: str = "vanilla"  # "vanilla", "gated" or "rnn"
    has_confidence: bool = False
    confidence_with_markov: bool = False  # the confidence head reads the row of the table, too

    head_class: ClassVar[type[BlockHead]] = MarkovHead
    takes_steps = False
    kind = "a DSpark draft"
    what = "a Markov head"
    kinds: ClassVar[tuple[str, ...]] = ("dspark",)
    architecture = "Qwen3DSparkModel"
    marks: ClassVar[tuple[str, ...]] = ("architectures=.*DSpark.*",)
    keys: ClassVar[tuple[Key, ...]] = keys("enable_confidence_head confidence_head_with_markov", FLAG)
    prefix = "markov_"
    notes = "markov_head_type *confidence_head* dspark_target_layer_ids"
    names: ClassVar[Mapping[str, str]] = {"confidence_head.": "confidence_head.", "markov_head.": ""}
    # A head that the config switches off.
    unused = r"block_head\.confidence_head\.proj\..*"
    table: ClassVar[tuple[Tensor, ...]] = (
        Tensor("markov_w1.weight", "* r", needed=False),
        Tensor("markov_w2.weight", "* r", needed=False),
        Tensor("confidence_head.proj.weight", "* c", needed=False),
    )
    token_tables: ClassVar[tuple[str, ...]] = ("markov_w1.weight", "markov_w2.weight")
    formats: ClassVar[tuple[FormatRow, ...]] = (
        ("dspark-speculators", "speculators", ("speculators_model_type=dspark",), ()),
        ("dspark-deepspec", "DeepSpec", ("architectures=Qwen3DSpark.*",), ()),
        ("dspark-specforge", "SpecForge", ("architectures=.*DSpark.*", "dflash_config.projector_type=dspark"), ()),
    )

    @property
    def grows_trees(self) -> bool:
        return not self.rank

    @classmethod
    def predicts_next(cls, reader: DFlashReader) -> bool:
        stated = reader.setting("sample_from_anchor")
        return cls.is_named(reader) if stated is None else stated

    @classmethod
    def read(cls, reader: DFlashReader) -> MarkovConfig:
        if reader.setting("markov_rank"):
            reader.require([_TABLE], "its Markov head")
        rank, width, size = (reader.sizes.get(symbol, 0) for symbol in "rch")
        kind = next((kind for kind, name in _TYPES.items() if f"{HEAD}{name}.weight" in reader.stored), "vanilla")
        # Where there is none, some configs say so by `false` or 0.
        stated = reader.stated("markov_head_type") or kind
        if rank and stated != kind:
            what = f"and the tensors of a Markov head of type '{kind}'"
            raise reader.wrong_setting("markov_head_type", stated, what, "Pass an intact checkpoint.")
        if not width or reader.setting("enable_confidence_head") is False:
            return cls(rank, kind)
        with_markov = width != size
        if with_markov:
            reader.require([_TABLE], "its confidence head")
        stated = reader.setting("confidence_head_with_markov")
        if stated not in (None, with_markov):
            what = f"and a confidence head that reads {width} values at a hidden size of {size}"
            raise reader.wrong_setting("confidence_head_with_markov", stated, what, "Pass an intact checkpoint.")
        return cls(rank, kind, True, with_markov)

    def entries(self, config: DFlashConfig) -> dict[str, Any]:
        entries: dict[str, Any] = {"markov_rank": self.rank, "markov_head_type": self.type}
        if not config.predicts_next:
            entries["sample_from_anchor"] = False
        if self.has_confidence:
            entries |= {"enable_confidence_head": True, "confidence_head_with_markov": self.confidence_with_markov}
        return entries

    def placed(self, config: DFlashConfig, common: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
        # All at the top, as DeepSpec writes it.
        return {"architectures": [self.architecture], **common, **inner, **self.entries(config)}
