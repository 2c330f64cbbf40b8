"""Uniform random numbers indexed by seed, row, position and purpose instead of by draw order.

Number x of a stream is word x of the counter-based generator Philox-4x64 (Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"), keyed by seed and purpose, with the row in the counter. So a number depends neither on
which rows stand beside it, nor on how many tokens were drafted, nor on what has been drawn before. The host makes
blocks of them, and a graph's kernel makes the same ones.

Shapes: R active rows, T verified nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ..drafts import TreeTopology
from ..kernels.indexing import arange
from ..kernels.philox import LARGEST_UNIFORM, uniforms_at
from ..transfers import RowNumbers


# Purposes of a number; numbers of different purposes are independent.
TARGET = 0  # the draw from the target's distribution (or its residual) for the token at a position
ACCEPT = 1  # the ratio test of a draft token
DRAFT = 2  # drawing a draft token

# Room for the nodes of one draft tree: node i after anchor position a has the number a * NODES_PER_ANCHOR + i.
NODES_PER_ANCHOR = 256

# Spaces of numbers: by absolute position, and by node after an anchor; and the numbers that each has for a position.
_BY_POSITION, _BY_NODE = 0, 1
_STEPS = (1, NODES_PER_ANCHOR)

# Numbers of a stream that the host makes at once: those of the nodes after 16 anchors.
_BLOCK = 16 * NODES_PER_ANCHOR


class RowUniforms:
    """Uniform numbers in [0, 1) for the rows of one `generate()` call; they stay below 1 in float32 too."""

    def __init__(self, seed: int, device: torch.device | str = "cpu"):
        if not 0 <= seed < 2**64:
            raise ValueError(f"The seed must be from 0 to 2**64 - 1, got {seed}.")
        self.seed = seed
        self.device: torch.device = torch.device(device)
        self._names: dict[int, tuple[int, int]] = {}

    def name(self, row: int, seed: int, number: int) -> None:
        """Gives a row the numbers that row `number` of a call with this seed has."""
        self._names[row] = seed, number

    def keys(self, rows: Sequence[int], positions: Sequence[int]) -> RowKeys:
        """The keys of rows that stand at some positions: indices into their own tokens, padding excluded."""
        names = [self._names.get(row, (self.seed, row)) for row in rows]
        seeds = [seed - (1 << 64) if seed >> 63 else seed for seed, _ in names]
        return RowKeys(seeds, [number for _, number in names], list(positions), self.device)


class RowKeys(NamedTuple):
    """Integers from which the numbers of rows follow: lists, or in a graph tensors `(R,)`.

    - `at` a position: for what is decided once there, the token that is committed and the test of a chain's draft
      token. After the first rejection of a cycle tests decide nothing, and its position is committed in the cycle.
    - `for_nodes` after an anchor: for drafts. A position may be drafted again after the same tokens, and must not see
      the number of its first draft again, which may have had an influence, such as on the length. Every cycle has an
      anchor of its own. Siblings have a number each.
    """

    seeds: RowNumbers  # their bits, as signed numbers
    numbers: RowNumbers  # of the rows in their calls
    positions: RowNumbers
    device: torch.device | None = None  # where numbers go that the host makes

    def at(self, purpose: int, count: int) -> torch.FloatTensor:
        """The numbers `(R, count)` of consecutive positions of each row."""
        return self._numbers(purpose, _BY_POSITION, 0, count)

    def at_depths(self, purpose: int, topology: TreeTopology) -> torch.FloatTensor:
        """The numbers of [`RowKeys.at`] for the nodes of a draft, `(R, T)`: those of their depths."""
        if isinstance(self.positions, torch.Tensor):
            places = self.positions[:, None] + topology.depths
            return uniforms_at(self.seeds, self.numbers, places, purpose, _BY_POSITION)
        drawn = self.at(purpose, topology.max_depth + 1)
        return drawn.gather(1, topology.depths.expand(len(self.positions), -1))

    def for_nodes(self, count: int, purpose: int = ACCEPT, first_node: int = 0) -> torch.FloatTensor:
        """The numbers `(R, count)` of draft nodes after each anchor, whose position belongs to this cycle alone."""
        if first_node + count > NODES_PER_ANCHOR:
            raise ValueError(
                f"A sampled draft tree has at most {NODES_PER_ANCHOR} nodes, got {first_node + count}. "
                "Use a smaller tree."
            )
        return self._numbers(purpose, _BY_NODE, first_node, count)

    def drafts_after(self, counts: torch.LongTensor, depth: int) -> torch.FloatTensor:
        """The numbers `(R, depth)` that draw drafts in a graph, after `counts` tokens `(R,)` from the positions on."""
        assert isinstance(self.positions, torch.Tensor), "outside of graphs the numbers are read"
        return self._replace(positions=self.positions + counts - 1).for_nodes(depth, DRAFT)

    def _numbers(self, purpose: int, space: int, offset: int, count: int) -> torch.FloatTensor:
        """The numbers `(R, count)` of a purpose and a space, from an offset after the positions on, on the device."""
        if isinstance(self.positions, torch.Tensor):
            places = (self.positions * _STEPS[space])[:, None] + arange(offset + count, self.positions.device)[offset:]
            return uniforms_at(self.seeds, self.numbers, places, purpose, space)
        values = np.empty((len(self.positions), count))
        for seed, number, position, line in zip(self.seeds, self.numbers, self.positions, values):
            filled = 0
            while filled < count:
                index, begin = divmod(position * _STEPS[space] + offset + filled, _BLOCK)
                part = _block(seed % 2**64, number, purpose, space, index)[begin : begin + count - filled]
                line[filled : filled + len(part)] = part
                filled += len(part)
        uniforms = torch.from_numpy(values)
        if self.device is None or self.device.type == "cpu":
            return uniforms
        if self.device.type == "cuda":
            # Copies of more than a few numbers would wait.
            uniforms = uniforms.pin_memory()
        dtype = torch.float32 if self.device.type == "mps" else torch.float64
        return uniforms.to(self.device, dtype, non_blocking=True)


@lru_cache(maxsize=1024)
def _block(seed: int, number: int, purpose: int, space: int, index: int) -> np.ndarray:
    """The numbers `index * _BLOCK` to `(index + 1) * _BLOCK - 1` of a row's stream."""
    key = np.array([seed, purpose], dtype=np.uint64)
    # A step of the counter gives four numbers.
    counter = np.array([index * _BLOCK // 4, space, number, 0], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    return np.minimum(generator.random(_BLOCK), LARGEST_UNIFORM)


def seed_from_torch(generator: torch.Generator | None = None) -> int:
    """A seed of 63 bits from a CPU generator, torch's default one if none is given: `torch.manual_seed` decides it."""
    return int(torch.randint(2**63 - 1, (), device="cpu", generator=generator))
