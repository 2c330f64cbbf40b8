"""`generate()` with the trees of `ngram` and `suffix`: they branch, and the text is that of plain generation."""

from functools import cache

import pytest
import torch

from hf_specdec import DraftTree, forget_speculators, record
from tests.helpers.by_hand import paths_of
from tests.helpers.methods import needs_library
from tests.helpers.models import tiny_llama, tiny_mistral


TREES = {
    "ngram": {"method": "ngram", "prompt_lookup_num_matches": 4},
    "suffix": {
        "method": "suffix",
        "suffix_decoding_use_tree_spec": True,
        "suffix_decoding_max_spec_factor": 4.0,
        "suffix_decoding_min_token_prob": 0.05,
    },
}
METHODS = ["ngram", pytest.param("suffix", marks=needs_library)]
PAD, LENGTH = 0, 60


@cache
def target(name):
    """Few tokens, so that everything has been followed by several of them."""
    return {"llama": tiny_llama, "sliding": tiny_mistral}[name](vocab_size=6)


def make_inputs(batch_size, seed=0):
    """Prompts of 1 to 5; row i has `2 * (B - 1 - i)` columns of padding."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, 6, (batch_size, LENGTH), generator=generator)
    mask = torch.ones_like(input_ids)
    for row in range(batch_size):
        mask[row, : 2 * (batch_size - 1 - row)] = 0
    return {"input_ids": input_ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def run(model, inputs, settings, **arguments):
    """The output and the record of the call."""
    # A response in the global tree would be found again.
    forget_speculators(model)
    with record(trace=True) as made:
        output = model.generate(**inputs, speculative=settings, **{"max_new_tokens": 32, **arguments})
    return output, made.calls[0]


def is_tree(row):
    return row.parents != list(range(-1, len(row.parents) - 1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "batch_size"), [("llama", 8), ("sliding", 1)])
def test_trees_branch_and_change_no_text(name, batch_size, method):
    model, inputs = target(name), make_inputs(batch_size)
    plain = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    ours, call = run(model, inputs, TREES[method], do_sample=False)
    assert torch.equal(ours, plain)
    assert call.stats.num_accepted_tokens > 5
    rows, on_the_side = [row for cycle in call.cycles for row in cycle.rows], 0
    assert sum(map(is_tree, rows)) > len(rows) / 4
    for row in rows:
        (paths,) = paths_of(DraftTree.from_lists([row.draft_tokens], parents=[row.parents]))
        assert len(set(paths)) == len(paths)
        accepted = tuple(row.committed_tokens[: row.num_accepted])
        assert row.num_accepted == 0 or accepted in paths
        on_the_side += row.num_accepted > 0 and accepted != paths[row.num_accepted - 1]
    shapes = [{tuple(row.parents) for row in cycle.rows if is_tree(row)} for cycle in call.cycles]
    if batch_size > 1:
        # Paths that are not the first one, and rows with trees of their own.
        assert on_the_side > 0
        assert max(map(len, shapes)) > 1
