"""Work that the next forward does not depend on runs beside it where forwards are asynchronous; on a CPU at once."""

from __future__ import annotations

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from hf_specdec import record
from hf_specdec.decoding import loop, reporting
from hf_specdec.decoding.functional import FunctionalSlotModel
from hf_specdec.logits import verifier
from tests.helpers.levels import in_full
from tests.helpers.models import prompts, scripted_for, tiny_llama


GREEDY = {"max_new_tokens": 24, "do_sample": False}
SCRIPTS = {"chains": {"k": 4}, "a tree for each row": {"tree": "random"}}
PROMPT = 7


@pytest.fixture
def defer(monkeypatch):
    """Lets the loop believe that forwards run by themselves, or not."""
    return lambda does: monkeypatch.setattr(reporting, "is_async", lambda device: does)


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """Events of calls, in order."""
    seen = []

    def note(owner, name, event):
        original = getattr(owner, name)

        def noting(*args, **kwargs):
            seen.append(event)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    note(loop.DecodingLoop, "_verify", "forward")
    note(loop, "count_cycle", "count")
    note(loop.DecodingLoop, "_observe", "observe")
    note(verifier, "_checked", "verdict")
    return seen


class Streamer(BaseStreamer):
    """Keeps what it is given; may fail.

    Args:
        events (`list[str]`): Gets a "put" for each column.
        fails_at (`int`, *optional*): Raises at this column.
    """

    def __init__(self, events=(), fails_at: int | None = None):
        self.events, self.fails_at = events, fails_at
        self.columns, self.has_ended = [], False

    def put(self, value):
        assert not self.has_ended
        if len(self.columns) == self.fails_at:
            raise KeyboardInterrupt
        self.columns.append(value.tolist())
        if self.events != ():
            self.events.append("put")

    def end(self):
        self.has_ended = True

    @property
    def text(self) -> list:
        """Tokens of each row, without the prompt."""
        return list(map(list, zip(*self.columns[1:])))


def speculate(model, inputs, plain, script=None, **arguments):
    speculator = scripted_for(plain, inputs, **(script or {"k": 4}))
    return model.generate(**inputs, **{**GREEDY, **arguments}, assistant=speculator)


def plain_text(model, inputs, **arguments):
    return model.generate(**inputs, **{**GREEDY, **arguments})


class TestOrder:
    def events_of_a_cycle(self, events, model) -> list[str]:
        inputs = prompts(1)
        plain = plain_text(model, inputs)
        events.clear()
        speculate(model, inputs, plain, {"k": 4, "accuracy": 0.0}, streamer=Streamer(events))
        # From the verdict of a cycle in the middle to that of the next one.
        verdicts = [index for index, event in enumerate(events) if event == "verdict"]
        return events[verdicts[8] : verdicts[9]]

    def test_at_once_on_a_cpu(self, events, model):
        assert self.events_of_a_cycle(events, model) == ["verdict", "count", "put", "observe", "forward"]

    def test_beside_the_next_forward(self, events, model, defer):
        defer(True)
        assert self.events_of_a_cycle(events, model) == ["verdict", "observe", "forward", "count", "put"]


class TestNothingElseChanges:
    @pytest.mark.parametrize(("script", "batch_size"), [("a tree for each row", 4), *in_full(("chains", 1))])
    def test_texts_and_records(self, script, batch_size, model, defer):
        inputs = prompts(batch_size)
        first = plain_text(model, inputs)[:, PROMPT:].tolist()
        # Rows end apart, in the middle of drafts.
        ends = {"eos_token_id": [first[0][9], first[-1][14]], "pad_token_id": 0}
        plain = plain_text(model, inputs, **ends)
        seen = []
        for does in (False, True):
            defer(does)
            streamer = Streamer()
            with record(trace=True, timings=True) as made:
                ours = speculate(model, inputs, plain, SCRIPTS[script], streamer=streamer, **ends)
            assert torch.equal(ours, plain)
            call = made.calls[0]
            counts = {
                name: value
                for name, value in call.stats.to_dict().items()
                if "second" not in name and "time" not in name
            }
            times = [timing.num_committed for timing in call.timings]
            seen.append((streamer.columns, counts, call.cycles, times))
        assert seen[0] == seen[1]

    def test_what_processors_and_criteria_see(self, model, defer):
        """A user's own code is called in the order of plain generation, also relative to the streamer."""

        class Watching(LogitsProcessor):
            def __call__(self, input_ids, scores):
                order.append(("processor", input_ids.tolist()))
                return scores

        class Stopping(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                order.append(("criterion", input_ids.tolist()))
                return torch.tensor([input_ids.shape[1] >= PROMPT + 15] * len(input_ids))

        class Noting(Streamer):
            def put(self, value):
                order.append(("streamer", value.tolist()))

        inputs = prompts(1)
        plain = plain_text(model, inputs)
        orders = []
        for does in (False, True):
            defer(does)
            orders.append(order := [])
            own = {
                "logits_processor": LogitsProcessorList([Watching()]),
                "stopping_criteria": StoppingCriteriaList([Stopping()]),
            }
            ours = speculate(model, inputs, plain, streamer=Noting(), **own)
            assert ours.shape[1] == PROMPT + 15
        assert orders[0] == orders[1]


class TestErrors:
    def closed_calls(self, monkeypatch):
        closed = []
        close = loop.SlotModel.close
        monkeypatch.setattr(loop.SlotModel, "close", lambda self: closed.append(self) or close(self))
        return closed

    @pytest.mark.parametrize("fails_at", [9, *in_full(2, 20)])
    def test_in_the_streamer(self, fails_at, defer, monkeypatch):
        """The call ends; the model is as it was, and what had been committed is counted."""
        model, inputs = tiny_llama(), prompts(1)
        plain = plain_text(model, inputs)
        closed = self.closed_calls(monkeypatch)
        defer(True)
        streamer = Streamer(fails_at=fails_at)
        with record(timings=True) as made, pytest.raises(KeyboardInterrupt):
            speculate(model, inputs, plain, streamer=streamer)
        call = made.calls[0]
        assert len(closed) == 1
        assert not streamer.has_ended
        assert streamer.text == [plain[0, PROMPT : PROMPT + fails_at - 1].tolist()]
        assert call.stats.num_committed_tokens >= fails_at
        # The cycle in whose bookkeeping it failed is told to its end.
        assert sum(timing.num_committed for timing in call.timings) == max(call.stats.num_committed_tokens - 1, 0)
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(speculate(model, inputs, plain), plain)

    @pytest.mark.parametrize("does", [False, True])
    def test_in_the_next_forward(self, does, defer, monkeypatch):
        """Tokens that were committed before it are streamed and counted."""
        model, inputs = tiny_llama(), prompts(1)
        plain = plain_text(model, inputs)
        forwards = []

        def failing(self, *args):
            forwards.append(1)
            if len(forwards) == 4:
                raise torch.OutOfMemoryError("no more of it")
            return forward(self, *args)

        forward = FunctionalSlotModel.forward
        monkeypatch.setattr(FunctionalSlotModel, "forward", failing)
        defer(does)
        streamer = Streamer()
        with record(trace=True) as made, pytest.raises(torch.OutOfMemoryError):
            speculate(model, inputs, plain, {"k": 4, "accuracy": 1.0}, streamer=streamer)
        assert len(made.calls[0].cycles) == 3
        assert len(streamer.text[0]) == made.calls[0].stats.num_committed_tokens > 10
        assert streamer.text[0] == plain[0, PROMPT : PROMPT + len(streamer.text[0])].tolist()
