"""Checkpoints of draft heads: a `config.json` and named tensors, read safely and only as far as they are asked for.

Files (one, or shards with an index) are mapped and read tensor by tensor. Pickled ones go through
`torch.load(weights_only=True)`, which runs no code from the file; only those of very old torch are read as a whole.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import CheckpointFormatError, SpecConfigError, SpecDecError
from ..target_facts import draft_device
from .files import RepoFiles
from .header import WEIGHT_FILES, Header


if TYPE_CHECKING:
    from ..settings import SpeculativeConfig


WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Checkpoint:
    """The tensors of a checkpoint by their names in its files.

    Of a repository only what is read is downloaded: the header of a file for the shapes, a file for its tensors.

    Args:
        config (`SpeculativeConfig`): `model` (folder or repo id), `revision`, `subfolder`, `cache_dir`, `token`,
            `local_files_only`.
        weight_files (`Sequence[str]`): Names that the weights may have, the preferred first.

    Attributes:
        files (`RepoFiles`): Its files.
        header (`Header`): Its settings, and every tensor's shape.

    Raises:
        CheckpointAccessError: It cannot be reached.
        CheckpointFormatError: A file is missing, damaged, or a pickle that holds more than tensors.
    """

    def __init__(self, config: SpeculativeConfig, weight_files: Sequence[str] = WEIGHT_FILES):
        self.name: str | None = config.model
        self.files: RepoFiles = RepoFiles.of(config)
        settings = self.files.config
        file = self.files.first_of(weight_files)
        if file is None:
            raise CheckpointFormatError(
                f"'{self.name}' has none of the weight files of this format: {', '.join(weight_files)}. Pass the "
                "folder or repo id of a complete checkpoint."
            )
        self._file_of: Mapping[str, str] = {}
        self._opened: dict[str, safe_open] = {}
        self._pickled: dict[str, torch.Tensor] = {}
        if ".safetensors" in file:
            shapes = table = self.files.tensors(file)
            self._file_of = table.file_of
        else:
            for part in self.files.parts(file):
                self._pickled |= self._unpickled(self.files.pickled_path(part))
            shapes = {name: tuple(tensor.shape) for name, tensor in self._pickled.items()}
        self.header: Header = Header(self.name, settings, shapes, file)

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

    def read(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """One of the tensors; if it is floating-point in `dtype` (`None`: as stored), on `device`."""
        tensor = self._pickled[name] if name in self._pickled else self._mapped(name)
        # A copy: the file is mapped into memory, and may be overwritten.
        return tensor.to(device, dtype if tensor.is_floating_point() else None, copy=True)

    def _mapped(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(self.files.path(file), framework="pt")
            return self._opened[file].get_tensor(name)
        except SpecDecError:
            raise
        except (SafetensorError, OSError) as error:
            raise self.files.damaged(file, f"is damaged: {error}", self.files.path(file)) from error

    def read_weight(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Reads as `read` does a tensor that is multiplied with.

        Raises:
            CheckpointFormatError: It is not of real floating-point numbers.
        """
        tensor = self.read(name, dtype, device)
        if tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointFormatError(
                f"'{self.name}': {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, and draft heads "
                "need float16, bfloat16, float32 or float64. Pass a checkpoint that is not quantised."
            )
        return tensor


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    name, tensor = item
    if not isinstance(name, str) or not torch.is_tensor(tensor):
        return False
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    # An expanded tensor of any size fits into a small file.
    return is_dense and not tensor.is_meta and tensor.untyped_storage().nbytes() >= tensor.nbytes


def tensor_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in the state dict of a module."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def save_checkpoint(
    folder: str | os.PathLike[str],
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
    config: SpeculativeConfig, target_model: torch.nn.Module, *, can_be_quantised: bool = False
) -> tuple[torch.dtype | None, torch.device]:
    """Dtype (`None`: as stored) and device of draft heads: the target's, unless the settings say otherwise.

    Args:
        can_be_quantised (`bool`): The heads have layers that can be packed on loading.

    Raises:
        SpecConfigError: Quantisation was asked for and cannot be had, or there is no such device.
    """
    if config.quantization is not None and not can_be_quantised:
        raise SpecConfigError(
            f"`quantization`='{config.quantization}' is for draft models and for heads with decoder layers; the heads "
            f"of method='{config.method}' are a few matrices and stay in a floating-point type. Leave it out, or use "
            "`dtype`."
        )
    device = draft_device(config, target_model, target_model.get_output_embeddings())
    if config.dtype is None:
        return target_model.dtype, device
    return None if config.dtype == "auto" else getattr(torch, config.dtype), device
