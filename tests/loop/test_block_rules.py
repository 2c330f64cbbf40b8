"""Rules that judge whole drafts: reference integers, the exact distribution of `block`, definitions, traps."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.generation.logits_process import LogitsProcessorList

from hf_specdec.drafting.chain import SteeredChain
from hf_specdec.drafts import DraftTree, TokenTree
from hf_specdec.kernels.acceptance import follow, reject_chain
from hf_specdec.kernels.sampling import sample_from_probs
from hf_specdec.logits.acceptance import accept_synthetic, accept_typical, block_thresholds, reject_block
from hf_specdec.logits.processors import ProcessorStack
from hf_specdec.logits.randomness import RowUniforms
from hf_specdec.logits.rules import BlockRule, StandardRule, conditional_rates, rates_of_length
from hf_specdec.logits.sampling import DraftSampler
from tests.helpers.paths import FIXTURES
from tests.helpers.rule_cases import random_probs, rows_of, uniform
from tests.helpers.statistics import chi_square_pvalue


def random_chains(generator, batch_size=16, size=5, vocab_size=300, overlap=0.8):
    target_probs = random_probs(generator, batch_size, size + 1, vocab_size)
    noise = random_probs(generator, batch_size, size, vocab_size)
    probs = overlap * target_probs[:, :-1] + (1 - overlap) * noise
    tokens = sample_from_probs(probs, uniform(generator, batch_size, size))
    num_nodes = torch.randint(size + 1, (batch_size,), generator=generator)
    draft = DraftTree.chain(tokens, num_nodes, probs)
    return draft, target_probs, uniform(generator, batch_size, size), uniform(generator, batch_size, size + 1)


@pytest.fixture(scope="module")
def lossy():
    return load_file(FIXTURES / "verification" / "lossy" / "expected.safetensors")


@pytest.fixture(scope="module")
def posterior():
    return load_file(FIXTURES / "medusa" / "posterior" / "expected.safetensors")


def test_thresholds_of_the_fixture():
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


# The distribution of `block`, all drafts and all outcomes of its tests enumerated


V = 3


class Language:
    """A random distribution of texts: `probs(prefix)` is that of the next token."""

    def __init__(self, seed: int, depth: int = 4):
        generator = torch.Generator().manual_seed(seed)
        self.tables = [random_probs(generator, *[V] * d, V, scale=1.2) for d in range(depth)]

    def probs(self, prefix) -> torch.Tensor:
        return self.tables[len(prefix)][tuple(prefix)]

    def text(self, tokens) -> float:
        return float(np.prod([self.probs(tokens[:i])[token] for i, token in enumerate(tokens)]))


def all_drafts(drafter: Language, depth: int, stops):
    """Every draft with its probability; `stops(tokens)` says that the drafter ends after these tokens."""
    drafts = [((), 1.0)]
    for _ in range(depth):
        longer = []
        for tokens, prob in drafts:
            if tokens and stops(tokens):
                longer.append((tokens, prob))
                continue
            distribution = drafter.probs(tokens)
            longer += [((*tokens, token), prob * distribution[token].item()) for token in range(V)]
        drafts = list(dict.fromkeys(longer))
    return drafts


def as_chains(drafts, target: Language, drafter: Language, depth: int):
    """One row for each draft, and the target's distributions; padding is made of what must never be read."""
    tokens = torch.full((len(drafts), depth), -1)
    probs = torch.full((len(drafts), depth, V), torch.nan)
    target_probs = torch.full((len(drafts), depth + 1, V), torch.nan)
    for row, (draft, _) in enumerate(drafts):
        for i in range(len(draft) + 1):
            target_probs[row, i] = target.probs(draft[:i])
        for i, token in enumerate(draft):
            tokens[row, i] = token
            probs[row, i] = drafter.probs(draft[:i])
    return DraftTree.chain(tokens, torch.tensor([len(draft) for draft, _ in drafts]), probs), target_probs


def enumerated(rule, target, drafter, depth, stops=lambda tokens: False, draws=2048):
    """Distribution of texts of `depth + 1` tokens that the rule writes, and the expected number of accepted tokens.

    Every test passes with the probability of its threshold, so each combination of outcomes is one case; the new token
    is drawn with evenly spread numbers, and the target writes the rest.
    """
    drafts = all_drafts(drafter, depth, stops)
    draft, target_probs = as_chains(drafts, target, drafter, depth)
    thresholds = block_thresholds(draft, target_probs)[1]
    numbers = ((torch.arange(draws, dtype=torch.float64) + 0.5) / draws)[:, None].expand(-1, depth + 1)
    distribution = dict.fromkeys(product(range(V), repeat=depth + 1), 0.0)
    expected = 0.0
    for passes in product([False, True], repeat=depth):
        passes = torch.tensor(passes)
        weights = torch.where(passes, thresholds, 1 - thresholds).prod(1)
        uniforms = torch.where(passes, thresholds * 0.5, (1 + thresholds) * 0.5)
        for row, (_, prob) in enumerate(drafts):
            weight = prob * weights[row].item()
            if weight == 0:
                continue
            repeated = DraftTree.chain(*(x[row].expand(draws, *x[row].shape) for x in chain_parts(draft)))
            distributions = target_probs[row].expand(draws, -1, -1)
            acceptance = rule(repeated, distributions, uniforms[row].expand(draws, -1), numbers)
            count = int(acceptance.num_accepted[0])
            expected += weight * count
            for written, times in zip(*acceptance.tokens[:, : count + 1].unique(dim=0, return_counts=True)):
                written = tuple(written.tolist())
                for rest in product(range(V), repeat=depth - count):
                    text = (*written, *rest)
                    share = times.item() / draws * target.text(text) / target.text(written)
                    distribution[text] += weight * share
    return distribution, expected


def chain_parts(draft):
    return draft.tokens, draft.num_nodes, draft.probs


def distance(distribution, target):
    """Total variation distance from the target's distribution."""
    return sum(abs(prob - target.text(text)) for text, prob in distribution.items()) / 2


def stop_at_first_failure(draft, target_probs, accept_uniforms, target_uniforms):
    """A wrong rule: the tests of `block`, ended by the first that fails."""
    failed = accept_uniforms >= block_thresholds(draft, target_probs)[1]
    return reject_block(draft, target_probs, accept_uniforms + failed.cumsum(1), target_uniforms)


def forget_the_residual(draft, target_probs, accept_uniforms, target_uniforms):
    """A wrong rule: after a rejection too the new token comes from the target's whole distribution."""
    acceptance = reject_block(draft, target_probs, accept_uniforms, target_uniforms)
    count = acceptance.num_accepted[:, None]
    new_tokens = sample_from_probs(target_probs, target_uniforms).gather(1, count)
    acceptance.tokens.scatter_(1, count, new_tokens)
    return acceptance


def expected_by_standard(drafts, target, drafter):
    """Expected number of accepted tokens of `reject_chain`."""
    expected = 0.0
    for tokens, prob in drafts:
        ratios = [
            target.probs(tokens[:i])[t].item() / drafter.probs(tokens[:i])[t].item() for i, t in enumerate(tokens)
        ]
        expected += prob * sum(np.cumprod([min(1.0, ratio) for ratio in ratios]))
    return expected


def low_confidence(drafter):
    """A drafter that ends after a token that it gave less than 0.3."""
    return lambda tokens: drafter.probs(tokens[:-1])[tokens[-1]] < 0.3


class TestLawOfBlock:
    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_is_the_targets(self, depth, seed):
        target, drafter = Language(seed), Language(100 + seed)
        distribution, _ = enumerated(reject_block, target, drafter, depth, draws=512 if depth == 3 else 2048)
        assert sum(distribution.values()) == pytest.approx(1)
        # Evenly spread draws are off by about one in their number.
        assert distance(distribution, target) < 2e-3

    @pytest.mark.parametrize("seed", range(3))
    def test_is_the_targets_where_drafts_end_by_their_own_tokens(self, seed):
        target, drafter = Language(seed), Language(200 + seed)
        stops = low_confidence(drafter)
        lengths = {len(tokens) for tokens, _ in all_drafts(drafter, 3, stops)}
        assert len(lengths) > 1
        distribution, _ = enumerated(reject_block, target, drafter, 3, stops, draws=512)
        assert distance(distribution, target) < 2e-3

    @pytest.mark.parametrize("wrong", [stop_at_first_failure, forget_the_residual])
    def test_of_wrong_rules_is_another(self, wrong):
        distribution, _ = enumerated(wrong, Language(0), Language(100), 2)
        assert distance(distribution, Language(0)) > 1e-2

    @settings(max_examples=60)
    @given(st.integers(0, 10**6), st.integers(1, 3), st.booleans())
    def test_accepts_at_least_as_much_as_standard(self, seed, depth, ends_early):
        target, drafter = Language(seed), Language(seed + 1)
        stops = low_confidence(drafter) if ends_early else (lambda tokens: False)
        drafts = all_drafts(drafter, depth, stops)
        draft, target_probs = as_chains(drafts, target, drafter, depth)
        fails = 1 - block_thresholds(draft, target_probs)[1]
        # At least i tokens are accepted unless all tests from the i-th on fail.
        block = sum(
            prob * sum(1 - fails[row, i:].prod().item() for i in range(len(tokens)))
            for row, (tokens, prob) in enumerate(drafts)
        )
        standard = expected_by_standard(drafts, target, drafter)
        assert block >= standard - 1e-6
        if depth == 1:
            assert block == pytest.approx(standard, abs=1e-6)

    def test_accepts_more(self):
        target, drafter = Language(0), Language(100)
        _, accepted = enumerated(reject_block, target, drafter, 3, draws=64)
        drafts = all_drafts(drafter, 3, lambda tokens: False)
        assert accepted > 1.01 * expected_by_standard(drafts, target, drafter)


def test_numbers_that_are_seen_again_change_the_distribution(generator):
    """Two cycles over three positions: the tests after the first new token are made again in the second cycle."""
    # The difference is small.
    samples = 200_000
    target, drafter = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.2, 0.7])

    def text_counts(reuse: bool):
        rows = torch.arange(samples)
        numbers = uniform(generator, samples, 6)
        text, length = torch.zeros(samples, 6, dtype=torch.long), torch.zeros(samples, dtype=torch.long)
        for _ in range(2):
            probs = drafter.expand(samples, 3, V)
            draft = DraftTree.chain(sample_from_probs(probs, uniform(generator, samples, 3)), probs=probs)
            places = (length[:, None] + torch.arange(3)).clamp(max=5)
            tests = numbers.gather(1, places) if reuse else uniform(generator, samples, 3)
            made = reject_block(draft, target.expand(samples, 4, V), tests, uniform(generator, samples, 4))
            for index in range(4):
                place = (length + index).clamp(max=5)
                text[rows, place] = torch.where(index <= made.num_accepted, made.tokens[:, index], text[rows, place])
            length += made.num_accepted + 1
        return text[:, :2].mul(torch.tensor([V, 1])).sum(1).bincount(minlength=V * V)

    distribution = (target[:, None] * target).flatten()
    assert chi_square_pvalue(text_counts(reuse=False), distribution) > 1e-3
    assert chi_square_pvalue(text_counts(reuse=True), distribution) < 1e-6


class TestBlockTraps:
    def test_one_token_is_standard(self, generator):
        draft, *inputs = random_chains(generator, batch_size=500, size=1)
        block, standard = reject_block(draft, *inputs), reject_chain(draft, *inputs)
        assert torch.equal(block.num_accepted, standard.num_accepted)
        assert torch.equal(block.tokens, standard.tokens)

    def test_padding_is_never_read(self, generator):
        draft, target_probs, accept_uniforms, target_uniforms = random_chains(generator, batch_size=200)
        expected = reject_block(draft, target_probs, accept_uniforms, target_uniforms)
        padding = torch.arange(5) >= draft.num_nodes[:, None]
        draft.tokens = draft.tokens.masked_fill(padding, -1)
        draft.probs = draft.probs.masked_fill(padding[..., None], torch.nan)
        target_probs[:, 1:] = target_probs[:, 1:].masked_fill(padding[..., None], torch.nan)
        accept_uniforms = accept_uniforms.masked_fill(padding, 0.0)
        again = reject_block(draft, target_probs, accept_uniforms, target_uniforms)
        assert torch.equal(again.tokens, expected.tokens)
        assert torch.equal(again.num_accepted, expected.num_accepted)
        assert (again.num_accepted <= draft.num_nodes).all()

    @pytest.mark.parametrize("draft_prob", [0.0, 0.5])
    def test_zero_never_accepts_an_impossible_token(self, draft_prob):
        """Tokens are accepted neither at their own place nor by the pass of a later token."""
        target_probs = torch.tensor([[0.0, 0.25, 0.75]]).repeat(1, 4, 1)
        probs = torch.tensor([[[draft_prob, 1 - draft_prob, 0.0], [0.0, 1.0, 0.0], [0.0, 0.1, 0.9]]])
        draft = DraftTree.chain(torch.tensor([[0, 1, 2]]), probs=probs)
        zeros = torch.zeros(1, 4, dtype=torch.float64)
        acceptance = reject_block(draft, target_probs, zeros[:, :3], zeros)
        assert acceptance.num_accepted.item() == 0
        assert acceptance.tokens[0, 0].item() in (1, 2)

    def test_where_both_parts_vanish_the_token_is_right(self):
        probs = torch.tensor([[[0.5, 0.5], [0.25, 0.75]]])
        target_probs = torch.cat([probs, probs[:, :1]], dim=1)
        ratios, thresholds = block_thresholds(DraftTree.chain(torch.tensor([[0, 1]]), probs=probs), target_probs)
        assert ratios.tolist() == [[1.0, 1.0]]
        assert thresholds.tolist() == [[1.0, 1.0]]

    def test_ratios_of_long_unlikely_chains_stay_numbers(self):
        size = 200
        probs = torch.tensor([1e-3, 1 - 1e-3]).expand(1, size, 2)
        target_probs = torch.tensor([1e-30, 1.0]).expand(1, size + 1, 2)
        draft = DraftTree.chain(torch.zeros(1, size, dtype=torch.long), probs=probs)
        ratios, thresholds = block_thresholds(draft, target_probs)
        assert torch.isfinite(ratios).all()
        assert ((thresholds >= 0) & (thresholds < 1e-20)).all()


# Typical acceptance


def typical_limit(distribution, threshold, alpha):
    entropy = -(distribution * (distribution + 1e-5).log()).sum()
    return min(threshold, alpha * float((-entropy).exp()))


def typical_by_definition(tokens, parents, num_nodes, scores, threshold, alpha):
    """Path and committed tokens of one row, by a walk over all paths."""
    distributions = scores.double().softmax(-1)
    paths = {0: ([], 0.0)}
    for node, (token, parent) in enumerate(zip(tokens[:num_nodes], parents)):
        distribution = distributions[parent + 1]
        if parent + 1 in paths and distribution[token] > typical_limit(distribution, threshold, alpha):
            path, likelihood = paths[parent + 1]
            paths[node + 1] = ([*path, node + 1], likelihood + float(distribution[token].log()))
    last = max(paths, key=lambda node: (len(paths[node][0]), paths[node][1], -node))
    path = paths[last][0]
    return path, [*(tokens[node - 1] for node in path), int(distributions[last].argmax())]


TYPICAL_CASES = {
    "typ_a": (0.7, 0.09, 0.3),
    "typ_b": (1.0, 0.09, 0.3),
    "typ_c": (1.0, 0.3, 0.55),
    "typ_d": (1.5, 0.01, 0.1),
}


@st.composite
def scored_trees(draw, shared_parents):
    batch_size, size = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    shapes = [[draw(st.integers(-1, i - 1)) for i in range(size)] for _ in range(1 if shared_parents else batch_size)]
    counts = [draw(st.integers(0, size)) for _ in range(batch_size)]
    return batch_size, size, shapes, counts, draw(st.integers(0, 10**6))


class TestTypical:
    @pytest.mark.parametrize("case", range(8))
    @pytest.mark.parametrize("name", TYPICAL_CASES)
    def test_official_choice(self, posterior, case, name):
        """Paths have distributions of their own, so they become branches below one that accepts all roots."""
        temperature, threshold, alpha = TYPICAL_CASES[name]
        candidates, logits = posterior[f"{case}.candidates"], posterior[f"{case}.logits"]
        num_paths, length = candidates.shape
        vocab_size = logits.shape[-1]
        # Every path begins with a token that only it has, and all of these are equally likely.
        roots = torch.arange(num_paths) + vocab_size
        tokens = torch.cat([roots[:, None], candidates[:, 1:]], dim=1).flatten()
        parents = torch.arange(-1, num_paths * length - 1)
        parents[::length] = -1
        scores = torch.full((1, num_paths * length + 1, vocab_size + num_paths), -torch.inf)
        scores[0, 0, vocab_size:] = 0.0
        scores[0, 1:, :vocab_size] = logits.flatten(0, 1) / temperature
        draft = DraftTree(tokens[None], parents, torch.tensor([len(tokens)]))
        acceptance = accept_typical(draft, scores, threshold, alpha)
        best, accepted = posterior[f"{case}.{name}"].tolist()
        assert acceptance.num_accepted.item() == accepted + 1
        path = range(best * length + 1, best * length + accepted + 2)
        assert acceptance.path[0, 1 : accepted + 2].tolist() == list(path)
        best_next = logits[best, accepted].argmax().item()
        assert rows_of(acceptance) == [[roots[best].item(), *candidates[best, 1 : accepted + 1].tolist(), best_next]]

    @pytest.mark.parametrize("temperature", [0.7, 1.0])
    @pytest.mark.parametrize("tree", ["small", "mc_sim_7b_63"])
    def test_official_choice_on_a_model(self, tree, temperature):
        case = load_file(FIXTURES / "medusa" / "v01_heads_pt" / "expected.safetensors")
        small = TokenTree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2,)])
        shape = small if tree == "small" else TokenTree.published(tree)
        nodes = case[f"{tree}.tree_candidates"]
        scores = case[f"{tree}.tree_logits"] / temperature
        acceptance = accept_typical(DraftTree.of_shape(shape, nodes[:, 1:]), scores, 0.09, 0.3)
        answer = f"{tree}.typical_t{temperature}"
        count = case[f"{answer}.accept_length"].item()
        assert acceptance.num_accepted.item() == count
        nodes_of_best = case[f"{tree}.buf.retrieve_indices"][case[f"{answer}.best_candidate"].item()]
        assert acceptance.path[0, : count + 1].tolist() == nodes_of_best[: count + 1].tolist()
        committed = case[f"{answer}.accepted_tokens"][1 : count + 1].tolist()
        best_next = scores[0, acceptance.path[0, count]].argmax().item()
        assert rows_of(acceptance) == [[*committed, best_next]]

    def test_chain_fixture(self, lossy):
        scores = lossy["target_probs"].log() / 0.8
        for row, expected in enumerate(lossy["typical_threshold"]):
            limits = [typical_limit(distribution, 0.09, 0.3) for distribution in scores[row, :-1].double().softmax(-1)]
            assert torch.allclose(torch.tensor(limits, dtype=torch.float64), expected, atol=1e-6)
        acceptance = accept_typical(DraftTree.chain(lossy["draft_tokens"]), scores, 0.09, 0.3)
        assert torch.equal(acceptance.num_accepted, lossy["typical_accepted"])
        assert acceptance.num_accepted.unique().numel() > 2

    @given(st.booleans().flatmap(scored_trees), st.sampled_from([(0.09, 0.3), (0.3, 0.6), (0.5, 2.0), (0.0, 0.0)]))
    def test_definition(self, tree, limits):
        batch_size, size, shapes, counts, seed = tree
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(5, (batch_size, size), generator=generator)
        scores = 2 * torch.randn(batch_size, size + 1, 5, generator=generator)
        parents = torch.tensor(shapes[0] if len(shapes) == 1 else shapes)
        acceptance = accept_typical(DraftTree(tokens, parents, torch.tensor(counts)), scores, *limits)
        committed = rows_of(acceptance)
        for row in range(batch_size):
            own_parents = shapes[0] if len(shapes) == 1 else shapes[row]
            path, expected = typical_by_definition(
                tokens[row].tolist(), own_parents, counts[row], scores[row], *limits
            )
            assert committed[row] == expected
            # Equal siblings with equal subtrees are the same text by another path.
            if len(set(zip(own_parents, tokens[row].tolist()))) == size:
                assert acceptance.path[row, 1 : len(path) + 1].tolist() == path

    @given(scored_trees(shared_parents=True))
    def test_chains_are_trees(self, tree):
        batch_size, size, _, counts, seed = tree
        generator = torch.Generator().manual_seed(seed)
        scores = 3 * torch.randn(batch_size, size + 1, 4, generator=generator)
        chain = DraftTree.chain(torch.randint(4, (batch_size, size), generator=generator), torch.tensor(counts))
        as_tree = DraftTree(chain.tokens, chain.parents, chain.num_nodes)
        first, second = (accept_typical(draft, scores, 0.2, 0.5) for draft in (chain, as_tree))
        assert torch.equal(first.tokens, second.tokens)
        assert torch.equal(first.path, second.path)

    def test_impossible_tokens_are_refused_even_at_threshold_zero(self):
        scores = torch.tensor([[[-torch.inf, 1.0, 0.0]] * 2])
        acceptance = accept_typical(DraftTree.from_lists([[0]]), scores, 0.0, 0.0)
        assert rows_of(acceptance) == [[1]]

    def test_padding_that_would_match(self):
        draft = DraftTree.chain(torch.tensor([[1, 1], [1, -1]]), torch.tensor([2, 1]))
        scores = torch.tensor([0.0, 9.0, 0.0]).expand(2, 3, 3)
        assert accept_typical(draft, scores, 0.09, 0.3).num_accepted.tolist() == [2, 1]

    def test_distributions_without_a_token_are_marked(self):
        for bad in (torch.nan, -torch.inf):
            acceptance = accept_typical(DraftTree.from_lists([[0]]), torch.full((1, 2, 3), bad), 0.09, 0.3)
            assert acceptance.tokens[0, 0] == -1
            assert accept_typical(DraftTree.empty(1), torch.full((1, 1, 3), bad), 0.09, 0.3).tokens[0, 0] == -1


# Synthetic acceptance


class TestSynthetic:
    def test_fixture(self, lossy):
        rates = torch.tensor(conditional_rates(tuple(lossy["synthetic_rates"].tolist())), dtype=torch.float64)
        assert torch.allclose(rates, lossy["synthetic_conditional"], atol=1e-6)
        draft = DraftTree.chain(torch.ones(64, 6, dtype=torch.long))
        acceptance = accept_synthetic(draft, rates, lossy["synthetic_uniform"], torch.zeros(64, 7, dtype=torch.long))
        assert torch.equal(acceptance.num_accepted, lossy["synthetic_accepted"])
        assert acceptance.num_accepted.unique().numel() > 3

    def test_fixture_of_a_length(self, lossy):
        expected = lossy["synthetic_length_rates"].tolist()
        rates = rates_of_length(lossy["synthetic_length"].item())
        assert [*rates, *[0.0] * (6 - len(rates))] == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("length", [1, 1.25, 2, 3.5, 7])
    def test_rates_of_a_length_add_up(self, length):
        assert 1 + sum(rates_of_length(length)) == pytest.approx(length)

    def test_conditional_rates(self):
        assert conditional_rates((0.8, 0.4, 0.0, 0.0)) == [0.8, 0.5, 0.0, 0.0]
        assert conditional_rates((1.0, 1.0)) == [1.0, 1.0]

    def test_follows_first_children(self):
        # Node 2 is the first child of node 1; nodes 3 and 4 are children of the second child of the anchor.
        parents = torch.tensor([-1, -1, 0, 1, 1, 2])
        draft = DraftTree(torch.arange(10, 16)[None].repeat(4, 1), parents, torch.tensor([6, 6, 5, 1]))
        numbers = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.9, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        node_tokens = torch.arange(7).expand(4, -1)
        acceptance = accept_synthetic(draft, torch.full((3,), 0.5), numbers, node_tokens)
        assert rows_of(acceptance) == [[10, 12, 15, 6], [10, 1], [10, 12, 3], [10, 1]]
        assert acceptance.path[:, :4].tolist() == [[0, 1, 3, 6], [0, 1, 1, 1], [0, 1, 3, 3], [0, 1, 1, 1]]

    @pytest.mark.parametrize("num_rates", [0, 1, 5])
    def test_rates_and_drafts_of_different_lengths(self, num_rates):
        draft = DraftTree.from_lists([[5, 6], [5]])
        numbers = torch.zeros(2, num_rates)
        acceptance = accept_synthetic(draft, torch.ones(num_rates), numbers, torch.tensor([[1, 2, 3]] * 2))
        assert acceptance.num_accepted.tolist() == [min(num_rates, 2), min(num_rates, 1)]

    def test_without_drafts(self):
        tokens = torch.tensor([[4], [5]])
        acceptance = accept_synthetic(DraftTree.empty(2), torch.ones(2), torch.zeros(2, 2), tokens)
        assert rows_of(acceptance) == [[4], [5]]

    def test_chains_need_no_match(self, generator):
        draft = DraftTree.chain(torch.randint(9, (50, 4), generator=generator))
        node_tokens = torch.randint(9, (50, 5), generator=generator)
        accepted = accept_synthetic(draft, torch.ones(4), torch.zeros(50, 4), node_tokens)
        assert accepted.num_accepted.tolist() == [4] * 50
        assert follow(draft, node_tokens).num_accepted.max() < 4


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan])
@pytest.mark.parametrize("kind", [StandardRule, BlockRule])
def test_drafts_that_run_into_nothing_are_judged_exactly(kind, bad):
    """The first token is drawn, and then the processors leave the draft nothing that it could draw."""
    target, drafted = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    rows, anchors = list(range(4000)), [4] * 4000
    sampler = DraftSampler(ProcessorStack(LogitsProcessorList()), None, RowUniforms(3, torch.device("cpu")), 4)
    chain = SteeredChain(sampler, rows, [5] * len(rows))
    for scores in (drafted.log(), torch.full((4,), bad)):
        chain.choose(scores.expand(len(rows), 4))
    judged = kind(sampler.uniforms).judge(
        chain.draft([2] * len(rows)), target.log().expand(len(rows), 3, 4), rows, anchors
    )
    assert chi_square_pvalue(judged.tokens[:, 0].bincount(minlength=4), target) > 1e-3
    goes_on = judged.num_accepted > 0
    assert goes_on.sum() > 1000
    assert chi_square_pvalue(judged.tokens[goes_on, 1].bincount(minlength=4), target) > 1e-3
