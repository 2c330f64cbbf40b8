"""What ordinary clients send: OpenAI's fields and vLLM's, those that ask for nothing among them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from hf_specdec import demo
from hf_specdec.serving import bodies
from hf_specdec.serving.penalties import PenaltiesLogitsProcessor
from tests.helpers.methods import demo_target
from tests.helpers.servers import plain, serving


PROMPT = "def read(path):"

# The template says which of these it is told.
TEMPLATE = (
    "{% for message in messages %}# {{ message.reasoning_content }}{{ message.content }}\n{% endfor %}"
    "{% if enable_thinking %}think{% endif %}{{ reasoning_effort }}{% if add_generation_prompt %}def{% endif %}"
)


@pytest.fixture(scope="module")
def running():
    with serving(template=TEMPLATE, max_new_tokens=100) as running:
        yield running


def chat(running, content: Any = "x", status: int = 200, **fields) -> Any:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **fields}
    answer = running.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"] if status != 200 else answer.json()["choices"][0]["message"]["content"]


def expected(length: int, **settings) -> str:
    """What plain generation says with such settings."""
    tokenizer = demo.load_tokenizer()
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": length, **settings}
    return tokenizer.decode(demo_target().generate(ids, **settings)[0, ids.shape[1] :], skip_special_tokens=True)


NOTHING = {
    "store": False,
    "metadata": {"a": "b"},
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "logit_bias": {},
    "prediction": None,
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "verbosity": "low",
    "user": "x",
    "stream": None,
    "stream_options": {"include_obfuscation": False},
    "seed": -1,
    "top_k": -1,
    "frequency_penalty": 0.0,
    "presence_penalty": None,
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "priority": 0,
    "guided_json": None,
    "invented": [1],
}
IN_CHATS = {
    "modalities": ["text"],
    "audio": None,
    "functions": None,
    "function_call": None,
    "parallel_tool_calls": True,
    "tools": None,
    "tool_choice": "none",
    "logprobs": False,
    "top_logprobs": 0,
    "add_generation_prompt": True,
    "chat_template_kwargs": {},
    "reasoning_effort": None,
}
IN_COMPLETIONS = {"suffix": None, "best_of": 1, "echo": False, "logprobs": None}


@pytest.mark.parametrize("name", [*NOTHING, *IN_COMPLETIONS])
def test_fields_that_ask_for_nothing(running, name):
    fields = {**NOTHING, **IN_COMPLETIONS}
    assert running.text(**{name: fields[name]}) == plain(PROMPT, 12)


@pytest.mark.parametrize("name", [*NOTHING, *IN_CHATS])
def test_fields_of_chats_that_ask_for_nothing(running, name):
    fields = {**NOTHING, **IN_CHATS}
    assert chat(running, **{name: fields[name]}) == plain("# x\ndef", 8)


def test_the_log_names_what_is_ignored_once(running, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(bodies, "_ignored", set())
    monkeypatch.setattr(bodies.logger, "warning", lines.append)
    for number in range(2):
        running.text(store=True, invented=1)
        running.text(**{f"{number}-{name}": 0 for name in range(100)})
    assert [line for line in lines if "'store'" in line or "'invented'" in line] == lines[:2]
    assert len(lines) == bodies._MOST_IGNORED


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modalities": ["text", "audio"]}, "modalities.1: Input should be 'text'"),
        ({"audio": {"voice": "x"}}, "`audio` cannot be honoured. Answers are texts."),
        ({"functions": [{"name": "x"}]}, "`functions` cannot be honoured. Take `tools`."),
        ({"chat_template": "{{ 1 }}"}, "`chat_template` cannot be honoured"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "cannot have 'chat_template'"),
        ({"chat_template_kwargs": {"tokenize": True}}, "cannot have 'tokenize'"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content.0.type: Input should be 'text'"),
        ({"top_logprobs": 2}, "`top_logprobs` needs `logprobs`"),
    ],
)
def test_what_cannot_be_done_is_said(running, fields, message):
    assert message in chat(running, status=400, **fields)


def test_messages_of_answers_are_sent_back(running):
    """As OpenAI's API gives them."""
    nothing = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    said = {"role": "assistant", "content": "y", "reasoning_content": "z", **nothing}
    declined = {"role": "assistant", "content": None, "refusal": "no"}
    body = {"messages": [said, declined], "max_tokens": 8, "temperature": 0}
    answer = running.client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == plain("# zy\n# no\ndef", 8)


def test_what_the_template_is_told(running):
    assert chat(running, chat_template_kwargs={"enable_thinking": True}) == plain("# x\nthinkdef", 8)
    assert chat(running, add_generation_prompt=False) == plain("# x\n", 8)
    assert chat(running, chat_template_kwargs={"continue_final_message": True}) == plain("# x", 8)
    assert chat(running, reasoning_effort="low") == plain("# x\nlowdef", 8)


def test_several_prompts(running):
    tokenizer = running.service.manager.tokenizer
    other = "class Reader:\n"
    texts = [plain(PROMPT, 12), plain(other, 12)]
    ids = [tokenizer(prompt)["input_ids"] for prompt in (PROMPT, other)]
    for prompts in ([PROMPT, other], ids):
        answer = running.complete(prompts).json()
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert [choice["text"] for choice in running.complete([PROMPT, other], n=2).json()["choices"]] == [
        texts[0],
        texts[0],
        texts[1],
        texts[1],
    ]
    drawn = {"n": 2, "temperature": 1.0, "seed": 3}
    both = [choice["text"] for choice in running.complete([PROMPT, other], **drawn).json()["choices"]]
    assert both[2:] == [choice["text"] for choice in running.complete(other, **drawn).json()["choices"]]


def test_echo(running):
    assert running.text(echo=True, best_of=1) == PROMPT + plain(PROMPT, 12)
    ids = running.service.manager.tokenizer(PROMPT)["input_ids"]
    assert running.text(ids, echo=True) == PROMPT + plain(PROMPT, 12)
    with running.client.stream(
        "POST", "/v1/completions", json={"prompt": PROMPT, "echo": True, "max_tokens": 5, "stream": True}
    ) as answer:
        first = next(line for line in answer.iter_lines() if PROMPT in line)
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == PROMPT


def test_biases_are_those_of_transformers(running):
    banned = running.service.manager.tokenizer(plain(PROMPT, 12), add_special_tokens=False)["input_ids"][:3]
    text = expected(30, sequence_bias=[[[token], -100.0] for token in banned])
    assert text != plain(PROMPT, 30)
    assert running.text(max_tokens=30, logit_bias={str(token): -100 for token in banned}) == text


@pytest.mark.parametrize(("frequency", "presence"), [(2.0, 0.0), (0.0, 2.0), (-1.0, 0.5)])
def test_penalties_count_the_answer_alone(running, frequency, presence):
    length = len(running.service.manager.tokenizer(PROMPT)["input_ids"])
    penalties = PenaltiesLogitsProcessor(frequency, presence, length)
    text = expected(40, logits_processor=LogitsProcessorList([penalties]))
    assert text != plain(PROMPT, 40)
    given = {"frequency_penalty": frequency, "presence_penalty": presence}
    answer = running.complete(max_tokens=40, **given).json()
    assert answer["choices"][0]["text"] == text
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    # By hand.
    scores = penalties(torch.tensor([[1] * length + [2, 2, 3]]), torch.zeros(1, 5))
    costs = [0.0, 0.0, 2 * frequency + presence, frequency + presence, 0.0]
    assert scores[0].tolist() == [-cost for cost in costs]


def test_ends_of_texts():
    tokenizer = demo.load_tokenizer()
    ids = tokenizer(plain(PROMPT, 12), add_special_tokens=False)["input_ids"]
    last = ids[5]
    whole = plain(PROMPT, 12)
    with serving(arguments={"eos_token_id": last}) as running:
        answer = running.complete().json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == ids.index(last) + 1
        assert running.text(ignore_eos=True) == whole
        text = expected(12, eos_token_id=last, min_new_tokens=10)
        assert running.text(min_tokens=10) == text
        assert running.text(min_tokens=10, ignore_eos=True) == whole
        shown = running.complete(skip_special_tokens=False).json()["choices"][0]["text"]
        assert shown == tokenizer.decode(ids[: ids.index(last)])


def test_extreme_sampling(running):
    for fields in ({"temperature": 1e-300}, {"temperature": 1e-38}, {"temperature": 1.0, "top_p": 0}):
        assert running.text(**fields) == plain(PROMPT, 12)
    for temperature in (1e-4, 100):
        running.text(temperature=temperature, repetition_penalty=0.01)


def test_pages_of_other_origins():
    page = {"Origin": "http://localhost:3000"}
    asks = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with serving(api_key="secret", origins=("http://localhost:3000",)) as running:
        allowed = running.client.options("/v1/completions", headers=asks)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == page["Origin"]
        assert running.client.get("/health", headers=page).headers["access-control-allow-origin"] == page["Origin"]
        other = running.client.get("/health", headers={"Origin": "http://stranger.example"})
        assert "access-control-allow-origin" not in other.headers
    with serving() as running:
        assert running.client.options("/v1/completions", headers=asks).status_code == 405
