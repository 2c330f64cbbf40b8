"""The ways of decoding that are compared: plain generation, the methods, and transformers' own assisted generation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..loader import load_speculator
from ..method import NO_DRAFTS, methods
from ..settings import SpeculativeConfig
from ..speculator import Speculator


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


PLAIN = "plain"

# Names of transformers' own ways begin with this.
STOCK = "stock_"

# Arguments of transformers' `generate()` that the methods name as their counterparts.
_ASSISTED, _OWN_LAYERS, _LOOKUP = "assistant_model", "use_mtp", "prompt_lookup_num_tokens"

# Draft tokens of prompt lookup where no method beside it has a length of its own: the number in transformers' docs.
_PROMPT_LOOKUP_TOKENS = 10


@dataclass
class Decoder:
    """One way of decoding."""

    name: str  # of its row in the results
    arguments: dict[str, Any]  # of `generate()`, beside those that all ways share
    settings: dict[str, Any] = field(default_factory=dict)  # as plain JSON types
    speculator: Speculator | None = None  # of the methods of this package
    network: torch.nn.Module | None = None  # the draft network
    max_batch_size: int | None = None  # most rows that it takes

    @property
    def counterpart(self) -> str | None:
        """Argument of transformers' own `generate()` that drafts in the same way."""
        method = None if self.speculator is None else methods().get(self.speculator.method)
        return None if method is None else method.transformers

    def forget_texts(self, model: PreTrainedModel) -> None:
        """Drops the method's memory of earlier texts. Weights stay loaded, and so do learnt costs."""
        if self.speculator is not None:
            self.speculator = self.speculator.without_texts(model)
            self.arguments = {"assistant": self.speculator}

    def draft_bytes(self, model: PreTrainedModel) -> int | None:
        """Bytes of the drafter's weights that are not the target's own; `None` where that is not known."""
        if self.network is None:
            return 0 if self.speculator is not None or self.name == PLAIN else None
        own = {tensor.data_ptr() for tensor in _tensors(model)}
        tensors = {tensor.data_ptr(): tensor for tensor in _tensors(self.network)}
        return sum(tensor.nbytes for pointer, tensor in tensors.items() if pointer not in own)


def with_baselines(model: PreTrainedModel, decoders: Sequence[Decoder], stock: bool = False) -> list[Decoder]:
    """These ways after plain generation, the loop without drafts, and if asked for transformers' own."""
    (undrafted,) = load_decoders(model, [NO_DRAFTS])
    others = [decoder for decoder in decoders if decoder.settings != undrafted.settings]
    # The settings of a generation config must not speed up the baseline.
    plain = Decoder(PLAIN, {"spec_method": "off"})
    return [plain, undrafted, *(stock_decoders(others) if stock else []), *others]


def load_decoders(model: PreTrainedModel, specs: Sequence[Any], *, names: Sequence[str | None] = ()) -> list[Decoder]:
    """Loads the methods, all before the first forward, under distinct names: those that are given, or the methods'."""
    loaded = [load_speculator(model, spec) for spec in specs]
    titles = [title or speculator.method for title, speculator in zip_longest(names, loaded)]
    return [
        Decoder(
            name,
            {"assistant": speculator},
            speculator.config.to_dict(),
            speculator,
            speculator.generator_class.network(speculator.resources),
        )
        for name, speculator in zip(_distinct(titles, [speculator.config for speculator in loaded]), loaded)
    ]


def stock_decoders(decoders: Sequence[Decoder]) -> list[Decoder]:
    """Transformers' own ways: a static cache, prompt lookup, and counterparts of the methods with the same k."""
    lengths = [decoder.speculator.config.fixed_length for decoder in decoders if decoder.counterpart == _LOOKUP]
    count = next((length for length in lengths if length is not None), _PROMPT_LOOKUP_TOKENS)
    static = replace(_stock("static", {"cache_implementation": "static"}), max_batch_size=None)
    found = [static, _stock("prompt_lookup", {_LOOKUP: count})]
    for decoder in decoders:
        if decoder.counterpart == _ASSISTED:
            found.append(_assisted(decoder))
        elif decoder.counterpart == _OWN_LAYERS:
            found.append(_stock(decoder.name, {_OWN_LAYERS: True}))
    return found


def _stock(name: str, arguments: dict[str, Any], settings: dict[str, Any] | None = None, network=None) -> Decoder:
    """One of transformers' own ways, whose settings are its arguments if they are not others."""
    settings = arguments if settings is None else settings
    return Decoder(f"{STOCK}{name}", {"spec_method": "off", **arguments}, settings, network=network, max_batch_size=1)


def _assisted(decoder: Decoder) -> Decoder:
    """Puts the draft model into transformers' loop, with as many draft tokens in every cycle."""
    config, generator_class = decoder.speculator.config, decoder.speculator.generator_class
    # Shares the weights; its generation config is its own.
    assistant = copy.copy(decoder.network)
    assistant.generation_config = copy.deepcopy(assistant.generation_config)
    settings: dict[str, Any] = {}
    if not decoder.speculator.is_adaptive:
        settings = {
            "num_assistant_tokens": config.fixed_length or generator_class.default_length(config.options),
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        assistant.generation_config.update(**settings)
    return _stock(decoder.name, {_ASSISTED: assistant}, settings, decoder.network)


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _distinct(titles: Sequence[str], configs: Sequence[SpeculativeConfig]) -> list[str]:
    """Names by title; those that would be the same have their settings appended."""
    names: list[str] = []
    for title, config in zip(titles, configs):
        parts = []
        if titles.count(title) > 1:
            settings = config.to_dict()
            model, _ = settings.pop("model", None), settings.pop("method", None)
            length = settings.pop("num_speculative_tokens", None)
            parts = [] if length is None else [f"k{length}"]
            parts += [f"{key}={value}" for key, value in settings.items()]
            parts = parts or ([Path(str(model)).name] if model else [])
        names.append("_".join([title, *parts]))
    return [
        name if names.count(name) == 1 else f"{name}_{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]
