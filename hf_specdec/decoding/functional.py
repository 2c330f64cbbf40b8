"""Fast paths for small draft networks. The general one is the model's own forward."""

from __future__ import annotations

from .cache import SlotCache
from .target import SlotModel


def slot_model(model, cache: SlotCache) -> SlotModel:
    """The fastest way to drive `model` over slots."""
    return SlotModel(model, cache)
