"""Tiny random models of every causal language model architecture of transformers, and of those that read images too.

A model type needs an entry here only where the common sizes do not fit it, or where it cannot be decoded
speculatively; types that transformers adds later are tried like all others.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)


# Taken over by every config that knows the name. Windows and chunks are shorter than prompt and text, heads are
# grouped, and the weights are large enough that the best token leads clearly.
COMMON = {
    "vocab_size": 99, "unpadded_vocab_size": 99, "hidden_size": 64, "d_model": 64, "intermediate_size": 96,
    "decoder_ffn_dim": 96, "num_hidden_layers": 3, "decoder_layers": 3, "num_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.5, "tie_word_embeddings": False, "use_cache": True, "is_decoder": True,
    "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1, "sliding_window": 8, "attention_chunk_size": 8,
    # Mixture of experts
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    # Compressed keys and values
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "index_n_heads": 40, "index_head_dim": 16, "index_topk": 12,
    # Recurrent states, in chunks shorter than the text
    "linear_num_heads": 4, "linear_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_d_ssm": 128, "mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "ssm_state_size": 16, "n_groups": 2, "chunk_size": 16,
    # Parts that read images, sound and video, whose output fits the text model
    "depth": 1, "embed_dim": 32, "projector_hidden_size": 32, "vision_hidden_size": 64, "out_hidden_size": 64,
    "text_hidden_size": 64,
}  # fmt: skip

# Rounding errors grow on the way through these models, or decide which experts or keys are taken.
_SENSITIVE = {"initializer_range": 0.1}
# Large weights make these repeat one token.
_CALM = {"initializer_range": 0.1}
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_INDEXED = {**_LATENT, **_SENSITIVE}
_SLIDING_LATENT = {
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 16,
}
# Types whose default has full attention only.
_SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "use_sliding_window": True}
_SHARED_CACHE = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 99,
    "global_head_dim": 16,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 4]}
_COMPASS = {**_SLIDING, "rope_parameters": {"full_attention": dict(_ROPE), "sliding_attention": dict(_ROPE)}}
_MULTIMODAL_ROPE = {"text_config": {"rope_parameters": _ROPE}}
_HALF_ROPE = {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}}}

_CONV = {"layer_types": ["conv", "full_attention", "conv"]}

# Values that a model type needs besides or in place of the common ones.
SPECIAL = {
    **dict.fromkeys(
        "axk1 bailing_hybrid deepseek_v2 deepseek_v3 glm4_moe_lite kimi_linear minicpm3 sarvam_mla youtu".split(),
        _LATENT,
    ),
    **dict.fromkeys("axk2 deepseek_v32 glm_moe_dsa".split(), _INDEXED),
    **dict.fromkeys("blenderbot minimax_m3_vl_text opt whisper".split(), _CALM),
    **dict.fromkeys("cosmos3_edge glm46v glm4v hunyuan_vl paddleocr_vl".split(), _MULTIMODAL_ROPE),
    **dict.fromkeys("dots1 laguna mellum ministral qwen2 qwen2_moe qwen3 smollm3".split(), _SLIDING),
    **dict.fromkeys("dots3_note_text".split(), _SLIDING_LATENT),
    **dict.fromkeys("gemma3n_text gemma4_text gemma4_unified_text".split(), _SHARED_CACHE),
    **dict.fromkeys("glm4v_moe glm_ocr glmga".split(), _HALF_ROPE),
    **dict.fromkeys("hrm_text hy_v4".split(), _SENSITIVE),
    **dict.fromkeys("lfm2".split(), _CONV),
    "apertus1p5": {
        "vision_config": {"codebook_size": 16},
        "audio_config": {"codebook_size": 16, "codebook_dim": 64},
        "image_token_offset": 10,
        "audio_token_offset": 26,
        "image_token_id": 98,
        "audio_token_id": 97,
    },
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},
    "chameleon": {"vocabulary_map": {"<image>": 98}, "vq_config": {"base_channels": 32, "embed_dim": 256}},
    "codegen": {"rotary_dim": 8},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse"]}},
    "dots3_note": {
        "text_config": _SLIDING_LATENT,
        "vision_config": {"num_hidden_layers": 42, "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 32], "rope_parameters": _ROPE}},
    "gemma4": {"text_config": _SHARED_CACHE},
    "gemma4_unified": {"text_config": _SHARED_CACHE},
    "gpt_neo": {"num_layers": 3, "attention_types": [[["local", "global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "granite4_vision": {"deepstack_layer_map": [[1, 0]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "got_ocr2": {"text_config": _SLIDING},
    "hy_v4_vl": {"text_config": {**_SENSITIVE, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "janus": {"vq_config": {"base_channels": 32, "embed_dim": 8, "projection_dim": 64, "image_token_embed_dim": 64}},
    "lfm2_moe": {**_CONV, "num_dense_layers": 1},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16},
    "mistral4": {"num_key_value_heads": 4},
    "mistral_large4": {"text_config": _INDEXED},
    "modernbert-decoder": {"local_attention": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [2, 1]}},
    "muse_glimmer": {"vision_config": {"layer_types": ["window_attention", "full_attention", "full_attention"]}},
    "muse_spark": {
        "audio_config": {"num_hidden_layers": 2, "patch_sizes": [16, 6], "hidden_sizes": [32, 64], "depths": [1, 1]}
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe"]},
    "nemotron_h_omni": {
        "text_config": {"layers_block_type": ["linear_attention", "full_attention", "moe"]},
        "vision_config": {"video_temporal_patch_size": 2},
    },
    "qwen2_5_omni_thinker": {**_MULTIMODAL_ROPE, "vision_start_token_id": 97},
    "qwen2_5_vl": {"text_config": {**_SLIDING, "rope_parameters": _ROPE}},
    "qwen2_vl": {"text_config": {**_SLIDING, "rope_parameters": _ROPE}},
    "qwen3_moe": {"use_sliding_window": True},
    "qwen3_omni_moe_thinker": {**_MULTIMODAL_ROPE, "vision_start_token_id": 97},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "attention_head_dim": 32},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]},
    "xmod": {"default_language": "en_XX"},
}

# Other forms of a type that take another way through its code: (type, changes).
VARIANTS = {
    "bert-two_way_prompt": ("bert", {"is_decoder": False}),
    "falcon-alibi": ("falcon", {"alibi": True}),
    "falcon-grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_bigcode-multi_head": ("gpt_bigcode", {"multi_query": False}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "mpt-no_alibi": ("mpt", {"attn_config": {"alibi": False}}),
    "qwen2-full": ("qwen2", {"layer_types": None, "use_sliding_window": False}),
}

# Types of which some models have layers of one kind alone, which may take other masks: the kind, or all there are.
LAYERS = {
    "cohere2": ["sliding_attention"],
    "dots3_note_text": ["sliding_attention", "full_attention", "indexed_attention"],
    "gemma3_text": ["sliding_attention"],
    "gpt_oss": ["full_attention"],
    "inkling_text": ["hybrid"],
    "lfm2": ["full_attention"],
    "lfm3": ["sliding_attention", "conv", "conv"],
    "llama4_text": ["chunked_attention"],
    "modernbert-decoder": ["sliding_attention"],
    "zaya": ["hybrid"],
}

# Types with a recurrent state, most of them beside attention.
RECURRENT = set(
    "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_text inkling_text jamba kimi_linear lfm2 "
    "lfm2_moe lara_mini lfm3 mamba mamba2 nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text "
    "qwen3_next zamba zamba2 zaya".split()
)

# Types that count slots, so that no tree can be verified.
CHAINS_ONLY = set(
    "bloom falcon-alibi gpt_neo inkling2_text inkling_text moss_transcribe_diarize mpt mpt-no_alibi roformer".split()
)

_BLOCK_INDEX = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256,
    "indexer_budget": 64, "indexer_compress_ratio": 4,
}  # fmt: skip
_LOOPS = "runs layers in loops"
_NO_CACHE = "keeps no key/value cache"
_KEEPS_STATE = "keeps its recurrent state in its modules"

# Types that cannot be used: what the error says, and the config values that the type is known for.
UNSUPPORTED = {
    **dict.fromkeys(("minimax", "recurrent_gemma", "rwkv", "xlstm"), (_KEEPS_STATE, {})),
    "blt": ("groups bytes into patches", {}),
    "cpmant": ("reads the whole text again", {}),
    "deepseek_v4": ("compresses the keys of many tokens into one", {}),
    "dory": (_LOOPS, {}),
    "git": ("image slots in front of the padding", {}),
    "glm5_next": ("pools keys by their places", {}),
    "inkling2_loop": (_LOOPS, {}),
    "inkling2_loop_text": (_LOOPS, {}),
    "openai-gpt": (_NO_CACHE, {}),
    "prophetnet": ("one token at a time", {}),
    "qwen4_exp": ("remembers the last tokens", {"text_config": _BLOCK_INDEX}),
    "qwen4_exp_text": ("remembers the last tokens", _BLOCK_INDEX),
    "reformer": (_NO_CACHE, {"is_decoder": True}),
    "t5gemma2": ("under one mask", {}),
    "unlimited_ocr": ("keeps its prompt apart from a window of the last tokens", {}),
    "xlm": (_NO_CACHE, {}),
    "xlnet": (_NO_CACHE, {}),
}

# Types that cannot be tried here.
_NEEDS_TIMM = "its vision tower needs the package timm"
_NEEDS_IMAGE = "its generate() needs an image"
WITH_IMAGE = "tried with an image, in tests/helpers/images.py"
WITH_ENCODER = "tried with its encoder, in tests/helpers/encoder_decoders.py"
NOT_BUILT = {
    "blip": WITH_IMAGE,
    "blip-2": WITH_IMAGE,
    "diffusion_gemma": "does not generate one token after the other",
    "evolla": "reads proteins, and belongs to another class of models than the mapping says",
    "fast_vlm": _NEEDS_TIMM,
    "florence2": WITH_ENCODER,
    "gemma3n": f"{_NEEDS_TIMM}; its text model is tried as gemma3n_text",
    "gemma4_assistant": "a drafting head on the cache of its target, which does not generate by itself",
    "gemma4_unified_assistant": "a drafting head on the cache of its target, which does not generate by itself",
    "idefics": _NEEDS_IMAGE,
    "instructblip": WITH_IMAGE,
    "instructblipvideo": WITH_IMAGE,
    "kosmos-2": _NEEDS_IMAGE,
    "musicgen": "generates several streams of audio codes, and its config does not build its causal model",
    "musicgen_melody": "generates several streams of audio codes, and its config does not build its causal model",
    "perception_lm": _NEEDS_TIMM,
    "pix2struct": _NEEDS_IMAGE,
    "pp_formulanet": _NEEDS_IMAGE,
    "pi0": "moves robots, and has no generate()",
    "udop": WITH_ENCODER,
    "vision-encoder-decoder": WITH_ENCODER,
}


def supported() -> list[str]:
    """Names of all types and variants that must work."""
    exceptions = {*UNSUPPORTED, *NOT_BUILT}
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in exceptions] + list(VARIANTS)


def with_images() -> list[str]:
    """Names of all types that must work with text alone, and are no causal language models of their own."""
    exceptions = {*UNSUPPORTED, *NOT_BUILT, *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    return [name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name not in exceptions]


def unsupported() -> list[str]:
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return [name for name in UNSUPPORTED if name in known]


def _auto_class(model_type: str) -> type:
    is_causal = model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def tiny_model(name: str, attn_implementation: str | None = None, **changes) -> torch.nn.Module:
    """A model of `supported()` or `with_images()` with fixed random weights; `changes` are config values."""
    model_type, variant = VARIANTS.get(name, (name, {}))
    config = build(CONFIG_MAPPING[model_type], {**SPECIAL.get(model_type, {}), **variant, **changes})
    torch.manual_seed(0)
    model = _auto_class(model_type).from_config(config, attn_implementation=attn_implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms, biases and attention sinks start as constants, which would hide their part.
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def empty_model(name: str) -> torch.nn.Module:
    """A model of `unsupported()` in its usual size, without memory for the weights."""
    config = CONFIG_MAPPING[name](**UNSUPPORTED[name][1])
    with torch.device("meta"):
        return _auto_class(name).from_config(config)


def _fixed(config_class: type) -> list[str]:
    """Attributes that follow from others."""
    return [name for name, value in vars(config_class).items() if isinstance(value, property) and value.fset is None]


def build(config_class: type, special: dict) -> PreTrainedConfig:
    """A config with the common sizes, and with special values of its own and of its parts."""
    default = config_class()
    known = {*config_class.__dataclass_fields__, *config_class.attribute_map}
    values = {name: value for name, value in COMMON.items() if name in known}
    kinds = sorted(set(getattr(default, "layer_types", None) or ()), reverse=True)
    given = {*special, *_fixed(config_class)}
    if "layer_types" in known and kinds and given.isdisjoint({"layer_types", "layers_block_type"}):
        # Every kind of layer that the architecture has.
        values["layer_types"] = [kinds[layer % len(kinds)] for layer in range(values["num_hidden_layers"])]
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            values[name] = build(type(part), {**SPECIAL.get(part.model_type, {}), **special.get(name, {})})
    own = {name: value for name, value in special.items() if name not in config_class.sub_configs}
    return config_class(**{**values, **own})
