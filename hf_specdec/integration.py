"""A speculative `generate()` call: its request is checked and prepared by transformers, then decoded by our loop.

transformers prepares everything (inputs, processors, criteria) and then calls what is given as `custom_generate`;
what that seam loses on the way (streamer, tokenizer, stop strings, synced_gpus) is kept here. Pipelines need nothing
of their own: they pass unknown arguments on to `generate()`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Real
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation import GenerationMixin
from transformers.generation.candidate_generator import CandidateGenerator as HfCandidateGenerator
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from .arguments import ARGUMENTS, SpeculativeArguments, configured_arguments
from .errors import SpecConfigError, shown
from .loader import load_speculator
from .loop.loop import DecodingLoop
from .method import NO_DRAFTS
from .patching import original_generate
from .speculator import GivenCandidateGenerator, Speculator
from .target.facts import REPEATED_INPUTS, is_text_only, model_profile
from .target.request import Request
from .target_facts import CACHE_NAMES, device_of, no_target


# Arguments of transformers' own assisted decoding that are settings of a drafter here.
SPELLINGS = ("assistant_early_exit", "assistant_tokenizer")


def generate(
    model: torch.nn.Module,
    *args: Any,
    spec_method: str | None = None,
    spec_model: Any = None,
    num_speculative_tokens: int | str | None = None,
    speculative: Any = None,
    assistant: Any = None,
    **kwargs: Any,
) -> Any:
    """`model.generate()` with speculative decoding, for those who do not want a patched method.

    Args:
        model (`PreTrainedModel`): The target.
        spec_method (`str`, *optional*): Name of the method; "auto" finds a drafter, "none" is the loop without
            drafts, "off" transformers' own generation.
        spec_model (`str`, `os.PathLike` or `PreTrainedModel`, *optional*):
            Draft checkpoint; without a `spec_method` the method is read from it.
        num_speculative_tokens (`int` or `str`, *optional*): Speculation length k in tokens, "fixed": the method's own,
            or "auto": each cycle the length that pays, down to plain decoding, which is the default.
        speculative (*optional*): All settings in one: what [`SpeculativeConfig.resolve`] takes.
        assistant ([`Speculator`], `PreTrainedModel` or `CandidateGenerator`, *optional*):
            A loaded speculator, draft model, or any candidate generator of transformers' own protocol.
        args, kwargs: Everything else that `model.generate()` takes.

    Returns:
        What `model.generate()` returns; with `return_dict_in_generate=True` its output has the statistics of the call
        as `output.speculative`.

    Raises:
        SpecConfigError: The request cannot be honoured: what was asked, what was found, what to do.
        UnsupportedModelError: The target's architecture cannot be driven by the loop.
    """
    if not isinstance(model, GenerationMixin):
        raise no_target(model)
    original = original_generate(type(model))
    asked = SpeculativeArguments(spec_method, spec_model, num_speculative_tokens, speculative, assistant)
    configured = None if asked.choose_drafter else configured_arguments(model, args, kwargs)
    if configured is None and not asked.given:
        return original(model, *args, **kwargs)
    return generate_speculatively(model, original, args, kwargs, asked, configured)


def generate_speculatively(
    model: PreTrainedModel,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    asked: SpeculativeArguments,
    configured: SpeculativeArguments | None,
) -> Any:
    """Runs [`generate`] where speculation is asked for.

    Args:
        model (`PreTrainedModel`): The target.
        original (`Callable`): transformers' own `generate` function.
        args, kwargs: transformers' arguments of the call.
        asked (`SpeculativeArguments`): What the call asks for.
        configured (`SpeculativeArguments`, *optional*): The objects on its generation config, where the call names no
            drafter.
    """
    arguments = _bind(original, model, args, kwargs)
    if isinstance(arguments.get("custom_generate"), str) and _repository_speculates(model, arguments):
        return original(model, **arguments, **asked.given)
    if configured is not None:
        asked = _with_objects(model, arguments, asked, configured)
    call = _Call(model, arguments, asked)
    if call.asked.is_off:
        return original(model, *args, **kwargs)
    call.prepare()
    model_profile(model)
    # Last, because it may load weights.
    call.speculator = _speculator(model, call.asked, call.tokenizers, call.early_exit)
    return call.run(original)


@dataclass
class _Call:
    """A call that asks for speculation.

    Attributes:
        model (`PreTrainedModel`): The target.
        arguments (`dict`): transformers' arguments by name, prepared for the loop as the call goes on.
        asked (`SpeculativeArguments`): What is asked for, by the call or by objects on its generation config.
        user_cache (`Cache`, *optional*): The one that the call continues.
        tokenizers (`tuple`, *optional*): Those of the target and the draft model, where the call brings both.
        early_exit (`int`, *optional*): `assistant_early_exit` of the call.
        speculator (`Speculator`, *optional*): The drafter, once it is loaded.
    """

    model: PreTrainedModel
    arguments: dict[str, Any]
    asked: SpeculativeArguments
    user_cache: Any = None
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None
    early_exit: int | None = None
    speculator: Speculator | GivenCandidateGenerator | None = None
    began: float = field(default_factory=perf_counter)

    def take_spellings(self, tokenizer: Any = None) -> None:
        """Takes the settings of drafters out of the arguments that transformers' own assisted decoding has, too.

        Args:
            tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's, where the arguments have none.

        Raises:
            SpecConfigError: Of two tokenizers one is missing.
        """
        self.early_exit = self.arguments.pop("assistant_early_exit", None)
        of_draft = self.arguments.pop("assistant_tokenizer", None)
        if of_draft is None:
            return
        tokenizer = self.arguments.get("tokenizer", tokenizer)
        if tokenizer is None:
            raise SpecConfigError(
                "`assistant_tokenizer` is given without `tokenizer`, that of the model. Pass both, or name the draft "
                "model's in speculative={'draft_tokenizer': ...}."
            )
        self.tokenizers = (tokenizer, of_draft)

    def prepare(self) -> None:
        """Prepares the arguments for the loop.

        Raises:
            SpecConfigError: They ask for what the loop cannot do.
        """
        given = self.arguments.get("use_cache", getattr(self.arguments.get("generation_config"), "use_cache", None))
        if given is None and self.model.generation_config.use_cache is False:
            # A checkpoint that was saved so is still decoded with a cache; the user's own word counts.
            self.arguments["use_cache"] = True
        self.take_spellings()
        problems = _problems(self.model, self.arguments)
        if problems:
            raise SpecConfigError(f"This request cannot be decoded speculatively. {problems}")
        for name in CACHE_NAMES:
            if (cache := self.arguments.pop(name, None)) is not None:
                self.user_cache = cache
        tokenizer = self.arguments.pop("tokenizer", None)
        if (strings := _effective(self.model, self.arguments, "stop_strings")) is not None:
            _prepare_stop_strings(self.model, self.arguments, strings, tokenizer)

    def run(self, original: Callable[..., Any], use: Callable[[Request], Any] | None = None):
        """The output of transformers' `generate()` with the loop of this package inside.

        Args:
            original (`Callable`): transformers' own `generate` function.
            use (`Callable`, *optional*): What is done with the prepared request in the place of the loop.
        """
        streamer, synced_gpus = self.arguments.pop("streamer", None), self.arguments.pop("synced_gpus", None)
        if synced_gpus is None and torch.distributed.is_available() and torch.distributed.is_initialized():
            is_sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(self.model)
            synced_gpus = is_sharded and torch.distributed.get_world_size() > 1
        source_inputs = _source_inputs(self.model, self.arguments) if self.model.config.is_encoder_decoder else {}

        # The signature matters: transformers hands over only what it names, and the rest as the model's arguments.
        def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
            _check_model_kwargs(self.model, model_kwargs)
            request = Request(
                model=self.model,
                input_ids=input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                model_kwargs=model_kwargs,
                streamer=streamer,
                synced_gpus=bool(synced_gpus),
                user_cache=self.user_cache,
                source_inputs=source_inputs,
                began=self.began,
            )
            if use is not None:
                return use(request)
            return DecodingLoop(request, self.speculator).run()

        original_device = _move_to_model(self.model, self.arguments)
        cache = {} if self.user_cache is None else {model_profile(self.model).cache_name: self.user_cache}
        output = original(self.model, **{**self.arguments, **cache, "custom_generate": decode})
        return output if original_device is None else _moved_output(output, original_device)


def prepare_request(model: PreTrainedModel, arguments: dict[str, Any]) -> Request:
    """A call as transformers prepares it, with nothing decoded.

    Args:
        model (`PreTrainedModel`): The target.
        arguments (`dict`): transformers' arguments by name.

    Raises:
        SpecConfigError: The loop cannot do what is asked for.
    """
    call, prepared = _Call(model, dict(arguments), SpeculativeArguments()), []
    call.prepare()
    original = original_generate(type(model))

    def keep(request: Request) -> None:
        prepared.append(request)
        # There is no text yet that a model's own generate() could go on with.
        raise _IsPreparedError

    with suppress(_IsPreparedError):
        call.run(original, keep)
    return prepared[0]


class _IsPreparedError(Exception):
    """Ends a call that is prepared."""


def speculator_of_many(
    model: PreTrainedModel, arguments: dict[str, Any], asked: SpeculativeArguments, tokenizer: Any = None
) -> Speculator:
    """The drafter of a run of many requests; without one, and where it is off, that which drafts nothing.

    Args:
        model (`PreTrainedModel`): The target.
        arguments (`dict`): transformers' arguments of all requests; settings of drafters are taken out of them.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's.
        asked (`SpeculativeArguments`): What the run asks for; without it objects on the generation config count.

    Raises:
        SpecConfigError: The drafter serves one call or one row only.
        UnsupportedModelError: The target's architecture cannot be driven by the loop.
    """
    configured = None if asked.choose_drafter else configured_arguments(model, (), arguments)
    if configured is not None:
        asked = _with_objects(model, arguments, asked, configured)
    call = _Call(model, arguments, asked)
    spelled = [name for name in SPELLINGS if arguments.get(name) is not None]
    call.take_spellings(tokenizer)
    model_profile(model)
    if call.asked.is_off:
        return load_speculator(model, NO_DRAFTS)
    if spelled and not call.asked.choose_drafter:
        raise SpecConfigError(
            f"`{spelled[0]}` is about a drafter that the run names, and it names none. Pass `spec_method` or "
            "`assistant` as well, or leave it out."
        )
    if not call.asked.given:
        return load_speculator(model, NO_DRAFTS)
    speculator = _speculator(model, call.asked, call.tokenizers, call.early_exit)
    if not isinstance(speculator, Speculator):
        raise SpecConfigError(
            f"A {type(call.asked.assistant).__name__} serves one call, and requests that join later need their own. "
            "Pass the speculator, or name a `spec_method`."
        )
    return speculator


def _with_objects(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    asked: SpeculativeArguments,
    configured: SpeculativeArguments,
) -> SpeculativeArguments:
    """What a call asks for, with the objects on its generation config in place of what it leaves open.

    They are taken from the config that transformers gets, which would copy what they hold.
    """
    config = copy.copy(arguments.get("generation_config") or model.generation_config)
    for name in ARGUMENTS:
        vars(config).pop(name, None)
    arguments["generation_config"] = config
    return SpeculativeArguments(**{**configured.given, **asked.given})


def _move_to_model(model: PreTrainedModel, arguments: dict[str, Any]) -> torch.device | None:
    """Puts the prompt's tensors on the model's device.

    Processors are made for the device of the prompt, and the loop judges drafts where the logits are.

    Returns:
        `torch.device` that they were on, or `None` where nothing had to move.
    """
    device = device_of(model, model.device)
    original_device = None
    of_decoder = ("decoder_input_ids", "decoder_attention_mask") if model.config.is_encoder_decoder else ()
    for name in ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", *of_decoder):
        tensor = arguments.get(name)
        if torch.is_tensor(tensor) and tensor.device != device:
            original_device = original_device or tensor.device
            arguments[name] = tensor.to(device)
    return original_device


def _source_inputs(model: PreTrainedModel, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a model's encoder, by name."""
    main = getattr(model.get_encoder(), "main_input_name", model.main_input_name)
    names = {main, model.main_input_name, "attention_mask"}
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    return {main: arguments["inputs"], **given} if arguments.get("inputs") is not None else given


def _moved_output(output, device: torch.device):
    """Token ids where the prompt came from, as plain generation returns them."""
    if torch.is_tensor(output):
        return output.to(device)
    output.sequences = output.sequences.to(device)
    return output


def _bind(
    original: Callable[..., Any], model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """All arguments of the call by name, also where another package's function passes them on as they come."""
    signature, model_name, rest_name = _signature(original)
    arguments = dict(signature.bind(model, *args, **kwargs).arguments)
    del arguments[model_name]
    return {**arguments.pop(rest_name, {}), **arguments}


@lru_cache(maxsize=8)
def _signature(original: Callable[..., Any]) -> tuple[inspect.Signature, str, str | None]:
    """The signature of `generate()`, the name of its first argument, and that of its `**kwargs`."""
    signature = inspect.signature(original)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        signature = inspect.signature(_first_arguments)
    names = {parameter.kind: name for name, parameter in signature.parameters.items()}
    return signature, next(iter(signature.parameters)), names.get(inspect.Parameter.VAR_KEYWORD)


def _first_arguments(self, inputs=None, generation_config=None, **kwargs):
    """The arguments of `generate()` that are ever given without their names."""


def _speculator(
    model: PreTrainedModel,
    asked: SpeculativeArguments,
    tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
    early_exit: int | None = None,
) -> Speculator | GivenCandidateGenerator:
    """The drafter that the arguments of a call name, loaded."""
    assistant, draft_model = asked.assistant, asked.spec_model
    if assistant is not None:
        is_loaded = isinstance(assistant, (Speculator, HfCandidateGenerator))
        if is_loaded and tokenizers is not None:
            raise SpecConfigError(
                "`assistant_tokenizer` belongs to a draft model, and `assistant` is a loaded "
                f"{type(assistant).__name__}. Pass the draft model, or load_speculator(..., tokenizers=...)."
            )
        if is_loaded and early_exit is not None:
            raise SpecConfigError(
                "`assistant_early_exit` belongs to spec_method='early_exit', and `assistant` is a loaded "
                f"{type(assistant).__name__}. Leave one of them out."
            )
        if is_loaded and asked.given.keys() == {"assistant"}:
            return assistant if isinstance(assistant, Speculator) else GivenCandidateGenerator(assistant)
        if not isinstance(assistant, torch.nn.Module):
            raise SpecConfigError(
                "`assistant` takes a loaded speculator, a draft model or a candidate generator, got "
                f"{_why_no_assistant(assistant, is_loaded)}"
            )
        if draft_model is not None:
            raise SpecConfigError("`assistant` and `spec_model` both name a draft model. Pass one of them.")
        draft_model = assistant
    name = "draft_model" if isinstance(draft_model, torch.nn.Module) else "model"
    settings = {name: draft_model, "method": asked.spec_method, "num_speculative_tokens": asked.num_speculative_tokens}
    if early_exit is not None:
        settings["assistant_early_exit"] = early_exit
    return load_speculator(model, asked.speculative, tokenizers=tokenizers, **settings)


def _why_no_assistant(assistant: Any, is_loaded: bool) -> str:
    """The kind of a wrong `assistant`, and what to do instead."""
    if isinstance(assistant, type):
        name = assistant.__name__
        return f"the class {name}. Pass an instance, such as {name}(), or register the class and name `spec_method`."
    kind = type(assistant).__name__
    if is_loaded:
        return f"{kind} together with other speculative arguments. Load the speculator with these settings."
    return f"{kind}. Use `spec_model` for a name."


# Features of plain generate() that a speculative call lacks: attribute of the generation config, the values that are
# harmless, and what to do instead.
_UNSUPPORTED = {
    "num_beams": ((None, 1), "Beam search does not verify drafts; use num_beams=1."),
    "use_cache": ((None, True), "Speculation keeps keys and values; leave `use_cache` out."),
    "output_attentions": ((None, False), "Attention weights of verified drafts are not kept; leave it out."),
    "penalty_alpha": ((None, 0, 0.0), "Contrastive search cannot be combined with speculation."),
    "dola_layers": ((None,), "DoLa decoding cannot be combined with speculation."),
    "constraints": ((None,), "Constrained beam search cannot be combined with speculation."),
    "force_words_ids": ((None,), "Constrained beam search cannot be combined with speculation."),
    "token_healing": ((None, False), "Heal the prompt beforehand, with `model.heal_tokens()`."),
    "prompt_lookup_num_tokens": ((None,), "Use spec_method='ngram' instead of it, not together with it."),
    "assistant_early_exit": ((None,), "Pass it to generate() itself, with spec_method='early_exit'."),
    "use_mtp": ((None, False), "Leave out transformers' own assisted generation."),
    "speculation_type": ((None,), "Leave out transformers' own assisted generation."),
    "cache_implementation": (
        (None, "dynamic", "dynamic_full", "static", "hybrid", "hybrid_chunked", "sliding_window"),
        "Keys and values are kept in slots of the model's dtype on its device.",
    ),
}

_UNSUPPORTED_ARGUMENTS = {
    "assistant_model": "Pass the draft model as `assistant` or `spec_model` instead.",
    "custom_generate": "It replaces the decoding loop, and so does speculation.",
}


def _problems(model: PreTrainedModel, arguments: dict[str, Any]) -> str:
    """The parts of a request that speculation excludes, each with its remedy; empty if there are none."""
    problems = []
    for name, remedy in _UNSUPPORTED_ARGUMENTS.items():
        if arguments.get(name) is not None:
            problems.append(f"`{name}`: {remedy}")
    for name, (harmless, remedy) in _UNSUPPORTED.items():
        value = _effective(model, arguments, name)
        if not any(value is item or (type(value) is type(item) and value == item) for item in harmless):
            problems.append(f"`{name}`={shown(value)}: {remedy}")
    seconds = _effective(model, arguments, "max_time")
    if not (seconds is None or isinstance(seconds, Real) or torch.is_tensor(seconds)):
        problems.append(f"`max_time`={shown(seconds)}: a number of seconds, got {type(seconds).__name__}.")
    caches = {name: arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None}
    if len(caches) > 1:
        problems.append(f"`{'` and `'.join(caches)}` are names for one cache to continue. Pass one of them.")
    for name, cache in caches.items():
        kind, is_offloaded = type(cache), getattr(cache, "offloading", False)
        if model.config.is_encoder_decoder:
            problems.append(f"`{name}`: no cache is continued beside an encoder. Pass `decoder_input_ids`.")
        elif kind not in (DynamicCache, StaticCache) or is_offloaded:
            found = "offloaded " * is_offloaded + kind.__name__
            problems.append(f"`{name}`: a DynamicCache or a StaticCache can be continued, got {found}.")
    mask = arguments.get("attention_mask")
    if torch.is_tensor(mask) and mask.dim() != 2:
        problems.append(f"`attention_mask`: one number for every token, got the shape {list(mask.shape)}.")
    return " ".join(problems)


def _repository_speculates(model: PreTrainedModel, arguments: dict[str, Any]) -> bool:
    """`True` where `custom_generate` names an exported repository, whose function takes the speculative arguments.

    It is loaded for that, which needs `trust_remote_code` as ever.
    """
    if not arguments.get("trust_remote_code"):
        return False
    others = {name: value for name, value in arguments.items() if name not in ("custom_generate", "model")}
    function = model.load_custom_generate(arguments["custom_generate"], **others)
    return getattr(function, "takes_speculative_arguments", False)


def _effective(model: PreTrainedModel, arguments: dict[str, Any], name: str):
    """A generation setting as `generate()` will see it: argument, then given config, then the model's own."""
    if name in arguments:
        return arguments[name]
    value = getattr(arguments.get("generation_config"), name, None)
    return getattr(model.generation_config, name, None) if value is None else value


def _prepare_stop_strings(model: PreTrainedModel, arguments: dict[str, Any], strings: Any, tokenizer: Any) -> None:
    """Makes the stopping criterion of stop strings here: the way through `custom_generate` loses the tokenizer."""
    if tokenizer is None:
        raise SpecConfigError(
            f"stop_strings={shown(strings)} needs the model's tokenizer. Pass `tokenizer=` to generate() as well."
        )
    criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
    # As in transformers, the user's own criterion of this kind takes the place of the argument.
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    arguments["stopping_criteria"] = criteria
    arguments.pop("stop_strings", None)
    config = arguments.get("generation_config")
    if getattr(config, "stop_strings", None) is not None:
        arguments["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    if getattr(model.generation_config, "stop_strings", None) is not None:
        # As an argument it overrides the model's own, which would otherwise be filled in.
        arguments["stop_strings"] = None


# Arguments of the target's forward that the loop sets itself, or that only concern its output.
_SET_BY_THE_LOOP = (
    *CACHE_NAMES,
    *("attention_mask", "cache_position", "inputs_embeds", "logits_to_keep", "position_ids"),
    *("output_attentions", "output_hidden_states", "use_cache"),
)


def _check_model_kwargs(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> None:
    """Refuses what the target would need for drafts too. What goes with the prompt alone (images) is no problem."""
    known = (*_SET_BY_THE_LOOP, *REPEATED_INPUTS)
    lost = [name for name, value in model_kwargs.items() if name not in known and value is not None]
    if model.config.is_encoder_decoder:
        # All else is the encoder's, which has read it.
        known = ("attention_mask", "position_ids")
        lost = [name for name in lost if name.startswith("decoder_") and name.removeprefix("decoder_") not in known]
    elif not is_text_only(model):
        lost = []
    if lost:
        names = ", ".join(f"`{name}`" for name in lost)
        raise SpecConfigError(
            f"{type(model).__name__} reads {names} for every token, and drafts have masks and positions only. Leave "
            "it out, or use plain generate()."
        )
