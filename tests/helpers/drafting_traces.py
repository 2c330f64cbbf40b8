"""Records what every drafter drafts, for the checkpoints in `tests/fixtures` and those of the demo.

    python -m tests.helpers.drafting_traces           # writes tests/fixtures/traces/*.json and log_probs.json anew

A cycle is a list of rows, each `[row, draft tokens, parents or null for a chain, accepted, committed tokens]`. Of
drafts that are rated, the log-probabilities of the paths in the first cycles are recorded, too.
Combinations are not among them: they choose by measured time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from transformers import PreTrainedModel, set_seed

from hf_specdec import DraftTree, Speculator, demo, forget_speculators, record
from tests.helpers import heads
from tests.helpers.methods import CHECKPOINTS
from tests.helpers.paths import FIXTURES
from tests.helpers.published import target_of


TRACES = FIXTURES / "traces"
LOG_PROBS = FIXTURES / "log_probs.json"
NUM_RATED_CYCLES = 2
# Nodes with one and with two children, of three depths.
STATIC_TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]"
SHAPES = {
    "ngram": {"chain": {}},
    "suffix": {"chain": {}, "dynamic": {"suffix_decoding_use_tree_spec": True}},
    "recycling": {"static": {}, "chain": {"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0)]"}},
    "early_exit": {
        "chain": {"early_exit_layer": 4, "draft_sample_method": "greedy"},
        "drawn": {"early_exit_layer": 4, "draft_sample_method": "probabilistic"},
    },
    "sparse_kv": {
        "chain": {"sparse_kv_window": 48, "draft_sample_method": "greedy"},
        "drawn": {"sparse_kv_window": 48, "draft_sample_method": "probabilistic"},
    },
    "draft_model": {
        "chain": {},
        "drawn": {"draft_sample_method": "probabilistic"},
        "confident": {"draft_confidence_threshold": 0.5},
    },
    "medusa": {
        "chain": {"num_speculative_tokens": 2},
        "static": {"speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1), (1, 0)]"},
        "sized": {"num_draft_nodes": 6},
        "measured": {"medusa_tree": "measured"},
    },
    "mlp_speculator": {
        "chain": {"num_speculative_tokens": 3},
        "static": {"speculative_token_tree": STATIC_TREE},
        "grown": {"num_draft_nodes": 6},
        "candidates": {"mlp_speculator_num_candidates": 4},
        "drawn": {"draft_sample_method": "probabilistic"},
    },
    "eagle": {
        "chain": {"num_speculative_tokens": 4},
        "static": {"speculative_token_tree": STATIC_TREE},
        "dynamic": {"draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 7},
        "drawn": {"num_speculative_tokens": 4, "draft_sample_method": "probabilistic"},
    },
    "mtp": {
        "layers": {"mtp_mode": "chain"},
        "chain": {"mtp_mode": "reuse", "num_speculative_tokens": 3},
        "static": {"mtp_mode": "reuse", "speculative_token_tree": STATIC_TREE},
        "dynamic": {"mtp_mode": "reuse", "draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 7},
        "drawn": {"mtp_mode": "reuse", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"},
    },
    "dflash": {
        "chain": {"num_draft_nodes": 0},
        "dynamic": {"num_draft_nodes": 8},
        "drawn": {"draft_sample_method": "probabilistic"},
    },
}
SHAPES["eagle3"] = SHAPES["eagle"]


@dataclass(frozen=True)
class Drafter:
    """A checkpoint (`model`; `None`: it lies in the target's own, or the method needs none) and its target."""

    method: str
    target: str
    model: str | None = None


def drafters() -> dict[str, Drafter]:
    """All of them, by the name of their file of traces."""
    found = {}
    for family in ("dflash", "eagle", "medusa", "mlp_speculator", "mtp"):
        for folder in sorted((FIXTURES / family).iterdir()):
            if folder.name != "target" and (family == "mtp" or (folder / "config.json").is_file()):
                method = "eagle3" if folder.name.startswith("eagle3") else family
                model = None if family == "mtp" else str(folder)
                found[f"{family}-{folder.name}"] = Drafter(method, str(heads.target_of(folder)), model)
    demos = {f"demo-{method}": Drafter(method, demo.target_path(), CHECKPOINTS.get(method)) for method in SHAPES}
    return {**found, **demos}


def cases(drafter: Drafter) -> Iterator[tuple[str, dict]]:
    """The name of each case and what `generate()` takes for it."""
    model, is_demo = target_of(drafter.target), drafter.target == demo.target_path()
    own = {"method": drafter.method}
    if drafter.model is not None:
        own["model"] = drafter.model
    if drafter.method == "draft_model":
        own["draft_vocabulary"] = "same"
    for shape, settings in SHAPES[drafter.method].items():
        for batch_size, samples in product((1, 3), (False, True)):
            if shape == "drawn" and not samples:
                continue
            prompts = _random_prompts(model, batch_size)
            if is_demo:
                texts = [prompt.text[-160 + 16 * row :] for row, prompt in enumerate(demo.prompts()[-batch_size:])]
                prompts = demo.load_tokenizer()(texts, return_tensors="pt", padding=True, padding_side="left")
            sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20} if samples else {"do_sample": False}
            call = {"max_new_tokens": 24 if batch_size == 1 else 12, "eos_token_id": None}
            name = f"{shape}, {batch_size} rows, {'seeded' if samples else 'greedy'}"
            yield name, {**prompts, **sampling, **call, "speculative": {**own, **settings}}


def _random_prompts(model: PreTrainedModel, batch_size: int) -> dict[str, torch.Tensor]:
    """A pattern that repeats itself, so that there is something to find; row i has i columns of padding."""
    generator = torch.Generator().manual_seed(batch_size)
    pattern = torch.randint(1, model.config.get_text_config().vocab_size, (batch_size, 5), generator=generator)
    input_ids = pattern.repeat(1, 3)
    attention_mask = torch.ones_like(input_ids)
    for row in range(batch_size):
        attention_mask[row, :row] = 0
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


def traced(drafter: Drafter) -> tuple[dict[str, list], dict[str, list]]:
    """The cycles of each case, and the log-probabilities of the first drafts where they are rated."""
    model, cycles, log_probs = target_of(drafter.target), {}, {}
    forget_speculators(model)
    for name, arguments in cases(drafter):
        set_seed(7)
        with record(trace=True) as recorded, _kept_drafts() as drafts:
            model.generate(**arguments)
        cycles[name] = [[_row(row) for row in cycle.rows] for cycle in recorded.calls[0].cycles]
        if rated := [draft for draft in drafts if draft.path_log_probs is not None][:NUM_RATED_CYCLES]:
            log_probs[name] = [
                [[round(value, 3) for value in row[:count]] for row, count in zip(values, draft.counts())]
                for draft in rated
                for values in [draft.path_log_probs.tolist()]
            ]
    return cycles, log_probs


@contextmanager
def _kept_drafts() -> Iterator[list[DraftTree]]:
    """Yields a list of all drafts that are proposed inside."""
    drafts, make = [], Speculator.candidate_generator

    def making(self, *session):
        generator = make(self, *session)
        propose = generator.propose
        generator.propose = lambda step: drafts.append(propose(step)) or drafts[-1]
        return generator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculator, "candidate_generator", making)
        yield drafts


def _row(row) -> list:
    is_chain = row.parents == list(range(-1, len(row.draft_tokens) - 1))
    return [row.row, row.draft_tokens, None if is_chain else row.parents, row.num_accepted, row.committed_tokens]


def _write() -> None:
    TRACES.mkdir(exist_ok=True)
    all_log_probs = {}
    for name, drafter in drafters().items():
        cycles, log_probs = traced(drafter)
        (TRACES / f"{name}.json").write_text(_lines(cycles))
        all_log_probs |= {f"{name}, {case}": values for case, values in log_probs.items()}
    LOG_PROBS.write_text(_lines(all_log_probs))


def _lines(cases: dict[str, list]) -> str:
    lines = [f"{json.dumps(case)}: {json.dumps(values, separators=(',', ':'))}" for case, values in cases.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    # As in the tests: lengths that nobody's clock decides.
    os.environ.setdefault("HF_SPECDEC_ADAPTIVE", "0")
    _write()
