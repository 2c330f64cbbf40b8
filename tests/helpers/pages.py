"""Pages of calls, as tests read them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """Reads a page as a browser's parser does.

    Attributes:
        tags (`list[str]`): Names of all elements, in their order.
        scripts (`list[tuple[dict, str]]`): Attributes and content of each script.
        links (`list[str]`): Addresses in attributes.
    """

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
