"""Triton, or a stand-in with which the kernel files can be imported; and the choice between kernel and reference.

No other file imports Triton. Kernel files begin with `from __future__ import annotations`, so that `tl.constexpr` in a
signature is never evaluated where there is no `tl`.
"""

from __future__ import annotations

import os

import torch
from transformers.utils import logging

from ..environment import kernel_choice
from ..errors import MissingDependencyError, SpecConfigError


logger = logging.get_logger(__name__)

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_wait  # noqa: F401 - since 3.4: before, kernels do not compile

    HAS_TRITON = True
except ImportError:

    class triton:
        @staticmethod
        def jit(function=None, **options):
            return function or (lambda function: function)

    tl = None
    HAS_TRITON = False

# Kernels run in Triton's interpreter, on CPU tensors. Triton reads the variable when it is imported.
IS_INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# Of tensors that kernels take, on a CPU as well.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Read once, when the package is first used.
CHOICE = kernel_choice()


def use_triton(*tensors: torch.Tensor | None) -> bool:
    """Decides whether an operation over these tensors, as far as there are some, runs as a Triton kernel.

    It does on a GPU where Triton is installed, unless `HF_SPECDEC_KERNELS` asks for the torch references; where that
    asks for kernels, an error says why they cannot run.
    """
    if CHOICE == "torch":
        return False
    on_gpu = all([tensor is None or tensor.is_cuda for tensor in tensors])
    if CHOICE == "auto":
        if on_gpu and not HAS_TRITON:
            logger.warning_once(
                "Triton 3.4 or later is not installed, so verification runs through plain torch operations, which are "
                "slower. Install it with `pip install triton`, in the version that your torch asks for."
            )
        return on_gpu and HAS_TRITON
    if not HAS_TRITON:
        raise MissingDependencyError(
            "HF_SPECDEC_KERNELS=triton, but Triton 3.4 or later is not installed. Install it, or unset the variable."
        )
    if not (on_gpu or IS_INTERPRETED):
        raise SpecConfigError(
            "HF_SPECDEC_KERNELS=triton, but tensors are not on a GPU. Move the model there, unset the variable, or "
            "start Python with TRITON_INTERPRET=1 to run the kernels in Triton's interpreter."
        )
    return True


def fuses(stream: torch.Tensor) -> bool:
    """Decides whether operations of layers over a stream run as kernels, which have no gradients and no autocast."""
    if torch.is_grad_enabled() or stream.dtype not in DTYPES or not use_triton(stream):
        return False
    return not torch.is_autocast_enabled(stream.device.type)


# As kernels read it.
_INTERPRETED = tl.constexpr(IS_INTERPRETED) if HAS_TRITON else None


@triton.jit
def computable(numbers):
    """Loaded numbers as kernels compute with them: Triton's interpreter would multiply the raw bits of bfloat16."""
    if _INTERPRETED:
        numbers = numbers.to(tl.float32)
    return numbers
