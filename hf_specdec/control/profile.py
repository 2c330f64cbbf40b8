"""Knowledge that the calls with one target and one drafter leave to the next call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from sys import float_info
from typing import Any

from ..errors import SpecConfigError, shown
from ..validation import is_number
from .acceptance import PastRates, PositionRates
from .budget import TrialBudget
from .constants import KNOWN, WINDOW
from .latency import LatencyModel, TimeTable, is_time


@dataclass
class ControlProfile:
    """Costs and acceptance that earlier calls with one target and one drafter on one device have found.

    Attributes:
        latency (`LatencyModel`): Costs.
        accepted, drafted (`PastRates`): Rates by position.
        budget (`float`): Seconds that trials may cost, saved up by earlier calls.
        rating_factor (`float`): Accepted over expected tokens of draft trees, see [`~control.tree_size`].
    """

    latency: LatencyModel = field(default_factory=LatencyModel)
    accepted: PastRates = field(default_factory=PastRates)
    drafted: PastRates = field(default_factory=PastRates)
    budget: float = 0.0
    rating_factor: float = 1.0

    def learn(
        self, latency: LatencyModel, budget: TrialBudget, accepted: PositionRates, drafted: PositionRates | None = None
    ) -> None:
        """Takes in the findings of a call."""
        self.latency, self.budget = latency, budget.seconds
        self.accepted = self.accepted.with_call(accepted.rates)
        if drafted is not None:
            self.drafted = self.drafted.with_call(drafted.rates)

    def to_dict(self) -> dict[str, Any]:
        """Returns all as plain values, for JSON: seconds at the present pace."""
        latency, pace = self.latency, self.latency.pace.factor
        return {
            "draft_seconds": _seconds_by_rows(latency.draft, pace * latency.draft_pace.factor),
            "verify_seconds": _seconds_by_rows(latency.verify, pace),
            "reading_seconds": _seconds_by_size(latency.reading, pace),
            "accepted": list(self.accepted.means),
            "accepted_weights": list(self.accepted.weights),
            "drafted": list(self.drafted.means),
            "drafted_weights": list(self.drafted.weights),
            "rating_factor": self.rating_factor,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ControlProfile:
        """The profile of `to_dict`.

        Raises:
            SpecConfigError: It is not what `to_dict` writes.
        """
        factor = values.get("rating_factor", 1.0)
        if not _are_numbers([factor]):
            raise SpecConfigError(f"`rating_factor` of a profile must be a number of at least 0, got {shown(factor)}.")
        latency = LatencyModel()
        try:
            for name, tables in (("draft_seconds", latency.draft), ("verify_seconds", latency.verify)):
                for rows, seconds in values[name].items():
                    if seconds:
                        tables[_size(rows, least=1)] = _table(seconds)
            latency.reading = _table(values["reading_seconds"])
        except (KeyError, AttributeError, TypeError) as error:
            raise SpecConfigError(
                "A latency profile holds `draft_seconds` and `verify_seconds`, each {rows: {size: seconds}}, and "
                f"`reading_seconds`, {{tokens: seconds}}, got {shown(values)}. Measure it again."
            ) from error
        accepted, drafted = _rates("accepted", values), _rates("drafted", values)
        return cls(latency, accepted, drafted, rating_factor=float(factor))


def _seconds_by_size(table: TimeTable, pace: float) -> dict[str, float]:
    return {str(size): table.levels[size] * pace for size in table.sizes}


def _seconds_by_rows(tables: Mapping[int, TimeTable], pace: float) -> dict[str, dict[str, float]]:
    return {str(rows): _seconds_by_size(table, pace) for rows, table in sorted(tables.items())}


def _table(seconds: Mapping[str, Any]) -> TimeTable:
    """A table of seconds by size, all of which are known."""
    table = TimeTable()
    for size, value in seconds.items():
        if not is_number(value) or not is_time(value):
            raise SpecConfigError(f"Times of a latency profile are positive numbers of seconds, got {shown(value)}.")
        for _ in range(KNOWN):
            table.observe(_size(size), float(value))
    return table


def _size(text: Any, least: int = 0) -> int:
    if not (str(text).isdecimal() and int(text) >= least):
        raise SpecConfigError(f"Sizes of a latency profile are integers of at least {least}, got {shown(text)}.")
    return int(text)


def _rates(name: str, values: Mapping[str, Any]) -> PastRates:
    means = values.get(name)
    if not _are_numbers(means, most=1.0):
        raise SpecConfigError(f"`{name}` of a profile must be a list of rates from 0 to 1, got {shown(means)}.")
    weights = values.get(f"{name}_weights", [WINDOW] * len(means))
    if not _are_numbers(weights) or len(weights) != len(means):
        raise SpecConfigError(
            f"`{name}_weights` of a profile must be a list of {len(means)} numbers of at least 0, got "
            f"{shown(weights)}."
        )
    return PastRates(list(map(float, means)), list(map(float, weights)))


def _are_numbers(values: Any, most: float = float_info.max) -> bool:
    """Tells a list of finite numbers from 0 to `most`."""
    return isinstance(values, list) and all(is_number(value) and 0 <= value <= most for value in values)
