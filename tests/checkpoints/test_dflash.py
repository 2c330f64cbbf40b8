"""DFlash networks and their checkpoints: the published numbers, every format, and what is wrong with others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
)

from hf_specdec import CheckpointFormatError, SpecConfigError, SpeculativeConfig
from hf_specdec.candidate_generators.dflash.formats import BlockView, default_layer_ids
from hf_specdec.candidate_generators.dflash.network import DFlashNetwork, GivenContext, load_dflash
from hf_specdec.decoding.states import captured_states
from tests.candidate_generators.test_dflash import NETWORKS, random_network
from tests.models import TINY, letter_tokenizer, tiny_llama


FIXTURES = Path(__file__).parents[1] / "fixtures" / "dflash"
NAMES = ("qwen3_random_b8", "default_layer_ids_b4", "trained_b8", "trained_for_refinement_b8", "dspark_vanilla_b5")
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def targets():
    return {name: AutoModelForCausalLM.from_pretrained(FIXTURES / name / "target").eval() for name in NAMES}


@pytest.fixture
def target(targets):
    return targets["qwen3_random_b8"]


def load(folder, target, **settings) -> DFlashNetwork:
    return load_dflash(SpeculativeConfig.resolve({"method": "dflash", "model": str(folder), **settings}), target)


def changed_copy(folder, name="qwen3_random_b8", weights=None, config=None):
    """A fixture with other tensors (`weights`: a function of all) and config values (`None`: without that key)."""
    tensors = load_file(FIXTURES / name / "model.safetensors")
    tensors = {key: tensor.contiguous() for key, tensor in (weights(tensors) if weights else tensors).items()}
    settings = {**json.loads((FIXTURES / name / "config.json").read_text()), **(config or {})}
    write(folder, tensors, {key: value for key, value in settings.items() if value is not None})
    return folder


def write(folder, tensors, config):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_tensors(**added):
    return lambda tensors: {**tensors, **{name.replace("__", "."): tensor for name, tensor in added.items()}}


def settings_of(name):
    return json.loads((FIXTURES / name / "config.json").read_text())


@torch.no_grad()
def block_output(network, number=0, name="qwen3_random_b8"):
    """The output for the block of a published first round, and what is expected of it."""
    expected = load_file(FIXTURES / name / "expected.safetensors")
    parts = expected["r0.context_features"].split(network.config.target_hidden_size, dim=-1)
    fused = network.fuse(dict(zip(network.target_hidden_states, parts)))
    length, tokens = fused.shape[1], expected["r0.block_input_ids"]
    context = GivenContext(network.context(fused, torch.arange(length)[None]))
    positions = (length + torch.arange(tokens.shape[1]))[None]
    return network(tokens, positions, {view: None for view in network.views}, context), expected


class TestPublishedNumbers:
    @pytest.mark.parametrize("name", NAMES)
    def test_states_and_logits(self, targets, name):
        network = load(FIXTURES / name, targets[name])
        output, expected = block_output(network, name=name)
        torch.testing.assert_close(output, expected["r0.draft_hidden"], **CLOSE)
        logits = network.logits(network.predicting(output))
        torch.testing.assert_close(logits, expected.get("r0.base_logits", expected["r0.draft_logits"]), **CLOSE)
        assert network.config.block_size == expected["block_size"]
        assert network.config.mask_token_id == expected["mask_token_id"]
        assert list(network.config.target_layer_ids) == expected["target_layer_ids"].tolist()

    @pytest.mark.parametrize("name", NAMES)
    @torch.no_grad()
    def test_captured_states(self, targets, name):
        target, network = targets[name], load(FIXTURES / name, targets[name])
        expected = load_file(FIXTURES / name / "expected.safetensors")
        prompt = expected.get("input_ids", expected.get("prompt0.input_ids"))
        with captured_states(target, network.target_hidden_states) as states:
            target(prompt)
        joined = torch.cat([states[key] for key in network.target_hidden_states], dim=-1)
        torch.testing.assert_close(joined, expected["r0.context_features"], **CLOSE)

    def test_corrections(self, targets):
        network = load(FIXTURES / "dspark_vanilla_b5", targets["dspark_vanilla_b5"])
        _, expected = block_output(network, name="dspark_vanilla_b5")
        previous = expected["r0.verify_input_ids"][:, :-1]
        corrected = expected["r0.base_logits"] + network.markov_head(previous)
        torch.testing.assert_close(corrected, expected["r0.draft_logits"], **CLOSE)

    def test_last_layer_is_read_before_the_final_norm(self, target, tmp_path):
        """transformers' last hidden state has gone through the norm."""
        ids = {"dflash_config": {"mask_token_id": 300, "target_layer_ids": [1, 3, 5]}}
        network = load(changed_copy(tmp_path, config=ids), target)
        assert network.target_hidden_states == (2, 4, 6)
        tokens = torch.arange(1, 6)[None]
        with torch.no_grad(), captured_states(target, network.target_hidden_states) as states:
            hidden = target(tokens, output_hidden_states=True).hidden_states
        torch.testing.assert_close(target.model.norm(states[6]), hidden[6])
        torch.testing.assert_close(states[4], hidden[4])
        assert not torch.allclose(states[6], hidden[6])


def as_speculators(folder, target, known=None, kind="dflash", **settings):
    """The first fixture as the `speculators` library writes it."""
    tensors = load_file(FIXTURES / "qwen3_random_b8" / "model.safetensors")
    layers = settings_of("qwen3_random_b8")
    inner = layers.pop("dflash_config")
    head = target.lm_head.weight.detach().clone()
    tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.detach().clone()
    tensors["lm_head.weight"] = head if known is None else head[known]
    if known is not None:
        ids = torch.tensor(known)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(320, dtype=torch.bool).index_fill_(0, ids, True)
    config = {
        "speculators_model_type": kind,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "core.DFlashDraftModel"},
        "block_size": 8,
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in inner["target_layer_ids"]],
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "transformer_layer_config": {
            key: value for key, value in layers.items() if key not in ("block_size", "num_target_layers")
        },
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        **settings,
    }
    write(folder, {name: tensor.contiguous() for name, tensor in tensors.items()}, config)
    return folder


class TestFormats:
    def same_as_published(self, network):
        output, expected = block_output(network)
        torch.testing.assert_close(output, expected["r0.draft_hidden"], **CLOSE)
        torch.testing.assert_close(network.logits(output[:, 1:]), expected["r0.draft_logits"], **CLOSE)

    def test_late_layout(self, target, tmp_path):
        """`block_size` among the special keys, the rotary embedding under one key."""
        changes = {
            "block_size": None,
            "dflash_config": {"mask_token_id": 300, "target_layer_ids": [1, 3, 4], "block_size": 6},
            "rope_theta": None,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
            "layer_types": None,
        }
        network = load(changed_copy(tmp_path, config=changes), target)
        assert network.config.block_size == 6
        self.same_as_published(network)

    def test_prefixed_names_and_what_is_not_used(self, target, tmp_path):
        def change(tensors):
            named = {f"model.{name}": tensor for name, tensor in tensors.items()}
            return {**named, "rotary_emb.inv_freq": torch.ones(8), "verifier_norm.weight": torch.ones(64)}

        self.same_as_published(load(changed_copy(tmp_path, weights=change), target))

    @pytest.mark.parametrize(
        ("config", "block_size", "mask_token_id", "layers"),
        [
            ({"block_size": None}, 16, 300, (1, 3, 4)),
            ({"dflash_config": {"block_size": 4}, "mask_token_id": 7, "target_layer_ids": [0, 2, 4]}, 4, 7, (0, 2, 4)),
            # Three draft layers on six of the target.
            ({"dflash_config": {"mask_token_id": 1}}, 8, 1, (1, 2, 3)),
            ({"dflash_config": {"mask_token_id": 1}, "num_target_layers": None}, 8, 1, (1, 2, 3)),
            ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [-1, 5, 0]}}, 8, 1, (-1, 5, 0)),
        ],
    )
    def test_where_settings_are(self, target, tmp_path, config, block_size, mask_token_id, layers):
        found = load(changed_copy(tmp_path, config=config), target).config
        assert (found.block_size, found.mask_token_id, found.target_layer_ids) == (block_size, mask_token_id, layers)

    def test_default_layers(self):
        assert default_layer_ids(5, 36) == (1, 9, 17, 25, 33)
        assert default_layer_ids(2, 8) == (1, 5)
        assert default_layer_ids(1, 36) == (18,)

    def test_speculators(self, target, tmp_path):
        network = load(as_speculators(tmp_path, target), target)
        self.same_as_published(network)
        # Both were copies of the target's.
        assert (network.embed_tokens, network.lm_head) == (None, None)
        assert not network.config.own_head
        assert network.config.num_embeddings is None
        assert (network.config.predicts_next, network.config.views) == (False, ())

    def test_reduced_vocabulary(self, target, tmp_path):
        known = list(range(0, 320, 3))
        network = load(as_speculators(tmp_path, target, known), target)
        output, expected = block_output(network)
        logits = network.logits(output[:, 1:])
        torch.testing.assert_close(logits, expected["r0.draft_logits"][..., known], **CLOSE)
        assert torch.equal(network.target_ids(torch.arange(len(known))), torch.tensor(known))
        full = network.target_logits(logits)
        assert torch.equal(full[..., known], logits)
        assert full.isfinite().sum() == logits.numel()
        assert network.embed_tokens is None

    def test_own_embedding_and_head(self, target, tmp_path):
        """With rows for tokens that the target has not, the mask among them."""
        torch.manual_seed(0)
        embedding, head = torch.randn(328, 64), torch.randn(320, 64)
        added = with_tensors(embed_tokens__weight=embedding, lm_head__weight=head)
        config = {"dflash_config": {"mask_token_id": 327, "target_layer_ids": [1, 3, 4]}}
        network = load(changed_copy(tmp_path, weights=added, config=config), target)
        assert torch.equal(network.embed(torch.tensor([[327, 3]]))[0], embedding[[327, 3]])
        hidden = torch.randn(2, 64)
        torch.testing.assert_close(network.logits(hidden), hidden @ head.T)
        assert network.num_embeddings == 328

    @pytest.mark.parametrize(
        ("base", "change", "predicts_next"),
        [
            ("qwen3_random_b8", {"sample_from_anchor": True}, True),
            ("qwen3_random_b8", {"architectures": ["Qwen3DSparkModel"]}, True),
            ("qwen3_random_b8", {"architectures": ["DSparkDraftModel"]}, True),
            ("qwen3_random_b8", {"architectures": ["DSparkDraftModel"], "sample_from_anchor": False}, False),
            ("dspark_vanilla_b5", {"markov_rank": 0}, True),
        ],
    )
    def test_which_token_a_position_predicts(self, targets, tmp_path, base, change, predicts_next):
        network = load(changed_copy(tmp_path, base, config=change), targets[base])
        assert network.config.predicts_next == predicts_next
        output = torch.zeros(1, network.config.block_size, 64)
        count = network.config.num_drafts(network.config.block_size)
        assert network.predicting(output).shape[1] == count == network.config.block_size - (not predicts_next)

    @pytest.mark.parametrize(("stated", "predicts_next"), [(None, True), (True, True), (False, False)])
    def test_speculators_of_the_other_kind(self, target, tmp_path, stated, predicts_next):
        folder = as_speculators(tmp_path, target, kind="dspark", sample_from_anchor=stated)
        assert load(folder, target).config.predicts_next == predicts_next

    def test_transformers_own_format(self, tmp_path):
        """Against transformers' model, with a window that hides tokens of the text and of the block."""
        native = pytest.importorskip("transformers.models.muse_glimmer_assistant")
        from transformers.cache_utils import DFlashCache

        config = native.MuseGlimmerAssistantConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            block_size=6,
            mask_token_id=5,
            target_layer_ids=[0, 1],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            vocab_size=64,
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
                past_key_values=cache,
            )
        torch.testing.assert_close(ours, expected.last_hidden_state, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
    def test_saved_and_loaded(self, network, tmp_path):
        network, target = random_network(**network), tiny_llama(vocab_size=40, num_hidden_layers=3)
        network.attach(target).save(tmp_path)
        again = load(tmp_path, target)
        assert again.config == network.config
        ours, theirs = network.state_dict(), again.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())

    def test_saved_layout(self, target, tmp_path):
        network = load(FIXTURES / "qwen3_random_b8", target)
        network.config = replace(network.config, num_denoising_steps=4)
        network.save(tmp_path)
        published, ours = settings_of("qwen3_random_b8"), json.loads((tmp_path / "config.json").read_text())
        assert ours["dflash_config"].pop("num_denoising_steps") == 4
        different = {key for key in published.keys() & ours.keys() if published[key] != ours[key]}
        assert different == set()
        weights = load_file(tmp_path / "model.safetensors")
        assert weights.keys() == load_file(FIXTURES / "qwen3_random_b8" / "model.safetensors").keys()


class TestDenoisingSteps:
    @pytest.mark.parametrize(
        ("config", "steps"),
        [
            ({}, 1),
            ({"num_denoising_steps": 4}, 4),
            ({"dflash_num_denoising_steps": 2}, 2),
            ({"iterative_denoising": True}, 3),
            ({"iterative_denoising": True, "num_denoising_steps": 5}, 5),
            ({"iterative_denoising": False}, 1),
        ],
    )
    def test_what_a_checkpoint_declares(self, target, tmp_path, config, steps):
        inner = {"mask_token_id": 300, "target_layer_ids": [1, 3, 4], **config}
        network = load(changed_copy(tmp_path, config={"dflash_config": inner}), target)
        assert network.config.num_denoising_steps == steps


SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]


class TestViews:
    @pytest.mark.parametrize(
        ("config", "views"),
        [
            ({}, ()),
            ({"layer_types": SLIDING}, (BlockView(32, True), BlockView(32, True), BlockView())),
            ({"layer_types": SLIDING, "is_causal": False}, (BlockView(32), BlockView(32), BlockView())),
            ({"layer_types": SLIDING, "use_sliding_window": False}, (*[BlockView(None, True)] * 2, BlockView())),
            ({"is_causal": True}, (BlockView(None, True),) * 3),
            ({"is_causal": False, "causal": True}, ()),
            ({"causal": True}, (BlockView(None, True),) * 3),
            ({"layer_types": SLIDING, "causal": False}, (BlockView(32), BlockView(32), BlockView())),
            ({"causal_head": True}, (BlockView(None, True),) * 3),
            ({"causal_head": True, "layer_types": SLIDING}, (BlockView(32, True),) * 2 + (BlockView(None, True),)),
            ({"causal_head": True, "causal": False}, ()),
            ({"causal_head": False}, ()),
        ],
    )
    def test_of_layers(self, target, tmp_path, config, views):
        config = dict(config)
        inner = {"mask_token_id": 300, "target_layer_ids": [1, 3, 4]}
        inner |= {key: config.pop(key) for key in ("causal", "causal_head") if key in config}
        usual = {"sliding_window": 32, "use_sliding_window": True, "dflash_config": inner}
        assert load(changed_copy(tmp_path, config={**usual, **config}), target).config.views == views

    @pytest.mark.parametrize(
        ("non_causal", "first"), [(True, BlockView(32)), (False, BlockView(32, True)), (None, BlockView(32, True))]
    )
    def test_of_speculators(self, target, tmp_path, non_causal, first):
        folder = as_speculators(tmp_path, target, sliding_window_non_causal=non_causal)
        config = json.loads((folder / "config.json").read_text())
        sliding = {"layer_types": SLIDING, "sliding_window": 32, "use_sliding_window": True}
        config["transformer_layer_config"] |= sliding
        (folder / "config.json").write_text(json.dumps(config))
        assert load(folder, target).config.views == (first, first, BlockView())

    @pytest.mark.parametrize("window", [None, 1, 3])
    @pytest.mark.parametrize("causal", [False, True])
    def test_what_is_hidden(self, window, causal):
        view, distances = BlockView(window, causal), range(-5, 6)
        hidden = [(causal and d < 0) or (window is not None and abs(d) >= window) for d in distances]
        assert view.hidden(torch.tensor(list(distances))).tolist() == hidden
        assert view.sees_all == (not any(hidden))


class TestMaskToken:
    def without(self, folder, **config):
        return changed_copy(folder, config={"dflash_config": {"target_layer_ids": [1, 3, 4]}, **config})

    def test_order(self, target, tmp_path):
        folder = changed_copy(tmp_path, config={"mask_token_id": 8})
        assert load(folder, target, dflash_mask_token_id=9).config.mask_token_id == 9
        assert load(folder, target).config.mask_token_id == 300
        assert load(self.without(tmp_path, mask_token_id=8, pard_token=7), target).config.mask_token_id == 8
        assert load(self.without(tmp_path, mask_token_id=0), target).config.mask_token_id == 0
        for key in ("dspark_noise_token_id", "pard_token", "ptd_token_id"):
            assert load(self.without(tmp_path, **{key: 7}), target).config.mask_token_id == 7

    def test_from_the_tokenizer(self, tmp_path):
        folder, names = tmp_path / "draft", tmp_path / "target"
        target = tiny_llama(vocab_size=40, num_hidden_layers=3)
        random_network().attach(target).save(folder)
        config = json.loads((folder / "config.json").read_text())
        del config["dflash_config"]["mask_token_id"]
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointFormatError, match="which token its masks are.*`dflash_mask_token_id`"):
            load(folder, target)
        tokenizer = letter_tokenizer()
        tokenizer.save_pretrained(names)
        target.config.name_or_path = str(names)
        with pytest.raises(CheckpointFormatError, match="which token its masks are"):
            load(folder, target)
        config["dflash_config"]["mask_token"] = "b"
        (folder / "config.json").write_text(json.dumps(config))
        assert load(folder, target).config.mask_token_id == tokenizer.convert_tokens_to_ids("b")

    def test_outside_of_the_embedding(self, target, tmp_path):
        for token in (320, 4000):
            with pytest.raises(SpecConfigError, match=f"is {token}, and the embedding has the tokens 0 to 319"):
                load(FIXTURES / "qwen3_random_b8", target, dflash_mask_token_id=token)


class TestSharedParts:
    """Embedding and lm_head of targets that do more than look up and multiply."""

    def test_scaled_embedding(self):
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

    def test_norm_behind_the_embedding(self):
        class Normed(torch.nn.Embedding):
            def __init__(self, *sizes):
                super().__init__(*sizes)
                self.embed_norm = torch.nn.RMSNorm(sizes[1])

            def forward(self, tokens):
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
            (CohereForCausalLM, CohereConfig(**TINY, logit_scale=0.25)),
            (GraniteForCausalLM, GraniteConfig(**TINY, logits_scaling=4.0)),
        ],
        ids=["cap", "scale", "divisor"],
    )
    @torch.no_grad()
    def test_logits(self, model_class, config):
        torch.manual_seed(0)
        target = model_class(config).eval()
        network = random_network_for(target)
        with captured_states(target, ("last",)) as states:
            logits = target(torch.tensor([[3, 9, 4]])).logits
        torch.testing.assert_close(network.logits(states["last"]), logits)
        assert not torch.allclose(target.lm_head(states["last"]), logits)

    def test_copies_are_given_up(self):
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


def without(*names):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def cut(name, rows=None, columns=None):
    return lambda tensors: {**tensors, name: tensors[name][:rows, :columns]}


class TestWhatIsWrong:
    @pytest.mark.parametrize(
        ("weights", "config", "match"),
        [
            (without("fc.weight"), {}, "lacks 1 tensors of a DFlash draft: fc.weight"),
            (without("layers.2.mlp.up_proj.weight"), {}, "lacks 1 tensors of the draft: layers.2.mlp.up_proj.weight"),
            (
                lambda t: {n: x for n, x in t.items() if not n.startswith("layers.1.")},
                {},
                r"has the layers \[0, 2\], not all from 0 on",
            ),
            (with_tensors(gate__weight=torch.ones(2)), {}, "1 tensors that no DFlash draft.*gate.weight"),
            (
                cut("fc.weight", columns=128),
                {},
                r"reads 128 values of the target's states.*3 layers \[2, 4, 5\] of Qwen3ForCausalLM have 3 \* 64",
            ),
            (cut("fc.weight", columns=100), {}, "reads 100 values"),
            (None, {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3]}}, "at the 2 layers"),
            (
                None,
                {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3, 6]}},
                r"\[2, 4, 7\], .* has 6 layers",
            ),
            (None, {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 3, -2]}}, r"\[2, 4, -1\], .* has 6"),
            (None, {"num_target_layers": 8}, "made for a target with 8 decoder layers, and Qwen3ForCausalLM has 6"),
            (None, {"vocab_size": 5000}, "vocabulary of 5000 tokens, and Qwen3ForCausalLM has 320"),
            (with_tensors(embed_tokens__weight=torch.ones(500, 64)), {}, "vocabulary of 500 tokens"),
            (with_tensors(lm_head__weight=torch.ones(100, 64)), {}, "drafts 100 of 320 tokens and does not say which"),
            (with_tensors(d2t=torch.arange(9)), {}, "table of 9 draft tokens.*no `lm_head.weight`"),
            (with_tensors(d2t=torch.arange(200)), {}, "selects no rising ids below 320"),
            (
                with_tensors(lm_head__weight=torch.ones(8, 64), d2t=torch.zeros(9, dtype=torch.long)),
                {},
                "table of 9 draft tokens.*8 rows",
            ),
            (lambda t: {**t, "norm.weight": t["norm.weight"][:3]}, {}, r"norm.weight of the shape \[3\]"),
            (cut("layers.1.self_attn.q_proj.weight", rows=32), {}, r"of the shape \[32, 64\].*ask for \[64, 64\]"),
            (cut("layers.0.self_attn.q_proj.weight", rows=20), {}, "20 rows of q_proj.*heads of 16"),
            (lambda t: {**t, "fc.weight": t["fc.weight"].to(torch.int8)}, {}, "stored as int8"),
            (None, {"block_size": 1}, "`block_size`=1, and needs at least 2"),
            (None, {"block_size": "8"}, "`block_size`='8' in its config.json, which must be a positive integer"),
            (None, {"block_size": True}, "must be a positive integer"),
            (None, {"rms_norm_eps": "small"}, "must be a positive number"),
            (None, {"layer_types": ["full_attention"]}, "`layer_types`.*for each of its 3 layers"),
            (None, {"layer_types": ["linear_attention"] * 3}, "`layer_types`.*for each of its 3 layers"),
            (
                None,
                {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": True},
                "sliding layers and no `sliding_window`",
            ),
            (None, {"rope_scaling": {"rope_type": "spiral"}}, "rope_type 'spiral'"),
            (None, {"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' without factor"),
            (None, {"rope_scaling": {"rope_type": "yarn", "factor": "two"}}, "no rotary embedding can be made"),
            (None, {"hidden_act": "wiggle"}, "name of an activation function"),
        ],
    )
    def test_message(self, target, tmp_path, weights, config, match):
        folder = changed_copy(tmp_path, weights=weights, config=config)
        with pytest.raises(CheckpointFormatError, match=match):
            load(folder, target)

    def test_other_hidden_size(self, targets):
        target = tiny_llama(num_hidden_layers=6, vocab_size=320)
        with pytest.raises(CheckpointFormatError, match=r"reads 192 values.*of LlamaForCausalLM have 3 \* 32"):
            load(FIXTURES / "qwen3_random_b8", target)
        with pytest.raises(CheckpointFormatError, match="made for a target with 6 decoder layers|reads 192 values"):
            load(FIXTURES / "qwen3_random_b8", targets["default_layer_ids_b4"])

    @pytest.mark.parametrize(
        ("weights", "config", "name"),
        [
            (None, {"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
            (with_tensors(layers__0__mlp_conv__base_kernel=torch.ones(2)), {}, "DFlash2"),
            (None, {"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
            (None, {"dflash_config": {"projector_type": "domino"}}, "Domino"),
            (None, {"architectures": ["Qwen3XPressModel"]}, "XPress"),
            (None, {"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna"),
            (with_tensors(aux_hidden_norms__0__weight=torch.ones(2)), {}, "Laguna"),
            (None, {"architectures": ["Gemma4DSparkModel"]}, "Gemma 4"),
            (None, {"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
            (None, {"dflash_config": {"use_swa": True}}, "MiMo"),
            (with_tensors(layers__0__self_attn__attention_sink_bias=torch.ones(4)), {}, "MiMo"),
            (None, {"dflash_config": {"use_gemma_norm": True}}, "`dflash_config.use_gemma_norm`=True"),
            (None, {"is_neox_style": False}, "`is_neox_style`=False"),
            (None, {"markov_head_type": "gated"}, "Markov head with a gate"),
            (None, {"quantization_config": {"bits": 4}}, "quantised"),
        ],
    )
    def test_kinds_that_are_not_supported(self, target, tmp_path, weights, config, name):
        with pytest.raises(CheckpointFormatError, match=f"{name}.*not supported. Pass"):
            load(changed_copy(tmp_path, weights=weights, config=config), target)

    def test_quantisation_of_the_draft(self, target):
        with pytest.raises(SpecConfigError, match="`quantization`"):
            load(FIXTURES / "qwen3_random_b8", target, quantization="4bit")
