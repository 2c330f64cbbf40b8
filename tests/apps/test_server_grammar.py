"""Answers that keep a form: JSON, regular expressions, choices, grammars, and calls of tools that have to come."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

import hf_specdec
from hf_specdec import demo
from hf_specdec.serving import service
from tests.helpers.methods import demo_target
from tests.helpers.servers import plain, serving


pytest.importorskip("xgrammar")

PROMPT = "def read(path):"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "size": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TEMPLATE = "{% for tool in tools or [] %}{% endfor %}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def running():
    with serving(template=TEMPLATE, arguments={"eos_token_id": demo.load_tokenizer().eos_token_id}) as running:
        yield running


def expected(length: int, **form) -> str:
    """What plain generation says in this form."""
    tokenizer = demo.load_tokenizer()
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    tokens = demo_target().generate(
        ids,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        max_new_tokens=length,
        logits_processor=LogitsProcessorList([hf_specdec.grammar(**form, tokenizer=tokenizer)]),
    )
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def asked(kind: str, value: Any) -> list[dict[str, Any]]:
    """Fields that ask for this form."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": True}}
    openai = [{"response_format": form}] if kind == "json" else []
    return [*openai, {f"guided_{kind}": value}, {"structured_outputs": {kind: value}}]


@pytest.mark.parametrize(
    ("kind", "value", "form", "pattern"),
    [
        ("json", SCHEMA, {"schema": SCHEMA}, r'\{"name": "[ab]", "size": \d+\}'),
        ("regex", "[a-c]{3}-[0-9]{4}", {"regex": "[a-c]{3}-[0-9]{4}"}, "[a-c]{3}-[0-9]{4}"),
        ("choice", ["yes", "no"], {"choices": ["yes", "no"]}, "yes|no"),
        ("grammar", 'start: "x" /[0-9]{2}/', {"lark": 'start: "x" /[0-9]{2}/'}, "x[0-9]{2}"),
    ],
)
def test_forms(running, kind, value, form, pattern):
    text = expected(40, **form)
    assert re.fullmatch(pattern, text)
    for fields in asked(kind, value):
        (choice,) = running.complete(max_tokens=40, **fields).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        drawn = running.text(max_tokens=40, temperature=1.0, seed=3, frequency_penalty=0.5, **fields)
        assert re.fullmatch(pattern, drawn)


def test_any_object(running):
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        answer = running.complete(max_tokens=60, **fields).json()["choices"][0]
        assert answer["text"] == expected(60, schema={"type": "object"})
        assert answer["text"].startswith("{")


def test_others_are_free_beside_it(running):
    body = {"prompt": [PROMPT] * 2, "max_tokens": 12, "temperature": 0}
    first = running.client.post("/v1/completions", json={**body, "guided_choice": ["yes", "no"]}).json()
    assert {choice["text"] for choice in first["choices"]} <= {"yes", "no"}
    assert running.text() == plain(PROMPT, 12)


def test_forms_that_are_compiled_keep_nobody_waiting(monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()

    def compiling(**form: Any) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return hf_specdec.grammar(**form)

    monkeypatch.setattr(service, "grammar", compiling)
    with serving(max_body_bytes=1 << 20) as running:
        asking = threading.Thread(target=running.text, kwargs={"guided_choice": ["yes", "no"]})
        asking.start()
        assert begun.wait(60)
        assert running.text() == plain(PROMPT, 12)
        assert "at most 65536 characters" in running.error(guided_choice=["x" * 70000])
        goes_on.set()
        asking.join()


def test_forms_that_cost_too_much(running):
    """Nested repetitions hold up the loop for hours in xgrammar, and so everybody."""
    pytest.importorskip("llguidance")
    assert running.text(guided_regex="((a{0,99}){0,99}){0,99}", max_tokens=20, min_tokens=20).strip("a") == ""
    choices = [f"x{number}" for number in range(6000)]
    for fields in ({"guided_choice": choices}, {"guided_choice": choices, "stream": True, "stop": "y"}):
        assert "more than llguidance can follow" in running.complete(max_tokens=60, **fields).text
    assert "more than llguidance can follow" in running.error(guided_choice=choices, max_tokens=60)
    assert running.text() == plain(PROMPT, 12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type: Input should be 'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format: the type `json_schema` needs"),
        ({"guided_json": "{"}, "cannot be kept: `schema` is no JSON"),
        ({"guided_json": {"type": "nothing"}}, "cannot be kept: "),
        ({"guided_regex": "("}, "cannot be kept: "),
        ({"guided_choice": []}, "cannot be kept: `choices` must be texts"),
        ({"guided_grammar": "root ::= x"}, "cannot be kept: "),
        ({"guided_regex": "x", "guided_choice": ["x"]}, "one form of the answer may be asked for"),
        ({"structured_outputs": {"structural_tag": "x"}}, "`structural_tag` cannot be honoured"),
    ],
)
def test_forms_that_cannot_be_kept(running, fields, message):
    assert message in running.error(**fields)
    assert running.service.num_open == 0


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


def test_tools_that_have_to_be_called(running):
    size = {"$ref": "#/$defs/size"}
    read, write = function("read", size=size), function("write", flag={"type": "boolean"})
    read["function"]["parameters"]["$defs"] = {"size": {"type": "integer", "minimum": 0, "maximum": 9}}
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 60,
        "temperature": 0,
        "tools": [read, write],
    }
    # No argument is invented where the schema leaves it open.
    del write["function"]["parameters"]["additionalProperties"]
    named = {"type": "function", "function": {"name": "write"}}
    for choice, names in (("required", {"read", "write"}), (named, {"write"})):
        (answer,) = running.client.post("/v1/chat/completions", json={**body, "tool_choice": choice}).json()["choices"]
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] is None
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in names
        (value,) = json.loads(call["function"]["arguments"]).values()
        assert type(value) is (int if call["function"]["name"] == "read" else bool)
    refused = running.client.post(
        "/v1/chat/completions", json={**body, "tool_choice": "required", "response_format": {"type": "json_object"}}
    )
    assert "exclude each other" in refused.json()["error"]["message"]
    for definitions in ([1], {"size": {"type": "boolean"}}):
        write["function"]["parameters"]["$defs"] = definitions
        refused = running.client.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
        assert (refused.status_code, "`$defs` of tools" in refused.text) == (400, True)
