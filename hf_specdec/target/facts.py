"""Properties of a model that decide how the loop can drive it, and the models that it cannot drive."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.generation import GenerationMixin

from ..errors import UnsupportedModelError
from ..target_facts import CACHE_NAMES, cache_name_among
from .masks import FULL, Span
from .parts.positions import CountedPositions
from .parts.recurrent import mixers


# Models that count slots, though they take positions or count them in a known way; those that do neither always do.
_COUNT_SLOTS = {
    "gpt_neo": "its local layers cut their window by slot",
    "inkling2_text": "its position bias counts slots",
    "inkling_text": "its position bias counts slots",
    "roformer": "it turns all rows alike",
}

# Models that no cache of transformers is enough for.
_UNSUPPORTED = {
    **dict.fromkeys(
        ("minimax", "recurrent_gemma", "rwkv", "xlstm"),
        "keeps its recurrent state in its modules, not in a cache of transformers",
    ),
    **dict.fromkeys(("flaubert", "xlm"), "keeps no key/value cache, and reads the whole text again in every forward"),
    **dict.fromkeys(("dory", "inkling2_loop_text"), "runs layers in loops over cache layers that it makes itself"),
    **dict.fromkeys(("dia", "musicgen_decoder", "musicgen_melody_decoder"), "writes several streams of audio codes"),
    "blt": "groups bytes into patches by what one forward reads, so its logits depend on how the text is cut",
    "cpmant": "reads the whole text again in every forward and places a learned prompt in front of it",
    "deepseek_v4": "compresses the keys of many tokens into one, which cannot be cut back to the accepted ones",
    "glm5_next_text": "pools keys by their places in the whole buffers of its cache, by a mask of two dimensions",
    "git": "keeps image slots in front of the padding, which its mask does not cover",
    "qwen4_exp_text": "remembers the last tokens for its n-grams beside its recurrent state",
    "fsmt": "has no mask for several tokens after its cache",
    "prophetnet": "continues from its cache by one token at a time",
    "t5gemma2_decoder": "attends to its text and to its source under one mask, which it makes itself",
    "unlimited_ocr_text": "keeps its prompt apart from a window of the last tokens, in cache layers of its own",
}

_SPAN_OF_LAYER_TYPE = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    # They choose among what the mask lets them see; the keys they choose by are kept like all others.
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    # Attention beside a recurrent state.
    "hybrid": "full",
    "hybrid_sliding": "sliding",
}

# Names of some models for the mask of such layers; others call it by the type of the layers.
_MASK_OF_LAYER_TYPE = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}

# Layers that attend to nothing: those with a recurrent state alone, and those that work on each token by itself.
_WITHOUT_ATTENTION = ("linear_attention", "conv", "mlp", "moe")

_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}

# Arguments with a value for each token, of which new tokens get the last one in plain generation.
REPEATED_INPUTS = ("token_type_ids",)


@dataclass(frozen=True)
class ModelProfile:
    """Facts about a model that the loop needs, read from its class and config once."""

    # The distinct spans of its layers, one mask each, and the types of the layers by which the model asks for them;
    # `None` if it takes a single mask.
    spans: tuple[Span, ...]
    layer_types: tuple[str, ...] | None
    # Tells positions from the slots of its cache, whatever positions it is given. That is right for chains in rows of
    # equal length only.
    counts_slots: bool
    takes_flat_mask: bool  # builds its position bias from a 2-D mask, and has no use for a ready 4-D one
    takes_position_ids: bool
    takes_logits_to_keep: bool
    attends: bool = True  # some layers keep keys and values, and read a mask
    is_recurrent: bool = False  # some layers have a state that sums up all tokens, and cannot be cut back
    last_recurrent_layer: int = -1  # the last of these
    cache_name: str = CACHE_NAMES[0]  # the argument of its forward, and of calls that continue a cache
    has_encoder: bool = False  # its decoder attends to the output of an encoder too, which the call reads once
    counted: CountedPositions | None = None  # modules that count positions, and can be told them instead

    @property
    def supports_trees(self) -> bool:
        """Tells whether branches can be verified, and not chains only."""
        return not self.counts_slots

    def of_decoder(self, name: str) -> str:
        """The name of the forward's arguments and outputs for what its decoder has under this one."""
        return f"decoder_{name}" if self.has_encoder else name

    def named_masks(self, masks: list[torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """The masks of all spans as the model's forward takes them."""
        if self.layer_types is None:
            return masks[0]
        named: dict[str, torch.Tensor | None] = {}
        for layer_type, mask in zip(self.layer_types, masks):
            named[layer_type] = named[_MASK_OF_LAYER_TYPE.get(layer_type, layer_type)] = mask
        return {**named, **dict.fromkeys(_WITHOUT_ATTENTION)} if self.is_recurrent else named


_profiles: WeakKeyDictionary[torch.nn.Module, tuple[Any, ...]] = WeakKeyDictionary()  # config, what it says, profile


def model_profile(model: torch.nn.Module, role: str = "target model") -> ModelProfile:
    """The model's profile; raises an `UnsupportedModelError` about a model that the loop cannot drive."""
    config, before, profile = _profiles.get(model) or (model.config.get_text_config(decoder=True), None, None)
    seen = [vars(config).get(name) for name in ("sliding_window", "attention_chunk_size", "layer_types")]
    if profile is None or seen != before:
        profile = _read_profile(model, role)
        _profiles[model] = config, seen, profile
    return profile


def _read_profile(model: Any, role: str) -> ModelProfile:
    config, parameters = model.config, inspect.signature(model.forward).parameters
    text_config = config.get_text_config(decoder=True)
    model_type, layer_types = text_config.model_type, set(getattr(text_config, "layer_types", None) or ())
    recurrent = set(mixers(model).values())
    unknown_types = layer_types - {*_SPAN_OF_LAYER_TYPE, *_WITHOUT_ATTENTION}
    unknown_types |= set() if recurrent else layer_types & _RECURRENT
    sample = getattr(model, "_sample", GenerationMixin._sample)
    cache_name = cache_name_among(_arguments(model))
    refusal = None
    if model_type in _UNSUPPORTED:
        refusal = f"{_UNSUPPORTED[model_type]}; it cannot be used as {role}"
    elif getattr(sample, "__func__", sample) is not GenerationMixin._sample:
        refusal = (
            "has a decoding loop of its own (`_sample`), and writes something else than the tokens that its logits "
            f"say; it cannot be used as {role}"
        )
    elif unknown_types or (getattr(model, "_is_stateful", False) and not recurrent):
        what = f"layers of type {', '.join(sorted(unknown_types))}" if unknown_types else "a recurrent state"
        refusal = (
            f"has {what} that cannot be cut back to the accepted tokens; as {role} only models can be used that keep "
            "keys and values of every token, or a recurrent state where transformers' caches keep it"
        )
    elif cache_name is None:
        refusal = (
            f"keeps no key/value cache (its forward has none of the arguments {', '.join(CACHE_NAMES)}), which "
            f"speculation needs of the {role}"
        )
    if refusal is not None or cache_name is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} {refusal}. Leave the speculative arguments out to use plain generate()."
        )
    if layer_types:
        attends = not layer_types <= set(_WITHOUT_ATTENTION)
    else:
        attends = not recurrent >= set(range(text_config.num_hidden_layers))
    has_encoder = bool(config.is_encoder_decoder)
    takes_flat_mask = model_type == "bloom" or bool(getattr(text_config, "alibi", False))
    takes_position_ids = ("decoder_position_ids" if has_encoder else "position_ids") in parameters
    counts_slots = takes_flat_mask or model_type in _COUNT_SLOTS
    counted = None if takes_position_ids or counts_slots else CountedPositions.of(model)
    spans, types_of_masks = _read_spans(text_config, layer_types, bool(recurrent))
    return ModelProfile(
        spans=spans,
        layer_types=types_of_masks,
        counts_slots=counts_slots or (attends and not takes_position_ids and counted is None),
        takes_flat_mask=takes_flat_mask,
        takes_position_ids=takes_position_ids,
        takes_logits_to_keep="logits_to_keep" in parameters,
        attends=attends,
        is_recurrent=bool(recurrent),
        last_recurrent_layer=max(recurrent, default=-1),
        cache_name=cache_name,
        has_encoder=has_encoder,
        counted=counted,
    )


def _arguments(model: Any) -> set[str]:
    """Names of a forward's arguments, and of those that it passes on to the forwards of classes below its own."""
    names: set[str] = set()
    of_classes = (vars(base)["forward"] for base in type(model).__mro__ if "forward" in vars(base))
    for forward in (model.forward, *of_classes):
        parameters = inspect.signature(forward).parameters
        names.update(parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


def _read_spans(
    config: Any, layer_types: set[str], is_recurrent: bool
) -> tuple[tuple[Span, ...], tuple[str, ...] | None]:
    """The distinct spans, and the types of the layers that have them."""
    window = getattr(config, "sliding_window", None)
    if not layer_types:
        return (Span("sliding", window) if window else FULL,), None
    sizes = {"sliding": window, "chunked": getattr(config, "attention_chunk_size", None), "full": 0}
    names = tuple(sorted(layer_types - set(_WITHOUT_ATTENTION)))
    kinds = [_SPAN_OF_LAYER_TYPE[name] for name in names]
    spans = tuple(Span(kind, sizes[kind]) if sizes[kind] else FULL for kind in kinds)
    if is_recurrent and len(set(spans)) <= 1:
        # One mask is understood to be for the attention; not all of these models call it by the types of their layers.
        return spans[:1] or (FULL,), None
    return spans, names


def is_text_only(model: torch.nn.Module) -> bool:
    """Tells whether a model reads nothing but text."""
    # Where the language model has no config of its own, there may still be other parts beside it.
    is_whole = model.config.get_text_config(decoder=True) is model.config
    return is_whole and model.input_modalities in ("text", ["text"], ("text",))
