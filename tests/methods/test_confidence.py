"""DSpark's confidence head: official runs, cuts by threshold and by price, and the distribution whatever is cut."""

import pytest
import torch

from hf_specdec import SpecConfigError, SpeculativeConfig, record
from hf_specdec.control import LatencyModel
from hf_specdec.control.acceptance import RatingFactor
from hf_specdec.control.chain_size import ChainSize
from hf_specdec.drafts import DraftTree
from hf_specdec.protocol import DraftStep, Session
from tests.helpers.by_hand import GREEDY, feed, random_rows, rows_of
from tests.helpers.distribution import P_VALUE, SETTINGS, exact_distribution, sampled_counts
from tests.helpers.statistics import chi_square_pvalue
from tests.methods.test_dflash import (
    NETWORKS,
    Recomputed,
    published,
    random_network,
    session,
    small_draft,
    speculator_for,
)


CONFIDENT = ("confident", "confident_alone", "confident_rnn")


@pytest.mark.parametrize("percent", [0, 40, 60])
def test_official_runs(percent):
    target, folder, expected = published("dspark_confidence_b5")
    run, prompt = f"generate_t{percent:02}", expected["input_ids"]
    text, lengths = expected[f"{run}.output_ids"], expected[f"{run}.proposal_lengths"].tolist()
    with record(trace=True) as made:
        output = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{**GREEDY, "max_new_tokens": text.shape[1] - prompt.shape[1] + 10},
            speculative={"model": folder, "draft_confidence_threshold": expected[f"{run}.threshold"].item()},
        )
    assert torch.equal(output[:, : text.shape[1]], text)
    traces = rows_of(made.calls[0])[: len(lengths)]
    assert [len(trace.draft_tokens) for trace in traces] == lengths
    assert [trace.num_accepted for trace in traces] == expected[f"{run}.accepted"].tolist()


class TestAgainstRecomputation:
    @pytest.mark.parametrize("threshold", [0.0, 0.4, 0.6, 1.0])
    @pytest.mark.parametrize("name", CONFIDENT)
    def test_rows(self, name, threshold):
        """Ragged rows, each cut by itself."""
        network = random_network(**NETWORKS[name])
        texts, states = random_rows(network, (9, 6, 12, 8), seed=2)
        call = Session(4, 1000, torch.device("cpu"))
        generator = speculator_for(network, draft_confidence_threshold=threshold).candidate_generator(call)
        feed(generator, texts, states, (5, 1, 4, 6))
        limits = [6, 5, 2, 6]
        anchors = torch.stack([text[-1] for text in texts])
        draft = generator.propose(DraftStep(list(range(4)), anchors, list(map(len, texts)), limits))
        counts = []
        for row, limit in enumerate(limits):
            confidences = Recomputed(network, texts[row], states[row]).confidences(6)[:limit]
            count = next((k for k, value in enumerate(confidences) if value < threshold), limit)
            survival = torch.tensor(confidences).cumprod(0)[:count]
            found = draft.path_log_probs[row].exp()
            torch.testing.assert_close(found[:count], survival, atol=1e-5, rtol=1e-4)
            assert not found[count:].any()
            counts.append(count)
        assert draft.counts() == counts
        assert draft.size == max(counts)

    def test_logits_of_a_cut_chain(self):
        draft = DraftTree.chain(torch.arange(8).view(2, 4), [4, 2], torch.rand(2, 4, 5))
        draft.path_log_probs = torch.tensor([[-0.1, -0.2, -0.3, -0.4], [-1.0, -2.0, -torch.inf, -torch.inf]])
        assert draft.shortened([4, 3]) is draft
        cut = draft.shortened([1, 3])
        assert (cut.size, cut.counts()) == (2, [1, 2])
        assert torch.equal(cut.probs, draft.probs[:, :2])
        assert cut.path_log_probs.tolist()[0] == [pytest.approx(-0.1), -torch.inf]
        none = draft.shortened([0, 0])
        assert (none.size, none.counts(), none.probs) == (0, [0, 0], None)


class TestSampling:
    """Cuts of drawn drafts, of which some are empty, leave the distribution as it is."""

    def speculator(self, **settings):
        network = small_draft(predicts_next=True, markov_rank=3, has_confidence=True, confidence_with_markov=True)
        with torch.no_grad():
            network.confidence_head.proj.weight.normal_(0.0, 1.5)
        return speculator_for(network, **settings)

    def check(self, speculator):
        counts, stats = sampled_counts(SETTINGS["top_k"], speculator)
        assert chi_square_pvalue(counts, exact_distribution(SETTINGS["top_k"])) > P_VALUE
        return stats

    @pytest.mark.parametrize("rule", ["standard", "block"])
    @pytest.mark.parametrize("method", ["greedy", "probabilistic"])
    def test_by_threshold(self, method, rule):
        settings = {"draft_sample_method": method, "rejection_sample_method": rule}
        whole = self.check(self.speculator(**settings))
        cut = self.check(self.speculator(**settings, draft_confidence_threshold=0.5))
        assert cut.num_accepted_tokens > 100
        assert cut.num_draft_tokens < 0.8 * whole.num_draft_tokens

    @pytest.mark.parametrize("rule", ["standard", "block"])
    def test_by_price(self, rule, monkeypatch):
        monkeypatch.setattr(ChainSize, "_plan", lambda chains, *given: setattr(chains, "price", 0.3))
        widths = []
        width_of = ChainSize._width
        monkeypatch.setattr(
            ChainSize, "_width", lambda chains, found: widths.append(width_of(chains, found)) or widths[-1]
        )
        monkeypatch.setattr(
            "hf_specdec.control.controller.SpeculationController.limits",
            lambda controller, rows, *more: [controller.most] * len(rows),
        )
        self.check(
            self.speculator(
                draft_sample_method="probabilistic", rejection_sample_method=rule, num_speculative_tokens="auto"
            )
        )
        assert any(width < 4 for width in widths)


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
    @pytest.mark.parametrize("of_a_node", [0.0, 2e-5, 2e-4, 1e-3])
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


class TestSettings:
    def test_a_draft_without_a_head(self):
        with pytest.raises(
            SpecConfigError, match=r"`draft_confidence_threshold`=0.5 needs a DSpark draft .* has none"
        ):
            speculator_for(random_network(), draft_confidence_threshold=0.5).candidate_generator(session())

    def test_a_tree(self):
        with pytest.raises(SpecConfigError, match="ends chains. Leave one out"):
            SpeculativeConfig("dflash", "folder", num_draft_nodes=4, draft_confidence_threshold=0.5)
