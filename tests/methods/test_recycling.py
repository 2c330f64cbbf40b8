"""Token recycling: its table and drafts against those of the authors' code, what it learns, and its limits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_specdec import load_speculator
from hf_specdec.candidate_generators.recycling.generator import NUM_SUCCESSORS, SuccessorTable
from hf_specdec.drafts import TokenTree
from hf_specdec.protocol import Session, VerifiedNodes
from tests.helpers.calls import with_mask
from tests.helpers.levels import in_full
from tests.helpers.methods import fresh_speculator, needs_library
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import FIXTURES


FIXTURE = FIXTURES / "recycling"
TREE = TokenTree(tuple(map(tuple, json.loads((FIXTURE / "config.json").read_text())["template"])))
VOCAB_SIZE, CPU = 160, torch.device("cpu")


@pytest.fixture(scope="module")
def official() -> dict[str, torch.Tensor]:
    return load_file(FIXTURE / "expected.safetensors")


def counting_speculator(**settings):
    return fresh_speculator({"method": "recycling", "num_speculative_tokens": "fixed", **settings})


@pytest.mark.parametrize("request_name", ["p0", *in_full("p1")])
def test_drafts_and_tables_are_those_of_the_authors(official, request_name):
    table = SuccessorTable(VOCAB_SIZE)
    table.successors[:] = official[f"{request_name}.table_before"].numpy()
    trees, best = (official[f"{request_name}.{key}"] for key in ("tree_input_ids", "tree_topk"))
    for cycle, (anchor, *drafted) in enumerate(trees.tolist()):
        before = official.get(f"{request_name}.s{cycle}.table_before")
        if before is not None:
            assert np.array_equal(table.successors, before.numpy())
        tokens, parents, nodes = table.fill(TREE, anchor)
        assert (tokens, parents, nodes) == (drafted, list(TREE.parents), list(range(len(TREE))))
        if cycle < len(trees) - 1:
            table.learn([anchor, *drafted], best[cycle].numpy())
    assert np.array_equal(table.successors, official[f"{request_name}.table_after"].numpy())


def test_texts_and_accepted_tokens(official):
    """Knowing the prompts, too, it accepts no less than they do in both requests together."""
    target, cycles = AutoModelForCausalLM.from_pretrained(FIXTURE / "target").eval(), 0
    tree = [list(path) for path in TREE.paths]
    settings = {"method": "recycling", "speculative_token_tree": tree, "num_speculative_tokens": "fixed"}
    speculator = load_speculator(target, settings)
    for name in ("p0", "p1"):
        prompt, expected = official[f"{name}.input_ids"], official[f"{name}.output_ids"]
        call = {"max_new_tokens": expected.shape[1] - prompt.shape[1], "do_sample": False, "assistant": speculator}
        output = target.generate(**with_mask(prompt), **call, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected)
        cycles += output.speculative.num_target_forwards - 1
    assert cycles <= sum(len(official[f"{name}.tokens_per_cycle"]) for name in ("p0", "p1"))


def test_an_unknown_token_cuts_the_tree():
    table = SuccessorTable(10)
    table.learn([3], np.array([[5, 6, 7, 0, 1, 2, 4, 8]]))
    tree = TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (1, 0), (1, 0, 1)])
    assert table.fill(tree, 4) == ([], [], [])
    assert table.fill(tree, 3) == ([5, 6, 7], [-1, -1, -1], [0, 1, 2])
    table.learn([6], np.array([[3, 6, 5, 0, 1, 2, 4, 8]]))
    assert table.fill(tree, 3) == ([5, 6, 7, 3, 6], [-1, -1, -1, 1, 3], [0, 1, 2, 4, 5])


def test_what_the_table_learns():
    table = SuccessorTable(10)
    best = np.stack([np.roll(np.arange(NUM_SUCCESSORS), shift) for shift in range(3)])
    # Of equal tokens the last node counts.
    table.learn([2, 7, 2], best)
    assert table.successors[2].tolist() == best[2].tolist()
    assert table.successors[7].tolist() == best[1].tolist()
    # A text comes first.
    table = SuccessorTable(10)
    table.learn([1], np.arange(NUM_SUCCESSORS)[None])
    table.learn_text([1, 3, 1, 9, 1])
    assert table.successors[1].tolist() == [9, 3, 0, 1, 2, 4, 5, 6]
    assert table.successors[3].tolist() == [1] + [-1] * 7
    assert (table.successors[[0, 2, 4, 5, 6, 7, 8]] == -1).all()
    # There may be fewer tokens than successors.
    table = SuccessorTable(3)
    table.learn([0], np.array([[2, 1, 0]]))
    assert table.successors[0].tolist() == [2, 1, 0, -1, -1, -1, -1, -1]
    # Rejected nodes teach, and padding does not.
    generator = counting_speculator().candidate_generator(Session(2, 100, CPU))
    best = torch.arange(2 * 3 * NUM_SUCCESSORS).view(2, 3, NUM_SUCCESSORS)
    generator.learn(VerifiedNodes([[4, 5, 6], [7]], best))
    known = {token: row.tolist() for token, row in enumerate(generator.table.successors) if row[0] >= 0}
    assert known == {token: row.tolist() for token, row in zip((4, 5, 6, 7), best.flatten(0, 1))}


@pytest.mark.parametrize("method", ["ngram+recycling", *in_full(pytest.param("suffix", marks=needs_library))])
def test_negative_ids_beside_embeddings(method):
    model, inputs = tiny_llama(), prompts(2, length=9)
    ids = inputs["input_ids"].clone()
    # The text before them comes again.
    ids[:, 7:] = ids[:, :2]
    arguments = {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": inputs["attention_mask"]}
    ids[:, 2:5] = -200
    arguments |= {"do_sample": False, "max_new_tokens": 12}
    plain = model.generate(ids, **arguments)
    assert torch.equal(model.generate(ids, **arguments, spec_method=method), plain)
