"""The machine: processor, data types, threads, memory, and the folder for what the package has fetched."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import constants
from transformers import __version__ as transformers_version

from .version import __version__


# Instructions with which a CPU multiplies matrices of 16 bits itself, as Linux names them.
_FLAGS = {
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def home_folder() -> Path:
    """Folder of all that the package keeps: `hf_specdec` in the home of the Hub's files."""
    return Path(constants.HF_HOME) / "hf_specdec"


def suitable_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 where the device computes in it, else float32."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if multiplies() else torch.float32


def multiplies(dtype: torch.dtype = torch.bfloat16) -> bool | None:
    """`True` if the CPU multiplies matrices of 16 bits itself; `None` where the system does not say."""
    flags = set(f"{_cpuinfo('flags')} {_cpuinfo('Features')}".split())
    return bool(flags & _FLAGS[dtype]) if flags else None


def is_intel() -> bool:
    return _cpuinfo("vendor_id") == "GenuineIntel"


@contextmanager
def num_threads(count: int | None) -> Iterator[None]:
    """Runs the block with `count` threads per operation; `None` leaves the number as it is."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def describe_environment(device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
    """Hardware, versions and settings that the figures hold for, as plain JSON types."""
    device = torch.device(device)
    return {
        "hf_specdec": __version__,
        "torch": torch.__version__,
        "transformers": transformers_version,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "dtype": str(dtype).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def free_bytes(device: torch.device | str) -> int:
    """Bytes that can still be used on a device: memory that torch holds and does not use counts as free."""
    device = torch.device(device)
    if device.type != "cuda":
        return psutil.virtual_memory().available
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _cpuinfo(key: str) -> str:
    """Linux's value of a key for the first processor; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == key), "")
    except OSError:
        return ""
