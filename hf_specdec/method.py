"""The drafting methods: one descriptor each, found in the folders of `candidate_generators`.

A method is a folder `candidate_generators/<folder>/` whose `__init__.py` declares `METHODS`, a tuple of `Method`. All
that the package must know of a method beside its code stands there; nothing else names it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from .errors import SpecConfigError, did_you_mean, shown


# Between the two methods of a combination.
COMBINING = "+"

# The method that drafts nothing: the loop that the others must beat.
NO_DRAFTS = "none"

_FOLDER = "hf_specdec.candidate_generators"
_COMBINED_GENERATOR = f"{_FOLDER}.combined.combination:combination"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A drafting method. References are "module:name" inside of its folder, imported on first use.

    Attributes:
        name (`str`): The value of `spec_method`.
        noun (`str`): What drafts, in titles: "EAGLE-3 head".
        drafts_from (`str`): Source of its drafts, in tables.
        generator (`str` or `type`): Reference to its candidate generator, or a registered class.
        folder (`str`): The package of its modules.
        weights (`str`, *optional*): What has to be loaded, with its article: "a head". `None`: nothing.
        takes_model (`bool`): Settings about a draft model can be given.
        needs_grammar (`bool`): It drafts only where a grammar constrains the text.
        only_if_named (`bool`): Nothing chooses it unasked: it pays for some targets or texts only.
        is_language_model (`bool`): The drafter is a whole language model, with a vocabulary of its own.
        in_target_checkpoint (`bool`): The drafter may be a part of the target's own checkpoint.
        drafts_static_trees (`bool`): `speculative_token_tree` gives its tree.
        drafts_one_token_per_head (`bool`): A checkpoint has a head for each draft token.
        aliases (`tuple[str, ...]`): Other names for `spec_method`.
        complements_copies (`bool`): Drafts without weights where others that do so find nothing to copy.
        package (`str`, *optional*): Optional dependency without which it cannot draft, as pip names it.
        preference (`int`): Order among drafters that fit a target equally well, the smallest number first.
        preferred_because (`str`): The reason of that place.
        tags (`tuple[str, ...]`): Tags of its drafters on the Hub, beside the name.
        formats (`str`, *optional*): Module with its checkpoint formats, `FORMATS`.
        recipe (`str`, *optional*): Reference to the recipe that trains it.
        training (`type`, *optional*): Dataclass of the recipe's options.
        further_recipes (`Mapping`): Further kinds of drafters that it can train, by name: what they are, reference to
            the recipe, and dataclass of its options.
        vllm (`str`, *optional*): Its name in vLLM's `--speculative-config`.
        sglang (`str`, *optional*): Its SGLang `--speculative-algorithm`.
        sglang_counts_steps (`bool`): SGLang also takes its number of steps and children.
        transformers (`str`, *optional*): Argument of transformers' own `generate()` that does the like.
        healthy_first_rate (`float`, *optional*): Share of first draft tokens that a drafter in order has accepted at
            least, on text of its kind.
        demo (`str`, *optional*): Folder of the drafter for the embedded demo target.
        demo_settings (`Mapping`): Settings of its rows in the demo, by a suffix of the row's name.
    """

    name: str
    noun: str
    drafts_from: str = ""
    generator: str | type
    folder: str = ""
    weights: str | None = None
    takes_model: bool = True
    needs_grammar: bool = False
    only_if_named: bool = False
    is_language_model: bool = False
    in_target_checkpoint: bool = False
    drafts_static_trees: bool = False
    drafts_one_token_per_head: bool = False
    complements_copies: bool = False
    aliases: tuple[str, ...] = ()
    package: str | None = None
    preference: int = 1000
    preferred_because: str = ""
    tags: tuple[str, ...] = ()
    formats: str | None = None
    recipe: str | None = None
    training: type | None = None
    further_recipes: Mapping[str, tuple[str, str, type]] = field(default_factory=dict)
    vllm: str | None = None
    sglang: str | None = None
    sglang_counts_steps: bool = False
    transformers: str | None = None
    healthy_first_rate: float | None = None
    demo: str | None = None
    demo_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})

    @property
    def is_built_in(self) -> bool:
        return bool(self.folder)

    @cached_property
    def generator_class(self) -> type:
        """The subclass of `CandidateGenerator` that drafts."""
        return self.load(self.generator) if isinstance(self.generator, str) else self.generator

    def load(self, reference: str) -> Any:
        """Imports "module:name" or "module" of the method's folder."""
        return _imported(f"{self.folder}.{reference}")


def methods() -> Mapping[str, Method]:
    """All methods by name, those that need least first; registered ones come last."""
    return MappingProxyType(_all_methods())


def built_in_methods() -> tuple[Method, ...]:
    """The methods of this package, those that need least first."""
    return tuple(method for method in _all_methods().values() if method.is_built_in)


class Training(NamedTuple):
    """A kind of drafter that can be trained: its method and noun, its recipe, the dataclass of the options."""

    method: Method
    noun: str
    recipe: str
    options: type


def trainings() -> dict[str, Training]:
    """All kinds of drafters that can be trained, by name; most are called like their methods."""
    found: dict[str, Training] = {}
    for method in built_in_methods():
        if method.recipe is not None and method.training is not None:
            found[method.name] = Training(method, method.noun, method.recipe, method.training)
        for name, further in method.further_recipes.items():
            found[name] = Training(method, *further)
    return found


def preferred_methods() -> tuple[Method, ...]:
    """The methods of this package, the preferred one first."""
    return tuple(sorted(built_in_methods(), key=lambda method: method.preference))


def names_without_weights() -> list[str]:
    """The methods of this package that draft any text without weights, and their combinations, the preferred first."""
    single = [
        method
        for method in preferred_methods()
        if not (method.takes_model or method.needs_grammar or method.only_if_named)
    ]
    completing = [method for method in single if method.complements_copies]
    found: list[str] = []
    for method in single:
        found += [f"{method.name}{COMBINING}{other.name}" for other in completing if other is not method]
        found.append(method.name)
    return found


def own_layers_method() -> Method:
    """The method that drafts with layers of the target's own checkpoint."""
    return next(method for method in built_in_methods() if method.in_target_checkpoint)


def language_model_method() -> Method:
    """The method that drafts with a whole language model."""
    return next(method for method in built_in_methods() if method.is_language_model)


def parts_of(name: str) -> tuple[str, ...]:
    """The methods that a name combines, without aliases: "suffix+eagle3" gives both, and "eagle3" itself alone."""
    aliases = _aliases()
    return tuple(aliases.get(part, part) for part in name.split(COMBINING))


def drafting_method(name: str | None) -> Method | None:
    """The method of a name, of a combination the last one; `None` where there is none, or it is unknown."""
    return None if name is None else _all_methods().get(parts_of(name)[-1])


def takes_model(name: str | None) -> bool:
    """Tells methods that can have a draft model from those that draft without one; unknown ones have one."""
    if not isinstance(name, str):
        return True
    known = _all_methods()
    return any(part not in known or known[part].takes_model for part in parts_of(name))


def is_language_model(name: str | None) -> bool:
    """Tells methods whose drafter is a whole language model."""
    return (method := drafting_method(name)) is not None and method.is_language_model


def is_method_name(text: str) -> bool:
    """Tells the name of a method, or of a combination that has a known part, from a path or repo id."""
    parts = parts_of(text)
    known = [part in _all_methods() or part in _WITHOUT_MODELS for part in parts]
    return known[0] if len(parts) == 1 else any(known) and "/" not in text


def names_of_methods() -> list[str]:
    """All names that `spec_method` takes for a single method, aliases included."""
    return [*_all_methods(), *_aliases()]


def resolve_candidate_generator(name: str) -> type:
    """The candidate generator of a method or of a combination of two, imported on first use.

    Raises:
        SpecConfigError: The name is unknown, or its parts cannot be combined.
    """
    known = _all_methods()
    parts = (name,) if name in known else parts_of(name)
    if len(parts) != 1:
        return _imported(_COMBINED_GENERATOR)(parts)
    if parts[0] not in known:
        raise _unknown_method(parts[0])
    return known[parts[0]].generator_class


def add_method(method: Method) -> None:
    """Adds a method from outside of the package."""
    _all_methods()[method.name] = method


def remove_method(name: str) -> None:
    """Removes a method that was added with `add_method`.

    Raises:
        SpecConfigError: No such method was added.
    """
    method = _all_methods().get(name)
    if method is None or method.is_built_in:
        raise SpecConfigError(f"spec_method='{name}' was not registered.")
    del _all_methods()[name]


# Names that engines have for methods of models that transformers does not have.
_WITHOUT_MODELS = {"pangu_ultra_moe_mtp": "transformers has no model of the type pangu_ultra_moe"}


@cache
def _all_methods() -> dict[str, Method]:
    folders = [found.name for found in pkgutil.iter_modules(import_module(_FOLDER).__path__) if found.ispkg]
    found = [method for name in folders for method in getattr(import_module(f"{_FOLDER}.{name}"), "METHODS", ())]
    return {method.name: method for method in sorted(found, key=lambda method: -method.preference)}


@cache
def _aliases() -> dict[str, str]:
    return {alias: method.name for method in built_in_methods() for alias in method.aliases}


@cache
def _imported(reference: str) -> Any:
    module, _, name = reference.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


def _unknown_method(name: str) -> SpecConfigError:
    if name in _WITHOUT_MODELS:
        return SpecConfigError(
            f"spec_method='{name}' cannot be used: {_WITHOUT_MODELS[name]}. For MTP layers of other families "
            "use 'mtp'; 'ngram' works with every target."
        )
    names = [*names_of_methods(), "auto", "off"]
    hint = f" Did you mean '{name.lower()}'?" if name.lower() in names else did_you_mean(name, names)
    choices = ", ".join([*_all_methods(), "auto", "off"])
    return SpecConfigError(f"Unknown spec_method={shown(name)}.{hint} Choose from: {choices}.")
