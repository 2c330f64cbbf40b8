"""Puts the speculative arguments onto `generate()` of all transformers models, and takes them back.

Nothing heavy is imported here. If transformers' generation code is not loaded yet, it is patched at the moment when it
is; the decoding loop is imported by the first speculative call.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from .arguments import ARGUMENTS, asks_for_off, patched, take_asked, with_objects


_MODULE = "transformers.generation.utils"

_DOCUMENTATION = """

        Speculative decoding, by hf_specdec: a drafter proposes tokens, and the model verifies several in one forward.
        What is generated stays the same.

        spec_method (`str`, *optional*):
            Name of the method, such as "ngram", "suffix", "eagle3" or "suffix+eagle3"; "auto" finds a drafter,
            "none" is this loop without drafts, "off" is plain generation.
        spec_model (`str`, `os.PathLike` or `PreTrainedModel`, *optional*):
            Draft checkpoint; without a `spec_method` the method is read from it.
        num_speculative_tokens (`int` or `str`, *optional*):
            Draft tokens of each cycle, "fixed": the method's own number, or "auto": as many as pay, down to plain
            decoding, which is the default.
        speculative (`SpeculativeConfig`, `dict` or `str`, *optional*):
            All settings in one, a method, or a draft checkpoint.
        assistant (`Speculator`, `PreTrainedModel` or `CandidateGenerator`, *optional*):
            A loaded speculator, a draft model, or a candidate generator.
"""


# Where another package has put a function around ours it stays there, and only calls the original while this is false.
_is_installed = False


def install() -> None:
    """Adds the speculative arguments to `generate()` of all transformers models. Safe to call twice."""
    module = sys.modules.get(_MODULE)
    if module is not None and hasattr(module, "GenerationMixin"):
        _patch(module.GenerationMixin)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Removes what `install()` added. Wrappers that other packages have put around it since then stay."""
    global _is_installed
    _is_installed = False
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name, function in patched.items():
        mixin = sys.modules[_MODULE].GenerationMixin
        if getattr(mixin, name) is function:
            delattr(mixin, name)
            if getattr(mixin, name, None) is not function.__wrapped__:
                setattr(mixin, name, function.__wrapped__)


def _patch(mixin: type) -> None:
    global _is_installed
    _is_installed = True
    for name in ("generate", "generate_batch"):
        original = getattr(mixin, name, None)
        if original is not None and (name not in patched or original is patched[name].__wrapped__):
            patched[name] = functools.wraps(original)(_asking(original, is_batch=name == "generate_batch"))
            setattr(mixin, name, patched[name])
    generate = patched["generate"]
    signature = inspect.signature(generate.__wrapped__)
    *parameters, kwargs = signature.parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in ARGUMENTS.items()
        if name not in signature.parameters
    ]
    generate.__signature__ = signature.replace(parameters=[*parameters, *added, kwargs])
    generate.__doc__ = (generate.__wrapped__.__doc__ or "").rstrip() + _DOCUMENTATION


def _asking(original: Callable, is_batch: bool) -> Callable:
    """A function with the speculative arguments; without them, and where they say "off", it is the original."""

    def asked_for(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = take_asked(kwargs)
        if not _is_installed:
            return original(self, *args, **kwargs, **asked)
        asked = with_objects(asked, self, args, kwargs)
        if not asked or asks_for_off(asked):
            return original(self, *args, **kwargs)
        if is_batch:
            from .many.generate import generate_batch

            return generate_batch(self, *args, **kwargs, **asked)
        from .call.entry import generate_speculatively

        return generate_speculatively(self, original, args, kwargs, asked)

    return asked_for


class _PatchOnImport(MetaPathFinder):
    """Finds transformers' generation module as usual, and has it patched once it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        # It stays among the finders: whoever looks for a module need not load it.
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_patch(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    _patch(module.GenerationMixin)

            spec.loader.exec_module = run_and_patch
        return spec


_finder = _PatchOnImport()
