"""Chains that are cut where their positions cost more than their survival promises, as a confidence head rates it."""

import pytest
import torch

from hf_specdec.control import LatencyModel
from hf_specdec.control.acceptance import RatingFactor
from hf_specdec.control.chain_size import ChainSize
from hf_specdec.drafts import DraftTree
from tests.helpers.levels import in_full


def test_a_chain_that_is_cut():
    draft = DraftTree.chain(torch.arange(8).view(2, 4), [4, 2], torch.rand(2, 4, 5))
    draft.path_log_probs = torch.tensor([[-0.1, -0.2, -0.3, -0.4], [-1.0, -2.0, -torch.inf, -torch.inf]])
    assert draft.shortened([4, 3]) is draft
    cut = draft.shortened([1, 3])
    assert (cut.size, cut.counts()) == (2, [1, 2])
    assert torch.equal(cut.probs, draft.probs[:, :2])
    assert cut.path_log_probs.tolist()[0] == [pytest.approx(-0.1), -torch.inf]
    none = draft.shortened([0, 0])
    assert (none.size, none.counts(), none.probs) == (0, [0, 0], None)


def latency_of(of_a_node, drafting=1e-3, rows=1):
    model = LatencyModel()
    for _ in range(5):
        for nodes in (1, 2, 4, 8, 9):
            model.observe_verification(rows, nodes, 1e-3 + of_a_node * (nodes - 1))
        model.observe_draft(rows, 8, drafting)
    return model


def rated(*rows):
    draft = DraftTree.chain(torch.zeros((len(rows), len(rows[0])), dtype=torch.long))
    draft.path_log_probs = torch.tensor(rows).cumprod(1).log()
    return draft


def agreed(numbers):
    return numbers


class TestPrice:
    @pytest.mark.parametrize("of_a_node", [2e-4, *in_full(0.0, 2e-5, 1e-3)])
    def test_cut_chains_give_more_tokens_in_a_second(self, of_a_node):
        """Drafts of two kinds: each has its own width, and the mean value is that of the best rule by survival."""
        latency, generator = latency_of(of_a_node), torch.Generator().manual_seed(0)
        drafts = [rated((0.95,) * 8), rated((0.5,) * 8)]
        chains = ChainSize(latency, RatingFactor())
        picked = torch.randint(2, (400,), generator=generator).tolist()
        widths = {0: [], 1: []}
        for kind in picked:
            draft = chains.cut(drafts[kind], 8, agreed)
            widths[kind].append(draft.size)
            chains.observe(draft, [round(sum(draft.path_log_probs[0].exp().tolist()))])
        last = [widths[kind][-1] for kind in (0, 1)]

        def value(*sizes):
            tokens = [1 + drafts[k].path_log_probs[0, :size].exp().sum().item() for k, size in enumerate(sizes)]
            seconds = [1e-3 + latency.verify_seconds(size + 1, 1) for size in sizes]
            return sum(tokens) / sum(seconds)

        best = max(value(one, other) for one in range(9) for other in range(9))
        assert value(*last) > 0.95 * best
        if of_a_node in (2e-4, 1e-3):
            assert last[0] > last[1]
            assert value(*last) > 1.02 * max(value(size, size) for size in range(9))
        else:
            assert last[0] == 8

    def test_rows_share_the_width(self):
        chains = ChainSize(latency_of(0.0, rows=2), RatingFactor())
        chains.price = 0.3
        chains._num_drafts = 2
        # Means: 0.7, 0.41, 0.275.
        draft = chains.cut(rated((0.9, 0.8, 0.7), (0.5, 0.2, 0.5)), 3, agreed)
        assert draft.counts() == [2, 2]
        chains.observe(draft, [2, 0])
        assert chains.rating.value == pytest.approx((8 + 1) / (8 + 0.7 + 0.41), rel=0.02)

    def test_drafts_that_the_threshold_has_emptied(self):
        chains = ChainSize(latency_of(2e-4), RatingFactor())
        empty = rated((0.9, 0.8)).shortened([0])
        for _ in range(3):
            assert chains.cut(empty, 2, agreed).size == 0
            chains.observe(empty, [0])
        assert chains.price == 0

    def test_nothing_is_read_where_positions_are_free(self, monkeypatch):
        chains = ChainSize(latency_of(0.0), RatingFactor())
        chains._num_drafts = 2
        monkeypatch.setattr(torch.Tensor, "tolist", None)
        draft = rated((0.9, 0.1))
        assert chains.cut(draft, 2, agreed) is draft
