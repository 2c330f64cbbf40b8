"""Sources of requests to a model with an encoder: how they are given, and which calls are more than one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin
from transformers.utils import ModelOutput

from ..errors import SpecConfigError, shown
from ..target.facts import model_profile


# Arguments of a request that are tensors with one row, and may come as lists.
_ROWS = ("attention_mask", "decoder_input_ids")

# Settings for which Whisper's own generate() decodes a source several times, and the values that are harmless.
_SEVERAL_CALLS = {
    "return_token_timestamps": "Attention weights are not kept of verified drafts.",
    "return_segments": "Segments are put together of several calls.",
    "logprob_threshold": "A text that falls below it is decoded anew.",
    "compression_ratio_threshold": "A text that exceeds it is decoded anew.",
    "no_speech_threshold": "It decides after a text whether there is one.",
}


class SourceForm:
    """Form in which requests give the source that a model's encoder reads.

    Args:
        model (`PreTrainedModel`): With an encoder.

    Attributes:
        name (`str`): The encoder's main input.
        is_text (`bool`): It reads tokens.
        samples_by_temperature (`bool`): Calls sample by their argument `temperature`, and not by `do_sample`, as in
            Whisper's own generate().
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self.name: str = getattr(model.get_encoder(), "main_input_name", model.main_input_name)
        if self.name == "inputs_embeds":
            # That of an encoder which is fed by the model around it.
            self.name = model.main_input_name
        self.is_text: bool = self.name == "input_ids"
        self.samples_by_temperature: bool = isinstance(model, WhisperGenerationMixin)

    @classmethod
    def of(cls, model: PreTrainedModel) -> SourceForm | None:
        """That of a model; `None` where it has no encoder."""
        return cls(model) if model_profile(model).has_encoder else None

    def given_by(self, request: Any) -> dict[str, Any]:
        """The settings of a request that names no text, with the source among them.

        Raises:
            SpecConfigError: It has no source.
        """
        names = (self.name, "encoder_outputs")
        if not isinstance(request, Mapping) or sum(request.get(name) is not None for name in names) != 1:
            what = list(request) if isinstance(request, Mapping) else request
            raise SpecConfigError(
                f"A request to {type(self._model).__name__} is a dict with `{self.name}` of one row, such as its "
                f"processor makes, or `encoder_outputs`, got {shown(what)}."
            )
        return {name: value for name, value in request.items() if value is not None}

    def arguments(self, tokens: list[int], given: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `generate()` for a request alone.

        Args:
            tokens (`list[int]`): Those of a source that is text, and else none.
            given (`dict`): All other arguments.

        Raises:
            SpecConfigError: A tensor has several rows or the wrong size, or one call cannot do what is asked for.
        """
        device, found = self._model.device, dict(given)
        if tokens:
            found["input_ids"] = [tokens]
        for name in (self.name, *_ROWS):
            if found.get(name) is not None:
                found[name] = self._row_of(name, found[name])
        if found.get("encoder_outputs") is not None:
            _check_encoded(found["encoder_outputs"])
        found = {name: value.to(device) if torch.is_tensor(value) else value for name, value in found.items()}
        self._complete_mask(found)
        if self.samples_by_temperature:
            self._check_one_window(found)
        return found

    def _row_of(self, name: str, value: Any) -> torch.Tensor:
        try:
            value = value if torch.is_tensor(value) else torch.as_tensor(value, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecConfigError(f"`{name}` takes a tensor, or lists of numbers, got {shown(value)}.") from error
        if name in _ROWS and value.dim() == 1:
            value = value[None]
        if value.dim() < 2 or len(value) != 1:
            raise SpecConfigError(
                f"`{name}` of a request takes one row, with a first dimension of 1, got the shape "
                f"{list(value.shape)}. Pass each source as a request of its own."
            )
        return value

    def _complete_mask(self, arguments: dict[str, Any]) -> None:
        """Sees that sources whose lengths may differ have masks."""
        source, mask = arguments.get(self.name), arguments.get("attention_mask")
        if source is None or source.dim() != 2:
            return
        if mask is None:
            arguments["attention_mask"] = torch.ones(source.shape, dtype=torch.long, device=source.device)
        elif mask.shape != source.shape:
            raise SpecConfigError(
                f"`attention_mask` has a number for each of {source.shape[1]} places of `{self.name}`, got the shape "
                f"{list(mask.shape)}."
            )

    def _check_one_window(self, arguments: dict[str, Any]) -> None:
        """Refuses what Whisper's own generate() decodes a source several times for."""
        own, encoder = arguments.get("generation_config", self._model.generation_config), self._model.get_encoder()

        def effective(name: str) -> Any:
            value = arguments.get(name)
            return getattr(own, name, None) if value is None else value

        window = self._model.config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        source, problem = arguments.get(self.name), None
        if source is not None and source.shape[-1] > window:
            problem = f"`{self.name}` of {source.shape[-1]} frames is read window by window, each of {window}."
        elif isinstance(arguments.get("temperature"), (list, tuple)):
            problem = "Several temperatures are tried one after the other. Pass one."
        elif effective("return_timestamps") and not effective("force_unique_generate_call"):
            problem = (
                "With `return_timestamps` a window begins where the last one has ended. Pass "
                "force_unique_generate_call=True for the first alone."
            )
        for name, why in _SEVERAL_CALLS.items():
            if effective(name) not in (None, False):
                problem = f"`{name}`: {why}"
        if problem is not None:
            raise SpecConfigError(f"{problem} A request is decoded once; call generate() for others.")


def _check_encoded(outputs: Any) -> None:
    """Refuses what is no output of an encoder for one source."""
    states = outputs[0] if isinstance(outputs, (ModelOutput, tuple, list)) and len(outputs) else outputs
    if states is outputs or not torch.is_tensor(states) or states.dim() < 3 or len(states) != 1:
        raise SpecConfigError(
            f"`encoder_outputs` takes what the encoder returns for one source, got {shown(outputs)}. Its states have "
            "the shape (1, source length, hidden size)."
        )
