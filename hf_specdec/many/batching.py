"""`generate_batch` of transformers with speculation: its arguments and its outputs, over the loop of many requests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..call.refusals import effective
from ..errors import SpecConfigError, shown
from ..metrics import SpecDecodingStats
from ..settings.checks import Bounds, checked
from ..target_facts import no_target
from .generate import generate_many
from .requests import check_config
from .row import RequestResult, error_text


# Arguments of generate_many() that are set here.
_OF_MANY = ("in_order", "progress", "requests", "shard")


@dataclass
class SpeculativeGenerationOutput(GenerationOutput):
    """`GenerationOutput` with more fields.

    Args:
        speculative (`SpecDecodingStats`): What was drafted and accepted for the request.
        finish_reason (`str`, *optional*): "stop", "length" or "error", once it has ended.
        top_logprobs (`list[list[tuple[int, float]]]`): For each generated token the most probable ones and their
            log-probabilities, and in `logprobs` its own, where a setting `top_logprobs` asks for them: those of the
            model, before temperature, filters and penalties.
        is_refused (`bool`): The error is that of the request: it was wrong as it came.
    """

    speculative: SpecDecodingStats | None = None
    finish_reason: str | None = None
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    is_refused: bool = False


def generate_batch(
    model: PreTrainedModel,
    inputs: Sequence[Sequence[int]],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    batch_size: int | None = None,
    **kwargs: Any,
) -> dict[str, SpeculativeGenerationOutput]:
    """`model.generate_batch()` with speculative decoding: transformers' signature over this package's loop.

    Args:
        model (`PreTrainedModel`): The target.
        inputs (`Sequence[Sequence[int]]`): Prompts, without padding.
        generation_config (`GenerationConfig`, *optional*): Of all requests.
        continuous_batching_config (`ContinuousBatchingConfig`, *optional*): Of it `max_requests_per_batch` and `seed`
            are read; the rest is about transformers' paged cache.
        progress_bar (`bool`): Show a bar.
        persistent_manager, warmup (`bool`): About transformers' own manager; nothing here.
        batch_size (`int`, *optional*): Requests that are decoded at a time, if the config does not say it; 8.
        kwargs: The speculative arguments, and everything else that `generate()` takes, which is honoured.

    Returns:
        `dict[str, SpeculativeGenerationOutput]`: By request id, "req_0", "req_1", ..., in the order of the inputs.
        With `num_return_sequences` the further ones are "req_0__child#0" and so on, in front of "req_0".

    Raises:
        SpecConfigError: The arguments cannot be honoured.
        UnsupportedModelError: The target's architecture cannot be driven by the loop.
    """
    if record_timestamps:
        raise SpecConfigError("`record_timestamps`: tokens come several at a time and are not timed. Leave it out.")
    if getattr(continuous_batching_config, "return_logprobs", None):
        raise SpecConfigError(
            "`return_logprobs` of the continuous batching config: Pass `top_logprobs=0`: log-probabilities here are "
            "those of the model itself."
        )
    if not isinstance(model, GenerationMixin):
        raise no_target(model)
    if foreign := [name for name in _OF_MANY if name in kwargs]:
        raise SpecConfigError(f"generate_batch() has no argument `{foreign[0]}`. See generate_many().")
    prompts: list[list[Any]] | None = None
    with suppress(TypeError):
        if isinstance(inputs, Sequence) and not any(isinstance(one, (str, bytes, dict)) for one in (inputs, *inputs)):
            prompts = [list(one) for one in inputs]
    if prompts is None:
        raise SpecConfigError(f"generate_batch() takes lists of token ids, got {shown(inputs)}. See generate_many().")
    if not prompts:
        return {}
    check_config(generation_config)
    if generation_config is not None:
        kwargs["generation_config"] = generation_config
    copies = effective(model, kwargs, "num_return_sequences")
    copies = checked("num_return_sequences", copies, int | None, Bounds(least=1)) or 1
    # A request has one text.
    kwargs["num_return_sequences"] = 1
    if batch_size is None:
        batch_size = getattr(continuous_batching_config, "max_requests_per_batch", None) or 8
    checked("batch_size", batch_size, int, Bounds(least=1))
    of_copies = [*(f"__child#{place}" for place in range(copies - 1)), ""]
    names = [f"req_{number}{of_copy}" for number in range(len(prompts)) for of_copy in of_copies]
    requests: list[Any] = [prompt for prompt in prompts for _ in range(copies)]
    adapters = kwargs.pop("adapter_names", None)
    if adapters is not None:
        # As in generate(), one for each prompt.
        if not isinstance(adapters, (list, tuple)) or len(adapters) != len(prompts):
            raise SpecConfigError(
                f"`adapter_names` takes a name for each of the {len(prompts)} prompts, got {shown(adapters)}."
            )
        named = [[name] for name in adapters for _ in range(copies)]
        requests = [{"input_ids": ids, "adapter_names": name} for ids, name in zip(requests, named)]
        kwargs["adapter_names"] = named[0]
    # More rows than requests would only cost memory.
    places = min(batch_size, len(requests))
    kwargs = {"seed": getattr(continuous_batching_config, "seed", None), **kwargs}
    began = perf_counter()
    results = generate_many(model, requests, places, progress=progress_bar, in_order=True, **kwargs)
    outputs = {}
    for number, (name, result) in enumerate(zip(names, results)):
        outputs[name] = output_of(name, prompts[number // copies], result)
        outputs[name].created_time = began
        outputs[name].lifespan = (began, perf_counter())
    return outputs


def output_of(name: str, prompt: list[int], result: RequestResult) -> SpeculativeGenerationOutput:
    """A request's output, at its end or, without a `finish_reason`, on the way."""
    status = RequestStatus.FINISHED if result.finish_reason else RequestStatus.DECODING
    logprobs = result.logprobs or []
    return SpeculativeGenerationOutput(
        request_id=name,
        prompt_ids=prompt,
        generated_tokens=result.tokens,
        logprobs=[one.own for one in logprobs],
        top_logprobs=[one.top for one in logprobs],
        error=error_text(result.error),
        status=status if result.error is None else RequestStatus.FAILED,
        speculative=result.stats,
        finish_reason=result.finish_reason,
    )
