"""A checkpoint's format and method are told by its config and the names of its tensors, in a folder and on the Hub."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_specdec import CheckpointFormatError, SpeculativeConfig, demo
from hf_specdec.checkpoints.files import RepoFiles
from hf_specdec.checkpoints.format import TensorNames, format_of
from hf_specdec.checkpoints.weights import TensorTable
from hf_specdec.hub.detect import TargetNeeds, detect_checkpoint, detect_method, known_formats
from tests.helpers.drafters import ANYTHING
from tests.helpers.heads import HEADS, WITH_LAYERS
from tests.helpers.levels import full
from tests.helpers.methods import CHECKPOINTS as DEMO_DRAFTERS
from tests.helpers.paths import FIXTURES


DEMO = Path(demo.target_path()).parent

# By format the checkpoints and the lengths of their drafts.
LENGTHS = {
    "causal-lm": {"demo/target": None, "demo/draft": None},
    "mtp": {"demo/mtp": None},
    "eagle-safeailab": {"demo/eagle": None, "eagle/eagle1_llama": None},
    "eagle3-safeailab": {"demo/eagle3": None, "eagle/eagle3_llama": None},
    "eagle3-angelslim": {"eagle/eagle3_qwen3": None},
    "eagle3-specforge": {"eagle/eagle3_specforge": None},
    "eagle3-speculators": {"eagle/eagle3_speculators": 3},
    "peagle-speculators": {"eagle/eagle3_peagle": 5},
    "dflash-zlab": {
        **{"demo/dflash": 7, "dflash/default_layer_ids_b4": 3, "dflash/jetspec_b8": 7, "dflash/qwen3_random_b8": 7},
        **{"dflash/trained_b8": 7, "dflash/trained_for_refinement_b8": 7},
    },
    "dflash2": {"dflash/dflash2_full_b8": 7, "dflash/dflash2_sliding_b5": 4},
    "dspark-deepspec": {"dflash/dspark_vanilla_b5": 5, "dflash/dspark_confidence_b5": 5},
    "domino": {"dflash/domino_b6": 5},
    "medusa-v2": {"demo/medusa": 4, "medusa/v2_shared_lm_head_safetensors": 3},
    # The config of the first says two heads.
    "medusa-original": {"medusa/v01_heads_pt": 5, "medusa/v01_two_layers_pt": 2},
    "medusa-merged": {"medusa/merged_v1": 2},
    "medusa-vllm": {f"medusa/vllm_{name}": 3 for name in ("converted", "original_lm_head", "truncated_vocab")},
    "mlp-speculator": {"demo/mlp_speculator": 4, **dict.fromkeys((n for n in HEADS if n.startswith("mlp_")), 3)},
}
# Of each the format, the length of a draft, and MTP layers beside a whole model.
CHECKPOINTS = {
    DEMO / name[5:] if name.startswith("demo/") else FIXTURES / name: (format, length, 0)
    for format, lengths in LENGTHS.items()
    for name, length in lengths.items()
}
CHECKPOINTS |= {path: ("causal-lm", None, 3 if "k3" in name else 1) for name, path in WITH_LAYERS.items()}


def classes(name):
    return {"architectures": [name]}


FORMATS = known_formats()
LAYER = [f"self_attn.{part}_proj.weight" for part in "qkvo"] + ["post_attention_layernorm.weight"]
EAGLE = ["fc.weight", *(f"layers.0.{part}" for part in LAYER)]
EAGLE_3 = ["fc.weight", "norm.weight", *(f"midlayer.{part}" for part in [*LAYER, "hidden_norm.weight"])]
EAGLE_3_LAYERS = [name.replace("midlayer.", "layers.0.") for name in EAGLE_3]
DFLASH = ["hidden_norm.weight", "norm.weight", *EAGLE, "layers.0.self_attn.q_norm.weight"]
DFLASH_2 = [*DFLASH, "candidate_selector.successor_codebook", "layers.0.mlp_conv.base_kernel"]
MLA = "self_attn.kv_a_proj_with_mqa.weight"
MODEL = ["model.embed_tokens.weight", "model.norm.weight", *(f"model.layers.0.{part}" for part in LAYER)]


# Class or config and some tensors of each format of which there is no checkpoint here.
EXAMPLES = {
    "mtp-speculators": ({"speculators_model_type": "mtp"}, ["mtp_layers.0.input_proj.weight"]),
    "mtp-mimo": ("MiMoForCausalLM", ["model.mtp_layers.0.input_proj.weight"]),
    "mtp-ernie": ("Ernie4_5_MoeForCausalLM", ["model.mtp_linear_proj.0.weight", "model.mtp_block.0.x.weight"]),
    "mtp-longcat": ("LongcatFlashForCausalLM", ["model.mtp.layers.0.eh_proj.weight", "model.mtp.norm.weight"]),
    "mtp-deepseek": ("DeepseekV3ForCausalLM", ["model.layers.61.eh_proj.weight", "model.layers.61.enorm.weight"]),
    "gemma4-assistant": ({"model_type": "gemma4_assistant"}, MODEL),
    "lstm-speculator": ({"method": "sum_lstm"}, ["forget_emb.0.weight", "head.0.weight", "proj.0.weight"]),
    "rnn-speculator": ({"method": "sum_rnn"}, ["emb.0.weight", "head.0.weight", "proj.0.0.weight"]),
    "dspark-speculators": ({"speculators_model_type": "dspark"}, DFLASH),
    "dflash-speculators": ({"speculators_model_type": "dflash", "draft_vocab_size": 9}, DFLASH),
    "dspark-gemma4": ("Gemma4DSparkModel", DFLASH),
    "dspark-specforge": ({**classes("DSparkDraftModel"), "dflash_config": {"projector_type": "dspark"}}, DFLASH),
    "dflash2-speculators": ({**classes("DFlash2DraftModel"), "speculators_model_type": "dflash2"}, DFLASH_2),
    "xpress": ("Qwen3XPressModel", [*DFLASH, "xpress_head.mix.L"]),
    "lilicorr": ("LiLiCorrDraftModel", [*DFLASH, "lilicorr.out_head.weight"]),
    "dflash-laguna": ({**classes("LagunaForCausalLM"), "dflash_config": {"mask_token_id": 3}}, ["fc.weight"]),
    "dflash-mimo": ({**classes("DFlashDraftModel"), "dflash_config": {"use_swa": True}}, DFLASH),
    "dflash-muse": ({"model_type": "muse_glimmer_assistant"}, ["encoder.fc.weight", "encoder.output_norm_enc.weight"]),
    "peagle": ("PeagleLlamaForCausalLM", [*EAGLE_3, "mask_hidden"]),
    "eagle3-mla": ("Eagle3DeepseekV2ForCausalLM", ["midlayer.hidden_norm.weight", f"midlayer.{MLA}"]),
    "eagle3-modelopt": ({**classes("LlamaForCausalLMEagle3"), "draft_vocab_size": 9}, EAGLE_3_LAYERS),
    "eagle-speculators": ({"speculators_model_type": "eagle"}, ["fusion_fc.weight", f"transformer.{LAYER[0]}"]),
    "eagle-llama4": ("EagleLlama4ForCausalLM", ["layers.0.input_layernorm.weight"]),
    "eagle-cohere": ("EagleCohereForCausalLM", ["fc.bias", "layers.0.input_layernorm.weight"]),
    "eagle-minicpm": ("EagleMiniCPMForCausalLM", [f"eagle_layers.0.{LAYER[0]}"]),
    "eagle-mistral": ("EagleMistralForCausalLM", ["eagle_linear.weight", f"layers.0.{LAYER[0]}", "norm.weight"]),
    "eagle-mtp": ("EagleDeepSeekMTPModel", ["enorm.weight", "hnorm.weight", "eh_proj.weight"]),
    "eagle-sglang": ("LlamaForCausalLMEagle", EAGLE),
    "eagle-vllm": ({"model_type": "eagle", "model": {"num_hidden_layers": 1}}, [f"model.{name}" for name in EAGLE]),
    "pard2": ({**classes("LlamaForCausalLM"), "pard_token": 128256, "spd_type": "pard2"}, MODEL),
    "pard": ({**classes("LlamaForCausalLM"), "pard_token": 128256}, MODEL),
    "encoder-decoder": ({**classes("WhisperForConditionalGeneration"), "is_encoder_decoder": True}, MODEL),
}
EXAMPLES = {
    name: (classes(config) if isinstance(config, str) else config, tensors)
    for name, (config, tensors) in EXAMPLES.items()
}
# Others have a checkpoint that tests draft with.
for path in map(Path, (*DEMO_DRAFTERS.values(), *CHECKPOINTS)):
    found = detect_checkpoint(path)
    files = RepoFiles(path)
    EXAMPLES.setdefault(found.format, (files.config, list(TensorTable(files, found.weight_file))))


def write(folder, config, tensors=(), shape=(1,)):
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file({name: torch.zeros(shape) for name in tensors}, folder / "model.safetensors")
    return folder


@pytest.fixture
def large_head(tmp_path):
    return write(tmp_path, *EXAMPLES["eagle3-safeailab"], shape=(1000, 200))


def test_every_format_is_recognised():
    assert sorted(EXAMPLES) == sorted(row.name for row in FORMATS)
    assert [format_of(FORMATS, "x", *example).name for example in EXAMPLES.values()] == list(EXAMPLES)
    # Without names of tensors heads whose configs are those of models cannot be told from models.
    found = {row.name: format_of(FORMATS, "x", EXAMPLES[row.name][0], None).method for row in FORMATS}
    assert found == {row.name: row.method if row.config else "draft_model" for row in FORMATS}


def test_config_of_one_method_and_tensors_of_another_are_ambiguous():
    marked = {row.method: row for row in FORMATS if row.config and not row.is_hint}
    shown = {row.method: row for row in FORMATS if row.is_shown(TensorNames(EXAMPLES[row.name][1]))}
    pairs = [(one, other) for one, other in product(marked.values(), shown.values()) if one.method != other.method]
    assert len(pairs) > 20
    for one, other in pairs:
        with pytest.raises(CheckpointFormatError, match="ambiguous.*spec_method") as error:
            format_of(FORMATS, "x", EXAMPLES[one.name][0], EXAMPLES[other.name][1])
        assert f"(method '{one.method}')" in str(error.value)
        assert f"(method '{other.method}')" in str(error.value)


keys = ["architectures", "model_type", "speculators_model_type", "dflash_config", "eagle_config", "text_config"]


@full
@given(
    st.dictionaries(st.sampled_from(keys) | st.text(max_size=8), ANYTHING, max_size=6),
    st.none() | st.lists(st.text(max_size=12) | st.sampled_from(EAGLE_3 + DFLASH), max_size=6),
)
def test_whatever_a_config_holds_is_a_format_or_an_error_of_this_package(config, tensors):
    try:
        assert format_of(FORMATS, "x", config, tensors) in FORMATS
    except CheckpointFormatError:
        pass


def test_methods_by_config_and_names_of_tensors(tmp_path):
    qwen = {**classes("Qwen2ForCausalLM"), "num_hidden_layers": 36, "bias": True}
    for method, config, *names in (
        ("draft_model", classes("GPT2LMHeadModel")),
        ("draft_model", {**classes("MarianMTModel"), "is_encoder_decoder": True}),
        ("eagle", classes("EagleLlamaForCausalLM")),
        ("dflash", {**classes("Qwen3ForCausalLM"), "speculators_model_type": "dspark"}),
        ("dflash", classes("DFlashLagunaForCausalLM")),
        ("mtp", {"model_type": "mtp", "num_nextn_predict_layers": 1}),
        # Names of tensors tell heads that call themselves models.
        ("eagle3", qwen, *EAGLE_3),
        ("eagle", qwen, *EAGLE),
        ("draft_model", qwen, *MODEL),
    ):
        assert SpeculativeConfig.resolve(str(write(tmp_path, config, names))).method == method
    for content, message in (('{"architectures": ["BertModel"]}', "BertModel"), ("{not json", "no readable config")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointFormatError, match=message):
            SpeculativeConfig.resolve(str(tmp_path))


def test_repository_of_the_same_name_elsewhere_is_another(hub, large_head, monkeypatch):
    hub.add("user/head", large_head)
    for url, is_asked in ((hub.url, True), (hub.url, False), (hub.storage_url, True)):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        hub.requests.clear()
        assert detect_method(SpeculativeConfig(model="user/head")) == "eagle3"
        assert bool(hub.requests) == is_asked


def test_every_checkpoint_of_the_fixtures():
    folders = {path.parent for path in FIXTURES.glob("*/*/config.json") if path.parent.name != "target"}
    assert folders <= CHECKPOINTS.keys()
    detected = {path: detect_checkpoint(path) for path in CHECKPOINTS}
    assert {path: (d.format, d.num_draft_tokens, d.mtp_layers) for path, d in detected.items()} == CHECKPOINTS
    method_of = {row.name: row.method for row in FORMATS}
    for found in detected.values():
        assert (found.method, found.problems) == (method_of[found.format], ())
        assert min(found.num_bytes, found.num_tensors) > 5
    for name, needs in {
        "dflash": TargetNeeds(None, 256, 4096, 5, 5),
        "eagle3": TargetNeeds(None, 256, 4096, None, 5),
        "medusa": TargetNeeds("hf_specdec/demo/target", 256),
        "mlp_speculator": TargetNeeds(None, 256, 4096),
        "draft": TargetNeeds(None, None, 4096),
        FIXTURES / "eagle/eagle3_speculators": TargetNeeds("target", 64, 256, None, 4),
    }.items():
        assert detected[DEMO / name].target == needs


def test_card_names_the_target(hub, tmp_path):
    for card, names, target in (
        ("base_model: user/target", EAGLE_3, "user/target"),
        ("base_model: [user/target, user/other]", EAGLE_3, "user/target"),
        ("base_model: user/parent\nspeculative: {target: user/target}", EAGLE_3, "user/target"),
        ("base_model: 5", EAGLE_3, None),
        # What a whole model was made from is not what it drafts for.
        ("base_model: user/parent", MODEL, None),
    ):
        write(tmp_path, classes("LlamaForCausalLM"), names)
        (tmp_path / "README.md").write_text(f"---\n{card}\n---\n# A head\n")
        hub.add("user/head", tmp_path)
        for place in (tmp_path, "user/head"):
            assert detect_checkpoint(place).target.name == target


def test_formats_that_are_not_supported_say_why(tmp_path):
    reasons = {"eagle3-mla": "MLA", "eagle-minicpm": "MiniCPM layer", "eagle-mtp": "layer for multi-token prediction"}
    reasons |= {"dflash-mimo": "MiMo", "dspark-gemma4": "Gemma 4", "rnn-speculator": "original format"}
    for name, reason in reasons.items():
        assert reason in detect_checkpoint(write(tmp_path, *EXAMPLES[name])).problems[0]


def test_damaged_and_missing_weights_are_problems_and_no_errors(large_head):
    path = large_head / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    found = detect_checkpoint(large_head)
    assert (found.method, "is damaged" in found.problems[0]) == ("eagle3", True)
    path.unlink()
    found = detect_checkpoint(large_head)
    assert (found.num_tensors, found.num_bytes, found.weight_file) == (None, None, None)
    assert "no weights of a known name" in found.problems[0]
