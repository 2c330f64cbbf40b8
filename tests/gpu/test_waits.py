"""The host waits for the device once in a cycle, whatever is drafted."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from hf_specdec import load_speculator, record
from hf_specdec.loop.loop import DecodingLoop
from hf_specdec.many.engine import Engine
from hf_specdec.many.requests import RequestReader
from tests.helpers.levels import in_full, split
from tests.helpers.models import prompts, scripted_for, tiny_gpt2, tiny_llama, tiny_mistral
from tests.helpers.other_device import DEVICE, move, other_device
from tests.helpers.sampled import sampled_speculator
from tests.helpers.tiny_drafters import GREEDY_DRAFTERS, tiny_drafter


GREEDY = {"max_new_tokens": 9, "do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 12}
TREES = {"tree": (-1, -1, 0, 0, 1, 2)}
SCRIPTS = {"chains": {"k": 4}, "trees": TREES, "a tree for each row": {"tree": "random"}}
DRAFTERS = [*SCRIPTS, *GREEDY_DRAFTERS, "sparse_kv"]
QUICK = ["chains", "a tree for each row", "ngram", "adaptive", "medusa, measured", "mlp_speculator, fixed"]
QUICK += ["eagle3, dynamic tree", "mtp, layers", "dflash"]
DRAWN = {
    "chains": lambda model: sampled_speculator(3),
    "trees": lambda model: sampled_speculator(2, widths=(2, 2)),
    "sparse_kv": lambda model: tiny_drafter(model, "sparse_kv"),
    "draft model": lambda model: tiny_drafter(model, "draft model"),
    "mlp_speculator": lambda model: tiny_drafter(model, "mlp_speculator, drawn"),
    "mtp": lambda model: tiny_drafter(model, "mtp, drawn"),
    "best tokens of a draft model": lambda model: tiny_drafter(model, "draft model", draft_sample_method="greedy"),
}


class Columns(BaseStreamer):
    """Keeps the tokens of a single row."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.extend(value.flatten().tolist())

    def end(self):
        pass


class Watched:
    """Runs calls on the other device.

    Attributes:
        cycles (`list[list[Wait]]`): The waits of each cycle of the last call.
    """

    def __init__(self, monkeypatch):
        self.waits, self.cycles = [], []
        cycle = DecodingLoop.cycle

        def watched(loop):
            before = len(self.waits)
            cycle(loop)
            if loop.session.device == DEVICE:
                self.cycles.append(self.waits[before:])

        monkeypatch.setattr(DecodingLoop, "cycle", watched)

    def generate(self, model, inputs, make_drafter, **arguments):
        """Text of the model with the drafter that `make_drafter` makes for it, once it is on the device."""
        self.cycles.clear()
        with other_device() as self.waits:
            inputs = {name: move(values) for name, values in inputs.items()}
            output = here(move(model), inputs, make_drafter, **arguments)
            return output.cpu() if torch.is_tensor(output) else output

    def check(self):
        """One wait in each cycle, for the verdict."""
        assert len(self.cycles) > 2
        for waits in self.cycles:
            # A drafter that has not drafted before reads the prompt first, once.
            found = [(wait.what, wait.where.split()[-1]) for wait in waits if not wait.where.endswith(" prefill")]
            assert found == [("read", "wait")]


@pytest.fixture
def watched(monkeypatch) -> Watched:
    return Watched(monkeypatch)


def here(model, inputs, make_drafter, **arguments):
    return model.generate(**inputs, **{**GREEDY, **arguments}, assistant=make_drafter(model))


def maker(name, plain, inputs):
    """What makes the drafter for a model; scripted ones know the plain text."""
    if name in SCRIPTS:
        return lambda model: scripted_for(plain.cpu(), inputs, **SCRIPTS[name])
    return lambda model: tiny_drafter(model, name)


class TestOneWaitACycle:
    def check_greedy(self, watched, model, inputs, name, **arguments):
        plain = model.generate(**inputs, **{**GREEDY, **arguments})
        ours = watched.generate(model, inputs, maker(name, plain, inputs), **arguments)
        assert ours.tolist() == plain.tolist()
        watched.check()
        return plain

    @pytest.mark.parametrize("drafter", split(DRAFTERS, short=QUICK))
    def test_greedy(self, drafter, watched):
        self.check_greedy(watched, tiny_llama(), prompts(3), drafter)

    @pytest.mark.parametrize("make", [tiny_mistral, *in_full(tiny_gpt2)])
    def test_windows_and_learned_positions(self, make, watched):
        self.check_greedy(watched, make(), prompts(3), "trees")

    def test_rows_end_apart(self, watched):
        model, inputs = tiny_llama(), prompts(4)
        texts = model.generate(**inputs, max_new_tokens=24, do_sample=False)[:, 7:].tolist()
        ends = {"max_new_tokens": 24, "eos_token_id": [texts[0][5], texts[2][11]], "pad_token_id": 0}
        plain = self.check_greedy(watched, model, inputs, "chains", **ends)
        assert len({row.index(0) if 0 in row else -1 for row in plain[:, 7:].tolist()}) > 1

    @pytest.mark.parametrize("drafter", split(DRAWN, short=["trees", "draft model"]))
    def test_sampling(self, drafter, watched):
        texts = []
        for run in (watched.generate, here):
            torch.manual_seed(3)
            texts.append(run(tiny_llama(), prompts(2), DRAWN[drafter], **SAMPLED).tolist())
        assert texts[0] == texts[1]
        watched.check()

    def test_outputs_and_streamer(self, watched):
        model, inputs = tiny_llama(), prompts(1)
        plain = model.generate(**inputs, **GREEDY)
        asked = {"output_scores": True, "output_logits": True, "output_hidden_states": True}
        asked |= {"streamer": Columns(), "return_dict_in_generate": True}
        output = watched.generate(model, inputs, maker("trees", plain, inputs), **asked)
        assert output.sequences.inner.tolist() == plain.tolist()
        assert asked["streamer"].tokens == plain[0].tolist()
        assert len(output.scores) == len(output.logits) == len(output.hidden_states) == GREEDY["max_new_tokens"]
        watched.check()

    def test_traces_come_with_the_verdict(self, watched):
        inputs = prompts(2)
        plain = tiny_llama().generate(**inputs, **GREEDY)
        traces = []
        for run in (watched.generate, here):
            with record(trace=True) as made:
                run(tiny_llama(), inputs, maker("a tree for each row", plain, inputs))
            traces.append(made.calls[0].cycles)
        assert traces[0] == traces[1]
        watched.check()

    def test_confidence_threshold_reads_every_token(self, watched):
        """A draft model that may stop early is asked for it."""
        model, inputs = tiny_llama(), prompts(2)
        plain = model.generate(**inputs, **GREEDY)
        early = {"draft_confidence_threshold": 0.5, "num_speculative_tokens": 6}
        ours = watched.generate(model, inputs, lambda model: tiny_drafter(model, "draft model", **early))
        assert ours.tolist() == plain.tolist()
        places = {wait.where.split()[-1] for waits in watched.cycles for wait in waits}
        assert places == {"wait", "stop_low_confidence"}
        assert min(map(len, watched.cycles)) < 6


# What torch warns of; a warning of the mode itself has other words.
TORCHS_WAITS = "called a synchronizing CUDA operation"


@contextmanager
def noted_waits() -> Iterator[list[str]]:
    """Yields a list that has, after the block, a message for each time that the host has waited for a GPU.

    Torch tells of its own waits, and nothing of those for an event.
    """
    waits: list[str] = []
    wait_for = torch.cuda.Event.synchronize

    def noted(event: torch.cuda.Event) -> None:
        waits.append("an event was waited for")
        wait_for(event)

    with ExitStack() as stack:
        seen = stack.enter_context(warnings.catch_warnings(record=True))
        stack.enter_context(patch.object(torch.cuda.Event, "synchronize", noted))
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waits += [message for message in (str(warning.message) for warning in seen) if TORCHS_WAITS in message]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=[pytest.mark.smoke] * (name in ("trees", "eagle3"))) for name in DRAFTERS]
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_one_wait_a_cycle_on_a_gpu(drafter, batch_size, gpu, monkeypatch):
    """Torch says itself where the host waits, but for events."""
    model, inputs = tiny_llama().to(gpu), prompts(batch_size)
    far = {name: values.to(gpu) for name, values in inputs.items()}
    plain = model.generate(**far, **GREEDY)
    assistant = maker(drafter, plain, inputs)(model)
    # Whatever is captured, compiled or kept for later is made in the first calls. In the fourth, of three rows, a
    # measured tree is rebuilt: after 64 drafts.
    for _ in range(4):
        model.generate(**far, **GREEDY, assistant=assistant)
    cycle, waits = DecodingLoop.cycle, []

    def watched(loop):
        with noted_waits() as seen:
            cycle(loop)
        waits.append(len(seen))

    monkeypatch.setattr(DecodingLoop, "cycle", watched)
    assert torch.equal(model.generate(**far, **GREEDY, assistant=assistant), plain)
    assert set(waits) == {1}


@pytest.mark.parametrize(("asked", "waits_of_a_step"), [({}, 1), ({"top_logprobs": 2}, 2)])
def test_rows_that_stream(asked, waits_of_a_step):
    """What rows have got so far is read after every cycle, and costs no wait; only log-probabilities cost one."""
    prompt, model = prompts(1, padding=False)["input_ids"][0].tolist(), tiny_llama()
    expected = model.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :].tolist()
    with other_device() as waits:
        model = move(model)
        reader = RequestReader(model, GREEDY, num_places=2)
        engine = Engine(load_speculator(model, "ngram", num_speculative_tokens=3), reader)
        rows = [reader.row(index, prompt, asked) for index in range(2)]
        for row in rows:
            engine.add(row)
        engine.step()
        steps, before = [], len(waits)
        while not engine.is_idle:
            engine.step()
            shown = [(row.tokens, row.logprobs) for row in rows]
            steps.append(len(waits) - before)
            before = len(waits)
    assert len(steps) > 1
    assert set(steps) == {waits_of_a_step}
    for tokens, logprobs in shown:
        assert tokens == expected
        assert len(logprobs) == (len(tokens) if asked else 0)
