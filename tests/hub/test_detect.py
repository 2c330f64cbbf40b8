"""A checkpoint is recognised by its config and the names of its tensors, in a folder and on the Hub."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from hf_specdec import CheckpointFormatError, SpeculativeConfig, demo
from hf_specdec.candidate_generators.mlp_speculator.network import load_mlp_speculator
from hf_specdec.checkpoints.files import RepoFiles
from hf_specdec.hub.detect import TargetNeeds, detect, detect_checkpoint, detect_method
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import FIXTURES
from tests.hub.test_formats import EXAMPLES


DEMO = Path(demo.target_path()).parent

# Format, length of a draft, and MTP layers beside a whole model.
CHECKPOINTS = {
    DEMO / "target": ("causal-lm", None, 0),
    DEMO / "draft": ("causal-lm", None, 0),
    DEMO / "eagle": ("eagle-safeailab", None, 0),
    DEMO / "eagle3": ("eagle3-safeailab", None, 0),
    DEMO / "dflash": ("dflash-zlab", 7, 0),
    DEMO / "medusa": ("medusa-v2", 4, 0),
    DEMO / "mlp_speculator": ("mlp-speculator", 4, 0),
    DEMO / "mtp": ("mtp", None, 0),
    FIXTURES / "dflash/default_layer_ids_b4": ("dflash-zlab", 3, 0),
    FIXTURES / "dflash/dflash2_full_b8": ("dflash2", 7, 0),
    FIXTURES / "dflash/dflash2_sliding_b5": ("dflash2", 4, 0),
    FIXTURES / "dflash/dspark_vanilla_b5": ("dspark-deepspec", 5, 0),
    FIXTURES / "dflash/jetspec_b8": ("dflash-zlab", 7, 0),
    FIXTURES / "dflash/domino_b6": ("domino", 5, 0),
    FIXTURES / "dflash/dspark_confidence_b5": ("dspark-deepspec", 5, 0),
    FIXTURES / "dflash/qwen3_random_b8": ("dflash-zlab", 7, 0),
    FIXTURES / "dflash/trained_b8": ("dflash-zlab", 7, 0),
    FIXTURES / "dflash/trained_for_refinement_b8": ("dflash-zlab", 7, 0),
    FIXTURES / "eagle/eagle1_llama": ("eagle-safeailab", None, 0),
    FIXTURES / "eagle/eagle3_llama": ("eagle3-safeailab", None, 0),
    FIXTURES / "eagle/eagle3_peagle": ("peagle-speculators", 5, 0),
    FIXTURES / "eagle/eagle3_qwen3": ("eagle3-angelslim", None, 0),
    FIXTURES / "eagle/eagle3_specforge": ("eagle3-specforge", None, 0),
    FIXTURES / "eagle/eagle3_speculators": ("eagle3-speculators", 3, 0),
    # Its config says two heads.
    FIXTURES / "medusa/v01_heads_pt": ("medusa-original", 5, 0),
    FIXTURES / "medusa/v01_two_layers_pt": ("medusa-original", 2, 0),
    FIXTURES / "medusa/v2_shared_lm_head_safetensors": ("medusa-v2", 3, 0),
    FIXTURES / "medusa/merged_v1": ("medusa-merged", 2, 0),
    FIXTURES / "medusa/vllm_converted": ("medusa-vllm", 3, 0),
    FIXTURES / "medusa/vllm_original_lm_head": ("medusa-vllm", 3, 0),
    FIXTURES / "medusa/vllm_truncated_vocab": ("medusa-vllm", 3, 0),
    FIXTURES / "mlp_speculator/tied_plain": ("mlp-speculator", 3, 0),
    FIXTURES / "mlp_speculator/tied_scaled": ("mlp-speculator", 3, 0),
    FIXTURES / "mlp_speculator/untied_plain": ("mlp-speculator", 3, 0),
    FIXTURES / "mlp_speculator/untied_scaled": ("mlp-speculator", 3, 0),
    FIXTURES / "mtp/deepseek_v3/target": ("causal-lm", None, 1),
    FIXTURES / "mtp/ernie4_5_moe/target": ("causal-lm", None, 1),
    FIXTURES / "mtp/glm4_moe/target": ("causal-lm", None, 1),
    FIXTURES / "mtp/glm4_moe_k3/target": ("causal-lm", None, 3),
    FIXTURES / "mtp/longcat_flash/target": ("causal-lm", None, 1),
    FIXTURES / "mtp/mellum/target": ("causal-lm", None, 1),
    FIXTURES / "mtp/mimo/target": ("causal-lm", None, 1),
    FIXTURES / "mtp/qwen3_5/target": ("causal-lm", None, 1),
    FIXTURES / "mtp/qwen3_next/target": ("causal-lm", None, 1),
}
METHOD_OF = {
    "causal-lm": "draft_model",
    "dflash2": "dflash",
    "domino": "dflash",
    "dspark-deepspec": "dflash",
    "mlp-speculator": "mlp_speculator",
    "peagle-speculators": "eagle3",
}
every_checkpoint = pytest.mark.parametrize(
    "path", CHECKPOINTS, ids=lambda path: "/".join(path.parts[-3 if path.name == "target" else -2 :])
)


def folder_with(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "draft_model"),
        ({"architectures": ["GPT2LMHeadModel"]}, "draft_model"),
        ({"architectures": ["MarianMTModel"], "is_encoder_decoder": True}, "draft_model"),
        ({"architectures": ["LlamaForCausalLM"], "medusa_num_heads": 4}, "medusa"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        # Without weights beside it, nothing tells a head from a model.
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": False}, "draft_model"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 1}, "dflash"),
        ({"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "draft_vocab_size": 9}, "dflash"),
        ({"speculators_model_type": "dspark", "architectures": ["Qwen3ForCausalLM"]}, "dflash"),
        ({"architectures": ["DominoDraftModel"]}, "dflash"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "dflash"),
        ({"model_type": "mtp", "num_nextn_predict_layers": 1}, "mtp"),
        ({"speculators_model_type": "mtp", "architectures": ["FastMTPSpeculator"]}, "mtp"),
    ],
)
def test_method_of_a_config(tmp_path, config, method):
    folder = folder_with(tmp_path, config)
    assert SpeculativeConfig.resolve(str(folder)).method == method


HEADS = {
    "eagle": ["fc.weight", "layers.0.self_attn.q_proj.weight"],
    "eagle3": ["fc.weight", "midlayer.hidden_norm.weight", "midlayer.self_attn.q_proj.weight"],
    "draft_model": ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"],
}


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
        {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 36, "bias": True},
    ],
)
def test_names_of_tensors_tell_heads_that_call_themselves_models(tmp_path, config, method, pickled):
    folder = folder_with(tmp_path, config)
    tensors = {name: torch.zeros(1) for name in HEADS[method]}
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    assert SpeculativeConfig.resolve(str(folder)).method == method


def test_weights_of_deep_models_are_not_looked_at(tmp_path):
    folder = folder_with(tmp_path, {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32})
    (folder / "pytorch_model.bin").mkdir()
    assert SpeculativeConfig.resolve(str(folder)).method == "draft_model"


def test_unknown_config_says_what_was_seen(tmp_path):
    with pytest.raises(CheckpointFormatError, match="BertModel.*Name it with `spec_method`"):
        SpeculativeConfig.resolve(str(folder_with(tmp_path, {"architectures": ["BertModel"]})))


@pytest.mark.parametrize("content", [None, "{not json"])
def test_unreadable_config(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointFormatError, match="no readable config.json"):
        SpeculativeConfig.resolve(str(tmp_path))


def test_spec_model_alone_is_a_draft_model(model, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    inputs = prompts(1)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    ours = model.generate(
        **inputs, do_sample=False, max_new_tokens=20, spec_model=str(tmp_path), return_dict_in_generate=True
    )
    assert torch.equal(ours.sequences, plain)
    assert ours.speculative.method == "draft_model"
    # The draft is the target: everything is accepted.
    assert ours.speculative.draft_acceptance_rate == 1


def method_of(name: str) -> str:
    return METHOD_OF.get(name) or name.partition("-")[0]


def test_every_checkpoint_of_the_tests_is_in_the_table():
    heads = {path.parent for path in (*FIXTURES.glob("*/*/config.json"), *FIXTURES.glob("mtp/*/target/config.json"))}
    assert set(CHECKPOINTS) == {path for path in heads if path.parts[-2] == "mtp" or path.name != "target"} | {
        *(path for path in CHECKPOINTS if path.parent == DEMO),
        *(path.parent for path in FIXTURES.glob("mtp/*/target/config.json")),
    }


@every_checkpoint
def test_a_checkpoint_in_a_folder_and_on_the_hub(path, hub):
    name, length, mtp_layers = CHECKPOINTS[path]
    hub.add("user/x", path)
    in_folder, on_hub = detect_checkpoint(path), detect_checkpoint("user/x")
    assert on_hub == in_folder
    assert (in_folder.format, in_folder.method) == (name, method_of(name))
    assert in_folder.num_draft_tokens == length
    assert in_folder.mtp_layers == mtp_layers
    assert in_folder.problems == ()
    assert in_folder.num_bytes > 0
    assert in_folder.num_tensors > 5
    assert detect_method(SpeculativeConfig(model=str(path))) == detect_method(SpeculativeConfig(model="user/x"))
    # Offline the same is known of what the cache has.
    files = RepoFiles("user/x")
    for file in (in_folder.weight_file, *files.parts(in_folder.weight_file), "config.json"):
        files.path(file)
    assert detect_checkpoint("user/x", local_files_only=True) == in_folder


def test_needs_of_a_target():
    def needs(path):
        return detect_checkpoint(path).target

    assert needs(DEMO / "dflash") == TargetNeeds(None, 256, 4096, 5, 5)
    assert needs(DEMO / "eagle3") == TargetNeeds(None, 256, 4096, None, 5)
    assert needs(DEMO / "medusa") == TargetNeeds("hf_specdec/demo/target", 256)
    assert needs(DEMO / "mlp_speculator") == TargetNeeds(None, 256, 4096)
    assert needs(DEMO / "draft") == TargetNeeds(None, None, 4096)
    assert needs(FIXTURES / "eagle/eagle3_speculators") == TargetNeeds("target", 64, 256, None, 4)


@pytest.mark.parametrize(
    ("card", "method", "name"),
    [
        ("base_model: user/target", "eagle3", "user/target"),
        ("base_model: [user/target, user/other]", "eagle3", "user/target"),
        ("base_model: user/parent\nspeculative: {target: user/target}", "eagle3", "user/target"),
        ("base_model: 5", "eagle3", None),
        # What a whole model was made from is not what it drafts for.
        ("base_model: user/parent", "draft_model", None),
    ],
)
@pytest.mark.parametrize("place", ["folder", "hub"])
def test_the_card_names_the_target(hub, tmp_path, card, method, name, place):
    tensors = {name: torch.zeros(1) for name in HEADS[method]}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n# A head\n")
    hub.add("user/head", tmp_path)
    found = detect_checkpoint(tmp_path if place == "folder" else "user/head")
    assert (found.method, found.target.name) == (method, name)


@pytest.fixture
def large_head(tmp_path):
    config, names = EXAMPLES["eagle3-safeailab"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(1000, 200) for name in names}, tmp_path / "model.safetensors")
    return tmp_path


class TestNothingLargeIsDownloaded:
    def test_of_shards(self, hub, large_head):
        tensors = {name: torch.zeros(1000, 200) for name in EXAMPLES["eagle3-safeailab"][1]}
        (large_head / "model.safetensors").unlink()
        for index, (name, tensor) in enumerate(tensors.items()):
            save_file({name: tensor}, large_head / f"model-{index}.safetensors")
        weight_map = {name: f"model-{index}.safetensors" for index, name in enumerate(tensors)}
        (large_head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        hub.add("user/head", large_head)
        found = detect_checkpoint("user/head")
        assert (found.format, found.num_tensors) == ("eagle3-safeailab", len(tensors))
        assert found.num_bytes > 5_000_000
        # The headers of two shards: inputs, and embedding.
        assert hub.sent() < 210_000


def test_the_method_of_a_repository_is_asked_for_once(hub, large_head):
    hub.add("user/head", large_head)
    config = SpeculativeConfig(model="user/head")
    assert detect_method(config) == "eagle3"
    hub.requests.clear()
    assert detect_method(config) == "eagle3"
    assert not hub.requests


def test_a_repository_of_the_same_name_elsewhere_is_another(hub, large_head, monkeypatch):
    hub.add("user/head", large_head)
    assert detect_method(SpeculativeConfig(model="user/head")) == "eagle3"
    monkeypatch.setattr(constants, "ENDPOINT", hub.storage_url)
    hub.requests.clear()
    assert detect_method(SpeculativeConfig(model="user/head")) == "eagle3"
    assert hub.requests


@pytest.mark.parametrize("name", ["lstm-speculator", "rnn-speculator"])
def test_speculators_of_other_kinds(tmp_path, name):
    config, tensors = EXAMPLES[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(1) for name in tensors}, tmp_path / "model.safetensors")
    found = detect_checkpoint(tmp_path)
    assert found.format == name
    assert found.problems[0].endswith("Pass an MLP speculator of the original format.")
    config = SpeculativeConfig.resolve(str(tmp_path))
    with pytest.raises(CheckpointFormatError, match="which is not supported. Pass an MLP speculator"):
        load_mlp_speculator(config, tiny_llama())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("eagle3-mla", "MLA"),
        ("eagle-llama4", "Llama-4 layer"),
        ("eagle-cohere", "Cohere layer"),
        ("eagle-minicpm", "MiniCPM layer"),
        ("eagle-mtp", "layer for multi-token prediction"),
        ("dflash-laguna", "Laguna"),
        ("dflash-mimo", "MiMo"),
        ("dspark-gemma4", "Gemma 4"),
    ],
)
def test_formats_that_are_known_and_not_supported_say_why(tmp_path, name, reason):
    config, tensors = EXAMPLES[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: torch.zeros(1) for name in tensors}, tmp_path / "model.safetensors")
    (problem,) = detect_checkpoint(tmp_path).problems
    assert reason in problem


def test_a_file_without_tensors(large_head):
    save_file({}, large_head / "model.safetensors")
    found = detect(RepoFiles(large_head))
    assert (found.num_tensors, found.num_bytes) == (0, 0)
    (large_head / "model.safetensors").unlink()
    found = detect(RepoFiles(large_head))
    assert (found.num_tensors, found.num_bytes, found.weight_file) == (None, None, None)


def test_damaged_weights_are_a_problem_and_no_error(large_head):
    content = (large_head / "model.safetensors").read_bytes()
    (large_head / "model.safetensors").write_bytes(content[:-10])
    found = detect(RepoFiles(large_head))
    assert found.method == "eagle3"
    assert "is damaged" in found.problems[0]
    (large_head / "model.safetensors").unlink()
    assert "no weights of a known name" in detect(RepoFiles(large_head)).problems[0]
