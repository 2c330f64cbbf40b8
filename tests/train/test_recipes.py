"""Recipes: runs that give usable drafts, the same after an interruption, and what each builds and saves."""

import copy
import itertools
import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_specdec import load_speculator
from hf_specdec.candidate_generators.dflash.config import BlockView
from hf_specdec.candidate_generators.dflash.recipe import DFlashRecipe
from hf_specdec.candidate_generators.draft_model.recipe import DraftModelRecipe
from hf_specdec.candidate_generators.eagle.recipe import Eagle3Recipe, PEagleRecipe
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.candidate_generators.mtp.recipe import MtpRecipe
from hf_specdec.errors import SpecConfigError, SpecDecError, UnsupportedModelError
from hf_specdec.hub.detect import detect_checkpoint
from hf_specdec.layers.known import is_llama_layer
from hf_specdec.layers.llama import DecoderLayer
from hf_specdec.layers.mask_token import mask_token_for
from hf_specdec.training import trainer
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.reading import Rows, TargetReader, check_plain_head
from hf_specdec.training.run import TrainingRun, make_recipe
from hf_specdec.training.trainer import train
from tests.helpers.architectures import tiny_model
from tests.helpers.levels import full, in_full, slow, split
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, prompts, tiny_gpt2, tiny_llama
from tests.helpers.paths import ROOT
from tests.helpers.recipes import MTP_TARGETS, RECIPES, SIZES, built, drafted_block, read


GREEDY = {"do_sample": False, "max_new_tokens": 24}
SHORT = ("medusa", "mlp_speculator", "draft_model, distilled", "eagle", "dflash, lilicorr")


def run(recipe, options, folder, target):
    return TrainingRun(recipe, options, folder).run(target, letter_tokenizer(), "tiny")


@pytest.mark.parametrize("name", split(RECIPES, [*SHORT, "eagle3, parallel", "mtp, narrow"]))
def test_every_parameter_learns_and_two_steps_give_a_usable_draft(name, target, tmp_path, run_options):
    recipe, tokens = RECIPES[name], torch.randint(1, VOCAB_SIZE, (2, 20))
    network = recipe.build(target)
    reader = TargetReader(target, recipe.states_for(network))
    nothing = recipe.loss(network, reader.read(Rows(tokens, torch.zeros_like(tokens, dtype=torch.bool))))
    assert nothing == 0
    nothing.backward()
    recipe.loss(network, reader.read(tokens)).backward()
    assert not [key for key, parameter in network.named_parameters() if not parameter.grad.abs().sum() > 0]
    before = {key: tensor.clone() for key, tensor in target.state_dict().items()}
    result = run(recipe, run_options(steps=2, self_generate=8), tmp_path / "out", target)
    assert json.loads((tmp_path / "out" / "training.json").read_text()) == result.to_dict()
    assert result.to_dict()["tokens_per_cycle"] == result.after.tokens_per_cycle >= 1
    assert all(torch.equal(tensor, before[key]) for key, tensor in target.state_dict().items())
    assert all(parameter.grad is None for parameter in target.parameters())
    inputs = prompts(3)
    drafted = target.generate(**inputs, **GREEDY, spec_method=result.method, spec_model=str(tmp_path / "out"))
    assert torch.equal(drafted, target.generate(**inputs, **GREEDY))


LEARNING = ("medusa", "mlp_speculator, untied", "draft_model", "eagle", "eagle3, narrow", "eagle3, parallel, shared")


@full
@pytest.mark.parametrize("name", [*LEARNING, "dflash", "dflash, selector", "dflash, domino", "mtp, narrow"])
def test_training_lowers_the_loss_and_raises_the_acceptance(name, target, tmp_path, run_options):
    recipe = RECIPES[name]
    rate = 7.5e-3 if recipe.method in ("eagle", "eagle3", "mtp") else 1.5e-2
    result = run(recipe, run_options(learning_rate=rate, weight_decay=0.0), tmp_path / "out", target)
    assert sum(result.losses[-10:]) < 0.85 * sum(result.losses[:10])
    assert result.after.tokens_per_cycle > result.before.tokens_per_cycle + 0.2
    assert result.after.accuracies[0] > result.before.accuracies[0]


# Interruptions


@pytest.mark.parametrize("name", ["eagle3, few tokens", *in_full("draft_model, distilled", "dflash, revealed")])
def test_a_resumed_run_gives_the_weights_of_an_uninterrupted_one(name, target, tmp_path, monkeypatch, run_options):
    recipe, settings = RECIPES[name], {"steps": 6, "save_every": 2, "self_generate": 16}
    whole = run(recipe, run_options(**settings), tmp_path / "whole", target)

    class InterruptedError(Exception):
        pass

    def interrupt(step_options, step, progress, original=TrainingOptions.learning_rate_at):
        if step == 3:
            raise InterruptedError
        return original(step_options, step, progress)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingOptions, "learning_rate_at", interrupt)
        with pytest.raises(InterruptedError):
            run(recipe, run_options(**settings), tmp_path / "parts", target)
    torch.rand(7)
    resumed = run(recipe, run_options(**settings, resume=True), tmp_path / "parts", target)
    assert resumed.losses == whole.losses
    assert resumed.after == whole.after
    file = next((tmp_path / "whole").glob("*.safetensors")).name
    whole, parts = (load_file(tmp_path / folder / file) for folder in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(tensor, parts[key]) for key, tensor in whole.items())


def test_resuming_takes_up_what_the_target_has_written_and_refuses_another_run(
    target, tmp_path, monkeypatch, run_options
):
    recipe, settings = MedusaRecipe(num_heads=2), {"steps": 2, "self_generate": 8}
    whole = run(recipe, run_options(**settings), tmp_path / "out", target)
    # The accuracies of all ranks, for trees that are measured.
    ranks = json.loads((tmp_path / "out" / "config.json").read_text())["medusa_accuracies"]
    assert [len(accuracies) for accuracies in ranks] == [10] * 2
    assert ranks[0] == pytest.approx(whole.after.rank_accuracies[0], abs=1e-4)
    shutil.rmtree(tmp_path / "out" / "training_state")
    monkeypatch.setattr("hf_specdec.training.run.continue_prompts", None)
    assert run(recipe, run_options(**settings, resume=True), tmp_path / "out", target) == whole
    for changed, words in (({"steps": 3}, "steps was 2, is 3"), ({"temperature": 0.5}, "temperature was 0.8, is 0.5")):
        with pytest.raises(SpecConfigError, match=words):
            run(recipe, run_options(**settings | changed, resume=True), tmp_path / "out", target)


# Readings and measures


def test_kept_states_are_those_of_a_reading_and_padding_is_not_read(target):
    tokens = torch.randint(1, VOCAB_SIZE, (6, 20))
    rows = Rows.of(tokens)
    reader, kept = TargetReader(target, ("last", 0)), TargetReader(target, ("last", 0))
    kept.keep(rows.once(4))
    batch = next(rows.batches(3, seed=1))
    for key, state in reader.read(Rows(batch.tokens, batch.counted)).states.items():
        torch.testing.assert_close(kept.read(batch).states[key], state)
    counted = torch.zeros_like(tokens, dtype=torch.bool)
    counted[0, 5:9], counted[1:, 4:12] = True, True
    states, whole = reader.read(Rows(tokens, counted)).states["last"], reader.read(tokens).states["last"]
    assert states.shape == whole.shape
    torch.testing.assert_close(states[:, :12], whole[:, :12])
    assert not states[:, 12:].any()


def test_the_measure_is_the_acceptance_length_of_greedy_generation(target):
    recipe, reader = MedusaRecipe(num_heads=2), TargetReader(target, ("last",))
    network, prompt = built(recipe, target), prompts(1, padding=False)["input_ids"]
    text = target.generate(prompt, do_sample=False, max_new_tokens=60)
    counted = (torch.arange(text.shape[1]) >= prompt.shape[1])[None]
    measured = recipe.measure(network, reader, [Rows(text, counted)])
    # Walked by hand: what the heads say after each committed token.
    best = network(reader.read(text).states["last"], target.lm_head).argmax(-1)[:, 0]
    position, cycles, committed = prompt.shape[1] - 2, 0, 0
    while position + 2 < text.shape[1]:
        accepted = 0
        for head, index in enumerate(range(position + 2, min(position + 4, text.shape[1]))):
            if best[head, position] != text[0, index]:
                break
            accepted += 1
        cycles, committed, position = cycles + 1, committed + accepted + 1, position + accepted + 1
    assert measured.tokens_per_cycle == pytest.approx(committed / cycles)
    # A copy of the target is always accepted.
    copied = DraftModelRecipe(from_scratch=SIZES).measure(target, reader, [Rows(text, counted)])
    assert copied.accuracies == (1.0,) * 4
    assert copied.tokens_per_cycle > 4
    with pytest.raises(SpecConfigError, match="no position to measure"):
        recipe.measure(network, reader, [Rows(text, torch.zeros_like(counted))])


# Errors


BAD_RECIPES = [
    ("eagle9", {}, "no training recipe for 'eagle9'.*draft_model, medusa, mlp_speculator"),
    ("medusa", {"n_predict": 3}, "no option of the recipe for medusa. It is for mlp_speculator"),
    ("mlp_speculator", {"top_k_tokens_per_head": (1, 0, 2)}, "one positive integer for each of the 3 stages"),
    ("draft_model", {}, "either `draft_model`.*got neither"),
    ("eagle3", {"aux_layer_ids": (1, 3)}, "from 0 to 2, the number of layers of LlamaForCausalLM, got 3"),
    ("eagle3", {"own_head": False, "hidden_size": 8}, "`own_head=False` shares the target's lm_head"),
    ("mtp", {"intermediate_size": 65}, "`intermediate_size` must be at most 64, that of Llama.*, got 65"),
    ("dflash", {"num_denoising_steps": 3}, "=3 needs a draft that has seen revealed tokens"),
    ("domino", {"reveal_share": 0.5}, "`reveal_share`=0.5 .* drafts of this kind take one"),
    ("lilicorr", {"lilicorr_num_heads": 7}, "`lilicorr_num_heads`=7 must divide `lilicorr_hidden_size`, got"),
]


def test_wrong_recipes_options_and_folders(target, tmp_path, run_options):
    for method, given, message in BAD_RECIPES:
        with pytest.raises(SpecConfigError, match=message):
            make_recipe(method, given).check(target)
    for changed in ({"batch_size": 0}, {"seq_length": 4}, {"self_generate": 0, "keep_text": True}):
        with pytest.raises(SpecConfigError, match=f"`{[*changed][-1]}`"):
            run_options(**changed)
    with pytest.raises(SpecConfigError, match="does not have: depth"):
        DraftModelRecipe(from_scratch={"depth": 3}).build(target)
    capped = copy.deepcopy(target)
    capped.register_forward_hook(lambda module, args, output: setattr(output, "logits", output.logits.tanh()))
    with pytest.raises(UnsupportedModelError, match="scales or caps"):
        check_plain_head(capped, "`kl_weight`")
    (tmp_path / "notes.txt").write_text("mine")
    for folder, options, message in (
        (tmp_path, {}, "is not empty. Name another one."),
        (tmp_path / "new", {"resume": True}, "no run to resume"),
        (tmp_path / "notes.txt", {}, "is a file"),
    ):
        with pytest.raises(SpecConfigError, match=message):
            TrainingRun(MedusaRecipe(), run_options(**options), folder)


@slow
def test_two_processes_train_one_head(target, data, tmp_path):
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["train", "medusa", "--target", tmp_path / "target", "--data", data, "--output", tmp_path / "out"]
    arguments += ["--seq-length", 48, "--batch-size", 8, "--steps", 30, "--self-generate", 24, "--num-heads", 2]
    arguments += ["--held-out", 0.2, "--lr", 0.015, "--no-bf16", "--cpu", "--json"]
    command = [*launcher, "-m", "hf_specdec", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["steps"] == 30
    assert report["tokens_per_cycle"] > report["untrained_tokens_per_cycle"]
    assert math.isfinite(report["loss"])
    inputs = prompts(1, padding=False)
    drafted = target.generate(**inputs, **GREEDY, spec_method="medusa", spec_model=str(tmp_path / "out"))
    assert torch.equal(drafted, target.generate(**inputs, **GREEDY))


# The trainer


def test_the_schedule_warms_up_decays_and_moves_with_a_time_limit():
    options = TrainingOptions(steps=100, learning_rate=1.0, warmup_steps=10, final_learning_rate=0.1)
    rates = [options.learning_rate_at(step, options.progress(step, 0.0)) for step in range(100)]
    assert (rates[0], max(rates)) == pytest.approx((0.1, rates[9]), abs=0.01)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[9:]))
    assert options.learning_rate_at(100, 1.0) == pytest.approx(0.1)
    options = TrainingOptions(steps=100, max_minutes=2)
    assert [options.progress(*at) for at in ((10, 60.0), (70, 60.0), (10, 1000.0))] == [0.5, 0.7, 1.0]


@pytest.mark.parametrize("muon", [True, *in_full(False)])
def test_training_lowers_the_loss_and_is_repeatable(muon):
    tokens = torch.randint(50, (4, 32), generator=torch.Generator().manual_seed(0))
    options = TrainingOptions(steps=12, learning_rate=1e-2, warmup_steps=1, bf16=False, muon=muon)
    runs = []
    for _ in range(2):
        model = tiny_llama(initializer_range=0.2)
        frozen = model.model.embed_tokens.weight.requires_grad_(False)
        before = frozen.clone()
        objective = DraftModelRecipe(from_scratch={}, kl_weight=0.0).objective(model, TargetReader(None, ()))
        runs.append(train(model, itertools.repeat(tokens), objective, options))
        assert torch.equal(frozen, before)
        assert not model.training
    assert runs[0] == runs[1]
    assert len(runs[0]) == 12
    assert runs[0][-1] < runs[0][0] - 1


def test_bfloat16_where_the_machine_computes_in_it_and_losses_that_diverge(monkeypatch):
    """Other CPUs take many times as long for it."""
    network, found = nn.Linear(4, 3), []

    def loss(batch):
        found.append(network(batch))
        return found[-1].float().pow(2).sum()

    for asked, multiplies in ((True, True), (True, False), (True, None), (False, True)):
        monkeypatch.setattr(trainer, "multiplies_bfloat16", lambda multiplies=multiplies: multiplies)
        options = TrainingOptions(steps=1, warmup_steps=1, bf16=asked)
        train(network, itertools.repeat(torch.ones(2, 4)), loss, options)
    assert [output.dtype for output in found] == [torch.bfloat16, *[torch.float32] * 3]
    with pytest.raises(SpecDecError, match="lower `learning_rate`"):
        train(network, [torch.ones(2, 4)], lambda batch: loss(batch) * math.inf, TrainingOptions(steps=1))


# What a recipe builds and saves: sizes and weights from the target, and checkpoints that loading understands


def saved(recipe, network, folder, **how):
    """Tensors and settings of what the recipe writes."""
    recipe.save(network, folder, **how)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    "name",
    [
        *("eagle3, few tokens", "dflash, selector", *in_full("eagle", "eagle3, narrow", "eagle3, parallel")),
        *in_full("eagle3, parallel, shared", "dflash, one layer", "dflash, revealed"),
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
