"""Detection and loading read a checkpoint alike: whatever is changed in it, both take it or both refuse it."""

import pytest
import torch

from hf_specdec import CheckpointFormatError, SpecDecError, SpeculativeConfig
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.hub.inspect import inspect_checkpoint
from hf_specdec.method import resolve_candidate_generator
from tests.helpers.heads import HEADS, copy_of, loaded_target, put
from tests.helpers.levels import full, in_full


DFLASH, DSPARK = "dflash/qwen3_random_b8", "dflash/dspark_vanilla_b5"
EAGLE1, EAGLE3, SPECULATORS = "eagle/eagle1_llama", "eagle/eagle3_llama", "eagle/eagle3_speculators"
MEDUSA = "medusa/vllm_converted"
MLP = "mlp_speculator/untied_plain"

# Settings that say what a block drafter is: the drafts it then makes, or `None` where it is refused.
BLOCKS = [
    (DFLASH, "sample_from_anchor", {True: 8, False: 7}),
    (DSPARK, "sample_from_anchor", {True: 5, False: 4}),
    (DFLASH, "dflash_config.sample_from_anchor", {True: 8}),
    (DFLASH, "block_size", {3: 2, 1: None, 0: None, -1: None, 2**31: None, 10**18: None, "8": None}),
    (DSPARK, "dflash_config.block_size", {3: 3, 257: None}),
    (DFLASH, "dflash_config.projector_type", {"dspark": 8, "mystery": None}),
    (DSPARK, "dflash_config.projector_type", {"dflash": 5, "domino": None}),
    (DSPARK, "speculators_model_type", {"mystery": None}),
    (DFLASH, "architectures", {("Qwen3DSparkModel",): 8}),
    (DSPARK, "architectures", {("LlamaForCausalLM",): 4}),
    (DFLASH, "shift_label", {True: None, False: 7}),
]
# Sizes that its tensors or its target disagree with.
SIZES = [
    (EAGLE3, {"hidden_size": 24}),
    (EAGLE3, {"eagle_aux_hidden_state_layer_ids": [1, 2]}),
    (EAGLE1, {"vocab_size": 7}),
    (DFLASH, {"hidden_size": 24}),
    (DSPARK, {"target_layer_ids": [0, 90, 1]}),
    ("dflash/domino_b6", {"target_hidden_size": 24}),
    ("dflash/jetspec_b8", {"vocab_size": 7}),
    ("dflash/trained_b8", {"num_target_layers": 3}),
    ("eagle/eagle3_peagle", {"num_hidden_layers": 9}),
    (SPECULATORS, {"aux_layer_ids": [1, 2, 90]}),
    (SPECULATORS, {"transformer_layer_config.vocab_size": 7}),
    (SPECULATORS, {"transformer_layer_config.hidden_size": 24}),
    (SPECULATORS, {"transformer_layer_config.quantization_config": {"quant_method": "fp8"}}),
    (MEDUSA, {"hidden_size": 24}),
    *((MLP, change) for change in ({"n_predict": None}, {"n_predict": 10**9}, {"emb_dim": None}, {"emb_dim": 10**12})),
]

# Settings of layers that are not those of the drafters' own.
LAYERS = {
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "embedding_multiplier": 12.0,
    "scale_emb": 12,
}
LAYERS |= {"residual_multiplier": 0.22, "attention_multiplier": 0.01, "logits_scaling": 8.0, "norm_type": "layer_norm"}
LAYERS |= {"use_parallel_residual": True, "is_neox_style": False, "position_embedding_type": "alibi"}
LAYERS |= {"rotary_pct": 0.25, "clip_qkv": 8.0, "hidden_act": "mystery"}
LAYERS |= {"rope_scaling": {"rope_type": "mystery", "factor": 2.0}}


def wrapped(prefix):
    return lambda tensors: {prefix + key: tensor for key, tensor in tensors.items()}


def drafts_of(resources) -> int | None:
    """Tokens of a draft that what was loaded can make; `None`: any number."""
    network = getattr(resources, "heads", None) or getattr(resources, "speculator", None) or resources
    config = getattr(network, "config", None)
    if hasattr(config, "num_drafts"):
        return config.num_drafts(config.block_size)
    return config.n_predict if hasattr(config, "n_predict") else getattr(network, "num_heads", None)


def outcome(folder, target):
    """What is detected, and what the loader of its method makes of it, or its error."""
    found = detect_checkpoint(folder)
    try:
        made = resolve_candidate_generator(found.method).load(SpeculativeConfig(found.method, str(folder)), target)
    except SpecDecError as error:
        return found, None, error
    return found, made, None


def check(folder, target):
    found, resources, error = outcome(folder, target)
    problems = (*found.problems, *inspect_checkpoint(folder, target.config.name_or_path).problems)
    assert bool(problems) == bool(error), f"the loader says: {error}"
    if error is None:
        assert drafts_of(resources) in (None, found.num_draft_tokens)
    return found


@full
def test_as_published():
    for folder in HEADS.values():
        assert check(folder, loaded_target(folder)).problems == ()


def test_wrapped_names(tmp_path):
    wrappers = {MEDUSA: "model.", EAGLE1: "eagle.", MLP: "speculator.", DFLASH: "language_model."}
    wrappers |= {"demo/mtp": "language_model.model.", "medusa/v01_heads_pt": "medusa_heads."}
    for name, prefix in wrappers.items():
        plain = detect_checkpoint(HEADS[name])
        found = check(copy_of(name, tmp_path / name, change=wrapped(prefix)), loaded_target(HEADS[name]))
        assert (found.method, found.num_draft_tokens, found.problems) == (plain.method, plain.num_draft_tokens, ())


@pytest.mark.parametrize(("name", "key", "drafts"), [*BLOCKS[:2], *in_full(*BLOCKS[2:])])
def test_kinds_and_sizes_of_blocks(tmp_path, name, key, drafts):
    for index, (value, expected) in enumerate(drafts.items()):
        value = list(value) if isinstance(value, tuple) else value
        folder, target = copy_of(name, tmp_path / str(index), {key: value}), loaded_target(HEADS[name])
        found, network, _ = outcome(folder, target)
        assert expected == (None if network is None else drafts_of(network))
        assert check(folder, target).num_draft_tokens == expected or expected is None


@pytest.mark.parametrize(("name", "change"), [SIZES[0], *in_full(*SIZES[1:])])
def test_sizes_that_disagree(tmp_path, name, change):
    check(copy_of(name, tmp_path / "head", change), loaded_target(HEADS[name]))


def test_two_writings_of_one_tensor_and_an_embedding_without_rows(tmp_path):
    target = loaded_target(HEADS[EAGLE3])
    folder = copy_of(EAGLE3, tmp_path / "two", change=put("model.norm.weight", torch.ones(64)))
    with pytest.raises(CheckpointFormatError, match="two writings of one tensor"):
        resolve_candidate_generator("eagle3").load(SpeculativeConfig("eagle3", str(folder)), target)
    empty = put("embed_tokens.weight", torch.ones(0, target.config.hidden_size))
    assert check(copy_of(EAGLE3, tmp_path / "empty", change=empty), target).target.vocab_size == 0


@pytest.mark.parametrize("name", [EAGLE3, *in_full(DFLASH)])
def test_keys_that_change_what_layers_compute(tmp_path, name):
    for key, value in LAYERS.items():
        _, _, error = outcome(copy_of(name, tmp_path / key, {key: value}), loaded_target(HEADS[name]))
        assert isinstance(error, CheckpointFormatError)
        assert key in str(error) or "rope_type 'mystery'" in str(error)


def test_values_that_change_nothing(tmp_path):
    harmless = {"residual_multiplier": 1.0, "is_neox_style": True, "scale_emb": 1, "unsloth_fixed": True, "note": "x"}
    for name in (EAGLE3, DFLASH):
        assert check(copy_of(name, tmp_path / name, harmless), loaded_target(HEADS[name])).problems == ()


def test_rotary_embeddings_of_several_kinds_of_layers(tmp_path):
    thetas = {"full_attention": 1e4, "sliding_attention": 1e6}
    sets = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    change = {"rope_parameters": sets, "rope_theta": None, "use_sliding_window": True, "sliding_window": 16}
    target = loaded_target(HEADS[DFLASH])
    mixed = {**change, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    _, _, error = outcome(copy_of(DFLASH, tmp_path / "mixed", mixed), target)
    assert "other rotary embeddings for each of full_attention, sliding_attention" in str(error)
    sliding = {**change, "layer_types": ["sliding_attention"] * 3}
    _, network, _ = outcome(copy_of(DFLASH, tmp_path / "sliding", sliding), target)
    assert network.config.rope_parameters["rope_theta"] == 1e6
