"""What the calls with one target and one drafter leave to the next call, and the budget of a call's trials."""

from __future__ import annotations

from dataclasses import dataclass, field

from .constants import FIRST_BUDGET, LARGEST_BUDGET, TRIAL_EVERY, TRIAL_SHARE
from .rates import PastRates, PositionRates
from .times import LatencyModel


class TrialBudget:
    """Seconds that trials may cost: earned with every cycle, spent by trials that lose, refilled by those that gain.

    What is not tried is not known. A trial costs its time minus the time in which its tokens would have been made
    otherwise. One whose drafter has to read text first is paid for by as many cycles as that takes, so nothing bounds
    what it may cost beside its share. `saved` is what earlier calls have left; `None` if there were none.
    """

    def __init__(self, saved: float | None):
        self._seconds = saved
        self._num_cycles = 0  # since the last trial

    @property
    def seconds(self) -> float:
        """Seconds that may be spent; 0 if more was."""
        return max(self._seconds or 0.0, 0.0)

    def earn(self, cycle_seconds: float, plain_seconds: float, reading_seconds: float, num_cycles: int = 1) -> None:
        """Adds the share of equal cycles, given the seconds of one without drafts and of reading what is unread."""
        if self._seconds is None:
            self._seconds = FIRST_BUDGET * plain_seconds
        most = LARGEST_BUDGET * plain_seconds + reading_seconds
        self._seconds = min(self._seconds + TRIAL_SHARE * num_cycles * cycle_seconds, most)
        self._num_cycles += num_cycles

    def pays(self, price: float) -> bool:
        """`True` if a trial that costs so many seconds may be made."""
        return self._seconds is not None and price <= self._seconds

    @property
    def is_due(self) -> bool:
        """Tells if there is something to spend, and the last trial is some time ago."""
        return self.seconds > 0 and self._num_cycles >= TRIAL_EVERY

    def begin(self) -> None:
        """Begins a trial."""
        self._num_cycles = 0

    def spend(self, seconds: float) -> None:
        """Takes what a trial has cost, or adds what it has gained, if that is negative."""
        self._seconds = (self._seconds or 0.0) - seconds


@dataclass
class ControlProfile:
    """Costs and acceptance that earlier calls with one target and one drafter on one device have found."""

    latency: LatencyModel = field(default_factory=LatencyModel)
    accepted: PastRates = field(default_factory=PastRates)
    drafted: PastRates = field(default_factory=PastRates)
    budget: float = 0.0  # seconds that trials may cost, saved up by earlier calls
    rating_factor: float = 1.0  # accepted over expected tokens of rated drafts, see `control.sizes`

    def learn(
        self, latency: LatencyModel, budget: TrialBudget, accepted: PositionRates, drafted: PositionRates | None = None
    ) -> None:
        """Takes in the findings of a call."""
        self.latency = latency
        self.budget = budget.seconds
        self.accepted = self.accepted.with_call(accepted.rates)
        if drafted is not None:
            self.drafted = self.drafted.with_call(drafted.rates)
