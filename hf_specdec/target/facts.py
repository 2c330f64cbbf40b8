"""Properties of a model that decide how the loop can drive it, and the models that it cannot drive."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from transformers.generation import GenerationMixin

from ..errors import UnsupportedModelError
from ..target_facts import CACHE_NAMES, cache_name_among
from .masks import FULL, Span
from .parts.positions import CountedPositions
from .parts.recurrent import mixers


@dataclass(frozen=True)
class ModelProfile:
    """Facts about a model that the loop needs, read from its class and config once.

    Attributes:
        spans (`tuple[Span, ...]`): The distinct spans of its layers; one mask each.
        layer_types (`tuple[str, ...]`, *optional*): Types of the layers that attend, in the order of `spans`, by which
            the model asks for the masks; `None` if it takes a single mask.
        counts_slots (`bool`): Tells positions from the slots of its cache, whatever positions it is given. That is
            right for chains in rows of equal length only.
        takes_flat_mask (`bool`): Builds its position bias from a 2-D mask, and has no use for a ready 4-D one.
        takes_position_ids (`bool`): Its forward has the argument `position_ids`.
        takes_logits_to_keep (`bool`): Its forward has the argument `logits_to_keep`.
        attends (`bool`): Some of its layers keep keys and values, and read a mask.
        is_recurrent (`bool`): Some of its layers have a recurrent state, which cannot be cut back.
        cache_name (`str`): The argument of its forward that takes the cache, and of calls that continue one.
        has_encoder (`bool`): Its decoder attends to the output of an encoder too, which the call reads once.
        counted (`CountedPositions`, *optional*): Modules that count positions, and can be told them instead.
    """

    spans: tuple[Span, ...]
    layer_types: tuple[str, ...] | None
    counts_slots: bool
    takes_flat_mask: bool
    takes_position_ids: bool
    takes_logits_to_keep: bool
    attends: bool = True
    is_recurrent: bool = False
    cache_name: str = CACHE_NAMES[0]
    has_encoder: bool = False
    counted: CountedPositions | None = None

    def of_decoder(self, name: str) -> str:
        """The name of the forward's arguments and outputs for what its decoder has under this one."""
        return f"decoder_{name}" if self.has_encoder else name

    @property
    def supports_trees(self) -> bool:
        """Tells whether branches can be verified, and not chains only."""
        return not self.counts_slots


# Models that count slots, though they take positions or count them in a known way; those that do neither always do.
_COUNT_SLOTS = {
    "gpt_neo": "its local layers cut their window by slot",
    "inkling2_text": "its position bias counts slots",
    "inkling_text": "its position bias counts slots",
    "roformer": "it turns all rows alike",
}

_KEEPS_STATE = "keeps its recurrent state in its modules, not in a cache of transformers"

# Models that no cache of transformers is enough for.
_UNSUPPORTED = {
    **dict.fromkeys(("minimax", "recurrent_gemma", "rwkv", "xlstm"), _KEEPS_STATE),
    "blt": "groups bytes into patches by what one forward reads, so its logits depend on how the text is cut",
    "cpmant": "reads the whole text again in every forward and places a learned prompt in front of it",
    "deepseek_v4": "compresses the keys of many tokens into one, which cannot be cut back to the accepted ones",
    "glm5_next_text": "pools keys by their places in the whole buffers of its cache, by a mask of two dimensions",
    "git": "keeps image slots in front of the padding, which its mask does not cover",
    "qwen4_exp_text": "remembers the last tokens for its n-grams beside its recurrent state",
    "dory": "runs layers in loops over cache layers that it makes itself",
    "dia": "writes several streams of audio codes",
    "fsmt": "has no mask for several tokens after its cache",
    "flaubert": "keeps no key/value cache, and reads the whole text again in every forward",
    "inkling2_loop_text": "runs layers in loops over cache layers that it makes itself",
    "musicgen_decoder": "writes several streams of audio codes",
    "musicgen_melody_decoder": "writes several streams of audio codes",
    "prophetnet": "continues from its cache by one token at a time",
    "t5gemma2_decoder": "attends to its text and to its source under one mask, which it makes itself",
    "unlimited_ocr_text": "keeps its prompt apart from a window of the last tokens, in cache layers of its own",
    "xlm": "keeps no key/value cache, and reads the whole text again in every forward",
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
MASK_OF_LAYER_TYPE = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}

# Layers that attend to nothing: those with a recurrent state alone, and those that work on each token by itself.
WITHOUT_ATTENTION = ("linear_attention", "conv", "mlp", "moe")

_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}

# Arguments with a value for each token, of which new tokens get the last one in plain generation.
REPEATED_INPUTS = ("token_type_ids",)

_profiles: WeakKeyDictionary[torch.nn.Module, ModelProfile] = WeakKeyDictionary()


def model_profile(model: torch.nn.Module, role: str = "target model") -> ModelProfile:
    """The model's profile.

    Raises:
        UnsupportedModelError: The loop cannot drive the model: what it is and what is missing.
    """
    if model not in _profiles:
        _profiles[model] = _read_profile(model, role)
    return _profiles[model]


def _read_profile(model, role) -> ModelProfile:
    name = type(model).__name__
    config = model.config
    text_config = config.get_text_config(decoder=True)
    if text_config.model_type in _UNSUPPORTED:
        raise UnsupportedModelError(
            f"{name} {_UNSUPPORTED[text_config.model_type]}; it cannot be used as {role}. Leave the speculative "
            "arguments out to use plain generate()."
        )
    sample = getattr(model, "_sample", GenerationMixin._sample)
    if getattr(sample, "__func__", sample) is not GenerationMixin._sample:
        raise UnsupportedModelError(
            f"{name} has a decoding loop of its own (`_sample`), and writes something else than the tokens that its "
            f"logits say; it cannot be used as {role}. Leave the speculative arguments out to use plain generate()."
        )
    layer_types = getattr(text_config, "layer_types", None)
    recurrent = mixers(model).values()
    is_recurrent = bool(recurrent)
    known = set(_SPAN_OF_LAYER_TYPE) | set(WITHOUT_ATTENTION)
    others = sorted(set(layer_types or ()) - (known if is_recurrent else known - _RECURRENT))
    if others or (getattr(model, "_is_stateful", False) and not is_recurrent):
        what = f"layers of type {', '.join(others)}" if others else "a recurrent state"
        raise UnsupportedModelError(
            f"{name} has {what} that cannot be cut back to the accepted tokens; as {role} only models can be used "
            "that keep keys and values of every token, or a recurrent state where transformers' caches keep it. Leave "
            "the speculative arguments out to use plain generate()."
        )
    parameters = inspect.signature(model.forward).parameters
    cache_name = cache_name_among(_passed_on(model))
    if cache_name is None:
        raise UnsupportedModelError(
            f"{name} keeps no key/value cache (its forward has none of the arguments {', '.join(CACHE_NAMES)}), which "
            f"speculation needs of the {role}. Leave the speculative arguments out to use plain generate()."
        )
    attends = _attends(text_config, layer_types, set(recurrent))
    has_encoder = bool(config.is_encoder_decoder)
    takes_flat_mask = text_config.model_type == "bloom" or bool(getattr(text_config, "alibi", False))
    takes_position_ids = ("decoder_position_ids" if has_encoder else "position_ids") in parameters
    counts_slots = takes_flat_mask or text_config.model_type in _COUNT_SLOTS
    counted = None if takes_position_ids or counts_slots else CountedPositions.of(model)
    spans, keys = _read_spans(text_config, layer_types, is_recurrent)
    return ModelProfile(
        spans=spans,
        layer_types=keys,
        counts_slots=counts_slots or (attends and not takes_position_ids and counted is None),
        takes_flat_mask=takes_flat_mask,
        takes_position_ids=takes_position_ids,
        takes_logits_to_keep="logits_to_keep" in parameters,
        attends=attends,
        is_recurrent=is_recurrent,
        cache_name=cache_name,
        has_encoder=has_encoder,
        counted=counted,
    )


def _passed_on(model) -> set[str]:
    """Names of a forward's arguments, and of those that it passes on to the forwards of classes below its own."""
    names: set[str] = set()
    of_classes = (vars(base)["forward"] for base in type(model).__mro__ if "forward" in vars(base))
    for forward in (model.forward, *of_classes):
        parameters = inspect.signature(forward).parameters
        names.update(parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


def _attends(config, layer_types, recurrent: set[int]) -> bool:
    """Tells whether some layers keep keys and values; `recurrent` are the numbers of those with a state."""
    if layer_types:
        return not set(layer_types) <= set(WITHOUT_ATTENTION)
    return not recurrent >= set(range(config.num_hidden_layers))


def _read_spans(config, layer_types, is_recurrent):
    window = getattr(config, "sliding_window", None)
    if not layer_types:
        return (Span("sliding", window) if window else FULL,), None
    sizes = {"sliding": window, "chunked": getattr(config, "attention_chunk_size", None), "full": 0}
    keys = tuple(sorted(set(layer_types) - set(WITHOUT_ATTENTION)))
    kinds = [_SPAN_OF_LAYER_TYPE[key] for key in keys]
    spans = tuple(Span(kind, sizes[kind]) if sizes[kind] else FULL for kind in kinds)
    if is_recurrent and len(set(spans)) <= 1:
        # One mask is understood to be for the attention; not all of these models call it by the types of their layers.
        return spans[:1] or (FULL,), None
    return spans, keys


def is_text_only(model: torch.nn.Module) -> bool:
    """Tells whether a model reads nothing but text."""
    # Where the language model has no config of its own, there may still be other parts beside it.
    is_whole = model.config.get_text_config(decoder=True) is model.config
    return is_whole and model.input_modalities in ("text", ["text"], ("text",))
