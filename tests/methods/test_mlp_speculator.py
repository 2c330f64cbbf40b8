"""The MLP speculator: the published drafts, trees against all paths one by one, and what its settings mean."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import load_speculator
from hf_specdec.candidate_generators.mlp_speculator.generator import MLPSpeculatorCandidateGenerator, grown_tree
from hf_specdec.candidate_generators.mlp_speculator.network import MLPSpeculator, MLPSpeculatorConfig
from hf_specdec.drafting.draw import DepthLimits, Draw
from hf_specdec.drafting.growth import DynamicTree
from hf_specdec.drafting.state import Entries
from hf_specdec.drafts import TokenTree
from hf_specdec.protocol import Commit, DraftStep, Session
from tests.helpers.by_hand import paths_of
from tests.helpers.draft_calls import mlp_speculator
from tests.helpers.levels import in_full
from tests.helpers.published import published


CPU = torch.device("cpu")


def generator_for(target, folder, batch_size, **shape) -> MLPSpeculatorCandidateGenerator:
    speculator = load_speculator(target, "mlp_speculator", model=str(folder), **shape)
    return speculator.candidate_generator(Session(batch_size, 1000, CPU))


def drafted(generator, hidden, tokens, limits=None):
    """The draft after the states `(B, H)` and the tokens `(B,)` chosen from them."""
    rows = list(range(len(tokens)))
    generator.observe(Commit(rows, tokens[:, None], [[t] for t in tokens.tolist()], [0] * len(rows), {"last": hidden}))
    limits = limits or [generator.num_speculative_tokens] * len(rows)
    return generator.propose(DraftStep(rows, tokens, [20] * len(rows), limits))


@pytest.mark.parametrize("name", ["tied_scaled", *in_full("untied_plain", "untied_scaled", "tied_plain")])
def test_published_drafts(name):
    target, folder, expected = published(f"mlp_speculator/{name}")
    hidden, tokens = expected["state"], expected["ind"][:, 0]
    chain = drafted(generator_for(target, folder, 3, num_speculative_tokens=3), hidden, tokens)
    assert chain.is_chain
    assert torch.equal(chain.tokens, expected["greedy_chain"])
    # The merged candidates, the anchor not counted: as many nodes, the same paths.
    draft = drafted(generator_for(target, folder, 3, mlp_speculator_num_candidates=5), hidden, tokens)
    for row, paths in enumerate(paths_of(draft)):
        sequences = [expected["flat_tokens"][nodes].tolist()[1:] for nodes in expected["unflat_map"][row]]
        assert sequences == expected["suffixes"][row].tolist()
        assert len(set(paths)) == len(paths)
        assert set(paths) == {tuple(sequence[:depth]) for sequence in sequences for depth in (1, 2, 3)}
    assert sum(1 + len(paths) for paths in paths_of(draft)) == len(expected["flat_tokens"])
    # Growing everything: leaves by their score are the published sequences in their order.
    generator = generator_for(target, folder, 3, mlp_speculator_num_candidates=24)
    draft = drafted(generator, hidden, tokens)
    for row, paths in enumerate(paths_of(draft)):
        leaves = [path for path in paths if len(path) == 3]
        order = draft.path_log_probs[row, -24:].argsort(descending=True)
        assert [list(leaves[leaf]) for leaf in order] == expected["suffixes_all"][row].tolist()


class TestTrees:
    def random_speculator(self, seed, vocab_size=7, depth=3):
        torch.manual_seed(seed)
        sizes = MLPSpeculatorConfig(5, 6, vocab_size, depth, (2,) * depth)
        return MLPSpeculator(sizes).requires_grad_(False)

    def grown(self, network, hidden, tokens, plan):
        """The draft that a plan makes of states and tokens."""
        generator = mlp_speculator(network, network.config.vocab_size).candidate_generator(Session(2, 99, CPU))
        generator.plan, limits = plan, [plan.max_depth] * 2
        new = Entries(tokens[:, None], {"last": hidden[:, None]}, [1, 1])
        nodes = generator.draft(generator.state, new, DepthLimits(torch.tensor(limits)), Draw())
        return nodes.draft(plan, limits, CPU)

    def every_path(self, speculator, hidden, token, widths):
        """All paths of the widths with their log-probabilities, one by one."""
        found, front = {}, [((), speculator.start(hidden), token, 0.0)]
        for index, width in enumerate(widths):
            grown = []
            for path, state, last, score in front:
                new_state, logits = speculator.stage(index)(state, last)
                for value, child in zip(*logits.log_softmax(-1).topk(width)):
                    grown.append(((*path, int(child)), new_state, child, score + float(value)))
            found |= {path: score for path, _, _, score in grown}
            front = grown
        return found

    @given(
        seed=st.integers(0, 10_000),
        widths=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        count=st.none() | st.integers(1, 12),
        num_nodes=st.integers(1, 20),
    )
    def test_best_of_every_path(self, seed, widths, count, num_nodes):
        """Candidates are the best sequences; grown trees hold the best of what was read."""
        speculator = self.random_speculator(seed)
        hidden, tokens = torch.randn(2, 5), torch.tensor([3, 4])
        widths = tuple(widths)
        plan = grown_tree(widths, num_nodes)
        if count is not None:
            expanded = tuple(math.prod(widths[:depth]) for depth in range(1, len(widths)))
            plan = DynamicTree(widths, expanded, 8, count, cuts_chosen=True)
        draft = self.grown(speculator, hidden, tokens, plan)
        for row, paths in enumerate(paths_of(draft)):
            scores = self.every_path(speculator, hidden[row], tokens[row], widths)
            if count is None:
                front, read = [()], []
                for depth, reads in enumerate((*plan.expanded, None), start=1):
                    level = [path for path in scores if len(path) == depth and path[:-1] in front]
                    front = sorted(level, key=scores.get, reverse=True)[:reads]
                    read += level
                wanted = set(sorted(read, key=scores.get, reverse=True)[:num_nodes])
                assert draft.size == len(plan)
            else:
                leaves = sorted((p for p in scores if len(p) == len(widths)), key=scores.get, reverse=True)
                wanted = {path[:depth] for path in leaves[:count] for depth in range(1, len(path) + 1)}
            assert set(paths) == wanted
            assert len(paths) == len(wanted) <= len(plan)
            assert draft.parent_lists()[row] == [paths.index(path[:-1]) if path[:-1] else -1 for path in paths]

    def test_equal_probabilities_keep_parents(self):
        """A stage that is sure gives its child the probability of the parent."""
        speculator = self.random_speculator(0)
        for head in speculator.head:
            head.weight.mul_(1e4)
        plan = grown_tree((2, 2, 2), 3)
        draft = self.grown(speculator, torch.randn(2, 5), torch.tensor([3, 4]), plan)
        assert draft.parents.tolist() == [[-1, 0, 1]] * 2


def test_shapes_by_default():
    """A short chain on a CPU, elsewhere a tree, but never unasked where trees are of no use."""
    network = MLPSpeculator(MLPSpeculatorConfig(5, 6, 7, 3, (4, 3, 2)))

    def default(device, **changes):
        session = Session(1, 100, torch.device(device), **changes)
        return mlp_speculator(network, 7).candidate_generator(session).plan, session.notes

    assert default("cpu") == (TokenTree.chain(3), [])
    assert default("cuda") == (grown_tree((4, 3, 2), 32), [])
    assert default("cuda", supports_trees=False) == (TokenTree.chain(3), [])
