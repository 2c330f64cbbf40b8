"""Every row of the table recognises its format, and no other row takes it for one of another method."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hf_specdec import CheckpointFormatError
from hf_specdec.checkpoints.format import TensorNames, format_of
from hf_specdec.hub.detect import detect_checkpoint, known_formats
from hf_specdec.method import methods
from tests.helpers.methods import CHECKPOINTS


FORMATS = known_formats()
LAYER = [f"self_attn.{part}_proj.weight" for part in "qkvo"] + ["post_attention_layernorm.weight"]
EAGLE = ["fc.weight", *(f"layers.0.{part}" for part in LAYER)]
EAGLE_3 = ["fc.weight", "norm.weight", *(f"midlayer.{part}" for part in [*LAYER, "hidden_norm.weight"])]
EAGLE_3_LAYERS = [name.replace("midlayer.", "layers.0.") for name in EAGLE_3]
DFLASH = ["hidden_norm.weight", "norm.weight", *EAGLE, "layers.0.self_attn.q_norm.weight"]
DFLASH_2 = [*DFLASH, "candidate_selector.successor_codebook", "layers.0.mlp_conv.base_kernel"]
MODEL = ["model.embed_tokens.weight", "model.norm.weight", *(f"model.layers.0.{part}" for part in LAYER)]


def classes(name, **more):
    return {"architectures": [name], **more}


# Contents of a checkpoint of each format: config, and some of its tensors.
EXAMPLES = {
    "mtp": ({"model_type": "mtp"}, ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"]),
    "mtp-speculators": ({"speculators_model_type": "mtp"}, ["mtp_layers.0.input_proj.weight"]),
    "mtp-mimo": (classes("MiMoForCausalLM"), ["model.mtp_layers.0.input_proj.weight"]),
    "mtp-ernie": (
        classes("Ernie4_5_MoeForCausalLM"),
        ["model.mtp_linear_proj.0.weight", "model.mtp_block.0.self_attn.q_proj.weight"],
    ),
    "mtp-longcat": (
        classes("LongcatFlashForCausalLM"),
        ["model.mtp.layers.0.eh_proj.weight", "model.mtp.norm.weight"],
    ),
    "mtp-deepseek": (
        classes("DeepseekV3ForCausalLM"),
        ["model.layers.61.eh_proj.weight", "model.layers.61.enorm.weight"],
    ),
    "gemma4-assistant": (classes("Gemma4AssistantForCausalLM", model_type="gemma4_assistant"), MODEL),
    "medusa-vllm": (classes("MedusaModel", model_type="medusa"), ["blocks.0.layers.0.weight", "lm_heads.0.weight"]),
    "medusa-original": ({"medusa_num_heads": 2}, ["0.0.linear.weight", "0.0.linear.bias", "0.1.weight"]),
    "medusa-v2": ({"medusa_num_heads": 2, "version": "2"}, ["0.0.linear.weight", "0.0.linear.bias"]),
    "medusa-merged": (
        classes("LlamaForCausalLM", medusa_num_heads=2),
        [*MODEL, "medusa_head.0.0.linear.weight", "medusa_head.0.1.weight"],
    ),
    "lstm-speculator": ({"method": "sum_lstm"}, ["forget_emb.0.weight", "head.0.weight", "proj.0.weight"]),
    "rnn-speculator": ({"method": "sum_rnn"}, ["emb.0.weight", "head.0.weight", "proj.0.0.weight"]),
    "mlp-speculator": (
        {"model_type": "mlp_speculator"},
        [f"speculator.{part}.0.weight" for part in ("emb", "proj", "head", "ln")],
    ),
    "dspark-speculators": ({"speculators_model_type": "dspark"}, DFLASH),
    "dflash-speculators": (classes("DFlashDraftModel", speculators_model_type="dflash", draft_vocab_size=9), DFLASH),
    "dspark-gemma4": (classes("Gemma4DSparkModel"), DFLASH),
    "dspark-deepspec": (classes("Qwen3DSparkModel", draft_vocab_size=9), DFLASH),
    "dspark-specforge": (classes("DSparkDraftModel", dflash_config={"projector_type": "dspark"}), DFLASH),
    "dflash2": (classes("DFlash2DraftModel", dflash_config={"conv_kernel_size": 2}), DFLASH_2),
    "dflash2-speculators": (classes("DFlash2DraftModel", speculators_model_type="dflash2"), DFLASH_2),
    "domino": (
        classes("DFlashDraftModel", dflash_config={"projector_type": "domino"}),
        [*DFLASH, "prefix_gru.weight_ih_l0", "embed_proj.0.weight"],
    ),
    "xpress": (classes("Qwen3XPressModel"), [*DFLASH, "xpress_head.mix.L"]),
    "lilicorr": (
        classes("LiLiCorrDraftModel", dflash_config={"lilicorr_num_layers": 4}),
        [*DFLASH, "lilicorr.out_head.weight"],
    ),
    "dflash-laguna": (classes("LagunaForCausalLM", dflash_config={"mask_token_id": 3}), ["fc.weight", "norm.weight"]),
    "dflash-mimo": (classes("DFlashDraftModel", dflash_config={"use_swa": True}), DFLASH),
    "dflash-muse": (
        classes("MuseGlimmerAssistantModel", model_type="muse_glimmer_assistant"),
        ["encoder.fc.weight", "encoder.output_norm_enc.weight", "norm.weight"],
    ),
    "dflash-zlab": (classes("DFlashDraftModel", dflash_config={"mask_token_id": 3}, draft_vocab_size=9), DFLASH),
    "peagle-speculators": (
        classes("PEagleDraftModel", speculators_model_type="peagle"),
        [*EAGLE_3_LAYERS, "mask_hidden"],
    ),
    "peagle": (classes("PeagleLlamaForCausalLM"), [*EAGLE_3, "mask_hidden"]),
    "eagle3-speculators": (classes("Eagle3DraftModel", speculators_model_type="eagle3"), EAGLE_3_LAYERS),
    "eagle3-mla": (
        classes("Eagle3DeepseekV2ForCausalLM"),
        ["midlayer.hidden_norm.weight", "midlayer.self_attn.kv_a_proj_with_mqa.weight"],
    ),
    "eagle3-specforge": (classes("LlamaForCausalLMEagle3", draft_vocab_size=9), EAGLE_3),
    "eagle3-modelopt": (classes("LlamaForCausalLMEagle3", draft_vocab_size=9), EAGLE_3_LAYERS),
    "eagle3-angelslim": (classes("Eagle3LlamaForCausalLM", draft_vocab_size=9), EAGLE_3),
    "eagle3-safeailab": (classes("LlamaForCausalLM", draft_vocab_size=9), EAGLE_3),
    "eagle-speculators": (
        classes("EagleSpeculator", speculators_model_type="eagle"),
        ["fusion_fc.weight", "transformer.self_attn.q_proj.weight"],
    ),
    "eagle-llama4": (classes("EagleLlama4ForCausalLM"), ["layers.0.input_layernorm.weight"]),
    "eagle-cohere": (classes("EagleCohereForCausalLM"), ["fc.bias", "layers.0.input_layernorm.weight"]),
    "eagle-minicpm": (classes("EagleMiniCPMForCausalLM"), ["eagle_layers.0.self_attn.q_proj.weight"]),
    "eagle-mistral": (
        classes("EagleMistralForCausalLM"),
        ["eagle_linear.weight", "layers.0.self_attn.q_proj.weight", "norm.weight"],
    ),
    "eagle-mtp": (classes("EagleDeepSeekMTPModel"), ["enorm.weight", "hnorm.weight", "eh_proj.weight"]),
    "eagle-sglang": (classes("LlamaForCausalLMEagle"), EAGLE),
    "eagle-vllm": ({"model_type": "eagle", "model": {"num_hidden_layers": 1}}, [f"model.{name}" for name in EAGLE]),
    "eagle-safeailab": (classes("LlamaForCausalLM"), EAGLE),
    "pard2": (classes("LlamaForCausalLM", pard_token=128256, spd_type="pard2"), MODEL),
    "pard": (classes("LlamaForCausalLM", pard_token=128256), MODEL),
    "causal-lm": (classes("LlamaForCausalLM"), MODEL),
    "encoder-decoder": (classes("WhisperForConditionalGeneration", is_encoder_decoder=True), MODEL),
}
# Other methods have the checkpoint that tests draft with.
for path in CHECKPOINTS.values():
    found = detect_checkpoint(path)
    if found.format not in EXAMPLES:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        EXAMPLES[found.format] = (config, list(load_file(Path(path) / found.weight_file)))


def test_every_format_has_an_example():
    assert sorted(EXAMPLES) == sorted(row.name for row in FORMATS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_format_is_recognised(name):
    config, tensors = EXAMPLES[name]
    assert format_of(FORMATS, "x", config, tensors).name == name


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_rows_are_complete(row):
    assert row.method in methods()
    assert row.producer
    assert row.config or row.tensors
    for mark in row.config:
        for part in mark.split("&"):
            key, equals, pattern = part.partition("=")
            assert key
            assert equals
            re.compile(pattern)


@pytest.mark.parametrize("name", EXAMPLES)
def test_without_names_of_tensors_the_config_gives_the_method_or_none(name):
    """Heads whose configs are those of models cannot be told from models."""
    config, _ = EXAMPLES[name]
    row = next(row for row in FORMATS if row.name == name)
    wanted = {row.method} if row.config else {"draft_model"}
    assert {format_of(FORMATS, "x", config, None).method} == wanted


@given(st.permutations(FORMATS), st.data())
def test_two_methods_at_once_are_ambiguous(rows, data):
    """A config of one method beside the tensors of another is no checkpoint of either."""
    marked, shown = data.draw(st.sampled_from([(a, b) for a in rows for b in rows if _clash(a, b)][:50]))
    with pytest.raises(CheckpointFormatError, match="ambiguous.*spec_method") as error:
        format_of(FORMATS, "x", EXAMPLES[marked.name][0], EXAMPLES[shown.name][1])
    assert f"(method '{marked.method}')" in str(error.value)
    assert f"(method '{shown.method}')" in str(error.value)


def _clash(marked, shown) -> bool:
    surely = marked.config and not marked.is_hint and shown.is_shown(_names(shown))
    return bool(surely) and marked.method != shown.method


def _names(row):
    return TensorNames(EXAMPLES[row.name][1])


def test_an_unknown_checkpoint_says_what_was_seen_and_what_is_near():
    with pytest.raises(CheckpointFormatError) as error:
        format_of(FORMATS, "user/x", classes("MedusaModelForMe", model_type="medusas"), ["fc.weight", "z.weight"])
    message = str(error.value)
    for words in ("'user/x'", "MedusaModelForMe", "medusas", "fc.weight, z.weight", "medusa-vllm (method 'medusa')"):
        assert words in message
    assert message.endswith("Name it with `spec_method`.")


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": "x"}, {"architectures": [3]}])
def test_a_config_that_says_nothing(config):
    with pytest.raises(CheckpointFormatError, match="of no known format"):
        format_of(FORMATS, "x", config, None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = ["architectures", "model_type", "speculators_model_type", "dflash_config", "eagle_config", "text_config"]


@given(
    st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), JSON, max_size=6),
    st.none() | st.lists(st.text(max_size=12) | st.sampled_from(EAGLE_3 + DFLASH), max_size=6),
)
def test_whatever_a_config_holds_there_is_a_format_or_an_error_of_this_package(config, tensors):
    try:
        found = format_of(FORMATS, "x", config, tensors)
    except CheckpointFormatError:
        return
    assert found in FORMATS
