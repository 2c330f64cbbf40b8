"""Requests that come and go while others are decoded, with the method names of transformers' continuous batching."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

from transformers import GenerationConfig, PreTrainedModel

from ..arguments import ARGUMENTS, SpeculativeArguments
from ..call.entry import speculator_of_many
from ..errors import SpecConfigError, shown
from ..metrics import SpecDecodingStats
from ..validation import Bounds, checked
from .batching import SpeculativeGenerationOutput, output_of
from .engine import Engine, check_run
from .requests import RequestReader, several
from .row import Row


# Seconds after which who waits looks whether anything can still come.
_LOOK_AGAIN = 0.1

# What threads can wait for.
_SECONDS = Bounds(most=threading.TIMEOUT_MAX)


class _Added(NamedTuple):
    """A request that has been added."""

    name: str
    number: int
    tokens: list[int]
    settings: dict[str, Any]


class SpeculativeBatchingManager:
    """Decodes in a thread of its own what is added from others, with or without speculation.

    As a context it starts, and finishes what was added before it ends.

    ```python
    with SpeculativeBatchingManager(model, batch_size=8, spec_method="ngram", max_new_tokens=64) as manager:
        name = manager.add_request(ids)
        output = manager.get_result(name)
    ```

    Args:
        model (`PreTrainedModel`): The target. While the manager runs, nobody else may change it outside of `pause()`.
        generation_config (`GenerationConfig`, *optional*): Of all requests.
        batch_size (`int`): Requests that are decoded at a time.
        max_tokens_in_flight (`int`, *optional*), tokenizer, seed, arguments: As for
            [`~many.generate.generate_many`].

    Attributes:
        arguments (`dict`): transformers' arguments of all requests.
        error (`Exception`, *optional*): What has ended the thread, other than `stop`.

    Raises:
        SpecConfigError: The arguments cannot be honoured.
        UnsupportedModelError: The target's architecture cannot be driven by the loop.
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
        check_run(model, batch_size, max_tokens_in_flight)
        asked = SpeculativeArguments(**{name: arguments.pop(name, None) for name in ARGUMENTS})
        if generation_config is not None:
            arguments["generation_config"] = generation_config
        self.model: PreTrainedModel = model
        self.tokenizer: Any = tokenizer
        self.batch_size: int = batch_size
        self._reader = RequestReader(model, arguments, tokenizer, seed, batch_size)
        self.arguments: dict[str, Any] = self._reader.arguments
        speculator = speculator_of_many(model, self.arguments, asked, tokenizer)
        self._reader.check()
        self._engine = Engine(model, speculator, self._reader, batch_size, max_tokens_in_flight)
        # Held during a step, and while a row is prepared; and by those who pause.
        self._turn, self._reading = threading.RLock(), threading.RLock()
        self._starting = threading.Lock()
        self._news = threading.Condition()  # guards what follows
        self._added: deque[_Added] = deque()
        self._preparing: _Added | None = None  # at work on it there is a thread
        self._prepared: deque[tuple[_Added, Row]] = deque()
        self._cancelled: set[str] = set()
        self._names: set[str] = set()  # of all that have not ended
        self._results: OrderedDict[int, SpeculativeGenerationOutput] = OrderedDict()
        self._num_added = self._num_results = 0
        self._is_stopping = self._gives_up = False
        self._thread: threading.Thread | None = None
        self._rows: dict[int, tuple[str, Row]] = {}  # by id, in the thread alone
        self._streaming: dict[str, list[int]] = {}  # tokens that have been shown
        self._handlers: dict[str, Callable[[SpeculativeGenerationOutput | None], None]] = {}
        self.error: Exception | None = None

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
            timeout (`float`, *optional*): So many seconds at most.
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

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.stop(hard_stop=kind is not None)

    # Requests

    def encode(self, prompt: Any) -> list[int]:
        """Tokens of a prompt of any kind.

        Raises:
            SpecConfigError: It cannot be read.
        """
        return self._reader.read(prompt)[0]

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
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        settings |= {name: value for name, value in given.items() if value is not None}
        try:
            return self._add(input_ids, request_id, bool(streaming), settings)
        except Exception:
            with self._news:
                if request_id not in self._names:
                    # Nothing will come for it.
                    self._handlers.pop(request_id, None)
            raise

    def _add(self, prompt: Any, request_id: str | None, streaming: bool, settings: dict[str, Any]) -> str:
        self._reader.check_settings(settings)
        tokens, own = self._reader.read(prompt)
        with self._news:
            if self._is_stopping:
                raise SpecConfigError("The manager is stopping and takes no more requests. Start it anew.")
            number, self._num_added = self._num_added, self._num_added + 1
            name = f"req_{number}" if request_id is None else request_id
            if name in self._names:
                raise SpecConfigError(f"There is a request of the id {shown(name)}. Choose another one.")
            self._names.add(name)
            if streaming:
                self._streaming[name] = []
            self._added.append(_Added(name, number, tokens, {**own, **settings}))
            if self._preparing is None:
                self._preparing = self._added[0]
                threading.Thread(target=self._prepare, name="hf_specdec preparation", daemon=True).start()
        return name

    def add_requests(self, inputs: list[Any], max_new_tokens: int | None = None, **settings: Any) -> list[str]:
        """Adds several requests with the same settings; returns their ids."""
        return [self.add_request(prompt, max_new_tokens=max_new_tokens, **settings) for prompt in several(inputs)]

    def cancel_request(self, request_id: str) -> None:
        """Gives up a request, whose place is free for others. It has no result, unless it has ended already."""
        checked("request_id", request_id, str)
        with self._news:
            if request_id in self._names:
                self._cancelled.add(request_id)
                self._news.notify_all()

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
        with self._news:
            self._news.wait_for(lambda: self._find(request_id) is not None or not self._may_come(request_id), timeout)
            key = self._find(request_id)
            return None if key is None else self._results.pop(key)

    def _find(self, request_id: str | None) -> int | None:
        keys = (key for key, output in self._results.items() if request_id in (None, output.request_id))
        return next(keys, None)

    def _may_come(self, request_id: str | None) -> bool:
        if not self.is_running():
            return False
        return request_id in self._names if request_id is not None else bool(self._names) or not self._is_stopping

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
            self._handlers[request_id] = hand_over

    # In threads of its own

    def _prepare(self) -> None:
        """Makes rows of what has been added, while others are decoded."""
        while True:
            with self._news:
                if not self._added:
                    self._preparing = None
                    self._news.notify_all()
                    return
                self._preparing = added = self._added.popleft()
                if added.name in self._cancelled:
                    self._forget(added.name)
                    continue
            row = failed = None
            try:
                with self._reading:
                    row = self._reader.row(added.number, added.tokens, added.settings)
            except Exception as error:  # noqa: BLE001 - of any kind: it is this request's
                failed = replace(_failed(added, error), is_refused=True)
            with self._news:
                if self._preparing is not added:
                    # All has ended in the meantime.
                    return
                if failed is not None:
                    self._add_result(failed)
                else:
                    self._prepared.append((added, row))
                    self._news.notify_all()

    @property
    def _has_work(self) -> bool:
        return not self._gives_up and bool(self._prepared or not self._engine.is_idle)

    @property
    def _is_done(self) -> bool:
        return self._gives_up or (
            self._is_stopping and not (self._added or self._preparing is not None or self._has_work)
        )

    def _work(self) -> bool:
        """Decodes until nobody waits; tells whether more may come."""
        goes_on = False
        try:
            while self._has_work:
                with self._turn:
                    self._take()
                    ended = self._engine.step()
                self._publish(ended)
            with self._news:
                goes_on = not self._is_done
        except Exception as error:  # noqa: BLE001 - of any kind: those who wait have to hear of it
            with self._news:
                self.error, self._is_stopping = error, True
                waiting = [*(added for added, _ in self._prepared), self._preparing, *self._added]
            for name, row in self._rows.values():
                self._give(name, row, error)
            for added in waiting:
                if added is not None:
                    self._add_result(_failed(added, error))
        finally:
            if not goes_on:
                self._end()
        return goes_on

    def _take(self) -> None:
        """Hands over to the engine what has been added, and what was cancelled."""
        with self._news:
            # A name stays among them until its request has ended, wherever that is now.
            prepared, cancelled = list(self._prepared), set(self._cancelled)
            self._prepared.clear()
        for added, row in prepared:
            if added.name in cancelled:
                self._forget(added.name)
                continue
            try:
                self._engine.add(row)
            except Exception as error:  # noqa: BLE001 - of any kind: it is this request's
                self._add_result(replace(_failed(added, error), is_refused=True))
                continue
            self._rows[id(row)] = added.name, row
        if cancelled:
            for name, row in list(self._rows.values()):
                if name in cancelled:
                    self._engine.cancel(row)

    def _publish(self, ended: list[Row]) -> None:
        for row in ended:
            name, _ = self._rows.pop(id(row))
            if row.is_cancelled and row.error is None:
                self._forget(name)
            else:
                self._give(name, row, row.error)
        for name, row in self._rows.values():
            said = self._streaming.get(name)
            if said is not None and (new := row.tokens_from(len(said))):
                said += new
                self._add_result(output_of(name, row.prompt, list(said), None, row.stats.copy(), None, row.logprobs))

    def _give(self, name: str, row: Row, error: Exception | None) -> None:
        reason = row.finish_reason if error is row.error else "error"
        output = output_of(name, row.prompt, row.tokens, error, row.stats, reason, row.logprobs)
        output.is_refused = error is row.error and isinstance(error, SpecConfigError)
        self._add_result(output)

    def _add_result(self, output: SpeculativeGenerationOutput) -> None:
        with self._news:
            handler = self._handlers.get(output.request_id)
            if output.is_finished():
                self._names.discard(output.request_id)
                # Another request may have the id from now on.
                self._cancelled.discard(output.request_id)
                self._streaming.pop(output.request_id, None)
                self._handlers.pop(output.request_id, None)
            if handler is not None:
                handler(output)
                return
            self._results[self._num_results] = output
            self._num_results += 1
            self._news.notify_all()

    def _forget(self, name: str) -> None:
        with self._news:
            self._names.discard(name)
            self._cancelled.discard(name)
            self._streaming.pop(name, None)
            if (handler := self._handlers.pop(name, None)) is not None:
                handler(None)
            self._news.notify_all()

    def _end(self) -> None:
        try:
            self._engine.close()
        finally:
            with self._news:
                self._is_stopping = True
                self._rows.clear()
                self._added.clear()
                self._prepared.clear()
                self._preparing = None
                self._names.clear()
                self._cancelled.clear()
                self._streaming.clear()
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


def _failed(added: _Added, error: Exception) -> SpeculativeGenerationOutput:
    """The output of a request that has never been decoded."""
    return output_of(added.name, added.tokens, [], error, SpecDecodingStats(batch_size=1), "error")
