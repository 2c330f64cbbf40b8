"""One `generate()` call as the host has prepared it, and what follows from its arguments.

Shapes: B rows, P prompt length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig

from ..logits.grammar.rows import RowGrammars
from ..logits.processors import ProcessorStack
from ..logits.randomness import seed_from_torch
from ..target_facts import vocabulary_size
from .facts import REPEATED_INPUTS, is_text_only, model_profile
from .parts.adapters import ADAPTED_ROW, RowAdapters


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    def processes(self) -> ProcessGroup | None:
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

    def prompt_slots(self, past_length: int) -> int:
        """Slots that the prompts fill together with the `past_length` of a continued cache."""
        mask = self.model_kwargs.get(model_profile(self.model).of_decoder("attention_mask"))
        if mask is not None:
            return mask.shape[1]
        # transformers drops a mask of ones, and remembers its length where that is needed.
        length = max(self.prompt_length, getattr(self.generation_config, "_mask_length", 0))
        return length if length > past_length else past_length + length

    def row_inputs(self) -> dict[str, torch.Tensor]:
        """Inputs `(B, 1)` that a row's new tokens repeat: arguments of the forward, and `ADAPTED_ROW`."""
        inputs = {}
        if hasattr(self.model, "peft_config") and RowAdapters(self.model):
            places = range(self.batch_size) if self.adapters is None else self.adapters
            inputs[ADAPTED_ROW] = torch.tensor(places, device="cpu")[:, None]
        if not is_text_only(self.model):
            # Models with images read them of the prompt alone.
            return inputs
        repeated = {name: self.model_kwargs.get(name) for name in REPEATED_INPUTS}
        return inputs | {name: values[:, -1:] for name, values in repeated.items() if values is not None}
