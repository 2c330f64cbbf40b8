"""Pages, tables, notebooks and the layout of the package keep up with the code, and the examples of the docs run."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import sys
import tokenize
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
import yaml

import hf_specdec
from hf_specdec import demo
from hf_specdec.kernels import products
from hf_specdec.method import built_in_methods
from tests.helpers import images
from tests.helpers.levels import full
from tests.helpers.methods import demo_inputs, demo_target
from tests.helpers.paths import DOCS, ROOT
from tools import benchmark_pages, command_tables, method_tables


# Pages whose examples can be pasted, from the first to the last.
PASTED = ["get_started.md", "reproducibility.md", "troubleshooting.md"]
PASTED += [f"howto/{path.name}" for path in sorted((DOCS / "howto").glob("*.md"))]

# Pages whose readers have a model and its inputs already.
CONTINUED = ["index.md", "picture.md"]

# Extras whose packages a page needs.
NEEDED = {"howto/serving.md": "fastapi", "howto/reinforcement.md": "trl"}


@pytest.fixture
def fresh_process(tmp_path, monkeypatch):
    """An empty folder, and settings as in a new process, both before an example and after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_SPECDEC_ADAPTIVE", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("page", PASTED + CONTINUED)
@pytest.mark.usefixtures("fresh_process")
def test_examples_run(page):
    """Each page on its own, in order, in one namespace."""
    if page in NEEDED:
        pytest.importorskip(NEEDED[page])
        # The package itself may use what transformers is about to drop.
        warnings.simplefilter("ignore", FutureWarning)
    namespace = {"__name__": "page"}
    if page in CONTINUED:
        namespace |= {"hf_specdec": hf_specdec, "model": demo.load_target(), "tokenizer": demo.load_tokenizer()}
        namespace["inputs"] = namespace["tokenizer"]("def read(path):", return_tensors="pt")
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        exec(compile(block, f"{page}, example {number + 1}", "exec"), namespace)


NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_are_stored_without_output(path, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    # The kernel shall import the package that is tested.
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    if path.stem != "which_method":
        pages = [output.data.get("text/html", "") for output in outputs if "data" in output]
        assert any(page.startswith("<iframe") for page in pages)


@full
def test_tables_are_those_of_the_tools():
    """Run `python -m tools.method_tables` and `python -m tools.benchmark_pages` otherwise."""
    version, tables = transformers.__version__.rpartition(".")[0], ""
    for path in method_tables.PAGES:
        page = (ROOT / path).read_text(encoding="utf-8")
        tables += page
        # Its model types are those of one version of transformers.
        if path != "docs/support.md" or f"transformers {version}" in page:
            assert page == method_tables.with_tables(page), path
    assert {name for name in method_tables.TABLES if f" table {name}" in tables} == set(method_tables.TABLES)
    written = {path.name: path.read_text(encoding="utf-8") for path in benchmark_pages.PAGES.glob("*.md")}
    assert written == benchmark_pages.pages()
    shown = [stem for study in benchmark_pages.STUDIES for stem in study.sources()]
    assert sorted(shown) == sorted(path.stem for path in benchmark_pages.RESULTS.glob("*.json"))
    for study in benchmark_pages.STUDIES:
        assert all(len(table.rows) > 1 for content in study.sources().values() for table in study.read(content))
        assert all((ROOT / program).is_file() for program in re.findall(r"benchmarks/\w+\.py", study.command))


@full
def test_pages_name_what_there_is():
    for path, phrase in (
        ("README.md", "and {} of them with images"),
        ("CHANGELOG.md", "Prompts with images are tested for {} types"),
        ("docs/limits.md", "{} types are tested with images"),
    ):
        text = " ".join((ROOT / path).read_text(encoding="utf-8").split())
        assert phrase.format(len(images.TESTED)) in text
    for method in built_in_methods():
        assert (DOCS / f"{method_tables.page_of(method)}.md").is_file()
        assert method.drafts_from
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = re.findall(r"([\w/]+\.md)$", yaml.safe_dump(navigation, width=1000), re.MULTILINE)
    assert sorted(listed) == sorted([*(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")), "changelog.md"])
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert link.startswith("http") or (ROOT / link).exists(), link


@full
def test_best_lengths_on_the_page_are_those_of_the_equation():
    text = (DOCS / "choose.md").read_text(encoding="utf-8").split("\n## How long a draft\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    for rate, *shown in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines):
        for cell, cost in zip(shown, (0.01, 0.02, 0.05, 0.1, 0.2, 0.4), strict=True):
            gains = [(1 - float(rate) ** (n + 1)) / (1 - float(rate)) / (1 + cost * n) for n in range(1, 65)]
            assert cell == f"{gains.index(max(gains)) + 1}: {max(gains):.1f}"


@full
def test_commands_and_options_of_the_pages_exist():
    commands = command_tables.commands()
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^## `hf-specdec ([\w-]+)`$", text, re.MULTILINE)) == sorted(commands)
    for path in (ROOT / "README.md", *DOCS.rglob("*.md")):
        text = re.sub(r" *\\\n *", " ", path.read_text(encoding="utf-8"))
        for name, arguments in re.findall(r"^(?:.*\| |.*`)?hf-specdec ([\w-]+)([^`\n]*)", text, re.MULTILINE):
            known = {"--help", "-h", "--debug"}
            known.update(*([*item.opts, *item.secondary_opts] for item in commands[name].params))
            # Values in quotes may hold anything.
            arguments = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", arguments)
            options = set(re.findall(r"(?<!\S)(?:--[a-z][\w-]*|-[a-zA-Z](?!\S))", arguments))
            assert options <= known, (path, name, arguments)


PACKAGE = Path(hf_specdec.__file__).parent


@full
def test_methods_are_named_in_their_own_folders_and_files_are_short():
    names = {method.name for method in built_in_methods()}
    own = {PACKAGE / "candidate_generators" / method.folder.rpartition(".")[2] for method in built_in_methods()}
    own.add(PACKAGE / "candidate_generators" / "combined")
    rooms = ("decoding", "logits", "kernels", "drafts", "drafting", "layers", "control")
    found = Counter()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 600, path
        if not own & set(path.parents):
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            strings = [token for token in tokens if token.type == tokenize.STRING]
            lines = {token.start[0] for token in strings if token.string.strip("\"'") in names}
            # Rooms below the methods name none.
            assert not lines or path.relative_to(PACKAGE).parts[0] not in rooms, path
            found[str(path.relative_to(PACKAGE))] = len(lines)
    assert sum(found.values()) <= 40, found.most_common(10)


def travelled(num_tokens: int) -> tuple[int, int, int]:
    """Functions of an eagle3 call, how often the next one is in another file, and its forwards."""
    functions, files = set(), [""]

    def enter(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_name[0] != "<" and code.co_filename.startswith(str(PACKAGE)):
            functions.add((code.co_filename, code.co_firstlineno))
            files.extend([code.co_filename] * (code.co_filename != files[-1]))

    products.measures = False
    settings = {"max_new_tokens": num_tokens, "do_sample": False, "return_dict_in_generate": True}
    settings |= {"spec_method": "eagle3", "spec_model": demo.drafter_path("eagle3")}
    sys.setprofile(enter)
    try:
        output = demo_target().generate(**demo_inputs(1), **settings)
    finally:
        sys.setprofile(None)
    return len(functions), len(files), output.speculative.num_target_forwards


@full
def test_a_second_call_is_a_short_way():
    # In a process of its own: listeners and finalizers that other tests leave are functions of the package, too.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        _, (_, short, few), (num_functions, long, many) = process.map(travelled, (8, 8, 72))
    assert num_functions <= 339
    assert (long - short) / (many - few) <= 138
