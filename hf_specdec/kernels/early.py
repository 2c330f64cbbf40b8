"""Kernels of layers that begin before the kernel in front of them has ended: programmatic dependent launch of CUDA.

Launching a kernel, and the end of the one before it, then overlap, and weights, which no kernel writes, are on their
way meanwhile. Compute capability 9.0 and later.
"""

from __future__ import annotations

import torch

from ..environment import is_switched_on
from ._triton import tl, triton


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
