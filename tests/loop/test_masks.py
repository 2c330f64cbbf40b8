"""Masks and positions against their definition, one node and one slot at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.decoding.attention import TreeMask
from hf_specdec.decoding.masks import FULL, GrownTopology, RowState, Span, node_masks, node_positions, slot_tree
from hf_specdec.drafts import TreeTopology, chain_topology, static_topology
from hf_specdec.kernels.tree_attention import Beginning, visible_slots


SPANS = (FULL, Span("sliding", 1), Span("sliding", 4), Span("chunked", 3), Span("sliding", 100))


@st.composite
def row_states(draw) -> RowState:
    """Rows alike, of different lengths, or padded."""
    rows = draw(st.integers(1, 4))
    lengths = [draw(st.integers(1, 9))] * rows if draw(st.booleans()) else draw(_ints(rows, 1, 9))
    starts = [0] * rows if draw(st.booleans()) else [draw(st.integers(0, length - 1)) for length in lengths]
    return RowState(lengths, starts, draw(_ints(rows, 0, 2)))


def _ints(size: int, low: int, high: int):
    return st.lists(st.integers(low, high), min_size=size, max_size=size)


@st.composite
def parent_lists(draw, rows: int) -> list[list[int]]:
    """Draft parents, the same for all rows or other ones for each."""
    size = draw(st.integers(0, 6))
    kinds = [
        st.just([list(range(-1, size - 1))]),
        st.tuples(*(st.integers(-1, node - 1) for node in range(size))).map(lambda parents: [list(parents)]),
    ]
    if size:
        kinds.append(
            st.lists(
                st.tuples(*(st.integers(-1, node - 1) for node in range(size))).map(list), min_size=rows, max_size=rows
            )
        )
    parents = draw(st.one_of(kinds))
    return parents if len(parents) == rows else parents * rows


def topology_of(parents: list[list[int]]) -> TreeTopology:
    if any(row != parents[0] for row in parents):
        return TreeTopology.from_parents(torch.tensor(parents))
    if parents[0] == list(range(-1, len(parents[0]) - 1)):
        return chain_topology(len(parents[0]), torch.device("cpu"))
    return static_topology(tuple(parents[0]), torch.device("cpu"))


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


def expected_mask(row: int, rows: RowState, parents: list[int], columns: int, span: Span) -> list[list[bool]]:
    length, start = rows.lengths[row], rows.starts[row]
    lines = []
    for node in range(len(parents) + 1):
        path = ancestors_of(node, parents)
        # Written as a text, the node stands after the row's real tokens and its ancestors.
        text = list(range(start, length)) + [length + ancestor for ancestor in reversed(path)]
        query = len(text) - 1
        seen = {slot for position, slot in enumerate(text) if is_seen(span, query, position)}
        lines.append([slot in seen for slot in range(columns)])
    return lines


@settings(max_examples=200)
@given(st.data(), row_states(), st.integers(0, 3), st.integers(1, 3))
def test_masks_show_each_node_the_text_it_stands_for(data, rows, spare_columns, repeats):
    parents = data.draw(parent_lists(len(rows.lengths)))
    topology = topology_of(parents)
    columns = max(rows.lengths) + len(parents[0]) + 1
    if not rows.is_uniform:
        columns += spare_columns
    masks = node_masks(topology, rows, columns, SPANS, torch.float32, repeats)
    for span, mask in zip(SPANS, masks):
        assert mask.shape[0] in (1, len(rows.lengths))
        assert set(mask.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}
        visible = (mask == 0).expand(len(rows.lengths), -1, -1, -1)
        for row, row_parents in enumerate(parents):
            assert visible[row, 0].tolist() == repeats * expected_mask(row, rows, row_parents, columns, span)


@settings(max_examples=100)
@given(st.data(), row_states())
def test_positions_count_real_tokens_and_ancestors(data, rows):
    parents = data.draw(parent_lists(len(rows.lengths)))
    positions = node_positions(topology_of(parents), rows)
    for row, row_parents in enumerate(parents):
        first = rows.lengths[row] + rows.leads[row]
        expected = [first + len(ancestors_of(node, row_parents)) - 1 for node in range(len(row_parents) + 1)]
        assert positions[row].tolist() == expected


@settings(max_examples=200)
@given(st.data(), row_states())
def test_trees_say_what_masks_say(data, rows):
    """Inputs of the tree attention kernel, against the same definition."""
    parents = data.draw(parent_lists(len(rows.lengths)))
    columns = max(rows.lengths) + len(parents[0]) + 1
    tree = slot_tree(topology_of(parents), rows)
    for span in SPANS:
        visible = visible_slots(tree, columns, **TreeMask(tree, span).limits)
        for row, row_parents in enumerate(parents):
            assert visible[row].tolist() == expected_mask(row, rows, row_parents, columns, span)


@settings(max_examples=100)
@given(st.data(), row_states(), st.integers(1, 2))
def test_rows_and_trees_that_the_device_alone_knows(data, rows, repeats):
    """As in a graph, they have the masks and positions of the same rows that the host knows."""
    parents = torch.tensor(data.draw(parent_lists(len(rows.lengths))), dtype=torch.long)
    known, topology = TreeTopology.from_parents(parents), GrownTopology(parents)
    unknown = RowState(*map(torch.tensor, (rows.lengths, rows.starts, rows.leads)))
    columns = max(rows.lengths) + parents.shape[1] + 1
    assert torch.equal(topology.parents, known.parents)
    assert torch.equal(topology.ancestors, known.ancestors)
    assert torch.equal(node_positions(topology, unknown), node_positions(known, rows))
    found, expected = (
        node_masks(some, places, columns, SPANS, torch.float32, repeats)
        for some, places in ((topology, unknown), (known, rows))
    )
    assert all(map(torch.equal, found, expected))


@settings(max_examples=100)
@given(st.data(), row_states(), st.integers(0, 3), st.integers(1, 5))
def test_both_ends_of_texts(data, rows, count, window):
    """A node sees what it would see of the whole text, but for the slots between its first and its last ones."""
    topology = GrownTopology(torch.tensor(data.draw(parent_lists(len(rows.lengths))), dtype=torch.long))
    lengths, texts, leads = map(torch.tensor, (rows.lengths, rows.starts, rows.leads))
    columns = max(rows.lengths) + topology.depths.shape[1]
    starts = torch.maximum(texts, lengths - window)
    ends = RowState(lengths, starts, leads, beginning=Beginning(texts, count, count + window))
    slots = torch.arange(columns)
    left_out = (slots >= texts[:, None] + count) & (slots < starts[:, None])
    spans = [span for span in SPANS if span.kind != "chunked"]
    whole = RowState(lengths, texts, leads)
    masks = (node_masks(topology, some, columns, spans, torch.float32) for some in (ends, whole))
    for span, mask, of_all in zip(spans, *masks):
        expected = (of_all == 0)[:, 0] & ~left_out[:, None]
        assert torch.equal((mask == 0)[:, 0], expected)
        tree = slot_tree(topology, ends)
        assert torch.equal(visible_slots(tree, columns, **TreeMask(tree, span).limits), expected)


def test_bits_live_as_long_as_their_topology():
    """A graph holds on to the topology alone."""
    topology, rows = chain_topology(2, torch.device("cpu")), RowState([5], [0], [0])
    bits = slot_tree(topology, rows).ancestors
    for _ in range(300):
        slot_tree(TreeTopology.from_parents(torch.tensor([-1, 0])), rows)
    assert slot_tree(topology, rows).ancestors is bits


def test_rows_that_are_alike_share_one_mask():
    topology = chain_topology(3, torch.device("cpu"))
    alike = node_masks(topology, RowState([5, 5], [0, 0], [0, 0]), 9, (FULL,), torch.float32)[0]
    padded = node_masks(topology, RowState([5, 5], [0, 2], [0, 0]), 9, (FULL,), torch.float32)[0]
    assert alike.shape == (1, 1, 4, 9)
    assert padded.shape == (2, 1, 4, 9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_hidden_slots_get_the_lowest_number_of_the_dtype(dtype):
    mask = node_masks(chain_topology(1, torch.device("cpu")), RowState([1], [0], [0]), 3, (FULL,), dtype)[0]
    assert mask.dtype == dtype
    assert mask[0, 0].tolist() == [[0.0, 0.0, torch.finfo(dtype).min], [0.0, 0.0, 0.0]]
