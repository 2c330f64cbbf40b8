"""Calls of tools in the text of an answer, as its parts come.

Read are the forms in which the common families write them, all as data:

- `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3 and their kin
- `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen 3.5, Qwen3-Coder
- an answer that is nothing but such an object, with `arguments` or `parameters`, or a list of them: Llama 3, Mistral

What names none of the request's tools, or cannot be read, stays text. Templates for parsing that come with a model
hold regular expressions of strangers and are not used.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

from .text import num_open


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"

# An answer that begins with these, space left out, may be a bare call, or a list of them.
_BARE = ('{"', "[{")


class ToolCall(NamedTuple):
    """A call in OpenAI's form."""

    index: int  # in the answer
    id: str  # by which its result can refer to it
    name: str
    arguments: str  # an object as JSON

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallReader:
    """Takes the calls of a request's tools, in OpenAI's form, out of a text that grows."""

    def __init__(self, tools: Sequence[dict[str, Any]]):
        functions = [tool["function"] for tool in tools]
        self._types = {one["name"]: _types((one.get("parameters") or {}).get("properties")) for one in functions}
        self._held = ""
        self._space = ""  # after a call, until text follows
        self._may_be_bare = True
        self.num_calls: int = 0

    def add(self, text: str, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Takes the next part; returns what is certain of the text, and the calls that have become complete."""
        self._held += text
        head = "".join(self._held.split())[:2]
        self._may_be_bare = self._may_be_bare and any(begin.startswith(head) for begin in _BARE)
        if self._may_be_bare:
            calls = self._calls(_values(self._held)) if is_last else []
            if calls or not is_last:
                self._held = "" if is_last else self._held
                return "", calls
        shown, found = "", []
        while (begin := self._held.find(_OPEN)) >= 0:
            end = self._held.find(_CLOSE, begin)
            if end < 0:
                break
            content = self._held[begin + len(_OPEN) : end]
            calls = self._calls(_values(content) or self._marked(content))
            end += len(_CLOSE)
            # A call that cannot be read is shown as it came.
            kept = self._held[:begin] if calls else self._held[:end]
            shown, self._held = shown + kept, self._held[end:]
            found += calls
        if is_last:
            certain = len(self._held)
        else:
            # Up to a call, or to what may become one.
            certain = begin if begin >= 0 else len(self._held) - num_open(self._held, [_OPEN])
        shown, self._held = shown + self._held[:certain], self._held[certain:]
        shown, self._space = self._space + shown, ""
        if self.num_calls and not shown.strip():
            # Nothing but space stands beside calls.
            shown, self._space = "", shown
        return shown, found

    def _calls(self, values: list[Any]) -> list[ToolCall]:
        """Calls that all of the values are, or those of a list; none if one of them is something else."""
        if len(values) == 1 and isinstance(values[0], list):
            values = values[0]
        calls = [self._call(self.num_calls + number, value) for number, value in enumerate(values)]
        known = [call for call in calls if call is not None]
        if len(known) < len(calls):
            return []
        self.num_calls += len(known)
        return known

    def _call(self, index: int, value: Any) -> ToolCall | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._types:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            # Some write them as JSON in a string.
            arguments = next(iter(_values(arguments)), None)
        if not isinstance(arguments, dict):
            return None
        try:
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            # Numbers without bound, and what is nested too deep.
            return None
        if any("\ud800" <= character <= "\udfff" for character in written):
            # Halves of characters, which no answer can hold.
            written = json.dumps(arguments)
        return ToolCall(index, f"call_{uuid.uuid4().hex[:24]}", name, written)

    def _marked(self, content: str) -> list[Any]:
        """The call that is written with marks, as an object; values are JSON, unless the tool takes a text."""
        content = content.strip()
        if not (content.startswith("<function=") and content.endswith("</function>")):
            return []
        name, _, rest = content.removeprefix("<function=").removesuffix("</function>").partition(">")
        types, arguments = self._types.get(name, {}), {}
        for part in rest.split("<parameter=")[1:]:
            key, _, value = part.partition(">")
            value, end, _ = value.rpartition("</parameter>")
            if not end:
                return []
            value = value.strip()
            parsed = [] if types.get(key) == "string" else _values(value)
            arguments[key] = parsed[0] if len(parsed) == 1 else value
        return [{"name": name, "arguments": arguments}]


def _types(properties: Any) -> dict[str, Any]:
    """Types of a tool's parameters, where its schema says them."""
    items = properties.items() if isinstance(properties, dict) else ()
    return {key: schema.get("type") for key, schema in items if isinstance(schema, dict)}


def _values(text: str) -> list[Any]:
    """The values of a text that is nothing but JSON, with `;` or `,` between them; none of another one."""
    decoder, found, place = json.JSONDecoder(parse_constant=_refuse), [], 0
    text = text.strip()
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        found.append(value)
        place += len(text[place:]) - len(text[place:].lstrip(" \t\r\n;,"))
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
