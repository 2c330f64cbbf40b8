"""Settings from whatever names them: a dict, JSON, the name of a method, a file, a folder or a repository.

[`SpeculativeConfig`] checks settings that are given by name; this module finds them, also in checkpoints and on the
Hub.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from .arguments import OFF, is_off
from .checkpoints.files import RepoFiles
from .errors import SpecConfigError, shown
from .hub.detect import detect_method
from .hub.inspect import method_for_target
from .hub.published import published_config, saved_settings, with_saved_settings
from .method import is_method_name, names_of_methods
from .reading import parse_json, read_text, reading_settings
from .settings import CONFIG_NAME, SpeculativeConfig
from .settings.names import AUTO, merged


def resolve(value: Any, overrides: Mapping[str, Any], target_config: PretrainedConfig | None) -> SpeculativeConfig:
    """The configuration that a user's `value` means, with a method; see [`SpeculativeConfig.resolve`]."""
    overrides = {key: item for key, item in overrides.items() if item is not None}
    with reading_settings(value, overrides):
        config = value
        if overrides or not isinstance(value, SpeculativeConfig):
            config = SpeculativeConfig(**merged(_read_settings(value), overrides))
        if config.method is None:
            config = with_saved_settings(config)
        if config.method is None:
            method = detect_method(config)
            config = config.replace(method=method_for_target(config, method, target_config))
        if target_config is not None:
            longest = getattr(target_config.get_text_config(), "max_position_embeddings", None)
            config.check_against_target(longest)
        return config


def as_text(value: Any, overrides: Mapping[str, Any]) -> str | None:
    """What [`resolve`] is given as JSON; `None` where it has objects, or a file that may say something else later."""
    if isinstance(value, str) and value.rstrip().endswith(".json"):
        return None
    with suppress(Exception):  # values of any kind, which are refused later
        return json.dumps([value, overrides], default=_name_of_config)
    return None


def _name_of_config(value: Any) -> Any:
    if isinstance(value, SpeculativeConfig):
        return value.compute_hash(), value.token
    raise TypeError("no plain value")


def read_pretrained(path_or_repo: str | os.PathLike[str], revision: str | None) -> SpeculativeConfig:
    """The configuration in a `speculation_config.json`; see [`SpeculativeConfig.from_pretrained`]."""
    with reading_settings(path_or_repo):
        path = Path(path_or_repo)
        if path.is_file():
            return SpeculativeConfig.from_dict(_read_json_file(path))
        settings = saved_settings(RepoFiles(path_or_repo, revision=revision))
        if settings is None:
            where = shown(path_or_repo)
            raise SpecConfigError(
                f"No {CONFIG_NAME} found in {where}. Pass what save_pretrained() wrote, or a method."
            )
        # Beside a checkpoint and on the Hub they are those of whoever made it.
        if not path.is_dir() or (path / "config.json").is_file():
            return published_config(settings, f"{CONFIG_NAME} of '{path_or_repo}'")
        return SpeculativeConfig.from_dict(settings)


def _read_settings(value: Any) -> dict[str, Any]:
    """The flat settings of anything that `SpeculativeConfig.resolve` takes."""
    if value is None:
        return {}
    if isinstance(value, SpeculativeConfig):
        return value.to_dict(secrets=True)
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, (str, os.PathLike)):
        raise SpecConfigError(
            "Speculation is set by a SpeculativeConfig, a dict, JSON text, the name of a method, a repo id or a path, "
            f"got {type(value).__name__}. A loaded draft model or speculator goes to `assistant=`."
        )
    text = value.strip() if isinstance(value, str) else os.fspath(value)
    if isinstance(value, str):
        if text.startswith("{"):
            return _read_json(text, "The JSON text")
        if not text:
            raise SpecConfigError("Speculation needs a method or a model, got an empty string.")
        if is_off(text):
            raise SpecConfigError(
                f"'{text}' is plain generation, and names no drafter. Pass spec_method='off' to generate(), or name "
                "a method."
            )
        if text == AUTO or is_method_name(text):
            return {"method": text}
        if "/" not in text and not os.path.exists(text):
            names = [*names_of_methods(), AUTO, OFF]
            if close := difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.8):
                raise SpecConfigError(
                    f"{shown(text)} is neither a method nor a local path. Did you mean '{close[0]}'? If it is a repo "
                    "id, pass it as `model`."
                )
    # A folder or repository is the model; what was saved in it is read with its method.
    return merged(_read_json_file(text), {}) if text.endswith(".json") else {"model": text}


def _read_json_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    name = shown(str(path))
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise SpecConfigError(
            f"The settings in {name} cannot be read: {error}. Name a JSON file of settings."
        ) from error
    return _read_json(text, f"{name[0].upper()}{name[1:]}")


def _read_json(text: str, source: str) -> dict[str, Any]:
    try:
        settings = parse_json(text)
    except ValueError as error:
        raise SpecConfigError(
            f"{source} is not valid JSON: {error}. Names and texts stand in double quotes, and true, false and null "
            "are lower case."
        ) from error
    if not isinstance(settings, dict):
        raise SpecConfigError(f"{source} must hold an object of settings, got {shown(settings)}.")
    return settings
