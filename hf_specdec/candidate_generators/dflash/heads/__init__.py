"""What follows the parallel prediction of a block. A variant of DFlash is one file of this folder, which has

    its module, a [`BlockHead`], with how tokens follow each other in it, a [`Walk`];
    a record of its sizes, a [`HeadConfig`], which also knows its part of a checkpoint;
    a recipe, if it can be trained, which adds its loss to that of the tokens.

The classes here are plain DFlash: the tokens of a block do not depend on each other. `formats.HEADS` lists all
variants.

Shapes: R rows, h hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from ....checkpoints.format import is_marked
from ....checkpoints.header import unwrapped
from ....checkpoints.schema import FLAG, Key, Kind, Tensor, count_up_to
from ....drafting.state import Entries
from .walks import Block, Memory, Walk


if TYPE_CHECKING:
    from ..formats import DFlashReader
    from ..network import DFlashConfig


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


def size_field(kind: Kind, size: str | None = None, default: Any = MISSING, also: str = "") -> Any:
    """Declares a size of a variant that configs state: a field, and what [`Key`] says of it but for its name."""
    return field(default=default, metadata={"key": Key(also, kind, None if default is MISSING else default, size)})


class BlockHead(nn.Module):
    """The weights of a variant, which have the names of the published files, see [`HeadConfig`]."""

    walk_class: type[Walk] = Walk

    def __init__(self, config: DFlashConfig, sizes: Any):
        super().__init__()
        self.sizes = sizes

    def begin_text(self, prompts: torch.LongTensor, device: torch.device) -> Memory:
        """What is kept of prompts `(R, L)` from one draft to the next."""
        return {}

    def remember(self, kept: Memory, fused: torch.Tensor, new: Entries) -> Memory:
        """What a block after new tokens is told of them; `fused` `(R, C, h)` is what layers see of those before them.

        What is kept is replaced in place; while a prompt is read, that is nothing.
        """
        return {}

    def begin(self, block: Block) -> Walk:
        """Begins to choose the tokens of a block."""
        return self.walk_class(block)


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a variant, what drafting has to know of it, and its part of a checkpoint."""

    head_class: ClassVar[type[BlockHead]] = BlockHead

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
    keys: ClassVar[tuple[Key, ...]] = (  # beside those of its sizes
        Key("block_size", BLOCK, 16),
        Key("sample_from_anchor", FLAG),
        Key("shift_label", FLAG, False),
    )
    prefix: ClassVar[str] = ""  # of the keys of its sizes, and of the options that name them in training
    block_size_key: ClassVar[str] = "block_size"
    notes: ClassVar[str] = ""  # keys that change nothing
    table: ClassVar[tuple[Tensor, ...]] = ()  # by the names of its module
    names: ClassVar[Mapping[str, str]] = {}  # beginnings of names in files, and what they are in its module
    spellings: ClassVar[Mapping[str, str]] = {}  # others, which are read and not written
    unused: ClassVar[str] = ""  # regular expression of names in the network that may be left over
    token_tables: ClassVar[tuple[str, ...]] = ()  # tensors with a row for every token
    formats: ClassVar[tuple[FormatRow, ...]] = ()

    @classmethod
    def all_keys(cls) -> tuple[Key, ...]:
        """Rows of all its settings."""
        sizes = [(item.name, item.metadata["key"]) for item in fields(cls) if item.metadata]
        return (*cls.keys, *(key._replace(names=f"{cls.prefix}{name} {key.names}") for name, key in sizes))

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
        beginnings, sizes = (*cls.names, *cls.spellings), [cls.prefix + item.name for item in fields(cls)]
        has_tensors = any(unwrapped(name).startswith(beginnings) for name in reader.stored.values())
        return has_tensors or cls.is_named(reader) or any(map(reader.stated, sizes if cls.prefix else ()))

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
