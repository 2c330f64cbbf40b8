"""Threads that load at once, and processes that fork while others do."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import threading
import traceback
import weakref
from contextlib import ExitStack, contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_specdec import forget_speculators, load_speculator
from hf_specdec.candidate_generators import register_candidate_generator, unregister_candidate_generator
from hf_specdec.candidate_generators.ngram.generator import NgramCandidateGenerator
from hf_specdec.checkpoints.files import RepoFiles
from hf_specdec.decoding.attention import attention_switch
from hf_specdec.decoding.graphs import ModelGraphs
from hf_specdec.loaded import record_of
from hf_specdec.metrics.log_line import IntervalLog
from hf_specdec.threads import Lock, OwnForwards, Recent, cached_property
from tests.helpers.architectures import tiny_model
from tests.helpers.interruptions import interrupted_everywhere
from tests.helpers.models import prompts, tiny_llama


# Only to fail instead of hanging for ever.
PATIENCE = 60

GREEDY = {"do_sample": False, "max_new_tokens": 8}


class Slow:
    """A registered method whose loading waits until it may go on, and counts how often it is begun."""

    def __init__(self):
        self.begun, self.may_end = threading.Semaphore(0), threading.Event()
        self.count, self.failures = 0, 0
        slow = self

        class SlowCandidateGenerator(NgramCandidateGenerator):
            loaded_by = ("prompt_lookup_max",)

            @classmethod
            def load(cls, config, target_model):
                slow.count += 1
                slow.begun.release()
                assert slow.may_end.wait(PATIENCE)
                if slow.failures:
                    slow.failures -= 1
                    raise OSError("the line is dead")
                return object()

        self.generator = SlowCandidateGenerator

    def wait_for_one(self):
        assert self.begun.acquire(timeout=PATIENCE)


@pytest.fixture
def slow():
    method = Slow()
    register_candidate_generator("slow", method.generator)
    yield method
    method.may_end.set()
    unregister_candidate_generator("slow")


class Calls:
    """Calls in threads of their own, and what they gave."""

    def __init__(self):
        self.threads, self.results = [], []

    def start(self, function, *args, **kwargs):
        def run():
            try:
                self.results.append(function(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - for the test to look at
                self.results.append(error)

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def end(self):
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        return self.results


@pytest.fixture
def calls():
    return Calls()


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


class TestLoading:
    def test_another_target_does_not_wait(self, slow, calls):
        mine, others = tiny_llama(), tiny_llama(seed=1)
        calls.start(load_speculator, mine, "slow")
        slow.wait_for_one()
        other = Calls()
        other.start(others.generate, **prompts(1), **GREEDY, spec_method="ngram")
        (text,) = other.end()
        assert torch.equal(text, others.generate(**prompts(1), **GREEDY))
        slow.may_end.set()
        assert calls.end()[0].method == "slow"

    def test_another_drafter_of_the_target_does_not_wait(self, slow, calls):
        model = tiny_llama()
        calls.start(load_speculator, model, "slow", prompt_lookup_max=3)
        slow.wait_for_one()
        other = Calls()
        other.start(load_speculator, model, "recycling")
        assert other.end()[0].method == "recycling"
        # Also one of the same method that takes its time.
        calls.start(load_speculator, model, "slow", prompt_lookup_max=4)
        slow.wait_for_one()
        slow.may_end.set()
        assert len({id(speculator.resources) for speculator in calls.end()}) == 2

    def test_threads_that_need_the_same_load_it_once(self, slow, calls):
        model = tiny_llama()
        for _ in range(4):
            calls.start(load_speculator, model, "slow")
        slow.wait_for_one()
        slow.may_end.set()
        assert len({id(speculator.resources) for speculator in calls.end()}) == 1
        assert slow.count == 1

    def test_one_that_waited_for_a_failure_tries_itself(self, slow, calls):
        model = tiny_llama()
        slow.failures = 1
        calls.start(load_speculator, model, "slow")
        slow.wait_for_one()
        calls.start(load_speculator, model, "slow")
        slow.may_end.set()
        results = sorted(calls.end(), key=lambda result: isinstance(result, OSError))
        assert [type(result).__name__ for result in results] == ["Speculator", "OSError"]
        assert load_speculator(model, "slow").resources is results[0].resources
        assert slow.count == 2

    def test_what_was_forgotten_meanwhile_is_loaded_again(self, slow, calls):
        model = tiny_llama()
        calls.start(load_speculator, model, "slow")
        slow.wait_for_one()
        forget_speculators(model)
        slow.may_end.set()
        (speculator,) = calls.end()
        assert load_speculator(model, "slow").resources is not speculator.resources

    def test_draft_models_are_built_one_after_the_other(self, tmp_path, monkeypatch, calls):
        """Meanwhile torch's default dtype is another one, in all threads."""
        target = tiny_llama()
        folders = [tmp_path / str(number) for number in range(2)]
        for number, folder in enumerate(folders):
            tiny_llama(seed=number).to(torch.bfloat16).save_pretrained(folder)
        build, together = AutoModelForCausalLM.from_pretrained, threading.Barrier(2)
        met = []

        def slow_build(*args, **kwargs):
            try:
                together.wait(0.5)
                met.append(True)
            except threading.BrokenBarrierError:
                pass
            return build(*args, **kwargs)

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", slow_build)
        for folder in folders:
            calls.start(load_speculator, target, "draft_model", model=str(folder), dtype="auto")
        assert [speculator.method for speculator in calls.end()] == ["draft_model"] * 2
        assert not met
        assert torch.get_default_dtype() == torch.float32

    def test_repositories_do_not_wait_for_each_other(self, tmp_path, monkeypatch, calls):
        """Attributes of functools that are computed once have one lock of all instances before Python 3.12."""
        (tmp_path / "config.json").write_text("{}")
        begun, may_end = threading.Event(), threading.Event()
        read_json = RepoFiles.read_json

        def slow_json(files, *args):
            if files.revision == "slow":
                begun.set()
                assert may_end.wait(PATIENCE)
            return read_json(files, *args)

        monkeypatch.setattr(RepoFiles, "read_json", slow_json)
        calls.start(lambda: RepoFiles(tmp_path, revision="slow").config)
        assert begun.wait(PATIENCE)
        other = Calls()
        other.start(lambda: RepoFiles(tmp_path).config)
        assert other.end() == [{}]
        may_end.set()
        assert calls.end() == [{}]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
# Python warns of what is tested here.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
class TestForks:
    def test_while_another_thread_loads(self, slow, calls):
        model = tiny_llama()
        expected = model.generate(**prompts(1), **GREEDY)
        calls.start(load_speculator, model, "slow")
        slow.wait_for_one()

        def child():
            slow.may_end.set()
            assert torch.equal(model.generate(**prompts(1), **GREEDY, spec_method="slow"), expected)

        in_a_fork(child)
        assert not slow.may_end.is_set()
        slow.may_end.set()
        assert calls.end()[0].method == "slow"

    def test_while_other_threads_hold_every_lock(self):
        model = tiny_llama()
        expected = model.generate(**prompts(1), **GREEDY, spec_method="suffix")
        cache = load_speculator(model, "suffix").resources
        parts = ("attention", "capture", "graphs")
        names = ("loaded", "metrics.listeners", "metrics.log_line", *(f"decoding.{part}" for part in parts))
        modules = [importlib.import_module(f"hf_specdec.{name}") for name in names]
        locks = [lock for module in modules for lock in vars(module).values() if isinstance(lock, Lock)]
        record, log = record_of(model), IntervalLog(1.0)
        locks += [record.lock, record.searching, log._lock, ModelGraphs()._lock]
        locks += [owner._lock for owner in (cache, attention_switch(model), record.found, record.learnt)]
        assert len(locks) >= 14

        def child():
            for lock in locks:
                with lock:
                    pass
            assert torch.equal(model.generate(**prompts(1), **GREEDY, spec_method="suffix"), expected)

        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(held_elsewhere(lock))
            in_a_fork(child)

    def test_by_the_thread_that_holds_a_lock(self):
        lock = Lock()
        with lock:
            # The child ends the block as well.
            child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

        def twice():
            with lock, lock:
                pass

        with lock:
            in_a_fork(twice)


class TestLifetimes:
    """Nothing that is kept for a target keeps it alive."""

    def test_targets_that_draft_for_each_other(self):
        one, two = tiny_llama(), tiny_llama(seed=1)
        expected = [model.generate(**prompts(1), **GREEDY) for model in (one, two)]
        for target, draft, text in ((one, two, expected[0]), (two, one, expected[1]), (one, two, expected[0])):
            assert torch.equal(target.generate(**prompts(1), **GREEDY, assistant=draft), text)
        references = [weakref.ref(one), weakref.ref(two)]
        del one, two, target, draft
        gc.collect()
        assert [reference() for reference in references] == [None, None]

    def test_a_target_inside_of_its_draft_model(self):
        class Wrapper(type(tiny_llama())):
            pass

        target = tiny_llama()
        draft = Wrapper(target.config).eval()
        draft.original = target
        load_speculator(target, draft_model=draft)
        references = [weakref.ref(target), weakref.ref(draft)]
        del target, draft
        gc.collect()
        assert [reference() for reference in references] == [None, None]


class TestRecent:
    def test_the_least_recently_used_leaves(self):
        recent = Recent(2)
        recent.put("a", 1)
        recent.put("b", 2)
        assert recent.get("a") == 1
        recent.put("c", 3)
        assert ("a" in recent, "b" in recent, "c" in recent, len(recent)) == (True, False, True, 2)
        assert recent.get("b", "none") == "none"
        recent.put("a", 4)
        recent.forget(lambda key: key == "c")
        assert (recent.get("a"), recent.get("c"), len(recent)) == (4, None, 1)


def test_a_cached_property_is_computed_once():
    class Owner:
        count = 0

        @cached_property
        def value(self):
            """Its own text."""
            self.count += 1
            return self.count

    owner = Owner()
    assert (owner.value, owner.value, Owner().value, Owner.value.__doc__) == (1, 1, 1, "Its own text.")


class TestOwnForwards:
    def modules(self) -> list[torch.nn.Module]:
        """One with its class's forward, one that keeps it under the name, and one with a user's own."""
        modules = [torch.nn.Linear(2, 2) for _ in range(3)]
        modules[1].forward = modules[1].forward
        modules[2].forward = print
        return modules

    def test_users_share_them(self):
        modules = self.modules()
        before = [dict(vars(module)) for module in modules]
        forwards = OwnForwards((module, len) for module in modules)
        with ExitStack() as first:
            first.enter_context(forwards.in_place())
            with forwards.in_place():
                first.close()
                assert [module.forward for module in modules] == [len, len, print]
            assert [dict(vars(module)) for module in modules] == before

    def test_they_leave_wherever_an_exception_comes(self):
        modules = self.modules()
        before = [dict(vars(module)) for module in modules]
        forwards = OwnForwards((module, len) for module in modules)

        def use():
            with forwards.in_place():
                assert modules[0].forward is len

        places = []
        for place in interrupted_everywhere(use, "threads.py"):
            assert [dict(vars(module)) for module in modules] == before, place
            places.append(place)
        assert len(places) > 20
        use()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_no_call_leaves_anything_in_a_model_wherever_it_is_interrupted(name):
    model, inputs = tiny_model(name), prompts(2)
    model.compile(backend="eager")
    # Not the lean forward.
    model.get_decoder().register_forward_hook(lambda *given: None)

    def state():
        kept = ("_parameters", "_modules", "_buffers")
        parts = [{key: value for key, value in vars(module).items() if key not in kept} for module in model.modules()]
        return [
            {key: dict(value) if isinstance(value, dict) else value for key, value in part.items()} for part in parts
        ]

    def call():
        model.generate(**inputs, do_sample=False, max_new_tokens=5, spec_method="recycling")

    call()
    before = state()
    for place in interrupted_everywhere(call):
        # Not as one expression: what differs is too long to be shown.
        is_as_before = state() == before
        assert is_as_before, place
