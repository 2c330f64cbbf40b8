"""The tables of the targets that the tests try, by model type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.helpers import architectures, encoder_decoders, images
from tests.helpers.families import WITHOUT, WITHOUT_LAST


def targets_table() -> str:
    """Model types that the tests decode, by what can be drafted for them."""
    causal = [name for name in architectures.supported() if name not in architectures.VARIANTS]
    chains = architectures.CHAINS_ONLY
    groups = {
        "causal language models: chains and trees": [
            name for name in causal if name not in chains | architectures.RECURRENT
        ],
        "causal language models with recurrent layers: chains and trees": [
            name for name in causal if name in architectures.RECURRENT - chains
        ],
        "causal language models that count the slots of their cache: chains": [
            name for name in causal if name in chains
        ],
        "image-text-to-text models with text prompts, beyond those above": architectures.with_images(),
        "image-text-to-text models also with images: chains and trees": images.TESTED,
        "models with an encoder: chains and trees": [
            name for name in encoder_decoders.supported() if name not in encoder_decoders.CHAINS_ONLY
        ],
        "models with an encoder whose decoders count the slots of their cache: chains": sorted(
            encoder_decoders.CHAINS_ONLY
        ),
    }
    lines = ["| targets | number | `model_type` |", "|---|---|---|"]
    lines += [f"| {group} | {len(names)} | {_listed(names)} |" for group, names in groups.items()]
    return "\n".join(lines)


def states_table() -> str:
    """Model types for which methods that read hidden states cannot draft, or not all of them."""
    lines = ["| hidden states | `model_type` |", "|---|---|"]
    lines.append(f"| none that drafters could read | {_listed(WITHOUT)} |")
    return "\n".join([*lines, f"| of the layers, but not what the lm_head reads | {_listed(sorted(WITHOUT_LAST))} |"])


def refused_table() -> str:
    """Model types that are refused with an error, and those that the tests cannot try, each with the reason."""
    refused = {name: architectures.UNSUPPORTED[name][0] for name in architectures.unsupported()}
    refused = {**encoder_decoders.UNSUPPORTED, **refused, **images.REFUSED}
    tried = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    elsewhere = architectures.WITH_ENCODER, architectures.WITH_IMAGE
    tried -= {name for name, reason in architectures.NOT_BUILT.items() if reason in elsewhere}
    untried = {name: reason for name, reason in architectures.NOT_BUILT.items() if name in tried}
    lines = ["| | reason | `model_type` |", "|---|---|---|"]
    needed = {name: f"needs {need}" for name, need in images.NOT_TRIED.items()}
    for title, reasons in (("refused", refused), ("not tried", untried), ("not tried with images", needed)):
        for reason, names in _by_reason(reasons).items():
            lines.append(f"| {title} | {reason} | {_listed(names)} |")
    return "\n".join(lines)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return groups
