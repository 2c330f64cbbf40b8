"""Pages of calls, as tests read them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

from hf_specdec import SpecDecodingStats
from hf_specdec.metrics import CallRecord, CallTrace, CycleTiming, CycleTrace, RowTrace


# Texts that would break out of a page that did not quote them.
NASTY = [
    "</script><script>alert(1)</script>",
    "<!--",
    "<script",
    "]]>",
    "&lt;img src=x onerror=alert(1)>",
    '"><img src=x>',
    "\u2028\u2029\u202e\u0000\ud800",
]


class Words:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, words: list[str]):
        self.words = words

    def decode(self, tokens, **_):
        return "".join(self.words[token] for token in tokens)


def drawn(rows, prompt=(0,), first=0, method="ngram", **stats) -> CallRecord:
    """A call of one prompt whose cycles have these rows."""
    cycles = [CycleTrace([row]) for row in rows]
    trace = CallTrace([list(prompt)], CycleTrace([RowTrace(0, [], [], 0, [first])]), cycles)
    timings = [CycleTiming(0.003, 0.001, 0.002, len(cycle.rows[0].committed_tokens)) for cycle in cycles]
    return CallRecord(SpecDecodingStats(method, **stats), "user/model", trace, timings)


class Page(HTMLParser):
    """Elements, scripts with their attributes and content, and addresses of a page, as a browser parses it."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[tuple[dict, str]] = []
        self.links: list[str] = []
        self._in_script = False
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append((dict(attrs), ""))
        self.links += [value for name, value in attrs if name in ("src", "href", "action")]

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            attributes, content = self.scripts[-1]
            self.scripts[-1] = attributes, content + data


def story_in(html: str) -> dict[str, Any]:
    """The data of a page."""
    (data,) = (content for attributes, content in Page(html).scripts if attributes.get("id") == "story")
    return json.loads(data)
