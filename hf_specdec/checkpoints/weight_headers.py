"""Headers of weight files: names, dtypes and shapes of tensors, without their values."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointFormatError
from ..threads import cached_property


if TYPE_CHECKING:
    from .files import RepoFiles


@dataclass(frozen=True)
class StoredTensor:
    """A tensor by its header: dtype (named as in the file's format), shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class TensorTable(Mapping[str, tuple[int, ...]]):
    """Shapes of the tensors of a checkpoint by name. The headers of shards are read when a shape is asked for.

    Args:
        files (`RepoFiles`): The checkpoint.
        source (`str`): The weight file or the index.
        file_of (`Mapping[str, str]`): File of each tensor.
        headers (`Mapping`, *optional*): Those that have been read, by file.
    """

    def __init__(
        self,
        files: RepoFiles,
        source: str,
        file_of: Mapping[str, str],
        headers: Mapping[str, Mapping[str, StoredTensor] | None] | None = None,
    ):
        self.files = files
        self.source = source
        self.file_of = file_of
        self._headers = dict(headers or {})

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self.stored(name).shape

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)

    def __contains__(self, name: object) -> bool:
        return name in self.file_of

    def stored(self, name: str) -> StoredTensor:
        """Header entry of a tensor."""
        file = self.file_of[name]
        if file not in self._headers:
            self._headers[file] = self.files.header(file)
        header = self._headers[file]
        if header is None or name not in header:
            raise CheckpointFormatError(
                f"'{self.files.name}': {file} has no tensor {name}, which {self.source} says it has. Pass a complete "
                "checkpoint."
            )
        return header[name]

    @cached_property
    def num_bytes(self) -> int | None:
        """Bytes of all tensors, by the headers or the sizes of the files; `None` where they do not tell."""
        if set(self.file_of.values()) <= self._headers.keys():
            return sum(self.stored(name).num_bytes for name in self)
        sizes = [self.files.sizes.get(file) for file in set(self.file_of.values())]
        return None if None in sizes else sum(sizes)


_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def num_bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor by the name of its dtype, which ends with its bits: `F32`, `BF16`, `I64`, `F8_E4M3`."""
    bits = _BITS.get(dtype) or int(re.findall(r"^[A-Z]+(\d+)", dtype)[0])
    return math.prod(shape) * bits // 8


# Bytes that are fetched at a time of a pickled file on the Hub.
BLOCK_BYTES = 64 * 1024


class RemoteFile(io.RawIOBase):
    """A file that can only be had in parts, as a file for those who want one.

    Args:
        get (`Callable`): Bytes from a position on, so many.
        size (`int`): Of the file.
    """

    def __init__(self, get: Callable[[int, int], bytes], size: int):
        self._get, self._size, self._position = get, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._position)
        data = self._get(self._position, count) if count > 0 else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
