"""Recipes of EAGLE heads: what a step of the training sees is what drafting sees, and training helps."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hf_specdec.candidate_generators.eagle.recipe import Eagle1Recipe, Eagle3Recipe
from hf_specdec.drafting.entries import DraftEntries
from hf_specdec.errors import SpecConfigError
from hf_specdec.training.autoregressive import walk_cycles
from hf_specdec.training.reading import Batch, TargetReader
from hf_specdec.training.run import make_recipe
from tests.models import VOCAB_SIZE, tiny_llama


RECIPES = {
    "eagle": Eagle1Recipe(token_weight=1.0),
    "eagle, two layers and steps": Eagle1Recipe(ttt_steps=2, num_layers=2, intermediate_size=24, kl_weight=0.5),
    "eagle3": Eagle3Recipe(ttt_steps=4),
    "eagle3, few tokens": Eagle3Recipe(ttt_steps=3, draft_vocab_size=48, aux_layer_ids=(0, 2), kl_weight=0.5),
    "eagle3, narrow": Eagle3Recipe(ttt_steps=3, hidden_size=24, num_layers=2, intermediate_size=40),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def built(recipe, target, seed=0):
    """A network with random weights large enough to tell wrong states from right ones."""
    torch.manual_seed(seed)
    network = recipe.build(target)
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return network


class TestCycles:
    def test_begin_where_their_first_draft_counts(self, target):
        recipe = Eagle1Recipe()
        tokens = torch.randint(1, VOCAB_SIZE, (3, 12))
        counted = torch.zeros_like(tokens, dtype=torch.bool)
        counted[0, 4:7] = counted[1, 6:] = True
        network = built(recipe, target)
        reading = TargetReader(target, recipe.states_for(network)).read(Batch(tokens, counted))
        _, known = recipe.hits(network, reading)
        assert [known[:, row].int().tolist() for row in range(3)] == [
            [[0, 0, *[1] * 3, *[0] * 7], [0, 0, 1, 1, *[0] * 8], [0, 0, 1, *[0] * 9], [0] * 12],
            [[*[0] * 4, *[1] * (6 - draft), *[0] * (2 + draft)] for draft in range(4)],
            [[0] * 12] * 4,
        ]
        nothing = Batch(tokens, torch.zeros_like(counted))
        assert recipe.loss(network, TargetReader(target, ("last",)).read(nothing)) == 0

    @every_recipe
    def test_a_step_sees_what_drafting_sees(self, recipe, target):
        network, steps = built(recipe, target).double(), 4
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
            hidden, output = (part[:, -1:] for part in outputs)
            entries.begin_draft(steps)
            for step in range(steps):
                if step:
                    node = tokens[:, anchor + 1 + step, None]
                    hidden, output = entries.read_nodes(node, hidden, torch.zeros(1, dtype=torch.long))
                for found, expected in zip(walked[step], (hidden, output)):
                    torch.testing.assert_close(found[places], expected[:, 0], atol=1e-5, rtol=1e-5)

    def test_steps_differ_from_those_on_states_of_the_target(self, target):
        network = built(RECIPES["eagle3"], target)
        tokens = torch.randint(1, VOCAB_SIZE, (1, 14))
        reading = TargetReader(target, RECIPES["eagle3"].states_for(network)).read(tokens)
        anchors = torch.arange(12)[None]
        (first, _), (second, _) = walk_cycles(network, tokens, network.fuse(reading.states), anchors, 2)
        assert not torch.allclose(first[:, 1:], second[:, :-1], atol=1e-2)


class TestLosses:
    @pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3, few tokens"])
    def test_is_the_weighted_mean_of_the_steps(self, name, target):
        recipe = replace(RECIPES[name], ttt_steps=2, head_decay=0.5, **({"noise": 0.0} if name == "eagle" else {}))
        network = built(recipe, target)
        tokens = torch.randint(1, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(6))
        counted = torch.ones_like(tokens, dtype=torch.bool)
        counted[0, :7] = False
        known = list(range(VOCAB_SIZE)) if network.token_ids is None else network.token_ids.tolist()
        reading = TargetReader(target, recipe.states_for(network)).read(Batch(tokens, counted))
        target_logits = target(tokens).logits
        means = []
        anchors = torch.arange(15).expand(2, -1)
        for step, (fed, output) in enumerate(walk_cycles(network, tokens, network.fuse(reading.states), anchors, 2)):
            losses = []
            for row in range(2):
                for anchor in range(16 - 2 - step):
                    label = int(tokens[row, anchor + 2 + step])
                    # Cycles begin where their first draft counts.
                    if not counted[row, anchor + 2] or label not in known:
                        continue
                    law = target_logits[row, anchor + 1 + step, known].softmax(-1)
                    logits = network.logits(output[row, anchor])
                    kl = (law * (law.log() - logits.log_softmax(-1))).sum()
                    loss = recipe.kl_weight * kl
                    loss = loss - (1 - recipe.kl_weight) * logits.log_softmax(-1)[known.index(label)]
                    if recipe.method == "eagle":
                        state = reading.states["last"][row, anchor + 1 + step]
                        loss = recipe.token_weight * loss + F.smooth_l1_loss(fed[row, anchor], state)
                    losses.append(loss)
            means.append(torch.stack(losses).mean())
        expected = (means[0] + 0.5 * means[1]) / 1.5
        torch.testing.assert_close(recipe.loss(network, reading), expected, atol=1e-4, rtol=1e-4)

    @every_recipe
    def test_every_parameter_learns_and_the_target_does_not(self, recipe, target):
        network = recipe.build(target)
        tokens = torch.randint(1, VOCAB_SIZE, (2, 16))
        reader = TargetReader(target, recipe.states_for(network))
        recipe.loss(network, reader.read(tokens)).backward()
        without = [name for name, parameter in network.named_parameters() if not parameter.grad.abs().sum() > 0]
        assert not without
        assert all(parameter.grad is None for parameter in target.parameters())

    @every_recipe
    def test_nothing_counts(self, recipe, target):
        network = recipe.build(target)
        tokens = torch.randint(1, VOCAB_SIZE, (2, 16))
        reader = TargetReader(target, recipe.states_for(network))
        loss = recipe.loss(network, reader.read(Batch(tokens, torch.zeros_like(tokens, dtype=torch.bool))))
        assert loss == 0
        loss.backward()

    def test_noise_is_of_the_training_alone(self, target):
        recipe = RECIPES["eagle"]
        network = built(recipe, target)
        reading = TargetReader(target, ("last",)).read(torch.randint(1, VOCAB_SIZE, (2, 16)))
        assert recipe.loss(network, reading) != recipe.loss(network, reading)
        assert torch.equal(recipe.hits(network, reading)[0], recipe.hits(network, reading)[0])
        quiet = replace(recipe, noise=0.0)
        assert quiet.loss(network, reading) == quiet.loss(network, reading)


class TestBuilding:
    def test_sizes_are_the_targets_where_none_are_given(self, target):
        config = Eagle3Recipe().build(target).config
        assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 64, 8)
        assert (config.draft_vocab_size, config.has_token_ids, config.own_embedding) == (VOCAB_SIZE, False, False)
        # Of 2, N // 2 and N - 3 with two layers.
        assert config.aux_layer_ids == (0, 1, 2)
        assert Eagle3Recipe().build(tiny_llama(num_hidden_layers=8)).config.aux_layer_ids == (2, 4, 5)

    def test_the_draft_knows_the_most_frequent_tokens(self, target):
        recipe = Eagle3Recipe(draft_vocab_size=3)
        network = recipe.build(target)
        recipe.prepare(network, target, torch.tensor([9, 5, 9, 40, 40, 7, 9, 5]))
        assert network.token_ids.tolist() == [5, 9, 40]
        assert torch.equal(network.lm_head.weight, target.lm_head.weight[[5, 9, 40]])

    @pytest.mark.parametrize(
        ("method", "given", "message"),
        [
            ("eagle", {"ttt_steps": 0}, "`ttt_steps` must be at least 1, got 0"),
            ("eagle", {"noise": -1.0}, "`noise` must be at least 0"),
            ("eagle", {"draft_vocab_size": 8}, "no option of the recipe for eagle. It is for eagle3"),
            ("eagle3", {"head_decay": 2.0}, "`head_decay` must be from 0 to 1"),
            ("eagle3", {"aux_layer_ids": ()}, "at least one state"),
            ("eagle3", {"aux_layer_ids": (1, 3)}, "from 0 to 2, the number of layers of LlamaForCausalLM, got 3"),
            ("eagle3", {"draft_vocab_size": 65}, "`draft_vocab_size` must be at most 64, the target's, got 65"),
        ],
    )
    def test_errors(self, method, given, message, target):
        with pytest.raises(SpecConfigError, match=message):
            make_recipe(method, given).check(target)


@every_recipe
def test_what_is_shared_is_not_saved(recipe, target, tmp_path):
    recipe.save(recipe.build(target), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert ("embed_tokens.weight" in tensors) == (config["hidden_size"] != 32)
    is_eagle3 = recipe.method == "eagle3"
    assert ("lm_head.weight" in tensors) == ("midlayer.hidden_norm.weight" in tensors) == is_eagle3
    assert ("d2t" in tensors) == (config.get("draft_vocab_size", VOCAB_SIZE) != VOCAB_SIZE)
    assert tensors["fc.weight"].dtype == torch.bfloat16
