"""Settings that come with a model: in its card, its generation config, or beside saved weights.

What is published is what others can use: nothing about the machine or the account of who published it. What is read
was written by a stranger: it is data, limited in size, and cannot allow code to run.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers.utils import logging

from ..candidate_generators import is_method_name
from ..config import AUTO, CONFIG_NAME, METHODS_WITHOUT_MODEL, SpeculativeConfig, describe_settings
from ..errors import CheckpointFormatError, SpecConfigError
from .files import MAX_CONFIG_BYTES, ReadOfRepositories, RepoFiles


if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.get_logger(__name__)

# Of the metadata of a card.
CARD_KEY = "speculative"

IN_GENERATION_CONFIG = "`speculative` in the generation config"

# About the machine or the account; never published.
_PRIVATE = ("device", "cache_dir", "local_files_only", "token", "trust_remote_code", "code_revision")

# Where a drafter is; left out of what lies beside it.
_PLACE = ("model", "revision", "subfolder")

# Values in a card's block. A static tree of the largest size has some thousand.
_MOST_VALUES = 10_000

_saved_on_the_hub = ReadOfRepositories()
_UNKNOWN = object()


def settings_to_publish(config: SpeculativeConfig, *, with_place: bool) -> dict[str, Any]:
    """The settings of a configuration that others can use, as plain Python and JSON types.

    Args:
        config (`SpeculativeConfig`): The configuration.
        with_place (`bool`): Also those that say where the drafter is; not for what lies beside it.
    """
    left_out = _PRIVATE if with_place else _PRIVATE + _PLACE
    return {key: value for key, value in config.to_dict().items() if key not in left_out}


def published_config(settings: Any, source: str, *, ignore_unknown: bool = False, **place) -> SpeculativeConfig:
    """The configuration of published settings.

    Args:
        settings (`Mapping` or `str`): Flat settings, or the name of a method.
        source (`str`): Where they were found, for messages.
        ignore_unknown (`bool`, defaults to `False`): Settings that this version does not know are left out with a
            line in the log.
        place: `model` and other settings that say where the drafter is, if the method has one and they name none.

    Raises:
        SpecConfigError: They cannot be understood, are wrong, or ask for remote code.
    """
    if isinstance(settings, str):
        settings = {"method": settings}
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise SpecConfigError(f"{source}: settings are a mapping of names to values, got {type(settings).__name__}.")
    _check_size(settings, source)
    check_asks_for_no_code(settings, source)
    flat = {**settings}
    if ignore_unknown:
        flat = _known(flat, source)
    if flat.get("method") not in METHODS_WITHOUT_MODEL and flat.get("model") is None:
        flat = {**flat, **{key: value for key, value in place.items() if value is not None}}
    try:
        return SpeculativeConfig.from_dict(flat)
    except SpecConfigError as error:
        raise SpecConfigError(f"{source}: {error}") from error


def target_entry(metadata: Mapping[str, Any]) -> Any:
    """What the metadata of a card say about the model as a target; `None` also where they are a drafter's."""
    entry = metadata.get(CARD_KEY)
    return None if isinstance(entry, Mapping) and "target" in entry else entry


def check_asks_for_no_code(settings: Any, source: str) -> None:
    """Only the user's own call may let code of a repository run.

    Raises:
        SpecConfigError: The published settings would.
    """
    if not isinstance(settings, Mapping):
        return
    if settings.get("trust_remote_code"):
        raise SpecConfigError(
            f"{source} sets `trust_remote_code`, and settings that come with a model must not let code run. If you "
            "trust the drafter's repository, name it and `trust_remote_code` in the call: `speculative={...}`."
        )
    check_asks_for_no_code(settings.get("options"), source)


def store_settings(generation_config: GenerationConfig, settings: Any) -> None:
    """Puts settings into a generation config: its model speculates with them from then on, saved and loaded as well.

    ```python
    hf_specdec.store_settings(model.generation_config, {"model": "user/head", "num_speculative_tokens": 4})
    model.push_to_hub("user/model")
    ```

    Args:
        generation_config (`GenerationConfig`): Of a model, or one to pass to `generate()`.
        settings (*optional*): What [`SpeculativeConfig.resolve`] takes; "off" is plain generation, `None` takes the
            entry out.

    Raises:
        SpecConfigError: The settings are wrong, or ask for remote code.
    """
    if isinstance(settings, os.PathLike):
        settings = os.fspath(settings)
    if settings is None:
        vars(generation_config).pop("speculative", None)
        return
    if not isinstance(settings, str):
        check_asks_for_no_code(settings, IN_GENERATION_CONFIG)
        config = settings if isinstance(settings, SpeculativeConfig) else SpeculativeConfig.from_dict(settings)
        settings = settings_to_publish(config, with_place=True)
    elif settings not in ("off", "none"):
        settings_of_generation_config(settings)
    generation_config.speculative = settings
    # Of a generation config that says so, transformers reads no keys that it does not know.
    generation_config._from_model_config = False


def settings_of_generation_config(value: Any) -> Any:
    """What `speculative` in a generation config means, for [`SpeculativeConfig.resolve`].

    Raises:
        SpecConfigError: It asks for remote code, or hides its settings in a text.
    """
    check_asks_for_no_code(value, IN_GENERATION_CONFIG)
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("{") or value.endswith(".json"):
        raise SpecConfigError(
            f"{IN_GENERATION_CONFIG} must be an object of settings, the name of a method, or the repo id or folder of "
            f"a drafter, got {value!r}. Write the settings as an object."
        )
    return {"method" if value == AUTO or is_method_name(value) else "model": value}


def with_saved_settings(config: SpeculativeConfig) -> SpeculativeConfig:
    """A configuration that names a checkpoint and no method, with the settings that were saved beside the checkpoint.

    Settings that are given take precedence. Where none were saved, or nothing can be reached, it is returned as it is.

    Raises:
        SpecConfigError: The saved settings are wrong, or contradict those that are given.
    """
    saved = _saved_beside(RepoFiles.of(config))
    if saved is None:
        return config
    given = config.to_dict(secrets=True)
    # Each says how long drafts are.
    if "num_speculative_tokens" in given:
        saved.pop("speculative_token_tree", None)
    if "speculative_token_tree" in given:
        saved.pop("num_speculative_tokens", None)
    if saved.get("method") in METHODS_WITHOUT_MODEL:
        given = {key: value for key, value in given.items() if key not in _PRIVATE + _PLACE}
    elif saved.get("model") is not None:
        # Settings alone, for a drafter that lies elsewhere.
        given = {key: value for key, value in given.items() if key not in _PLACE}
    return published_config(saved, f"{CONFIG_NAME} of '{config.model}'", model=config.model).replace(**given)


def _saved_beside(files: RepoFiles) -> dict[str, Any] | None:
    """`saved_settings`, asked of the Hub once; `None` also where nothing can be reached."""
    known = _UNKNOWN if files.folder is not None else _saved_on_the_hub.find(files, _UNKNOWN)
    if known is not _UNKNOWN:
        return copy.deepcopy(known)
    try:
        found = saved_settings(files)
    except CheckpointFormatError:
        # Whoever reads the checkpoint itself says what is wrong.
        return None
    if files.folder is None:
        _saved_on_the_hub.keep(files, copy.deepcopy(found))
    return found


def forget_saved(name: str) -> None:
    """Forgets what has been read of a repository, which has changed."""
    _saved_on_the_hub.forget_name(name)


def saved_settings(files: RepoFiles) -> dict[str, Any] | None:
    """What `speculation_config.json` holds; `None` where there is none.

    Raises:
        SpecConfigError: The file is there and cannot be read.
        CheckpointFormatError: The folder or repository cannot be reached.
    """
    if files.folder is None and files.is_offline:
        path = _cached_settings(files)
    else:
        path = files.path(CONFIG_NAME) if CONFIG_NAME in files else None
    if path is None:
        return None
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {MAX_CONFIG_BYTES} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__} and not an object")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise SpecConfigError(
            f"{CONFIG_NAME} of '{files.name}' cannot be read: {error}. Correct or remove it, or name the method with "
            "`spec_method`."
        ) from error


def _cached_settings(files: RepoFiles) -> Path | None:
    """Offline there is no list of a repository's files."""
    name = f"{files.subfolder.strip('/')}/{CONFIG_NAME}" if files.subfolder else CONFIG_NAME
    try:
        cached = try_to_load_from_cache(files.name, name, cache_dir=files.cache_dir, revision=files.revision)
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None


def _known(settings: dict[str, Any], source: str) -> dict[str, Any]:
    """The settings that this version knows: common ones and those of the method, if it has one."""
    names = {setting.key for setting in describe_settings()} | {"options"}
    method = settings.get("method")
    if isinstance(method, str):
        try:
            names |= {setting.key for setting in describe_settings(method)}
        except SpecConfigError:
            # Reported where the configuration is made.
            return settings
    unknown = [key for key in settings if key not in names]
    if unknown:
        logger.info(f"{source}: settings of another version are left out: {', '.join(sorted(unknown))}.")
    return {key: value for key, value in settings.items() if key in names}


def _check_size(settings: Mapping, source: str) -> None:
    """References within YAML can make a small file hold a huge value."""
    found, open_values = 0, [settings]
    while open_values:
        value = open_values.pop()
        found += 1
        if found > _MOST_VALUES:
            raise SpecConfigError(f"{source} has more than {_MOST_VALUES} values in its settings. It is not read.")
        if isinstance(value, Mapping):
            open_values += value.values()
        elif isinstance(value, (list, tuple)):
            open_values += value
