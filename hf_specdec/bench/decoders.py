"""The ways of decoding that are compared: plain generation, the methods, and transformers' own assisted generation."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingDependencyError, SpecConfigError, shown
from ..loader import load_speculator
from ..method import COMBINING, NO_DRAFTS, methods
from ..reading import parse_json
from ..settings import SpeculativeConfig, describe_settings
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
    """One way of decoding.

    Attributes:
        name (`str`): Of its row in the results.
        arguments (`dict`): Of `generate()`, beside those that all ways share.
        settings (`dict`): Its settings, as plain JSON types.
        speculator (`Speculator`, *optional*): Of the methods of this package.
        network (`torch.nn.Module`, *optional*): The draft network.
        max_batch_size (`int`, *optional*): Most rows that it takes.
    """

    name: str
    arguments: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    speculator: Speculator | None = None
    network: torch.nn.Module | None = None
    max_batch_size: int | None = None

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

    def at_full_length(self) -> Decoder:
        """A copy with the most draft tokens in every cycle, so that those that would not pay are verified, too."""
        if self.speculator is None:
            return self
        speculator = self.speculator.at_full_length()
        return replace(self, speculator=speculator, arguments={"assistant": speculator})

    def draft_bytes(self, model: PreTrainedModel) -> int | None:
        """Bytes of the drafter's weights that are not the target's own; `None` where that is not known."""
        if self.network is None:
            return 0 if self.speculator is not None or self.name == PLAIN else None
        own = {tensor.data_ptr() for tensor in _tensors(model)}
        tensors = {tensor.data_ptr(): tensor for tensor in _tensors(self.network)}
        return sum(tensor.nbytes for pointer, tensor in tensors.items() if pointer not in own)


def plain_decoder() -> Decoder:
    # The settings of a generation config must not speed up the baseline.
    return Decoder(PLAIN, {"spec_method": "off"})


def with_baselines(model: PreTrainedModel, decoders: Sequence[Decoder], stock: bool = False) -> list[Decoder]:
    """The ways to compare: plain generation, the loop without drafts, transformers' own ways if asked for, and these.

    Args:
        model (`PreTrainedModel`): The target.
        decoders (`Sequence[Decoder]`): Methods, from [`load_decoders`].
        stock (`bool`): Also [`stock_decoders`].
    """
    (undrafted,), _ = load_decoders(model, [NO_DRAFTS])
    others = [decoder for decoder in decoders if decoder.settings != undrafted.settings]
    return [plain_decoder(), undrafted, *(stock_decoders(others) if stock else []), *others]


def load_decoders(
    model: PreTrainedModel, specs: Sequence[Any], *, names: Sequence[str | None] = (), skip_missing: bool = False
) -> tuple[list[Decoder], dict[str, str]]:
    """Loads the methods, all before the first forward.

    Args:
        model (`PreTrainedModel`): The target.
        specs (`Sequence[Any]`): What `load_speculator` takes, such as settings from [`read_spec`].
        names (`Sequence[str]`, *optional*): Names of the rows; without one the method's.
        skip_missing (`bool`): Leave out methods whose optional package is missing.

    Returns:
        The methods, with distinct names, and for each one left out the reason.

    Raises:
        SpecConfigError: Settings are wrong, or do not fit the target.
        MissingDependencyError: An optional package is missing, and must not be.
    """
    loaded, missing = [], {}
    for spec, title in zip_longest(specs, names):
        try:
            speculator = load_speculator(model, spec)
        except MissingDependencyError as error:
            if not skip_missing:
                raise
            missing[title or str(spec.get("method") if isinstance(spec, Mapping) else spec)] = str(error)
        else:
            loaded.append((title or speculator.method, speculator))
    distinct = _distinct([title for title, _ in loaded], [speculator.config for _, speculator in loaded])
    return [
        Decoder(
            name,
            {"assistant": speculator},
            speculator.config.to_dict(),
            speculator,
            speculator.generator_class.network(speculator.resources),
        )
        for name, (_, speculator) in zip(distinct, loaded)
    ], missing


def stock_decoders(decoders: Sequence[Decoder]) -> list[Decoder]:
    """Lists transformers' own assisted generation: prompt lookup, and the counterparts of the methods with the same k.

    All of them take one row. Some cannot run, which shows in the warm-up.
    """
    lengths = [decoder.speculator.config.fixed_length for decoder in decoders if decoder.counterpart == _LOOKUP]
    count = next((length for length in lengths if length is not None), _PROMPT_LOOKUP_TOKENS)
    found = [_stock("prompt_lookup", {_LOOKUP: count})]
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


# ------------------------------------------------------------------------------------------------------------ `--spec`


def read_spec(text: str, named: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any] | str:
    """Reads the text of a `--spec` as settings that `load_speculator` takes.

    Args:
        text (`str`): A method, a repo id, a folder, JSON, or any of the first three followed by settings:
            `eagle3,model=user/head,k=4`, where `k` is `num_speculative_tokens`.
        named (`Mapping`, *optional*): Settings that have a name, or hold for a method without a `model`.

    Returns:
        `dict` of flat settings, or the text itself where it is a name.
    """
    named = named or {}
    if text in named:
        return {**named[text]}
    if text.startswith("{"):
        try:
            settings = parse_json(text)
        except ValueError as error:
            raise SpecConfigError(f"--spec {shown(text)} is no JSON: {error}.") from error
    elif ("=" in text or "," in text) and not os.path.exists(text):
        settings = _pairs(text)
    else:
        settings = {"method": text}
    # Of a combination the last method has the model.
    own = {} if "model" in settings else named.get(str(settings.get("method")).rpartition(COMBINING)[2], {})
    return text if settings == {"method": text} and not own else {**own, **settings}


def _pairs(text: str) -> dict[str, Any]:
    first, *rest = text.split(",")
    texts = {setting.key for setting in describe_settings() if setting.type == "str | None"}
    settings: dict[str, Any] = {}
    if "=" in first:
        rest = [first, *rest]
    else:
        settings["model" if "/" in first or os.path.exists(first) else "method"] = first.strip()
    for part in rest:
        key, equals, value = map(str.strip, part.partition("="))
        if not equals or not key:
            raise SpecConfigError(
                f"--spec '{text}': '{part}' is no key=value. Write lists and texts with commas as JSON: "
                "'{\"method\": ..., ...}'."
            )
        key = "num_speculative_tokens" if key == "k" else key
        settings[key] = value if key in texts and value != "null" else _value(value)
    return settings


def _value(text: str) -> Any:
    """Reads numbers, true, false and null as in JSON, everything else as text."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def _distinct(titles: Sequence[str], configs: Sequence[SpeculativeConfig]) -> list[str]:
    """Names by title; those that would be the same have their settings appended."""
    names = [
        title if titles.count(title) == 1 else "_".join([title, *_variant(config)])
        for title, config in zip(titles, configs)
    ]
    return [
        name if names.count(name) == 1 else f"{name}_{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]


def _variant(config: SpeculativeConfig) -> list[str]:
    settings = config.to_dict()
    model = settings.pop("model", None)
    settings.pop("method", None)
    length = settings.pop("num_speculative_tokens", None)
    parts = [] if length is None else [f"k{length}"]
    parts += [f"{key}={value}" for key, value in settings.items()]
    return parts or ([Path(str(model)).name] if model else [])
