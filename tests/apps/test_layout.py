"""The layout of the package in numbers: who names a method, how long files are, how far a call travels."""

import io
import multiprocessing
import sys
import tokenize
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import hf_specdec
from hf_specdec import demo
from hf_specdec.kernels import products
from hf_specdec.method import built_in_methods
from tests.helpers.methods import demo_inputs, demo_target


PACKAGE = Path(hf_specdec.__file__).parent
# Functions of the package in a second call, and how often a cycle changes from one file to another.
MOST_FUNCTIONS, MOST_SWITCHES_OF_A_CYCLE = 339, 138

NAMES = {method.name for method in built_in_methods()}
METHOD_FOLDERS = {method.folder.rpartition(".")[2] for method in built_in_methods()} | {"combined"}


def modules_outside_of_methods() -> list[Path]:
    folders = {PACKAGE / "candidate_generators" / name for name in METHOD_FOLDERS}
    return [path for path in PACKAGE.rglob("*.py") if not folders & set(path.parents)]


def lines_that_name_a_method(path: Path) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    literals = (token for token in tokens if token.type == tokenize.STRING)
    return {token.start[0] for token in literals if token.string.strip("\"'") in NAMES}


def test_methods_are_named_in_their_own_folders():
    found = {
        str(path.relative_to(PACKAGE)): len(lines_that_name_a_method(path)) for path in modules_outside_of_methods()
    }
    assert sum(found.values()) <= 40, Counter(found).most_common(10)


def test_rooms_below_the_methods_name_none():
    rooms = ("decoding", "logits", "kernels", "drafts", "drafting", "layers", "control")
    below = [path for path in modules_outside_of_methods() if path.relative_to(PACKAGE).parts[0] in rooms]
    assert below
    assert not [path for path in below if lines_that_name_a_method(path)]


def test_no_file_is_too_long_to_read():
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert not {path: length for path, length in lengths.items() if length > 600}


class Journey:
    """Functions of the package that run, and how often the next one is in another file."""

    def __init__(self):
        self.functions, self.num_calls, self.num_switches = set(), 0, 0
        self._file = None

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event != "call" or code.co_name[0] == "<" or not code.co_filename.startswith(str(PACKAGE)):
            return
        self.functions.add((code.co_filename, code.co_firstlineno))
        self.num_calls += 1
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
