"""Inspection, detection and loading agree: whether a drafter fits a target, whatever is changed in its files."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec import CheckpointFormatError, SpecDecError, SpeculativeConfig, cli, demo
from hf_specdec.hub import inspect_checkpoint
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.method import resolve_candidate_generator
from tests.helpers import drafters
from tests.helpers.heads import HEADS, WITH_LAYERS, copy_of, loaded_target, method_of, put, target_of, without
from tests.helpers.levels import full, in_full, split
from tests.helpers.loopback_hub import TOKEN


DEMO = Path(demo.target_path()).parent
EAGLE3, DFLASH = "eagle/eagle3_llama", "dflash/qwen3_random_b8"
PUBLISHED = {**HEADS, **WITH_LAYERS}
PUBLISHED |= {f"demo/{path.name}": path for path in DEMO.iterdir() if (path / "config.json").is_file()}
PUBLISHED.pop("demo/target")


def run(*arguments, **options):
    return CliRunner().invoke(cli.app, ["inspect", *map(str, arguments)], prog_name="hf-specdec", **options)


def demo_target(folder, **changes):
    """The config of the demo's target with other values."""
    folder.mkdir()
    config = json.loads((DEMO / "target" / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_inspect_names_method_and_target():
    for name, folder in PUBLISHED.items():
        found = inspect_checkpoint(folder, target_of(folder))
        assert (found.fits, found.problems) == (True, ())
        assert inspect_checkpoint(folder).fits is None
        is_own = name in WITH_LAYERS
        assert ("use spec_method='mtp'" in (found.hint or "")) == is_own
        if is_own or name == "demo/draft":
            assert found.found.method == "draft_model"
            continue
        assert found.found.method == (folder.name if name.startswith("demo") else method_of(name))
        config = json.loads((target_of(folder) / "config.json").read_text())
        assert found.found.target.hidden_size == config["hidden_size"]
        # A head that goes through the target's lm_head works with every vocabulary.
        assert found.found.format == "medusa-v2" or found.found.target.vocab_size == config["vocab_size"]


def test_drafters_of_other_targets_do_not_fit(tmp_path):
    for index, (drafter, changes, problem) in enumerate(
        (
            ("eagle", {"hidden_size": 512}, "It reads states of hidden size 256, and the target has 512."),
            ("medusa", {"hidden_size": 512}, "It reads states of hidden size 256, and the target has 512."),
            ("mlp_speculator", {"vocab_size": 9000}, "It has a vocabulary of 4096 tokens, and the target has 9000"),
            ("draft", {"vocab_size": 9000}, "different tokenizers"),
            ("eagle3", {"num_hidden_layers": 4}, "It reads the states of 5 decoder layers, and the target has 4."),
            ("dflash", {"num_hidden_layers": 8}, "made for a target with 5 decoder layers, and the target has 8."),
            ("eagle", {"is_encoder_decoder": True}, "reads the states of decoder-only ones"),
            ("mtp", {"model_type": "mistral"}, "the model_type 'llama', and the target is of 'mistral'."),
            ("mtp", {"model_type": "gpt2"}, "The MTP layers of targets of the model_type 'gpt2' are not supported."),
        )
    ):
        target = demo_target(tmp_path / str(index), **changes)
        found = inspect_checkpoint(DEMO / drafter, target)
        assert found.fits is False
        assert any(problem in sentence for sentence in found.problems)
    assert run(DEMO / drafter, "--target", target).exit_code == 1
    # Padding of the vocabulary is no difference.
    padded = demo_target(tmp_path / "padded", vocab_size=4100)
    for drafter in ("eagle", "draft", "mlp_speculator", "mtp"):
        assert inspect_checkpoint(DEMO / drafter, padded).fits is True
    # The language model of a multimodal target.
    inner = json.loads((DEMO / "target" / "config.json").read_text())
    for size, fits in ((256, True), (512, False)):
        target = demo_target(tmp_path / str(size), text_config={**inner, "hidden_size": size})
        assert inspect_checkpoint(DEMO / "eagle3", target).fits is fits


@full
def test_command(hub, tmp_path):
    hub.add("user/head", DEMO / "eagle3", card=drafters.card_of("user/target"))
    hub.add("user/target", DEMO / "target")
    result = run("user/head", "--target", "user/target", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["method"], found["format"], found["tensors"]) == ("eagle3", "eagle3-safeailab", 12)
    assert (found["fits"], found["problems"]) == (True, [])
    assert hub.sent("/storage/*") < 110_000
    # Texts of strangers stay on one line.
    hub.add("user/head", DEMO / "eagle3", card='---\nbase_model: "a\\x1b[2J\\n\\u202eb"\n---\n')
    assert inspect_checkpoint("user/head", "demo").found.target.name.isprintable()
    assert "\x1b[2J" not in run("user/head", "--target", "demo").stdout
    files = {f"inner/{path.name}": path.read_bytes() for path in (DEMO / "medusa").iterdir()}
    hub.add("user/inner", files=files, revision="v2", private=True)
    place = {"revision": "v2", "subfolder": "inner", "cache_dir": tmp_path}
    assert inspect_checkpoint("user/inner", "user/target", **place, token=TOKEN).fits is True
    assert (tmp_path / "models--user--target").is_dir()
    for arguments in (("user/none",), (DEMO / "eagle", "--target", "user/none"), ("user/other", "--offline")):
        result = run(*arguments)
        assert (result.exit_code, "Traceback" in result.stderr) == (2, False)


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
    (EAGLE1, {"vocab_size": 7}),
    (DSPARK, {"target_layer_ids": [0, 90, 1]}),
    ("dflash/trained_b8", {"num_target_layers": 3}),
    ("eagle/eagle3_peagle", {"num_hidden_layers": 9}),
    (SPECULATORS, {"aux_layer_ids": [1, 2, 90]}),
    (SPECULATORS, {"transformer_layer_config.hidden_size": 24}),
    (SPECULATORS, {"transformer_layer_config.quantization_config": {"quant_method": "fp8"}}),
    (MEDUSA, {"hidden_size": 24}),
    *((MLP, change) for change in ({"n_predict": None}, {"n_predict": 10**9}, {"emb_dim": 10**12})),
    (EAGLE3, {"rope_theta": [1]}),
    (EAGLE3, {}, put("fc.weight", torch.ones(63, 192))),
    (DFLASH, {}, put("x.weight", torch.ones(2))),
    (MEDUSA, {}, put("lm_heads.1.weight", torch.ones(3))),
    (MLP, {}, without("ln.2.bias")),
    ("demo/mtp", {}, put("mtp.fc.weight", torch.ones(3, 3))),
]

# Settings of layers that are not those of the drafters' own.
LAYERS = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "embedding_multiplier": 12.0}
LAYERS |= {"residual_multiplier": 0.22, "attention_multiplier": 0.01, "logits_scaling": 8.0, "norm_type": "layer_norm"}
LAYERS |= {"use_parallel_residual": True, "is_neox_style": False, "position_embedding_type": "alibi", "scale_emb": 12}
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


def test_as_published_and_with_wrapped_names(tmp_path):
    for folder in HEADS.values():
        assert check(folder, loaded_target(folder)).problems == ()
    wrappers = {MEDUSA: "model.", EAGLE1: "eagle.", MLP: "speculator.", DFLASH: "language_model."}
    wrappers |= {"demo/mtp": "language_model.model.", "medusa/v01_heads_pt": "medusa_heads."}
    for name, prefix in wrappers.items():
        plain = detect_checkpoint(HEADS[name])
        found = check(copy_of(name, tmp_path / name, change=wrapped(prefix)), loaded_target(HEADS[name]))
        assert (found.method, found.num_draft_tokens, found.problems) == (plain.method, plain.num_draft_tokens, ())


@pytest.mark.parametrize(("name", "key", "drafts"), split(BLOCKS, BLOCKS[:1]))
def test_kinds_and_sizes_of_blocks(tmp_path, name, key, drafts):
    for index, (value, expected) in enumerate(drafts.items()):
        value = list(value) if isinstance(value, tuple) else value
        folder, target = copy_of(name, tmp_path / str(index), {key: value}), loaded_target(HEADS[name])
        found, network, _ = outcome(folder, target)
        assert expected == (None if network is None else drafts_of(network))
        assert check(folder, target).num_draft_tokens == expected or expected is None


def test_sizes_and_tensors_that_disagree(tmp_path):
    for index, (name, settings, *change) in enumerate(SIZES):
        folder = copy_of(name, tmp_path / str(index), settings, *change)
        check(folder, loaded_target(HEADS[name]))
        assert not change or inspect_checkpoint(folder, target_of(HEADS[name])).fits is False


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


def test_values_that_change_nothing(tmp_path, warnings):
    harmless = {"residual_multiplier": 1.0, "is_neox_style": True, "scale_emb": 1, "unsloth_fixed": True, "note": "x"}
    changes = [(EAGLE3, harmless), (DFLASH, harmless)]
    # A key that is not known, and off.
    key = "transformer_layer_config.rope_parameters.alpha"
    changes += [(SPECULATORS, {key: value}) for value in (False, 0, [], {}, "")]
    for index, (name, change) in enumerate(changes):
        folder = copy_of(name, tmp_path / str(index), change)
        assert check(folder, loaded_target(HEADS[name])).problems == ()
    assert not any(f"`{key}`" in line for line in warnings)


@full
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
