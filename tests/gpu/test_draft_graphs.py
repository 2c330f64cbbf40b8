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

from hf_specdec import demo, forget_speculators, load_speculator, record
from hf_specdec.candidate_generators.eagle.network import EagleNetwork
from hf_specdec.candidate_generators.medusa import generator as medusa
from hf_specdec.candidate_generators.medusa.network import MedusaHeads
from hf_specdec.candidate_generators.mlp_speculator.network import MLPStage
from hf_specdec.drafting import slots
from hf_specdec.drafting.runner import Runner
from hf_specdec.drafting.state import Entries, NetworkState
from hf_specdec.kernels import tree_attention
from hf_specdec.protocol import Session
from hf_specdec.target import graphs
from hf_specdec.target.graphs import CallGraphs, GraphInputs, Variant, graphs_for
from hf_specdec.target.masks import TreeMask
from tests.helpers import layer_references
from tests.helpers.draft_calls import (
    CASES,
    CPU,
    SIZE,
    Call,
    last_of,
    medusa_speculator,
    mlp_speculator,
    network_of,
    run,
)
from tests.helpers.gemma4 import tiny_gemma4
from tests.helpers.levels import full, in_full, split
from tests.helpers.methods import demo_inputs, settings_of
from tests.helpers.models import prompts
from tests.helpers.other_device import DEVICE, move, other_device
from tests.helpers.tape import spoil_all, spoil_inputs, tape_everything


# Trees, chains, layers, blocks, corrections of blocks, heads and stages.
QUICK = ["eagle chain", "eagle3 tree", "mtp layers", "dflash windows", "dflash corrections", "medusa measured"]
QUICK += ["mlp speculator tree"]
ROUNDS = ((1, 0), (3, 0), (3, 1))  # rows, seed


class TestDraftsEqualThoseWithoutGraphs:
    @pytest.mark.parametrize("case", split(sorted(CASES), short=QUICK))
    def test_calls(self, case, tapes):
        """Rows of different length that leave one after the other; later calls find the graphs of earlier ones."""
        assert sum(run(*CASES[case], num_rows, seed) for num_rows, seed in ROUNDS) > 0
        assert str(graphs_for(network_of(CASES[case][0]), {})) == "on"

    @full
    @pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("m") or case.startswith("mtp")])
    def test_calls_through_the_tree_kernel(self, case, tapes, monkeypatch):
        """The first of two calls reads content of masks, as the kernel does, eagerly and in graphs."""
        has_kernel, masks = itertools.cycle((True, False)), Counter()
        monkeypatch.setattr(slots, "takes_trees", lambda *like: next(has_kernel))
        monkeypatch.setattr(tree_attention, "tree_attention_triton", layer_references.tree_attention)
        attend = TreeMask.attend
        monkeypatch.setattr(TreeMask, "attend", lambda *args: masks.update(["tree"]) or attend(*args))
        for num_rows, seed in ROUNDS:
            run(*CASES[case], num_rows, seed)
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


# With the demo's drafters.
ROWS = ["eagle tree", "eagle3 chain", "mtp", "dflash", "dflash tree", "medusa", "draft_model", "mlp_speculator chain"]
ROWS += ["mlp_speculator tree"]
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
DRAWN = ["eagle3 chain", "mtp", "dflash", "mlp_speculator chain"]


def generate(target, num_rows, new_tokens=16, **arguments):
    inputs = {name: values.to(target.device) for name, values in demo_inputs(num_rows).items()}
    arguments = {"do_sample": False, "return_dict_in_generate": True, **arguments}
    return target.generate(**inputs, max_new_tokens=new_tokens, **arguments)


def traced(target, num_rows, speculative, **arguments):
    """The text, every draft of the call, and its statistics."""
    torch.manual_seed(5)
    with record(trace=True) as made:
        output = generate(target, num_rows, speculative=speculative, **arguments)
    return output.sequences.tolist(), made.calls[0].cycles, output.speculative


def check_traced(target, num_rows, row, more=None, **arguments):
    """Texts and drafts are those without graphs; drafts and statistics."""
    text, drafts, stats = traced(target, num_rows, settings_of(row, **(more or {})), **arguments)
    eager = settings_of(row, enforce_eager=True, **(more or {}))
    eager_text, eager_drafts, eager_stats = traced(target, num_rows, eager, **arguments)
    assert text == eager_text
    assert drafts == eager_drafts
    assert (stats.draft_graphs, eager_stats.draft_graphs) == ("on", "off: enforce_eager=True")
    assert stats.num_draft_graph_replays > eager_stats.num_draft_graph_replays == 0
    assert stats.num_draft_graph_captures > 0
    if not arguments.get("do_sample"):
        assert text == generate(target, num_rows, **arguments).sequences.tolist()
    return drafts, stats


class TestCalls:
    @pytest.mark.parametrize(
        ("row", "num_rows"), split([(row, 3) for row in ROWS], short=[("eagle tree", 3), ("dflash tree", 1)])
    )
    def test_text_and_drafts(self, row, num_rows, target, tapes):
        check_traced(target, num_rows, row)

    @pytest.mark.parametrize("row", split(DRAWN, short=["eagle3 chain"]))
    def test_drawn_drafts(self, row, target, tapes):
        """Random numbers and distributions are equal, with and without graphs."""
        drafts, stats = check_traced(target, 2, row, PROBABILISTIC, do_sample=True)
        # Tokens of MLP speculators are drawn between graphs.
        assert stats.num_draft_graph_replays <= len(drafts) * (3 if "mlp" in row else 1)

    @full
    def test_drawn_drafts_of_many_settings(self, target, tapes):
        """Processors are built into graphs, of which only those of the last few settings are kept."""
        for temperature in (0.5, 0.6, 0.7, 0.8, 0.9, 0.5):
            arguments = {"do_sample": True, "temperature": temperature, "top_k": 20, "min_p": 0.01}
            check_traced(target, 1, "eagle3 chain", PROBABILISTIC, **arguments)
        network = load_speculator(target, settings_of("eagle3 chain")).resources
        variants = {part for key in graphs._models[network].forwards for part in key if isinstance(part, Variant)}
        assert len(variants) == 4

    @full
    def test_processors_look_at_each_token_of_a_chain(self, target, tapes):
        """So that each has a graph."""
        drafts, stats = check_traced(target, 2, "mlp_speculator chain", repetition_penalty=1.3, new_tokens=24)
        assert stats.num_draft_graph_replays > len(drafts)

    @pytest.mark.parametrize("row", ["mtp", *in_full("eagle3 chain", "dflash tree", "medusa", "mlp_speculator chain")])
    def test_second_call_captures_nothing(self, row, target, tapes):
        """Graphs belong to the network, and the next call runs them from its first cycle on."""
        calls = [traced(target, 1, settings_of(row)) for _ in range(3)]
        captures = [stats.num_draft_graph_captures for *_, stats in calls]
        assert captures[0] > captures[2] == 0
        _, drafts, stats = calls[2]
        assert stats.num_draft_graph_replays >= len(drafts) - 2

    @full
    def test_slots_grow(self, target, tapes):
        """More rows and longer texts have larger slots, and graphs of their own."""
        for num_rows, new_tokens in ((1, 8), (2, 40)):
            check_traced(target, num_rows, "eagle3 chain", new_tokens=new_tokens)

    @full
    @pytest.mark.parametrize("row", ["eagle3 chain", "medusa", "mlp_speculator chain"])
    def test_forgotten_with_the_speculator(self, row, target, tapes):
        generate(target, 1, speculative=settings_of(row))
        speculator = load_speculator(target, settings_of(row))
        network = speculator.generator_class.network(speculator.resources)
        assert graphs._models[network].forwards
        forget_speculators(target)
        assert network not in graphs._models

    @full
    def test_networks_are_not_kept_alive(self, target, tapes):
        assert generate(target, 1, speculative=settings_of("eagle3 chain")).speculative.draft_graphs == "on"
        network = weakref.ref(load_speculator(target, settings_of("eagle3 chain")).resources)
        with pytest.MonkeyPatch.context() as patch:
            # What forgets the network forgets its graphs; they alone must not hold it either.
            patch.setattr("hf_specdec.loader.forget_graphs", lambda *args: None)
            forget_speculators(target)
        gc.collect()
        assert network() is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("row", "more"),
    [
        *(pytest.param(row, {}, marks=[pytest.mark.smoke] * (row in ("eagle3 chain", "dflash tree"))) for row in ROWS),
        *((row, PROBABILISTIC) for row in DRAWN),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_cuda_graphs(row, more, num_rows, gpu):
    """Runs the calls with CUDA graphs in the place of tapes."""
    target = demo.load_target(torch.float32).to(gpu)
    plain = generate(target, num_rows).sequences.tolist()
    for _ in range(2):
        text, _, stats = traced(target, num_rows, settings_of(row, **more), do_sample=bool(more))
        assert more or text == plain
        assert stats.draft_graphs == "on"
        assert stats.num_draft_graph_replays > 0


class TestNetworksWithoutACache:
    @full
    def test_trees_that_change(self, target, tapes, monkeypatch):
        """The candidates are one graph for all trees of a depth."""
        monkeypatch.setattr(medusa, "_FIRST_REVIEW", 2)
        trees, default_tree = [], medusa.default_tree
        monkeypatch.setattr(medusa, "default_tree", lambda *args: trees.append(default_tree(*args)) or trees[-1])
        captures = CallGraphs.all_captures
        text, drafts, stats = traced(target, 1, settings_of("medusa measured", num_draft_nodes=16), new_tokens=120)
        # Who times cycles leaves those with captures out.
        assert CallGraphs.all_captures - captures == stats.num_draft_graph_captures + stats.num_graph_captures > 0
        assert text == generate(target, 1, 120).sequences.tolist()
        assert len({tree.paths for tree in trees}) > 3
        depths = {tree.max_depth for tree in trees}
        assert stats.num_draft_graph_captures <= len(depths)
        assert stats.num_draft_graph_replays > len(drafts) - 2 * len(depths)

    @pytest.mark.parametrize(("name", "captures"), [("targets_lm_head", 2), ("own_lm_heads", 1)])
    def test_another_lm_head(self, name, captures, tapes):
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
    def test_targets_of_several_vocabularies(self, tapes):
        """A network may draft for targets that know fewer tokens than it, or more."""
        network, states = network_of("mlp_speculator/tied"), {"last": torch.randn(5, 32)}
        for size in (SIZE, 5, SIZE + 3, SIZE):
            drafts = []
            for enforce_eager in (False, True):
                speculator = mlp_speculator(network, size, num_speculative_tokens=4, enforce_eager=enforce_eager)
                call = Call(speculator, [torch.arange(1, 6)], [states])
                for length in range(6, 9):
                    call.observe([torch.ones(1, dtype=torch.long)], [last_of(states)])
                    drafts.append(call.propose([size - 1], [length], [4]))
                call.generator.close()
                assert (call.graphs.num_replays > 0) == (not enforce_eager)
            assert all(draft == drafts[0] for draft in drafts)
            assert max(drafts[0][0][0]) < size

    def test_only_the_rows_in_use(self, tapes):
        network, session = network_of("mlp_speculator/tied"), Session(3, 60, CPU)
        runner = Runner.of(graphs_for(network, {}), CPU, session)
        state = NetworkState(kept={"sum": torch.zeros(3)})

        def read(state, new):
            state.kept["sum"] = state.kept["sum"] + new.last(new.states["two"]).sum(1)
            return 2 * new.last(new.tokens), (state.kept["sum"] + 1, 7)

        for index in range(1, 4):
            new = Entries(torch.arange(3)[:, None], {"two": torch.ones(3, 1, 2)}, [1, 1, 1])
            double, (total, number) = runner.replay(read, state, new)
            assert double.tolist() == [0, 2, 4]
            assert (total.tolist(), number) == ([2 * index + 1] * 3, 7)
        assert state.kept["sum"].tolist() == [6, 6, 6]
        runner.graphs.close()
        # For three rows, and fewer.
        assert session.draft_graphs[0].num_replays == session.draft_graphs[0].num_captures == 3


class TestAssistants:
    """Assistants of Gemma 4 read the keys and values of the target where they lie."""

    @pytest.mark.parametrize("arguments", [{}, *in_full({"do_sample": True, "temperature": 4.0})])
    def test_drafts_are_those_without_graphs(self, arguments, tapes):
        arguments, found = {"do_sample": False, "max_new_tokens": 24, **arguments}, []
        with tiny_gemma4() as (model, assistant):
            for enforce_eager in (False, True):
                torch.manual_seed(0)
                drafter = load_speculator(
                    model, draft_model=assistant, num_speculative_tokens=3, enforce_eager=enforce_eager
                )
                with record(trace=True) as made:
                    text = model.generate(**prompts(3), **arguments, assistant=drafter)
                found.append((text.tolist(), made.calls[0].cycles, made.calls[0].stats))
        (_, cycles, stats), eager = found
        assert found[0][:2] == eager[:2]
        assert stats.draft_graphs == "on"
        # One for each draft, launched before the verdict is read or after it.
        assert len(cycles) - 1 <= stats.num_draft_graph_replays <= stats.num_target_forwards


class TestGraphInputs:
    def test_tensors(self):
        """Rows of padding are zeros, and so is what is larger than the values."""
        values = {"states": torch.ones((2, 3, 5), dtype=torch.bfloat16), "tokens": torch.tensor([[3], [4]])}
        inputs = GraphInputs(4, CPU, {}, values, 2)
        for num_rows in (3, 4, 1):
            spoil_all(inputs)
            inputs.fill(num_rows, {}, {"states": torch.ones((4, 1, 5)), "tokens": torch.ones((4, 2))})
            assert inputs.tensors["states"].dtype == torch.bfloat16
            assert inputs.tensors["states"].sum(2).tolist() == [[5, 0]] * num_rows + [[0, 0]] * (4 - num_rows)
            assert inputs.tensors["tokens"].tolist() == [[1, 1]] * num_rows + [[0, 0]] * (4 - num_rows)

    def test_numbers(self):
        """They are filled where they lie, those that the device alone knows among them."""
        with other_device() as waits:
            inputs = GraphInputs(3, DEVICE, {"a": 0, "b": 4, "c": 9}, {})
            spoil_all(inputs)
            inputs.fill(2, {"a": [1, 2, 3], "b": move(torch.tensor([7, 8, 9])), "c": [5, 6]}, {})
        assert [line.inner.tolist() for line in inputs.numbers.values()] == [[1, 2, 0], [7, 8, 4], [5, 6, 9]]
        assert waits == []


class TestEager:
    def test_cpu(self, target):
        stats = generate(target, 1, speculative=settings_of("eagle3 chain")).speculative
        assert (stats.draft_graphs, stats.num_draft_graph_replays) == ("", 0)

    def test_hooks_on_what_is_shared(self, target, tapes):
        """Modules of the target that the draft goes through are looked at as well."""
        network = load_speculator(target, settings_of("eagle")).resources
        assert str(graphs_for(network, {}, network.shared_modules)) == "on"
        handle = target.get_output_embeddings().register_forward_hook(lambda module, args, output: None)
        hooked = graphs_for(network, {}, network.shared_modules)
        assert str(hooked) == "off: its modules have hooks, or forwards of their own"
        handle.remove()

    @pytest.mark.parametrize(
        ("row", "kind", "part"),
        [
            ("eagle3 chain", EagleNetwork, "fuse"),
            *in_full(("medusa", MedusaHeads, "short_logits"), ("mlp_speculator chain", MLPStage, "__call__")),
        ],
    )
    def test_what_cannot_be_captured(self, row, kind, part, target, tapes, monkeypatch):
        """Drafts are made all the same, and a capture is not tried again."""
        whole = getattr(kind, part)

        def waiting(self, given, *args):
            states = next(iter(given.values())) if isinstance(given, dict) else given
            assert states.sum().item() < float("inf")
            return whole(self, given, *args)

        monkeypatch.setattr(kind, part, waiting)
        text, _, stats = traced(target, 1, settings_of(row))
        assert text == generate(target, 1).sequences.tolist()
        assert stats.draft_graphs.startswith("off: capturing failed: CannotCaptureError")
        assert stats.num_draft_graph_replays == 0
