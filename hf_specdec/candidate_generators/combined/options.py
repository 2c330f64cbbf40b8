"""Options of a combination: those of its two methods, under one set of names, and one of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any

from ...drafts.static import MAX_NODES
from ...errors import SpecConfigError
from ...threads import cached_property
from ...validation import Options, hints_of, setting


@dataclass(frozen=True)
class CombinedOptions(Options):
    """Options of a combination. Those of its parts are read from it as if they were its own.

    Args:
        methods (`tuple[str, str]`): Names of the parts.
        retrieval, model (`Any`): The options of the parts.

    Raises:
        SpecConfigError: A value is out of range.
    """

    methods: tuple[str, str]
    retrieval: Any
    model: Any
    retrieval_num_speculative_tokens: int | None = setting(
        None,
        "Most tokens of a retrieved draft; `num_speculative_tokens` is that of the other method. Left "
        "out, the default of the retrieving method.",
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
    """Makes the options of a combination from one set of names, in the place of an options class.

    Args:
        methods (`tuple[str, str]`): Names of the parts.
        retrieval, model (`type`): The options classes of the parts.

    Raises:
        SpecConfigError: Both have an option of one name.
    """

    def __init__(self, methods: tuple[str, str], retrieval: type, model: type):
        self.methods = methods
        self.retrieval = retrieval
        self.model = model
        self.option_fields: tuple[Field[Any], ...] = _fields_of(retrieval, model)
        self._check_names()

    def _check_names(self) -> None:
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
