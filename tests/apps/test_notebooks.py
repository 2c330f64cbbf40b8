"""The notebooks run from their first cell to their last, and hold no output of anybody's machine."""

import os

import pytest

from tests.helpers.paths import DOCS


FOLDER = DOCS / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def nbformat():
    pytest.importorskip("nbclient", reason="needs nbclient and ipykernel, which the extra [test] has")
    return pytest.importorskip("nbformat")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(nbformat, path, tmp_path, monkeypatch):
    from nbclient import NotebookClient

    # The kernel shall import the package that is tested.
    folders = [str(FOLDER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    if path.stem != "which_method":
        pages = [output.data.get("text/html", "") for output in outputs if "data" in output]
        assert any(page.startswith("<iframe") for page in pages)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_output(nbformat, path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
