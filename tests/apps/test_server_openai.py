"""The server as OpenAI's own client sees it."""

from __future__ import annotations

import json

import pytest

from tests.helpers.servers import PROMPT, Reading, plain


openai = pytest.importorskip("openai")
pytest.importorskip("xgrammar")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "hf_specdec"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("user/other")


def test_chats_go_on(client):
    fields = {"model": "demo", "temperature": 0, "max_completion_tokens": 10, "store": False, "metadata": {"a": "b"}}
    messages = [{"role": "user", "content": PROMPT}]
    answer = client.chat.completions.create(messages=messages, response_format={"type": "text"}, **fields)
    assert answer.choices[0].message.content == plain(PROMPT, 10)
    messages = [*messages, answer.choices[0].message, {"role": "user", "content": "\n"}]
    assert client.chat.completions.create(messages=messages, **fields).choices[0].finish_reason == "length"
    with client.chat.completions.stream(messages=messages[:1], **fields) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    assert text == plain(PROMPT, 10)


def test_completions(client):
    fields = {"model": "demo", "temperature": 0, "max_tokens": 10}
    answer = client.completions.create(prompt=[PROMPT, "class"], echo=True, logit_bias={}, **fields)
    assert [choice.text for choice in answer.choices] == [PROMPT + plain(PROMPT, 10), "class" + plain("class", 10)]
    parts = client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **fields)
    *parts, last = parts
    assert "".join(part.choices[0].text for part in parts) == plain(PROMPT, 10)
    assert last.usage.completion_tokens == 10


def test_parsed_answers(client):
    fields = {"model": "demo", "temperature": 0, "max_tokens": 60, "messages": [{"role": "user", "content": PROMPT}]}
    answer = client.chat.completions.parse(response_format=Reading, **fields)
    assert isinstance(answer.choices[0].message.parsed, Reading)
    tool = openai.pydantic_function_tool(Reading, name="tell")
    with client.chat.completions.stream(response_format=Reading, **fields) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed
    # The model need not call it.
    assert client.chat.completions.create(tools=[tool], **fields).choices[0].message.content
    answer = client.chat.completions.parse(tools=[tool], tool_choice="required", **fields)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Reading)
    assert json.loads(call.function.arguments).keys() == {"size", "kind"}


def test_refusals(client):
    with pytest.raises(openai.BadRequestError, match="`suffix` cannot be honoured"):
        client.completions.create(model="demo", prompt=PROMPT, suffix="x")
    with pytest.raises(openai.NotFoundError) as raised:
        client.embeddings.create(model="demo", input=PROMPT)
    assert raised.value.body.keys() == {"message", "type", "param", "code"}
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()
