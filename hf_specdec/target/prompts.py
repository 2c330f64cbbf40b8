"""The target's reading of the prompts, and the continuation of plain generation after them.

Models may prepare their inputs themselves: they shift positions, count them in a way of their own, or put tokens in
front of the prompt. So masks and positions are not computed here but asked for, with transformers' own functions, and
the slots are described by the answer.

Shapes: B rows of the call, P tokens of the given prompts, S slots that the prompts fill, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
import torch.nn.functional as F
from transformers.generation import GenerationMixin

from ..errors import UnsupportedModelError
from ..protocol import Prompt
from ..target_facts import cache_name_among, decoder_layers, forward_arguments, layers_owner
from .cache import check_room
from .facts import ModelProfile, model_profile
from .forward import Part, SlotNodes
from .model import SlotModel
from .parts.positions import PositionCounter
from .parts.rotary import ChangingRotary, rotary_changes
from .parts.source import Source
from .request import Request


# Most tokens after the prompts for which a model's own preparation of inputs is asked beforehand.
_MOST_ASKED = 4096


def read_prompts(request: Request, target: SlotModel, max_length: int) -> tuple[Any, Prompt, Continuation]:
    """Lets the target read the prompts into its slots, by transformers' own prefill, and starts the slots.

    A row may hold `max_length` tokens, the prompt included. Returns what the forward has returned, the prompts for a
    drafter, and where the rows go on.
    """
    model, input_ids, profile = request.model, request.input_ids, target.profile
    kwargs, length = dict(request.model_kwargs), input_ids.shape[1]
    mask = kwargs.get(profile.of_decoder("attention_mask"))
    if request.user_cache is not None:
        target.cache.load(request.user_cache)
    room = max_length - length
    num_given = request.prompt_slots(target.cache.get_seq_length())
    rotary_changes(model, [num_given] if mask is None else mask.ne(0).sum(1).tolist(), room)
    check_room(kwargs.get(profile.cache_name), request.batch_size, num_given + room)
    if profile.has_encoder:
        Source.of_call(model, kwargs, request.source_inputs).attach(target)
    kwargs[profile.cache_name] = target.forward_cache
    ends = [length]
    if request.between_chunks is not None:
        ends = [*range(request.chunk_size, length, request.chunk_size), length]
        if kwargs.get("attention_mask") is None:
            # How much of the prompt is in the cache is told from it.
            kwargs["attention_mask"] = torch.ones_like(input_ids)
    columns = [name for name, value in kwargs.items() if torch.is_tensor(value) and value.shape[-1:] == (length,)]
    chunks: dict[Any, list[torch.Tensor]] = {key: [] for key in target.states}
    for end in ends:
        is_last = end == length
        part = kwargs if is_last else {**kwargs, **{name: kwargs[name][..., :end] for name in columns}}
        # The generation config may cut the prompts into chunks, too.
        with (
            target.taps.captured(joined=True) as states,
            _watched_prefill(model) as received,
            target.reading_prompts(SlotNodes(input_ids)),
        ):
            output = model._prefill(input_ids if is_last else input_ids[:, :end], request.generation_config, part)
        for key, parts in chunks.items():
            parts.append(states[key])
        if not is_last and request.between_chunks is not None:
            request.between_chunks()
    if received.cache not in (None, target.forward_cache):
        # The model has put a beginning of its own in front of the prompts.
        target.cache.load(received.cache)
        output[cache_name_among(output.keys())] = target.cache
    target.check_prefilled()
    next_kwargs = model._update_model_kwargs_for_generation(output, dict(kwargs), profile.has_encoder)
    # The tokens that follow are not known yet.
    inputs = _next_inputs(model, F.pad(input_ids, (0, 1)), next_kwargs)
    continuation = Continuation.read(request, target, inputs, received, num_given)
    # With the code of transformers and PEFT whole texts are compared in the tests.
    if model.prepare_inputs_for_generation.__module__.partition(".")[0] not in ("transformers", "peft"):
        _ask_for_following(request, target, output, kwargs, inputs, room)
    parts: list[Part] = [] if continuation.counter is None else [continuation.counter]
    if changes := rotary_changes(model, continuation.next_positions, room):
        rotary = ChangingRotary(target, max(continuation.next_positions), changes)
        is_left_padded = continuation.hidden is None and not any(continuation.offsets)
        rotary.read_again(is_known=continuation.num_slots == length and is_left_padded)
        parts.append(rotary)
    target.start_slots(continuation.starts, continuation.offsets, continuation.hidden, parts)
    # The last token is never read.
    target.max_position = max(continuation.next_positions) + room - 2
    states = {key: torch.cat(parts, dim=1) if parts[1:] else parts[0] for key, parts in chunks.items()}
    source = target.find(Source)
    return output, continuation.prompt(input_ids, states, source and source.without_keys()), continuation


class _Received:
    """Arguments that the last forward of the prefill received, of models that prepare their inputs themselves."""

    def __init__(self, cache_name: str):
        self.cache_name = cache_name
        self.cache: Any = None
        self.last_positions: torch.Tensor | None = None  # of the last column, (..., 1), where the decoder reads them
        self.thread = get_ident()

    # Torch calls hooks without keyword arguments in another thread, while this one takes them back.

    def on_model(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        if get_ident() == self.thread:
            self.cache = kwargs.get(self.cache_name)

    def on_reader(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        if get_ident() == self.thread and kwargs is not None:
            positions = {**dict(zip(forward_arguments(type(module)), args)), **kwargs}.get("position_ids")
            if torch.is_tensor(positions):
                self.last_positions = positions[..., -1:]


@contextmanager
def _watched_prefill(model: torch.nn.Module) -> Iterator[_Received]:
    """Watches, inside of the block, a model that prepares its inputs itself while it reads the prompts."""
    received = _Received(model_profile(model).cache_name)
    name = "prepare_inputs_for_generation"
    with ExitStack() as hooks:
        if name in vars(model) or getattr(type(model), name) is not getattr(GenerationMixin, name):
            taps = [(model, received.on_model), *((reader, received.on_reader) for reader in _position_readers(model))]
            for module, tap in taps:
                hooks.callback(module.register_forward_pre_hook(tap, with_kwargs=True).remove)
        yield received


def _position_readers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules where the decoder reads positions: its embeddings, or its first layer."""
    try:
        layers = decoder_layers(model)
    except UnsupportedModelError:
        return []
    modules = [*layers_owner(model, layers).children(), layers[0]]
    return [module for module in modules if "position_ids" in forward_arguments(type(module))]


def _next_inputs(model: torch.nn.Module, tokens: torch.LongTensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the forward that reads the last of some tokens `(B, L)` in plain generation."""
    inputs = model.prepare_inputs_for_generation(tokens, next_sequence_length=1, **model_kwargs)
    if inputs.get("inputs_embeds") is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} prepares embeddings for the tokens after its prompts, where drafts have tokens "
            f"(`prepare_inputs_for_generation` of {model.prepare_inputs_for_generation.__module__}). PEFT 0.21 does "
            "so with virtual tokens under transformers 5.24, whose cache it does not know. Leave the speculative "
            "arguments out to use plain generate()."
        )
    name = model_profile(model).of_decoder("attention_mask")
    mask = inputs.get(name)
    if mask is not None and not (torch.is_tensor(mask) and mask.dim() == 2):
        inputs[name] = model_kwargs.get(name)
    return inputs


def following_inputs(
    first: dict[str, Any], profile: ModelProfile, tokens: torch.LongTensor, count: int
) -> dict[str, Any]:
    """Inputs of the forward that reads tokens `(B, 1)` in plain generation, `count` tokens after the `first` ones."""
    inputs = {**first, profile.of_decoder("input_ids"): tokens}
    mask_name, position_name = profile.of_decoder("attention_mask"), profile.of_decoder("position_ids")
    if first.get(position_name) is not None:
        inputs[position_name] = first[position_name] + count
    if first.get(mask_name) is not None:
        inputs[mask_name] = F.pad(first[mask_name], (0, count), value=1)
    return inputs


def _ask_for_following(
    request: Request, target: SlotModel, output: Any, kwargs: dict[str, Any], first: dict[str, Any], room: int
) -> None:
    """Asks a model that prepares inputs with code of its own for those of all tokens that may follow the prefill.

    They must be those that are derived from the `first` ones after it.
    """
    model, profile = request.model, target.profile
    attributes, tokens, past = dict(vars(model)), request.input_ids, target.cache.get_seq_length()
    # Tokens that stand for those that are not known yet, and differ from each other.
    following = torch.arange(room, device=tokens.device).remainder(2).expand(len(tokens), -1)
    with target.cache.kept():
        for count in range(1, min(room, _MOST_ASKED)):
            kwargs = model._update_model_kwargs_for_generation(output, dict(kwargs), profile.has_encoder)
            target.cache.pretend(past + count - 1)
            text = torch.cat([tokens, following[:, :count]], dim=1)
            inputs = _next_inputs(model, text, kwargs)
            expected = following_inputs(first, profile, text[:, -1:], count - 1)
            changed = [key for key in {**inputs, **expected} if not _same(inputs.get(key), expected.get(key))]
            if changed or any(vars(model).get(key) is not value for key, value in attributes.items()):
                what = ", ".join(f"`{key}`" for key in changed) or "attributes of the model"
                raise UnsupportedModelError(
                    f"{type(model).__name__}.prepare_inputs_for_generation is not transformers' own, and its inputs "
                    f"for the forward {count} tokens after the prompts cannot be derived from the first ones: it "
                    f"changes {what}. Leave the speculative arguments out to use plain generate()."
                )


def _same(one: Any, other: Any) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one, other)
    return one is other or (type(one) is type(other) and bool(one == other))


@dataclass
class Continuation:
    """Places where the rows of a call go on."""

    inputs: dict[str, Any]  # of plain generation's next forward
    num_slots: int  # S
    starts: list[int]  # each row's first slot that it sees, S if it sees none
    # How many slots are none of its text: hidden ones, and what the model has put in front. One less where that is
    # all: a drafter must have a token.
    num_others: list[int]
    offsets: list[int]  # what is added to the distance from the start, for position ids
    hidden: torch.BoolTensor | None = None  # (B, S), slots that a row does not see, if not only those before its start
    counter: PositionCounter | None = None  # says the positions, in the place of starts and offsets

    @classmethod
    def read(
        cls, request: Request, target: SlotModel, inputs: dict[str, Any], received: _Received, num_given: int
    ) -> Continuation:
        """Derives it from the next forward's inputs and what the prefill's forward received.

        Of the slots `generate()` knows `num_given`.
        """
        model, profile, batch_size = request.model, target.profile, request.batch_size
        num_slots = target.cache.get_seq_length()
        mask = inputs.get(profile.of_decoder("attention_mask"))
        if mask is None and not profile.attends and (mask := request.model_kwargs.get("attention_mask")) is not None:
            # Padding is kept out of a recurrent state while the prompt is read, and no mask is needed after it.
            mask = F.pad(mask, (0, 1), value=1)
        starts, num_hidden, hidden = [0] * batch_size, [0] * batch_size, None
        if mask is not None:
            if mask.shape[1] != num_slots + 1:
                raise UnsupportedModelError(
                    f"The prompts have left {num_slots} tokens in the cache of {type(model).__name__}, and the mask "
                    f"of the next forward covers {mask.shape[1] - 1}, so it cannot be told which of them a row sees. "
                    "Leave the speculative arguments out to use plain generate()."
                )
            hidden = mask[:, :-1].eq(0)
            count = hidden.sum(1)
            first = (~hidden).int().argmax(1).where(count < num_slots, num_slots)
            starts, num_hidden = torch.stack([first, count]).tolist()
            hidden = None if starts == num_hidden else hidden
        positions, counter = inputs.get(profile.of_decoder("position_ids")), None
        if positions is None and received.last_positions is not None:
            positions = received.last_positions + 1
        elif positions is None and profile.counted is None:
            counter = PositionCounter.of(model)
        # A model that is given no positions, and shows none, counts slots.
        offsets = starts if positions is None else position_offsets(positions, num_slots, starts)
        num_others = [min(number + num_slots - num_given, num_slots - 1) for number in num_hidden]
        return cls(inputs, num_slots, starts, num_others, offsets, hidden, counter)

    @property
    def next_positions(self) -> list[int]:
        """Position of the first token of each row."""
        return [self.num_slots - start + offset for start, offset in zip(self.starts, self.offsets)]

    def prompt(
        self, input_ids: torch.LongTensor, states: dict[Any, torch.Tensor], source: Source | None = None
    ) -> Prompt:
        """The prompts for a drafter: each row's tokens that it sees, one at least, at the end of the row.

        The slots may begin before the given tokens `(B, P)`; states `(B, S' <= S, H)` are those of the last slots.
        """
        length = input_ids.shape[1]
        num_unknown = self.num_slots - length
        if self.hidden is None:
            starts = [min(max(start - num_unknown, 0), max(length - 1, 0)) for start in self.starts]
            return Prompt(input_ids, starts, states, source)
        visible = ~self.hidden
        visible[:, -1] |= ~visible[:, num_unknown:].any(1)
        shown = visible[:, num_unknown:]
        starts = (length - shown.sum(1)).tolist()
        input_ids = input_ids.gather(1, _visible_last(shown))
        return Prompt(input_ids, starts, {key: _squeezed(state, visible) for key, state in states.items()}, source)


def _visible_last(visible: torch.BoolTensor) -> torch.LongTensor:
    """Columns `(B, N)` with those that are visible at the end, in their order."""
    return visible.int().argsort(dim=1, stable=True)


def _squeezed(states: torch.Tensor, visible: torch.BoolTensor) -> torch.Tensor:
    """The states `(B, N, H)` of the last slots with the visible ones at the end, as far back as all rows have."""
    with_states = visible[:, -states.shape[1] :].to(states.device)
    counts = zip(with_states.sum(1).tolist(), visible.sum(1).tolist())
    size = min((count for count, count_of_row in counts if count < count_of_row), default=states.shape[1])
    rows = torch.arange(len(states), device=states.device)[:, None]
    return states[rows, _visible_last(with_states)[:, -max(size, 1) :]]


def position_offsets(position_ids: torch.Tensor, num_slots: int, starts: list[int]) -> list[int]:
    """Differences of the positions `(..., 1)` of the next tokens from the distance to each row's start.

    Multimodal rotary embeddings take them as `(3, B, 1)`, temporal, height and width, or as `(4, B, 1)` with a count
    of tokens in front. Text has the same in all three, so that plain ids of shape `(B, T)` do for what follows.
    """
    last = position_ids[..., -1]
    if last.dim() == 2:
        axes, last = last[-3:], last[-1]
        if not axes.eq(last).all() or not last.eq(last.round()).all():
            raise UnsupportedModelError(
                "Generation continues at a position that has to be one whole number, and is (temporal, height, width) "
                f"{axes.T.tolist()} in the rows of this call: the prompts end inside an image or a video, or the "
                "model counts fractions of a second. End the prompts with text, or leave the speculative arguments "
                "out to use plain generate()."
            )
    last = last.expand(len(starts)).long().tolist()
    return [position - (num_slots - start) for position, start in zip(last, starts)]
