"""Knowledge that the calls with one target and one drafter leave to the next call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from sys import float_info
from typing import Any

from ..errors import SpecConfigError, shown
from .acceptance import PastRates, PositionRates
from .budget import TrialBudget
from .constants import WINDOW
from .latency import LatencyModel


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
        """Everything as plain values, for JSON."""
        return {
            **self.latency.to_dict(),
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
        latency, accepted, drafted = (
            LatencyModel.from_dict(values),
            _rates("accepted", values),
            _rates("drafted", values),
        )
        return cls(latency, accepted, drafted, rating_factor=float(factor))


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
    return isinstance(values, list) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most for value in values
    )
