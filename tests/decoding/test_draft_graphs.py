"""Draft networks in graphs, on tapes in the place of CUDA graphs: every draft equals the one without graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import SpeculativeConfig, demo, forget_speculators, load_speculator, record
from hf_specdec.candidate_generators.eagle.network import Eagle3Network
from hf_specdec.candidate_generators.medusa import generator as medusa
from hf_specdec.candidate_generators.medusa.generator import MedusaCandidateGenerator, MedusaResources, RankCounts
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.candidate_generators.mlp_speculator.generator import LoadedSpeculator, MLPSpeculatorCandidateGenerator
from hf_specdec.candidate_generators.mlp_speculator.network import MLPSpeculator, MLPSpeculatorConfig, MLPStage
from hf_specdec.candidate_generators.mtp.generator import MtpCandidateGenerator
from hf_specdec.decoding import graphs
from hf_specdec.decoding.graphs import CallGraphs, graphs_for
from hf_specdec.drafting.graphs import RowGraphs, RowInputs
from hf_specdec.drafting.slots import DraftInputs, DraftSlots, Entries
from hf_specdec.drafts import DraftTree
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from hf_specdec.speculator import Speculator
from tests.candidate_generators import test_dflash as dflash_cases
from tests.candidate_generators import test_eagle as eagle_cases
from tests.candidate_generators import test_mtp as mtp_cases
from tests.candidate_generators.by_hand import padded
from tests.models import prompts, tiny_llama
from tests.tape import TapeBackend, spoil, spoil_inputs, tape_everything
from tests.threads import in_threads


CPU = torch.device("cpu")
TREE = {"draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 9}


@pytest.fixture
def backends(monkeypatch) -> list[TapeBackend]:
    spoil_inputs(monkeypatch)
    return tape_everything(monkeypatch)


SIZE = 40  # tokens of the vocabulary
LM_HEAD = torch.nn.Linear(32, SIZE, bias=False).eval().requires_grad_(False)
HEADS_OF = {
    "own_lm_heads": {},
    "targets_lm_head": {"own_lm_heads": False},
    "token_map": {"lm_head_size": 14, "has_token_map": True},
}
STAGES_OF = {"tied": {"tie_weights": True, "inner_dim": 24}, "untied": {"scale_input": True}}


@torch.no_grad()
def random_heads(variant: str) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(32, SIZE, 4, **HEADS_OF[variant])
    for weight in heads.parameters():
        weight.normal_()
    if heads.token_map is not None:
        heads.token_map.mul_(2).add_(1)
    return heads.requires_grad_(False)


@torch.no_grad()
def random_stages(variant: str) -> MLPSpeculator:
    torch.manual_seed(0)
    sizes = {"emb_dim": 32, "vocab_size": SIZE, "n_predict": 4, "top_k_tokens_per_head": (4, 3, 2, 2)}
    return MLPSpeculator(MLPSpeculatorConfig(**sizes, **STAGES_OF[variant])).requires_grad_(False)


def medusa_speculator(heads: MedusaHeads, lm_head: torch.nn.Module = LM_HEAD, **settings) -> Speculator:
    resources = MedusaResources(heads, SimpleNamespace(head=lm_head), RankCounts(heads.accuracies, heads.num_heads))
    return Speculator(SpeculativeConfig("medusa", "loaded", **settings), MedusaCandidateGenerator, resources)


def mlp_speculator(network: MLPSpeculator, target_size: int = SIZE, **settings) -> Speculator:
    stages = [network.stage(index, target_size) for index in range(network.config.n_predict)]
    resources = LoadedSpeculator(network, stages, unknown_tokens=target_size > SIZE)
    config = SpeculativeConfig("mlp_speculator", "loaded", **settings)
    return Speculator(config, MLPSpeculatorCandidateGenerator, resources)


class Kind(NamedTuple):
    """A method's networks.

    Attributes:
        make (`Callable`): The network of a name.
        speculator (`Callable`): Drafts with one, by further settings.
        sizes (`Callable`): The width of the states that one reads, and the size of its vocabulary.
    """

    make: Callable
    speculator: Callable
    sizes: Callable = lambda network: (network.config.target_hidden_size, SIZE)


KINDS = {
    "dflash": Kind(
        lambda name: dflash_cases.random_network(**dflash_cases.NETWORKS[name]), dflash_cases.speculator_for
    ),
    "eagle": Kind(lambda name: eagle_cases.random_network(**eagle_cases.NETWORKS[name]), eagle_cases.speculator_for),
    "medusa": Kind(random_heads, medusa_speculator, lambda heads: (heads.hidden_size, SIZE)),
    "mlp_speculator": Kind(random_stages, mlp_speculator, lambda network: (network.config.emb_dim, SIZE)),
    "mtp": Kind(
        lambda name: mtp_cases.random_mtp(3).eval(),
        mtp_cases.speculator_for,
        lambda network: (network.needs.hidden_size, network.needs.vocab_size),
    ),
}


@cache
def network_of(kind: str) -> torch.nn.Module:
    method, _, name = kind.partition("/")
    return KINDS[method].make(name).eval()


def speculator_of(kind: str, **settings) -> Speculator:
    return KINDS[kind.partition("/")[0]].speculator(network_of(kind), **settings)


# Networks, and what is drafted with them.
CASES = {
    "eagle chain": ("eagle/eagle1", {"num_speculative_tokens": 4}),
    "eagle tree": ("eagle/eagle1", TREE),
    "eagle3 chain": ("eagle/eagle3", {"num_speculative_tokens": 3}),
    "eagle3 tree": ("eagle/eagle3", TREE),
    "eagle3 static tree": ("eagle/eagle3", {"speculative_token_tree": eagle_cases.STATIC}),
    "eagle3 doubtful tree": ("eagle/eagle3", {**TREE, "draft_min_path_prob": 0.2}),
    "eagle3 doubtful chain": ("eagle/eagle3", {"num_speculative_tokens": 4, "draft_min_path_prob": 0.2}),
    "window": ("eagle/window", TREE),
    "window static tree": ("eagle/window", {"speculative_token_tree": eagle_cases.STATIC}),
    "mtp layers": ("mtp", {"mtp_mode": "chain"}),
    "mtp two layers": ("mtp", {"mtp_mode": "chain", "num_speculative_tokens": 2}),
    "mtp doubtful layers": ("mtp", {"mtp_mode": "chain", "draft_min_path_prob": 0.1}),
    "mtp one layer": ("mtp", {"mtp_mode": "reuse", "num_speculative_tokens": 4}),
    "mtp tree": ("mtp", {"mtp_mode": "reuse", **TREE}),
    "dflash": ("dflash/full", {}),
    "dflash windows": ("dflash/window_and_full", {}),
    "dflash causal tree": ("dflash/causal", {"num_draft_nodes": 9}),
    "dflash denoising": ("dflash/reduced_vocabulary", {"dflash_num_denoising_steps": 3}),
    "dflash tree": ("dflash/reduced_vocabulary", {"num_draft_nodes": 12, "num_speculative_tokens": 3}),
    "dflash corrections": ("dflash/corrections", {"num_speculative_tokens": 4}),
    "medusa": ("medusa/own_lm_heads", {"num_draft_nodes": 12}),
    "medusa chain": ("medusa/targets_lm_head", {"num_speculative_tokens": 3}),
    "medusa measured": ("medusa/token_map", {"medusa_tree": "measured", "num_draft_nodes": 6}),
    "mlp speculator chain": ("mlp_speculator/tied", {"num_speculative_tokens": 3}),
    "mlp speculator tree": ("mlp_speculator/untied", {"num_draft_nodes": 7}),
    "mlp speculator candidates": ("mlp_speculator/tied", {"mlp_speculator_num_candidates": 4}),
    "mlp speculator static tree": ("mlp_speculator/untied", {"speculative_token_tree": eagle_cases.STATIC}),
}
every_case = pytest.mark.parametrize(("kind", "shape"), CASES.values(), ids=CASES)


class Call:
    """A candidate generator in the middle of a call; what is committed, accepted and left is given from outside."""

    def __init__(self, speculator: Speculator, texts: list[torch.Tensor], states: list[dict]):
        self.session = Session(len(texts), 60, CPU)
        self.generator = speculator.candidate_generator(self.session)
        lengths = [len(text) for text in texts]
        starts = [max(lengths) - length for length in lengths]
        keys = self.generator.target_hidden_states
        self.generator.prefill(
            Prompt(
                padded(texts, left=True),
                starts,
                {key: padded([state[key] for state in states], left=True) for key in keys},
            )
        )

    def observe(self, texts: list[torch.Tensor], states: list[dict]) -> None:
        keys = self.generator.target_hidden_states
        columns = {key: padded([state[key] for state in states], left=False) for key in keys}
        lists = [text.tolist() for text in texts]
        tokens = padded(texts, left=False)
        self.generator.observe(Commit(list(range(len(texts))), tokens, lists, [0] * len(texts), columns))

    def propose(self, anchors: list[int], lengths: list[int], limits: list[int]) -> list[tuple]:
        draft = self.generator.propose(DraftStep(list(range(len(limits))), torch.tensor(anchors), lengths, limits))
        assert draft.size <= self.generator.num_draft_nodes
        shapes = draft.token_lists(), draft.parent_lists(), draft.max_depths()
        # Sums of logarithms may be rounded otherwise in other sizes.
        ratings = (
            [None] * len(limits)
            if draft.path_log_probs is None
            else draft.path_log_probs.exp().round(decimals=3).tolist()
        )
        return list(zip(*shapes, [rating and rating[:count] for rating, count in zip(ratings, draft.counts())]))

    @property
    def graphs(self):
        return self.session.draft_graphs[0]


def run(kind: str, shape: dict, num_rows: int, seed: int, num_cycles: int = 5) -> int:
    """The same made-up call with and without graphs; how many graphs have run."""
    random = torch.Generator().manual_seed(seed)
    width, size = KINDS[kind.partition("/")[0]].sizes(network_of(kind))
    keys = speculator_of(kind, **shape).candidate_generator(Session(num_rows, 60, CPU)).target_hidden_states

    def below(most: int) -> int:
        return int(torch.randint(0, most, (1,), generator=random))

    def text_of(length: int) -> tuple[torch.Tensor, dict]:
        states = {key: torch.randn((length, width), generator=random) for key in keys}
        return torch.randint(1, size - 1, (length,), generator=random), states

    parts = [text_of(2 + below(7)) for _ in range(num_rows)]
    # The last state of a prompt comes again with the first committed token.
    news = [(torch.randint(1, size - 1, (1,), generator=random), _last(states)) for _, states in parts]
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
        assert ours == eager
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
    assert graphs._models[network_of(kind)]._owner() is None
    assert calls[1].graphs.num_replays == 0
    return calls[0].graphs.num_replays


def _last(states: dict) -> dict:
    return {key: value[-1:] for key, value in states.items()}


class TestDraftsEqualThoseWithoutGraphs:
    @every_case
    def test_calls(self, kind, shape, backends):
        """Rows of different length that leave one after the other; later calls find the graphs of earlier ones."""
        counts = [run(kind, shape, num_rows, seed) for num_rows, seed in ((1, 0), (3, 0), (3, 1))]
        assert sum(counts) > 0
        assert str(graphs_for(network_of(kind), {})) == "on"

    @settings(max_examples=12)
    @given(case=st.sampled_from(sorted(CASES)), num_rows=st.integers(1, 5), seed=st.integers(0, 10**6))
    def test_any_call(self, case, num_rows, seed):
        with pytest.MonkeyPatch.context() as patch:
            spoil_inputs(patch)
            tape_everything(patch)
            run(*CASES[case], num_rows, seed)
            graphs.forget_graphs()


# The demo's target and the heads that were trained for it, with what is drafted.
HEADS = {
    "eagle": (demo.drafter_path("eagle"), {"draft_tree_depth": 4, "draft_tree_top_k": 3, "num_draft_nodes": 9}),
    "eagle3": (demo.drafter_path("eagle3"), {"num_speculative_tokens": 4}),
    "mtp": (demo.drafter_path("mtp"), {}),
    "dflash": (demo.drafter_path("dflash"), {}),
    "dflash tree": (demo.drafter_path("dflash"), {"num_draft_nodes": 10}),
    "medusa": (demo.drafter_path("medusa"), {"num_draft_nodes": 16}),
    "mlp_speculator": (demo.drafter_path("mlp_speculator"), {"num_speculative_tokens": 3}),
    "mlp_speculator tree": (demo.drafter_path("mlp_speculator"), {"num_draft_nodes": 10}),
}
every_head = pytest.mark.parametrize("name", HEADS)


@pytest.fixture(scope="module")
def target():
    return demo.load_target(torch.float32)


@pytest.fixture(autouse=True)
def no_graphs_left():
    yield
    graphs.forget_graphs()
    forget_speculators()


def settings_of(name: str, **more) -> dict:
    path, shape = HEADS[name]
    return {"method": name.split()[0], "model": path, **shape, **more}


def inputs_of(num_rows: int) -> dict:
    tokenizer = demo.load_tokenizer()
    tokenizer.padding_side = "left"
    texts = [prompt.text for prompt in demo.prompts()[:num_rows]]
    return tokenizer(texts, return_tensors="pt", padding=True)


def generate(target, inputs, new_tokens=16, **arguments):
    arguments = {"do_sample": False, "return_dict_in_generate": True, **arguments}
    return target.generate(**inputs, max_new_tokens=new_tokens, **arguments)


def traced(target, inputs, speculative, **arguments):
    """The text, every draft of the call, and its statistics."""
    with record(trace=True) as made:
        output = generate(target, inputs, speculative=speculative, **arguments)
    return output.sequences.tolist(), made.calls[0].cycles, output.speculative


def _noted(draft: DraftTree, laws: list[torch.Tensor]) -> DraftTree:
    """The draft; the distributions of its tokens are kept for later."""
    laws += [row[:count].clone() for row, count in zip(draft.probs, draft.num_nodes.tolist())]
    return draft


class TestCalls:
    @every_head
    @pytest.mark.parametrize("num_rows", [1, 3])
    def test_text_and_drafts(self, name, num_rows, target, backends):
        inputs = inputs_of(num_rows)
        plain = generate(target, inputs).sequences.tolist()
        text, drafts, stats = traced(target, inputs, settings_of(name))
        eager_text, eager_drafts, eager_stats = traced(target, inputs, settings_of(name, enforce_eager=True))
        assert text == eager_text == plain
        assert drafts == eager_drafts
        assert (stats.draft_graphs, eager_stats.draft_graphs) == ("on", "off: enforce_eager=True")
        assert stats.num_draft_graph_replays > 0
        assert stats.num_draft_graph_captures > 0
        assert eager_stats.num_draft_graph_replays == 0

    @pytest.mark.parametrize("name", ["eagle3", "mtp", "dflash", "mlp_speculator"])
    def test_drawn_drafts(self, name, target, backends):
        """The same random numbers and distributions, with and without graphs."""
        found = []
        for enforce_eager in (False, True):
            torch.manual_seed(5)
            speculative = settings_of(name, draft_sample_method="probabilistic", enforce_eager=enforce_eager)
            found.append(traced(target, inputs_of(2), speculative, do_sample=True))
        (text, drafts, stats), (eager_text, eager_drafts, _) = found
        assert text == eager_text
        assert drafts == eager_drafts
        assert stats.num_draft_graph_replays > 0

    @pytest.mark.parametrize("shape", [{}, {"num_speculative_tokens": 2}, {"draft_min_path_prob": 0.1}], ids=str)
    def test_drawn_chains_of_layers(self, shape, backends, monkeypatch):
        """Each token is drawn from the next layer, which reads the window in a graph of its own."""
        network, found, laws, propose = network_of("mtp"), [], [], MtpCandidateGenerator.propose
        monkeypatch.setattr(MtpCandidateGenerator, "propose", lambda *args: _noted(propose(*args), laws))
        for enforce_eager in (False, True):
            torch.manual_seed(5)
            speculator = speculator_of(
                "mtp", mtp_mode="chain", draft_sample_method="probabilistic", enforce_eager=enforce_eager, **shape
            )
            with record(trace=True) as made:
                output = generate(tiny_llama(), prompts(3), 24, do_sample=True, assistant=speculator)
            found.append((output.sequences.tolist(), made.calls[0].cycles))
            stats = output.speculative
            if not enforce_eager:
                assert stats.draft_graphs == "on"
                # Most tokens, not only the first of each draft.
                assert stats.num_draft_graph_replays > 1.2 * len(made.calls[0].cycles)
                keys = [key for key in graphs._models[network].forwards if "layer" in key]
                layers = {key[key.index("layer") + 1] for key in keys}
                assert layers == set(range(shape.get("num_speculative_tokens", 3)))
        assert found[0] == found[1]
        for law, eager_law in zip(laws[: len(laws) // 2], laws[len(laws) // 2 :], strict=True):
            torch.testing.assert_close(law, eager_law, atol=1e-5, rtol=1e-4)

    @every_head
    def test_second_call_captures_nothing(self, name, target, backends):
        """Graphs belong to the network, and the next call runs them from its first cycle on."""
        counts = []
        for _ in range(3):
            _, drafts, stats = traced(target, inputs_of(1), settings_of(name))
            counts.append(stats.num_draft_graph_captures)
        assert counts[0] > 0
        assert counts[2] == 0
        assert stats.num_draft_graph_replays >= len(drafts) - 2

    def test_slots_grow(self, target, backends):
        """More rows and longer texts have larger slots, and graphs of their own."""
        for num_rows, new_tokens in ((1, 8), (2, 8), (1, 40)):
            inputs = inputs_of(num_rows)
            plain = generate(target, inputs, new_tokens).sequences.tolist()
            text, _, stats = traced(target, inputs, settings_of("eagle3"), new_tokens=new_tokens)
            assert text == plain
            assert stats.draft_graphs == "on"

    @pytest.mark.parametrize("name", ["eagle3", "medusa", "mlp_speculator"])
    def test_forgotten_with_the_speculator(self, name, target, backends):
        generate(target, inputs_of(1), speculative=settings_of(name))
        speculator = load_speculator(target, settings_of(name))
        network = speculator.generator_class.network(speculator.resources)
        assert graphs._models[network].forwards
        forget_speculators(target)
        assert network not in graphs._models

    def test_networks_are_not_kept_alive(self, target, backends):
        assert generate(target, inputs_of(1), speculative=settings_of("eagle3")).speculative.draft_graphs == "on"
        network = weakref.ref(load_speculator(target, settings_of("eagle3")).resources)
        with pytest.MonkeyPatch.context() as patch:
            # What forgets the network forgets its graphs; they alone must not hold it either.
            patch.setattr("hf_specdec.loader.forget_graphs", lambda *args: None)
            forget_speculators(target)
        gc.collect()
        assert network() is None

    @pytest.mark.parametrize("name", ["eagle3", "mlp_speculator tree"])
    def test_threads(self, name, target, backends):
        """One call has the graphs, others draft without them."""
        inputs = inputs_of(2)
        plain = generate(target, inputs).sequences.tolist()
        load_speculator(target, settings_of(name))

        def run_calls() -> list:
            return [generate(target, inputs, speculative=settings_of(name)) for _ in range(2)]

        for output in sum(in_threads(*[run_calls] * 3), []):
            assert output.sequences.tolist() == plain
            assert output.speculative.draft_graphs in ("on", "off: another call is using the graphs of the model")


class TestNetworksWithoutACache:
    def test_trees_that_change(self, target, backends, monkeypatch):
        """The candidates are one graph for all trees of a depth."""
        monkeypatch.setattr(medusa, "_FIRST_REVIEW", 2)
        trees, default_tree = [], medusa.default_tree
        monkeypatch.setattr(medusa, "default_tree", lambda *args: trees.append(default_tree(*args)) or trees[-1])
        settings = settings_of("medusa", medusa_tree="measured")
        plain = generate(target, inputs_of(1), 120).sequences.tolist()
        captures = CallGraphs.all_captures
        text, drafts, stats = traced(target, inputs_of(1), settings, new_tokens=120)
        assert text == plain
        assert len({tree.paths for tree in trees}) > 3
        depths = {tree.max_depth for tree in trees}
        assert stats.num_draft_graph_captures <= len(depths)
        assert stats.num_draft_graph_replays > len(drafts) - 2 * len(depths)
        # Who times cycles leaves those with captures out.
        assert CallGraphs.all_captures - captures == stats.num_draft_graph_captures + stats.num_graph_captures > 0

    def test_trees_of_several_widths(self, backends):
        heads, states = network_of("medusa/own_lm_heads"), {"last": torch.randn(5, 32)}
        for width in (2, 5, 2):
            paths = [(rank,) for rank in range(width)]
            call = Call(medusa_speculator(heads, speculative_token_tree=paths), [torch.arange(1, 6)], [states])
            call.observe([torch.ones(1, dtype=torch.long)], [_last(states)])
            expected = heads(states["last"][-1])[0].topk(width).indices.tolist()
            for _ in range(3):
                assert call.propose([1], [6], [1]) == [(expected, [-1] * width, 1, None)]
            assert call.graphs.num_replays > 1
            call.generator.close()

    @pytest.mark.parametrize(("name", "captures"), [("targets_lm_head", 2), ("own_lm_heads", 1)])
    def test_another_lm_head(self, name, captures, backends):
        """Graphs that go through the target's lm_head hold on to its weights."""
        heads, states = network_of(f"medusa/{name}"), {"last": torch.randn(5, 32)}
        drafts, counts = [], []
        for seed in (0, 1):
            torch.manual_seed(seed)
            speculator = medusa_speculator(heads, torch.nn.Linear(32, SIZE, bias=False).eval().requires_grad_(False))
            call = Call(speculator, [torch.arange(1, 6)], [states])
            for length in range(6, 10):
                call.observe([torch.ones(1, dtype=torch.long)], [_last(states)])
                drafts.append(call.propose([1], [length], [4]))
            call.generator.close()
            counts.append(call.graphs.num_captures)
        assert sum(counts) == captures
        assert drafts[0] == drafts[3]
        assert (drafts[3] != drafts[7]) == (name == "targets_lm_head")

    def test_targets_of_several_vocabularies(self, backends):
        """A network may draft for targets that know fewer tokens than it, or more."""
        network, states = network_of("mlp_speculator/tied"), {"last": torch.randn(5, 32)}
        for size in (SIZE, 5, SIZE + 3, SIZE):
            drafts = []
            for enforce_eager in (False, True):
                speculator = mlp_speculator(network, size, num_speculative_tokens=4, enforce_eager=enforce_eager)
                call = Call(speculator, [torch.arange(1, 6)], [states])
                for length in range(6, 9):
                    call.observe([torch.ones(1, dtype=torch.long)], [_last(states)])
                    drafts.append(call.propose([size - 1], [length], [4]))
                call.generator.close()
                assert (call.graphs.num_replays > 0) == (not enforce_eager)
            assert all(draft == drafts[0] for draft in drafts)
            assert max(drafts[0][0][0]) < size

    def test_processors(self, target, backends):
        """They look at each token of a chain, so that each has a graph."""
        settings, asked = settings_of("mlp_speculator"), {"repetition_penalty": 1.3, "new_tokens": 24}
        plain = generate(target, inputs_of(2), **asked).sequences.tolist()
        text, drafts, stats = traced(target, inputs_of(2), settings, **asked)
        eager_text, eager_drafts, _ = traced(target, inputs_of(2), {**settings, "enforce_eager": True}, **asked)
        assert text == eager_text == plain
        assert drafts == eager_drafts
        assert stats.num_draft_graph_replays > len(drafts)

    def test_padding(self):
        """Rows of padding are zeros."""
        values = {"states": torch.ones((2, 5), dtype=torch.bfloat16), "tokens": torch.tensor([3, 4])}
        inputs = RowInputs(4, values, CPU)
        for num_rows in (3, 4, 1):
            for buffer in inputs.buffers:
                spoil(buffer)
            inputs.fill({"states": torch.ones((num_rows, 5)), "tokens": torch.arange(1, num_rows + 1)})
            assert inputs.tensors["states"].dtype == torch.bfloat16
            assert inputs.tensors["states"].sum(1).tolist() == [5] * num_rows + [0] * (4 - num_rows)
            assert inputs.tensors["tokens"].tolist() == [*range(1, num_rows + 1), *[0] * (4 - num_rows)]

    def test_only_the_rows_in_use(self, backends):
        network, session = network_of("mlp_speculator/tied"), Session(3, 60, CPU)
        row_graphs = RowGraphs(network)
        row_graphs.begin(SpeculativeConfig("mlp_speculator", "loaded"), session)
        for _ in range(3):
            values = {"one": torch.arange(3.0), "two": torch.ones(3, 2)}
            double, (total, number) = row_graphs.run((), lambda one, two: (2 * one, (two.sum(1), 7)), values)
            assert double.tolist() == [0, 2, 4]
            assert (total.tolist(), number) == ([2, 2, 2], 7)
        row_graphs.close()
        assert session.draft_graphs[0].num_replays == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.smoke] * (name in ("eagle3", "dflash tree"))) for name in HEADS]
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_cuda_graphs(name, num_rows):
    """The same calls with CUDA graphs in the place of tapes."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    target, inputs = demo.load_target(torch.float32).to("cuda"), inputs_of(num_rows).to("cuda")
    plain = generate(target, inputs).sequences.tolist()
    for _ in range(2):
        text, _, stats = traced(target, inputs, settings_of(name))
        assert text == plain
        assert stats.draft_graphs == "on"
        assert stats.num_draft_graph_replays > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["eagle3", "mtp", "dflash", "mlp_speculator"])
def test_cuda_graphs_of_drawn_drafts(name):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    target, inputs = demo.load_target(torch.float32).to("cuda"), inputs_of(3).to("cuda")
    for _ in range(2):
        speculative = settings_of(name, draft_sample_method="probabilistic")
        _, _, stats = traced(target, inputs, speculative, do_sample=True)
        assert stats.draft_graphs == "on"
        assert stats.num_draft_graph_replays > 0


class TestEager:
    def test_cpu(self, target):
        stats = generate(target, inputs_of(1), speculative=settings_of("eagle3")).speculative
        assert (stats.draft_graphs, stats.num_draft_graph_replays) == ("", 0)

    def test_hooks_on_what_is_shared(self, target, backends):
        """Modules of the target that the draft goes through are looked at as well."""
        network = load_speculator(target, settings_of("eagle")).resources
        assert str(graphs_for(network, {}, network.shared_modules)) == "on"
        handle = target.get_output_embeddings().register_forward_hook(lambda module, args, output: None)
        hooked = graphs_for(network, {}, network.shared_modules)
        assert str(hooked) == "off: its modules have hooks, or forwards of their own"
        handle.remove()

    @pytest.mark.parametrize(
        ("name", "kind", "part"),
        [
            ("eagle3", Eagle3Network, "fuse"),
            ("medusa", MedusaHeads, "top_tokens"),
            ("mlp_speculator", MLPStage, "__call__"),
        ],
    )
    def test_what_cannot_be_captured(self, name, kind, part, target, backends, monkeypatch):
        """It drafts all the same, and is not tried again."""
        whole = getattr(kind, part)

        def waiting(self, given, *args):
            states = next(iter(given.values())) if isinstance(given, dict) else given
            assert states.sum().item() < float("inf")
            return whole(self, given, *args)

        plain = generate(target, inputs_of(1)).sequences.tolist()
        monkeypatch.setattr(kind, part, waiting)
        text, _, stats = traced(target, inputs_of(1), settings_of(name))
        assert text == plain
        assert stats.draft_graphs.startswith("off: capturing failed: CannotCaptureError")
        assert stats.num_draft_graph_replays == 0

    def test_more_entries_than_a_cycle_leaves(self, backends):
        """As after plain cycles, whose tokens come all at once: they are read without a graph."""
        call = a_call("eagle/eagle3", {"num_speculative_tokens": 2})
        new = Entries(torch.zeros((2, 4), dtype=torch.long), {}, [4, 4])
        slots: DraftSlots = call.generator.entries
        assert slots.replay((), new, 3, 0, [1, 1], lambda inputs, columns: None) is None


def a_call(kind: str, shape: dict) -> Call:
    """A call for two rows of equal length."""
    network = network_of(kind)
    states = {key: torch.ones((5, network.config.target_hidden_size)) for key in network.target_hidden_states}
    return Call(speculator_of(kind, **shape), [torch.arange(1, 6), torch.arange(2, 7)], [states, states])


class TestDraftInputs:
    def test_padding(self):
        """Entries of padding are zeros; rows of padding stand where the first one does."""
        call = a_call("eagle/eagle3", {})
        slots = call.generator.entries
        inputs = DraftInputs(4, 3, {1: torch.zeros((2, 1, 5))}, CPU)
        for buffer in inputs.buffers:
            spoil(buffer)
        inputs.fill(Entries(torch.ones((2, 2)), {1: torch.ones((2, 2, 5))}, [1, 2]), [3, 4], slots)
        assert inputs.tokens.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
        assert inputs.states[1].sum() == 20
        assert inputs.counts.tolist() == [1, 2, 1, 1]
        assert inputs.limits.tolist() == [3, 4, 3, 3]
        assert inputs.ends.tolist() == [4] * 4
        assert inputs.leads[:, 0].tolist() == [0] * 4
        assert inputs.first_slots[:, 0].tolist() == [0] * 4
