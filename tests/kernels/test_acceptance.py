"""`follow` and `reject`: the kernels give the reference's integers."""

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
from tests.helpers.levels import in_full, when_slow
from tests.helpers.rule_cases import random_probs, uniform


ALMOST_ONE = float(np.nextafter(1.0, 0.0))
STAR, BINARY, MIXED = (-1, -1, -1, -1), (-1, -1, 0, 0, 1, 1, 2), (-1, 0, 0, 1, 0, -1)


def check(draft, device, *arguments):
    """The accepted nodes by the reference, which are the kernel's."""
    kernel, reference = (_reject_triton, _reject_chain_torch if draft.is_chain else _reject_tree_torch)
    if len(arguments) == 1:
        kernel, reference = _follow_triton, _follow_torch
    expected = reference(draft, *arguments)
    probs = None if draft.probs is None else draft.probs.to(device)
    parts = [part.to(device) for part in (draft.tokens, draft.parents, draft.num_nodes)]
    found = kernel(DraftTree(*parts, probs), *(argument.to(device) for argument in arguments))
    for name in ("num_accepted", "path", "tokens"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
    return expected


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
    # Where nothing is chosen there is -1.
    return DraftTree(matrix(size), parents, num_nodes), matrix(size + 1) - draw(st.integers(0, 1))


@given(drafted_batches())
def test_follow_any_tree(device, batch):
    draft, node_tokens = batch
    check(draft, device, node_tokens)


@pytest.mark.parametrize(
    ("size", "vocab_size", "dtype"),
    [
        (5, 1271, torch.float32),
        *in_full((5, 2, torch.float32), (5, 256, torch.float32), (5, 5000, torch.float32)),
        *in_full(*((4, 1000, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64))),
        *in_full((1, 300, torch.float32), (1, 262_144, torch.float32)),
    ],
)
def test_reject_chains(size, vocab_size, dtype, device, generator):
    draft, target_probs, *numbers = random_tree(generator, range(-1, size - 1), 8, vocab_size, 0.8)
    draft.is_chain, draft.probs = True, draft.probs.to(dtype)
    accepted = check(draft, device, target_probs.to(dtype), *numbers)
    assert accepted.num_accepted.unique().numel() > min(2, size)
    # Padding is never read, and dtypes may differ.
    padding = torch.arange(size) >= draft.num_nodes[:, None]
    draft.tokens = draft.tokens.masked_fill(padding, -1)
    draft.probs = draft.probs.masked_fill(padding[..., None], torch.nan).to(torch.bfloat16)
    assert (check(draft, device, target_probs, *numbers).tokens >= 0).all()


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


OWN = ((-1, -1, -1, 0, 1), (-1, 0, 1, 2, 3), (-1, 0, 0, 0, 2), (-1, -1, 1, 1, 1))


@pytest.mark.parametrize(
    ("parents", "vocab_size"),
    [(MIXED, 300), (OWN, 300), *in_full((STAR, 5), (STAR, 5000), (BINARY, 300), (BINARY, 5), (MIXED, 5000))],
)
def test_reject_trees(parents, vocab_size, device, generator):
    draft, *arguments = random_tree(generator, parents, 4, vocab_size, overlap=0.4)
    assert check(draft, device, *arguments).path.unique().numel() > 2


@pytest.mark.smoke
def test_siblings_that_are_the_whole_vocabulary_equal_or_drawn_from_nothing(device, generator):
    draft, *arguments = random_tree(generator, (-1, -1, -1), 8, 3, overlap=0.2)
    draft.num_nodes.fill_(3)
    accepted = check(draft, device, *arguments)
    assert (accepted.num_accepted == 1).all()
    assert accepted.path[:, 1].unique().numel() == 3
    # Equal ones are tried once.
    draft.tokens[:, 1] = draft.tokens[:, 0]
    assert (check(draft, device, *arguments).path != 2).all()
    draft = DraftTree(torch.tensor([[0, 2]]).expand(8, -1), torch.tensor([-1, -1]), torch.full((8,), 2))
    draft.probs = torch.tensor([1.0, 0.0, 0.0]).expand(8, 2, 3)
    target_probs = torch.tensor([0.2, 0.3, 0.5]).expand(8, 3, 3)
    accepted = check(draft, device, target_probs, uniform(generator, 8, 2), uniform(generator, 8, 3))
    assert (accepted.path.amax(1) <= 1).all()
    assert accepted.num_accepted.unique().numel() == 2


# Numeric traps of both rules

both_rules = pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])


@both_rules
def test_numbers_at_the_borders(is_chain, device, generator):
    """Zero accepts nothing impossible, and a number next to one accepts all where the distributions are equal."""
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    draft = DraftTree.chain(torch.tensor([[0]]), probs=torch.tensor([[[0.0, 1.0, 0.0]]]))
    draft.is_chain = is_chain
    accepted = check(draft, device, torch.tensor([[[0.0, 0.25, 0.75]] * 2]), zeros[:, :1], zeros)
    assert accepted.num_accepted.item() == 0
    assert accepted.tokens[0, 0].item() in (1, 2)
    draft, target_probs, _, numbers = random_tree(generator, range(-1, 4), 3, 300)
    draft.probs, draft.is_chain = target_probs[:, :-1].clone(), is_chain
    accepted = check(draft, device, target_probs, torch.full((3, 5), ALMOST_ONE, dtype=torch.float64), numbers)
    assert torch.equal(accepted.num_accepted, draft.num_nodes)


@both_rules
def test_empty_residual_falls_back_to_the_target(is_chain, device):
    # The target's distribution is the draft's, rounded down everywhere: a rejection leaves nothing of p - q.
    probs = torch.tensor([[[0.5, 0.0, 0.5]]])
    draft = DraftTree.chain(torch.tensor([[0]]), probs=probs)
    draft.is_chain = is_chain
    rejecting = torch.full((1, 1), ALMOST_ONE, dtype=torch.float64)
    for number in (0.51, 0.0, 0.49, ALMOST_ONE):
        numbers = torch.full((1, 2), number, dtype=torch.float64)
        accepted = check(draft, device, torch.cat([probs, probs], dim=1) * (1 - 2**-22), rejecting, numbers)
        assert accepted.tokens.tolist() == [[0 if number < 0.5 else 2, 0]]


@both_rules
def test_nan_in_a_distribution(is_chain, device, generator):
    """In the target's it is marked, in the draft's it leaves the target's."""
    draft, target_probs, *numbers = random_tree(generator, range(-1, 2), 4, 300)
    draft.is_chain, good = is_chain, target_probs.clone()
    target_probs[1] = torch.nan
    target_probs[2, :, 7] = torch.nan
    accepted = check(draft, device, target_probs, *numbers)
    new_tokens = accepted.tokens.gather(1, accepted.num_accepted[:, None]).flatten()
    assert (new_tokens < 0).tolist() == [False, True, True, False]
    draft.num_nodes.fill_(3)
    draft.probs[1] = torch.nan
    accepted = check(draft, device, good, *numbers)
    assert accepted.num_accepted[1] == 0
    assert accepted.tokens[1, 0] == sample_torch(good[1, 0], numbers[1][1, 0])


CHAIN = tuple(range(-1, 15))


@pytest.mark.parametrize(
    ("compile_for", "vocab_size", "parents", "dtype"),
    [
        *in_full((90, 151_936, CHAIN, torch.float32), (80, 32_001, BINARY, torch.bfloat16)),
        *when_slow((120, 151_936, CHAIN, torch.float32), (100, 32_001, BINARY, torch.bfloat16)),
    ],
    indirect=["compile_for"],
)
def test_kernels_compile(vocab_size, parents, dtype, compile_for):
    parents, size = torch.tensor(parents), len(parents)
    tokens, node_tokens = torch.zeros(2, size, dtype=torch.long), torch.zeros(2, size + 1, dtype=torch.long)
    draft = DraftTree(tokens, parents, torch.full((2,), size), torch.empty(2, size, vocab_size, dtype=dtype))
    numbers = torch.empty(2, size, dtype=torch.float64), torch.empty(2, size + 1, dtype=torch.float64)
    with compile_for() as kernels:
        _follow_triton(draft, node_tokens)
        _reject_triton(draft, torch.empty(2, size + 1, vocab_size, dtype=dtype), *numbers)
    assert len(kernels) == 3
