"""Puts the speculative arguments onto `generate()` of all transformers models, and takes them back.

Nothing heavy is imported here. If transformers' generation code is not loaded yet, it is patched at the moment when it
is; the decoding loop is imported by the first speculative call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from typing import Any

from .arguments import ARGUMENTS, SpeculativeArguments, configured_arguments
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


_patches: list[Patch] = []


def install() -> None:
    """Teaches `generate()` of all transformers models the speculative arguments. Safe to call twice."""
    module = sys.modules.get(_MODULE)
    if module is not None and hasattr(module, "GenerationMixin"):
        _patch(module.GenerationMixin)
    elif not any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchOnImport())


def uninstall() -> None:
    """Takes back what `install()` did. Wrappers that other packages have put around it since then stay."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _PatchOnImport)]
    while _patches:
        _patches.pop().take_back()


def _patch(mixin: type) -> None:
    if _patches and all(patch.is_reached for patch in _patches):
        return
    uninstall()
    _patches.append(Patch(mixin, "generate", _speculating))
    _patches[-1].function.__signature__ = _with_arguments(inspect.signature(_patches[-1].original))
    _patches[-1].function.__doc__ = (_patches[-1].original.__doc__ or "").rstrip() + _DOCUMENTATION
    if hasattr(mixin, "generate_batch"):
        _patches.append(Patch(mixin, "generate_batch", _batching))


def _with_arguments(signature: inspect.Signature) -> inspect.Signature:
    """The signature with the speculative arguments in front of its `**kwargs`."""
    parameters = list(signature.parameters.values())
    rest = [parameters.pop()] if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    known = set(signature.parameters)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in ARGUMENTS.items()
        if name not in known
    ]
    return signature.replace(parameters=[*parameters, *added, *rest])


def _speculating(original: Callable, patch: Patch) -> Callable:
    """`generate()` with the speculative arguments."""

    def generate(
        self,
        *args,
        spec_method: str | None = None,
        spec_model: Any = None,
        num_speculative_tokens: int | str | None = None,
        speculative: Any = None,
        assistant: Any = None,
        **kwargs,
    ):
        asked = SpeculativeArguments(spec_method, spec_model, num_speculative_tokens, speculative, assistant)
        if not patch.is_active:
            return original(self, *args, **kwargs, **asked.given)
        configured = None if asked.choose_drafter else configured_arguments(self, args, kwargs)
        if configured is None and not asked.given:
            return original(self, *args, **kwargs)
        from .integration import generate_speculatively

        return generate_speculatively(self, original, args, kwargs, asked, configured)

    return generate


def _batching(original: Callable, patch: Patch) -> Callable:
    """`generate_batch()` with the speculative arguments; without them transformers' own continuous batching."""

    def generate_batch(self, *args, **kwargs):
        is_given = any(kwargs.get(name) is not None for name in ARGUMENTS)
        if patch.is_active and (is_given or configured_arguments(self, args, kwargs) is not None):
            from .many.batching import generate_batch_as_asked

            return generate_batch_as_asked(self, original, args, kwargs)
        return original(self, *args, **kwargs)

    return generate_batch


class _PatchOnImport(MetaPathFinder):
    """Finds transformers' generation module as usual and patches it once it has run."""

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        # It stays until the module runs: whoever looks for a module need not load it.
        others = (finder for finder in sys.meta_path if not isinstance(finder, _PatchOnImport))
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(Loader):
    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module) -> None:
        self.loader.exec_module(module)
        # From here on the module is as if it had been loaded without us.
        module.__spec__.loader = module.__loader__ = self.loader
        _patch(module.GenerationMixin)

    def __getattr__(self, name: str):
        return getattr(self.loader, name)
