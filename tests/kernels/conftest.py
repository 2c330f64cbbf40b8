"""Kernels are tested in three ways, each in a process of its own kind.

- `device` fixture, "cpu": in Triton's interpreter, where TRITON_INTERPRET=1. `test_interpreted.py` starts such a
  process, so that a run without a GPU covers these tests.
- `device` fixture, "cuda": on a GPU (`pytest -m gpu`), the same tests.
- `compile_for` fixture: compiled ahead of time for GPUs that need not be there.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.levels import in_full, when_slow


IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Shared memory that a block may take, in bytes, by compute capability, or AMD's name of the architecture.
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10, "gfx942": 64 << 10}

# Every kernel is compiled for a GPU of each maker in the full run, and for the others before a release; in the short
# run those of a layer are (`test_early.py`).
every_gpu, every_nvidia = (
    pytest.mark.parametrize("compile_for", [*in_full(*makers), *when_slow(80, 100, 120)], indirect=True)
    for makers in ((90, "gfx942"), (90,))
)

# ptxas of different versions trades a few bytes of stack for occupancy.
SPILL_ALLOWANCE = 32


@pytest.fixture(scope="session", params=["cpu"] if IS_INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """Device on which a kernel can run: in the interpreter, or on a GPU."""
    pytest.importorskip("triton")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device(request.param)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session", autouse=IS_INTERPRETED)
def patched_once():
    """Leaves Triton's language patched, which the interpreter does anew for every function that a kernel calls."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        languages = frozenset({"tl", "core"} & function.__globals__.keys())
        if languages not in patched:
            patched.add(languages)
            patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


@pytest.fixture
def compile_for(request):
    """A context in which launchers are given CPU tensors, and compile what they would launch without running it.

    When it ends, each kernel must have been compiled without spilling and must fit into the shared memory. The
    context's value is the list of compiled kernels.
    """
    pytest.importorskip("triton")
    if IS_INTERPRETED:
        pytest.skip("Triton compiles only without TRITON_INTERPRET")
    arch = request.param

    @contextlib.contextmanager
    def context():
        with fake_gpu(arch) as kernels:
            yield kernels
        assert kernels, "nothing was launched"
        for kernel in kernels:
            used = resources(kernel)
            assert used["spilled"] <= SPILL_ALLOWANCE, f"{kernel.name} for {arch} spills: {used}"
            assert used["shared"] <= SHARED_MEMORY[arch], f"{kernel.name} does not fit into {arch}: {used}"

    return context


@contextlib.contextmanager
def fake_gpu(arch: int | str):
    """Lets every launch compile for an architecture (90 is compute capability 9.0); gives the list of kernels."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    kernels = []
    run, active = JITFunction.run, driver._active

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return kernels[-1]

    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    # The device is a key of the cache of kernels.
    device = {"get_current_device": lambda: str(arch), "get_current_stream": lambda device: 0}
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, **device))
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run
        driver.set_active(active)


def resources(kernel) -> dict[str, int]:
    """Registers, spilled bytes of a thread (of AMD: spilled registers), and bytes of shared memory of a block.

    Scalars of AMD spill into lanes of registers, not into memory, and do not count.
    """
    import triton

    if "amdgcn" in kernel.asm:
        counted = {name: rf"\.{name}: +(\d+)" for name in ("vgpr_count", "vgpr_spill_count")}
        found = {name: int(re.search(pattern, kernel.asm["amdgcn"])[1]) for name, pattern in counted.items()}
        spilled = found["vgpr_spill_count"]
        return {"registers": found["vgpr_count"], "spilled": spilled, "shared": kernel.metadata.shared}
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        text = subprocess.run([cuobjdump, "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spilled": stack + local, "shared": kernel.metadata.shared}


def watched(monkeypatch: pytest.MonkeyPatch, *functions: tuple) -> list[str]:
    """A list that gets the name of each of these functions, pairs of module and name, whenever it is called."""
    names = []

    def watch(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **kwargs: names.append(name) or function(*args, **kwargs))

    for module, name in functions:
        watch(module, name)
    return names
