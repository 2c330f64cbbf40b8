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
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.generation.candidate_generator import CandidateGenerator as HfCandidateGenerator
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from ..arguments import ARGUMENTS, asks_for_off, names_drafter, objects_on, original_generate, take_asked, with_objects
from ..errors import SpecConfigError, shown
from ..loader import load_speculator
from ..method import NO_DRAFTS
from ..speculator import GivenCandidateGenerator, Speculator
from ..target.facts import model_profile
from ..target.prompts import Request
from ..target_facts import CACHE_NAMES, device_of, no_target
from .build import decode
from .refusals import check_call, check_forward_inputs, effective


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
    """`model.generate()` with speculative decoding, without a patched method.

    Args:
        model (`PreTrainedModel`): The target.
        spec_method (`str`, *optional*): Name of the method; "auto" finds a drafter, "none" is the loop without
            drafts, "off" transformers' own generation.
        spec_model (`str`, `os.PathLike` or `PreTrainedModel`, *optional*):
            Draft checkpoint; without a `spec_method` the method is read from it.
        num_speculative_tokens (`int` or `str`, *optional*): Speculation length k in tokens, "fixed": the method's own,
            or "auto": each cycle the fastest length, down to plain decoding, which is the default.
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
    values = spec_method, spec_model, num_speculative_tokens, speculative, assistant
    asked = with_objects(take_asked(dict(zip(ARGUMENTS, values))), model, args, kwargs)
    if not asked or asks_for_off(asked):
        return original(model, *args, **kwargs)
    return generate_speculatively(model, original, args, kwargs, asked)


def generate_speculatively(
    model: PreTrainedModel,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    asked: dict[str, Any],
) -> Any:
    """Runs [`generate`] where speculation is asked for; `original` is transformers' own function."""
    # By name also where another package's function passes them on as they come.
    signature = inspect.signature(original)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        signature = inspect.signature(original_generate(GenerationMixin))
    arguments = dict(signature.bind(model, *args, **kwargs).arguments)
    del arguments[next(iter(signature.parameters))]
    rest = next((name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD), None)
    arguments = {**arguments.pop(rest, {}), **arguments}
    settings = _settings_of_drafters(model, arguments)
    return _run(model, original, arguments, lambda: partial(decode, speculator=_load(model, asked, settings)))


def prepare_request(
    model: PreTrainedModel,
    arguments: dict[str, Any],
    make_criterion: Callable[[Any, Any], StoppingCriteria] = StopStringCriteria,
) -> Request:
    """A call as transformers prepares it, with nothing decoded; `make_criterion` makes that of stop strings."""
    prepared = []

    def keep(request: Request) -> None:
        prepared.append(request)
        # There is no text yet that a model's own generate() could go on with.
        raise _IsPreparedError

    with suppress(_IsPreparedError):
        _run(model, original_generate(type(model)), dict(arguments), lambda: keep, make_criterion)
    return prepared[0]


class _IsPreparedError(Exception):
    """Ends a call that is prepared."""


def speculator_of_many(
    model: PreTrainedModel, arguments: dict[str, Any], asked: dict[str, Any], tokenizer: Any = None
) -> Speculator:
    """The drafter of a run of many requests; without one, and where it is off, that which drafts nothing.

    Settings of drafters are taken out of the run's `arguments`.
    """
    asked = with_objects(asked, model, (), arguments)
    name = next((name for name in SPELLINGS if arguments.get(name) is not None), None)
    settings = _settings_of_drafters(model, arguments, tokenizer)
    if name is not None and not names_drafter(asked):
        raise SpecConfigError(
            f"`{name}` is about a drafter that the run names, and it names none. Pass `spec_method` or `assistant` as "
            "well, or leave it out."
        )
    if asks_for_off(asked) or not asked:
        return load_speculator(model, NO_DRAFTS)
    speculator = _load(model, asked, settings)
    if not isinstance(speculator, Speculator):
        raise SpecConfigError(
            f"A {type(asked['assistant']).__name__} serves one call, and requests that join later need their own. "
            "Pass the speculator, or name a `spec_method`."
        )
    return speculator


def _run(
    model: PreTrainedModel,
    original: Callable[..., Any],
    arguments: dict[str, Any],
    make_loop: Callable[[], Callable[[Request], Any]],
    make_criterion: Callable[[Any, Any], StoppingCriteria] = StopStringCriteria,
) -> Any:
    """The output of transformers' `generate()` with another loop in the place of its own.

    `make_loop` is called last, because it may load weights; `arguments` are changed for the call.
    """
    began = perf_counter()
    use_cache = arguments.get("use_cache", getattr(arguments.get("generation_config"), "use_cache", None))
    if use_cache is None and model.generation_config.use_cache is False:
        # A checkpoint that was saved so is still decoded with a cache; the user's own word counts.
        arguments["use_cache"] = True
    profile = model_profile(model)
    check_call(model, arguments)
    caches = [arguments.pop(name, None) for name in CACHE_NAMES]
    user_cache = next((cache for cache in caches if cache is not None), None)
    tokenizer = arguments.pop("tokenizer", None)
    if (strings := effective(model, arguments, "stop_strings")) is not None:
        # Their criterion is made here: the way through `custom_generate` loses the tokenizer. As in transformers, the
        # user's own criterion of this kind takes the place of the argument.
        if tokenizer is None:
            raise SpecConfigError(
                f"stop_strings={shown(strings)} needs the model's tokenizer. Pass `tokenizer=` as well."
            )
        criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
        if not any(type(criterion) is StopStringCriteria for criterion in criteria):
            criteria.append(make_criterion(tokenizer, strings))
        arguments["stopping_criteria"] = criteria
        arguments.pop("stop_strings", None)
        if getattr(model.generation_config, "stop_strings", None) is not None:
            # As an argument it overrides the model's own, which would otherwise be filled in.
            arguments["stop_strings"] = None
        if getattr(arguments.get("generation_config"), "stop_strings", None) is not None:
            arguments["generation_config"] = copy.copy(arguments["generation_config"])
            arguments["generation_config"].stop_strings = None
    streamer = arguments.pop("streamer", None)
    synced_gpus = arguments.pop("synced_gpus", None)
    if synced_gpus is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        is_sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
        synced_gpus = is_sharded and torch.distributed.get_world_size() > 1
    source_inputs = _source_inputs(model, arguments) if model.config.is_encoder_decoder else {}
    loop = make_loop()

    # The signature matters: transformers hands over only what it names, and the rest as the model's arguments.
    def custom_generate(
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        check_forward_inputs(model, model_kwargs)
        request = Request(
            model=model,
            input_ids=input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            streamer=streamer,
            synced_gpus=bool(synced_gpus),
            user_cache=user_cache,
            source_inputs=source_inputs,
            began=began,
        )
        return loop(request)

    original_device = _move_to_model(model, arguments)
    if user_cache is not None:
        arguments[profile.cache_name] = user_cache
    output = original(model, **{**arguments, "custom_generate": custom_generate})
    if original_device is None:
        return output
    # Token ids go where the prompt came from, as in plain generation.
    if torch.is_tensor(output):
        return output.to(original_device)
    output.sequences = output.sequences.to(original_device)
    return output


def _settings_of_drafters(model: PreTrainedModel, arguments: dict[str, Any], tokenizer: Any = None) -> dict[str, Any]:
    """Takes what is about drafters out of a call's arguments: settings spelled as transformers' own are returned.

    Objects on its generation config go, in a copy, because transformers would copy what they hold. `tokenizer` is the
    target's, where the arguments have none.
    """
    config = arguments.get("generation_config") or model.generation_config
    if objects_on(config) or objects_on(model.generation_config):
        arguments["generation_config"] = config = copy.copy(config)
        for name in ARGUMENTS:
            vars(config).pop(name, None)
    early_exit, draft_tokenizer = (arguments.pop(name, None) for name in SPELLINGS)
    settings = {} if early_exit is None else {"assistant_early_exit": early_exit}
    if draft_tokenizer is not None:
        tokenizer = arguments.get("tokenizer", tokenizer)
        if tokenizer is None:
            raise SpecConfigError(
                "`assistant_tokenizer` is given without `tokenizer`, that of the model. Pass both, or name the draft "
                "model's in speculative={'draft_tokenizer': ...}."
            )
        settings["tokenizers"] = (tokenizer, draft_tokenizer)
    return settings


def _load(
    model: PreTrainedModel, asked: dict[str, Any], spelled: dict[str, Any]
) -> Speculator | GivenCandidateGenerator:
    """The drafter that a call asks for, with the settings that are spelled as transformers' own."""
    assistant, draft_model = asked.get("assistant"), asked.get("spec_model")
    if assistant is not None:
        kind = type(assistant).__name__
        is_loaded = isinstance(assistant, (Speculator, HfCandidateGenerator))
        if is_loaded and "tokenizers" in spelled:
            raise SpecConfigError(
                f"`assistant_tokenizer` belongs to a draft model, and `assistant` is a loaded {kind}. Pass the draft "
                "model, or load_speculator(..., tokenizers=...)."
            )
        if is_loaded and "assistant_early_exit" in spelled:
            raise SpecConfigError(
                f"`assistant_early_exit` belongs to spec_method='early_exit', and `assistant` is a loaded {kind}. "
                "Leave one of them out."
            )
        if is_loaded and asked.keys() == {"assistant"}:
            return assistant if isinstance(assistant, Speculator) else GivenCandidateGenerator(assistant)
        if not isinstance(assistant, torch.nn.Module):
            got = f"{kind}. Use `spec_model` for a name."
            if isinstance(assistant, type):
                name = assistant.__name__
                got = f"the class {name}. Pass an instance, such as {name}(), or register it and name `spec_method`."
            elif is_loaded:
                got = f"{kind} together with other speculative arguments. Load the speculator with these settings."
            raise SpecConfigError(
                f"`assistant` takes a loaded speculator, a draft model or a candidate generator, got {got}"
            )
        if draft_model is not None:
            raise SpecConfigError("`assistant` and `spec_model` both name a draft model. Pass one of them.")
        draft_model = assistant
    length = asked.get("num_speculative_tokens")
    settings = {"method": asked.get("spec_method"), "num_speculative_tokens": length, **spelled}
    settings["draft_model" if isinstance(draft_model, torch.nn.Module) else "model"] = draft_model
    return load_speculator(model, asked.get("speculative"), **settings)


def _move_to_model(model: PreTrainedModel, arguments: dict[str, Any]) -> torch.device | None:
    """Puts the prompt's tensors on the model's device; returns the one that they were on, if any has moved.

    Processors are made for the device of the prompt, and the loop judges drafts where the logits are.
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
    inputs = {name: arguments.get(name) for name in {main, model.main_input_name, "attention_mask"}}
    if inputs[main] is None:
        inputs[main] = arguments.get("inputs")
    return {name: value for name, value in inputs.items() if value is not None}
