"""Environment variables of the package; `HF_SPECDEC_` is in front of their names."""

from __future__ import annotations

import os

from .errors import SpecConfigError, shown


# As in transformers, in any case; all else is false.
_TRUE = ("1", "on", "yes", "true")

_KERNELS = ("auto", "torch", "triton")


def variable(name: str) -> str | None:
    """The text of a variable; `None` where it is not set, or empty."""
    return os.environ.get(f"HF_SPECDEC_{name}", "").strip() or None


def is_switched_on(name: str, *, default: bool) -> bool:
    """A variable that is true or false."""
    value = variable(name)
    return default if value is None else value.lower() in _TRUE


def kernel_choice() -> str:
    """What `HF_SPECDEC_KERNELS` says: "auto", "torch" or "triton"."""
    value = (variable("KERNELS") or "auto").lower()
    if value not in _KERNELS:
        raise SpecConfigError(
            f"HF_SPECDEC_KERNELS must be 'auto', 'torch' (no kernels) or 'triton', got {shown(value)}. Unset it, or "
            "set it to one of these."
        )
    return value
