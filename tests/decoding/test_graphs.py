"""Forwards as graphs: whole calls on tapes in the place of CUDA graphs, and the same on a GPU."""

from __future__ import annotations

import gc
import logging
import operator
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM
from transformers.generation import LogitsProcessor, LogitsProcessorList

from hf_specdec import forget_speculators
from hf_specdec.decoding import attention, cache, capture, graphs, loop, target
from hf_specdec.decoding.attention import TreeMask
from hf_specdec.decoding.cache import SlotCache, SlotStore, padded_size
from hf_specdec.decoding.capture import CannotCaptureError, CaptureBackend, CudaBackend, NoWaiting, SharedOutputs
from hf_specdec.decoding.graphs import CallGraphs
from hf_specdec.decoding.masks import FULL, RowState, Span, node_masks, node_positions
from hf_specdec.decoding.target import NodeInputs, call_graphs
from hf_specdec.drafts import TreeTopology, chain_topology, static_topology
from hf_specdec.kernels.indexing import arange
from hf_specdec.kernels.tree_attention import MAX_NODES
from tests.architectures import CHAINS_ONLY, supported, tiny_model
from tests.models import prompts, scripted_for, tiny_gpt2, tiny_llama, tiny_mistral
from tests.sampled import sampled_speculator
from tests.tape import NothingToHost, Tape, TapeBackend, spoil_inputs, tape_everything
from tests.test_architectures import TREE, Case
from tests.threads import in_threads


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device(request.param)


@pytest.fixture
def backends(device, monkeypatch) -> list[TapeBackend]:
    """What is captured goes onto tapes, on a GPU into graphs. Whatever a replay reads must have been filled for it."""
    spoil_inputs(monkeypatch)
    return tape_everything(monkeypatch) if device.type == "cpu" else []


@pytest.fixture
def with_kernel(monkeypatch):
    """Attention from a tree and not from a mask, by the reference of the kernel."""
    monkeypatch.setattr(attention, "use_triton", lambda *tensors: True)
    monkeypatch.setattr(target, "use_triton", lambda *tensors: True)


@pytest.fixture
def small_slots(monkeypatch):
    """Calls begin with room for hardly more than their prompts."""
    monkeypatch.setattr(cache, "_LEAST_SLOTS", 1)
    monkeypatch.setattr(loop, "SlotCache", lambda capacity, limit: SlotCache(12, limit))


def on(device, inputs: dict) -> dict:
    return {name: values.to(device) for name, values in inputs.items()}


def greedy(model, inputs, new_tokens=24, **arguments):
    inputs = on(model.device, inputs)
    return model.generate(
        **inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True, **arguments
    )


def check_scripted(model, inputs, new_tokens=24, **script):
    """A call with scripted drafts says what plain generation says; its statistics."""
    plain = greedy(model, inputs, new_tokens).sequences
    output = greedy(model, inputs, new_tokens, assistant=scripted_for(plain.cpu(), inputs, **script))
    assert output.sequences.tolist() == plain.tolist()
    return output.speculative


SCRIPTS = {"chains": {"k": 4}, "trees": {"tree": TREE}, "a tree for each row": {"tree": "random"}}


class TestCallsEqualPlainGeneration:
    @pytest.mark.parametrize("script", SCRIPTS)
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_drafts(self, script, batch_size, device, backends):
        stats = check_scripted(tiny_llama().to(device), prompts(batch_size), **SCRIPTS[script])
        assert stats.graphs == "on"
        assert stats.num_graph_captures >= 1
        # Sizes that come up for the first time are not captured yet.
        assert stats.num_graph_replays > (stats.num_target_forwards - 1) / 2

    @pytest.mark.smoke
    def test_plain_decoding(self, device, backends):
        """One token at a time through a graph, without drafts."""
        model, inputs = tiny_llama().to(device), prompts(2)
        plain = greedy(model, inputs).sequences
        output = greedy(model, inputs, speculative={"method": "ngram", "disable_by_batch_size": 1})
        assert output.sequences.tolist() == plain.tolist()
        stats = output.speculative
        # All forwards but the prefill, and the first one.
        assert (stats.num_graph_captures, stats.num_graph_replays) == (1, stats.num_target_forwards - 2)

    @pytest.mark.parametrize("make", [tiny_mistral, tiny_gpt2])
    def test_windows_and_learned_positions(self, make, device, backends):
        assert check_scripted(make().to(device), prompts(3), tree=TREE).graphs == "on"

    @pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "llama4_text", "qwen3", "gemma4_text", "phi3"])
    def test_attention_from_the_tree(self, name, device, backends, with_kernel):
        case = Case(name, tiny_model(name).to(device))
        output = case.speculate(4, num_speculative_tokens=3, tree=TREE)
        assert output.sequences.tolist() == case.expected(4).tolist()
        assert output.speculative.graphs == "on"
        assert output.speculative.attention.startswith("tree kernel")

    def test_rows_end_apart(self, device, backends):
        model, inputs = tiny_llama().to(device), prompts(5)
        text = greedy(model, inputs, 40).sequences[:, 7:].tolist()
        ends = {token: {row.index(token) for row in text if token in row} for token in range(64)}
        end = max(ends, key=lambda token: (len(ends[token]), min(ends[token], default=0)))
        assert len(ends[end]) >= 3
        plain = greedy(model, inputs, 40, eos_token_id=end).sequences
        script = scripted_for(plain.cpu(), inputs, k=2)
        output = greedy(model, inputs, 40, eos_token_id=end, assistant=script)
        assert output.sequences.tolist() == plain.tolist()
        # For more than one number of rows.
        assert output.speculative.num_graph_captures > 1

    def test_states_logits_and_cache_survive(self, device, backends):
        """Everything a call returns is its own, not the memory of a graph."""
        model, inputs = tiny_llama().to(device), prompts(2)
        plain = greedy(model, inputs, output_logits=True, output_scores=True)
        script = scripted_for(plain.sequences.cpu(), inputs)
        output = greedy(model, inputs, assistant=script, output_logits=True, output_scores=True)
        assert output.speculative.num_graph_replays > 0
        greedy(model, prompts(2, seed=1), assistant=script)
        for name in ("logits", "scores"):
            for mine, others in zip(getattr(output, name), getattr(plain, name), strict=True):
                torch.testing.assert_close(mine, others, atol=1e-3, rtol=1e-3)
        for mine, others in zip(output.past_key_values.layers, plain.past_key_values.layers, strict=True):
            torch.testing.assert_close(mine.keys, others.keys, atol=1e-3, rtol=1e-3)

    @pytest.mark.smoke
    def test_sampling(self, device, backends):
        """The same random numbers, with and without graphs."""
        model, inputs = tiny_llama().to(device), on(device, prompts(2))
        texts = []
        for enforce_eager in (True, False):
            drafter = sampled_speculator(3)
            drafter.config = drafter.config.replace(enforce_eager=enforce_eager)
            torch.manual_seed(3)
            texts.append(model.generate(**inputs, assistant=drafter, do_sample=True, max_new_tokens=24).tolist())
        assert texts[0] == texts[1]

    def test_continued_cache(self, device, backends):
        model, inputs = tiny_llama().to(device), prompts(1)
        plain = greedy(model, inputs, 30).sequences
        first = greedy(model, inputs, 12, spec_method="ngram")
        tokens = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
        output = greedy(model, tokens, 18, spec_method="ngram", past_key_values=first.past_key_values)
        assert output.sequences.tolist() == plain.tolist()


class TestDrafters:
    def test_draft_model(self, device, backends):
        model, draft, inputs = tiny_llama().to(device), tiny_llama(seed=1).to(device), prompts(2)
        plain = greedy(model, inputs).sequences
        seen = []
        close = CallGraphs.close
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CallGraphs, "close", lambda self: seen.append(self) or close(self))
            output = greedy(model, inputs, assistant=draft)
        assert output.sequences.tolist() == plain.tolist()
        assert len(seen) == 2
        assert all(graphs.num_replays > 10 for graphs in seen)

    @pytest.mark.smoke
    def test_hidden_states_of_the_target(self, device, backends):
        """A drafter reads states that the graph of the verification writes."""
        target_model = tiny_llama().to(device)
        inputs = prompts(2)
        plain = greedy(target_model, inputs).sequences
        speculator = scripted_for(plain.cpu(), inputs)
        seen = {"on": [], "off": []}

        def watching(where):
            class Watching(speculator.generator_class):
                target_hidden_states = (1, "last")

                def observe(self, commit):
                    seen[where].append(
                        (commit.tokens.clone(), {k: v.clone() for k, v in commit.hidden_states.items()})
                    )

            return Watching

        for where in seen:
            watched = scripted_for(plain.cpu(), inputs)
            watched.generator_class = watching(where)
            watched.config = watched.config.replace(enforce_eager=where == "off")
            output = greedy(target_model, inputs, assistant=watched)
            assert (output.speculative.num_graph_replays > 0) == (where == "on")
        for (tokens, states), (others, other_states) in zip(seen["on"], seen["off"], strict=True):
            assert torch.equal(tokens, others)
            torch.testing.assert_close(states, other_states, atol=1e-3, rtol=1e-3)


class TestReuse:
    @pytest.mark.smoke
    def test_second_call_captures_nothing(self, device, backends):
        model, inputs = tiny_llama().to(device), prompts(1)
        first, second = (check_scripted(model, inputs) for _ in range(2))
        assert first.num_graph_captures > 0
        # A size that came up once in the first call may come up again.
        third = check_scripted(model, inputs)
        assert third.num_graph_captures == 0
        assert third.num_graph_replays == third.num_target_forwards - 1

    def test_sizes(self, device, backends):
        """Powers of two, and what the call's full drafts need."""
        model = tiny_llama().to(device)
        check_scripted(model, prompts(3), k=5)
        places, rows, nodes, _ = zip(*graphs._models[model].forwards)
        assert set(rows) == {4}
        assert 6 in nodes
        assert set(nodes) <= {1, 2, 4, 6}
        assert set(places) == {(4, 1024)}

    def test_forget_speculators(self, device, backends):
        model, inputs = tiny_llama().to(device), prompts(1)
        for _ in range(2):
            assert check_scripted(model, inputs).num_graph_captures > 0
            forget_speculators(model)

    def test_what_a_graph_reads_is_kept_alive(self, monkeypatch):
        """Also what was made once for all who want it, and has had to make way since."""

        class Forgetful(CaptureBackend):
            def capture(self, run):
                run()
                return lambda: None, None

        monkeypatch.setattr(graphs, "capture_backend", lambda device: Forgetful())
        model, seen = tiny_llama(), []

        def read(inputs):
            places = arange(1000, torch.device("cpu"))
            seen.append(weakref.ref(places))

        call = call_graphs(model)
        for _ in range(2):
            captured = call.run(("key",), dict, lambda inputs: None, read)
        for size in range(300):
            arange(size, torch.device("cpu"))
        assert captured is not None
        assert seen[0]() is not None
        del captured, call
        graphs.forget_graphs(model)
        gc.collect()
        assert seen[0]() is None

    def test_models_are_not_kept_alive(self, device, backends):
        model = tiny_llama().to(device)
        assert check_scripted(model, prompts(1)).num_graph_captures > 0
        model = weakref.ref(model)
        gc.collect()
        assert model() is None

    def test_slots_grow(self, device, backends, small_slots):
        """Within a call, and from one call to the next."""
        model, inputs = tiny_llama().to(device), prompts(2)
        for new_tokens in (8, 60):
            assert check_scripted(model, inputs, new_tokens=new_tokens).num_graph_captures > 0
        assert len({place for place, *_ in graphs._models[model].forwards}) > 1
        for new_tokens in (8, 60, 8, 60):
            stats = check_scripted(model, inputs, new_tokens=new_tokens)
        assert stats.num_graph_captures == 0

    def test_moved_weights(self, device, backends):
        """Graphs read weights where they were."""
        model, inputs = tiny_llama().to(device), prompts(1)
        check_scripted(model, inputs)
        for parameter in model.parameters():
            parameter.data = -parameter.data
        assert check_scripted(model, inputs).num_graph_captures > 0

    def test_changed_weights(self, device, backends):
        """Weights that are trained in place need no new graphs."""
        model, inputs = tiny_llama().to(device), prompts(1)
        for _ in range(2):
            check_scripted(model, inputs)
        with torch.no_grad():
            model.get_output_embeddings().weight.neg_()
        check_scripted(model, inputs)

    def test_inference_mode(self, device, backends):
        """Calls inside and outside of it share graphs and slots."""
        model, inputs = tiny_llama().to(device), prompts(2)
        with torch.inference_mode():
            check_scripted(model, inputs)
        check_scripted(model, inputs)
        with torch.inference_mode():
            assert check_scripted(model, inputs).num_graph_captures == 0


class Wrapped(torch.Tensor):
    """A tensor that holds another one, as quantised and sharded weights do."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return cls(args[0].inner)


def wrap_weights(model):
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(Wrapped(norm.weight.detach()), requires_grad=False)


def replace_forward(model):
    model.model.forward = model.model.forward


CHANGES = {
    "it is split over several processes": lambda model: setattr(model, "_tp_size", 2),
    "its weights are wrapped tensors, whose addresses are not known": wrap_weights,
    "its weights lie on several devices": lambda model: model.model.norm.to("meta"),
    "it is in training mode": lambda model: model.train(),
    "it is compiled": lambda model: model.model.compile(),
    "it has adapters, which may be switched": lambda model: setattr(model.model.norm, "active_adapter", "default"),
    "its modules have hooks, or forwards of their own": replace_forward,
}


class TestEager:
    def test_enforce_eager(self, device, backends):
        model, inputs = tiny_llama().to(device), prompts(1)
        output = greedy(model, inputs, speculative={"method": "ngram", "enforce_eager": True})
        assert output.speculative.graphs == "off: enforce_eager=True"
        assert output.speculative.num_graph_replays == 0

    def test_cpu(self):
        output = greedy(tiny_llama(), prompts(1), spec_method="ngram")
        assert output.speculative.graphs == "off: not on a CUDA device"
        assert output.speculative.peak_memory_bytes == 0

    def test_all_hidden_states(self, device, backends):
        model = tiny_llama().to(device)
        output = greedy(model, prompts(1), spec_method="ngram", output_hidden_states=True)
        assert output.speculative.graphs == "off: the hidden states of all layers are returned"

    @pytest.mark.parametrize(
        ("name", "reason"),
        [("qwen3_next", "it has layers with a recurrent state"), ("bloom", "it tells positions from the slots")],
    )
    def test_models_that_cannot_be_captured(self, name, reason, device, backends):
        case = Case(name, tiny_model(name).to(device))
        output = case.speculate(1, num_speculative_tokens=3)
        assert output.speculative.graphs.startswith(f"off: {reason}")

    @pytest.mark.parametrize("reason", CHANGES)
    def test_changed_models(self, reason, device, backends):
        model = tiny_llama().to(device)
        assert str(call_graphs(model)) == "on"
        CHANGES[reason](model)
        assert str(call_graphs(model)) == f"off: {reason}"

    def test_autocast(self, device, backends):
        model = tiny_llama().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            assert str(call_graphs(model)) == "off: autocast is on"
        assert str(call_graphs(model)) == "on"

    def test_hooks_that_transformers_leaves_behind(self, device, backends):
        model = tiny_llama().to(device)
        greedy(model, prompts(1), 2, output_hidden_states=True)
        assert str(call_graphs(model)) == "on"

    def test_hooks(self, device, backends):
        model, inputs = tiny_llama().to(device), prompts(1)
        seen = []
        handle = model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(1))
        stats = check_scripted(model, inputs)
        assert stats.graphs == "off: its modules have hooks, or forwards of their own"
        handle.remove()
        assert check_scripted(model, inputs).graphs == "on"

    def test_long_drafts(self, device, backends):
        model, inputs = tiny_llama().to(device), prompts(1)
        stats = check_scripted(model, inputs, new_tokens=90, k=MAX_NODES + 1, accuracy=0.0)
        assert stats.num_graph_replays < stats.num_target_forwards - 1


class Waiting(LlamaForCausalLM):
    """Asks the device for a number in every forward."""

    def forward(self, input_ids=None, past_key_values=None, position_ids=None, **kwargs):
        assert input_ids.max().item() < self.config.vocab_size
        return super().forward(input_ids, past_key_values=past_key_values, position_ids=position_ids, **kwargs)


class TestFailingCapture:
    @pytest.fixture
    def model(self, device):
        return Waiting(tiny_llama().config).eval().to(device)

    @pytest.mark.smoke
    def test_runs_eagerly_and_says_why(self, model, backends, caplog, monkeypatch):
        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        stats = check_scripted(model, prompts(2))
        assert stats.graphs.startswith("off: capturing failed: ")
        assert stats.num_graph_replays == 0
        assert "runs without CUDA graphs; capturing failed" in caplog.text

    def test_is_not_tried_again(self, model, backends, monkeypatch):
        check_scripted(model, prompts(2))
        monkeypatch.setattr(CallGraphs, "_capture", lambda *args: pytest.fail("captured again"))
        assert "capturing failed" in check_scripted(model, prompts(2)).graphs

    def test_in_the_middle_of_a_call(self, device, backends, small_slots, monkeypatch):
        """The slots stay where they are."""
        read, columns = target.SlotModel.read_static, set()

        def failing(self, nodes, num_columns):
            columns.add(num_columns)
            assert len(columns) < 2, "no more of it"
            return read(self, nodes, num_columns)

        monkeypatch.setattr(target.SlotModel, "read_static", failing)
        stats = check_scripted(tiny_llama().to(device), prompts(3), new_tokens=60)
        assert stats.num_graph_replays > 0
        assert stats.graphs.startswith("off: capturing failed: AssertionError: no more of it")


class TestCallsAtOnce:
    def test_the_second_call_runs_without(self, device, backends):
        model, inputs = tiny_llama().to(device), prompts(1)
        first = call_graphs(model)
        second = call_graphs(model)
        assert str(second) == "off: another call is using the graphs of the model"
        assert second.store is None
        first.close()
        assert check_scripted(model, inputs).graphs == "on"

    def test_a_call_that_never_ends(self, device, backends):
        model = tiny_llama().to(device)
        lost = call_graphs(model)
        del lost
        gc.collect()
        assert str(call_graphs(model)) == "on"

    def test_failed_calls_give_them_back(self, device, backends):
        class Failing(LogitsProcessor):
            def __call__(self, input_ids, scores):
                if input_ids.shape[1] > 10:
                    raise KeyboardInterrupt
                return scores

        model, inputs = tiny_llama().to(device), prompts(1)
        with pytest.raises(KeyboardInterrupt) as caught:
            greedy(model, inputs, spec_method="ngram", logits_processor=LogitsProcessorList([Failing()]))
        assert check_scripted(model, inputs).graphs == "on"
        assert caught.traceback

    def test_one_after_the_other(self, device, backends):
        """What captures is told of them, to keep their streams in order."""
        model = tiny_llama().to(device)
        for _ in range(2):
            check_scripted(model, prompts(1))
        if device.type == "cpu":
            assert backends[0].calls == ["begin", "end", "begin", "end"]

    def test_threads(self, device, backends):
        model, inputs = tiny_llama().to(device), [prompts(2, seed=seed) for seed in range(4)]
        plain = [greedy(model, each).sequences for each in inputs]

        def run(index):
            script = scripted_for(plain[index].cpu(), inputs[index], seed=index)
            return [greedy(model, inputs[index], assistant=script) for _ in range(3)]

        outputs = in_threads(*(partial(run, index) for index in range(len(inputs))))
        for text, runs in zip(plain, outputs, strict=True):
            for output in runs:
                assert output.sequences.tolist() == text.tolist()
                assert output.speculative.graphs in ("on", "off: another call is using the graphs of the model")


ROWS = {
    "equal": RowState([9, 9, 9], [0, 0, 0], [0, 0, 0]),
    "ragged": RowState([9, 4, 12], [0, 2, 3], [0, 5, 0]),
}
TOPOLOGIES = {
    "anchor": chain_topology(0, torch.device("cpu")),
    "chain": chain_topology(4, torch.device("cpu")),
    "tree": static_topology((-1, -1, 0, 1, 1), torch.device("cpu")),
    "trees": TreeTopology.from_parents(torch.tensor([[-1, 0, 1], [-1, -1, 0], [-1, -1, -1]])),
}


class TestNodeInputs:
    @pytest.mark.parametrize("span", [FULL, Span("sliding", 5), Span("chunked", 4)], ids=lambda span: span.kind)
    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("shape", TOPOLOGIES)
    def test_say_what_masks_and_positions_say(self, shape, rows, span):
        topology, rows = TOPOLOGIES[shape], ROWS[rows]
        num_nodes = topology.depths.shape[-1]
        columns = max(rows.lengths) + num_nodes
        inputs = NodeInputs(4, 8, torch.device("cpu"))
        inputs.fill(torch.randint(1, 50, (3, num_nodes)), topology, rows, max_position=13)
        (expected,) = node_masks(topology, rows, columns, (span,), torch.float32)
        mask = TreeMask(inputs.tree, span).additive(24, torch.float32)
        assert mask.shape == (4, 1, 8, 24)
        assert torch.equal(mask[:3, :, :num_nodes, :columns], expected.expand(3, -1, -1, -1))
        assert mask[:3, :, :num_nodes, columns:].lt(0).all()
        assert torch.equal(inputs.positions[:3, :num_nodes], node_positions(topology, rows).clamp(max=13))
        # Padding sees something: nothing at all would be no number.
        assert mask.eq(0).any(-1).all()

    def test_padding_is_out_of_the_way(self):
        topology, rows = TOPOLOGIES["tree"], ROWS["ragged"]
        inputs = NodeInputs(4, 8, torch.device("cpu"))
        inputs.fill(torch.full((3, 6), 7), topology, rows)
        assert inputs.lengths.tolist() == [*rows.lengths, 0]
        assert inputs.starts.tolist() == [*rows.starts, 0]
        bits = inputs.ancestors
        # No node in use sees a node of padding.
        assert (bits[:3, :6] >> 6).eq(0).all()

    @pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (3, 1), (8, 64)])
    def test_kernels_are_compiled_once(self, sizes):
        """Triton compiles others for addresses that are no multiples of 16."""
        inputs = NodeInputs(*sizes, torch.device("cpu"))
        for part in (*inputs.tree.__dict__.values(), inputs.tokens, inputs.positions):
            assert part.data_ptr() % 16 == 0

    def test_full_size(self):
        """All 64 bits of the ancestors."""
        topology, rows = chain_topology(MAX_NODES - 2, torch.device("cpu")), RowState([3], [0], [0])
        inputs = NodeInputs(1, MAX_NODES, torch.device("cpu"))
        inputs.fill(torch.ones((1, MAX_NODES - 1), dtype=torch.long), topology, rows)
        visible = TreeMask(inputs.tree, FULL).additive(3 + MAX_NODES, torch.float32)[0, 0].eq(0)
        assert visible[-1].nonzero()[:, 0].tolist() == [0, 1, 2, 2 + MAX_NODES]


class TestSlotStore:
    """Two layers of a call ask for buffers."""

    @pytest.fixture
    def dropped(self) -> list:
        return []

    @pytest.fixture
    def store(self, dropped) -> SlotStore:
        return SlotStore(dropped.append)

    def take(self, store, rows, capacity, size=4, layer=0):
        return store.take(layer, "keys", rows, 2, capacity, torch.empty(1, size))

    def call(self, store, rows, capacity, **changes):
        store.begin_call()
        return [self.take(store, rows, capacity, layer=layer, **changes) for layer in range(2)]

    def test_buffers_are_kept(self, store, dropped):
        first = self.call(store, 3, 100)
        for buffer in first:
            buffer.fill_(1)
        again = self.call(store, 2, 60)
        assert all(map(operator.is_, first, again))
        assert not any(buffer.any() for buffer in again)
        assert not dropped

    @pytest.mark.parametrize("changes", [{"capacity": 3000}, {"rows": 9}])
    def test_larger_calls_leave_those_of_others_alone(self, store, dropped, changes):
        first = self.call(store, 4, 1500)
        larger = self.call(store, **{"rows": 4, "capacity": 1500, **changes})
        assert not any(map(operator.is_, first, larger))
        assert all(map(operator.is_, first, self.call(store, 4, 1500)))
        assert not dropped

    def test_graphs_of_other_models_make_way(self, store, dropped):
        first = self.call(store, 2, 100)
        assert not any(map(operator.is_, first, self.call(store, 2, 100, size=8)))
        assert set(dropped) == {(2, 1024)}

    def test_the_largest_makes_way(self, store, dropped):
        """What is left must be small beside the largest that is left."""
        for rows, capacity in [(5, 1025), (1, 1), (5, 1), (1, 4097)]:
            self.call(store, rows, capacity)
        sizes = [place.rows * place.slots for place in store._places]
        assert sum(sizes) <= 2 * max(sizes)

    def test_at_most_twice_the_largest(self, store, dropped):
        for rows, capacity in [(1, 1000), (4, 1000), (1, 4000)]:
            self.call(store, rows, capacity)
        assert dropped == [(1, 1024)]
        # Rows for two fit into those for four.
        self.call(store, 2, 1000)
        assert store.place == (4, 1024)
        self.call(store, 1, 2000)
        assert store.place == (1, 2048)
        assert dropped == [(1, 1024), (1, 4096)]

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(1, 9), st.lists(st.integers(1, 5000), min_size=1, max_size=3).map(sorted)),
            min_size=1,
            max_size=8,
        )
    )
    def test_any_calls(self, calls):
        """Whatever is asked for: it fits, layers agree, a place's buffers stay what they are until it is dropped."""
        known = {}
        store = SlotStore(lambda place: known.pop(place, None))
        for rows, capacities in calls:
            store.begin_call()
            for capacity in capacities:
                # Layers may grow one by one.
                found = [self.take(store, rows, capacity, layer=layer) for layer in range(2)]
                assert all(buffer.shape == (*store.place[:1], 2, *store.place[1:], 4) for buffer in found)
                assert store.place.rows >= rows
                assert store.place.slots >= capacity
                assert all(map(operator.is_, known.setdefault(store.place, found), found))
        sizes = [place.rows * place.slots for place in known]
        assert sum(sizes) <= 2 * max(sizes)

    def test_others_make_way_for_one_that_has_no_room(self, store, dropped, monkeypatch):
        self.call(store, 1, 1000)
        zeros, asked = torch.zeros, []

        def out_of_memory_once(*args, **kwargs):
            asked.append(list(dropped))
            if len(asked) == 1:
                raise torch.OutOfMemoryError
            return zeros(*args, **kwargs)

        monkeypatch.setattr(torch, "zeros", out_of_memory_once)
        assert len(self.call(store, 1, 2000)) == 2
        assert asked == [[], [(1, 1024)], [(1, 1024)]]

    @pytest.mark.parametrize(("capacity", "slots"), [(1, 1024), (1025, 2048), (8192, 8192), (8193, 10240)])
    def test_slots(self, store, capacity, slots):
        assert self.take(store, 1, capacity).shape[2] == slots

    def test_rows_have_room_for_those_of_padding(self):
        sizes = {rows: len(self.take(SlotStore(list), rows, 4)) for rows in (1, 2, 3, 5, 8, 9, 16, 33)}
        assert sizes == {1: 1, 2: 2, 3: 4, 5: 8, 8: 8, 9: 16, 16: 16, 33: 40}


class TestLengths:
    """Calls of other lengths capture little anew."""

    def calls(self, model, lengths, batch_size=2):
        """Captures of calls with prompts of these lengths."""
        return [check_scripted(model, prompts(batch_size, length=length)).num_graph_captures for length in lengths]

    def test_prompts_of_similar_lengths(self, device, backends):
        """They have slots of one size."""
        model = tiny_llama(max_position_embeddings=4096).to(device)
        self.calls(model, [10, 10])
        assert self.calls(model, [90, 900, 10]) == [0] * 3

    @pytest.mark.smoke
    def test_a_long_prompt_costs_short_ones_nothing(self, device, backends):
        model = tiny_llama(max_position_embeddings=4096).to(device)
        self.calls(model, [10, 10])
        assert self.calls(model, [1500])[0] > 0
        assert self.calls(model, [40]) == [0]

    def test_fewer_rows_have_the_slots_of_more(self, device, backends):
        model = tiny_llama().to(device)
        for _ in range(2):
            self.calls(model, [10], batch_size=4)
            self.calls(model, [10], batch_size=2)
        assert set(place for place, *_ in graphs._models[model].forwards) == {(4, 1024)}
        assert self.calls(model, [10], batch_size=2) == [0]


class TestSharedOutputs:
    @pytest.fixture
    def everything_is_large(self, monkeypatch):
        monkeypatch.setattr(capture, "_LARGE_OUTPUT", 0)

    @pytest.mark.parametrize("script", SCRIPTS)
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_calls(self, script, batch_size, device, backends, everything_is_large):
        model = tiny_llama().to(device)
        for _ in range(2):
            stats = check_scripted(model, prompts(batch_size), **SCRIPTS[script])
        assert stats.num_graph_replays > (stats.num_target_forwards - 1) / 2

    def test_memory(self, device, backends, everything_is_large):
        """That of the largest, and of those that had to make way for it: not of all sizes."""
        model = tiny_llama().to(device)
        for k in (7, 3, 1):
            for _ in range(2):
                check_scripted(model, prompts(2), new_tokens=12, k=k)
        outputs = [captured.output[0] for captured in graphs._models[model].forwards.values()]
        sizes = sorted(output.nbytes for output in outputs)
        assert len(sizes) >= 3
        kept = {output.untyped_storage().data_ptr(): output.untyped_storage().nbytes() for output in outputs}
        assert sizes[-1] <= sum(kept.values()) <= 2 * sizes[-1]

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(0, 7), st.sampled_from([torch.bfloat16, torch.float32, torch.long])), max_size=4
        )
    )
    def test_what_is_put_comes_out(self, kinds):
        shared = SharedOutputs()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(capture, "_LARGE_OUTPUT", 16)
            for _ in range(2):
                given = {number: torch.randint(9, (3, size)).to(dtype) for number, (size, dtype) in enumerate(kinds)}
                output = shared.put((given, "text"))
                assert output[1] == "text"
                for number, tensor in given.items():
                    assert torch.equal(output[0][number], tensor)
                    assert (output[0][number] is tensor) == (tensor.nbytes < 16)


class Runtime:
    """What of CUDA a capture calls, noted; nothing runs.

    Attributes:
        events (`list[str]`): What was called.
        streams (`list[str]`): The current one is the last.
        errors (`list`): What the next captured runs raise, `None` for nothing.
    """

    def __init__(self, monkeypatch):
        self.events, self.streams, self.errors = [], ["call"], []
        for name in ("synchronize", "empty_cache", "ipc_collect"):
            monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: self.events.append(name))
        monkeypatch.setattr(gc, "collect", lambda *args: self.events.append("gc.collect"))
        for name, value in {
            "Stream": lambda: _Stream("capture", self),
            "current_stream": lambda *args: _Stream(self.streams[-1], self),
            "stream": self.stream,
            "device": lambda device: nullcontext(),
            "graph_pool_handle": lambda: "pool",
            "CUDAGraph": lambda: _Graph(self),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def stream(self, stream):
        self.streams.append(stream.name)
        try:
            yield
        finally:
            self.streams.pop()


class _Stream:
    def __init__(self, name, runtime):
        self.name, self.runtime = name, runtime

    def wait_stream(self, other):
        self.runtime.events.append(f"{self.name} waits for {other.name}")


class _Graph:
    def __init__(self, runtime):
        self.runtime = runtime

    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert (pool, capture_error_mode, self.runtime.streams[-1]) == ("pool", "thread_local", "capture")
        self.runtime.events.append("begin")

    def capture_end(self):
        self.runtime.events.append("end")
        if self.runtime.errors[:1] != [None]:
            raise RuntimeError("the capture was broken off")

    def replay(self):
        self.runtime.events.append("replay")


class TestCudaBackend:
    """In which order it calls CUDA, and what it leaves out."""

    @pytest.fixture
    def runtime(self, monkeypatch) -> Runtime:
        return Runtime(monkeypatch)

    def run_for(self, runtime):
        def run():
            runtime.events.append(f"run in {runtime.streams[-1]}")
            if runtime.events[-2] == "begin" and runtime.errors[0] is not None:
                raise runtime.errors[0]
            return "output"

        return run

    WARM_UP = ["capture waits for call", "run in capture", "run in capture"]
    CAPTURE = ["begin", "run in capture", "end"]

    def test_nothing_is_waited_for_and_no_memory_given_back(self, runtime):
        runtime.errors = [None]
        replay, output = CudaBackend(torch.device("cuda", 0)).capture(self.run_for(runtime))
        assert output == "output"
        assert runtime.events == [*self.WARM_UP, *self.CAPTURE, "call waits for capture"]
        replay()
        assert runtime.events[-1] == "replay"

    def test_failures_are_told_as_they_are(self, runtime):
        """And the stream is again that of the call."""
        runtime.errors = [KeyError("inside")]
        with pytest.raises(KeyError, match="inside"):
            CudaBackend(torch.device("cuda", 0)).capture(self.run_for(runtime))
        assert runtime.events[-2:] == ["end", "call waits for capture"]
        assert runtime.streams == ["call"]

    def test_memory_is_given_back_where_a_capture_wants_it(self, runtime):
        runtime.errors = [torch.OutOfMemoryError("full"), None]
        backend = CudaBackend(torch.device("cuda", 0))
        run = self.run_for(runtime)
        empty = torch.cuda.empty_cache

        def emptied():
            empty()
            runtime.errors.pop(0)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "empty_cache", emptied)
            assert backend.capture(run)[1] == "output"
        freed = ["synchronize", "empty_cache"]
        assert runtime.events == [*self.WARM_UP, *self.CAPTURE, *freed, *self.CAPTURE, "call waits for capture"]


@pytest.mark.gpu
@pytest.mark.smoke
def test_captures_do_not_wait_for_the_whole_device():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    model = tiny_llama().cuda()
    check_scripted(model, prompts(1))
    before = torch.cuda.memory_stats()
    assert check_scripted(model, prompts(1), k=7).num_graph_captures > 0
    after = torch.cuda.memory_stats()
    for name in ("num_sync_all_streams", "num_device_free"):
        assert after[name] == before[name]


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (33, 64), (64, 64)])
def test_padded_size(count, size):
    assert padded_size(count) == size


def assign_where(tensor):
    tensor[tensor > 0] = torch.ones(2, device=tensor.device)


class TestNoWaiting:
    """A forward is refused before the capture, which it would leave in pieces."""

    @pytest.mark.parametrize(
        "waits",
        [
            torch.Tensor.item,
            lambda tensor: bool(tensor.sum()),
            torch.Tensor.nonzero,
            torch.Tensor.unique,
            lambda tensor: tensor[tensor > 0],
            assign_where,
            lambda tensor: tensor.to("meta"),
            lambda tensor: tensor.repeat_interleave(tensor.long()),
        ],
    )
    def test_waiting(self, waits, device):
        given = torch.ones(1 if waits is torch.Tensor.item else 2, device=device)
        with pytest.raises(CannotCaptureError), NoWaiting():
            waits(given)

    @pytest.mark.parametrize(
        "copies",
        [
            lambda far: torch.tensor([1, 2], device=far.device),
            lambda far: torch.tensor(1.0, device=far.device),
            lambda far: torch.as_tensor(np.arange(2), device=far.device),
            lambda far: torch.asarray(obj=[1, 2], device=far.device),
            lambda far: far.new_tensor([1.0]),
            lambda far: far[[0, 1]],
            lambda far: far[:, np.arange(2)],
            lambda far: far[torch.arange(2)],
            lambda far: far.__setitem__((0, [0, 1]), 1.0),
        ],
    )
    def test_lists_that_go_to_the_device(self, copies, device):
        """What would copy from memory that a graph does not keep; torch shows only a part of it as operations."""
        far = torch.ones((2, 2), device="meta" if device.type == "cpu" else device)
        with pytest.raises(CannotCaptureError), NoWaiting():
            copies(far)

    def test_what_stays_where_it_is(self, device):
        far = torch.ones((2, 2), device="meta" if device.type == "cpu" else device)
        with NoWaiting():
            constant = torch.tensor([1.0, 2.0])[[1]]
            assert far.new_ones(2).device == far[0, :1].device == torch.as_tensor(far).device == far.device
            assert far[far.long()].shape == (2, 2, 2)
        assert constant.tolist() == [2.0]

    def test_filling_a_mask(self, device):
        given = torch.ones(2, device=device)
        with NoWaiting():
            given[given > 0] = 3.0
        assert given.tolist() == [3.0, 3.0]

    @pytest.mark.parametrize("reads", [torch.Tensor.tolist, torch.Tensor.numpy])
    def test_lists(self, reads):
        with pytest.raises(CannotCaptureError), NothingToHost():
            reads(torch.ones(1))


class TestTape:
    """The stand-in for graphs is as strict as they are."""

    def test_repeats_on_the_same_memory(self):
        given, kept = torch.arange(3.0), torch.zeros(3)
        with Tape() as tape:
            doubled = given * 2
            kept.copy_(doubled[1:].sum())
        given += 1
        tape.replay()
        assert doubled.tolist() == [2.0, 4.0, 6.0]
        assert kept.tolist() == [10.0] * 3

    def test_numbers_of_python_are_built_in(self):
        length, given = 2, torch.zeros(3)
        with Tape() as tape:
            given[:length] += length
        length = 3
        tape.replay()
        assert given.tolist() == [4.0, 4.0, 0.0]

    def test_other_tapes_are_spoiled(self):
        backend, given = TapeBackend(), torch.ones(2)
        replay, output = backend.capture(lambda: given + 1)
        other, other_output = backend.capture(lambda: given + 2)
        replay()
        assert other_output.isnan().all()
        other()
        assert output.isnan().all()
        assert other_output.tolist() == [3.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", supported())
def test_every_architecture(name, device, backends):
    """What a model reads in Python from the text or from the cache would be wrong in the next cycle."""
    case = Case(name, tiny_model(name).to(device))
    for batch_size in (1, 4):
        for script in ({"num_speculative_tokens": 5}, {"num_speculative_tokens": 3, "tree": TREE}):
            if "tree" in script and name in CHAINS_ONLY:
                continue
            output = case.speculate(batch_size, **script)
            assert output.sequences.tolist() == case.expected(batch_size).tolist()
            stats = output.speculative
            assert (stats.num_graph_replays > 0) == (stats.graphs == "on")
