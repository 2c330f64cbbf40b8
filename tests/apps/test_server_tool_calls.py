"""Calls of tools in texts that grow."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.serving.tool_calls import ToolCallReader


TOOLS = [
    {"type": "function", "function": {"name": "read", "parameters": {"properties": {"path": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "now"}},
]
READ = '{"name": "read", "arguments": {"path": "a/é.txt", "lines": [1, 2]}}'
NOW = '{"name": "now", "parameters": {}}'
MARKED = (
    "<tool_call>\n<function=read>\n<parameter=path>\n12\n</parameter>\n<parameter=lines>\n[1]\n</parameter>\n"
    "</function>\n</tool_call>"
)
PATH = {"path": "a/é.txt", "lines": [1, 2]}

FOUND = [
    (f"<tool_call>\n{READ}\n</tool_call>", "", [("read", PATH)]),
    (
        f"I look.\n<tool_call>{READ}</tool_call>\n<tool_call>{NOW}</tool_call>",
        "I look.\n",
        [("read", PATH), ("now", {})],
    ),
    (MARKED, "", [("read", {"path": "12", "lines": [1]})]),
    (f" {NOW}", "", [("now", {})]),
    (f"{NOW}; {READ}", "", [("now", {}), ("read", PATH)]),
    (f"[{READ}, {NOW}]", "", [("read", PATH), ("now", {})]),
    ('{"name": "read", "arguments": "{\\"path\\": \\"x\\"}"}', "", [("read", {"path": "x"})]),
    (f"<tool_call>{NOW}</tool_call>\nIt is\n\n <b>late</b>.", "It is\n\n <b>late</b>.", [("now", {})]),
]
TEXTS = [
    "Nothing to call.",
    "a < b, <tool",
    "<tool_call>{not JSON}</tool_call> and on",
    f"<tool_call>{READ}",
    '<tool_call>{"name": "remove", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "read", "arguments": [1]}</tool_call>',
    '{"name": "Ada", "born": 1815}',
    '{"answer": 1',
    "[1] of the sources",
    f"See {NOW}",
    '{"name": "now", "arguments": {"x": NaN}}',
    '{"name": "now", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001,
    "<tool_call><function=read><parameter=path>x</function></tool_call>",
    '{"name": "now", "arguments": {"x": 1e999}}',
]


def read(text: str, parts: list[int]) -> tuple[str, list[tuple[str, dict]], list]:
    """What is read of a text that comes in parts of these lengths."""
    reader, shown, calls, place = ToolCallReader(TOOLS), "", [], 0
    for length in parts:
        more, found = reader.add(text[place : place + length], is_last=False)
        shown, calls, place = shown + more, calls + found, place + length
    more, found = reader.add(text[place:], is_last=True)
    calls += found
    return shown + more, [(call.name, json.loads(call.arguments)) for call in calls], calls


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=st.sampled_from(FOUND), parts=st.lists(st.integers(0, 30), max_size=12))
def test_calls_are_read_however_the_text_arrives(case, parts):
    text, shown, expected = case
    rest, found, calls = read(text, parts)
    assert found == expected
    # Space around calls is shown where it came before anybody knew of them.
    assert rest.strip() == shown.strip()
    assert "<tool_call>" not in rest
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.sampled_from(TEXTS), parts=st.lists(st.integers(0, 30), max_size=12))
def test_what_is_no_call_stays_text(text, parts):
    assert read(text, parts)[:2] == (text, [])


def test_arguments_can_be_sent():
    _, [(_, arguments)], [call] = read('{"name": "read", "arguments": {"path": "\\ud800"}}', [])
    assert call.arguments.encode()
    assert arguments == {"path": "\ud800"}


def test_no_depth_is_an_error():
    # What can just be read cannot always be written.
    for depth in range(850, 1010, 2):
        text = '{"name": "now", "arguments": {"x": ' + "[" * depth + "]" * depth + "}}"
        shown, calls, _ = read(text, [])
        assert (shown, len(calls)) in ((text, 0), ("", 1))


def test_space_in_text_after_a_call_is_shown():
    text = f"<tool_call>{NOW}</tool_call>\nIt\n\nis"
    assert read(text, [len(text) - 6, 2, 2])[0] == "\nIt\n\nis"


def test_text_is_shown_at_once():
    reader = ToolCallReader(TOOLS)
    assert reader.add("I loo", is_last=False) == ("I loo", [])
    assert reader.add("k <too", is_last=False) == ("k ", [])
    assert reader.add("thbrush", is_last=False) == ("<toothbrush", [])
    assert reader.add(f"<tool_call>{NOW}", is_last=False) == ("", [])
    assert [call.name for call in reader.add("</tool_call> done", is_last=False)[1]] == ["now"]


@pytest.mark.parametrize("length", [20_000])
def test_long_texts_take_no_time(length):
    text = "<tool_call>" * (length // 11)
    assert read(text, [7] * (length // 7))[:2] == (text, [])
