"""Prompts and texts as users write them down: files of JSON, and the fields of a record that hold one.

A prompt is a text, a chat (a list of messages) or a list of token ids. Requests, prompts to measure on and texts to
train on have their fields in common, and differ in which of them is meant where a record has several.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import SpecConfigError
from .reading import parse_json


# Fields of a text or chat as a whole, which may have its answers, and of a prompt alone. Of `turns` the first is it.
WHOLE_FIELDS = ("messages", "conversations", "text", "content")
PROMPT_FIELDS = ("prompt", "turns", "question", "instruction")
TOKENS_FIELD = "input_ids"

# Of ShareGPT's `from`.
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


def json_records(content: str, path: Path, example: str) -> list[tuple[str, Any]]:
    """The values of a file's text, each with its place: one a line, or in a `.json` file those of one list."""
    if path.suffix == ".json" and content.lstrip().startswith("["):
        values = _parsed(content, f"'{path}'", example)
        return [(f"Entry {number} of '{path}'", value) for number, value in enumerate(values, start=1)]
    lines = enumerate(content.split("\n"), start=1)
    places = [(f"Line {number} of '{path}'", line) for number, line in lines if line.strip()]
    return [(place, _parsed(line, place, example)) for place, line in places]


def _parsed(text: str, place: str, example: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise SpecConfigError(f"{place} is no JSON: {error}. {example}") from error


def prompts_in(record: Mapping[str, Any], fields: Iterable[str]) -> dict[str, Any]:
    """The prompts that a record has in some fields, in the order of these."""
    found = {name: record[name] for name in fields if record.get(name) is not None}
    if isinstance(turns := found.get("turns"), (list, tuple)) and turns:
        found["turns"] = turns[0]
    return {name: [*map(_message, value)] if is_chat(value) else value for name, value in found.items()}


def _message(message: Any) -> Any:
    """A message with `role` and `content`, of ShareGPT's `from` and `value` too."""
    if isinstance(message, Mapping) and message.get("role") is None and {"from", "value"} <= message.keys():
        return {"role": _ROLES.get(str(message["from"]), message["from"]), "content": message["value"]}
    return message


def is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
