"""Messages about checkpoints that are wrong or not supported: one table for the formats of all methods."""

import re

import pytest
import torch
from safetensors.torch import save_file

from hf_specdec import CheckpointFormatError, SpecConfigError, load_speculator
from hf_specdec.hub.detect import detect_checkpoint
from tests.helpers.heads import HEADS, both, copy_of, folder_of, load, loaded_target, method_of, put, without
from tests.helpers.models import tiny_llama


EAGLE1, EAGLE3 = "eagle/eagle1_llama", "eagle/eagle3_llama"
DFLASH, DSPARK = "dflash/qwen3_random_b8", "dflash/dspark_vanilla_b5"
DOMINO, CONFIDENCE = "dflash/domino_b6", "dflash/dspark_confidence_b5"
DFLASH2, CONVOLUTION = "dflash/dflash2_full_b8", "layers.0.attention_conv"
MEDUSA, MERGED = "medusa/v2_shared_lm_head_safetensors", "medusa/merged_v1"
MEDUSA_VLLM, MEDUSA_CUT = "medusa/vllm_converted", "medusa/vllm_truncated_vocab"
MLP, MLP_TIED = "mlp_speculator/untied_plain", "mlp_speculator/tied_plain"
GLM, GLM_3, DEEPSEEK = "mtp/glm4_moe", "mtp/glm4_moe_k3", "mtp/deepseek_v3"

ONE = torch.tensor(1.0)
ATTENTION = "midlayer.self_attn."


def ones(name, *shape, dtype=None):
    return put(name, torch.ones(shape, dtype=dtype))


def rows(name, count):
    return put(name, lambda tensor: tensor[:count])


def columns(name, count):
    return put(name, lambda tensor: tensor[:, :count])


def class_of(name):
    return {"architectures": [name]}


def reads(*layers):
    return {"dflash_config": {"mask_token_id": 1, "target_layer_ids": list(layers)}}


# (checkpoint, change of its tensors, of its config, what the message says)
UNSUPPORTED = [
    (EAGLE3, None, {"eagle_config": {"parallel_draft_step": 4}}, "heads of their own.*parallel drafting"),
    (EAGLE1, both(ones("eh_proj.weight", 2, 2), ones("enorm.weight", 2)), {}, "multi-token prediction"),
    (EAGLE3, ones(f"{ATTENTION}q_a_proj.weight", 2, 2), {}, "multi-head latent attention"),
    (EAGLE1, None, {"layernorms": True}, "norms before `fc` .*layernorms"),
    (EAGLE1, ones("embed_layernorm.weight", 2), {}, "norms before `fc`"),
    (EAGLE3, ones("base_model.model.x.lora_A.weight", 2, 2), {}, "LoRA"),
    (EAGLE3, ones("midlayer.mlp.up_proj.qweight", 2, 2), {}, "quantised weights.*up_proj.qweight.*floating-point"),
    (EAGLE3, ones("fc.weight_packed", 2, 2), {}, "quantised weights.*fc.weight_packed"),
    (MEDUSA, ones("0.0.linear.weight.absmax", 2), {}, "quantised weights.*absmax"),
    (EAGLE3, ones("midlayer.mlp.experts.0.up_proj.weight", 2, 2), {}, "with experts"),
    (EAGLE1, None, class_of("EagleLlama4ForCausalLM"), "Llama-4 layer"),
    (EAGLE1, None, class_of("EagleCohereForCausalLM"), "Cohere layer"),
    (EAGLE1, ones("input_norm1.weight", 2), {}, "MiniCPM layer"),
    (DFLASH2, put("d2t", torch.arange(9)), {}, "DFlash 2 draft .*with a vocabulary of its own"),
    (DFLASH2, None, {"dflash_config.sample_from_anchor": True}, "DFlash 2 draft .*predict the next token"),
    (DFLASH2, ones("markov_head.markov_w1.weight", 200, 4), {}, "DFlash 2 draft .*with a Markov head"),
    (DOMINO, ones("markov_head.markov_w1.weight", 160, 4), {}, "Domino draft with a Markov head"),
    (DFLASH, None, class_of("DFlashLagunaForCausalLM"), "Laguna"),
    (DFLASH, ones("aux_hidden_norms.0.weight", 2), {}, "Laguna"),
    (DFLASH, None, class_of("Gemma4DSparkModel"), "Gemma 4.*Qwen3 layers"),
    (DFLASH, None, class_of("PEagleDraftModel"), "P-EAGLE"),
    (DFLASH, None, {"dflash_config": {"use_swa": True}}, "MiMo"),
    (DFLASH, ones("layers.0.self_attn.attention_sink_bias", 4), {}, "MiMo"),
    (DFLASH, None, {"dflash_config": {"use_gemma_norm": True}}, "`dflash_config.use_gemma_norm`=True"),
    (DFLASH, None, {"is_neox_style": False}, "`is_neox_style`=False"),
    (DFLASH, ones("layers.0.mlp.up_proj.weight_scale_2", 1), {}, "quantised weights.*weight_scale_2"),
]

MISSING = [
    (EAGLE3, None, {"speculators_model_type": "peagle"}, "lacks 1 tensors of a P-EAGLE head: mask_hidden"),
    (EAGLE3, ones("mask_hidden", 2, 2), {}, "is a P-EAGLE head .*which token its masks are"),
    (EAGLE1, without("fc.weight"), {}, "no EAGLE head.*`fc.weight`.*name the method"),
    *[
        (EAGLE3, without(f"midlayer.{part}.weight"), {}, f"lacks 1 tensors of .*: layers.0.{part}")
        for part in ("input_layernorm", "post_attention_layernorm", "self_attn.v_proj", "mlp.up_proj")
    ],
    (EAGLE3, without("hidden_norm"), {}, "lacks 1 tensors of its norms: layers.0.hidden_norm.weight"),
    (EAGLE3, lambda t: {n: x for n, x in t.items() if n != "norm.weight"}, {}, "of its norms: norm.weight"),
    (EAGLE3, ones("fc_norm.1.weight", 64), {}, "lacks 2 tensors of its norms: fc_norm.0.weight, fc_norm.2.weight"),
    (EAGLE3, None, {"norm_before_fc": True}, "lacks 1 tensors of its norms: input_norm"),
    (EAGLE3, None, {"fc_norm": True}, "lacks 3 tensors of its norms: fc_norm.0"),
    (EAGLE3, ones("layers.2.mlp.up_proj.weight", 2, 2), {}, r"has the layers \[0, 2\], not all from 0 on"),
    (DFLASH, without("fc.weight"), {}, "lacks 1 tensors of a DFlash draft: fc.weight"),
    (DFLASH, without("layers.2.mlp.up_proj.weight"), {}, "tensors of the draft: layers.2.mlp.up_proj.weight"),
    (DFLASH, without("layers.1."), {}, r"has the layers \[0, 2\], not all from 0 on"),
    (DFLASH, None, class_of("DFlash2DraftModel"), "lacks 7 tensors of a DFlash 2 draft: candidate_selector"),
    (DFLASH, None, {"dflash_config.conv_kernel_size": 2}, "lacks 7 tensors of a DFlash 2 draft"),
    (DFLASH, ones(f"{CONVOLUTION}.base_kernel", 2, 2, 64), {}, "lacks 6 tensors of a DFlash 2 draft"),
    (DFLASH2, without("candidate_selector"), {}, "lacks 3 tensors of a DFlash 2 draft: candidate_selector"),
    (DFLASH2, without("_conv."), {}, "lacks 4 tensors of a DFlash 2 draft: layers.0.attention_conv"),
    (DFLASH2, without("layers.1.mlp_conv"), {}, "lacks 2 tensors of the draft: layers.1.mlp_conv"),
    (DSPARK, without("markov_w1"), {}, "lacks 1 tensors of its Markov head: markov_head.markov_w1.weight"),
    (DFLASH, None, {"dflash_config.projector_type": "domino"}, "lacks 4 tensors of a Domino draft: prefix_gru"),
    (DFLASH, None, class_of("LiLiCorrDraftModel"), "lacks 2 tensors of a LiLiCorr draft: lilicorr.rank_embedding"),
    (DFLASH, None, {"dflash_config.lilicorr_factor_dim": 4}, "lacks 2 tensors of a LiLiCorr draft"),
    (DFLASH, None, class_of("Qwen3XPressModel"), "lacks 1 tensors of an XPress draft: xpress_head.mix.L"),
    (DOMINO, without("embed_proj.2"), {}, "lacks 1 tensors of a Domino draft: embed_proj.2.weight"),
    (CONFIDENCE, without("markov_head."), {"markov_rank": 0}, "lacks 1 tensors of its confidence head: markov_head"),
    (CONFIDENCE, without("proj.bias"), {}, "lacks 1 tensors of the draft: confidence_head.proj.bias"),
    (MEDUSA, without("1.0.linear"), {}, r"lacks 2 tensors.*1\.0\.linear"),
    (MEDUSA, without("2.0.linear.bias"), {}, r"lacks 1 tensors.*2\.0\.linear\.bias"),
    (MEDUSA_VLLM, without("lm_heads.1.weight"), {}, r"lacks 1.*lm_heads\.1\.weight"),
    (MEDUSA_VLLM, without("blocks.2.layers.0.weight"), {}, r"lacks 1.*blocks\.2"),
    (MERGED, without("medusa_head.0.0.linear.weight"), {}, r"lacks 1 tensors.*medusa_head\.0\.0\.linear\.weight"),
    (MERGED, without("medusa_head"), {}, "holds no Medusa heads: model.safetensors has 21 tensors"),
    (MEDUSA_CUT, without("token_map"), {}, "lacks 1 tensors of a cut vocabulary"),
    (MLP, without("head.1.weight"), {}, "lacks 1 tensors of the MLP speculator: head.1.weight"),
    (MLP, without("ln.2.bias"), {}, "lacks 1 tensors of the MLP speculator: ln.2.bias"),
    (MLP, without("speculator."), {}, "lacks 1 tensors of the MLP speculator: emb.0.weight"),
    (GLM, without("layers.3."), {}, "no MTP layers.*quantised.*`spec_model`"),
    (GLM_3, without("layers.4."), {}, r"3 MTP layers.*\[0, 2\]"),
]

# Numbers and names in files that would make a network of any size.
FAR = 99_999_999
COUNTS = [
    (MEDUSA, ones(f"{FAR}.0.linear.weight", 64, 64), {}, "has 7 tensors.*100000000 Medusa heads with 1 layers need"),
    (MEDUSA, ones(f"0.{FAR}.linear.weight", 64, 64), {}, "3 Medusa heads with 100000000 layers need .* 300000000"),
    (MEDUSA_VLLM, ones(f"lm_heads.{FAR}.weight", 256, 64), {}, "100000000 Medusa heads with 1 layers need"),
    (MLP, None, {"n_predict": 2, "top_k_tokens_per_head": [2] * 2}, "has 3 stages.*n_predict=2.*tie_weights=false"),
    (MLP, None, {"n_predict": 999, "top_k_tokens_per_head": [1] * 999}, "has 3 stages.*n_predict=999"),
    (
        MLP,
        both(ones("speculator.emb.998.weight", 256, 32), ones("speculator.head.998.weight", 256, 32)),
        {"n_predict": 999, "top_k_tokens_per_head": [1] * 999},
        "has 17 tensors in model.safetensors, and 999 stages need at least 999",
    ),
    (MLP_TIED, None, {"tie_weights": False}, "has 1 stages in model.safetensors.*n_predict=3 with tie_weights=false"),
    (MLP, None, {"inner_dim": 33}, r"emb.0.weight of the shape \[256, 32\].* config.json asks for \[256, 33\]"),
    (MLP, None, {"inner_dim": 2**31 - 1}, r"emb.0.weight of the shape \[256, 32\].*\[256, 2147483647\]"),
    *[(MLP, None, {"inner_dim": 10**power}, "`inner_dim`=.*at most 2147483647") for power in (15, 19, 400)],
]

SHAPES = [
    (EAGLE3, columns("midlayer.mlp.down_proj.weight", -1), {}, r"has midlayer.mlp.down_proj.weight of the shape \["),
    (EAGLE3, rows(f"{ATTENTION}v_proj.weight", -8), {}, f"has {ATTENTION}v_proj.weight of the shape"),
    (EAGLE3, rows("fc.weight", -1), {}, "has fc.weight of the shape"),
    (EAGLE3, rows("norm.weight", -1), {}, "has norm.weight of the shape"),
    (EAGLE3, columns("lm_head.weight", -1), {}, "has lm_head.weight of the shape"),
    (EAGLE3, ones("fc.weight", 64), {}, "fc.weight must be a matrix"),
    (EAGLE3, ones(f"{ATTENTION}q_proj.weight", 64), {}, "q_proj.weight must be a matrix"),
    (EAGLE3, put("lm_head.weight", ONE), {}, "lm_head.weight must be a matrix"),
    (EAGLE3, None, {"num_attention_heads": 5}, "64 rows of q_proj and 64 of k_proj, .* not fit 5 query heads"),
    (EAGLE3, None, {"num_attention_heads": None}, "does not say `num_attention_heads`"),
    (DFLASH, rows("norm.weight", 3), {}, r"norm.weight of the shape \[3\]"),
    (DFLASH, rows("layers.1.self_attn.q_proj.weight", 32), {}, r"of the shape \[32, 64\].*ask for \[64, 64\]"),
    (DFLASH, rows("layers.0.self_attn.q_proj.weight", 20), {}, "20 rows of q_proj.*heads of 16"),
    (DFLASH2, ones(f"{CONVOLUTION}.base_kernel", 2, 48), {}, r"shape \[2, 48\] and 24 rows .*no groups of 48"),
    (DFLASH2, ones(f"{CONVOLUTION}.kernel_projection.weight", 20, 48), {}, "20 rows of `kernel_projection`"),
    (DFLASH2, ones("layers.1.mlp_conv.base_kernel", 2, 3, 48), {}, r"of the shape \[2, 3, 48\].*for \[2, 2, 48\]"),
    (DFLASH, ones("gate.weight", 2), {}, "1 tensors that no DFlash draft.*gate.weight"),
    (MEDUSA, ones("1.0.linear.weight", 64, 32), {}, r"1\.0\.linear\.weight of the shape \[64, 32\].*\[64, 64\]"),
    (MEDUSA, ones("0.0.linear.bias", 63), {}, r"\[63\].*\[64\]"),
    (MEDUSA, put("0.0.linear.weight", ONE), {}, r"0\.0\.linear\.weight must be a matrix, and has the shape \[\]"),
    (MEDUSA, put("1.0.linear.weight", ONE), {}, r"of the shape \[\].*\[64, 64\]"),
    (
        MEDUSA_VLLM,
        ones("lm_heads.2.weight", 250, 64),
        {},
        r"lm_heads\.2\.weight of the shape \[250, 64\].*\[256, 64\]",
    ),
    (MEDUSA_VLLM, ones("lm_heads.0.weight", 256, 32), {}, r"\[256, 32\].*\[256, 64\]"),
    (MEDUSA_VLLM, put("lm_heads.0.weight", ONE), {}, r"lm_heads\.0\.weight must be a matrix"),
    (MEDUSA_CUT, ones("medusa_heads.lm_heads.1.weight", 63, 64), {}, r"1\.weight of the shape \[63, 64\].*\[64, 64\]"),
    *[
        (MLP, rows(f"speculator.{name}", -1), {}, rf"{name} of the shape \[.*config.json asks for \[")
        for name in ("emb.0.weight", "proj.1.weight", "head.2.weight", "ln.0.bias")
    ],
    (MLP, put("speculator.emb.0.weight", ONE), {}, "emb.0.weight must be a matrix"),
    (MLP, put("speculator.head.1.weight", ONE), {}, r"head.1.weight of the shape \[\]"),
]

# Tensors that are no weights: (checkpoint, tensor).
NO_WEIGHTS = [
    (EAGLE3, "midlayer.mlp.up_proj.weight"),
    (DFLASH, "fc.weight"),
    (MEDUSA, "1.0.linear.bias"),
    (MEDUSA_VLLM, "lm_heads.1.weight"),
    (MLP, "speculator.proj.1.weight"),
    (GLM, "model.layers.3.eh_proj.weight"),
]
DTYPES = [
    (name, put(tensor, lambda x, dtype=dtype: x.to(dtype)), {}, f"is stored as {str(dtype)[6:]}, .*not quantised")
    for name, tensor in NO_WEIGHTS
    for dtype in (torch.int8, torch.bool, torch.complex64)
] + [
    (
        EAGLE3,
        ones("midlayer.mlp.up_proj.weight_scale_inv", 2, 2),
        {},
        "up_proj.weight in float32 with factors in .*not supported",
    ),
    (DFLASH, ones("norm.weight_scale", 2), {}, "norm.weight in float32 with factors in float32"),
]


def tokens(values):
    return put("medusa_heads.token_map", values)


VOCABULARIES = [
    (EAGLE3, without("d2t", "t2d"), {}, "drafts 160 of 256 tokens and does not say which"),
    (EAGLE3, put("d2t", lambda ids: ids[:-1]), {}, "table of 159 draft tokens.*160 rows"),
    (EAGLE3, put("d2t", lambda ids: ids + 256), {}, "selects no rising ids below 256"),
    (EAGLE3, put("d2t", -2 * torch.arange(160)), {}, "selects no rising ids below 256"),
    (EAGLE3, put("d2t", torch.zeros(4, 40, dtype=torch.long)), {}, "selects no rising ids"),
    (EAGLE3, both(without("d2t"), put("t2d", torch.arange(256) < 39)), {}, "table of 39 draft tokens.*160 rows"),
    (EAGLE3, without("lm_head"), {}, "table of 160 draft tokens.*no `lm_head.weight`"),
    (EAGLE3, ones("embed_tokens.weight", 500, 64), {}, "vocabulary of 500 tokens, and LlamaForCausalLM has 256"),
    (EAGLE3, without("t2d"), {"vocab_size": 1000}, "vocabulary of 1000 tokens, and LlamaForCausalLM has 256"),
    (DFLASH, None, {"vocab_size": 5000}, "vocabulary of 5000 tokens, and Qwen3ForCausalLM has 320"),
    (DFLASH, ones("embed_tokens.weight", 500, 64), {}, "vocabulary of 500 tokens"),
    (DFLASH, ones("lm_head.weight", 100, 64), {}, "drafts 100 of 320 tokens and does not say which"),
    (DFLASH, put("d2t", torch.arange(9)), {}, "table of 9 draft tokens.*no `lm_head.weight`"),
    (DFLASH, put("d2t", torch.arange(200)), {}, "selects no rising ids below 320"),
    (
        DFLASH,
        both(ones("lm_head.weight", 8, 64), put("d2t", torch.zeros(9, dtype=torch.long))),
        {},
        "table of 9 draft tokens.*8 rows",
    ),
    (MEDUSA_CUT, tokens(torch.arange(60)), {}, r"64 different tokens, got torch.int64 of the shape \[60\]"),
    (MEDUSA_CUT, tokens(torch.tensor(3)), {}, r"64 different tokens, got torch.int64 of the shape \[\]"),
    (MEDUSA_CUT, tokens(torch.arange(64.0)), {}, "64 different tokens, got torch.float32"),
    (MEDUSA_CUT, tokens(torch.arange(64) + 0j), {}, "64 different tokens, got torch.complex64"),
    (MEDUSA_CUT, tokens(torch.zeros(64, dtype=torch.long)), {}, "64 different tokens, got 1, from 0 on"),
    (MEDUSA_CUT, tokens(torch.arange(-4, 60)), {}, "64 different tokens, got 64, from -4 on"),
    (MEDUSA_CUT, tokens(torch.arange(200, 264)), {}, r"draft the token 263 \(`token_map`\), the target has 256"),
    (MEDUSA_CUT, None, {"vocab_size": 32000}, "vocabulary of 32000 tokens, and LlamaForCausalLM has 256"),
    (MLP, None, {"vocab_size": 300}, "vocabulary of 300 tokens, and|emb.0.weight of the shape"),
]

POSITIVE, COUNT, FLAG = "a positive number", "a positive integer", "true or false"
INNER = "dflash_config."
STAGES = "one positive integer for each of its n_predict=3 stages"


YARN = {"rope_type": "yarn", "factor": 4.0}


def longrope(long_factor):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "original_max_position_embeddings": 64}
    return {"rope_scaling": {**rope, "long_factor": long_factor}}


def wrong_setting(name, key, value, what, place=""):
    shown = repr(value).replace("[", r"\[").replace("]", r"\]")
    return (name, None, {place + key: value}, f"`{key}`={shown} in its config.json, which must be {what}")


SETTINGS = [
    (EAGLE3, without("t2d"), {"vocab_size": "64"}, f"`vocab_size`='64' in its config.json, which must be {COUNT}"),
    wrong_setting(EAGLE3, "rms_norm_eps", True, POSITIVE),
    wrong_setting(EAGLE3, "hidden_act", "swoosh", "the name of an activation function"),
    wrong_setting(EAGLE3, "num_attention_heads", 0, COUNT),
    wrong_setting(EAGLE3, "rope_scaling", [1], "an object"),
    wrong_setting(EAGLE3, "rope_theta", -1, POSITIVE),
    wrong_setting(EAGLE3, "layer_types", "full_attention", "a list of names"),
    wrong_setting(EAGLE3, "norm_output", "yes", FLAG),
    wrong_setting(EAGLE3, "logit_scale", float("nan"), POSITIVE),
    wrong_setting(EAGLE3, "layer_ids", ["2", "4"], "a list of integers", "eagle_config."),
    wrong_setting(EAGLE3, "target_hidden_size", 32.0, COUNT),
    (EAGLE3, None, {"rope_scaling": {"type": "linear", "factor": "four"}}, "`factor`='four'.* must be a number"),
    (DFLASH, None, {"rope_scaling": {**YARN, "attention_factor": "x"}}, "`attention_factor`='x'.* must be a number"),
    (DFLASH, None, {"rope_scaling": {**YARN, "beta_fast": [1]}}, "`beta_fast`=.* must be a number"),
    (EAGLE3, None, {"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral'"),
    (EAGLE3, None, longrope(["x"] * 8), "`long_factor`=.* must be 8 positive numbers"),
    (EAGLE3, None, longrope([1.0] * 7), "`long_factor`=.* must be 8 positive numbers"),
    (EAGLE3, None, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "without low_freq_factor and high_freq"),
    (EAGLE3, None, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (EAGLE3, None, {"speculators_model_type": "mystery"}, r"of the kind 'mystery' \(`speculators_model_type`\)"),
    wrong_setting(DFLASH, "block_size", "8", COUNT),
    wrong_setting(DFLASH, "block_size", True, COUNT),
    *[
        wrong_setting(DFLASH, key, size, f"{COUNT} of at most 256", place)
        for key, place in (("block_size", ""), ("block_size", INNER), ("num_denoising_steps", INNER))
        for size in (2**31, 10**12, 257)
    ],
    wrong_setting(DFLASH, "sample_from_anchor", "no", FLAG),
    wrong_setting(DFLASH, "rms_norm_eps", "small", POSITIVE),
    wrong_setting(DFLASH, "hidden_act", "wiggle", "the name of an activation function"),
    (DFLASH, None, {"block_size": 1}, "`block_size`=1, and needs at least 2"),
    (DFLASH, None, {"dflash_config.output_multiplier": 2}, "`output_multiplier`=2 .*for DFlash 2 drafts alone"),
    (DFLASH2, None, {"dflash_config.conv_group_size": 4}, "`conv_group_size`=4 .* its tensors have 8"),
    (DFLASH2, None, {"dflash_config.selector_rank": 8}, "`selector_rank`=8 .* its tensors have 16"),
    (DFLASH2, None, {"dflash_config.selector_top_k": None}, "does not say `selector_top_k`"),
    wrong_setting(DFLASH2, "selector_top_k", 257, f"{COUNT} of at most 256", INNER),
    wrong_setting(DFLASH2, "final_logit_softcapping", "30", "a number"),
    (DOMINO, None, {"dflash_config.gru_hidden_dim": 9}, "`gru_hidden_dim`=9 .* its tensors have 16"),
    (DOMINO, None, {"dflash_config.emb_dim": 9}, "`emb_dim`=9 .* its tensors have 12"),
    (DSPARK, None, {"markov_head_type": "gated"}, "`markov_head_type`='gated' .*Markov head of type 'vanilla'"),
    (CONFIDENCE, None, {"confidence_head_with_markov": False}, "`confidence_head_with_markov`=False .*40 values .*32"),
    (DFLASH, None, {"shift_label": True}, "`shift_label` without `sample_from_anchor`"),
    (DFLASH, None, {"dflash_config.projector_type": "mystery"}, r"of the kind 'mystery' \(`projector_type`\)"),
    (DFLASH, None, {"layer_types": ["full_attention"]}, "`layer_types`.*for each of its 3 layers"),
    (DFLASH, None, {"layer_types": ["linear_attention"] * 3}, "`layer_types`.*for each of its 3 layers"),
    (DFLASH, None, {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True}, "and no `sliding_window`"),
    (DFLASH, None, {"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' without factor"),
    (DFLASH, None, {"dflash_config.mask_token_id": None}, "which token its masks are.*`dflash_mask_token_id`"),
    wrong_setting(MEDUSA, "base_model_name_or_path", 5, "a name"),
    wrong_setting(MEDUSA, "logit_scale", "abc", POSITIVE),
    wrong_setting(MEDUSA, "logit_scale", 0, POSITIVE),
    (MEDUSA, None, {"logit_scale": 10**400}, "`logit_scale`=.*a positive number"),
    wrong_setting(MEDUSA_CUT, "truncated_vocab_size", "5", COUNT),
    wrong_setting(MEDUSA_CUT, "truncated_vocab_size", -5, COUNT),
    wrong_setting(MEDUSA_CUT, "vocab_size", [256], COUNT),
    wrong_setting("medusa/vllm_original_lm_head", "original_lm_head", "yes", FLAG),
    wrong_setting(MEDUSA, "medusa_accuracies", 3, "a list of numbers from 0 to 1 for each of the 3 heads"),
    wrong_setting(MEDUSA, "medusa_accuracies", [[1.5]] * 3, "a list of numbers from 0 to 1"),
    wrong_setting(MEDUSA, "medusa_accuracies", [[0.5]] * 2, "a list of numbers .* the 3 heads"),
    wrong_setting(MLP, "top_k_tokens_per_head", [5, 4], STAGES),
    wrong_setting(MLP, "top_k_tokens_per_head", [5, 4, 0], STAGES),
    wrong_setting(MLP, "top_k_tokens_per_head", 5, STAGES),
    (
        MLP,
        None,
        {"top_k_tokens_per_head": None, "n_predict": 2},
        "has no `top_k_tokens_per_head`.* n_predict=2 stages",
    ),
    wrong_setting(MLP, "n_predict", 0, f"{COUNT} of at most 1024"),
    wrong_setting(MLP, "n_predict", 1025, f"{COUNT} of at most 1024"),
    wrong_setting(MLP, "inner_dim", "16", "an integer of at least 0 and at most"),
    wrong_setting(MLP, "n_candidates", 1.5, COUNT),
    wrong_setting(MLP, "tie_weights", "yes", FLAG),
    wrong_setting("demo/mtp", "mtp_intermediate_size", "wide", COUNT),
]

# Made for another target than the fixture's.
TARGETS = [
    (EAGLE1, None, {"target_hidden_size": 48}, "hidden size 48, and LlamaForCausalLM has 64"),
    (EAGLE3, None, {"target_hidden_size": 48}, "hidden size 48, and LlamaForCausalLM has 64"),
    (EAGLE3, columns("fc.weight", 150), {}, r"reads 150 values.*of LlamaForCausalLM have 3 \* 64.*`aux_layer_ids`"),
    (EAGLE3, None, {"aux_layer_ids": [2, 30, 58]}, r"at the layers \[2, 30, 58\].*has 8.*trained for"),
    (EAGLE3, None, {"aux_layer_ids": [2, 5]}, r"192 values.*\[2, 5\] of .* have 2 \* 64.*`aux_layer_ids`"),
    (DFLASH, columns("fc.weight", 128), {}, r"reads 128 values .*3 layers \[2, 4, 5\] of .* have 3 \* 64"),
    (DFLASH, columns("fc.weight", 100), {}, "reads 100 values"),
    (DFLASH, None, reads(1, 3), "at the 2 layers"),
    (DFLASH, None, reads(1, 3, 6), r"\[2, 4, 7\], .* has 6 layers"),
    (DFLASH, None, reads(1, 3, -2), r"\[2, 4, -1\], .* has 6"),
    (DFLASH, None, {"num_target_layers": 8}, "made for a target with 8 decoder layers, and Qwen3ForCausalLM has 6"),
    (MLP, None, {"emb_dim": 48}, "hidden size 48, and LlamaForCausalLM has 64"),
    (GLM, put("model.layers.3.eh_proj.weight", torch.ones(64, 96)), {}, r"\[64, 96\], where the target asks for"),
    (
        DEEPSEEK,
        ones("model.layers.3.mlp.experts.0.up_proj.weight", 3, 3),
        {},
        "do not fit together, or are damaged",
    ),
]

TABLE = UNSUPPORTED + MISSING + COUNTS + SHAPES + DTYPES + VOCABULARIES + SETTINGS + TARGETS


@pytest.mark.parametrize(("name", "change", "config", "message"), TABLE)
def test_message(tmp_path, name, change, config, message):
    folder = copy_of(name, tmp_path / "head", config, change)
    with pytest.raises(CheckpointFormatError, match=message) as caught:
        load(method_of(name), folder, loaded_target(folder_of(name)))
    is_refused = (name, change, config, message) in UNSUPPORTED
    assert not is_refused or "not supported. Pass" in str(caught.value)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", [EAGLE3, DFLASH, MEDUSA, MLP, "demo/mtp"])
def test_target_of_another_width(name):
    with pytest.raises(CheckpointFormatError, match="hidden size [0-9]+, and .* has 32|have [23] [*] 32") as caught:
        load(method_of(name), HEADS[name], tiny_llama(num_hidden_layers=6))
    assert name != MEDUSA or "not for 'target'" in str(caught.value)


def test_heads_that_would_fill_the_memory(tmp_path):
    """A large first head and many tiny ones: 160 GB, if all were as large."""
    heads = {f"{head}.0.linear.weight": torch.ones(1, 1) for head in range(1, 20_000)}
    (tmp_path / "config.json").write_text("{}")
    save_file({"0.0.linear.weight": torch.zeros(1024, 1024), **heads}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(CheckpointFormatError, match=r"1\.0\.linear\.weight of the shape \[1, 1\]"):
        load_speculator(tiny_llama(hidden_size=1024), method="medusa", model=str(tmp_path))


def test_what_a_config_copied_from_another_kind_of_model_says(tmp_path):
    folder = copy_of(EAGLE3, tmp_path, {"projector_type": "mlp"})
    assert not detect_checkpoint(folder).problems


@pytest.mark.parametrize("size", [100, 241, 272, 1000])
@pytest.mark.parametrize("name", [MLP, "medusa/v01_heads_pt", MERGED])
def test_target_of_another_vocabulary(name, size):
    with pytest.raises(CheckpointFormatError, match=f"vocabulary of 256 tokens, and LlamaForCausalLM has {size}"):
        load(method_of(name), HEADS[name], tiny_llama(hidden_size=64, vocab_size=size))


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "dflash", "medusa", "mlp_speculator"])
def test_no_checkpoint(method):
    with pytest.raises(SpecConfigError, match=f"spec_method='{method}' needs .* as `spec_model`"):
        load(method, None, tiny_llama())


@pytest.mark.parametrize("name", [EAGLE3, DFLASH, MEDUSA, MLP, "demo/mtp"])
def test_files_and_settings(tmp_path, name):
    target = loaded_target(HEADS[name])
    if name in (MEDUSA, MLP):
        with pytest.raises(SpecConfigError, match="`quantization`.*floating-point"):
            load(method_of(name), HEADS[name], target, quantization="4bit")
    (tmp_path / "config.json").write_text((HEADS[name] / "config.json").read_text())
    with pytest.raises(CheckpointFormatError, match="none of the weight files"):
        load(method_of(name), tmp_path, target)


@pytest.mark.parametrize(("name", "method"), [(EAGLE1, "eagle3"), (EAGLE3, "eagle")])
def test_heads_of_the_other_method(name, method):
    match = f"is a head for spec_method='{method_of(name)}', got '{method}'"
    with pytest.raises(SpecConfigError, match=match):
        load(method, HEADS[name], loaded_target(HEADS[name]))


@pytest.mark.parametrize(
    ("name", "ids", "error", "message"),
    [
        (EAGLE1, (1, 2, 3), SpecConfigError, "`aux_layer_ids`.*final norm"),
        (EAGLE3, (1, 9, 2), CheckpointFormatError, r"at the layers \[1, 2, 9\].*has 8"),
        (EAGLE3, (1, 2), CheckpointFormatError, r"reads 192 values.*2 \* 64.*`aux_layer_ids`"),
    ],
)
def test_states_that_the_user_names(name, ids, error, message):
    with pytest.raises(error, match=message):
        load(method_of(name), HEADS[name], loaded_target(HEADS[name]), aux_layer_ids=ids)


@pytest.mark.parametrize("token", [320, 4000])
def test_mask_tokens_outside_of_the_embedding(token):
    with pytest.raises(SpecConfigError, match=f"is {token}, and the embedding has the tokens 0 to 319"):
        load("dflash", HEADS[DFLASH], loaded_target(HEADS[DFLASH]), dflash_mask_token_id=token)


def test_a_mask_token_of_the_checkpoint_outside_of_the_embedding(tmp_path):
    folder = copy_of(DFLASH, tmp_path / "head", {"dflash_config.mask_token_id": 2**31 - 1})
    with pytest.raises(SpecConfigError, match=f"mask token of '{folder}' is 2147483647"):
        load("dflash", folder, loaded_target(HEADS[DFLASH]))


@pytest.mark.parametrize("name", [EAGLE3, DFLASH, MLP])
def test_the_method_that_a_checkpoint_is_for_is_named(name):
    with pytest.raises(CheckpointFormatError, match=f"It is a checkpoint for spec_method='{method_of(name)}'"):
        load_speculator(loaded_target(HEADS[name]), method="medusa", model=str(HEADS[name]))


@pytest.mark.parametrize(("name", "change", "config", "message"), COUNTS)
def test_detection_makes_nothing_of_far_numbers_either(tmp_path, name, change, config, message):
    (problem,) = detect_checkpoint(copy_of(name, tmp_path / "head", config, change)).problems
    assert re.search(message, problem)
