"""Texts that grow are the same however their tokens arrive, and so are the calls of tools that are read in them."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from hf_specdec import demo
from hf_specdec.serving.text import GrowingText
from hf_specdec.serving.tool_calls import ToolCallReader
from tests.helpers.levels import full


TOKENIZER = demo.load_tokenizer()
TEXTS = st.text("abc \n()é漢🙂", max_size=30)


def grown(tokens: list[int], ends: list[int], stop: list[str]) -> tuple[str, bool]:
    """The text and whether it has stopped, of tokens that arrive up to these places."""
    text, said = GrowingText(TOKENIZER, stop), ""
    for end in [*ends, len(tokens)]:
        said += text.add(tokens[:end], end == len(tokens))
        if text.has_stopped or end == len(tokens):
            break
    return said, text.has_stopped


@given(text=TEXTS, stop=st.lists(st.text("abc \n(é🙂", min_size=1, max_size=4), max_size=3), data=st.data())
def test_parts_are_the_whole_up_to_a_stop_string(text, stop, data):
    tokens = TOKENIZER(text)["input_ids"]
    ends = sorted(data.draw(st.sets(st.integers(1, max(len(tokens), 1)))))
    # The end and the beginning of each: the text ends with the one that is complete first.
    places = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    expected = text[: min(places)[1]] if places else text
    assert grown(tokens, ends, stop) == (expected, bool(places))


def test_text_is_held_back_while_it_may_stop():
    tokens = [TOKENIZER(part)["input_ids"] for part in ("one two", " th", "ree", " four")]
    text, said, so_far = GrowingText(TOKENIZER, [" three five", "four"]), [], []
    for part in tokens:
        so_far = so_far + part
        said.append(text.add(so_far, False))
    assert "".join(said) == "one two three "
    assert said[:2] == ["one two", ""]
    assert text.has_stopped


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
        "I look.",
        [("read", PATH), ("now", {})],
    ),
    (MARKED, "", [("read", {"path": "12", "lines": [1]})]),
    (f" {NOW}", "", [("now", {})]),
    (f"{NOW}; {READ}", "", [("now", {}), ("read", PATH)]),
    (f"[{READ}, {NOW}]", "", [("read", PATH), ("now", {})]),
    ('{"name": "read", "arguments": "{\\"path\\": \\"x\\"}"}', "", [("read", {"path": "x"})]),
    (f"<tool_call>{NOW}</tool_call>\nIt is\n\n <b>late</b>.", "It is\n\n <b>late</b>.", [("now", {})]),
]


NO_CALLS = [
    "a < b, <tool",
    "<tool_call>{not JSON}</tool_call> and on",
    f"<tool_call>{READ}",
    '<tool_call>{"name": "remove", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "read", "arguments": [1]}</tool_call>',
    '{"name": "Ada", "born": 1815}',
    "[1] of the sources",
    f"See {NOW}",
    '{"name": "now", "arguments": {"x": NaN}}',
    '{"name": "now", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001,
    "<tool_call><function=read><parameter=path>x</function></tool_call>",
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


def check_reading(parts: list[int]) -> None:
    for text, shown, expected in FOUND:
        rest, found, calls = read(text, parts)
        assert found == expected
        # Space around calls is shown where it came before anybody knew of them.
        assert rest.strip() == shown.strip()
        assert "<tool_call>" not in rest
        assert [call.index for call in calls] == list(range(len(calls)))
        assert len({call.id for call in calls}) == len(calls)
    for text in NO_CALLS:
        assert read(text, parts)[:2] == (text, [])


def test_tool_calls_in_whole_texts_and_in_parts():
    for length in (1, 7, 1000):
        check_reading([length] * min(200, 1000 // length))


@full
@given(st.lists(st.integers(0, 30), max_size=12))
def test_tool_calls_however_the_text_arrives(parts):
    check_reading(parts)


def test_tool_calls_of_odd_arguments():
    _, [(_, arguments)], [call] = read('{"name": "read", "arguments": {"path": "\\ud800"}}', [])
    assert call.arguments.encode()
    assert arguments == {"path": "\ud800"}
    # What can just be read cannot always be written.
    for depth in range(850, 1010, 2):
        text = '{"name": "now", "arguments": {"x": ' + "[" * depth + "]" * depth + "}}"
        shown, calls, _ = read(text, [])
        assert (shown, len(calls)) in ((text, 0), ("", 1))


def test_text_beside_tool_calls_is_shown_at_once():
    reader = ToolCallReader(TOOLS)
    assert reader.add("I loo", is_last=False) == ("I loo", [])
    assert reader.add("k <too", is_last=False) == ("k ", [])
    assert reader.add("thbrush", is_last=False) == ("<toothbrush", [])
    assert reader.add(f"<tool_call>{NOW}", is_last=False) == ("", [])
    assert [call.name for call in reader.add("</tool_call> done", is_last=False)[1]] == ["now"]
    text = f"<tool_call>{NOW}</tool_call>\nIt\n\nis"
    assert read(text, [len(text) - 6, 2, 2])[0] == "\nIt\n\nis"
    # A text of marks takes no more time than another.
    text = "<tool_call>" * (20_000 // 11)
    assert read(text, [7] * (20_000 // 7))[:2] == (text, [])
