"""Puts the speculative arguments onto `generate()` of all transformers models, and takes them back.

Nothing heavy is imported here. If transformers' generation code is not loaded yet, it is patched at the moment when it
is; the decoding loop is imported by the first speculative call.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from typing import Any


_MODULE = "transformers.generation.utils"

_original_generate = None


def install() -> None:
    """Teaches `generate()` of all transformers models the speculative arguments. Safe to call twice."""
    module = sys.modules.get(_MODULE)
    if module is not None and hasattr(module, "GenerationMixin"):
        _patch(module.GenerationMixin)
    elif not any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchOnImport())


def uninstall() -> None:
    """Takes back what `install()` did."""
    global _original_generate
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _PatchOnImport)]
    if _original_generate is not None:
        sys.modules[_MODULE].GenerationMixin.generate = _original_generate
        _original_generate = None


def original_generate(model_class: type):
    """The class's `generate` without the speculative arguments."""
    generate = model_class.generate
    return getattr(generate, "without_speculation", generate)


def configured_settings(model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """`speculative` of the generation config that a `generate()` call goes by: the given one, else the model's own."""
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    settings = getattr(given, "speculative", None)
    return getattr(getattr(model, "generation_config", None), "speculative", None) if settings is None else settings


def _patch(mixin: type) -> None:
    global _original_generate
    if _original_generate is not None:
        return
    original = _original_generate = mixin.generate

    @functools.wraps(original)
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
        asked = (spec_method, spec_model, num_speculative_tokens, speculative, assistant)
        if all(argument is None for argument in asked) and configured_settings(self, args, kwargs) is None:
            return original(self, *args, **kwargs)
        from .integration import generate_speculatively

        return generate_speculatively(self, original, args, kwargs, *asked)

    generate.without_speculation = original
    mixin.generate = generate


class _PatchOnImport(MetaPathFinder):
    """Finds transformers' generation module as usual and patches it once it has run."""

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
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
