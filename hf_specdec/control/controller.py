"""The speculation length of each cycle: that with the most expected tokens per second, plain decoding included.

[`~control.plan`] values the lengths. What is not tried is not known, so other ones are tried now and then: those that
may well be better than they are known to be, and those whose last trial is long ago. A trial has a price: its time
minus the time in which its tokens would have been made otherwise. Trials are paid from a budget of one part in a
hundred of all time ([`~control.profile`]), which bounds what they can cost; a trial that gains refills it, so that
success is followed up at once.

Pure Python, some 0.1 ms a cycle for one row; no tensor, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from .constants import (
    CHEAP,
    CLEARLY_SLOWER,
    HYSTERESIS,
    LEAST_GAIN,
    NEGLIGIBLE,
    PLAIN_OBSERVE_EVERY,
    PLAIN_PLAN_EVERY,
    PLAN_EVERY,
    PLAN_ROWS,
)
from .plan import Plan, make_plan
from .profile import ControlProfile, TrialBudget
from .rates import AcceptanceModel, RowOutcome
from .sizes import DraftSizes
from .times import LatencyModel


@dataclass(frozen=True)
class Choice:
    """Limits of a cycle that is yet to be observed."""

    limit: int  # the largest one of a row
    length: int = 0  # the limit outside of trials, then
    row_limits: dict[int, int] = field(default_factory=dict)  # of rows that have their own
    is_trial: bool = False  # the limit is tried instead of that length
    plan: Plan | None = None  # from which it was chosen
    reading_price: float = 0.0  # seconds that a trial takes beside it, for reading


class SpeculationController:
    """Chooses the limits of one call's cycles, at most `most`.

    The loop asks for `limits` and reports what came of them with `observe`, in turn. It may also ask for those of the
    next cycle before it knows what came of the last one, which then counts a cycle later.

    `profile` is what earlier calls have found; it learns from this one when it is closed. `usual` is the length to
    begin with where nothing is known. `most_tokens` is a rule of the user's that stands above: active rows -> the
    largest limit.
    """

    kind = "adaptive length"

    def __init__(
        self,
        most: int,
        num_rows: int,
        profile: ControlProfile | None = None,
        usual: int | None = None,
        most_tokens: Callable[[int], int] | None = None,
    ):
        self.profile: ControlProfile = profile or ControlProfile()
        self.most = most
        self.usual: int = most if usual is None else min(usual, most)
        self._most_tokens = most_tokens
        self._cap = most  # of the present number of rows
        self.latency: LatencyModel = self.profile.latency.for_another_call()
        self.acceptance: AcceptanceModel = AcceptanceModel(most, num_rows, self.profile.accepted, self.profile.drafted)
        self.sizes: DraftSizes | None = DraftSizes(self.latency, self.profile.rating_factor)
        self.length: int = 0  # the limit that is used outside of trials
        self.num_cycles: int = 0  # for which limits were asked
        # The last limits are those of a plan without drafts that still stands. Such cycles need not be observed, and
        # are not where the limits of the next one may have been asked for.
        self.is_resting: bool = False
        self._num_rested = 0  # cycles since the last one that was observed
        self._plan: Plan | None = None
        self._row_limits: dict[int, int] = {}
        self._num_unread = 0
        self._left: Sequence[float] | None = None
        is_first_call = not self.latency.knows_anything
        # The first run of a size is often a slow one, so both are measured again unless drafting is clearly slower.
        self._first_cycles = [self.usual, 0, self.usual, 0] if is_first_call else []
        self._budget = TrialBudget(None if is_first_call else self.profile.budget)
        self._chosen: deque[Choice] = deque()  # of cycles to be observed
        self._follow_up: int | None = None  # a trial that has just paid
        self._last_used = [0] * (most + 1)

    # Choosing

    def limits(self, rows: list[int], num_unread: int = 0, left: Sequence[float] | None = None) -> list[int]:
        """Depth that each of the active rows may draft in this cycle; 0 for all: decode plainly.

        `num_unread` are the tokens, of all rows together, that the drafter would read before it drafts, and `left`
        those that each of these rows may still get, if that is known.
        """
        self._num_unread = num_unread
        self._left = left
        if self._most_tokens is not None:
            self._cap = min(self._most_tokens(len(rows)), self.most)
        choice = self._choose(rows)
        if not self.is_resting:
            self._chosen.append(choice)
        self._last_used[choice.limit] = self.num_cycles
        self.num_cycles += 1
        if choice.limit == choice.length and not choice.is_trial:
            return [choice.row_limits.get(row, choice.limit) for row in rows]
        return [choice.limit] * len(rows)

    def take_back(self) -> None:
        """Forgets the last limits: other rows than theirs have come to be in the cycle."""
        if not self.is_resting:
            self._chosen.pop()

    @property
    def why_none(self) -> str:
        """Reason why the last cycle had no drafts, if it had none."""
        return "does_not_pay" if self._cap else "batch_size"

    def _choose(self, rows: list[int]) -> Choice:
        # True if nothing is drafted, and neither a new plan nor a measurement is due.
        self.is_resting = (
            not self.length
            and self._plan is not None
            and self._plan.rows == rows
            and not self._first_cycles
            and self._follow_up is None
            and self._cap > 0
            and self.num_cycles % PLAIN_OBSERVE_EVERY != 0
        )
        self._num_rested += self.is_resting
        if self._cap == 0 or self.is_resting:
            return Choice(0)
        if len(self._first_cycles) == 2 and self._is_clearly_slower(rows):
            self._first_cycles = []
        if self._first_cycles:
            return Choice(min(self._first_cycles.pop(0), self._cap), self.length)
        if not self.latency.knows_anything:
            return Choice(0 if self.latency.draft else min(self.usual, self._cap), self.length)
        every = (PLAN_EVERY if self.length else PLAIN_PLAN_EVERY) * (1 + len(rows) // PLAN_ROWS)
        is_new = self._plan is None or self._plan.rows != rows or self.num_cycles % every == 0
        if is_new:
            self._plan = self._planned(rows)
            self.length = self._best_length(self._plan)
            self._row_limits = self._plan.row_limits(self.length) if self.length and len(rows) > 1 else {}
        trial = self._affordable_trial(self._plan, is_new)
        limit = min(self.length if trial is None else trial, self._cap)
        return Choice(limit, self.length, self._row_limits, trial is not None, self._plan, self._reading_price)

    def _planned(self, rows: list[int]) -> Plan:
        return make_plan(self.latency, self.acceptance, rows, self._costs(rows), self._num_unread, self._left)

    def _costs(self, rows: list[int]) -> list[float]:
        most_nodes = None if self.sizes is None else self.sizes.trees.size
        return self.latency.cycle_seconds_up_to(self._cap, len(rows), most_nodes)

    def _is_clearly_slower(self, rows: list[int]) -> bool:
        """True if the usual length has been measured once and is far slower than plain decoding."""
        if not self.latency.knows_anything:
            return False
        plan = self._planned(rows)
        return CLEARLY_SLOWER * plan.value(plan.within(self.usual)) < plan.value(0)

    def _best_length(self, plan: Plan) -> int:
        """The length that promises most, or the present one if that promises hardly less."""
        best = plan.best
        if self.length < len(plan.tokens) and plan.value(best) <= HYSTERESIS * plan.value(self.length):
            best = self.length
        return best if plan.value(best) > LEAST_GAIN * plan.value(0) else 0

    # Trials

    def _affordable_trial(self, plan: Plan, is_new_plan: bool) -> int | None:
        """A length to try instead of the chosen one, if there is one that the budget pays for."""
        again, self._follow_up = self._follow_up, None
        cycles, self._num_rested = 1 + self._num_rested, 0
        self._budget.earn(plan.seconds[self.length], plan.seconds[0], self._reading_price, cycles)
        # Rows that have ended since may allow less.
        if again is not None and again <= self._cap and again != self.length and self._is_affordable(plan, again):
            return again
        if not is_new_plan or not self._budget.is_due:
            return None
        trial = self._optimistic_length(plan)
        if trial is None:
            trial = self._longest_unused(plan)
        if trial is not None:
            self._budget.begin()
        return trial

    def _optimistic_length(self, plan: Plan) -> int | None:
        """The best affordable length if acceptance were as good as it might be, where that is not the chosen one."""
        best, limit, tokens = plan.value(self.length), None, 1.0
        furthest = min(max(2 * self.length, self.usual), self._cap)
        for depth, probability in enumerate(accumulate(self.acceptance.optimistic()[:furthest], mul), start=1):
            tokens += probability
            if probability < NEGLIGIBLE:
                break
            # If the rows were alike. The value of their tokens depends on what each still gets.
            planned = plan.within(depth)
            token_value = plan.tokens[planned] / sum(plan.row_tokens[planned])
            value = tokens * len(plan.rows) * token_value / plan.seconds_of(depth)
            if depth != self.length and value > best and self._is_affordable(plan, depth):
                best, limit = value, depth
        return limit

    def _longest_unused(self, plan: Plan) -> int | None:
        """Affordable length that has waited longest in relation to its price, of those that are worth knowing: none,
        those around the chosen one, and doubled ones."""
        least = 0.02 * plan.seconds[0]
        limits = {0, 1, self.length - 1, self.length + 1, 2 * self.length, self.usual} - {self.length}
        waited = {
            limit: (self.num_cycles - self._last_used[limit]) / (self._price(plan, limit) + least)
            for limit in limits
            if 0 <= limit <= self._cap and self._is_affordable(plan, limit)
        }
        return max(waited, key=waited.__getitem__, default=None)

    def _is_affordable(self, plan: Plan, limit: int) -> bool:
        return self._budget.pays(self._price(plan, limit))

    def _price(self, plan: Plan, limit: int) -> float:
        """Expected seconds that a trial costs."""
        instead = plan.tokens[plan.within(limit)] / plan.value(self.length)
        return max(plan.seconds_of(limit) - instead, 0.0) + (self._reading_price if limit else 0.0)

    @property
    def _reading_price(self) -> float:
        """Seconds in which the drafter would read text that it need not know otherwise."""
        return 0.0 if self.length else self.latency.reading_seconds(self._num_unread)

    # Learning

    def observe(
        self,
        outcomes: list[RowOutcome],
        num_nodes: int,
        draft_seconds: float | None,
        verify_seconds: float,
        reading: tuple[int, float] | None = None,
        num_drafted: int | None = None,
    ) -> None:
        """Takes in a cycle of the active rows.

        `num_nodes` are the draft nodes of a row, padding included, and `num_drafted` those before the tree was cut, if
        it was. `draft_seconds` are the drafter's, `None` if it was not asked, without those of `reading`, the tokens
        of all rows that it was told of first and the seconds of that. `verify_seconds` are the rest of the cycle.
        """
        num_rows, deepest = len(outcomes), max(outcome.depth for outcome in outcomes)
        self.latency.observe_verification(num_rows, num_nodes + 1, verify_seconds)
        if draft_seconds is not None:
            self.latency.observe_draft(num_rows, deepest, draft_seconds, reading)
        if deepest > 0:
            self.latency.observe_nodes(deepest, num_nodes if num_drafted is None else num_drafted)
        for outcome in outcomes:
            if outcome.limit > 0:
                self.acceptance.observe(outcome)
        choice = self._chosen.popleft() if self._chosen else None
        if choice is not None and choice.is_trial:
            self._pay(choice, outcomes, deepest, (draft_seconds or 0.0) + verify_seconds)

    def _pay(self, choice: Choice, outcomes: list[RowOutcome], deepest: int, measured: float) -> None:
        """Takes from the budget what the trial has cost, or gives it what it has gained.

        It is compared with what the chosen length would have made of the same drafts: where a text is easy, every
        length gains, and it shall not be the trial's merit.
        """
        plan, trial = choice.plan, choice.limit
        assert plan is not None, "a trial without a plan"
        costs = self._costs(plan.rows)
        expected = costs[deepest] if trial else self.latency.verify_seconds(1, len(outcomes))
        # Noise is not the trial's, nor a stall of the machine.
        seconds = measured if measured < CHEAP * expected else expected
        more = sum(outcome.num_committed - self._tokens_instead(choice, plan, outcome) for outcome in outcomes)
        gained = more * plan.token_value(trial, choice.length)
        loss = seconds - self._seconds_instead(choice, plan, costs, outcomes) - gained / plan.value(choice.length)
        self._budget.spend(loss + (choice.reading_price if trial else 0.0))
        if loss < 0 or seconds < expected:
            self._follow_up = trial
            self._plan = None

    @staticmethod
    def _seconds_instead(choice: Choice, plan: Plan, costs: list[float], outcomes: list[RowOutcome]) -> float:
        """Expected seconds of the chosen length where the drafts of the trial got so deep."""
        length, limits = choice.length, choice.row_limits
        if length == 0 or length > max(outcome.depth for outcome in outcomes) >= choice.limit:
            # How deep the drafts would have become is not known.
            return plan.seconds[length]
        return costs[max(min(outcome.depth, limits.get(outcome.row, length)) for outcome in outcomes)]

    @staticmethod
    def _tokens_instead(choice: Choice, plan: Plan, outcome: RowOutcome) -> float:
        """Expected tokens of the chosen length where the trial had this outcome."""
        accepted, length = outcome.num_accepted, choice.row_limits.get(outcome.row, choice.length)
        if accepted < choice.limit or length <= accepted:
            return min(accepted, length) + 1.0
        # Everything was accepted; how much of more would have been is not known.
        tokens = list(map(sum, plan.row_tokens))
        further = tokens[plan.within(length)] - tokens[plan.within(accepted)]
        reached = tokens[accepted] - tokens[accepted - 1] if 0 < accepted < len(tokens) else len(plan.rows)
        return accepted + 1 + further / max(reached, NEGLIGIBLE)

    def join(self, rows: list[int]) -> None:
        """Forgets what is known of the texts that these rows had before."""
        self.acceptance.restart(self.acceptance.rows.keys() & set(rows))
        self._plan = None

    def close(self) -> None:
        """Ends the call: its profile learns what was found."""
        if self.num_cycles:
            self.profile.learn(self.latency, self._budget, self.acceptance.accepted, self.acceptance.drafted)
            if self.sizes is not None:
                self.profile.rating_factor = self.sizes.rating.value
