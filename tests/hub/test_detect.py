"""The method of a checkpoint is read from its config, and a draft model needs no method to be named."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hf_specdec import CheckpointFormatError, SpeculativeConfig
from tests.models import prompts, tiny_llama


def folder_with(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "draft_model"),
        ({"architectures": ["GPT2LMHeadModel"]}, "draft_model"),
        ({"architectures": ["LlamaForCausalLM"], "medusa_num_heads": 4}, "medusa"),
        ({"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": 3}, "medusa"),
        ({"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]}, "mlp_speculator"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle"}, "eagle3"),
        ({"architectures": ["EagleSpeculator"], "speculators_model_type": "eagle"}, "eagle"),
        ({"model_type": "eagle", "model": {"architectures": ["LlamaForCausalLM"]}}, "eagle"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
        # Without weights beside it, nothing tells a head from a model.
        ({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": False}, "draft_model"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": 1}, "dflash"),
        ({"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "draft_vocab_size": 9}, "dflash"),
        ({"speculators_model_type": "dspark", "architectures": ["Qwen3ForCausalLM"]}, "dflash"),
        ({"architectures": ["Qwen3DSparkModel"], "draft_vocab_size": 9}, "dflash"),
        ({"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}, "dflash"),
        ({"architectures": ["DominoDraftModel"]}, "dflash"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "dflash"),
        ({"architectures": ["LagunaForCausalLM"], "dflash_config": {"mask_token_id": 3}}, "dflash"),
        ({"model_type": "mtp", "num_nextn_predict_layers": 1}, "mtp"),
        ({"speculators_model_type": "mtp", "architectures": ["FastMTPSpeculator"]}, "mtp"),
        ({"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"]}, "mtp"),
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
