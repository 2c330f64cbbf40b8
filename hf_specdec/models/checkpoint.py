"""Checkpoints of draft heads: a `config.json` and named tensors, read safely and only as far as they are asked for.

Files (one, or shards with an index) are mapped and read tensor by tensor. Pickled ones go through
`torch.load(weights_only=True)`, which runs no code from the file; only those of very old torch are read as a whole.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils.hub import cached_file

from ..errors import CheckpointFormatError, SpecConfigError, SpecDecError
from .draft_model import MAX_VOCABULARY_GAP, draft_device, vocabulary_size


if TYPE_CHECKING:
    from ..config import SpeculativeConfig


# Where a checkpoint keeps its tensors, the safe formats first.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Checkpoint:
    """The tensors of a checkpoint by name.

    Args:
        config (`SpeculativeConfig`): `model` (folder or repo id), `revision`, `subfolder`.
        weight_files (`Sequence[str]`): Names that the weights may have, the preferred first.

    Attributes:
        name (`str`): Folder or repo id.
        config (`dict`): `config.json`.
        file (`str`): The file that was found.
        shapes (`dict[str, tuple[int, ...]]`): Every tensor's shape.

    Raises:
        CheckpointFormatError: A file is missing, damaged, or a pickle that holds more than tensors.
    """

    def __init__(self, config: SpeculativeConfig, weight_files: Sequence[str] = WEIGHT_FILES):
        from ..hub.detect import read_config

        self.name = config.model
        self._location = {"revision": config.revision, "subfolder": config.subfolder or ""}
        self.config = read_config(config)
        path = next(filter(None, map(self._find, weight_files)), None)
        if path is None:
            raise CheckpointFormatError(
                f"'{self.name}' has none of the weight files of this format: {', '.join(weight_files)}. Pass the "
                "folder or repo id of a complete checkpoint."
            )
        self.file = path.name
        self._pickled: dict[str, torch.Tensor] = {}
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in self._files(path):
            self._list(file)

    def _find(self, file: str) -> Path | None:
        try:
            path = cached_file(self.name, file, _raise_exceptions_for_missing_entries=False, **self._location)
        except OSError as error:
            raise CheckpointFormatError(f"'{self.name}' cannot be read: {error}") from error
        return None if path is None else Path(path)

    def _files(self, path: Path) -> list[Path]:
        """The file itself, or the shards that an index names."""
        if path.suffix != ".json":
            return [path]
        try:
            names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
            if not all(isinstance(name, str) for name in names):
                raise TypeError(f"`weight_map` names files, got {names[:3]}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointFormatError(f"'{self.name}' has a damaged index {path.name}: {error!r}.") from error
        shards = {name: self._find(name) for name in names}
        missing = [name for name, found in shards.items() if found is None]
        if missing:
            raise CheckpointFormatError(
                f"'{self.name}' lacks {', '.join(missing)}, which {path.name} names. Pass a complete checkpoint."
            )
        return list(shards.values())

    def _list(self, file: Path) -> None:
        if file.suffix == ".safetensors":
            try:
                with safe_open(file, framework="pt") as tensors:
                    shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
            except (SafetensorError, OSError) as error:
                raise CheckpointFormatError(f"'{self.name}': {file.name} is damaged: {error}.") from error
        else:
            self._pickled |= self._unpickled(file)
            shapes = {name: tuple(tensor.shape) for name, tensor in self._pickled.items()}
        self.shapes |= shapes
        self._file_of |= dict.fromkeys(shapes, file)

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
                f"'{self.name}': `{key}` in config.json must be {what}, got {value!r}. Correct it or leave it out."
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
            more = ", ..." if len(missing) > 3 else ""
            raise CheckpointFormatError(
                f"'{self.name}' lacks {len(missing)} tensors of {of}: {', '.join(missing[:3])}{more} (it has "
                f"{len(self.shapes)} in {self.file}). Pass a complete checkpoint."
            )

    def read(
        self, names: Iterable[str], dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Some of the tensors; floating-point ones in `dtype` (`None`: as stored), on `device`."""
        found = {}
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name in names:
                file = self._file_of[name]
                if name in self._pickled:
                    tensor = self._pickled[name]
                else:
                    if file not in opened:
                        opened[file] = stack.enter_context(safe_open(file, framework="pt"))
                    tensor = opened[file].get_tensor(name)
                found[name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        return found

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


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    name, tensor = item
    if not isinstance(name, str) or not torch.is_tensor(tensor):
        return False
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    # An expanded tensor of any size fits into a small file.
    return is_dense and not tensor.is_meta and tensor.untyped_storage().nbytes() >= tensor.nbytes


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


def hidden_size(target_model: torch.nn.Module) -> int:
    """Width of the states that the target's head reads."""
    head = target_model.get_output_embeddings()
    # Packed weights have another shape.
    return getattr(head, "in_features", None) or head.weight.shape[-1]


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
