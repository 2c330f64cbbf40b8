"""Bodies of requests, in OpenAI's form, with vLLM's additions.

Fields of a model are accepted. Those of its table `refused` ask for what cannot be done, unless they are empty. All
others have no meaning here and are ignored; the log says so once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from transformers.utils import logging

from ..errors import shown


logger = logging.get_logger(__name__)

# Below it, scores divided by the temperature are infinite sooner or later; vLLM, too, takes the most likely token.
_LEAST_TEMPERATURE = 1e-5

# Names of ignored fields that the log has. Clients may invent any number of them.
_ignored: set[str] = set()
_MOST_IGNORED = 100


class _Body(BaseModel):
    """What a client sends; `refused` are names of fields that cannot be honoured, and what to do instead."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="ignore", strict=True)
    refused: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def look_at_names(cls, data: Any) -> Any:
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in data.items() if isinstance(data, dict) else ():
            if name in cls.refused and value not in (None, False, "", [], {}):
                raise ValueError(f"`{name}` cannot be honoured. {cls.refused[name]}")
            if name not in known:
                _tell_ignored(name)
        return data


def _tell_ignored(name: str, where: str = "") -> None:
    if len(_ignored) < _MOST_IGNORED and name not in _ignored:
        _ignored.add(name)
        logger.warning(f"The field {shown(name)} of a request has no meaning {where or 'here '}and is ignored.")


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> Any:
    """A prompt, or several, as a list of texts and lists of ids."""

    def is_prompt(one: Any) -> bool:
        is_list = type(one) is list and all(type(token) is int for token in one)
        return bool(one) and (isinstance(one, str) or is_list)

    prompts = [value] if is_prompt(value) else value
    if not isinstance(prompts, list) or not prompts or not all(map(is_prompt, prompts)):
        raise ValueError("it must be a text, a list of token ids, or a list of such prompts, none of them empty")
    return prompts


class StreamOptions(_Body):
    """Beside `stream`."""

    include_usage: bool | None = None


class JsonSchema(_Body):
    """A schema with a name. Texts fit it whether `strict` says so or not."""

    content: dict[str, Any] | None = Field(None, alias="schema")
    name: Any = None
    description: Any = None
    strict: Any = None


class ResponseFormat(_Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def check(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.content is None):
            raise ValueError("the type `json_schema` needs `json_schema`: {`schema`: ...}")
        return self

    @property
    def forms(self) -> list[dict[str, Any]]:
        if self.type == "text":
            return []
        return [{"schema": self.json_schema.content if self.type == "json_schema" else {"type": "object"}}]


class StructuredOutputs(_Body):
    """The form of an answer, as vLLM writes it; a grammar is Lark's, from `start`."""

    refused: ClassVar[dict[str, str]] = {"structural_tag": "Take `json`, `regex`, `choice` or `grammar`."}

    content: Any = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @property
    def forms(self) -> list[dict[str, Any]]:
        schemas = [self.content, {"type": "object"} if self.json_object else None]
        forms = [*({"schema": schema} for schema in schemas), {"regex": self.regex}, {"choices": self.choice}]
        return [form for form in (*forms, {"lark": self.grammar}) if None not in form.values()]


_THE_DRAFTER = 'The drafter is chosen when the server starts; a request may say `spec_method`: "off".'
_PLAINLY = "Leave it out."


class Wanted(NamedTuple):
    """What a request asks for, whichever its kind."""

    prompts: list[Any]  # in a form that the manager takes
    length: int | None  # most tokens of an answer
    num_top_logprobs: int | None  # most probable tokens with log-probabilities; `None` if none at all are wanted
    grammar: dict[str, Any] | None  # what an answer has to fit, as [`grammar`] takes it
    tools: Sequence[dict[str, Any]] = ()  # that the model may call
    most_calls: int | None = None  # of tools, in an answer
    echoes: bool = False  # answers begin with their prompt


class GenerationBody(_Body):
    """Fields of both kinds of requests; the drafter is the server's, and sampling the model's where none is asked."""

    refused: ClassVar[dict[str, str]] = {
        **dict.fromkeys(
            ("spec_model", "speculative", "speculative_config", "assistant", "assistant_model"), _THE_DRAFTER
        ),
        **dict.fromkeys(("generation_config", "logits_processors", "prompt_logprobs", "use_beam_search"), _PLAINLY),
        **dict.fromkeys(("stop_token_ids", "bad_words", "include_stop_str_in_output"), _PLAINLY),
        "guided_decoding": "Take `structured_outputs`.",
    }

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=200)]] | None, Field(max_length=4), BeforeValidator(_listed)
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    num_speculative_tokens: int | None = Field(None, ge=0, le=1024)
    spec_method: Literal["off", "none"] | None = None
    n: int | None = Field(None, ge=1, le=128)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def check_settings(self) -> GenerationBody:
        if not all(token.isascii() and token.isdigit() and len(token) < 10 for token in self.logit_bias or ()):
            raise ValueError("`logit_bias` needs token ids as keys")
        if len(self._forms) > 1:
            raise ValueError(
                "one form of the answer may be asked for, by `response_format`, `guided_*` or another field"
            )
        return self

    @cached_property
    def wanted(self) -> Wanted:
        raise NotImplementedError

    @property
    def num_answers(self) -> int:
        """Answers to all prompts together."""
        return (self.n or 1) * len(self.wanted.prompts)

    @property
    def _forms(self) -> list[dict[str, Any]]:
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        asked = (self.response_format, self.structured_outputs, guided)
        return [form for one in asked if one is not None for form in one.forms]

    def settings(self) -> dict[str, Any]:
        """Settings of the request, as [`~many.generate.generate_many`] takes them; without its length."""
        settings = self.model_dump(include={"temperature", "top_p", "top_k", "min_p"}, exclude_none=True)
        if settings.get("temperature", 1) < _LEAST_TEMPERATURE or self.top_p == 0:
            # Filters leave the most likely token.
            settings = {"do_sample": False}
        elif settings:
            settings["do_sample"] = True
        if settings.get("top_k") == -1:
            settings["top_k"] = 0
        biases = [[[int(token)], float(bias)] for token, bias in (self.logit_bias or {}).items()]
        others = {
            "repetition_penalty": self.repetition_penalty,
            "seed": None if self.seed == -1 else self.seed,  # as in vLLM
            "num_speculative_tokens": self.num_speculative_tokens,
            "min_new_tokens": self.min_tokens or None,
            "sequence_bias": biases or None,
            "spec_method": None if self.spec_method is None else "off",
            "top_logprobs": self.wanted.num_top_logprobs,
        }
        return settings | {name: value for name, value in others.items() if value is not None}


class TextPart(_Body):
    """A part of a message; there are only texts."""

    type: Literal["text"]
    text: str


class Function(_Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A tool; there are only functions."""

    type: Literal["function"]
    function: Function


def _arguments(value: Any) -> Any:
    """The arguments of a call as an object: templates write them as JSON themselves."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "{}")
        except RecursionError as error:
            raise ValueError("they are nested too deep") from error
        if isinstance(value, dict):
            return value
    raise ValueError("they must be an object as JSON, in a string")


class FunctionCall(_Body):
    """A call that an earlier answer has made."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)]


class EarlierCall(_Body):
    """The same with the name by which its result refers to it."""

    id: str
    type: Literal["function"]
    function: FunctionCall


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(_Body):
    """A message of a chat."""

    refused: ClassVar[dict[str, str]] = {
        "audio": "Messages are texts.",
        "function_call": "Write it as `tool_calls`.",
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[TextPart] | None, BeforeValidator(_parts)] = None
    refusal: str | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check(self) -> Message:
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise ValueError("a message needs `content`, or `tool_calls`")
        return self

    def as_dict(self) -> dict[str, Any]:
        text = "".join(part.text for part in self.content or ()) or self.refusal or ""
        further = self.model_dump(include={"reasoning_content", "tool_calls", "tool_call_id"}, exclude_none=True)
        if not self.tool_calls:
            further.pop("tool_calls", None)
        if self.role == "tool" and self.name is not None:
            further["name"] = self.name
        return {"role": self.role, "content": text, **further}


_CHOICES = ("auto", "none", "required")


def _choice(value: Any) -> Any:
    """Which tool is called: OpenAI's words, alone or as a `type`, or a function by name."""
    if isinstance(value, dict) and len(value) == 1:
        value = value.get("type", value)
    is_named = isinstance(value, dict) and value.get("type") == "function" and "function" in value
    if not (value is None or is_named or (isinstance(value, str) and value in _CHOICES)):
        raise ValueError('it is "auto", "none", "required" or {"type": "function", "function": {"name": ...}}')
    return value


_CLOSED = {"additionalProperties": False}


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    refused: ClassVar[dict[str, str]] = {
        **GenerationBody.refused,
        "audio": "Answers are texts.",
        "functions": "Take `tools`.",
        "web_search_options": "Take `tools`.",
        "chat_template": "The template is the tokenizer's.",
    }

    messages: list[Message] = Field(min_length=1)
    modalities: list[Literal["text"]] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Annotated[Tool | str | None, BeforeValidator(_choice)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def check(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` needs `logprobs`: true")
        if self._must_call:
            if not self._callable:
                raise ValueError("`tool_choice` needs `tools`, and a name that one of them has")
            if self._forms:
                raise ValueError("a form of the answer and a `tool_choice` that demands a call exclude each other")
            _form_of_calls(self._callable)  # says what is wrong with the tools
        elif self.tool_choice != "none" and any(tool.function.strict for tool in self.tools or ()):
            _tell_ignored("strict", 'without the `tool_choice` "required", or a function by name, ')
        return self

    @cached_property
    def wanted(self) -> Wanted:
        tools = () if self.tool_choice == "none" else self.tools or ()
        told = {"reasoning_effort": self.reasoning_effort, "add_generation_prompt": self.add_generation_prompt}
        told = {name: value for name, value in told.items() if value is not None}
        prompt = {
            "messages": [message.as_dict() for message in self.messages],
            "tools": [tool.model_dump(exclude_none=True) for tool in tools],
            "chat_template_kwargs": {**told, **(self.chat_template_kwargs or {})},
        }
        return Wanted(
            [prompt],
            self.max_completion_tokens or self.max_tokens,
            (self.top_logprobs or 0) if self.logprobs else None,
            _form_of_calls(self._callable) if self._must_call else next(iter(self._forms), None),
            prompt["tools"],
            1 if self.parallel_tool_calls is False else None,
        )

    @property
    def _must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, Tool)

    @property
    def _callable(self) -> list[Function]:
        """Functions of which one is called."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else None
        return [tool.function for tool in self.tools or () if named in (None, tool.function.name)]


def _form_of_calls(functions: list[Function]) -> dict[str, Any]:
    """The form of an answer that calls one of these functions."""
    calls, definitions = [], dict[str, Any]()
    for function in functions:
        # Arguments that no parameter has would be of no use.
        closed = {} if function.parameters and "properties" not in function.parameters else _CLOSED
        parameters = {"type": "object", **closed, **(function.parameters or {})}
        # References are to the root of a schema.
        for key in ("$defs", "definitions"):
            schemas, earlier = parameters.pop(key, {}), definitions.setdefault(key, {})
            is_object = isinstance(schemas, dict)
            if not is_object or any(earlier.get(name, schema) != schema for name, schema in schemas.items()):
                raise ValueError(f"`{key}` of tools must be objects, of which no two mean different things by a name")
            earlier.update(schemas)
        properties = {"name": {"const": function.name}, "arguments": parameters}
        calls.append({"type": "object", "properties": properties, "required": [*properties], **_CLOSED})
    return {"schema": {"anyOf": calls, **definitions}}


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`: a text, token ids, or several of them."""

    refused: ClassVar[dict[str, str]] = {
        **GenerationBody.refused,
        "suffix": "Texts are continued at their end.",
        "prompt_embeds": "Prompts are texts or token ids.",
    }

    prompt: Annotated[list[Any], Field(max_length=2048), BeforeValidator(_prompts)]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    best_of: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def check(self) -> CompletionBody:
        if self.best_of not in (None, self.n or 1):
            raise ValueError("`best_of` other than `n` cannot be honoured: all answers are returned")
        if self.echo and self.logprobs is not None:
            raise ValueError("`echo` with `logprobs` cannot be honoured: prompts have no log-probabilities")
        return self

    @cached_property
    def wanted(self) -> Wanted:
        form = next(iter(self._forms), None)
        return Wanted(self.prompt, self.max_tokens, self.logprobs, form, echoes=bool(self.echo))
