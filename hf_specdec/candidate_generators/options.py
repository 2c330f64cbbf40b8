"""Options of methods without any."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NoOptions:
    """Options of a method that has none."""
