"""Draft networks in graphs, on tapes in the place of CUDA graphs: every draft equals the one without graphs."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import demo, forget_speculators, load_speculator, record
from hf_specdec.candidate_generators.base import Commit, DraftStep, Prompt, Session
from hf_specdec.candidate_generators.slots import DraftInputs, DraftSlots, Entries
from hf_specdec.decoding import graphs
from hf_specdec.decoding.graphs import draft_graphs
from tests.candidate_generators import test_dflash as dflash_cases
from tests.candidate_generators import test_eagle as eagle_cases
from tests.candidate_generators import test_mtp as mtp_cases
from tests.tape import TapeBackend, spoil, spoil_inputs, tape_everything


CPU = torch.device("cpu")
TREE = {"depth": 3, "top_k": 3, "total_tokens": 10}


@pytest.fixture
def backends(monkeypatch) -> list[TapeBackend]:
    spoil_inputs(monkeypatch)
    return tape_everything(monkeypatch)


@cache
def network_of(kind: str) -> torch.nn.Module:
    method, _, variant = kind.partition("/")
    if method == "dflash":
        return dflash_cases.random_network(**dflash_cases.NETWORKS[variant])
    return (
        mtp_cases.random_mtp(3).eval()
        if method == "mtp"
        else eagle_cases.random_network(**eagle_cases.NETWORKS[method])
    )


def speculator_of(kind: str, **settings):
    cases = {"dflash": dflash_cases, "mtp": mtp_cases}.get(kind.partition("/")[0], eagle_cases)
    return cases.speculator_for(network_of(kind), **settings)


# Networks, and what is drafted with them.
CASES = {
    "eagle chain": ("eagle1", {"num_speculative_tokens": 4}),
    "eagle tree": ("eagle1", TREE),
    "eagle3 chain": ("eagle3", {"num_speculative_tokens": 3}),
    "eagle3 tree": ("eagle3", TREE),
    "eagle3 static tree": ("eagle3", {"speculative_token_tree": eagle_cases.STATIC}),
    "eagle3 doubtful tree": ("eagle3", {**TREE, "adaptive_threshold": 0.2}),
    "eagle3 doubtful chain": ("eagle3", {"num_speculative_tokens": 4, "adaptive_threshold": 0.2}),
    "window": ("window", TREE),
    "window static tree": ("window", {"speculative_token_tree": eagle_cases.STATIC}),
    "mtp layers": ("mtp", {"mode": "chain"}),
    "mtp two layers": ("mtp", {"mode": "chain", "num_speculative_tokens": 2}),
    "mtp doubtful layers": ("mtp", {"mode": "chain", "adaptive_threshold": 0.1}),
    "mtp one layer": ("mtp", {"mode": "reuse", "num_speculative_tokens": 4}),
    "mtp tree": ("mtp", {"mode": "reuse", **TREE}),
    "dflash": ("dflash/full", {}),
    "dflash windows": ("dflash/window_and_full", {}),
    "dflash causal tree": ("dflash/causal", {"dflash_tree_budget": 9}),
    "dflash denoising": ("dflash/reduced_vocabulary", {"dflash_num_denoising_steps": 3}),
    "dflash tree": ("dflash/reduced_vocabulary", {"dflash_tree_budget": 12, "num_speculative_tokens": 3}),
    "dflash corrections": ("dflash/corrections", {"num_speculative_tokens": 4}),
}
every_case = pytest.mark.parametrize(("kind", "shape"), CASES.values(), ids=CASES)


class Call:
    """A candidate generator in the middle of a call; what is committed, accepted and left is given from outside."""

    def __init__(self, kind: str, shape: dict, texts: list[torch.Tensor], states: list[dict], enforce_eager: bool):
        self.session = Session(len(texts), 60, CPU)
        speculator = speculator_of(kind, **shape, enforce_eager=enforce_eager)
        self.generator = speculator.candidate_generator(self.session)
        lengths = [len(text) for text in texts]
        starts = [max(lengths) - length for length in lengths]
        keys = self.generator.target_hidden_states
        self.generator.prefill(
            Prompt(
                eagle_cases.padded(texts, left=True),
                starts,
                {key: eagle_cases.padded([state[key] for state in states], left=True) for key in keys},
            )
        )

    def observe(self, texts: list[torch.Tensor], states: list[dict]) -> None:
        keys = self.generator.target_hidden_states
        columns = {key: eagle_cases.padded([state[key] for state in states], left=False) for key in keys}
        lists = [text.tolist() for text in texts]
        tokens = eagle_cases.padded(texts, left=False)
        self.generator.observe(Commit(list(range(len(texts))), tokens, lists, [0] * len(texts), columns))

    def propose(self, anchors: list[int], lengths: list[int], limits: list[int]) -> list[tuple]:
        draft = self.generator.propose(DraftStep(list(range(len(limits))), torch.tensor(anchors), lengths, limits))
        assert draft.size <= self.generator.num_draft_nodes
        return list(zip(draft.token_lists(), draft.parent_lists(), draft.max_depths()))

    @property
    def graphs(self):
        return self.session.draft_graphs[0]


def run(kind: str, shape: dict, num_rows: int, seed: int, num_cycles: int = 5) -> int:
    """The same made-up call with and without graphs; how many graphs have run."""
    random = torch.Generator().manual_seed(seed)
    network = network_of(kind)
    width = 32 if kind == "mtp" else network.config.target_hidden_size
    size = 40 if kind != "mtp" else 64
    keys = network.target_hidden_states

    def below(most: int) -> int:
        return int(torch.randint(0, most, (1,), generator=random))

    def text_of(length: int) -> tuple[torch.Tensor, dict]:
        states = {key: torch.randn((length, width), generator=random) for key in keys}
        return torch.randint(1, size - 1, (length,), generator=random), states

    parts = [text_of(2 + below(7)) for _ in range(num_rows)]
    # The last state of a prompt comes again with the first committed token.
    news = [(torch.randint(1, size - 1, (1,), generator=random), _last(states)) for _, states in parts]
    lengths = [len(text) for text, _ in parts]
    calls = [Call(kind, shape, *map(list, zip(*parts)), enforce_eager) for enforce_eager in (False, True)]
    deepest = calls[0].generator.num_speculative_tokens
    for _ in range(num_cycles):
        lengths = [length + len(text) for length, (text, _) in zip(lengths, news)]
        for call in calls:
            call.observe(*map(list, zip(*news)))
        if below(6) == 0:
            # Nothing was drafted before the next tokens.
            news = [text_of(1) for _ in lengths]
            continue
        limits = [below(deepest + 1) for _ in lengths] if below(3) == 0 else [deepest] * len(lengths)
        limits[0] = max(limits[0], 1)
        ours, eager = (call.propose([int(text[-1]) for text, _ in news], lengths, limits) for call in calls)
        assert ours == eager
        news = []
        for tokens, parents, _ in ours:
            # Of a chain a part is accepted; of a tree anything may be.
            is_chain = parents == list(range(-1, len(parents) - 1))
            accepted = below((len(tokens) if is_chain else deepest) + 1)
            text, states = text_of(accepted + 1)
            if is_chain:
                text[:accepted] = torch.tensor(tokens[:accepted], dtype=torch.long)
            news.append((text, states))
        if len(lengths) > 1 and below(3) == 0:
            keep = [len(lengths) - 1, *range(1, len(lengths) - 1)]
            for call in calls:
                call.generator.keep_rows(keep)
            lengths, news = [lengths[row] for row in keep], [news[row] for row in keep]
    for call in calls:
        call.generator.close()
    assert calls[1].graphs.num_replays == 0
    return calls[0].graphs.num_replays


def _last(states: dict) -> dict:
    return {key: value[-1:] for key, value in states.items()}


class TestDraftsEqualThoseWithoutGraphs:
    @every_case
    def test_calls(self, kind, shape, backends):
        """Rows of different length that leave one after the other; later calls find the graphs of earlier ones."""
        counts = [run(kind, shape, num_rows, seed) for seed in range(2) for num_rows in (1, 3)]
        assert sum(counts) > 0
        assert str(draft_graphs(network_of(kind))) == "on"

    @settings(max_examples=12, deadline=None)
    @given(case=st.sampled_from(sorted(CASES)), num_rows=st.integers(1, 5), seed=st.integers(0, 10**6))
    def test_any_call(self, case, num_rows, seed):
        with pytest.MonkeyPatch.context() as patch:
            spoil_inputs(patch)
            tape_everything(patch)
            run(*CASES[case], num_rows, seed)
            graphs.forget_graphs()


# The demo's target and the heads that were trained for it, with what is drafted.
HEADS = {
    "eagle": (demo.eagle_path, {"depth": 3, "top_k": 3, "total_tokens": 10}),
    "eagle3": (demo.eagle3_path, {"num_speculative_tokens": 4}),
    "mtp": (demo.mtp_path, {}),
    "dflash": (demo.dflash_path, {}),
    "dflash tree": (demo.dflash_path, {"dflash_tree_budget": 10}),
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
    return {"method": name.split()[0], "model": path(), **shape, **more}


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

    @pytest.mark.parametrize("name", ["eagle3", "mtp", "dflash"])
    def test_drawn_drafts(self, name, target, backends):
        """The same random numbers and laws, with and without graphs."""
        found = []
        for enforce_eager in (False, True):
            torch.manual_seed(5)
            speculative = settings_of(name, draft_sample_method="probabilistic", enforce_eager=enforce_eager)
            found.append(traced(target, inputs_of(2), speculative, do_sample=True))
        (text, drafts, stats), (eager_text, eager_drafts, _) = found
        assert text == eager_text
        assert drafts == eager_drafts
        assert stats.num_draft_graph_replays > 0

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

    def test_forgotten_with_the_speculator(self, target, backends):
        generate(target, inputs_of(1), speculative=settings_of("eagle3"))
        network = load_speculator(target, settings_of("eagle3")).resources
        assert graphs._models[network].forwards
        forget_speculators(target)
        assert network not in graphs._models

    def test_networks_are_not_kept_alive(self, target, backends):
        assert generate(target, inputs_of(1), speculative=settings_of("eagle3")).speculative.draft_graphs == "on"
        network = weakref.ref(load_speculator(target, settings_of("eagle3")).resources)
        with pytest.MonkeyPatch.context() as patch:
            # What forgets the network forgets its graphs; they alone must not hold it either.
            patch.setattr("hf_specdec.speculator.forget_graphs", lambda *args: None)
            forget_speculators(target)
        gc.collect()
        assert network() is None

    def test_threads(self, target, backends):
        """One call has the graphs, others draft without them."""
        inputs = inputs_of(2)
        plain = generate(target, inputs).sequences.tolist()
        load_speculator(target, settings_of("eagle3"))
        outputs, ready = [None] * 3, threading.Barrier(3)

        def run_calls(index: int) -> None:
            ready.wait()
            outputs[index] = [generate(target, inputs, speculative=settings_of("eagle3")) for _ in range(2)]

        threads = [threading.Thread(target=run_calls, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for output in sum(outputs, []):
            assert output.sequences.tolist() == plain
            assert output.speculative.draft_graphs in ("on", "off: another call is using the graphs of the model")


@pytest.mark.gpu
@every_head
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


class TestEager:
    def test_cpu(self, target):
        stats = generate(target, inputs_of(1), speculative=settings_of("eagle3")).speculative
        assert (stats.draft_graphs, stats.num_draft_graph_replays) == ("", 0)

    def test_hooks_on_what_is_shared(self, target, backends):
        """Modules of the target that the draft goes through are looked at as well."""
        network = load_speculator(target, settings_of("eagle")).resources
        assert str(draft_graphs(network)) == "on"
        handle = target.get_output_embeddings().register_forward_hook(lambda module, args, output: None)
        assert str(draft_graphs(network)) == "off: its modules have hooks, or forwards of their own"
        handle.remove()

    def test_a_draft_that_cannot_be_captured(self, target, backends, monkeypatch):
        """It drafts all the same, and is not tried again."""
        inputs = inputs_of(1)
        plain = generate(target, inputs).sequences.tolist()
        kind = type(load_speculator(target, settings_of("eagle3")).resources)
        fuse = kind.fuse

        def waiting(self, states):
            assert next(iter(states.values())).sum().item() < float("inf")
            return fuse(self, states)

        monkeypatch.setattr(kind, "fuse", waiting)
        text, _, stats = traced(target, inputs, settings_of("eagle3"))
        assert text == plain
        assert stats.draft_graphs.startswith("off: capturing failed: CannotCaptureError")
        assert stats.num_draft_graph_replays == 0

    def test_more_entries_than_a_cycle_leaves(self, backends):
        """As after plain cycles, whose tokens come all at once: they are read without a graph."""
        call = a_call("eagle3", {"num_speculative_tokens": 2})
        new = Entries(torch.zeros((2, 4), dtype=torch.long), {}, [4, 4])
        slots: DraftSlots = call.generator.entries
        assert slots.replay((), new, 3, 0, [1, 1], lambda inputs, columns: None) is None


def a_call(kind: str, shape: dict) -> Call:
    """A call for two rows of equal length."""
    network = network_of(kind)
    states = {key: torch.ones((5, network.config.target_hidden_size)) for key in network.target_hidden_states}
    return Call(kind, shape, [torch.arange(1, 6), torch.arange(2, 7)], [states, states], False)


class TestDraftInputs:
    def test_padding(self):
        """Entries of padding are zeros; rows of padding stand where the first one does."""
        call = a_call("eagle3", {})
        rows = call.generator.entries.rows
        inputs = DraftInputs(4, 3, {1: torch.zeros((2, 1, 5))}, CPU)
        for buffer in inputs.buffers:
            spoil(buffer)
        inputs.fill(Entries(torch.ones((2, 2)), {1: torch.ones((2, 2, 5))}, [1, 2]), [3, 4], rows)
        assert inputs.tokens.tolist() == [[1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
        assert inputs.states[1].sum() == 20
        assert inputs.counts.tolist() == [1, 2, 1, 1]
        assert inputs.limits.tolist() == [3, 4, 3, 3]
        assert inputs.ends[:, 0].tolist() == [4] * 4
        assert inputs.positions[:, 0].tolist() == [4] * 4
        assert inputs.first_slots[:, 0].tolist() == [0] * 4
