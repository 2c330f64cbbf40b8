"""The parts of graphs: inputs of one size, slots that are kept, captures that wait for nothing."""

from __future__ import annotations

import gc
import operator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.drafts import DraftTree, TreeTopology, chain_topology, static_topology
from hf_specdec.kernels.tree_attention import MAX_NODES
from hf_specdec.logits.randomness import RowKeys
from hf_specdec.target.cache import SlotStore
from hf_specdec.target.capture import CannotCaptureError, CudaBackend, NoWaiting
from hf_specdec.target.graphed import NodeInputs
from hf_specdec.target.masks import FULL, RowPlaces, Span, TreeMask, node_masks, node_positions, slot_tree
from tests.helpers.levels import split
from tests.helpers.tape import TapeBackend, spoil_all


CPU = torch.device("cpu")
ROWS = {
    "equal": RowPlaces([9, 9, 9], [0, 0, 0], [0, 0, 0]),
    "ragged": RowPlaces([9, 4, 12], [0, 2, 3], [0, 5, 0]),
}


TOPOLOGIES = {
    "anchor": chain_topology(0, CPU),
    "chain": chain_topology(4, CPU),
    "tree": static_topology((-1, -1, 0, 1, 1), CPU),
    "trees": TreeTopology.from_parents(torch.tensor([[-1, 0, 1], [-1, -1, 0], [-1, -1, -1]])),
}


def filled(rows_of_graph, nodes_of_graph, tokens, topology, rows) -> SimpleNamespace:
    """Nodes as a graph of these sizes reads them."""
    inputs = NodeInputs(rows_of_graph, nodes_of_graph, CPU)
    spoil_all(inputs)
    draft = DraftTree(tokens[:, 1:], topology.parents[..., 1:] - 1, [tokens.shape[1] - 1] * len(tokens))
    inputs.fill_nodes(len(tokens), tokens[:, 0], draft, rows)
    return read(inputs)


def read(inputs: NodeInputs) -> SimpleNamespace:
    tokens, topology, draft = inputs.read()
    rows = inputs.rows
    positions, tree = node_positions(topology, rows), slot_tree(topology, rows)
    return SimpleNamespace(tokens=tokens, draft=draft, positions=positions, tree=tree, topology=topology, rows=rows)


class TestNodeInputs:
    @pytest.mark.parametrize("span", [FULL, Span("sliding", 5), Span("chunked", 4)], ids=lambda span: span.kind)
    @pytest.mark.parametrize("rows", split(ROWS, short=["ragged"]))
    @pytest.mark.parametrize("shape", TOPOLOGIES)
    def test_say_what_masks_and_positions_say(self, shape, rows, span):
        topology, rows = TOPOLOGIES[shape], ROWS[rows]
        num_nodes = topology.depths.shape[-1]
        columns = max(rows.lengths) + num_nodes
        nodes = filled(4, 8, torch.randint(1, 50, (3, num_nodes)), topology, replace(rows, max_position=13))
        (expected,) = node_masks(topology, rows, columns, (span,), torch.float32)
        mask = TreeMask(nodes.tree, span).additive(24, torch.float32)
        assert torch.equal(mask, node_masks(nodes.topology, nodes.rows, 24, (span,), torch.float32)[0])
        assert mask.shape == (4, 1, 8, 24)
        assert torch.equal(mask[:3, :, :num_nodes, :columns], expected.expand(3, -1, -1, -1))
        assert mask[:3, :, :num_nodes, columns:].lt(0).all()
        assert torch.equal(nodes.positions[:3, :num_nodes], node_positions(topology, rows).clamp(max=13))
        # Padding sees something: nothing at all would be no number.
        assert mask.eq(0).any(-1).all()

    def test_padding_is_out_of_the_way(self):
        topology, rows = TOPOLOGIES["tree"], ROWS["ragged"]
        nodes = filled(4, 8, torch.full((3, 6), 7), topology, rows)
        assert nodes.tree.lengths.tolist() == [*rows.lengths, 0]
        assert nodes.tree.starts.tolist() == [*rows.starts, 0]
        assert nodes.tokens.tolist() == [[7] * 6 + [0] * 2] * 4
        # No node in use sees a node of padding, and none of these is accepted.
        assert (nodes.tree.ancestors[:3, :6] >> 6).eq(0).all()
        assert nodes.draft.num_nodes.tolist() == [5, 5, 5, 0]

    def test_counts_and_tokens_that_the_device_alone_knows(self):
        """Rows are longer and stand further on; those of padding do not."""
        inputs = NodeInputs(4, 3, CPU)
        spoil_all(inputs)
        keys, tokens = RowKeys([5, 6], [0, 1], [11, 12]), torch.ones((2, 2), dtype=torch.long)
        rows, more = RowPlaces([8, 7], [0, 1], [0, -1]), torch.tensor([3, 1])
        draft = DraftTree(tokens[:, 1:], torch.tensor([-1]), torch.tensor([1, 0]))
        inputs.fill_nodes(2, tokens[:, 0], draft, rows, keys, more)
        assert read(inputs).draft.num_nodes.tolist() == [1, 0, 0, 0]
        assert inputs.rows.lengths.tolist() == [11, 8, 0, 0]
        assert inputs.keys.positions.tolist() == [14, 13, 0, 0]
        assert inputs.keys.seeds.tolist() == [5, 6, 0, 0]

    @pytest.mark.parametrize("sizes", [(1, 3), (8, 64)])
    def test_kernels_are_compiled_once(self, sizes):
        """Triton compiles others for addresses that are no multiples of 16."""
        nodes = read(NodeInputs(*sizes, CPU))
        for part in (*vars(nodes.tree).values(), nodes.tokens, nodes.positions, nodes.draft.num_nodes):
            assert not torch.is_tensor(part) or part.data_ptr() % 16 == 0

    def test_full_size(self):
        """All 64 bits of the ancestors."""
        topology, rows = chain_topology(MAX_NODES - 2, CPU), RowPlaces([3], [0], [0])
        nodes = filled(1, MAX_NODES, torch.ones((1, MAX_NODES - 1), dtype=torch.long), topology, rows)
        visible = TreeMask(nodes.tree, FULL).additive(3 + MAX_NODES, torch.float32)[0, 0].eq(0)
        # The text, the anchor, and itself.
        assert visible[-1].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 2 + MAX_NODES]


class TestSlotStore:
    """Two layers of a call ask for buffers."""

    @pytest.fixture
    def dropped(self) -> list:
        return []

    @pytest.fixture
    def store(self, dropped) -> SlotStore:
        return SlotStore(dropped.append)

    def take(self, store, rows, capacity, size=4, layer=0):
        return store.take(layer, "keys", rows, 2, capacity, torch.empty(1, size))

    def call(self, store, rows, capacity, **changes):
        store.place = None
        return [self.take(store, rows, capacity, layer=layer, **changes) for layer in range(2)]

    def test_buffers_are_kept(self, store, dropped):
        """Larger calls leave those of others alone, graphs of another model make way."""
        first = self.call(store, 4, 1500)
        for buffer in first:
            buffer.fill_(1)
        for rows, capacity in ((4, 3000), (9, 1500)):
            assert not any(map(operator.is_, first, self.call(store, rows, capacity)))
        again = self.call(store, 3, 1400)
        assert all(map(operator.is_, first, again))
        assert not any(buffer.any() for buffer in again)
        assert not dropped
        assert not any(map(operator.is_, first, self.call(store, 4, 1500, size=8)))
        assert set(dropped) == {(4, 2048)}

    @given(
        st.lists(
            st.tuples(st.integers(1, 9), st.lists(st.integers(1, 5000), min_size=1, max_size=3).map(sorted)),
            min_size=1,
            max_size=8,
        )
    )
    def test_any_calls(self, calls):
        """Calls of any sizes fit, layers agree, a place's buffers stay what they are until it is dropped."""
        known = {}
        store = SlotStore(lambda place: known.pop(place, None))
        for rows, capacities in calls:
            store.place = None
            for capacity in capacities:
                # Layers may grow one by one.
                found = [self.take(store, rows, capacity, layer=layer) for layer in range(2)]
                assert all(buffer.shape == (*store.place[:1], 2, *store.place[1:], 4) for buffer in found)
                assert store.place.rows >= rows
                assert store.place.slots >= capacity
                assert all(map(operator.is_, known.setdefault(store.place, found), found))
        sizes = [place.rows * place.slots for place in known]
        assert sum(sizes) <= 2 * max(sizes)

    def test_others_make_way_for_one_that_has_no_room(self, store, dropped, monkeypatch):
        self.call(store, 1, 1000)
        zeros, asked = torch.zeros, []

        def out_of_memory_once(*args, **kwargs):
            asked.append(list(dropped))
            if len(asked) == 1:
                raise torch.OutOfMemoryError
            return zeros(*args, **kwargs)

        monkeypatch.setattr(torch, "zeros", out_of_memory_once)
        assert len(self.call(store, 1, 2000)) == 2
        assert asked == [[], [(1, 1024)], [(1, 1024)]]

    def test_rows_have_room_for_those_of_padding(self):
        sizes = {rows: len(self.take(SlotStore(list), rows, 4)) for rows in (1, 2, 3, 5, 8, 9, 16, 33)}
        assert sizes == {1: 1, 2: 2, 3: 4, 5: 8, 8: 8, 9: 16, 16: 16, 33: 40}


class Runtime:
    """Calls of CUDA in a capture, noted; nothing runs.

    Attributes:
        events (`list[str]`): What was called.
        streams (`list[str]`): The current one is the last.
        errors (`list`): What the next captured runs raise, `None` for nothing.
    """

    def __init__(self, monkeypatch):
        self.events, self.streams, self.errors = [], ["call"], [None]
        for name in ("synchronize", "empty_cache", "ipc_collect"):
            monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: self.events.append(name))
        monkeypatch.setattr(gc, "collect", lambda *args: self.events.append("gc.collect"))
        for name, value in {
            "Stream": lambda: self.a_stream("capture"),
            "current_stream": lambda *args: self.a_stream(self.streams[-1]),
            "stream": self.stream,
            "device": lambda device: nullcontext(),
            "graph_pool_handle": lambda: "pool",
            # The runtime is the only graph, too.
            "CUDAGraph": lambda: self,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def a_stream(self, name):
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.events.append(f"{name} waits for {other.name}")
        )

    @contextmanager
    def stream(self, stream):
        self.streams.append(stream.name)
        try:
            yield
        finally:
            self.streams.pop()

    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert (pool, capture_error_mode, self.streams[-1]) == ("pool", "thread_local", "capture")
        self.events.append("begin")

    def capture_end(self):
        self.events.append("end")
        if self.errors[:1] != [None]:
            raise RuntimeError("the capture was broken off")

    def replay(self):
        self.events.append("replay")

    def run(self):
        """What is captured."""
        self.events.append(f"run in {self.streams[-1]}")
        if self.events[-2] == "begin" and self.errors[0] is not None:
            raise self.errors[0]
        return "output"


class TestCudaBackend:
    """Order in which it calls CUDA, and what it leaves out."""

    WARM_UP = ["capture waits for call", "run in capture", "run in capture"]
    CAPTURE = ["begin", "run in capture", "end"]

    @pytest.fixture
    def runtime(self, monkeypatch) -> Runtime:
        return Runtime(monkeypatch)

    @pytest.fixture
    def backend(self, runtime) -> CudaBackend:
        return CudaBackend(torch.device("cuda", 0))

    def test_nothing_is_waited_for_and_no_memory_given_back(self, runtime, backend):
        replay, output = backend.capture(runtime.run)
        assert output == "output"
        assert runtime.events == [*self.WARM_UP, *self.CAPTURE, "call waits for capture"]
        replay()
        assert runtime.events[-1] == "replay"

    def test_failures_are_told_as_they_are(self, runtime, backend):
        """And the stream is again that of the call."""
        runtime.errors = [KeyError("inside")]
        with pytest.raises(KeyError, match="inside"):
            backend.capture(runtime.run)
        assert runtime.events[-2:] == ["end", "call waits for capture"]
        assert runtime.streams == ["call"]

    def test_memory_is_given_back_where_a_capture_wants_it(self, runtime, backend, monkeypatch):
        runtime.errors = [torch.OutOfMemoryError("full"), None]
        empty = torch.cuda.empty_cache
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: [empty(), runtime.errors.pop(0)])
        assert backend.capture(runtime.run)[1] == "output"
        freed = ["synchronize", "empty_cache"]
        assert runtime.events == [*self.WARM_UP, *self.CAPTURE, *freed, *self.CAPTURE, "call waits for capture"]


WAITING = [
    lambda far: far[0].item(),
    lambda far: bool(far.sum()),
    torch.Tensor.nonzero,
    torch.Tensor.unique,
    lambda far: far[far > 0],
    lambda far: far.__setitem__(far > 0, torch.ones(2, device=far.device)),
    lambda far: far.to("meta"),
    lambda far: far.repeat_interleave(far.long()),
]
# Copies from memory that a graph does not keep; torch shows only a part of them as operations.
COPYING = [
    lambda far: torch.tensor([1, 2], device=far.device),
    lambda far: torch.tensor(1.0, device=far.device),
    lambda far: torch.as_tensor(np.arange(2), device=far.device),
    lambda far: torch.asarray(obj=[1, 2], device=far.device),
    lambda far: far.new_tensor([1.0]),
    lambda far: far[[0, 1]],
    lambda far: far[:, np.arange(2)],
    lambda far: far[torch.arange(2)],
    lambda far: far.__setitem__((0, [0, 1]), 1.0),
]


class TestNoWaiting:
    """A forward is refused before the capture, which it would leave in pieces."""

    @pytest.mark.parametrize("waits", WAITING)
    def test_waiting(self, waits, device):
        with pytest.raises(CannotCaptureError), NoWaiting():
            waits(torch.ones(2, device=device))

    @pytest.mark.parametrize("copies", COPYING)
    def test_lists_that_go_to_the_device(self, copies, device):
        far = torch.ones((2, 2), device="meta" if device.type == "cpu" else device)
        with pytest.raises(CannotCaptureError), NoWaiting():
            copies(far)

    def test_what_stays_where_it_is(self, device):
        far = torch.ones((2, 2), device="meta" if device.type == "cpu" else device)
        given = torch.ones(2, device=device)
        with NoWaiting():
            constant = torch.tensor([1.0, 2.0])[[1]]
            assert far.new_ones(2).device == far[0, :1].device == torch.as_tensor(far).device == far.device
            assert far[far.long()].shape == (2, 2, 2)
            given[given > 0] = 3.0
        assert constant.tolist() == [2.0]
        assert given.tolist() == [3.0, 3.0]


def test_a_tape_is_as_strict_as_a_graph():
    """It repeats on the same memory, and spoils what other tapes have made."""
    backend, given, kept = TapeBackend(), torch.arange(3.0), torch.zeros(3)
    replay, output = backend.capture(lambda: [given * 2, kept.copy_(given[1:].sum())][0])
    other, other_output = backend.capture(lambda: given + 2)
    given += 1
    replay()
    assert output.tolist() == [2.0, 4.0, 6.0]
    assert kept.tolist() == [5.0] * 3
    assert other_output.isnan().all()
    other()
    assert output.isnan().all()
    assert other_output.tolist() == [3.0, 4.0, 5.0]
