"""Settings whose best choice depends on the drafter and the machine, compared by `hf-specdec bench`.

    python benchmarks/run.py                                   # lists the cases
    python benchmarks/run.py eagle3 --rounds 5 --output eagle3.json
    python benchmarks/run.py eagle3 combined --num-prompts 2   # two prompts of each kind
    python benchmarks/run.py eagle3 --target user/model --drafter user/head --prompts spec-bench

A case is a list of `--spec`s. All other options are those of `hf-specdec bench`, which measures and prints: every way
of decoding generates every batch in turn, beside plain generation and transformers' own assisted generation. With the
embedded target, the default, every method has a drafter; `--drafter` names that of another target.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specdec.cli import app
from hf_specdec.method import takes_model


@dataclass(frozen=True)
class Case:
    """A question, and what is compared to answer it.

    Attributes:
        question (`str`): What the figures are to show.
        method (`str`): The method of all specs that name none.
        specs (`tuple[dict]`): Flat settings of each way of speculating.
        options (`tuple[str]`): Options of `hf-specdec bench`.
    """

    question: str
    method: str
    specs: tuple[dict[str, Any], ...]
    options: tuple[str, ...] = ()


def _lengths(*lengths: int | str) -> tuple[dict[str, Any], ...]:
    return tuple({"num_speculative_tokens": length} for length in lengths)


def _trees(*shapes: tuple[int, int, int]) -> tuple[dict[str, Any], ...]:
    """Dynamic trees by levels, children of a node, and nodes."""
    return tuple(
        {"draft_tree_depth": depth, "draft_tree_top_k": top_k, "num_draft_nodes": nodes}
        for depth, top_k, nodes in shapes
    )


_EAGLE_TREES = _trees((5, 4, 11), (6, 8, 31), (8, 10, 59))
_FRESH = {"suffix_decoding_max_cached_requests": 0}
_AS_TREE = {"suffix_decoding_use_tree_spec": True}

CASES = {
    "medusa": Case(
        "Chain or tree, and how many nodes?",
        "medusa",
        (
            *_lengths(1, 4),
            {},
            {"num_draft_nodes": 12},
            {"num_draft_nodes": 63},
            {"speculative_token_tree": "mc_sim_7b_63"},
            {"num_draft_nodes": 12, "medusa_tree": "measured"},
        ),
    ),
    "mlp_speculator": Case(
        "Chain, tree of the best nodes, or several candidates?",
        "mlp_speculator",
        (
            *_lengths(2, 4),
            {},
            {"num_draft_nodes": 8},
            {"num_draft_nodes": 16},
            {"mlp_speculator_num_candidates": 4},
        ),
    ),
    "eagle": Case("Chain or tree, and how large?", "eagle", (*_lengths(2, 4, 6), *_EAGLE_TREES)),
    "eagle3": Case("Chain or tree, and how large?", "eagle3", (*_lengths(2, 4, 6), *_EAGLE_TREES)),
    "early-stop": Case(
        "At which path probability should drafting stop?",
        "eagle3",
        tuple({"num_speculative_tokens": 6, "draft_min_path_prob": share} for share in (0.0, 0.1, 0.2, 0.3)),
    ),
    "dflash": Case(
        "Whole blocks, several denoising steps, or trees?",
        "dflash",
        (
            {},
            *_lengths(3),
            *({"dflash_num_denoising_steps": steps} for steps in (2, 3)),
            *({"num_draft_nodes": nodes} for nodes in (8, 16, 32)),
        ),
    ),
    "mtp": Case("How far does one layer draft, beside transformers' use_mtp=True?", "mtp", _lengths(1, 2, 3, 4)),
    "retrieval": Case(
        "Are the trees of retrieved drafts better than chains?",
        "ngram",
        (
            *({"prompt_lookup_num_matches": matches} for matches in (1, 2, 4, 8)),
            {"method": "suffix", "suffix_decoding_use_tree_spec": False},
            {"method": "suffix", **_AS_TREE},
            {"method": "suffix", "suffix_decoding_max_spec_factor": 4.0, **_AS_TREE},
        ),
    ),
    "combined": Case(
        "What do two methods bring beside each alone?",
        "suffix",
        (
            _FRESH,
            {"method": "eagle3"},
            {"method": "suffix+eagle3", **_FRESH},
            {"method": "draft_model"},
            {"method": "suffix+draft_model", **_FRESH},
        ),
    ),
    "rules": Case(
        "How much does block verification accept beyond the standard rule?",
        "draft_model",
        tuple(
            {"num_speculative_tokens": length, "rejection_sample_method": rule}
            for length in (4, 8)
            for rule in ("standard", "block")
        ),
        ("--temperature", "1"),
    ),
    "auto": Case("Does the adaptive length find the best one?", "draft_model", _lengths("auto", 1, 3, 5, 8, 12)),
}


def command(case: Case, drafter: str | None) -> list[str]:
    """The arguments of `hf-specdec` that measure a case."""
    found = ["bench", *case.options]
    for settings in case.specs:
        spec = {"method": case.method, **settings}
        if drafter is not None and takes_model(spec["method"]):
            spec["model"] = drafter
        found += ["--spec", json.dumps(spec)]
    return found


def main(arguments: list[str]) -> None:
    count = next((index for index, text in enumerate(arguments) if text.startswith("-")), len(arguments))
    names, options = arguments[:count], arguments[count:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", help="repo id or folder of the drafter, for another target than the embedded one")
    parser.add_argument("--output", type=Path, help="file for the figures; of several cases the name has the case")
    own, passed_on = parser.parse_known_args(options)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        parser.error(f"there is no case '{unknown[0]}'; there are {', '.join(CASES)}")
    if not names:
        print("\n".join(f"{name:15} {case.question}" for name, case in CASES.items()))
    for name in names:
        print(f"{name}: {CASES[name].question}", file=sys.stderr)
        written = []
        if own.output is not None:
            file = own.output.with_stem(f"{own.output.stem}-{name}") if len(names) > 1 else own.output
            written = ["--output", str(file)]
        code = app([*command(CASES[name], own.drafter), *written, *passed_on], standalone_mode=False)
        if code:
            raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
