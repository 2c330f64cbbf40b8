"""Detection and loading say the same of a checkpoint, whatever is done to it, and refuse keys that nobody knows."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_specdec import CheckpointFormatError, SpecDecError, SpeculativeConfig
from hf_specdec.hub.detect import Detection, detect_checkpoint
from hf_specdec.hub.inspect import inspect_checkpoint
from hf_specdec.method import resolve_candidate_generator
from tests.helpers.heads import HEADS, copy_of, loaded_target


WRAPPERS = ("model.", "eagle.", "speculator.", "language_model.", "language_model.model.", "medusa_heads.")


def drafts_of(resources) -> int | None:
    """Tokens of a draft that what was loaded can make; `None`: any number."""
    network = getattr(resources, "heads", None) or getattr(resources, "speculator", None) or resources
    config = getattr(network, "config", None)
    if hasattr(config, "num_drafts"):
        return config.num_drafts(config.block_size)
    if hasattr(config, "n_predict"):
        return config.n_predict
    return getattr(network, "num_heads", None)


def outcome(folder, target):
    """Result of the detected method's loader for a checkpoint: method and drafts, or its error."""
    found = detect_checkpoint(folder)
    config = SpeculativeConfig(found.method, str(folder))
    try:
        resources = resolve_candidate_generator(found.method).load(config, target)
    except SpecDecError as error:
        return found, None, error
    return found, resources, None


def check(folder, target) -> Detection:
    found, resources, error = outcome(folder, target)
    problems = (*found.problems, *inspect_checkpoint(folder, target.config.name_or_path).problems)
    if error is not None:
        assert problems, f"the loader says: {error}"
        return found
    assert problems == ()
    assert drafts_of(resources) in (None, found.num_draft_tokens)
    return found


@pytest.mark.parametrize("name", HEADS)
def test_as_published(name):
    found, resources, error = outcome(HEADS[name], loaded_target(HEADS[name]))
    assert error is None
    assert found.problems == ()
    assert drafts_of(resources) in (None, found.num_draft_tokens)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", [name for name in HEADS if name != "medusa/merged_v1"])
def test_wrapped_names(tmp_path, name, wrapper):
    folder = copy_of(name, tmp_path / "head", change=lambda tensors: {wrapper + key: x for key, x in tensors.items()})
    plain, wrapped = detect_checkpoint(HEADS[name]), check(folder, loaded_target(HEADS[name]))
    assert (wrapped.method, wrapped.num_draft_tokens, wrapped.problems) == (plain.method, plain.num_draft_tokens, ())


FLIPS = {
    "sample_from_anchor": (True, False),
    "dflash_config.sample_from_anchor": (True, False),
    "block_size": (3, 1, 0, -1, 2**31, 10**18, "8", True),
    "dflash_config.block_size": (3, 257),
    "architectures": (["DFlashDraftModel"], ["Qwen3DSparkModel"], ["LlamaForCausalLM"]),
    "dflash_config.projector_type": ("dspark", "dflash", "domino", "mystery"),
    "speculators_model_type": ("mystery",),
    "shift_label": (True, False),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in FLIPS.items() for value in values])
@pytest.mark.parametrize("name", ["dflash/qwen3_random_b8", "dflash/dspark_vanilla_b5"])
def test_flips_of_block_drafters(tmp_path, name, key, value):
    folder = copy_of(name, tmp_path / "head", {key: value})
    try:
        detect_checkpoint(folder)
    except CheckpointFormatError as error:
        if "ambiguous" not in str(error):
            raise
        return
    check(folder, loaded_target(HEADS[name]))


@pytest.mark.parametrize(
    ("name", "flipped", "drafts"),
    [
        ("dflash/dspark_vanilla_b5", False, 4),
        ("dflash/dspark_vanilla_b5", True, 5),
        ("dflash/qwen3_random_b8", True, 8),
        ("dflash/qwen3_random_b8", False, 7),
    ],
)
def test_drafts_from_the_anchor(tmp_path, name, flipped, drafts):
    folder = copy_of(name, tmp_path / "head", {"sample_from_anchor": flipped})
    found, network, _ = outcome(folder, loaded_target(HEADS[name]))
    assert found.num_draft_tokens == drafts_of(network) == drafts


SIZES = {"hidden_size": 24, "target_hidden_size": 24, "vocab_size": 7, "num_target_layers": 3, "num_hidden_layers": 9}
SIZES |= {"transformer_layer_config.vocab_size": 7, "transformer_layer_config.hidden_size": 24}
SIZES |= {"aux_layer_ids": [1, 2, 90], "eagle_aux_hidden_state_layer_ids": [1, 2], "target_layer_ids": [0, 90, 1]}


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("name", [name for name in HEADS if name.startswith(("dflash", "eagle", "medusa"))])
def test_flips_of_sizes(tmp_path, name, key):
    """Detector and loader go by the tensors if a config disagrees with them."""
    inside, _, _ = key.rpartition(".")
    if inside and inside not in json.loads((HEADS[name] / "config.json").read_text()):
        pytest.skip("its config has no such part")
    if (name, key) == ("medusa/vllm_truncated_vocab", "vocab_size"):
        pytest.skip("its heads have different numbers of rows, and only the config tells why")
    check(copy_of(name, tmp_path / "head", {key: SIZES[key]}), loaded_target(HEADS[name]))


@pytest.mark.parametrize("change", [{"n_predict": None}, {"emb_dim": None}, {"emb_dim": 10**12}, {"n_predict": 10**9}])
def test_flips_of_stages(tmp_path, change):
    check(
        copy_of("mlp_speculator/untied_plain", tmp_path / "head", change),
        loaded_target(HEADS["mlp_speculator/untied_plain"]),
    )


@pytest.mark.parametrize("name", HEADS)
def test_renamed_files(tmp_path, name):
    folder = copy_of(name, tmp_path / "head")
    (weights,) = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt")]
    weights.rename(folder / f"other{weights.suffix}")
    for pickled in folder.glob("*.bin"):
        pickled.unlink()
    try:
        found = detect_checkpoint(folder)
    except CheckpointFormatError as error:
        if "cannot be read" not in str(error):
            raise
        return
    assert "no weights of a known name" in found.problems[0]
    check(folder, loaded_target(HEADS[name]))


def test_two_writings_of_one_tensor(tmp_path):
    name = "eagle/eagle3_llama"
    folder = copy_of(name, tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": tensors["norm.weight"] * 2}, folder / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match="two writings of one tensor"):
        resolve_candidate_generator("eagle3").load(
            SpeculativeConfig("eagle3", str(folder)), loaded_target(HEADS[name])
        )


class TestKeysThatNobodyKnows:
    UNKNOWN = {
        "dflash/qwen3_random_b8": ["dflash_config.mystery", "dflash_gate", "rope_parameters.alpha"],
        "dflash/dspark_vanilla_b5": ["markov_temperature", "causal_depth"],
        "eagle/eagle3_specforge": ["eagle_config.mystery", "rope_parameters.alpha", "eagle_gate"],
        "eagle/eagle3_speculators": [
            "mystery",
            "transformer_layer_config.mystery",
            "transformer_layer_config.rope_parameters.alpha",
            "speculators_config.mystery",
        ],
        "eagle/eagle1_llama": ["rope_scaling.alpha", "eagle_config.mystery"],
        "medusa/vllm_converted": ["mystery", "medusa_gate"],
        "medusa/v01_heads_pt": ["mystery", "medusa_gate"],
        "medusa/merged_v1": ["medusa_gate"],
        "mlp_speculator/untied_plain": ["mystery", "activation"],
        "demo/mtp": ["mystery", "mtp_gate"],
    }

    @pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in UNKNOWN.items() for key in keys])
    def test_are_told_by_name(self, tmp_path, warnings, name, key):
        folder = copy_of(name, tmp_path / "head", {key: "x" * 1000})
        found, resources, error = outcome(folder, loaded_target(HEADS[name]))
        assert resources is not None, error
        assert not found.problems
        (line,) = (line for line in warnings if "not known here" in line)
        assert f"{folder}' has `{key}`" in line
        assert len(line) < 700

    @pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in UNKNOWN.items() for key in keys[:1]])
    @pytest.mark.parametrize("value", [False, 0, [], {}, ""])
    def test_what_is_switched_off_says_nothing(self, tmp_path, name, key, value):
        folder = copy_of(name, tmp_path / "head", {key: value})
        _, resources, error = outcome(folder, loaded_target(HEADS[name]))
        assert resources is not None, error

    @pytest.mark.parametrize("name", ["dflash/qwen3_random_b8", "eagle/eagle3_llama", "eagle/eagle1_llama"])
    def test_notes_of_whole_models_are_harmless(self, tmp_path, name):
        notes = {"unsloth_fixed": True, "_name_or_path": "x", "quality": 3, "tie_word_embeddings": True, "note": "x"}
        _, resources, error = outcome(copy_of(name, tmp_path / "head", notes), loaded_target(HEADS[name]))
        assert resources is not None, error


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("attention_multiplier", 0.01),
        ("logits_scaling", 8.0),
        ("scale_emb", 12),
        ("norm_type", "layer_norm"),
        ("use_parallel_residual", True),
        ("is_neox_style", False),
        ("position_embedding_type", "alibi"),
        ("rotary_pct", 0.25),
        ("clip_qkv", 8.0),
        ("hidden_act", "mystery"),
        ("rope_scaling", {"rope_type": "mystery", "factor": 2.0}),
    ],
)
@pytest.mark.parametrize("name", ["dflash/qwen3_random_b8", "eagle/eagle3_llama"])
def test_keys_that_change_what_layers_compute(tmp_path, name, key, value):
    """Keys count also at the top of a whole model's config, where the rest are notes."""
    folder = copy_of(name, tmp_path / "head", {key: value})
    _, _, error = outcome(folder, loaded_target(HEADS[name]))
    assert isinstance(error, CheckpointFormatError)
    assert key in str(error) or "rope_type 'mystery'" in str(error)


@pytest.mark.parametrize(("key", "value"), [("residual_multiplier", 1.0), ("is_neox_style", True), ("scale_emb", 1)])
@pytest.mark.parametrize("name", ["dflash/qwen3_random_b8", "eagle/eagle3_llama"])
def test_values_that_change_nothing(tmp_path, name, key, value):
    _, resources, error = outcome(copy_of(name, tmp_path / "head", {key: value}), loaded_target(HEADS[name]))
    assert resources is not None, error


def test_rotary_embeddings_of_several_kinds_of_layers(tmp_path):
    sets = {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in (("full_attention", 1e4), ("sliding_attention", 1e6))
    }
    mixed = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 16}
    name = "dflash/qwen3_random_b8"
    target = loaded_target(HEADS[name])
    change = {"rope_parameters": sets, "rope_theta": None, "use_sliding_window": True}
    _, _, error = outcome(copy_of(name, tmp_path / "mixed", {**change, **mixed}), target)
    assert "other rotary embeddings for each of full_attention, sliding_attention" in str(error)
    sliding = {**mixed, "layer_types": ["sliding_attention"] * 3}
    _, network, _ = outcome(copy_of(name, tmp_path / "sliding", {**change, **sliding}), target)
    assert network.config.rope_parameters["rope_theta"] == 1e6


@pytest.mark.parametrize("name", ["medusa/v01_heads_pt", "mlp_speculator/untied_plain", "eagle/eagle3_speculators"])
def test_tensors_of_something_else(tmp_path, name):
    """A config alone makes no drafter: detection says what is missing, as loading does."""
    folder = copy_of(name, tmp_path / "head")
    weights = next(path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt"))
    weights.unlink()
    save_file({"something.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    found, _, error = outcome(folder, loaded_target(HEADS[name]))
    assert isinstance(error, CheckpointFormatError)
    assert len(found.problems) == 1


def test_an_embedding_without_rows(tmp_path):
    name = "eagle/eagle3_llama"
    folder = copy_of(name, tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    width = loaded_target(HEADS[name]).config.hidden_size
    save_file({**tensors, "embed_tokens.weight": torch.ones(0, width)}, folder / "model.safetensors")
    found = check(folder, loaded_target(HEADS[name]))
    assert found.target.vocab_size == 0


def test_layers_copied_from_a_quantised_target(tmp_path):
    quantised = {"transformer_layer_config.quantization_config": {"quant_method": "fp8"}}
    name = "eagle/eagle3_speculators"
    assert check(copy_of(name, tmp_path / "head", quantised), loaded_target(HEADS[name])).problems == ()
