"""Header of a checkpoint, and the facts about targets that drafters are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import CheckpointFormatError
from ..settings import SpeculativeConfig
from ..target_facts import MAX_VOCABULARY_GAP, decoder_layers, hidden_size, vocabulary_size
from .files import RepoFiles, is_pickled
from .weights import WEIGHT_FILES, TensorTable, shards_of


_WRAPPERS = ("model.", "eagle.", "draft_model.", "eagle_module.", "medusa_heads.", "speculator.", "language_model.")


@dataclass(frozen=True)
class Header:
    """All that is known of a checkpoint before its weights are read."""

    name: str  # folder or repo id
    config: Mapping[str, Any]  # `config.json`
    tensors: Mapping[str, tuple[int, ...]]  # their shapes by their names in the file; a `TensorTable` reads them, too
    file: str | None = None  # the weight file, or its index

    @classmethod
    def of(cls, config: SpeculativeConfig, weight_files: Sequence[str] = WEIGHT_FILES) -> Header:
        """That of the checkpoint `config.model`, whose weights have one of these names, the preferred first."""
        files = RepoFiles.of(config)
        settings = files.config
        file = files.first_of(weight_files)
        if file is None:
            raise CheckpointFormatError(
                f"'{files.name}' has none of the weight files of this format: {', '.join(weight_files)}. Pass the "
                "folder or repo id of a complete checkpoint."
            )
        if is_pickled(file):
            # All of it will be read.
            for part in shards_of(files, file):
                files.path(part)
        return cls(files.name, settings, TensorTable(files, file), file)


@dataclass(frozen=True)
class TargetNeeds:
    """Target that a checkpoint was made for; `None` where it says nothing."""

    name: str | None = None  # repo id or folder, by the config or the card
    hidden_size: int | None = None  # of the states that the drafter reads
    vocab_size: int | None = None  # padding may differ
    num_hidden_layers: int | None = None
    min_hidden_layers: int | None = None  # that it must have for the states that are read
    model_type: str | None = None  # of a drafter that has the target's own layers


@dataclass(frozen=True)
class TargetSizes:
    """Name of a target in messages, and the sizes that a drafter must fit; `None` where one is not known."""

    name: str
    hidden_size: int | None
    vocab_size: int | None
    num_hidden_layers: int | None

    @classmethod
    def of(cls, target_model: nn.Module, *, with_layers: bool = True) -> TargetSizes:
        """Sizes of a model; its layers are only looked for where a drafter reads states between them."""
        layers = len(decoder_layers(target_model)) if with_layers else None
        name = type(target_model).__name__
        return cls(name, hidden_size(target_model), vocabulary_size(target_model), layers)


def misfits(needs: TargetNeeds, target: TargetSizes, most_gap: float = MAX_VOCABULARY_GAP) -> Iterator[str]:
    """Reasons why a drafter cannot draft for a target, without subject; padding may differ by `most_gap`."""
    width, size, layers = target.hidden_size, target.vocab_size, target.num_hidden_layers
    if needs.hidden_size is not None and width is not None and needs.hidden_size != width:
        yield f"reads states of hidden size {needs.hidden_size}, and {target.name} has {width}"
    rows = needs.vocab_size
    if rows is not None and size is not None and abs(rows - size) > most_gap * size:
        yield f"has a vocabulary of {rows} tokens, and {target.name} has {size}: these are different tokenizers"
    if layers is not None and needs.num_hidden_layers not in (None, layers):
        yield f"was made for a target with {needs.num_hidden_layers} decoder layers, and {target.name} has {layers}"
    elif layers is not None and (needs.min_hidden_layers or 0) > layers:
        yield f"reads the states of {needs.min_hidden_layers} decoder layers, and {target.name} has {layers}"


def unwrapped(name: str) -> str:
    """The name of a tensor without the wrappers that files put around a head."""
    while prefix := next(filter(name.startswith, _WRAPPERS), None):
        name = name.removeprefix(prefix)
    return name


def listed(names: Iterable[str]) -> str:
    """The first names, for a message."""
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
