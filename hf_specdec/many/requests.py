"""Requests as users write them, and as rows that the loop decodes."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.stopping_criteria import StopStringCriteria

from ..arguments import ARGUMENTS, is_off, original_generate
from ..call.entry import SPELLINGS, prepare_request
from ..call.refusals import check_sharing, effective
from ..errors import SpecConfigError, SpecDecError, shown
from ..logits.grammar.masks import grammar_of
from ..logits.randomness import seed_from_torch
from ..method import NO_DRAFTS
from ..prompts import PROMPT_FIELDS, TOKENS_FIELD, WHOLE_FIELDS, is_chat, prompts_in
from ..settings.checks import MOST_INTEGER, Bounds, checked
from ..target.parts.adapters import AdapterChoice
from ..target.parts.rotary import check_constant_rotary
from ..target.prompts import Request
from ..target_facts import forward_arguments, num_embeddings, vocabulary_size
from ..threads import Recent, cached_property
from .row import Row


# How a dict names its prompt.
_PROMPTS = (TOKENS_FIELD, *PROMPT_FIELDS, *WHOLE_FIELDS)

# Settings of all requests; of the speculative ones a request may switch its drafts off, or bound their length.
_FOR_ALL = ({*ARGUMENTS} - {"spec_method", "num_speculative_tokens"}) | {*SPELLINGS, "generation_config"}

# Numbers that requests may have, their types and their bounds. Seeds are those that torch takes.
_NUMBERS = {
    "max_new_tokens": (int, Bounds(least=1)),
    "max_length": (int, Bounds(least=1)),
    "max_time": (float, Bounds()),
    "guidance_scale": (float, Bounds()),
    "prefill_chunk_size": (int, Bounds(least=1)),
    "forced_bos_token_id": (int, Bounds(least=0)),
    "num_speculative_tokens": (int, Bounds(least=0)),
    "seed": (int, Bounds(-(2**63), 2**64 - 1)),
    "seed_row": (int, Bounds(least=0)),
    "top_logprobs": (int, Bounds(least=0)),
}

# Of other settings: what fits, and what an error calls it.
_FORMS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "logits_processor": (lambda value: _is_list(value, callable), "a list of functions"),
    "stopping_criteria": (lambda value: _is_list(value, callable), "a list of functions"),
    "prefix_allowed_tokens_fn": (callable, "a function"),
    "stop_strings": (lambda value: _is_text(value) or (value and _is_list(value, _is_text)), "a text or texts"),
}

# Of what tokenizers apply templates with, what `chat_template_kwargs` may say beside names of the template.
_FOR_TEMPLATES = {"add_generation_prompt", "continue_final_message", "kwargs"}

# Of the forward's arguments, those that the loop sets itself.
_SET_BY_THE_LOOP = ("input_ids", "attention_mask", "use_cache")

# Arguments between transformers' generate() and the loop.
_INTERNAL = ("self", "model", "inputs", "custom_generate", "use_model_defaults")

# Of transformers' generation config, those that all rows share because they are about the forward.
_OF_FORWARDS = ("use_cache", "cache_implementation", "prefill_chunk_size", "generation_config")


class RequestReader:
    """Makes rows of requests, whose settings take precedence over those of all requests, `arguments`."""

    def __init__(
        self,
        model: PreTrainedModel,
        arguments: dict[str, Any],
        tokenizer: Any = None,
        seed: int | None = None,
        num_places: int = 1,
    ):
        if tokenizer is not None and not (callable(tokenizer) and hasattr(tokenizer, "decode")):
            raise SpecConfigError(f"`tokenizer` takes the model's tokenizer, got {shown(tokenizer)}.")
        self.model = model
        self.tokenizer = tokenizer
        self._given_seed = seed
        self._seed = None if seed is None else seed_of(seed)
        self.num_places: int = num_places
        numbers = _check({**arguments, "seed": seed})
        self.arguments: dict[str, Any] = {name: numbers.get(name, value) for name, value in arguments.items()}
        self.arguments["return_dict_in_generate"] = False
        has_adapters = self.arguments.get("adapter_names") is not None
        # Requests may each name an adapter of their own.
        self.adapters: AdapterChoice | None = AdapterChoice(model) if has_adapters else None
        self._stop_criteria: Recent[StopStringCriteria] = Recent(64)

    @cached_property
    def written_settings(self) -> dict[str, Any]:
        """The settings of all requests, as far as they decide what is said."""
        config = self.arguments.get("generation_config")
        written = {name: value for name, value in self.arguments.items() if name != "generation_config"}
        if config is not None:
            written["generation_config"] = config.to_diff_dict()
        return {**written, "seed": self._given_seed}

    def check(self) -> None:
        """Lets transformers prepare a prompt, so that what is wrong for all requests is said at once."""
        # Requests may all have lengths of their own, of which transformers then knows none.
        lengths = [effective(self.model, self.arguments, name) for name in ("max_new_tokens", "max_length")]
        self.row(0, [0], {"seed": 0, "max_new_tokens": 1} if lengths == [None, None] else {"seed": 0})

    def read(self, request: Any) -> tuple[list[int], dict[str, Any]]:
        """Tokens of a request, and its own settings."""
        if not isinstance(request, Mapping):
            return self._tokens(request), {}
        prompts = [*prompts_in(request, _PROMPTS).values()]
        if len(prompts) != 1:
            names = ", ".join(f"`{name}`" for name in _PROMPTS)
            raise SpecConfigError(f"A request needs one of {names}, got {shown(list(request))}.")
        settings = {name: value for name, value in request.items() if name not in _PROMPTS}
        tools = settings.pop("tools", None)
        template = settings.pop("chat_template_kwargs", None)
        self.check_settings(settings)
        if (tools or template) and not (is_chat(prompts[0]) and self.tokenizer is not None):
            raise SpecConfigError(
                "`tools` and `chat_template_kwargs` belong to a chat. Pass `messages`, and `tokenizer=` of the model."
            )
        return self._tokens(prompts[0], tools, template or {}), settings

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuses settings of a request that are for all of them, or not for requests of one loop."""
        method = settings.get("spec_method")
        if method is not None and method != NO_DRAFTS and not is_off(method):
            raise SpecConfigError(
                f"`spec_method`={shown(method)} is for all requests. Pass it to the run; a request may say 'off'."
            )
        if for_all := [name for name in settings if name in _FOR_ALL]:
            raise SpecConfigError(
                f"`{for_all[0]}` is for all requests. Pass it to the run; a request has single settings."
            )
        _check(settings)

    def _tokens(self, prompt: Any, tools: Any = None, template: Any = None) -> list[int]:
        if isinstance(prompt, str):
            return self._encode(prompt, special=True)
        if is_chat(prompt):
            return self._encode(self._chat(prompt, tools, template or {}), special=False)
        if not isinstance(prompt, Sequence) and hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
            if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
                prompt = prompt[0]
        is_list = isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray, memoryview))
        try:
            # Sets and dicts are no prompts, and floats no tokens.
            tokens = [operator.index(token) for token in (prompt if is_list else ())]
        except TypeError:
            tokens = []
        if not tokens:
            raise SpecConfigError(
                f"A request is a text, a list of token ids, a chat or a dict with one of them, got {shown(prompt)}."
            )
        size = num_embeddings(self.model.get_input_embeddings())
        if not 0 <= min(tokens) <= max(tokens) < size:
            raise SpecConfigError(f"A prompt needs at least one token, all from 0 to {size - 1}, got {shown(tokens)}.")
        return tokens

    def _chat(self, messages: Sequence[Any], tools: Any, template: Any) -> str:
        if self.tokenizer is None:
            raise SpecConfigError("A chat needs the model's tokenizer. Pass `tokenizer=`.")
        if not isinstance(template, Mapping):
            raise SpecConfigError(f"`chat_template_kwargs` takes a dict, got {shown(template)}.")
        taken = {*signature(self.tokenizer.apply_chat_template).parameters} - _FOR_TEMPLATES
        if wrong := [name for name in template if not isinstance(name, str) or name in taken]:
            raise SpecConfigError(f"`chat_template_kwargs` cannot have {shown(wrong[0])}. Leave it out.")
        if tools and "tools" not in self.tokenizer.get_chat_template(tools=tools):
            raise SpecConfigError(
                "The chat template of this model has no place for `tools`. Leave them out, or describe them in a "
                "message."
            )
        contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
        parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
        if other := [part for part in parts if isinstance(part, Mapping) and part.get("type", "text") != "text"]:
            raise SpecConfigError(
                f"A request is a text, and the chat has a part that is none: {shown(other[0])}. Call generate() with "
                "what the model's processor makes of it."
            )
        prompt = {"add_generation_prompt": not template.get("continue_final_message")}
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, **{**prompt, **template}
            )
        except Exception as error:
            # Templates are programs.
            raise SpecConfigError(
                f"The model's chat template cannot write this chat ({type(error).__name__}: {error}). Change the "
                "messages, or the template."
            ) from error

    def _encode(self, text: str, special: bool) -> list[int]:
        if self.tokenizer is None:
            raise SpecConfigError(f"The text {shown(text)} needs the model's tokenizer. Pass `tokenizer=`.")
        try:
            tokens = list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        except Exception as error:
            # Half a character, say.
            raise SpecConfigError(
                f"The tokenizer cannot read the text {shown(text)} ({type(error).__name__}: {error})."
            ) from error
        return self._tokens(tokens)

    def row(self, index: int, tokens: list[int], settings: dict[str, Any]) -> Row:
        """The row of a request of this number, of what `read` returned."""
        settings = dict(settings)
        request_seed = settings.pop("seed", None)
        seed_row = settings.pop("seed_row", None) or 0
        most_draft_tokens = settings.pop("num_speculative_tokens", None)
        most_draft_tokens = MOST_INTEGER if most_draft_tokens is None else most_draft_tokens
        if settings.pop("spec_method", None) is not None:
            most_draft_tokens = 0  # nothing else may be asked
        arguments = {**self.arguments, **settings, **self._copied_functions(settings)}
        top_logprobs = arguments.pop("top_logprobs", None)
        adapters = arguments.pop("adapter_names", None)
        if self.adapters is None and adapters is not None:
            raise SpecConfigError(
                f"`adapter_names`={shown(adapters)} of a request needs one of the run, for requests that name none. "
                "Pass adapter_names=['__base__'] to the run as well, for no adapter."
            )
        input_ids = torch.tensor([tokens], device=self.model.device)
        arguments |= {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        # Before transformers encodes images.
        _check_inputs(arguments, forward_arguments(type(self.model)))
        arguments = self._in_one_config({**arguments, "tokenizer": self.tokenizer})
        try:
            request = prepare_request(self.model, arguments, self._stop_criterion)
        except (SpecDecError, ValueError):
            raise
        except Exception as error:
            # transformers finds some wrong types where it uses them.
            raise SpecConfigError(
                f"transformers cannot prepare a request with the settings {shown(settings)} "
                f"({type(error).__name__}: {error}). Change them."
            ) from error
        _check_inputs(arguments, request.model_kwargs)
        if request.batch_size != 1:
            raise SpecConfigError(f"A request is one row, and this one begins {request.batch_size}. Pass each alone.")
        first, size = request.generation_config.forced_bos_token_id, vocabulary_size(self.model)
        if first is not None and first >= size:
            raise SpecConfigError(f"`forced_bos_token_id`={shown(first)} is no token: those are from 0 to {size - 1}.")
        if self.adapters is not None:
            adapters = self.arguments["adapter_names"] if adapters is None else adapters
            request.adapters = [self.adapters.place(adapters)]
        if "pad_token_id" not in self.arguments and request.generation_config._pad_token_tensor is not None:
            # Otherwise transformers says for each request that it takes another token for it.
            self.arguments["pad_token_id"] = request.pad_token
        seed, number = 0, index
        if request_seed is not None:
            seed, number = seed_of(request_seed), seed_row
        elif request.generation_config.do_sample:
            # As a call does, and the same in all processes that hold parts of the target.
            seed = self._seed = request.draw_seed() if self._seed is None else self._seed
        row = Row(request, seed, number, most_draft_tokens, top_logprobs)
        row.index = index
        # A loop of several rows may read any of them beside the others.
        reach = ([1], row.most_tokens - 1) if self.num_places > 1 else ([row.length], row.most_tokens - row.length)
        check_constant_rotary(self.model, *reach)
        return row

    def _copied_functions(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Copies of the processors and criteria of all requests, which may remember what they have seen."""
        copies = {}
        processors: Any = self.arguments.get("logits_processor") or []
        # Grammars that are known are read, and not used.
        shared = {id(one): one for one in processors if grammar_of(one) is not None}
        for name in ("logits_processor", "stopping_criteria"):
            if name in settings or self.arguments.get(name) is None:
                continue
            try:
                copies[name] = copy.deepcopy(self.arguments[name], dict(shared))
            except Exception as error:
                raise SpecConfigError(
                    f"`{name}` cannot be copied for each request ({type(error).__name__}: {error}). Pass it in the "
                    "requests, each with its own."
                ) from error
        return copies

    def _stop_criterion(self, tokenizer: Any, strings: Any) -> StopStringCriteria:
        """The criterion of stop strings, which is made once for equal ones: it reads the whole vocabulary."""
        if (criterion := self._stop_criteria.get(repr(strings))) is None:
            criterion = StopStringCriteria(stop_strings=strings, tokenizer=tokenizer)
            self._stop_criteria.put(repr(strings), criterion)
        return criterion

    def together(self, rows: list[Row]) -> Request:
        """The prompts of some rows as one batch, padded on the left, for the forward that reads them."""
        length = max(row.length for row in rows)
        input_ids = torch.zeros((len(rows), length), dtype=torch.long, device="cpu")
        mask = torch.zeros_like(input_ids)
        for index, row in enumerate(rows):
            input_ids[index, length - row.length :] = row.texts.row(0).cpu()
            mask[index, length - row.length :] = 1
        arguments = {name: self.arguments[name] for name in _OF_FORWARDS if name in self.arguments}
        arguments |= {
            "input_ids": input_ids.to(self.model.device),
            "attention_mask": mask.to(self.model.device),
            "do_sample": bool(effective(self.model, self.arguments, "do_sample")),
            "max_new_tokens": max(row.most_tokens - row.length for row in rows),
            "pad_token_id": rows[0].request.pad_token,
            "return_dict_in_generate": False,
            "stop_strings": None,
        }
        request = prepare_request(self.model, self._in_one_config(arguments))
        if self.adapters is not None:
            request.adapters = [name for row in rows for name in row.request.adapters or ()]
        return request

    def _in_one_config(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the settings in a copy of the generation config, if there is one."""
        # transformers takes the one or the other.
        config = arguments.get("generation_config")
        if config is None:
            return arguments
        config = copy.copy(config)
        # Some models have a generate() of their own, which reads its arguments and not the config.
        named = signature(original_generate(type(self.model))).parameters
        settings = {name: value for name, value in arguments.items() if name in vars(config) and name not in named}
        if "max_new_tokens" in settings:
            config.max_length = None
        if getattr(self.model.generation_config, "stop_strings", None) is not None:
            # Only as an argument it overrides the model's own.
            settings.pop("stop_strings", None)
        vars(config).update(settings)
        others = {name: value for name, value in arguments.items() if name not in settings}
        return {**others, "generation_config": config}


def several(requests: Any) -> Iterator[Any]:
    """The requests one after the other; refuses what is none or a single one."""
    with suppress(TypeError):
        if not isinstance(requests, (str, bytes, dict)):
            return iter(requests)
    raise SpecConfigError(f"`requests` takes several requests, such as a list, got {shown(requests)}.")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, (list, tuple)) and all(map(fits, value))


def seed_of(seed: int) -> int:
    """The seed that a call draws after `torch.manual_seed(seed)`."""
    return seed_from_torch(torch.Generator().manual_seed(int(seed)))


def _check_inputs(arguments: Mapping[str, Any], of_forwards: Container[str]) -> None:
    """Refuses arguments that the forward would read, of whose names `of_forwards` has some."""
    read = [name for name, value in arguments.items() if name in of_forwards and value is not None]
    if lost := [name for name in read if name not in _SET_BY_THE_LOOP]:
        raise SpecConfigError(
            f"`{lost[0]}` would not be read: requests that share a loop are tokens alone. Leave it out, or call "
            "generate()."
        )


def _check(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Refuses arguments that rows of one loop cannot have; returns the numbers among them as Python's own."""
    config = arguments.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise SpecConfigError(f"`generation_config` takes a GenerationConfig, got a {type(config).__name__}.")
    for name in arguments:
        if not isinstance(name, str) or not name or name in _INTERNAL:
            raise SpecConfigError(f"A request has no setting {name!r}. Leave it out.")
    numbers = {
        name: checked(name, arguments.get(name, getattr(config, name, None)), kind | None, bounds)
        for name, (kind, bounds) in _NUMBERS.items()
    }
    for name, (fits, form) in _FORMS.items():
        value = arguments.get(name, getattr(config, name, None))
        if value is not None and not fits(value):
            raise SpecConfigError(f"`{name}` takes {form}, got {shown(value)}.")
    check_sharing(arguments)
    return numbers
