"""DFlash, EAGLE, P-EAGLE and MTP draft what reading the whole text again for every token says, in ragged rows."""

import pytest
import torch

from hf_specdec.drafting import slots
from hf_specdec.drafts import TokenTree
from hf_specdec.protocol import Commit, DraftStep, Prompt
from tests.helpers import block_networks, draft_layers
from tests.helpers.block_networks import NETWORKS
from tests.helpers.by_hand import drafts_of, feed, generator_for, random_rows
from tests.helpers.draft_layers import STATIC
from tests.helpers.levels import full, in_full
from tests.helpers.recomputed import RecomputedBlock, RecomputedHead


LENGTHS, PROMPTS = (9, 6, 12), (5, 1, 4)
TREE = {"draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 9}
SHORT = ("window_and_full", "biases", "corrections_gated", "corrections_rnn", "domino", "lilicorr", "xpress")
SHORT += ("selector_window_and_scales",)


def block(name, **settings):
    return block_networks.random_network(**NETWORKS[name], **settings)


def layer(name):
    """A network that drafts token by token."""
    if name == "mtp":
        return draft_layers.random_mtp(1)
    if name.startswith("peagle"):
        window = {} if name == "peagle" else {"sliding_window": 4}
        window |= {"full_layers": (0,)} if name.endswith("mixed") else {}
        return draft_layers.parallel_head(40, 32, mask=39, **window)
    return draft_layers.random_network(**draft_layers.NETWORKS[name])


def check(network, settings, expected, lengths=LENGTHS, prompts=PROMPTS, parts=1, limits=None, make=RecomputedBlock):
    """Compares each row's draft with what `expected` makes of the row and its limit; the generator."""
    generator = generator_for(network, len(lengths), **settings)
    texts, states = random_rows(network, lengths, seed=parts)
    feed(generator, texts, states, prompts, parts)
    limits = limits or [generator.num_speculative_tokens] * len(lengths)
    for row, paths in enumerate(drafts_of(generator, texts, limits)):
        assert paths == expected(make(network, texts[row], states[row]), limits[row])
    assert drafts_of(generator, texts, [0] * len(texts)) == [[]] * len(texts)
    return generator


class TestBlocks:
    def chains(self, network, settings, count, **arguments):
        settings = {"num_draft_nodes": 0, **settings}
        return check(network, settings, lambda row, _: row.chain(network.config.block_size, count), **arguments)

    @pytest.mark.parametrize(
        ("name", "parts", "chunk_size", "lengths"),
        [
            *((name, 2, 2, LENGTHS) for name in SHORT),
            *in_full(*((name, 2, 2, LENGTHS) for name in NETWORKS if name not in SHORT)),
            *in_full(*((name, 1, 1024, (8, 8, 8)) for name in ("full", "causal", "selector", "xpress"))),
            *in_full(*((name, 3, 3, LENGTHS) for name in ("full", "window_and_full", "selector", "xpress"))),
        ],
    )
    def test_chain(self, name, parts, chunk_size, lengths, monkeypatch):
        monkeypatch.setattr(slots, "_CHUNK_SIZE", chunk_size)
        prompts = (4, 4, 4) if len(set(lengths)) == 1 else PROMPTS
        self.chains(block(name), {}, 6, lengths=lengths, prompts=prompts, parts=parts)

    @pytest.mark.parametrize("name", ["full", *in_full("next_token", "domino_next_token", "lilicorr")])
    def test_sizes_of_blocks(self, name):
        network = block(name)
        anchor = 7 - network.config.num_drafts(7)
        for settings, size, count in (
            ({"num_speculative_tokens": 2}, 2 + anchor, 2),
            ({"dflash_block_size": 4}, 4, 4 - anchor),
            ({"dflash_block_size": 5, "num_speculative_tokens": 2}, 5, 2),
            ({"dflash_block_size": 1 + anchor}, 1 + anchor, 1),
        ):
            settings = {"num_draft_nodes": 0, **settings}
            generator = check(network, settings, lambda row, _, size=size, count=count: row.chain(size, count))
            assert (generator.block_size, generator.num_speculative_tokens) == (size, count)

    @full
    def test_a_part_of_what_a_refinement_drafts(self):
        """Its passes go over the whole block all the same."""
        generator = self.chains(block("xpress"), {"num_speculative_tokens": 3}, 3)
        assert generator.block_size == 7

    @pytest.mark.parametrize(
        ("name", "num_steps"),
        [
            ("selector", 2),
            *in_full(("full", 1), ("full", 3), ("full", 9), ("selector", 9), ("reduced_vocabulary", 4)),
            *in_full(("window_and_full", 3)),
        ],
    )
    def test_denoising(self, name, num_steps):
        network = block(name, num_denoising_steps=9)
        for shape, size, count in (
            ({}, 7, 6),
            ({"num_speculative_tokens": 4}, 5, 4),
            ({"dflash_block_size": 6, "num_speculative_tokens": 2}, 6, 2),
        ):
            settings = {"num_draft_nodes": 0, "dflash_num_denoising_steps": num_steps, **shape}
            check(network, settings, lambda row, _, size=size, count=count: row.denoised(size, num_steps, count))

    @pytest.mark.parametrize(
        ("name", "budget", "depth"),
        [
            ("reduced_vocabulary", 12, 4),
            ("selector_window_and_scales", 12, 4),
            *in_full(
                *((name, 12, 4) for name in ("full", "window_and_full", "next_token", "selector", "lilicorr")),
                *((name, 1, 4) for name in ("full", "lilicorr")),
                *((name, 5, 1) for name in ("full", "next_token", "selector")),
            ),
        ],
    )
    def test_tree(self, name, budget, depth):
        network = block(name)
        size = depth + (0 if network.config.predicts_next else 1)
        settings = {"num_draft_nodes": budget, "num_speculative_tokens": depth}
        check(network, settings, lambda row, _: row.tree(size, budget, depth))

    @full
    def test_limits_of_the_rows(self):
        rows = {"lengths": (6, 7, 8, 9), "prompts": [4] * 4, "limits": [0, 1, 2, 6]}
        for num_steps in (1, 3):
            settings = {"num_draft_nodes": 0, "dflash_num_denoising_steps": num_steps}
            check(block("full"), settings, lambda row, limit, n=num_steps: row.denoised(7, n, limit), **rows)

    @full
    def test_mask_token(self, monkeypatch):
        monkeypatch.setattr(RecomputedBlock, "masks", lambda row, size: torch.full((size - 1,), 3))
        self.chains(block("full"), {"dflash_mask_token_id": 3}, 6)

    @pytest.mark.parametrize(
        ("name", "threshold"),
        [
            ("confident_rnn", 0.4),
            *in_full(("confident", 0.6), ("confident_alone", 0.5), ("confident_rnn", 0.0), ("confident", 1.0)),
        ],
    )
    def test_confidence_of_each_row(self, name, threshold):
        """Rows are cut by themselves, and the drafts say how likely they are kept."""
        network, limits = block(name), [6, 5, 2, 6]
        texts, states = random_rows(network, (9, 6, 12, 8), seed=2)
        generator = generator_for(network, 4, draft_confidence_threshold=threshold)
        feed(generator, texts, states, (5, 1, 4, 6))
        anchors = torch.stack([text[-1] for text in texts])
        draft = generator.propose(DraftStep(list(range(4)), anchors, list(map(len, texts)), limits))
        counts = []
        for row, limit in enumerate(limits):
            confidences = RecomputedBlock(network, texts[row], states[row]).confidences(6)[:limit]
            count = next((k for k, value in enumerate(confidences) if value < threshold), limit)
            found = draft.path_log_probs[row].exp()
            torch.testing.assert_close(
                found[:count], torch.tensor(confidences).cumprod(0)[:count], atol=1e-5, rtol=1e-4
            )
            assert not found[count:].any()
            counts.append(count)
        assert draft.counts() == counts
        assert draft.size == max(counts)


class TestTokenByToken:
    def check(self, name, settings, expected, **arguments):
        return check(layer(name), settings, expected, make=RecomputedHead, **arguments)

    @pytest.mark.parametrize("name", ["eagle1", "mixed", "mtp", *in_full("eagle3", "window")])
    # Parts in which the text after the prompt comes, and entries that are read at once.
    @pytest.mark.parametrize(("parts", "chunk_size"), [(2, 2), *in_full((1, 1024), (3, 3))])
    def test_dynamic_tree(self, name, parts, chunk_size, monkeypatch):
        monkeypatch.setattr(slots, "_CHUNK_SIZE", chunk_size)
        mode = {"mtp_mode": "reuse"} if name == "mtp" else {}
        self.check(name, {**TREE, **mode}, lambda row, limit: row.dynamic(limit, **TREE), parts=parts)
        limits = [0, 1, 2]
        self.check(name, {**TREE, **mode}, lambda row, limit: row.dynamic(limit, **TREE), parts=parts, limits=limits)

    @pytest.mark.parametrize(
        ("name", "paths"),
        [
            ("eagle3", STATIC),
            *in_full(*((name, STATIC) for name in ("eagle1", "window", "mixed", "mtp"))),
            *in_full(*((name, TokenTree.chain(4).paths) for name in ("eagle1", "window", "mixed", "mtp"))),
        ],
    )
    def test_static_tree(self, name, paths):
        settings = {"speculative_token_tree": paths, **({"mtp_mode": "reuse"} if name == "mtp" else {})}
        paths = TokenTree.from_paths(paths).paths
        self.check(name, settings, lambda row, _: row.static(paths), parts=2)

    @pytest.mark.parametrize("name", ["peagle_mixed", *in_full("peagle", "peagle_window")])
    @pytest.mark.parametrize("parts", [2, *in_full(1, 3)])
    def test_parallel_drafts(self, name, parts):
        for limits in ([4, 4, 4], [1, 3, 0]):
            settings = {"num_speculative_tokens": 4}
            self.check(name, settings, lambda row, limit: row.parallel(limit), parts=parts, limits=limits)

    def test_unlikely_nodes_end_a_draft(self):
        depths = []
        for threshold in (0.0, 0.05, 0.2, 0.99):
            settings = {**TREE, "num_draft_nodes": 39, "draft_confidence_threshold": threshold}

            def expected(row, limit, settings=settings):
                paths = row.dynamic(limit, **settings)
                depths.append(len(paths[-1]))
                return paths

            self.check("eagle1", settings, expected, lengths=(9, 6, 12, 8), prompts=(5, 2, 4, 6))
        assert depths[:4] == [4] * 4
        assert depths[12:].count(1) >= 3
        assert 4 < sum(depths[8:12]) <= sum(depths[4:8])


@pytest.mark.parametrize(
    ("name", "num_tokens", "num_states"),
    [("eagle3", 8, 3), *in_full(("dflash", 8, 3), ("eagle3", 3, 3), ("dflash", 0, 8), ("eagle3", 8, 1))],
)
def test_prompts_of_which_a_part_is_unknown(name, num_tokens, num_states):
    """The remaining tokens are read at their own positions, and drafted from."""
    network = block("full") if name == "dflash" else layer(name)
    generator = generator_for(network, 1, **({"num_draft_nodes": 0} if name == "dflash" else TREE))
    (text,), (states,) = random_rows(network, [9], seed=6)
    known = {key: value[None, 8 - num_states :] for key, value in states.items()}
    generator.prefill(Prompt(text[None, 8 - num_tokens : 8], [0], known))
    last = {key: value[:, -1:] for key, value in known.items()}
    generator.observe(Commit([0], text[None, -1:], [text[-1:].tolist()], [0], last))
    count = min(num_states, num_tokens + 1)
    assert generator.state.slots.leads == [max(num_tokens - count, 0)]
    # Only distances of positions count.
    text, known = text[8 - count :], {key: value[8 - count :] for key, value in states.items()}
    if name == "dflash":
        expected = RecomputedBlock(network, text, known).chain(7, 6)
    else:
        expected = RecomputedHead(network, text, known).dynamic(4, **TREE)
    assert drafts_of(generator, [torch.nn.functional.pad(text, (9 - len(text), 0))]) == [expected]
