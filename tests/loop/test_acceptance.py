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
from tests.helpers.levels import full, in_full, split
from tests.helpers.paths import FIXTURES
from tests.helpers.rule_cases import ALMOST_ONE, SAMPLES, random_chains, random_probs, rows_of, uniform
from tests.helpers.statistics import chi_square_pvalue


PUBLISHED = FIXTURES / "verification"
RULES = (reject_chain, reject_block, reject_tree)


def make_tree(tokens, parents, probs=None, num_nodes=None):
    """A tree; tokens `(B, N)`, parents `(N,)` or `(B, N)`."""
    tokens = torch.as_tensor(tokens)
    num_nodes = [tokens.shape[1]] * tokens.shape[0] if num_nodes is None else num_nodes
    return DraftTree(tokens, torch.as_tensor(parents), torch.as_tensor(num_nodes), probs)


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

    def matrix(width, rows=batch_size, drawn=lambda column: st.integers(0, 2)):
        values = [[data.draw(drawn(column)) for column in range(width)] for _ in range(rows)]
        return torch.tensor(values, dtype=torch.long).view(rows, width)

    tokens, node_tokens = matrix(size), matrix(size + 1)
    num_nodes = [data.draw(st.integers(0, size)) for _ in range(batch_size)]
    if shape == "chains":
        draft = DraftTree.from_lists([row[:count] for row, count in zip(tokens.tolist(), num_nodes)])
        parents, node_tokens = torch.arange(-1, size - 1), node_tokens[:, : draft.size + 1]
    else:
        parents = matrix(size, 1 if shape == "one tree" else batch_size, lambda column: st.integers(-1, column - 1))
        draft = make_tree(tokens, parents[0] if len(parents) == 1 else parents, num_nodes=num_nodes)
    parents = parents.expand(batch_size, size).tolist()
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


def cases_of_trees():
    """The mode and the tensors of each case."""
    modes, tensors = json.loads((PUBLISHED / "tree" / "modes.json").read_text()), {}
    for key, tensor in load_file(PUBLISHED / "tree" / "expected.safetensors").items():
        index, name = key.split(".", 1)
        tensors.setdefault(int(index), {})[name] = tensor
    return [(mode, tensors[index]) for index, mode in enumerate(modes)]


def test_reference_integers_of_chains():
    case = load_file(PUBLISHED / "chain" / "expected.safetensors")
    draft = DraftTree.chain(case["draft_tokens"], case["num_draft"], case["draft_probs"])
    acceptance = follow(draft, case["target_probs"].argmax(-1))
    assert torch.equal(acceptance.num_accepted, case["greedy.accepted"])
    assert rows_of(acceptance) == [row[row >= 0].tolist() for row in case["greedy.tokens_invcdf"]]
    for rule, name in ((reject_chain, "with_q"), (reject_block, "block")):
        acceptance = rule(draft, case["target_probs"], case["uniform"], case["recover_uniform"])
        assert torch.equal(acceptance.num_accepted, case[f"{name}.accepted"])
        assert rows_of(acceptance) == [row[row >= 0].tolist() for row in case[f"{name}.tokens_invcdf"]]
        assert acceptance.num_accepted.unique().numel() > 3
        for row in range(0, 40, 3):
            one = {key: values[row].expand(4096, *values[row].shape) for key, values in case.items()}
            many = DraftTree.chain(one["draft_tokens"], one["num_draft"], one["draft_probs"])
            acceptance = rule(many, one["target_probs"], one["uniform"], SPREAD[:, None].expand(-1, 6))
            assert acceptance.num_accepted[0] == case[f"{name}.accepted"][row]
            assert_drawn_from(case[f"{name}.residual"][row], acceptance)


def test_reference_integers_of_trees(generator):
    """Of chosen trees: draws that agree with the outcome lead along its path, whatever is drawn at other nodes."""
    lengths = {"onehot": set(), "without_replacement": set()}
    for index, (mode, case) in enumerate(cases_of_trees()):
        path = [node for node in case["path"].tolist() if node > 0]
        committed = [*case["token"][path].tolist(), int(case["token_invcdf"])]

        def judge(numbers, batch_size=1, case=case):
            draft = tree_of_case(case, batch_size)
            uniforms = case["uniform"][1:].expand(batch_size, -1)
            target_probs = case["target_probs"].expand(batch_size, -1, -1)
            return reject_tree(draft, target_probs, uniforms, numbers.expand(batch_size, draft.size + 1))

        if mode == "onehot":
            draft = tree_of_case(case)
            node_tokens = torch.randint(101, (1, draft.size + 1), generator=generator)
            node_tokens[0, [0, *path]] = torch.tensor(committed)
            acceptance = follow(draft, node_tokens)
        elif mode == "without_replacement":
            acceptance = judge(case["recover_uniform"])
            if index % 3 == 0:
                assert_drawn_from(case["residual"], judge(SPREAD[:, None], 4096))
        else:
            continue
        assert acceptance.path[0, 1 : len(path) + 1].tolist() == path
        assert rows_of(acceptance) == [committed]
        lengths[mode].add(len(path))
    assert len(lengths["onehot"]) > 1
    assert len(lengths["without_replacement"]) > 2


# The distribution of the output: short texts of a vocabulary of 3, where each token depends on all before it


class Language:
    """A random distribution of texts: `probs(prefix)` is that of the next token after each row's prefix `(B, d)`."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tables = [random_probs(generator, *[3] * depth, 3) for depth in range(4)]

    def probs(self, prefix):
        return self.tables[prefix.shape[1]][tuple(prefix.T)].expand(prefix.shape[0], 3)

    def joint(self, length):
        joint = torch.ones(())
        for table in self.tables[:length]:
            joint = joint[..., None] * table
        return joint.flatten()


TARGET, DRAFTER = Language(1), Language(2)


def target_probs_of(draft):
    """The target's distribution after each node of trees that share their parents."""
    paths = [[]]
    for node, parent in enumerate(draft.parents.tolist()):
        paths.append([*paths[parent + 1], node])
    return torch.stack([TARGET.probs(draft.tokens[:, path]) for path in paths], dim=1)


def judged(draft, generator, rule=None):
    """What `follow` commits of a chosen draft, or a rule of a drawn one."""
    target_probs, numbers = target_probs_of(draft), uniform(generator, SAMPLES, draft.size + 1)
    if draft.probs is None:
        return follow(draft, sample_from_probs(target_probs, numbers))
    rule = rule or (reject_chain if draft.is_chain else reject_tree)
    return rule(draft, target_probs, uniform(generator, SAMPLES, draft.size), numbers)


def text_pvalue(acceptance, generator, length=3):
    """Completes the committed tokens to texts with draws from the target, and tests their joint distribution."""
    text = torch.zeros(SAMPLES, length, dtype=torch.long)
    text[:, : acceptance.tokens.shape[1]] = acceptance.tokens[:, :length]
    for position in range(1, length):
        drawn = sample_from_probs(TARGET.probs(text[:, :position]), uniform(generator, len(text)))
        text[:, position] = torch.where(acceptance.num_accepted < position, drawn, text[:, position])
    cells = (text * 3 ** torch.arange(length - 1, -1, -1)).sum(1)
    return chi_square_pvalue(cells.bincount(minlength=3**length), TARGET.joint(length))


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


def drawn_chain(generator, depth=2):
    tokens, distributions = torch.zeros(SAMPLES, 0, dtype=torch.long), []
    for _ in range(depth):
        distributions.append(DRAFTER.probs(tokens))
        tokens = torch.cat([tokens, sample_from_probs(distributions[-1], uniform(generator, SAMPLES))[:, None]], dim=1)
    return DraftTree.chain(tokens, probs=torch.stack(distributions, dim=1))


def ragged_drawn_chain(generator, depth=2):
    draft = drawn_chain(generator, depth)
    draft.num_nodes = torch.randint(depth + 1, (SAMPLES,), generator=generator)
    padding = torch.arange(depth) >= draft.num_nodes[:, None]
    draft.tokens = draft.tokens.masked_fill(padding, -1)
    draft.probs = draft.probs.masked_fill(padding[..., None], torch.nan)
    return draft


def self_ending_chain(generator, depth=2):
    """A drafter that ends after a token that is unlikely for it."""
    draft = drawn_chain(generator, depth)
    first = draft.probs[:, 0].gather(1, draft.tokens[:, :1]).squeeze(1)
    draft.num_nodes = torch.where(first < first.median(), 1, depth)
    return draft


def more_siblings_than_tokens(generator):
    """The second sibling was drawn from nothing: it must not be tried."""
    probs = torch.tensor([1.0, 0.0, 0.0]).expand(SAMPLES, 2, 3)
    return make_tree(torch.tensor([[0, 2]]).expand(SAMPLES, -1), [-1, -1], probs)


def chosen_tree(generator):
    return make_tree(torch.tensor([[0, 1, 2, 0, 2]]).expand(SAMPLES, -1), [-1, -1, 0, 1, 0])


def equal_siblings(generator):
    return make_tree(torch.randint(3, (SAMPLES, 6), generator=generator), [-1, -1, -1, 0, 1, 2])


# By drafts: the probability that the first token is accepted, where it is known, and the deepest path that may be.
DRAFTS = {
    "drawn chain": (drawn_chain, torch.minimum(TARGET.tables[0], DRAFTER.tables[0]).sum().item()),
    "ragged drawn chain": (ragged_drawn_chain, None),
    "chosen tree": (chosen_tree, TARGET.tables[0][:2].sum().item()),
    "tree with equal siblings": (equal_siblings, None),
    "drawn tree": (drawn_tree, None),
    # All three tokens are tried: one of them is the target's.
    "drawn tree with all tokens": (lambda generator: drawn_tree(generator, width=3), 1.0),
    "ragged drawn tree": (ragged_drawn_tree, None),
    "more siblings than tokens": (more_siblings_than_tokens, None),
}


SHORT = ("ragged drawn chain", "chosen tree", "ragged drawn tree", "more siblings than tokens")


@pytest.mark.parametrize("name", split(DRAFTS, SHORT))
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


@pytest.mark.parametrize(
    ("make", "depth"),
    [(ragged_drawn_chain, 2), *in_full((drawn_chain, 2), (self_ending_chain, 2), (ragged_drawn_chain, 3))],
)
def test_block_verification_has_the_distribution_of_the_target_and_accepts_as_much(make, depth, generator):
    draft = make(generator, depth)
    block, standard = (judged(draft, generator, rule) for rule in (reject_block, reject_chain))
    assert text_pvalue(block, generator, depth + 1) > 1e-3
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
        choices = sample_from_probs(target_probs_of(draft), uniform(generator, SAMPLES, draft.size + 1))
        new_tokens = choices.gather(1, acceptance.path.gather(1, count))
        acceptance.tokens.scatter_(1, count, new_tokens)
        assert text_pvalue(acceptance, generator) < 1e-6


# Rules against each other, and numeric traps


def test_a_row_does_not_depend_on_the_batch(generator):
    chains, target_probs, *numbers = random_chains(generator)
    # Trees of different shapes, and the first of each node's siblings, whose distribution all of them share.
    parents = torch.tensor([[-1, -1, 0, 1, 1], [-1, -1, -1, 0, 1], [-1, 0, 1, 2, 3], [-1, 0, 0, 0, 2]]).repeat(4, 1)
    first = torch.tensor([[0, 0, 2, 3, 3], [0, 0, 0, 3, 4], [0, 1, 2, 3, 4], [0, 1, 1, 1, 4]]).repeat(4, 1)
    probs = chains.probs.gather(1, first[..., None].expand(-1, -1, 300))
    for rule in RULES:
        is_tree = rule is reject_tree
        draft = make_tree(chains.tokens, parents, probs, chains.num_nodes) if is_tree else chains
        together = rule(draft, target_probs, *numbers)
        for row in range(16):
            one = slice(row, row + 1)
            parts = draft.tokens[one], draft.probs[one], draft.num_nodes[one]
            alone = make_tree(parts[0], parents[row], *parts[1:]) if is_tree else draft_for(rule, *parts)
            found = rule(alone, target_probs[one], *(x[one] for x in numbers))
            assert torch.equal(found.tokens[0], together.tokens[row])
            assert torch.equal(found.path[0], together.path[row])


def test_empty_drafts_sample_the_target_and_equal_distributions_accept_everything(generator):
    draft, target_probs, _, numbers = random_chains(generator)
    last = draft.num_nodes[:, None]
    bonus = sample_from_probs(target_probs, numbers)
    for rule in RULES:
        acceptance = rule(DraftTree.empty(16), target_probs[:, :1], numbers[:, :0], numbers[:, :1])
        assert torch.equal(acceptance.tokens, bonus[:, :1])
        assert not acceptance.num_accepted.any()
        assert not acceptance.path.any()
        same = draft_for(rule, draft.tokens, target_probs[:, :-1].clone(), draft.num_nodes)
        acceptance = rule(same, target_probs, torch.full((16, 5), ALMOST_ONE, dtype=torch.float64), numbers)
        assert torch.equal(acceptance.num_accepted, draft.num_nodes)
        # The bonus token is drawn at the last node, with that node's number.
        assert torch.equal(acceptance.tokens.gather(1, last), bonus.gather(1, last))


@pytest.mark.parametrize("rule", RULES)
def test_numeric_traps_of_rejection(rule):
    def judge(probs, target_probs, accept, number):
        accept, number = (torch.full((1, 2), value, dtype=torch.float64) for value in (accept, number))
        return rule(draft_for(rule, torch.tensor([[0]]), probs), target_probs, accept[:, :1], number)

    # The number 0 accepts no impossible token.
    for draft_prob in (0.0, 0.5):
        acceptance = judge(
            torch.tensor([[[draft_prob, 1 - draft_prob, 0.0]]]), torch.tensor([[[0.0, 0.25, 0.75]] * 2]), 0.0, 0.0
        )
        assert acceptance.num_accepted.item() == 0
        assert acceptance.tokens[0, 0].item() in (1, 2)
    # The target's distribution is the draft's, rounded down everywhere: a rejection leaves nothing of p - q.
    probs = torch.tensor([[[0.5, 0.0, 0.5]]])
    target_probs = torch.cat([probs, probs], dim=1) * (1 - 2**-22)
    for number, token in [(0.0, 0), (0.49, 0), (0.51, 2), (ALMOST_ONE, 2)]:
        assert rows_of(judge(probs, target_probs, ALMOST_ONE, number)) == [[token]]
    assert judge(probs, torch.full((1, 2, 3), torch.nan), 0.5, 0.5).tokens[0, 0] == -1
    with pytest.raises(ValueError, match="`probs=None`"):
        rule(DraftTree.from_lists([[1, 2]]), torch.ones(1, 3, 4) / 4, torch.zeros(1, 2), torch.zeros(1, 3))
