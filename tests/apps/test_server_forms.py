"""Answers of the server that keep a form, and calls of tools."""

from __future__ import annotations

import json
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor

import hf_specdec
from hf_specdec import demo
from hf_specdec.serving import service
from hf_specdec.serving.text import GrowingText
from hf_specdec.serving.tool_calls import ToolCallReader
from tests.helpers.levels import full, in_full
from tests.helpers.servers import PROMPT, WITH_TOOLS, plain, serving


pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "size": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def running():
    arguments = {"eos_token_id": demo.load_tokenizer().eos_token_id}
    with serving(template=WITH_TOOLS, arguments=arguments, max_body_bytes=1 << 20) as running:
        yield running


def expected(length: int, **form) -> str:
    tokenizer = demo.load_tokenizer()
    processor = hf_specdec.grammar(**form, tokenizer=tokenizer)
    return plain(PROMPT, length, eos_token_id=tokenizer.eos_token_id, logits_processor=[processor])


def asked(kind: str, value: Any) -> list[dict[str, Any]]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": True}}
    if kind == "json_object":
        return [{"response_format": {"type": kind}}, {"structured_outputs": {kind: value}}]
    openai = [{"response_format": form}] if kind == "json" else []
    return [*openai, {f"guided_{kind}": value}, {"structured_outputs": {kind: value}}]


@pytest.mark.parametrize(
    ("kind", "value", "form", "pattern"),
    [
        ("json", SCHEMA, {"schema": SCHEMA}, r'\{"name": "[ab]", "size": \d+\}'),
        ("choice", ["yes", "no"], {"choices": ["yes", "no"]}, "yes|no"),
        *in_full(
            ("regex", "[a-c]{3}-[0-9]{4}", {"regex": "[a-c]{3}-[0-9]{4}"}, "[a-c]{3}-[0-9]{4}"),
            ("grammar", 'start: "x" /[0-9]{2}/', {"lark": 'start: "x" /[0-9]{2}/'}, "x[0-9]{2}"),
            ("json_object", True, {"schema": {"type": "object"}}, r"\{.*"),
        ),
    ],
    ids=["json", "choice", "regex", "grammar", "json_object"],
)
def test_answers_keep_the_form(running, kind, value, form, pattern):
    text = expected(40, **form)
    assert re.fullmatch(pattern, text)
    for fields in asked(kind, value):
        (choice,) = running.complete(max_tokens=40, **fields).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "length" if kind == "json_object" else "stop")
        drawn = running.text(max_tokens=40, temperature=1.0, seed=3, frequency_penalty=0.5, **fields)
        assert re.fullmatch(pattern, drawn)


def test_forms_that_are_compiled_keep_nobody_waiting(running, monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()

    def compiling(**form: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return hf_specdec.grammar(**form)

    monkeypatch.setattr(service, "grammar", compiling)
    asking = threading.Thread(target=running.text, kwargs={"guided_choice": ["left", "right"]})
    asking.start()
    try:
        assert begun.wait(60)
        assert running.text() == plain(PROMPT, 12)
        assert "at most 65536 characters" in running.error(guided_choice=["x" * 70000])
    finally:
        goes_on.set()
        asking.join()


@full
def test_forms_that_cost_too_much(running):
    """Nested repetitions hold up the loop for hours in xgrammar, and so everybody."""
    pytest.importorskip("llguidance")
    assert running.text(guided_regex="((a{0,99}){0,99}){0,99}", max_tokens=20, min_tokens=20).strip("a") == ""
    choices = [f"x{number}" for number in range(6000)]
    for fields in ({}, {"stream": True, "stop": "y"}):
        answer = running.complete(guided_choice=choices, max_tokens=60, **fields)
        assert "more than llguidance can follow" in answer.text
    assert running.text() == plain(PROMPT, 12)


def test_forms_that_cannot_be_kept(running):
    for fields, message in (
        ({"response_format": {"type": "json_schema"}}, "response_format: the type `json_schema` needs"),
        ({"guided_json": {"type": "nothing"}}, "cannot be kept: "),
        ({"guided_regex": "("}, "cannot be kept: "),
        ({"guided_choice": []}, "cannot be kept: `choices` must be texts"),
        ({"guided_regex": "x", "guided_choice": ["x"]}, "one form of the answer may be asked for"),
        ({"structured_outputs": {"structural_tag": "x"}}, "`structural_tag` cannot be honoured"),
    ):
        assert message in running.error(**fields), fields
    assert running.service.num_open == 0


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "x"}'}}
DEEP = {**CALL, "function": {"name": "read", "arguments": '{"a":' * 3000 + "1" + "}" * 3000}}
CALLED = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "y"},
]


def test_tools_that_have_to_be_called(running):
    read, write = function("read", size={"$ref": "#/$defs/size"}), function("write", flag={"type": "boolean"})
    read["function"]["parameters"]["$defs"] = {"size": {"type": "integer", "minimum": 0, "maximum": 9}}
    # No argument is invented where the schema leaves it open.
    del write["function"]["parameters"]["additionalProperties"]
    body = {"messages": PROMPT, "max_tokens": 60, "tools": [read, write]}
    named = {"type": "function", "function": {"name": "write"}}
    both = {"read", "write"}
    for choice, names in (("required", both), ({"type": "required"}, both), (named, {"write"})):
        (answer,) = running.chat(**body, tool_choice=choice).json()["choices"]
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] is None
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in names
        (value,) = json.loads(call["function"]["arguments"]).values()
        assert type(value) is (int if call["function"]["name"] == "read" else bool)
    message = running.chat_error(**body, tool_choice="required", response_format={"type": "json_object"})
    assert "exclude each other" in message
    write["function"]["parameters"]["$defs"] = {"size": {"type": "boolean"}}
    assert "`$defs` of tools" in running.chat_error(**body, tool_choice="required")


def test_tools_are_told_through_the_chat_template():
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for message in messages %}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
        "{{ message.content }} {{ message.tool_call_id }};{% endfor %}"
    )
    with serving(template=template) as running:
        chat = 'x ;{"path": "x"} ;y call_1;'
        for fields, prompt in (({"tools": [TOOL]}, f"read {chat}"), ({"tools": [TOOL], "tool_choice": "none"}, chat)):
            message = running.chat(CALLED, **fields).json()["choices"][0]["message"]
            assert message == {"role": "assistant", "content": plain(prompt, 8)}
        for fields, message in (
            ({"tool_choice": {"type": "function", "function": {"name": "write"}}}, "`tool_choice` needs `tools`"),
            ({"tool_choice": "required", "tools": []}, "`tool_choice` needs `tools`"),
            ({"messages": [{"role": "user"}]}, "needs `content`"),
            ({"messages": [{"role": "assistant", "tool_calls": [DEEP]}]}, "nested too deep"),
        ):
            assert message in running.chat_error(**{"messages": CALLED, "tools": [TOOL], **fields}), fields
        running.service.manager.tokenizer.chat_template = "{{ messages[0].content }}"
        assert "no place for `tools`" in running.chat_error(CALLED, tools=[TOOL])


class Says(LogitsProcessor):
    """Lets the model say a text, whatever the prompt is."""

    def __init__(self, text: str):
        # Token 0 ends the text.
        self.tokens = [*demo.load_tokenizer()(text, add_special_tokens=False)["input_ids"], 0]
        self.start = None

    def __call__(self, input_ids, scores):
        self.start = input_ids.shape[1] if self.start is None else self.start
        token = self.tokens[min(input_ids.shape[1] - self.start, len(self.tokens) - 1)]
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([token]), 0.0)


def test_calls_of_tools_are_read_from_the_answer():
    said = 'I look.\n<tool_call>\n{"name": "read", "arguments": {"path": "x"}}\n</tool_call>'
    says, body = Says(said), {"tools": [TOOL], "max_tokens": 80}
    with serving(template=WITH_TOOLS, arguments={"logits_processor": [says], "eos_token_id": 0}) as running:
        (choice,) = running.chat(**body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"].strip() == "I look."
        assert call["function"] == {"name": "read", "arguments": '{"path": "x"}'}
        # As it came, it may be sent back.
        assert running.chat([choice["message"], {"role": "tool", "content": "y"}], **body).status_code == 200
        for choice, reason in (("auto", "tool_calls"), ("none", "stop")):
            choices = [event["choices"][0] for event in running.stream_chat(**body, tool_choice=choice)]
            assert choices[-1]["finish_reason"] == reason
            deltas = [choice["delta"] for choice in choices]
            text = "".join(delta.get("content", "") for delta in deltas)
            found = [call for delta in deltas for call in delta.get("tool_calls", ())]
            if reason == "stop":
                assert (text, found) == (said, [])
            else:
                assert text.strip() == "I look."
                assert [(one["index"], one["function"]) for one in found] == [(0, call["function"])]
        (short,) = running.chat(tools=[TOOL], max_tokens=len(says.tokens) - 4).json()["choices"]
        assert short["finish_reason"] == "length"
        assert "<tool_call>" in short["message"]["content"]
        says.tokens = Says(said.removeprefix("I look.\n") * 2).tokens
        for is_parallel, count in ((True, 2), (False, 1)):
            fields = {**body, "parallel_tool_calls": is_parallel, "max_tokens": 100}
            assert len(running.chat(**fields).json()["choices"][0]["message"]["tool_calls"]) == count
            deltas = [event["choices"][0]["delta"] for event in running.stream_chat(**fields)]
            assert sum(len(delta.get("tool_calls", ())) for delta in deltas) == count
        # A processor of the server's own is never left out for a client's wish.
        assert "logits processors of its own" in running.chat_error(**body, presence_penalty=1)


# Texts that grow, and calls of tools in them

TOKENIZER = demo.load_tokenizer()
TEXTS = st.text("abc \n()é漢🙂", max_size=30)


@given(text=TEXTS, stop=st.lists(st.text("abc \n(é🙂", min_size=1, max_size=4), max_size=3), data=st.data())
def test_parts_are_the_whole_up_to_a_stop_string(text, stop, data):
    tokens = TOKENIZER(text)["input_ids"]
    ends = sorted(data.draw(st.sets(st.integers(1, max(len(tokens), 1)))))
    # The end and the beginning of each: the text ends with the one that is complete first.
    places = [(text.find(one) + len(one), text.find(one)) for one in stop if one in text]
    expected = text[: min(places)[1]] if places else text
    growing, said = GrowingText(TOKENIZER, stop), ""
    for end in [*ends, len(tokens)]:
        said += growing.add(tokens[:end], end == len(tokens))
        if growing.has_stopped or end == len(tokens):
            break
    assert (said, growing.has_stopped) == (expected, bool(places))


def test_text_is_held_back_while_it_may_stop():
    letters = SimpleNamespace(decode=lambda tokens, **_: "".join(map(chr, tokens)))
    for stop, parts, said in (
        (["abc"], ("xab", "xabc"), ["x", ""]),
        ([" th fi", "fo"], ("one", "one th", "one three", "one three fo"), ["one", "", " three", " "]),
    ):
        text = GrowingText(letters, stop)
        assert [text.add([*map(ord, part)], False) for part in parts] == said
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
    (f"I.\n<tool_call>{READ}</tool_call>\n<tool_call>{NOW}</tool_call>", "I.", [("read", PATH), ("now", {})]),
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
    f"See {NOW}",
    '{"name": "now", "arguments": {"x": NaN}}',
    '{"name": "now", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001,
    "<tool_call><function=read><parameter=path>x</function></tool_call>",
]


def read(text: str, parts: list[int]) -> tuple[str, list[tuple[str, dict]], list]:
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


@full
@given(st.lists(st.integers(0, 30), max_size=12))
def test_tool_calls_however_the_text_arrives(parts):
    check_reading(parts)


def test_tool_calls_in_whole_texts_and_in_parts_and_odd_arguments():
    for length in (1, 7, 1000):
        check_reading([length] * min(200, 1000 // length))
    _, [(_, arguments)], [call] = read('{"name": "read", "arguments": {"path": "\\ud800"}}', [])
    assert call.arguments.encode()
    assert arguments == {"path": "\ud800"}
    # What can just be read cannot always be written.
    for depth in range(850, 1010, 8):
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
