"""The tests that are run first on a GPU: few, of every kind of kernel, and in front of the others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


_COLLECT = """
import pytest

class Listing:
    def pytest_collection_finish(self, session):
        for item in session.items:
            print("ITEM", item.get_closest_marker("smoke") is not None, item.path.name)

files = ["tests/kernels", "tests/decoding/test_waits.py", "tests/test_transfers.py"]
pytest.main(["-q", "-q", "-p", "no:cacheprovider", "--collect-only", "-m", "gpu", *files], plugins=[Listing()])
"""


def test_smoke_comes_first():
    top = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", _COLLECT], cwd=top, capture_output=True, text=True)
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ITEM ")]
    are_smoke = [is_smoke == "True" for is_smoke, _ in found]
    count = sum(are_smoke)
    assert 10 <= count <= 20 < len(found), done.stdout + done.stderr
    assert all(are_smoke[:count])
    kinds = {"acceptance", "cache", "generate", "sampling", "tree_attention", "waits", "transfers"}
    assert {name for _, name in found[:count]} == {f"test_{kind}.py" for kind in kinds}
