"""Files of `torch.save`, looked into without unpickling: the names and shapes of their tensors, and their true size.

A pickle is a program. Here its instructions are read as text: what they would import and call is only noted, and of
the notes those are understood that describe tensors. Nothing is imported, called or allocated.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, NamedTuple


# Bytes of instructions. Ten thousand tensors need some three million.
MAX_PICKLE_BYTES = 8 * 2**20

_MOST_ELEMENTS = 2**62

# Name of the dtype by the class of the storage.
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


class Unreadable(ValueError):
    """Raised for what is no archive of `torch.save`, or one with more than tensors in it."""


class Inflated(Unreadable):
    """An archive that would take more memory than its size, which torch never writes."""


class PickledTensor(NamedTuple):
    """A tensor by its archive: name of its dtype, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class _Global:
    """A name that unpickling would import."""

    module: str
    name: str


_REBUILDS = (_Global("torch._utils", "_rebuild_tensor_v2"), _Global("torch._utils", "_rebuild_tensor_v3"))


@dataclass(frozen=True)
class _Call:
    """A call that unpickling would make, with its arguments."""

    function: Any
    arguments: Any


@dataclass(frozen=True)
class _Storage:
    """Data in a file of the archive."""

    kind: _Global
    key: str


def is_archive(file: BinaryIO) -> bool:
    """Tells archives of torch 1.6 or later; before, tensors and names were interleaved."""
    file.seek(0)
    return file.read(4) == b"PK\3\4"


def check_archive(file: BinaryIO) -> None:
    """Refuses an archive that would take more memory than its own size: torch itself compresses nothing.

    Raises:
        Inflated: It has compressed files, or files that share their data.
        Unreadable: It is no archive.
    """
    size = file.seek(0, 2)
    try:
        with zipfile.ZipFile(file) as archive:
            files = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise Unreadable(f"is damaged: {error}") from error
    total = sum(part.file_size for part in files)
    if total > size or any(part.compress_type != zipfile.ZIP_STORED for part in files):
        raise Inflated(f"holds {total} bytes of compressed or overlapping files in {size}, as torch.save never does")


def tensors_in(file: BinaryIO) -> dict[str, PickledTensor]:
    """The tensors of a state dict by name.

    Args:
        file: An archive of `torch.save`, of which the directory and the instructions are read.

    Raises:
        Inflated: It would take more memory than its size.
        Unreadable: It is no such archive, damaged, or holds more than a dict of dense tensors.
    """
    check_archive(file)
    try:
        with zipfile.ZipFile(file) as archive:
            sizes = {part.filename: part.file_size for part in archive.infolist()}
            name = next(name for name in sizes if name.endswith("data.pkl"))
            if sizes[name] > MAX_PICKLE_BYTES:
                raise Unreadable(f"has {sizes[name]} bytes of instructions, and state dicts need far fewer")
            found = _Reader().read(archive.read(name))
        if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
            raise Unreadable("is not a state dict")
        folder = name.removesuffix("data.pkl")
        return {key: _tensor(value, sizes, folder) for key, value in found.items()}
    except (Unreadable, OSError):
        raise
    except Exception as error:
        # Instructions of a stranger may trip anything.
        raise Unreadable(f"is damaged: {error!r}") from error


def _tensor(value: Any, sizes: dict[str, int], folder: str) -> PickledTensor:
    """Header of the tensor that a call would make."""
    if isinstance(value, _Call) and value.function == _Global("torch._utils", "_rebuild_parameter"):
        value = value.arguments[0]
    if not isinstance(value, _Call) or not isinstance(value.function, _Global) or value.function not in _REBUILDS:
        raise Unreadable("holds more than dense tensors")
    storage, offset, shape, strides = value.arguments[:4]
    if not isinstance(storage, _Storage):
        raise Unreadable("holds more than dense tensors")
    if not all(isinstance(count, int) and 0 <= count < _MOST_ELEMENTS for count in (offset, *shape, *strides)):
        raise Unreadable("holds a tensor of no possible shape")
    # Newer dtypes have no storages of their own.
    dtype = _STORAGES.get(storage.kind.name) or value.arguments[6].name
    num_bytes = prod(shape) * _item_bytes(dtype)
    if num_bytes > sizes[f"{folder}data/{storage.key}"]:
        raise Inflated(f"holds a tensor of the shape {list(shape)} without data for it")
    return PickledTensor(dtype, tuple(shape), num_bytes)


def _item_bytes(dtype: str) -> int:
    """Bytes of an element by the name of its dtype, which has its bits: `float32`, `float8_e4m3fn`."""
    return 1 if dtype == "bool" else int(re.findall(r"\d+", dtype)[0]) // 8


def _text(value: Any) -> str:
    """A key or a name. Nothing else is hashed or printed: of nested tuples that takes time without end."""
    if not isinstance(value, str):
        raise Unreadable("has keys that are no texts")
    return value


class _Reader:
    """Follows the instructions of a pickle on a stack of notes."""

    def __init__(self):
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def read(self, content: bytes) -> Any:
        for code, argument, _ in pickletools.genops(content):
            if code.name == "STOP":
                return self.stack.pop()
            self._follow(code.name, argument)
        raise Unreadable("ends too early")

    def _follow(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8" | "UNICODE" | "BINFLOAT" | "FLOAT":
                stack.append(argument)
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "INT" | "LONG":
                stack.append(argument)
            case "GLOBAL":
                stack.append(_Global(*argument.split(" ")))
            case "STACK_GLOBAL":
                stack.append(_Global(*map(_text, self._popped(2))))
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(self._popped(int(name[-1])))
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(self.memo[argument])
            case "BINPERSID":
                kind, storage, key, *_ = stack.pop()
                if kind != "storage" or not isinstance(storage, _Global):
                    raise Unreadable("holds more than dense tensors")
                stack.append(_Storage(storage, _text(key)))
            case "REDUCE":
                stack.append(_called(*self._popped(2)))
            case "SETITEM":
                key, value = self._popped(2)
                stack[-1][_text(key)] = value
            case "SETITEMS":
                items = self._since_mark()
                stack[-1].update(zip(map(_text, items[::2]), items[1::2], strict=True))
            case "APPEND":
                stack[-2].append(stack.pop())
            case "APPENDS":
                items = self._since_mark()
                stack[-1].extend(items)
            case "BUILD":
                # The versions of modules, which a state dict has as an attribute.
                stack.pop()
            case _:
                raise Unreadable(f"has the instruction {name}, which no state dict needs")

    def _popped(self, count: int) -> tuple:
        popped = tuple(self.stack[-count:])
        del self.stack[-count:]
        return popped

    def _since_mark(self) -> list:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


def _called(function: Any, arguments: Any) -> Any:
    return {} if function == _Global("collections", "OrderedDict") and not arguments else _Call(function, arguments)
