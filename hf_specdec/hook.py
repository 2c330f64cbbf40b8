"""Puts the speculative arguments onto `generate()` of all transformers models, and takes them back.

Nothing heavy is imported here. If transformers' generation code is not loaded yet, it is patched at the moment when it
is; the decoding loop is imported by the first speculative call.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import Loader, MetaPathFinder
from typing import Any


_MODULE = "transformers.generation.utils"

_OFF = ("off", "none")

# The speculative arguments, and what they are annotated with.
ARGUMENTS = {
    "spec_method": "str | None",
    "spec_model": "str | os.PathLike | PreTrainedModel | None",
    "num_speculative_tokens": "int | str | None",
    "speculative": "SpeculativeConfig | dict | str | None",
    "assistant": "Speculator | PreTrainedModel | CandidateGenerator | None",
}

_DOCUMENTATION = """

        Speculative decoding, by hf_specdec: a drafter proposes tokens, and the model verifies several in one forward.
        What is generated stays the same.

        spec_method (`str`, *optional*):
            Name of the method, such as "ngram", "suffix", "eagle3" or "suffix+eagle3"; "auto" finds a drafter, "off"
            is plain generation.
        spec_model (`str`, `os.PathLike` or `PreTrainedModel`, *optional*):
            Draft checkpoint; without a `spec_method` the method is read from it.
        num_speculative_tokens (`int` or `str`, *optional*):
            Most draft tokens of a cycle; "auto": as many as pay, down to plain decoding.
        speculative (`SpeculativeConfig`, `dict` or `str`, *optional*):
            All settings in one, a method, or a draft checkpoint.
        assistant (`Speculator`, `PreTrainedModel` or `CandidateGenerator`, *optional*):
            A loaded speculator, a draft model, or a candidate generator.
"""


class _Patch:
    """One method of a class with a function in its place.

    Args:
        owner (`type`): The class.
        name (`str`): The method, its own or inherited.
        wrap (`Callable`): Makes the function from the original one and this patch.

    Attributes:
        is_active (`bool`): Whether the function does anything but call the original. Where another package has put
            its own function around it, it cannot be taken out.
    """

    def __init__(self, owner: type, name: str, wrap: Callable):
        self.owner, self.name, self.is_active = owner, name, True
        self._is_own = name in vars(owner)
        self.original = getattr(owner, name)
        while (patch := _patch_behind(self.original)) is not None and not patch.is_active:
            # One of ours that was buried, and has come to the surface.
            self.original = patch.original
        self.function = functools.wraps(self.original)(wrap(self.original, self))
        self.function.patch = self
        setattr(owner, name, self.function)

    @property
    def is_reached(self) -> bool:
        """Whether the class still calls it, as far as can be seen: directly, or by functions of other packages."""
        below = set(map(id, _chain(self.original)))
        for found in _chain(getattr(self.owner, self.name)):
            if found is self.function:
                return True
            if id(found) in below or _patch_behind(found) is not None:
                return False
        # Something that does not say what it calls has probably been put around ours.
        return True

    def take_back(self) -> None:
        self.is_active = False
        # From here on it looks like the original, too.
        self.function.__doc__ = self.original.__doc__
        vars(self.function).pop("__signature__", None)
        if getattr(self.owner, self.name) is not self.function:
            return
        if self._is_own:
            setattr(self.owner, self.name, self.original)
        else:
            delattr(self.owner, self.name)


def _patch_behind(function: Callable) -> _Patch | None:
    """The patch whose function it is. Functions around it have copies of its attributes."""
    patch = getattr(function, "patch", None)
    return patch if isinstance(patch, _Patch) and patch.function is function else None


def _chain(function: Callable) -> Iterator[Callable]:
    """The function, the one that it says to be around, and so on."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


_patches: list[_Patch] = []


def install() -> None:
    """Teaches `generate()` of all transformers models the speculative arguments. Safe to call twice."""
    module = sys.modules.get(_MODULE)
    if module is not None and hasattr(module, "GenerationMixin"):
        _patch(module.GenerationMixin)
    elif not any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchOnImport())


def uninstall() -> None:
    """Takes back what `install()` did. What other packages have put around it since then stays."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _PatchOnImport)]
    while _patches:
        _patches.pop().take_back()


def original_generate(model_class: type):
    """The class's `generate` without the speculative arguments."""
    generate = model_class.generate
    patch = _patch_behind(generate)
    return generate if patch is None else patch.original


def is_off(value: Any) -> bool:
    """Whether `spec_method` or `speculative` asks for plain generation."""
    return value is False or (isinstance(value, str) and str.__str__(value) in _OFF)


class GivenArguments(dict):
    """Speculative arguments that were put into a generation config as objects, which no file can hold."""


def configured_settings(model: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the generation config that a `generate()` call goes by, the given one or else the model's own, asks for.

    It may have any of the speculative arguments.

    Returns:
        What `speculative` may be in a generation config, also where the other names were used; [`GivenArguments`]
        where one is an object; `None` where there is none.
    """
    given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    for config in (given, getattr(model, "generation_config", None)):
        found = {name: value for name in ARGUMENTS if (value := getattr(config, name, None)) is not None}
        if found:
            return _as_settings(found)
    return None


# What a file can hold, and paths.
_WRITTEN = (str, int, float, list, tuple, dict, os.PathLike)

# Names in a generation config, and what they are called among the settings.
_SETTINGS = {"spec_method": "method", "spec_model": "model"}


def _as_settings(found: dict[str, Any]) -> Any:
    """Several arguments of a generation config as one entry; as in a call, the single ones take precedence."""
    if found.keys() == {"speculative"}:
        return found["speculative"]
    if is_off(found.get("spec_method")) or is_off(found.get("speculative")):
        return "off"
    from .errors import SpecConfigError
    from .hub.published import settings_of_generation_config

    settings = found.pop("speculative", {})
    if not all(isinstance(found.get(name, ""), _WRITTEN) for name in ("assistant", "spec_model")):
        # The settings beside the object may have come with the model.
        return GivenArguments(found, **({"speculative": settings_of_generation_config(settings)} if settings else {}))
    if isinstance(settings, str):
        try:
            settings = settings_of_generation_config(settings)
        except SpecConfigError:
            # Whoever follows it says what is wrong, if the call asks for it at all.
            return settings
    elif not isinstance(settings, Mapping):
        # A configuration.
        settings = settings.to_dict() if hasattr(settings, "to_dict") else {"speculative": settings}
    named = {_SETTINGS.get(name, name): value for name, value in found.items()}
    return {**settings, **{name: os.fspath(v) if isinstance(v, os.PathLike) else v for name, v in named.items()}}


def _patch(mixin: type) -> None:
    if _patches and all(patch.is_reached for patch in _patches):
        return
    uninstall()
    _patches.append(_Patch(mixin, "generate", _speculating))
    _patches[-1].function.__signature__ = _with_arguments(inspect.signature(_patches[-1].original))
    _patches[-1].function.__doc__ = (_patches[-1].original.__doc__ or "").rstrip() + _DOCUMENTATION
    if hasattr(mixin, "generate_batch"):
        _patches.append(_Patch(mixin, "generate_batch", _refusing))


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


def _speculating(original: Callable, patch: _Patch) -> Callable:
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
        asked = (spec_method, spec_model, num_speculative_tokens, speculative, assistant)
        is_asked = any(argument is not None for argument in asked)
        if not patch.is_active:
            given = {name: value for name, value in zip(ARGUMENTS, asked) if value is not None}
            return original(self, *args, **kwargs, **given)
        if not is_asked and configured_settings(self, args, kwargs) is None:
            return original(self, *args, **kwargs)
        from .integration import generate_speculatively

        return generate_speculatively(self, original, args, kwargs, *asked)

    return generate


def _refusing(original: Callable, patch: _Patch) -> Callable:
    """`generate_batch()`, transformers' continuous batching, which drops arguments that it does not know."""

    def generate_batch(self, *args, **kwargs):
        given = {name: value for name in ARGUMENTS if (value := kwargs.get(name)) is not None}
        if patch.is_active and (given or configured_settings(self, args, kwargs) is not None):
            from .integration import check_continuous_batching

            check_continuous_batching(self, given)
            kwargs = {name: value for name, value in kwargs.items() if name not in ARGUMENTS}
        return original(self, *args, **kwargs)

    return generate_batch


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
