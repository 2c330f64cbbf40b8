"""Sizes of a GPU, and the tiles in which attention suits them."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """Multiprocessors, and the shared memory that a block may take, in bytes."""

    processors: int
    shared_memory: int


@lru_cache
def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        # The interpreter works through its programs one after the other.
        return Gpu(1, 99 << 10)
    found = torch.cuda.get_device_properties(device)
    # Of AMD's torch knows the memory of a block, and no other.
    shared = getattr(found, "shared_memory_per_block_optin", 0) or found.shared_memory_per_block
    return Gpu(found.multi_processor_count, shared)


class Tile(NamedTuple):
    """Most queries, slots of a block, warps, stages of the pipeline, and tiles that a multiprocessor has at a time."""

    queries: int
    slots: int
    warps: int
    stages: int
    residents: int


# By shared memory of a block, bytes of a number, and head size: the largest that spill nothing while they read. The
# first table is for compute capability 9.0 and 10.0, and was measured on an H100 with heads of 128; the second fits
# into what every GPU from 8.0 on has, the last one into AMD's.
TILES = {
    227 << 10: {
        2: {
            64: (Tile(16, 64, 4, 3, 1), Tile(64, 64, 4, 3, 1)),
            128: (Tile(16, 64, 4, 3, 1), Tile(64, 64, 4, 3, 1)),
            256: (Tile(16, 32, 4, 3, 1), Tile(64, 32, 8, 3, 1)),
        },
        4: {64: (Tile(32, 32, 8, 3, 2),), 128: (Tile(16, 16, 4, 3, 2),), 256: (Tile(16, 16, 4, 3, 2),)},
    },
    99 << 10: {
        2: {64: (Tile(64, 32, 4, 3, 2),), 128: (Tile(64, 32, 4, 3, 2),), 256: (Tile(32, 32, 4, 2, 2),)},
        4: {64: (Tile(32, 32, 8, 2, 2),), 128: (Tile(16, 16, 4, 2, 2),), 256: (Tile(16, 16, 4, 2, 2),)},
    },
    64 << 10: {
        2: {64: (Tile(64, 32, 4, 2, 2),), 128: (Tile(64, 32, 4, 2, 2),), 256: (Tile(32, 32, 4, 1, 1),)},
        4: {64: (Tile(32, 32, 8, 1, 2),), 128: (Tile(16, 16, 4, 1, 2),), 256: (Tile(16, 16, 4, 1, 2),)},
    },
}

# What small tiles, of which more work at a time, may read of keys and values, most of it from the cache of the GPU.
_CACHED_BYTES = 64 << 20


def attention_tile(gpu: Gpu, item_size: int, head_size: int, lines: int, bytes_read: int) -> Tile:
    """The smallest tile that has room for so many queries, or of which the keys are not read too often."""
    table = next((table for memory, table in TILES.items() if gpu.shared_memory >= memory), TILES[64 << 10])
    tiles = table[item_size][max(64, head_size)]
    for tile in tiles:
        count = math.ceil(lines / tile.queries)
        if count == 1 or count * bytes_read <= _CACHED_BYTES:
            return tile
    return tiles[-1]


_MAX_SPLITS = 64

# Slots of a part at least; with many queries it also takes longer to be added.
_MIN_SLOTS = 64

# How fast one program adds the numbers of all parts, relative to all programs that read keys.
_ADDING_SPEED = 0.5


def count_splits(programs: int, slots: int, written: float, tile: Tile, processors: int) -> int:
    """Parts of the keys, so that every processor of the GPU has its programs, tiles of all rows and heads.

    A tile reads so many slots at most. As large as the keys and values of `written` slots are the numbers that a part
    leaves to be added, by one program for all parts: so many parts that both take as long are enough.
    """
    busy = max(tile.residents * processors // programs, 1)
    enough = math.ceil(math.sqrt(_ADDING_SPEED * slots / written))
    return min(busy, enough, math.ceil(slots / max(tile.slots, _MIN_SLOTS)), _MAX_SPLITS)
