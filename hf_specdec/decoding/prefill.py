"""The target's reading of the prompts, from which the slots of the call begin.

Shapes: B rows, P prompt length, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .cache import check_room
from .continuation import Continuation, next_inputs, watched_prefill
from .profile import check_reach
from .request import Request
from .target import SlotModel


@dataclass
class Prefill:
    """Result of the target's forward over the prompts.

    Attributes:
        output (`ModelOutput`): What the forward has returned.
        hidden_states (`dict`): The states that the drafter asked for, each `(B, P, H)`.
        continuation (`Continuation`): Where the rows go on.
    """

    output: Any
    hidden_states: dict
    continuation: Continuation


def read_prompts(request: Request, target: SlotModel, max_length: int) -> Prefill:
    """Lets the target read the prompts into its slots, by transformers' own prefill, and starts the slots.

    Args:
        request (`Request`): The call.
        target (`SlotModel`): Its target, with an empty cache.
        max_length (`int`): Tokens that a row may hold, the prompt included.

    Raises:
        SpecConfigError: A static cache has no room for the call.
        UnsupportedModelError: The model goes on after its prompts in a way that cannot be followed.
    """
    model, input_ids, kwargs = request.model, request.input_ids, dict(request.model_kwargs)
    if request.past_key_values is not None:
        target.cache.load(request.past_key_values)
    room = max_length - input_ids.shape[1]
    given, mask = request.prompt_slots(target.cache.get_seq_length()), kwargs.get("attention_mask")
    check_reach(model, [given] if mask is None else mask.ne(0).sum(1).tolist(), room)
    check_room(kwargs.get("past_key_values"), request.batch_size, given + room)
    kwargs["past_key_values"] = target.cache
    # The prompts may be read in chunks.
    with target.captured(joined=True) as states, watched_prefill(model) as received:
        output = model._prefill(input_ids, request.generation_config, kwargs)
    if received.cache not in (None, target.cache):
        # The model has put a beginning of its own in front of the prompts.
        target.cache.load(received.cache)
        output.past_key_values = target.cache
    target.check_prefilled()
    inputs = next_inputs(model, output, input_ids, kwargs)
    num_slots = target.cache.get_seq_length()
    continuation = Continuation.read(model, inputs, received, num_slots, given, request.batch_size)
    check_reach(model, continuation.next_positions, room)
    continuation.start_slots(target, range(request.batch_size))
    # The last token is never read.
    target.max_position = max(continuation.next_positions) + room - 2
    return Prefill(output, states, continuation)
