"""The encoder's part of requests: put off while each is prepared for itself, then done for several together.

transformers lets the encoder read a source in the middle of preparing a call. Requests that wait for a place would all
be encoded, one by one, long before they are decoded. So the call is prepared by a stand-in of the model, which takes
down what the encoder would have been given, and those that get a place are encoded then.

Shapes: B rows, N tokens or frames of the source, P prompt length of the decoder.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..target.parts.source import Source, side_by_side
from ..target.request import Request
from ..target_facts import CACHE_NAMES


# The method of transformers in which the encoder reads, by its names: since 5.20, and before.
_READING = ("_maybe_prepare_encoder_kwargs_for_generation", "_prepare_encoder_decoder_kwargs_for_generation")

# Arguments that are not the encoder's, by the beginnings of their names.
_NOT_FOR_ENCODERS = ("decoder_", *CACHE_NAMES)


@dataclass
class Encoding:
    """The encoder's part of one call, which has not run.

    Attributes:
        inputs (`torch.Tensor` of shape `(1, N, ...)`): Its main input.
        model_kwargs (`dict`): All other arguments of the call's forwards, from which it takes its own.
        name (`str`, *optional*): The name of the main input.
        generation_config (`GenerationConfig`): Of the call.
    """

    inputs: torch.Tensor
    model_kwargs: dict[str, Any]
    name: str | None
    generation_config: GenerationConfig

    @property
    def form(self) -> tuple[Any, ...]:
        """Equal for sources that need no padding beside each other, which encoders do not all leave out of account."""
        return _form(self.inputs), *((name, _form(value)) for name, value in sorted(self.model_kwargs.items()))

    def read_with(self, model: PreTrainedModel, others: Sequence[Encoding]) -> dict[str, Any]:
        """The arguments of all forwards, with the encoder's output, for this call and others of the same form."""
        every, kwargs = [self, *others], {}
        for name, value in self.model_kwargs.items():
            kwargs[name] = torch.cat([one.model_kwargs[name] for one in every]) if torch.is_tensor(value) else value
        read = getattr(model, _reading(type(model)))
        return read(torch.cat([one.inputs for one in every]), kwargs, self.name, self.generation_config)


def _form(value: Any) -> Any:
    if torch.is_tensor(value):
        return value.shape, value.dtype, value.device
    return value if value is None or isinstance(value, (bool, int, float, str)) else id(value)


def _reading(model_class: type) -> str:
    return next(name for name in _READING if hasattr(model_class, name))


def stand_in(model: PreTrainedModel) -> Any:
    """An object that is the model in all but one thing: a call of its `generate()` leaves out the encoder.

    Its attribute `encoding` is what the encoder would have been given in the last call, an [`Encoding`], or `None`
    where the call has come with the encoder's output.
    """
    other = object.__new__(_stand_in_class(type(model)))
    object.__setattr__(other, "__dict__", vars(model))
    other.encoding = None
    return other


@lru_cache(maxsize=64)
def _stand_in_class(model_class: type) -> type:
    def take_down(self, inputs_tensor, model_kwargs, model_input_name, generation_config):
        if model_kwargs.get("encoder_outputs") is None:
            own = {name: value for name, value in model_kwargs.items() if not name.startswith(_NOT_FOR_ENCODERS)}
            self.encoding = Encoding(inputs_tensor, own, model_input_name, generation_config)
            model_kwargs["encoder_outputs"] = BaseModelOutput(inputs_tensor.new_zeros((1, 1, 1)))
        return model_kwargs

    # With a slot, because it shares all other attributes with the model.
    own = {"__slots__": ("encoding",), "__module__": model_class.__module__, _reading(model_class): take_down}
    return type(model_class.__name__, (model_class,), own)


def encode_together(model: PreTrainedModel, requests: Sequence[Request]) -> Request:
    """Lets the encoder read the sources of requests, and puts these beside each other in one request.

    Sources of one form are read in one forward of the encoder; what it says to a source does not depend on others.

    Args:
        model (`PreTrainedModel`): With an encoder.
        requests (`list[Request]`): Each of one row, and all of the same length P.

    Returns:
        `Request`: One of `(B, P)`, with their sources; the rest is that of the first one.

    Raises:
        SpecConfigError: Sources of different lengths have no masks.
    """
    groups: dict[Any, list[int]] = {}
    for index, request in enumerate(requests):
        form = index if request.encoding is None else request.encoding.form
        groups.setdefault(form, []).append(index)
    parts = [_source_of(model, [requests[index] for index in group]) for group in groups.values()]
    order = [index for group in groups.values() for index in group]
    source = Source.joined(parts)
    if order != list(range(len(order))):
        source = source.of_rows(sorted(range(len(order)), key=order.__getitem__))
    first = requests[0]
    # What the encoder has read is its affair, and here that of the first row alone.
    read = {} if first.encoding is None else first.encoding.model_kwargs
    others = {name: value for name, value in first.model_kwargs.items() if not torch.is_tensor(read.get(name))}
    return replace(
        first,
        input_ids=torch.cat([request.input_ids for request in requests]),
        generation_config=copy.copy(first.generation_config),
        model_kwargs={**others, **source.inputs},
        source=source,
    )


def _source_of(model: PreTrainedModel, requests: list[Request]) -> Source:
    """The sources of requests whose encodings have one form, or of one that has come encoded."""
    first, *others = requests
    if first.encoding is None:
        kwargs = first.model_kwargs
    else:
        kwargs = first.encoding.read_with(model, [request.encoding for request in others])
    given = {
        name: side_by_side([request.source_inputs[name] for request in requests])
        for name, value in first.source_inputs.items()
        if torch.is_tensor(value) and all(name in request.source_inputs for request in others)
    }
    return Source.of_call(model, kwargs, given)
