"""Recurrences over the nodes of a verification, against the same ones step by step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.decoding.linear_attention import read_nodes
from hf_specdec.decoding.nodes import Nodes
from hf_specdec.decoding.recurrences import over_nodes, reads_nodes
from hf_specdec.decoding.recurrent import mixers
from hf_specdec.drafts import TreeTopology, chain_topology
from tests.helpers.architectures import tiny_model


ROWS, HEADS, KEYS, VALUES = 2, 3, 4, 5


@st.composite
def topologies(draw) -> TreeTopology:
    size = draw(st.integers(1, 7))
    rows = [[draw(st.integers(-1, node - 1)) for node in range(size)] for _ in range(draw(st.sampled_from([1, ROWS])))]
    return TreeTopology.from_parents(torch.tensor(rows[0] if len(rows) == 1 else rows))


def draws(seed: int):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=60)
@given(topologies(), st.booleans(), st.booleans(), st.sampled_from([0.1, 300.0]), st.integers(0, 99))
def test_every_node_continues_its_parent(topology, by_channel, has_rates, strength, seed):
    random, count = draws(seed), topology.depths.shape[-1]
    query, key, value = (random(ROWS, HEADS, count, size) for size in (KEYS, KEYS, VALUES))
    key = key / key.norm(dim=-1, keepdim=True)
    # Strong decays: their products along one way vanish beside those along others.
    decay = -strength * random(ROWS, HEADS, count, KEYS if by_channel else 1).abs()
    beta = random(ROWS, HEADS, count, 1).sigmoid() if has_rates else None
    start = random(ROWS, HEADS, KEYS, VALUES)
    output, sums = read_nodes(query, key, value, decay, start, Nodes(topology).visible, beta)

    parents, states = topology.parents.view(-1, count).expand(ROWS, -1), []
    for node in range(count):
        before = start if node == 0 else torch.stack([states[parents[row, node]][row] for row in range(ROWS)])
        before = before * decay[:, :, node, :, None].exp()
        written = value[:, :, node]
        if has_rates:
            written = beta[:, :, node] * (written - (before * key[:, :, node, :, None]).sum(-2))
        states.append(before + key[:, :, node, :, None] * written[:, :, None])
        torch.testing.assert_close(output[:, :, node], (states[-1] * query[:, :, node, :, None]).sum(-2))
    for nodes in torch.randint(count, (4, ROWS), generator=torch.Generator().manual_seed(seed)):
        expected = torch.stack([states[node][row] for row, node in enumerate(nodes.tolist())])
        torch.testing.assert_close(sums.after(nodes), expected)


@settings(deadline=None, max_examples=40)
@given(topologies(), st.integers(2, 5), st.integers(0, 2), st.integers(0, 99))
def test_windows_are_the_last_inputs_of_a_path(topology, size, more, seed):
    count, past = topology.depths.shape[-1], size + more
    seen = draws(seed)(ROWS, 3, past + count)
    nodes = Nodes(topology)
    windows, parents = nodes.windows(seen, size), topology.parents.view(-1, count).expand(ROWS, -1)
    for row in range(ROWS):
        for node in range(count):
            columns, place = [], node
            while place:
                columns.append(past + place)
                place = int(parents[row, place])
            columns += range(past, -1, -1)
            expected = seen[row][:, columns[:size][::-1]]
            assert torch.equal(windows[row, :, node], expected)
            last = torch.full((ROWS,), node)
            assert torch.equal(nodes.last_inputs(seen, size, last)[row], expected)


def test_calls_share_a_mixer_and_leave_it_as_it_was():
    model = tiny_model("qwen3_next")
    module = next(iter(mixers(model)))
    first, second = (over_nodes(model, {module: 0}).in_place() for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "forward" in vars(module)
    second.__exit__(None, None, None)
    assert "forward" not in vars(module)


def test_mixers_that_the_user_has_replaced():
    model = tiny_model("qwen3_next")
    first, second = list(mixers(model))[:2]
    known = over_nodes(model, {first: 0})
    assert over_nodes(model, {first: 0}) is known
    with over_nodes(model, {second: 1}).in_place():
        assert "forward" in vars(second)
        assert "forward" not in vars(first)


def test_other_calls_get_the_own_forward():
    model = tiny_model("qwen3_next")
    module, hidden = next(iter(mixers(model))), draws(0)(2, 5, 64).float()
    with torch.no_grad():
        expected = module(hidden)
        with over_nodes(model, {module: 0}).in_place():
            assert torch.equal(module(hidden), expected)


@pytest.mark.parametrize(("name", "is_known"), [("lfm2", True), ("mamba2", True), ("zaya", False)])
def test_mixers_of_unknown_functions_and_replaced_forwards_are_stepped(name, is_known):
    model = tiny_model(name)
    module = next(iter(mixers(model)))
    assert reads_nodes(module, True, name != "lfm2") is is_known
    module.forward = theirs = lambda *args, **kwargs: None
    with over_nodes(model, {module: 0}).in_place():
        assert vars(module)["forward"] is theirs
        assert not reads_nodes(module, True, name != "lfm2")


def test_a_chain_is_a_tree():
    chain = chain_topology(4, torch.device("cpu"))
    tree = TreeTopology.from_parents(torch.arange(-1, 3))
    assert torch.equal(Nodes(chain).visible, Nodes(tree).visible)
    assert torch.equal(*(Nodes(one).columns(4, 3, torch.device("cpu")) for one in (chain, tree)))
