"""Reader of a checkpoint's header: one place that knows what its settings and tensors mean.

Detection, inspection and loading ask the same reader, so that they say the same of every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.utils import logging

from ..errors import CheckpointFormatError, shown
from .config_keys import refused_key, unknown_keys
from .format import Unsupported
from .header import WEIGHT_FILES, Header, TargetNeeds, TargetSizes, listed, misfits, unwrapped
from .quantised import is_about_quantisation, packed_weight, scale_of, scaled
from .settings import COUNT, MAPPING, Kind, count_up_to


if TYPE_CHECKING:
    from .checkpoint import Checkpoint


logger = logging.get_logger(__name__)

# Tokens of a draft that a config may say: with some networks each costs logits over the whole vocabulary.
_DRAFT_TOKENS = count_up_to(256)


class CheckpointReader:
    """Reading of a drafter's header.

    A method subclasses it for its formats. Class attributes:

    - `noun` (`str`): What messages call the drafter.
    - `blocks` (`tuple[str, ...]`): Parts of a config that may state a setting, the first to be asked first; the empty
      name is the config itself.
    - `settings` (`dict[str, Kind]`): Settings that are read, each with its kind.
    - `notes` (`str`): Other keys of its configs that change nothing here, as shell patterns with spaces between.
    - `renamed` (`Mapping[str, str]`): Beginnings of names of tensors in files, and what they are called here.
    - `unsupported` (`tuple[Unsupported, ...]`): Kinds that are refused; `instead` says what to pass then.
    - `sizes_by`, `fitting` (`str`): What asks for the shapes of its tensors, and what to pass where they differ.
    - `weight_files` (`tuple[str, ...]`): Names that its weights may have, the preferred first.
    - `target_files` (`str`, *optional*): Pattern of files that lie beside the weights of whole models and hold layers
      for this method.

    Args:
        header (`Header`): Of a checkpoint of one of the formats.

    Attributes:
        places (`Sequence[Mapping]`): Where the config may say something; the first that does counts.
        stored (`Mapping[str, str]`): The name in the file of each tensor by its name here.
        tables (`dict[str, torch.Tensor]`): Tensors of the network that are not stored as they are.

    Raises:
        CheckpointFormatError: Two tensors have one name here.
    """

    noun: ClassVar[str] = "drafter"
    blocks: ClassVar[tuple[str, ...]] = ("",)
    settings: ClassVar[dict[str, Kind]] = {
        "hidden_size": COUNT,
        "quantization_config": MAPPING,
        "vocab_size": COUNT,
    }
    notes: ClassVar[str] = ""
    renamed: ClassVar[Mapping[str, str]] = {}
    unsupported: ClassVar[tuple[Unsupported, ...]] = ()
    instead: ClassVar[str] = "Pass another drafter."
    sizes_by: ClassVar[str] = "its other tensors ask"
    fitting: ClassVar[str] = "Pass an intact checkpoint."
    weight_files: ClassVar[tuple[str, ...]] = WEIGHT_FILES
    target_files: ClassVar[str | None] = None

    def __init__(self, header: Header):
        self.header = header
        self.name: str = header.name
        blocks = (header.config.get(key) if key else header.config for key in self.blocks)
        self.places: tuple[Mapping[str, Any], ...] = tuple(block for block in blocks if isinstance(block, Mapping))
        self.stored: dict[str, str] = self._stored_names()
        self.tables: dict[str, torch.Tensor] = {}

    # What detection and inspection ask

    @property
    def needs(self) -> TargetNeeds:
        """The target that it was made for, without its name."""
        return TargetNeeds()

    @property
    def target_name(self) -> str | None:
        """Repo id or folder of the target, `None` where the config does not name it."""
        verifier = _inner(_inner(self.header.config, "speculators_config"), "verifier")
        names = (self.header.config.get("base_model_name_or_path"), verifier.get("name_or_path"))
        return next((name for name in names if isinstance(name, str) and name), None)

    @property
    def num_draft_tokens(self) -> int | None:
        """Tokens of a draft that it was made for; `None`: any number, or it does not say."""
        proposals = _inner(self.header.config, "speculators_config").get("proposal_methods")
        first = proposals[0] if isinstance(proposals, list) and proposals else None
        found = first.get("speculative_tokens") if isinstance(first, Mapping) else None
        return found if _DRAFT_TOKENS.is_valid(found) else None

    def check(self) -> None:
        """Checks what can be known without a target.

        Raises:
            CheckpointFormatError: It is of a kind that is not supported, is incomplete, or contradicts itself.
        """
        if (packed := packed_weight(self.stored)) is not None:
            raise self.wrong(
                f"holds quantised weights in a form ({packed}) which is not supported",
                "Pass one in a floating-point type, or in 8 bits with `weight_scale` or `weight_scale_inv`.",
            )
        for kind in self.unsupported:
            if kind.is_there(self.places, self.stored):
                raise self.not_supported(kind)
        if reason := refused_key(self.header.config, self._known_keys):
            raise CheckpointFormatError(f"'{self.name}' {reason}")

    @property
    def _known_keys(self) -> set[str]:
        return {*self.settings, *self.notes.split()}

    def check_target(self, target: TargetSizes) -> None:
        """Raises a [`CheckpointFormatError`] where it was made for another target, and warns of unknown settings."""
        if unknown := unknown_keys(self.header.config, self._known_keys):
            names = listed(f"`{name[:100]}`" for name in unknown)
            logger.warning_once(
                f"'{self.name}' has {names} in its config.json, which is not known here. If it changes what "
                "is computed, fewer drafts are accepted; the text stays right."
            )
        for reason in misfits(self.needs, target):
            raise self.wrong(reason, self.for_target)

    @property
    def for_target(self) -> str:
        """Advice about a drafter of another target."""
        own = f", not for '{self.target_name}'" if self.target_name else ""
        return f"Pass the {self.noun} trained for this target{own}."

    # Of methods that draft with the layers of a target

    @classmethod
    def count_in_target(cls, header: Header) -> int:
        """Layers of this method in the checkpoint of a whole model."""
        return 0

    @classmethod
    def family_misfits(cls, needs: TargetNeeds, target_config: Mapping[str, Any]) -> Iterator[str]:
        """Reasons why it cannot draft for targets of a kind, in sentences, by the config of the language model."""
        yield from ()

    # What the header says

    def stated(self, key: str) -> Any:
        """A setting of any kind from the first place that states it, `None` where it is left out."""
        return next((place[key] for place in self.places if place.get(key) is not None), None)

    def setting(self, key: str, kind: Kind | None = None) -> Any:
        """A setting, `None` where it is left out; its `kind` is by default that of the table.

        Raises:
            CheckpointFormatError: It is of another kind.
        """
        value, kind = self.stated(key), kind or self.settings[key]
        if value is not None and not kind.is_valid(value):
            raise self.wrong(
                f"has `{key}`={shown(value)} in its config.json, which must be {kind.what}",
                "Correct it or leave it out.",
            )
        return value

    def first_setting(self, *keys: str) -> Any:
        """The first of these settings that is given and is not an empty list, `None` where none is."""
        return next((value for value in map(self.setting, keys) if value not in (None, [])), None)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a tensor, `None` where there is none of this name."""
        shapes = self.header.shapes
        return shapes[self.stored[name]] if shapes is not None and name in self.stored else None

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows and columns of a tensor.

        Raises:
            CheckpointFormatError: There is none of this name, or it has another number of dimensions.
        """
        self.require([name], f"the {self.noun}")
        shape = self.shape(name)
        if len(shape) != 2:
            raise CheckpointFormatError(
                f"'{self.name}': {self.stored[name]} must be a matrix, and has the shape {list(shape)}. Pass an "
                "intact checkpoint."
            )
        return shape

    def require(self, names: Iterable[str], of: str) -> None:
        """Checks that tensors are there.

        Raises:
            CheckpointFormatError: Some are missing; `of` says whose they are.
        """
        missing = [self.name_in_file(name) for name in names if name not in self.stored]
        if missing:
            raise CheckpointFormatError(
                f"'{self.name}' lacks {len(missing)} tensors of {of}: {listed(missing)} (it has {len(self.stored)} in "
                f"{self.header.file}). Pass a complete checkpoint."
            )

    def check_count(self, count: int, of: str) -> None:
        """Checks that there are that many tensors at all, before their names are spelled out.

        Raises:
            CheckpointFormatError: There are fewer; `of` says whose they are.
        """
        if count > len(self.stored):
            raise CheckpointFormatError(
                f"'{self.name}' has {len(self.stored)} tensors in {self.header.file}, and {of} need at least {count}. "
                "Pass a complete checkpoint, with nothing missing between the numbers in the names."
            )

    # Tensors

    def rename(self, stored: str) -> str:
        """The name used here of a tensor in a file."""
        bare = unwrapped(stored)
        old = next(filter(bare.startswith, self.renamed), "")
        return self.renamed.get(old, "") + bare.removeprefix(old)

    def name_in_file(self, name: str) -> str:
        """The name that messages call a missing tensor by."""
        return name

    def tensors(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype | None,
        device: torch.device | str,
    ) -> dict[str, torch.Tensor]:
        """The tensors of a network.

        Args:
            checkpoint (`Checkpoint`): The one that the header is of.
            shapes (`Mapping[str, tuple[int, ...]]`): What the network's state dict holds.
            dtype (`torch.dtype`, *optional*): Of the floating-point ones; `None`: as stored.
            device (`torch.device`): Where to.

        Raises:
            CheckpointFormatError: Some are missing, have other shapes, are not of real numbers, or are not known.
        """
        plan = {name: self.sources(name, shape) for name, shape in shapes.items() if name not in self.tables}
        used = dict.fromkeys(source for rows in plan.values() for row in rows for source in row)
        self.require(used, f"the {self.noun}")
        self.judge_left_over(
            [name for name in self.stored if name not in used and not is_about_quantisation(name, used)]
        )
        self._check_room(plan, shapes)
        found = {name: table.to(device) for name, table in self.tables.items() if name in shapes}
        for name, rows in plan.items():
            if rows == [[name]]:
                found[name] = self._row(checkpoint, name, rows[0], shapes[name], dtype, device)
                continue
            whole = None
            # One at a time: those of large targets are gigabytes.
            for index, row in enumerate(rows):
                tensor = self._row(checkpoint, name, row, shapes[name][1:], dtype, device)
                whole = tensor.new_empty(shapes[name]) if whole is None else whole
                whole[index] = tensor
            found[name] = whole
        return found

    def _check_room(self, plan: Mapping[str, Sequence[Sequence[str]]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuses to stack tensors into more numbers than the files hold, before any is read."""
        for name, rows in plan.items():
            shape = shapes[name][1:]
            # The first is looked at when it is read.
            for row in rows[1:]:
                if sum(math.prod(self.shape(source) or ()) for source in row) < math.prod(shape):
                    raise self.wrong_shape(row[0], shape)

    def sources(self, name: str, shape: tuple[int, ...]) -> Sequence[Sequence[str]]:
        """Tensors that one of the network is stacked from, each of one or several with their rows side by side."""
        return [[name]]

    def weight(
        self, checkpoint: Checkpoint, name: str, dtype: torch.dtype | None, device: torch.device | str
    ) -> torch.Tensor:
        """One of the stored tensors, as it is multiplied with; 8-bit weights are multiplied with their factors."""
        scales = scale_of(name, self.stored)
        if scales is None:
            return checkpoint.read_weight(self.stored[name], dtype, device)
        parts = (checkpoint.read(self.stored[part], None, device) for part in (name, scales))
        return scaled(self, self.stored[name], *parts, dtype)

    def fitted(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The part of a tensor that the network uses, where it has this `name` and this `shape`."""
        return tensor

    def judge_left_over(self, names: Sequence[str]) -> None:
        """Warns of tensors that the network does not have, or refuses them."""

    def wrong(self, what: str, todo: str) -> CheckpointFormatError:
        """The error that something is wrong with the checkpoint, and what to do about it."""
        return CheckpointFormatError(f"'{self.name}' {what}. {todo}")

    def wrong_shape(self, name: str, shape: tuple[int, ...]) -> CheckpointFormatError:
        """The error that a tensor has another shape than this one."""
        found = list(self.shape(name) or ())
        return self.wrong(
            f"has {self.stored[name]} of the shape {found}, where {self.sizes_by} for {list(shape)}", self.fitting
        )

    def not_supported(self, kind: Unsupported) -> CheckpointFormatError:
        """The error that it is of a known kind that cannot be used."""
        return self.wrong(f"{kind.what}, which is not supported", kind.instead or self.instead)

    def _row(
        self,
        checkpoint: Checkpoint,
        name: str,
        sources: Sequence[str],
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
        device: torch.device | str,
    ) -> torch.Tensor:
        parts = [self.weight(checkpoint, source, dtype, device) for source in sources]
        tensor = self.fitted(name, torch.cat(parts) if len(parts) > 1 else parts[0], shape)
        if tuple(tensor.shape) != shape:
            raise self.wrong_shape(sources[0], shape)
        return tensor

    def _stored_names(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for stored in self.header.shapes or ():
            name = self.rename(stored)
            if name in found:
                raise self.wrong(
                    f"has {stored} and {found[name]}, which are two writings of one tensor",
                    "Pass a checkpoint with one of them.",
                )
            found[name] = stored
        return found


def _inner(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}
