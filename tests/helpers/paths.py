"""Where the repository and its parts are."""

from __future__ import annotations

from pathlib import Path


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FIXTURES = ROOT / "tests" / "fixtures"
