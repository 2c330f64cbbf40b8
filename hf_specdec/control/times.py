"""Costs of a cycle: seconds of a draft by its depth, and of a verification by its nodes, from measured cycles.

    T(cycle) = T_draft(depth, rows) + T_verify(nodes, rows)

Both are tables, not formulas. On a CPU the time of a verification is no smooth function of its nodes: in float32 two
or three nodes cost more than eight, and from there it has plateaus. A table with interpolation follows that. Medians
keep it from being moved by a machine that stalls now and then.

A context that grows and a machine that gets busy slow all sizes down alike. That is one factor, the pace: the median
of how much longer the last verifications took than their sizes' levels. With it, sizes that were measured at different
times stay comparable.

Nothing here waits for a device: seconds come in, seconds come out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf, log

from .constants import FAR, KNOWN, LARGEST_PACE, LAST_MEASUREMENTS


@dataclass
class TimeTable:
    """Seconds by size: of each the lower median of its last measurements, since a first run is often a slow one."""

    sizes: list[int] = field(default_factory=list)  # those that have been measured, in increasing order
    levels: dict[int, float] = field(default_factory=dict)
    last: dict[int, deque[float]] = field(default_factory=dict)  # measurements

    def observe(self, size: int, seconds: float) -> None:
        """Adds a measurement."""
        if size not in self.last:
            self.last[size] = deque(maxlen=LAST_MEASUREMENTS)
            insort(self.sizes, size)
        last = self.last[size]
        if len(last) > 1 and max(last[-1], seconds) * FAR < self.levels[size]:
            # A low outlier is real, a high one is usually a stall: two short ones in a row are believed.
            last.clear()
        last.append(seconds)
        self.levels[size] = sorted(last)[(len(last) - 1) // 2]

    def predict(self, size: float) -> float:
        """Seconds of a size: measured, between its neighbours, or beyond the largest size on the mean slope.

        Below the smallest size nothing is cheaper. At least one size must have been measured.
        """
        sizes, levels = self.sizes, self.levels
        if size in levels or size < sizes[0]:
            return levels.get(size, levels[sizes[0]])
        index = bisect_left(sizes, size)
        is_inside = index < len(sizes)
        low, high = (sizes[index - 1], sizes[index]) if is_inside else (sizes[0], sizes[-1])
        below, above = levels[low], levels[high]
        slope = (above - below) / (high - low) if low < high else 0.0
        return below + slope * (size - low) if is_inside else above + max(slope, 0.0) * (size - high)

    def for_another_call(self) -> TimeTable:
        """A copy in which the sizes are known by few measurements, which newer ones soon outweigh."""
        counts = {size: min(len(last), KNOWN) for size, last in self.last.items()}
        last = {size: deque([self.levels[size]] * count, LAST_MEASUREMENTS) for size, count in counts.items()}
        return TimeTable(list(self.sizes), dict(self.levels), last)


@dataclass
class LatencyModel:
    """Costs of a drafter and a target on one device, learnt from the cycles of generate() calls.

    The tables have seconds at a pace of 1, `draft` and `verify` by the number of rows: drafts by depth, verifications
    by nodes with the anchor included, and `reading`, in which the drafter reads text that it was not told of, such as
    the prompts, by tokens of all rows together, rounded up to powers of two. Times that are no positive numbers are
    passed over.
    """

    draft: dict[int, TimeTable] = field(default_factory=dict)
    verify: dict[int, TimeTable] = field(default_factory=dict)
    reading: TimeTable = field(default_factory=TimeTable)
    nodes: dict[int, int] = field(default_factory=dict)  # of a row's last draft of a depth, before it was cut
    pace: float = 1.0

    def __post_init__(self) -> None:
        # The pace begins as if it had been measured: one stall must not set it.
        self._paces: deque[float] = deque([self.pace] * LAST_MEASUREMENTS, LAST_MEASUREMENTS)

    def for_another_call(self) -> LatencyModel:
        """A copy whose measurements count little: the call may have another context, and the machine other work."""
        draft, verify = (
            {rows: table.for_another_call() for rows, table in tables.items()} for tables in (self.draft, self.verify)
        )
        return LatencyModel(draft, verify, self.reading.for_another_call(), dict(self.nodes), self.pace)

    @property
    def knows_anything(self) -> bool:
        """True once drafts and verifications with and without drafts have been timed."""
        return bool(self.draft) and any(1 in table.levels for table in self.verify.values())

    def observe_draft(
        self, num_rows: int, depth: int, num_nodes: int, seconds: float, reading: tuple[int, float] | None = None
    ) -> None:
        """Adds a draft of so many nodes a row, before it was cut, and its time.

        `reading` are the tokens of all rows that were read before it, and the time of that (or in the time of the
        draft, where the drafter reads when it is asked).
        """
        if depth:
            self.nodes[depth] = num_nodes
        if reading is not None:
            is_known = num_rows in self.draft and depth in self.draft[num_rows].levels
            late = max(seconds - self.draft_seconds(depth, num_rows), 0.0) if is_known else 0.0
            if 0 < reading[1] + late < inf:
                self.reading.observe(1 << (reading[0] - 1).bit_length(), (reading[1] + late) / self.pace)
            if is_known:
                return
        if 0 < seconds < inf:
            self.draft.setdefault(num_rows, TimeTable()).observe(depth, seconds / self.pace)

    def observe_verification(self, num_rows: int, num_nodes: int, seconds: float) -> None:
        """Adds the time of a cycle without drafting; nodes of a row, the anchor and padding included."""
        if not 0 < seconds < inf:
            return
        table = self.verify.setdefault(num_rows, TimeTable())
        if len(table.last.get(num_nodes, ())) >= KNOWN:
            pace = min(max(seconds / table.levels[num_nodes], 1 / LARGEST_PACE), LARGEST_PACE)
            self._paces.append(pace)
            # It falls at once: else what is measured when a stall is over would be taken for faster than it is.
            self.pace = min(sorted(self._paces)[LAST_MEASUREMENTS // 2], FAR * pace)
        table.observe(num_nodes, seconds / self.pace)

    def reading_seconds(self, num_tokens: int) -> float:
        """Seconds in which the drafter would read so many tokens; 0 for none, and as long as nothing was measured.

        Beyond the largest measured size it is that size's time: a slope between a few tokens says nothing of a
        thousand, and the first real reading corrects it.
        """
        if not num_tokens or not self.reading.sizes:
            return 0.0
        return self.pace * self.reading.predict(min(1 << (num_tokens - 1).bit_length(), self.reading.sizes[-1]))

    def draft_seconds(self, depth: int, num_rows: int) -> float:
        """Seconds of a draft of this depth, in front of and beyond what was measured in proportion to it; 0 as long as
        none was measured."""
        if not self.draft:
            return 0.0
        table = self.draft[_nearest(self.draft, num_rows)]
        measured = min(max(depth, table.sizes[0]), table.sizes[-1])
        return self.pace * table.predict(measured) * (depth / measured if measured else 1.0)

    def cycle_seconds(self, depth: int, num_rows: int, most_nodes: int | None = None, least_nodes: int = 0) -> float:
        """Seconds of a cycle whose deepest draft is so deep, with at most and at least so many nodes a row."""
        nodes = self.nodes.get(depth, depth)
        if depth and self.nodes and depth not in self.nodes:
            # In proportion to the nearest depth that was seen.
            nearest = min(self.nodes, key=lambda other: abs(other - depth))
            nodes = round(max(self.nodes[nearest] * depth / nearest, depth))
        nodes = max(nodes if most_nodes is None else min(nodes, most_nodes), least_nodes)
        return self.draft_seconds(depth, num_rows) + self.verify_seconds(nodes + 1, num_rows)

    def verify_seconds(self, num_nodes: float, num_rows: int) -> float:
        """Seconds of a verification of so many nodes a row; 1 as long as none was measured."""
        if not self.verify:
            return 1.0
        rows = _nearest(self.verify, num_rows)
        table = self.verify[rows]
        # With another number of rows: what as many tokens took.
        seconds = self.pace * table.predict(num_nodes * num_rows / rows)
        if rows == num_rows and num_nodes < table.sizes[0]:
            # Fewer nodes than were measured take less, as with other numbers of rows.
            others = [rows for rows, table in self.verify.items() if table.sizes[0] <= num_nodes]
            if others:
                other = self.verify[_nearest(others, num_rows)]
                seconds *= min(other.predict(num_nodes) / other.predict(table.sizes[0]), 1.0)
        return seconds


def _nearest(numbers: Collection[int], num_rows: int) -> int:
    """The one of some numbers of rows that is this number or comes nearest to it, by their ratio."""
    return num_rows if num_rows in numbers else min(numbers, key=lambda rows: abs(log(rows / num_rows)))
