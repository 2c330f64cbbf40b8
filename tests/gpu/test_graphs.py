"""Forwards as graphs: whole calls on tapes in the place of CUDA graphs, and the same on a GPU."""

from __future__ import annotations

import gc
import logging
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaForCausalLM
from transformers.generation import LogitsProcessor, LogitsProcessorList

from hf_specdec.call import build
from hf_specdec.kernels.indexing import arange
from hf_specdec.kernels.tree_attention import MAX_NODES
from hf_specdec.target import cache, capture, graphs
from hf_specdec.target.cache import SlotCache
from hf_specdec.target.capture import CudaBackend, SharedOutputs
from hf_specdec.target.graphs import CallGraphs, call_graphs
from tests.helpers.architectures import CHAINS_ONLY, supported, tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.families import TREE, Case
from tests.helpers.levels import full, in_full, slow
from tests.helpers.models import prompts, scripted_for, tiny_gpt2, tiny_llama, tiny_mistral
from tests.helpers.sampled import sampled_speculator
from tests.helpers.threads import in_threads


@pytest.fixture
def small_slots(monkeypatch):
    """Calls begin with room for hardly more than their prompts."""
    monkeypatch.setattr(cache, "_LEAST_SLOTS", 1)
    monkeypatch.setattr(build, "SlotCache", lambda capacity, limit: SlotCache(12, limit))


def generate(model, inputs, new_tokens=24, **arguments):
    inputs = {name: values.to(model.device) for name, values in inputs.items()}
    arguments = {"do_sample": False, "return_dict_in_generate": True, **arguments}
    return model.generate(**inputs, max_new_tokens=new_tokens, **arguments)


def check_scripted(model, inputs, new_tokens=24, **script):
    """A call with scripted drafts says what plain generation says; its statistics."""
    plain = generate(model, inputs, new_tokens).sequences
    output = generate(model, inputs, new_tokens, assistant=scripted_for(plain.cpu(), inputs, **script))
    assert output.sequences.tolist() == plain.tolist()
    return output.speculative


SCRIPTS = {"chains": {"k": 4}, "trees": {"tree": TREE}, "a tree for each row": {"tree": "random"}}


class TestCallsEqualPlainGeneration:
    @pytest.mark.parametrize(
        ("make", "script", "batch_size"),
        [
            *((tiny_llama, "trees", 1), (tiny_llama, "a tree for each row", 3), (tiny_mistral, "trees", 3)),
            *in_full((tiny_llama, "chains", 3), (tiny_llama, "trees", 3), (tiny_gpt2, "trees", 3)),
        ],
    )
    def test_drafts(self, make, script, batch_size, device, backends):
        stats = check_scripted(make().to(device), prompts(batch_size), **SCRIPTS[script])
        assert stats.graphs == "on"
        assert stats.num_graph_captures >= 1
        # All but the prefill.
        assert stats.num_graph_replays == stats.num_target_forwards - 1

    @full
    @pytest.mark.smoke
    def test_plain_decoding(self, device, backends):
        """One token at a time through a graph, without drafts."""
        model, inputs = tiny_llama().to(device), prompts(2)
        plain = generate(model, inputs).sequences
        output = generate(model, inputs, speculative="none")
        assert output.sequences.tolist() == plain.tolist()
        stats = output.speculative
        # One for each number of rows, at the beginning.
        assert (stats.num_graph_captures, stats.num_graph_replays) == (2, stats.num_target_forwards - 1)

    @pytest.mark.parametrize(
        "name", ["gemma3_text", *in_full("gpt_oss", "llama4_text", "qwen3", "gemma4_text", "phi3")]
    )
    def test_attention_from_the_tree(self, name, device, backends, with_kernel):
        case = Case(name, tiny_model(name).to(device))
        output = case.speculate(4, num_speculative_tokens=3, tree=TREE)
        assert output.sequences.tolist() == case.expected(4).tolist()
        # In float32 its experts are a loop on a GPU, whose sizes the host reads.
        if name == "gpt_oss" and device.type == "cuda":
            assert output.speculative.graphs.startswith("off")
        else:
            assert output.speculative.graphs == "on"
        assert output.speculative.attention.startswith("tree kernel")

    def test_rows_end_apart(self, device, backends, monkeypatch):
        """Rows that leave find their graphs: nothing is captured after the first verification."""
        model, inputs, seen = tiny_llama().to(device), prompts(5), []
        text = generate(model, inputs, 40).sequences[:, 7:].tolist()
        ends = {token: {row.index(token) for row in text if token in row} for token in range(64)}
        end = max(ends, key=lambda token: (len(ends[token]), min(ends[token], default=0)))
        assert len(ends[end]) >= 3
        plain = generate(model, inputs, 40, eos_token_id=end).sequences
        run, captures = CallGraphs.run, lambda self: (self.num_captures, self.num_replays)
        monkeypatch.setattr(CallGraphs, "run", lambda self, *args: [run(self, *args), seen.append(captures(self))][0])
        output = generate(model, inputs, 40, eos_token_id=end, assistant=scripted_for(plain.cpu(), inputs, k=2))
        assert output.sequences.tolist() == plain.tolist()
        assert output.speculative.num_graph_replays == len(seen) > 3
        # For eight, four, two and one rows; and once more for single tokens, at the ends of texts.
        assert seen[0] == (4, 1)
        assert {number for number, _ in seen} <= {4, 8}

    def test_states_logits_and_cache_survive(self, device, backends):
        """Everything a call returns is its own, not the memory of a graph."""
        model, inputs = tiny_llama().to(device), prompts(2)
        plain = generate(model, inputs, output_logits=True, output_scores=True)
        script = scripted_for(plain.sequences.cpu(), inputs)
        output = generate(model, inputs, assistant=script, output_logits=True, output_scores=True)
        assert output.speculative.num_graph_replays > 0
        generate(model, prompts(2, seed=1), assistant=script)
        for name in ("logits", "scores"):
            for mine, others in zip(getattr(output, name), getattr(plain, name), strict=True):
                torch.testing.assert_close(mine, others, atol=1e-3, rtol=1e-3)
        for mine, others in zip(output[CACHE].layers, plain[CACHE].layers, strict=True):
            if device.type == "cuda":
                # The kernel that reads the prompt lets padding see itself alone.
                padding = F.pad(inputs["attention_mask"] == 0, (0, mine.keys.shape[2] - inputs["input_ids"].shape[1]))
                for layer in (mine, others):
                    layer.keys = layer.keys.masked_fill(padding[:, None, :, None].to(device), 0)
            torch.testing.assert_close(mine.keys, others.keys, atol=1e-3, rtol=1e-3)

    @pytest.mark.smoke
    def test_sampling(self, device, backends):
        """Random numbers are equal, with and without graphs."""
        model, texts = tiny_llama().to(device), []
        for enforce_eager in (True, False):
            torch.manual_seed(3)
            drafter = sampled_speculator(3, enforce_eager=enforce_eager)
            texts.append(generate(model, prompts(2), assistant=drafter, do_sample=True).sequences.tolist())
        assert texts[0] == texts[1]

    @pytest.mark.smoke
    def test_hidden_states_of_the_target(self, device, backends):
        """A drafter reads states that the graph of the verification writes."""
        model, inputs = tiny_llama().to(device), prompts(2)
        plain, seen = generate(model, inputs).sequences, []
        for enforce_eager in (False, True):
            seen.append([])
            drafter = scripted_for(plain.cpu(), inputs)

            class Watching(drafter.generator_class):
                target_hidden_states = (1, "last")

                def observe(self, commit):
                    # Commits are read when others have followed.
                    seen[-1].append(commit)

            drafter.generator_class = Watching
            drafter.config = drafter.config.replace(enforce_eager=enforce_eager)
            replays = generate(model, inputs, assistant=drafter).speculative.num_graph_replays
            assert (replays == 0) == enforce_eager
        for ours, others in zip(*seen, strict=True):
            # Those of a graph are as wide as a whole draft.
            width = others.tokens.shape[1]
            assert torch.equal(ours.tokens[:, :width], others.tokens)
            assert not ours.tokens[:, width:].any()
            states = {key: value[:, :width] for key, value in ours.hidden_states.items()}
            torch.testing.assert_close(states, others.hidden_states, atol=1e-3, rtol=1e-3)


class TestReuse:
    @pytest.mark.smoke
    @pytest.mark.parametrize("is_inference", [False, *in_full(True)])
    def test_second_call_captures_nothing(self, is_inference, device, backends):
        """Calls inside and outside of inference mode share graphs and slots."""
        model, inputs = tiny_llama().to(device), prompts(2)
        with torch.inference_mode(is_inference):
            assert check_scripted(model, inputs).num_graph_captures > 0
        second = check_scripted(model, inputs)
        assert second.num_graph_captures == 0
        assert second.num_graph_replays == second.num_target_forwards - 1
        # Graphs read weights where they were.
        for parameter in model.parameters():
            parameter.data = -parameter.data
        with torch.inference_mode(is_inference):
            assert check_scripted(model, inputs).num_graph_captures > 0

    @full
    def test_what_a_graph_reads_is_kept_alive(self, monkeypatch):
        """Tensors made once for all who want them are kept too, even if they have had to make way since."""

        class Forgetful(CudaBackend):
            def capture(self, run):
                run()
                return lambda: None, None

        monkeypatch.setattr(graphs, "capture_backend", Forgetful)
        model, seen = tiny_llama(), []

        def read(inputs):
            places = arange(1000, torch.device("cpu"))
            seen.append(weakref.ref(places))

        call = call_graphs(model)
        captured = call.run(("key",), 1, lambda rows: {}, lambda inputs, rows: None, read)
        for size in range(300):
            arange(size, torch.device("cpu"))
        assert captured is not None
        assert seen[0]() is not None
        del captured, call
        graphs.forget_graphs(model)
        gc.collect()
        assert seen[0]() is None

    @full
    def test_forgotten_graphs_are_free_at_once(self, device, backends):
        """Without a collection of garbage, which may come late; graphs do not keep their model alive."""
        model = tiny_llama().to(device)
        check_scripted(model, prompts(1))
        kept = graphs._models[model]
        gone = [weakref.ref(part) for part in (kept, kept.store, *kept.forwards.values())]
        gc.collect()
        gc.disable()
        try:
            del kept
            graphs.forget_graphs(model)
            assert [part() for part in gone] == [None] * len(gone)
        finally:
            gc.enable()
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


def wrap_weights(model):
    """As quantised and sharded weights are."""
    weight = model.model.norm.weight.detach()
    model.model.norm.weight = torch.nn.Parameter(TwoTensor(weight, weight), requires_grad=False)


HOOKED = "its modules have hooks, or forwards of their own"
CHANGES = [
    ("it is split over several processes", lambda model: setattr(model, "_tp_size", 2)),
    ("its weights are wrapped tensors, whose addresses are not known", wrap_weights),
    ("its weights lie on several devices", lambda model: model.model.norm.to("meta")),
    ("it is in training mode", lambda model: model.train()),
    ("it has adapters, which may be switched", lambda model: setattr(model.model.norm, "active_adapter", "default")),
    (HOOKED, lambda model: setattr(model.model, "forward", model.model.forward)),
    (HOOKED, lambda model: model.model.layers[0].register_forward_hook(lambda module, args, output: None)),
]


class TestEager:
    def test_cpu_and_enforce_eager(self, request):
        stats = generate(tiny_llama(), prompts(1), spec_method="ngram").speculative
        assert (stats.graphs, stats.peak_memory_bytes) == ("off: not on a CUDA device", 0)
        request.getfixturevalue("tapes")
        eager = {"method": "ngram", "enforce_eager": True}
        stats = generate(tiny_llama(), prompts(1), speculative=eager).speculative
        assert (stats.graphs, stats.num_graph_replays) == ("off: enforce_eager=True", 0)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("qwen3_next", "it has layers with a recurrent state"),
            *in_full(("bloom", "it tells positions from the slots")),
        ],
    )
    def test_models_that_cannot_be_captured(self, name, reason, device, backends):
        case = Case(name, tiny_model(name).to(device))
        output = case.speculate(1, num_speculative_tokens=3)
        assert output.speculative.graphs.startswith(f"off: {reason}")

    @pytest.mark.parametrize(("reason", "change"), CHANGES)
    def test_changed_models(self, reason, change, device, backends):
        model = tiny_llama().to(device)
        with torch.autocast(device.type, torch.bfloat16):
            assert str(call_graphs(model)) == "off: autocast is on"
        assert str(call_graphs(model)) == "on"
        change(model)
        assert str(call_graphs(model)) == f"off: {reason}"

    def test_hidden_states_of_all_layers(self, device, backends):
        output = generate(tiny_llama().to(device), prompts(1), spec_method="ngram", output_hidden_states=True)
        assert output.speculative.graphs == "off: the hidden states of all layers are returned"

    def test_hooks_that_transformers_leaves_behind(self, device, backends):
        model = tiny_llama().to(device)
        generate(model, prompts(1), 2, output_hidden_states=True)
        assert str(call_graphs(model)) == "on"

    @full
    def test_long_drafts(self, device, backends):
        model, inputs = tiny_llama().to(device), prompts(1)
        stats = check_scripted(model, inputs, new_tokens=90, k=MAX_NODES + 1, accuracy=0.0)
        assert stats.num_graph_replays < stats.num_target_forwards - 1


class Waiting(LlamaForCausalLM):
    """Asks the device for a number in every forward."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        assert input_ids.max().item() < self.config.vocab_size
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


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
        # And is not captured again.
        monkeypatch.setattr(CallGraphs, "_capture", lambda *args: pytest.fail("captured again"))
        assert "capturing failed" in check_scripted(model, prompts(2)).graphs

    @full
    def test_in_the_middle_of_a_call(self, device, backends, small_slots, monkeypatch):
        """The slots stay where they are."""
        in_a_graph, columns = SlotCache.in_a_graph, set()

        def failing(self, lengths, num_columns):
            columns.add(num_columns)
            assert len(columns) < 2, "no more of it"
            return in_a_graph(self, lengths, num_columns)

        monkeypatch.setattr(SlotCache, "in_a_graph", failing)
        stats = check_scripted(tiny_llama().to(device), prompts(3), new_tokens=60)
        assert stats.num_graph_replays > 0
        assert stats.graphs.startswith("off: capturing failed: AssertionError: no more of it")


class TestCallsAtOnce:
    def test_the_second_call_runs_without(self, device, backends):
        """Until the first one, which may fail, gives them back."""

        class Failing(LogitsProcessor):
            def __call__(self, input_ids, scores):
                second = call_graphs(model)
                assert str(second) == "off: another call is using the graphs of the model"
                assert second.store is None
                if input_ids.shape[1] > 10:
                    raise KeyboardInterrupt
                return scores

        model, inputs = tiny_llama().to(device), prompts(1)
        with pytest.raises(KeyboardInterrupt) as caught:
            generate(model, inputs, spec_method="ngram", logits_processor=LogitsProcessorList([Failing()]))
        assert check_scripted(model, inputs).graphs == "on"
        assert caught.traceback

    @full
    def test_threads(self, device, backends):
        model, inputs = tiny_llama().to(device), [prompts(2, seed=seed) for seed in range(4)]
        plain = [generate(model, each).sequences for each in inputs]

        def run(index):
            script = scripted_for(plain[index].cpu(), inputs[index], seed=index)
            return [generate(model, inputs[index], assistant=script) for _ in range(3)]

        outputs = in_threads(*(partial(run, index) for index in range(len(inputs))))
        for text, runs in zip(plain, outputs, strict=True):
            for output in runs:
                assert output.sequences.tolist() == text.tolist()
                assert output.speculative.graphs in ("on", "off: another call is using the graphs of the model")


class TestLengths:
    """Calls of other lengths and batch sizes capture nothing anew where the slots of earlier ones serve."""

    @pytest.mark.smoke
    @pytest.mark.parametrize(
        ("first", "rows", "place", "others"),
        [
            # Prompts of similar lengths.
            (10, 2, (2, 1024), [90, 900, 10]),
            # A long prompt leaves the slots of short ones.
            *in_full((10, 2, (2, 1024), [1500, 40])),
            # Smaller calls have the slots of larger ones.
            *in_full((10, 4, (4, 1024), [10, 40]), (1500, 2, (2, 2048), [10, 40])),
        ],
    )
    def test_slots_of_earlier_calls(self, first, rows, place, others, device, backends):
        model = tiny_llama(max_position_embeddings=4096).to(device)
        check_scripted(model, prompts(rows, length=first))
        check_scripted(model, prompts(2, length=10))
        captures = [check_scripted(model, prompts(2, length=length)).num_graph_captures for length in others]
        assert [count > 0 for count in captures] == [length > place[1] for length in others]
        places = {place for place, *_ in graphs._models[model].forwards}
        assert places == {place, *((2, 2048) for length in others if length > place[1])}


class TestSharedOutputs:
    @pytest.fixture(autouse=True)
    def everything_is_large(self, monkeypatch):
        monkeypatch.setattr(capture, "_LARGE_OUTPUT", 0)

    @pytest.mark.parametrize(
        ("script", "batch_size"), [("trees", 3), *in_full(("chains", 1), ("a tree for each row", 3))]
    )
    def test_calls(self, script, batch_size, device, backends):
        model = tiny_llama().to(device)
        for _ in range(2):
            stats = check_scripted(model, prompts(batch_size), **SCRIPTS[script])
        assert stats.num_graph_replays > (stats.num_target_forwards - 1) / 2

    @full
    def test_memory(self, device, backends):
        """Memory of the largest, and of those that had to make way for it: not of all sizes."""
        model = tiny_llama().to(device)
        for k in (7, 3, 1):
            for _ in range(2):
                check_scripted(model, prompts(2), new_tokens=12, k=k)
        outputs = [captured.output[0] for captured in graphs._models[model].forwards.values()]
        sizes = sorted(output.nbytes for output in outputs)
        assert len(sizes) >= 3
        kept = {output.untyped_storage().data_ptr(): output.untyped_storage().nbytes() for output in outputs}
        assert sizes[-1] <= sum(kept.values()) <= 2 * sizes[-1]

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


@pytest.mark.gpu
@pytest.mark.smoke
def test_captures_do_not_wait_for_the_whole_device(gpu):
    model = tiny_llama().to(gpu)
    check_scripted(model, prompts(1))
    before = torch.cuda.memory_stats()
    assert check_scripted(model, prompts(1), k=7).num_graph_captures > 0
    after = torch.cuda.memory_stats()
    for name in ("num_sync_all_streams", "num_device_free"):
        assert after[name] == before[name]


@slow
@pytest.mark.parametrize("name", supported())
def test_every_architecture(name, device, backends):
    """Values that a model reads in Python from the text or from the cache would be wrong in the next cycle."""
    case = Case(name, tiny_model(name).to(device))
    for batch_size in (1, 4):
        for script in ({"num_speculative_tokens": 5}, {"num_speculative_tokens": 3, "tree": TREE}):
            if "tree" in script and name in CHAINS_ONLY:
                continue
            output = case.speculate(batch_size, **script)
            assert output.sequences.tolist() == case.expected(batch_size).tolist()
            stats = output.speculative
            assert (stats.num_graph_replays > 0) == (stats.graphs == "on")
