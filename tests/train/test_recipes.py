"""Recipes: runs that give usable drafts, the same after an interruption, and what each builds and saves."""

import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_specdec import load_speculator
from hf_specdec.candidate_generators.dflash.network import BlockView
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
from hf_specdec.method import trainings
from hf_specdec.training import arguments
from hf_specdec.training.reading import TargetReader, check_plain_head, collate
from hf_specdec.training.text import rows_of
from hf_specdec.training.trainer import ByLength, DraftTrainer, MuonAndAdamW
from tests.helpers.architectures import tiny_model
from tests.helpers.levels import full, in_full, slow, split
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, prompts, tiny_gpt2, tiny_llama
from tests.helpers.paths import ROOT
from tests.helpers.recipes import MTP_TARGETS, RECIPES, SIZES, built, drafted_block, read, training_arguments


GREEDY = {"do_sample": False, "max_new_tokens": 24}
SHORT = ("medusa", "mlp_speculator", "draft_model, distilled", "eagle", "eagle3, parallel", "dflash, lilicorr")
SHORT += ("mtp, narrow",)


@pytest.mark.parametrize("name", split(RECIPES, SHORT))
def test_every_parameter_learns_and_nothing_from_tokens_that_do_not_count(name, target):
    recipe, tokens = RECIPES[name], torch.randint(1, VOCAB_SIZE, (2, 20))
    network = recipe.build(target)
    reader = TargetReader(target, recipe.states_for(network))
    nothing = recipe.loss(network, reader.read(tokens, torch.zeros_like(tokens, dtype=torch.bool)))
    assert nothing == 0
    nothing.backward()
    recipe.loss(network, reader.read(tokens)).backward()
    assert not [key for key, parameter in network.named_parameters() if not parameter.grad.abs().sum() > 0]
    assert all(parameter.grad is None for parameter in target.parameters())


def assert_usable(target, result):
    """The draft keeps the target's text, and what was measured of it is beside it."""
    folder = Path(result.folder)
    assert json.loads((folder / "training.json").read_text()) == json.loads(json.dumps(asdict(result)))
    inputs = prompts(3)
    drafted = target.generate(**inputs, **GREEDY, spec_method=result.method, spec_model=str(folder))
    assert torch.equal(drafted, target.generate(**inputs, **GREEDY))


@pytest.mark.parametrize("name", SHORT)
def test_two_steps_give_a_usable_draft(name, target, tmp_path, run):
    before = {key: tensor.clone() for key, tensor in target.state_dict().items()}
    result = run(RECIPES[name], tmp_path / "out", max_steps=2, self_generate=8)
    assert result.tokens_per_cycle >= 1
    assert all(torch.equal(tensor, before[key]) for key, tensor in target.state_dict().items())
    assert_usable(target, result)


LEARNING = ("medusa", "mlp_speculator, untied", "draft_model", "eagle", "eagle3, narrow", "eagle3, parallel, shared")


@full
@pytest.mark.parametrize("name", [*LEARNING, "dflash", "dflash, selector", "dflash, domino", "mtp, narrow"])
def test_training_lowers_the_loss_and_raises_the_acceptance(name, target, tmp_path, run):
    recipe = RECIPES[name]
    rate = 7.5e-3 if recipe.method in ("eagle", "eagle3", "mtp") else 1.5e-2
    result = run(recipe, tmp_path / "out", learning_rate=rate, weight_decay=0.0)
    assert sum(result.losses[-10:]) < 0.85 * sum(result.losses[:10])
    assert result.tokens_per_cycle > result.untrained_tokens_per_cycle + 0.2
    assert_usable(target, result)


# Interruptions


def interrupted(whole, parts, step):
    """Copies a run as if it had ended after a step."""
    shutil.copytree(whole, parts)
    for path in parts.iterdir():
        is_later = path.name.startswith("checkpoint-") and int(path.name.split("-")[1]) > step
        if is_later:
            shutil.rmtree(path)
        elif path.suffix == ".safetensors":
            path.unlink()


def assert_same_weights(whole, parts):
    file = next(whole.glob("*.safetensors")).name
    expected, found = (load_file(folder / file) for folder in (whole, parts))
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in expected.items())


# With random numbers in the loss, and weights that a network shares.
@pytest.mark.parametrize("name", ["eagle", *in_full("mlp_speculator", "dflash, revealed")])
def test_a_resumed_run_gives_the_weights_of_an_uninterrupted_one(name, tmp_path, run):
    recipe = RECIPES[name]
    settings = {"max_steps": 6, "save_steps": 1, "save_total_limit": None, "self_generate": 16, "keep_states": True}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "lr_scheduler_type": "linear"}
    whole = run(recipe, tmp_path / "whole", **settings)
    # In the middle of the second of its epochs of four steps.
    interrupted(tmp_path / "whole", tmp_path / "parts", 5)
    torch.rand(7)
    resumed = run(recipe, tmp_path / "parts", **settings, resume=True)
    assert len(whole.losses) == 6
    assert asdict(resumed) == asdict(whole) | {"folder": str(tmp_path / "parts")}
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def test_resuming_takes_up_what_the_target_has_written_and_refuses_another_run(tmp_path, monkeypatch, run):
    recipe, settings = MedusaRecipe(num_heads=2), {"max_steps": 2, "self_generate": 8}
    whole = run(recipe, tmp_path / "out", **settings)
    # The accuracies of all ranks, for trees that are measured.
    ranks = json.loads((tmp_path / "out" / "config.json").read_text())["medusa_accuracies"]
    assert [len(accuracies) for accuracies in ranks] == [10] * 2
    assert [accuracies[0] for accuracies in ranks] == pytest.approx(whole.accuracies, abs=1e-4)
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    monkeypatch.setattr("hf_specdec.training.run.continue_prompts", None)
    assert run(recipe, tmp_path / "out", **settings, resume=True) == whole
    for changed, words in (
        ({"max_steps": 3}, "max_steps was 2, is 3"),
        ({"temperature": 0.5}, "temperature was 0.8, is 0.5"),
    ):
        with pytest.raises(SpecConfigError, match=words):
            run(recipe, tmp_path / "out", **settings | changed, resume=True)
    # Another draft learns from the same.
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "out" / "continuations.parquet", tmp_path / "other")
    assert run(RECIPES["mlp_speculator"], tmp_path / "other", **settings, resume=True).steps == 2


# Readings and measures


def test_kept_states_are_those_of_a_reading(target, monkeypatch):
    rows = [{"tokens": torch.randint(1, VOCAB_SIZE, (size,)), "prompt_length": 3} for size in (20, 12, 9, 15)]
    rows = [row | {"index": index} for index, row in enumerate(rows)]
    reader, keeping = TargetReader(target, ("last", 0)), TargetReader(target, ("last", 0), keeps=True)
    for first in (0, 2):
        keeping.read(**collate(rows[first : first + 2]))
    batch = collate([rows[index] for index in (3, 1, 2)])
    assert batch["counted"].sum(1).tolist() == [12, 9, 6]
    expected = reader.read(**batch).states
    monkeypatch.setattr("hf_specdec.training.reading.captured_states", None)
    found = keeping.read(**batch).states
    for row, size in enumerate((15, 12, 9)):
        for key, state in expected.items():
            assert found[key].shape == state.shape
            torch.testing.assert_close(found[key][row, :size], state[row, :size])


def test_the_measure_is_the_acceptance_length_of_greedy_generation(target):
    recipe, reader = MedusaRecipe(num_heads=2), TargetReader(target, ("last",))
    network, prompt = built(recipe, target), prompts(1, padding=False)["input_ids"]
    text = target.generate(prompt, do_sample=False, max_new_tokens=60)
    counted = (torch.arange(text.shape[1]) >= prompt.shape[1])[None]
    measured = recipe.measure(network, reader, [{"tokens": text, "counted": counted}])
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
    copied = DraftModelRecipe(from_scratch=SIZES).measure(target, reader, [{"tokens": text, "counted": counted}])
    assert copied.accuracies == (1.0,) * 4
    assert copied.tokens_per_cycle > 4
    with pytest.raises(SpecConfigError, match="no position to measure"):
        recipe.measure(network, reader, [{"tokens": text, "counted": torch.zeros_like(counted)}])


# Errors


BAD_RECIPES = [
    ("mlp_speculator", {"top_k_tokens_per_head": (1, 0, 2)}, "one positive integer for each of the 3 stages"),
    ("draft_model", {}, "either `draft_model`.*got neither"),
    ("eagle3", {"aux_layer_ids": (1, 3)}, "from 0 to 2 of LlamaForCausalLM, got 3"),
    ("dflash", {"target_layer_ids": (0, 2)}, "at least one layer from 0 to 1 of LlamaForCausalLM, got 2"),
    ("dflash", {"target_layer_ids": ()}, "at least one layer from 0 to 1 of LlamaForCausalLM, got none"),
    ("eagle3", {"own_head": False, "hidden_size": 8}, "`own_head=False` shares the target's lm_head"),
    ("mtp", {"intermediate_size": 65}, "`intermediate_size` must be at most 64, that of Llama.*, got 65"),
    ("dflash", {"num_denoising_steps": 3}, "=3 needs a draft that has seen revealed tokens"),
    ("domino", {"reveal_share": 0.5}, "`reveal_share`=0.5 .* drafts of this kind take one"),
    ("lilicorr", {"lilicorr_num_heads": 7}, "`lilicorr_num_heads`=7 must divide `lilicorr_hidden_size`, got"),
]


def test_wrong_recipes_options_and_folders(target, tmp_path, run):
    for method, given, message in BAD_RECIPES:
        with pytest.raises(SpecConfigError, match=message):
            trainings()[method].recipe_class(**given).check(target)
    with pytest.raises(SpecConfigError, match="does not have: depth"):
        DraftModelRecipe(from_scratch={"depth": 3}).build(target)
    capped = copy.deepcopy(target)
    capped.register_forward_hook(lambda module, args, output: setattr(output, "logits", output.logits.tanh()))
    with pytest.raises(UnsupportedModelError, match="scales or caps"):
        check_plain_head(capped, "`kl_weight`")
    (tmp_path / "notes.txt").write_text("mine")
    for folder, changed, message in (
        (tmp_path, {}, "is not empty. Name another one."),
        (tmp_path / "new", {"resume": True}, "no run to resume"),
        (tmp_path / "notes.txt", {}, "is a file"),
        (tmp_path / "new", {"seq_length": 4}, "`seq_length`"),
        (tmp_path / "new", {"self_generate": 0, "keep_text": True}, "`keep_text`"),
        (tmp_path / "new", {"push_to_hub": True}, "`push_to_hub` has no meaning for the training of a draft"),
        (tmp_path / "new", {"max_minutes": 0}, "`max_minutes` must be above 0"),
        (tmp_path / "new", {"bf16_full_eval": True, "fp16_full_eval": True}, "do not go together: At most one"),
        (tmp_path / "new", {"report_to": "nowhere"}, "cannot begin: nowhere is not supported"),
        (tmp_path / "newer", {"learning_rate": 1e38, "max_grad_norm": 0.0}, "lower `learning_rate`"),
    ):
        with pytest.raises(SpecDecError, match=message):
            run(MedusaRecipe(num_heads=1), folder, **{"self_generate": 0} | changed)


# The trainer


@slow
def test_two_processes_train_one_head_and_are_resumed(target, data, tmp_path):
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["train", "eagle", tmp_path / "target", data, "--num-layers", 1]
    arguments += ["--seq-length", 48, "--batch-size", 4, "--steps", 30, "--self-generate", 24, "--held-out", 0.2]
    arguments += ["--lr", 0.015, "--no-bf16", "--device", "cpu", "--json", "--save-steps", 7, "--save-total-limit", 9]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def train(folder, *further):
        command = [*launcher, "-m", "hf_specdec", *map(str, [*arguments, "--output", folder, *further])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout)

    report = train(tmp_path / "whole")
    assert report["steps"] == 30
    assert report["tokens_per_cycle"] > report["untrained_tokens_per_cycle"]
    interrupted(tmp_path / "whole", tmp_path / "parts", 14)
    resumed = train(tmp_path / "parts", "--resume")
    assert resumed["losses"] == report["losses"]
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    inputs = prompts(1, padding=False)
    drafted = target.generate(**inputs, **GREEDY, spec_method="eagle", spec_model=str(tmp_path / "parts"))
    assert torch.equal(drafted, target.generate(**inputs, **GREEDY))


def test_evaluations_are_logged_and_the_best_weights_kept(target, tmp_path, run):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    settings |= {"metric_for_best_model": "tokens_per_cycle", "save_total_limit": None, "max_steps": 8}
    result = run(RECIPES["mlp_speculator"], tmp_path / "out", **settings)
    state = json.loads((tmp_path / "out" / "checkpoint-8" / "trainer_state.json").read_text())
    measured = [entry["eval_tokens_per_cycle"] for entry in state["log_history"] if "eval_accuracy_3" in entry]
    assert len(measured) == 4
    assert result.tokens_per_cycle == max(measured)
    assert [entry["loss"] for entry in state["log_history"] if "loss" in entry] == result.losses


def language_model_trainer(tmp_path, tokens, **changed):
    """Trains a tiny model with a frozen embedding on one batch again and again."""
    model = tiny_llama(initializer_range=0.2)
    model.model.embed_tokens.weight.requires_grad_(False)
    recipe = DraftModelRecipe(from_scratch={}, kl_weight=0.0)
    settings = {"max_steps": 12, "learning_rate": 1e-2, "warmup_steps": 1, "save_strategy": "no", "logging_steps": 1}
    rows = rows_of({"tokens": row, "prompt_length": 0} for row in tokens.tolist())
    arguments = training_arguments(tmp_path, **settings | changed)
    return DraftTrainer(recipe, model, None, arguments, rows)


@pytest.mark.parametrize("muon", [None, *in_full(False)])
def test_training_lowers_the_loss_and_is_repeatable(muon, tmp_path):
    runs = []
    for _ in range(2):
        tokens = torch.randint(50, (8, 32), generator=torch.Generator().manual_seed(0))
        trainer = language_model_trainer(tmp_path, tokens, muon=muon)
        frozen = trainer.network.model.embed_tokens.weight.clone()
        trainer.train()
        assert isinstance(trainer.optimizer.optimizer, MuonAndAdamW) == (muon is None)
        runs.append([entry for entry in trainer.state.log_history if "loss" in entry])
        assert torch.equal(trainer.network.model.embed_tokens.weight, frozen)
    losses, rates = ([entry[name] for entry in runs[0]] for name in ("loss", "learning_rate"))
    assert losses == [entry["loss"] for entry in runs[1]]
    assert losses[-1] < losses[0] - 1
    assert rates[1] == max(rates) == 1e-2
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[1:]))
    assert rates[-1] < 1e-3


def test_a_time_limit_ends_the_training_with_its_schedule(tmp_path, monkeypatch):
    clock = itertools.count(step=12.0)
    monkeypatch.setattr("hf_specdec.training.trainer.monotonic", lambda: next(clock))
    trainer = language_model_trainer(tmp_path, torch.ones(8, 8, dtype=torch.long), max_steps=1000, max_minutes=1)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(rates) == 5
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[1:]))
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(2e-4)


@full
def test_bfloat16_where_the_machine_computes_in_it(monkeypatch, tmp_path):
    """Other CPUs take many times as long for it."""
    found = []
    for asked, multiplies in ((True, True), (True, False), (True, None), (False, True)):
        monkeypatch.setattr(arguments, "multiplies", lambda multiplies=multiplies: multiplies)
        tokens = torch.ones(8, 8, dtype=torch.long)
        trainer = language_model_trainer(tmp_path, tokens, bf16=asked, max_steps=1)
        layer = trainer.network.model.layers[0].mlp.up_proj
        layer.register_forward_hook(lambda module, inputs, output: found.append(output.dtype))
        trainer.train()
        assert trainer.args.saved_dtype == (torch.bfloat16 if asked else torch.float32)
    assert found == [torch.bfloat16, *[torch.float32] * 3]


def test_rows_of_similar_length_share_a_step_in_every_epoch_in_a_new_order():
    lengths, epoch = [5, 90, 7, 92, 6, 91, 8, 93, 50], 0
    sampler = ByLength(lengths, 2, seed=1, epoch=lambda: epoch)
    orders = []
    for epoch in (0, 1, 0):  # noqa: B007 - read by the sampler
        orders.append(list(sampler))
        assert sorted(orders[-1]) == list(range(9))
    assert orders[0] == orders[2] != orders[1]


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
    assert torch.equal(first[:4], second[:4])
    assert not torch.equal(first[4], second[4])


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
    rows = rows_of({"tokens": row, "prompt_length": 0} for row in torch.randint(1, VOCAB_SIZE, (8, 24)).tolist())
    settings = training_arguments(tmp_path, max_steps=20, learning_rate=1e-2, save_strategy="no", logging_steps=1)
    trainer = DraftTrainer(recipe, network, target, settings, rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    recipe.save(network, tmp_path, dtype=torch.float32)
    loaded = load_speculator(target, "mtp", model=str(tmp_path)).resources.state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in network.state_dict().items())
    call = {**prompts(2), "do_sample": False, "max_new_tokens": 24}
    assert torch.equal(target.generate(**call, spec_model=str(tmp_path)), target.generate(**call))
