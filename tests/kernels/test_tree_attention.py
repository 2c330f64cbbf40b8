"""Tree attention: the reference against its definition, the kernels against the reference."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

from hf_specdec.drafts import TreeTopology
from hf_specdec.kernels import tree_attention as kernels
from hf_specdec.kernels.launching import arrivals
from hf_specdec.kernels.tiles import TILES, Gpu
from hf_specdec.kernels.tree_attention import (
    MAX_NODES,
    Beginning,
    SlotTree,
    pack_words,
    tree_attention_triton,
)
from hf_specdec.transfers import holding
from tests.helpers.layer_references import tree_attention
from tests.helpers.levels import in_full, when_slow
from tests.kernels.conftest import SHARED_MEMORY


CHAIN = tuple(range(-1, 6))
STAR = (-1,) * 6
BUSHY = (-1, -1, 0, 0, 1, 4)
OWN_TREES = ((-1, 0, 1, 2), (-1, -1, -1, -1), (-1, -1, 0, 1))

# Sums in another order, and a tanh made of exponentials; float16 and bfloat16 weights are rounded before they meet the
# values, and the interpreter cuts bfloat16 off where a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def tree_of(parents, lengths, starts) -> SlotTree:
    """Drafts of one shape, or of one for every row."""
    topology = TreeTopology.from_parents(torch.tensor(parents, dtype=torch.long))
    words = pack_words(topology.ancestors if topology.ancestors.dim() == 3 else topology.ancestors[None])
    return SlotTree(torch.tensor(lengths), torch.tensor(starts), words, topology.depths)


def moved(tree, device):
    """The tree on a device, or its beginning."""
    parts = {name: part.to(device) if torch.is_tensor(part) else part for name, part in vars(tree).items()}
    if parts.get("beginning") is not None:
        parts["beginning"] = moved(parts["beginning"], device)
    return type(tree)(**parts)


def of_both_ends(tree: SlotTree, count: int, window: int) -> SlotTree:
    """The tree as it sees the first slots of each text and the last committed ones alone."""
    starts = torch.maximum(tree.starts, tree.lengths - window)
    return replace(tree, starts=starts, beginning=Beginning(tree.starts, count, count + window))


def random_states(rows, heads, kv_heads, nodes, slots, size, value_size=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def states(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    # The layout that models hand over.
    query = states(rows, nodes, heads, size).transpose(1, 2)
    # A view of a larger buffer, as of a cache; what lies after the slots must not be read.
    key, value = states(rows + 1, kv_heads, slots + 7, size), states(rows + 1, kv_heads, slots + 7, value_size or size)
    key[:, :, slots:], value[:, :, slots:] = float("nan"), float("nan")
    return query, key[:rows, :, :slots], value[:rows, :, :slots]


def attention(run, *states, scale=0.3, **options):
    return run(*states, scale=scale, **options)


def check(device, query, key, value, tree, num_splits=1, **options):
    """Runs the kernels on the device."""
    expected = attention(tree_attention, query, key, value, tree, **options)
    options = {name: option.to(device) if torch.is_tensor(option) else option for name, option in options.items()}
    states = (states.to(device) for states in (query, key, value))
    output = attention(tree_attention_triton, *states, moved(tree, device), num_splits=num_splits, **options)
    # The next launch counts from 0 again.
    assert not arrivals(1024, device).any()
    assert output.is_contiguous()
    assert output.dtype == query.dtype
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(output.cpu(), expected, atol=tolerance, rtol=tolerance)


# The reference


def by_definition(query, key, value, tree, parents, scale=0.3, window=0, chunk=0, softcap=0.0, sinks=None):
    """One node and head at a time, over the text that the node stands for."""
    rows, heads, nodes, _ = query.shape
    groups = heads // key.shape[1]
    output = torch.zeros(rows, nodes, heads, value.shape[-1])
    for row, node, head in torch.cartesian_prod(*map(torch.arange, (rows, nodes, heads))).tolist():
        path = [node]
        while path[0] > 0:
            path.insert(0, parents[path[0] - 1] + 1)
        length = int(tree.lengths[row])
        text = [*range(length), *(length + ancestor for ancestor in path)]
        text = [slot for slot in text if slot >= tree.starts[row]] or text[-1:]
        position = len(text) - 1
        if window:
            text = text[max(position - window + 1, 0) :]
        if chunk:
            text = text[position // chunk * chunk :]
        scores = key[row, head // groups, text] @ query[row, head, node] * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.exp()
        total = weights.sum() + (0 if sinks is None else sinks[head].exp())
        output[row, node, head] = weights / total @ value[row, head // groups, text]
    return output


WINDOW, CHUNK = {"window": 5}, {"chunk": 4}


@pytest.mark.parametrize(
    ("parents", "options"),
    [
        *((BUSHY, options) for options in ({}, WINDOW, CHUNK, {"softcap": 0.7}, {"sinks": torch.ones(4)})),
        *in_full(*((parents, options) for parents in ((), CHAIN, STAR) for options in ({}, WINDOW, CHUNK))),
        *in_full((BUSHY, {"window": 1}), (BUSHY, {"window": 100})),
    ],
    ids=str,
)
def test_reference_follows_the_definition(parents, options):
    nodes = len(parents) + 1
    tree = tree_of(parents, lengths=[14, 1, 9], starts=[3, 0, 8])
    states = random_states(3, 4, 2, nodes, slots=14 + nodes, size=8, value_size=6)
    output = attention(tree_attention, *states, tree, **options)
    torch.testing.assert_close(output, by_definition(*states, tree, parents, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [WINDOW, *in_full({}, CHUNK)], ids=str)
def test_last_nodes_of_a_tree_and_chains_of_any_length(options):
    """As a level of a draft reads them, and prompts; padding sees itself, so that there is no NaN."""
    tree = tree_of(BUSHY, lengths=[14, 1, 9], starts=[3, 0, 8])
    query, key, value = random_states(3, 4, 2, 7, slots=21, size=8)
    expected = attention(tree_attention, query, key, value, tree, **options)[:, -3:]
    last = SlotTree(tree.lengths, tree.starts, tree.ancestors[:, -3:], tree.depths)
    assert (last.num_queries, last.num_nodes) == (3, 7)
    output = attention(tree_attention, query[:, :, -3:], key, value, last, **options)
    torch.testing.assert_close(output, expected)
    states, chain = random_states(3, 4, 2, 12, slots=15, size=8), SlotTree(**PROMPTS, num_queries=12)
    expected = by_definition(*states, chain, range(-1, 10), **options)
    torch.testing.assert_close(attention(tree_attention, *states, chain, **options), expected)


# Prompts: nothing is committed, and the first tokens of some rows are padding.
PROMPTS = {"lengths": torch.tensor([0, 0, 3]), "starts": torch.tensor([0, 5, 4])}


def test_graphs_count_arrivals_apart():
    """Graphs may run beside each other and beside other work."""
    cpu, graphs = torch.device("cpu"), []
    for _ in range(2):
        with holding() as held:
            graphs.append(arrivals(1024, cpu))
            assert arrivals(1024, cpu) is graphs[-1]
        assert len(held) == 1
    graphs.append(arrivals(1024, cpu))
    assert arrivals(1024, cpu) is graphs[-1]
    assert len({id(graph) for graph in graphs}) == 3


# The kernels

SINKS = torch.tensor([-3.0, 0.0, 90.0, 4.0])
SPANS = ({"window": 1}, {"window": 70}, {"chunk": 64}, {"softcap": 0.7}, {"sinks": SINKS})


@pytest.mark.parametrize(
    ("parents", "lengths", "starts", "heads", "num_splits", "options"),
    [
        # Short and long rows, with padding, in several parts, and everything at once.
        (BUSHY, (150, 1, 64), (3, 0, 63), (2, 1), 3, {}),
        (BUSHY, (100, 7), (11, 2), (4, 1), 2, {"window": 9, "softcap": 30.0, "sinks": SINKS}),
        (STAR, (40, 41), (0, 5), (6, 2), 2, {"chunk": 4}),
        # A tree of its own for every row, and as many nodes as there are bits.
        pytest.param(OWN_TREES, (25, 9, 3), (0, 9, 1), (2, 1), 2, {}, marks=pytest.mark.smoke),
        (tuple(node // 3 - 1 for node in range(MAX_NODES - 1)), (106,), (0,), (2, 1), 1, {}),
        *in_full(
            *((parents, (150, 1, 64), (3, 0, 63), (2, 1), splits, {}) for parents in ((), CHAIN) for splits in (1, 3)),
            *((BUSHY, (100, 7), (11, 2), (4, 1), splits, options) for splits in (1, 2) for options in SPANS),
            *((STAR, (40, 41), (0, 5), heads, 2, {}) for heads in ((3, 3), (7, 1))),
        ),
    ],
    ids=lambda value: str(value) if len(str(value)) < 60 else "",
)
@pytest.mark.filterwarnings("ignore:overflow")  # a sink that leaves nothing to the others
def test_kernel(parents, lengths, starts, heads, num_splits, options, device):
    nodes = (4 if parents is OWN_TREES else len(parents)) + 1
    states = random_states(len(lengths), *heads, nodes, max(lengths) + nodes, 16)
    check(device, *states, tree_of(parents, list(lengths), list(starts)), num_splits, **options)


def other_trees(kind):
    """Trees of other kinds, with the sizes of the states that they are of."""
    if kind == "chain":
        return SlotTree(**PROMPTS, num_queries=MAX_NODES + 6), (3, 2, 1, MAX_NODES + 6, MAX_NODES + 9)
    if kind == "many nodes":
        # More than a word has bits.
        parents = [tuple(node // 3 - 1 for node in range(MAX_NODES + 5)), tuple(range(-1, MAX_NODES + 4))]
        topology = TreeTopology.from_parents(torch.tensor(parents))
        words = pack_words(topology.ancestors[:, -7:])
        tree = SlotTree(torch.tensor([20, 3]), torch.tensor([4, 0]), words, topology.depths)
        return tree, (2, 2, 1, 7, 90)
    # Long texts, one shorter than both ends, and one that begins with padding.
    tree = tree_of(BUSHY, lengths=[180, 7, 64], starts=[11, 2, 0])
    return of_both_ends(tree, kind, window=40), (3, 4, 1, 7, 187)


@pytest.mark.parametrize(
    ("kind", "options", "num_splits"),
    [
        *(("chain", {"window": 9}, 2), ("many nodes", WINDOW, 2), (4, {"window": 60}, 3)),
        *in_full(("chain", {}, 2), ("chain", {"window": 9}, 1), ("chain", {"chunk": 8}, 1), ("many nodes", {}, 2)),
        # Both ends of texts, of which so many slots are the beginning.
        *in_full(*((count, {}, splits) for count in (0, 4, 70) for splits in (1, 3))),
        *in_full((70, {"window": 9}, 3), (0, {"window": 60}, 1), (70, {"window": 60}, 1)),
    ],
    ids=str,
)
def test_kernel_over_other_trees(kind, options, num_splits, device):
    tree, sizes = other_trees(kind)
    check(device, *random_states(*sizes, 16), tree, num_splits, **options)


@pytest.mark.parametrize(
    ("size", "value_size", "dtype"),
    [
        (24, 40, torch.bfloat16),
        (192, 128, torch.float16),
        *in_full(*((size, size, torch.bfloat16) for size in (64, 80, 96, 128, 256))),
        *in_full((80, 80, torch.float32), (256, 256, torch.float32), (80, 80, torch.float16)),
    ],
    ids=str,
)
def test_kernel_with_any_head_size_and_dtype(size, value_size, dtype, device):
    states = random_states(1, 2, 1, 7, 60, size, value_size, dtype)
    check(device, *states, tree_of(BUSHY, [53], [4]), num_splits=2, scale=size**-0.5)


def test_kernel_keeps_nan_where_it_belongs(device):
    """A node that sees a NaN, and one that does not."""
    query, key, value = random_states(1, 1, 1, 3, 23, 16)
    value[0, 0, 21, 3] = float("nan")
    tree, states = moved(tree_of((-1, -1), [20], [0]), device), [part.to(device) for part in (query, key, value)]
    for num_splits in (1, 2):
        output = attention(tree_attention_triton, *states, tree, num_splits=num_splits)
        assert output[0, 1].isnan().nonzero().tolist() == [[0, 3]]


# What a GPU would run, and whether it needs more than one program for the keys: each entry of the tables of tiles, the
# largest tiles with everything on.
SHAPES = {
    "d128": (128, 128, 64, 8, torch.bfloat16, 8, {"window": 4096, "softcap": 50.0, "sinks": True}),
    "d128_few": (128, 128, 4, 4, torch.bfloat16, 8, {}),
    "d128_some": (128, 128, 16, 4, torch.bfloat16, 8, {}),
    "d128_chain": (128, 128, 1000, 4, torch.bfloat16, 1, {"is_chain": True, "window": 512}),
    "d64": (64, 64, 64, 8, torch.float16, 1, {"window": 128, "sinks": True}),
    "d64_some": (64, 64, 16, 4, torch.float16, 8, {}),
    "d128_both_ends": (128, 128, 1, 4, torch.bfloat16, 1, {"both_ends": True}),
    "one_query": (96, 96, 1, 1, torch.bfloat16, 8, {}),
    "d192": (192, 128, 16, 1, torch.bfloat16, 1, {}),
    "d256": (256, 256, 32, 2, torch.bfloat16, 8, {"chunk": 8192, "softcap": 50.0}),
    "d64_float32": (64, 64, 8, 4, torch.float32, 8, {}),
    "d128_float32": (128, 128, 8, 4, torch.float32, 1, {"sinks": True}),
    "d256_float32": (256, 256, 8, 2, torch.float32, 8, {}),
}
# Each on one of two kinds of GPU, one shape on another maker's, the largest tiles on all of them.
FULL = [*zip(itertools.cycle((90, 80)), SHAPES), ("gfx942", "d128_some")]
SLOW = [(90, "d128_some"), (90, "d256"), (80, "d128"), (120, "d128")]


@pytest.mark.parametrize(("compile_for", "shape"), [*in_full(*FULL), *when_slow(*SLOW)], indirect=["compile_for"])
def test_kernels_compile(compile_for, shape, request, monkeypatch):
    gpu = Gpu(132, SHARED_MEMORY[request.node.callspec.params["compile_for"]])
    monkeypatch.setattr(kernels, "gpu_of", lambda device: gpu)
    size, value_size, nodes, groups, dtype, num_splits, options = SHAPES[shape]
    query = torch.empty(1, 8 * groups, nodes, size, dtype=dtype)
    key, value = (torch.empty(1, 8, 4096, width, dtype=dtype) for width in (size, value_size))
    options = {**options, "sinks": torch.empty(8 * groups, dtype=dtype) if "sinks" in options else None}
    integers = torch.zeros(1, dtype=torch.long)
    tree = SlotTree(integers, integers, integers.expand(1, nodes, 1), integers.expand(nodes))
    if options.pop("is_chain", False):
        tree = SlotTree(integers, integers, num_queries=nodes)
    if options.pop("both_ends", False):
        tree = of_both_ends(tree, 4, 512)
    with compile_for() as compiled:
        attention(tree_attention_triton, query, key, value, tree, num_splits=num_splits, **options)
    assert len(compiled) == 1
    # Numbers that threads hand to each other one by one. Sums of all parts, which a thread keeps, would be 64 more.
    assert compiled[0].asm.get("ptx", "").count("st.shared.b32") < 64
    memory = next(memory for memory in TILES if gpu.shared_memory >= memory)
    if memory == 227 << 10 and dtype.itemsize == 2:
        # More than one tile is on its way while another is worked on.
        waits = [int(count) for count in re.findall(r"cp.async.wait_group\s+(\d+)", compiled[0].asm["ptx"])]
        assert max(waits) >= 2
