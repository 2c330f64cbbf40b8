"""Pages, tables, notebooks, distributions and the layout keep up with the code, and the examples of the docs run."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections import Counter

import pytest
import torch
import transformers
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hf_specdec
from hf_specdec import __version__, demo
from hf_specdec.method import built_in_methods
from tests.helpers import images
from tests.helpers.examples import examples, stand_ins, with_stand_ins
from tests.helpers.levels import full, split
from tests.helpers.paths import DOCS, ROOT
from tools import benchmark_pages, command_tables, method_tables


# Pages whose readers have a model and its inputs already; examples of the others are pasted from first to last.
FROM_NOTHING = ["quickstart.md"]
# Examples with tests of their own, and those of commands.
TESTED_ELSEWHERE = ["write_your_own_method.md", "cli.md"]
OWN_ROOMS = ("hf_specdec", "tests", "tools", "benchmarks")
PAGES = ["../README.md", *(page.name for page in sorted(DOCS.glob("*.md")) if examples(page))]


@pytest.mark.parametrize("page", split(sorted({*PAGES} - {*TESTED_ELSEWHERE}), ["../README.md", "quickstart.md"]))
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_SPECDEC_ADAPTIVE", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    if page == "server.md":
        pytest.importorskip("fastapi")
    elif page == "grammar.md":
        pytest.importorskip("xgrammar")
    elif page == "evaluation.md":
        pytest.importorskip("trl")
        # The package itself may use what transformers is about to drop.
        warnings.simplefilter("ignore", FutureWarning)
    namespace = {"__name__": "page"}
    if page not in ("../README.md", *FROM_NOTHING):
        namespace |= {"hf_specdec": hf_specdec, "model": demo.load_target(), "tokenizer": demo.load_tokenizer()}
        namespace["inputs"] = namespace["tokenizer"]("def read(path):", return_tensors="pt")
    places = stand_ins(tmp_path / "stand-ins")
    try:
        for number, code in enumerate(examples(DOCS / page)):
            exec(compile(with_stand_ins(code, places), f"{page}, example {number + 1}", "exec"), namespace)
    finally:
        torch.use_deterministic_algorithms(False)


@full
def test_notebook_runs_and_is_stored_without_output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((DOCS / "notebooks" / "first_speed_up.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    namespace: dict = {}
    for cell in cells:
        exec(with_stand_ins("".join(cell["source"]), {}), namespace)
    # What it shows of a call.
    assert namespace["r"].calls[0]._repr_html_().startswith("<iframe")


@full
def test_tables_are_those_of_the_tools():
    """Run `python -m tools.method_tables` and `python -m tools.benchmark_pages` otherwise."""
    version = transformers.__version__.rpartition(".")[0]
    for path in method_tables.PAGES:
        page = (ROOT / path).read_text(encoding="utf-8")
        # Its model types are those of one version of transformers.
        if path != "docs/models.md" or f"transformers {version}" in page:
            assert page == method_tables.with_tables(page), path
    assert benchmark_pages.PAGE.read_text(encoding="utf-8") == benchmark_pages.page()


@full
def test_pages_name_what_there_is():
    for path, phrase in (("README.md", "and {} of them with images"), ("docs/models.md", "{} types are tested with")):
        text = " ".join((ROOT / path).read_text(encoding="utf-8").split())
        assert phrase.format(len(images.TESTED)) in text
    assert all((DOCS / f"{method_tables.page_of(method)}.md").is_file() for method in built_in_methods())
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = re.findall(r"([\w/]+\.md)$", yaml.safe_dump(navigation, width=1000), re.MULTILINE)
    assert sorted(listed) == sorted([*(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")), "changelog.md"])
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert link.startswith("http") or (ROOT / link).exists(), (path, link)
    # Files, also by the last part of their paths, and environment variables.
    text = " ".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    paths = {f"/{path.relative_to(ROOT).as_posix()}" for room in OWN_ROOMS for path in (ROOT / room).rglob("*.py")}
    for name in set(re.findall(r"(?<![\w/.*>])(?:\w+/)*\w+\.py\b", text)):
        assert any(path.endswith(f"/{name}") for path in paths), name
    code = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "hf_specdec").rglob("*.py"))
    listed = re.findall(
        r"^\| `(HF_SPECDEC_\w+)` \|", (DOCS / "configuration.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(set(re.findall(r"\bHF_SPECDEC_[A-Z_]*[A-Z]\b", code)))
    # Commands and their options.
    flags = {name: {"--help", "-h", *command_tables.flags(name)} for name in command_tables.commands()}
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^## `hf-specdec ([\w-]+)`$", text, re.MULTILINE)) == sorted(flags)
    for path in (ROOT / "README.md", *DOCS.rglob("*.md")):
        text = re.sub(r" *\\\n *", " ", path.read_text(encoding="utf-8"))
        # Commands of measurements are those of the version that was measured.
        text = re.sub(r"<!-- table figures of .*?<!-- end -->", "", text, flags=re.DOTALL)
        for name, arguments in re.findall(r"^(?:.*\| |.*`)?hf-specdec ([\w-]+)([^`\n]*)", text, re.MULTILINE):
            # Values in quotes may hold anything.
            arguments = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", arguments)
            options = set(re.findall(r"(?<!\S)(?:--[a-z][\w-]*|-[a-zA-Z](?!\S))", arguments))
            assert options <= flags[name], (path, name, arguments)


@full
def test_methods_are_named_in_their_own_folders():
    names, package = {method.name for method in built_in_methods()}, ROOT / "hf_specdec"
    own = {package / "candidate_generators" / method.folder.rpartition(".")[2] for method in built_in_methods()}
    own.add(package / "candidate_generators" / "combined")
    rooms = ("decoding", "logits", "kernels", "drafts", "drafting", "layers", "control")
    found = Counter()
    for path in package.rglob("*.py"):
        if not own & set(path.parents):
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            lines = {node.lineno for node in nodes if isinstance(node, ast.Constant) and node.value in names}
            # Rooms below the methods name none.
            assert not lines or path.relative_to(package).parts[0] not in rooms, path
            found[str(path.relative_to(package))] = len(lines)
    assert sum(found.values()) <= 40, found.most_common(10)


@full
def test_wheel_and_sdist_are_the_package(tmp_path):
    # In a copy: what earlier builds have left beside the package stays out.
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "fixtures", "*.egg-info", "__pycache__")

    def ignore(folder: str, names: list[str]) -> set[str]:
        return {*unwanted(folder, names), *(["heads"] if folder == str(ROOT) else [])}

    copy = shutil.copytree(ROOT, tmp_path / "source", ignore=ignore)
    built = "".join(f"build_meta.build_{kind}({str(tmp_path)!r})\n" for kind in ("wheel", "sdist"))
    code = f"from setuptools import build_meta\n{built}"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True, timeout=600)
    files = (path for path in (ROOT / "hf_specdec").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    package = {path.relative_to(ROOT).as_posix() for path in files}
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == package
    assert {f"hf_specdec/metrics/picture/page.{kind}" for kind in ("css", "html", "js")} <= package
    assert {"hf_specdec/py.typed", "hf_specdec/demo/target/model.safetensors"} <= package
    assert wheel.stat().st_size < 20e6
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if name.count("/")}
    beside = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "docs/cli.md", "docs/call.png"}
    assert package | beside < names
    assert not [name for name in names if name.startswith(("tests", "tools", "benchmarks", "heads"))]


@full
def test_versions_and_instructions_to_install():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version = {{{__version__}}}," in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    # Nobody is told to install what an index has under the name of this package.
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.*"), *(ROOT / "hf_specdec").rglob("*.py")]:
        if path.suffix in {".py", ".md", ".ipynb"}:
            told = re.search(r"pip install (-\S+ )*[\"'\\]*hf[-_]specdec.*", path.read_text(encoding="utf-8"))
            assert told is None, path


# Distributions of which the module has another name.
NAMED_OTHERWISE = {"lmformatenforcer": "lm-format-enforcer", "yaml": "pyyaml"}


def imported(folder: str, *, at_once: bool = False) -> set[str]:
    """Distributions whose modules the files of a folder import, anywhere or in lines without indentation alone."""
    own = {path.stem for path in (*ROOT.iterdir(), *(ROOT / "benchmarks").glob("*.py"))}
    indent = "" if at_once else " *"
    line = re.compile(rf"^{indent}(?:from (\w+)[\w.]* import\b|import (\w+))", re.MULTILINE)
    modules = set()
    for path in (ROOT / folder).rglob("*.py"):
        # Rooms that nothing imports but the command or the user who needs their extra.
        if at_once and path.relative_to(ROOT / folder).parts[0] in ("serving", "integrations"):
            continue
        found = line.findall(path.read_text(encoding="utf-8"))
        modules |= {name for names in found for name in names if name}
    # What the reader of a tool installs, to compare with; and what comes with numba, in the one version that suits it.
    undeclared = {"dflash", "economize", "llvmlite"}
    left_out = own | undeclared | sys.stdlib_module_names
    return {canonicalize_name(NAMED_OTHERWISE.get(module, module)) for module in modules - left_out}


@full
def test_what_is_imported_is_declared_in_versions_that_are_known_to_work():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared, extras = {}, {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, lines in extras.items():
        # Names of other extras are left out.
        declared[extra] = [need for need in map(Requirement, lines) if need.name != project["name"]]
    names = {extra: {canonicalize_name(need.name) for need in needs} for extra, needs in declared.items()}
    for_users = set().union(*(needs for extra, needs in names.items() if extra != "dev"))
    assert imported("hf_specdec", at_once=True) <= names[""]
    assert imported("hf_specdec") <= for_users
    for folder in ("tests", "tools", "benchmarks"):
        assert imported(folder) <= for_users | names["dev"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for need in (need for needs in declared.values() for need in needs):
        assert ">=" in str(need.specifier), need
        assert need.specifier.contains(pins[canonicalize_name(need.name)]), need
