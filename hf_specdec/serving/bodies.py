"""Bodies of requests, in OpenAI's form, with vLLM's additions.

Fields without a meaning here are ignored, and the log says so once. Those of `refused` ask for what cannot be done.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

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
    """What a client sends.

    Attributes:
        refused (`dict`): Fields that ask for what cannot be done, unless they are empty, and what to do instead.
    """

    model_config = ConfigDict(extra="ignore", strict=True)
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
    if isinstance(value, str) or (isinstance(value, list) and all(type(one) is int for one in value)):
        value = [value]
    is_list = isinstance(value, list) and len(value) > 0
    if not is_list or not all(_is_prompt(one) for one in value):
        raise ValueError("it must be a text, a list of token ids, or a list of such prompts, none of them empty")
    return value


def _is_prompt(value: Any) -> bool:
    return bool(value) and (isinstance(value, str) or (type(value) is list and all(type(one) is int for one in value)))


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
    def grammar(self) -> dict[str, Any]:
        schemas = {"json_object": {"type": "object"}, "json_schema": self.json_schema and self.json_schema.content}
        return {"schema": schemas[self.type]} if self.type in schemas else {}


class StructuredOutputs(_Body):
    """The form of an answer, as vLLM writes it; a grammar is Lark's, from `start`."""

    refused: ClassVar[dict[str, str]] = {"structural_tag": "Take `json`, `regex`, `choice` or `grammar`."}

    content: Any = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @property
    def given(self) -> list[dict[str, Any]]:
        schema = {"type": "object"} if self.json_object else None
        grammars = (
            {"schema": self.content},
            {"regex": self.regex},
            {"choices": self.choice},
            {"lark": self.grammar},
            {"schema": schema},
        )
        return [one for one in grammars if None not in one.values()]


_THE_DRAFTER = 'The drafter is chosen when the server starts; a request may say `spec_method`: "off".'
_PLAINLY = "Leave it out."


class GenerationBody(_Body):
    """Fields of both kinds of requests.

    Sampling is the model's own unless `temperature`, `top_p`, `top_k` or `min_p` is given. `spec_method` can only
    switch drafts off, and `num_speculative_tokens` bound their length: the drafter is the server's.
    """

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
        if len(self._grammars) > 1:
            raise ValueError(
                "one form of the answer may be asked for, by `response_format`, `guided_*` or another field"
            )
        return self

    @property
    def prompts(self) -> list[Any]:
        """The prompts, in a form that the manager takes."""
        raise NotImplementedError

    @property
    def num_answers(self) -> int:
        """Answers to all prompts together."""
        return (self.n or 1) * len(self.prompts)

    @property
    def asked_length(self) -> int | None:
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Most probable tokens whose log-probabilities are wanted; `None` if none at all are."""
        raise NotImplementedError

    @property
    def told_tools(self) -> list[dict[str, Any]]:
        """Tools that the model may call."""
        return []

    @property
    def most_calls(self) -> int | None:
        """Calls of tools in an answer."""
        return None

    @property
    def echoes(self) -> bool:
        """Tells whether answers begin with their prompt."""
        return False

    @property
    def _grammars(self) -> list[dict[str, Any]]:
        guided = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        return [
            *filter(None, [self.response_format and self.response_format.grammar]),
            *(self.structured_outputs.given if self.structured_outputs else ()),
            *guided.given,
        ]

    @property
    def grammar(self) -> dict[str, Any] | None:
        """What the answer has to fit, as [`grammar`] takes it."""
        return next(iter(self._grammars), None)

    def settings(self) -> dict[str, Any]:
        """Settings of the request, as [`~many.generate.generate_many`] takes them; without its length."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "num_speculative_tokens")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        is_sampling = [name for name in names[:4] if name in given]
        if given.get("temperature", 1) < _LEAST_TEMPERATURE or self.top_p == 0:
            # Filters leave the most likely token.
            given = {name: given[name] for name in names[4:] if name in given} | {"do_sample": False}
        elif is_sampling:
            given["do_sample"] = True
        if self.top_k == -1 and "top_k" in given:
            given["top_k"] = 0
        if self.seed == -1:
            # vLLM's word for none.
            del given["seed"]
        if self.min_tokens:
            given["min_new_tokens"] = self.min_tokens
        if self.logit_bias:
            given["sequence_bias"] = [[[int(token)], float(bias)] for token, bias in self.logit_bias.items()]
        if self.spec_method is not None:
            given["spec_method"] = "off"
        if self.num_top_logprobs is not None:
            given["top_logprobs"] = self.num_top_logprobs
        return given


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

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class FunctionCall(_Body):
    """A call that an earlier answer has made; `arguments` is an object as JSON."""

    name: str
    arguments: str

    @model_validator(mode="after")
    def check(self) -> FunctionCall:
        if not isinstance(self.as_dict()["arguments"], dict):
            raise ValueError("`arguments` of a tool call must be an object as JSON")
        return self

    def as_dict(self) -> dict[str, Any]:
        # Templates write the arguments as JSON themselves.
        try:
            return {"name": self.name, "arguments": json.loads(self.arguments or "{}")}
        except RecursionError as error:
            raise ValueError("`arguments` of a tool call are nested too deep") from error


class EarlierCall(_Body):
    """The same with the name by which its result refers to it."""

    id: str
    type: Literal["function"]
    function: FunctionCall

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.as_dict()}


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
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.role == "tool" and self.name is not None:
            message["name"] = self.name
        return message


class NamedFunction(_Body):
    """A function by its name."""

    name: str


class ToolChoice(_Body):
    """Which tool is called: OpenAI's words, or a function by name."""

    type: Literal["auto", "none", "required", "function"]
    function: NamedFunction | None = None

    @model_validator(mode="after")
    def check(self) -> ToolChoice:
        if (self.type == "function") != (self.function is not None):
            raise ValueError('it is "auto", "none", "required" or {"type": "function", "function": {"name": ...}}')
        return self


def _as_choice(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


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
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_as_choice)] = None
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
            if self._grammars:
                raise ValueError("a form of the answer and a `tool_choice` that demands a call exclude each other")
            _ = self.grammar  # says what is wrong with the tools
        elif any(tool.function.strict for tool in self.tools or ()) and self._choice != "none":
            _tell_ignored("strict", 'without the `tool_choice` "required", or a function by name, ')
        return self

    @property
    def prompts(self) -> list[Any]:
        messages = [message.as_dict() for message in self.messages]
        return [{"messages": messages, "tools": self.told_tools, "chat_template_kwargs": self._template_arguments}]

    @property
    def asked_length(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def _choice(self) -> str:
        return "auto" if self.tool_choice is None else self.tool_choice.type

    @property
    def _must_call(self) -> bool:
        return self._choice in ("required", "function")

    @property
    def _template_arguments(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        prompt = {} if self.add_generation_prompt is None else {"add_generation_prompt": self.add_generation_prompt}
        return {**effort, **prompt, **(self.chat_template_kwargs or {})}

    @property
    def _callable(self) -> list[Function]:
        """Functions of which one is called."""
        functions = [tool.function for tool in self.tools or ()]
        named = self.tool_choice and self.tool_choice.function
        return [one for one in functions if named is None or one.name == named.name]

    @property
    def told_tools(self) -> list[dict[str, Any]]:
        return [] if self._choice == "none" else [tool.as_dict() for tool in self.tools or ()]

    @property
    def most_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else None

    @property
    def grammar(self) -> dict[str, Any] | None:
        if not self._must_call:
            return super().grammar
        calls, definitions = [], dict[str, Any]()
        for one in self._callable:
            # Arguments that no parameter has would be of no use.
            closed = {} if one.parameters and "properties" not in one.parameters else _CLOSED
            parameters = {"type": "object", **closed, **(one.parameters or {})}
            # References are to the root of a schema.
            for key in ("$defs", "definitions"):
                own, known = parameters.pop(key, {}), definitions.setdefault(key, {})
                if not isinstance(own, dict) or any(known.get(name, schema) != schema for name, schema in own.items()):
                    raise ValueError(
                        f"`{key}` of tools must be objects, of which no two mean different things by a name"
                    )
                known.update(own)
            properties = {"name": {"const": one.name}, "arguments": parameters}
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

    @property
    def prompts(self) -> list[Any]:
        return self.prompt

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)
