"""The speculation length of each cycle: that with the most expected tokens per second, plain decoding included.

    value(k) = tokens(k) / E[T_draft(W) + T_verify(nodes(W))]

For one row tokens(k) = 1 + S_1 + ... + S_k, where S_i is the probability that its token i is accepted. W <= k is how
deep the deepest draft of the batch gets. The probabilities come from [`~control.rates`], the times from
[`~control.times`]. k = 0 is plain decoding: nothing is drafted, and one token a row is committed in T_verify(1).

A row that gets r tokens a cycle leaves the batch after n = left / r cycles. Of a cycle's time a part f is the same for
any number of rows, and is paid until the slowest row has ended; the rest falls with the rows. So the call takes as
long as f max(n) + (1 - f) mean(n) cycles of all rows, and each of them has the value

    tokens(k) = sum(left) / (f max(n) + (1 - f) mean(n))

What is not tried is not known, so other lengths are tried now and then: those that may well be better than they are
known to be, and those whose last trial is long ago. A trial has a price: its time minus the time in which its tokens
would have been made otherwise. Trials are paid from a budget of one part in a hundred of all time, which bounds what
they can cost; a trial that gains refills it, so that success is followed up at once.

Pure Python, some 0.1 ms a cycle for one row; no tensor, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import add, mul, truediv
from typing import Any

from .constants import (
    CHEAP,
    CLEARLY_SLOWER,
    FIRST_BUDGET,
    FIRST_RATE,
    FIXED_PART,
    HYSTERESIS,
    LARGEST_BUDGET,
    LEAST_GAIN,
    NEGLIGIBLE,
    PLAIN_OBSERVE_EVERY,
    PLAIN_PLAN_EVERY,
    PLAN_EVERY,
    PLAN_ROWS,
    TRIAL_EVERY,
    TRIAL_SHARE,
)
from .rates import AcceptanceModel, PositionRates, Rate, RowOutcome, with_call
from .sizes import DraftSizes
from .times import LatencyModel


@dataclass(frozen=True)
class Choice:
    """Limits of a cycle that is yet to be observed."""

    limit: int  # the largest one of a row
    row_limits: dict[int, int] = field(default_factory=dict)  # of rows that have their own
    plan: Plan | None = None  # of a trial: the plan that it is measured by,
    length: int = 0  # the length in whose place it stands,
    reading: float = 0.0  # and the seconds that it takes besides, for reading


class SpeculationController:
    """Chooses the limits of one call's cycles, at most `most`.

    The loop asks for `limits` and reports what came of them with `observe`, in turn. It may also ask for those of the
    next cycle before it knows what came of the last one, which then counts a cycle later.

    `profile` is what earlier calls have found; it learns from this one when it is closed. `usual` is the length to
    begin with where nothing is known. `most_tokens` is a rule of the user's that stands above: active rows -> the
    largest limit. `draft_cost` is the time of a draft token in plain cycles, as far as it is known before anything has
    been measured.
    """

    kind = "adaptive length"

    def __init__(
        self,
        most: int,
        num_rows: int,
        profile: ControlProfile | None = None,
        usual: int | None = None,
        most_tokens: Callable[[int], int] | None = None,
        draft_cost: float = 0.0,
    ):
        self.profile: ControlProfile = profile or ControlProfile()
        self.most = most
        self.usual: int = most if usual is None else min(usual, most)
        self._most_tokens = most_tokens
        self._cap = most  # of the present number of rows
        self.latency: LatencyModel = self.profile.latency.for_another_call()
        self.acceptance: AcceptanceModel = AcceptanceModel(most, num_rows, self.profile.accepted, self.profile.drafted)
        self.sizes: DraftSizes = DraftSizes(self.latency, self.profile.rating_factor)
        self.length: int = 0  # the limit that is used outside of trials
        self.num_cycles: int = 0  # for which limits were asked
        # The last limits are those of a plan without drafts that still stands. Such cycles need not be observed, and
        # are not where the limits of the next one may have been asked for.
        self.is_resting: bool = False
        self._num_rested = 0  # cycles since the last one that was observed
        self._plan: Plan | None = None
        self._row_limits: dict[int, int] = {}
        self._knows_costs: bool = self.latency.knows_anything
        is_first_call = not self._knows_costs
        self._first_cycles: list[int] = []
        if is_first_call:
            # Where no length pays at the first expectation, one token tells enough. Else it and none are measured
            # twice, since the first run of a size is often a slow one, unless it is clearly slower.
            self.usual = first_length(self.usual, draft_cost)
            self._first_cycles = [self.usual, 0, self.usual, 0] if self.usual else [0, 1, 0]
        self._budget = TrialBudget(self.profile.budget, is_first_call)
        self._chosen: deque[Choice] = deque()  # of cycles to be observed
        self._follow_up: int | None = None  # a trial that has just paid
        self._last_used = [0] * (most + 1)

    # Choosing

    def limits(self, rows: list[int], num_unread: int = 0, left: Sequence[float] | None = None) -> list[int]:
        """Depth that each of the active rows may draft in this cycle; 0 for all: decode plainly.

        `num_unread` are the tokens, of all rows together, that the drafter would read before it drafts, and `left`
        those that each of these rows may still get, if that is known.
        """
        if self._most_tokens is not None:
            self._cap = min(self._most_tokens(len(rows)), self.most)
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
        choice = Choice(0)
        if self.is_resting:
            self._num_rested += 1
        else:
            if self._cap:
                choice = self._choose(rows, num_unread, left)
            self._chosen.append(choice)
        self._last_used[choice.limit] = self.num_cycles
        self.num_cycles += 1
        return [choice.row_limits.get(row, choice.limit) for row in rows]

    def take_back(self) -> None:
        """Forgets the last limits: other rows than theirs have come to be in the cycle."""
        if not self.is_resting:
            self._chosen.pop()

    @property
    def why_none(self) -> str:
        """Reason why the last cycle had no drafts, if it had none."""
        return "does_not_pay" if self._cap else "batch_size"

    def _choose(self, rows: list[int], num_unread: int, left: Sequence[float] | None) -> Choice:
        """Chooses for a cycle that is to be observed, and may draft."""
        self._knows_costs = self._knows_costs or self.latency.knows_anything
        if not self._knows_costs:
            is_measured = not self._first_cycles and self.latency.draft
            usual = self._first_cycles.pop(0) if self._first_cycles else 0 if is_measured else self.usual
            return Choice(min(usual, self._cap))
        plan = self._plan
        every = (PLAN_EVERY if self.length else PLAIN_PLAN_EVERY) * (1 + len(rows) // PLAN_ROWS)
        is_new = plan is None or plan.rows != rows or self.num_cycles % every == 0 or bool(self._first_cycles)
        if is_new:
            plan = Plan(self.latency, self.acceptance, rows, self._cap, self.sizes.trees.size, num_unread, left)
        if self._first_cycles:
            # Measured once: far slower than plain decoding?
            usual = min(self.usual, len(plan.values) - 1)
            if len(self._first_cycles) != 2 or CLEARLY_SLOWER * plan.values[usual] >= plan.values[0]:
                return Choice(min(self._first_cycles.pop(0), self._cap))
            self._first_cycles = []
        if is_new:
            self._plan = plan
            values = plan.values
            best = max(range(len(values)), key=values.__getitem__)
            # The present length stays if another one promises hardly more.
            if self.length < len(values) and values[best] <= HYSTERESIS * values[self.length]:
                best = self.length
            self.length = best if values[best] > LEAST_GAIN * values[0] else 0
            self._row_limits = plan.row_limits(self.length) if self.length and len(rows) > 1 else {}
        # What the drafter need not read otherwise.
        reading = 0.0 if self.length else self.latency.reading_seconds(num_unread)
        trial = self._affordable_trial(plan, is_new, reading)
        if trial is None:
            return Choice(self.length, self._row_limits)
        return Choice(trial, {}, plan, self.length, reading if trial else 0.0)

    def _affordable_trial(self, plan: Plan, is_new_plan: bool, reading: float) -> int | None:
        """A length to try instead of the chosen one, if there is one that the budget pays for."""
        again, self._follow_up = self._follow_up, None
        cycles, self._num_rested = 1 + self._num_rested, 0
        is_due = self._budget.earn(plan.seconds[self.length], plan.seconds[0], reading, cycles) and is_new_plan
        if again is None and not is_due:
            return None
        # By length: the seconds that a trial costs beyond those in which the chosen one makes its tokens.
        prices, tokens_per_second = {}, plan.values[self.length]
        # Rows that have ended since the plan was made may allow less.
        for limit, tokens in enumerate(plan.tokens[: self._cap + 1]):
            price = max(plan.seconds[limit] - tokens / tokens_per_second, 0.0) + (reading if limit else 0.0)
            if price <= self._budget.seconds and limit != self.length:
                prices[limit] = price
        if again in prices:
            return again
        if not is_due:
            return None
        # The best length if acceptance were as good as it might be, for rows that are alike,
        best, trial, tokens = plan.values[self.length], None, 1.0
        furthest = min(max(2 * self.length, self.usual), self._cap)
        for depth, probability in enumerate(accumulate(self.acceptance.optimistic()[:furthest], mul), start=1):
            tokens += probability
            if probability < NEGLIGIBLE:
                break
            value = tokens * len(plan.rows) * plan.tokens[depth] / plan.sums[depth] / plan.seconds[depth]
            if depth in prices and value > best:
                best, trial = value, depth
        if trial is None:
            # or what has waited longest in relation to its price, of lengths that are worth knowing: none, those
            # around the chosen one, and doubled ones.
            limits = {0, 1, self.length - 1, self.length + 1, 2 * self.length, self.usual} & prices.keys()
            least = 0.02 * plan.seconds[0]
            waited = {limit: (self.num_cycles - self._last_used[limit]) / (prices[limit] + least) for limit in limits}
            trial = max(waited, key=waited.__getitem__, default=None)
        if trial is not None:
            self._budget.num_cycles = 0
        return trial

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
        for outcome in outcomes:
            if outcome.limit > 0:
                self.acceptance.observe(outcome)
        num_rows, deepest = len(outcomes), max(outcome.depth for outcome in outcomes)
        self.latency.observe_verification(num_rows, num_nodes + 1, verify_seconds)
        if draft_seconds is not None:
            num_drafted = num_nodes if num_drafted is None else num_drafted
            self.latency.observe_draft(num_rows, deepest, num_drafted, draft_seconds, reading)
        choice = self._chosen.popleft() if self._chosen else None
        if choice is None or choice.plan is None:
            return
        # The trial costs its time without that in which the chosen length makes as many tokens.
        drafting = 0.0 if draft_seconds is None else self.latency.draft_seconds(deepest, num_rows)
        expected = drafting + self.latency.verify_seconds(num_nodes + 1, num_rows)
        measured = (draft_seconds or 0.0) + verify_seconds
        # Noise is not the trial's, nor a stall of the machine.
        seconds = measured if measured < CHEAP * expected else expected
        plan, num_committed = choice.plan, sum(outcome.num_committed for outcome in outcomes)
        tokens = num_committed * plan.tokens[choice.limit] / plan.sums[choice.limit]
        loss = seconds - tokens / plan.values[choice.length]
        self._budget.seconds -= loss + choice.reading
        if loss < 0 or seconds < expected:
            self._follow_up = choice.limit
            self._plan = None

    def join(self, rows: list[int]) -> None:
        """Forgets what is known of the texts that these rows had before."""
        self.acceptance.restart(self.acceptance.rows.keys() & set(rows))
        self._plan = None

    def close(self) -> None:
        """Ends the call: its profile learns what was found."""
        if self.num_cycles:
            self.profile.learn(self.latency, self._budget, self.acceptance.accepted, self.acceptance.drafted)
            self.profile.rating_factor = self.sizes.rating.value


class ScheduledLength:
    """Lengths by the number of active rows, as serving engines have them: a rule of the user's, nothing is measured.

    The loop drops rows that have finished, so the number of rows falls in a call, and the length may rise.
    """

    kind = "length by batch size"
    why_none = "batch_size"
    sizes = None  # trees stay whole
    is_resting = False

    def __init__(self, most_tokens: Callable[[int], int]):
        self.most_tokens = most_tokens

    def limits(self, rows: list[int], num_unread: int = 0, left: Sequence[float] | None = None) -> list[int]:
        """Depth that each of the active rows may draft in this cycle."""
        return [self.most_tokens(len(rows))] * len(rows)

    def take_back(self) -> None: ...

    def join(self, rows: list[int]) -> None: ...

    def observe(self, outcomes: list[RowOutcome], *costs: Any) -> None: ...

    def close(self) -> None: ...


@dataclass
class ControlProfile:
    """Costs and acceptance that earlier calls with one target and one drafter on one device have found."""

    latency: LatencyModel = field(default_factory=LatencyModel)
    accepted: Sequence[Rate] = ()
    drafted: Sequence[Rate] = ()
    budget: float = 0.0  # seconds that trials may cost, saved up by earlier calls
    rating_factor: float = 1.0  # accepted over expected tokens of rated drafts, see `control.sizes`
    # The time of a draft token in plain cycles, before anything was measured; `None` where drafts are no chains whose
    # tokens cost alike.
    draft_cost: float | None = None

    def learn(
        self, latency: LatencyModel, budget: TrialBudget, accepted: PositionRates, drafted: PositionRates | None = None
    ) -> None:
        """Takes in the findings of a call."""
        self.latency = latency
        self.budget = max(budget.seconds, 0.0)
        self.accepted = with_call(self.accepted, accepted.rates)
        if drafted is not None:
            self.drafted = with_call(self.drafted, drafted.rates)


@dataclass
class TrialBudget:
    """Seconds that trials may cost: earned with every cycle, spent by trials that lose, refilled by those that gain.

    A trial whose drafter has to read text first is paid for by as many cycles as that takes, so nothing bounds what it
    may cost beside its share.
    """

    seconds: float = 0.0  # at first what earlier calls have left
    is_first: bool = False  # there were none: it begins with an advance
    num_cycles: int = 0  # since the last trial

    def earn(self, seconds: float, plain_seconds: float, reading_seconds: float, num_cycles: int = 1) -> bool:
        """Adds the share of equal cycles of so many seconds, given those of one without drafts and of reading what is
        unread; returns whether there is something to spend, and the last trial is some time ago.
        """
        if self.is_first:
            self.is_first, self.seconds = False, FIRST_BUDGET * plain_seconds
        most = LARGEST_BUDGET * plain_seconds + reading_seconds
        self.seconds = min(self.seconds + TRIAL_SHARE * num_cycles * seconds, most)
        self.num_cycles += num_cycles
        return self.seconds > 0 and self.num_cycles >= TRIAL_EVERY


class Plan:
    """Expected tokens and seconds of a cycle by limit up to `most`, for some rows, of trees cut to `most_nodes`.

    `num_unread` tokens of all rows together would be read before the draft, and each row may still get so many as are
    `left`, if that is known. Limits whose last position is hardly ever reached have no value.
    """

    def __init__(
        self,
        latency: LatencyModel,
        acceptance: AcceptanceModel,
        rows: list[int],
        most: int,
        most_nodes: int | None = None,
        num_unread: int = 0,
        left: Sequence[float] | None = None,
    ):
        self.rows: list[int] = list(rows)
        num_rows, room = len(rows), left or [1.0] * len(rows)
        costs = [latency.cycle_seconds(depth, num_rows, most_nodes) for depth in range(most + 1)]
        self.costs: list[float] = costs
        # What the drafter must read first is spread over the tokens that are left.
        reading = latency.reading_seconds(num_unread) / sum(left) if left else 0.0
        self.seconds: list[float] = [latency.verify_seconds(1, num_rows)]
        rates_by_position = acceptance.of_rows(rows)
        row_tokens = [1.0] * num_rows
        # Value of a cycle, in tokens, and the tokens of all rows: so any number of these is worth tokens / sums each.
        self.tokens: list[float] = [batch_tokens(row_tokens, room)]
        self.sums: list[float] = [float(num_rows)]
        # By position and row: probabilities that so many tokens are accepted, and that the draft gets so deep.
        self.accepted: list[list[float]] = []
        self.depths: list[list[float]] = []
        spent, deeper = 0.0, 1.0
        gains, reach = [1.0] * num_rows, [1.0] * num_rows
        for position, rates in zip(range(most), rates_by_position):
            gains = [gain * rate for gain, (rate, _) in zip(gains, rates)]
            reach = [probability * rate for probability, (_, rate) in zip(reach, rates)]
            if sum(gains) < NEGLIGIBLE * num_rows:
                break
            row_tokens = list(map(add, row_tokens, gains))
            self.tokens.append(batch_tokens(row_tokens, room))
            self.sums.append(sum(row_tokens))
            self.accepted.append(gains)
            self.depths.append(reach)
            reached = 1 - prod(1 - probability for probability in reach)
            spent += (deeper - reached) * costs[position]
            deeper = reached
            self.seconds.append(spent + deeper * costs[position + 1] + reading * self.tokens[-1])
        self.values: list[float] = list(map(truediv, self.tokens, self.seconds))  # tokens per second
        # Where drafts hardly ever get so deep, a cycle brings no more, and takes as long as one in which they do.
        missing = len(costs) - len(self.tokens)
        self.tokens += [self.tokens[-1]] * missing
        self.sums += [self.sums[-1]] * missing
        self.seconds += costs[len(self.seconds) :]

    def row_limits(self, length: int) -> dict[int, int]:
        """The limit of each row, at most `length`.

        A verification is as wide as its widest row, so a token is free for a row where others go as deep anyway. One
        that makes the cycle longer must bring more tokens than the batch makes in that time.
        """
        more = self.sums[length] - self.sums[0]
        token_value = (self.tokens[length] - self.tokens[0]) / more if more else 1.0
        best, gains, limits = [0.0] * len(self.rows), [0.0] * len(self.rows), [0] * len(self.rows)
        for position in range(length):
            depths, more_seconds = self.depths[position], self.costs[position + 1] - self.costs[position]
            for index, alone in enumerate(_none_of_the_others(depths)):
                longer = alone * depths[index] * more_seconds
                gains[index] += token_value * self.accepted[position][index] - self.values[length] * longer
                if gains[index] >= best[index]:
                    best[index], limits[index] = gains[index], position + 1
        return dict(zip(self.rows, limits))


def first_length(most: int, draft_cost: float) -> int:
    """The length that pays most before anything is known but the time of a draft token, in plain cycles."""
    tokens = accumulate(FIRST_RATE**depth for depth in range(most + 1))
    values = [sum_of_tokens / (1 + draft_cost * length) for length, sum_of_tokens in enumerate(tokens)]
    return max(range(len(values)), key=values.__getitem__)


def batch_tokens(row_tokens: Sequence[float], left: Sequence[float], fixed: float = FIXED_PART) -> float:
    """Value of a cycle of a batch, in tokens: their sum if all rows are equal."""
    if len(row_tokens) == 1:
        return row_tokens[0]
    cycles = list(map(truediv, left, row_tokens))
    return sum(left) / (fixed * max(cycles) + (1 - fixed) * sum(cycles) / len(cycles))


def _none_of_the_others(probabilities: Sequence[float]) -> list[float]:
    """Probability, for each of several independent events, that none of the others happens."""
    nones = [1 - probability for probability in probabilities]
    before = accumulate(nones[:-1], mul, initial=1.0)
    after = list(accumulate(nones[:0:-1], mul, initial=1.0))
    return list(map(mul, before, reversed(after)))
