"""Detection of what a checkpoint is: its method, its format and the target it was made for, without its weights.

Read are `config.json`, the list of files, the names and shapes of the tensors and the metadata of the card; what is
large stays where it is. Repository names are never looked at: they do not tell.
"""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from ..checkpoints.files import RepoFiles, is_pickled
from ..checkpoints.format import Format, format_of
from ..checkpoints.header import Header, TargetNeeds
from ..checkpoints.loading import checkpoint_errors
from ..checkpoints.reader import CheckpointReader, target_name
from ..checkpoints.weights import WEIGHT_FILES, TensorTable
from ..errors import CheckpointAccessError, CheckpointFormatError
from ..method import built_in_methods, is_language_model
from .trust import texts_in


if TYPE_CHECKING:
    from ..settings import SpeculativeConfig


@dataclass(frozen=True)
class Detection:
    """Method, format and target of a checkpoint."""

    method: str  # what drafts with it
    format: str  # name of the [`Format`]
    producer: str  # who publishes or writes that format
    target: TargetNeeds = field(default_factory=TargetNeeds)  # that it was made for
    num_draft_tokens: int | None = None  # of a draft that it was made for; `None`: it does not say, or any
    num_tensors: int | None = None  # in its weight files; `None` where these were not read
    num_bytes: int | None = None  # of its weights
    weight_file: str | None = None  # from which the weights are read, or its index
    mtp_layers: int = 0  # beside the layers of a whole model
    problems: tuple[str, ...] = ()  # why it cannot be used with any target
    reader: CheckpointReader | None = field(default=None, repr=False, compare=False)  # of its loader

    @property
    def is_pickled(self) -> bool:
        """True where the weights are in a file of `torch.save`."""
        return self.weight_file is not None and is_pickled(self.weight_file)

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain Python and JSON types."""
        found = asdict(replace(self, reader=None)) | {"problems": list(self.problems)}
        del found["reader"]
        return found


@cache
def known_formats() -> tuple[Format, ...]:
    """The formats of all methods; those of whole models come last, for heads often have their class names."""
    with_formats = sorted((m for m in built_in_methods() if m.formats), key=lambda method: method.is_language_model)
    return tuple(dict.fromkeys(row for method in with_formats for row in method.load(method.formats).FORMATS))


def detect(files: RepoFiles, *, reads_pickles: bool = True) -> Detection:
    """What the checkpoint with these files is; of pickled weights, without `reads_pickles`, by its config."""
    with checkpoint_errors(files.name):
        row, weight_file, tensors, problems = _read(files, reads_pickles)
        is_whole_model = is_language_model(row.method)
        needs = TargetNeeds(target_name(files.config) or target_in_card(files.card, is_whole_model))
        reader = num_draft_tokens = None
        faults: list[str] = []
        if tensors is not None:
            with gathered(faults, files.name):
                reader = row.reader(Header(files.name, files.config, tensors, weight_file))
                with gathered(faults, files.name):
                    reader.check()
                needs = replace(reader.needs, name=needs.name)
                num_draft_tokens = reader.num_draft_tokens
        num_layers = 0
        if is_whole_model:
            # Beside those of the model, or in a file of their own.
            extra = files.first_of([reader.target_files for reader in _readers() if reader.target_files])
            tables = (tensors, _tensors(files, extra)[0] if extra else None)
            header = Header(files.name, files.config, ChainMap(*(table for table in tables if table is not None)))
            num_layers = max(reader.count_in_target(header) for reader in _readers())
        return Detection(
            row.method,
            row.name,
            row.producer,
            needs,
            num_draft_tokens,
            None if tensors is None else len(tensors),
            files.sizes.get(weight_file) if tensors is None else tensors.num_bytes,
            weight_file,
            num_layers,
            # Further ones follow from the first.
            (*problems, *faults[:1]),
            reader,
        )


@contextmanager
def gathered(problems: list[str], name: str) -> Iterator[None]:
    """Turns the error that something is wrong with the checkpoint `name` into one of the problems."""
    try:
        yield
    except CheckpointAccessError:
        raise
    except CheckpointFormatError as error:
        problems.append(about_it(str(error), name))


def about_it(message: str, name: str) -> str:
    """A message about a checkpoint without its name, where it begins with that."""
    subject = f"'{name}' "
    return f"It {message.removeprefix(subject)}" if message.startswith(subject) else message


def detect_checkpoint(name: str | os.PathLike[str], **location: Any) -> Detection:
    """Detects what a folder or repository is; `location` is what [`RepoFiles`] takes."""
    return detect(RepoFiles(name, **location))


def detect_method(config: SpeculativeConfig) -> str:
    """The method of the checkpoint `config.model`."""
    files = RepoFiles.of(config)
    # What else is wrong with it is for its loader to say.
    with checkpoint_errors(files.name):
        return files.recall("method", lambda: _read(files)[0].method)


def _read(files: RepoFiles, reads_pickles: bool = True) -> tuple[Format, str | None, TensorTable | None, list[str]]:
    """The format, the weight file that its loader takes, the tensors in it, and what is wrong with the files."""
    # All names that weights have in some format, the most telling first.
    beside = [reader.target_files for reader in _readers() if reader.target_files]
    own = [name for reader in _readers() for name in reader.weight_files if name not in (*beside, *WEIGHT_FILES)]
    seen = files.first_of([*own, *WEIGHT_FILES, *beside])
    tensors, problems = _tensors(files, seen, reads_pickles)
    row = format_of(known_formats(), files.name, files.config, tensors)
    taken = files.first_of(row.reader.weight_files)
    if taken == seen:
        return row, seen, tensors, problems
    tensors, problems = _tensors(files, taken, reads_pickles)
    other = format_of(known_formats(), files.name, files.config, tensors)
    if other.method != row.method:
        raise CheckpointFormatError(
            f"The method of '{files.name}' is ambiguous: {seen} is of the format {row.name} (method '{row.method}'), "
            f"and {taken} of {other.name} (method '{other.method}'). Name the method with `spec_method`."
        )
    return other, taken, tensors, problems


def _tensors(
    files: RepoFiles, weight_file: str | None, reads_pickles: bool = True
) -> tuple[TensorTable | None, list[str]]:
    """Names and shapes of the tensors where they can be had, and what is wrong with the files."""
    problems: list[str] = []
    if weight_file is None:
        problems.append(f"'{files.name}' has no weights of a known name, such as {', '.join(WEIGHT_FILES[:2])}.")
    elif reads_pickles or not is_pickled(weight_file):
        with gathered(problems, files.name):
            return TensorTable(files, weight_file), problems
    return None, problems


def _readers() -> list[type[CheckpointReader]]:
    return list(dict.fromkeys(row.reader for row in known_formats()))


def target_in_card(card: Mapping[str, Any], is_whole_model: bool) -> str | None:
    """The target that a drafter's card names; its base model mostly is its target, but for a whole model."""
    own = card.get("speculative")
    names = texts_in(own.get("target")) if isinstance(own, Mapping) else []
    names += [] if is_whole_model else texts_in(card.get("base_model"))
    return next(filter(None, names), None)
