"""Costs of a cycle: seconds of a draft by its depth, and of a verification by its nodes, from measured cycles.

    T(cycle) = T_draft(depth, rows) + T_verify(nodes, rows)

Both are tables, not formulas. On a CPU the time of a verification is no smooth function of its nodes: in float32 two
or three nodes cost more than eight, and from there it has plateaus. A table with interpolation follows that. Medians
and clipped steps keep it from being moved by a machine that stalls now and then.

A context that grows and a machine that gets busy slow all sizes down alike. That is one factor, the pace: the median
of how much longer the last verifications took than their sizes' levels. With it, sizes that were measured at different
times stay comparable. Drafts have a pace of their own on top of it.

Nothing here waits for a device: seconds come in, seconds come out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection
from math import inf, isfinite, log

from .constants import (
    FAR,
    FIRST_FIXED_PART,
    KNOWN,
    LARGEST_PACE,
    LARGEST_SURPRISE,
    LAST_MEASUREMENTS,
    LEVEL_PART,
    NODES_PART,
    SELDOM,
)


class TimeTable:
    """Seconds by size.

    Attributes:
        sizes (`list[int]`): Sizes that have been measured, in increasing order.
        levels (`dict[int, float]`): The seconds of each.
    """

    def __init__(self):
        self.sizes: list[int] = []
        self.levels: dict[int, float] = {}
        self._measured: dict[int, deque[float]] = {}
        self._last: dict[int, int] = {}
        self._weights: dict[int, int] = {}  # measurements that a level stands for
        self._num_measurements = 0

    def observe(self, size: int, seconds: float) -> None:
        """Adds a measurement."""
        if size not in self._measured:
            self._measured[size] = deque(maxlen=LAST_MEASUREMENTS)
            insort(self.sizes, size)
        measured = self._measured[size]
        if len(measured) > 1 and max(measured[-1], seconds) * FAR < self.levels[size]:
            # A low outlier is real, a high one is usually a stall: two short ones in a row are believed.
            measured.clear()
            measured.append(seconds)
        is_seldom = self._num_measurements - self._last.get(size, 0) > SELDOM
        self._num_measurements += 1
        self._last[size] = self._num_measurements
        measured.append(seconds)
        # The lower median: the first run of a size is often a slow one.
        median = sorted(measured)[(len(measured) - 1) // 2]
        level = self.levels.get(size, median)
        if is_seldom or len(measured) < LAST_MEASUREMENTS or not level / FAR < median < level * FAR:
            self.levels[size], self._weights[size] = median, len(measured)
            return
        ratio = min(max(seconds / level, 1 / LARGEST_SURPRISE), LARGEST_SURPRISE)
        self._weights[size] += 1
        self.levels[size] = level * ratio ** max(1 / self._weights[size], LEVEL_PART)

    def knows(self, size: int) -> bool:
        """Tells sizes with enough measurements."""
        return len(self._measured.get(size, ())) >= KNOWN

    def predict(self, size: float) -> float:
        """Seconds of a size: measured, between its neighbours, or beyond the largest size on the mean slope.

        Below the smallest size nothing is cheaper. At least one size must have been measured.
        """
        level = self.levels.get(size)
        if level is None:
            return self._interpolated(size, self.sizes)
        if self.knows(size):
            return level
        # One stall of the machine must not keep a size from ever being tried again.
        known = [other for other in self.sizes if self.knows(other)]
        return min(level, LARGEST_SURPRISE * self._interpolated(size, known)) if known else level

    def _interpolated(self, size: float, sizes: list[int]) -> float:
        index = bisect_left(sizes, size)
        if index == 0:
            return self.levels[sizes[0]]
        is_inside = index < len(sizes)
        low, high = (sizes[index - 1], sizes[index]) if is_inside else (sizes[0], sizes[-1])
        below, above = self.levels[low], self.levels[high]
        slope = (above - below) / (high - low) if low < high else 0.0
        return below + slope * (size - low) if is_inside else above + max(slope, 0.0) * (size - high)

    def aged(self) -> TimeTable:
        """A copy in which the sizes are known by few measurements, which newer ones soon outweigh."""
        table = TimeTable()
        for size in self.sizes:
            for _ in range(min(len(self._measured[size]), KNOWN)):
                table.observe(size, self.levels[size])
        return table


class Pace:
    """Factor by which everything takes longer than its level: the median of the last measurements.

    It falls at once: a low outlier is real, a high one is usually a stall. Else what is measured when a stall is over
    would be taken for much faster than it is.

    Args:
        factor (`float`): What it begins with, as if it had been measured: one stall must not set it.

    Attributes:
        factor (`float`): The pace.
    """

    def __init__(self, factor: float = 1.0):
        self.factor: float = factor
        self._last: deque[float] = deque([factor] * LAST_MEASUREMENTS, maxlen=LAST_MEASUREMENTS)

    def observe(self, factor: float) -> None:
        factor = min(max(factor, 1 / LARGEST_PACE), LARGEST_PACE)
        self._last.append(factor)
        self.factor = min(sorted(self._last)[len(self._last) // 2], FAR * factor)


class LatencyModel:
    """Costs of a drafter and a target on one device, learnt from the cycles of generate() calls.

    Attributes:
        draft, verify (`dict[int, TimeTable]`): For each number of rows the seconds at a pace of 1: of drafts by
            depth, and of verifications by nodes, the anchor included.
        pace (`Pace`): Of everything.
        draft_pace (`Pace`): Of drafts, on top of that.
        reading (`TimeTable`): Seconds in which the drafter reads text that it was not told of, such as the prompts, by
            tokens of all rows together.
        nodes (`dict[int, float]`): Nodes of a row's draft, by its depth.
    """

    def __init__(self):
        self.draft: dict[int, TimeTable] = {}
        self.verify: dict[int, TimeTable] = {}
        self.pace: Pace = Pace()
        self.draft_pace: Pace = Pace()
        self.reading: TimeTable = TimeTable()
        self.nodes: dict[int, float] = {}
        self._draft_levels: dict[tuple[int, int], list[float]] = {}  # of rows and largest depths, until the next draft

    def for_another_call(self) -> LatencyModel:
        """A copy whose measurements count little: the call may have another context, and the machine other work."""
        model = LatencyModel()
        model.draft = {rows: table.aged() for rows, table in self.draft.items()}
        model.verify = {rows: table.aged() for rows, table in self.verify.items()}
        model.pace, model.draft_pace = Pace(self.pace.factor), Pace(self.draft_pace.factor)
        model.reading, model.nodes = self.reading.aged(), dict(self.nodes)
        return model

    def observe_draft(
        self, num_rows: int, depth: int, seconds: float, reading: tuple[int, float] | None = None
    ) -> None:
        """Adds the time of a draft.

        Args:
            num_rows (`int`): Rows that were drafted for.
            depth (`int`): Depth of the deepest draft, 0 where nothing was found to draft.
            seconds (`float`): Everything that the drafter did in the cycle, `reading` excluded.
            reading (`tuple[int, float]`, *optional*): Tokens of all rows that the drafter was told of first, and the
                seconds that this took. It may have read them in the time of the draft only.
        """
        if reading is not None:
            num_tokens, reading_seconds = reading
            if num_rows in self.draft and depth in self.draft[num_rows].levels:
                late = max(seconds - self.draft_seconds(depth, num_rows), 0.0)
                self.observe_reading(num_tokens, reading_seconds + late)
                return
            self.observe_reading(num_tokens, reading_seconds)
        if not is_time(seconds):
            return
        table = self.draft.setdefault(num_rows, TimeTable())
        seconds /= self.pace.factor
        if table.knows(depth):
            self.draft_pace.observe(seconds / table.levels[depth])
        table.observe(depth, seconds / self.draft_pace.factor)
        self._draft_levels.clear()

    def observe_verification(self, num_rows: int, num_nodes: int, seconds: float) -> None:
        """Adds the time of a verification.

        Args:
            num_rows (`int`): Active rows.
            num_nodes (`int`): Nodes of a row, the anchor and padding included.
            seconds (`float`): Of the cycle without drafting.
        """
        if not is_time(seconds):
            return
        table = self.verify.setdefault(num_rows, TimeTable())
        if table.knows(num_nodes):
            self.pace.observe(seconds / table.levels[num_nodes])
        table.observe(num_nodes, seconds / self.pace.factor)

    def observe_nodes(self, depth: int, num_nodes: int) -> None:
        """Adds a draft of so many nodes a row, before it was cut."""
        known = self.nodes.get(depth, num_nodes)
        self.nodes[depth] = known + NODES_PART * (num_nodes - known)

    def nodes_of_depth(self, depth: int) -> int:
        """Draft nodes of a row; those of a depth that was not seen are in proportion to the nearest that was."""
        known = self.nodes.get(depth, depth)
        if depth and self.nodes and depth not in self.nodes:
            nearest = min(self.nodes, key=lambda seen: abs(seen - depth))
            known = max(self.nodes[nearest] * depth / nearest, depth)
        return round(known)

    def observe_reading(self, num_tokens: int, seconds: float) -> None:
        """Adds the time in which the drafter has read text.

        Args:
            num_tokens (`int`): Tokens of all rows together.
            seconds (`float`): What that took.
        """
        if is_time(seconds):
            self.reading.observe(_power_of_two(num_tokens), seconds / self.pace.factor)

    def reading_seconds(self, num_tokens: int) -> float:
        """Seconds in which the drafter would read so many tokens; 0 for none, and as long as nothing was measured.

        More than was ever measured is taken for as cheap: what it takes is known once it was read, and a slope
        between a few tokens says nothing of a thousand.
        """
        if not num_tokens or not self.reading.sizes:
            return 0.0
        size = min(_power_of_two(num_tokens), self.reading.sizes[-1])
        return self.pace.factor * self.reading.levels.get(size, self.reading.predict(size))

    def draft_seconds(self, depth: int, num_rows: int) -> float:
        """Seconds of a draft of this depth; 0 as long as none was measured.

        A draft takes no longer than a deeper one, and no longer in proportion than a shallower one. In front of and
        beyond what was measured, the time is in proportion to the depth.
        """
        return self.draft_seconds_up_to(depth, num_rows)[depth]

    def draft_seconds_up_to(self, most: int, num_rows: int) -> list[float]:
        """Seconds of drafts of all depths from 0 to `most`."""
        if not self.draft:
            return [0.0] * (most + 1)
        rows, pace = _nearest(self.draft, num_rows), self.pace.factor * self.draft_pace.factor
        if (rows, most) not in self._draft_levels:
            self._draft_levels[rows, most] = _draft_levels(self.draft[rows], most)
        return [pace * level for level in self._draft_levels[rows, most]]

    def cycle_seconds_up_to(self, most: int, num_rows: int, most_nodes: int | None = None) -> list[float]:
        """Seconds of cycles whose deepest draft has each of the depths from 0 to `most`.

        Args:
            most (`int`): The largest depth.
            num_rows (`int`): Active rows.
            most_nodes (`int`, *optional*): Nodes of a row to which trees are cut.
        """
        seconds = []
        for depth, drafting in enumerate(self.draft_seconds_up_to(most, num_rows)):
            nodes = self.nodes_of_depth(depth)
            nodes = nodes if most_nodes is None else min(nodes, most_nodes)
            seconds.append(drafting + self.verify_seconds(nodes + 1, num_rows))
        return seconds

    def verify_seconds(self, num_nodes: float, num_rows: int) -> float:
        """Seconds of a verification of so many nodes a row; 1 as long as none was measured."""
        own = self.verify.get(num_rows)
        if own is not None:
            return self.pace.factor * self._verify_level(own, num_nodes, num_rows)
        if not self.verify:
            return 1.0
        # With other numbers of rows: what as many tokens took.
        others = _nearest(self.verify, num_rows)
        return self.pace.factor * self.verify[others].predict(num_nodes * num_rows / others)

    def _verify_level(self, own: TimeTable, num_nodes: float, num_rows: int) -> float:
        """Seconds for a number of rows. Fewer nodes than were measured take less, as for other numbers of rows."""
        level, smallest = own.predict(num_nodes), own.sizes[0]
        if num_nodes >= smallest:
            return level
        others = [rows for rows, table in self.verify.items() if table.sizes[0] <= num_nodes]
        if not others:
            return level
        table = self.verify[_nearest(others, num_rows)]
        return level * min(table.predict(num_nodes) / table.predict(smallest), 1.0)

    def fixed_part(self, num_rows: int) -> float:
        """The part of a plain cycle's time that is the same for any number of rows, from 0 to 1."""
        seconds = {rows: table.levels[1] for rows, table in self.verify.items() if table.knows(1)}
        few, many = min(seconds, default=0), max(seconds, default=0)
        if few == many:
            return FIRST_FIXED_PART
        of_a_row = max((seconds[many] - seconds[few]) / (many - few), 0.0)
        fixed = max(seconds[few] - of_a_row * few, 0.0)
        return fixed / (fixed + of_a_row * num_rows)

    @property
    def knows_anything(self) -> bool:
        """True once drafts and verifications with and without drafts have been timed."""
        return bool(self.draft) and any(1 in table.levels for table in self.verify.values())


def _draft_levels(table: TimeTable, most: int) -> list[float]:
    """Seconds of drafts of depths 0 to `most`; single measurements may be old, or of a cold or busy machine."""
    first, last = table.sizes[0], table.sizes[-1]
    depths = sorted({*table.sizes, *range(first, min(last, most) + 1)})
    levels = {depth: table.predict(depth) for depth in depths}
    # No longer than a deeper one,
    for depth, deeper in zip(depths[-2::-1], depths[:0:-1]):
        levels[depth] = min(levels[depth], levels[deeper])
    # and no longer in proportion than a shallower one.
    of_a_token = inf
    for depth in filter(None, depths):
        levels[depth] = min(levels[depth], of_a_token * depth)
        of_a_token = min(of_a_token, table.levels.get(depth, inf) / depth)
    shallower = [levels[first] * depth / first for depth in range(min(first, most + 1))]
    deeper_ones = [levels[last] * depth / max(last, 1) for depth in range(last + 1, most + 1)]
    return shallower + [levels[depth] for depth in range(first, min(last, most) + 1)] + deeper_ones


def _nearest(numbers: Collection[int], num_rows: int) -> int:
    """The one of some numbers of rows that is this number or comes nearest to it, by their ratio."""
    return num_rows if num_rows in numbers else min(numbers, key=lambda rows: abs(log(rows / num_rows)))


def _power_of_two(num_tokens: int) -> int:
    """The size that stands for so many tokens."""
    return 1 << max(num_tokens - 1, 0).bit_length()


def is_time(seconds: float) -> bool:
    """Tells a positive, finite number of seconds."""
    return isfinite(seconds) and seconds > 0
