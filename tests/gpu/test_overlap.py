"""Work that the next forward does not depend on runs beside it where forwards are asynchronous; on a CPU at once."""

from __future__ import annotations

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from hf_specdec import record
from hf_specdec.loop import cycle, loop, observers, rows
from hf_specdec.loop.ahead import Ahead
from hf_specdec.target.lean import LeanModel
from tests.helpers.levels import in_full
from tests.helpers.models import prompts, scripted_for, tiny_llama


GREEDY = {"max_new_tokens": 24, "do_sample": False}
CHAINS, TREES = {"k": 4}, {"tree": "random"}
PROMPT = 7


@pytest.fixture
def defer(monkeypatch):
    """Lets the loop believe that forwards run by themselves, or not."""
    begin = loop.DecodingLoop.begin

    def begin_ahead(self):
        parts = self.rows, self.drafter, self.target, self.judging
        self.ahead = Ahead(*parts, self.session, self.stats, self.observers)
        begin(self)

    return lambda does: monkeypatch.setattr(loop.DecodingLoop, "begin", begin_ahead if does else begin)


class Streamer(BaseStreamer):
    """Keeps the columns that it is given and tells of them; may fail at one of them."""

    def __init__(self, on_column=lambda column: None, fails_at: int | None = None):
        self.on_column, self.fails_at = on_column, fails_at
        self.columns, self.has_ended = [], False

    def put(self, value):
        assert not self.has_ended
        if len(self.columns) == self.fails_at:
            raise KeyboardInterrupt
        self.columns.append(value.tolist())
        self.on_column(value.tolist())

    def end(self):
        self.has_ended = True

    @property
    def text(self) -> list:
        """Tokens of each row, without the prompt."""
        return list(map(list, zip(*self.columns[1:])))


def speculate(model, inputs, plain, script=CHAINS, **arguments):
    return model.generate(**inputs, **{**GREEDY, **arguments}, assistant=scripted_for(plain, inputs, **script))


@pytest.mark.parametrize(
    ("does", "order"),
    [
        (False, ["verdict", "observe", "count", "put", "forward"]),
        (True, ["verdict", "observe", "forward", "count", "put"]),
    ],
)
def test_order_of_a_cycle(does, order, model, defer, monkeypatch):
    events = []

    def note(owner, name, event):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: events.append(event) or original(*args, **more))

    note(loop.DecodingLoop, "verify", "forward")
    note(observers.Statistics, "tell", "count")
    note(cycle.Cycle, "commit", "observe")
    note(rows.Rows, "append", "verdict")
    defer(does)
    inputs = prompts(1)
    plain = model.generate(**inputs, **GREEDY)
    streamer = Streamer(lambda column: events.append("put"))
    speculate(model, inputs, plain, {"k": 4, "accuracy": 0.0}, streamer=streamer)
    # From the verdict of a cycle in the middle to that of the next one.
    verdicts = [index for index, event in enumerate(events) if event == "verdict"]
    assert events[verdicts[8] : verdicts[9]] == order


@pytest.mark.parametrize(("script", "batch_size"), [(TREES, 4), *in_full((CHAINS, 1))])
def test_texts_and_records_are_the_same(script, batch_size, model, defer):
    inputs = prompts(batch_size)
    first = model.generate(**inputs, **GREEDY)[:, PROMPT:].tolist()
    # Rows end apart, in the middle of drafts.
    ends = {"eos_token_id": [first[0][9], first[-1][14]], "pad_token_id": 0}
    plain = model.generate(**inputs, **GREEDY, **ends)
    seen = []
    for does in (False, True):
        defer(does)
        streamer = Streamer()
        with record(trace=True, timings=True) as made:
            ours = speculate(model, inputs, plain, script, streamer=streamer, **ends)
        assert torch.equal(ours, plain)
        call = made.calls[0]
        counts = {k: value for k, value in call.stats.to_dict().items() if "second" not in k and "time" not in k}
        seen.append((streamer.columns, counts, call.cycles, [timing.num_committed for timing in call.timings]))
    assert seen[0] == seen[1]


def test_what_processors_and_criteria_see(model, defer):
    """A user's own code is called in the order of plain generation, also relative to the streamer."""

    class Watching(LogitsProcessor):
        def __call__(self, input_ids, scores):
            order.append(("processor", input_ids.tolist()))
            return scores

    class Stopping(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            order.append(("criterion", input_ids.tolist()))
            return torch.tensor([input_ids.shape[1] >= PROMPT + 15] * len(input_ids))

    inputs, orders = prompts(1), []
    plain = model.generate(**inputs, **GREEDY)
    for does in (False, True):
        defer(does)
        orders.append(order := [])
        own = {
            "logits_processor": LogitsProcessorList([Watching()]),
            "stopping_criteria": StoppingCriteriaList([Stopping()]),
            "streamer": Streamer(lambda column: order.append(("streamer", column))),
        }
        assert speculate(model, inputs, plain, **own).shape[1] == PROMPT + 15
    assert orders[0] == orders[1]


@pytest.mark.parametrize("fails_at", [9, *in_full(2, 20)])
def test_error_in_the_streamer(fails_at, defer, monkeypatch):
    """The call ends; the model is as it was, and what had been committed is counted."""
    model, inputs, closed = tiny_llama(), prompts(1), []
    plain = model.generate(**inputs, **GREEDY)
    close = loop.SlotModel.close
    monkeypatch.setattr(loop.SlotModel, "close", lambda self: closed.append(self) or close(self))
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
def test_error_in_the_next_forward(does, defer, monkeypatch):
    """Tokens that were committed before it are streamed and counted."""
    model, inputs, forwards = tiny_llama(), prompts(1), []
    plain = model.generate(**inputs, **GREEDY)
    forward = LeanModel.forward

    def failing(self, *args):
        forwards.append(1)
        if len(forwards) == 4:
            raise torch.OutOfMemoryError("no more of it")
        return forward(self, *args)

    monkeypatch.setattr(LeanModel, "forward", failing)
    defer(does)
    streamer = Streamer()
    with record(trace=True) as made, pytest.raises(torch.OutOfMemoryError):
        speculate(model, inputs, plain, {"k": 4, "accuracy": 1.0}, streamer=streamer)
    assert len(made.calls[0].cycles) == 3
    [text] = streamer.text
    assert len(text) == made.calls[0].stats.num_committed_tokens > 10
    assert text == plain[0, PROMPT : PROMPT + len(text)].tolist()
