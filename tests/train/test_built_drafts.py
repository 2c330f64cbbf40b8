"""What a recipe builds and saves: sizes and weights from the target, and checkpoints that loading understands."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

from hf_specdec import load_speculator
from hf_specdec.candidate_generators.dflash.config import BlockView
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.eagle.recipe import Eagle3Recipe, PEagleRecipe
from hf_specdec.candidate_generators.mtp.recipe import MtpRecipe
from hf_specdec.errors import SpecDecError
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.layers.known import is_llama_layer
from hf_specdec.layers.llama import DecoderLayer
from hf_specdec.layers.mask_token import mask_token_for
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.reading import Rows, TargetReader
from hf_specdec.training.trainer import train
from tests.helpers.architectures import tiny_model
from tests.helpers.levels import full, in_full
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, prompts, tiny_gpt2, tiny_llama
from tests.helpers.recipes import MTP_TARGETS, RECIPES, built, drafted_block, read


def saved(recipe, network, folder, **how):
    """Tensors and settings of what the recipe writes."""
    recipe.save(network, folder, **how)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        *("eagle3, few tokens", "eagle3, parallel", "dflash, selector"),
        *in_full("eagle", "eagle3, narrow", "eagle3, parallel, shared", "dflash, one layer", "dflash, revealed"),
    ],
)
def test_what_is_shared_is_not_saved(name, target, tmp_path):
    recipe = RECIPES[name]
    tensors, config = saved(recipe, recipe.build(target), tmp_path, dtype=torch.bfloat16)
    assert tensors["fc.weight"].dtype == torch.bfloat16
    if recipe.method == "dflash":
        assert not {"embed_tokens.weight", "lm_head.weight"} & tensors.keys()
        assert config["architectures"] == ["DFlash2DraftModel" if "selector" in name else "DFlashDraftModel"]
        assert (config["block_size"], config["num_hidden_layers"]) == (recipe.block_size, recipe.num_layers)
        assert config["dflash_config"].get("num_denoising_steps") == recipe.num_denoising_steps
        assert config["dflash_config"]["mask_token_id"] == (recipe.mask_token_id or 0)
        return
    has_own = config["hidden_size"] != 32 or getattr(recipe, "own_embedding", False)
    assert ("embed_tokens.weight" in tensors) == has_own
    assert ("mask_hidden" in tensors) == ("mask_token_id" in config) == ("parallel" in name)
    is_eagle3 = recipe.method == "eagle3"
    assert ("lm_head.weight" in tensors) == ("midlayer.hidden_norm.weight" in tensors) == is_eagle3
    assert ("d2t" in tensors) == (config.get("draft_vocab_size", VOCAB_SIZE) != VOCAB_SIZE)


def test_eagle3_sizes_are_the_targets_and_the_draft_knows_the_most_frequent_tokens(target, tmp_path):
    config = Eagle3Recipe().build(target).config
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 64, 8)
    assert (config.draft_vocab_size, config.has_token_ids, config.own_embedding) == (VOCAB_SIZE, False, False)
    # Of 2, N // 2 and N - 3 with two layers.
    assert config.aux_layer_ids == (0, 1, 2)
    assert Eagle3Recipe().build(tiny_llama(num_hidden_layers=8)).config.aux_layer_ids == (2, 4, 5)
    recipe = Eagle3Recipe(draft_vocab_size=3)
    network = recipe.build(target)
    recipe.prepare(network, target, torch.tensor([9, 5, 9, 40, 40, 7, 9, 5]))
    assert network.token_ids.tolist() == [5, 9, 40]
    assert torch.equal(network.lm_head.weight, target.lm_head.weight[[5, 9, 40]])
    recipe = PEagleRecipe(ttt_steps=5, num_layers=2, mask_token_id=7)
    recipe.save(recipe.build(target), tmp_path)
    config = load_speculator(target, model=str(tmp_path)).resources.config
    assert (config.mask_token_id, config.num_parallel_tokens, config.num_hidden_layers) == (7, 5, 2)
    found = detect_checkpoint(tmp_path)
    assert (found.format, found.num_draft_tokens) == ("peagle", 5)


def test_dflash_sizes_are_the_targets_and_its_layers_begin_as_the_last_ones():
    large, target = tiny_llama(num_hidden_layers=8), tiny_llama(num_hidden_layers=3)
    config = DFlashRecipe(num_layers=2).build(large).config
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 64, 8)
    assert (config.block_size, config.num_hidden_layers, config.target_layer_ids) == (16, 2, (1, 5))
    assert (config.num_target_layers, config.num_denoising_steps, config.own_head) == (8, 1, False)
    # A target without room for the default.
    assert DFlashRecipe().build(tiny_llama()).config.target_layer_ids == (0, 1)
    assert DFlashRecipe(reveal_share=0.5).build(target).config.num_denoising_steps == 3
    network = DFlashRecipe(num_layers=2, intermediate_size=24, target_layer_ids=(2, 0)).build(target)
    for own, layer in zip(network.layers, target.model.layers[1:]):
        assert torch.equal(own.self_attn.q_proj.weight, layer.self_attn.q_proj.weight)
        assert torch.equal(own.mlp.down_proj.weight, layer.mlp.down_proj.weight[:, :24])
    # They read mostly the deeper of the states.
    deeper, other = network.fc.weight.chunk(2, dim=1)
    assert deeper.diagonal().mean() > 0.8
    assert other.diagonal().mean().abs() < 0.1


def test_causal_blocks_stay_causal(target, tmp_path):
    recipe = RECIPES["dflash, causal"]
    network = built(recipe, target)
    recipe.save(network, tmp_path, dtype=torch.float32)
    config = load_speculator(target, "dflash", model=str(tmp_path)).resources.config
    assert config.views == (BlockView(causal=True),) * 2
    assert config.suits_trees
    # A token of the block changes nothing before it.
    reading = read(recipe, network, target)
    first, second = (drafted_block(network, reading, 0, 6, masked) for masked in ([0, 1, 2, 3], [0, 1, 2, 9]))
    assert torch.equal(first[:3], second[:3])
    assert not torch.equal(first[3], second[3])


def test_the_mask_token_is_one_that_no_text_has(tmp_path):
    model, tokenizer = tiny_llama(), letter_tokenizer()
    found = [mask_token_for(model)]
    model.generation_config.eos_token_id = [5, 7]
    model.config.name_or_path = str(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found.append(mask_token_for(model))
    model.resize_token_embeddings(VOCAB_SIZE + 8)
    found.append(mask_token_for(model))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<other>", "<|MASK|>"]})
    tokenizer.save_pretrained(tmp_path)
    found.append(mask_token_for(model))
    model.resize_token_embeddings(VOCAB_SIZE + 1)
    assert [*found, mask_token_for(model)] == [0, 5, VOCAB_SIZE, VOCAB_SIZE + 1, 5]


def test_an_mtp_layer_begins_as_the_last_one_and_is_trained_in_float32(tmp_path):
    target = tiny_llama().to(torch.bfloat16)
    last, recipe = target.model.layers[-1], MtpRecipe(ttt_steps=2, intermediate_size=24)
    network = recipe.build(target)
    own = network.layers[0]
    assert is_llama_layer(last)
    assert type(own) is DecoderLayer
    assert torch.equal(own.self_attn.q_proj.weight, last.self_attn.q_proj.weight.float())
    assert torch.equal(own.mlp.up_proj.weight, last.mlp.up_proj.weight[:24].float())
    assert torch.equal(own.mlp.down_proj.weight, last.mlp.down_proj.weight[:, :24].float())
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    tensors, config = saved(recipe, network, tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["mtp.fc.weight"], network.eh_proj[0].weight.to(torch.bfloat16))
    assert tensors["mtp.layers.0.mlp.up_proj.weight"].shape == (24, 32)
    # The target's own parts are neither copied nor changed.
    assert all(name.startswith("mtp.") and "embed_tokens" not in name for name in tensors)
    assert copy.deepcopy(network).embed(torch.tensor([[1]])).dtype == torch.float32
    assert target.lm_head.weight.dtype == torch.bfloat16
    assert (config["model_type"], config["mtp_intermediate_size"]) == ("mtp", 24)
    for unsuitable, words in ((tiny_gpt2(), "GPT2LMHeadModel.*llama"), (tiny_model("qwen3_moe"), "have experts")):
        with pytest.raises(SpecDecError, match=words):
            recipe.check(unsuitable)


@full
@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_5_text"])
def test_mtp_layers_of_other_kinds_are_trained(kind, tmp_path):
    target, recipe = MTP_TARGETS[kind]().requires_grad_(False), MtpRecipe(ttt_steps=2)
    target.generation_config.pad_token_id = 0
    torch.manual_seed(0)
    network = recipe.build(target)
    batches = [Rows.of(torch.randint(1, VOCAB_SIZE, (4, 24))) for _ in range(2)] * 10
    settings = TrainingOptions(steps=20, learning_rate=1e-2, warmup_steps=2, bf16=False, muon=True)
    losses = train(network, iter(batches), recipe.objective(network, TargetReader(target, ("last",))), settings)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    recipe.save(network, tmp_path, dtype=torch.float32)
    loaded = load_speculator(target, "mtp", model=str(tmp_path)).resources.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in network.state_dict().items())
    call = {**prompts(2), "do_sample": False, "max_new_tokens": 24}
    assert torch.equal(target.generate(**call, spec_model=str(tmp_path)), target.generate(**call))
