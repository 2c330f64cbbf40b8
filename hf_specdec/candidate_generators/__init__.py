"""The methods: one file each, found by name through one table and imported on first use."""

from __future__ import annotations

import difflib
from importlib import import_module

from ..errors import SpecConfigError, shown


_GENERATORS: dict[str, str | type] = {
    "ngram": "hf_specdec.candidate_generators.ngram.generator:NgramCandidateGenerator",
    "suffix": "hf_specdec.candidate_generators.suffix.generator:SuffixCandidateGenerator",
    "draft_model": "hf_specdec.candidate_generators.draft_model.generator:DraftModelCandidateGenerator",
    "medusa": "hf_specdec.candidate_generators.medusa.generator:MedusaCandidateGenerator",
    "mlp_speculator": "hf_specdec.candidate_generators.mlp_speculator.generator:MLPSpeculatorCandidateGenerator",
    "eagle": "hf_specdec.candidate_generators.eagle.generator:EagleCandidateGenerator",
    "eagle3": "hf_specdec.candidate_generators.eagle.generator:EagleCandidateGenerator",
    "dflash": "hf_specdec.candidate_generators.dflash.generator:DFlashCandidateGenerator",
    "mtp": "hf_specdec.candidate_generators.mtp.generator:MtpCandidateGenerator",
}

KNOWN_METHODS = tuple(_GENERATORS)

# Stands between the two methods of a combination.
COMBINING = "+"

METHOD_ALIASES = {
    "prompt_lookup": "ngram",
    "prompt_lookup_decoding": "ngram",
    "suffix_decoding": "suffix",
    "assistant_model": "draft_model",
    "deepseek_mtp": "mtp",
    "mimo_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "ernie_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "longcat_flash_mtp": "mtp",
}

# Names that engines have for methods, and nothing that could be done under them here.
_WITHOUT_MODELS = {"pangu_ultra_moe_mtp": "transformers has no model of the type pangu_ultra_moe"}


def available_methods() -> tuple[str, ...]:
    """Names that `resolve_candidate_generator` has a class for, registered ones included."""
    return tuple(_GENERATORS)


def parts_of(name: str) -> tuple[str, ...]:
    """The methods that a name combines, without aliases: "suffix+eagle3" gives both, and "eagle3" itself alone."""
    return tuple(METHOD_ALIASES.get(part, part) for part in name.split(COMBINING))


def is_method_name(text: str) -> bool:
    """Whether a text is the name of a method, or of a combination that has a known part, and no path or repo id."""
    parts = parts_of(text)
    known = [part in _GENERATORS or part in _WITHOUT_MODELS for part in parts]
    return known[0] if len(parts) == 1 else any(known) and "/" not in text


def resolve_candidate_generator(name: str) -> type:
    """The class of a method or of a combination of two, imported on first use.

    Raises:
        SpecConfigError: The name is unknown, or its parts cannot be combined.
    """
    parts = parts_of(name)
    if len(parts) > 1:
        from .combined.generator import combined_generator

        return combined_generator(parts)
    (name,) = parts
    if name not in _GENERATORS:
        raise _unknown_method(name)
    found = _GENERATORS[name]
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        found = _GENERATORS[name] = getattr(import_module(module), attribute)
    return found


def register_candidate_generator(name: str, generator: type) -> None:
    """Adds a method under a new name, usable as `spec_method=name` from then on.

    Args:
        name (`str`): A name that no method or alias has.
        generator (`type`): A subclass of `hf_specdec.CandidateGenerator` with its own `options_class`.

    Raises:
        SpecConfigError: The name is taken or would be read as a combination, or the class is not a candidate
            generator of this package.
    """
    from ..setting_names import AUTO
    from .base import CandidateGenerator

    if COMBINING in name:
        raise SpecConfigError(f"spec_method='{name}' would be read as a combination. Name it without '{COMBINING}'.")
    if name in _GENERATORS or name in METHOD_ALIASES or name == AUTO:
        raise SpecConfigError(f"spec_method='{name}' is taken. Register the candidate generator under another name.")
    if not (isinstance(generator, type) and issubclass(generator, CandidateGenerator)):
        raise SpecConfigError(
            f"A candidate generator must be a subclass of hf_specdec.CandidateGenerator, got {generator!r}."
        )
    _GENERATORS[name] = generator


def unregister_candidate_generator(name: str) -> None:
    """Removes a method that was added with `register_candidate_generator`."""
    if isinstance(_GENERATORS.get(name), str) or name not in _GENERATORS:
        raise SpecConfigError(f"spec_method='{name}' was not registered.")
    del _GENERATORS[name]


def _unknown_method(name: str) -> SpecConfigError:
    if name in _WITHOUT_MODELS:
        return SpecConfigError(
            f"spec_method='{name}' cannot be used: {_WITHOUT_MODELS[name]}. For MTP layers of other families "
            "use 'mtp'; 'ngram' works with every target."
        )
    available = ", ".join(_GENERATORS)
    close = difflib.get_close_matches(name[:100], [*KNOWN_METHODS, *_GENERATORS, *METHOD_ALIASES], n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return SpecConfigError(f"Unknown spec_method={shown(name)}.{hint} Choose from: {available}.")
