"""The server as OpenAI's own client and LangChain see it, none of which the extras bring."""

from __future__ import annotations

import asyncio

import pytest

from hf_specdec import demo
from tests.helpers.levels import slow
from tests.helpers.servers import PROMPT, WITH_TOOLS, Reading, plain, serving


openai = pytest.importorskip("openai")
pytest.importorskip("xgrammar")

pytestmark = slow


@pytest.fixture(scope="module")
def url():
    arguments = {"eos_token_id": demo.load_tokenizer().eos_token_id}
    with serving(template=WITH_TOOLS, arguments=arguments, api_key="secret") as running:
        yield f"{running.address}/v1"


def test_openai(url):
    messages, say = [{"role": "user", "content": PROMPT}], plain(PROMPT, 10)
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
        chats = client.chat.completions
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").owned_by == "hf_specdec"
        fields = {"model": "demo", "temperature": 0, "max_completion_tokens": 10, "store": False}
        answer = chats.create(messages=messages, response_format={"type": "text"}, **fields)
        assert answer.choices[0].message.content == say
        more = [*messages, answer.choices[0].message, {"role": "user", "content": "\n"}]
        assert chats.create(messages=more, **fields).choices[0].finish_reason == "length"
        with chats.stream(messages=messages, **fields) as stream:
            assert "".join(event.delta for event in stream if event.type == "content.delta") == say
        fields = {"model": "demo", "temperature": 0, "max_tokens": 10}
        answer = client.completions.create(prompt=[PROMPT, "class"], echo=True, logit_bias={}, **fields)
        assert [choice.text for choice in answer.choices] == [PROMPT + say, "class" + plain("class", 10)]
        usage = {"include_usage": True}
        *parts, last = client.completions.create(prompt=PROMPT, stream=True, stream_options=usage, **fields)
        assert "".join(part.choices[0].text for part in parts) == say
        assert last.usage.completion_tokens == 10
        fields |= {"max_tokens": 60, "messages": messages}
        parsed = chats.parse(response_format=Reading, **fields).choices[0].message.parsed
        assert isinstance(parsed, Reading)
        with chats.stream(response_format=Reading, **fields) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed
        tool = openai.pydantic_function_tool(Reading, name="tell")
        # The model need not call it.
        assert chats.create(tools=[tool], **fields).choices[0].message.content
        (call,) = chats.parse(tools=[tool], tool_choice="required", **fields).choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Reading)
        with pytest.raises(openai.BadRequestError, match="`suffix` cannot be honoured"):
            client.completions.create(model="demo", prompt=PROMPT, suffix="x")
        with pytest.raises(openai.NotFoundError) as raised:
            client.embeddings.create(model="demo", input=PROMPT)
        assert raised.value.body.keys() == {"message", "type", "param", "code"}
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()


def test_langchain(url):
    langchain = pytest.importorskip("langchain_openai")
    given = {"model": "demo", "base_url": url, "api_key": "secret", "max_retries": 0, "temperature": 0}
    short, client = (langchain.ChatOpenAI(**given, max_tokens=length) for length in (10, 60))
    assert short.invoke(PROMPT).content == plain(PROMPT, 10)
    assert "".join(chunk.content for chunk in short.stream(PROMPT)) == plain(PROMPT, 10)
    assert [answer.content for answer in short.batch([PROMPT] * 2)] == [plain(PROMPT, 10)] * 2
    assert short.invoke(PROMPT, stop=["re"]).content == plain(PROMPT, 10).partition("re")[0]
    scores = short.bind(logprobs=True, top_logprobs=2).invoke(PROMPT).response_metadata["logprobs"]["content"]
    assert [len(one["top_logprobs"]) for one in scores] == [2] * 10
    assert [one.content for one in asyncio.run(short.abatch([PROMPT, "class"]))] == [
        plain(PROMPT, 10),
        plain("class", 10),
    ]
    settings = {"seed": 3, "reasoning_effort": "low", "verbosity": "low", "store": False, "service_tier": "auto"}
    settings |= {"metadata": {"a": "b"}, "logit_bias": {"5": 1}, "presence_penalty": 0.1, "extra_body": {"top_k": 5}}
    assert langchain.ChatOpenAI(**given, **settings).invoke(PROMPT).content
    for strict, choice in ((None, "any"), (True, "Reading")):
        calling = client.bind_tools([Reading], strict=strict, tool_choice=choice, parallel_tool_calls=False)
        answer = calling.invoke(PROMPT)
        (call,) = answer.tool_calls
        Reading(**call["args"])
        parts = list(calling.stream(PROMPT))
        assert sum(parts[1:], parts[0]).tool_calls[0]["args"] == call["args"]
        told = [("user", PROMPT), answer, {"role": "tool", "tool_call_id": call["id"], "content": "x"}]
        assert client.bind_tools([Reading], strict=strict).invoke(told).content
    for method in ("json_schema", "function_calling"):
        assert isinstance(client.with_structured_output(Reading, method=method).invoke(PROMPT), Reading)
