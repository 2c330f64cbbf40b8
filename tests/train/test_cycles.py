"""Recipes of EAGLE heads and MTP layers: a step of the training sees what drafting sees, and learns from it."""

import copy
import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hf_specdec import load_speculator
from hf_specdec.candidate_generators.eagle.parallel import MaskedReading
from hf_specdec.candidate_generators.eagle.recipe import Eagle1Recipe, Eagle3Recipe, PEagleRecipe
from hf_specdec.candidate_generators.mtp.recipe import MtpRecipe
from hf_specdec.drafting.entries import DraftEntries
from hf_specdec.drafting.slots import Entries
from hf_specdec.errors import SpecConfigError, UnsupportedModelError
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.layers.known import is_llama_layer
from hf_specdec.layers.llama import DecoderLayer
from hf_specdec.training.autoregressive import walk_cycles
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.reading import Rows, TargetReader
from hf_specdec.training.trainer import train
from tests.helpers.architectures import tiny_model
from tests.helpers.models import VOCAB_SIZE, prompts, tiny_gpt2, tiny_llama, tiny_mistral
from tests.helpers.recipes import RECIPES, built, named, read


GREEDY = {"do_sample": False, "max_new_tokens": 24}

# Targets whose MTP layers are of several kinds: a short window; latent attention and experts; gated attention beside
# recurrent layers.
TARGETS = {
    "llama": tiny_llama,
    "mistral, window of 4": lambda: tiny_mistral(sliding_window=4),
    "deepseek_v3": lambda: tiny_model("deepseek_v3", first_k_dense_replace=1),
    "qwen3_5_text": lambda: tiny_model("qwen3_5_text"),
}
PARALLEL = [name for name in named("eagle3") if "parallel" in name]
ONE_BY_ONE = [name for name in named("eagle", "eagle3", "mtp") if name not in PARALLEL]
NETWORKS = [*((name, "llama") for name in ONE_BY_ONE), *(("mtp", kind) for kind in TARGETS)]


@pytest.mark.parametrize(("name", "kind"), dict.fromkeys(NETWORKS))
@torch.no_grad()
def test_a_step_sees_what_drafting_sees(name, kind):
    target, recipe, steps = TARGETS[kind](), RECIPES[name], 4
    network = built(recipe, target)
    # Experts and recurrent layers know float32 alone.
    network = network.double() if kind == "llama" else network
    reading = read(recipe, network, target, length=14)
    tokens, states = reading.tokens, network.fuse(reading.states)
    anchors = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 4, 3, 2, 1, 0, 5, 6, 8, 7]])
    walked = list(walk_cycles(network, tokens, states, anchors, steps))
    for anchor in range(10):
        places = (anchors == anchor).nonzero(as_tuple=True)
        # What the cached forward of a cycle does that begins here, one token at a time.
        entries = DraftEntries(network, starts=[0, 0], offsets=[0, 0], capacity=32)
        count = anchor + 1
        outputs = entries.read(tokens[:, 1 : count + 1], states[:, :count], [count, count])
        hidden, output = (part[:, -1:] for part in outputs)
        entries.begin_draft(steps)
        for step in range(steps):
            if step:
                node = tokens[:, anchor + 1 + step, None]
                hidden, output = entries.read_nodes(node, hidden, torch.zeros(1, dtype=torch.long))
            for found, expected in zip(walked[step], (hidden, output)):
                torch.testing.assert_close(found[places], expected[:, 0], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", PARALLEL)
@torch.no_grad()
def test_masks_see_what_drafting_sees(name, target):
    recipe, steps = RECIPES[name], 4
    network = built(recipe, target)
    torch.nn.init.normal_(network.mask_hidden)
    network = network.double()
    reading = read(recipe, network, target, length=14)
    tokens, states = reading.tokens, network.fuse(reading.states)
    anchors = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 4, 3, 2, 1, 0, 5, 6, 8, 7]])
    cycles = walk_cycles(network, tokens, states, anchors, steps)
    walked = torch.stack([network.logits(output) for _, output in cycles])
    for anchor in range(10):
        entries, count = DraftEntries(network, starts=[0, 0], offsets=[0, 0], capacity=32), anchor + 1
        raw = {key: state[:, :count] for key, state in reading.states.items()}
        new = Entries(tokens[:, 1 : count + 1], raw, [count, count])
        _, expected = MaskedReading(network).read(entries, new, steps - 1)
        found = walked[:, anchors == anchor].movedim(0, 1)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_cycles_begin_where_their_first_draft_counts(target):
    recipe = Eagle1Recipe()
    tokens = torch.randint(1, VOCAB_SIZE, (3, 12))
    counted = torch.zeros_like(tokens, dtype=torch.bool)
    counted[0, 4:7] = counted[1, 6:] = True
    network = built(recipe, target)
    reading = TargetReader(target, recipe.states_for(network)).read(Rows(tokens, counted))
    _, known = recipe.hits(network, reading)
    assert [known[:, row].int().tolist() for row in range(3)] == [
        [[0, 0, *[1] * 3, *[0] * 7], [0, 0, 1, 1, *[0] * 8], [0, 0, 1, *[0] * 9], [0] * 12],
        [[*[0] * 4, *[1] * (6 - draft), *[0] * (2 + draft)] for draft in range(4)],
        [[0] * 12] * 4,
    ]


@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3, few tokens", "eagle3, parallel", "mtp, narrow"])
def test_the_loss_is_the_weighted_mean_of_the_steps(name, target):
    recipe = replace(RECIPES[name], ttt_steps=2, head_decay=0.5, **({"noise": 0.0} if name == "eagle" else {}))
    network = built(recipe, target)
    reading = read(recipe, network, target, length=16, uncounted=7)
    tokens, known = reading.tokens, list(range(VOCAB_SIZE))
    known = known if network.token_ids is None else network.token_ids.tolist()
    target_logits = target(tokens).logits
    means = []
    anchors = torch.arange(15).expand(2, -1)
    for step, (fed, output) in enumerate(walk_cycles(network, tokens, network.fuse(reading.states), anchors, 2)):
        losses = []
        for row in range(2):
            for anchor in range(16 - 2 - step):
                label = int(tokens[row, anchor + 2 + step])
                # Cycles begin where their first draft counts.
                if not reading.counted[row, anchor + 2] or label not in known:
                    continue
                probs = target_logits[row, anchor + 1 + step, known].softmax(-1)
                log_probs = network.logits(output[row, anchor]).log_softmax(-1)
                loss = recipe.kl_weight * (probs * (probs.log() - log_probs)).sum()
                loss = loss - (1 - recipe.kl_weight) * log_probs[known.index(label)]
                if recipe.method == "eagle":
                    state = reading.states["last"][row, anchor + 1 + step]
                    loss = recipe.token_weight * loss + F.smooth_l1_loss(fed[row, anchor], state)
                losses.append(loss)
        means.append(torch.stack(losses).mean())
    expected = (means[0] + 0.5 * means[1]) / 1.5
    torch.testing.assert_close(recipe.loss(network, reading), expected, atol=1e-4, rtol=1e-4)


def test_noise_is_of_the_training_alone(target):
    recipe = RECIPES["eagle"]
    network = built(recipe, target)
    reading = read(recipe, network, target)
    assert recipe.loss(network, reading) != recipe.loss(network, reading)
    assert torch.equal(recipe.hits(network, reading)[0], recipe.hits(network, reading)[0])
    quiet = replace(recipe, noise=0.0)
    assert quiet.loss(network, reading) == quiet.loss(network, reading)


class TestEagle:
    def test_sizes_are_the_targets_where_none_are_given(self, target):
        config = Eagle3Recipe().build(target).config
        assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 64, 8)
        assert (config.draft_vocab_size, config.has_token_ids, config.own_embedding) == (VOCAB_SIZE, False, False)
        # Of 2, N // 2 and N - 3 with two layers.
        assert config.aux_layer_ids == (0, 1, 2)
        assert Eagle3Recipe().build(tiny_llama(num_hidden_layers=8)).config.aux_layer_ids == (2, 4, 5)

    def test_a_parallel_head_says_so(self, target, tmp_path):
        recipe = PEagleRecipe(ttt_steps=5, num_layers=2, mask_token_id=7)
        recipe.save(recipe.build(target), tmp_path)
        network = load_speculator(target, model=str(tmp_path)).resources
        config = network.config
        assert (config.mask_token_id, config.num_parallel_tokens, config.num_hidden_layers) == (7, 5, 2)
        assert detect_checkpoint(tmp_path).format == "peagle"
        assert detect_checkpoint(tmp_path).num_draft_tokens == 5
        with pytest.raises(SpecConfigError, match="`mask_token_id` must be from 0 to 63"):
            PEagleRecipe(mask_token_id=64).check(target)

    def test_the_draft_knows_the_most_frequent_tokens(self, target):
        recipe = Eagle3Recipe(draft_vocab_size=3)
        network = recipe.build(target)
        recipe.prepare(network, target, torch.tensor([9, 5, 9, 40, 40, 7, 9, 5]))
        assert network.token_ids.tolist() == [5, 9, 40]
        assert torch.equal(network.lm_head.weight, target.lm_head.weight[[5, 9, 40]])

    @pytest.mark.parametrize("name", named("eagle", "eagle3"))
    def test_what_is_shared_is_not_saved(self, name, target, tmp_path):
        recipe = RECIPES[name]
        recipe.save(recipe.build(target), tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        config = json.loads((tmp_path / "config.json").read_text())
        has_own = config["hidden_size"] != 32 or getattr(recipe, "own_embedding", False)
        assert ("embed_tokens.weight" in tensors) == has_own
        assert ("mask_hidden" in tensors) == ("mask_token_id" in config) == (name in PARALLEL)
        is_eagle3 = recipe.method == "eagle3"
        assert ("lm_head.weight" in tensors) == ("midlayer.hidden_norm.weight" in tensors) == is_eagle3
        assert ("d2t" in tensors) == (config.get("draft_vocab_size", VOCAB_SIZE) != VOCAB_SIZE)
        assert tensors["fc.weight"].dtype == torch.bfloat16


class TestMtp:
    def test_the_layer_begins_as_the_last_one_of_the_target(self, target):
        last = target.model.layers[-1]
        layer = MtpRecipe(intermediate_size=24).build(target).layers[0]
        assert type(layer) is DecoderLayer
        assert is_llama_layer(last)
        assert torch.equal(layer.self_attn.q_proj.weight, last.self_attn.q_proj.weight)
        assert torch.equal(layer.mlp.up_proj.weight, last.mlp.up_proj.weight[:24])
        assert torch.equal(layer.mlp.down_proj.weight, last.mlp.down_proj.weight[:, :24])

    @pytest.mark.parametrize("recipe", [RECIPES["mtp"], RECIPES["mtp, narrow"]], ids=["mtp", "narrow"])
    def test_it_is_trained_in_float32_and_saved_as_asked_for(self, recipe, tmp_path):
        target = tiny_llama().to(torch.bfloat16)
        network = recipe.build(target)
        recipe.save(network, tmp_path, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
        tensors = load_file(tmp_path / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert torch.equal(tensors["mtp.fc.weight"], network.eh_proj[0].weight.to(torch.bfloat16))
        assert tensors["mtp.layers.0.mlp.up_proj.weight"].shape == (recipe.intermediate_size or 64, 32)
        # The target's own parts are neither copied nor changed.
        assert all(name.startswith("mtp.") and "embed_tokens" not in name for name in tensors)
        assert copy.deepcopy(network).embed(torch.tensor([[1]])).dtype == torch.float32
        assert target.lm_head.weight.dtype == torch.bfloat16
        config = json.loads((tmp_path / "config.json").read_text())
        assert (config["model_type"], config.get("mtp_intermediate_size", 0)) == ("mtp", recipe.intermediate_size)

    def test_unsuitable_targets(self):
        with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel.*llama"):
            MtpRecipe().check(tiny_gpt2())
        with pytest.raises(SpecConfigError, match="have experts.*Leave out `intermediate_size`"):
            MtpRecipe(intermediate_size=8).check(tiny_model("qwen3_moe"))

    @pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_5_text"])
    def test_layers_of_other_kinds_are_trained(self, kind, tmp_path):
        target = TARGETS[kind]().requires_grad_(False)
        target.generation_config.pad_token_id = 0
        recipe = MtpRecipe(ttt_steps=2)
        torch.manual_seed(0)
        network = recipe.build(target)
        batches = [Rows.of(torch.randint(1, VOCAB_SIZE, (4, 24))) for _ in range(2)] * 10
        settings = TrainingOptions(steps=20, learning_rate=1e-2, warmup_steps=2, bf16=False, muon=True)
        losses = train(network, iter(batches), recipe.objective(network, TargetReader(target, ("last",))), settings)
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
        recipe.save(network, tmp_path, dtype=torch.float32)
        loaded = load_speculator(target, "mtp", model=str(tmp_path)).resources
        assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in network.state_dict().items())
        inputs = prompts(2)
        drafted = target.generate(**inputs, **GREEDY, spec_model=str(tmp_path))
        assert torch.equal(drafted, target.generate(**inputs, **GREEDY))
