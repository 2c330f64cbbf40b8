"""Parts of transformers that decoding takes beyond its documented interface, checked before anything is decoded."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module

import transformers

from ..errors import MissingDependencyError


# The versions that the tests run on.
OLDEST, NEWEST = "5.17", "5.23"

# Names that are imported or called, some with the parameters that they are called with.
_MIXIN = {
    "GenerationMixin.generate": ("custom_generate",),
    "GenerationMixin.prepare_inputs_for_generation": ("input_ids", "next_sequence_length"),
    "GenerationMixin._prefill": ("input_ids", "generation_config", "model_kwargs"),
    "GenerationMixin._update_model_kwargs_for_generation": ("outputs", "model_kwargs", "is_encoder_decoder"),
    "GenerationMixin._has_unfinished_sequences": ("this_peer_finished", "synced_gpus", "device"),
    "GenerateDecoderOnlyOutput": (),
    "GenerateEncoderDecoderOutput": (),
}
_PROCESSORS = (
    "TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper MinPLogitsWarper TypicalLogitsWarper "
    "EpsilonLogitsWarper EtaLogitsWarper SuppressTokensLogitsProcessor InfNanRemoveLogitsProcessor LogitNormalization "
    "TopHLogitsWarper RepetitionPenaltyLogitsProcessor NoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor "
    "NoBadWordsLogitsProcessor MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor "
    "ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor ExponentialDecayLengthPenalty "
    "SuppressTokensAtBeginLogitsProcessor WatermarkLogitsProcessor WhisperTimeStampLogitsProcessor "
    "LogitsProcessor LogitsProcessorList"
)
_CACHES = "Cache CacheLayerMixin DynamicCache EncoderDecoderCache StaticCache"
_CRITERIA = "EosTokenCriteria MaxLengthCriteria MaxTimeCriteria StopStringCriteria StoppingCriteriaList"
_HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "transformers.activations": {"ACT2FN": ()},
    "transformers.generation.utils": _MIXIN,
    "transformers.generation.logits_process": dict.fromkeys(_PROCESSORS.split(), ()),
    "transformers.generation.stopping_criteria": dict.fromkeys(_CRITERIA.split(), ()),
    "transformers.cache_utils": dict.fromkeys(_CACHES.split(), ()),
    "transformers.masking_utils": dict.fromkeys(("ALL_MASK_ATTENTION_FUNCTIONS", "eager_mask", "sdpa_mask"), ()),
    "transformers.modeling_outputs": {"BaseModelOutput": ()},
    "transformers.modeling_utils": {"AttentionInterface": ()},
    "transformers.utils": {"ModelOutput": ()},
    "transformers.integrations.sdpa_attention": {"sdpa_attention_forward": ()},
}
# Attributes of every config. A name that is only written to would be missed by nobody.
_OF_CONFIGS = ("_attn_implementation", "_attn_implementation_internal", "_name_or_path")


def check_transformers() -> None:
    """Checks that transformers has all that decoding relies on.

    Raises:
        MissingDependencyError: It lacks something: what, and which versions have it.
    """
    missing = list(_missing())
    if missing:
        raise MissingDependencyError(
            f"transformers {transformers.__version__} does not have what hf_specdec relies on: {', '.join(missing)}. "
            f"Versions {OLDEST} to {NEWEST} do: pip install 'transformers~={NEWEST}.0'. A newer hf_specdec may know "
            "the installed one."
        )


def _missing() -> Iterator[str]:
    for place, names in _HOOKS.items():
        try:
            module = import_module(place)
        except ModuleNotFoundError:
            yield place
            continue
        for name, parameters in names.items():
            found = module
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is None:
                yield f"{place}.{name}"
            elif parameters:
                known = inspect.signature(found).parameters
                yield from (f"{place}.{name}({each}=)" for each in parameters if each not in known)
    config = transformers.PreTrainedConfig()
    yield from (f"PreTrainedConfig.{name}" for name in _OF_CONFIGS if not hasattr(config, name))
