"""Uniform random numbers indexed by seed, row, position and purpose instead of by draw order.

Number x of a stream is word x of the counter-based generator Philox-4x64 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"), keyed by seed and purpose, with the row in the counter. So a number depends neither on
which rows stand beside it, nor on how many tokens were drafted, nor on what has been drawn before.

Shapes: B active rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..kernels.indexing import arange
from ..kernels.philox import LARGEST_UNIFORM, uniforms_at
from ..transfers import RowNumbers


if TYPE_CHECKING:
    from ..drafts import TreeTopology


# Purposes of a number; numbers of different purposes are independent.
TARGET = 0  # the draw from the target's distribution (or its residual) for the token at a position
ACCEPT = 1  # the ratio test of a draft token
DRAFT = 2  # drawing a draft token

# Room for the nodes of one draft tree: node i after anchor position a has the number a * NODES_PER_ANCHOR + i.
NODES_PER_ANCHOR = 256

# Spaces of numbers: by absolute position, and by node after an anchor.
_BY_POSITION, _BY_NODE = 0, 1


class RowUniforms:
    """Uniform numbers in [0, 1) for the rows of one `generate()` call.

    A position is an index into a row's own tokens, padding excluded; rows are named by their index in the call.

    Two ways to address a number:

    - `at` by absolute position. For decisions made at most once per position: the token committed there, and the
      ratio test of a chain's draft token there (a test after the first rejection of a cycle decides nothing, and the
      position of the rejected token is committed in the same cycle).
    - `for_nodes` and `draft_at` by anchor position and node. Drafting must use these: a position may be drafted again
      in a later cycle after the same tokens, and must not see the number of its first draft again, because that
      draft may already have had an influence (on the draft length, for instance). Every cycle commits a token, so
      its anchor's position is its own. Trees also need a number for each of the siblings at one position.

    Args:
        seed (`int`): 0 to 2**64 - 1.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`): Where the numbers are wanted.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu"):
        if not 0 <= seed < 2**64:
            raise ValueError(f"The seed must be from 0 to 2**64 - 1, got {seed}.")
        self.seed = seed
        self.device: torch.device = torch.device(device)
        purposes = (TARGET, ACCEPT, DRAFT)
        self._by_position = [_Stream(seed, purpose, _BY_POSITION, width=1024) for purpose in purposes]
        self._by_node = [_Stream(seed, purpose, _BY_NODE, width=16 * NODES_PER_ANCHOR) for purpose in purposes]

    def name(self, row: int, seed: int, number: int) -> None:
        """Gives a row the numbers that row `number` of a call with this seed has."""
        for stream in (*self._by_position, *self._by_node):
            stream.name(row, seed, number)

    def keys(self, rows: Sequence[int], positions: Sequence[int]) -> RowKeys:
        """Integers from which a graph makes the numbers of rows that stand at some positions."""
        named = [self._by_position[TARGET].named(row) for row in rows]
        seeds = [seed - (1 << 64) if seed >> 63 else seed for seed, _ in named]
        return RowKeys(seeds, [number for _, number in named], list(positions))

    def at(self, purpose: int, rows: Sequence[int], first_positions: Sequence[int], count: int) -> torch.FloatTensor:
        """The numbers of `count` consecutive positions of each row.

        Args:
            purpose (`int`): `TARGET`, `ACCEPT` or `DRAFT`.
            rows (`Sequence[int]` of length B): Which row of the call each active row is.
            first_positions (`Sequence[int]` of length B): Absolute position of each row's first number.
            count (`int`): Positions per row.

        Returns:
            `torch.FloatTensor` of shape `(B, count)`: Numbers that stay below 1 in float32 too.
        """
        return self._to_device(self._by_position[purpose].read(rows, np.asarray(first_positions), count))

    def at_depths(
        self, purpose: int, rows: Sequence[int], first_positions: Sequence[int], topology: TreeTopology
    ) -> torch.FloatTensor:
        """The numbers of [`RowUniforms.at`] for the nodes of a draft, `(B, T)`: those of their depths."""
        drawn = self.at(purpose, rows, first_positions, topology.max_depth + 1)
        return drawn.gather(1, topology.depths.expand(len(rows), -1))

    def for_nodes(
        self,
        rows: Sequence[int],
        anchor_positions: Sequence[int],
        count: int,
        purpose: int = ACCEPT,
        first_node: int = 0,
    ) -> torch.FloatTensor:
        """The numbers of `count` consecutive draft nodes, from `first_node` on, of the tree after each anchor.

        Args:
            rows (`Sequence[int]` of length B): Which row of the call each active row is.
            anchor_positions (`Sequence[int]` of length B): A position of each row that belongs to this cycle alone.
            count (`int`): Nodes per row.
            purpose (`int`, *optional*, defaults to `ACCEPT`): What they are used for.
            first_node (`int`, *optional*, defaults to 0): The first draft node; nodes go up to 255.

        Returns:
            `torch.FloatTensor` of shape `(B, count)`.
        """
        if first_node + count > NODES_PER_ANCHOR:
            raise ValueError(
                f"A sampled draft tree has at most {NODES_PER_ANCHOR} nodes, got {first_node + count}. "
                "Use a smaller tree."
            )
        first = np.asarray(anchor_positions) * NODES_PER_ANCHOR + first_node
        return self._to_device(self._by_node[purpose].read(rows, first, count))

    def draft_at(self, rows: Sequence[int], anchor_positions: Sequence[int], depth: int) -> torch.FloatTensor:
        """The numbers that draw draft token `depth` (0 is the first) of a chain: shape `(B,)`."""
        return self.for_nodes(rows, anchor_positions, 1, DRAFT, depth)[:, 0]

    def _to_device(self, values: np.ndarray) -> torch.FloatTensor:
        values = torch.from_numpy(values)
        if self.device.type == "cpu":
            return values
        if self.device.type == "cuda":
            # Copies of more than a few numbers would wait.
            values = values.pin_memory()
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        return values.to(self.device, dtype, non_blocking=True)


class RowKeys(NamedTuple):
    """Integers of each row: lists, or in a graph tensors `(R,)`.

    Attributes:
        seeds (`RowNumbers`): The bits of the seeds, as signed numbers.
        numbers (`RowNumbers`): Numbers of the rows in their calls.
        positions (`RowNumbers`): Where the rows stand, padding not counted.
    """

    seeds: RowNumbers
    numbers: RowNumbers
    positions: RowNumbers

    def drafts_after(self, counts: torch.LongTensor, depth: int) -> torch.FloatTensor:
        """The numbers `(R, depth)` that draw drafts in a graph, after `counts` tokens `(R,)` from the positions on."""
        assert isinstance(self.positions, torch.Tensor), "outside of graphs the numbers are read"
        anchors = self._replace(positions=self.positions + counts - 1)
        return CapturedUniforms(anchors).for_nodes([], [], depth, DRAFT)


class CapturedUniforms:
    """[`RowUniforms`] inside of a graph, made by the device. Rows and positions are those of the keys.

    Args:
        keys (`RowKeys`): Tensors.
    """

    def __init__(self, keys: RowKeys):
        self.keys: RowKeys = keys

    def at(self, purpose: int, rows: Sequence[int], first_positions: Sequence[int], count: int) -> torch.FloatTensor:
        return self._numbers(purpose, _BY_POSITION, arange(count, self.keys.positions.device))

    def at_depths(
        self, purpose: int, rows: Sequence[int], first_positions: Sequence[int], topology: TreeTopology
    ) -> torch.FloatTensor:
        return self._numbers(purpose, _BY_POSITION, topology.depths)

    def for_nodes(
        self, rows: Sequence[int], anchor_positions: Sequence[int], count: int, purpose: int = ACCEPT
    ) -> torch.FloatTensor:
        return self._numbers(purpose, _BY_NODE, arange(count, self.keys.positions.device))

    def _numbers(self, purpose: int, space: int, offsets: torch.LongTensor) -> torch.FloatTensor:
        seeds, numbers, positions = self.keys
        first = positions * (NODES_PER_ANCHOR if space == _BY_NODE else 1)
        return uniforms_at(seeds, numbers, first[:, None] + offsets, purpose, space)


class _Stream:
    """The numbers of one purpose: for each row a window of them that follows the reads."""

    def __init__(self, seed: int, purpose: int, space: int, width: int):
        self.purpose, self.names = purpose, {}
        self.key = np.array([seed, purpose], dtype=np.uint64)
        self.space = space
        self.width = width
        self.values = np.empty((0, width))
        self.starts = np.empty(0, dtype=np.int64)

    def read(self, rows: Sequence[int], first: np.ndarray, count: int) -> np.ndarray:
        """A copy of numbers `first[b]` to `first[b] + count - 1` of each row, shape `(B, count)`."""
        rows = np.asarray(rows, dtype=np.int64)
        if count > self.width // 2:
            self._widen(4 * count)
        if rows.size and rows.max() >= len(self.starts):
            self._add_rows(int(rows.max()) + 1)
        offsets = first - self.starts[rows]
        outside = (offsets < 0) | (offsets > self.width - count)
        if outside.any():
            self._move_windows(rows[outside], first[outside])
            offsets = first - self.starts[rows]
        return self.values[rows[:, None], offsets[:, None] + np.arange(count)]

    def name(self, row: int, seed: int, number: int) -> None:
        self.names[row] = np.array([seed, self.purpose], dtype=np.uint64), number
        if row < len(self.starts):
            self.starts[row] = np.iinfo(np.int64).max

    def named(self, row: int) -> tuple[int, int]:
        """Seed and number of a row."""
        key, number = self.names.get(row, (self.key, row))
        return int(key[0]), number

    def _add_rows(self, num_rows: int) -> None:
        new = num_rows - len(self.starts)
        self.values = np.concatenate([self.values, np.empty((new, self.width))])
        # Past every position, so that the first read of a row fills its window.
        self.starts = np.concatenate([self.starts, np.full(new, np.iinfo(np.int64).max)])

    def _widen(self, width: int) -> None:
        """Empties the windows and makes them wider; their numbers are those of their positions all the same."""
        # Windows begin at multiples of their half, which must be whole steps of the counter.
        self.width = -(-width // 8) * 8
        self.values = np.empty((len(self.starts), self.width))
        self.starts[:] = np.iinfo(np.int64).max

    def _move_windows(self, rows: np.ndarray, first: np.ndarray) -> None:
        half = self.width // 2
        for row, position in zip(rows.tolist(), first.tolist()):
            start = position // half * half
            # A step of the counter gives four numbers.
            key, number = self.names.get(row, (self.key, row))
            counter = np.array([start // 4, self.space, number, 0], dtype=np.uint64)
            generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
            self.values[row] = np.minimum(generator.random(self.width), LARGEST_UNIFORM)
            self.starts[row] = start


def seed_from_torch(generator: torch.Generator | None = None) -> int:
    """A seed of 63 bits drawn from torch's default CPU generator, so that `torch.manual_seed` determines it.

    Args:
        generator (`torch.Generator`, *optional*): Of the CPU, in the place of that one.
    """
    return int(torch.randint(2**63 - 1, (), device="cpu", generator=generator))
