"""Draft networks in graphs, on tapes in the place of CUDA graphs: every draft equals the one without graphs."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import SpeculativeConfig, demo, forget_speculators, load_speculator, record
from hf_specdec.candidate_generators.eagle.network import Eagle3Network
from hf_specdec.candidate_generators.medusa import generator as medusa
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.candidate_generators.mlp_speculator.network import MLPStage
from hf_specdec.decoding import graphs
from hf_specdec.decoding.attention import TreeMask
from hf_specdec.decoding.graphs import CallGraphs, Variant, graphs_for
from hf_specdec.drafting import slots
from hf_specdec.drafting.graphs import RowGraphs, RowInputs
from hf_specdec.drafting.slots import DraftInputs, Entries
from hf_specdec.protocol import Session
from tests.helpers.draft_calls import (
    CASES,
    CPU,
    SIZE,
    Call,
    last_of,
    medusa_speculator,
    network_of,
    run,
    speculator_of,
)
from tests.helpers.levels import full, in_full, split
from tests.helpers.tape import TapeBackend, spoil, spoil_inputs, tape_everything


@pytest.fixture
def backends(monkeypatch) -> list[TapeBackend]:
    spoil_inputs(monkeypatch)
    return tape_everything(monkeypatch)


# Trees, chains, layers, blocks, corrections of blocks, heads and stages.
QUICK = ("eagle chain", "eagle3 tree", "mtp layers", "dflash windows", "dflash corrections", "medusa measured")
QUICK += ("mlp speculator tree",)


def named(*names: str) -> list:
    return [pytest.param(*CASES[name], id=name) for name in sorted(names)]


class TestDraftsEqualThoseWithoutGraphs:
    @pytest.mark.parametrize(("kind", "shape"), split(named(*CASES), short=named(*QUICK)))
    def test_calls(self, kind, shape, backends):
        """Rows of different length that leave one after the other; later calls find the graphs of earlier ones."""
        counts = [run(kind, shape, num_rows, seed) for num_rows, seed in ((1, 0), (3, 0), (3, 1))]
        assert sum(counts) > 0
        assert str(graphs_for(network_of(kind), {})) == "on"

    @full
    @pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("m") or case.startswith("mtp")])
    def test_calls_through_the_tree_kernel(self, case, backends, monkeypatch):
        """The first of two calls reads content of masks, as the kernel does, eagerly and in graphs."""
        has_kernel, masks = itertools.cycle((True, False)), Counter()
        monkeypatch.setattr(slots, "takes_trees", lambda *like: next(has_kernel))
        attend = TreeMask.attend
        monkeypatch.setattr(TreeMask, "attend", lambda *args: masks.update(["tree"]) or attend(*args))
        kind, shape = CASES[case]
        for num_rows, seed in ((1, 0), (3, 0), (3, 1)):
            run(kind, shape, num_rows, seed)
        assert masks["tree"] > 10

    @full
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
    "draft_model": (demo.drafter_path("draft_model"), {"num_speculative_tokens": 4}),
    "mlp_speculator": (demo.drafter_path("mlp_speculator"), {"num_speculative_tokens": 3}),
    "mlp_speculator tree": (demo.drafter_path("mlp_speculator"), {"num_draft_nodes": 10}),
}


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


class TestCalls:
    @pytest.mark.parametrize(
        ("name", "num_rows"), split([(name, 3) for name in HEADS], short=[("eagle", 3), ("dflash tree", 1)])
    )
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

    @pytest.mark.parametrize("name", ["eagle3", *in_full("mtp", "dflash", "mlp_speculator")])
    def test_drawn_drafts(self, name, target, backends):
        """Random numbers and distributions are equal, with and without graphs."""
        found = []
        for enforce_eager in (False, True):
            torch.manual_seed(5)
            speculative = settings_of(name, draft_sample_method="probabilistic", enforce_eager=enforce_eager)
            found.append(traced(target, inputs_of(2), speculative, do_sample=True))
        (text, drafts, stats), (eager_text, eager_drafts, _) = found
        assert text == eager_text
        assert drafts == eager_drafts
        # Tokens of MLP speculators are drawn between graphs.
        assert 0 < stats.num_draft_graph_replays <= len(drafts) * (1 if name != "mlp_speculator" else 3)

    @full
    def test_drawn_drafts_of_many_settings(self, target, backends):
        """Processors are built into graphs, of which only those of the last few settings are kept."""
        for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 0.5):
            found = []
            for enforce_eager in (False, True):
                torch.manual_seed(5)
                speculative = settings_of("eagle3", draft_sample_method="probabilistic", enforce_eager=enforce_eager)
                arguments = {"do_sample": True, "temperature": temperature, "top_k": 20, "min_p": 0.01}
                found.append(traced(target, inputs_of(1), speculative, **arguments))
            assert found[0][:2] == found[1][:2]
            assert found[0][2].num_draft_graph_captures > 0
        network = load_speculator(target, settings_of("eagle3")).resources
        variants = {part for key in graphs._models[network].forwards for part in key if isinstance(part, Variant)}
        assert len(variants) == 4

    @pytest.mark.parametrize("name", ["mtp", *in_full("eagle3", "dflash tree", "medusa", "mlp_speculator")])
    def test_second_call_captures_nothing(self, name, target, backends):
        """Graphs belong to the network, and the next call runs them from its first cycle on."""
        counts = []
        for _ in range(3):
            _, drafts, stats = traced(target, inputs_of(1), settings_of(name))
            counts.append(stats.num_draft_graph_captures)
        assert counts[0] > 0
        assert counts[2] == 0
        assert stats.num_draft_graph_replays >= len(drafts) - 2

    @full
    def test_slots_grow(self, target, backends):
        """More rows and longer texts have larger slots, and graphs of their own."""
        for num_rows, new_tokens in ((1, 8), (2, 8), (1, 40)):
            inputs = inputs_of(num_rows)
            plain = generate(target, inputs, new_tokens).sequences.tolist()
            text, _, stats = traced(target, inputs, settings_of("eagle3"), new_tokens=new_tokens)
            assert text == plain
            assert stats.draft_graphs == "on"

    @full
    @pytest.mark.parametrize("name", ["eagle3", "medusa", "mlp_speculator"])
    def test_forgotten_with_the_speculator(self, name, target, backends):
        generate(target, inputs_of(1), speculative=settings_of(name))
        speculator = load_speculator(target, settings_of(name))
        network = speculator.generator_class.network(speculator.resources)
        assert graphs._models[network].forwards
        forget_speculators(target)
        assert network not in graphs._models

    @full
    def test_networks_are_not_kept_alive(self, target, backends):
        assert generate(target, inputs_of(1), speculative=settings_of("eagle3")).speculative.draft_graphs == "on"
        network = weakref.ref(load_speculator(target, settings_of("eagle3")).resources)
        with pytest.MonkeyPatch.context() as patch:
            # What forgets the network forgets its graphs; they alone must not hold it either.
            patch.setattr("hf_specdec.loader.forget_graphs", lambda *args: None)
            forget_speculators(target)
        gc.collect()
        assert network() is None


class TestNetworksWithoutACache:
    @full
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
                call.observe([torch.ones(1, dtype=torch.long)], [last_of(states)])
                drafts.append(call.propose([1], [length], [4]))
            call.generator.close()
            counts.append(call.graphs.num_captures)
        assert sum(counts) == captures
        assert drafts[0] == drafts[3]
        assert (drafts[3] != drafts[7]) == (name == "targets_lm_head")

    @full
    def test_processors(self, target, backends):
        """Processors look at each token of a chain, so that each has a graph."""
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
            inputs.fill({"states": torch.ones((4, 5)), "tokens": torch.arange(1, 5)}, num_rows)
            assert inputs.tensors["states"].dtype == torch.bfloat16
            assert inputs.tensors["states"].sum(1).tolist() == [5] * num_rows + [0] * (4 - num_rows)
            assert inputs.tensors["tokens"].tolist() == [*range(1, num_rows + 1), *[0] * (4 - num_rows)]

    def test_only_the_rows_in_use(self, backends):
        network, session = network_of("mlp_speculator/tied"), Session(3, 60, CPU)
        row_graphs = RowGraphs(network)
        row_graphs.begin(SpeculativeConfig("mlp_speculator", "loaded"), session)

        def values():
            return {"one": torch.arange(3.0), "two": torch.ones(3, 2)}

        for _ in range(3):
            double, (total, number) = row_graphs.run((), 3, lambda one, two: (2 * one, (two.sum(1), 7)), values)
            assert double.tolist() == [0, 2, 4]
            assert (total.tolist(), number) == ([2, 2, 2], 7)
        row_graphs.close()
        assert session.draft_graphs[0].num_replays == 3
        # For three rows, and fewer.
        assert session.draft_graphs[0].num_captures == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.smoke] * (name in ("eagle3", "dflash tree"))) for name in HEADS]
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_cuda_graphs(name, num_rows):
    """Runs the calls with CUDA graphs in the place of tapes."""
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
            *in_full(("medusa", MedusaHeads, "top_tokens"), ("mlp_speculator", MLPStage, "__call__")),
        ],
    )
    def test_what_cannot_be_captured(self, name, kind, part, target, backends, monkeypatch):
        """Drafts are made all the same, and a capture is not tried again."""
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
        inputs.fill(Entries(torch.ones((2, 2)), {1: torch.ones((2, 2, 5))}, [1, 2]), [3, 4], slots, 2)
        assert inputs.tokens.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
        assert inputs.states[1].sum() == 20
        assert inputs.counts.tolist() == [1, 2, 1, 1]
        assert inputs.limits.tolist() == [3, 4, 3, 3]
        assert inputs.ends.tolist() == [4] * 4
        assert inputs.leads[:, 0].tolist() == [0] * 4
        assert inputs.first_slots[:, 0].tolist() == [0] * 4
