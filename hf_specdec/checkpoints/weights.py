"""The tensors of a checkpoint, read safely and only as far as they are asked for: names, shapes, then values.

Files (one, or shards with an index) are mapped and read tensor by tensor. Pickled ones go through
`torch.load(weights_only=True)`, which runs no code from the file; only those of very old torch are read as a whole.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import SafetensorsParsingError
from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from ..errors import CheckpointAccessError, CheckpointFormatError
from .files import RepoFiles, check_is_inside, is_pickled


logger = logging.get_logger(__name__)

# Files in which a checkpoint keeps its tensors, the safe formats first.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# Of tensors that are multiplied with.
WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Bytes. The index of a model with a hundred thousand tensors has some ten million.
MAX_INDEX_BYTES = 64 * 2**20

# Largest pickled file that is downloaded to see its tensors: heads for targets of 70B have two billion bytes.
MAX_PICKLE_BYTES = 4 * 2**30


class TensorTable(Mapping[str, tuple[int, ...]]):
    """The tensors of a weight file or of the shards of an index: their shapes by name, and they themselves to read."""

    def __init__(self, files: RepoFiles, source: str):
        self.files = files
        self.source = source
        self._headers: dict[str, dict[str, tuple[int, ...]]] = {}
        self._opened: dict[str, Any] = {}
        self.file_of: dict[str, str]  # of each tensor
        if source.endswith(".json"):
            self.file_of = _weight_map(files, source)
        else:
            self.file_of = dict.fromkeys(self._header(source), source)

    def __getitem__(self, name: str) -> tuple[int, ...]:
        file = self.file_of[name]
        header = self._header(file)
        if name not in header:
            raise CheckpointFormatError(
                f"'{self.files.name}': {file} has no tensor {name}, which {self.source} says it has. Pass a complete "
                "checkpoint."
            )
        return header[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)

    def __contains__(self, name: object) -> bool:
        return name in self.file_of

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the files; `None` where they are not known."""
        sizes = [self.files.sizes.get(file) for file in set(self.file_of.values())]
        return None if None in sizes else sum(sizes)

    def _header(self, file: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of a file; of safetensors on the Hub only the header is downloaded."""
        if file not in self._headers:
            check_is_inside(self.files.name, file)
            if is_pickled(file):
                shapes = {name: tuple(tensor.shape) for name, tensor in self._open(file).items()}
            elif self.files.local(file) is None:
                shapes = _remote_header(self.files, file)
            else:
                tensors = self._open(file)
                with _damage_told(self.files, file):
                    shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
            self._headers[file] = shapes
        return self._headers[file]

    def _open(self, file: str) -> Any:
        """The tensors of a pickled file, mapped into memory, or a file of safetensors that reads them."""
        if file not in self._opened and is_pickled(file):
            self._opened[file] = _unpickled(self.files, file)
        elif file not in self._opened:
            path = self.files.path(file)
            with _damage_told(self.files, file):
                self._opened[file] = safe_open(path, framework="pt")
        return self._opened[file]

    def read(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """One of the tensors; if it is floating-point in `dtype` (`None`: as stored), on `device`."""
        file = self.file_of[name]
        tensors = self._open(file)
        with _damage_told(self.files, file):
            tensor = tensors[name] if is_pickled(file) else tensors.get_tensor(name)
        # A copy: the file is mapped into memory, and may be overwritten.
        return tensor.to(device, dtype if tensor.is_floating_point() else None, copy=True)


def shards_of(files: RepoFiles, source: str) -> list[str]:
    """A weight file itself, or the shards of an index."""
    return sorted(set(_weight_map(files, source).values())) if source.endswith(".json") else [source]


def _weight_map(files: RepoFiles, index: str) -> dict[str, str]:
    """File of each tensor by an index, all of them there."""
    kind = f".{index.split('.')[1]}"
    try:
        file_of = files.read_json(index, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(file_of, dict) or not all(str(file).endswith(kind) for file in file_of.values()):
            raise files.damaged(index, f"needs a `weight_map` from names of tensors to names of {kind} files")
    except CheckpointAccessError:
        raise
    except CheckpointFormatError as error:
        reason = str(error).removeprefix(f"'{files.name}': ")
        raise CheckpointFormatError(f"'{files.name}' has a damaged index: {reason}") from error
    shards = sorted(set(file_of.values()))
    for file in shards:
        check_is_inside(files.name, file)
    # Of a repository that is only in the cache, what is there may be all that was needed.
    is_whole = files.folder is not None or files.info is not None
    missing = [file for file in shards if file not in files] if is_whole else []
    if missing:
        raise CheckpointFormatError(
            f"'{files.name}' lacks {', '.join(missing)}, which {index} names. Pass a complete checkpoint."
        )
    return file_of


@contextmanager
def _damage_told(files: RepoFiles, name: str) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise files.damaged(name, f"is damaged: {error}", files.path(name)) from error


def _remote_header(files: RepoFiles, name: str) -> dict[str, tuple[int, ...]]:
    api = HfApi(endpoint=constants.ENDPOINT, token=files.token)
    file = files.prefix + name
    try:
        with files.explained(name):
            metadata = api.parse_safetensors_file_metadata(files.name, file, revision=files.asked_revision)
    except SafetensorsParsingError as error:
        raise files.damaged(name, f"is damaged: {error}") from error
    size = files.sizes.get(name)
    if size is not None and max((tensor.data_offsets[1] for tensor in metadata.tensors.values()), default=0) > size:
        raise files.damaged(name, f"is damaged: it has {size} bytes, and its tensors need more")
    return {key: tuple(tensor.shape) for key, tensor in metadata.tensors.items()}


def _unpickled(files: RepoFiles, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a file of `torch.save`, mapped into memory but for those of very old torch."""
    if files.local(name) is None and files.cached(name) is None:
        size = files.sizes.get(name) or 0
        if size > MAX_PICKLE_BYTES:
            raise CheckpointFormatError(
                f"'{files.name}': {name} is pickled, so that its tensors are known once all of it is here. It has "
                f"{size} bytes, and at most {MAX_PICKLE_BYTES} are downloaded for that. Download it yourself, or "
                "pass safetensors."
            )
        logger.warning(
            f"'{files.name}': {name} is pickled, so all of it ({size / 1e6:.0f} MB) is downloaded to see its tensors."
        )
    path = files.path(name)
    is_archive = zipfile.is_zipfile(path)
    try:
        with zipfile.ZipFile(path) if is_archive else nullcontext() as archive:
            parts = archive.infolist() if is_archive else []
        total, size = sum(part.file_size for part in parts), path.stat().st_size
        if total > size or any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            # It would take more memory than its size.
            raise files.damaged(
                name,
                f"holds {total} bytes of compressed or overlapping files in {size}, as torch.save never does, so it "
                "is not read",
                path,
            )
        # Names and shapes are read at once, the data when it is looked at.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except CheckpointFormatError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointFormatError(
            f"'{files.name}': {name} is a pickle that holds more than tensors (or is no pickle), and loading it "
            "could run code. Convert it to safetensors where you trust it, and pass that."
        ) from error
    except Exception as error:
        # In a damaged file the unpickler may trip over anything.
        raise files.damaged(name, f"is damaged, or no file of torch.save: {error!r}", path) from error
    if not isinstance(tensors, dict) or not all(map(_is_named_tensor, tensors.items())):
        raise CheckpointFormatError(
            f"'{files.name}': {name} is not a state dict, a dict of dense tensors with their data by name. Save "
            "the weights of the heads alone."
        )
    return tensors


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    name, tensor = item
    if not isinstance(name, str) or not torch.is_tensor(tensor):
        return False
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    # An expanded tensor of any size fits into a small file.
    return is_dense and not tensor.is_meta and tensor.untyped_storage().nbytes() >= tensor.nbytes
