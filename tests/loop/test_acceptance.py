"""Acceptance rules: reference integers, the exact distribution of texts, a plain walk of the tree, numeric traps."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_specdec.drafts import DraftTree
from hf_specdec.kernels.acceptance import follow, reject_chain, reject_tree
from hf_specdec.kernels.sampling import sample_from_probs
from hf_specdec.logits.acceptance import reject_block
from tests.helpers.chi_square import chi_square_pvalue
from tests.helpers.levels import full
from tests.helpers.paths import FIXTURES
from tests.helpers.rule_cases import ALMOST_ONE, SAMPLES, random_chains, random_probs, rows_of, uniform


PUBLISHED = FIXTURES / "verification"
RULES = (reject_chain, reject_block, reject_tree)


def make_tree(tokens, parents, probs=None, num_nodes=None):
    """A tree; tokens `(B, N)`, parents `(N,)` or `(B, N)`."""
    tokens, parents = torch.as_tensor(tokens), torch.as_tensor(parents)
    if num_nodes is None:
        num_nodes = [tokens.shape[1]] * tokens.shape[0]
    return DraftTree(tokens, parents, torch.as_tensor(num_nodes), probs)


def draft_for(rule, tokens, probs, num_nodes=None):
    """A chain in the form that the rule judges."""
    if rule is reject_tree:
        return make_tree(tokens, torch.arange(-1, tokens.shape[1] - 1), probs, num_nodes)
    return DraftTree.chain(tokens, num_nodes, probs)


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


@given(st.sampled_from(["chains", "one tree", "trees of their own"]), st.data())
def test_follow_walks_the_drafts(shape, data):
    batch_size, size = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 10))

    def matrix(width):
        return torch.tensor(
            [[data.draw(st.integers(0, 2)) for _ in range(width)] for _ in range(batch_size)], dtype=torch.long
        ).view(batch_size, width)

    tokens, node_tokens = matrix(size), matrix(size + 1)
    num_nodes = [data.draw(st.integers(0, size)) for _ in range(batch_size)]
    if shape == "chains":
        draft = DraftTree.from_lists([row[:count] for row, count in zip(tokens.tolist(), num_nodes)])
        parents, node_tokens = [list(range(-1, size - 1))] * batch_size, node_tokens[:, : draft.size + 1]
    else:
        count = 1 if shape == "one tree" else batch_size
        parents = [[data.draw(st.integers(-1, i - 1)) for i in range(size)] for _ in range(count)]
        given_parents = torch.tensor(parents, dtype=torch.long).view(count, size)
        draft = make_tree(tokens, given_parents[0] if count == 1 else given_parents, num_nodes=num_nodes)
        parents = parents if len(parents) == batch_size else parents * batch_size
    acceptance = follow(draft, node_tokens)
    committed = rows_of(acceptance)
    for row, count in enumerate(acceptance.num_accepted.tolist()):
        path, expected = walk(tokens[row].tolist(), parents[row], num_nodes[row], node_tokens[row].tolist())
        assert acceptance.path[row, : count + 1].tolist() == path
        assert committed[row] == expected


def test_follow_without_drafts_with_padding_that_would_match_and_with_equal_siblings():
    acceptance = follow(DraftTree.empty(3), torch.tensor([[5], [6], [7]]))
    assert rows_of(acceptance) == [[5], [6], [7]]
    assert acceptance.path.tolist() == [[0]] * 3
    draft = DraftTree.chain(torch.tensor([[1, 1, 1], [1, 1, -1]]), torch.tensor([1, 2]))
    assert follow(draft, torch.ones(2, 4, dtype=torch.long)).num_accepted.tolist() == [1, 2]
    # Nodes 1 and 2 carry the same token; only node 2's child would go on.
    acceptance = follow(make_tree([[4, 4, 5]], [-1, -1, 1]), torch.tensor([[4, 5, 5, 0]]))
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
    return {mode: [case for own, case in zip(modes, cases) if own == mode] for mode in set(modes)}


SPREAD = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096


def assert_drawn_from(residual, acceptance):
    """Draws, 4096 and evenly spread, reproduce the cumulated residual."""
    count = acceptance.num_accepted[0]
    assert (acceptance.num_accepted == count).all()
    drawn = acceptance.tokens[:, count].bincount(minlength=len(residual)).double() / 4096
    assert (drawn.cumsum(0) - (residual / residual.sum()).cumsum(0)).abs().max() < 1.5 / 4096


def tree_of_case(case, batch_size=1):
    """The draft of a tree case, whose node 0 is the anchor and whose `draft_probs` belong to the parent."""
    parents = case["parent"][1:]
    tokens = case["token"][None, 1:].expand(batch_size, -1)
    return make_tree(tokens, parents - 1, case["draft_probs"][None, parents].expand(batch_size, -1, -1))


@pytest.mark.parametrize(("rule", "name"), [(follow, "greedy"), (reject_chain, "with_q"), (reject_block, "block")])
def test_reference_integers_of_chains(chain_fixture, rule, name):
    case = chain_fixture
    draft = DraftTree.chain(case["draft_tokens"], case["num_draft"], case["draft_probs"])
    if rule is follow:
        acceptance = follow(draft, case["target_probs"].argmax(-1))
    else:
        acceptance = rule(draft, case["target_probs"], case["uniform"], case["recover_uniform"])
    assert torch.equal(acceptance.num_accepted, case[f"{name}.accepted"])
    assert rows_of(acceptance) == [row[row >= 0].tolist() for row in case[f"{name}.tokens_invcdf"]]
    if rule is follow:
        return
    assert acceptance.num_accepted.unique().numel() > 3
    for row in range(0, 40, 3):
        one = {key: values[row].expand(4096, *values[row].shape) for key, values in case.items()}
        draft = DraftTree.chain(one["draft_tokens"], one["num_draft"], one["draft_probs"])
        acceptance = rule(draft, one["target_probs"], one["uniform"], SPREAD[:, None].expand(-1, 6))
        assert acceptance.num_accepted[0] == case[f"{name}.accepted"][row]
        assert_drawn_from(case[f"{name}.residual"][row], acceptance)


def test_reference_integers_of_drawn_trees(tree_fixtures):
    lengths = set()
    for index, case in enumerate(tree_fixtures["without_replacement"]):

        def judge(batch_size, numbers, case=case):
            draft = tree_of_case(case, batch_size)
            uniforms = case["uniform"][1:].expand(batch_size, -1)
            target_probs = case["target_probs"].expand(batch_size, -1, -1)
            return reject_tree(draft, target_probs, uniforms, numbers.expand(batch_size, draft.size + 1))

        acceptance = judge(1, case["recover_uniform"])
        path = [node for node in case["path"].tolist() if node > 0]
        count = int(acceptance.num_accepted)
        assert acceptance.path[0, 1 : count + 1].tolist() == path
        assert rows_of(acceptance) == [[*case["token"][path].tolist(), int(case["token_invcdf"])]]
        lengths.add(count)
        if index % 3 == 0:
            assert_drawn_from(case["residual"], judge(4096, SPREAD[:, None]))
    assert len(lengths) > 2


def test_reference_paths_of_chosen_trees(tree_fixtures, generator):
    """Draws that agree with the reference's outcome lead along its path, whatever is drawn at the other nodes."""
    lengths = set()
    for case in tree_fixtures["onehot"]:
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


def target_choices(draft, generator):
    return sample_from_probs(target_probs_of(draft), uniform(generator, SAMPLES, draft.size + 1))


def judged(draft, generator, rule=None):
    """What `follow` commits of a chosen draft, or a rule of a drawn one."""
    if draft.probs is None:
        return follow(draft, target_choices(draft, generator))
    rule = rule or (reject_chain if draft.is_chain else reject_tree)
    numbers = uniform(generator, SAMPLES, draft.size), uniform(generator, SAMPLES, draft.size + 1)
    return rule(draft, target_probs_of(draft), *numbers)


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


def drawn_tree(generator, width=2):
    """Two or three children of the anchor, two of its first child and one of its second, without replacement."""
    anchor = torch.zeros(SAMPLES, 0, dtype=torch.long)
    first_probs = DRAFTER.probs(anchor)
    top = draw_children(anchor, first_probs, width, generator)
    distributions = [DRAFTER.probs(top[:, [i]]) for i in range(2)]
    below = [draw_children(top[:, [i]], distributions[i], 2 - i, generator) for i in range(2)]
    tokens = torch.cat([top, *below], dim=1)
    probs = torch.stack([first_probs] * width + [distributions[0], distributions[0], distributions[1]], dim=1)
    return make_tree(tokens, [-1] * width + [0, 0, 1], probs)


def ragged_drawn_tree(generator):
    draft = drawn_tree(generator)
    draft.num_nodes = torch.randint(6, (SAMPLES,), generator=generator)
    return draft


def drawn_chain(generator):
    tokens, distributions = torch.zeros(SAMPLES, 0, dtype=torch.long), []
    for _ in range(2):
        distributions.append(DRAFTER.probs(tokens))
        tokens = torch.cat([tokens, sample_from_probs(distributions[-1], uniform(generator, SAMPLES))[:, None]], dim=1)
    return DraftTree.chain(tokens, probs=torch.stack(distributions, dim=1))


def ragged_drawn_chain(generator):
    draft = drawn_chain(generator)
    draft.num_nodes = torch.randint(3, (SAMPLES,), generator=generator)
    padding = torch.arange(2) >= draft.num_nodes[:, None]
    draft.tokens = draft.tokens.masked_fill(padding, -1)
    draft.probs = draft.probs.masked_fill(padding[..., None], torch.nan)
    return draft


def self_ending_chain(generator):
    """A drafter that ends after a token that is unlikely for it."""
    draft = drawn_chain(generator)
    first = draft.probs[:, 0].gather(1, draft.tokens[:, :1]).squeeze(1)
    draft.num_nodes = torch.where(first < first.median(), 1, 2)
    return draft


def more_siblings_than_tokens(generator):
    """The second sibling was drawn from nothing: it must not be tried."""
    probs = torch.tensor([1.0, 0.0, 0.0]).expand(SAMPLES, 2, 3)
    return make_tree(torch.tensor([[0, 2]]).expand(SAMPLES, -1), [-1, -1], probs)


def chosen_tree(generator):
    return make_tree(torch.tensor([[0, 1, 2, 0, 2]]).expand(SAMPLES, -1), [-1, -1, 0, 1, 0])


# By drafts: the probability that the first token is accepted, where it is known, and the deepest path that may be.
DRAFTS = {
    "drawn chain": (drawn_chain, torch.minimum(TARGET.tables[0], DRAFTER.tables[0]).sum().item()),
    "ragged drawn chain": (ragged_drawn_chain, None),
    "chosen chain": (lambda _: DraftTree.chain(torch.tensor([[2, 0]]).expand(SAMPLES, -1)), None),
    "chosen tree": (chosen_tree, TARGET.tables[0][:2].sum().item()),
    "tree with equal siblings": (
        lambda generator: make_tree(torch.randint(3, (SAMPLES, 6), generator=generator), [-1, -1, -1, 0, 1, 2]),
        None,
    ),
    "drawn tree": (drawn_tree, None),
    # All three tokens are tried: one of them is the target's.
    "drawn tree with all tokens": (lambda generator: drawn_tree(generator, width=3), 1.0),
    "ragged drawn tree": (ragged_drawn_tree, None),
    "more siblings than tokens": (more_siblings_than_tokens, None),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_texts_have_the_distribution_of_the_target(name, generator):
    make, rate = DRAFTS[name]
    draft = make(generator)
    acceptance = judged(draft, generator)
    assert text_pvalue(acceptance, generator) > 1e-3
    if rate is not None:
        # Five standard deviations of a rate from 60k tests are at most 1.1e-2.
        assert (acceptance.num_accepted > 0).double().mean().item() == pytest.approx(rate, abs=1.1e-2)
    limits = 1 if make is more_siblings_than_tokens else draft.num_nodes
    assert (acceptance.path.amax(1) <= limits).all()


@pytest.mark.parametrize("make", [drawn_chain, ragged_drawn_chain, self_ending_chain])
def test_block_verification_has_the_distribution_of_the_target_and_accepts_as_much(make, generator):
    draft = make(generator)
    block, standard = (judged(draft, generator, rule) for rule in (reject_block, reject_chain))
    assert text_pvalue(block, generator) > 1e-3
    # Standard deviations of the means are below 4e-3.
    means = [acceptance.num_accepted.double().mean().item() for acceptance in (block, standard)]
    assert means[0] > means[1] - 0.01


@full
def test_wrong_rules_have_another_distribution(generator):
    """After a rejection, the new token of a wrong rule comes from the target's whole distribution."""
    for make, rule in ((drawn_chain, reject_chain), (drawn_chain, reject_block), (drawn_tree, reject_tree)):
        draft = make(generator)
        acceptance = judged(draft, generator, rule)
        count = acceptance.num_accepted[:, None]
        new_tokens = target_choices(draft, generator).gather(1, acceptance.path.gather(1, count))
        acceptance.tokens.scatter_(1, count, new_tokens)
        assert text_pvalue(acceptance, generator) < 1e-6


# Rules against each other, and numeric traps


@pytest.mark.parametrize("rule", RULES)
def test_a_row_does_not_depend_on_the_batch(rule, generator):
    draft, target_probs, *numbers = random_chains(generator)
    if rule is reject_tree:
        # Trees of different shapes, and the first of each node's siblings, whose distribution all of them share.
        parents = torch.tensor([[-1, -1, 0, 1, 1], [-1, -1, -1, 0, 1], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 2]])
        first = torch.tensor([[0, 0, 2, 3, 3], [0, 0, 0, 3, 4], [0, 1, 2, 3, 4], [0, 1, 1, 1, 4]]).repeat(4, 1)
        probs = draft.probs.gather(1, first[..., None].expand(-1, -1, 300))
        draft = make_tree(draft.tokens, parents.repeat(4, 1), probs, draft.num_nodes)
    together = rule(draft, target_probs, *numbers)
    for row in range(16):
        rows = slice(row, row + 1)
        one = (draft.tokens[rows], draft.probs[rows], draft.num_nodes[rows])
        if rule is reject_tree:
            alone = make_tree(one[0], draft.parents[row], *one[1:])
        else:
            alone = draft_for(rule, *one)
        found = rule(alone, target_probs[rows], *(x[rows] for x in numbers))
        assert torch.equal(found.tokens[0], together.tokens[row])
        assert torch.equal(found.path[0], together.path[row])


def test_rejection_without_drafts_samples_the_target(generator):
    target_probs, numbers = random_probs(generator, 4, 1, 50), uniform(generator, 4, 1)
    for rule in RULES:
        acceptance = rule(DraftTree.empty(4), target_probs, numbers[:, :0], numbers)
        assert torch.equal(acceptance.tokens, sample_from_probs(target_probs, numbers))
        assert acceptance.num_accepted.tolist() == [0] * 4
        assert acceptance.path.tolist() == [[0]] * 4


def test_impossible_tokens_are_not_accepted_by_the_number_0():
    target_probs, zeros = torch.tensor([[[0.0, 0.25, 0.75]] * 2]), torch.zeros(1, 2, dtype=torch.float64)
    for rule in RULES:
        for draft_prob in (0.0, 0.5):
            probs = torch.tensor([[[draft_prob, 1 - draft_prob, 0.0]]])
            acceptance = rule(draft_for(rule, torch.tensor([[0]]), probs), target_probs, zeros[:, :1], zeros)
            assert acceptance.num_accepted.item() == 0
            assert acceptance.tokens[0, 0].item() in (1, 2)


def test_equal_distributions_accept_everything(generator):
    draft, target_probs, _, numbers = random_chains(generator)
    last = draft.num_nodes[:, None]
    for rule in RULES:
        same = draft_for(rule, draft.tokens, target_probs[:, :-1].clone(), draft.num_nodes)
        acceptance = rule(same, target_probs, torch.full((16, 5), ALMOST_ONE, dtype=torch.float64), numbers)
        assert torch.equal(acceptance.num_accepted, draft.num_nodes)
        # The bonus token is drawn at the last node, with that node's number.
        bonus = sample_from_probs(target_probs, numbers).gather(1, last)
        assert torch.equal(acceptance.tokens.gather(1, last), bonus)


def test_an_empty_residual_falls_back_to_the_target():
    # The target's distribution is the draft's, rounded down everywhere: a rejection leaves nothing of p - q.
    probs = torch.tensor([[[0.5, 0.0, 0.5]]])
    target_probs = torch.cat([probs, probs], dim=1) * (1 - 2**-22)
    rejecting = torch.full((1, 1), ALMOST_ONE, dtype=torch.float64)
    for rule in RULES:
        for number, token in [(0.0, 0), (0.49, 0), (0.51, 2), (ALMOST_ONE, 2)]:
            draft = draft_for(rule, torch.tensor([[0]]), probs)
            numbers = torch.full((1, 2), number, dtype=torch.float64)
            assert rows_of(rule(draft, target_probs, rejecting, numbers)) == [[token]]


def test_missing_draft_probs_are_refused_and_missing_distributions_marked():
    numbers = torch.full((1, 2), 0.5, dtype=torch.float64)
    for rule in RULES:
        with pytest.raises(ValueError, match="`probs=None`"):
            rule(DraftTree.from_lists([[1, 2]]), torch.ones(1, 3, 4) / 4, torch.zeros(1, 2), torch.zeros(1, 3))
        draft = draft_for(rule, torch.tensor([[0]]), torch.full((1, 1, 3), 1 / 3))
        assert rule(draft, torch.full((1, 2, 3), torch.nan), numbers[:, :1], numbers).tokens[0, 0] == -1
