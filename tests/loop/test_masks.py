"""Masks and positions of nodes against their definition, one node and one slot at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.drafts import TreeTopology, chain_topology, static_topology
from hf_specdec.kernels.tree_attention import Beginning, visible_slots
from hf_specdec.target.masks import FULL, GrownTopology, RowPlaces, Span, node_masks, node_positions, slot_tree
from tests.helpers.levels import in_full


SPANS = (FULL, Span("sliding", 1), Span("sliding", 4), Span("chunked", 3), Span("sliding", 100))
CPU = torch.device("cpu")


def ints(size: int, low: int, high: int):
    return st.lists(st.integers(low, high), min_size=size, max_size=size)


@st.composite
def nodes(draw) -> tuple[RowPlaces, list[list[int]]]:
    """Rows alike, of different lengths or padded, and parents of draft nodes, the same or other ones for each row."""
    count = draw(st.integers(1, 4))
    lengths = [draw(st.integers(1, 9))] * count if draw(st.booleans()) else draw(ints(count, 1, 9))
    starts = [0] * count if draw(st.booleans()) else [draw(st.integers(0, length - 1)) for length in lengths]
    rows, size = RowPlaces(lengths, starts, draw(ints(count, 0, 2))), draw(st.integers(0, 6))
    trees = st.tuples(*(st.integers(-1, node - 1) for node in range(size))).map(list)
    kind = draw(st.sampled_from(["chain", "one tree", "trees"]))
    if kind == "trees":
        return rows, [draw(trees) for _ in range(count)]
    return rows, [list(range(-1, size - 1)) if kind == "chain" else draw(trees)] * count


def topology_of(parents: list[list[int]]) -> TreeTopology:
    if any(row != parents[0] for row in parents):
        return TreeTopology.from_parents(torch.tensor(parents))
    if parents[0] == list(range(-1, len(parents[0]) - 1)):
        return chain_topology(len(parents[0]), CPU)
    return static_topology(tuple(parents[0]), CPU)


def ancestors_of(node: int, parents: list[int]) -> list[int]:
    """The verified nodes from `node` up to the anchor, both included."""
    path = [node]
    while path[-1] != 0:
        path.append(parents[path[-1] - 1] + 1)
    return path


def is_seen(span: Span, query: int, key: int) -> bool:
    """Tells if a text's token at position `query` looks at the one at position `key`, which is not after it."""
    if span.kind == "sliding":
        return query - key < span.size
    if span.kind == "chunked":
        return query // span.size == key // span.size
    return True


def expected_mask(row: int, rows: RowPlaces, parents: list[int], columns: int, span: Span) -> list[list[bool]]:
    length, start = rows.lengths[row], rows.starts[row]
    lines = []
    for node in range(len(parents) + 1):
        # Written as a text, the node stands after the row's real tokens and its ancestors.
        text = list(range(start, length)) + [length + ancestor for ancestor in reversed(ancestors_of(node, parents))]
        seen = {slot for position, slot in enumerate(text) if is_seen(span, len(text) - 1, position)}
        lines.append([slot in seen for slot in range(columns)])
    return lines


def check_masks(rows: RowPlaces, parents: list[list[int]], spare_columns: int, repeats: int) -> None:
    """Masks, trees of the attention kernel, and positions."""
    topology, columns = topology_of(parents), max(rows.lengths) + len(parents[0]) + 1
    columns += 0 if rows.is_uniform else spare_columns
    tree = slot_tree(topology, rows)
    for span, mask in zip(SPANS, node_masks(topology, rows, columns, SPANS, torch.float32, repeats)):
        assert mask.shape[0] in (1, len(rows.lengths))
        assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}
        visible = (mask == 0).expand(len(rows.lengths), -1, -1, -1)
        of_tree = visible_slots(tree, columns, **span.limits)
        for row, row_parents in enumerate(parents):
            expected = expected_mask(row, rows, row_parents, columns, span)
            assert visible[row, 0].tolist() == repeats * expected
            assert of_tree[row].tolist() == expected
    positions = node_positions(topology, rows)
    for row, row_parents in enumerate(parents):
        first = rows.lengths[row] + rows.leads[row]
        depths = [len(ancestors_of(node, row_parents)) - 1 for node in range(len(row_parents) + 1)]
        assert positions[row].tolist() == [first + depth for depth in depths]


def check_masks_of_a_graph(rows: RowPlaces, parents: list[list[int]], repeats: int) -> None:
    """Rows and trees that the device alone knows have the masks and positions of those that the host knows."""
    known = TreeTopology.from_parents(torch.tensor(parents, dtype=torch.long))
    topology = GrownTopology(torch.tensor(parents, dtype=torch.long))
    unknown = RowPlaces(*map(torch.tensor, (rows.lengths, rows.starts, rows.leads)))
    columns = max(rows.lengths) + len(parents[0]) + 1
    assert torch.equal(topology.parents, known.parents)
    assert torch.equal(topology.ancestors, known.ancestors)
    assert torch.equal(node_positions(topology, unknown), node_positions(known, rows))
    found, expected = (
        node_masks(some, places, columns, SPANS, torch.float32, repeats)
        for some, places in ((topology, unknown), (known, rows))
    )
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("max_examples", [25, *in_full(200)])
def test_masks_show_each_node_the_text_it_stands_for(max_examples):
    @settings(max_examples=max_examples)
    @given(nodes(), st.integers(0, 3), st.integers(1, 3))
    def check(nodes, spare_columns, repeats):
        check_masks(*nodes, spare_columns, repeats)
        check_masks_of_a_graph(*nodes, repeats)

    check()


@pytest.mark.parametrize("lengths", [[9, 9], [9, 5]], ids=["equal", "ragged"])
@pytest.mark.parametrize("num_trees", [1, 2], ids=["shared", "own trees"])
def test_masks_of_more_nodes_than_an_integer_has_bits(lengths, num_trees):
    rows, count = RowPlaces(lengths, [0, 0], [0, 0]), 70
    parents = [[(node - 1) // (2 + tree) for node in range(count)] for tree in range(num_trees)] * (2 // num_trees)
    check_masks(rows, parents, 0, 1)


@given(nodes(), st.integers(0, 3), st.integers(1, 5))
def test_masks_of_both_ends_of_texts(nodes, count, window):
    """A node sees what it would see of the whole text, but for the slots between its first and its last ones."""
    rows, parents = nodes
    topology = GrownTopology(torch.tensor(parents, dtype=torch.long))
    lengths, texts, leads = map(torch.tensor, (rows.lengths, rows.starts, rows.leads))
    columns = max(rows.lengths) + topology.depths.shape[1]
    starts = torch.maximum(texts, lengths - window)
    ends = RowPlaces(lengths, starts, leads, beginning=Beginning(texts, count, count + window))
    slots = torch.arange(columns)
    left_out = (slots >= texts[:, None] + count) & (slots < starts[:, None])
    spans = [span for span in SPANS if span.kind != "chunked"]
    whole = RowPlaces(lengths, texts, leads)
    masks = (node_masks(topology, some, columns, spans, torch.float32) for some in (ends, whole))
    for span, mask, of_all in zip(spans, *masks):
        expected = (of_all == 0)[:, 0] & ~left_out[:, None]
        assert torch.equal((mask == 0)[:, 0], expected)
        tree = slot_tree(topology, ends)
        assert torch.equal(visible_slots(tree, columns, **span.limits), expected)
