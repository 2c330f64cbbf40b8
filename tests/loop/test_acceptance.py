"""Acceptance rules: recorded integers, the exact distribution of texts, plain definitions, numeric traps."""

import json
from copy import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_specdec.drafting.draw import SteeredDraw
from hf_specdec.drafts import DraftTree, TokenTree
from hf_specdec.kernels.acceptance import follow, reject
from hf_specdec.kernels.sampling import sample_from_probs
from hf_specdec.logits.randomness import DRAFT, RowUniforms
from hf_specdec.logits.rules import (
    BlockRule,
    StandardRule,
    TypicalRule,
    accept_synthetic,
    block_thresholds,
    conditional_rates,
    rates_of_length,
    reject_block,
)
from tests.helpers.chi_square import chi_square_pvalue
from tests.helpers.levels import in_full, split
from tests.helpers.paths import FIXTURES
from tests.helpers.rule_cases import (
    ALMOST_ONE,
    SAMPLES,
    random_chains,
    random_probs,
    rows_of,
    typical_by_definition,
    typical_limit,
    uniform,
)


PUBLISHED = FIXTURES / "verification"


def reject_tree(draft, *arguments):
    """`reject` of what is not known to be a chain."""
    draft = copy(draft)
    draft.is_chain = False
    return reject(draft, *arguments)


RULES = (reject, reject_block, reject_tree)


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


def drawn_shapes(data, batch_size, size):
    """Parents of each row's nodes, and these in the form of a draft."""
    kind = data.draw(st.sampled_from(["chain", "one tree", "trees of their own"]))
    if kind == "chain":
        shapes = [list(range(-1, size - 1))]
    else:
        number = 1 if kind == "one tree" else batch_size
        shapes = [[data.draw(st.integers(-1, node - 1)) for node in range(size)] for _ in range(number)]
    parents = torch.tensor(shapes, dtype=torch.long).view(len(shapes), size)
    return parents.expand(batch_size, size).tolist(), parents if kind == "trees of their own" else parents[0]


@given(st.data())
def test_follow_walks_the_drafts(data):
    batch_size, size = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 10))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    tokens, node_tokens = (torch.randint(3, (batch_size, width), generator=generator) for width in (size, size + 1))
    num_nodes = [data.draw(st.integers(0, size)) for _ in range(batch_size)]
    shapes, parents = drawn_shapes(data, batch_size, size)
    acceptance = follow(make_tree(tokens, parents, num_nodes=num_nodes), node_tokens)
    committed = rows_of(acceptance)
    for row, count in enumerate(acceptance.num_accepted.tolist()):
        path, expected = walk(tokens[row].tolist(), shapes[row], num_nodes[row], node_tokens[row].tolist())
        assert acceptance.path[row, : count + 1].tolist() == path
        assert committed[row] == expected


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
    for rule, name in ((reject, "with_q"), (reject_block, "block")):
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
    rule = rule or reject
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
    block, standard = (judged(draft, generator, rule) for rule in (reject_block, reject))
    assert text_pvalue(block, generator, depth + 1) > 1e-3
    # Standard deviations of the means are below 4e-3.
    means = [acceptance.num_accepted.double().mean().item() for acceptance in (block, standard)]
    assert means[0] > means[1] - 0.01


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


def test_numeric_traps_of_rejection():
    def judge(rule, probs, target_probs, accept, number):
        accept, number = (torch.full((1, 2), value, dtype=torch.float64) for value in (accept, number))
        return rule(draft_for(rule, torch.tensor([[0]]), probs), target_probs, accept[:, :1], number)

    # The target's distribution is the draft's, rounded down everywhere: a rejection leaves nothing of p - q.
    probs = torch.tensor([[[0.5, 0.0, 0.5]]])
    rounded, impossible = torch.cat([probs, probs], dim=1) * (1 - 2**-22), torch.tensor([[[0.0, 0.25, 0.75]] * 2])
    for rule in RULES:
        for number, token in [(0.0, 0), (0.49, 0), (0.51, 2), (ALMOST_ONE, 2)]:
            assert rows_of(judge(rule, probs, rounded, ALMOST_ONE, number)) == [[token]]
        # The number 0 accepts no impossible token.
        for draft_prob in (0.0, 0.5):
            acceptance = judge(rule, torch.tensor([[[draft_prob, 1 - draft_prob, 0.0]]]), impossible, 0.0, 0.0)
            assert acceptance.num_accepted.item() == 0
            assert acceptance.tokens[0, 0].item() in (1, 2)
        assert judge(rule, probs, torch.full((1, 2, 3), torch.nan), 0.5, 0.5).tokens[0, 0] == -1
        with pytest.raises(ValueError, match="`probs=None`"):
            rule(DraftTree.from_lists([[1, 2]]), torch.ones(1, 3, 4) / 4, torch.zeros(1, 2), torch.zeros(1, 3))


# Rules that judge whole drafts


# `block`, whose integers and distribution are those of tests/loop/test_acceptance.py


def test_block_thresholds_of_the_reference_where_both_parts_vanish_and_of_long_unlikely_chains():
    chains = load_file(FIXTURES / "verification" / "chain" / "expected.safetensors")
    draft = DraftTree.chain(chains["draft_tokens"], chains["num_draft"], chains["draft_probs"])
    ratios, thresholds = block_thresholds(draft, chains["target_probs"])
    valid = chains["block.p"] >= 0
    assert torch.equal(valid.sum(1), chains["num_draft"])
    assert (ratios - chains["block.p"])[valid].abs().max() < 1e-5
    # 0 / 0 but for rounding where both parts vanish.
    clear = valid & (1 - chains["block.p"] > 1e-4)
    assert clear.sum() > 50
    assert (thresholds - chains["block.h"])[clear].abs().max() < 1e-5
    assert not thresholds[~valid].any()
    probs = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]])
    draft = DraftTree.chain(torch.tensor([[0, 1]]), probs=probs)
    ratios, thresholds = block_thresholds(draft, torch.cat([probs, probs[:, :1]], dim=1))
    assert ratios.tolist() == thresholds.tolist() == [[1.0, 1.0]]
    probs = torch.tensor([1e-3, 0.999]).expand(1, 200, 2)
    draft = DraftTree.chain(torch.zeros(1, 200, dtype=torch.long), probs=probs)
    ratios, thresholds = block_thresholds(draft, torch.tensor([1e-30, 1.0]).expand(1, 201, 2))
    assert torch.isfinite(ratios).all()
    assert ((thresholds >= 0) & (thresholds < 1e-20)).all()


def test_block_never_reads_padding_or_accepts_impossible_tokens_and_judges_one_token_as_standard(generator):
    draft, target_probs, accept_uniforms, target_uniforms = random_chains(generator, batch_size=200)
    expected = reject_block(draft, target_probs, accept_uniforms, target_uniforms)
    padding = torch.arange(5) >= draft.num_nodes[:, None]
    draft.tokens = draft.tokens.masked_fill(padding, -1)
    draft.probs = draft.probs.masked_fill(padding[..., None], torch.nan)
    target_probs[:, 1:] = target_probs[:, 1:].masked_fill(padding[..., None], torch.nan)
    again = reject_block(draft, target_probs, accept_uniforms.masked_fill(padding, 0.0), target_uniforms)
    assert rows_of(again) == rows_of(expected)
    assert (again.num_accepted <= draft.num_nodes).all()
    one = random_chains(generator, batch_size=500, size=1)
    assert rows_of(reject_block(*one)) == rows_of(reject(*one))
    # An impossible token is accepted neither at its own place nor by the pass of a later token.
    target_probs, zeros = torch.tensor([[0.0, 0.25, 0.75]]).repeat(1, 4, 1), torch.zeros(1, 4, dtype=torch.float64)
    for draft_prob in (0.0, 0.5):
        probs = torch.tensor([[[draft_prob, 1 - draft_prob, 0.0], [0.0, 1.0, 0.0], [0.0, 0.1, 0.9]]])
        draft = DraftTree.chain(torch.tensor([[0, 1, 2]]), probs=probs)
        acceptance = reject_block(draft, target_probs, zeros[:, :3], zeros)
        assert acceptance.num_accepted.item() == 0
        assert acceptance.tokens[0, 0].item() in (1, 2)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [(BlockRule, -torch.inf), *in_full((StandardRule, torch.nan), (StandardRule, -torch.inf), (BlockRule, torch.nan))],
)
def test_drafts_that_run_into_nothing_are_judged_exactly(kind, bad):
    """The first token is drawn, and then the processors leave the draft nothing that it could draw."""
    target, drafted = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    rows, anchors = list(range(4000)), [4] * 4000
    uniforms = RowUniforms(3, torch.device("cpu"))
    chain = SteeredDraw(lambda logits, tokens: logits, uniforms.keys(rows, anchors).for_nodes(2, DRAFT))
    for scores in (drafted.log(), torch.full((4,), bad)):
        chain.choose(scores.expand(len(rows), 4))
    scores = target.log().expand(len(rows), 3, 4)
    draft, rule = DraftTree.chain(torch.stack(chain.tokens, dim=1), [2] * len(rows), chain.all_probs), kind(uniforms)
    judged = rule.judge(draft, scores, rule.keys(rows, anchors))
    assert chi_square_pvalue(judged.tokens[:, 0].bincount(minlength=4), target) > 1e-3
    goes_on = judged.num_accepted > 0
    assert goes_on.sum() > 1000
    assert chi_square_pvalue(judged.tokens[goes_on, 1].bincount(minlength=4), target) > 1e-3


LOSSY = FIXTURES / "verification" / "lossy" / "expected.safetensors"


# Typical acceptance


def accept_typical(draft, scores, *limits):
    return TypicalRule(None, *limits).judge(draft, scores, None)


@pytest.mark.parametrize("tree", ["mc_sim_7b_63", *in_full("small")])
def test_typical_acceptance_chooses_the_official_path_of_a_tree(tree):
    case = load_file(FIXTURES / "medusa" / "v01_heads_pt" / "expected.safetensors")
    small = TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2,)])
    shape = small if tree == "small" else TokenTree.published(tree)
    draft = DraftTree.of_shape(shape, case[f"{tree}.tree_candidates"][:, 1:])
    for temperature in (0.7, 1.0):
        scores, answer = case[f"{tree}.tree_logits"] / temperature, f"{tree}.typical_t{temperature}"
        acceptance, count = accept_typical(draft, scores, 0.09, 0.3), case[f"{answer}.accept_length"].item()
        assert acceptance.num_accepted.item() == count
        nodes_of_best = case[f"{tree}.buf.retrieve_indices"][case[f"{answer}.best_candidate"].item()]
        assert acceptance.path[0, : count + 1].tolist() == nodes_of_best[: count + 1].tolist()
        best_next = scores[0, acceptance.path[0, count]].argmax().item()
        assert rows_of(acceptance) == [[*case[f"{answer}.accepted_tokens"][1 : count + 1].tolist(), best_next]]


def test_typical_acceptance_of_the_reference_chains_of_impossible_tokens_and_of_padding():
    lossy = load_file(LOSSY)
    scores = lossy["target_probs"].log() / 0.8
    for row, expected in enumerate(lossy["typical_threshold"]):
        limits = [typical_limit(distribution, 0.09, 0.3) for distribution in scores[row, :-1].double().softmax(-1)]
        assert torch.allclose(torch.tensor(limits, dtype=torch.float64), expected, atol=1e-6)
    acceptance = accept_typical(DraftTree.chain(lossy["draft_tokens"]), scores, 0.09, 0.3)
    assert torch.equal(acceptance.num_accepted, lossy["typical_accepted"])
    assert acceptance.num_accepted.unique().numel() > 2
    scores = torch.tensor([[[-torch.inf, 1.0, 0.0]] * 2])
    assert rows_of(accept_typical(DraftTree.from_lists([[0]]), scores, 0.0, 0.0)) == [[1]]
    draft = DraftTree.chain(torch.tensor([[1, 1], [1, -1]]), torch.tensor([2, 1]))
    scores = torch.tensor([0.0, 9.0, 0.0]).expand(2, 3, 3)
    assert accept_typical(draft, scores, 0.09, 0.3).num_accepted.tolist() == [2, 1]
    for bad in (torch.nan, -torch.inf):
        for draft in (DraftTree.from_lists([[0]]), DraftTree.empty(1)):
            scores = torch.full((1, draft.size + 1, 3), bad)
            assert accept_typical(draft, scores, 0.09, 0.3).tokens[0, 0] == -1


@given(st.sampled_from([(0.09, 0.3), (0.3, 0.6), (0.5, 2.0), (0.0, 0.0)]), st.data())
def test_typical_acceptance_is_that_of_the_definition(limits, data):
    batch_size, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    counts = [data.draw(st.integers(0, size)) for _ in range(batch_size)]
    tokens = torch.randint(5, (batch_size, size), generator=generator)
    scores = 2 * torch.randn(batch_size, size + 1, 5, generator=generator)
    shapes, parents = drawn_shapes(data, batch_size, size)
    acceptance = accept_typical(make_tree(tokens, parents, num_nodes=counts), scores, *limits)
    for row, committed in enumerate(rows_of(acceptance)):
        given_tokens = tokens[row].tolist()
        path, expected = typical_by_definition(given_tokens, shapes[row], counts[row], scores[row], *limits)
        assert committed == expected
        # Equal siblings with equal subtrees are the same text by another path.
        if len(set(zip(shapes[row], given_tokens))) == size:
            assert acceptance.path[row, 1 : len(path) + 1].tolist() == path


# Synthetic acceptance


def test_synthetic_acceptance_of_the_reference_follows_first_children_and_needs_no_match(generator):
    lossy = load_file(LOSSY)
    rates = torch.tensor(conditional_rates(tuple(lossy["synthetic_rates"].tolist())), dtype=torch.float64)
    assert torch.allclose(rates, lossy["synthetic_conditional"], atol=1e-6)
    draft = DraftTree.chain(torch.ones(64, 6, dtype=torch.long))
    acceptance = accept_synthetic(draft, rates, lossy["synthetic_uniform"], torch.zeros(64, 7, dtype=torch.long))
    assert torch.equal(acceptance.num_accepted, lossy["synthetic_accepted"])
    assert acceptance.num_accepted.unique().numel() > 3
    of_length = rates_of_length(lossy["synthetic_length"].item())
    expected = lossy["synthetic_length_rates"].tolist()
    assert [*of_length, *[0.0] * (6 - len(of_length))] == pytest.approx(expected, abs=1e-6)
    for length in (1, 1.25, 7):
        assert 1 + sum(rates_of_length(length)) == pytest.approx(length)
    assert conditional_rates((0.8, 0.4, 0.0, 0.0)) == [0.8, 0.5, 0.0, 0.0]
    # Node 2 is the first child of node 1; nodes 3 and 4 are children of the second child of the anchor.
    parents = torch.tensor([-1, -1, 0, 1, 1, 2])
    draft = DraftTree(torch.arange(10, 16)[None].repeat(4, 1), parents, torch.tensor([6, 6, 5, 1]))
    numbers = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.9, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    acceptance = accept_synthetic(draft, torch.full((3,), 0.5), numbers, torch.arange(7).expand(4, -1))
    assert rows_of(acceptance) == [[10, 12, 15, 6], [10, 1], [10, 12, 3], [10, 1]]
    assert acceptance.path[:, :4].tolist() == [[0, 1, 3, 6], [0, 1, 1, 1], [0, 1, 3, 3], [0, 1, 1, 1]]
    # There may be more or fewer rates than drafts.
    draft = DraftTree.from_lists([[5, 6], [5]])
    for num_rates in (0, 1, 5):
        numbers = torch.zeros(2, num_rates)
        accepted = accept_synthetic(draft, torch.ones(num_rates), numbers, torch.tensor([[1, 2, 3]] * 2)).num_accepted
        assert accepted.tolist() == [min(num_rates, 2), min(num_rates, 1)]
    acceptance = accept_synthetic(DraftTree.empty(2), torch.ones(2), torch.zeros(2, 2), torch.tensor([[4], [5]]))
    assert rows_of(acceptance) == [[4], [5]]
    draft = DraftTree.chain(torch.randint(9, (50, 4), generator=generator))
    node_tokens = torch.randint(9, (50, 5), generator=generator)
    accepted = accept_synthetic(draft, torch.ones(4), torch.zeros(50, 4), node_tokens)
    assert accepted.num_accepted.tolist() == [4] * 50
    assert follow(draft, node_tokens).num_accepted.max() < 4
