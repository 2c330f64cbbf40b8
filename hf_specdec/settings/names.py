"""The flat names of settings: which there are, whose they are, and the options that they make.

Options of a method have a flat name, by default that of the field in its options class. Users give them beside the
settings of all methods or inside of `options`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from types import NoneType
from typing import Any

from ..errors import SpecConfigError, SpecDecError, did_you_mean, is_access_token, shown
from ..method import COMBINING, methods, parts_of, resolve_candidate_generator
from ..reading import plain_value
from .checks import Bounds, checked, frozen, hints_of, is_int, is_json_value, types_of
from .spellings import FORMER_NAMES, OTHER_NAMES, respelled


# In a method's place: the drafter that is found for the target, or the method of the `model` that is named. In that of
# a length: the one that pays.
AUTO = "auto"
# In a length's place: the method's own, in every cycle.
FIXED = "fixed"


@dataclass(frozen=True)
class PendingOptions:
    """Options given before the method is known; they are checked once it has been read from the checkpoint."""

    values: tuple[tuple[str, Any], ...] = ()


def canonical_method(name: Any) -> str | None:
    """A method by its own name, where it may be given by an alias."""
    if name is not None and not isinstance(name, str):
        raise SpecConfigError(f"`method` must be the name of a method, got {shown(name)} ({type(name).__name__}).")
    return None if name is None else COMBINING.join(parts_of(name))


def options_class(method: str) -> type[Any]:
    """The dataclass of a method's own options."""
    return resolve_candidate_generator(method).options_class


def options_in(options: Any) -> list[Field[Any]]:
    """The fields of an options class or object that are options."""
    return [item for item in fields(options) if item.init]


def option_fields(method: str) -> list[Field[Any]]:
    """The fields of a method's own options; none of a method that does not exist."""
    return list(dict.fromkeys(option_names(method).values()))


def option_names(method: str) -> dict[str, Field[Any]]:
    """The same by all names that they may be given by."""
    try:
        return {name: item for name, (item, _) in spellings_of(options_class(method)).items()}
    except SpecDecError:
        return {}


def key_of(item: Field[Any]) -> str:
    """The flat name of an option."""
    return item.metadata.get("key", item.name)


def default_of(item: Field[Any]) -> Any:
    """The default of an option, made anew where it has a factory."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def flattened(settings: Mapping[str, Any], method: str | None = None) -> dict[str, Any]:
    """Flat settings of a method by today's names, those in `options` (an object or a mapping) among them."""
    flat = dict(settings.items())
    options = flat.pop("options", None)
    options = {} if options is None else options
    if isinstance(options, PendingOptions):
        options = dict(options.values)
    elif hasattr(options, "__dataclass_fields__"):
        options = {key_of(item): getattr(options, item.name) for item in options_in(options)}
    elif not isinstance(options, Mapping):
        raise SpecConfigError(f"`options` must be a dict or the options object of a method, got {shown(options)}.")
    unnamed = next((key for key in (*flat, *options) if not isinstance(key, str)), None)
    if unnamed is not None:
        raise SpecConfigError(f"The names of settings must be strings, got {shown(unnamed)}.")
    twice = options.keys() & flat.keys()
    if twice:
        names = ", ".join(name[:100] for name in sorted(twice))
        raise SpecConfigError(f"These settings are given twice, beside and inside `options`: {names}.")
    flat.update(options)
    flat = {str.__str__(key): plain_value(f"`{key[:100]}`", value) for key, value in flat.items()}
    former = FORMER_NAMES & flat.keys()
    if not former:
        return flat
    method = flat.get("method") or method
    # What the method itself calls so, or any where it is open, is its own.
    known = [method] if isinstance(method, str) and method != AUTO else methods()
    return respelled(flat, former.difference(*map(option_names, known)))


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` on top, whichever of its two names an option is given by."""
    base = flattened(base)
    changes = flattened(changes, base.get("method"))
    method = canonical_method(changes.get("method", base.get("method")))
    if method in (None, AUTO):
        return {**base, **changes}
    return {**by_key(method, base), **by_key(method, changes)}


def by_key(method: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the options of a method under their flat names, whichever of their names was used."""
    spellings = spellings_of(options_class(method))
    named: dict[str, Any] = {}
    for name, value in flat.items():
        item, offset = spellings.get(name, (None, 0))
        key = name if item is None else key_of(item)
        if key in named:
            both = [f"`{other}`" for other in flat if other in spellings and spellings[other][0] is item]
            raise SpecConfigError(f"{' and '.join(both)} are two names of one setting. Keep one.")
        named[key] = value + offset if offset and is_int(value) else value
    return named


@cache
def spellings_of(options_class: type[Any]) -> dict[str, tuple[Field[Any], int]]:
    """By flat name, name of the field, and those of engines: the option, and what engines count less."""
    return {
        name: (item, offset)
        for item in options_in(options_class)
        for name, offset in {key_of(item): 0, item.name: 0, **item.metadata.get("engine_names", {})}.items()
    }


def check_is_named(flat: Mapping[str, Any]) -> None:
    """Raises a [`SpecConfigError`] unless there is a method or a model; it names the setting that was meant."""
    if flat["method"] is not None or flat["model"] is not None:
        return
    for key in flat.keys() - {"method", "model"}:
        if key in OTHER_NAMES:
            raise SpecConfigError(_called_otherwise(key))
        if hint := did_you_mean(key, ("method", "model")):
            raise SpecConfigError(f"Unknown setting {shown(key)}.{hint}")
    raise SpecConfigError(
        "Speculation needs a method or a model, got neither. Name a `method` such as 'ngram', or a draft `model` from "
        "whose checkpoint the method is read."
    )


def _called_otherwise(key: str) -> str:
    name = OTHER_NAMES[key]
    argument = f" (an argument of generate(): `spec_{name}`)" if name in ("method", "model") else ""
    owners = [f"'{owner}'" for owner in option_owners().get(name, [])]
    whose = f", a setting of method {' and '.join(owners)}" if owners else ""
    return f"`{key}` is called `{name}` here{argument}{whose}. Rename it."


def unknown_setting(method: str | None, key: str, options: Iterable[str], common: Iterable[str]) -> str:
    """The message about a setting `key` that neither the `options` of a method nor the `common` settings have."""
    owners = option_owners().get(key, [])
    whose = f"method='{method}'" if method else "Speculation"
    if owners:
        belongs = " and ".join(f"'{owner}'" for owner in owners)
        return f"`{key}` belongs to method {belongs}, got {whose}. Leave it out, or change the method."
    if key in OTHER_NAMES:
        return _called_otherwise(key)
    hint = did_you_mean(key, [*common, *options])
    listed = f" Its own options are: {', '.join(options)}." if method and options else ""
    return f"{whose} has no setting {shown(key)}.{hint}{listed} The settings of all methods are: {', '.join(common)}."


def option_owners() -> dict[str, list[str]]:
    """The methods that have an option, by its name; for messages, because it imports every method."""
    owners: dict[str, list[str]] = {}
    for method in methods():
        for name in sorted(option_names(method)):
            owners.setdefault(name, []).append(method)
    return owners


def build_options(method: str | None, flat: Mapping[str, Any], common: Collection[str]) -> Any:
    """The options object of a method, from all settings that are not the `common` ones."""
    if method in (None, AUTO):
        # Some method must have each of them.
        owners_of = option_owners() if flat else {}
        for key, value in flat.items():
            if key not in owners_of:
                raise SpecConfigError(unknown_setting(None, key, owners_of, common))
            if not is_json_value(value):
                raise SpecConfigError(
                    f"`{key}` must be a text, a finite number or a list of them, got {shown(value)} "
                    f"({type(value).__name__})."
                )
        return PendingOptions(tuple(sorted((key, frozen(value)) for key, value in flat.items())))
    made_of = options_class(method)
    items = {key_of(item): item for item in options_in(made_of)}
    hints = hints_of(made_of)
    values = {}
    for key, value in by_key(method, flat).items():
        if key not in items:
            raise SpecConfigError(unknown_setting(method, key, items, common))
        values[items[key].name] = value_of(items[key], value, hints[items[key].name])
    try:
        return made_of(**values)
    except SpecConfigError as error:
        # It is about fields, in backticks; the user knows their flat names.
        message = str(error)
        for key, item in items.items():
            message = message.replace(f"`{item.name}`", f"`{key}`")
        raise SpecConfigError(message) from error


def value_of(item: Field, value: Any, hint: Any) -> Any:
    """The value in the type of its field and within its bounds; `None` is the default where it is no value itself."""
    name, metadata, types = key_of(item), item.metadata, types_of(hint)
    if value is None:
        return value if NoneType in types else default_of(item)
    if normalize := metadata.get("normalize"):
        value = normalize(value)
    if metadata.get("is_secret") and not isinstance(value, types):
        raise SpecConfigError(f"`{name}` must be a string, True, False or None, got a {type(value).__name__}.")
    if is_access_token(value) and not metadata.get("is_secret"):
        raise SpecConfigError(f"`{name}` has the form of an access token. Give that as `token`.")
    aliases = metadata.get("aliases", {})
    value = aliases.get(value, value) if isinstance(value, str) else value
    return checked(name, value, hint, metadata.get("bounds", Bounds()), aliases)
