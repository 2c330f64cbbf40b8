"""Checkpoints of draft heads: a `config.json` and named tensors, read safely and only as far as they are asked for.

Files (one, or shards with an index) are mapped and read tensor by tensor. Pickled ones go through
`torch.load(weights_only=True)`, which runs no code from the file; only those of very old torch are read as a whole.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import CheckpointFormatError, SpecConfigError, SpecDecError, shown
from ..hub.files import WEIGHT_FILES, RepoFiles
from ..hub.formats import unwrapped
from ..target_facts import MAX_VOCABULARY_GAP, draft_device, hidden_size, vocabulary_size


if TYPE_CHECKING:
    from ..settings import SpeculativeConfig


_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Checkpoint:
    """The tensors of a checkpoint by name.

    Of a repository only what is read is downloaded: the header of a file for the shapes, a file for its tensors.

    Args:
        config (`SpeculativeConfig`): `model` (folder or repo id), `revision`, `subfolder`, `cache_dir`, `token`,
            `local_files_only`.
        weight_files (`Sequence[str]`): Names that the weights may have, the preferred first.
        unwrap (`bool`): Names of tensors are without the wrappers of some files (`model.`, `speculator.`, ...).

    Attributes:
        name (`str`): Folder or repo id.
        files (`RepoFiles`): Its files.
        config (`dict`): `config.json`.
        file (`str`): The file that was found.
        shapes (`Mapping[str, tuple[int, ...]]`): Every tensor's shape.

    Raises:
        CheckpointAccessError: It cannot be reached.
        CheckpointFormatError: A file is missing, damaged, or a pickle that holds more than tensors.
    """

    def __init__(self, config: SpeculativeConfig, weight_files: Sequence[str] = WEIGHT_FILES, *, unwrap: bool = False):
        self.name, self.files = config.model, RepoFiles.of(config)
        self.config = self.files.config
        file = self.files.first_of(weight_files)
        if file is None:
            raise CheckpointFormatError(
                f"'{self.name}' has none of the weight files of this format: {', '.join(weight_files)}. Pass the "
                "folder or repo id of a complete checkpoint."
            )
        self.file = file
        self._file_of: Mapping[str, str] = {}
        self._pickled: dict[str, torch.Tensor] = {}
        if ".safetensors" in file:
            table = self.files.tensors(file)
            self.shapes, self._file_of = table, table.file_of
        else:
            for part in self.files.parts(file):
                self._pickled |= self._unpickled(self.files.pickled_path(part))
            self.shapes = {name: tuple(tensor.shape) for name, tensor in self._pickled.items()}
        self._stored: Mapping[str, str] = {}
        if unwrap:
            # A name without a wrapper goes before the same name with one.
            names = sorted(self.shapes, key=lambda name: unwrapped(name) == name)
            self._stored = {unwrapped(name): name for name in names}
            self.shapes = _Renamed(self.shapes, self._stored)

    def _unpickled(self, file: Path) -> dict[str, torch.Tensor]:
        try:
            # Names and shapes are read at once, the data when it is looked at.
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        except pickle.UnpicklingError as error:
            raise CheckpointFormatError(
                f"'{self.name}': {file.name} is a pickle that holds more than tensors (or is no pickle), and loading "
                "it could run code. Convert it to safetensors where you trust it, and pass that."
            ) from error
        except Exception as error:
            # In a damaged file the unpickler may trip over anything.
            raise CheckpointFormatError(
                f"'{self.name}': {file.name} is damaged, or no file of torch.save: {error!r}. Pass an intact one."
            ) from error
        if not isinstance(found, dict) or not all(map(_is_named_tensor, found.items())):
            raise CheckpointFormatError(
                f"'{self.name}': {file.name} is not a state dict, a dict of dense tensors with their data by name. "
                "Save the weights of the heads alone."
            )
        return found

    def setting(self, key: str, is_valid: Callable[[Any], bool], what: str) -> Any:
        """A value of `config.json`, `None` where it is left out.

        Raises:
            CheckpointFormatError: It is not valid; `what` says what it must be.
        """
        value = self.config.get(key)
        if value is not None and not is_valid(value):
            raise CheckpointFormatError(
                f"'{self.name}': `{key}` in config.json must be {what}, got {shown(value)}. Correct it or "
                "leave it out."
            )
        return value

    def check_count(self, count: int, of: str) -> None:
        """Checks that there are that many tensors at all, before their names are spelled out.

        Raises:
            CheckpointFormatError: There are fewer; `of` says whose they are.
        """
        if count > len(self.shapes):
            raise CheckpointFormatError(
                f"'{self.name}' has {len(self.shapes)} tensors in {self.file}, and {of} need at least {count}. Pass a "
                "complete checkpoint, with nothing missing between the numbers in the names."
            )

    def matrix(self, name: str) -> tuple[int, int]:
        """Rows and columns of a tensor.

        Raises:
            CheckpointFormatError: It has another number of dimensions.
        """
        shape = self.shapes[name]
        if len(shape) != 2:
            raise CheckpointFormatError(
                f"'{self.name}': {name} must be a matrix, and has the shape {shape}. Pass an intact checkpoint."
            )
        return shape

    def require(self, names: Iterable[str], of: str) -> None:
        """Checks that tensors are there.

        Raises:
            CheckpointFormatError: Some are missing; `of` says whose they are.
        """
        missing = [name for name in names if name not in self.shapes]
        if missing:
            raise CheckpointFormatError(
                f"'{self.name}' lacks {len(missing)} tensors of {of}: {listed(missing)} (it has {len(self.shapes)} in "
                f"{self.file}). Pass a complete checkpoint."
            )

    def read(
        self, names: Iterable[str], dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Some of the tensors; floating-point ones in `dtype` (`None`: as stored), on `device`."""
        found = {}
        with ExitStack() as stack:
            opened: dict[str, Any] = {}
            for name in names:
                stored = self._stored.get(name, name)
                if stored in self._pickled:
                    tensor = self._pickled[stored]
                else:
                    file = self._file_of[stored]
                    if file not in opened:
                        opened[file] = stack.enter_context(self._opened(file))
                    tensor = self._tensor(opened[file], file, stored)
                # A copy: the file is mapped into memory, and may be overwritten.
                found[name] = tensor.to(device, dtype if tensor.is_floating_point() else None, copy=True)
        return found

    def _opened(self, file: str) -> safe_open:
        path = self.files.path(file)
        try:
            return safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise self.files.damaged(file, f"is damaged: {error}", path) from error

    def _tensor(self, opened: safe_open, file: str, name: str) -> torch.Tensor:
        try:
            return opened.get_tensor(name)
        except SafetensorError as error:
            raise self.files.damaged(file, f"is damaged: {error}", self.files.path(file)) from error

    def read_weights(
        self, names: Iterable[str], dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """As `read`, for tensors that are multiplied with.

        Raises:
            CheckpointFormatError: One is not of real floating-point numbers.
        """
        found = self.read(names, dtype, device)
        for name, tensor in found.items():
            if tensor.dtype not in _WEIGHT_DTYPES:
                raise CheckpointFormatError(
                    f"'{self.name}': {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, and draft heads "
                    "need float16, bfloat16, float32 or float64. Pass a checkpoint that is not quantised."
                )
        return found


class _Renamed(Mapping[str, tuple[int, ...]]):
    """Shapes of tensors under other names."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, str]):
        self._shapes, self._stored = shapes, stored

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._shapes[self._stored[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    name, tensor = item
    if not isinstance(name, str) or not torch.is_tensor(tensor):
        return False
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    # An expanded tensor of any size fits into a small file.
    return is_dense and not tensor.is_meta and tensor.untyped_storage().nbytes() >= tensor.nbytes


def listed(names: Iterable[str]) -> str:
    """The first names, for a message."""
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def tensor_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """What the state dict of a module holds."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def save_checkpoint(
    folder: str | os.PathLike,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    weight_file: str = WEIGHT_FILES[0],
) -> None:
    """Writes `config.json` and a safetensors file.

    Args:
        folder (`str` or `os.PathLike`): Made if needed.
        config (`Mapping`): The content of `config.json`.
        tensors (`Mapping[str, torch.Tensor]`): The tensors by the names in the file, contiguous.
        weight_file (`str`): The name of the file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(dict(tensors), folder / weight_file, metadata={"format": "pt"})


def head_placement(
    config: SpeculativeConfig, target_model: torch.nn.Module
) -> tuple[torch.dtype | None, torch.device]:
    """Dtype (`None`: as stored) and device of draft heads: the target's, unless the settings say otherwise.

    Raises:
        SpecConfigError: Quantisation was asked for, which only whole draft models have, or an unknown device.
    """
    if config.quantization is not None:
        raise SpecConfigError(
            f"`quantization`='{config.quantization}' is for draft models; the heads of method='{config.method}' are a "
            "few matrices and stay in a floating-point type. Leave it out, or use `dtype`."
        )
    device = draft_device(config, target_model, target_model.get_output_embeddings())
    if config.dtype is None:
        return target_model.dtype, device
    return None if config.dtype == "auto" else getattr(torch, config.dtype), device


def check_target(
    heads: str,
    width: int,
    vocab_size: int | None,
    target_model: torch.nn.Module,
    error: type[SpecDecError] = CheckpointFormatError,
) -> None:
    """Draft heads must read the target's states and speak its tokens.

    Args:
        heads (`str`): What the error calls them.
        width (`int`): Of the states that they read.
        vocab_size (`int`, *optional*): Of their vocabulary, which may be padded otherwise than the target's; `None`:
            they use the target's.
        target_model (`PreTrainedModel`): The target.
        error (`type`): Raised if they do not.
    """
    target_width, target_size = hidden_size(target_model), vocabulary_size(target_model)
    if width != target_width:
        raise error(
            f"{heads} read states of a target with hidden_size={width}, the target has {target_width}. Pass those "
            "that were trained for this target."
        )
    if vocab_size is not None and abs(vocab_size - target_size) > MAX_VOCABULARY_GAP * target_size:
        raise error(
            f"{heads} have a vocabulary of {vocab_size} tokens, the target has {target_size}: these are different "
            "tokenizers. Pass those that were trained for this target."
        )
