"""The distributions hold the package with its data, and nothing beside it; what is imported is declared."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import packages_distributions

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_specdec import __version__
from tests.helpers.levels import full
from tests.helpers.paths import ROOT


pytestmark = full

BUILD = "from setuptools import build_meta; build_meta.build_{}({!r})"


def test_wheel_and_sdist_are_the_package(tmp_path):
    # In a copy: what earlier builds have left beside the package stays out.
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "heads", "fixtures", "*.egg-info", "__pycache__")
    copy = shutil.copytree(ROOT, tmp_path / "source", ignore=unwanted)
    for kind in ("wheel", "sdist"):
        command = [sys.executable, "-c", BUILD.format(kind, str(tmp_path))]
        subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=600)
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


def test_citations_and_instructions_to_install():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert f"version = {{{__version__}}}," in (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    # Nobody is told to install what an index has under the name of this package.
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.*"), *(ROOT / "hf_specdec").rglob("*.py")]:
        if path.suffix in {".py", ".md", ".ipynb"}:
            told = re.search(r"pip install (-\S+ )*[\"'\\]*hf[-_]specdec.*", path.read_text(encoding="utf-8"))
            assert told is None, path


# What the reader of a tool installs, to compare with; and what comes with numba, in the one version that suits it.
UNDECLARED = {"dflash", "llvmlite"}
# Rooms that nothing imports but the command or the user who needs their extra.
OF_EXTRAS = ("serving", "integrations")


def declared() -> dict[str, list[Requirement]]:
    """What pyproject.toml asks for: "" for everybody, and by extra; names of other extras are left out."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    found = {extra: [Requirement(line) for line in lines] for extra, lines in extras.items()}
    return {extra: [need for need in needs if need.name != project["name"]] for extra, needs in found.items()}


def imported(folder: str, *, at_once: bool = False) -> set[str]:
    """Distributions whose modules the files of a folder import, anywhere or in the outermost lines alone."""
    own = {path.stem for path in (*ROOT.iterdir(), *(ROOT / "benchmarks").glob("*.py"))}
    modules = set()
    for path in (ROOT / folder).rglob("*.py"):
        if at_once and path.relative_to(ROOT / folder).parts[0] in OF_EXTRAS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body if at_once else ast.walk(tree):
            if isinstance(node, ast.Import):
                modules |= {item.name.partition(".")[0] for item in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(node.module.partition(".")[0])
    providers, left_out = packages_distributions(), own | UNDECLARED | sys.stdlib_module_names
    return {canonicalize_name(providers.get(module, [module])[0]) for module in modules - left_out}


def test_what_is_imported_is_declared_in_versions_that_are_known_to_work():
    names = {extra: {canonicalize_name(need.name) for need in needs} for extra, needs in declared().items()}
    for_users = set().union(*(needs for extra, needs in names.items() if extra != "dev"))
    assert imported("hf_specdec", at_once=True) <= names[""]
    assert imported("hf_specdec") <= for_users
    for folder in ("tests", "tools", "benchmarks"):
        assert imported(folder) <= for_users | names["dev"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for need in (need for needs in declared().values() for need in needs):
        assert ">=" in str(need.specifier), need
        assert need.specifier.contains(pins[canonicalize_name(need.name)]), need
