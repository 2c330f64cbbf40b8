"""Keys of a drafter's `config.json` that nobody here reads: harmless ones, and ones that may change what it computes.

What is known to change the computation is refused. Where a config is about the drafter alone, whatever else is not
known is named in a warning; a whole model's config has dozens of keys, most of them notes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import translate
from functools import cache
from typing import Any


# Keys that change what layers compute, and the values that are computed here beside none at all.
_COMPUTED: Mapping[str, tuple] = {
    **dict.fromkeys(
        "alibi attention_chunk_size attention_multiplier attn_logit_softcapping attn_temperature_tuning clip_qkv "
        "dim_model_base final_logit_softcapping no_rope_layers parallel_attn parallel_residual query_pre_attn_scalar "
        "rope_interleave rope_interleaved use_gemma_norm use_mtp_layernorm use_parallel_residual".split(),
        (),
    ),
    **dict.fromkeys(
        "embedding_multiplier input_embedding_scale logit_scale logits_scaling output_multiplier residual_multiplier "
        "rotary_pct rotary_percent scale_depth scale_emb".split(),
        (1,),
    ),
    **dict.fromkeys("is_neox_style next_layer_regular rope_is_neox_style".split(), (True,)),
    "hidden_activation": ("silu",),
    "norm_type": ("rms_norm", "rmsnorm", "RMSNorm"),
    "position_embedding_type": ("rope", "rotary"),
}

# Notes of transformers and of whole models' configs, and what the shapes of the tensors say better.
_HARMLESS = frozenset(
    "_* architectures auto_map model_type *dtype *_version version license name_or_path base_model* tokenizer_class "
    "*_token_id use_cache return_dict* output_* torchscript is_decoder is_encoder_decoder add_cross_attention "
    "tie_encoder_decoder tie_word_embeddings pruned_heads id2label label2id problem_type finetuning_task prefix "
    "task_specific_params chunk_size_feed_forward initializer_range *dropout* *_pdrop pretraining_tp "
    "max_window_layers attn_implementation cross_attention_hidden_size use_bfloat16 tf_legacy_loss "
    "has_no_defaults_at_init max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty *no_repeat_ngram_size "
    "bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty *suppress_tokens "
    "sep_token* hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "vocab_size attention_bias mlp_bias qkv_bias bias use_qk_norm qk_norm speculators_config speculators_model_type "
    "algorithm default_proposal_method proposal_methods verifier method num_lookahead_tokens medusa_choices "
    "num_parameters total_flos".split()
)

# Keys that transformers' rotary embeddings read, and those that embeddings for several axes add.
_ROPE = frozenset(
    "rope_type type rope_theta factor attention_factor beta_fast beta_slow short_factor long_factor low_freq_factor "
    "high_freq_factor original_max_position_embeddings mscale mscale_all_dim truncate partial_rotary_factor "
    "mrope_section mrope_interleaved finetuned".split()
)

# Objects inside of a config that are about the drafter alone.
_BLOCKS = ("dflash_config", "eagle_config", "transformer_layer_config", "speculators_config")
_ROPE_BLOCKS = ("rope_parameters", "rope_scaling")

# Whole configs that are.
_OWN_TYPES = ("eagle", "medusa", "mlp_speculator", "mtp")

# Keys that the configs of these methods have as their own elsewhere.
_OWN_KEYS = re.compile(
    r"(aux|block|conv|dflash|domino|draft|dspark|eagle|jetspec|lilicorr|markov|medusa|mtp|selector|xpress)_.+|.*causal.*"
)


def refused_keys(config: Mapping[str, Any], read_keys: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Names and values of what makes a config describe another computation than the one done here."""
    for name, key, value, _ in _unread(config, read_keys):
        allowed = _COMPUTED.get(key)
        if allowed is not None and value not in allowed and (value or True in allowed):
            yield name, value


def unknown_keys(config: Mapping[str, Any], read_keys: frozenset[str]) -> list[str]:
    """Names of the keys about the drafter alone that nobody here knows. What is empty or switched off says nothing."""
    unread = _unread(config, read_keys.union(_HARMLESS, _COMPUTED))
    return [name for name, _, value, is_own in unread if value and is_own]


def _unread(config: Mapping[str, Any], read_keys: frozenset[str]) -> Iterator[tuple[str, str, Any, bool]]:
    """Full name, key and value of what is not among these, and whether only the drafter can be meant."""
    read, model_type = _compiled(read_keys), config.get("model_type")
    inner = (*_BLOCKS, "model") if model_type == "eagle" else _BLOCKS

    def entries(block: Mapping[str, Any], place: str, is_own: bool, is_rope: bool) -> Iterator[tuple]:
        for key, value in block.items():
            # Rotary embeddings may have a set of settings for each kind of layer.
            is_rope_block = is_rope or key in _ROPE_BLOCKS
            if isinstance(value, Mapping) and (is_rope_block or (not place and key in inner)):
                yield from entries(value, f"{place}{key}.", True, is_rope_block)
            elif not (value is None or (is_rope and key in _ROPE) or read.fullmatch(key)):
                yield f"{place}{key}", key, value, is_own or _OWN_KEYS.fullmatch(key) is not None

    # Original Medusa heads have no type of a model.
    is_medusa = "medusa_num_heads" in config and "model_type" not in config
    is_own = "speculators_model_type" in config or model_type in _OWN_TYPES or is_medusa
    return entries(config, "", is_own, False)


@cache
def _compiled(patterns: frozenset[str]) -> re.Pattern:
    return re.compile("|".join(map(translate, patterns)))
