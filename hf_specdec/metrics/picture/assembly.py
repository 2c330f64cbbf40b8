"""The page as one file: markup, style, script and data, none of which asks anything of a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from ...errors import SpecConfigError
from .pieces import Pieces
from .story import story_of


if TYPE_CHECKING:
    from ..records import CallRecord


def page(call: CallRecord, tokenizer: Any = None) -> str:
    """Draws the page of a call.

    Args:
        call (`CallRecord`): Recorded with a trace.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Shows tokens as text; without one they are numbers.

    Raises:
        SpecConfigError: The call ended before its first token, or `tokenizer` cannot decode.
    """
    if call.trace is None or call.trace.first is None:
        raise SpecConfigError(
            "The call ended before its first token, so there is nothing to draw. Record another one."
        )
    story = story_of(call, Pieces(tokenizer))
    return _filled(
        _asset("page.html"), style=_asset("page.css"), script=_asset("page.js"), data=_as_script_data(story)
    )


def in_notebook(page_html: str, height: int = 720) -> str:
    """Puts a page into a frame of its own, whose style and script see nothing of the notebook.

    Args:
        page_html (`str`): The page.
        height (`int`): Of the frame, in pixels.
    """
    return (
        f'<iframe srcdoc="{html.escape(page_html, quote=True)}" sandbox="allow-scripts" title="A speculative call" '
        f'style="width: 100%; height: {height}px; border: 0"></iframe>'
    )


def _filled(template: str, style: str, script: str, data: str) -> str:
    # The browser runs this script and no other, whatever a text may contain.
    policy = f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}"
    parts = {"policy": policy, "style": style, "script": script, "data": data}
    for name, part in parts.items():
        before, after = template.split(f"<!--{name}-->" if name != "policy" else "{policy}")
        template = before + part + after
    return template


def _source(text: str) -> str:
    """Name of an inline style or script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _as_script_data(value: Any) -> str:
    """JSON in ASCII in which no HTML parser finds the end of a script."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()
