"""DFlash networks: the published numbers, and what settings mean."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
)

from hf_specdec import CheckpointFormatError
from hf_specdec.candidate_generators.dflash.config import BlockView, default_layer_ids
from hf_specdec.candidate_generators.dflash.corrections import Block
from hf_specdec.candidate_generators.dflash.network import GivenContext
from hf_specdec.decoding.states import captured_states
from hf_specdec.hub.detect import detect_checkpoint
from tests.helpers import heads
from tests.helpers.caches import CACHE
from tests.helpers.heads import (
    HEADS,
    changed,
    copy_of,
    expected_of,
    loaded_target,
    published,
    same_network,
    settings_of,
    tensors_of,
    write,
)
from tests.helpers.levels import in_full
from tests.helpers.models import TINY, letter_tokenizer, tiny_llama
from tests.methods.test_dflash import NETWORKS, random_network


RANDOM = "dflash/qwen3_random_b8"
NAMES = [name for name in HEADS if name.startswith("dflash/")]
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def target():
    return loaded_target(HEADS[RANDOM])


def load(folder, target, **settings):
    return heads.load("dflash", folder, target, **settings)


@torch.no_grad()
def block_output(network, name=RANDOM):
    """The output for the block of a published first round, and what is expected of it."""
    expected = expected_of(name)
    parts = expected["r0.context_features"].split(network.config.target_hidden_size, dim=-1)
    fused = network.fuse(dict(zip(network.target_hidden_states, parts)))
    length, tokens = fused.shape[1], expected["r0.block_input_ids"]
    context = GivenContext(network.context(fused, torch.arange(length)[None]))
    positions = torch.arange(length + tokens.shape[1])
    distance = positions[length:, None] - positions
    masks = {view: torch.zeros(distance.shape).masked_fill_(view.hidden(distance), -1e9) for view in network.views}
    masks = {view: mask[None, None] for view, mask in masks.items()}
    return network(tokens, positions[None, length:], masks, context), expected


# Published numbers


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_recorded_states_and_logits(name):
    network, target = published(name), loaded_target(HEADS[name])
    output, expected = block_output(network, name)
    with captured_states(target, network.target_hidden_states) as states:
        target(expected.get("input_ids", expected.get("prompt0.input_ids")))
    joined = torch.cat([states[key] for key in network.target_hidden_states], dim=-1)
    torch.testing.assert_close(joined, expected["r0.context_features"], **CLOSE)
    torch.testing.assert_close(output, expected["r0.draft_hidden"], **CLOSE)
    logits = network.logits(network.predicting(output))
    base = expected.get("r0.base_logits", expected["r0.draft_logits"])
    torch.testing.assert_close(logits, base[:, -logits.shape[1] :], **CLOSE)
    config = network.config
    if "block_size" in expected:
        found = [config.block_size, config.mask_token_id, *config.target_layer_ids]
        assert found == [expected["block_size"], expected["mask_token_id"], *expected["target_layer_ids"].tolist()]
    if config.is_sequential:
        walk = network.left_to_right(Block(logits, network.predicting(output)))
        before = torch.cat((expected["r0.block_input_ids"][:, :1], expected["r0.draft_tokens"]), dim=1)
        corrected = torch.stack([walk.after(before[:, place]) for place in range(logits.shape[1])], dim=1)
        torch.testing.assert_close(corrected, expected["r0.draft_logits"], **CLOSE)
        assert not torch.allclose(corrected, logits, atol=1e-2)


def test_last_layer_is_read_before_the_final_norm(target, tmp_path):
    """transformers' last hidden state has gone through the norm."""
    network = load(copy_of(RANDOM, tmp_path, {"dflash_config.target_layer_ids": [1, 3, 5]}), target)
    assert network.target_hidden_states == (2, 4, 6)
    tokens = torch.arange(1, 6)[None]
    with torch.no_grad(), captured_states(target, network.target_hidden_states) as states:
        hidden = target(tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(target.model.norm(states[6]), hidden[6])
    torch.testing.assert_close(states[4], hidden[4])
    assert not torch.allclose(states[6], hidden[6])


# Drafts as the `speculators` library writes them


def as_speculators(folder, known=None, layer_settings=None, **settings):
    """The first fixture as the library writes it."""
    tensors, layers, target = tensors_of(HEADS[RANDOM]), settings_of(RANDOM), loaded_target(HEADS[RANDOM])
    inner = layers.pop("dflash_config")
    head = target.lm_head.weight.detach().clone()
    tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.detach().clone()
    tensors["lm_head.weight"] = head if known is None else head[known]
    if known is not None:
        ids = torch.tensor(known)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(320, dtype=torch.bool).index_fill_(0, ids, True)
    inside = {key: value for key, value in layers.items() if key not in ("block_size", "num_target_layers")}
    config = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "core.DFlashDraftModel"},
        "block_size": 8,
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in inner["target_layer_ids"]],
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "transformer_layer_config": inside | (layer_settings or {}),
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        **settings,
    }
    return write(folder, tensors, config)


@pytest.mark.parametrize("known", [list(range(0, 320, 3)), *in_full(None)], ids=["reduced", "full"])
def test_vocabulary_of_speculators(target, tmp_path, known):
    network = load(as_speculators(tmp_path, known), target)
    output, expected = block_output(network)
    torch.testing.assert_close(output, expected["r0.draft_hidden"], **CLOSE)
    logits = network.logits(output[:, 1:])
    # Copies of the target's are not kept.
    assert network.embed_tokens is None
    assert (network.config.predicts_next, network.config.views) == (False, ())
    if known is None:
        torch.testing.assert_close(logits, expected["r0.draft_logits"], **CLOSE)
        assert (network.lm_head, network.config.own_head, network.config.num_embeddings) == (None, False, None)
    else:
        torch.testing.assert_close(logits, expected["r0.draft_logits"][..., known], **CLOSE)
        assert torch.equal(network.target_ids(torch.arange(len(known))), torch.tensor(known))
        full = network.target_logits(logits)
        assert torch.equal(full[..., known], logits)
        assert full.isfinite().sum() == logits.numel()


SLIDES, CAUSAL, SLIDES_CAUSAL = BlockView(32), BlockView(None, True), BlockView(32, True)
SLIDING_LAYERS = {"layer_types": SLIDING, "sliding_window": 32, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"speculators_model_type": "dspark", "sample_from_anchor": None}, {"predicts_next": True}),
        ({"sliding_window_non_causal": None}, {"views": (SLIDES_CAUSAL, SLIDES_CAUSAL, BlockView())}),
        *in_full(
            ({"speculators_model_type": "dspark", "sample_from_anchor": True}, {"predicts_next": True}),
            ({"speculators_model_type": "dspark", "sample_from_anchor": False}, {"predicts_next": False}),
            ({"sliding_window_non_causal": True}, {"views": (SLIDES, SLIDES, BlockView())}),
            ({"sliding_window_non_causal": False}, {"views": (SLIDES_CAUSAL, SLIDES_CAUSAL, BlockView())}),
        ),
    ],
)
def test_settings_of_speculators(target, tmp_path, settings, expected):
    config = load(as_speculators(tmp_path, layer_settings=SLIDING_LAYERS, **settings), target).config
    assert {key: getattr(config, key) for key in expected} == expected


# DFlash 2: convolutions and selector

DFLASH2 = ("dflash/dflash2_full_b8", "dflash/dflash2_sliding_b5")


@pytest.mark.parametrize("name", DFLASH2)
@torch.no_grad()
def test_recorded_scores_walk_and_samples(name):
    network = published(name)
    output, expected = block_output(network, name)
    output, anchors = network.predicting(output), expected["r0.block_input_ids"][:, 0]
    edges = network.candidate_selector(network.logits(output), output, anchors)
    assert torch.equal(edges.tokens, expected["r0.candidate_ids"])
    torch.testing.assert_close(edges.scores, expected["r0.edge_scores"], **CLOSE)
    places = edges.walk()
    assert torch.equal(edges.tokens_at(places), expected["r0.draft_tokens"])
    assert torch.equal(edges.tokens[..., 0], expected["r0.unary_tokens"])
    before = torch.cat((torch.zeros_like(places[:, :1]), places[:, :-1]), dim=1)[..., None, None]
    scores = edges.scores.gather(2, before.expand(-1, -1, 1, edges.tokens.shape[2]))[:, :, 0]
    torch.testing.assert_close(scores, expected["r0.selector_scores"], **CLOSE)
    for index in range(2):
        path, temperature = expected[f"sample{index}.path"], expected[f"sample{index}.temperature"]
        places = torch.zeros_like(anchors)
        for position in range(path.shape[1]):
            logits = edges.logits_after(position, places, network.config.vocab_size)
            probs = (logits / temperature).softmax(-1)
            on_candidates = probs.gather(1, edges.tokens[:, position])
            torch.testing.assert_close(on_candidates, expected[f"sample{index}.q"][:, position], **CLOSE)
            assert torch.count_nonzero(probs) <= edges.tokens.shape[2]
            places = edges.places_of(position, path[:, position])


@pytest.mark.parametrize("name", DFLASH2)
@torch.no_grad()
def test_recorded_convolutions(name):
    expected = expected_of(name)
    convolution = published(name).layers[0].attention_conv
    seen = []

    def operation(convolved):
        seen.append(convolved)
        return expected["r0.layer0.conv_out_input"]

    output = convolution(expected["r0.layer0.conv_in_input"], operation)
    torch.testing.assert_close(seen[0], expected["r0.layer0.conv_in_output"], **CLOSE)
    torch.testing.assert_close(output, expected["r0.layer0.conv_out_output"], **CLOSE)


@torch.no_grad()
def test_convolutions_of_blocks_in_a_row_and_shorter_than_the_taps():
    convolution = published(DFLASH2[1]).layers[0].attention_conv
    blocks = torch.randn(4, 5, 48)
    together = convolution(blocks.view(1, 20, 48), torch.tanh, block_size=5)
    torch.testing.assert_close(together.view(4, 5, 48), convolution(blocks, torch.tanh), **CLOSE)
    # A convolution looks back alone.
    for size in (1, 2):
        shorter = convolution(blocks[:, :size], torch.tanh)
        torch.testing.assert_close(shorter, convolution(blocks, torch.tanh)[:, :size], **CLOSE)


def with_weights(tensors):
    return {f"{name}.weight" if "codebook" in name else name: x for name, x in tensors.items()}


AT_THE_TOP = {f"dflash_config.{key}": None for key in ("conv_kernel_size", "conv_group_size", "selector_top_k")}
AT_THE_TOP |= {"conv_kernel_size": 2, "selector_top_k": 8}


@pytest.mark.parametrize(
    ("config", "change"),
    [
        (AT_THE_TOP, with_weights),
        *in_full(*(({"architectures": [name]}, None) for name in ("DFlash2BeamDraftModel", "Qwen3ForCausalLM"))),
    ],
)
def test_other_spellings_of_dflash2(tmp_path, config, change):
    folder = copy_of(DFLASH2[0], tmp_path / "draft", config, change)
    found = detect_checkpoint(folder)
    assert (found.method, found.format, found.problems) == ("dflash", "dflash2", ())
    same_network(load(folder, loaded_target(HEADS[DFLASH2[0]])), published(DFLASH2[0]))


def test_scales_of_dflash2(tmp_path):
    scales = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 5.0}
    folder = copy_of(DFLASH2[0], tmp_path / "draft", scales)
    network, plain = load(folder, loaded_target(HEADS[DFLASH2[0]])), published(DFLASH2[0])
    tokens, output = torch.arange(6)[None], torch.randn(1, 3, 48)
    torch.testing.assert_close(network.embed(tokens), 2 * plain.embed(tokens))
    torch.testing.assert_close(network.logits(output), 5 * (plain.logits(output) / 10).tanh())
    off = load(
        copy_of(DFLASH2[0], tmp_path / "off", {"final_logit_softcapping": -1}),
        loaded_target(HEADS[DFLASH2[0]]),
    )
    torch.testing.assert_close(off.logits(output), plain.logits(output))


@pytest.mark.parametrize(
    ("non_causal", "causal", "has_copies"),
    [(None, False, True), (False, True, False), *in_full((True, False, False))],
)
def test_dflash2_of_speculators(tmp_path, non_causal, causal, has_copies):
    name = DFLASH2[1]
    layers, tensors, target = settings_of(name), tensors_of(HEADS[name]), loaded_target(HEADS[name])
    inner = layers.pop("dflash_config")
    layers.pop("is_causal")
    ids = [layer + 1 for layer in inner.pop("target_layer_ids")]
    if has_copies:
        tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    config = {
        "speculators_model_type": "dflash2",
        "architectures": ["DFlash2DraftModel"],
        "aux_hidden_state_layer_ids": ids,
        "sample_from_anchor": False,
        "transformer_layer_config": layers,
        **inner,
    }
    if non_causal is not None:
        config["sliding_window_non_causal"] = non_causal
    folder = write(tmp_path / "draft", tensors, config)
    found = detect_checkpoint(folder)
    assert (found.method, found.format, found.problems) == ("dflash", "dflash2-speculators", ())
    assert found.num_draft_tokens == 4
    network = load(folder, target)
    assert network.config.views == (BlockView(12, causal),) * 2
    if not causal:
        same_network(network, published(name))
    config.pop("selector_top_k")
    assert load(write(tmp_path / "usual", tensors, config), target).config.selector_top_k == 16


def test_transformers_own_format(tmp_path):
    """Against transformers' model, with a window that hides tokens of the text and of the block."""
    native = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    from transformers.cache_utils import DFlashCache

    sizes = {key: TINY[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")}
    config = native.MuseGlimmerAssistantConfig(
        **sizes,
        intermediate_size=48,
        num_hidden_layers=3,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        block_size=6,
        mask_token_id=5,
        target_layer_ids=[0, 1],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    torch.manual_seed(0)
    theirs = native.MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_(0.0, 0.3) if weight.dim() == 2 else weight.normal_(1.0, 0.2)
    theirs.save_pretrained(tmp_path)
    target = tiny_llama()
    network = load(tmp_path, target)
    assert network.config.views == (BlockView(5), BlockView(), BlockView(5))
    states = {key: torch.randn(1, 9, 32) for key in network.target_hidden_states}
    tokens = torch.tensor([[3, 5, 5, 5, 5, 5]])
    positions = torch.arange(15)
    distance = positions[9:, None] - positions
    masks = {
        view: torch.zeros(6, 15).masked_fill_(view.hidden(distance), torch.finfo(torch.float32).min)[None, None]
        for view in network.views
    }
    with torch.no_grad():
        context = GivenContext(network.context(network.fuse(states), positions[None, :9]))
        ours = network(tokens, positions[None, 9:], masks, context)
        joined = torch.cat([states[1], states[2]], dim=-1)
        cache = DFlashCache(config=config)
        cache.set_previous_accepted_tokens(9)
        expected = theirs(
            target.get_input_embeddings()(tokens),
            joined,
            position_ids=positions[None],
            **{CACHE: cache},
        )
    torch.testing.assert_close(ours, expected.last_hidden_state, atol=1e-5, rtol=1e-4)


def without_mask(**config):
    return {"dflash_config.mask_token_id": None, **config}


def views(*found, **config):
    """Settings of layers of which the first two may slide, and the views that they stand for."""
    inner = {f"dflash_config.{key}": config.pop(key) for key in ("causal", "causal_head") if key in config}
    return {"sliding_window": 32, "use_sliding_window": True, **inner, **config}, {"views": found}


DSPARK_CLASS, STEPS = {"architectures": ["DSparkDraftModel"]}, "num_denoising_steps"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_size": None}, {"block_size": 16, "mask_token_id": 300, "target_layer_ids": (1, 3, 4)}),
        # Three draft layers on six of the target.
        ({"dflash_config.target_layer_ids": None}, {"target_layer_ids": (1, 2, 3)}),
        (without_mask(mask_token_id=8, pard_token=7), {"mask_token_id": 8}),
        ({}, {STEPS: 1, "predicts_next": False, "views": ()}),
        ({"dflash_config.iterative_denoising": True}, {STEPS: 3}),
        (DSPARK_CLASS, {"predicts_next": True}),
        views(SLIDES_CAUSAL, SLIDES_CAUSAL, BlockView(), layer_types=SLIDING),
        views(SLIDES, SLIDES, BlockView(), layer_types=SLIDING, causal=False),
        *in_full(
            ({"dflash_config.block_size": 4}, {"block_size": 4}),
            ({"dflash_config": None, "mask_token_id": 7, "target_layer_ids": [0, 2, 4]}, {"mask_token_id": 7}),
            ({"dflash_config.target_layer_ids": [-1, 5, 0]}, {"target_layer_ids": (-1, 5, 0)}),
            ({"mask_token_id": 8}, {"mask_token_id": 300}),
            *((without_mask(**{key: 7}), {"mask_token_id": 7}) for key in ("dspark_noise_token_id", "ptd_token_id")),
            ({"dflash_config.dflash_num_denoising_steps": 2}, {STEPS: 2}),
            ({"iterative_denoising": True, "num_denoising_steps": 5}, {STEPS: 5}),
            ({"iterative_denoising": False}, {STEPS: 1}),
            ({"sample_from_anchor": True}, {"predicts_next": True}),
            ({**DSPARK_CLASS, "sample_from_anchor": False}, {"predicts_next": False}),
            views(CAUSAL, CAUSAL, BlockView(), layer_types=SLIDING, use_sliding_window=False),
            views(CAUSAL, CAUSAL, CAUSAL, is_causal=True),
            views(is_causal=False, causal=True),
            views(CAUSAL, CAUSAL, CAUSAL, causal_head=True),
            views(SLIDES_CAUSAL, SLIDES_CAUSAL, CAUSAL, causal_head=True, layer_types=SLIDING),
            views(causal_head=True, causal=False),
        ),
    ],
)
def test_what_settings_mean(target, tmp_path, changes, expected):
    network = load(copy_of(RANDOM, tmp_path / "draft", changes), target)
    found = network.config
    assert {key: getattr(found, key) for key in expected} == expected
    output = torch.zeros(1, found.block_size, 64)
    assert network.predicting(output).shape[1] == found.num_drafts(found.block_size)
    assert found.num_drafts(found.block_size) == found.block_size - (not found.predicts_next)


def test_default_layers():
    assert default_layer_ids(5, 36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(2, 8) == (1, 5)
    assert default_layer_ids(1, 36) == (18,)


def test_distances_that_a_view_hides():
    distances = range(-5, 6)
    for window, causal in product((None, 1, 3), (False, True)):
        view = BlockView(window, causal)
        hidden = [(causal and d < 0) or (window is not None and abs(d) >= window) for d in distances]
        assert view.hidden(torch.tensor(list(distances))).tolist() == hidden
        assert view.sees_all == (not any(hidden))


SHORT = ("selector", "reduced_vocabulary", "xpress")


@pytest.mark.parametrize("name", [*SHORT, *in_full(*(name for name in NETWORKS if name not in SHORT))])
def test_saved_and_loaded(name, tmp_path):
    network, target = random_network(**NETWORKS[name]), tiny_llama(vocab_size=40, num_hidden_layers=3)
    network.attach(target).save(tmp_path)
    same_network(load(tmp_path, target), network)


def test_saved_layout(target, tmp_path):
    network = load(copy_of(RANDOM, tmp_path, {"dflash_config.num_denoising_steps": 4}), target)
    network.save(tmp_path / "saved")
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "saved", tmp_path))
    assert {key for key in theirs.keys() & ours.keys() if theirs[key] != ours[key]} == set()
    assert tensors_of(tmp_path / "saved").keys() == tensors_of(HEADS[RANDOM]).keys()


# The token of masks


def test_mask_token_of_the_user_and_of_the_tokenizer(target, tmp_path):
    assert load(HEADS[RANDOM], target, dflash_mask_token_id=9).config.mask_token_id == 9
    folder, names = tmp_path / "draft", tmp_path / "target"
    target = tiny_llama(vocab_size=40, num_hidden_layers=3)
    random_network().attach(target).save(folder)

    def mask_token_with(**changes):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(changed(config, {f"dflash_config.{k}": v for k, v in changes.items()}))
        )
        return load(folder, target).config.mask_token_id

    with pytest.raises(CheckpointFormatError, match="which token its masks are.*`dflash_mask_token_id`"):
        mask_token_with(mask_token_id=None)
    tokenizer = letter_tokenizer()
    tokenizer.save_pretrained(names)
    target.config.name_or_path = str(names)
    with pytest.raises(CheckpointFormatError, match="which token its masks are"):
        mask_token_with()
    assert mask_token_with(mask_token="b") == tokenizer.convert_tokens_to_ids("b")


# Embedding and lm_head of targets that do more than look up and multiply


def test_own_embedding_and_head(target, tmp_path):
    """Embeddings with rows for tokens that the target has not, the mask among them."""
    torch.manual_seed(0)
    embedding, head = torch.randn(328, 64), torch.randn(320, 64)
    own = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    folder = copy_of(RANDOM, tmp_path, {"dflash_config.mask_token_id": 327}, lambda tensors: tensors | own)
    network = load(folder, target)
    assert torch.equal(network.embed(torch.tensor([[327, 3]]))[0], embedding[[327, 3]])
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(network.logits(hidden), hidden @ head.T)
    assert network.num_embeddings == 328


def test_scaled_embedding_of_the_target():
    torch.manual_seed(0)
    settings = {**TINY, "head_dim": 8, "sliding_window": 16}
    target = Gemma3ForCausalLM(Gemma3TextConfig(**settings)).eval().requires_grad_(False)
    network = random_network_for(target)
    tokens = torch.tensor([[3, 9]])
    assert torch.equal(network.embed(tokens), target.get_input_embeddings()(tokens))
    # A copy is of the rows alone.
    weight = target.get_input_embeddings().weight.clone()
    network.embed_tokens = torch.nn.Embedding(*weight.shape, _weight=weight)
    network.attach(target)
    assert torch.equal(network.embed(tokens), torch.nn.functional.embedding(tokens, weight))


def test_norm_after_the_targets_embedding():
    class Normed(torch.nn.Embedding):
        def __init__(*sizes):
            super().__init__(*sizes)
            self.embed_norm = torch.nn.RMSNorm(sizes[1])

        def forward(tokens):
            return self.embed_norm(super().forward(tokens))

    target = tiny_llama()
    target.set_input_embeddings(Normed(64, 32).requires_grad_(False))
    tokens = torch.tensor([[3, 9]])
    network = random_network_for(target)
    assert torch.equal(network.embed(tokens)[0], target.get_input_embeddings().weight[[3, 9]])


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=3.0)),
        *in_full((CohereForCausalLM, CohereConfig(**TINY, logit_scale=0.25))),
        *in_full((GraniteForCausalLM, GraniteConfig(**TINY, logits_scaling=4.0))),
    ],
    ids=["cap", "scale", "divisor"],
)
@torch.no_grad()
def test_logits_of_the_targets_head(model_class, config):
    torch.manual_seed(0)
    target = model_class(config).eval()
    network = random_network_for(target)
    with captured_states(target, ("last",)) as states:
        logits = target(torch.tensor([[3, 9, 4]])).logits
    torch.testing.assert_close(network.logits(states["last"]), logits)
    assert not torch.allclose(target.lm_head(states["last"]), logits)


def test_copies_of_the_targets_parts_are_given_up():
    target = tiny_llama()
    network = random_network_for(target)
    network.embed_tokens = torch.nn.Embedding(64, 32, _weight=target.get_input_embeddings().weight.clone())
    network.lm_head = torch.nn.Linear(32, 64, bias=False)
    network.attach(target)
    assert network.embed_tokens is None
    assert network.lm_head is not None
    network.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.clone())
    network.attach(target)
    assert network.lm_head is None


def random_network_for(target):
    torch.manual_seed(1)
    network = random_network()
    network.embed_tokens = None
    network.config = replace(network.config, num_embeddings=None, vocab_size=64, draft_vocab_size=64)
    return network.attach(target)
