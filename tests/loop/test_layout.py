"""The house in numbers, which only go down: lines of rooms and files, and how far a call travels."""

import ast
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hf_specdec
from hf_specdec import demo
from hf_specdec.control import clock
from hf_specdec.kernels import products
from hf_specdec.metrics import SpecDecodingStats
from hf_specdec.target.lean import LeanModel
from tests.helpers.methods import demo_inputs, demo_target


PACKAGE = Path(hf_specdec.__file__).parent
FOLDER = f"{PACKAGE}{os.sep}"
MOST_LINES = {
    "cli": 1795,
    "diagnosis": 1222,
    "bench": 822,
    "call": 766,
    "loop": 1697,
    "target": 4756,
    "logits": 1787,
    "drafting": 1422,
    "candidate_generators": 11089,
    "drafts": 652,
    "checkpoints": 2120,
    "control": 1207,
    "training": 1457,
    "layers": 1407,
    "kernels": 4232,
    "many": 1815,
    "serving": 1545,
    "settings": 1211,
    "metrics": 1383,
    "integrations": 478,
    "hub": 1950,
}
MOST_LINES_OF_A_FILE = 565
# Functions of the package in a second call, and how often a cycle changes from one file to another.
MOST_FUNCTIONS, MOST_SWITCHES_OF_A_CYCLE = 323, 82

# Of a method, beside the heads of blocks.
MOST_FILES_OF_A_METHOD, MOST_NAMES_FROM_DRAFTING = 5, 12

STORY = (
    *("loop/loop.py", "loop/rows.py", "loop/texts.py", "loop/judging.py", "loop/walk.py", "loop/ahead.py"),
    "target/model.py",
)
MOST_LINES_OF_THE_STORY = 1437


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("room", MOST_LINES)
def test_rooms_do_not_grow(room):
    assert sum(map(num_lines, (PACKAGE / room).rglob("*.py"))) <= MOST_LINES[room]


def test_files_are_read_in_one_sitting():
    lengths = {str(path.relative_to(PACKAGE)): num_lines(path) for path in PACKAGE.rglob("*.py")}
    assert not {path: length for path, length in lengths.items() if length > MOST_LINES_OF_A_FILE}
    assert sum(lengths[path] for path in STORY) <= MOST_LINES_OF_THE_STORY


METHODS = sorted(path for path in (PACKAGE / "candidate_generators").iterdir() if (path / "__init__.py").is_file())


@pytest.mark.parametrize("folder", METHODS, ids=lambda path: path.name)
def test_a_method_is_a_few_files_over_a_few_names(folder):
    files = list(folder.glob("*.py"))
    assert len(files) <= MOST_FILES_OF_A_METHOD
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {name.name for node in imports if (node.module or "").startswith("drafting.") for name in node.names}
    assert len(names) <= MOST_NAMES_FROM_DRAFTING


def test_the_loop_names_no_part_of_a_rare_model():
    for path in (PACKAGE / "loop").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [module for module in modules if "parts" in module.split(".")], path.name


class Journey:
    """Functions of the package that run, and how often the next one is in another file."""

    def __init__(self):
        self.functions: set[tuple[str, int]] = set()
        self.num_switches = 0
        self._file = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Is told of every function that is called; without another function in return, not of its lines."""
        code = frame.f_code
        if code.co_name[0] == "<" or not code.co_filename.startswith(FOLDER):
            return
        self.functions.add((code.co_filename, code.co_firstlineno))
        self.num_switches += code.co_filename != self._file
        self._file = code.co_filename


def short_and_long_call() -> tuple[int, float]:
    """Functions of a second eagle3 call, and changes of file in each of its cycles."""
    products.is_used = False
    os.environ.pop("HF_SPECDEC_ADAPTIVE", None)
    # Lengths are chosen by times: here the clock goes on when it is read, and with every forward of the target.
    moments, run = count(), LeanModel.run

    def slow_run(self, *arguments, **settings):
        for _ in range(10):
            next(moments)
        return run(self, *arguments, **settings)

    LeanModel.run = slow_run
    clock.thread_time = clock.perf_counter = lambda: next(moments) / 1000
    target, arguments = demo_target(), {"spec_method": "eagle3", "spec_model": demo.drafter_path("eagle3")}

    def travelled(max_new_tokens: int) -> tuple[Journey, SpecDecodingStats]:
        journey = Journey()
        settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
        sys.settrace(journey)
        try:
            output = target.generate(**demo_inputs(1), **arguments, **settings)
        finally:
            sys.settrace(None)
        return journey, output.speculative

    travelled(8)
    (short, few), (long, many) = travelled(8), travelled(72)
    num_cycles = many.num_target_forwards - few.num_target_forwards
    # Cycles that draft are counted.
    assert many.num_drafts > 0.9 * many.num_target_forwards > 8
    return len(long.functions), (long.num_switches - short.num_switches) / num_cycles


def test_a_second_call_is_a_short_way():
    # In a process of its own: listeners and finalizers that other tests leave are functions of the package, too.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        num_functions, switches_of_a_cycle = process.submit(short_and_long_call).result()
    assert num_functions <= MOST_FUNCTIONS
    assert switches_of_a_cycle <= MOST_SWITCHES_OF_A_CYCLE
