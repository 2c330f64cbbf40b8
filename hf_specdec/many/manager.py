"""Requests that come and go while others are decoded, with the method names of transformers' continuous batching.

Three threads meet here: those who add requests and wait for results, one that prepares what was added, and one that
decodes, and looks between its steps at requests that have `_changed`. `_news` guards what they share, and tells of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

from transformers import GenerationConfig, PreTrainedModel

from ..errors import SpecConfigError, shown
from ..settings.checks import Bounds, checked
from .engine import engine_of_run
from .generate import SpeculativeGenerationOutput, output_of
from .requests import several
from .row import RequestResult, Row


# Seconds after which who waits looks whether anything can still come.
_LOOK_AGAIN = 0.1

# What threads can wait for.
_SECONDS = Bounds(most=threading.TIMEOUT_MAX)

_Handler = Callable[[SpeculativeGenerationOutput | None], None]


@dataclass(eq=False)
class _Request:
    """A request that has not ended."""

    name: str
    number: int
    tokens: list[int]
    settings: dict[str, Any]
    handler: _Handler | None
    num_streamed: int | None  # tokens that have been given out on the way; None without streaming
    row: Row | None = None  # once it is decoded, or waits for a place
    is_cancelled: bool = False


class SpeculativeBatchingManager:
    """Decodes requests in a thread of its own, with or without speculation; they are added from other threads.

    As a context manager it starts, and finishes what was added before it ends.

    ```python
    with SpeculativeBatchingManager(model, batch_size=8, spec_method="ngram", max_new_tokens=64) as manager:
        name = manager.add_request(ids)
        output = manager.get_result(name)
    ```

    Args:
        model (`PreTrainedModel`): The target. While the manager runs, it may only be changed inside `pause()`.
        generation_config (`GenerationConfig`, *optional*): Of all requests.
        batch_size (`int`): Requests that are decoded at a time.
        max_tokens_in_flight (`int`, *optional*), tokenizer, seed, arguments: As for
            [`~many.generate.generate_many`].

    Attributes:
        arguments (`dict`): transformers' arguments of all requests.
        error (`Exception`, *optional*): What has ended the thread, other than `stop`.

    Raises:
        SpecConfigError: The arguments cannot be honoured.
        UnsupportedModelError: The target's architecture cannot be driven by the loop, or it has an encoder.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        batch_size: int = 8,
        max_tokens_in_flight: int | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        **arguments: Any,
    ):
        if generation_config is not None:
            arguments["generation_config"] = generation_config
        self._engine = engine_of_run(model, arguments, tokenizer, seed, batch_size, max_tokens_in_flight)
        self.model: PreTrainedModel = model
        self.tokenizer: Any = tokenizer
        self.batch_size: int = batch_size
        self.arguments: dict[str, Any] = self._engine.reader.arguments
        self.error: Exception | None = None
        # Held during a step, and while a row is prepared; and by those who pause.
        self._turn, self._reading = threading.RLock(), threading.RLock()
        self._starting = threading.Lock()
        self._preparing = ThreadPoolExecutor(1, "hf_specdec preparation")
        self._thread: threading.Thread | None = None
        self._news = threading.Condition()  # guards what follows
        self._open: dict[str, _Request] = {}
        self._changed: list[_Request] = []  # they are prepared, or cancelled
        self._results: list[SpeculativeGenerationOutput] = []
        self._handlers: dict[str, _Handler] = {}  # of requests that are still to be added
        self._num_added = 0
        self._is_stopping = self._gives_up = False

    # The thread's life

    def start(self) -> None:
        """Begins to decode; where it is stopping, once that has come to its end."""
        with self._starting:
            if self._is_stopping and self._thread is not None:
                self._thread.join()
            if not self.is_running():
                self._is_stopping, self._gives_up, self.error = False, False, None
                # It does not hold the manager: one that nobody else holds ends.
                self._thread = threading.Thread(
                    target=_decode, args=(ref(self), self._news), name="hf_specdec", daemon=True
                )
                self._thread.start()

    def is_running(self) -> bool:
        """Tells whether requests are decoded, or waited for."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False) -> None:
        """Takes no more requests, and ends when those that were added have ended.

        Args:
            block (`bool`): Wait for that.
            timeout (`float`, *optional*): Seconds to wait at most.
            hard_stop (`bool`): Give up what has not ended.
        """
        timeout = checked("timeout", timeout, float | None, _SECONDS)
        with self._news:
            self._is_stopping, self._gives_up = True, self._gives_up or hard_stop
            self._news.notify_all()
        if block and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def destroy(self) -> None:
        """Ends at once."""
        self.stop(hard_stop=True)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, no forward runs, and the weights of the model may be changed. Nothing is lost."""
        with self._turn, self._reading:
            yield

    def __enter__(self) -> SpeculativeBatchingManager:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.stop(hard_stop=kind is not None)

    # Requests

    def encode(self, prompt: Any) -> list[int]:
        """Tokens of a prompt of any kind.

        Raises:
            SpecConfigError: It cannot be read.
        """
        return self._engine.reader.read(prompt)[0]

    def add_request(
        self,
        input_ids: Any,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        eos_token_id: int | list[int] | None = None,
        **settings: Any,
    ) -> str:
        """Adds a request; returns its id.

        Args:
            input_ids (`list[int]`): The prompt, or anything else that [`~many.generate.generate_many`] takes.
            request_id (`str`, *optional*): Its id; "req_0" and so on if none is given.
            max_new_tokens, eos_token_id, settings: Its own settings, all that `generate()` takes, and `seed`.
            streaming (`bool`): Give the output so far after every cycle, too.

        Raises:
            SpecConfigError: It cannot be read, its id is taken, or the manager is stopping.
        """
        checked("request_id", request_id, str | None)
        named = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        settings |= {name: value for name, value in named.items() if value is not None}
        try:
            self._engine.reader.check_settings(settings)
            tokens, in_request = self._engine.reader.read(input_ids)
            with self._news:
                if self._is_stopping:
                    raise SpecConfigError("The manager is stopping and takes no more requests. Start it anew.")
                number = self._num_added
                self._num_added += 1
                name = f"req_{number}" if request_id is None else request_id
                if name in self._open:
                    raise SpecConfigError(f"There is a request of the id {shown(name)}. Choose another one.")
                handler = self._handlers.pop(name, None)
                request = _Request(name, number, tokens, {**in_request, **settings}, handler, 0 if streaming else None)
                self._open[name] = request
                self._preparing.submit(self._prepare, request)
                return name
        except Exception:
            with self._news:
                # Nothing will come for it.
                self._handlers.pop(request_id, None)
            raise

    def add_requests(self, inputs: list[Any], max_new_tokens: int | None = None, **settings: Any) -> list[str]:
        """Adds several requests with the same settings; returns their ids."""
        return [self.add_request(prompt, max_new_tokens=max_new_tokens, **settings) for prompt in several(inputs)]

    def cancel_request(self, request_id: str) -> None:
        """Gives up a request, whose place is free for others. It has no result, unless it has ended already."""
        checked("request_id", request_id, str)
        with self._news:
            if (request := self._open.get(request_id)) is not None:
                request.is_cancelled = True
                self._tell(request)

    # Results

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> SpeculativeGenerationOutput | None:
        """The next result, or that of one request; waits for it.

        Returns:
            `None` where nothing has come in `timeout` seconds, or nothing can come any more.
        """
        checked("request_id", request_id, str | None)
        timeout = checked("timeout", timeout, float | None, _SECONDS)

        def places() -> list[int]:
            return [place for place, output in enumerate(self._results) if request_id in (None, output.request_id)]

        def may_come() -> bool:
            is_wanted = request_id in self._open if request_id is not None else self._open or not self._is_stopping
            return self.is_running() and bool(is_wanted)

        with self._news:
            self._news.wait_for(lambda: places() or not may_come(), timeout)
            return self._results.pop(places()[0]) if places() else None

    def __iter__(self) -> Iterator[SpeculativeGenerationOutput]:
        """Results as they come, until the manager has been stopped."""
        while True:
            output = self.get_result(timeout=_LOOK_AGAIN)
            if output is not None:
                yield output
            elif not self.is_running():
                return

    def request_id_iter(self, request_id: str) -> Iterator[SpeculativeGenerationOutput]:
        """Results of one request: of a streaming one several, the last of which is finished."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(
        self, request_id: str, callback: Callable[[SpeculativeGenerationOutput | None], Any]
    ) -> None:
        """Hands the results of a request to an event loop, the running one, instead of keeping them.

        Args:
            request_id (`str`): The request, before it is added.
            callback (`Callable`): Called in the event loop with each result, and with `None` where the request was
                cancelled or given up and nothing more comes.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError as error:
            raise SpecConfigError("No event loop is running. Register the handler in a coroutine.") from error

        def hand_over(output: SpeculativeGenerationOutput | None) -> None:
            # Who has closed the loop does not wait any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(callback, output)

        with self._news:
            if request_id in self._open:
                self._open[request_id].handler = hand_over
            else:
                self._handlers[request_id] = hand_over

    # In threads of its own

    def _prepare(self, request: _Request) -> None:
        """Makes the row of what has been added, while others are decoded."""
        try:
            with self._reading:
                if not request.is_cancelled:
                    request.row = self._engine.reader.row(request.number, request.tokens, request.settings)
        except Exception as error:  # noqa: BLE001 - of any kind: it is this request's
            self._end_request(request, RequestResult(request.number, error=error), is_refused=True)
        else:
            self._tell(request)

    def _tell(self, request: _Request) -> None:
        """Has the thread that decodes look at a request before its next step."""
        with self._news:
            self._changed.append(request)
            self._news.notify_all()

    @property
    def _has_work(self) -> bool:
        return not self._gives_up and bool(self._changed or not self._engine.is_idle)

    @property
    def _is_done(self) -> bool:
        return self._gives_up or (self._is_stopping and not self._open)

    def _work(self) -> bool:
        """Decodes until nobody waits; tells whether more may come."""
        goes_on = False
        try:
            while self._has_work:
                with self._turn:
                    with self._news:
                        changed, self._changed = self._changed, []
                    for request in changed:
                        if (row := request.row) is not None and row.owner is not None:
                            self._engine.cancel(row)
                        elif request.is_cancelled or row is None:
                            self._end_request(request)
                        elif self._open.get(request.name) is request:  # all may have ended since it was prepared
                            row.owner = request
                            self._engine.add(row)
                    ended = self._engine.step()
                for row in ended:
                    is_given_up = row.is_cancelled and row.error is None
                    result = None if is_given_up else RequestResult.of_row(row)
                    self._end_request(row.owner, result, is_refused=isinstance(row.error, SpecConfigError))
                with self._news:
                    going_on = [(request, request.row) for request in self._open.values()]
                for request, row in going_on:
                    if row is not None and request.num_streamed is not None and request.num_streamed < row.num_tokens:
                        request.num_streamed = row.num_tokens
                        self._hand_over(request, output_of(request.name, request.tokens, RequestResult.of_row(row)))
            with self._news:
                goes_on = not self._is_done
        except Exception as error:  # noqa: BLE001 - of any kind: those who wait have to hear of it
            self.error = error
        finally:
            if not goes_on:
                self._close()
        return goes_on

    def _end_request(self, request: _Request, result: RequestResult | None = None, is_refused: bool = False) -> None:
        """Closes a request with its last output; without a result, nothing comes for it any more."""
        with self._news:
            if self._open.get(request.name) is request:
                # Another request may have the id from now on.
                del self._open[request.name]
                output = None
                if result is not None:
                    output = output_of(request.name, request.tokens, result)
                    output.is_refused = is_refused
                self._hand_over(request, output)

    def _hand_over(self, request: _Request, output: SpeculativeGenerationOutput | None) -> None:
        with self._news:
            if request.handler is not None:
                request.handler(output)
            elif output is not None:
                self._results.append(output)
            self._news.notify_all()

    def _close(self) -> None:
        """Ends all requests that are open, with the error if there is one."""
        try:
            self._engine.close()
        finally:
            with self._news:
                self._is_stopping = True
                self._changed.clear()
                for request in list(self._open.values()):
                    result = None if self.error is None else RequestResult(request.number, error=self.error)
                    if result is not None and request.row is not None:
                        request.row.error = self.error
                        result = RequestResult.of_row(request.row)
                    self._end_request(request, result)
                for handler in self._handlers.values():
                    handler(None)
                self._handlers.clear()
                self._news.notify_all()


def _decode(manager_ref: ref[SpeculativeBatchingManager], news: threading.Condition) -> None:
    """Decodes for a manager, as long as somebody holds it or waits for a request."""
    while (manager := manager_ref()) is not None:
        with news:
            is_waiting = not (manager._has_work or manager._is_done)
            if is_waiting:
                del manager
                news.wait(_LOOK_AGAIN)
        if not (is_waiting or manager._work()):
            return
