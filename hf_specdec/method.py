"""The drafting methods: one descriptor each, found in the folders of `candidate_generators`.

A method is a folder `candidate_generators/<folder>/` whose `__init__.py` declares `METHODS`, a tuple of `Method`. All
that the package must know of a method beside its code stands there; nothing else names it.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from .errors import SpecConfigError, did_you_mean, shown
from .threads import cached_property


# Largest number of tokens of a draft, and of nodes of a static tree.
MOST_DRAFT_TOKENS = 1024

# Between the two methods of a combination.
COMBINING = "+"

# The method that drafts nothing: the loop that the others must beat.
NO_DRAFTS = "none"

_FOLDER = "hf_specdec.candidate_generators"
_COMBINED_GENERATOR = f"{_FOLDER}.combined.generator:combination"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A drafting method. References are "module:name" inside of its folder, imported on first use."""

    name: str  # the value of `spec_method`
    noun: str  # what drafts, in titles: "EAGLE-3 head"
    drafts_from: str = ""  # source of its drafts, in tables
    generator: str | type  # reference to its candidate generator, or a registered class
    folder: str = ""  # package of its modules, where it is found
    weights: str | None = None  # what has to be loaded, with its article: "a head"
    takes_model: bool = True  # settings about a draft model can be given
    needs_grammar: bool = False  # drafts only where a grammar constrains the text
    only_if_named: bool = False  # nothing chooses it unasked: it pays for some targets or texts only
    is_language_model: bool = False  # the drafter is a whole language model, with a vocabulary of its own
    in_target_checkpoint: bool = False  # the drafter may be a part of the target's own checkpoint
    drafts_static_trees: bool = False  # `speculative_token_tree` gives its tree
    drafts_one_token_per_head: bool = False  # a checkpoint has a head for each draft token
    complements_copies: bool = False  # drafts without weights where others that do so find nothing to copy
    aliases: tuple[str, ...] = ()  # other names for `spec_method`
    package: str | None = None  # optional dependency without which it cannot draft, as pip names it
    preference: int = 1000  # order among drafters that fit a target equally well, the smallest number first
    tags: tuple[str, ...] = ()  # of its drafters on the Hub, beside the name
    formats: str | None = None  # module with its checkpoint formats, `FORMATS`
    recipe: str | None = None  # reference to the recipe that trains it
    training: type | None = None  # dataclass of the recipe's options
    # Further kinds of drafters that it trains, by name: noun, reference to the recipe, dataclass of its options.
    further_recipes: Mapping[str, tuple[str, str, type]] = field(default_factory=dict)
    vllm: str | None = None  # its name in vLLM's `--speculative-config`
    sglang: str | None = None  # its SGLang `--speculative-algorithm`
    sglang_counts_steps: bool = False  # SGLang also takes its number of steps and children
    transformers: str | None = None  # argument of transformers' own `generate()` that does the like
    # Share of first draft tokens that a drafter in order has accepted at least, on text of its kind.
    healthy_first_rate: float | None = None
    demo: str | None = None  # folder of the drafter for the embedded demo target
    # Settings of its rows in the demo, by a suffix of the row's name.
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

    @property
    def recipe_class(self) -> type:
        """The recipe, imported on first use."""
        return self.method.load(self.recipe)


def trainings() -> dict[str, Training]:
    """All kinds of drafters that can be trained, by name; most are called like their methods."""
    by_name: dict[str, Training] = {}
    for method in built_in_methods():
        if method.recipe is not None and method.training is not None:
            by_name[method.name] = Training(method, method.noun, method.recipe, method.training)
        for name, further in method.further_recipes.items():
            by_name[name] = Training(method, *further)
    return by_name


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
    names: list[str] = []
    for method in single:
        others = (other for other in single if other.complements_copies and other is not method)
        names += [f"{method.name}{COMBINING}{other.name}" for other in others]
        names.append(method.name)
    return names


def own_layers_method() -> Method:
    """The method that drafts with layers of the target's own checkpoint."""
    return next(method for method in built_in_methods() if method.in_target_checkpoint)


def parts_of(name: str) -> tuple[str, ...]:
    """The methods that a name combines, without aliases: "suffix+eagle3" gives both, and "eagle3" itself alone."""
    aliases = _aliases()
    return tuple(aliases.get(part, part) for part in name.split(COMBINING))


def drafting_method(name: str | None) -> Method | None:
    """The method of a name, of a combination the last one; `None` where there is none, or it is unknown."""
    return None if name is None else _all_methods().get(parts_of(name)[-1])


def takes_model(name: str | None) -> bool:
    """`True` for methods that can have a draft model, and for unknown ones."""
    if not isinstance(name, str):
        return True
    methods_named = map(_all_methods().get, parts_of(name))
    return any(method is None or method.takes_model for method in methods_named)


def is_language_model(name: str | None) -> bool:
    """`True` for methods whose drafter is a whole language model."""
    return (method := drafting_method(name)) is not None and method.is_language_model


def is_method_name(text: str) -> bool:
    """`True` for the name of a method, or of a combination that has a known part; else it is a path or repo id."""
    are_known = [part in _all_methods() or part in _WITHOUT_MODELS for part in parts_of(text)]
    return are_known[0] if len(are_known) == 1 else any(are_known) and "/" not in text


def names_of_methods() -> list[str]:
    """All names that `spec_method` takes for a single method, aliases included."""
    return [*_all_methods(), *_aliases()]


def resolve_candidate_generator(name: str) -> type:
    """The candidate generator of a method or of a combination of two, imported on first use."""
    parts = (name,) if name in _all_methods() else parts_of(name)
    if len(parts) != 1:
        return _imported(_COMBINED_GENERATOR)(parts)
    if parts[0] not in _all_methods():
        raise _unknown_method(parts[0])
    return _all_methods()[parts[0]].generator_class


def add_method(method: Method) -> None:
    """Adds a method from outside of the package."""
    _all_methods()[method.name] = method


def remove_method(name: str) -> None:
    """Removes a method that was added with `add_method`."""
    method = _all_methods().get(name)
    if method is None or method.is_built_in:
        raise SpecConfigError(f"spec_method='{name}' was not registered.")
    del _all_methods()[name]


# Names that engines have for methods of models that transformers does not have.
_WITHOUT_MODELS = {"pangu_ultra_moe_mtp": "transformers has no model of the type pangu_ultra_moe"}


@cache
def _all_methods() -> dict[str, Method]:
    modules = pkgutil.iter_modules(import_module(_FOLDER).__path__)
    packages = [import_module(f"{_FOLDER}.{module.name}") for module in modules if module.ispkg]
    every = [
        replace(method, folder=package.__name__) for package in packages for method in getattr(package, "METHODS", ())
    ]
    return {method.name: method for method in sorted(every, key=lambda method: -method.preference)}


@cache
def _aliases() -> dict[str, str]:
    return {alias: method.name for method in built_in_methods() for alias in method.aliases}


@cache
def _imported(reference: str) -> Any:
    module_name, _, name = reference.partition(":")
    module = import_module(module_name)
    return getattr(module, name) if name else module


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
