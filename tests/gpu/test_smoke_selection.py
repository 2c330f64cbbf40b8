"""The tests that are run first on a GPU: few, of every kind of kernel, and in front of the others."""

from __future__ import annotations

import pytest

from tests.helpers.levels import full
from tests.helpers.paths import ROOT


class Listing:
    def __init__(self):
        self.found: list[tuple[bool, str]] = []

    def pytest_collection_finish(self, session):
        self.found += [(item.get_closest_marker("smoke") is not None, item.path.name) for item in session.items]


@full
def test_smoke_comes_first():
    listing, folder = Listing(), ROOT / "tests"
    files = [folder / name for name in ("kernels", "gpu/test_waits.py", "gpu/test_transfers.py")]
    options = ["-qq", "-p", "no:cacheprovider", "-n", "0", "--collect-only", "-m", "gpu"]
    pytest.main([*options, *map(str, files)], plugins=[listing])
    are_smoke = [is_smoke for is_smoke, _ in listing.found]
    count = sum(are_smoke)
    assert 10 <= count <= 20 < len(are_smoke)
    assert all(are_smoke[:count])
    kinds = {"acceptance", "ancestors", "best", "cache", "experts", "generate", "matches", "philox", "projections"}
    kinds |= {"sampling", "tree_attention", "waits", "transfers"}
    assert {name for _, name in listing.found[:count]} == {f"test_{kind}.py" for kind in kinds}
