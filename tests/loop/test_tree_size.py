"""Size of draft trees: the number of nodes that pays, found from ratings, outcomes and times."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from hf_specdec import forget_speculators, load_speculator, record
from hf_specdec.control import LatencyModel
from hf_specdec.control.tree_size import TreeSize
from hf_specdec.drafts import DraftTree, TokenTree
from tests.helpers.levels import in_full
from tests.helpers.methods import demo_inputs, demo_target, settings_of


def trees_with(verify, rows=1, draft=0.0):
    """Known times: of drafts, and of verifications by nodes."""
    model = LatencyModel()
    for _ in range(5):
        for nodes in (1, 2, 4, 8, 16, 24, 32, 33):
            model.observe_verification(rows, nodes, verify(nodes))
        model.observe_draft(rows, 4, max(draft, 1e-9))
    return TreeSize(model)


def rated(probs, rows=1):
    """A draft of children of the anchor for each row, rated so, in an order of its own."""
    order = random.Random(0).sample(range(len(probs)), len(probs))
    ratings = torch.tensor([[probs[rank] for rank in order]] * rows, dtype=torch.float64).log()
    tokens = torch.tensor([order] * rows)
    return DraftTree(tokens, torch.full_like(tokens[0], -1), [len(probs)] * rows, path_log_probs=ratings)


@pytest.mark.parametrize(("slope", "rate"), [(0.03, 0.6), (0.1, 1.0), *in_full((0.0, 1.0), (0.01, 0.6), (1.0, 0.6))])
def test_the_size_is_the_best_one(slope, rate):
    """Ratings that are right by a factor: what is kept is the analytic optimum over all sizes, or nearly so."""
    random_numbers = random.Random(1)
    probs = [0.5 / rank for rank in range(1, 33)]

    def verify(nodes):
        return (1 + slope * (nodes - 1)) * 1e-3

    trees = trees_with(verify, draft=0.2e-3)
    for _ in range(400):
        draft = trees.cut(rated(probs), 4)
        accepted = sum(random_numbers.random() < rate * probs[token] for token in draft.token_lists()[0])
        trees.observe(draft, [accepted])
    assert trees.rating.value == pytest.approx(rate, rel=0.25)
    tokens = [1 + rate * total for total in accumulate(probs, initial=0.0)]
    values = [value / (0.2e-3 + verify(size + 1)) for size, value in enumerate(tokens)]
    kept = trees.size or len(probs)
    assert values[kept] > 0.97 * max(values[1:])


def test_what_is_not_rated_is_left_alone():
    """Chains that foresee nothing, and trees that were found in a text, also between others."""
    trees = trees_with(lambda nodes: nodes * 1e-3)
    for _ in range(20):
        trees.cut(rated([0.5, 0.3, 0.1]), 4)
    chain = DraftTree.chain(torch.arange(8)[None])
    found = DraftTree.from_lists([[5, 6, 7]], parents=[[-1, -1, 0]])
    for draft in [chain, found] * 20:
        assert trees.cut(draft, 8) is draft
        trees.observe(draft, [3])
    assert trees.rating.value == 1.0


_DYNAMIC = {"draft_tree_depth": 4, "draft_tree_top_k": 4, "num_draft_nodes": 23}
TREES = {
    "eagle3": _DYNAMIC,
    "eagle": _DYNAMIC,
    "medusa": {"num_draft_nodes": 24},
    "mlp_speculator": {"num_draft_nodes": 24},
    "eagle3 static tree": {"speculative_token_tree": TokenTree.of_size(20, 3)},
}


@pytest.mark.parametrize(
    ("name", "batch_size", "do_sample"),
    [
        ("eagle3", 3, True),
        ("medusa", 1, False),
        *in_full(("eagle", 1, True), ("mlp_speculator", 3, False), ("eagle3 static tree", 3, True)),
    ],
)
def test_the_text_does_not_depend_on_the_size(name, batch_size, do_sample, monkeypatch):
    target = demo_target()
    settings = settings_of(name, num_speculative_tokens="auto", **TREES[name])
    speculator = load_speculator(target, settings)
    monkeypatch.setattr(
        "hf_specdec.control.controller.SpeculationController.limits",
        lambda controller, rows, *more: [controller.most] * len(rows),
    )

    def run(size):
        monkeypatch.setattr(TreeSize, "_plan", lambda trees, *given: setattr(trees, "size", size))
        torch.manual_seed(3)
        call = {**demo_inputs(batch_size), "max_new_tokens": 12, "do_sample": do_sample}
        with record() as r:
            text = target.generate(**call, assistant=speculator)
        return text, r.calls[0].stats

    text, whole = run(None)
    for size in (1, 7):
        other, cut = run(size)
        assert torch.equal(other, text)
        assert cut.num_draft_tokens / cut.num_drafts < whole.num_draft_tokens / whole.num_drafts
    forget_speculators(target)
