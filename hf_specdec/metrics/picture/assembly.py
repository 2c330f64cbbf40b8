"""The page as one file: markup, style, script and data, none of which asks anything of a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from .pieces import Pieces
from .story import story_of


if TYPE_CHECKING:
    from ..records import CallRecord


def page(call: CallRecord, tokenizer: Any = None) -> str:
    """Draws the page of a call that was recorded with a trace; without a tokenizer, tokens are shown as numbers."""
    style, script, filled = _asset("page.css"), _asset("page.js"), _asset("page.html")
    # JSON in ASCII in which no HTML parser finds the end of a script.
    data = json.dumps(story_of(call, Pieces(tokenizer)), separators=(",", ":"), allow_nan=False)
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    # The browser runs this script and no other, whatever a text may contain.
    policy = f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}"
    parts = {"{policy}": policy, "<!--style-->": style, "<!--script-->": script, "<!--data-->": data}
    for place, part in parts.items():
        before, after = filled.split(place)
        filled = before + part + after
    return filled


def in_notebook(page_html: str, height: int = 720) -> str:
    """Puts a page into a frame of its own, whose style and script see nothing of the notebook."""
    return (
        f'<iframe srcdoc="{html.escape(page_html, quote=True)}" sandbox="allow-scripts" title="A speculative call" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )


def _source(text: str) -> str:
    """Name of an inline style or script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()
