"""Sources of a target with an encoder, as a draft model sees them.

A draft model with the target's encoder takes what the target has read (distil-whisper keeps Whisper's encoder), and so
does a decoder that has none of its own (`WhisperForCausalLM`). One with another encoder reads each source once.

Shapes: B rows, N tokens or frames of the source, H hidden size.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from ...errors import UnsupportedModelError
from ...target.facts import model_profile
from ...target.parts.source import Source


class SourceReader:
    """Way of a draft model to the sources of a target.

    Args:
        draft_model, target_model (`PreTrainedModel`): The two models.

    Attributes:
        shares_encoder (`bool`): The draft model's encoder is the target's, or a copy of it.

    Raises:
        UnsupportedModelError: The draft model has an encoder, and the target has none; or it cannot take what the
            target's encoder returns.
    """

    def __init__(self, draft_model: Any, target_model: Any):
        self.model = draft_model
        self.has_encoder: bool = model_profile(draft_model).has_encoder
        has_sources = model_profile(target_model).has_encoder
        if self.has_encoder and not has_sources:
            raise UnsupportedModelError(
                f"{type(draft_model).__name__} is an encoder-decoder model, and {type(target_model).__name__} has no "
                "encoder. Use a decoder-only draft model."
            )
        self._states_name = _states_name(draft_model) if has_sources and not self.has_encoder else None
        if self._states_name is not None:
            own = draft_model.config.get_text_config(decoder=True).hidden_size
            given = target_model.config.get_text_config(encoder=True).hidden_size
            if own != given:
                raise UnsupportedModelError(
                    f"{type(draft_model).__name__} has no encoder and reads states of {own} numbers, and the encoder "
                    f"of {type(target_model).__name__} returns {given}. Load the draft model with its own encoder."
                )
        self.shares_encoder: bool = self.has_encoder and have_same_encoder(draft_model, target_model)

    def missing(self, given: Source | None) -> str | None:
        """The argument that the draft model's own encoder reads, where the call does not have it."""
        if given is None or not self.has_encoder or self.shares_encoder:
            return None
        name = getattr(self.model.get_encoder(), "main_input_name", "input_ids")
        return None if name in given.given else name

    def source(self, given: Source | None, rows: list[int]) -> Source | None:
        """The sources of these rows for the draft model; `None` where it reads none.

        Args:
            given (`Source`, *optional*): The target's.
        """
        if given is None or not (self.has_encoder or self._states_name):
            return None
        given = given.of_rows(rows)
        if self.has_encoder and not self.shares_encoder:
            inputs = {"encoder_outputs": BaseModelOutput(self._encoded(given.given))}
            mask = given.given.get("attention_mask")
        else:
            states, mask = self._moved(given.states), given.inputs.get("attention_mask")
            name = self._states_name or "encoder_outputs"
            inputs = {name: (states,) if name == "encoder_outputs" else states}
        if mask is not None:
            inputs["attention_mask" if self.has_encoder else "encoder_attention_mask"] = self._moved(mask)
        if self._states_name == "encoder_outputs":
            # Whisper's decoder sees all of its window.
            inputs.pop("encoder_attention_mask", None)
        return Source(inputs)

    def _encoded(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        """The encoder's output `(B, N, H)`."""
        encoder = self.model.get_encoder()
        names = inspect.signature(encoder.forward).parameters
        inputs = {name: self._moved(value) for name, value in given.items() if name in names}
        return encoder(**inputs, return_dict=True)[0]

    def _moved(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.model.device, self.model.dtype if values.is_floating_point() else values.dtype)


def have_same_encoder(draft_model: Any, target_model: Any) -> bool:
    """Tells whether the encoders of two models are one, or copies of each other."""
    mine, other = draft_model.get_encoder(), target_model.get_encoder()
    if mine is other:
        return True
    weights, others = mine.state_dict(), other.state_dict()
    is_alike = type(mine) is type(other) and weights.keys() == others.keys()
    return is_alike and all(_are_equal(weights[name], others[name]) for name in weights)


def _are_equal(mine: torch.Tensor, other: torch.Tensor) -> bool:
    # What is offloaded cannot be compared.
    are_here = "meta" not in (mine.device.type, other.device.type)
    return are_here and (mine.shape, mine.dtype) == (other.shape, other.dtype) and mine.equal(other.to(mine.device))


def _states_name(model: Any) -> str | None:
    """The argument through which a decoder without an encoder takes the states of one; `None` where it takes none."""
    names = inspect.signature(model.forward).parameters
    if "encoder_outputs" in names:
        return "encoder_outputs"
    attends = getattr(model.config, "add_cross_attention", False) or any(
        name.endswith("encoder_attn") for name, _ in model.named_modules()
    )
    return "encoder_hidden_states" if attends and "encoder_hidden_states" in names else None
