"""Functions in place of methods of other packages' classes, which can be taken back whatever was put around them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any


class Patch:
    """One method of a class with a function in its place.

    Args:
        owner (`type`): The class.
        name (`str`): The method, its own or inherited.
        wrap (`Callable`): Makes the function from the original one and this patch.

    Attributes:
        is_active (`bool`): `False` once the function only calls the original: where another package has put its own
            function around it, it cannot be taken out.
    """

    def __init__(self, owner: type, name: str, wrap: Callable):
        self.owner = owner
        self.name = name
        self.is_active = True
        self._is_own = name in vars(owner)
        self.original: Any = getattr(owner, name)
        while (patch := _patch_of(self.original)) is not None and not patch.is_active:
            # One of ours that was buried, and has come to the surface.
            self.original = patch.original
        self.function: Any = functools.wraps(self.original)(wrap(self.original, self))
        self.function.patch = self
        setattr(owner, name, self.function)

    @property
    def is_reached(self) -> bool:
        """`True` if the class still calls it, as far as can be seen: directly, or by functions of other packages."""
        below = set(map(id, _chain(self.original)))
        for found in _chain(getattr(self.owner, self.name)):
            if found is self.function:
                return True
            if id(found) in below or _patch_of(found) is not None:
                return False
        # Something that does not say what it calls has probably been put around ours.
        return True

    def take_back(self) -> None:
        """Puts the original back, or if something is around the function, lets it only call the original."""
        self.is_active: bool = False
        # From here on it looks like the original, too.
        self.function.__doc__ = self.original.__doc__
        vars(self.function).pop("__signature__", None)
        if getattr(self.owner, self.name) is not self.function:
            return
        if self._is_own:
            setattr(self.owner, self.name, self.original)
        else:
            delattr(self.owner, self.name)


def _patch_of(function: Callable) -> Patch | None:
    """The patch that made a function. Functions around it have copies of its attributes."""
    patch = getattr(function, "patch", None)
    return patch if isinstance(patch, Patch) and patch.function is function else None


def _chain(function: Callable) -> Iterator[Callable]:
    """The function, the one that it says to be around, and so on."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def original_generate(model_class: type) -> Callable[..., Any]:
    """The `generate` of a model class without the speculative arguments."""
    generate = model_class.generate
    patch = _patch_of(generate)
    return generate if patch is None else patch.original
