"""Acceptance rules: reference integers, the exact distribution of texts, a plain walk of the tree, numeric traps."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_specdec.drafts import DraftTree
from hf_specdec.kernels.acceptance import Acceptance, follow, reject_chain, reject_tree
from hf_specdec.kernels.sampling import sample_from_probs
from hf_specdec.logits.acceptance import reject_block
from tests.helpers.paths import FIXTURES
from tests.helpers.rule_cases import ALMOST_ONE, SAMPLES, random_probs, rows_of, uniform
from tests.helpers.statistics import chi_square_pvalue


PUBLISHED = FIXTURES / "verification"


def make_tree(tokens, parents, probs=None, num_nodes=None):
    """A tree; tokens `(B, N)`, parents `(N,)` or `(B, N)`."""
    tokens, parents = torch.as_tensor(tokens), torch.as_tensor(parents)
    if num_nodes is None:
        num_nodes = [tokens.shape[1]] * tokens.shape[0]
    return DraftTree(tokens, parents, torch.as_tensor(num_nodes), probs)


def assert_same(first: Acceptance, second: Acceptance):
    for name in ("num_accepted", "path", "tokens"):
        assert torch.equal(getattr(first, name), getattr(second, name)), name


# follow


def walk(tokens, parents, num_nodes, node_tokens):
    """The rule of `follow` for one row: path and committed tokens."""
    path, committed, node = [0], [], 0
    while True:
        committed.append(node_tokens[node])
        children = [i for i in range(num_nodes) if parents[i] + 1 == node and tokens[i] == node_tokens[node]]
        if not children:
            return path, committed
        node = children[0] + 1
        path.append(node)


@st.composite
def drafted_batches(draw, shared_parents):
    batch_size, size = draw(st.integers(1, 4)), draw(st.integers(0, 10))
    token = st.integers(0, 2)

    def parents():
        return [draw(st.integers(-1, i - 1)) for i in range(size)]

    def matrix(width):
        return [[draw(token) for _ in range(width)] for _ in range(batch_size)]

    all_parents = [parents()] * batch_size if shared_parents else [parents() for _ in range(batch_size)]
    return matrix(size), all_parents, [draw(st.integers(0, size)) for _ in range(batch_size)], matrix(size + 1)


def check_follow(draft, tokens, parents, num_nodes, node_tokens):
    acceptance = follow(draft, torch.tensor(node_tokens))
    committed = rows_of(acceptance)
    for row, count in enumerate(acceptance.num_accepted.tolist()):
        expected_path, expected_tokens = walk(tokens[row], parents[row], num_nodes[row], node_tokens[row])
        assert acceptance.path[row, : count + 1].tolist() == expected_path
        assert committed[row] == expected_tokens


@given(drafted_batches(shared_parents=True))
def test_follow_walks_trees_of_one_shape(batch):
    tokens, parents, num_nodes, _ = batch
    tokens = torch.tensor(tokens, dtype=torch.long).view(len(tokens), -1)
    draft = make_tree(tokens, torch.tensor(parents[0], dtype=torch.long), num_nodes=num_nodes)
    check_follow(draft, *batch)


@given(drafted_batches(shared_parents=False))
def test_follow_walks_trees_of_different_shapes(batch):
    tokens, parents, num_nodes, _ = batch
    tokens, own_parents = (torch.tensor(x, dtype=torch.long).view(len(tokens), -1) for x in (tokens, parents))
    check_follow(make_tree(tokens, own_parents, num_nodes=num_nodes), *batch)


@given(drafted_batches(shared_parents=True))
def test_follow_walks_chains(batch):
    tokens, _, num_nodes, node_tokens = batch
    draft = DraftTree.from_lists([row[:count] for row, count in zip(tokens, num_nodes)])
    chain = [list(range(-1, draft.size - 1))] * len(tokens)
    check_follow(draft, tokens, chain, num_nodes, [row[: draft.size + 1] for row in node_tokens])


def test_follow_without_drafts():
    acceptance = follow(DraftTree.empty(3), torch.tensor([[5], [6], [7]]))
    assert rows_of(acceptance) == [[5], [6], [7]]
    assert acceptance.num_accepted.tolist() == [0, 0, 0]
    assert acceptance.path.tolist() == [[0]] * 3


def test_follow_ignores_padding_that_would_match():
    draft = DraftTree.chain(torch.tensor([[1, 1, 1], [1, 1, -1]]), torch.tensor([1, 2]))
    assert follow(draft, torch.ones(2, 4, dtype=torch.long)).num_accepted.tolist() == [1, 2]


def test_follow_takes_the_first_of_equal_siblings():
    # Nodes 1 and 2 carry the same token; only node 2's child would go on.
    draft = make_tree([[4, 4, 5]], [-1, -1, 1])
    acceptance = follow(draft, torch.tensor([[4, 5, 5, 0]]))
    assert acceptance.path.tolist() == [[0, 1, 1, 1]]
    assert rows_of(acceptance) == [[4, 5]]


# Fixed probabilities and random numbers


@pytest.fixture(scope="module")
def chain_fixture():
    return load_file(PUBLISHED / "chain" / "expected.safetensors")


@pytest.fixture(scope="module")
def tree_fixtures():
    modes = json.loads((PUBLISHED / "tree" / "modes.json").read_text())
    tensors = load_file(PUBLISHED / "tree" / "expected.safetensors")
    cases = [{} for _ in modes]
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        cases[int(index)][name] = tensor
    return list(zip(modes, cases))


def tree_of_case(case, batch_size=1):
    """The draft of a tree case, whose node 0 is the anchor and whose `draft_probs` belong to the parent."""
    parents = case["parent"][1:]
    tokens = case["token"][None, 1:].expand(batch_size, -1)
    return make_tree(tokens, parents - 1, case["draft_probs"][None, parents].expand(batch_size, -1, -1))


def test_chain_fixture_greedy(chain_fixture):
    draft = DraftTree.chain(chain_fixture["draft_tokens"], chain_fixture["num_draft"])
    acceptance = follow(draft, chain_fixture["target_probs"].argmax(-1))
    assert torch.equal(acceptance.num_accepted, chain_fixture["greedy.accepted"])
    expected = [row[row >= 0].tolist() for row in chain_fixture["greedy.tokens_invcdf"]]
    assert rows_of(acceptance) == expected


every_chain_rule = pytest.mark.parametrize(("rule", "name"), [(reject_chain, "with_q"), (reject_block, "block")])


@every_chain_rule
def test_chain_fixture_with_draft_probs(chain_fixture, rule, name):
    case = chain_fixture
    draft = DraftTree.chain(case["draft_tokens"], case["num_draft"], case["draft_probs"])
    acceptance = rule(draft, case["target_probs"], case["uniform"], case["recover_uniform"])
    assert torch.equal(acceptance.num_accepted, case[f"{name}.accepted"])
    assert rows_of(acceptance) == [row[row >= 0].tolist() for row in case[f"{name}.tokens_invcdf"]]
    assert acceptance.num_accepted.unique().numel() > 3


@every_chain_rule
def test_chain_fixture_residual(chain_fixture, rule, name):
    """Draws, 4096 and evenly spread, reproduce the cumulated residual, with the ratio tests as given."""
    numbers = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    for row in range(0, 40, 3):
        case = {key: values[row].expand(4096, *values[row].shape) for key, values in chain_fixture.items()}
        draft = DraftTree.chain(case["draft_tokens"], case["num_draft"], case["draft_probs"])
        acceptance = rule(draft, case["target_probs"], case["uniform"], numbers[:, None].expand(-1, 6))
        count = chain_fixture[f"{name}.accepted"][row]
        assert (acceptance.num_accepted == count).all()
        drawn = acceptance.tokens[:, count].bincount(minlength=203).double() / 4096
        residual = chain_fixture[f"{name}.residual"][row]
        assert (drawn.cumsum(0) - (residual / residual.sum()).cumsum(0)).abs().max() < 1.5 / 4096


def test_chain_fixture_onehot_distribution(chain_fixture, generator):
    """One draw a node has the distribution of the ratio test without the draft token: `onehot` of the reference."""
    samples, num_compared = 5_000, 0
    for row in range(0, 40, 8):
        case = {key: x[row] for key, x in chain_fixture.items()}
        target, count = case["target_probs"], int(case["onehot.accepted"])
        draft = DraftTree.chain(case["draft_tokens"].expand(samples, -1), case["num_draft"].expand(samples))
        node_tokens = sample_from_probs(target.expand(samples, -1, -1), uniform(generator, samples, 6))
        acceptance = follow(draft, node_tokens)
        accept_probs = [target[i, case["draft_tokens"][i]].item() for i in range(int(case["num_draft"]))]
        reach = np.cumprod([1.0, *accept_probs])
        counts = acceptance.num_accepted.bincount(minlength=len(reach)).numpy()
        assert chi_square_pvalue(counts, reach * (1 - np.array([*accept_probs, 0.0]))) > 1e-3
        stopped_there = acceptance.tokens[acceptance.num_accepted == count, count]
        if len(stopped_there) > 500:
            assert chi_square_pvalue(stopped_there.bincount(minlength=203), case["onehot.residual"]) > 1e-3
            num_compared += 1
    assert num_compared > 2


def test_tree_fixtures_without_replacement(tree_fixtures):
    lengths = set()
    for mode, case in tree_fixtures:
        if mode != "without_replacement":
            continue
        draft = tree_of_case(case)
        size = draft.size + 1
        acceptance = reject_tree(
            draft, case["target_probs"][None], case["uniform"][None, 1:], case["recover_uniform"].expand(1, size)
        )
        path = [node for node in case["path"].tolist() if node > 0]
        count = int(acceptance.num_accepted)
        assert acceptance.path[0, 1 : count + 1].tolist() == path
        assert rows_of(acceptance) == [[*case["token"][path].tolist(), int(case["token_invcdf"])]]
        lengths.add(count)
    assert len(lengths) > 2


def test_tree_fixture_residuals(tree_fixtures):
    numbers = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    for _, case in [item for item in tree_fixtures if item[0] == "without_replacement"][::3]:
        draft = tree_of_case(case, 4096)
        acceptance = reject_tree(
            draft,
            case["target_probs"].expand(4096, -1, -1),
            case["uniform"][1:].expand(4096, -1),
            numbers[:, None].expand(-1, draft.size + 1),
        )
        count = int(acceptance.num_accepted[0])
        drawn = acceptance.tokens[:, count].bincount(minlength=101).double() / 4096
        residual = case["residual"] / case["residual"].sum()
        assert (drawn.cumsum(0) - residual.cumsum(0)).abs().max() < 1.5 / 4096


def test_tree_fixtures_onehot(tree_fixtures, generator):
    """Draws that agree with the reference's outcome lead along its path, whatever is drawn at the other nodes."""
    lengths = set()
    for mode, case in tree_fixtures:
        if mode != "onehot":
            continue
        draft = tree_of_case(case)
        path = [node for node in case["path"].tolist() if node > 0]
        committed = [*case["token"][path].tolist(), int(case["token_invcdf"])]
        node_tokens = torch.randint(101, (1, draft.size + 1), generator=generator)
        node_tokens[0, [0, *path]] = torch.tensor(committed)
        acceptance = follow(draft, node_tokens)
        assert acceptance.path[0, 1 : len(path) + 1].tolist() == path
        assert rows_of(acceptance) == [committed]
        lengths.add(len(path))
    assert len(lengths) > 1


# The distribution of the output: texts of 3 tokens of a vocabulary of 3, where each depends on all tokens before it


class Language:
    """A random distribution of texts: `probs(prefix)` is that of the next token after each row's prefix `(B, d)`."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tables = [random_probs(generator, *[3] * depth, 3) for depth in range(3)]

    def probs(self, prefix):
        return self.tables[prefix.shape[1]][tuple(prefix.T)].expand(prefix.shape[0], 3)

    def joint(self):
        first, second, third = self.tables
        return first[:, None, None] * second[:, :, None] * third


TARGET, DRAFTER = Language(1), Language(2)


def target_probs_of(draft):
    """The target's distribution after each node of trees that share their parents and are at most 2 deep."""
    parents, distributions = draft.parents.tolist(), [TARGET.probs(draft.tokens[:, :0])]
    for node, parent in enumerate(parents):
        path = [node] if parent < 0 else [parent, node]
        distributions.append(TARGET.probs(draft.tokens[:, path]))
    return torch.stack(distributions, dim=1)


def text_pvalue(acceptance, generator):
    """Completes the committed tokens to texts of 3 with draws from the target, and tests their joint distribution."""
    text = acceptance.tokens[:, :3].clone()
    for position in (1, 2):
        drawn = sample_from_probs(TARGET.probs(text[:, :position]), uniform(generator, len(text)))
        text[:, position] = torch.where(acceptance.num_accepted < position, drawn, text[:, position])
    cells = (text * torch.tensor([9, 3, 1])).sum(1)
    return chi_square_pvalue(cells.bincount(minlength=27), TARGET.joint().flatten())


def draw_children(prefix, distribution, number, generator):
    """`number` siblings drawn without replacement, shape `(B, number)`."""
    tokens, left = [], distribution.clone()
    for _ in range(number):
        tokens.append(sample_from_probs(left, uniform(generator, len(prefix))))
        left.scatter_(1, tokens[-1][:, None], 0.0)
    return torch.stack(tokens, dim=1)


def sampled_tree(generator, wide):
    """Two or three children of the anchor, two of its first child and one of its second, without replacement."""
    anchor = torch.zeros(SAMPLES, 0, dtype=torch.long)
    first_probs, width = DRAFTER.probs(anchor), 3 if wide else 2
    top = draw_children(anchor, first_probs, width, generator)
    distributions = [DRAFTER.probs(top[:, [i]]) for i in range(2)]
    below = [draw_children(top[:, [i]], distributions[i], 2 - i, generator) for i in range(2)]
    tokens = torch.cat([top, *below], dim=1)
    probs = torch.stack([first_probs] * width + [distributions[0], distributions[0], distributions[1]], dim=1)
    return make_tree(tokens, [-1] * width + [0, 0, 1], probs)


def sampled_chain(generator):
    tokens, distributions = torch.zeros(SAMPLES, 0, dtype=torch.long), []
    for _ in range(2):
        distributions.append(DRAFTER.probs(tokens))
        tokens = torch.cat([tokens, sample_from_probs(distributions[-1], uniform(generator, SAMPLES))[:, None]], dim=1)
    return DraftTree.chain(tokens, probs=torch.stack(distributions, dim=1))


def numbers_for(draft, generator):
    return uniform(generator, SAMPLES, draft.size), uniform(generator, SAMPLES, draft.size + 1)


def target_choices(draft, generator):
    return sample_from_probs(target_probs_of(draft), uniform(generator, SAMPLES, draft.size + 1))


def with_new_tokens_from_the_target(acceptance, draft, generator):
    """The wrong rule that forgets the residual: after a rejection it draws from the target's whole distribution."""
    node = acceptance.path.gather(1, acceptance.num_accepted[:, None])
    new_tokens = target_choices(draft, generator).gather(1, node)
    tokens = acceptance.tokens.scatter(1, acceptance.num_accepted[:, None], new_tokens)
    return Acceptance(acceptance.num_accepted, acceptance.path, tokens)


def test_distribution_of_a_sampled_chain(generator):
    draft = sampled_chain(generator)
    acceptance = reject_chain(draft, target_probs_of(draft), *numbers_for(draft, generator))
    assert text_pvalue(acceptance, generator) > 1e-3
    overlap = torch.minimum(TARGET.tables[0], DRAFTER.tables[0]).sum().item()
    # Five standard deviations of a rate from 60k tests are at most 1.1e-2.
    assert (acceptance.num_accepted > 0).double().mean().item() == pytest.approx(overlap, abs=1.1e-2)
    assert text_pvalue(with_new_tokens_from_the_target(acceptance, draft, generator), generator) < 1e-6


def test_distribution_of_a_sampled_chain_with_a_wrong_draft_distribution_is_wrong(generator):
    draft = sampled_chain(generator)
    draft.probs = torch.full_like(draft.probs, 1 / 3)
    acceptance = reject_chain(draft, target_probs_of(draft), *numbers_for(draft, generator))
    assert text_pvalue(acceptance, generator) < 1e-6


def test_distribution_of_ragged_sampled_chains(generator):
    draft = sampled_chain(generator)
    draft.num_nodes = torch.randint(3, (SAMPLES,), generator=generator)
    target_probs = target_probs_of(draft)
    padding = torch.arange(2) >= draft.num_nodes[:, None]
    draft.tokens = draft.tokens.masked_fill(padding, -1)
    draft.probs = draft.probs.masked_fill(padding[..., None], torch.nan)
    assert text_pvalue(reject_chain(draft, target_probs, *numbers_for(draft, generator)), generator) > 1e-3


def test_distribution_of_a_fixed_chain(generator):
    draft = DraftTree.chain(torch.tensor([[2, 0]]).expand(SAMPLES, -1))
    acceptance = follow(draft, target_choices(draft, generator))
    assert text_pvalue(acceptance, generator) > 1e-3
    assert text_pvalue(with_new_tokens_from_the_target(acceptance, draft, generator), generator) < 1e-6


def test_distribution_of_a_fixed_tree(generator):
    draft = make_tree(torch.tensor([[0, 1, 2, 0, 2]]).expand(SAMPLES, -1), [-1, -1, 0, 1, 0])
    acceptance = follow(draft, target_choices(draft, generator))
    assert text_pvalue(acceptance, generator) > 1e-3
    covered = TARGET.tables[0][:2].sum().item()
    assert (acceptance.num_accepted > 0).double().mean().item() == pytest.approx(covered, abs=1.1e-2)
    assert text_pvalue(with_new_tokens_from_the_target(acceptance, draft, generator), generator) < 1e-6


def test_distribution_of_a_random_tree_with_equal_siblings(generator):
    draft = make_tree(torch.randint(3, (SAMPLES, 6), generator=generator), [-1, -1, -1, 0, 1, 2])
    assert text_pvalue(follow(draft, target_choices(draft, generator)), generator) > 1e-3


@pytest.mark.parametrize("wide", [False, True])
def test_distribution_of_sampled_siblings(wide, generator):
    draft = sampled_tree(generator, wide)
    acceptance = reject_tree(draft, target_probs_of(draft), *numbers_for(draft, generator))
    assert text_pvalue(acceptance, generator) > 1e-3
    if wide:
        # All three tokens were tried: one of them was the target's.
        assert (acceptance.num_accepted > 0).all()
    else:
        assert text_pvalue(with_new_tokens_from_the_target(acceptance, draft, generator), generator) < 1e-6


def test_distribution_of_ragged_sampled_siblings(generator):
    draft = sampled_tree(generator, wide=False)
    draft.num_nodes = torch.randint(6, (SAMPLES,), generator=generator)
    acceptance = reject_tree(draft, target_probs_of(draft), *numbers_for(draft, generator))
    assert text_pvalue(acceptance, generator) > 1e-3
    assert (acceptance.path.amax(1) <= draft.num_nodes).all()


def test_distribution_of_siblings_in_another_order_is_wrong(generator):
    """Siblings sorted by probability are no longer a draw from the distribution: the check must notice."""
    draft = sampled_tree(generator, wide=False)
    top = draft.tokens[:, :2]
    order = draft.probs[:, 0].gather(1, top).argsort(1, descending=True)
    leaves = make_tree(top.gather(1, order), [-1, -1], draft.probs[:, :2])
    acceptance = reject_tree(leaves, target_probs_of(leaves), *numbers_for(leaves, generator))
    assert text_pvalue(acceptance, generator) < 1e-6


def test_distribution_where_the_draft_has_fewer_tokens_than_siblings(generator):
    """The second sibling was drawn from nothing: it must not be tried."""
    draft = make_tree(torch.tensor([[0, 2]]).expand(SAMPLES, -1), [-1, -1])
    draft.probs = torch.tensor([1.0, 0.0, 0.0]).expand(SAMPLES, 2, 3)
    acceptance = reject_tree(draft, target_probs_of(draft), *numbers_for(draft, generator))
    assert text_pvalue(acceptance, generator) > 1e-3
    assert (acceptance.path.amax(1) <= 1).all()


# Rules against each other, and numeric traps


every_rule = pytest.mark.parametrize("rule", [reject_chain, reject_block, reject_tree])


def random_case(generator, batch_size=16, size=5, vocab_size=300, overlap=0.8):
    target_probs = random_probs(generator, batch_size, size + 1, vocab_size)
    noise = random_probs(generator, batch_size, size, vocab_size)
    probs = overlap * target_probs[:, :-1] + (1 - overlap) * noise
    tokens = sample_from_probs(probs, uniform(generator, batch_size, size))
    num_nodes = torch.randint(size + 1, (batch_size,), generator=generator)
    numbers = uniform(generator, batch_size, size), uniform(generator, batch_size, size + 1)
    return tokens, num_nodes, probs, target_probs, numbers


def test_a_chain_is_a_tree_for_every_rule(generator):
    tokens, num_nodes, probs, target_probs, numbers = random_case(generator, batch_size=200)
    chain = DraftTree.chain(tokens, num_nodes, probs)
    tree = make_tree(tokens, chain.parents, probs, num_nodes)
    accepted = reject_chain(chain, target_probs, *numbers)
    assert_same(accepted, reject_tree(tree, target_probs, *numbers))
    assert accepted.num_accepted.unique().numel() == 6
    node_tokens = torch.where(uniform(generator, 200, 6) < 0.6, torch.cat([tokens, tokens[:, :1]], 1), 7)
    assert_same(follow(chain, node_tokens), follow(tree, node_tokens))


@every_rule
def test_rejection_of_a_row_does_not_depend_on_the_batch(rule, generator):
    tokens, num_nodes, probs, target_probs, numbers = random_case(generator)
    parents = torch.arange(-1, 4) if rule is not reject_tree else torch.tensor([-1, -1, 0, 1, 1])

    def judge(rows):
        if rule is not reject_tree:
            draft = DraftTree.chain(tokens[rows], num_nodes[rows], probs[rows])
        else:
            siblings = probs[:, [0, 0, 2, 3, 3]]
            draft = make_tree(tokens[rows], parents, siblings[rows], num_nodes[rows])
        return rule(draft, target_probs[rows], *(x[rows] for x in numbers))

    together = judge(slice(None))
    for row in range(16):
        alone = judge(slice(row, row + 1))
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.path[0], together.path[row])


def test_trees_of_different_shapes_in_one_batch(generator):
    tokens, num_nodes, probs, target_probs, numbers = random_case(generator, batch_size=3)
    shapes = torch.tensor([[-1, -1, -1, 0, 1], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 2]])
    first_of_family = torch.tensor([[0, 0, 0, 3, 4], [0, 1, 2, 3, 4], [0, 1, 1, 1, 4]])
    probs = probs.gather(1, first_of_family[..., None].expand(-1, -1, 300))
    together = reject_tree(make_tree(tokens, shapes, probs, num_nodes), target_probs, *numbers)
    for row in range(3):
        rows = slice(row, row + 1)
        draft = make_tree(tokens[rows], shapes[row], probs[rows], num_nodes[rows])
        alone = reject_tree(draft, target_probs[rows], *(x[rows] for x in numbers))
        assert torch.equal(alone.tokens[0], together.tokens[row])


@every_rule
def test_rejection_without_drafts_samples_the_target(rule, generator):
    target_probs, numbers = random_probs(generator, 4, 1, 50), uniform(generator, 4, 1)
    acceptance = rule(DraftTree.empty(4), target_probs, numbers[:, :0], numbers)
    assert torch.equal(acceptance.tokens, sample_from_probs(target_probs, numbers))
    assert acceptance.num_accepted.tolist() == [0] * 4
    assert acceptance.path.tolist() == [[0]] * 4


def chain_or_tree(rule, tokens, probs):
    if rule is not reject_tree:
        return DraftTree.chain(tokens, probs=probs)
    return make_tree(tokens, torch.arange(-1, tokens.shape[1] - 1), probs)


@every_rule
@pytest.mark.parametrize("draft_prob", [0.0, 0.5])
def test_zero_never_accepts_an_impossible_token(rule, draft_prob):
    target_probs = torch.tensor([[[0.0, 0.25, 0.75]] * 2])
    probs = torch.tensor([[[draft_prob, 1 - draft_prob, 0.0]]])
    draft = chain_or_tree(rule, torch.tensor([[0]]), probs)
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    acceptance = rule(draft, target_probs, zeros[:, :1], zeros)
    assert acceptance.num_accepted.item() == 0
    assert acceptance.tokens[0, 0].item() in (1, 2)


@every_rule
def test_equal_distributions_accept_everything(rule, generator):
    tokens, num_nodes, _, target_probs, (_, numbers) = random_case(generator)
    draft = chain_or_tree(rule, tokens, target_probs[:, :-1].clone())
    draft.num_nodes = num_nodes
    acceptance = rule(draft, target_probs, torch.full((16, 5), ALMOST_ONE, dtype=torch.float64), numbers)
    assert torch.equal(acceptance.num_accepted, num_nodes)
    # The bonus token is drawn at the last node, with that node's number.
    bonus = sample_from_probs(target_probs, numbers).gather(1, num_nodes[:, None])
    assert torch.equal(acceptance.tokens.gather(1, num_nodes[:, None]), bonus)


@every_rule
def test_empty_residual_falls_back_to_the_target(rule):
    # The target's distribution is the draft's, rounded down everywhere: a rejection leaves nothing of p - q.
    probs = torch.tensor([[[0.5, 0.0, 0.5]]])
    target_probs = torch.cat([probs, probs], dim=1) * (1 - 2**-22)
    draft = chain_or_tree(rule, torch.tensor([[0]]), probs)
    rejecting = torch.full((1, 1), ALMOST_ONE, dtype=torch.float64)
    for number, token in [(0.0, 0), (0.49, 0), (0.51, 2), (ALMOST_ONE, 2)]:
        acceptance = rule(draft, target_probs, rejecting, torch.full((1, 2), number, dtype=torch.float64))
        assert rows_of(acceptance) == [[token]]


@every_rule
def test_rejection_needs_draft_probs(rule):
    draft = DraftTree.from_lists([[1, 2]])
    with pytest.raises(ValueError, match="`probs=None`"):
        rule(draft, torch.ones(1, 3, 4) / 4, torch.zeros(1, 2), torch.zeros(1, 3))


@every_rule
def test_rows_without_a_distribution_are_marked(rule):
    draft = chain_or_tree(rule, torch.tensor([[0]]), torch.full((1, 1, 3), 1 / 3))
    numbers = torch.full((1, 2), 0.5, dtype=torch.float64)
    assert rule(draft, torch.full((1, 2, 3), torch.nan), numbers[:, :1], numbers).tokens[0, 0] == -1
