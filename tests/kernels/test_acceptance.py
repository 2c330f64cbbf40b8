"""`follow`, `reject_chain`, `reject_tree`: the kernels give the reference's integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec.drafts import DraftTree
from hf_specdec.kernels.acceptance import (
    _follow_torch,
    _follow_triton,
    _reject_chain_torch,
    _reject_tree_torch,
    _reject_triton,
)
from hf_specdec.kernels.sampling import sample_torch
from tests.helpers.levels import full, in_full


ALMOST_ONE = float(np.nextafter(1.0, 0.0))
STAR, BINARY, MIXED = (-1, -1, -1, -1), (-1, -1, 0, 0, 1, 1, 2), (-1, 0, 0, 1, 0, -1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def uniform(generator, *shape):
    return torch.rand(shape, dtype=torch.float64, generator=generator)


def random_probs(generator, *shape):
    return torch.randn(shape, generator=generator).mul(1.5).softmax(-1)


def moved(draft, device):
    """The draft with its tensors on a device."""
    probs = None if draft.probs is None else draft.probs.to(device)
    return DraftTree(draft.tokens.to(device), draft.parents.to(device), draft.num_nodes.to(device), probs)


def assert_same(kernel, reference):
    for name in ("num_accepted", "path", "tokens"):
        assert torch.equal(getattr(kernel, name).cpu(), getattr(reference, name)), name


def check_follow(draft, node_tokens, device):
    reference = _follow_torch(draft, node_tokens)
    assert_same(_follow_triton(moved(draft, device), node_tokens.to(device)), reference)
    return reference


def check_reject(draft, target_probs, accept_uniforms, target_uniforms, device):
    reject = _reject_chain_torch if draft.is_chain else _reject_tree_torch
    arguments = target_probs, accept_uniforms, target_uniforms
    reference = reject(draft, *arguments)
    assert_same(_reject_triton(moved(draft, device), *(x.to(device) for x in arguments)), reference)
    return reference


@st.composite
def drafted_batches(draw):
    """Trees over three tokens, of one shape or of several, with what the target chooses at each node."""
    batch_size, size = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    shared = draw(st.booleans())

    def matrix(width):
        return torch.tensor([[draw(st.integers(0, 2)) for _ in range(width)] for _ in range(batch_size)])

    parents = [[draw(st.integers(-1, i - 1)) for i in range(size)] for _ in range(1 if shared else batch_size)]
    num_nodes = torch.tensor([draw(st.integers(0, size)) for _ in range(batch_size)])
    parents = torch.tensor(parents[0] if shared else parents)
    return DraftTree(matrix(size), parents, num_nodes), matrix(size + 1)


@given(drafted_batches())
def test_follow_any_tree(device, batch):
    check_follow(*batch, device)


FOLLOWED = {
    "whole draft": (DraftTree.chain(torch.arange(64)[None]), torch.arange(65)[None], "num_accepted", [64]),
    "padding that would match": (
        DraftTree.chain(torch.tensor([[1, 1, 1], [1, 1, -1], [1, 1, 1]]), torch.tensor([1, 2, 0])),
        torch.ones(3, 4, dtype=torch.long),
        "num_accepted",
        [1, 2, 0],
    ),
    # Nodes 1 and 2 carry the same token; only node 2's child would go on.
    "first of equal siblings": (
        DraftTree(torch.tensor([[4, 4, 5]]), torch.tensor([-1, -1, 1]), torch.tensor([3])),
        torch.tensor([[4, 5, 5, 0]]),
        "path",
        [[0, 1, 1, 1]],
    ),
    "no choice at a node": (
        DraftTree.chain(torch.tensor([[3, -1]]), torch.tensor([1])),
        torch.tensor([[3, -1, -1]]),
        "tokens",
        [[3, -1, 0]],
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", FOLLOWED)
def test_follow(case, device):
    draft, node_tokens, name, expected = FOLLOWED[case]
    assert getattr(check_follow(draft, node_tokens, device), name).tolist() == expected


def random_chain(generator, batch_size, size, vocab_size, dtype=torch.float32, overlap=0.8):
    """Drawn chains, the target's distributions after them, and the numbers of the tests and draws."""
    target_probs = random_probs(generator, batch_size, size + 1, vocab_size)
    noise = random_probs(generator, batch_size, size, vocab_size)
    probs = overlap * target_probs[:, :-1] + (1 - overlap) * noise
    tokens = sample_torch(probs, uniform(generator, batch_size, size))
    num_nodes = torch.randint(size + 1, (batch_size,), generator=generator)
    numbers = uniform(generator, batch_size, size), uniform(generator, batch_size, size + 1)
    return DraftTree.chain(tokens, num_nodes, probs.to(dtype)), target_probs.to(dtype), *numbers


@pytest.mark.parametrize(
    ("rows", "size", "vocab_size", "dtype"),
    [
        (8, 5, 1271, torch.float32),
        *in_full((8, 5, 2, torch.float32), (8, 5, 256, torch.float32), (8, 5, 5000, torch.float32)),
        *in_full(*((3, 4, 1000, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64))),
        *in_full((4, 1, 300, torch.float32), (2, 1, 262_144, torch.float32)),
    ],
)
def test_reject_chains(rows, size, vocab_size, dtype, device, generator):
    accepted = check_reject(*random_chain(generator, rows, size, vocab_size, dtype), device)
    assert rows < 8 or accepted.num_accepted.unique().numel() > 2


def test_padding_is_never_read_and_dtypes_may_differ(device, generator):
    draft, target_probs, *numbers = random_chain(generator, 4, 4, 300)
    padding = torch.arange(4) >= draft.num_nodes[:, None]
    draft.tokens = draft.tokens.masked_fill(padding, -1)
    draft.probs = draft.probs.masked_fill(padding[..., None], torch.nan).to(torch.bfloat16)
    accepted = check_reject(draft, target_probs, *numbers, device)
    assert (accepted.tokens >= 0).all()


def random_tree(generator, parents, batch_size, vocab_size, overlap=0.6):
    """Trees whose siblings were drawn without replacement; parents `(N,)` or `(B, N)`."""
    parents = torch.as_tensor(parents)
    size, own_parents = parents.shape[-1], parents.expand(batch_size, -1)
    rows = torch.arange(batch_size)
    target_probs = random_probs(generator, batch_size, size + 1, vocab_size)
    family_probs = overlap * target_probs + (1 - overlap) * random_probs(generator, batch_size, size + 1, vocab_size)
    probs = family_probs[rows[:, None], own_parents + 1]
    left, tokens = family_probs.clone(), []
    for node in range(size):
        own_probs = left[rows, own_parents[:, node] + 1]
        tokens.append(sample_torch(own_probs, uniform(generator, batch_size)).clamp(min=0))
        left[rows, own_parents[:, node] + 1] = own_probs.scatter(1, tokens[-1][:, None], 0.0)
    num_nodes = torch.randint(size + 1, (batch_size,), generator=generator)
    num_nodes[0] = size
    draft = DraftTree(torch.stack(tokens, dim=1), parents, num_nodes, probs)
    return draft, target_probs, uniform(generator, batch_size, size), uniform(generator, batch_size, size + 1)


@pytest.mark.parametrize(
    ("parents", "vocab_size"),
    [(MIXED, 300), *in_full((STAR, 5), (STAR, 5000), (BINARY, 300), (BINARY, 5), (MIXED, 5000))],
)
def test_reject_trees(parents, vocab_size, device, generator):
    accepted = check_reject(*random_tree(generator, parents, 4, vocab_size, overlap=0.4), device)
    assert accepted.path.unique().numel() > 2


@pytest.mark.smoke
def test_reject_trees_of_different_shapes(device, generator):
    parents = [[-1, -1, -1, 0, 1], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 2], [-1, -1, 1, 1, 1]]
    check_reject(*random_tree(generator, parents, 4, 300), device)


def test_siblings_are_the_whole_vocabulary_or_equal(device, generator):
    draft, *arguments = random_tree(generator, (-1, -1, -1), 8, 3, overlap=0.2)
    draft.num_nodes.fill_(3)
    accepted = check_reject(draft, *arguments, device)
    assert (accepted.num_accepted == 1).all()
    assert accepted.path[:, 1].unique().numel() == 3
    # Equal ones are tried once.
    draft.tokens[:, 1] = draft.tokens[:, 0]
    assert (check_reject(draft, *arguments, device).path != 2).all()


@full
def test_sibling_drawn_from_nothing_is_not_tried(device, generator):
    draft = DraftTree(torch.tensor([[0, 2]]).expand(8, -1), torch.tensor([-1, -1]), torch.full((8,), 2))
    draft.probs = torch.tensor([1.0, 0.0, 0.0]).expand(8, 2, 3)
    target_probs = torch.tensor([0.2, 0.3, 0.5]).expand(8, 3, 3)
    accepted = check_reject(draft, target_probs, uniform(generator, 8, 2), uniform(generator, 8, 3), device)
    assert (accepted.path.amax(1) <= 1).all()
    assert accepted.num_accepted.unique().numel() == 2


# Numeric traps of both rules

both_rules = pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])


def chain_or_tree(is_chain, tokens, probs):
    draft = DraftTree.chain(tokens, probs=probs)
    draft.is_chain = is_chain
    return draft


@both_rules
def test_zero_never_accepts_an_impossible_token(is_chain, device):
    target_probs = torch.tensor([[[0.0, 0.25, 0.75]] * 2])
    probs = torch.tensor([[[0.0, 1.0, 0.0]]])
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    draft = chain_or_tree(is_chain, torch.tensor([[0]]), probs)
    accepted = check_reject(draft, target_probs, zeros[:, :1], zeros, device)
    assert accepted.num_accepted.item() == 0
    assert accepted.tokens[0, 0].item() in (1, 2)


@both_rules
def test_equal_distributions_accept_everything(is_chain, device, generator):
    draft, target_probs, _, numbers = random_chain(generator, 3, 5, 300)
    draft.probs, draft.is_chain = target_probs[:, :-1].clone(), is_chain
    almost_one = torch.full((3, 5), ALMOST_ONE, dtype=torch.float64)
    accepted = check_reject(draft, target_probs, almost_one, numbers, device)
    assert torch.equal(accepted.num_accepted, draft.num_nodes)


@both_rules
@pytest.mark.parametrize("number", [0.51, *in_full(0.0, 0.49, ALMOST_ONE)])
def test_empty_residual_falls_back_to_the_target(is_chain, number, device):
    # The target's distribution is the draft's, rounded down everywhere: a rejection leaves nothing of p - q.
    probs = torch.tensor([[[0.5, 0.0, 0.5]]])
    target_probs = torch.cat([probs, probs], dim=1) * (1 - 2**-22)
    draft = chain_or_tree(is_chain, torch.tensor([[0]]), probs)
    rejecting = torch.full((1, 1), ALMOST_ONE, dtype=torch.float64)
    numbers = torch.full((1, 2), number, dtype=torch.float64)
    accepted = check_reject(draft, target_probs, rejecting, numbers, device)
    assert accepted.tokens.tolist() == [[0 if number < 0.5 else 2, 0]]


@both_rules
def test_nan_in_a_distribution(is_chain, device, generator):
    """In the target's it is marked, in the draft's it leaves the target's."""
    draft, target_probs, *numbers = random_chain(generator, 4, 3, 300)
    draft.is_chain, good = is_chain, target_probs.clone()
    target_probs[1] = torch.nan
    target_probs[2, :, 7] = torch.nan
    accepted = check_reject(draft, target_probs, *numbers, device)
    new_tokens = accepted.tokens.gather(1, accepted.num_accepted[:, None]).flatten()
    assert (new_tokens < 0).tolist() == [False, True, True, False]
    draft.num_nodes.fill_(3)
    draft.probs[1] = torch.nan
    accepted = check_reject(draft, good, *numbers, device)
    assert accepted.num_accepted[1] == 0
    assert accepted.tokens[1, 0] == sample_torch(good[1, 0], numbers[1][1, 0])


COMPILED = {"chain": (151_936, tuple(range(-1, 15)), torch.float32), "tree": (32_001, BINARY, torch.bfloat16)}


@pytest.mark.parametrize(
    ("compile_for", "shape"),
    [(90, "chain"), *in_full((80, "tree"), (100, "tree"), (120, "chain"))],
    indirect=["compile_for"],
)
def test_kernels_compile(shape, compile_for):
    vocab_size, parents, dtype = COMPILED[shape]
    parents = torch.tensor(parents)
    size = len(parents)
    tokens, node_tokens = torch.zeros(2, size, dtype=torch.long), torch.zeros(2, size + 1, dtype=torch.long)
    draft = DraftTree(tokens, parents, torch.full((2,), size), torch.empty(2, size, vocab_size, dtype=dtype))
    numbers = torch.empty(2, size, dtype=torch.float64), torch.empty(2, size + 1, dtype=torch.float64)
    with compile_for() as kernels:
        _follow_triton(draft, node_tokens)
        _reject_triton(draft, torch.empty(2, size + 1, vocab_size, dtype=dtype), *numbers)
    assert len(kernels) == 4
