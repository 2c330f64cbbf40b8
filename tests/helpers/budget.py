"""Processor time of a run: where it goes, and an error where it is twice what `--budget` allows.

It is the time that the processes of the run compute, those that tests start included. The same work takes up to three
times as much on another machine, or where others share its cores. So a fixed piece of work is done again and again
between the tests, and the budget is in seconds of a machine that does it in `_REFERENCE`.

`--most-seconds` is a limit by the clock on the wall: tests that have not begun by then are skipped.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections import Counter

import pytest


_SHOWN = 12
_ALLOWANCE = 2
_REFERENCE = 0.006
_TESTS_BETWEEN = 20

_SOURCE = "\n".join(f"def f{i}(x, *y):\n    return [x + {i} * z for z in y if z] or f'{{x}}'" for i in range(150))


def used_seconds() -> float:
    """Seconds that this process and those that it has waited for have computed."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def reference_seconds() -> float:
    """Seconds that the fixed piece of work takes: small products, and what Python does for a page of code."""
    import torch

    before, values = time.thread_time(), torch.eye(48)
    for _ in range(400):
        values = torch.softmax(values @ values, dim=-1)
    compile(_SOURCE, "reference", "exec")
    return time.thread_time() - before


def pytest_addoption(parser):
    parser.addoption("--budget", type=float, help="Seconds of processor time that the run takes on a known machine.")
    parser.addoption("--most-seconds", type=float, default=math.inf, help="After these no test of the run begins.")


class Budget:
    """Adds up what the processes of a run have used, and what each file of tests has."""

    def __init__(self, config: pytest.Config):
        self.budget = config.getoption("budget")
        self.is_worker = hasattr(config, "workeroutput")
        self.of_workers = 0.0
        self.of_files: Counter[str] = Counter()
        self.num_tests = 0
        self.references: list[float] = []
        self.ends = time.monotonic() + config.getoption("most_seconds")

    def pytest_runtest_setup(self):
        if time.monotonic() > self.ends:
            pytest.skip("The time that this run may take is over.")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        before = used_seconds()
        output = yield
        self.of_files[item.nodeid.partition("::")[0]] += used_seconds() - before
        if self.budget and self.num_tests % _TESTS_BETWEEN == 0:
            self.references.append(reference_seconds())
        self.num_tests += 1
        return output

    def pytest_sessionfinish(self, session):
        if self.is_worker:
            session.config.workeroutput["used_seconds"] = used_seconds()
            session.config.workeroutput["of_files"] = dict(self.of_files)
            session.config.workeroutput["references"] = self.references
        elif self.is_over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        output = getattr(node, "workeroutput", {})
        self.of_workers += output.get("used_seconds", 0.0)
        self.of_files.update(output.get("of_files", {}))
        self.references += output.get("references", [])

    @property
    def total(self) -> float:
        # Workers are children that are not waited for before the end.
        return self.of_workers or used_seconds()

    @property
    def on_the_known_machine(self) -> float:
        return self.total * _REFERENCE / statistics.mean(self.references) if self.references else 0.0

    @property
    def is_over(self) -> bool:
        return bool(self.budget) and self.on_the_known_machine > _ALLOWANCE * self.budget

    def pytest_terminal_summary(self, terminalreporter):
        if self.budget is None:
            return
        known = self.on_the_known_machine
        terminalreporter.section(f"{self.total:.0f} s of processor time: {known:.0f} of a budget of {self.budget:.0f}")
        for name, seconds in self.of_files.most_common(_SHOWN):
            terminalreporter.line(f"{seconds:6.1f} s  {name}")
        if self.is_over:
            terminalreporter.line("Twice what the budget allows: the run has failed.", red=True)
