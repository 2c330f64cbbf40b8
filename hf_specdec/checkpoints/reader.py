"""Reader of a checkpoint's header: one place that knows what its settings and tensors mean.

Detection, inspection and loading ask the same reader, so that they say the same of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import CheckpointFormatError, shown
from .config_keys import refused_key
from .format import Unsupported
from .header import WEIGHT_FILES, Header, TargetNeeds, TargetSizes, check_fits, listed, unwrapped
from .settings import COUNT, Kind


if TYPE_CHECKING:
    from .checkpoint import Checkpoint


class CheckpointReader:
    """Reading of a drafter's header.

    A method subclasses it for its formats. Class attributes:

    - `noun` (`str`): What messages call the drafter.
    - `keys` (`str`): Keys of its configs that are read here or change nothing, as shell patterns with spaces between.
    - `renamed` (`Mapping[str, str]`): Beginnings of names of tensors in files, and what they are called here.
    - `unsupported` (`tuple[Unsupported, ...]`): Kinds that are refused.
    - `weight_files` (`tuple[str, ...]`): Names that its weights may have, the preferred first.
    - `target_files` (`str`, *optional*): Pattern of files that lie beside the weights of whole models and hold layers
      for this method.

    Args:
        header (`Header`): Of a checkpoint of one of the formats.

    Attributes:
        places (`Sequence[Mapping]`): Where the config may say something; the first that does counts.
        stored (`Mapping[str, str]`): The name in the file of each tensor by its name here.

    Raises:
        CheckpointFormatError: Two tensors have one name here.
    """

    noun: ClassVar[str] = "drafter"
    keys: ClassVar[str] = ""
    renamed: ClassVar[Mapping[str, str]] = {}
    unsupported: ClassVar[tuple[Unsupported, ...]] = ()
    weight_files: ClassVar[tuple[str, ...]] = WEIGHT_FILES
    target_files: ClassVar[str | None] = None

    def __init__(self, header: Header):
        self.header, self.name = header, header.name
        self.places = self.places_in(header.config)
        self.stored = self._stored_names()

    # Of formats

    @staticmethod
    def places_in(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        """Parts of a config that may state a setting, the first to be asked first."""
        return (config,)

    def rename(self, stored: str) -> str:
        """The name used here of a tensor in a file."""
        bare = unwrapped(stored)
        old = next(filter(bare.startswith, self.renamed), "")
        return self.renamed.get(old, "") + bare.removeprefix(old)

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
        return found if COUNT.is_valid(found) else None

    def refusal(self) -> str | None:
        """Reason why it cannot be used, whatever the target is, without a subject; `None` where it can.

        Raises:
            CheckpointFormatError: It is incomplete or contradicts itself.
        """
        known = (kind.what for kind in self.unsupported if kind.is_there(self.places, self.stored))
        return next(known, None) or refused_key(self.header.config, self.keys)

    def check_supported(self) -> None:
        """Raises a [`CheckpointFormatError`] where it is not supported."""
        if reason := self.refusal():
            raise CheckpointFormatError(f"'{self.name}' {reason}")

    def check_target(self, target: TargetSizes) -> None:
        """Raises a [`CheckpointFormatError`] where it was made for another target."""
        check_fits(f"'{self.name}'", self.needs, target, self.for_target)

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

    def setting(self, key: str, kind: Kind) -> Any:
        """A setting from the first place that states it, `None` where it is left out.

        Raises:
            CheckpointFormatError: It is of another kind.
        """
        value = stated(self.places, key)
        if value is not None and not kind.is_valid(value):
            raise self.wrong(
                f"has `{key}`={shown(value)} in its config.json, which must be {kind.what}",
                "Correct it or leave it out.",
            )
        return value

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
                f"'{self.name}': {self.stored[name]} must be a matrix, and has the shape {shape}. Pass an intact "
                "checkpoint."
            )
        return shape

    def require(self, names: Iterable[str], of: str) -> None:
        """Checks that tensors are there.

        Raises:
            CheckpointFormatError: Some are missing; `of` says whose they are.
        """
        missing = [name for name in names if name not in self.stored]
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

    def read(
        self, checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype | None, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """Weights of the checkpoint that the header is of, see [`Checkpoint.read_weights`]."""
        names = list(names)
        found = checkpoint.read_weights([self.stored[name] for name in names], dtype, device)
        return {name: found[self.stored[name]] for name in names}

    def wrong(self, what: str, todo: str) -> CheckpointFormatError:
        """The error that something is wrong with the checkpoint, and what to do about it."""
        return CheckpointFormatError(f"'{self.name}' {what}. {todo}")

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


def stated(places: Iterable[Mapping[str, Any]], key: str) -> Any:
    """Value of a key in the first place of a config that states it; `None` where none does."""
    return next((place[key] for place in places if place.get(key) is not None), None)
