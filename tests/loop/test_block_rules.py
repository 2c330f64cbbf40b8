"""Rules that judge whole drafts: `block`, typical and synthetic acceptance, by their references and definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers.generation.logits_process import LogitsProcessorList

from hf_specdec.drafting.chain import SteeredChain
from hf_specdec.drafts import DraftTree, TokenTree
from hf_specdec.kernels.acceptance import follow, reject_chain
from hf_specdec.logits.acceptance import accept_synthetic, accept_typical, block_thresholds, reject_block
from hf_specdec.logits.processors import ProcessorStack
from hf_specdec.logits.randomness import RowUniforms
from hf_specdec.logits.rules import BlockRule, StandardRule, conditional_rates, rates_of_length
from hf_specdec.logits.sampling import DraftSampler
from tests.helpers.levels import in_full, split
from tests.helpers.paths import FIXTURES
from tests.helpers.rule_cases import random_chains, rows_of, typical_by_definition, typical_limit
from tests.helpers.statistics import chi_square_pvalue


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
    assert rows_of(reject_block(*one)) == rows_of(reject_chain(*one))
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
    sampler = DraftSampler(ProcessorStack(LogitsProcessorList()), None, RowUniforms(3, torch.device("cpu")), 4)
    chain = SteeredChain(sampler, rows, [5] * len(rows))
    for scores in (drafted.log(), torch.full((4,), bad)):
        chain.choose(scores.expand(len(rows), 4))
    scores = target.log().expand(len(rows), 3, 4)
    judged = kind(sampler.uniforms).judge(chain.draft([2] * len(rows)), scores, rows, anchors)
    assert chi_square_pvalue(judged.tokens[:, 0].bincount(minlength=4), target) > 1e-3
    goes_on = judged.num_accepted > 0
    assert goes_on.sum() > 1000
    assert chi_square_pvalue(judged.tokens[goes_on, 1].bincount(minlength=4), target) > 1e-3


LOSSY = FIXTURES / "verification" / "lossy" / "expected.safetensors"


# Typical acceptance


TYPICAL = {"typ_a": (0.7, 0.09, 0.3), "typ_b": (1.0, 0.09, 0.3), "typ_c": (1.0, 0.3, 0.55), "typ_d": (1.5, 0.01, 0.1)}


@pytest.mark.parametrize("name", split(TYPICAL, ["typ_a"]))
def test_typical_acceptance_chooses_the_official_candidate(name):
    """Paths have distributions of their own, so they become branches below one that accepts all roots."""
    posterior = load_file(FIXTURES / "medusa" / "posterior" / "expected.safetensors")
    temperature, threshold, alpha = TYPICAL[name]
    for case in range(8):
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


@given(
    st.sampled_from(["chains", "one tree", "trees of their own"]),
    st.sampled_from([(0.09, 0.3), (0.3, 0.6), (0.5, 2.0), (0.0, 0.0)]),
    st.data(),
)
def test_typical_acceptance_is_that_of_the_definition(kind, limits, data):
    batch_size, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    counts = [data.draw(st.integers(0, size)) for _ in range(batch_size)]
    tokens = torch.randint(5, (batch_size, size), generator=generator)
    scores = 2 * torch.randn(batch_size, size + 1, 5, generator=generator)
    shapes = [list(range(-1, size - 1))] * batch_size
    if kind != "chains":
        number = 1 if kind == "one tree" else batch_size
        shapes = [[data.draw(st.integers(-1, i - 1)) for i in range(size)] for _ in range(number)]
        shapes *= batch_size // number
    parents = torch.tensor(shapes if kind == "trees of their own" else shapes[0])
    acceptance = accept_typical(DraftTree(tokens, parents, torch.tensor(counts)), scores, *limits)
    for row, committed in enumerate(rows_of(acceptance)):
        given_tokens = tokens[row].tolist()
        path, expected = typical_by_definition(given_tokens, shapes[row], counts[row], scores[row], *limits)
        assert committed == expected
        # Equal siblings with equal subtrees are the same text by another path.
        if len(set(zip(shapes[row], given_tokens))) == size:
            assert acceptance.path[row, 1 : len(path) + 1].tolist() == path


# Synthetic acceptance


def test_synthetic_acceptance_of_the_reference():
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


def test_synthetic_acceptance_follows_first_children_and_needs_no_match(generator):
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
