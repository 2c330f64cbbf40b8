"""Numbers between host and device: what arrives, in how many copies, and who waits."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import transfers
from hf_specdec.candidate_generators.medusa import generator as medusa
from hf_specdec.drafts import TokenTree, chain_topology, static_topology
from hf_specdec.kernels import cache, indexing
from hf_specdec.transfers import (
    PackedTables,
    PendingRead,
    holding,
    kept_on_device,
    kept_tensor,
    select_rows,
    upload_together,
)
from tests.helpers.other_device import DEVICE, move, other_device


CPU = torch.device("cpu")
integers = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.lists(integers, max_size=5), min_size=1, max_size=4))
def test_tables_arrive_as_they_were(tables):
    with other_device() as waits:
        for device in (CPU, DEVICE):
            arrived = upload_together(device, *tables)
            assert [values.device.type for values in arrived] == [device.type] * len(tables)
            assert [(values.inner if device == DEVICE else values).tolist() for values in arrived] == tables
    assert waits == []
    # Kernels like even places.
    assert all(values.inner.storage_offset() % 2 == 0 and values.inner.is_contiguous() for values in arrived)


@given(st.data(), st.integers(1, 4))
def test_one_wait_for_all_that_is_read(data, rows):
    widths = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    tables = {
        str(index): data.draw(st.lists(st.lists(integers, min_size=w, max_size=w), min_size=rows, max_size=rows))
        for index, w in enumerate(widths)
    }
    with other_device() as waits:
        far = {name: move(torch.tensor(table, dtype=torch.long).view(rows, -1)) for name, table in tables.items()}
        packed = PackedTables.of(far)
        arrival = PendingRead(packed.values)
        assert not waits
        found = packed.split(arrival.get().cpu())
    assert {name: table.tolist() for name, table in found.items()} == tables
    assert [wait.what for wait in waits] == ["read"]


def test_rows_are_selected_without_waiting():
    with other_device() as waits:
        chosen = select_rows(move(torch.arange(12).view(4, 3)), [3, 0])
    assert chosen.inner.tolist() == [[9, 10, 11], [0, 1, 2]]
    assert waits == []


@pytest.mark.gpu
@pytest.mark.smoke
def test_pending_reads_arrive(gpu):
    assert PendingRead(torch.arange(5, device=gpu) * 2).get().tolist() == [0, 2, 4, 6, 8]


TREE = TokenTree.from_paths([(0,), (1,), (0, 0)])
KEPT = {
    indexing.arange: (3,),
    kept_tensor: ((1, 2),),
    chain_topology: (2,),
    static_topology: ((-1, -1, 0),),
    TokenTree.levels: (TREE,),
    medusa._candidate_of_node: (TREE, 4),
    medusa._is_committed: ((1, 2), 3),
    cache._addresses: ((16, 32),),
}


@pytest.mark.parametrize("make", KEPT, ids=lambda make: make.__qualname__)
def test_what_is_kept_on_the_device_is_kept_by_stream(make, monkeypatch):
    """Memory that one stream is still filling must not be read by another one."""
    made = {}
    for stream in (1, 2, 1):
        monkeypatch.setattr(transfers, "_stream_of", lambda device, stream=stream: stream)
        found = make(*KEPT[make], CPU)
        assert made.setdefault(stream, found) is found
    assert made[1] is not made[2]


def test_what_is_held_outlives_the_others():
    make = kept_on_device(lambda size, device: torch.ones(size, device=device))
    before = make(1, CPU)
    with holding() as held:
        make(1, CPU)
        inside = weakref.ref(make(2, CPU))
    outside = weakref.ref(make(3, CPU))
    for size in range(10, 300):
        make(size, CPU)
    gc.collect()
    assert any(value is before for value in held.values())
    assert inside() is not None
    assert outside() is None
    held.clear()
    gc.collect()
    assert inside() is None


# What makes the host wait for a GPU.
WAITING = {
    "item": lambda far: far[0].item(),
    "truth": lambda far: bool((far > 1).all()),
    "list": lambda far: far.tolist(),
    "copy to the host": lambda far: far.cpu(),
    "copy to the host, unfinished": lambda far: far.to("cpu", non_blocking=True),
    "copy into a tensor of the host": lambda far: torch.zeros(3, dtype=torch.long).copy_(far),
    "tensor from a list": lambda far: torch.tensor([1, 2], device=far.device),
    "tensor like another": lambda far: far.new_tensor([1]),
    "upload": lambda far: torch.ones(3).to(far.device),
    "index from a list": lambda far: far[[0, 1]],
    "index from the host": lambda far: far[torch.tensor([0, 1])],
    "mask": lambda far: far[far > 1],
    "nonzero": lambda far: far.nonzero(),
    "repeat": lambda far: far.repeat_interleave(far),
    "equal": lambda far: torch.equal(far, far),
}


@pytest.mark.parametrize("what", WAITING)
def test_other_device_notes_waits(what):
    with other_device() as waits:
        WAITING[what](move(torch.tensor([1, 2, 3])))
    assert len(waits) == 1
    assert waits[0].where.startswith("tests.gpu.test_transfers:")


def test_other_device_notes_nothing_else():
    with other_device() as waits:
        far = move(torch.tensor([1, 2, 3]))
        far = (far + 1).cumsum(0).masked_fill(far > 1, 0) + torch.arange(3, device=far.device)
        far[1:].fill_(3)
        far.copy_(torch.ones(3), non_blocking=True)
        far = far[far - 1] + torch.ones(3).to(far.device, non_blocking=True)
        with pytest.raises(RuntimeError, match="on the CPU and on the other device"):
            far + torch.ones(3)
    assert far.inner.tolist() == [2, 2, 2]
    assert waits == []
