"""What the launches of several kernels share: tensors as lines of numbers, and counters of programs that have ended.

Kernels of layers may begin before the kernel in front of them has ended: programmatic dependent launch of CUDA, for
compute capability 9.0 and later. Launching a kernel, and the end of the one before it, then overlap, and weights,
which no kernel writes, are on their way meanwhile.

Shapes: X width of a line.
"""

from __future__ import annotations

import torch

from ..environment import is_switched_on
from ..transfers import written_on_device
from ._triton import tl, triton
from .tiles import gpu_of


# Programs of a line, at most.
MOST_PARTS = 64


def as_lines(tensor: torch.Tensor) -> torch.Tensor:
    """The lines of `(..., X)`, of any shape before it, each side by side in memory: a view if that can be."""
    lines = tensor.reshape(-1, tensor.shape[-1])
    return lines if lines.stride(-1) == 1 else lines.contiguous()


def parts_of_lines(count: int, width: int, block: int, device: torch.device, least_blocks: int = 1) -> tuple[int, int]:
    """Width of the parts in which lines are read, a multiple of `block`, and how many there are of a line.

    A GPU then has two programs for each of its processors, and each reads so many blocks at least.
    """
    wanted = triton.cdiv(2 * gpu_of(device).processors, max(count, 1))
    blocks = triton.cdiv(width, block)
    part = triton.cdiv(blocks, min(wanted, max(blocks // least_blocks, 1), MOST_PARTS)) * block
    return part, triton.cdiv(width, part)


def arrivals(count: int, device: torch.device) -> torch.Tensor:
    """Counters of the parts that have ended, `count` of them at least: 0 before every launch and after it."""
    return _zeros(triton.next_power_of_2(max(count, 1024)), device)


@triton.jit
def ends_last(
    arrivals_ptr,  # a counter of [`arrivals`]
    count,
):
    """Counts a program that has written its part; tells the last of so many, which may read those of the others.

    It reads with `cache_modifier=".cg"`: the cache of its own processor knows nothing of what others have written.
    """
    # All threads have written before one of them says so.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals_ptr, 1) == count - 1
    if is_last:
        # For the next launch.
        tl.store(arrivals_ptr, 0)
    return is_last


@written_on_device
def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


# Read once, when the package is first used.
LAUNCHES_EARLY = is_switched_on("EARLY_LAUNCH", default=False)


def launches_early(tensor: torch.Tensor) -> bool:
    """Tells whether kernels over a tensor begin early: where `HF_SPECDEC_EARLY_LAUNCH=1` asks for it."""
    is_known = LAUNCHES_EARLY and tensor.is_cuda and torch.version.hip is None
    return is_known and torch.cuda.get_device_capability(tensor.device) >= (9, 0)


def early_launch(tensor: torch.Tensor) -> dict[str, bool]:
    """Options of the launch of a kernel that waits before it reads or writes what others touch."""
    return {"IS_EARLY": True, "launch_pdl": True} if launches_early(tensor) else {"IS_EARLY": False}


@triton.jit
def wait_for_previous(IS_EARLY: tl.constexpr):
    """Waits for the kernels in front: every kernel does, so that whoever comes after it finds all of them ended."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def launch_next(IS_EARLY: tl.constexpr):
    """Lets the next kernel begin once all programs have come here or ended."""
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin_early(IS_EARLY: tl.constexpr):
    """Both, for kernels that leave room on the GPU for the next one."""
    launch_next(IS_EARLY)
    wait_for_previous(IS_EARLY)
