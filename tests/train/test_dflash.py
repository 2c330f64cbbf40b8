"""The recipe of DFlash drafts: a block in training sees what drafting sees, and training helps."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from hf_specdec import SpecConfigError, load_speculator
from hf_specdec.candidate_generators.dflash import recipe as dflash
from hf_specdec.candidate_generators.dflash.config import BlockView
from hf_specdec.candidate_generators.dflash.corrections import Block
from hf_specdec.candidate_generators.dflash.network import DFlashNetwork
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe, read_blocks
from hf_specdec.candidate_generators.dflash.text import DraftText
from hf_specdec.layers.mask_token import mask_token_for
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.reading import IGNORED, TargetReader
from hf_specdec.training.text import load_documents, pack
from hf_specdec.training.trainer import train
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, tiny_llama
from tests.helpers.recipes import BLOCKS, RECIPES, built, enlarged, named, read


LENGTH = 48


def drafted(network, reading, row, place, masked):
    """The output at the masks, `(K, h)`, of the cached forward of drafting for a block after `place`."""
    text = DraftText(network, starts=[0], offsets=[0], capacity=64)
    states = {key: reading.states[key][row, None, : place + 1] for key in network.target_hidden_states}
    text.extend(states, [place + 1])
    size = network.config.block_size
    text.begin_block(size)
    block = torch.tensor([[int(reading.tokens[row, place + 1]), *masked]])
    return network.predicting(text.read_block(block))[0]


class TestBlocks:
    @pytest.mark.parametrize("piece", [1, 12, 128])
    @pytest.mark.parametrize("views", [(), (BlockView(), BlockView(4, True))], ids=["full", "sliding"])
    @pytest.mark.parametrize("name", ["dflash", "dflash, selector"])
    def test_see_what_drafting_sees(self, name, piece, views, target, monkeypatch):
        monkeypatch.setattr(dflash, "_PIECE", piece)
        recipe = RECIPES[name]
        network = recipe.build(target)
        network = enlarged(DFlashNetwork(replace(network.config, views=views)).attach(target) if views else network)
        reading = read(recipe, network, target)
        anchors = torch.tensor([[0, 7, 3, 12, 5], [18, 4, 2, 1, 0]])
        blocks = torch.randint(1, VOCAB_SIZE, (2, 5, 5), generator=torch.Generator().manual_seed(7))
        blocks[..., 0] = reading.tokens.gather(1, anchors + 1)
        context = network.context(network.fuse(reading.states), torch.arange(20)[None])
        found = read_blocks(network, context, anchors, blocks)
        for row in range(2):
            for index, place in enumerate(anchors[row].tolist()):
                expected = drafted(network, reading, row, place, blocks[row, index, 1:].tolist())
                torch.testing.assert_close(found[row, index], expected, atol=1e-5, rtol=1e-5)

    def test_anchors_are_drawn_from_all(self, target):
        recipe = replace(RECIPES["dflash"], num_anchors=3)
        network = built(recipe, target)
        reading = read(recipe, network, target, uncounted=16)
        torch.manual_seed(0)
        drawn = [recipe.draw_anchors(reading) for _ in range(60)]
        assert all(anchors.shape == (2, 3) and len(set(anchors[1].tolist())) == 3 for anchors in drawn)
        assert {place for anchors in drawn for place in anchors[1].tolist()} == set(range(18))
        # The first row has four; before they run out nothing else is drawn.
        assert {place for anchors in drawn for place in anchors[0].tolist()} == {14, 15, 16, 17}

    def test_a_part_of_some_is_revealed(self):
        recipe = DFlashRecipe(block_size=6, reveal_share=0.5)
        labels = torch.ones((4, 500, 5), dtype=torch.long)
        labels[..., -1] = IGNORED
        torch.manual_seed(0)
        shown = recipe.draw_revealed(labels)
        assert not shown[..., -1].any()
        assert 0.4 < shown.any(2).float().mean() < 0.5
        # One to four of five, of which the last has no token.
        assert set(shown.sum(2).unique().tolist()) == {0, 1, 2, 3, 4}
        places = shown[..., :4].float().mean((0, 1))
        assert places.max() - places.min() < 0.05
        full = recipe.draw_revealed(torch.ones((4, 500, 5), dtype=torch.long))
        assert full.sum(2).max() == 4


def selector_loss(network, output, before, token):
    """Loss of the selector for a token after another one, where it is a candidate."""
    selector, logits = network.candidate_selector, network.logits(output[None])[0]
    candidates = logits.argsort(descending=True)[: selector.top_k].tolist()
    if token not in candidates:
        return 0.0
    projected = selector.predecessor_codebook[before] * selector.hidden_projection(output)
    scores = torch.stack([logits[c] + projected @ selector.successor_codebook[c] for c in candidates])
    return -scores.log_softmax(-1)[candidates.index(token)]


def lattice_losses(recipe, network, reading, row, place, output, text, target_logits):
    """Losses of the lattice at the places of a block, up to the first whose token is no candidate."""
    seen = network.fuse({key: reading.states[key][row, None, place, None] for key in network.target_hidden_states})
    edges = network.lilicorr(network.logits(output[None]), output[None], seen[:, 0], network.embed)
    before, losses = 0, []
    for candidates, scores, token, wanted in zip(edges.tokens[0].tolist(), edges.scores[0], text, target_logits):
        if token not in candidates:
            break
        right = candidates.index(token)
        probs = scores[before].softmax(-1)
        rejected = sum(prob * max(0, wanted[token] - wanted[c]) for prob, c in zip(probs, candidates))
        losses.append(-recipe.lattice_weight * probs[right].log() + recipe.rejection_weight * rejected)
        before = right
    return losses


@pytest.mark.parametrize("name", named("dflash"))
def test_the_loss_is_that_of_blocks_read_one_by_one(name, target):
    recipe = RECIPES[name]
    recipe = replace(recipe, num_anchors=min(recipe.num_anchors, 9))
    network = built(recipe, target)
    reading = read(recipe, network, target, uncounted=7)
    target_logits = target(reading.tokens).logits
    target_log_probs = target_logits.log_softmax(-1)
    torch.manual_seed(4)
    found = recipe.loss(network, reading)
    torch.manual_seed(4)
    anchors = recipe.draw_anchors(reading)
    labels = reading.labels_at(anchors, recipe.num_drafts).movedim(0, 2)
    revealed = recipe.draw_revealed(labels)
    assert bool(revealed.any()) == bool(recipe.reveal_share)
    total = weights = 0.0
    of_lattice = []
    for row in range(2):
        for index, place in enumerate(anchors[row].tolist()):
            if place + 2 >= 20 or not reading.counted[row, place + 2]:
                continue
            text = reading.tokens[row, place + 2 :].tolist()
            shown = revealed[row, index].tolist()
            masked = [text[at] if known else network.config.mask_token_id for at, known in enumerate(shown)]
            output = drafted(network, reading, row, place, masked)
            logits = network.logits(output)
            if network.config.is_sequential:
                walk = network.left_to_right(Block(logits[None], output[None]))
                before = reading.tokens[row, place + 1 :]
                logits = torch.cat([walk.after(token[None]) for token in before[: len(logits)]])
            if network.lilicorr is not None:
                wanted = target_logits[row, place + 1 :]
                of_lattice += lattice_losses(recipe, network, reading, row, place, output, text, wanted)
            log_probs = logits.log_softmax(-1)
            for mask, token in enumerate(text[: recipe.num_drafts]):
                if shown[mask]:
                    continue
                wanted = target_log_probs[row, place + 1 + mask]
                divergence = (wanted.exp() * (wanted - log_probs[mask])).sum()
                loss = recipe.kl_weight * divergence - (1 - recipe.kl_weight) * log_probs[mask, token]
                if network.candidate_selector is not None:
                    before = reading.tokens[row, place + 1 + mask]
                    loss = loss + recipe.selector_weight * selector_loss(network, output[mask], before, token)
                total = total + recipe.head_decay**mask * loss
                weights += recipe.head_decay**mask
    if network.lilicorr is not None:
        assert len(of_lattice) > 5
    expected = total / weights + sum(of_lattice) / max(len(of_lattice), 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


class TestBuilding:
    def test_sizes_are_the_targets_where_none_are_given(self):
        target = tiny_llama(num_hidden_layers=8)
        config = DFlashRecipe(num_layers=2).build(target).config
        assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 64, 8)
        assert (config.block_size, config.num_hidden_layers, config.target_layer_ids) == (16, 2, (1, 5))
        assert (config.num_target_layers, config.num_denoising_steps, config.own_head) == (8, 1, False)
        # A target without room for the default.
        assert DFlashRecipe().build(tiny_llama()).config.target_layer_ids == (0, 1)

    def test_the_layers_begin_as_the_last_ones_of_the_target(self):
        target = tiny_llama(num_hidden_layers=3)
        network = DFlashRecipe(num_layers=2, intermediate_size=24, target_layer_ids=(2, 0)).build(target)
        for own, layer in zip(network.layers, target.model.layers[1:]):
            assert torch.equal(own.self_attn.q_proj.weight, layer.self_attn.q_proj.weight)
            assert torch.equal(own.mlp.down_proj.weight, layer.mlp.down_proj.weight[:, :24])
        # They read mostly the deeper of the states.
        deeper, other = network.fc.weight.chunk(2, dim=1)
        assert deeper.diagonal().mean() > 0.8
        assert other.diagonal().mean().abs() < 0.1

    def test_revealed_blocks_declare_several_steps(self, target):
        assert DFlashRecipe(reveal_share=0.5).build(target).config.num_denoising_steps == 3
        assert RECIPES["dflash, revealed"].build(target).config.num_denoising_steps == 2

    def test_causal_blocks_stay_causal(self, target, tmp_path):
        recipe = RECIPES["dflash, causal"]
        network = built(recipe, target)
        recipe.save(network, tmp_path, dtype=torch.float32)
        config = load_speculator(target, "dflash", model=str(tmp_path)).resources.config
        assert config.views == (BlockView(causal=True),) * 2
        assert config.suits_trees
        # A token of the block changes nothing before it.
        reading = read(recipe, network, target)
        first, second = (drafted(network, reading, 0, 6, masked) for masked in ([0, 1, 2, 3], [0, 1, 2, 9]))
        assert torch.equal(first[:3], second[:3])
        assert not torch.equal(first[3], second[3])

    def test_the_mask_token(self, tmp_path):
        model, tokenizer = tiny_llama(), letter_tokenizer()
        assert mask_token_for(model) == 0
        model.generation_config.eos_token_id = [5, 7]
        assert mask_token_for(model) == 5
        model.config.name_or_path = str(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        assert mask_token_for(model) == 5
        model.resize_token_embeddings(VOCAB_SIZE + 8)
        assert mask_token_for(model) == VOCAB_SIZE
        tokenizer.add_special_tokens({"additional_special_tokens": ["<other>", "<|MASK|>"]})
        tokenizer.save_pretrained(tmp_path)
        assert mask_token_for(model) == VOCAB_SIZE + 1
        model.resize_token_embeddings(VOCAB_SIZE + 1)
        assert mask_token_for(model) == 5


@pytest.mark.parametrize("name", ["dflash", "dflash, revealed", "dflash, one layer", "dflash, selector"])
def test_what_is_saved(name, target, tmp_path):
    recipe = RECIPES[name]
    recipe.save(recipe.build(target), tmp_path, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"embed_tokens.weight", "lm_head.weight"} & tensors.keys()
    assert tensors["fc.weight"].dtype == torch.bfloat16
    kind = "DFlash2DraftModel" if "selector" in name else "DFlashDraftModel"
    assert config["architectures"] == [kind]
    assert (config["block_size"], config["num_hidden_layers"]) == (recipe.block_size, recipe.num_layers)
    assert config["dflash_config"].get("num_denoising_steps") == recipe.num_denoising_steps
    assert config["dflash_config"]["mask_token_id"] == (recipe.mask_token_id or 0)


def test_a_selector_begins_as_none_and_learns(target, data):
    rows = pack(load_documents([str(data)], letter_tokenizer()), LENGTH, None)
    settings = TrainingOptions(steps=120, learning_rate=1e-2, warmup_steps=5, bf16=False)
    recipe = replace(RECIPES["dflash, selector"], num_anchors=8)
    torch.manual_seed(1)
    network, plain = recipe.build(target), DFlashRecipe(**BLOCKS)
    torch.manual_seed(1)
    plain_network = plain.build(target)
    reader = TargetReader(target, recipe.states_for(network))
    reading = reader.read(rows.once(32)[0])
    anchors = reading.cycle_anchors()
    same = dict(network.named_parameters())
    with torch.no_grad():
        for name, weight in plain_network.named_parameters():
            same[name].copy_(weight)
        states = {"last": 2}
        plain_reading = TargetReader(target, plain.states_for(plain_network)).read(rows.once(32)[0])
        plain_reading.states[states["last"]] = reading.states["last"]
        assert torch.equal(
            recipe.drafts(network, reading, anchors), plain.drafts(plain_network, plain_reading, anchors)
        )
    train(network, rows.batches(4, 0), recipe.objective(network, reader), settings)
    everywhere = replace(recipe, num_anchors=0)
    with torch.no_grad():
        learned = everywhere.loss(network, reading)
        network.candidate_selector.successor_codebook.zero_()
        assert learned < 0.95 * everywhere.loss(network, reading)


def test_corrections_begin_as_next_to_none_and_learn(target, data):
    rows = pack(load_documents([str(data)], letter_tokenizer()), LENGTH, None)
    settings = TrainingOptions(steps=120, learning_rate=1e-2, warmup_steps=5, bf16=False)
    recipe = replace(RECIPES["dflash, domino"], num_anchors=8, kl_weight=0.0)
    torch.manual_seed(1)
    network = recipe.build(target)
    assert network.logit_head.embed_proj[2].weight.abs().max() < 0.01
    reader = TargetReader(target, recipe.states_for(network))
    train(network, rows.batches(4, 0), recipe.objective(network, reader), settings)
    reading, everywhere = reader.read(rows.once(32)[0]), replace(recipe, num_anchors=0)
    with torch.no_grad():
        learned = everywhere.loss(network, reading)
        network.logit_head.embed_proj[2].weight.zero_()
        assert learned < 0.9 * everywhere.loss(network, reading)
    with pytest.raises(SpecConfigError, match="`reveal_share`=0.5 .* drafts of this kind take one"):
        replace(recipe, reveal_share=0.5)


def test_a_lattice_learns_to_walk(target, data):
    """After some steps its walk accepts more than the best token of each place."""
    rows = pack(load_documents([str(data)], letter_tokenizer()), LENGTH, None)
    settings = TrainingOptions(steps=120, learning_rate=1e-2, warmup_steps=5, bf16=False)
    recipe = replace(RECIPES["dflash, lilicorr"], num_anchors=8)
    torch.manual_seed(1)
    network = recipe.build(target)
    reader = TargetReader(target, recipe.states_for(network))
    held_out = rows.once(32)[:1]
    untrained = recipe.measure(network, reader, held_out)
    train(network, rows.batches(4, 0), recipe.objective(network, reader), settings)
    walked = recipe.measure(network, reader, held_out)
    plain = DFlashNetwork(replace(network.config, lilicorr=None))
    plain.load_state_dict(network.state_dict(), strict=False)
    alone = recipe.measure(plain.attach(target), reader, held_out)
    assert walked.tokens_per_cycle > untrained.tokens_per_cycle + 0.3
    assert walked.tokens_per_cycle > alone.tokens_per_cycle
    with pytest.raises(SpecConfigError, match="`lilicorr_num_heads`=3 must divide `lilicorr_hidden_size`, got 16"):
        replace(recipe, lilicorr_num_heads=3)


def test_revealing_teaches_to_use_known_tokens(target, data):
    rows = pack(load_documents([str(data)], letter_tokenizer()), LENGTH, None)
    settings = TrainingOptions(steps=160, learning_rate=1e-2, warmup_steps=5, bf16=False)

    def gain(share):
        """The loss beside known tokens relative to that among masks."""
        recipe = DFlashRecipe(**BLOCKS, num_anchors=8, reveal_share=share)
        torch.manual_seed(1)
        network = recipe.build(target)
        reader = TargetReader(target, recipe.states_for(network))
        train(network, rows.batches(4, 0), recipe.objective(network, reader), settings)
        reading = reader.read(rows.once(32)[0])
        with torch.no_grad():
            known, masked = (replace(recipe, num_anchors=0, reveal_share=part) for part in (1.0, 0.0))
            return known.loss(network, reading) / masked.loss(network, reading)

    assert gain(0.7) < gain(0.0) - 0.05
