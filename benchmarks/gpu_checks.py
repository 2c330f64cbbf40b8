"""The text of every method on a device, before times count there.

Texts are those of the embedded demo's target in float32 with its trained drafters, which accept and reject as they do
in use: chains, trees and batches, against plain `generate()`; once with the lean forward of small models, once with
the model's own modules, which large ones go through; on a GPU also without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from common import Row
from transformers import PreTrainedModel

from hf_specdec import SpecDecodingStats, demo, record
from hf_specdec.bench.prompts import Batch, make_batches
from hf_specdec.diagnosis import verify
from hf_specdec.method import built_in_methods
from hf_specdec.target import lean


# Chain and tree of the methods that have both; the others draft as they do by default.
_STATIC_CHAIN = {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0)]"}
_GROWN = {"draft_tree_depth": 5, "draft_tree_top_k": 4, "num_draft_nodes": 15}
_SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "ngram": {"chain": {"prompt_lookup_num_matches": 1}, "tree": {}},
    "suffix": {"chain": {}, "tree": {"suffix_decoding_use_tree_spec": True}},
    "recycling": {"chain": _STATIC_CHAIN, "tree": {"num_draft_nodes": 31}},
    "medusa": {"chain": {"num_speculative_tokens": 3}, "tree": {"num_draft_nodes": 31}},
    "mlp_speculator": {"chain": {"num_speculative_tokens": 3}, "tree": {"num_draft_nodes": 16}},
    "eagle": {"chain": {"num_speculative_tokens": 4}, "tree": _GROWN},
    "eagle3": {"chain": {"num_speculative_tokens": 4}, "tree": _GROWN},
    "mtp": {"chain": {"num_speculative_tokens": 3}, "tree": _GROWN},
    "dflash": {"chain": {}, "tree": {"num_draft_nodes": 16}},
}


def drafts() -> dict[str, dict[str, Any]]:
    """Settings of every method that can draft for the demo's target, chains and trees."""
    named = {method.name: {"method": method.name} for method in built_in_methods() if method.only_if_named}
    return {
        f"{name}, {shape}": {**settings, **own}
        for name, settings in (demo.settings() | named).items()
        if name == settings["method"]
        for shape, own in _SHAPES.get(name, {"chain": {}}).items()
    }


@cache
def target_and_batches(
    device: torch.device, max_new_tokens: int, is_quick: bool
) -> tuple[PreTrainedModel, list[Batch]]:
    """The demo's target, and batches of prompts."""
    target = demo.load_target().to(device)
    tokenizer, prompts = demo.load_tokenizer(), demo.prompts()
    # One to edit, one to continue, and the last ones together, padded.
    singles = prompts[-1:] if is_quick else (prompts[0], prompts[-1])
    batches = make_batches(tokenizer, singles, 1, max_new_tokens, device)
    if not is_quick:
        batches += make_batches(tokenizer, prompts[-4:], 4, max_new_tokens, device)
    return target, batches


def ways_through_a_model(device: torch.device) -> dict[str, tuple[Callable[[], AbstractContextManager], dict]]:
    """What a check of texts is made in, and further settings."""
    through_modules = partial(patch.object, lean, "has_lean_forward", lambda model: False)
    ways = {"lean forward": (nullcontext, {}), "modules": (through_modules, {})}
    if device.type == "cuda":
        ways["modules, no graphs"] = (through_modules, {"enforce_eager": True})
    return ways


def check_text(name: str, target: PreTrainedModel, settings: dict[str, Any], batches: list[Batch]) -> Row:
    """Compares greedy texts with those of plain `generate()`; a numerical tie counts as right.

    Raises:
        AssertionError: They differ, and it says where.
    """
    with record() as made:
        [found] = verify(target, {name: settings}, batches)
    stats, last = SpecDecodingStats.total([call.stats for call in made.calls]), made.calls[-1].stats
    if found.bugs:
        places = "; ".join(f"{one.verdict} in {one.prompt} from token {one.index}" for one in found.differences)
        raise AssertionError(f"{name}: {places}")
    facts = {"attention": last.attention, "graphs": last.graphs, "ties": len(found.differences)}
    return {"drafts": name, "tokens_per_cycle": stats.mean_acceptance_length, **facts}
