"""Reader of a checkpoint's header: one place that knows what its settings and tensors mean.

Detection, inspection and loading ask the same reader, so that they say the same of every checkpoint. Whatever is wrong
with one raises a [`CheckpointFormatError`].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers.utils import logging

from ..errors import CheckpointFormatError, shown
from ..threads import cached_property
from .config_keys import refused_keys, unknown_keys
from .format import Unsupported
from .header import Header, TargetNeeds, TargetSizes, listed, misfits, unwrapped
from .quantised import is_about_quantisation, packed_weight, scale_of, scaled
from .schema import (
    COUNT,
    MAPPING,
    Key,
    Kind,
    Tensor,
    count_up_to,
    dimensions,
    keys,
    numbered,
    pattern_of,
    renamed,
    spellings,
)
from .weights import WEIGHT_DTYPES, WEIGHT_FILES, TensorTable


logger = logging.get_logger(__name__)

# Tokens of a draft that a config may say: with some networks each costs logits over the whole vocabulary.
_DRAFT_TOKENS = count_up_to(256)


class CheckpointReader:
    """Reading of a drafter's header by the tables of its format. A method subclasses it for its formats."""

    noun: ClassVar[str] = "drafter"  # what messages call it
    # Parts of a config that may state a setting, the first to be asked first; the empty name is the config itself.
    blocks: ClassVar[tuple[str, ...]] = ("",)
    keys: tuple[Key, ...] = (*keys("hidden_size vocab_size", COUNT), Key("quantization_config", MAPPING))
    notes: ClassVar[str] = ""  # keys of its configs that change nothing, as shell patterns with spaces between
    table: tuple[Tensor, ...] = ()  # a property where it depends on what the checkpoint says
    # Beginnings of names of tensors in files, and what they are here; `{layer}` in both is a number.
    renamed: ClassVar[Mapping[str, str]] = {}
    unused: ClassVar[re.Pattern[str]] = re.compile(r".*")  # tensors that files may hold and drafting has no use for
    unsupported: ClassVar[tuple[Unsupported, ...]] = ()  # kinds that are refused
    instead: ClassVar[str] = "Pass another drafter."  # of these
    sizes_by: ClassVar[str] = "its other tensors ask"  # for the shapes of its tensors
    fitting: ClassVar[str] = "Pass an intact checkpoint."  # where they differ
    reads_layers: ClassVar[bool] = False  # it matters how many layers a target has
    weight_files: ClassVar[tuple[str, ...]] = WEIGHT_FILES  # the preferred first
    # Pattern of files that lie beside the weights of whole models and hold layers for this method.
    target_files: ClassVar[str | None] = None

    def __init__(self, header: Header, options: Any = None, target_model: nn.Module | None = None):
        self.header = header
        self.options: Any = options  # the method's own settings, of a checkpoint that is loaded
        self.target_model: nn.Module | None = target_model
        self.name: str = header.name
        blocks = (header.config.get(key) if key else header.config for key in self.blocks)
        # Where the config may say something; the first that does counts.
        self.places: tuple[Mapping[str, Any], ...] = tuple(block for block in blocks if isinstance(block, Mapping))
        self.stored: dict[str, str] = self._stored_names()  # names in the file by those here
        self.tables: dict[str, torch.Tensor] = {}  # of the network, that are not stored as they are

    # What detection and inspection ask

    @property
    def needs(self) -> TargetNeeds:
        """The target that it was made for, without its name."""
        return TargetNeeds()

    @property
    def num_draft_tokens(self) -> int | None:
        """Tokens of a draft that it was made for; `None`: any number, or it does not say."""
        proposals = _inner(self.header.config, "speculators_config").get("proposal_methods")
        first = proposals[0] if isinstance(proposals, list) and proposals else None
        count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
        return count if _DRAFT_TOKENS.is_valid(count) else None

    def check(self) -> None:
        """Checks what can be known without a target."""
        if (packed := packed_weight(self.stored)) is not None:
            raise self.wrong(
                f"holds quantised weights in a form ({packed}) which is not supported",
                "Pass one in a floating-point type, or in 8 bits with `weight_scale` or `weight_scale_inv`.",
            )
        for kind in self.unsupported:
            if kind.is_there(self.places, self.stored):
                raise self.wrong(f"{kind.what}, which is not supported", kind.instead or self.instead)
        for name, value in refused_keys(self.header.config, self._known_keys):
            what = "which changes what its layers compute, and is not supported"
            raise self.wrong_setting(name, value, what, "Pass a drafter without it.")
        _ = self.sizes

    def check_target(self, target: TargetSizes) -> None:
        """Checks what can be known by the sizes of a target, and warns of settings that nobody here knows."""
        for reason in misfits(self.needs, target):
            raise self.wrong(reason, self.for_target)
        if unknown := unknown_keys(self.header.config, self._known_keys):
            names = listed(f"`{name[:100]}`" for name in unknown)
            logger.warning_once(
                f"'{self.name}' has {names} in its config.json, which is not known here. If it changes what "
                "is computed, fewer drafts are accepted; the text stays right."
            )

    @property
    def _known_keys(self) -> frozenset[str]:
        return frozenset(" ".join([self.notes, *(key.names for key in self.keys)]).split())

    def record(self, target: TargetSizes) -> Any:
        """What a network for a target is made of, of which all is checked; tables of tokens go to `tables`."""
        raise NotImplementedError(f"{type(self).__name__} must implement record().")

    @property
    def for_target(self) -> str:
        """Advice about a drafter of another target."""
        named = target_name(self.header.config)
        other = f", not for '{named}'" if named else ""
        return f"Pass the {self.noun} trained for this target{other}."

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

    def setting(self, name: str, kind: Kind | None = None) -> Any:
        """A setting of the table; also one that is not there, if its kind is given."""
        key = Key(name, kind) if kind else self._keys[name]
        for spelling in key.names.split():
            value = self.stated(spelling)
            if value is not None and not key.kind.is_valid(value):
                raise self.wrong_setting(
                    spelling, value, f"which must be {key.kind.what}", "Correct it or leave it out."
                )
            # An empty list says nothing.
            if value not in (None, []):
                return value
        return key.default

    def value(self, name: str) -> Any:
        """A setting of the table that must be there, or the size of the tensors that it tells."""
        size = self._keys[name].size
        setting = self.sizes[size] if size in self.sizes else self.setting(name)
        if setting is None:
            raise self.wrong(f"does not say `{name}` in its config.json", "Add it there.")
        return setting

    @cached_property
    def _keys(self) -> dict[str, Key]:
        return {key.names.partition(" ")[0]: key for key in self.keys}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, empty where there is none of this name."""
        return self.header.tensors[self.stored[name]] if name in self.stored else ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """What the symbols of the table stand for, and how many numbers there are in the names of its tensors."""
        names = [(row, spelling) for row in self.table for spelling in spellings(row.name)]
        # The first row that fits each tensor, in the order of the rows and their numbers.
        described: dict[str, tuple[Tensor, re.Match[str]]] = {}
        for row, spelling in names:
            fitting = [match for match in map(pattern_of(spelling).fullmatch, self.stored) if match]
            for match in sorted(fitting, key=lambda match: [*map(int, match.groups())]):
                described.setdefault(match[0], (row, match))
        if names and not described:
            such = f" such as {listed(self.stored.values())}" if self.stored else ""
            raise self.wrong(
                f"holds no {self.noun}: {self.header.file} has {len(self.stored)} tensors{such}, none of them named "
                f"like '{re.sub('{.*?}', '0', names[0][1])}'",
                "Pass a checkpoint of this kind, or name the method that this one is for.",
            )
        sizes: dict[str, int] = {}
        for symbol in dict.fromkeys(symbol for _, spelling in names for symbol in pattern_of(spelling).groupindex):
            numbers = {int(match[symbol]) for _, match in described.values() if symbol in match.re.groupindex}
            if numbers and len(numbers) <= max(numbers):
                raise self.wrong(
                    f"has the {symbol}s {shown(sorted(numbers))}, not all from 0 on", "Pass a complete checkpoint."
                )
            sizes[symbol] = len(numbers)
        self._require_rows(names, sizes)
        sizes |= self.stated_sizes
        for name, (row, _) in described.items():
            if row.shape:
                self._measure(row, name, sizes)
        for name, key in self._keys.items():
            if key.size in sizes and self.setting(name) not in (None, sizes[key.size]):
                raise self.wrong_setting(name, self.setting(name), f"and its tensors have {sizes[key.size]}")
        return sizes

    @property
    def stated_sizes(self) -> dict[str, int]:
        """Sizes that the config decides, not the tensors."""
        return {}

    def _require_rows(self, rows: Sequence[tuple[Tensor, str]], counts: Mapping[str, int]) -> None:
        """Checks that what the table needs is there. Of what there is nothing of, the first is missed."""
        described: set[str] = set()
        missing: dict[str, list[str]] = {}
        for row, spelling in rows:
            symbols = pattern_of(spelling).groupindex
            count, whose = math.prod(max(counts[symbol], 1) for symbol in symbols), row.needed
            if count > max(len(self.stored), 1):
                # Their names are not spelled out.
                if whose:
                    raise self.wrong(
                        f"has {len(self.stored)} tensors in {self.header.file}, and needs at least {count}",
                        "Pass a complete checkpoint.",
                    )
                continue
            names = set(numbered(spelling, {symbol: max(counts[symbol], 1) for symbol in symbols})) - described
            described |= names
            if whose:
                missing.setdefault(whose if isinstance(whose, str) else f"the {self.noun}", []).extend(sorted(names))
        for whose, names in missing.items():
            self.require(names, whose)

    def _measure(self, row: Tensor, name: str, sizes: dict[str, int]) -> None:
        """Takes the sizes of a tensor that are not known yet, and checks the others."""
        shape, symbols = self.shape(name), dimensions(row.shape)
        if len(shape) != len(symbols):
            what = "a matrix" if len(symbols) == 2 else f"of {len(symbols)} dimension{'s' if len(symbols) > 1 else ''}"
            raise self.wrong(f"has {self.stored[name]} of the shape {list(shape)}, which must be {what}", self.fitting)
        for size, (factor, symbol) in zip(shape, symbols):
            if symbol != "*":
                sizes.setdefault(symbol, size // factor)
        asked = tuple(size if one[1] == "*" else one[0] * sizes[one[1]] for size, one in zip(shape, symbols))
        if shape != asked:
            raise self.wrong_shape(name, asked)

    def require(self, names: Iterable[str], of: str) -> None:
        """Checks that tensors are there; `of` says whose they are."""
        missing = [self.name_in_file(name) for name in names if name not in self.stored]
        if missing:
            has = f"it has {len(self.stored)} in {self.header.file}"
            lacks = f"lacks {len(missing)} tensors of {of}: {listed(missing)} ({has})"
            raise self.wrong(lacks, "Pass a complete checkpoint.")

    # Tensors

    def rename(self, stored: str) -> str:
        """The name used here of a tensor in a file."""
        bare = unwrapped(stored)
        return renamed(bare, self.renamed) or bare

    def name_in_file(self, name: str) -> str:
        """The name that a missing tensor would have in the file, by the spellings that it has for others."""
        bare = [unwrapped(stored) for stored in self.stored.values()]
        used = {new: old for old, new in self.renamed.items() if any(map(pattern_of(old).match, bare))}
        return renamed(name, used) or name

    def tensors(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype | None,
        device: torch.device | str,
    ) -> dict[str, torch.Tensor]:
        """The tensors of a network whose state dict has these `shapes`, in a dtype (`None`: as stored)."""
        plan = {name: self.sources(name, shape) for name, shape in shapes.items() if name not in self.tables}
        used = dict.fromkeys(source for rows in plan.values() for row in rows for source in row)
        self.require(used, f"the {self.noun}")
        left_over = [name for name in self.stored if name not in used and not is_about_quantisation(name, used)]
        if unknown := [name for name in left_over if not self.unused.fullmatch(name)]:
            self.judge_unknown(unknown)
        for name, rows in plan.items():
            # Before any is read: tensors are not stacked into more numbers than the files hold.
            for row in rows[1:]:
                if sum(math.prod(self.shape(source)) for source in row) < math.prod(shapes[name][1:]):
                    raise self.wrong_shape(row[0], shapes[name][1:])

        def row_of(name: str, sources: Sequence[str], shape: tuple[int, ...]) -> torch.Tensor:
            parts = [self.weight(source, dtype, device) for source in sources]
            tensor = self.fitted(name, torch.cat(parts) if len(parts) > 1 else parts[0], shape)
            if tuple(tensor.shape) != shape:
                raise self.wrong_shape(sources[0], shape)
            return tensor

        read = {name: table.to(device) for name, table in self.tables.items() if name in shapes}
        for name, rows in plan.items():
            if rows == [[name]]:
                read[name] = row_of(name, rows[0], shapes[name])
                continue
            # One at a time: those of large targets are gigabytes.
            for index, row in enumerate(rows):
                tensor = row_of(name, row, shapes[name][1:])
                if not index:
                    read[name] = tensor.new_empty(shapes[name])
                read[name][index] = tensor
        return read

    def sources(self, name: str, shape: tuple[int, ...]) -> Sequence[Sequence[str]]:
        """Tensors that one of the network is stacked from, each of one or several with their rows side by side."""
        return [[name]]

    @property
    def _weights(self) -> TensorTable:
        assert isinstance(self.header.tensors, TensorTable), "a header without its files"
        return self.header.tensors

    def read(self, name: str) -> torch.Tensor:
        """One of the stored tensors as it is, on the CPU."""
        return self._weights.read(self.stored[name])

    def weight(self, name: str, dtype: torch.dtype | None, device: torch.device | str) -> torch.Tensor:
        """One of the stored tensors, as it is multiplied with; 8-bit weights are multiplied with their factors."""
        if (scales := scale_of(name, self.stored)) is not None:
            parts = (self._weights.read(self.stored[part], None, device) for part in (name, scales))
            return scaled(self, self.stored[name], *parts, dtype)
        tensor = self._weights.read(self.stored[name], dtype, device)
        if tensor.dtype not in WEIGHT_DTYPES:
            raise self.wrong(
                f"has {self.stored[name]}, which is stored as {str(tensor.dtype).removeprefix('torch.')}, and draft "
                "heads need float16, bfloat16, float32 or float64",
                "Pass a checkpoint that is not quantised.",
            )
        return tensor

    def fitted(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The part of a tensor that the network uses, where it has this `name` and this `shape`."""
        return tensor

    def judge_unknown(self, names: Sequence[str]) -> None:
        """Warns of tensors that the network does not have and that are not among the unused, or refuses them."""

    def wrong(self, what: str, todo: str) -> CheckpointFormatError:
        """The error that something is wrong with the checkpoint, and what to do about it."""
        return CheckpointFormatError(f"'{self.name}' {what}. {todo}")

    def wrong_setting(self, name: str, value: Any, what: str, todo: str = "Correct it.") -> CheckpointFormatError:
        return self.wrong(f"has `{name}`={shown(value)} in its config.json, {what}", todo)

    def wrong_shape(self, name: str, shape: tuple[int, ...]) -> CheckpointFormatError:
        """The error that a tensor has another shape than this one."""
        stored = list(self.shape(name) or ())
        return self.wrong(
            f"has {self.stored[name]} of the shape {stored}, where {self.sizes_by} for {list(shape)}", self.fitting
        )

    def _stored_names(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for stored in self.header.tensors:
            name = self.rename(stored)
            if name in names:
                raise self.wrong(
                    f"has {stored} and {names[name]}, which are two writings of one tensor",
                    "Pass a checkpoint with one of them.",
                )
            names[name] = stored
        return names


def target_name(config: Mapping[str, Any]) -> str | None:
    """Repo id or folder of a drafter's target, `None` where the config does not name it."""
    verifier = _inner(_inner(config, "speculators_config"), "verifier")
    names = (config.get("base_model_name_or_path"), verifier.get("name_or_path"))
    return next((name for name in names if isinstance(name, str) and name), None)


def _inner(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    block = config.get(key)
    return block if isinstance(block, Mapping) else {}
