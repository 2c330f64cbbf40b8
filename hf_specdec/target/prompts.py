"""One call as the host has prepared it: the target's reading of its prompts, and the continuation after them.

Models may prepare their inputs themselves: they shift positions, count them in a way of their own, or put tokens in
front of the prompt. So masks and positions are not computed here but asked for, with transformers' own functions, and
the slots are described by the answer.

Shapes: B rows of the call, P tokens of the given prompts, S slots that the prompts fill, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GenerationConfig
from transformers.cache_utils import StaticCache
from transformers.generation import GenerationMixin

from ..errors import SpecConfigError, UnsupportedModelError
from ..logits.grammar.masks import RowGrammars
from ..logits.processors import ProcessorStack
from ..logits.randomness import seed_from_torch
from ..protocol import Prompt
from ..target_facts import cache_name_among, decoder_layers, forward_arguments, layers_owner, vocabulary_size
from .cache import check_room
from .facts import REPEATED_INPUTS, ModelProfile, is_text_only, model_profile
from .forward import Part, SlotForward, SlotOutput
from .model import SlotModel
from .parts.adapters import ADAPTED_ROW, adapter_hooks
from .parts.positions import PositionCounter
from .parts.rotary import ChangingRotary, rotary_changes
from .parts.source import Source


# Most tokens after the prompts for which a model's own preparation of inputs is asked beforehand.
_MOST_ASKED = 4096


@dataclass
class Request:
    """One `generate()` call as the host has prepared it."""

    model: torch.nn.Module  # the target
    input_ids: torch.LongTensor  # (B, P): left-padded prompts; P is 0 with `inputs_embeds` alone
    logits_processor: list[Any]
    stopping_criteria: list[Any]
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]  # of the target's forward: mask, positions, multimodal inputs
    streamer: Any = None  # has seen nothing yet
    synced_gpus: bool = False  # go on with forwards until all ranks have finished
    user_cache: Any = None  # the user's `DynamicCache` or `StaticCache`, to be brought up to date at the end
    source_inputs: dict[str, Any] = field(default_factory=dict)  # arguments of the encoder, of a model that has one
    began: float = field(default_factory=perf_counter)  # when `generate()` was called
    # Places of the rows' adapters among all that their layers are told, where these are not those of one call's rows.
    adapters: list[int] | None = None
    chunk_size: int = 512  # tokens of the prompts that are read before others get a turn, where there are others
    between_chunks: Callable[[], None] | None = None  # their turn

    def __post_init__(self) -> None:
        self.batch_size: int = len(self.input_ids)
        self.device: torch.device = self.input_ids.device
        # The caller gets the cache of the whole text.
        self.keeps_cache: bool = bool(self.generation_config.return_dict_in_generate) or self.user_cache is not None
        pad = getattr(self.generation_config, "_pad_token_tensor", None)
        # Without an end-of-sequence token no row ends before the others, and padding is never written.
        self.pad_token: int = 0 if pad is None else int(pad)
        # Tokens or embeddings of the prompts, padding included; those of a model with an encoder are the encoder's.
        embeds = None if self.model.config.is_encoder_decoder else self.model_kwargs.get("inputs_embeds")
        self.prompt_length: int = max(self.input_ids.shape[1], 0 if embeds is None else embeds.shape[1])

    @property
    def processes(self) -> torch.distributed.ProcessGroup | None:
        """The processes that hold parts of the target; `None` where each has all of it."""
        if (getattr(self.model, "tp_size", None) or 1) == 1:
            return None
        mesh = getattr(self.model, "_device_mesh", None)
        if mesh is None:
            return torch.distributed.group.WORLD
        return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")

    def draw_seed(self) -> int:
        """A seed from torch's generator: that of the first process, as all that hold parts draw the same tokens."""
        shared, group = [seed_from_torch()], self.processes
        if group is not None:
            torch.distributed.broadcast_object_list(shared, group=group, group_src=0)
        return shared[0]

    def processor_stack(self, ends: Collection[int]) -> ProcessorStack:
        """The processors of the call, whose rows these tokens may end."""
        grammars = None
        if self.logits_processor:
            grammars = RowGrammars.of_call(self.logits_processor, self.input_ids, vocabulary_size(self.model), ends)
        return ProcessorStack(self.logits_processor, grammars)

    def row_inputs(self) -> dict[str, torch.Tensor]:
        """Inputs `(B, 1)` that a row's new tokens repeat: arguments of the forward, and `ADAPTED_ROW`."""
        inputs = {}
        if hasattr(self.model, "peft_config") and adapter_hooks(self.model):
            places = range(self.batch_size) if self.adapters is None else self.adapters
            inputs[ADAPTED_ROW] = torch.tensor(places, device="cpu")[:, None]
        if not is_text_only(self.model):
            # Models with images read them of the prompt alone.
            return inputs
        repeated = {name: self.model_kwargs.get(name) for name in REPEATED_INPUTS}
        return inputs | {name: values[:, -1:] for name, values in repeated.items() if values is not None}


def read_prompts(request: Request, target: SlotModel, max_length: int) -> tuple[Prompt, SlotOutput, Continuation]:
    """Lets the target read the prompts by transformers' own prefill, and starts slots for rows of `max_length`."""
    model, input_ids, profile = request.model, request.input_ids, target.profile
    kwargs, length = dict(request.model_kwargs), input_ids.shape[1]
    mask = kwargs.get(profile.of_decoder("attention_mask"))
    if mask is not None:
        check_left_padded(mask)
    if request.user_cache is not None:
        target.cache.load(request.user_cache)
    room = max_length - length
    # Slots that the prompts fill together with a continued cache.
    past_length = target.cache.get_seq_length()
    if mask is not None:
        num_given = mask.shape[1]
    else:
        # transformers drops a mask of ones, and remembers its length where that is needed.
        num_given = max(request.prompt_length, getattr(request.generation_config, "_mask_length", 0))
        num_given += 0 if num_given > past_length else past_length
    rotary_changes(model, [num_given] if mask is None else mask.ne(0).sum(1).tolist(), room)
    if type(cache := kwargs.get(profile.cache_name)) is StaticCache:
        check_room(cache, request.batch_size, num_given + room)
    if profile.has_encoder:
        Source.of_call(model, kwargs, request.source_inputs).attach(target)
    kwargs[profile.cache_name] = target.forward_cache
    output, states, received = _prefill(request, target, kwargs)
    if received.get("cache") not in (None, target.forward_cache):
        # The model has put a beginning of its own in front of the prompts.
        target.cache.load(received["cache"])
        output[cache_name_among(output.keys())] = target.cache
    target.check_prefilled()
    next_kwargs = model._update_model_kwargs_for_generation(output, dict(kwargs), profile.has_encoder)
    # The tokens that follow are not known yet.
    inputs = _next_inputs(model, F.pad(input_ids, (0, 1)), next_kwargs)
    continuation = Continuation.read(request, target, inputs, received.get("positions"), num_given)
    # With the code of transformers and PEFT whole texts are compared in the tests.
    if model.prepare_inputs_for_generation.__module__.partition(".")[0] not in ("transformers", "peft"):
        _ask_for_following(request, target, output, kwargs, inputs, room)
    parts: list[Part] = [] if continuation.counter is None else [continuation.counter]
    if changes := rotary_changes(model, continuation.positions, room):
        is_known = continuation.num_slots == length and not any(continuation.offsets)
        parts.append(ChangingRotary(target, max(continuation.positions), changes, is_known))
    target.start_slots(continuation.starts, continuation.offsets, parts)
    # The last token is never read.
    target.max_position = max(continuation.positions) + room - 2
    # For a drafter each row has a token at least, and the slots may begin before the given ones.
    num_unknown = continuation.num_slots - length
    starts = [min(max(start - num_unknown, 0), max(length - 1, 0)) for start in continuation.starts]
    source = target.find(Source)
    prompt = Prompt(input_ids, starts, states, source and replace(source, keys=None))
    last = {key: value[:, -1:] for key, value in states.items()}
    all_states = output.get(profile.of_decoder("hidden_states"))
    return prompt, SlotOutput(output.logits[:, -1:].to(input_ids.device), last, all_states), continuation


def _prefill(
    request: Request, target: SlotModel, kwargs: dict[str, Any]
) -> tuple[Any, dict[Any, torch.Tensor], dict[str, Any]]:
    """transformers' own prefill, in chunks where others get a turn: its output, all states, and what was received."""
    input_ids, length, ends = request.input_ids, request.input_ids.shape[1], []
    if request.between_chunks is not None:
        ends = list(range(request.chunk_size, length, request.chunk_size))
        # How much of the prompt is in the cache is told from it.
        if kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = torch.ones_like(input_ids)
    columns = [name for name, value in kwargs.items() if torch.is_tensor(value) and value.shape[-1:] == (length,)]
    chunks: list[dict[Any, torch.Tensor]] = []
    for end in [*ends, length]:
        part = kwargs if end == length else {**kwargs, **{name: kwargs[name][..., :end] for name in columns}}
        # The generation config may cut the prompts into chunks, too.
        with (
            target.capturing(joined=True) as states,
            _watched_prefill(request.model, target.profile) as received,
            target.reading_prompts(SlotForward(input_ids)),
        ):
            output = request.model._prefill(input_ids[:, :end], request.generation_config, part)
        chunks.append(states)
        if end != length and request.between_chunks is not None:
            request.between_chunks()
    if len(chunks) > 1:
        states = {key: torch.cat([chunk[key] for chunk in chunks], dim=1) for key in target.states}
    return output, states, received


@contextmanager
def _watched_prefill(model: torch.nn.Module, profile: ModelProfile) -> Iterator[dict[str, Any]]:
    """Yields the "cache" and last "positions" of the last forward of a model that prepares its inputs itself."""
    received: dict[str, Any] = {}
    thread, name = get_ident(), "prepare_inputs_for_generation"

    def watch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> None:
        # Torch calls hooks without keyword arguments in another thread, while this one takes them back.
        if get_ident() != thread:
            return
        if module is model:
            received["cache"] = kwargs.get(profile.cache_name)
            return
        positions = {**dict(zip(forward_arguments(type(module)), args)), **kwargs}.get("position_ids")
        if torch.is_tensor(positions):
            received["positions"] = positions[..., -1:]

    with ExitStack() as hooks:
        if name in vars(model) or getattr(type(model), name) is not getattr(GenerationMixin, name):
            readers: list[torch.nn.Module] = []
            with suppress(UnsupportedModelError):
                layers = decoder_layers(model)
                readers = [*layers_owner(model, layers).children(), layers[0]]
            readers = [reader for reader in readers if "position_ids" in forward_arguments(type(reader))]
            for module in (model, *readers):
                hooks.callback(module.register_forward_pre_hook(watch, with_kwargs=True).remove)
        yield received


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
    """Refuses a model whose own code prepares other inputs for later tokens than follow from the `first` ones."""
    model, profile = request.model, target.profile
    attributes, tokens, past = dict(vars(model)), request.input_ids, target.cache.get_seq_length()
    # Tokens that stand for those that are not known yet, and differ from each other.
    following = torch.arange(room, device=tokens.device).remainder(2).expand(len(tokens), -1)

    def is_same(one: Any, other: Any) -> bool:
        if torch.is_tensor(one) and torch.is_tensor(other):
            return torch.equal(one, other)
        return one is other or (type(one) is type(other) and bool(one == other))

    with target.cache.kept():
        for count in range(1, min(room, _MOST_ASKED)):
            kwargs = model._update_model_kwargs_for_generation(output, dict(kwargs), profile.has_encoder)
            for layer in target.cache.layers:
                # As if it had the tokens before.
                layer.length = past + count - 1 if layer.is_initialized else 0
            text = torch.cat([tokens, following[:, :count]], dim=1)
            inputs = _next_inputs(model, text, kwargs)
            expected = following_inputs(first, profile, text[:, -1:], count - 1)
            changed = [key for key in {**inputs, **expected} if not is_same(inputs.get(key), expected.get(key))]
            if changed or any(vars(model).get(key) is not value for key, value in attributes.items()):
                what = ", ".join(f"`{key}`" for key in changed) or "attributes of the model"
                raise UnsupportedModelError(
                    f"{type(model).__name__}.prepare_inputs_for_generation is not transformers' own, and its inputs "
                    f"for the forward {count} tokens after the prompts cannot be derived from the first ones: it "
                    f"changes {what}. Leave the speculative arguments out to use plain generate()."
                )


@dataclass
class Continuation:
    """Places where the rows of a call go on."""

    inputs: dict[str, Any]  # of plain generation's next forward
    num_slots: int  # S
    starts: list[int]  # each row's first slot that it sees, S if it sees none
    # How many slots are none of padding, nor of what the model has put in front. One at least: a drafter must have a
    # token.
    text_lengths: list[int]
    offsets: list[int]  # what is added to the distance from the start, for position ids
    positions: list[int]  # of the first tokens after the prompts
    counter: PositionCounter | None = None  # says the positions, in the place of starts and offsets

    @classmethod
    def read(
        cls, request: Request, target: SlotModel, inputs: dict[str, Any], last: torch.Tensor | None, num_given: int
    ) -> Continuation:
        """Derives it from the next forward's inputs, and the `last` positions that the decoder was seen to read."""
        model, profile = request.model, target.profile
        num_slots = target.cache.get_seq_length()
        mask = inputs.get(profile.of_decoder("attention_mask"))
        if mask is None and not profile.attends and (mask := request.model_kwargs.get("attention_mask")) is not None:
            # Padding is kept out of a recurrent state while the prompt is read, and no mask is needed after it.
            mask = F.pad(mask, (0, 1), value=1)
        starts = [0] * request.batch_size
        if mask is not None:
            if mask.shape[1] != num_slots + 1:
                raise UnsupportedModelError(
                    f"The prompts have left {num_slots} tokens in the cache of {type(model).__name__}, and the mask "
                    f"of the next forward covers {mask.shape[1] - 1}, so it cannot be told which of them a row sees. "
                    "Leave the speculative arguments out to use plain generate()."
                )
            check_left_padded(mask)
            starts = mask[:, :-1].eq(0).sum(1).tolist()
        position_ids, counter = inputs.get(profile.of_decoder("position_ids")), None
        if position_ids is None and last is not None:
            position_ids = last + 1
        elif position_ids is None and profile.counted is None:
            counter = PositionCounter.of(model)
        # A model that is given no positions, and shows none, counts slots.
        offsets = starts if position_ids is None else position_offsets(position_ids, num_slots, starts)
        text_lengths = [max(num_given - start, 1) for start in starts]
        positions = [num_slots - start + offset for start, offset in zip(starts, offsets)]
        return cls(inputs, num_slots, starts, text_lengths, offsets, positions, counter)


def check_left_padded(mask: torch.Tensor) -> None:
    """Refuses masks `(B, S)` that hide anything but the beginning of a row."""
    is_hidden_again = mask[:, 1:].eq(0) & mask[:, :-1].ne(0)
    if bool(is_hidden_again.any()):
        row, column = is_hidden_again.nonzero()[0].tolist()
        raise SpecConfigError(
            f"The attention mask hides tokens behind others that it shows (first in row {row} at token "
            f"{column + 1}), and speculation masks rows at their beginning only. Pad prompts on the left "
            "(`padding_side='left'`), or leave the speculative arguments out to use plain generate()."
        )


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
