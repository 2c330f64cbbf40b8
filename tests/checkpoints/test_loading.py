"""Checkpoints of all formats: other ways to store them, their dtype and device, and saving them again."""

import pytest
import torch

from hf_specdec import SpeculativeConfig
from hf_specdec.checkpoints.weights import TensorTable
from hf_specdec.hub.detect import detect_method
from hf_specdec.target_facts import decoder_layers
from tests.helpers.heads import (
    HEADS,
    WITH_LAYERS,
    copy_of,
    folder_of,
    load,
    loaded_target,
    method_of,
    published,
    put,
    renamed,
    same_network,
    settings_of,
)
from tests.helpers.levels import in_full


# MiMo's target is of no type of transformers.
ALL = [*HEADS, *(name for name in WITH_LAYERS if name != "mtp/mimo")]
ONE_EACH = ("eagle/eagle3_llama", "dflash/dspark_vanilla_b5", "medusa/merged_v1", "mlp_speculator/tied_plain")
ONE_EACH += ("demo/mtp", "mtp/deepseek_v3")
# The published layouts have no place for these.
NOT_SAVED = ("medusa/vllm_truncated_vocab", "mtp/ernie4_5_moe", "mtp/longcat_flash", "mtp/glm4_moe_k3")
ONES = torch.ones(64)


def load_again(name, folder, **settings):
    return load(method_of(name), folder, loaded_target(folder_of(name)), **settings)


@pytest.mark.parametrize(
    "name",
    [*ONE_EACH, "mtp/longcat_flash", *in_full(*(name for name in ALL if name not in (*ONE_EACH, NOT_SAVED[2])))],
)
def test_detected_loaded_and_saved(tmp_path, name):
    """No weight is trained or is the target's, and what is saved is loaded again as the same network."""
    assert name in WITH_LAYERS or detect_method(SpeculativeConfig(model=str(HEADS[name]))) == method_of(name)
    network = published(name)
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert not network.training
    theirs = {id(parameter) for parameter in loaded_target(folder_of(name)).parameters()}
    assert not any(id(parameter) in theirs for parameter in network.parameters())
    if name in NOT_SAVED:
        with pytest.raises(ValueError, match="cannot be (written|saved)"):
            network.save(tmp_path)
        assert not list(tmp_path.iterdir())
        return
    network.save(tmp_path)
    assert detect_method(SpeculativeConfig(model=str(tmp_path))) == method_of(name)
    again = load_again(name, tmp_path)
    # The layout has biases and an lm_head for each head; that of MTP layers has other names for all.
    if not name.startswith(("mtp/", "medusa/vllm")):
        same_network(again, network)
    assert again.needs == network.needs


EAGLE1, EAGLE3, QWEN3 = "eagle/eagle1_llama", "eagle/eagle3_llama", "eagle/eagle3_qwen3"
SPECULATORS, DFLASH, MLP = "eagle/eagle3_speculators", "dflash/qwen3_random_b8", "mlp_speculator/untied_plain"
EAGLE1_CONFIG = settings_of(EAGLE1)


def class_of(name):
    return {"architectures": [name]}


def as_speculators(config):
    """The config of an EAGLE head as the `speculators` library writes it."""
    stated = {"speculators_model_type": "eagle", "architectures": ["EagleSpeculator"], "layernorms": False}
    return {**dict.fromkeys(config), **stated, "transformer_layer_config": config, "fusion_bias": False}


LATE = dict.fromkeys(("block_size", "rope_theta", "rope_scaling", "layer_types"))
LATE |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25}}
AT_THE_TOP = {f"dflash_config.{key}": None for key in ("conv_kernel_size", "conv_group_size", "selector_top_k")}
INNER = {**dict.fromkeys(EAGLE1_CONFIG), "model_type": "eagle", "model": EAGLE1_CONFIG, "eagle_fc_bias": False}


def with_weights(tensors):
    return {f"{name}.weight" if "codebook" in name else name: x for name, x in tensors.items()}


def with_parts_of_the_verifier(tensors):
    return {**tensors, "verifier_lm_head.weight": torch.randn(256, 64), "verifier_norm.weight": torch.randn(64)}


# Other writings of the same networks: change of tensors, of the config.
WRITINGS = {
    EAGLE1: [
        (renamed(fc__="fusion_fc.", layers__0__="transformer."), as_speculators(EAGLE1_CONFIG)),
        (renamed(fc="model.fc", layers="eagle.layers", embed="model.embed"), {}),
        (put("lm_head.weight", torch.ones(256, 64)), class_of("EagleLlamaForCausalLM")),
        (None, INNER),
    ],
    EAGLE3: [
        (renamed(midlayer="draft_model.midlayer", fc="eagle_module.fc", norm="model.norm"), {}),
        (renamed(midlayer__="layers.0."), class_of("LlamaForCausalLMEagle3")),
        (renamed(t2d=None), {}),
        (renamed(d2t=None), {}),
        (put("d2t", lambda ids: ids + torch.arange(160)), {}),
        (None, {"num_hidden_layers": 36, "head_dim": 128, "draft_vocab_size": 32000}),
        # Signals of an exit.
        (put("fc.weight", lambda x: torch.cat([x, torch.randn(3, 192)])), class_of("Eagle3LlamaForCausalLM")),
    ],
    QWEN3: [
        (put("d2t", torch.zeros(256, dtype=torch.long)), {}),
        (None, {"draft_vocab_size": None, "tie_word_embeddings": True}),
        (put("lm_head.weight", lambda weight: torch.cat([weight, torch.randn(8, 64)])), {}),
    ],
    "eagle/eagle3_specforge": [(None, {"eagle_config": None})],
    SPECULATORS: [
        (renamed(layers__0__="midlayer."), {}),
        (with_parts_of_the_verifier, {**class_of("Eagle3Speculator"), "norm_output": None, "fc_norm": None}),
    ],
    DFLASH: [
        (None, {**LATE, "dflash_config.block_size": 8}),
        (lambda t: {**t, "rotary_emb.inv_freq": ONES.clone(), "verifier_norm.weight": ONES}, {}),
    ],
    "dflash/dflash2_full_b8": [
        (with_weights, {**AT_THE_TOP, "conv_kernel_size": 2, "selector_top_k": 8}),
    ],
    MLP: [
        (put("speculator.emb.99999999999999999999.weight", ONES), {}),
        (None, {"emb_dim": None, "hidden_size": 64}),
    ],
    "mtp/ernie4_5_moe": [(put("model.mtp_linear_proj.0.weight", lambda weight: weight.t()), {})],
}


def test_other_writings_of_the_same_network(tmp_path):
    for name, writings in WRITINGS.items():
        for number, (change, config) in enumerate(writings):
            folder = copy_of(name, tmp_path / name / str(number), config, change)
            same_network(load_again(name, folder), published(name))


@pytest.mark.parametrize("name", [EAGLE3, "mtp/deepseek_v3", *in_full(*ONE_EACH[1:-1])])
def test_dtypes_and_random_numbers(name):
    before, target = torch.get_rng_state(), loaded_target(folder_of(name))
    for dtype, expected in (("bfloat16", torch.bfloat16), ("float16", torch.float16), (None, target.dtype)):
        network = load_again(name, folder_of(name), dtype=dtype, device="cpu")
        # But for what the target's layers keep in float32.
        kept = tuple(getattr(target, "_keep_in_fp32_modules_strict", None) or ())
        found = {tensor.dtype for key, tensor in network.named_parameters() if not kept or not key.endswith(kept)}
        assert found == {expected}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "name", ["mtp/glm4_moe", *in_full("medusa/merged_v1", "mtp/qwen3_next", "mtp/ernie4_5_moe", "mtp/longcat_flash")]
)
def test_of_a_whole_model_only_what_drafts_is_read(monkeypatch, name):
    names, read = [], TensorTable.read
    monkeypatch.setattr(TensorTable, "read", lambda self, name, *args: names.append(name) or read(self, name, *args))
    load_again(name, folder_of(name))
    number = len(decoder_layers(loaded_target(folder_of(name))))
    own = ("medusa_head.", *(f"model.layers.{number + j}." for j in range(3)))
    assert names
    assert all("mtp" in name or name.startswith(own) for name in names)
    assert not any("embed_tokens" in name or "shared_head.head" in name for name in names)
