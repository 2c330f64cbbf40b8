"""DFlash networks: the published numbers, and what settings mean."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
)

from hf_specdec import CheckpointFormatError
from hf_specdec.candidate_generators.dflash.heads.walks import CorrectedWalk
from hf_specdec.candidate_generators.dflash.network import BlockView, default_layer_ids
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.target.states import captured_states
from hf_specdec.training.reading import GrowingCache
from tests.helpers import heads
from tests.helpers.block_networks import random_network
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
from tests.helpers.models import TINY, letter_tokenizer, tiny_llama


RANDOM, DFLASH2 = "dflash/qwen3_random_b8", ("dflash/dflash2_full_b8", "dflash/dflash2_sliding_b5")
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def target():
    return loaded_target(HEADS[RANDOM])


def load(folder, target, **settings):
    return heads.load("dflash", folder, target, **settings)


def masks_of(network, length, count):
    """What each view sees from `count` places after `length` others."""
    positions = torch.arange(length + count)
    distance = positions[length:, None] - positions
    masks = {view: torch.zeros(distance.shape).masked_fill_(view.hidden(distance), -1e9) for view in network.views}
    return {view: mask[None, None] for view, mask in masks.items()}


@torch.no_grad()
def block_output(network, name=RANDOM):
    """The output for the block of a published first round, and what is expected of it."""
    expected = expected_of(name)
    parts = expected["r0.context_features"].split(network.config.target_hidden_size, dim=-1)
    fused = network.fuse(dict(zip(network.target_hidden_states, parts)))
    length, tokens = fused.shape[1], expected["r0.block_input_ids"]
    context = GrowingCache(network.context(fused, torch.arange(length)[None]))
    positions = torch.arange(length, length + tokens.shape[1])[None]
    return network(tokens, positions, masks_of(network, length, tokens.shape[1]), context), expected


def along(walk, before, count):
    """Logits of the first positions, each after the token before it."""
    levels = []
    for walk.position in range(count):
        levels.append(walk.logits(before[:, walk.position, None]))
    return torch.cat(levels, dim=1)


@torch.no_grad()
def test_recorded_states_and_logits():
    for name in HEADS:
        if name.startswith("dflash/"):
            check_recorded(name)


def check_recorded(name):
    network, target = published(name), loaded_target(HEADS[name])
    output, expected = block_output(network, name)
    with captured_states(target, network.target_hidden_states) as states:
        target(expected.get("input_ids", expected.get("prompt0.input_ids")))
    joined = torch.cat([states[key] for key in network.target_hidden_states], dim=-1)
    torch.testing.assert_close(joined, expected["r0.context_features"], **CLOSE)
    torch.testing.assert_close(output, expected["r0.draft_hidden"], **CLOSE)
    block = network.block(output, expected["r0.block_input_ids"][:, 0], {})
    logits = block.logits
    base = expected.get("r0.base_logits", expected["r0.draft_logits"])
    torch.testing.assert_close(logits, base[:, -logits.shape[1] :], **CLOSE)
    config = network.config
    if "block_size" in expected:
        found = [config.block_size, config.mask_token_id, *config.target_layer_ids]
        assert found == [expected["block_size"], expected["mask_token_id"], *expected["target_layer_ids"].tolist()]
    walk = network.block_head.begin(block)
    if isinstance(walk, CorrectedWalk):
        before = torch.cat((expected["r0.block_input_ids"][:, :1], expected["r0.draft_tokens"]), dim=1)
        corrected = along(walk, before, logits.shape[1])
        torch.testing.assert_close(corrected, expected["r0.draft_logits"], **CLOSE)
        assert not torch.allclose(corrected, logits, atol=1e-2)


@torch.no_grad()
def test_recorded_selector_of_dflash2():
    for name in DFLASH2:
        network, (output, expected) = published(name), block_output(published(name), name)
        anchors = expected["r0.block_input_ids"][:, 0]
        walk = network.block_head.begin(network.block(output, anchors, {}))
        assert torch.equal(walk.tokens, expected["r0.candidate_ids"])
        torch.testing.assert_close(walk.scores, expected["r0.edge_scores"], **CLOSE)
        assert torch.equal(walk.best(), expected["r0.draft_tokens"])
        for index in range(2):
            path, temperature = expected[f"sample{index}.path"], expected[f"sample{index}.temperature"]
            before = torch.cat((anchors[:, None], path), dim=1)
            on_candidates = (along(walk, before, path.shape[1]) / temperature).softmax(-1).gather(2, walk.tokens)
            torch.testing.assert_close(on_candidates, expected[f"sample{index}.q"], **CLOSE)


def as_speculators(name, folder, known=None, layers=None, **settings):
    """A fixture as the `speculators` library writes it, with copies of the target's embedding and head."""
    tensors, config, target = tensors_of(HEADS[name]), settings_of(name), loaded_target(HEADS[name])
    inner, is_second = config.pop("dflash_config"), name in DFLASH2
    ids = [i + 1 for i in inner.pop("target_layer_ids")]
    head = target.lm_head.weight.detach().clone()
    tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    tensors["lm_head.weight"] = head if known is None else head[known]
    if known is not None:
        tensors["d2t"] = torch.tensor(known) - torch.arange(len(known))
        tensors["t2d"] = torch.zeros(320, dtype=torch.bool).index_fill_(0, torch.tensor(known), True)
    for key in ("is_causal", "num_target_layers"):
        config.pop(key, None)
    stated = {
        "speculators_model_type": "dflash2" if is_second else "dflash",
        "architectures": ["DFlash2DraftModel" if is_second else "DFlashDraftModel"],
        "block_size": config.get("block_size"),
        "aux_hidden_state_layer_ids": ids,
        "draft_vocab_size": None if is_second else len(tensors["lm_head.weight"]),
        "transformer_layer_config": {key: value for key, value in config.items() if key != "block_size"}
        | (layers or {}),
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        **inner,
        **settings,
    }
    return write(folder, tensors, {key: value for key, value in stated.items() if value is not None})


SLIDES, CAUSAL, SLIDES_CAUSAL, ALL = BlockView(32), BlockView(None, True), BlockView(32, True), BlockView()


def test_vocabulary_and_settings_of_speculators(target, tmp_path):
    for known in (list(range(0, 320, 3)), None):
        network = load(as_speculators(RANDOM, tmp_path, known), target)
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
    layers = {"layer_types": SLIDING, "sliding_window": 32, "use_sliding_window": True}
    for settings, key, value in (
        ({"speculators_model_type": "dspark", "sample_from_anchor": None}, "predicts_next", True),
        ({"speculators_model_type": "dspark", "sample_from_anchor": False}, "predicts_next", False),
        ({"sliding_window_non_causal": None}, "views", (SLIDES_CAUSAL, SLIDES_CAUSAL, ALL)),
        ({"sliding_window_non_causal": True}, "views", (SLIDES, SLIDES, ALL)),
    ):
        config = load(as_speculators(RANDOM, tmp_path, layers=layers, **settings), target).config
        assert getattr(config, key) == value


def test_dflash2_of_speculators_and_with_scales(tmp_path):
    name, plain = DFLASH2[1], published(DFLASH2[1])
    target = loaded_target(HEADS[name])
    for non_causal, causal in ((None, False), (True, False), (False, True)):
        folder = as_speculators(name, tmp_path / str(non_causal), sliding_window_non_causal=non_causal)
        found = detect_checkpoint(folder)
        assert (found.method, found.format, found.problems) == ("dflash", "dflash2-speculators", ())
        assert found.num_draft_tokens == 4
        network = load(folder, target)
        assert network.config.views == (BlockView(12, causal),) * 2
        if not causal:
            same_network(network, plain)
    as_speculators(name, tmp_path, selector_top_k=None)
    assert load(tmp_path, target).config.head.top_k == 16
    scales = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 5.0}
    network = load(copy_of(name, tmp_path / "scaled", scales), target)
    tokens, output = torch.arange(6)[None], torch.randn(1, 3, 48)
    torch.testing.assert_close(network.embed(tokens), 2 * plain.embed(tokens))
    torch.testing.assert_close(network.logits(output), 5 * (plain.logits(output) / 10).tanh())


def test_format_of_transformers(tmp_path):
    """Against transformers' model, with a window that hides tokens of the text and of the block."""
    native = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    from transformers.cache_utils import DFlashCache

    sizes = {key: TINY[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")}
    sizes |= {"intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 4, "block_size": 6}
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    inner = {"mask_token_id": 5, "target_layer_ids": [0, 1], "layer_types": layers}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = native.MuseGlimmerAssistantConfig(**sizes, **inner, rope_parameters=rope)
    torch.manual_seed(0)
    theirs = native.MuseGlimmerAssistantModel(config).eval()
    for weight in theirs.requires_grad_(False).parameters():
        weight.normal_(0.0, 0.3) if weight.dim() == 2 else weight.normal_(1.0, 0.2)
    theirs.save_pretrained(tmp_path)
    target = tiny_llama().requires_grad_(False)
    network = load(tmp_path, target)
    assert network.config.views == (BlockView(5), ALL, BlockView(5))
    states = {key: torch.randn(1, 9, 32) for key in network.target_hidden_states}
    tokens, positions = torch.tensor([[3, 5, 5, 5, 5, 5]]), torch.arange(15)[None]
    context = GrowingCache(network.context(network.fuse(states), positions[:, :9]))
    ours = network(tokens, positions[:, 9:], masks_of(network, 9, 6), context)
    cache, joined = DFlashCache(config=config), torch.cat([states[1], states[2]], dim=-1)
    cache.set_previous_accepted_tokens(9)
    embedded = target.get_input_embeddings()(tokens)
    expected = theirs(embedded, joined, position_ids=positions, **{CACHE: cache})
    torch.testing.assert_close(ours, expected.last_hidden_state, atol=1e-5, rtol=1e-4)


def without_mask(**config):
    return {"dflash_config.mask_token_id": None, **config}


def views(*found, **config):
    """Settings of layers of which the first two may slide, and the views that they stand for."""
    inner = {f"dflash_config.{key}": config.pop(key) for key in ("causal", "causal_head") if key in config}
    return {"sliding_window": 32, "use_sliding_window": True, **inner, **config}, {"views": found}


DSPARK_CLASS, STEPS = {"architectures": ["DSparkDraftModel"]}, "num_denoising_steps"
# Settings, and what they mean.
MEANINGS = [
    ({"block_size": None}, {"block_size": 16, "mask_token_id": 300, "target_layer_ids": (1, 3, 4)}),
    # Three draft layers on six of the target.
    ({"dflash_config.target_layer_ids": None}, {"target_layer_ids": (1, 2, 3)}),
    ({"dflash_config.target_layer_ids": [-1, 5, 0]}, {"target_layer_ids": (-1, 5, 0)}),
    ({"dflash_config": None, "mask_token_id": 7, "target_layer_ids": [0, 2, 4]}, {"mask_token_id": 7}),
    (without_mask(mask_token_id=8, pard_token=7), {"mask_token_id": 8}),
    (without_mask(dspark_noise_token_id=7), {"mask_token_id": 7}),
    ({}, {STEPS: 1, "predicts_next": False, "views": ()}),
    ({"dflash_config.iterative_denoising": True}, {STEPS: 3}),
    ({"iterative_denoising": True, "num_denoising_steps": 5}, {STEPS: 5}),
    (DSPARK_CLASS, {"predicts_next": True}),
    ({**DSPARK_CLASS, "sample_from_anchor": False}, {"predicts_next": False}),
    views(SLIDES_CAUSAL, SLIDES_CAUSAL, ALL, layer_types=SLIDING),
    views(SLIDES, SLIDES, ALL, layer_types=SLIDING, causal=False),
    views(CAUSAL, CAUSAL, ALL, layer_types=SLIDING, use_sliding_window=False),
    views(CAUSAL, CAUSAL, CAUSAL, is_causal=True),
    views(SLIDES_CAUSAL, SLIDES_CAUSAL, CAUSAL, causal_head=True, layer_types=SLIDING),
]


def test_what_settings_mean(target, tmp_path):
    for number, (changes, expected) in enumerate(MEANINGS):
        network = load(copy_of(RANDOM, tmp_path / str(number), changes), target)
        found = network.config
        assert {key: getattr(found, key) for key in expected} == expected, changes
        assert network.predicting(torch.zeros(1, found.block_size, 64)).shape[1] == found.num_drafts(found.block_size)
        assert found.num_drafts(found.block_size) == found.block_size - (not found.predicts_next)


def test_default_layers_and_distances_that_a_view_hides():
    assert default_layer_ids(5, 36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(2, 8) == (1, 5)
    assert default_layer_ids(1, 36) == (18,)
    for window, causal in product((None, 1, 3), (False, True)):
        view = BlockView(window, causal)
        hidden = [(causal and d < 0) or (window is not None and abs(d) >= window) for d in range(-5, 6)]
        assert view.hidden(torch.arange(-5, 6)).tolist() == hidden
        assert view.sees_all == (not any(hidden))


def test_mask_token_of_the_user_and_of_the_tokenizer(target, tmp_path):
    assert load(HEADS[RANDOM], target, dflash_mask_token_id=9).config.mask_token_id == 9
    target, tokenizer = tiny_llama(vocab_size=40, num_hidden_layers=3), letter_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    target.config.name_or_path = str(tmp_path)
    random_network().attach(target).save(tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    config = changed(json.loads(file.read_text()), {"dflash_config.mask_token_id": None})
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointFormatError, match="which token its masks are.*`dflash_mask_token_id`"):
        load(tmp_path / "draft", target)
    file.write_text(json.dumps(changed(config, {"dflash_config.mask_token": "b"})))
    assert load(tmp_path / "draft", target).config.mask_token_id == tokenizer.convert_tokens_to_ids("b")


# They do more than look up and multiply.
SCALING = [
    (Gemma3ForCausalLM, Gemma3TextConfig(**TINY, head_dim=8, final_logit_softcapping=3.0)),
    (CohereForCausalLM, CohereConfig(**TINY, logit_scale=0.25)),
    (GraniteForCausalLM, GraniteConfig(**TINY, logits_scaling=4.0)),
]


@torch.no_grad()
def test_embedding_and_logits_of_the_target():
    tokens, sizes = torch.tensor([[3, 9, 4]]), {"num_embeddings": None, "vocab_size": 64, "draft_vocab_size": 64}
    for model_class, config in SCALING:
        target, network = model_class(config).eval(), random_network(seed=1)
        network.embed_tokens, network.config = None, replace(network.config, **sizes)
        network.attach(target)
        with captured_states(target, ("last",)) as states:
            logits = target(tokens).logits
        torch.testing.assert_close(network.logits(states["last"]), logits)
        assert not torch.allclose(target.lm_head(states["last"]), logits)
        embedding = target.get_input_embeddings()
        assert torch.equal(network.embed(tokens), embedding(tokens))
        # A copy is of the rows alone.
        network.embed_tokens = torch.nn.Embedding(*embedding.weight.shape, _weight=embedding.weight.clone())
        network.attach(target)
        assert torch.equal(network.embed(tokens), torch.nn.functional.embedding(tokens, embedding.weight))


def test_own_embedding_and_head(target, tmp_path):
    """Embeddings with rows for tokens that the target has not, the mask among them."""
    embedding, head = torch.randn(328, 64), torch.randn(320, 64)
    own = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    folder = copy_of(RANDOM, tmp_path, {"dflash_config.mask_token_id": 327}, lambda tensors: tensors | own)
    network, hidden = load(folder, target), torch.randn(2, 64)
    assert torch.equal(network.embed(torch.tensor([[327, 3]]))[0], embedding[[327, 3]])
    torch.testing.assert_close(network.logits(hidden), hidden @ head.T)
    assert network.num_embeddings == 328
