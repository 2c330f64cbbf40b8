"""What follows the parallel prediction of a block. A variant of DFlash is one file of this folder, which has

    a record of its sizes, a [`HeadConfig`], which also knows its part of a checkpoint;
    its module, a [`BlockHead`], and how tokens follow each other in it, a [`Walk`];
    a recipe, if it can be trained, which adds its loss to that of the tokens.

The classes here are plain DFlash: the tokens of a block do not depend on each other. `formats.HEADS` lists all
variants.

Shapes: R rows, T positions of a block, K of them that predict what is drafted, h hidden size, U vocabulary of the
draft, V that of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn

from ....checkpoints.format import is_marked
from ....checkpoints.schema import FLAG, Key, Tensor, count_up_to
from ....drafting.draw import DepthLimits, Draw, SteeredDraw
from ....drafting.growth import DraftNodes, DynamicTree, Positions, allowed_first
from ....drafting.prefixes import Lattice, best_candidates
from ....drafting.state import Entries
from ....drafts import TokenTree
from ....kernels.best import best_tokens
from ....logits.grammar.masks import GrowingMasks
from .denoising import Denoising


if TYPE_CHECKING:
    from ..formats import DFlashReader
    from ..network import DFlashConfig, DFlashNetwork


# Tokens of a block, and forwards for one: published drafts have 16. Each token of a block has logits over the whole
# vocabulary, so that a config must not be able to ask for any number.
BLOCK = count_up_to(256)

# What names of tensors of the head begin with in the network.
HEAD = "block_head."

# Name, producer, marks and shown tensors of a format.
FormatRow = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def projector(kind: str) -> tuple[str, ...]:
    """Marks of configs in which a kind is called a type of projector."""
    return f"dflash_config.projector_type={kind}", f"projector_type={kind}"


# What a head remembers of the text, by name; each `(R, ...)`.
Memory = dict[str, torch.Tensor]


class Block(NamedTuple):
    """Predictions of one forward."""

    network: DFlashNetwork
    anchors: torch.LongTensor  # (R,), first tokens of the blocks
    output: torch.Tensor  # (R, K, h), of the network at the first K positions that predict
    logits: torch.Tensor  # (R, K, U), of the draft there
    whole: torch.Tensor  # (R, T, h), output of the network at all positions
    memory: Memory  # what the head remembers of the text, see `BlockHead`
    grammar: Callable[[], GrowingMasks] | None = None  # begins the masks of the rows' grammars, after the anchors

    def allowed_first(
        self, logits: torch.Tensor, settled: torch.BoolTensor | None = None, tokens: torch.LongTensor | None = None
    ) -> torch.Tensor:
        """Logits `(R, K, U)`, with [`~drafting.growth.allowed_first`] where there is a grammar."""
        if self.grammar is None:
            return logits
        return allowed_first(logits, self.grammar(), self.network.token_ids, settled, tokens)


class Walk(Positions):
    """A way through the positions of a block; here their tokens do not depend on each other."""

    is_independent: ClassVar[bool] = True

    def __init__(self, block: Block):
        super().__init__(block.logits)
        self.block = block
        self.head: Any = block.network.block_head

    def best(self) -> torch.LongTensor:
        """The best tokens `(R, K)`, each after those before it, in the target's ids."""
        return self.block.network.target_ids(best_tokens(self.block.logits))

    def lattice(self, count: int) -> Lattice:
        """Up to `count` candidates of each position, for trees of the most probable prefixes."""
        return best_candidates(self.block.logits, count, self.block.network.token_ids)

    def draft(self, plan: TokenTree | DynamicTree, limits: DepthLimits, draw: Draw) -> DraftNodes:
        """A chain, or where a grammar is in force a tree that grows level by level."""
        if draw.is_plain:
            return DraftNodes(self.best()[:, : limits.deepest])
        if self.is_independent and isinstance(draw, SteeredDraw) and not draw.reads_tokens:
            return DraftNodes(draw.choose_at_once(self.block.logits[:, : limits.deepest]), probs=draw.all_probs)
        return self.grow(plan, self.block.anchors, limits, draw)


class CorrectedWalk(Walk):
    """A walk whose tokens change the logits of the positions after them, so that no tree can be searched."""

    is_independent = False

    def correction(self, tokens: torch.LongTensor) -> torch.Tensor | None:
        """What is added to the logits of the position, `(R, U)`, after tokens `(R,)`; positions come in turn."""
        raise NotImplementedError(f"{type(self).__name__} must implement correction().")

    def logits(self, tokens: torch.LongTensor) -> torch.Tensor:
        logits, added = self.block.logits[:, self.position, None], self.correction(tokens[:, 0])
        return logits if added is None else logits + added[:, None]

    def best(self) -> torch.LongTensor:
        tokens = [self.block.anchors[:, None]]
        for position in range(self.block.logits.shape[1]):
            self.position = position
            tokens.append(self.block.network.target_ids(best_tokens(self.logits(tokens[-1]))))
        return torch.cat(tokens[1:], dim=1)


class BlockHead(nn.Module):
    """The weights of a variant, which have the names of the published files, see [`HeadConfig`]."""

    walk_class: ClassVar[type[Walk]] = Walk

    def begin_text(self, prompts: torch.LongTensor, device: torch.device) -> Memory:
        """What is kept of prompts `(R, L)` from one draft to the next."""
        return {}

    def remember(self, kept: Memory, fused: torch.Tensor, new: Entries) -> Memory:
        """What a block after new tokens of the text is told of them.

        `fused` `(R, C, h)` is what the layers see of the tokens before the new ones. What is kept is replaced in
        place; while a prompt is read, that is nothing.
        """
        return {}

    def begin(self, block: Block) -> Walk:
        """Begins to choose the tokens of a block."""
        return self.walk_class(block)

    def denoise(self, state: Denoising, block: Block, keep: int) -> None:
        """One of several denoising steps by a block's predictions, see [`Denoising.update`]."""
        state.update(block.allowed_first(block.logits, state.settled, state.tokens), keep, block.network.token_ids)


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a variant, what drafting has to know of it, and its part of a checkpoint."""

    # Drafting
    draws: ClassVar[bool] = True  # its tokens have distributions, so that they can be drawn
    grows_trees: ClassVar[bool] = True  # a tree can be made of a block
    suits_trees: ClassVar[bool] = False  # and that is what it was made for
    takes_steps: ClassVar[bool] = True  # blocks may have known tokens in the place of some masks
    takes_untrained_steps: ClassVar[bool] = True  # also more often than it was trained for
    chooses_together: ClassVar[bool] = False  # what is chosen at a position depends on all drafted ones
    needs_whole_block: ClassVar[bool] = False  # blocks always have their trained size
    uses_last_output: ClassVar[bool] = True  # where positions predict the next token, the last one does, too
    has_confidence = False  # it foresees how many drafts will be kept; a field of some variants

    # The target
    reads_normed_states: ClassVar[bool] = False  # those of the last layer, after the final norm
    has_own_scales: ClassVar[bool] = False  # in the place of what the target does after embedding and lm_head

    # Checkpoints
    kind: ClassVar[str] = "a DFlash draft"  # in messages
    what: ClassVar[str] = ""  # the head itself, in messages
    architecture: ClassVar[str] = "DFlashDraftModel"
    kinds: ClassVar[tuple[str, ...]] = ("dflash",)  # what configs call it
    marks: ClassVar[tuple[str, ...]] = ()  # of its configs, see `checkpoints.format`
    excludes: ClassVar[tuple[str, ...]] = ()  # of "predicts_next", "has_own_vocabulary": what no published one has
    looks_ahead_in_windows: ClassVar[bool] = False  # of layers, where files of speculators do not say otherwise
    keys: ClassVar[tuple[Key, ...]] = (
        Key("block_size", BLOCK, 16),
        Key("sample_from_anchor", FLAG),
        Key("shift_label", FLAG, False),
    )
    prefix: ClassVar[str] = ""  # of the keys of its sizes
    block_size_key: ClassVar[str] = "block_size"
    notes: ClassVar[str] = ""  # keys that change nothing
    table: ClassVar[tuple[Tensor, ...]] = ()  # by the names of its module
    names: ClassVar[Mapping[str, str]] = {}  # beginnings of names in files, and what they are in its module
    spellings: ClassVar[Mapping[str, str]] = {}  # others, which are read and not written
    unused: ClassVar[str] = ""  # regular expression of names in the network that may be left over
    token_tables: ClassVar[tuple[str, ...]] = ()  # tensors with a row for every token
    formats: ClassVar[tuple[FormatRow, ...]] = ()

    def module(self, config: DFlashConfig) -> BlockHead:
        """The head of a draft with these sizes, of random weights."""
        return BlockHead()

    @classmethod
    def name_in_file(cls, name: str) -> str:
        """What files call a tensor of the network."""
        inner = name.removeprefix(HEAD)
        if inner == name:
            return name
        return next(file + inner.removeprefix(here) for file, here in cls.names.items() if inner.startswith(here))

    @classmethod
    def is_named(cls, reader: DFlashReader) -> bool:
        """True where the config speaks of it."""
        is_kind = any(reader.stated(key) in cls.kinds for key in reader.kind_keys)
        return is_kind or is_marked(reader.header.config, cls.marks)

    @classmethod
    def is_there(cls, reader: DFlashReader) -> bool:
        """True where config or tensors speak of it."""
        return cls.is_named(reader) or reader.has_tensors(*cls.names, *cls.spellings)

    @classmethod
    def predicts_next(cls, reader: DFlashReader) -> bool:
        """True where a position of the block predicts the token after it."""
        is_stated = bool(reader.setting("sample_from_anchor"))
        if reader.setting("shift_label") and not is_stated:
            raise reader.wrong("has `shift_label` without `sample_from_anchor` in its config.json", reader.instead)
        return is_stated

    @classmethod
    def read(cls, reader: DFlashReader) -> HeadConfig:
        """The sizes in a checkpoint."""
        return cls(**{item.name: reader.value(cls.prefix + item.name) for item in fields(cls)})

    def entries(self, config: DFlashConfig) -> dict[str, Any]:
        """What is said of it where a draft is saved."""
        sizes = {self.prefix + name: value for name, value in asdict(self).items()}
        return sizes | ({"sample_from_anchor": True} if config.predicts_next else {})

    def placed(self, config: DFlashConfig, common: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
        """The `config.json` of a saved draft, from what every draft has, and what only block drafters have."""
        inner = {**inner, **self.entries(config)}
        return {"architectures": [self.architecture], **common, "dflash_config": inner}
