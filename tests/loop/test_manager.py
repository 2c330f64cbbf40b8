"""Requests to a thread of its own and `generate_batch()`: results, streams, cancellations, errors, and the thread."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import weakref
from functools import partial

import pytest
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_specdec import SpecConfigError, SpeculativeBatchingManager, generate_batch
from tests.helpers.arrivals import NGRAM, Raises, prompt, said_alone
from tests.helpers.levels import full
from tests.helpers.models import VOCAB_SIZE, tiny_llama
from tests.helpers.threads import in_threads


# New tokens of a request that is running still when the test comes to it, however slow the test is.
ENDLESS = 1_000_000


@pytest.fixture
def manager(model):
    with SpeculativeBatchingManager(model, batch_size=2, do_sample=False, max_new_tokens=8, **NGRAM) as manager:
        yield manager
        manager.destroy()


def expected(model, index: int, new: int = 8) -> list[int]:
    return said_alone(model, prompt(index), max_new_tokens=new)


def assert_works(model, manager, name: str | None = None) -> None:
    result = manager.get_result(manager.add_request(prompt(0), name), timeout=60)
    assert result.generated_tokens == expected(model, 0)


def test_outputs_of_batches_are_those_of_transformers(model):
    prompts = [prompt(index, 2 + index) for index in range(5)]
    config = GenerationConfig(do_sample=False, max_new_tokens=7)
    outputs = generate_batch(model, prompts, config, batch_size=2, **NGRAM)
    assert list(outputs) == [f"req_{index}" for index in range(5)]
    for (name, output), own in zip(outputs.items(), prompts):
        assert isinstance(output, GenerationOutput)
        assert (output.request_id, output.prompt_ids, output.error) == (name, own, None)
        assert output.generated_tokens == said_alone(model, own, max_new_tokens=7)
        assert output.speculative.num_committed_tokens == 7
    right, wrong = generate_batch(model, [prompt(0), [VOCAB_SIZE]], max_new_tokens=3, do_sample=False).values()
    assert (right.status, wrong.status) == (RequestStatus.FINISHED, RequestStatus.FAILED)
    assert "from 0 to 63" in wrong.error
    config = GenerationConfig(do_sample=True, max_new_tokens=9, num_return_sequences=2, pad_token_id=0)
    outputs = model.generate_batch(prompts[:2], config, **NGRAM)
    assert list(outputs) == ["req_0__child#0", "req_0", "req_1__child#0", "req_1"]
    assert len({tuple(output.generated_tokens) for output in outputs.values()}) == 4


def test_results_of_requests(model, manager):
    names = manager.add_requests([prompt(index) for index in range(4)])
    assert names == ["req_0", "req_1", "req_2", "req_3"]
    own = manager.add_request(prompt(4), "mine", max_new_tokens=3)
    assert manager.get_result(own, timeout=60).generated_tokens == expected(model, 4, 3)
    outputs = {output.request_id: output for output in (manager.get_result(timeout=60) for _ in names)}
    assert [outputs[name].generated_tokens for name in names] == [expected(model, index) for index in range(4)]
    assert manager.get_result(timeout=0.01) is None
    assert manager.is_running()


def test_streams_and_cancelled_requests(model, manager):
    long = manager.add_request(prompt(0), max_new_tokens=ENDLESS)
    first, *parts, last = manager.request_id_iter(manager.add_request(prompt(1), streaming=True))
    text = expected(model, 1)
    assert all(part.generated_tokens == text[: len(part.generated_tokens)] for part in (first, *parts, last))
    assert [part.is_finished() for part in (first, *parts, last)] == [False] * (1 + len(parts)) + [True]
    # Outputs on the way are of their time.
    assert first.speculative.num_committed_tokens == len(first.generated_tokens) < 8
    assert last.speculative.num_committed_tokens == 8
    assert last.generated_tokens == text
    manager.cancel_request(long)
    manager.cancel_request("unknown")
    assert manager.get_result(long, timeout=60) is None
    # Its name is free again.
    assert_works(model, manager, long)


def test_late_cancellation_concerns_no_later_request(model, manager):
    step = manager._engine.step

    def cancelled_as_it_ends():
        if ended := step():
            manager.cancel_request("mine")
        return ended

    manager._engine.step = cancelled_as_it_ends
    for index in range(2):
        manager.add_request(prompt(index), "mine")
        assert manager.get_result("mine", timeout=60).generated_tokens == expected(model, index)


def test_results_for_an_event_loop(model, manager):
    async def listen() -> dict[str, list]:
        heard = {name: [] for name in ("streaming", "whole", "cancelled", "given up", "numbered")}
        ended = asyncio.Queue()

        def hear(name, output):
            heard[name].append(output)
            if output is None or output.is_finished():
                ended.put_nowait(name)

        for number, name in enumerate([*heard][:4]):
            manager.register_result_handler(name, partial(hear, name))
            length = 8 if number < 2 else ENDLESS
            manager.add_request(prompt(number), name, length, streaming=name == "streaming", eos_token_id=-1)
        await ended.get(), await ended.get()
        manager.cancel_request("cancelled")
        assert await ended.get() == "cancelled"
        # Ids that the manager chooses are known beforehand.
        manager.register_result_handler("req_4", partial(hear, "numbered"))
        assert manager.add_request(prompt(2)) == "req_4"
        assert await ended.get() == "numbered"
        manager.stop(hard_stop=True)
        assert await ended.get() == "given up"
        return heard

    heard = asyncio.run(asyncio.wait_for(listen(), 60))
    assert heard["cancelled"] == heard["given up"] == [None]
    (whole,) = heard["whole"]
    assert (whole.generated_tokens, whole.finish_reason) == (expected(model, 1), "length")
    *parts, last = heard["streaming"]
    assert parts
    assert {part.finish_reason for part in parts} == {None}
    assert last.generated_tokens == expected(model, 0)
    # Nothing is kept for those who ask otherwise.
    assert manager.get_result(timeout=0.01) is None


def test_errors_of_requests(model, manager):
    with pytest.raises(SpecConfigError, match="from 0 to 63"):
        manager.add_request([VOCAB_SIZE])
    manager.add_request(prompt(0), "failing", stopping_criteria=[Raises(1)])
    assert manager.get_result("failing", timeout=60).status == RequestStatus.FAILED
    with pytest.raises(SpecConfigError, match="for all requests"):
        manager.add_request(prompt(0), spec_method="suffix")
    # The first one cannot have ended when the second one comes.
    manager.add_request(prompt(0), "running", max_new_tokens=ENDLESS)
    with pytest.raises(SpecConfigError, match="Choose another"):
        manager.add_request(prompt(0), "running")
    manager.cancel_request("running")
    assert manager.error is None
    assert_works(model, manager, "failing")


def test_manager_starts_anew_after_an_error_of_its_own(model, manager):
    def broken():
        raise TypeError("broken")

    # Nothing is decoded, so that the thread is outside of a step.
    manager._engine.step = broken
    manager.add_request(prompt(0), "one")
    assert manager.get_result("one", timeout=60).status == RequestStatus.FAILED
    assert isinstance(manager.error, TypeError)
    with pytest.raises(SpecConfigError, match="stopping"):
        manager.add_request(prompt(0))
    del manager._engine.step
    manager.start()
    assert manager.error is None
    assert_works(model, manager)


@full
def test_bad_arguments(model, manager):
    for method, arguments in (
        (manager.get_result, {"timeout": math.nan}),
        (manager.get_result, {"request_id": []}),
        (manager.stop, {"timeout": "x"}),
        (manager.cancel_request, {"request_id": []}),
        (manager.add_request, {"input_ids": prompt(0), "request_id": [1]}),
        (manager.add_requests, {"inputs": "abc"}),
        # Outside of an event loop.
        (manager.register_result_handler, {"request_id": "x", "callback": print}),
    ):
        with pytest.raises(SpecConfigError):
            method(**arguments)


def test_stopping_manager_finishes_what_was_added_and_can_be_started_anew(model):
    manager = SpeculativeBatchingManager(model, batch_size=1, do_sample=False, max_new_tokens=8)
    with manager:
        with manager.pause():
            manager.add_requests([prompt(index) for index in range(2)])
            manager.stop(block=False)
        manager.start()
        manager.add_request(prompt(2))
    assert [output.generated_tokens for output in manager] == [expected(model, index) for index in range(3)]
    assert not manager.is_running()


@full
def test_manager_has_one_thread(manager):
    manager.stop()
    in_threads(*[manager.start] * 8)
    with manager.pause(), manager.pause():
        decoding = [thread for thread in threading.enumerate() if thread.name == "hf_specdec"]
        assert [thread for thread in decoding if thread._args[0]() is manager] == [manager._thread]


@full
def test_manager_that_nobody_holds_ends():
    target = tiny_llama(seed=4)
    manager = SpeculativeBatchingManager(target, do_sample=False, max_new_tokens=8, **NGRAM)
    manager.start()
    manager.get_result(manager.add_request(prompt(0)), timeout=60)
    thread, left = manager._thread, weakref.ref(target)
    del target, manager
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    gc.collect()
    assert left() is None


def test_weights_may_change_in_a_pause(model):
    target = tiny_llama(seed=3)
    with SpeculativeBatchingManager(target, do_sample=False, max_new_tokens=8, **NGRAM) as manager:
        manager.add_request(prompt(0))
        first = manager.get_result(timeout=60)
        with manager.pause():
            target.load_state_dict(model.state_dict())
        assert_works(model, manager)
    assert first.generated_tokens != expected(model, 0)
