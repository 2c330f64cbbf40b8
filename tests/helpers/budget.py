"""Processor time of a run: where it goes, and an error where it is twice as much as `--budget` allows.

It is the time that the processes of the run compute, those that tests start included. The same work takes up to 1.8
times as much where two processes share a core as its hyperthreads, so that a smaller excess says nothing.
"""

from __future__ import annotations

import resource
import time
from collections import Counter

import pytest


_SHOWN = 12
_ALLOWANCE = 2


def used_seconds() -> float:
    """Seconds that this process and those that it has waited for have computed."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def pytest_addoption(parser):
    parser.addoption("--budget", type=float, help="Seconds of processor time that the run takes on a quiet machine.")


class Budget:
    """Adds up what the processes of a run have used, and what each file of tests has."""

    def __init__(self, config: pytest.Config):
        self.budget = config.getoption("budget")
        self.is_worker = hasattr(config, "workeroutput")
        self.of_workers = 0.0
        self.of_files: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        before = used_seconds()
        output = yield
        self.of_files[item.nodeid.partition("::")[0]] += used_seconds() - before
        return output

    def pytest_sessionfinish(self, session):
        if self.is_worker:
            session.config.workeroutput["used_seconds"] = used_seconds()
            session.config.workeroutput["of_files"] = dict(self.of_files)
        elif self.budget and self.total > _ALLOWANCE * self.budget and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        output = getattr(node, "workeroutput", {})
        self.of_workers += output.get("used_seconds", 0.0)
        self.of_files.update(output.get("of_files", {}))

    @property
    def total(self) -> float:
        # Workers are children that are not waited for before the end.
        return self.of_workers or used_seconds()

    def pytest_terminal_summary(self, terminalreporter):
        if self.budget is None:
            return
        terminalreporter.section(f"{self.total:.0f} s of processor time, of {self.budget:.0f}")
        for name, seconds in self.of_files.most_common(_SHOWN):
            terminalreporter.line(f"{seconds:6.1f} s  {name}")
        if self.total > _ALLOWANCE * self.budget:
            terminalreporter.line("More than twice the budget: the run has failed.", red=True)
