"""Answers of the server over real connections: texts of `generate()`, streams, scores, and the fields of clients."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import LogitsProcessorList

from hf_specdec import demo
from hf_specdec.serving.penalties import PenaltiesLogitsProcessor
from tests.helpers.methods import demo_target
from tests.helpers.servers import PROMPT, plain, serving, wait_until


# The template says which of these it is told.
TEMPLATE = (
    "{% for message in messages %}# {{ message.reasoning_content }}{{ message.content }}\n{% endfor %}"
    "{% if enable_thinking %}think{% endif %}{{ reasoning_effort }}{% if add_generation_prompt %}def{% endif %}"
)
CHAT = [{"role": "system", "content": "def read(path):"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]


@pytest.fixture(scope="module")
def running():
    with serving(template=TEMPLATE, max_new_tokens=100) as running:
        yield running


def choices(answer) -> list:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def texts(answer) -> list[str]:
    return [choice["text"] for choice in choices(answer)]


def test_completions_and_streams_are_the_text_of_generate(running):
    answer = running.complete(max_tokens=40).json()
    assert (answer["object"], answer["model"]) == ("text_completion", "demo")
    (choice,) = answer["choices"]
    assert choice["text"] == plain(PROMPT, 40)
    assert choice["finish_reason"] == "length"
    ids, usage = running.service.manager.tokenizer(PROMPT)["input_ids"], answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 40)
    assert usage["total_tokens"] == len(ids) + 40
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert running.text(ids, max_tokens=40) == choice["text"]
    *parts, last = running.stream(max_tokens=40, stream_options={"include_usage": True})
    assert len(parts) > 3
    assert "".join(part["choices"][0]["text"] for part in parts) == choice["text"]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert last["usage"] == usage


def test_chats_are_completions_of_the_template(running, monkeypatch):
    (choice,) = choices(running.chat(CHAT, max_completion_tokens=10, max_tokens=None))
    assert choice["message"] == {"role": "assistant", "content": plain("# def read(path):\n# x\ndef", 10)}
    first, *parts, last = running.stream_chat(CHAT, max_tokens=10)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == choice["message"]["content"]
    assert last["choices"][0]["finish_reason"] == "length"
    # The template is told what the request says.
    assert running.chat_text(chat_template_kwargs={"enable_thinking": True}) == plain("# x\nthinkdef", 8)
    assert running.chat_text(add_generation_prompt=False) == plain("# x\n", 8)
    assert running.chat_text(chat_template_kwargs={"continue_final_message": True}) == plain("# x", 8)
    assert running.chat_text(reasoning_effort="low") == plain("# x\nlowdef", 8)
    # Answers are sent back as OpenAI's API gives them.
    nothing = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    said = {"role": "assistant", "content": "y", "reasoning_content": "z", **nothing}
    declined = {"role": "assistant", "content": None, "refusal": "no"}
    assert running.chat_text([said, declined]) == plain("# zy\n# no\ndef", 8)
    for template, message in (
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% for %}", "TemplateSyntaxError"),
    ):
        monkeypatch.setattr(running.service.manager.tokenizer, "chat_template", template)
        assert message in running.chat_error()


def test_stop_strings_end_the_answer_before_them(running):
    text = plain(PROMPT, 40)
    (stop,) = re.findall(r"^    def \w+", text, re.MULTILINE)[:1]
    (answer,) = choices(running.complete(max_tokens=40, stop=["nowhere", stop]))
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


def test_seeds_and_temperatures(running):
    def drawn(**fields):
        return running.text(temperature=1.0, top_k=50, max_tokens=30, **fields)

    assert drawn(seed=3) == drawn(seed=3)
    assert len({drawn(seed=3), drawn(seed=4), drawn(), drawn()}) == 4
    for fields in ({"temperature": 1e-300}, {"temperature": 1e-38}, {"temperature": 1.0, "top_p": 0}):
        assert running.text(**fields) == plain(PROMPT, 12)


def test_several_answers_are_the_rows_of_one_call(running):
    settings = {"n": 3, "temperature": 1.0, "max_tokens": 12, "seed": 5}
    answer = running.complete(**settings).json()
    drawn = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(drawn)) == 3
    assert (answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"]) == (36, 5)
    tokenizer = running.service.manager.tokenizer
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    torch.manual_seed(5)
    sampled = {"do_sample": True, "top_k": 50, "num_return_sequences": 3, "max_new_tokens": 12, "eos_token_id": None}
    rows = demo_target().generate(ids, **sampled, pad_token_id=0, spec_method="ngram", num_speculative_tokens=4)
    assert drawn == tokenizer.batch_decode(rows[:, ids.shape[1] :], skip_special_tokens=True)
    parts = [part["choices"][0] for part in running.stream(**settings)]
    assert ["".join(one["text"] for one in parts if one["index"] == index) for index in range(3)] == drawn
    assert sorted(one["index"] for one in parts if one["finish_reason"] == "length") == [0, 1, 2]
    wait_until(lambda: running.service.num_open == 0)


def test_answers_that_have_stopped_wait_for_no_others(running, monkeypatch):
    stop = running.text(max_tokens=40)[8:10]
    manager, num_open = running.service.manager, []

    def cancel(name, cancel=manager.cancel_request):
        num_open.append(running.service.num_open)
        cancel(name)

    monkeypatch.setattr(manager, "cancel_request", cancel)
    assert choices(running.complete(n=2, max_tokens=40, stop=stop))[1]["finish_reason"] == "stop"
    # While the reply was open.
    assert 2 in num_open


def test_several_prompts_and_echo(running):
    tokenizer, other = running.service.manager.tokenizer, "class Reader:\n"
    expected = [plain(PROMPT, 12), plain(other, 12)]
    ids = [tokenizer(prompt)["input_ids"] for prompt in (PROMPT, other)]
    for prompts in ([PROMPT, other], ids):
        answer = running.complete(prompts)
        assert texts(answer) == expected
        assert [choice["index"] for choice in choices(answer)] == [0, 1]
        assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert texts(running.complete([PROMPT, other], n=2)) == [expected[0]] * 2 + [expected[1]] * 2
    drawn = {"n": 2, "temperature": 1.0, "seed": 3}
    assert texts(running.complete([PROMPT, other], **drawn))[2:] == texts(running.complete(other, **drawn))
    for prompt in (PROMPT, ids[0]):
        assert running.text(prompt, echo=True, best_of=1) == PROMPT + expected[0]
    parts = [part["choices"][0]["text"] for part in running.stream(echo=True)]
    assert PROMPT in parts
    assert "".join(parts) == PROMPT + expected[0]


def test_log_probabilities_are_those_of_the_model(running):
    tokenizer = running.service.manager.tokenizer
    # Whatever is done to its scores.
    fields = {"max_tokens": 30, "logprobs": 2, "repetition_penalty": 1.3}
    (answer,) = choices(running.complete(**fields))
    found, text = answer["logprobs"], answer["text"]
    assert "".join(found["tokens"]) == text
    places = zip(found["text_offset"], found["tokens"])
    assert [text[offset:][: len(token)] for offset, token in places] == found["tokens"]
    ids = tokenizer(PROMPT)["input_ids"]
    tokens = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text))
    assert tokenizer.batch_decode([[token] for token in tokens]) == found["tokens"]
    with torch.no_grad():
        logs = demo_target()(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    own = logs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    assert found["token_logprobs"] == pytest.approx(own, abs=1e-4)
    best = logs.topk(2)
    for top, values, places in zip(found["top_logprobs"], best.values.tolist(), best.indices.tolist()):
        assert top == pytest.approx(dict(zip(tokenizer.batch_decode([[p] for p in places]), values)), abs=1e-4)
    parts = [part["choices"][0]["logprobs"] for part in running.stream(**fields)]
    for name, values in found.items():
        assert [value for part in parts if part is not None for value in part[name]] == values


def test_log_probabilities_of_chats_and_stop_strings(running):
    body = {"messages": CHAT, "max_tokens": 10, "logprobs": True}
    content = choices(running.chat(**body, top_logprobs=1))[0]["logprobs"]["content"]
    assert len(content) == 10
    for one in content:
        # Greedy.
        assert one["top_logprobs"] == [{name: one[name] for name in ("token", "logprob", "bytes")}]
        assert bytes(one["bytes"]).decode() == one["token"]
    stop = max((one["token"] for one in content[2:]), key=len)
    (stopped,) = choices(running.chat(**body, stop=stop))
    text, tokens = stopped["message"]["content"], [one["token"] for one in stopped["logprobs"]["content"]]
    assert "".join(tokens[:-1]) in text
    assert "".join(tokens).startswith(text)
    assert stopped["logprobs"]["content"][0]["top_logprobs"] == []


def test_biases_are_those_of_transformers_and_penalties_count_the_answer_alone(running):
    banned = running.service.manager.tokenizer(plain(PROMPT, 12), add_special_tokens=False)["input_ids"][:3]
    text = plain(PROMPT, 30, sequence_bias=[[[token], -100.0] for token in banned])
    assert text != plain(PROMPT, 30)
    assert running.text(max_tokens=30, logit_bias={str(token): -100 for token in banned}) == text
    length = len(running.service.manager.tokenizer(PROMPT)["input_ids"])
    for frequency, presence in ((2.0, 0.0), (0.0, 2.0), (-1.0, 0.5)):
        penalties = PenaltiesLogitsProcessor(frequency, presence, length)
        text = plain(PROMPT, 40, logits_processor=LogitsProcessorList([penalties]))
        assert text != plain(PROMPT, 40)
        answer = running.complete(max_tokens=40, frequency_penalty=frequency, presence_penalty=presence).json()
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        # By hand.
        scores = penalties(torch.tensor([[1] * length + [2, 2, 3]]), torch.zeros(1, 5))
        costs = [0.0, 0.0, 2 * frequency + presence, frequency + presence, 0.0]
        assert scores[0].tolist() == [-cost for cost in costs]


def test_ends_of_texts():
    tokenizer, whole = demo.load_tokenizer(), plain(PROMPT, 12)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    last = ids[5]
    with serving(arguments={"eos_token_id": last}) as running:
        answer = running.complete().json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == ids.index(last) + 1
        assert running.text(ignore_eos=True) == whole
        assert running.text(min_tokens=10) == plain(PROMPT, 12, eos_token_id=last, min_new_tokens=10)
        assert running.text(min_tokens=10, ignore_eos=True) == whole
        assert running.text(skip_special_tokens=False) == tokenizer.decode(ids[: ids.index(last)])


NOTHING = {"store": False, "metadata": {"a": "b"}, "response_format": {"type": "text"}, "service_tier": "auto"}
NOTHING |= {"logit_bias": {}, "prediction": None, "safety_identifier": "x", "prompt_cache_key": "x", "user": "x"}
NOTHING |= {"verbosity": "low", "stream": None, "stream_options": {"include_obfuscation": False}, "seed": -1}
NOTHING |= {"top_k": -1, "frequency_penalty": 0.0, "presence_penalty": None, "min_tokens": 0, "ignore_eos": False}
NOTHING |= {"skip_special_tokens": True, "priority": 0, "guided_json": None, "invented": [1]}
IN_CHATS = {"modalities": ["text"], "audio": None, "functions": None, "function_call": None, "logprobs": False}
IN_CHATS |= {"parallel_tool_calls": True, "tools": None, "tool_choice": "none", "top_logprobs": 0}
IN_CHATS |= {"add_generation_prompt": True, "chat_template_kwargs": {}, "reasoning_effort": None}
IN_COMPLETIONS = {"suffix": None, "best_of": 1, "echo": False, "logprobs": None}


def test_fields_that_ask_for_nothing(running):
    assert running.text(**NOTHING, **IN_COMPLETIONS) == plain(PROMPT, 12)
    assert running.chat_text(**NOTHING, **IN_CHATS) == plain("# x\ndef", 8)
