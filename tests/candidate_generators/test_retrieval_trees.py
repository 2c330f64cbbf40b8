"""`generate()` with the trees of `ngram` and `suffix`: they branch, and the text is that of plain generation."""

from functools import cache
from itertools import pairwise

import pytest
import torch
import transformers

from hf_specdec import forget_speculators, record
from hf_specdec.candidate_generators import base
from tests.candidate_generators.test_suffix import needs_library, paths_of
from tests.models import tiny_gpt2, tiny_llama, tiny_mistral


TREES = {
    "ngram": {"method": "ngram", "prompt_lookup_num_matches": 4},
    "suffix": {
        "method": "suffix",
        "suffix_decoding_use_tree_spec": True,
        "suffix_decoding_max_spec_factor": 4.0,
        "suffix_decoding_min_token_prob": 0.05,
    },
}
CHAINS = {
    "ngram": {"method": "ngram", "prompt_lookup_num_matches": 1},
    "suffix": {**TREES["suffix"], "suffix_decoding_use_tree_spec": False},
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
    """The output and the cycles' rows, by row of the call."""
    # A response in the global tree would be found again.
    forget_speculators(model)
    with record(trace=True) as made:
        output = model.generate(**inputs, speculative=settings, **{"max_new_tokens": 32, **arguments})
    (call,) = made.calls
    return output, call, [row for cycle in call.cycles for row in cycle.rows]


def is_tree(row):
    return row.parents != list(range(-1, len(row.parents) - 1))


def depth(row):
    return max(map(len, paths_of(row.draft_tokens, row.parents)), default=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_greedy_text_is_that_of_plain_generation(name, batch_size, method):
    model, inputs = target(name), make_inputs(batch_size)
    plain = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    ours, call, rows = run(model, inputs, TREES[method], do_sample=False)
    assert torch.equal(ours, plain)
    assert sum(map(is_tree, rows)) > len(rows) / 4
    assert call.stats.num_accepted_tokens > 5
    for row in rows:
        assert all(parent < node for node, parent in enumerate(row.parents))
        paths = paths_of(row.draft_tokens, row.parents)
        assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("method", METHODS)
def test_rows_have_shapes_of_their_own(method):
    _, call, _ = run(target("llama"), make_inputs(3), TREES[method], do_sample=False)
    shapes = [{tuple(row.parents) for row in cycle.rows if is_tree(row)} for cycle in call.cycles]
    assert max(map(len, shapes)) > 1


@pytest.mark.parametrize("method", METHODS)
def test_accepted_paths_lie_on_side_branches_too(method):
    _, _, rows = run(target("llama"), make_inputs(8), TREES[method], do_sample=False)
    on_the_side = 0
    for row in rows:
        accepted = tuple(row.committed_tokens[: row.num_accepted])
        paths = paths_of(row.draft_tokens, row.parents)
        assert row.num_accepted == 0 or accepted in paths
        on_the_side += row.num_accepted > 0 and accepted != paths[row.num_accepted - 1]
    assert on_the_side > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_sampled_text_depends_on_the_seed_alone(method, batch_size):
    model, inputs = target("llama"), make_inputs(batch_size)
    texts = []
    for settings in (TREES[method], CHAINS[method], {**CHAINS[method], "num_speculative_tokens": 1}):
        transformers.set_seed(7)
        text, _, rows = run(model, inputs, settings, do_sample=True, temperature=0.8, top_k=0)
        texts.append(text)
        assert any(map(is_tree, rows)) == (settings is TREES[method])
    assert all(torch.equal(one, other) for one, other in pairwise(texts))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("new_tokens", [2, 3, 5])
def test_no_node_lies_behind_the_last_token(method, new_tokens):
    model, inputs = target("llama"), make_inputs(3)
    plain = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    ours, call, _ = run(model, inputs, TREES[method], do_sample=False, max_new_tokens=new_tokens)
    assert torch.equal(ours, plain)
    left = {row: new_tokens - 1 for row in range(3)}
    drafted = 0
    for row in (row for cycle in call.cycles for row in cycle.rows):
        assert depth(row) <= left[row.row] - 1
        drafted += len(row.draft_tokens)
        left[row.row] -= len(row.committed_tokens)
    assert (drafted > 0) == (new_tokens > 2)


@pytest.mark.parametrize("method", METHODS)
def test_no_node_lies_behind_max_model_len(method):
    model, inputs = target("llama"), make_inputs(1)
    limit = LENGTH + 12
    plain = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    ours, _, rows = run(model, inputs, {**TREES[method], "max_model_len": limit}, do_sample=False)
    assert torch.equal(ours, plain)
    length = LENGTH + 1
    for row in rows:
        # The suffix method leaves room for the target's own token, as vLLM's does.
        assert depth(row) <= max(limit - length - (method == "suffix"), 0)
        length += len(row.committed_tokens)
    assert any(map(is_tree, rows))


@pytest.mark.parametrize("method", METHODS)
def test_targets_that_cannot_verify_trees_get_chains(method, monkeypatch):
    model, inputs = tiny_gpt2(), make_inputs(2)
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    session = base.Session.__init__
    monkeypatch.setattr(
        base.Session,
        "__init__",
        lambda self, *given, **fields: session(self, *given, **{**fields, "supports_trees": False}),
    )
    ours, call, rows = run(model, inputs, TREES[method], do_sample=False, max_new_tokens=16)
    assert torch.equal(ours, plain)
    assert not any(map(is_tree, rows))
    assert len(call.stats.notes) == 1
    assert "cannot verify trees" in call.stats.notes[0]
