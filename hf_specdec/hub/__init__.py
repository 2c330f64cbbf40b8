"""Checkpoints: where they are, what they are and how they are loaded, found and published."""

from __future__ import annotations

from importlib import import_module
from typing import Any


__all__ = [
    "Candidate",
    "Detection",
    "Inspection",
    "RepoFiles",
    "add_to_target_card",
    "detect_checkpoint",
    "discover_drafters",
    "export_custom_generate",
    "inspect_checkpoint",
    "make_card",
    "read_card",
    "read_target_card",
]

# Imported on first use: models and settings below this package need parts of it.
_HOMES = {
    "add_to_target_card": "card",
    "make_card": "card",
    "read_card": "card",
    "read_target_card": "card",
    "export_custom_generate": "custom_generate",
    "Candidate": "candidate",
    "discover_drafters": "discover",
    "Detection": "detect",
    "detect_checkpoint": "detect",
    "RepoFiles": "files",
    "Inspection": "inspect",
    "inspect_checkpoint": "inspect",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
