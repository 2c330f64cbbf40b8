"""The one table of methods: each with a small real checkpoint for the demo's target, and what tests need around it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import pytest
import torch
from transformers import PreTrainedModel

from hf_specdec import Speculator, demo, load_speculator
from hf_specdec.method import built_in_methods, parts_of


CHECKPOINTS = {
    "draft_model": demo.draft_path,
    "medusa": demo.medusa_path,
    "mlp_speculator": demo.mlp_speculator_path,
    "eagle": demo.eagle_path,
    "eagle3": demo.eagle3_path,
    "dflash": demo.dflash_path,
    "mtp": demo.mtp_path,
}

# Settings beside the checkpoint, by a name that begins with the method.
_SHAPES = {
    "ngram": {},
    "suffix": {},
    "draft_model": {},
    "medusa": {},
    "medusa measured": {"medusa_tree": "measured"},
    "mlp_speculator": {},
    "mlp_speculator tree": {"mlp_speculator_num_nodes": 8},
    "eagle": {},
    "eagle3": {},
    "eagle3 tree": {"depth": 3, "top_k": 3, "total_tokens": 9},
    "dflash": {},
    "dflash tree": {"dflash_tree_budget": 12},
    "mtp": {},
    "mtp reuse": {"mode": "reuse", "num_speculative_tokens": 4},
    **{f"{first}+{second}": {} for first in ("ngram", "suffix") for second in CHECKPOINTS},
}

# What makes a method draft chains where it would draft trees.
_CHAINS = {
    "ngram": {"prompt_lookup_num_matches": 1},
    "medusa": {"num_speculative_tokens": 3},
    "mlp_speculator": {"num_speculative_tokens": 3},
    "eagle": {"num_speculative_tokens": 4},
    "eagle3": {"num_speculative_tokens": 4},
}


def settings_of(name: str, **settings) -> dict:
    """The settings of a row of the table, for `generate(speculative=...)`."""
    method = name.partition(" ")[0]
    path = CHECKPOINTS.get(parts_of(method)[-1])
    model = {} if path is None else {"model": path(), **({"same_tokenizer": True} if "draft_model" in method else {})}
    return {"method": method, **model, **_SHAPES[name], **settings}


def chains_of(name: str) -> dict:
    """The same for chains."""
    return settings_of(name, **_CHAINS.get(name, {}))


def _params(names):
    needs_library = pytest.mark.skipif(find_spec("arctic_inference") is None, reason="needs arctic-inference")
    return [pytest.param(name, marks=needs_library if "suffix" in name else ()) for name in names]


METHODS = _params(method.name for method in built_in_methods())
COMBINATIONS = _params(name for name in _SHAPES if "+" in name)
EVERYTHING = _params(_SHAPES)

assert {method.name for method in built_in_methods()} <= set(_SHAPES), "a method is missing in the table"


@cache
def demo_target() -> PreTrainedModel:
    return demo.load_target()


@cache
def demo_inputs(batch_size: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of the demo, of different lengths."""
    tokenizer = demo.load_tokenizer()
    tokenizer.padding_side = "left"
    texts = [prompt.text[-length:] for prompt, length in zip(demo.prompts(), (160, 300, 220, 260))][:batch_size]
    encoded = tokenizer(texts, return_tensors="pt", padding=True)
    return {key: encoded[key] for key in ("input_ids", "attention_mask")}


@cache
def plain_text(batch_size: int, max_new_tokens: int) -> torch.LongTensor:
    """What the demo's target writes greedily, `(B, L)`."""
    return demo_target().generate(**demo_inputs(batch_size), max_new_tokens=max_new_tokens, do_sample=False)


def fresh_speculator(settings: dict) -> Speculator:
    """A speculator for the demo's target that knows of no earlier text; weights and what they learn are shared."""
    target = demo_target()
    return load_speculator(target, settings).without_texts(target)
