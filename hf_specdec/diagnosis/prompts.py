"""Prompts for those who name none."""

from __future__ import annotations

from ..bench.prompts import Prompt


# New prose, new code, a text to repeat with changes, and a list.
_GENERAL = {
    "explain": "Explain in a few sentences why the sky is blue and sunsets are red.",
    "code": "Write a Python function that merges two sorted lists into one sorted list, with a docstring.",
    "rewrite": "Rewrite this paragraph in the past tense and change nothing else:\n\nThe ship leaves the harbour at "
    "dawn. The captain looks at the map, the crew sets the sails, and the wind carries the ship to the open sea. In "
    "the evening the crew sees an island, and the captain decides to stay there for the night.",
    "list": "List the planets of the solar system in order, with one fact about each of them.",
}


def general_prompts(max_new_tokens: int = 128) -> list[Prompt]:
    """A few prompts that any language model can go on from, each of its own kind."""
    return [Prompt(name, text, name, max_new_tokens) for name, text in _GENERAL.items()]
