"""The tables of what is supported, as the tests try it: methods by features, and targets by model type."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hf_specdec.method import built_in_methods
from tests.helpers import architectures, encoder_decoders, images
from tests.helpers.families import WITHOUT, WITHOUT_LAST
from tests.helpers.methods import EVERYTHING, OTHER_CHECKPOINTS, exemption, settings_of


_LOSSLESS = Path(__file__).parents[1] / "tests" / "lossless"
_COMBINATIONS = "combinations"


def features_table() -> str:
    """Tests that take every row, in the groups of their files, with the methods they apply to, and why to no other."""
    columns = _rows_by_method()
    lines = ["| what is tested | with every setting of | with some settings of |", "|---|---|---|"]
    reasons: dict[str, list[str]] = {}
    # What users meet comes before what only methods do.
    for path in sorted(_LOSSLESS.glob("test_*.py"), key=lambda path: (path.stem == "test_contract", path.stem)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tests = [test for test in _tests_of(tree) if "row" in [argument.arg for argument in test.args.args]]
        if tests:
            lines.append(f"| **{(ast.get_docstring(tree) or '').partition(':')[0]}** | | |")
        for test in tests:
            exemptions = {name: [exemption(row, test.name) for row in rows] for name, rows in columns.items()}
            every = [name for name, found in exemptions.items() if not any(found)]
            some = [name for name, found in exemptions.items() if any(found) and not all(found)]
            shown = "every method" if len(every) == len(columns) else _listed(every)
            lines.append(f"| {_words(test.name)} | {shown} | {_listed(some)} |")
            for reason in {reason for found in exemptions.values() for reason in found} - {None}:
                reasons.setdefault(reason, []).append(_words(test.name))
    lines += ["", "| not for every method or setting | because |", "|---|---|"]
    lines += [f"| {'; '.join(tests)} | {reason} |" for reason, tests in sorted(reasons.items())]
    return "\n".join(lines)


def forms_table() -> str:
    """The settings in which every method is tested."""
    lines = ["| method | settings in the tests |", "|---|---|"]
    for name, rows in _rows_by_method().items():
        if name != _COMBINATIONS:
            lines.append(f"| `{name}` | {'; '.join(_form(row) for row in rows)} |")
    combined = ", ".join(f"`{row}`" for row in _rows_by_method()[_COMBINATIONS])
    return "\n".join([*lines, f"| {_COMBINATIONS} | {combined} |"])


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


def _rows_by_method() -> dict[str, list[str]]:
    """Rows of `tests/helpers/methods.py` of each method that has some, and those of all combinations."""
    found: dict[str, list[str]] = {method.name: [] for method in built_in_methods()}
    found[_COMBINATIONS] = []
    for parameter in EVERYTHING:
        (row,) = parameter.values
        found[_COMBINATIONS if "+" in row else row.partition(" ")[0]].append(row)
    return {name: rows for name, rows in found.items() if rows}


def _tests_of(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def _words(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def _form(row: str) -> str:
    settings = {
        key: value for key, value in settings_of(row).items() if key not in ("method", "model", "same_tokenizer")
    }
    checkpoint, _ = OTHER_CHECKPOINTS.get(row, (None, None))
    forms = [*([checkpoint] if checkpoint else []), *(f"`{key}={value}`" for key, value in settings.items())]
    return ", ".join(forms) or "the defaults"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name if name == _COMBINATIONS else f"`{name}`" for name in names)


def _by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return groups
