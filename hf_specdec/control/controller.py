"""The speculation length of each cycle: that with the most expected tokens per second, plain decoding included.

    value(k) = tokens(k) / E[T_draft(W) + T_verify(nodes(W))]

For one row tokens(k) = 1 + S_1 + ... + S_k, where S_i is the probability that its token i is accepted. W <= k is how
deep the deepest draft of the batch gets. The probabilities come from [`~control.acceptance`], the times from
[`~control.latency`]. k = 0 is plain decoding: nothing is drafted, and one token a row is committed in T_verify(1).
[`batch_tokens`] values the tokens of a batch whose rows end at different times.

What is not tried is not known, so other lengths are tried now and then: those that may well be better than they are
known to be, and those whose last trial is long ago. A trial has a price: its time minus the time in which its tokens
would have been made otherwise. Trials are paid from a budget of one part in a hundred of all time, which bounds what
they can cost; a trial that gains refills it, so that success is followed up at once.

Pure Python, some 0.1 ms a cycle for one row; no tensor, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, mul

from .acceptance import AcceptanceModel
from .batch import batch_tokens
from .outcome import RowOutcome, lengths_note
from .profile import ControlProfile
from .tree_size import TreeSize


# Another length must promise so much more to be taken. Drafts must promise so much more than plain decoding, or there
# are none: a difference that is smaller cannot be told from noise.
_HYSTERESIS = 1.02
_LEAST_GAIN = 1.015

# Part of all time that trials may cost. In times of a plain cycle: what they may cost before anything was earned, and
# the most that can be saved up beside what the drafter's reading takes.
_TRIAL_SHARE = 0.01
_FIRST_BUDGET = 4.0
_LARGEST_BUDGET = 8.0

# Cycles between two plans, with drafts and without, and at least between two trials.
_PLAN_EVERY = 4
_PLAIN_PLAN_EVERY = 8
_TRIAL_EVERY = 8

# With nothing known about times, the first cycles draft the usual length and nothing. The first run of a size is often
# a slow one, so both are measured again unless drafting is clearly slower.
_CLEARLY_SLOWER = 2.0

# A trial that takes so much less time than expected is repeated: a low outlier is real, a high one is usually a stall.
_CHEAP = 0.7

# Positions that are reached so seldom end the search.
_NEGLIGIBLE = 1e-3


@dataclass
class _Plan:
    """Expected tokens and seconds of a cycle by limit, for some rows.

    Attributes:
        rows (`list[int]`): Rows of the call.
        tokens (`list[float]`): What a cycle is worth, in tokens, see [`batch_tokens`].
        seconds (`list[float]`): What it takes.
        row_tokens (`list[list[float]]`): Tokens of each row, for each limit.
        costs (`list[float]`): What a cycle takes whose deepest draft has each of the depths.
    """

    rows: list[int]
    tokens: list[float]
    seconds: list[float]
    row_tokens: list[list[float]]
    costs: list[float]

    def value(self, limit: int) -> float:
        """Tokens per second."""
        return self.tokens[limit] / self.seconds[limit]

    @property
    def best(self) -> int:
        return max(range(len(self.tokens)), key=self.value)

    def token_value(self, limit: int, other: int) -> float:
        """Value of an additional token of one of two limits over the other, on average."""
        one, two = (min(depth, len(self.tokens) - 1) for depth in (limit, other))
        more = sum(self.row_tokens[one]) - sum(self.row_tokens[two])
        return (self.tokens[one] - self.tokens[two]) / more if more else 1.0


class SpeculationController:
    """Chooses the limits of one call's cycles.

    The loop asks for `limits` and reports what came of them with `observe`, in turn.

    Args:
        most (`int`): K, the largest limit.
        num_rows (`int`): Rows of the call.
        profile (`ControlProfile`, *optional*): What earlier calls have found; learns from this one when it is closed.
        usual (`int`, *optional*): The length to begin with where nothing is known; K if not given.
        most_tokens (`Callable[[int], int]`, *optional*): A rule of the user's that stands above: active rows -> the
            largest limit.

    Attributes:
        length (`int`): The limit that is used outside of trials.
        tree_size (`TreeSize`, *optional*): Chooses how many nodes of trees are verified.
        num_cycles, num_plain_cycles (`int`): All, and those without drafts.
        sum_limits (`int`): Of the limits of all cycles.
    """

    def __init__(
        self,
        most: int,
        num_rows: int,
        profile: ControlProfile | None = None,
        usual: int | None = None,
        most_tokens: Callable[[int], int] | None = None,
    ):
        self.profile = profile = profile or ControlProfile()
        self.most = most
        self.usual = most if usual is None else min(usual, most)
        self._most_tokens = most_tokens
        self._cap = most  # of the present number of rows
        self.latency = profile.latency.for_another_call()
        self.acceptance = AcceptanceModel(most, num_rows, profile.accepted, profile.drafted)
        self.tree_size: TreeSize | None = TreeSize(self.latency, profile.rating_factor)
        self.length = 0  # the chosen one
        self.num_cycles = self.num_plain_cycles = self.sum_limits = 0
        self._nodes: dict[int, float] = {}
        self._plan: _Plan | None = None
        self._row_limits: dict[int, int] = {}
        self._is_first_call = not self.latency.knows_anything
        self._first_cycles = [self.usual, 0, self.usual, 0] if self._is_first_call else []
        self._budget: float | None = None if self._is_first_call else profile.budget  # seconds
        self._num_unread, self._left = 0, None
        self._trial: int | None = None  # the limit that is being tried
        self._follow_up: int | None = None  # a trial that has just paid
        self._last_trial = 0
        self._last_used = [0] * (most + 1)

    # Choosing

    def limits(self, rows: list[int], num_unread: int = 0, left: Sequence[float] | None = None) -> list[int]:
        """Depth that each of the active rows may draft in this cycle; 0 for all: decode plainly.

        Args:
            rows (`list[int]`): Rows of the call.
            num_unread (`int`): Tokens, of all rows together, that the drafter would read before it drafts.
            left (`Sequence[float]`, *optional*): Tokens that each of these rows may still get, if that is known.
        """
        self._num_unread, self._left = num_unread, left
        if self._most_tokens is not None:
            self._cap = min(self._most_tokens(len(rows)), self.most)
        limit = min(self._choose(rows), self._cap)
        self.sum_limits += limit
        self.num_plain_cycles += limit == 0
        self._last_used[limit] = self.num_cycles
        self.num_cycles += 1
        if limit == self.length and self._row_limits and self._trial is None:
            return [self._row_limits[row] for row in rows]
        return [limit] * len(rows)

    @property
    def why_none(self) -> str:
        """Reason why the last cycle had no drafts, if it had none."""
        return "does_not_pay" if self._cap else "batch_size"

    def _choose(self, rows: list[int]) -> int:
        self._trial = None
        if self._cap == 0:
            return 0
        if self._first_cycles and not self._is_clearly_slower(rows):
            return self._first_cycles.pop(0)
        if not self.latency.knows_anything:
            return 0 if self.latency.draft else self.usual
        every = _PLAN_EVERY if self.length else _PLAIN_PLAN_EVERY
        is_new = self._plan is None or self._plan.rows != rows or self.num_cycles % every == 0
        if is_new:
            self._make_plan(rows)
        self._trial = self._affordable_trial(is_new)
        return self.length if self._trial is None else self._trial

    def _is_clearly_slower(self, rows: list[int]) -> bool:
        """True if the usual length has been measured once and is far slower than plain decoding."""
        if len(self._first_cycles) != 2 or not self.latency.knows_anything:
            return False
        plan = self._expect(rows)[0]
        is_slower = _CLEARLY_SLOWER * plan.value(min(self.usual, len(plan.tokens) - 1)) < plan.value(0)
        if is_slower:
            self._first_cycles = []
        return is_slower

    def _make_plan(self, rows: list[int]) -> None:
        self._plan, accepted, depths = self._expect(rows)
        self.length = self._best_length()
        if self._budget is None:
            self._budget = _FIRST_BUDGET * self._plan.seconds[0]
        self._row_limits = {}
        if len(rows) > 1 and self.length > 0:
            limits = self._limits_of_rows(accepted, depths)
            self._row_limits = dict(zip(rows, limits))

    def _best_length(self) -> int:
        """The length that promises most, or the present one if that promises hardly less."""
        plan, length = self._plan, self.length
        best = plan.best
        if length is not None and length < len(plan.tokens) and plan.value(best) <= _HYSTERESIS * plan.value(length):
            best = length
        return best if plan.value(best) > _LEAST_GAIN * plan.value(0) else 0

    def _expect(self, rows: list[int]) -> tuple[_Plan, list[list[float]], list[list[float]]]:
        """Plan, and for each row the probabilities that a token is accepted and that a draft gets so deep."""
        accepted, depths = self._probabilities(rows)
        num_rows = len(rows)
        left, fixed = self._left or [1.0] * num_rows, self.latency.fixed_part(num_rows)
        row_tokens = [[1.0] * num_rows]
        squares = [0.0] * num_rows  # expected, of the accepted tokens of each row
        tokens, seconds = [batch_tokens(row_tokens[0], left, fixed)], [self._plain_seconds(num_rows)]
        costs = self._costs(num_rows)
        spent, deeper = 0.0, 1.0
        # What the drafter must read first is spread over the tokens that are left.
        reading = self.latency.reading_seconds(self._num_unread) / sum(self._left) if self._left else 0.0
        for position in range(self._cap):
            gains = [probs[position] for probs in accepted]
            if sum(gains) < _NEGLIGIBLE * num_rows:
                break
            row_tokens.append(list(map(add, row_tokens[-1], gains)))
            reached = _at_least_one(probs[position] for probs in depths)
            spent += (deeper - reached) * costs[position]
            deeper = reached
            squares = [square + (2 * position + 1) * gain for square, gain in zip(squares, gains)]
            tokens.append(batch_tokens(row_tokens[-1], left, fixed, squares if self._left else None))
            seconds.append(spent + deeper * costs[position + 1] + reading * tokens[-1])
        return _Plan(list(rows), tokens, seconds, row_tokens, costs), accepted, depths

    def _probabilities(self, rows: list[int]) -> tuple[list[list[float]], list[list[float]]]:
        accepted, drafted = self.acceptance.expected()
        if not self.acceptance.rows:
            return [list(accumulate(accepted, mul))], [list(accumulate(drafted, mul))]
        pairs = [self.acceptance.expected_of_row(row, accepted, drafted) for row in rows]
        return (
            [list(accumulate(own, mul)) for own, _ in pairs],
            [list(accumulate(own, mul)) for _, own in pairs],
        )

    def _plain_seconds(self, num_rows: int) -> float:
        return self.latency.verify_seconds(1, num_rows)

    def _costs(self, num_rows: int) -> list[float]:
        """Seconds of a cycle whose deepest draft has each of the depths up to the largest."""
        return [
            draft + self.latency.verify_seconds(self._nodes_of_depth(depth) + 1, num_rows)
            for depth, draft in enumerate(self.latency.draft_seconds_up_to(self._cap, num_rows))
        ]

    def _cycle_seconds(self, depth: int, num_rows: int) -> float:
        """Seconds of a cycle whose deepest draft has this depth."""
        nodes = self._nodes_of_depth(depth)
        return self.latency.draft_seconds(depth, num_rows) + self.latency.verify_seconds(nodes + 1, num_rows)

    def _nodes_of_depth(self, depth: int) -> int:
        """Draft nodes of a row; those of a depth that was not seen are in proportion to the nearest that was."""
        known = self._nodes.get(depth)
        if known is None and self._nodes and depth > 0:
            nearest = min(self._nodes, key=lambda seen: abs(seen - depth))
            known = max(self._nodes[nearest] * depth / nearest, depth)
        nodes = depth if known is None else round(known)
        cut = None if self.tree_size is None else self.tree_size.size
        return nodes if cut is None else min(nodes, cut)

    def _limits_of_rows(self, accepted: list[list[float]], depths: list[list[float]]) -> list[int]:
        """The limit of each row, at most `length`.

        A verification is as wide as its widest row, so a token is free for a row where others go as deep anyway. One
        that makes the cycle longer must bring more tokens than the batch makes in that time.
        """
        num_rows, rate = len(accepted), self._plan.value(self.length)
        worth = self._plan.token_value(self.length, 0)
        costs = self._plan.costs
        limits = []
        for row in range(num_rows):
            best, limit, gain = 0.0, 0, 0.0
            for position in range(self.length):
                others = _at_least_one(depths[other][position] for other in range(num_rows) if other != row)
                longer = (1 - others) * depths[row][position] * (costs[position + 1] - costs[position])
                gain += worth * accepted[row][position] - rate * longer
                if gain >= best:
                    best, limit = gain, position + 1
            limits.append(limit)
        return limits

    # Trials

    def _affordable_trial(self, is_new_plan: bool) -> int | None:
        """A length to try instead of the chosen one, if there is one that the budget pays for."""
        plan, again = self._plan, self._follow_up
        self._follow_up = None
        assert self._budget is not None, "a plan without a budget"
        most = _LARGEST_BUDGET * plan.seconds[0] + self._reading_price
        self._budget = min(self._budget + _TRIAL_SHARE * plan.seconds[self.length], most)
        if again is not None and again != self.length and self._price(again) <= self._budget:
            return again
        if not is_new_plan or self._budget <= 0 or self.num_cycles - self._last_trial < _TRIAL_EVERY:
            return None
        chosen = self._optimistic_length(self._budget)
        if chosen is None:
            chosen = self._longest_unused(self._budget)
        if chosen is not None:
            self._last_trial = self.num_cycles
        return chosen

    def _optimistic_length(self, budget: float) -> int | None:
        """The best length if acceptance were as good as it might be, of those that the budget pays for."""
        plan = self._plan
        best, limit, tokens = plan.value(self.length), None, 1.0
        furthest = min(max(2 * self.length, self.usual), self._cap)
        for depth, probability in enumerate(accumulate(self.acceptance.optimistic()[:furthest], mul), start=1):
            tokens += probability
            if probability < _NEGLIGIBLE:
                break
            # If the rows were alike. What their tokens are worth depends on what each still gets.
            planned = min(depth, len(plan.tokens) - 1)
            worth = plan.tokens[planned] / sum(plan.row_tokens[planned])
            value = tokens * len(plan.rows) * worth / self._expected_seconds(depth)
            if depth != self.length and value > best and self._price(depth) <= budget:
                best, limit = value, depth
        return limit

    def _longest_unused(self, budget: float) -> int | None:
        """Affordable length that has waited longest in relation to its price."""
        least = 0.02 * self._plan.seconds[0]
        chosen, best = None, 0.0
        for limit in self._neighbours():
            price = self._price(limit)
            waited = (self.num_cycles - self._last_used[limit]) / (price + least)
            if price <= budget and waited > best:
                chosen, best = limit, waited
        return chosen

    def _neighbours(self) -> set[int]:
        """Lengths that are worth knowing: none, those around the chosen one, and doubled ones."""
        length = self.length
        limits = {0, 1, length - 1, length + 1, 2 * length, self.usual}
        return {limit for limit in limits if 0 <= limit <= self._cap and limit != length}

    def _price(self, limit: int) -> float:
        """Expected seconds that a trial costs."""
        plan = self._plan
        tokens = plan.tokens[min(limit, len(plan.tokens) - 1)]
        reading = self._reading_price if limit else 0.0
        return max(self._expected_seconds(limit) - tokens / plan.value(self.length), 0.0) + reading

    @property
    def _reading_price(self) -> float:
        """Seconds in which the drafter would read text that it need not know otherwise."""
        return 0.0 if self.length else self.latency.reading_seconds(self._num_unread)

    def _expected_seconds(self, limit: int) -> float:
        """Seconds of a cycle with this limit; where drafts seldom get so deep, of one that does."""
        plan = self._plan
        return plan.seconds[limit] if limit < len(plan.seconds) else plan.costs[limit]

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
        """Takes in a cycle.

        Args:
            outcomes (`list[RowOutcome]`): The active rows.
            num_nodes (`int`): Draft nodes of a row, padding included.
            draft_seconds (`float`, *optional*): Of the drafter in the cycle; `None` if it was not asked.
            verify_seconds (`float`): The rest of the cycle.
            reading (`tuple[int, float]`, *optional*): Tokens of all rows that the drafter was told of first, and the
                seconds which that took. It may have read them in the time of the draft only.
            num_drafted (`int`, *optional*): Draft nodes of a row before the tree was cut, if it was.
        """
        num_rows, deepest = len(outcomes), max(outcome.depth for outcome in outcomes)
        self.latency.observe_verification(num_rows, num_nodes + 1, verify_seconds)
        if draft_seconds is not None:
            self._observe_draft(num_rows, deepest, draft_seconds, reading)
        if deepest > 0:
            drafted = num_nodes if num_drafted is None else num_drafted
            known = self._nodes.get(deepest, drafted)
            self._nodes[deepest] = known + 0.2 * (drafted - known)
        for outcome in outcomes:
            if outcome.limit > 0:
                is_cut = outcome.num_committed <= outcome.num_accepted
                self.acceptance.observe(outcome.row, outcome.limit, outcome.depth, outcome.num_accepted, is_cut)
        if self._trial is not None:
            self._pay(self._trial, outcomes, deepest, (draft_seconds or 0.0) + verify_seconds)

    def _observe_draft(
        self, num_rows: int, depth: int, draft_seconds: float, reading: tuple[int, float] | None
    ) -> None:
        late = 0.0
        if reading is None or not self._knows_draft(num_rows, depth):
            self.latency.observe_draft(num_rows, depth, draft_seconds)
        else:
            late = max(draft_seconds - self.latency.draft_seconds(depth, num_rows), 0.0)
        if reading is not None:
            num_tokens, seconds = reading
            self.latency.observe_reading(num_tokens, seconds + late)

    def _knows_draft(self, num_rows: int, depth: int) -> bool:
        table = self.latency.draft.get(num_rows)
        return table is not None and depth in table.levels

    def _pay(self, trial: int, outcomes: list[RowOutcome], deepest: int, measured: float) -> None:
        """Takes from the budget what the trial has cost, or gives it what it has gained.

        It is compared with what the chosen length would have made of the same drafts: where a text is easy, every
        length gains, and it shall not be the trial's merit.
        """
        expected = self._cycle_seconds(deepest, len(outcomes)) if trial else self._plain_seconds(len(outcomes))
        # Noise is not the trial's, nor a stall of the machine.
        seconds = measured if measured < _CHEAP * expected else expected
        plan = self._plan
        more = sum(outcome.num_committed - self._tokens_instead(outcome, trial) for outcome in outcomes)
        gained = more * plan.token_value(trial, self.length)
        loss = seconds - self._seconds_instead(outcomes, trial) - gained / plan.value(self.length)
        assert self._budget is not None, "a trial without a budget"
        self._budget -= loss + (self._reading_price if trial else 0.0)
        if loss < 0 or seconds < expected:
            self._follow_up = trial
            self._plan = None

    def _seconds_instead(self, outcomes: list[RowOutcome], trial: int) -> float:
        """Expected seconds of the chosen length where the drafts of the trial got so deep."""
        if self.length == 0 or self.length > max(outcome.depth for outcome in outcomes) >= trial:
            # How deep the drafts would have become is not known.
            return self._plan.seconds[self.length]
        limits = self._row_limits
        deepest = max(min(outcome.depth, limits.get(outcome.row, self.length)) for outcome in outcomes)
        return self._cycle_seconds(deepest, len(outcomes))

    def _tokens_instead(self, outcome: RowOutcome, trial: int) -> float:
        """Expected tokens of the chosen length where the trial had this outcome."""
        accepted, length = outcome.num_accepted, self._row_limits.get(outcome.row, self.length)
        if accepted < trial or length <= accepted:
            return min(accepted, length) + 1.0
        # Everything was accepted; how much of more would have been is not known.
        tokens, num_rows = list(map(sum, self._plan.row_tokens)), len(self._plan.rows)
        further = tokens[min(length, len(tokens) - 1)] - tokens[min(accepted, len(tokens) - 1)]
        reached = tokens[accepted] - tokens[accepted - 1] if 0 < accepted < len(tokens) else num_rows
        return accepted + 1 + further / max(reached, _NEGLIGIBLE)

    def close(self) -> str:
        """Ends the call: its profile learns what was found. Returns a line for the call's statistics."""
        self.profile_into(self.profile)
        return lengths_note("adaptive length", self.num_cycles, self.num_plain_cycles, self.sum_limits)

    def profile_into(self, profile: ControlProfile) -> None:
        """Leaves what was found to the next call."""
        if self.num_cycles:
            profile.learn(self.latency, self.acceptance, self._budget or 0.0)
            if self.tree_size is not None:
                profile.rating_factor = self.tree_size.rating_factor


def _at_least_one(probabilities: Iterable[float]) -> float:
    """Probability that at least one of several independent events happens."""
    none = 1.0
    for probability in probabilities:
        none *= 1 - probability
    return 1 - none
