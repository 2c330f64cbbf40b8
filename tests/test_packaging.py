"""The distributions hold the package with its data, and nothing of what stands beside it in the repository."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from hf_specdec import __version__


ROOT = Path(__file__).parents[1]
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
