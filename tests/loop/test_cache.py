"""The slot cache: rows that grow, end and leave hold the tokens that lists of them hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.target.cache import SlotCache, SlotLayer, compact
from tests.helpers.levels import in_full


# Key/value heads of each layer, and its head size.
LAYERS = ((1, 2), (3, 4))


def states_of(tokens: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """States `(R, H, T, D)` in which every number tells token, head and channel."""
    places = torch.arange(heads * size, dtype=torch.float).view(1, heads, 1, size)
    return tokens[:, None, :, None] * 100.0 + places


def write(cache: SlotCache, tokens: torch.Tensor, indexed: bool) -> list:
    """Writes tokens to all layers, and returns what attention gets to see."""
    seen = []
    for layer, (heads, size) in enumerate(LAYERS):
        states = states_of(tokens, heads, size)
        seen.append(cache.update(states, -states, layer))
        if indexed:
            seen.append((cache.update_indexer(states_of(tokens, 1, size)[:, 0], layer),))
    return seen


def assert_holds(cache: SlotCache, rows: list[list[int]], indexed: bool) -> None:
    assert cache.lengths == [len(row) for row in rows]
    for row, tokens in enumerate(rows):
        for (heads, size), buffers in zip(LAYERS, cache.row_states(row)):
            expected = states_of(torch.tensor([tokens]), heads, size)[0]
            assert torch.equal(buffers[0], expected)
            assert torch.equal(buffers[1], -expected)
            assert len(buffers) == 2 + indexed
            if indexed:
                assert torch.equal(buffers[2], states_of(torch.tensor([tokens]), 1, size)[0])


class Tokens:
    """Gives every token of a test another number."""

    next = 1

    def __call__(self, rows: int, width: int) -> torch.Tensor:
        self.next += rows * width
        return torch.arange(self.next - rows * width, self.next).view(rows, width)


def check_course(data, batch_size: int, prompt_length: int, capacity: int, indexed: bool) -> None:
    """Prefill in parts, then cycles of writing, committing and dropping rows; the buffers grow when they must."""
    fresh, cache = Tokens(), SlotCache(capacity)
    prompt = [fresh(batch_size, prompt_length), fresh(batch_size, 2)]
    for part in prompt:
        write(cache, part, indexed)
    cache.start_slots(batch_size)
    rows, left, keeps_all = torch.cat(prompt, dim=1).tolist(), [], data.draw(st.booleans())
    for _ in range(data.draw(st.integers(1, 4))):
        nodes = data.draw(st.integers(1, 5))
        drafted = fresh(len(rows), nodes)
        # All nodes at once, or the levels of a tree one after the other.
        cuts = sorted(data.draw(st.sets(st.integers(1, nodes)) if data.draw(st.booleans()) else st.just(set())))
        for begin, end in zip([0, *cuts], [*cuts, nodes]):
            plan = cache.plan_write(end - begin, ahead=begin)
            seen = write(cache, drafted[:, begin:end], indexed)
            assert plan.columns == max(map(len, rows)) + end
        for row, tokens in enumerate(rows):
            text = torch.tensor([tokens + drafted[row].tolist()])
            assert torch.equal(seen[0][0][row, :, : text.shape[1]], states_of(text, *LAYERS[0])[0])
            assert seen[0][0].shape[2] == plan.columns
        counts = [data.draw(st.integers(1, nodes)) for _ in rows]
        is_chain = data.draw(st.booleans())
        paths = [list(range(nodes)) if is_chain else data.draw(paths_of(nodes, count)) for count in counts]
        cache.commit(counts, None if is_chain else padded(paths, max(counts)))
        for row, path, count, new in zip(rows, paths, counts, drafted.tolist()):
            row += [new[node] for node in path[:count]]
        assert_holds(cache, rows, indexed)
        finished = [data.draw(st.booleans()) for _ in rows]
        if not all(finished):
            keep = compact(finished)
            gone = [row for row, done in enumerate(finished) if done] if keeps_all else []
            cache.keep_rows(keep, gone)
            left = [rows[row] for row in gone] + left
            rows = [rows[row] for row in keep]
            assert_holds(cache, rows, indexed)
    # Rows that have left stand behind the others.
    cache.lengths = list(map(len, rows + left))
    assert_holds(cache, rows + left, indexed)


@pytest.mark.parametrize("max_examples", [25, *in_full(150)])
def test_any_course_of_a_generation(max_examples):
    sizes = st.integers(1, 4), st.integers(1, 5), st.integers(1, 8), st.booleans()
    settings(max_examples=max_examples)(given(st.data(), *sizes)(check_course))()


def paths_of(nodes: int, count: int):
    """Nodes on a way down a tree: the anchor and `count - 1` rising nodes after it."""
    later = st.lists(st.integers(1, max(nodes - 1, 1)), min_size=count - 1, max_size=count - 1, unique=True)
    return later.map(lambda chosen: [0, *sorted(chosen)])


def padded(paths: list[list[int]], width: int) -> torch.LongTensor:
    return torch.tensor([(path + path[-1:] * width)[:width] for path in paths])


@given(st.lists(st.booleans(), max_size=9))
def test_compact_fills_holes_from_the_end(finished):
    keep = compact(finished)
    assert sorted(keep) == [row for row, done in enumerate(finished) if not done]
    assert all(row == place or (finished[place] and row > place) for place, row in enumerate(keep))


def test_growth_of_buffers():
    layer, ones = SlotLayer(8, limit=11), [torch.ones(1, 1, count, 2) for count in (8, 1, 9)]
    for states in ones[:2]:
        layer.update(states, states)
    assert layer.keys.shape[2] == layer.capacity == 11
    # What does not fit the limit, such as a continued cache, still gets its room.
    keys, _ = layer.update(ones[2], ones[2])
    assert keys.shape[2] == 18
    assert bool((keys == 1).all())

    # Slots that grow may be those of an earlier call with more rows.
    def take(name, rows, heads, capacity, like):
        return torch.zeros(rows if capacity < 8 else 5, heads, capacity, like.shape[-1])

    layer = SlotLayer(capacity=4, take=take)
    layer.update(torch.ones(2, 1, 3, 2), torch.ones(2, 1, 3, 2))
    layer.grow(8)
    assert layer.keys.shape == (5, 1, 8, 2)
    assert bool((layer.keys[:2, :, :3] == 1).all())
    assert not layer.keys[2:].any()
