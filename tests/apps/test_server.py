"""The server, over real connections."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch
from transformers import LogitsProcessor
from typer.testing import CliRunner

from hf_specdec import SpecDecError, SpeculativeBatchingManager, UnsupportedModelError, cli, demo
from hf_specdec.serving import service
from hf_specdec.serving.app import build_app
from hf_specdec.serving.bodies import CompletionBody
from hf_specdec.serving.service import UNAVAILABLE, Limits, Service
from tests.helpers.encoder_decoders import text_model
from tests.helpers.methods import demo_target
from tests.helpers.paths import ROOT
from tests.helpers.servers import httpx, plain, serving, uvicorn, wait_until


PROMPT = "def read(path):"
CHAT = [{"role": "system", "content": "def read(path):"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
LONG = {"max_tokens": 800, "spec_method": "off", "temperature": 0}


@pytest.fixture(scope="module")
def running():
    with serving(max_prompt_tokens=200, max_new_tokens=400, max_body_bytes=4000) as running:
        yield running


def events(answer: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ------------------------------------------------------------------------------------------------------------- answers


def test_completions_are_those_of_generate(running):
    answer = running.complete(max_tokens=40).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "demo"
    (choice,) = answer["choices"]
    assert choice["text"] == plain(PROMPT, 40)
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 40
    assert usage["total_tokens"] == 40 + usage["prompt_tokens"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    ids = running.service.manager.tokenizer(PROMPT)["input_ids"]
    assert running.text(ids, max_tokens=40) == choice["text"]


def test_streams_are_the_same_text(running):
    whole = running.complete(max_tokens=40).json()
    fields = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True}
    with running.client.stream("POST", "/v1/completions", json=fields) as answer:
        parts = events(answer)
    assert len(parts) > 3
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    fields["stream_options"] = {"include_usage": True}
    with running.client.stream("POST", "/v1/completions", json=fields) as answer:
        assert events(answer)[-1]["usage"] == whole["usage"]


def test_chats(running):
    body = {"messages": CHAT, "max_completion_tokens": 10, "temperature": 0}
    answer = running.client.post("/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert message == {"role": "assistant", "content": plain("# def read(path):\n# x\n", 10)}
    with running.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as streamed:
        first, *parts, last = events(streamed)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == message["content"]
    assert last["choices"][0]["finish_reason"] == "length"


def test_stop_strings(running):
    text = plain(PROMPT, 40)
    (stop,) = re.findall(r"^    def \w+", text, re.MULTILINE)[:1]
    answer = running.complete(max_tokens=40, stop=["nowhere", stop]).json()["choices"][0]
    assert answer["text"] == text[: text.index(stop)]
    assert answer["finish_reason"] == "stop"
    wait_until(lambda: running.service.num_open == 0)


def test_requests_bound_their_drafts(running):
    def details(**fields):
        answer = running.complete(max_tokens=40, **fields).json()
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens_details"]

    text, drafted = details()
    for fields in ({"spec_method": "off"}, {"num_speculative_tokens": 0}):
        nothing = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        assert details(**fields) == (text, nothing)
    text_of_one, one = details(num_speculative_tokens=1)
    assert text_of_one == text
    assert 0 < sum(one.values()) < sum(drafted.values())


def test_seeds(running):
    def drawn(**fields):
        return running.text(temperature=1.0, top_k=50, max_tokens=30, **fields)

    assert drawn(seed=3) == drawn(seed=3)
    assert len({drawn(seed=3), drawn(seed=4), drawn(), drawn()}) == 4


def test_several_answers(running):
    settings = {"n": 3, "temperature": 1.0, "max_tokens": 12, "seed": 5}
    answer = running.complete(**settings).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert answer["usage"]["completion_tokens"] == 36
    assert answer["usage"]["prompt_tokens"] == 5
    # They are the rows of one call.
    tokenizer = running.service.manager.tokenizer
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    torch.manual_seed(5)
    sampled = {"do_sample": True, "top_k": 50, "num_return_sequences": 3, "max_new_tokens": 12, "eos_token_id": None}
    rows = demo_target().generate(ids, **sampled, pad_token_id=0, spec_method="ngram", num_speculative_tokens=4)
    assert texts == tokenizer.batch_decode(rows[:, ids.shape[1] :], skip_special_tokens=True)
    fields = {"prompt": PROMPT, **settings, "stream": True}
    with running.client.stream("POST", "/v1/completions", json=fields) as streamed:
        choices = [part["choices"][0] for part in events(streamed)]
    assert ["".join(one["text"] for one in choices if one["index"] == index) for index in range(3)] == texts
    assert sorted(one["index"] for one in choices if one["finish_reason"] == "length") == [0, 1, 2]
    wait_until(lambda: running.service.num_open == 0)


def test_answers_that_have_stopped_wait_for_no_others(running, monkeypatch):
    fields = {"n": 2, "temperature": 0, "max_tokens": 40}
    stop = running.text(max_tokens=40)[8:10]
    manager, num_open = running.service.manager, []

    def cancel(name, cancel=manager.cancel_request):
        num_open.append(running.service.num_open)
        cancel(name)

    monkeypatch.setattr(manager, "cancel_request", cancel)
    assert running.complete(**fields, stop=stop).json()["choices"][1]["finish_reason"] == "stop"
    # While the reply was open.
    assert 2 in num_open


def test_log_probabilities(running):
    tokenizer = running.service.manager.tokenizer
    # Those of the model, whatever is done to its scores.
    answer = running.complete(max_tokens=30, logprobs=2, repetition_penalty=1.3).json()["choices"][0]
    found = answer["logprobs"]
    assert "".join(found["tokens"]) == answer["text"]
    assert [answer["text"][offset:][: len(token)] for offset, token in zip(found["text_offset"], found["tokens"])] == (
        found["tokens"]
    )
    ids = tokenizer(PROMPT)["input_ids"]
    tokens = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(answer["text"]))
    assert tokenizer.batch_decode([[token] for token in tokens]) == found["tokens"]
    with torch.no_grad():
        logs = demo_target()(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    own = logs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    assert found["token_logprobs"] == pytest.approx(own, abs=1e-4)
    best = logs.topk(2)
    for top, values, places in zip(found["top_logprobs"], best.values.tolist(), best.indices.tolist()):
        assert top == pytest.approx(dict(zip(tokenizer.batch_decode([[p] for p in places]), values)), abs=1e-4)
    fields = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "logprobs": 2, "repetition_penalty": 1.3}
    with running.client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as streamed:
        parts = [part["choices"][0]["logprobs"] for part in events(streamed)]
    for name, values in found.items():
        assert [value for part in parts if part is not None for value in part[name]] == values


def test_log_probabilities_of_chats_and_stop_strings(running):
    body = {"messages": CHAT, "max_tokens": 10, "temperature": 0, "logprobs": True}
    choice = running.client.post("/v1/chat/completions", json={**body, "top_logprobs": 1}).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 10
    for one in content:
        # Greedy.
        assert one["top_logprobs"] == [{name: one[name] for name in ("token", "logprob", "bytes")}]
        assert bytes(one["bytes"]).decode() == one["token"]
    stop = max((one["token"] for one in content[2:]), key=len)
    stopped = running.client.post("/v1/chat/completions", json={**body, "stop": stop}).json()["choices"][0]
    text, tokens = stopped["message"]["content"], [one["token"] for one in stopped["logprobs"]["content"]]
    assert "".join(tokens[:-1]) in text
    assert "".join(tokens).startswith(text)
    assert stopped["logprobs"]["content"][0]["top_logprobs"] == []


TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "x"}'}}
DEEP = {**CALL, "function": {"name": "read", "arguments": '{"a":' * 3000 + "1" + "}" * 3000}}
CALLED = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "y"},
]


def test_tools_are_told_through_the_chat_template(running):
    body = {"messages": CALLED, "max_tokens": 8, "temperature": 0, "tools": [TOOL]}
    refused = running.client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "no place for `tools`" in refused.text
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{% for message in messages %}"
        "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
        "{{ message.content }} {{ message.tool_call_id }};{% endfor %}"
    )
    with serving(template=template) as other:
        chat = '{"path": "x"} ;y call_1;'
        strict = [{**TOOL, "function": {**TOOL["function"], "strict": True}}]
        asked = {"tools": [TOOL]}, {"tools": strict}, {"tool_choice": "none"}
        for fields, prompt in zip(asked, (f"read x ;{chat}", f"read x ;{chat}", f"x ;{chat}")):
            answer = other.client.post("/v1/chat/completions", json={**body, **fields}).json()
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": plain(prompt, 8)}
        for fields, message in (
            ({"tool_choice": {"type": "function", "function": {"name": "write"}}}, "`tool_choice` needs `tools`"),
            ({"tool_choice": "required", "tools": []}, "`tool_choice` needs `tools`"),
            ({"tool_choice": "always"}, "tool_choice.type: Input should be 'auto'"),
            ({"tools": [{"type": "search"}]}, "tools.0.type: Input should be 'function'"),
            ({"messages": [{"role": "user"}]}, "needs `content`"),
            ({"messages": [{"role": "assistant", "tool_calls": [DEEP]}]}, "nested too deep"),
            ({"top_logprobs": 2}, "needs `logprobs`"),
        ):
            refused = other.client.post("/v1/chat/completions", json={**body, **fields})
            assert refused.status_code == 400
            assert message in refused.text


class Says(LogitsProcessor):
    """Lets the model say a text, whatever the prompt is."""

    def __init__(self, tokens: list[int]):
        self.tokens, self.start = tokens, None

    def __call__(self, input_ids, scores):
        self.start = input_ids.shape[1] if self.start is None else self.start
        token = self.tokens[min(input_ids.shape[1] - self.start, len(self.tokens) - 1)]
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([token]), 0.0)


def test_calls_of_tools():
    said = 'I look.\n<tool_call>\n{"name": "read", "arguments": {"path": "x"}}\n</tool_call>'
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
    tokens = [*demo.load_tokenizer()(said, add_special_tokens=False)["input_ids"], 0]
    arguments = {"logits_processor": [Says(tokens)], "eos_token_id": 0}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 80, "tools": [TOOL]}
    with serving(template=template, arguments=arguments) as other:
        (choice,) = other.client.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert choice["message"]["content"].strip() == "I look."
        assert call["function"] == {"name": "read", "arguments": '{"path": "x"}'}
        # As it came, it may be sent back.
        again = {**body, "messages": [*body["messages"], choice["message"], {"role": "tool", "content": "y"}]}
        assert other.client.post("/v1/chat/completions", json=again).status_code == 200
        for choice, reason in (("auto", "tool_calls"), ("none", "stop")):
            streamed = {**body, "tool_choice": choice, "stream": True}
            with other.client.stream("POST", "/v1/chat/completions", json=streamed) as answer:
                choices = [event["choices"][0] for event in events(answer)]
            assert choices[-1]["finish_reason"] == reason
            deltas = [choice["delta"] for choice in choices]
            text = "".join(delta.get("content", "") for delta in deltas)
            found = [call for delta in deltas for call in delta.get("tool_calls", ())]
            if reason == "stop":
                assert (text, found) == (said, [])
            else:
                assert text.strip() == "I look."
                assert [(one["index"], one["function"]) for one in found] == [(0, call["function"])]
        short = other.client.post("/v1/chat/completions", json={**body, "max_tokens": len(tokens) - 4}).json()
        assert short["choices"][0]["finish_reason"] == "length"
        assert "<tool_call>" in short["choices"][0]["message"]["content"]


def test_one_call_at_a_time():
    call = '<tool_call>{"name": "read", "arguments": {}}</tool_call>'
    template = "{% for tool in tools or [] %}{% endfor %}{{ messages[0].content }}"
    tokens = [*demo.load_tokenizer()(call * 2, add_special_tokens=False)["input_ids"], 0]
    arguments = {"logits_processor": [Says(tokens)], "eos_token_id": 0}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100, "tools": [TOOL]}
    with serving(template=template, arguments=arguments) as other:
        for is_parallel, count in ((True, 2), (False, 1)):
            fields = {**body, "parallel_tool_calls": is_parallel}
            (choice,) = other.client.post("/v1/chat/completions", json=fields).json()["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert len(choice["message"]["tool_calls"]) == count
            with other.client.stream("POST", "/v1/chat/completions", json={**fields, "stream": True}) as answer:
                deltas = [event["choices"][0]["delta"] for event in events(answer)]
            assert sum(len(delta.get("tool_calls", ())) for delta in deltas) == count
        # A processor of the server's own is never left out for a client's wish.
        refused = other.client.post("/v1/chat/completions", json={**body, "presence_penalty": 1})
        assert "logits processors of its own" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0]['nothing'].strip() }}", "UndefinedError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ '%(x)s' % {} }}", "KeyError"),
        ("{% for %}", "TemplateSyntaxError"),
    ],
)
def test_templates_that_raise(template, message):
    with serving(template=template) as other:
        refused = other.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]
        assert other.text() == plain(PROMPT, 12)


def test_failures_inside_are_no_mistakes_of_the_client(running, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("of the model")

    before = running.service.outcomes["failed"]
    with monkeypatch.context() as patch:
        patch.setattr("hf_specdec.decoding.joint.Judge.verify", fail)
        assert running.error(status=500) == "The server has failed at this request. See its log."
    assert running.service.outcomes["failed"] == before + 1
    monkeypatch.setattr(running.service.manager, "encode", lambda prompt: 1 / 0)
    failed = running.client.post("/v1/completions", json={"prompt": "x"})
    assert failed.status_code == 500
    monkeypatch.undo()
    assert running.client.get("/health").extensions["network_stream"] is failed.extensions["network_stream"]
    assert running.text() == plain(PROMPT, 12)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spec_model": "user/head"}, "`spec_model` cannot be honoured. The drafter is chosen when the server starts"),
        ({"speculative": {"method": "ngram"}}, "`speculative` cannot be honoured"),
        ({"generation_config": "{}"}, "`generation_config` cannot be honoured"),
        ({"suffix": "x"}, "`suffix` cannot be honoured"),
        ({"stop_token_ids": [3]}, "`stop_token_ids` cannot be honoured"),
        ({"spec_method": "ngram"}, "spec_method.*'off'"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: .*greater than or equal to 0"),
        ({"response_format": "json"}, "^response_format: Input should be an object$"),
        ({"n": 0}, "n: "),
        ({"n": 69}, "at most 68 answers here, got 69"),
        ({"n": 35, "prompt": ["x", "y"]}, "at most 68 answers here, got 70"),
        ({"logprobs": 6}, "logprobs: "),
        ({"best_of": 2}, "`best_of` other than `n`"),
        ({"echo": True, "logprobs": 1}, "`echo` with `logprobs`"),
        ({"temperature": -1}, "temperature: "),
        ({"repetition_penalty": 1e-40}, "repetition_penalty: .*0.01"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"min_tokens": 401}, "At most 12 tokens are generated, and at least 401"),
        ({"presence_penalty": 2.5}, "presence_penalty: "),
        ({"logit_bias": {"x": 1}}, "`logit_bias` needs token ids"),
        ({"logit_bias": {"999999999": 1}}, "`logit_bias`: '999999999' is no token"),
        ({"logit_bias": {"9" * 100: 1}}, "`logit_bias` needs token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5: "),
        ({"stop": ["a", "b", "c", "d", "e"]}, "^stop: List should have at most 4 items"),
        ({"stop": ""}, "^stop.0: String should have at least 1 character"),
        ({"prompt": ""}, "^prompt: it must be a text, a list of token ids, or a list of such prompts"),
        ({"prompt": ["x", ""]}, "^prompt: it must be"),
        ({"prompt": [5, "x"]}, "^prompt: it must be"),
        ({"prompt": [True]}, "^prompt: it must be"),
        ({"prompt": [1 << 40]}, "all from 0 to"),
        ({"prompt": [5] * 201}, "201 tokens, more than the 200"),
    ],
)
def test_bad_requests(running, fields, message):
    assert re.search(message, running.error(**{"prompt": PROMPT, **fields}))
    assert running.service.num_open == 0


def test_bad_bodies_and_paths(running):
    client = running.client
    assert "model_not_found" in running.complete(model="other").text
    broken = client.post("/v1/completions", content="{", headers={"content-type": "application/json"})
    assert broken.status_code == 400
    assert "The body is no JSON: Expecting property name" in broken.json()["error"]["message"]
    assert "must be a JSON object" in client.post("/v1/completions", json=[1]).json()["error"]["message"]
    assert client.post("/v1/completions", content='{"prompt": "x"}').status_code == 400
    assert (
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [{}]}]}).status_code == 400
    )
    assert running.error("x" * 5000, status=413) == "A body has at most 4000 bytes."
    assert client.post("/load_model", json={"model": "other"}).status_code == 404
    # A page in the user's browser that has got a name of its own for 127.0.0.1.
    for host in (
        "stranger.example",
        "127.0.0.1.stranger.example",
        "[::1].stranger.example:80",
        "[::2]",
        "127.0.0.1:x",
    ):
        refused = client.get("/v1/models", headers={"host": host})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_host")
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]", "[::1]:8000"):
        assert client.get("/v1/models", headers={"host": host}).status_code == 200
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "demo"
    assert client.get("/v1/models/demo").json() == model
    assert client.get("/v1/models/user/other").json()["error"]["code"] == "model_not_found"


def test_positions_of_the_model(running, monkeypatch):
    monkeypatch.setattr(running.service, "_positions", 20)
    assert "20 positions, and the prompt has 20 tokens" in running.error([5] * 20)
    # An answer without a length of its own gets what is left, and so does one that asks for more.
    for fields in ({}, {"max_tokens": 18}):
        fields = {"prompt": PROMPT, "temperature": 0, **fields}
        answer = running.client.post("/v1/completions", json=fields).json()
        assert answer["usage"]["total_tokens"] == 20
        assert answer["choices"][0]["finish_reason"] == "length"


def test_lengths_beyond_the_limit_are_cut(running):
    answer = running.complete(max_tokens=10**9).json()
    assert answer["usage"]["completion_tokens"] == 400
    assert answer["choices"][0]["finish_reason"] == "length"


def test_api_key():
    with serving(api_key="secret\n") as running:
        assert running.error(status=401) == "The API key is missing or wrong."
        for path, status in (("/health", 200), ("/metrics", 401), ("/v1/models", 401)):
            assert running.client.get(path).status_code == status
        running.client.headers["Authorization"] = "Bearer secret"
        assert running.text() == plain(PROMPT, 12)


# -------------------------------------------------------------------------------------------------- places and leaving


def test_too_many_requests_and_clients_that_leave():
    with serving(batch_size=1, max_waiting=1) as running:
        service, fields = running.service, {"prompt": PROMPT, **LONG}
        with running.client.stream("POST", "/v1/completions", json={**fields, "stream": True}) as first:
            lines = first.iter_lines()
            assert next(lines).startswith("data: ")
            waiting = threading.Thread(target=running.complete, kwargs={"max_tokens": 2})
            waiting.start()
            wait_until(lambda: service.num_open == 2)
            refused = running.complete()
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        # The first one has left: who waits gets its place, long before its 800 tokens are there.
        waiting.join()
        with pytest.raises(httpx.ReadTimeout):
            running.client.post("/v1/completions", json=fields, timeout=0.2)
        wait_until(lambda: service.num_open == 0)
        wait_until(lambda: not service.manager._names)
        assert service.outcomes == {"left": 2, "answered": 1, "refused": 1}
        assert running.text() == plain(PROMPT, 12)


def test_clients_that_leave_in_the_turn_in_which_something_has_come(running):
    async def leave() -> None:
        reply = running.service.admit(CompletionBody(prompt=PROMPT))
        coming = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(reply.in_time(coming))
        await asyncio.sleep(0)
        coming.set_result(None)
        waiting.cancel()
        await asyncio.wait({waiting})
        reply.close()
        assert waiting.cancelled()

    asyncio.run(leave())
    assert running.service.num_open == 0


@pytest.mark.parametrize("length", [1, 4000])
def test_bodies_of_which_a_part_never_comes(length):
    with serving() as running:
        body = json.dumps({"prompt": PROMPT, **LONG}).encode()
        host, port = running.address.removeprefix("http://").split(":")
        for _ in range(5):
            with socket.create_connection((host, int(port))) as client:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
                client.sendall(f"{head}Content-Length: {len(body) + length}\r\n\r\n".encode() + body)
        assert running.text() == plain(PROMPT, 12)
        assert running.service.outcomes == {"answered": 1}
        assert running.service.num_open == 0


def test_answers_that_take_too_long():
    with serving(batch_size=1, timeout=0.3) as running:
        assert running.error(status=504, **LONG) == "The answer has taken more than 0.3 seconds."
        wait_until(lambda: not running.service.manager._names)
        assert running.service.outcomes == {"timeout": 1}


def test_metrics_and_health(running):
    before = running.service.outcomes["answered"]
    running.complete(max_tokens=40)
    metrics = running.client.get("/metrics").text
    assert f'hf_specdec_server_requests_total{{outcome="answered"}} {before + 1:.1f}' in metrics
    assert 'num_accepted_tokens_total{method="ngram",model_name="demo"}' in metrics
    assert running.client.get("/health").json() == {"status": "ok"}


def test_a_server_whose_model_has_failed(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr(service.logger, "error", lambda message, exc_info: told.append(f"{message} {exc_info}"))
    with serving() as running:
        running.service.manager._engine.step = None
        assert "has failed" in running.error(status=503)
        health = running.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failed", "message": UNAVAILABLE["failed"]})
        assert "has failed and decodes no more" in running.error(status=503)
        running.service.manager.error = None
        assert running.client.get("/health").json() == {"status": "stopped", "message": UNAVAILABLE["stopped"]}
        assert "has stopped" in running.error(status=503)
    assert told == ["The server decodes no more. 'NoneType' object is not callable"]


def test_the_first_client_finds_all_warm():
    manager = SpeculativeBatchingManager(
        demo_target(), batch_size=3, tokenizer=demo.load_tokenizer(), spec_method="ngram", max_tokens_in_flight=200
    )
    service = Service(manager, "demo", Limits())

    async def ask() -> tuple[httpx.Response, httpx.Response]:
        transport = httpx.ASGITransport(build_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get("/health"), await client.post("/v1/completions", json={"prompt": "x"})

    health, refused = asyncio.run(ask())
    assert (health.status_code, health.json()) == (503, {"status": "starting", "message": UNAVAILABLE["starting"]})
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "The server is starting.")
    service.start()
    try:
        assert service.status == "ok"
        stats = manager._engine.stats
        assert stats.num_accepted_tokens > 0
        assert stats.num_committed_tokens == 16 + 21 + 26
        assert not manager._names
    finally:
        manager.destroy()
    with serving() as running:
        # Nobody has asked for these.
        assert "generation_tokens_total{" not in running.client.get("/metrics").text


def test_models_that_cannot_decode_do_not_start(monkeypatch):
    monkeypatch.setattr("hf_specdec.decoding.joint.Judge.verify", lambda *args, **kwargs: 1 / 0)
    manager = SpeculativeBatchingManager(demo_target(), tokenizer=demo.load_tokenizer(), spec_method="ngram")
    try:
        with pytest.raises(SpecDecError, match="The server cannot decode: .*division by zero"):
            Service(manager, "demo", Limits()).start()
    finally:
        manager.destroy()


# --------------------------------------------------------------------------------------------------------- the command


def is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_the_command_ends_open_answers_first():
    command = [sys.executable, "-m", "hf_specdec", "serve", "--port", "0", "--spec-method", "ngram", "-k", "4"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    # Whatever happens, nobody waits for ever; on a busy machine the imports alone take minutes.
    timer = threading.Timer(600, process.kill)
    timer.start()
    try:
        address = next(found[0] for line in process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        wait_until(lambda: is_up(address), 300)
        fields = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=fields, timeout=300) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        process.stderr.read()
        assert process.wait(300) == 0
    finally:
        timer.cancel()
        process.kill()
        process.stderr.close()


@pytest.mark.parametrize(
    ("host", "address", "is_open"),
    [
        ("localhost", "http://localhost", False),
        ("127.0.0.2", "http://127.0.0.2", False),
        ("127.1", "http://127.1", False),
        ("::1", "http://[::1]", False),
        ("0.0.0.0", "http://0.0.0.0", True),
    ],
)
def test_hosts(monkeypatch, host, address, is_open):
    statuses = []

    def run(server, sockets):
        async def ask() -> None:
            transport = httpx.ASGITransport(server.config.app)
            async with httpx.AsyncClient(transport=transport, base_url=url) as client:
                for headers in ({}, {"host": "stranger.example"}):
                    statuses.append((await client.get("/v1/models", headers=headers)).status_code)

        url = f"{address}:{sockets[0].getsockname()[1]}"
        statuses.append(url)
        asyncio.run(ask())

    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    result = CliRunner().invoke(cli.app, ["serve", "--host", host, "--port", "0", "--spec-method", "ngram"])
    if result.exit_code == 2 and host == "::1":
        pytest.skip("This machine has no IPv6.")
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stderr.split())
    assert f"Serving demo at {statuses[0]}" in text
    assert ("Everybody who reaches" in text) == is_open
    assert statuses[1:] == [200, 200 if is_open else 400]


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = CliRunner().invoke(cli.app, ["serve", "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2
    assert "Name a free --port" in " ".join(result.stderr.split())


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(cli.app, ["serve"])
    assert result.exit_code == 2
    assert "pip install fastapi uvicorn prometheus-client" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key", " "], "The API key is empty"),
        (["--spec-method", "off", "-k", "3"], "generates without drafts"),
        (["--spec-method", "nothing"], "nothing"),
    ],
)
def test_bad_options(arguments, message):
    result = CliRunner().invoke(cli.app, ["serve", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_models_with_an_encoder_are_not_served():
    manager = SpeculativeBatchingManager(text_model("t5")[0], spec_method="off")
    with pytest.raises(UnsupportedModelError, match="has an encoder, and the server goes on with texts"):
        Service(manager, "t5", Limits())
