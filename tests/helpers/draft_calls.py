"""Calls of draft networks of random weights, made up cycle by cycle, with graphs and without."""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from hf_specdec import SpeculativeConfig
from hf_specdec.candidate_generators.medusa.generator import MedusaCandidateGenerator, MedusaResources, RankCounts
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.candidate_generators.mlp_speculator.generator import MLPSpeculatorCandidateGenerator
from hf_specdec.candidate_generators.mlp_speculator.network import MLPSpeculator, MLPSpeculatorConfig
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from hf_specdec.speculator import Speculator
from hf_specdec.target import graphs
from tests.helpers import block_networks, draft_layers
from tests.helpers.by_hand import padded, speculator_for


CPU = torch.device("cpu")
TREE = {"draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 9}
SIZE = 40  # tokens of the vocabulary
LM_HEAD = torch.nn.Linear(32, SIZE, bias=False).eval().requires_grad_(False)


@torch.no_grad()
def random_heads(**settings) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(32, SIZE, 4, **settings)
    for weight in heads.parameters():
        weight.normal_()
    if heads.token_map is not None:
        heads.token_map.mul_(2).add_(1)
    return heads.requires_grad_(False)


def random_stages(**settings) -> MLPSpeculator:
    torch.manual_seed(0)
    sizes = {"emb_dim": 32, "vocab_size": SIZE, "n_predict": 4, "top_k_tokens_per_head": (4, 3, 2, 2)}
    return MLPSpeculator(MLPSpeculatorConfig(**sizes, **settings)).requires_grad_(False)


def medusa_speculator(heads: MedusaHeads, lm_head: torch.nn.Module = LM_HEAD, **settings) -> Speculator:
    resources = MedusaResources(heads, SimpleNamespace(head=lm_head), RankCounts(heads.accuracies, heads.num_heads))
    return Speculator(SpeculativeConfig("medusa", "loaded", **settings), MedusaCandidateGenerator, resources)


def mlp_speculator(network: MLPSpeculator, target_size: int = SIZE, **settings) -> Speculator:
    resources = network if target_size == network.target_size else copy.copy(network)
    resources.target_size = target_size
    config = SpeculativeConfig("mlp_speculator", "loaded", **settings)
    return Speculator(config, MLPSpeculatorCandidateGenerator, resources)


PARALLEL = {"vocab_size": SIZE, "hidden_size": 32, "mask": 39}
MIXED = {"sliding_window": 4, "full_layers": (0,)}

# By method: what makes its networks, their settings, and what drafts with one.
KINDS = {
    "dflash": (block_networks.random_network, block_networks.NETWORKS, speculator_for),
    "eagle": (draft_layers.random_network, draft_layers.NETWORKS, speculator_for),
    "peagle": (draft_layers.parallel_head, {"": PARALLEL, "mixed": PARALLEL | MIXED}, speculator_for),
    "mtp": (draft_layers.random_mtp, {"": {}}, speculator_for),
    "medusa": (
        random_heads,
        {
            "own_lm_heads": {},
            "targets_lm_head": {"own_lm_heads": False},
            "token_map": {"lm_head_size": 14, "has_token_map": True},
        },
        medusa_speculator,
    ),
    "mlp_speculator": (
        random_stages,
        {"tied": {"tie_weights": True, "inner_dim": 24}, "untied": {"scale_input": True}},
        mlp_speculator,
    ),
}


@cache
def network_of(kind: str) -> torch.nn.Module:
    method, _, name = kind.partition("/")
    make, settings, _ = KINDS[method]
    return make(**settings[name]).eval()


def speculator_of(kind: str, **settings) -> Speculator:
    return KINDS[kind.partition("/")[0]][-1](network_of(kind), **settings)


# Networks, and what is drafted with them.
CASES = {
    "eagle chain": ("eagle/eagle1", {"num_speculative_tokens": 4}),
    "eagle tree": ("eagle/eagle1", TREE),
    "eagle3 chain": ("eagle/eagle3", {"num_speculative_tokens": 3}),
    "eagle3 tree": ("eagle/eagle3", TREE),
    "eagle3 static tree": ("eagle/eagle3", {"speculative_token_tree": draft_layers.STATIC}),
    "eagle3 improbable tree": ("eagle/eagle3", {**TREE, "draft_confidence_threshold": 0.2}),
    "eagle3 improbable chain": ("eagle/eagle3", {"num_speculative_tokens": 4, "draft_confidence_threshold": 0.2}),
    "peagle": ("peagle", {"num_speculative_tokens": 4}),
    "peagle windows": ("peagle/mixed", {"num_speculative_tokens": 4}),
    "window": ("eagle/window", TREE),
    "windows of some layers": ("eagle/mixed", TREE),
    "window static tree": ("eagle/window", {"speculative_token_tree": draft_layers.STATIC}),
    "mtp layers": ("mtp", {"mtp_mode": "chain"}),
    "mtp two layers": ("mtp", {"mtp_mode": "chain", "num_speculative_tokens": 2}),
    "mtp improbable layers": ("mtp", {"mtp_mode": "chain", "draft_confidence_threshold": 0.1}),
    "mtp one layer": ("mtp", {"mtp_mode": "reuse", "num_speculative_tokens": 4}),
    "mtp tree": ("mtp", {"mtp_mode": "reuse", **TREE}),
    "dflash": ("dflash/full", {}),
    "dflash windows": ("dflash/window_and_full", {}),
    "dflash causal tree": ("dflash/causal", {"num_draft_nodes": 9}),
    "dflash denoising": ("dflash/reduced_vocabulary", {"dflash_num_denoising_steps": 3}),
    "dflash tree": ("dflash/reduced_vocabulary", {"num_draft_nodes": 12, "num_speculative_tokens": 3}),
    "dflash corrections": ("dflash/corrections", {"num_speculative_tokens": 4}),
    "dflash corrections with a state": ("dflash/corrections_rnn", {}),
    "dflash confident": ("dflash/confident", {"draft_confidence_threshold": 0.5}),
    "dflash lattice": ("dflash/lilicorr", {}),
    "dflash lattice tree": ("dflash/lilicorr_convolutions", {"num_draft_nodes": 12}),
    "dflash refinement": ("dflash/xpress", {}),
    "dflash domino": ("dflash/domino", {}),
    "dflash siblings": ("dflash/full", {"num_draft_nodes": 9, "draft_tree_top_k": 3}),
    "dflash selector": ("dflash/selector", {"num_draft_nodes": 0}),
    "dflash selector tree": ("dflash/selector_window_and_scales", {"num_draft_nodes": 12}),
    "medusa": ("medusa/own_lm_heads", {"num_draft_nodes": 12}),
    "medusa chain": ("medusa/targets_lm_head", {"num_speculative_tokens": 3}),
    "medusa measured": ("medusa/token_map", {"medusa_tree": "measured", "num_draft_nodes": 6}),
    "medusa probable paths": ("medusa/token_map", {"draft_confidence_threshold": 0.05, "num_draft_nodes": 9}),
    "medusa improbable chain": (
        "medusa/own_lm_heads",
        {"draft_confidence_threshold": 0.2, "num_speculative_tokens": 3},
    ),
    "mlp speculator chain": ("mlp_speculator/tied", {"num_speculative_tokens": 3}),
    "mlp speculator tree": ("mlp_speculator/untied", {"num_draft_nodes": 7}),
    "mlp speculator candidates": ("mlp_speculator/tied", {"mlp_speculator_num_candidates": 4}),
    "mlp speculator static tree": ("mlp_speculator/untied", {"speculative_token_tree": draft_layers.STATIC}),
}


class Call:
    """A candidate generator in the middle of a call; what is committed, accepted and left is given from outside."""

    def __init__(self, speculator: Speculator, texts: list[torch.Tensor], states: list[dict]):
        self.session = Session(len(texts), 60, CPU)
        self.generator = speculator.candidate_generator(self.session)
        lengths = [len(text) for text in texts]
        starts = [max(lengths) - length for length in lengths]
        columns = self._columns(states, left=True)
        self.generator.prefill(Prompt(padded(texts, left=True), starts, columns))

    def _columns(self, states: list[dict], left: bool) -> dict:
        return {key: padded([s[key] for s in states], left) for key in self.generator.target_hidden_states}

    def observe(self, texts: list[torch.Tensor], states: list[dict]) -> None:
        rows, lists = list(range(len(texts))), [text.tolist() for text in texts]
        columns = self._columns(states, left=False)
        self.generator.observe(Commit(rows, padded(texts, left=False), lists, [0] * len(rows), columns))

    def propose(self, anchors: list[int], lengths: list[int], limits: list[int]) -> list[tuple]:
        draft = self.generator.propose(DraftStep(list(range(len(limits))), torch.tensor(anchors), lengths, limits))
        assert draft.size <= self.generator.num_draft_nodes
        shapes = draft.token_lists(), draft.parent_lists(), draft.max_depths()
        ratings = [None] * len(limits) if draft.path_log_probs is None else draft.path_log_probs.exp().tolist()
        return list(zip(*shapes, [rating and rating[:count] for rating, count in zip(ratings, draft.counts())]))

    @property
    def graphs(self):
        return self.session.draft_graphs[0]


def run(kind: str, shape: dict, num_rows: int, seed: int, num_cycles: int = 5) -> int:
    """One made-up call with and without graphs; how many graphs have run."""
    random = torch.Generator().manual_seed(seed)
    # Of MTP layers, the tiny target's; of all others, the same.
    size = network_of(kind).needs.vocab_size if kind == "mtp" else SIZE
    keys = speculator_of(kind, **shape).candidate_generator(Session(num_rows, 60, CPU)).target_hidden_states

    def below(most: int) -> int:
        return int(torch.randint(0, most, (1,), generator=random))

    def text_of(length: int) -> tuple[torch.Tensor, dict]:
        states = {key: torch.randn((length, 32), generator=random) for key in keys}
        return torch.randint(1, size - 1, (length,), generator=random), states

    parts = [text_of(2 + below(7)) for _ in range(num_rows)]
    # The last state of a prompt comes again with the first committed token.
    news = [(torch.randint(1, size - 1, (1,), generator=random), last_of(states)) for _, states in parts]
    lengths = [len(text) for text, _ in parts]
    calls = [
        Call(speculator_of(kind, **shape, enforce_eager=enforce_eager), *map(list, zip(*parts)))
        for enforce_eager in (False, True)
    ]
    deepest = calls[0].generator.num_speculative_tokens
    for _ in range(num_cycles):
        lengths = [length + len(text) for length, (text, _) in zip(lengths, news)]
        for call in calls:
            call.observe(*map(list, zip(*news)))
        if len(lengths) > 1 and below(3) == 0:
            keep = [len(lengths) - 1, *range(1, len(lengths) - 1)]
            for call in calls:
                call.generator.keep_rows(keep)
            lengths, news = [lengths[row] for row in keep], [news[row] for row in keep]
        if below(6) == 0:
            # Nothing was drafted before the next tokens.
            news = [text_of(1) for _ in lengths]
            continue
        limits = [below(deepest + 1) for _ in lengths] if below(3) == 0 else [deepest] * len(lengths)
        limits[0] = max(limits[0], 1)
        ours, eager = (call.propose([int(text[-1]) for text, _ in news], lengths, limits) for call in calls)
        assert [draft[:3] for draft in ours] == [draft[:3] for draft in eager]
        # Sums of logarithms may be rounded otherwise in other sizes.
        assert all(one == pytest.approx(other, abs=1e-4) for (*_, one), (*_, other) in zip(ours, eager))
        news = []
        for tokens, parents, *_ in ours:
            # Of a chain a part is accepted; of a tree anything may be.
            is_chain = parents == list(range(-1, len(parents) - 1))
            accepted = below((len(tokens) if is_chain else deepest) + 1)
            text, states = text_of(accepted + 1)
            if is_chain:
                text[:accepted] = torch.tensor(tokens[:accepted], dtype=torch.long)
            news.append((text, states))
    for call in calls:
        call.generator.close()
    # The next call may have the graphs.
    assert graphs._models[network_of(kind)].owner() is None
    assert calls[1].graphs.num_replays == 0
    return calls[0].graphs.num_replays


def last_of(states: dict) -> dict:
    return {key: value[-1:] for key, value in states.items()}
