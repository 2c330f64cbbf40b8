"""`--drafter`, `--set` and `-k`: what they say, as settings of a speculator."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from ..arguments import OFF, is_off
from ..errors import SpecConfigError
from ..method import COMBINING, is_method_name, methods, takes_model
from ..reading import parse_json
from ..settings import SpeculativeConfig, describe_settings
from . import options


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .target import Target


@dataclass(frozen=True)
class Drafting:
    """The drafter of a command, `auto` where it is left out."""

    drafter: options.Drafter = None
    num_speculative_tokens: options.Length = None
    settings: options.Settings = None

    def read(self, target: Target) -> dict[str, Any]:
        """What these options mean for a target, as settings of `load_speculator`."""
        text, packaged, offline = self.drafter or "auto", target.drafters, target.place.offline
        return read_drafter(text, self.num_speculative_tokens, self.settings, packaged, offline)


def read_drafter(
    text: str,
    length: str | None = None,
    pairs: list[str] | None = None,
    packaged: Mapping[str, Mapping[str, Any]] | None = None,
    offline: bool = False,
) -> dict[str, Any]:
    """A `--drafter`, `-k` and `--set` as settings of `load_speculator`; `packaged`: those of a model's own ones."""
    packaged = packaged or {}
    # A comma may stand in a value.
    is_json = text.startswith("{") or (text.endswith(".json") and os.path.exists(text))
    name, *own_pairs = [text] if is_json or os.path.exists(text) else re.split(r",(?=\s*\w+\s*=)", text)
    if is_json:
        settings = SpeculativeConfig.resolve(text).to_dict(secrets=True)
    elif name in packaged:
        settings = dict(packaged[name])
    elif not is_method_name(name) and (os.path.exists(name) or ("/" in name and ":" not in name)):
        settings = {"model": name}
    else:
        method, _, model = name.partition(":")
        # Of a combination the last method has the model.
        own = packaged.get(method.rpartition(COMBINING)[2], {})
        settings = {**own, "method": method, **({"model": model} if model else {})}
    for pair in (*(pairs or ()), *own_pairs):
        key, equals, value = map(str.strip, pair.partition("="))
        if not equals or not key:
            raise SpecConfigError(f"'{pair}' is no key=value, such as num_speculative_tokens=4.")
        settings[key] = value if key in _texts() else _value(value)
    if length is not None:
        # What is no number is judged with the other settings.
        settings["num_speculative_tokens"] = int(length) if length.removeprefix("-").isdecimal() else length
    method = settings.get("method")
    if offline and (method is None or not is_method_name(method) or takes_model(method)):
        settings.setdefault("local_files_only", True)
    return settings


def load_drafter(model: PreTrainedModel, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `generate()` that settings mean: their speculator, or "off" for transformers' own."""
    from ..loader import load_speculator

    if is_off(settings.get("method")):
        if extra := settings.keys() - {"method", "local_files_only"}:
            raise SpecConfigError(f"The drafter 'off' generates without drafts. Leave out {' and '.join(extra)}.")
        return {"spec_method": OFF}
    return {"assistant": load_speculator(model, dict(settings))}


@cache
def _texts() -> frozenset[str]:
    """Settings whose value is a text, whatever it looks like: a revision may be a number."""
    every = [setting for method in (None, *methods()) for setting in describe_settings(method)]
    return frozenset(setting.key for setting in every if setting.type.startswith("str"))


def _value(text: str) -> Any:
    """Reads numbers, true, false, null and lists as in JSON, everything else as text."""
    try:
        return parse_json(text)
    except ValueError:
        return text
