"""The distributions hold the package with its data, and nothing of what stands beside it in the repository; what is
imported is declared.
"""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hf_specdec import __version__
from tests.helpers.paths import ROOT


BUILD = "from setuptools import build_meta; build_meta.build_{}({!r})"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """A folder with wheel and sdist, built in a copy: what earlier builds have left beside the package stays out."""
    folder = tmp_path_factory.mktemp("distributions")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "heads", "fixtures", "*.egg-info", "__pycache__")
    copy = shutil.copytree(ROOT, folder / "source", ignore=unwanted)
    for kind in ("wheel", "sdist"):
        command = [sys.executable, "-c", BUILD.format(kind, str(folder))]
        subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=120)
    return folder


def files_of_the_package() -> set[str]:
    files = (path for path in (ROOT / "hf_specdec").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_is_the_package(distributions):
    (wheel,) = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files_of_the_package()
    assert {f"hf_specdec/metrics/picture/page.{kind}" for kind in ("css", "html", "js")} <= names
    assert {"hf_specdec/py.typed", "hf_specdec/demo/target/model.safetensors"} <= names
    assert wheel.stat().st_size < 20e6


def test_the_sdist_also_has_the_documentation(distributions):
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if name.count("/")}
    assert names > files_of_the_package()
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "docs/cli.md",
        "docs/call.png",
    } <= names
    assert not [name for name in names if name.startswith(("tests", "tools", "benchmarks", "heads"))]


def test_citations_name_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == __version__
    assert f"version = {{{__version__}}}," in (ROOT / "docs" / "releases.md").read_text(encoding="utf-8")
    assert f"\n## {__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


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


def names(*extras: str) -> set[str]:
    return {canonicalize_name(need.name) for extra in ("", *extras) for need in declared()[extra]}


def imported(folder: str, *, at_once: bool = False) -> set[str]:
    """Distributions whose modules the files of a folder import, anywhere or in the outermost lines alone."""
    own = {path.stem for path in (*ROOT.iterdir(), *(ROOT / "benchmarks").glob("*.py"))}
    modules = set()
    for path in (ROOT / folder).rglob("*.py"):
        if at_once and path.relative_to(ROOT / folder).parts[0] in OF_EXTRAS:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules |= {module.partition(".")[0] for module in _imports(tree.body if at_once else ast.walk(tree))}
    providers = packages_distributions()
    return {
        canonicalize_name(providers.get(module, [module])[0])
        for module in modules - own - UNDECLARED - sys.stdlib_module_names
    }


def _imports(nodes) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def test_what_is_imported_is_declared():
    for_users = names(*(extra for extra in declared() if extra != "dev"))
    assert imported("hf_specdec", at_once=True) <= names()
    assert imported("hf_specdec") <= for_users
    for folder in ("tests", "tools", "benchmarks"):
        assert imported(folder) <= for_users | names("dev")


def test_what_is_declared_has_a_lower_bound_and_a_version_that_is_known_to_work():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for needs in declared().values():
        for need in needs:
            assert ">=" in str(need.specifier), need
            assert need.specifier.contains(pins[canonicalize_name(need.name)]), need


def test_nobody_is_told_to_install_what_an_index_has_under_the_name_of_this_package():
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.*"), *(ROOT / "hf_specdec").rglob("*.py")]:
        if path.suffix in {".py", ".md", ".ipynb"}:
            told = re.search(r"pip install (-\S+ )*[\"'\\]*hf[-_]specdec.*", path.read_text(encoding="utf-8"))
            assert told is None, path
