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
    """Seconds by size."""

    def __init__(self):
        self.sizes: list[int] = []  # those that have been measured, in increasing order
        self.levels: dict[int, float] = {}
        self._last: dict[int, deque[float]] = {}
        self._weights: dict[int, int] = {}  # measurements that a level stands for
        self._times: dict[int, int] = {}  # number of the last measurement of each
        self._num_measurements = 0

    def observe(self, size: int, seconds: float) -> None:
        """Adds a measurement."""
        if size not in self._last:
            self._last[size] = deque(maxlen=LAST_MEASUREMENTS)
            self._weights[size] = 0
            insort(self.sizes, size)
        last = self._last[size]
        if len(last) > 1 and max(last[-1], seconds) * FAR < self.levels[size]:
            # A low outlier is real, a high one is usually a stall: two short ones in a row are believed.
            last.clear()
        is_seldom = self._num_measurements - self._times.get(size, 0) > SELDOM
        self._num_measurements += 1
        self._times[size] = self._num_measurements
        last.append(seconds)
        # The lower median: the first run of a size is often a slow one.
        median = sorted(last)[(len(last) - 1) // 2]
        level = self.levels.get(size, median)
        self._weights[size] += 1
        if is_seldom or len(last) < LAST_MEASUREMENTS or not level / FAR < median < level * FAR:
            self.levels[size] = median
            self._weights[size] = len(last)
        else:
            ratio = min(max(seconds / level, 1 / LARGEST_SURPRISE), LARGEST_SURPRISE)
            self.levels[size] = level * ratio ** max(1 / self._weights[size], LEVEL_PART)

    def knows(self, size: int) -> bool:
        """Tells sizes with enough measurements."""
        return len(self._last.get(size, ())) >= KNOWN

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

    def for_another_call(self) -> TimeTable:
        """A copy in which the sizes are known by few measurements, which newer ones soon outweigh."""
        table = TimeTable()
        for size in self.sizes:
            for _ in range(min(len(self._last[size]), KNOWN)):
                table.observe(size, self.levels[size])
        return table


class Pace:
    """Factor by which everything takes longer than its level: the median of the last measurements.

    It falls at once: a low outlier is real, a high one is usually a stall. Else what is measured when a stall is over
    would be taken for much faster than it is. It begins as if it had been measured: one stall must not set it.
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

    The tables have seconds at a pace of 1, `draft` and `verify` by the number of rows: drafts by depth, verifications
    by nodes with the anchor included, and `reading`, in which the drafter reads text that it was not told of, such as
    the prompts, by tokens of all rows together.
    """

    def __init__(self):
        self.draft: dict[int, TimeTable] = {}
        self.verify: dict[int, TimeTable] = {}
        self.reading: TimeTable = TimeTable()
        self.nodes: dict[int, float] = {}  # of a row's draft, by its depth
        self.pace: Pace = Pace()
        self.draft_pace: Pace = Pace()  # of drafts, on top of the other
        self._draft_levels: dict[tuple[int, int], list[float]] = {}  # of rows and largest depths, until the next draft

    def for_another_call(self) -> LatencyModel:
        """A copy whose measurements count little: the call may have another context, and the machine other work."""
        model = LatencyModel()
        model.draft = {rows: table.for_another_call() for rows, table in self.draft.items()}
        model.verify = {rows: table.for_another_call() for rows, table in self.verify.items()}
        model.reading = self.reading.for_another_call()
        model.nodes = dict(self.nodes)
        model.pace = Pace(self.pace.factor)
        model.draft_pace = Pace(self.draft_pace.factor)
        return model

    @property
    def knows_anything(self) -> bool:
        """True once drafts and verifications with and without drafts have been timed."""
        return bool(self.draft) and any(1 in table.levels for table in self.verify.values())

    def observe_draft(
        self, num_rows: int, depth: int, seconds: float, reading: tuple[int, float] | None = None
    ) -> None:
        """Adds the time of a draft, and before it that of reading so many tokens of all rows (in this time or later,
        when the draft was made)."""
        if reading is not None:
            num_tokens, reading_seconds = reading
            is_known = num_rows in self.draft and depth in self.draft[num_rows].levels
            late = max(seconds - self.draft_seconds(depth, num_rows), 0.0) if is_known else 0.0
            if is_time(reading_seconds + late):
                self.reading.observe(_power_of_two(num_tokens), (reading_seconds + late) / self.pace.factor)
            if is_known:
                return
        if not is_time(seconds):
            return
        table = self.draft.setdefault(num_rows, TimeTable())
        seconds /= self.pace.factor
        if table.knows(depth):
            self.draft_pace.observe(seconds / table.levels[depth])
        table.observe(depth, seconds / self.draft_pace.factor)
        self._draft_levels.clear()

    def observe_verification(self, num_rows: int, num_nodes: int, seconds: float) -> None:
        """Adds the time of a cycle without drafting; nodes of a row, the anchor and padding included."""
        if not is_time(seconds):
            return
        table = self.verify.setdefault(num_rows, TimeTable())
        if table.knows(num_nodes):
            self.pace.observe(seconds / table.levels[num_nodes])
        table.observe(num_nodes, seconds / self.pace.factor)

    def observe_nodes(self, depth: int, num_nodes: int) -> None:
        """Adds a draft of so many nodes a row, before it was cut."""
        nodes = self.nodes.get(depth, num_nodes)
        self.nodes[depth] = nodes + NODES_PART * (num_nodes - nodes)

    def nodes_of_depth(self, depth: int) -> int:
        """Draft nodes of a row; those of a depth that was not seen are in proportion to the nearest that was."""
        nodes = self.nodes.get(depth, depth)
        if depth and self.nodes and depth not in self.nodes:
            nearest = min(self.nodes, key=lambda other: abs(other - depth))
            nodes = max(self.nodes[nearest] * depth / nearest, depth)
        return round(nodes)

    def reading_seconds(self, num_tokens: int) -> float:
        """Seconds in which the drafter would read so many tokens; 0 for none, and as long as nothing was measured.

        Beyond the largest measured size it is that size's time: a slope between a few tokens says nothing of a
        thousand, and the first real reading corrects it.
        """
        if not num_tokens or not self.reading.sizes:
            return 0.0
        return self.pace.factor * self.reading.predict(min(_power_of_two(num_tokens), self.reading.sizes[-1]))

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
        rows = _nearest(self.draft, num_rows)
        if (rows, most) not in self._draft_levels:
            self._draft_levels[rows, most] = _draft_levels(self.draft[rows], most)
        return [self.pace.factor * self.draft_pace.factor * level for level in self._draft_levels[rows, most]]

    def cycle_seconds_up_to(self, most: int, num_rows: int, most_nodes: int | None = None) -> list[float]:
        """Seconds of cycles whose deepest draft has each of the depths from 0 to `most`, trees cut to `most_nodes`."""
        seconds = []
        for depth, drafting in enumerate(self.draft_seconds_up_to(most, num_rows)):
            nodes = self.nodes_of_depth(depth)
            nodes = nodes if most_nodes is None else min(nodes, most_nodes)
            seconds.append(drafting + self.verify_seconds(nodes + 1, num_rows))
        return seconds

    def verify_seconds(self, num_nodes: float, num_rows: int) -> float:
        """Seconds of a verification of so many nodes a row; 1 as long as none was measured."""
        if not self.verify:
            return 1.0
        rows = _nearest(self.verify, num_rows)
        table = self.verify[rows]
        if rows != num_rows:
            # With other numbers of rows: what as many tokens took.
            return self.pace.factor * table.predict(num_nodes * num_rows / rows)
        seconds = self.pace.factor * table.predict(num_nodes)
        if num_nodes < table.sizes[0]:
            # Fewer nodes than were measured take less, as with other numbers of rows.
            others = [rows for rows, table in self.verify.items() if table.sizes[0] <= num_nodes]
            if others:
                other = self.verify[_nearest(others, num_rows)]
                seconds *= min(other.predict(num_nodes) / other.predict(table.sizes[0]), 1.0)
        return seconds

    def fixed_part(self, num_rows: int) -> float:
        """The part of a plain cycle's time that is the same for any number of rows, from 0 to 1."""
        seconds = {rows: table.levels[1] for rows, table in self.verify.items() if table.knows(1)}
        few, many = min(seconds, default=0), max(seconds, default=0)
        if few == many:
            return FIRST_FIXED_PART
        of_a_row = max((seconds[many] - seconds[few]) / (many - few), 0.0)
        fixed = max(seconds[few] - of_a_row * few, 0.0)
        return fixed / (fixed + of_a_row * num_rows)


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
    return 1 << max(num_tokens - 1, 0).bit_length()


def is_time(seconds: float) -> bool:
    """Tells a positive, finite number of seconds."""
    return isfinite(seconds) and seconds > 0
