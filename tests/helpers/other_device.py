"""A GPU without a GPU, as far as waiting goes: a device of its own, whose tensors the host cannot see into.

Tensors on it are computed on the CPU and look as if they lay elsewhere (torch calls the place "meta", the one device
beside the CPU that every build knows). Whatever would make the host wait for a GPU is noted: numbers that are read,
results whose size depends on numbers, and uploads that are not told to go on by themselves. What a GPU would refuse,
operations on tensors in two places, is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdec.target.capture import FROM_LISTS, INDEXING, WAITING, parts_of_index, picks_by_mask


# With an index, so that nothing kept for real tensors without content is taken for it.
DEVICE = torch.device("meta", 0)

aten = torch.ops.aten

_COPIES = (aten._to_copy, aten.copy_)
_INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)


class Wait(NamedTuple):
    """Attributes: what waits, and the function of this package that asked for it."""

    what: str
    where: str


class Elsewhere(torch.Tensor):
    """A tensor on the other device.

    Args:
        inner (`torch.Tensor`): Its numbers, on the CPU.
    """

    # Unlike that of real tensors there, its content is known.
    is_meta = False

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=DEVICE
        )

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise RuntimeError(f"{operation} outside of `other_device`")

    def __repr__(self):
        return f"Elsewhere({self.inner})"


class _Operations(TorchDispatchMode):
    def __init__(self, waits: list[Wait]):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [value for value in leaves_of((args, kwargs)) if isinstance(value, torch.Tensor)]
        far = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
        is_far = bool(far) or _is_other(kwargs.get("device"))
        packet = operation.overloadpacket
        if is_far and (packet in WAITING or picks_by_mask(operation, args)):
            self.waits.append(Wait(str(packet), _caller()))
        if packet in _COPIES:
            is_far = self._copy(packet, args, kwargs)
        elif far:
            self._check_places(packet, tensors)
        operation, kwargs = on_cpu(operation, kwargs)
        output = operation(*numbers(args), **numbers(kwargs))
        return _changed(output, _elsewhere) if is_far else output

    def _copy(self, packet, args, kwargs) -> bool:
        """Notes a copy between the places if it waits; whether its result is on the other device."""
        if packet is aten.copy_:
            target, source = args[:2]
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            goes, comes = isinstance(target, Elsewhere), isinstance(source, Elsewhere)
        else:
            comes, non_blocking = isinstance(args[0], Elsewhere), kwargs.get("non_blocking", False)
            device = kwargs.get("device")
            goes = comes if device is None else _is_other(device)
        # A read that does not wait is a read of numbers that have not arrived.
        if comes and not goes:
            self.waits.append(Wait("read", _caller()))
        elif goes and not comes and not non_blocking:
            self.waits.append(Wait("blocking upload", _caller()))
        return goes

    def _check_places(self, packet, tensors) -> None:
        near = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere) and tensor.dim()]
        if near and packet in _INDEXING:
            self.waits.append(Wait("blocking upload", _caller()))
        elif near:
            raise RuntimeError(f"{packet} of tensors on the CPU and on the other device")


class _Functions(TorchFunctionMode):
    """Calls that never become an operation: tensors and indices from lists, and reading."""

    def __init__(self, waits: list[Wait]):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in FROM_LISTS and _is_other(kwargs.get("device")):
            del kwargs["device"]
            return self._uploaded(function(*args, **kwargs))
        if args and isinstance(args[0], Elsewhere):
            if function is torch.Tensor.new_tensor:
                return self._uploaded(torch.tensor(*args[1:], dtype=args[0].dtype, **kwargs))
            if function is torch.Tensor.tolist:
                self.waits.append(Wait("read", _caller()))
                return args[0].inner.tolist()
            if function in INDEXING:
                return function(args[0], self._index(args[1]), *args[2:])
        return function(*args, **kwargs)

    def _uploaded(self, values: torch.Tensor) -> torch.Tensor:
        self.waits.append(Wait("blocking upload", _caller()))
        return Elsewhere(values)

    def _index(self, index):
        parts = parts_of_index(index)
        return tuple(self._uploaded(torch.tensor(part)) if isinstance(part, list) else part for part in parts)


def _is_other(device) -> bool:
    return device is not None and torch.device(device) == DEVICE


def leaves_of(values: Any) -> list[Any]:
    """What an operation is given, or returns, in a list. Torch's own functions, for any tree, are slow."""
    if isinstance(values, dict):
        values = list(values.values())
    elif not isinstance(values, (tuple, list)):
        return [values]
    leaves = []
    for value in values:
        if isinstance(value, (tuple, list, dict)):
            leaves += leaves_of(value)
        else:
            leaves.append(value)
    return leaves


def numbers(values: Any) -> Any:
    """The same with the numbers of tensors in the place of those on the other device."""
    return _changed(values, lambda value: value.inner if isinstance(value, Elsewhere) else value)


def _changed(values: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(values, (tuple, list)):
        return type(values)([_changed(value, change) for value in values])
    if isinstance(values, dict):
        return {name: _changed(value, change) for name, value in values.items()}
    return change(values)


def on_cpu(operation: Callable, kwargs: dict[str, Any]) -> tuple[Callable, dict[str, Any]]:
    """An operation of the other device and its keyword arguments, as they run over numbers."""
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "cpu"}
    return _histc if operation.overloadpacket is aten.histc else operation, kwargs


def _histc(values: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """Of integers too, as on a GPU."""
    floats = values if values.is_floating_point() else values.double()
    return aten.histc(floats, *args, **kwargs).to(values.dtype)


def _elsewhere(value: Any) -> Any:
    return Elsewhere(value) if torch.is_tensor(value) and not isinstance(value, Elsewhere) else value


def _caller() -> str:
    """The innermost function of the package, or of a test, that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("hf_specdec.") or (name.startswith("tests.") and name != __name__):
            return f"{name.removeprefix('hf_specdec.')}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def other_device() -> Iterator[list[Wait]]:
    """Lets tensors lie on `DEVICE` inside of the block; yields the list to which every wait is added."""
    waits: list[Wait] = []
    with _Functions(waits), _Operations(waits), torch.no_grad():
        yield waits


def move(value: torch.Tensor | torch.nn.Module) -> torch.Tensor | torch.nn.Module:
    """A tensor, or a module with all of its parameters and buffers, on the other device. The module is changed."""
    if torch.is_tensor(value):
        return _elsewhere(value)
    for module in value.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(_elsewhere(parameter.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _elsewhere(buffer)
    return value
