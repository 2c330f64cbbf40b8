"""The recipe of MTP layers: what a step of the training sees is what drafting sees, and training helps."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from hf_specdec import load_speculator
from hf_specdec.candidate_generators.mtp.recipe import MtpRecipe
from hf_specdec.drafting.entries import DraftEntries
from hf_specdec.errors import SpecConfigError, UnsupportedModelError
from hf_specdec.layers.llama import DecoderLayer, is_llama_layer
from hf_specdec.training.autoregressive import walk_cycles
from hf_specdec.training.reading import Batch, TargetReader
from hf_specdec.training.run import make_recipe
from hf_specdec.training.trainer import TrainingOptions, train
from tests.architectures import tiny_model
from tests.models import VOCAB_SIZE, prompts, tiny_gpt2, tiny_llama, tiny_mistral


RECIPES = {"default": MtpRecipe(), "narrow": MtpRecipe(ttt_steps=2, intermediate_size=24, kl_weight=0.5)}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
GREEDY = {"do_sample": False, "max_new_tokens": 24}

# Layers of several kinds: a short window; latent attention and experts; gated attention beside recurrent layers.
TARGETS = {
    "llama": tiny_llama,
    "mistral, window of 4": lambda: tiny_mistral(sliding_window=4),
    "deepseek_v3": lambda: tiny_model("deepseek_v3", first_k_dense_replace=1),
    "qwen3_5_text": lambda: tiny_model("qwen3_5_text"),
}


def built(recipe, target):
    """A network with random weights large enough to tell wrong states from right ones."""
    torch.manual_seed(0)
    network = recipe.build(target)
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return network


@pytest.mark.parametrize("kind", TARGETS)
@torch.no_grad()
def test_a_step_sees_what_drafting_sees(kind):
    target, steps = TARGETS[kind](), 3
    recipe = MtpRecipe()
    network = built(recipe, target)
    tokens = torch.randint(1, VOCAB_SIZE, (2, 14), generator=torch.Generator().manual_seed(5))
    reading = TargetReader(target, recipe.states_for(network)).read(tokens)
    states = network.fuse(reading.states)
    anchors = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 4, 3, 2, 1, 0, 5, 6, 8, 7]])
    walked = list(walk_cycles(network, tokens, states, anchors, steps))
    for anchor in range(10):
        places = (anchors == anchor).nonzero(as_tuple=True)
        # What the cached forward of a cycle does that begins here, one token at a time.
        entries = DraftEntries(network, starts=[0, 0], offsets=[0, 0], capacity=32)
        count = anchor + 1
        outputs = entries.read(tokens[:, 1 : count + 1], states[:, :count], [count, count])
        handed_on, output = (part[:, -1:] for part in outputs)
        entries.begin_draft(steps)
        for step in range(steps):
            if step:
                node = tokens[:, anchor + 1 + step, None]
                handed_on, output = entries.read_nodes(node, handed_on, torch.zeros(1, dtype=torch.long))
            for found, expected in zip(walked[step], (handed_on, output)):
                torch.testing.assert_close(found[places], expected[:, 0], atol=1e-5, rtol=1e-5)


class TestLoss:
    def test_is_the_weighted_mean_of_the_steps(self, target):
        recipe = replace(RECIPES["narrow"], head_decay=0.5)
        network = built(recipe, target)
        tokens = torch.randint(1, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(6))
        counted = torch.ones_like(tokens, dtype=torch.bool)
        counted[0, :7] = False
        reading = TargetReader(target, ("last",)).read(Batch(tokens, counted))
        law = target(tokens).logits.log_softmax(-1)
        anchors = torch.arange(15).expand(2, -1)
        means = []
        for step, (_, output) in enumerate(walk_cycles(network, tokens, reading.states["last"], anchors, 2)):
            losses = []
            for row in range(2):
                for anchor in range(16 - 2 - step):
                    # Cycles begin where their first draft counts.
                    if counted[row, anchor + 2]:
                        wanted = law[row, anchor + 1 + step]
                        log_probs = target.lm_head(output[row, anchor]).log_softmax(-1)
                        divergence = (wanted.exp() * (wanted - log_probs)).sum()
                        losses.append(0.5 * divergence - 0.5 * log_probs[tokens[row, anchor + 2 + step]])
            means.append(torch.stack(losses).mean())
        torch.testing.assert_close(recipe.loss(network, reading), (means[0] + 0.5 * means[1]) / 1.5)

    @every_recipe
    def test_every_parameter_learns_and_the_target_does_not(self, recipe, target):
        network = recipe.build(target)
        reader = TargetReader(target, recipe.states_for(network))
        recipe.loss(network, reader.read(torch.randint(1, VOCAB_SIZE, (2, 16)))).backward()
        without = [name for name, parameter in network.named_parameters() if not parameter.grad.abs().sum() > 0]
        assert not without
        assert all(parameter.grad is None for parameter in target.parameters())

    def test_nothing_counts(self, target):
        recipe = MtpRecipe()
        network = recipe.build(target)
        tokens = torch.randint(1, VOCAB_SIZE, (2, 16))
        reader = TargetReader(target, recipe.states_for(network))
        loss = recipe.loss(network, reader.read(Batch(tokens, torch.zeros_like(tokens, dtype=torch.bool))))
        assert loss == 0
        loss.backward()


class TestBuilding:
    def test_the_layer_begins_as_the_last_one_of_the_target(self, target):
        last = target.model.layers[-1]
        layer = MtpRecipe(intermediate_size=24).build(target).layers[0]
        assert type(layer) is DecoderLayer
        assert is_llama_layer(last)
        assert torch.equal(layer.self_attn.q_proj.weight, last.self_attn.q_proj.weight)
        assert torch.equal(layer.mlp.up_proj.weight, last.mlp.up_proj.weight[:24])
        assert torch.equal(layer.mlp.down_proj.weight, last.mlp.down_proj.weight[:, :24])

    def test_it_is_trained_in_float32_and_saved_as_asked_for(self, tmp_path):
        target, recipe = tiny_llama().to(torch.bfloat16), MtpRecipe()
        network = recipe.build(target)
        recipe.save(network, tmp_path, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
        tensors = load_file(tmp_path / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert torch.equal(tensors["mtp.fc.weight"], network.eh_proj[0].weight.to(torch.bfloat16))
        # The target's own parts are neither copied nor changed.
        assert copy.deepcopy(network).embed(torch.tensor([[1]])).dtype == torch.float32
        assert target.lm_head.weight.dtype == torch.bfloat16

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"ttt_steps": 0}, "`ttt_steps` must be at least 1, got 0"),
            ({"head_decay": 2.0}, "`head_decay` must be from 0 to 1"),
            ({"kl_weight": -0.1}, "`kl_weight` must be from 0 to 1"),
            ({"intermediate_size": -1}, "`intermediate_size` must be at least 0"),
            ({"intermediate_size": 65}, "`intermediate_size` must be at most 64, that of LlamaForCausalLM, got 65"),
            ({"num_layers": 2}, "no option of the recipe for mtp. It is for .*eagle"),
        ],
    )
    def test_errors(self, given, message, target):
        with pytest.raises(SpecConfigError, match=message):
            make_recipe("mtp", given).check(target)

    def test_unsuitable_targets(self):
        with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel.*llama"):
            MtpRecipe().check(tiny_gpt2())
        with pytest.raises(SpecConfigError, match="have experts.*Leave out `intermediate_size`"):
            MtpRecipe(intermediate_size=8).check(tiny_model("qwen3_moe"))


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_5_text"])
def test_layers_of_other_kinds_are_trained(kind, tmp_path):
    target = TARGETS[kind]().requires_grad_(False)
    target.generation_config.pad_token_id = 0
    recipe = MtpRecipe(ttt_steps=2)
    torch.manual_seed(0)
    network = recipe.build(target)
    batches = [Batch.of(torch.randint(1, VOCAB_SIZE, (4, 24))) for _ in range(2)] * 10
    settings = TrainingOptions(steps=20, learning_rate=1e-2, warmup_steps=2, bf16=False, muon=True)
    losses = train(network, iter(batches), recipe.objective(network, TargetReader(target, ("last",))), settings)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    recipe.save(network, tmp_path, dtype=torch.float32)
    loaded = load_speculator(target, "mtp", model=str(tmp_path)).resources
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in network.state_dict().items())
    inputs = prompts(2)
    drafted = target.generate(**inputs, **GREEDY, spec_model=str(tmp_path))
    assert torch.equal(drafted, target.generate(**inputs, **GREEDY))


@every_recipe
def test_what_is_saved(recipe, target, tmp_path):
    recipe.save(recipe.build(target), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert all(name.startswith("mtp.") for name in tensors)
    assert not any("embed_tokens" in name or "lm_head" in name for name in tensors)
    assert tensors["mtp.layers.0.mlp.up_proj.weight"].shape == (recipe.intermediate_size or 64, 32)
    assert tensors["mtp.fc.weight"].dtype == torch.bfloat16
    assert config["model_type"] == "mtp"
    assert config.get("mtp_intermediate_size", 0) == recipe.intermediate_size
