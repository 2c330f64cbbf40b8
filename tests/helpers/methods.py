"""The one table of methods: each with a small real checkpoint for the demo's target, and what tests need around it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import Speculator, demo, load_speculator
from hf_specdec.control import ControlProfile
from hf_specdec.method import NO_DRAFTS, built_in_methods, parts_of
from hf_specdec.settings import option_fields
from tests.helpers.block_drafts import HEADS, head_path
from tests.helpers.paths import FIXTURES


NEED_GRAMMAR = [method.name for method in built_in_methods() if method.needs_grammar]

CHECKPOINTS = {method.name: demo.drafter_path(method.name) for method in built_in_methods() if method.demo}

# Every way to draft, by a name that begins with the method: the settings beside the checkpoint.
_STATIC_TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
_SHAPES = {
    "ngram": {},
    "ngram chain": {"prompt_lookup_num_matches": 1},
    "suffix": {},
    "suffix tree": {"suffix_decoding_use_tree_spec": True, "suffix_decoding_max_spec_factor": 4.0},
    "recycling": {},
    "recycling chain": {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0)]"},
    "recycling large tree": {"num_draft_nodes": 40},
    "early_exit": {"early_exit_layer": 4},
    "sparse_kv": {"sparse_kv_window": 48},
    "draft_model": {},
    "draft_model confident": {"draft_confidence_threshold": 0.5},
    "draft_model first tokens": {"draft_vocabulary_size": 2000},
    "draft_model shared tokens": {"draft_vocabulary": "shared_tokens"},
    "draft_model re-encoded": {"draft_vocabulary": "text"},
    "medusa": {},
    "medusa chain": {"num_speculative_tokens": 3},
    "medusa static tree": {"speculative_token_tree": _STATIC_TREE},
    "medusa measured": {"medusa_tree": "measured"},
    "mlp_speculator": {},
    "mlp_speculator chain": {"num_speculative_tokens": 3},
    "mlp_speculator candidates": {"mlp_speculator_num_candidates": 4},
    "mlp_speculator static tree": {"speculative_token_tree": _STATIC_TREE},
    "mlp_speculator tree": {"num_draft_nodes": 8},
    "eagle": {},
    "eagle tree": {"draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 8},
    "eagle3": {},
    "eagle3 chain": {"num_speculative_tokens": 4},
    "eagle3 static tree": {"speculative_token_tree": _STATIC_TREE},
    "eagle3 tree": {"draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 8},
    "eagle3 adaptive tree": {
        "draft_tree_depth": 4,
        "draft_tree_top_k": 3,
        "num_draft_nodes": 8,
        "draft_confidence_threshold": 0.3,
    },
    "dflash": {},
    "dflash part of a block": {"dflash_block_size": 6, "num_speculative_tokens": 3},
    "dflash denoising": {"dflash_num_denoising_steps": 3},
    "dflash tree": {"num_draft_nodes": 12},
    "dflash siblings": {"num_draft_nodes": 12, "draft_tree_top_k": 3},
    "dflash selector": {"num_draft_nodes": 0},
    "dflash selector tree": {"num_draft_nodes": 12},
    "dflash confident": {"draft_confidence_threshold": 0.3},
    "dflash domino": {},
    "dflash lilicorr": {},
    "dflash xpress": {},
    "mtp": {},
    "mtp reuse": {"mtp_mode": "reuse", "num_speculative_tokens": 4},
    "mtp reuse tree": {"mtp_mode": "reuse", "draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 8},
    "grammar": {},
    **{
        name: {}
        for name in (
            *("grammar+ngram", "grammar+suffix", "grammar+eagle3"),
            *("ngram+recycling", "ngram+draft_model", "ngram+medusa", "ngram+eagle3", "ngram+dflash"),
            *("suffix+recycling", "suffix+mlp_speculator", "suffix+eagle", "suffix+eagle3", "suffix+mtp"),
        )
    },
}

# Methods that the table has in no combination.
_SHAPES |= {
    f"ngram+{method.name}": {}
    for method in built_in_methods()
    if method.name != NO_DRAFTS and not any(method.name in parts_of(name) for name in _SHAPES if "+" in name)
}

# Rows with another checkpoint than their method's: what it is, and where; `None` where it is made.
_FIXTURES = FIXTURES
_DFLASH2 = _FIXTURES / "demo" / "drafters" / "dflash2"
_OTHER_TOKENIZER = _FIXTURES / "other_tokenizer"
OTHER_CHECKPOINTS = {
    **{name: ("a DFlash 2 draft", str(_DFLASH2)) for name in ("dflash selector", "dflash selector tree")},
    **{
        name: ("a draft model with another tokenizer", str(_OTHER_TOKENIZER))
        for name in ("draft_model shared tokens", "draft_model re-encoded")
    },
    **{f"dflash {name}": (what, None) for name, (what, _) in HEADS.items()},
}

# Settings that make a method draft chains where it would draft trees.
_CHAINS = {
    "ngram": {"prompt_lookup_num_matches": 1},
    "recycling": {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0)]"},
    "medusa": {"num_speculative_tokens": 3},
    "mlp_speculator": {"num_speculative_tokens": 3},
    "eagle": {"num_speculative_tokens": 4},
    "eagle3": {"num_speculative_tokens": 4},
}

# One combination with a drafter that draws from one layer of its own, and one with hidden states.
_DRAWN_COMBINATIONS = ("ngram+draft_model", "suffix+eagle3")

_OF_THE_TARGET = {
    name: "it drafts with the slots of this package's loop"
    for name in _SHAPES
    if "early_exit" in name or "sparse_kv" in name
}

# By test of `tests/lossless` and row: why it does not apply.
EXEMPT = {
    "test_transformers_own_loop": _OF_THE_TARGET,
    "test_it_drafts": _OF_THE_TARGET,
    "test_rows_end_while_it_is_paused_from_the_start": {
        name: "a length for each batch size asks for chains, and its settings ask for trees"
        for name in ("medusa measured", "eagle tree", "eagle3 tree", "eagle3 adaptive tree", "mtp reuse tree")
    },
    "test_told_late_and_of_fewer_rows_it_drafts_as_well": {
        **_OF_THE_TARGET,
        **{name: "rows draft from each other's text" for name in _SHAPES if "suffix" in name or "recycling" in name},
    },
    "test_as_many_tokens_are_accepted_as_alone": {
        **{name: "rows draft from each other's text" for name in _SHAPES if "suffix" in name or "recycling" in name},
        **{
            name: "its parts take turns by the number of the row"
            for name in _SHAPES
            if "ngram+" in name or name == "grammar+eagle3"
        },
    },
    "test_drawn_drafts_that_lie_about_their_distribution_are_noticed": {
        "dflash selector": "too few of its drafts are accepted for so few rows to show it",
        "dflash lilicorr": "the four tokens leave most positions one candidate, whose probability is 1",
    },
    "test_requests_join_where_forwards_are_graphs": {
        name: "its graphs are those of another row" for name in _SHAPES if " " in name or "+" in name
    },
    "test_drawn_drafts_depend_on_the_request_alone": {
        name: "its parts take turns by the number of the row, and who has drawn a draft decides the text"
        for name in _SHAPES
        if "+" in name
    },
}


def settings_of(name: str, **settings) -> dict:
    """The settings of a row of the table, for `generate(speculative=...)`."""
    method = name.partition(" ")[0]
    _, path = OTHER_CHECKPOINTS.get(name, (None, CHECKPOINTS.get(parts_of(method)[-1])))
    if path is None and name in OTHER_CHECKPOINTS:
        path = head_path(name.partition(" ")[2])
    model = {} if path is None else {"model": path}
    if "draft_model" in method and name not in OTHER_CHECKPOINTS:
        model["draft_vocabulary"] = "same"
    return {"method": method, **model, **_SHAPES[name], **settings}


def chains_of(name: str) -> dict:
    """The settings of a row of the table, for chains."""
    return settings_of(name, **_CHAINS.get(name, {}))


def draws(name: str) -> bool:
    """Tells if the method of a row can draw its drafts instead of choosing them."""
    method = parts_of(name.partition(" ")[0])[-1]
    return any(item.name == "draft_sample_method" for item in option_fields(method))


def exemption(name: str, test: str) -> str | None:
    """The reason why a test of `tests/lossless` does not apply to a row; `None` where it does."""
    if "drawn" in test and not draws(name):
        return "its drafts are chosen"
    if (
        "drawn" in test
        and name.removeprefix("dflash ") not in ("selector", "confident", "domino", "lilicorr")
        and name != "draft_model shared tokens"
        and (" " in name or "+" in name and name not in _DRAWN_COMBINATIONS)
    ):
        return "drawn drafts are the chains of another row"
    return EXEMPT.get(test, {}).get(name)


needs_library = pytest.mark.skipif(find_spec("arctic_inference") is None, reason="needs arctic-inference")


def _params(names):
    return [pytest.param(name, marks=needs_library if "suffix" in name else ()) for name in names]


METHODS = _params(
    method.name for method in built_in_methods() if not method.needs_grammar and method.name != NO_DRAFTS
)
COMBINATIONS = _params(name for name in _SHAPES if "+" in name)
# Methods that need a grammar draft nothing alone where there is none; `tests/lossless/test_grammar.py` has their rows.
EVERYTHING = _params(name for name in _SHAPES if name not in NEED_GRAMMAR)
# A row of each method, a published tree and two combinations: those of most tests of `tests/lossless` in `make test`.
REPRESENTATIVES = {name for (name,) in (row.values for row in METHODS)}
REPRESENTATIVES |= {"eagle3 tree", "suffix+recycling", "ngram+eagle3"}


@cache
def demo_target() -> PreTrainedModel:
    return demo.load_target()


@cache
def demo_tokenizer() -> PreTrainedTokenizerBase:
    """For tests that do not change it."""
    return demo.load_tokenizer()


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
    """Greedy texts of the demo's target, `(B, L)`."""
    return demo_target().generate(**demo_inputs(batch_size), max_new_tokens=max_new_tokens, do_sample=False)


def fresh_speculator(settings: dict, target: PreTrainedModel | None = None) -> Speculator:
    """A speculator for a target, or the demo's, that knows of no earlier text or time; what is loaded is shared."""
    target = target or demo_target()
    speculator = load_speculator(target, settings).without_texts(target)
    if speculator.is_adaptive:
        speculator.profile = ControlProfile()
    return speculator
