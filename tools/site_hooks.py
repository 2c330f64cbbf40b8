"""Hooks of the documentation's build, see `mkdocs.yml`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File


if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


ROOT = Path(__file__).parents[1]

# Types of arguments, which docstrings write as `str`, *optional*.
_TYPE = re.compile(r"<code>(`[^<]*)</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the changelog, which lies beside the README, as a page."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "changelog.md", content=re.sub(r"\]\(docs/", "](", text)))
    return files


def on_page_content(html: str, **_) -> str:
    """Takes the marks out of types, which the reference shows as code anyway."""
    return _TYPE.sub(lambda found: f"<code>{found[1].replace('`', '').replace('*optional*', 'optional')}</code>", html)
