"""Profiles in files: what was measured of a target and a drafter on a device, for the next process.

A profile belongs to a target, a drafter, a device, a data type and a version of torch. All of them stand in its file,
and the file's name in the cache folder follows from all but the version.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..errors import SpecConfigError, shown
from ..folders import profile_folder
from ..reading import parse_json, read_text
from ..settings import AUTO, SpeculativeConfig
from .profile import ControlProfile


logger = logging.get_logger(__name__)

_FORMAT = 1

# Settings that change neither what a cycle costs nor how often drafts are accepted.
_OF_NO_MATTER = ("control_profile", "cache_dir", "local_files_only", "trust_remote_code")


def profile_identity(
    target_model: torch.nn.Module, config: SpeculativeConfig, network: torch.nn.Module | None
) -> dict[str, Any]:
    """Identity of the models and machine of a profile, as plain values.

    Args:
        target_model (`PreTrainedModel`): The target.
        config (`SpeculativeConfig`): The settings.
        network (`nn.Module`, *optional*): The draft network.
    """
    settings = {key: value for key, value in config.to_dict().items() if key not in _OF_NO_MATTER}
    # Left out, it is the same.
    settings["num_speculative_tokens"] = AUTO
    return {
        "target": _described(target_model),
        "drafter": {**settings, "network": None if network is None else _described(network)},
        "device": _device(target_model.device),
        "torch": torch.__version__,
    }


def profile_path(identity: dict[str, Any]) -> Path:
    """The file of a profile in the cache folder."""
    lasting = {key: value for key, value in identity.items() if key != "torch"}
    return profile_folder() / f"{hashlib.sha256(_json(lasting).encode()).hexdigest()[:16]}.json"


def save_profile(
    profile: ControlProfile, identity: dict[str, Any], path: str | os.PathLike[str] | None = None
) -> Path:
    """Writes a profile, to the cache folder if no path is given. Returns the path."""
    file = profile_path(identity) if path is None else Path(path)
    content = {"format": _FORMAT, "identity": identity, "profile": profile.to_dict()}
    # A process that reads meanwhile sees the old file or the new one.
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        draft.replace(file)
    except OSError as error:
        raise SpecConfigError(f"The profile '{file}' cannot be written: {error}. Name another file.") from error
    return file


def load_profile(path: str | os.PathLike[str], identity: dict[str, Any]) -> ControlProfile:
    """Reads a profile.

    Raises:
        SpecConfigError: The file cannot be read, or was measured of something else.
    """
    again = "Measure it again with `hf-specdec calibrate`."
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise SpecConfigError(f"The profile {shown(str(path))} cannot be read: {error}. {again}") from error
    is_known = isinstance(content, dict) and content.get("format") == _FORMAT
    if not is_known or not isinstance(content.get("profile"), dict):
        raise SpecConfigError(f"{shown(str(path))} is no profile of this version. {again}")
    found = content.get("identity")
    found = found if isinstance(found, dict) else {}
    for key, wanted in identity.items():
        if found.get(key) != wanted:
            raise SpecConfigError(
                f"The profile {shown(str(path))} was measured with the {key} {shown(found.get(key))}, and this is "
                f"{shown(wanted)}. {again}"
            )
    try:
        return ControlProfile.from_dict(content["profile"])
    except Exception as error:
        why = error if isinstance(error, SpecConfigError) else shown(error)
        raise SpecConfigError(f"The profile {shown(str(path))} cannot be used: {why} {again}") from error


def find_profile(
    target_model: torch.nn.Module, config: SpeculativeConfig, network: torch.nn.Module | None
) -> ControlProfile:
    """The profile to begin with: the file that the settings name, that of the cache folder, or an empty one.

    Raises:
        SpecConfigError: The named file cannot be read, or was measured of something else.
    """
    identity = profile_identity(target_model, config, network)
    if config.control_profile is not None:
        return load_profile(config.control_profile, identity)
    path = profile_path(identity)
    if not path.is_file():
        return ControlProfile()
    try:
        profile = load_profile(path, identity)
    except SpecConfigError as error:
        logger.warning(f"A stored profile is not used: {error}")
        return ControlProfile()
    logger.info(f"Lengths begin with the profile '{path}'.")
    return profile


def _described(model: torch.nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    return {
        "class": type(model).__name__,
        "name": getattr(config, "_name_or_path", None) or None,
        "revision": getattr(config, "_commit_hash", None),
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(getattr(model, "dtype", None)).removeprefix("torch."),
    }


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
