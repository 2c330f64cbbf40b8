"""Threads that load drafters at once, processes that fork meanwhile, and what outlives a target or an interruption."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec import forget_speculators, load_speculator
from hf_specdec.candidate_generators import register_candidate_generator, unregister_candidate_generator
from hf_specdec.candidate_generators.ngram.generator import NgramCandidateGenerator
from hf_specdec.loaded import record_of
from hf_specdec.metrics.log_line import IntervalLog
from hf_specdec.target.attention import attention_switch
from hf_specdec.target.graphs import ModelGraphs
from hf_specdec.threads import Lock, OwnForwards, cached_property
from tests.helpers.architectures import tiny_model
from tests.helpers.interruptions import interrupted_everywhere
from tests.helpers.levels import full, slow
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.threads import PATIENCE


GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.fixture
def pool():
    """Threads; `submit(...).result(PATIENCE)` raises what a call raises."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_cached_properties_of_two_objects_do_not_wait_for_each_other(pool):
    both = threading.Barrier(2)

    class Repository:
        @cached_property
        def place(self):
            return both.wait(PATIENCE)

    places = [pool.submit(lambda: Repository().place) for _ in range(2)]
    assert sorted(place.result(PATIENCE) for place in places) == [0, 1]


class SlowMethod:
    """A registered method whose loading waits until it may go on, and counts how often it is begun."""

    def __init__(self):
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        self.count, self.failures = 0, 0

    def load(self, config, target_model):
        self.count += 1
        self.begun.release()
        assert self.may_end.wait(PATIENCE)
        if self.failures:
            self.failures -= 1
            raise OSError("the line is dead")
        return object()

    def begin(self, pool, model, **settings):
        """Begins to load in a thread."""
        loading = pool.submit(load_speculator, model, "slow", **settings)
        assert self.begun.acquire(timeout=PATIENCE)
        return loading


@pytest.fixture
def slow_method(pool):
    method = SlowMethod()
    members = {"loaded_by": ("prompt_lookup_max",), "load": staticmethod(method.load)}
    register_candidate_generator("slow", type("SlowGenerator", (NgramCandidateGenerator,), members))
    yield method
    method.may_end.set()
    unregister_candidate_generator("slow")


def test_other_drafters_and_targets_do_not_wait(slow_method, pool):
    mine, others = tiny_llama(), tiny_llama(seed=1)
    loading = [slow_method.begin(pool, mine, prompt_lookup_max=3)]
    text = pool.submit(others.generate, **prompts(1), **GREEDY, spec_method="ngram").result(PATIENCE)
    assert torch.equal(text, others.generate(**prompts(1), **GREEDY))
    # Also one of the same method that takes its time.
    loading.append(slow_method.begin(pool, mine, prompt_lookup_max=4))
    slow_method.may_end.set()
    assert len({id(one.result(PATIENCE).resources) for one in loading}) == 2


def test_threads_load_the_same_once_and_again_after_a_failure(slow_method, pool):
    model = tiny_llama()
    slow_method.failures = 1
    loading = [slow_method.begin(pool, model), *(pool.submit(load_speculator, model, "slow") for _ in range(3))]
    slow_method.may_end.set()
    with pytest.raises(OSError, match="the line is dead"):
        loading[0].result(PATIENCE)
    assert len({id(one.result(PATIENCE).resources) for one in loading[1:]}) == 1
    assert slow_method.count == 2


@full
def test_what_was_forgotten_meanwhile_is_loaded_again(slow_method, pool):
    model = tiny_llama()
    loading = slow_method.begin(pool, model)
    forget_speculators(model)
    slow_method.may_end.set()
    assert load_speculator(model, "slow").resources is not loading.result(PATIENCE).resources


@full
def test_draft_models_are_built_one_after_the_other(tmp_path, monkeypatch, pool):
    """Meanwhile torch's default dtype is another one, in all threads."""
    for number in range(2):
        tiny_llama(seed=number).to(torch.bfloat16).save_pretrained(tmp_path / str(number))
    build, together, met = AutoModelForCausalLM.from_pretrained, threading.Barrier(2), []

    def meeting(*args, **kwargs):
        # Nobody comes, so that however long it waits changes nothing.
        with suppress(threading.BrokenBarrierError):
            met.append(together.wait(0.3))
        return build(*args, **kwargs)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", meeting)
    target = tiny_llama()
    settings = [{"model": str(tmp_path / str(number)), "dtype": "auto"} for number in range(2)]
    loading = [pool.submit(load_speculator, target, "draft_model", **own) for own in settings]
    assert [one.result(PATIENCE).method for one in loading] == ["draft_model"] * 2
    assert not met
    assert torch.get_default_dtype() == torch.float32


def in_a_fork(function) -> None:
    """Runs a function in a forked child, which must come to its end."""
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        try:
            function()
        except BaseException:  # noqa: BLE001 - nothing of the test may go on in the child
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@contextmanager
def held_elsewhere(lock):
    """Another thread holds the lock."""
    has_it, may_end = threading.Event(), threading.Event()

    def hold():
        with lock:
            has_it.set()
            assert may_end.wait(PATIENCE)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert has_it.wait(PATIENCE)
    yield
    may_end.set()
    thread.join(PATIENCE)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
# Python warns of what is tested here.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_fork_while_other_threads_load_and_hold_every_lock(slow_method, pool):
    model = tiny_llama()
    expected = model.generate(**prompts(1), **GREEDY, spec_method="suffix")
    cache = load_speculator(model, "suffix").resources
    parts = ("attention", "capture", "graphs")
    names = ("loaded", "metrics.listeners", "metrics.log_line", *(f"target.{part}" for part in parts))
    modules = [importlib.import_module(f"hf_specdec.{name}") for name in names]
    locks = [lock for module in modules for lock in vars(module).values() if isinstance(lock, Lock)]
    record, log = record_of(model), IntervalLog(1.0)
    locks += [record.lock, record.searching, log._lock, ModelGraphs().lock]
    locks += [owner._lock for owner in (cache, attention_switch(model), record.chosen, record.learnt)]
    assert len(locks) >= 14
    loading, held_here = slow_method.begin(pool, model), Lock()

    def child():
        slow_method.may_end.set()
        for lock in (*locks, held_here):
            with lock, lock:
                pass
        for method in ("suffix", "slow"):
            assert torch.equal(model.generate(**prompts(1), **GREEDY, spec_method=method), expected)

    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(held_elsewhere(lock))
        with held_here:
            in_a_fork(child)
    assert not slow_method.may_end.is_set()
    slow_method.may_end.set()
    assert loading.result(PATIENCE).method == "slow"


def test_nothing_that_is_kept_for_a_target_keeps_it_alive():
    one, two = tiny_llama(), tiny_llama(seed=1)
    expected = [model.generate(**prompts(1), **GREEDY) for model in (one, two)]
    for target, draft, text in ((one, two, expected[0]), (two, one, expected[1]), (one, two, expected[0])):
        assert torch.equal(target.generate(**prompts(1), **GREEDY, assistant=draft), text)
    assert torch.equal(one.generate(**prompts(1), **GREEDY, assistant=one), expected[0])
    # A target inside of its draft model.
    wrapper = type("Wrapper", (type(one),), {})(one.config).eval()
    wrapper.original = two
    load_speculator(two, draft_model=wrapper)
    references = [weakref.ref(model) for model in (one, two, wrapper)]
    del one, two, target, draft, wrapper
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_own_forwards_are_shared_and_leave_wherever_an_exception_comes():
    # One with its class's forward, one that keeps it under the name, and one with a user's own.
    modules = [torch.nn.Linear(2, 2) for _ in range(3)]
    modules[1].forward, modules[2].forward = modules[1].forward, print
    before = [dict(vars(module)) for module in modules]
    forwards = OwnForwards((module, len) for module in modules)
    with ExitStack() as first:
        first.enter_context(forwards.in_place())
        with forwards.in_place():
            first.close()
            assert [module.forward for module in modules] == [len, len, print]
        assert [dict(vars(module)) for module in modules] == before

    def use():
        with forwards.in_place():
            assert modules[0].forward is len

    places = []
    for place in interrupted_everywhere(use, "threads.py"):
        assert [dict(vars(module)) for module in modules] == before, place
        places.append(place)
    assert len(places) > 20
    use()


@slow
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_interrupted_calls_leave_nothing_in_a_model(name):
    model, inputs = tiny_model(name), prompts(2)
    model.compile(backend="eager")
    # Not the lean forward.
    model.get_decoder().register_forward_hook(lambda *given: None)

    def state():
        kept = ("_parameters", "_modules", "_buffers")
        parts = [{key: value for key, value in vars(module).items() if key not in kept} for module in model.modules()]
        return [{key: dict(own) if isinstance(own, dict) else own for key, own in part.items()} for part in parts]

    def call():
        model.generate(**inputs, do_sample=False, max_new_tokens=5, spec_method="recycling")

    call()
    before = state()
    for place in interrupted_everywhere(call):
        # Not as one expression: what differs is too long to be shown.
        is_as_before = state() == before
        assert is_as_before, place
