"""Checkpoints that are wrong or not supported: an error that names the file and what is wrong, for all methods."""

import json

import pytest
import torch

from hf_specdec import CheckpointFormatError, SpecConfigError, load_speculator
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.hub.inspect import target_problems
from tests.helpers.heads import HEADS, copy_of, folder_of, load, loaded_target, method_of, put, target_of, without
from tests.helpers.levels import in_full
from tests.helpers.models import tiny_llama


SLIDING, PEAGLE = "sliding_attention", "eagle/eagle3_peagle"
EAGLE1, EAGLE3 = "eagle/eagle1_llama", "eagle/eagle3_llama"
DFLASH, DSPARK, CONFIDENCE = "dflash/qwen3_random_b8", "dflash/dspark_vanilla_b5", "dflash/dspark_confidence_b5"
DOMINO, DFLASH2 = "dflash/domino_b6", "dflash/dflash2_full_b8"
MEDUSA, MERGED = "medusa/v2_shared_lm_head_safetensors", "medusa/merged_v1"
MEDUSA_CUT, MAP = "medusa/vllm_truncated_vocab", "medusa_heads.token_map"
MLP, GLM, DEEPSEEK = "mlp_speculator/untied_plain", "mtp/glm4_moe", "mtp/deepseek_v3"
UP, FAR = "midlayer.mlp.up_proj.weight", 99_999_999


def ones(name, *shape):
    return put(name, torch.ones(shape))


def rows(name, count):
    return put(name, lambda tensor: tensor[:count])


def stored_as(name, dtype):
    return put(name, lambda tensor: tensor.to(dtype))


# (checkpoint, change of its tensors, of its config, what the message says)
FAR_NUMBERS = [
    # Numbers and names in files that would make a network of any size.
    (MEDUSA, ones(f"{FAR}.0.linear.weight", 64, 64), {}, r"has the heads \[0, 1, 2, 99999999\], not all from 0 on"),
    (
        MLP,
        None,
        {"n_predict": 999, "top_k_tokens_per_head": [1] * 999},
        "`n_predict`=999 in .* its tensors have 3",
    ),
    (MLP, None, {"inner_dim": 2**31 - 1}, r"emb.0.weight of the shape \[256, 32\].*\[256, 2147483647\]"),
]
EAGLE_TABLE = [
    (EAGLE1, without("fc.weight"), {}, "lacks 1 tensors of the head: fc.weight"),
    (EAGLE3, ones("midlayer.mlp.up_proj.qweight", 2, 2), {}, "quantised weights.*up_proj.qweight.*floating-point"),
    (EAGLE3, ones("midlayer.mlp.experts.0.up_proj.weight", 2, 2), {}, "with experts"),
    (EAGLE3, ones("mask_hidden", 2, 2), {}, "is a P-EAGLE head .*which token its masks are"),
    (EAGLE3, without("midlayer.self_attn.v_proj.weight"), {}, "lacks 1 tensors of .*: midlayer.self_attn.v_proj"),
    (
        EAGLE3,
        put("midlayer.mlp.down_proj.weight", lambda t: t[:, :-1]),
        {},
        "midlayer.mlp.down_proj.weight of the shape",
    ),
    (EAGLE3, stored_as(UP, torch.int8), {}, "is stored as int8, .*not quantised"),
    (EAGLE3, without("d2t", "t2d"), {}, "drafts 160 of 256 tokens and does not say which"),
    (EAGLE3, None, {"aux_layer_ids": [2, 5]}, r"192 values.*\[2, 5\] of .* have 2 \* 64.*`aux_layer_ids`"),
    (EAGLE3, None, {"rms_norm_eps": True}, "`rms_norm_eps`=True in its config.json, which must be a positive number"),
    (EAGLE3, None, {"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral'"),
    (EAGLE3, None, {"partial_rotary_factor": 0.5}, "rotary embedding with partial_rotary_factor=0.5"),
    (PEAGLE, None, {"mask_token_id": 160}, "has the mask token 160, and its embedding has 160 tokens"),
    (
        PEAGLE,
        None,
        {"transformer_layer_config.layer_types": [SLIDING], "transformer_layer_config.sliding_window": 4},
        "has `layer_types`=.* and [2-9] layers",
    ),
]
DFLASH_TABLE = [
    (DFLASH, without("layers.1."), {}, r"has the layers \[0, 2\], not all from 0 on"),
    (DFLASH, rows("layers.1.self_attn.q_proj.weight", 32), {}, r"of the shape \[32, 64\].*ask for \[64, 64\]"),
    (DFLASH, ones("lm_head.weight", 100, 64), {}, "drafts 100 of 320 tokens and does not say which"),
    (DFLASH, None, {"vocab_size": 5000}, "vocabulary of 5000 tokens, and .* has 320"),
    (DFLASH, None, {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True}, "say `sliding_window`"),
    (DFLASH, None, {"layer_types": [SLIDING], "sliding_window": 4}, "`layer_types`=.* for each of its 3 layers"),
    (DFLASH, None, {"dflash_config.conv_kernel_size": 2}, "lacks 12 tensors of its convolutions"),
    (DFLASH2, None, {"dflash_config.sample_from_anchor": True}, "DFlash 2 draft .*predict the next token"),
    (
        DFLASH2,
        ones("layers.0.attention_conv.base_kernel", 2, 48),
        {},
        "must be of 3 dimensions",
    ),
    (CONFIDENCE, without("markov_head."), {"markov_rank": 0}, "lacks 1 tensors of its confidence head: markov_hea"),
]
OTHERS = [
    (MEDUSA, without("2.0.linear.bias"), {}, r"lacks 1 tensors.*2\.0\.linear\.bias"),
    (MEDUSA, ones("1.0.linear.weight", 64, 32), {}, r"1\.0\.linear\.weight of the shape \[64, 32\].*\[64, 64\]"),
    (MERGED, without("medusa_head"), {}, "holds no Medusa heads: model.safetensors has 21 tensors"),
    (MLP, rows("speculator.head.2.weight", -1), {}, r"head.2.weight of the shape \[.*config.json asks for \["),
    (MLP, None, {"top_k_tokens_per_head": [5, 4]}, "one positive integer for each of its n_predict=3 stages"),
    (DEEPSEEK, ones("model.layers.3.mlp.experts.0.up_proj.weight", 3, 3), {}, "not fit together, or are damaged"),
]
TAKES_WEIGHTS = ("is stored as int8, .*not quantised", "not fit together, or are damaged")
TABLES = {"far numbers": FAR_NUMBERS, "eagle": EAGLE_TABLE, "dflash": DFLASH_TABLE, "others": OTHERS}


@pytest.mark.parametrize("table", TABLES)
def test_message(tmp_path, table):
    for number, (name, change, config, message) in enumerate(TABLES[table]):
        folder = copy_of(name, tmp_path / str(number), config, change)
        with pytest.raises(CheckpointFormatError, match=message) as caught:
            load(method_of(name), folder, loaded_target(folder_of(name)))
        assert str(folder) in str(caught.value)
        # Detection and inspection say so without loading anything, unless it takes weights to know.
        found = detect_checkpoint(folder)
        config = json.loads((target_of(folder_of(name)) / "config.json").read_text())
        problems = [*found.problems, *target_problems(found, config)]
        is_meant = found.method == method_of(name) and message not in TAKES_WEIGHTS
        assert problems or not is_meant


@pytest.mark.parametrize("name", [EAGLE3, MLP, *in_full(DFLASH, MEDUSA, "demo/mtp")])
def test_target_of_another_width(name):
    with pytest.raises(CheckpointFormatError, match="hidden size [0-9]+, and .* has 32|have [23] [*] 32"):
        load(method_of(name), HEADS[name], tiny_llama(num_hidden_layers=6))
    if name == MLP:
        with pytest.raises(CheckpointFormatError, match="vocabulary of 256 tokens, and LlamaForCausalLM has 100"):
            load(method_of(name), HEADS[name], tiny_llama(hidden_size=64, vocab_size=100))


def test_no_checkpoint_and_none_of_the_files(tmp_path):
    for method in ("eagle3", "draft_model", "eagle", "dflash", "medusa", "mlp_speculator"):
        with pytest.raises(SpecConfigError, match=f"spec_method='{method}' needs .* as `spec_model`"):
            load(method, None, tiny_llama())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointFormatError, match="none of the weight files"):
        load("medusa", tmp_path, tiny_llama())


def test_checkpoint_for_another_method():
    for name, method in ((EAGLE1, "eagle3"), (EAGLE3, "eagle"), (DFLASH, "medusa"), (MLP, "medusa")):
        with pytest.raises((SpecConfigError, CheckpointFormatError), match=f"for spec_method='{method_of(name)}'"):
            load_speculator(loaded_target(HEADS[name]), method=method, model=str(HEADS[name]))


def test_settings_of_the_user_that_do_not_fit(tmp_path):
    for name, settings, message in (
        (EAGLE1, {"aux_layer_ids": (1, 2, 3)}, "`aux_layer_ids`.*final norm"),
        (EAGLE3, {"aux_layer_ids": (1, 9, 2)}, r"at the layers \[1, 2, 9\].*has 8"),
        (EAGLE3, {"aux_layer_ids": (1, 2)}, r"reads 192 values.*2 \* 64.*`aux_layer_ids`"),
        (DFLASH, {"dflash_mask_token_id": 320}, "is 320, and the embedding has the tokens 0 to 319"),
        (MEDUSA, {"quantization": "4bit"}, "`quantization`.*for draft models"),
        (EAGLE3, {"quantization": "8bit"}, "`quantization`.*for draft models"),
    ):
        with pytest.raises((SpecConfigError, CheckpointFormatError), match=message):
            load(method_of(name), HEADS[name], loaded_target(HEADS[name]), **settings)
    # The mask token of the checkpoint.
    folder = copy_of(DFLASH, tmp_path / "head", {"dflash_config.mask_token_id": 2**31 - 1})
    with pytest.raises(SpecConfigError, match=f"mask token of '{folder}' is 2147483647"):
        load("dflash", folder, loaded_target(HEADS[DFLASH]))
