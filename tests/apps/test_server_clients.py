"""The server as OpenAI's own client, LangChain and LiteLLM see it, none of which the extras bring."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from hf_specdec import demo
from tests.helpers.levels import slow
from tests.helpers.servers import PROMPT, WITH_TOOLS, Reading, httpx, plain, serving


openai = pytest.importorskip("openai")
pytest.importorskip("xgrammar")

pytestmark = slow


@pytest.fixture(scope="module")
def url():
    arguments = {"eos_token_id": demo.load_tokenizer().eos_token_id}
    with serving(template=WITH_TOOLS, arguments=arguments, api_key="secret") as running:
        yield f"{running.address}/v1"


class TestOpenAI:
    @pytest.fixture
    def client(self, url):
        with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
            yield client

    def test_models(self, client):
        assert [model.id for model in client.models.list()] == ["demo"]
        assert client.models.retrieve("demo").owned_by == "hf_specdec"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("user/other")

    def test_chats_go_on(self, client):
        fields = {"model": "demo", "temperature": 0, "max_completion_tokens": 10, "store": False}
        messages = [{"role": "user", "content": PROMPT}]
        answer = client.chat.completions.create(messages=messages, response_format={"type": "text"}, **fields)
        assert answer.choices[0].message.content == plain(PROMPT, 10)
        messages = [*messages, answer.choices[0].message, {"role": "user", "content": "\n"}]
        assert client.chat.completions.create(messages=messages, **fields).choices[0].finish_reason == "length"
        with client.chat.completions.stream(messages=messages[:1], **fields) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == plain(PROMPT, 10)

    def test_completions(self, client):
        fields = {"model": "demo", "temperature": 0, "max_tokens": 10}
        answer = client.completions.create(prompt=[PROMPT, "class"], echo=True, logit_bias={}, **fields)
        assert [choice.text for choice in answer.choices] == [
            prompt + plain(prompt, 10) for prompt in (PROMPT, "class")
        ]
        usage = {"include_usage": True}
        *parts, last = client.completions.create(prompt=PROMPT, stream=True, stream_options=usage, **fields)
        assert "".join(part.choices[0].text for part in parts) == plain(PROMPT, 10)
        assert last.usage.completion_tokens == 10

    def test_parsed_answers(self, client):
        messages = [{"role": "user", "content": PROMPT}]
        fields = {"model": "demo", "temperature": 0, "max_tokens": 60, "messages": messages}
        answer = client.chat.completions.parse(response_format=Reading, **fields)
        assert isinstance(answer.choices[0].message.parsed, Reading)
        with client.chat.completions.stream(response_format=Reading, **fields) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed
        tool = openai.pydantic_function_tool(Reading, name="tell")
        # The model need not call it.
        assert client.chat.completions.create(tools=[tool], **fields).choices[0].message.content
        answer = client.chat.completions.parse(tools=[tool], tool_choice="required", **fields)
        (call,) = answer.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Reading)
        assert json.loads(call.function.arguments).keys() == {"size", "kind"}

    def test_refusals(self, client):
        with pytest.raises(openai.BadRequestError, match="`suffix` cannot be honoured"):
            client.completions.create(model="demo", prompt=PROMPT, suffix="x")
        with pytest.raises(openai.NotFoundError) as raised:
            client.embeddings.create(model="demo", input=PROMPT)
        assert raised.value.body.keys() == {"message", "type", "param", "code"}
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()


class TestLangChain:
    @pytest.fixture
    def chat(self, url):
        langchain = pytest.importorskip("langchain_openai")
        given = {"model": "demo", "base_url": url, "api_key": "secret", "max_retries": 0}
        return partial(langchain.ChatOpenAI, **given, temperature=0, max_tokens=60)

    def test_texts(self, chat):
        client = chat(max_tokens=10)
        assert client.invoke(PROMPT).content == plain(PROMPT, 10)
        assert "".join(chunk.content for chunk in client.stream(PROMPT)) == plain(PROMPT, 10)
        assert [answer.content for answer in client.batch([PROMPT] * 2)] == [plain(PROMPT, 10)] * 2
        assert client.invoke(PROMPT, stop=["re"]).content == plain(PROMPT, 10).partition("re")[0]
        scores = client.bind(logprobs=True, top_logprobs=2).invoke(PROMPT).response_metadata["logprobs"]["content"]
        assert [len(one["top_logprobs"]) for one in scores] == [2] * 10
        message = pytest.importorskip("langchain_core.messages").HumanMessage(PROMPT)
        assert len(chat(n=3, temperature=1).generate([[message]]).generations[0]) == 3

    def test_settings_that_frameworks_send(self, chat):
        settings = {"seed": 3, "reasoning_effort": "low", "verbosity": "low", "store": False, "service_tier": "auto"}
        settings |= {"metadata": {"a": "b"}, "logit_bias": {"5": 1}, "presence_penalty": 0.1}
        assert chat(**settings, extra_body={"top_k": 5}).invoke(PROMPT).content

    def test_asynchronous_calls(self, chat):
        async def ask() -> tuple[str, list[str]]:
            async with httpx.AsyncClient() as own:
                client = chat(max_tokens=10, http_async_client=own)
                text = "".join([chunk.content async for chunk in client.astream(PROMPT)])
                return text, [answer.content for answer in await client.abatch([PROMPT, "class"])]

        assert asyncio.run(ask()) == (plain(PROMPT, 10), [plain(PROMPT, 10), plain("class", 10)])

    @pytest.mark.parametrize(
        ("choice", "strict"),
        [({"tool_choice": "any"}, None), ({"tool_choice": "Reading", "parallel_tool_calls": False}, True)],
    )
    def test_calls_of_tools(self, chat, choice, strict):
        calling = chat().bind_tools([Reading], strict=strict, **choice)
        answer = calling.invoke(PROMPT)
        (call,) = answer.tool_calls
        Reading(**call["args"])
        parts = list(calling.stream(PROMPT))
        assert sum(parts[1:], parts[0]).tool_calls[0]["args"] == call["args"]
        told = [("user", PROMPT), answer, {"role": "tool", "tool_call_id": call["id"], "content": "x"}]
        assert chat().bind_tools([Reading], strict=strict).invoke(told).content

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured_answers(self, chat, method):
        assert isinstance(chat().with_structured_output(Reading, method=method).invoke(PROMPT), Reading)


class TestLiteLLM:
    @pytest.fixture
    def complete(self, url, monkeypatch):
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        self.litellm = pytest.importorskip("litellm")
        settings = {"api_base": url, "api_key": "secret", "temperature": 0, "max_tokens": 60, "num_retries": 0}
        messages = [{"role": "user", "content": PROMPT}]

        def complete(**given: Any) -> Any:
            return self.litellm.completion(**{"model": "openai/demo", "messages": messages, **settings, **given})

        return complete

    def test_texts(self, complete):
        for model in ("openai/demo", "hosted_vllm/demo"):
            assert complete(model=model, max_tokens=10).choices[0].message.content == plain(PROMPT, 10)
        chunks = complete(stream=True, max_tokens=10, stream_options={"include_usage": True})
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == plain(PROMPT, 10)
        assert len(complete(n=2, temperature=1, logprobs=True, top_logprobs=1).choices) == 2

    def test_forms(self, complete):
        assert Reading.model_validate_json(complete(response_format=Reading).choices[0].message.content)
        function = {"name": "tell", "parameters": Reading.model_json_schema()}
        answer = complete(tools=[{"type": "function", "function": function}], tool_choice="required")
        (call,) = answer.choices[0].message.tool_calls
        assert Reading.model_validate_json(call.function.arguments)

    def test_refusals(self, complete):
        with pytest.raises(self.litellm.BadRequestError, match="greater than or equal to 1"):
            complete(max_tokens=-1)
        with pytest.raises(self.litellm.AuthenticationError):
            complete(api_key="other")
