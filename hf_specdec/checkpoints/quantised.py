"""Quantised weights: stored ones of heads, and the settings with which bitsandbytes packs draft models.

Of stored weights those of 8 bits with factors are read: one factor for the matrix, for each row, or for each block.
They are multiplied when they are read, since a head is small and computes in the type of its target's states.

    fp8 (DeepSeek, Qwen)                                      weight, weight_scale_inv (by blocks of weight_block_size)
    compressed-tensors (float-quantized, int-quantized)       weight, weight_scale; input_scale, ... of activations
    ModelOpt, FP8                                             weight, weight_scale, input_scale
"""

from __future__ import annotations

import logging as python_logging
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.utils.import_utils import is_bitsandbytes_available

from ..errors import CheckpointFormatError, MissingDependencyError, SpecConfigError, shown
from .schema import INDICES


if TYPE_CHECKING:
    from .reader import CheckpointReader


# ------------------------------------------------------------------------------------------------- stored weights

_SCALES = ("_scale_inv", "_scale")
# Of activations, which are not rounded here.
_OF_ACTIVATIONS = re.compile(r".*\.(input_scale|output_scale|[kv]_scale)")
_PACKED = ("*weight_packed", "*qweight", "*weight_zero_point", "*weight_scale_2", "*.absmax", "*.SCB")
_USUAL_BLOCK = 128
_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def scale_of(name: str, stored: Mapping[str, Any]) -> str | None:
    """The name of the factors of a weight; `None` where it has none."""
    return next((name + end for end in _SCALES if name + end in stored), None)


def is_about_quantisation(name: str, stored: Mapping[str, Any]) -> bool:
    """Tells tensors that say how others were quantised: factors of weights that are there, and of activations."""
    is_scale = any(name.endswith(end) and name.removesuffix(end) in stored for end in _SCALES)
    return is_scale or _OF_ACTIVATIONS.fullmatch(name) is not None


def packed_weight(stored: Mapping[str, str]) -> str | None:
    """The first tensor, by its name in the file, of weights that are packed in a way that is not read."""
    packed = (stored[name] for name in stored if any(fnmatchcase(name, pattern) for pattern in _PACKED))
    return next(packed, None)


def scaled(
    reader: CheckpointReader, name: str, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    """8-bit weights `(O, I)` times factors: one, `(O,)`, or `(o, i)` by blocks, the last of which may be cut."""
    if weight.dtype not in _BYTES or not scales.is_floating_point():
        kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in (weight, scales)]
        raise reader.wrong(
            f"has {name} in {kinds[0]} with factors in {kinds[1]}, which is not supported: weights must be float8 or "
            "int8, and factors floating-point",
            "Pass one in a floating-point type.",
        )
    weight, scales = weight.float(), scales.float()
    if scales.numel() == 1:
        scales = scales.reshape(())
    else:
        scales = scales[:, None] if scales.dim() == 1 else scales
        for dim, size in enumerate(_block_sizes(reader, name, weight.shape, scales.shape)):
            length = weight.shape[dim]
            scales = scales.repeat_interleave(min(size, length), dim).narrow(dim, 0, length)
    return (weight * scales).to(dtype or torch.bfloat16)


def _block_sizes(reader: CheckpointReader, name: str, shape: Sequence[int], grid: Sequence[int]) -> Sequence[int]:
    """Lengths of blocks: as stated, or else as the numbers of factors divide a matrix."""
    stated = (reader.setting("quantization_config") or {}).get("weight_block_size")
    is_valid = stated is None or (INDICES.is_valid(stated) and len(stated) == len(shape) and min(stated) > 0)
    if not is_valid or len(grid) != len(shape):
        raise CheckpointFormatError(
            f"'{reader.name}': `weight_block_size`={shown(stated)} in config.json does not fit matrices of "
            f"{len(shape)} dimensions with factors of {len(grid)}. Pass an intact checkpoint."
        )
    # What a config says of the target's blocks does not hold for factors of rows.
    if stated is None or list(grid) == [shape[0], 1]:
        is_usual = [-(-length // _USUAL_BLOCK) == count for length, count in zip(shape, grid)]
        parts = zip(is_usual, shape, grid)
        stated = [_USUAL_BLOCK if usual else max(length // max(count, 1), 1) for usual, length, count in parts]
    # More factors than blocks would be laid out beside the matrix, as large as a file asks for.
    if any(-(-length // size) != count for length, size, count in zip(shape, stated, grid)):
        raise reader.wrong(
            f"has {list(grid)} factors of {name} of the shape {list(shape)}, which do not fit blocks of "
            f"{list(stated)} (`weight_block_size`)",
            "Pass an intact checkpoint.",
        )
    return stated


# ------------------------------------------------------------------------------------------------- bitsandbytes

_QUANTIZATION: dict[str, dict[str, Any]] = {
    "bitsandbytes_4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes_fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "bitsandbytes_8bit": {"load_in_8bit": True},
}
# Inputs and outputs of four-bit layers on a CPU come in blocks.
_INPUTS_ON_CPU, _OUTPUTS_ON_CPU = 64, 32


def quantization_config(name: str, dtype: Any) -> BitsAndBytesConfig:
    """The settings of bitsandbytes for `quantization`, with the type that four-bit layers compute in."""
    if not is_bitsandbytes_available():
        raise MissingDependencyError(
            f"quantization='{name}' needs bitsandbytes. Install it with: pip install bitsandbytes"
        )
    if name == "bitsandbytes_8bit":
        # It says so for every layer of every forward.
        python_logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_no_cast_message)
    compute = {} if name == "bitsandbytes_8bit" else {"bnb_4bit_compute_dtype": dtype}
    return BitsAndBytesConfig(**_QUANTIZATION[name], **compute)


def _is_no_cast_message(record: python_logging.LogRecord) -> bool:
    return not str(record.msg).startswith("MatMul8bitLt: inputs will be cast")


def check_four_bits(model: nn.Module, name: str) -> None:
    """Refuses four-bit layers that cannot run on a CPU."""
    for path, module in cast(Any, model).named_modules():
        # Where the processor cannot multiply bfloat16, bitsandbytes widens layers of any size.
        has_kernel = getattr(module, "support_avx512bf16_for_cpu", False)
        if not has_kernel or module.weight.device.type != "cpu":
            continue
        if module.in_features % _INPUTS_ON_CPU or module.out_features % _OUTPUTS_ON_CPU:
            raise SpecConfigError(
                f"The draft model '{name}' cannot compute in four bits on a CPU: {path} has {module.in_features} "
                f"inputs and {module.out_features} outputs, and inputs must be a multiple of {_INPUTS_ON_CPU} there, "
                f"and outputs of {_OUTPUTS_ON_CPU}. Use quantization='bitsandbytes_8bit'."
            )
