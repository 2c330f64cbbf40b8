"""The server as frameworks over OpenAI's protocol see it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.helpers.servers import PROMPT, Reading, httpx, plain


pytest.importorskip("openai")
pytest.importorskip("xgrammar")

pytestmark = pytest.mark.slow


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
        settings |= {
            "metadata": {"a": "b"},
            "logit_bias": {"5": 1},
            "presence_penalty": 0.1,
            "extra_body": {"top_k": 5},
        }
        assert chat(**settings).invoke(PROMPT).content

    def test_asynchronous_calls(self, chat):
        async def ask() -> tuple[str, list[str]]:
            async with httpx.AsyncClient() as own:
                client = chat(max_tokens=10, http_async_client=own)
                text = "".join([chunk.content async for chunk in client.astream(PROMPT)])
                return text, [answer.content for answer in await client.abatch([PROMPT, "class"])]

        assert asyncio.run(ask()) == (plain(PROMPT, 10), [plain(PROMPT, 10), plain("class", 10)])

    @pytest.mark.parametrize(
        "choice", [{"tool_choice": "any"}, {"tool_choice": "Reading", "parallel_tool_calls": False}]
    )
    @pytest.mark.parametrize("strict", [None, True])
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
