"""Functions in place of methods of other packages' classes, which can be taken back whatever was put around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Patch:
    """One method of a class, its own or inherited, with the function that `wrap` makes of the original and the patch.

    While `is_active` is `False`, the function only calls the original: where another package has put its own function
    around it, it cannot be taken out.
    """

    def __init__(self, owner: type, name: str, wrap: Callable[[Callable, Patch], Callable]):
        self.owner = owner
        self.name = name
        self.is_active: bool = True
        self._is_inherited = name not in vars(owner)
        self.original: Any = getattr(owner, name)
        self.function: Any = functools.wraps(self.original)(wrap(self.original, self))
        self.function.patch = self
        setattr(owner, name, self.function)

    def take_back(self) -> bool:
        """Puts the original back; returns `False` where something around the function keeps it in place."""
        self.is_active = False
        if getattr(self.owner, self.name) is not self.function:
            return False
        if self._is_inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)
        return True


def original_generate(model_class: type) -> Callable[..., Any]:
    """The `generate` of a model class without the speculative arguments."""
    generate = model_class.generate
    patch = getattr(generate, "patch", None)
    # Functions around ours have copies of its attributes.
    return patch.original if isinstance(patch, Patch) and patch.function is generate else generate
