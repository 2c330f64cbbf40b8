"""The house in numbers, which only go down: lines of rooms and files, and how far a call travels."""

import ast
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hf_specdec
from hf_specdec import demo
from hf_specdec.kernels import products
from tests.helpers.methods import demo_inputs, demo_target


PACKAGE = Path(hf_specdec.__file__).parent
MOST_LINES = {
    "call": 860,
    "loop": 1920,
    "target": 5820,
    "logits": 2140,
    "drafting": 1250,
    "drafts": 710,
    "control": 1590,
    "many": 2090,
}
MOST_LINES_OF_A_FILE = 600
# Functions of the package in a second call, and how often a cycle changes from one file to another.
MOST_FUNCTIONS, MOST_SWITCHES_OF_A_CYCLE = 500, 190

STORY = ("loop/loop.py", "loop/rows.py", "loop/judging.py", "loop/walk.py", "loop/ahead.py", "target/model.py")
MOST_LINES_OF_THE_STORY = 1900


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("room", MOST_LINES)
def test_rooms_do_not_grow(room):
    assert sum(map(num_lines, (PACKAGE / room).rglob("*.py"))) <= MOST_LINES[room]


def test_files_are_read_in_one_sitting():
    lengths = {str(path.relative_to(PACKAGE)): num_lines(path) for path in PACKAGE.rglob("*.py")}
    assert not {path: length for path, length in lengths.items() if length > MOST_LINES_OF_A_FILE}
    assert sum(lengths[path] for path in STORY) <= MOST_LINES_OF_THE_STORY


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
        code = frame.f_code
        if event != "call" or code.co_name[0] == "<" or not code.co_filename.startswith(str(PACKAGE)):
            return
        self.functions.add((code.co_filename, code.co_firstlineno))
        self.num_switches += code.co_filename != self._file
        self._file = code.co_filename


def short_and_long_call() -> tuple[int, float]:
    """Functions of a second eagle3 call, and changes of file in each of its cycles."""
    products.measures = False
    target, arguments = demo_target(), {"spec_method": "eagle3", "spec_model": demo.drafter_path("eagle3")}

    def travelled(max_new_tokens: int) -> tuple[Journey, int]:
        journey = Journey()
        settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
        sys.setprofile(journey)
        try:
            output = target.generate(**demo_inputs(1), **arguments, **settings)
        finally:
            sys.setprofile(None)
        return journey, output.speculative.num_target_forwards

    travelled(8)
    (short, few), (long, many) = travelled(8), travelled(72)
    assert many > few + 8
    return len(long.functions), (long.num_switches - short.num_switches) / (many - few)


def test_a_second_call_is_a_short_way():
    # In a process of its own: listeners and finalizers that other tests leave are functions of the package, too.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        num_functions, switches_of_a_cycle = process.submit(short_and_long_call).result()
    assert num_functions <= MOST_FUNCTIONS
    assert switches_of_a_cycle <= MOST_SWITCHES_OF_A_CYCLE
