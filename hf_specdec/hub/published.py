"""Settings that come with a model: in its card, its generation config, or beside saved weights.

What is published is what others may be told: the shape of drafts, and of a target also which drafter is meant. What is
read was written by a stranger: no more of it is believed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ..arguments import is_off
from ..checkpoints.files import RepoFiles, is_pickled
from ..errors import CheckpointAccessError, CheckpointFormatError, SpecConfigError
from ..method import is_method_name, takes_model
from ..settings import CONFIG_NAME, SpeculativeConfig
from ..settings.names import AUTO
from .trust import PLACE_SETTINGS, may_be_published, one_line, sifted, warn_of


if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.get_logger(__name__)

CARD_NAME = "README.md"

# Of the metadata of a card.
CARD_KEY = "speculative"

IN_GENERATION_CONFIG = "`speculative` in the generation config"

# About the machine, the account or the code; never written down for others.
PRIVATE = ("device", "cache_dir", "local_files_only", "token", "trust_remote_code", "code_revision")

# Settings that say which shape drafts have, each in its own way: a chain, a static tree, a dynamic one.
_SHAPES = {
    "num_speculative_tokens": "chain",
    "speculative_token_tree": "tree",
    **dict.fromkeys(("draft_tree_depth", "draft_tree_top_k", "num_draft_nodes"), "growth"),
}


def settings_to_publish(config: SpeculativeConfig, *, with_place: bool) -> dict[str, Any]:
    """The settings that others believe, as plain Python and JSON types; `with_place`: also where the drafter is."""
    names = may_be_published(config.method) | set(PLACE_SETTINGS if with_place else ())
    settings = config.to_dict()
    own = sorted(settings.keys() - names - {*PRIVATE, *PLACE_SETTINGS})
    if own:
        logger.warning_once(
            f"Not published or stored with a model: {', '.join(own)}. Only a call may say these, so pass them there."
        )
    return {key: value for key, value in settings.items() if key in names}


def read_entry(
    entry: Any, source: str, *, with_place: bool = False, **place: Any
) -> tuple[SpeculativeConfig, tuple[str, ...]]:
    """What is published as a configuration, as far as a stranger's word counts, and the names of what is left out."""
    if isinstance(entry, SpeculativeConfig):
        entry = entry.to_dict()
    elif isinstance(entry, str):
        if entry.lstrip().startswith("{") or entry.endswith(".json"):
            raise SpecConfigError(
                f"{source} must be an object of settings, the name of a method, or the repo id or folder of a "
                f"drafter, got '{one_line(entry)}'. Write the settings as an object."
            )
        is_model = with_place and not (entry == AUTO or is_method_name(entry))
        entry = {"model" if is_model else "method": entry}
    settings, left_out = sifted(entry, source, with_place=with_place)
    return config_of(settings, source, **place), left_out


def published_config(entry: Any, source: str, **place: Any) -> SpeculativeConfig:
    """The configuration of an entry, with a warning of what is left out; arguments as of `read_entry`."""
    config, left_out = read_entry(entry, source, **place)
    warn_of(left_out, source)
    return config


def config_of(flat: dict[str, Any], source: str, **place: Any) -> SpeculativeConfig:
    """The configuration of settings that have been sifted."""
    try:
        if takes_model(flat.get("method")) and flat.get("model") is None:
            flat = {**flat, **{key: value for key, value in place.items() if value is not None}}
        return SpeculativeConfig.from_dict(flat)
    except Exception as error:
        # Values of strangers may raise anything.
        raise SpecConfigError(f"{source}: {one_line(error, 500)}") from error


def target_entry(metadata: Mapping[str, Any]) -> Any:
    """Entry in a target's card; `None` also where the card is a drafter's."""
    entry = metadata.get(CARD_KEY)
    return None if isinstance(entry, Mapping) and "target" in entry else entry


def store_settings(generation_config: GenerationConfig, settings: Any) -> None:
    """Puts settings into a generation config, for calls with `spec_method="auto"`, or with a method and no model.

    Other calls stay plain, and so do those of whoever loads the model.

    ```python
    hf_specdec.store_settings(model.generation_config, {"model": "user/head", "num_speculative_tokens": 4})
    model.push_to_hub("user/model")
    ```

    Args:
        generation_config (`GenerationConfig`): Of a model.
        settings (*optional*): What [`SpeculativeConfig.resolve`] takes; `None` takes the entry out. Only the shape of
            drafts and the place of the drafter are stored: who reads the config obeys nothing else.

    Raises:
        SpecConfigError: The settings are wrong, or ask for remote code.
    """
    if isinstance(settings, os.PathLike):
        settings = os.fspath(settings)
    if settings is None:
        vars(generation_config).pop("speculative", None)
        return
    if not isinstance(settings, str):
        if isinstance(settings, Mapping):
            sifted(settings, IN_GENERATION_CONFIG)
        config = settings if isinstance(settings, SpeculativeConfig) else SpeculativeConfig.from_dict(settings)
        settings = settings_to_publish(config, with_place=True)
    elif not is_off(settings):
        read_entry(settings, IN_GENERATION_CONFIG, with_place=True)
    if os.path.isabs(named := settings.get("model", "") if isinstance(settings, dict) else settings):
        raise SpecConfigError(
            f"'{named}' is a folder of this machine. A generation config names a drafter by its repo id, or by its "
            "folder inside of the target's."
        )
    generation_config.speculative = settings
    # Of a generation config that says so, transformers reads no keys that it does not know.
    generation_config._from_model_config = False


def with_saved_settings(config: SpeculativeConfig) -> SpeculativeConfig:
    """A configuration without a method above the settings saved beside its checkpoint, if these can be reached."""
    files, source = RepoFiles.of(config), f"{CONFIG_NAME} of '{config.model}'"
    try:
        # The Hub is asked once.
        saved = copy.deepcopy(files.recall("settings", lambda: saved_settings(files)))
    except CheckpointFormatError:
        # Whoever reads the checkpoint itself says what is wrong.
        return config
    if saved is None:
        return config
    # A local folder that holds nothing else may say where the drafter is.
    is_pointer = files.folder is not None and not any(
        name == "config.json" or name.endswith(".safetensors") or is_pickled(name) for name in files.sizes
    )
    elsewhere = saved.get("model")
    if elsewhere is not None and not is_pointer:
        raise SpecConfigError(
            f"{source} names another drafter, '{one_line(elsewhere)}'. Settings beside a checkpoint cannot lead away "
            "from it: name that drafter in the call if you trust it."
        )
    saved, left_out = sifted(saved, source, with_place=is_pointer)
    warn_of(left_out, source)
    given = config.to_dict(secrets=True)
    asked = _shapes(given)
    if asked:
        saved = {name: value for name, value in saved.items() if _shapes({name: value}) <= asked}
    if not takes_model(saved.get("method")):
        given = {key: value for key, value in given.items() if key not in PRIVATE + PLACE_SETTINGS}
    elif is_pointer:
        given = {key: value for key, value in given.items() if key not in PLACE_SETTINGS}
    return config_of(saved, source, model=None if is_pointer else config.model).replace(**given)


def _shapes(settings: Mapping[str, Any]) -> set[str]:
    """The ways in which settings say what shape drafts have; "auto" and "fixed" are about its size."""
    return {way for name, way in _SHAPES.items() if not isinstance(settings.get(name), str | None)}


def saved_settings(files: RepoFiles) -> dict[str, Any] | None:
    """Content of `speculation_config.json`; `None` where there is none."""
    try:
        if files.folder is None and files.is_offline:
            # There is no list of a repository's files.
            path = files.cached(CONFIG_NAME)
            return None if path is None else RepoFiles(path.parent).read_json(CONFIG_NAME)
        return files.read_json(CONFIG_NAME) if CONFIG_NAME in files else None
    except CheckpointAccessError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise SpecConfigError(
            f"{CONFIG_NAME} of '{files.name}' cannot be read: {one_line(error)} Correct or remove it, or name the "
            "method with `spec_method`."
        ) from error
