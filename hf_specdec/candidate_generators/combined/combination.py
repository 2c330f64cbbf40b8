"""The candidate generator of a pair of methods, and their options under one set of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from functools import cache
from typing import Any

from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...method import COMBINING, NO_DRAFTS, resolve_candidate_generator
from ...settings.checks import Options, hints_of, setting
from ...threads import cached_property
from ..base import CandidateGenerator
from .generator import Combination, CombinedCandidateGenerator, LedCandidateGenerator


@dataclass(frozen=True)
class CombinedOptions(Options):
    """Options of a combination. Those of its parts are read from it as if they were its own."""

    methods: tuple[str, str]
    retrieval: Any
    model: Any
    retrieval_num_speculative_tokens: int | None = setting(
        None,
        "Most tokens of a retrieved draft; `num_speculative_tokens` is that of the other method. Default: that of the "
        "retrieving method.",
        least=1,
        most=MAX_NODES,
        published=True,
    )

    def __getattr__(self, name: str) -> Any:
        # Also asked for while an instance is being unpickled, when it has no parts yet.
        for part in (vars(self).get("retrieval"), vars(self).get("model")):
            if not name.startswith("_") and hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(f"The options of '{'+'.join(vars(self).get('methods', ()))}' have no `{name}`.")

    @property
    def option_fields(self) -> tuple[Field[Any], ...]:
        """The fields of all options."""
        return _fields_of(self.retrieval, self.model)


_OWN_FIELD = CombinedOptions.__dataclass_fields__["retrieval_num_speculative_tokens"]


def _fields_of(retrieval: Any, model: Any) -> tuple[Field[Any], ...]:
    """The fields of two options classes or objects, and the one of combinations."""
    # Both may be of one class.
    return tuple(dict.fromkeys((*fields(model), *fields(retrieval), _OWN_FIELD)))


class CombinedOptionsClass:
    """Makes the options of a combination from one set of names, in the place of an options class."""

    def __init__(self, methods: tuple[str, str], retrieval: type, model: type):
        self.methods = methods
        self.retrieval = retrieval
        self.model = model
        self.option_fields: tuple[Field[Any], ...] = _fields_of(retrieval, model)
        seen: set[str] = set()
        for item in self.option_fields:
            names = {item.name, item.metadata.get("key", item.name)}
            if names & seen:
                raise SpecConfigError(
                    f"method='{'+'.join(self.methods)}': both methods have an option `{sorted(names & seen)[0]}`, and "
                    "whose is meant could not be said. Rename the option of one, or use one of the methods alone."
                )
            seen |= names

    @cached_property
    def type_hints(self) -> Mapping[str, Any]:
        """The type of each option, by its field's name."""
        return {**hints_of(CombinedOptions), **hints_of(self.retrieval), **hints_of(self.model)}

    def __call__(self, **values: Any) -> CombinedOptions:
        retrieval, model = (
            owner(**{item.name: values[item.name] for item in fields(owner) if item.name in values})
            for owner in (self.retrieval, self.model)
        )
        return CombinedOptions(self.methods, retrieval, model, values.get(_OWN_FIELD.name))


def combination(methods: tuple[str, ...]) -> type[Combination]:
    """The candidate generator of two methods; those that cannot be combined are refused."""
    return _combination(methods, tuple(map(resolve_candidate_generator, methods)))


@cache
def _combination(methods: tuple[str, ...], parts: tuple[type[CandidateGenerator], ...]) -> type[Combination]:
    if NO_DRAFTS in methods:
        raise SpecConfigError(
            f"method='{COMBINING.join(methods)}': '{NO_DRAFTS}' drafts nothing beside another method. Leave it out."
        )
    is_led = len(parts) == 2 and parts[0].leads and parts[1].continues_leads
    if not is_led:
        _check_parts(methods, parts)
    kind = LedCandidateGenerator if is_led else CombinedCandidateGenerator
    loaded_by = [part.loaded_by for part in parts]
    attributes = {
        "parts": parts,
        "options_class": CombinedOptionsClass(methods, *(part.options_class for part in parts)),
        "default_num_speculative_tokens": parts[1].default_num_speculative_tokens,
        "most_speculative_tokens": parts[1].most_speculative_tokens,
        "loaded_by": None if None in loaded_by else tuple(dict.fromkeys(sum(loaded_by, ()))),
    }
    return type(kind.__name__, (kind,), attributes)


def _check_parts(methods: tuple[str, ...], parts: tuple[type[CandidateGenerator], ...]) -> None:
    retrieves = [part.estimates_acceptance for part in parts]
    if retrieves == [True, False]:
        return
    name = COMBINING.join(methods)
    if retrieves == [False, True]:
        problem = f"names the retrieving one last. Write '{methods[1]}+{methods[0]}'"
    elif len(parts) == 2:
        kind = "retrieve" if retrieves[0] else "draft everywhere"
        problem = f"names {'one method twice' if methods[0] == methods[1] else f'two that {kind}'}"
    else:
        problem = f"names {len(parts)}"
    raise SpecConfigError(
        f"method='{name}': a combination has two methods, one that retrieves (ngram, suffix) and one that drafts "
        f"everywhere, in this order, and this one {problem}. An example is 'suffix+eagle3'. Before any other method "
        "'grammar' can stand."
    )
