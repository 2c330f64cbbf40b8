"""Runs of every recipe: a draft that generation can use, the same after an interruption, and better than before."""

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

from hf_specdec import load_speculator, record
from hf_specdec.candidate_generators.draft_model.recipe import DraftModelRecipe
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.errors import SpecConfigError, SpecDecError, UnsupportedModelError
from hf_specdec.training import trainer
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.reading import Rows, TargetReader, check_plain_head
from hf_specdec.training.run import TrainingRun, make_recipe
from hf_specdec.training.trainer import train
from tests.helpers.levels import full, in_full, split
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, prompts, tiny_llama
from tests.helpers.paths import ROOT
from tests.helpers.recipes import RECIPES, SIZES, built


GREEDY = {"do_sample": False, "max_new_tokens": 24}
SHORT = ("medusa", "mlp_speculator", "draft_model, distilled", "eagle", "dflash, revealed", "dflash, lilicorr")


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
    if result.method in ("medusa", "mlp_speculator"):
        return
    # What is measured is the acceptance length of chains.
    inputs, drafts = prompts(1, padding=False), {"spec_method": result.method, "spec_model": str(tmp_path / "out")}
    chains = {"do_sample": False, "max_new_tokens": 120, "num_speculative_tokens": recipe.num_drafts}
    with record() as made:
        text = target.generate(**inputs, **drafts, **chains)
    network = load_speculator(target, result.method, model=str(tmp_path / "out")).resources
    network = getattr(network, "model", network)
    counted = (torch.arange(text.shape[1]) > inputs["input_ids"].shape[1])[None]
    measured = recipe.measure(network, TargetReader(target, recipe.states_for(network)), [Rows(text, counted)])
    assert measured.tokens_per_cycle == pytest.approx(made.calls[0].stats.mean_acceptance_length, abs=0.1)


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
    ("medusa", {"num_heads": 0}, "`num_heads` must be an integer of at least 1, got 0"),
    ("mlp_speculator", {"top_k_tokens_per_head": (1, 0, 2)}, "one positive integer for each of the 3 stages"),
    ("draft_model", {}, "either `draft_model`.*got neither"),
    ("eagle3", {"aux_layer_ids": (1, 3)}, "from 0 to 2, the number of layers of LlamaForCausalLM, got 3"),
    ("eagle3", {"draft_vocab_size": 65}, "`draft_vocab_size` must be at most 64, the target's, got 65"),
    ("eagle3", {"own_head": False, "hidden_size": 8}, "`own_head=False` shares the target's lm_head"),
    ("peagle", {"mask_token_id": 64}, "`mask_token_id` must be from 0 to 63"),
    ("mtp", {"intermediate_size": 65}, "`intermediate_size` must be at most 64, that of Llama.*, got 65"),
    ("dflash", {"num_denoising_steps": 3}, "=3 needs a draft that has seen revealed tokens"),
    ("dflash", {"target_layer_ids": (0, 2)}, "from 0 to 1, the layers of LlamaForCausalLM, got 2"),
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


@full
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
