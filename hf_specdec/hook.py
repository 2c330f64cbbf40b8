"""Puts the speculative arguments onto `generate()` of all transformers models, and takes them back.

Nothing heavy is imported here. If transformers' generation code is not loaded yet, it is patched at the moment when it
is; the decoding loop is imported by the first speculative call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .arguments import ARGUMENTS, SpeculativeArguments, asked_for
from .patching import Patch


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


_patches: dict[str, Patch] = {}


def install() -> None:
    """Teaches `generate()` of all transformers models the speculative arguments. Safe to call twice."""
    module = sys.modules.get(_MODULE)
    if module is not None and hasattr(module, "GenerationMixin"):
        _patch(module.GenerationMixin)
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Takes back what `install()` did. Wrappers that other packages have put around it since then stay."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name, patch in list(_patches.items()):
        if patch.take_back():
            del _patches[name]


def _patch(mixin: type) -> None:
    for name, wrap in (("generate", _speculating), ("generate_batch", _batching)):
        patch = _patches.get(name)
        if patch is None or getattr(mixin, name) is patch.original:
            if not hasattr(mixin, name):
                continue
            patch = _patches[name] = Patch(mixin, name, wrap)
        patch.is_active = True
    generate = _patches["generate"]
    generate.function.__signature__ = _with_arguments(inspect.signature(generate.original))
    generate.function.__doc__ = (generate.original.__doc__ or "").rstrip() + _DOCUMENTATION


def _with_arguments(signature: inspect.Signature) -> inspect.Signature:
    """The signature with the speculative arguments in front of its `**kwargs`."""
    kwargs = [item for item in signature.parameters.values() if item.kind is inspect.Parameter.VAR_KEYWORD]
    parameters = {name: item for name, item in signature.parameters.items() if item not in kwargs}
    for name, annotation in ARGUMENTS.items():
        added = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        parameters.setdefault(name, added)
    return signature.replace(parameters=[*parameters.values(), *kwargs])


def _speculating(original: Callable, patch: Patch) -> Callable:
    """`generate()` with the speculative arguments."""

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = SpeculativeArguments(**{name: kwargs.pop(name, None) for name in ARGUMENTS})
        if not patch.is_active:
            return original(self, *args, **kwargs, **asked.given)
        asked = asked_for(self, args, kwargs, asked)
        if not asked.given:
            return original(self, *args, **kwargs)
        from .call.entry import generate_speculatively

        return generate_speculatively(self, original, args, kwargs, asked)

    return generate


def _batching(original: Callable, patch: Patch) -> Callable:
    """`generate_batch()` with the speculative arguments; without them transformers' own continuous batching."""

    def generate_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = SpeculativeArguments(**{name: kwargs.get(name) for name in ARGUMENTS})
        if patch.is_active and asked_for(self, args, kwargs, asked).given:
            from .many.batching import generate_batch_as_asked

            return generate_batch_as_asked(self, original, args, kwargs)
        return original(self, *args, **kwargs)

    return generate_batch


class _PatchOnImport(MetaPathFinder):
    """Finds transformers' generation module as usual, and has it patched once it has run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        # It stays among the finders: whoever looks for a module need not load it.
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_patch(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    _patch(module.GenerationMixin)

            spec.loader.exec_module = run_and_patch
        return spec


_finder = _PatchOnImport()
