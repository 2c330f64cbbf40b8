"""Limits of trust in what others publish: settings beside a model, drafters that nobody named, text in messages.

A stranger may say what shape drafts have, and a target may also say which drafter is meant. All else is for the call.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from transformers.utils import logging

from ..errors import SpecConfigError
from ..method import built_in_methods, parts_of
from ..reading import plain_value
from ..settings.names import AUTO, flattened, option_names


logger = logging.get_logger(__name__)

# Settings of all methods that may be published.
PUBLISHED_SETTINGS = (
    "method",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "speculative_token_tree",
    "max_model_len",
)

# Settings of a drafter's place: for a target to say, not for what lies beside the drafter.
PLACE_SETTINGS = ("model", "revision", "subfolder")

# Owners of repositories whose drafters may be taken although nobody named them, separated by commas.
OWNERS_VARIABLE = "HF_SPECDEC_TRUSTED_OWNERS"

# Patterns of repo ids that may be taken although no call named them, separated by commas.
MODELS_VARIABLE = "HF_SPECDEC_ALLOWED_MODELS"

# Values in published settings; a static tree of the largest size has some thousand. References within YAML can make a
# small file hold a huge value.
_MOST_VALUES = 10_000


# ----------------------------------------------------------------------------------------------------------- settings


def may_be_published(method: str | None = None) -> set[str]:
    """Names of the settings that may be published for a method, or any: shapes of drafts, not memory or sampling."""
    found = set(PUBLISHED_SETTINGS)
    built_in = [method.name for method in built_in_methods()]
    for part in built_in if method in (None, AUTO) else {method, *parts_of(method)}:
        found |= {name for name, item in option_names(part).items() if item.metadata.get("published")}
    return found


def sifted(settings: Any, source: str, *, with_place: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Splits published settings into those a stranger may set and the printable names of the others."""
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise SpecConfigError(f"{source}: settings are a mapping of names to values, got {type(settings).__name__}.")
    settings = plain_value(source, settings, _MOST_VALUES)
    options = settings.get("options")
    flat = {**(options if isinstance(options, Mapping) else {}), **settings}
    flat.pop("options", None)
    flat = flattened(flat)
    if flat.get("trust_remote_code") or (isinstance(options, Mapping) and options.get("trust_remote_code")):
        raise SpecConfigError(
            f"{source} sets `trust_remote_code`, and settings that come with a model must not let code run. If you "
            "trust the drafter's repository, name it and `trust_remote_code` in the call: `speculative={...}`."
        )
    method = flat.get("method")
    names = may_be_published(method if isinstance(method, str) else None) | set(PLACE_SETTINGS if with_place else ())
    for name in ("revision", "subfolder") if with_place else ():
        # Paths stay inside of their repository.
        place = flat.get(name) if isinstance(flat.get(name), str) else ""
        if place.startswith("/") or ".." in place.split("/") or set(place) & set("\\:\0"):
            raise SpecConfigError(f"{source} has the {name} '{one_line(flat[name])}', which leads elsewhere.")
    left_out = sorted(one_line(key, 40) for key, value in flat.items() if key not in names and value is not None)
    return {key: value for key, value in flat.items() if key in names}, tuple(left_out)


def warn_of(left_out: tuple[str, ...], source: str) -> None:
    """Warns once of published settings that are not obeyed."""
    if left_out:
        logger.warning_once(
            f"{source}: {', '.join(left_out[:8])}{', ...' if len(left_out) > 8 else ''} left out. Settings that come "
            "with a model say the shape of drafts and nothing else; what you want of these, pass in the call."
        )


# ----------------------------------------------------------------------------------------------------------- drafters


def restrictions() -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Trusted owners and allowed models of the environment, each `None` where it is not set."""
    values = map(os.environ.get, (OWNERS_VARIABLE, MODELS_VARIABLE))
    return tuple(value if value is None else tuple(filter(None, map(str.strip, value.split(",")))) for value in values)


def owner_of(repo_id: str) -> str:
    """The user or organisation that a repository belongs to; empty for the few that have none in their id."""
    return repo_id.partition("/")[0] if "/" in repo_id else ""


def trusted_owners_of(repo_id: str | None, trusted_owners: Iterable[str] | None = None) -> dict[str, str]:
    """Whose drafters go before all others, by lower case: the target's owner, then those that the user trusts."""
    owners = owner_of(repo_id or ""), *(trusted_owners or ()), *(restrictions()[0] or ())
    return {owner.lower(): owner for owner in owners if owner}


def why_not_unasked(repo_id: str, trusted_owners: Iterable[str] | None = None) -> str | None:
    """Reason of the user's or the environment's lists not to take a repository that nobody named, if any."""
    by_environment, models = restrictions()
    owner = owner_of(repo_id).lower()
    for owners, source in ((trusted_owners, "`trusted_owners`"), (by_environment, OWNERS_VARIABLE)):
        if owners is not None and owner not in {name.lower() for name in owners}:
            return f"Its owner '{owner}' is not among {source}: name it as `model` in the call if you trust it."
    if models is not None and not any(fnmatchcase(repo_id.lower(), pattern.lower()) for pattern in models):
        return f"It is not among {MODELS_VARIABLE}: name it as `model` in the call if you trust it."
    return None


# --------------------------------------------------------------------------------------------------------------- text


def one_line(text: Any, most: int = 200) -> str:
    """A stranger's text for a log or a terminal: on one line, cut, and without control characters."""
    text = str(text)
    short = " ".join(text[: 2 * most].split())
    short = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in short)
    return short if len(short) <= most and len(text) <= 2 * most else short[: most - 3] + "..."


def texts_in(value: Any) -> list[str]:
    """The texts in an entry of a card, which has one or a list."""
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]
