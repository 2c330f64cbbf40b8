"""The settings of speculative decoding: names, values, and the one validated object that holds them."""

from .config import CONFIG_NAME, Setting, SpeculativeConfig, describe_settings
from .names import AUTO, FIXED, PendingOptions, option_fields


__all__ = [
    "AUTO",
    "CONFIG_NAME",
    "FIXED",
    "PendingOptions",
    "Setting",
    "SpeculativeConfig",
    "describe_settings",
    "option_fields",
]
