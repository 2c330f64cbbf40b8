"""The method of a checkpoint is read from its config, and a draft model needs no method to be named."""

import json

import pytest
import torch

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig
from hf_specdec.candidate_generators import available_methods
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
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
    ],
)
def test_method_of_a_config(tmp_path, config, method):
    folder = folder_with(tmp_path, config)
    if method in available_methods():
        assert SpeculativeConfig.resolve(str(folder)).method == method
    else:
        with pytest.raises(SpecConfigError, match=f"'{method}' is not available in this version"):
            SpeculativeConfig.resolve(str(folder))


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
