import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from hf_specdec import load_speculator, record
from hf_specdec.candidate_generators.draft_model.recipe import DraftModelRecipe
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.candidate_generators.mlp_speculator.recipe import MLPSpeculatorRecipe
from hf_specdec.decoding.states import captured_states
from hf_specdec.errors import SpecConfigError, UnsupportedModelError
from hf_specdec.training import recipe as frame
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.reading import Rows, TargetReader, check_plain_head
from hf_specdec.training.recipe import draft_loss, walk
from hf_specdec.training.run import TrainingRun, make_recipe
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, prompts, tiny_llama
from tests.helpers.paths import ROOT
from tests.helpers.recipes import RECIPES, SIZES


LENGTH = 48
RESUMED = ("medusa", "draft_model, distilled", "eagle", "eagle3, few tokens", "dflash, revealed", "mtp, narrow")
GREEDY = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(scope="module", params=RECIPES)
def trained(request, target, run_options, tmp_path_factory):
    recipe = RECIPES[request.param]
    rate = 7.5e-3 if recipe.method in ("eagle", "eagle3", "mtp") else 1.5e-2
    folder = tmp_path_factory.mktemp("out") / "draft"
    run = TrainingRun(recipe, run_options(learning_rate=rate, weight_decay=0.0), folder)
    return folder, run.run(target, letter_tokenizer(), "tiny"), recipe


class TestTraining:
    @pytest.mark.thinned(3)
    def test_lowers_the_loss_and_raises_the_acceptance(self, trained):
        _, result, _ = trained
        assert sum(result.losses[-10:]) < 0.85 * sum(result.losses[:10])
        assert result.after.tokens_per_cycle > result.before.tokens_per_cycle + 0.2
        assert result.after.accuracies[0] > result.before.accuracies[0]

    @pytest.mark.thinned(3)
    def test_generation_with_the_result_equals_plain_greedy(self, trained, target):
        folder, result, _ = trained
        inputs = prompts(3)
        plain = target.generate(**inputs, **GREEDY)
        drafted = target.generate(**inputs, **GREEDY, spec_method=result.method, spec_model=str(folder))
        assert torch.equal(plain, drafted)

    @pytest.mark.thinned(3)
    def test_the_report_is_written_beside_the_draft(self, trained):
        folder, result, _ = trained
        assert json.loads((folder / "training.json").read_text()) == result.to_dict()
        assert result.to_dict()["tokens_per_cycle"] == result.after.tokens_per_cycle

    @pytest.mark.thinned(2)
    def test_the_measure_is_the_acceptance_length_of_chains(self, trained, target):
        folder, result, recipe = trained
        if result.method in ("medusa", "mlp_speculator"):
            pytest.skip("drafts trees, see TestMeasure")
        inputs = prompts(1, padding=False)
        drafts = {"spec_method": result.method, "spec_model": str(folder)}
        with record() as made:
            text = target.generate(
                **inputs, do_sample=False, max_new_tokens=120, **drafts, num_speculative_tokens=recipe.num_drafts
            )
        network = load_speculator(target, result.method, model=str(folder)).resources
        network = getattr(network, "model", network)
        counted = torch.zeros_like(text, dtype=torch.bool)
        counted[:, inputs["input_ids"].shape[1] + 1 :] = True
        reader = TargetReader(target, recipe.states_for(network))
        measured = recipe.measure(network, reader, [Rows(text, counted)])
        assert measured.tokens_per_cycle == pytest.approx(made.calls[0].stats.mean_acceptance_length, abs=0.1)


def test_medusa_keeps_the_accuracies_of_all_ranks(target, tmp_path, run_options):
    result = TrainingRun(MedusaRecipe(num_heads=2), run_options(steps=3), tmp_path / "out").run(
        target, letter_tokenizer(), "tiny"
    )
    saved = json.loads((tmp_path / "out" / "config.json").read_text())["medusa_accuracies"]
    assert [len(ranks) for ranks in saved] == [10, 10]
    assert saved[0] == pytest.approx(result.after.rank_accuracies[0], abs=1e-4)


class TestResuming:
    @pytest.mark.parametrize("name", RESUMED)
    def test_gives_the_weights_of_an_uninterrupted_run(self, name, target, tmp_path, monkeypatch, run_options):
        recipe, settings = RECIPES[name], run_options(steps=6, save_every=2)
        whole = TrainingRun(recipe, settings, tmp_path / "whole").run(target, letter_tokenizer())

        class InterruptedError(Exception):
            pass

        def interrupt(step_options, step, progress, original=TrainingOptions.learning_rate_at):
            if step == 3:
                raise InterruptedError
            return original(step_options, step, progress)

        with monkeypatch.context() as patch:
            patch.setattr(TrainingOptions, "learning_rate_at", interrupt)
            with pytest.raises(InterruptedError):
                TrainingRun(recipe, settings, tmp_path / "parts").run(target, letter_tokenizer())
        torch.rand(7)
        resumed = TrainingRun(recipe, run_options(steps=6, save_every=2, resume=True), tmp_path / "parts").run(
            target, letter_tokenizer()
        )
        assert resumed.losses == whole.losses
        assert resumed.after == whole.after
        file = next((tmp_path / "whole").glob("*.safetensors")).name
        whole, parts = (load_file(tmp_path / folder / file) for folder in ("whole", "parts"))
        assert whole.keys() == parts.keys()
        assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())

    def test_refuses_another_run(self, target, tmp_path, run_options):
        TrainingRun(MedusaRecipe(num_heads=2), run_options(steps=2), tmp_path).run(target, letter_tokenizer())
        again = TrainingRun(MedusaRecipe(num_heads=2), run_options(steps=3, resume=True), tmp_path)
        with pytest.raises(SpecConfigError, match="steps was 2, is 3"):
            again.run(target, letter_tokenizer())

    def test_takes_up_what_the_target_has_written(self, target, tmp_path, monkeypatch, run_options):
        settings = run_options(steps=3)
        whole = TrainingRun(MedusaRecipe(num_heads=1), settings, tmp_path / "whole").run(target, letter_tokenizer())
        shutil.rmtree(tmp_path / "whole" / "training_state")
        monkeypatch.setattr("hf_specdec.training.run.continue_prompts", None)
        resumed = TrainingRun(MedusaRecipe(num_heads=1), run_options(steps=3, resume=True), tmp_path / "whole")
        assert resumed.run(target, letter_tokenizer()) == whole
        other = TrainingRun(MedusaRecipe(), run_options(resume=True, temperature=0.5), tmp_path / "whole")
        with pytest.raises(SpecConfigError, match="temperature was 0.8, is 0.5"):
            other.run(target, letter_tokenizer())


class TestLosses:
    @pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
    def test_every_parameter_learns_and_the_target_does_not(self, recipe, target):
        network = recipe.build(target)
        tokens = torch.randint(1, VOCAB_SIZE, (2, 20))
        reader = TargetReader(target, recipe.states_for(network))
        nothing = recipe.loss(network, reader.read(Rows(tokens, torch.zeros_like(tokens, dtype=torch.bool))))
        assert nothing == 0
        nothing.backward()
        recipe.loss(network, reader.read(tokens)).backward()
        assert not [name for name, parameter in network.named_parameters() if not parameter.grad.abs().sum() > 0]
        assert all(parameter.grad is None for parameter in target.parameters())

    def test_medusa_loss_is_the_weighted_mean_of_the_heads(self, target):
        recipe = MedusaRecipe(num_heads=2, head_decay=0.5)
        network = recipe.build(target)
        torch.nn.init.normal_(network.weights[0], std=0.1)
        tokens = torch.randint(1, VOCAB_SIZE, (2, 20))
        with captured_states(target, ("last",)) as states, torch.no_grad():
            target(tokens)
        logits = network(states["last"], target.lm_head)
        first = F.cross_entropy(logits[0, :, :-2].flatten(0, 1), tokens[:, 2:].flatten())
        second = F.cross_entropy(logits[1, :, :-3].flatten(0, 1), tokens[:, 3:].flatten())
        loss = recipe.loss(network, TargetReader(target, ("last",)).read(tokens))
        torch.testing.assert_close(loss, (first + 0.5 * second) / 1.5)

    def test_stages_read_the_tokens_before_the_one_they_draft(self, target):
        recipe = MLPSpeculatorRecipe(n_predict=2, inner_dim=16, head_decay=1.0)
        network = recipe.build(target)
        tokens = torch.randint(1, VOCAB_SIZE, (1, 12))
        reading = TargetReader(target, ("last",)).read(tokens)
        losses = []
        for position in range(9):
            known = tokens[:, position + 1 : position + 3]
            logits = network(reading.states["last"][:, position], known)[:, 0]
            losses.append(F.cross_entropy(logits, tokens[0, position + 2 : position + 4], reduction="none"))
        last = network(reading.states["last"][:, 9], tokens[:, 10:11])[:, 0]
        means = torch.stack(losses).T
        first = torch.cat((means[0], F.cross_entropy(last, tokens[0, 11:], reduction="none"))).mean()
        torch.testing.assert_close(recipe.loss(network, reading), (first + means[1].mean()) / 2)

    def test_what_does_not_count_is_left_out(self, target):
        recipe = MedusaRecipe(num_heads=1)
        network = recipe.build(target)
        tokens = torch.randint(1, VOCAB_SIZE, (1, 20))
        counted = torch.zeros_like(tokens, dtype=torch.bool)
        counted[:, 12:] = True
        reader = TargetReader(target, ("last",))
        logits = network(reader.read(tokens).states["last"], target.lm_head)[0]
        expected = F.cross_entropy(logits[0, 10:-2], tokens[0, 12:])
        torch.testing.assert_close(recipe.loss(network, reader.read(Rows(tokens, counted))), expected)

    def test_kl_is_that_of_the_two_distributions(self):
        logits, target_logits = torch.randn(5, 7), torch.randn(5, 7)
        labels = torch.tensor([1, 2, 3, 4, -100])
        p, q = target_logits.softmax(-1), logits.softmax(-1)
        kl = (p * (p.log() - q.log())).sum(-1)
        torch.testing.assert_close(draft_loss(logits, labels, target_logits, 1.0)[:4], kl[:4])
        cross_entropy = F.cross_entropy(logits[:4], labels[:4], reduction="none")
        mixed = draft_loss(logits, labels, target_logits, 0.25)
        torch.testing.assert_close(mixed[:4], 0.25 * kl[:4] + 0.75 * cross_entropy)
        assert mixed[4] == 0

    def test_logits_that_are_computed_again_give_the_same_gradients(self, target, monkeypatch):
        recipe = MedusaRecipe(num_heads=2)
        reading = TargetReader(target, ("last",)).read(torch.randint(1, VOCAB_SIZE, (4, 40)))
        gradients = []
        for kept in (frame.KEPT_LOGITS, 0):
            monkeypatch.setattr(frame, "KEPT_LOGITS", kept)
            monkeypatch.setattr(frame, "CHUNK_LOGITS", 2 * VOCAB_SIZE * 32)
            network = recipe.build(target)
            recipe.loss(network, reading).backward()
            gradients.append(network.weights[0].grad)
        assert gradients[0].abs().sum() > 0
        torch.testing.assert_close(*gradients)

    @pytest.mark.parametrize("kl_weight", [0.0, 0.5])
    def test_a_draft_may_have_a_smaller_vocabulary(self, kl_weight, target):
        recipe = DraftModelRecipe(from_scratch={**SIZES, "vocab_size": VOCAB_SIZE - 4}, kl_weight=kl_weight)
        network = recipe.build(target)
        tokens = torch.randint(1, VOCAB_SIZE - 4, (2, 20))
        reader = TargetReader(target, ("last",))
        loss = recipe.loss(network, reader.read(tokens))
        tokens[0, -1] = VOCAB_SIZE - 1
        with_foreign = recipe.loss(network, reader.read(tokens))
        assert torch.isfinite(with_foreign)
        assert with_foreign != loss

    def test_a_distilled_draft_of_the_target_itself_loses_nothing(self, target):
        recipe = DraftModelRecipe(from_scratch=SIZES)
        reading = TargetReader(target, ("last",)).read(torch.randint(1, VOCAB_SIZE, (2, 20)))
        assert recipe.loss(target, reading).abs() < 1e-6


class TestReader:
    def test_kept_states_are_those_of_a_reading(self, target):
        tokens = torch.randint(1, VOCAB_SIZE, (6, 20))
        rows = Rows(tokens, torch.ones_like(tokens, dtype=torch.bool))
        reader, kept = TargetReader(target, ("last", 0)), TargetReader(target, ("last", 0))
        kept.keep(rows.once(4))
        batch = next(rows.batches(3, seed=1))
        for key, state in reader.read(Rows(batch.tokens, batch.counted)).states.items():
            torch.testing.assert_close(kept.read(batch).states[key], state)

    def test_padding_is_not_read(self, target):
        tokens = torch.randint(1, VOCAB_SIZE, (2, 20))
        counted = torch.zeros_like(tokens, dtype=torch.bool)
        counted[0, 5:9], counted[1, 4:12] = True, True
        reader = TargetReader(target, ("last",))
        states, whole = reader.read(Rows(tokens, counted)).states["last"], reader.read(tokens).states["last"]
        assert states.shape == whole.shape
        torch.testing.assert_close(states[:, :12], whole[:, :12])
        assert not states[:, 12:].any()

    def test_the_target_stays_as_it_is(self, target, tmp_path, run_options):
        before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
        TrainingRun(MedusaRecipe(num_heads=1), run_options(steps=2), tmp_path).run(target, letter_tokenizer())
        for name, tensor in target.state_dict().items():
            assert torch.equal(tensor, before[name])
        assert all(parameter.grad is None for parameter in target.parameters())

    def test_capped_logits_are_refused_for_kl(self):
        class Capped(type(tiny_llama())):
            def forward(self, *args, **kwargs):
                output = super().forward(*args, **kwargs)
                output.logits = output.logits.tanh()
                return output

        model = Capped(tiny_llama().config).eval()
        with pytest.raises(UnsupportedModelError, match="scales or caps"):
            check_plain_head(model, "`kl_weight`")
        check_plain_head(tiny_llama(), "`kl_weight`")


class TestMeasure:
    def test_a_walk_begins_each_cycle_after_the_accepted_drafts(self):
        assert walk([2, 5, 5, 0, 1], [True] * 5) == (6, 3)
        assert walk([1, 1, 1, 1], [False, False, True, True]) == (2, 1)
        assert walk([], []) == (0, 0)

    def test_is_the_acceptance_length_of_greedy_generation(self, target):
        recipe = MedusaRecipe(num_heads=2)
        network = recipe.build(target)
        torch.manual_seed(0)
        torch.nn.init.normal_(network.weights[0], std=0.05)
        prompt = prompts(1, padding=False)["input_ids"]
        text = target.generate(prompt, do_sample=False, max_new_tokens=60)
        counted = torch.zeros_like(text, dtype=torch.bool)
        counted[:, prompt.shape[1] :] = True
        measured = recipe.measure(network, TargetReader(target, ("last",)), [Rows(text, counted)])
        # Walked by hand: what the heads say after each committed token.
        with captured_states(target, ("last",)) as states, torch.no_grad():
            target(text)
        best = network(states["last"], target.lm_head).argmax(-1)[:, 0]
        position, cycles, committed = prompt.shape[1] - 2, 0, 0
        while position + 2 < text.shape[1]:
            accepted = 0
            for head in range(2):
                index = position + 2 + head
                if index >= text.shape[1] or best[head, position] != text[0, index]:
                    break
                accepted += 1
            cycles, committed, position = cycles + 1, committed + accepted + 1, position + accepted + 1
        assert measured.tokens_per_cycle == pytest.approx(committed / cycles)

    def test_a_copy_of_the_target_is_always_accepted(self, target):
        text = target.generate(**prompts(1, padding=False), do_sample=False, max_new_tokens=20)
        counted = torch.zeros_like(text, dtype=torch.bool)
        counted[:, 7:] = True
        recipe = DraftModelRecipe(from_scratch=SIZES)
        acceptance = recipe.measure(target, TargetReader(target, ("last",)), [Rows(text, counted)])
        assert acceptance.accuracies == (1.0,) * 4
        assert acceptance.tokens_per_cycle > 4

    def test_needs_something_to_measure(self, target):
        tokens = torch.ones(1, 8, dtype=torch.long)
        recipe = MedusaRecipe()
        nothing = Rows(tokens, torch.zeros_like(tokens, dtype=torch.bool))
        with pytest.raises(SpecConfigError, match="no position to measure"):
            recipe.measure(recipe.build(target), TargetReader(target, ("last",)), [nothing])


class TestErrors:
    @pytest.mark.parametrize(
        ("method", "given", "message"),
        [
            ("eagle9", {}, "no training recipe for 'eagle9'.*draft_model, medusa, mlp_speculator"),
            ("medusa", {"n_predict": 3}, "no option of the recipe for medusa. It is for mlp_speculator"),
            ("mtp", {"num_layers": 2}, "no option of the recipe for mtp. It is for .*eagle"),
            ("medusa", {"num_heads": 0}, "`num_heads` must be an integer of at least 1, got 0"),
            ("medusa", {"kl_weight": 1.5}, "`kl_weight` must be a number from 0 to 1, got 1.5"),
            ("mlp_speculator", {"top_k_tokens_per_head": (1, 2)}, "each of the 3 stages"),
            ("mlp_speculator", {"top_k_tokens_per_head": (1, 0, 2)}, "one positive integer for each of the 3 stages"),
            (
                "mlp_speculator",
                {"n_predict": 2000},
                "`n_predict` must be .* of at most 1024, got 2000",
            ),
            (
                "mlp_speculator",
                {"n_candidates": 0},
                "`n_candidates` must be .* of at most 1024, got 0",
            ),
            ("draft_model", {}, "either `draft_model`.*got neither"),
            ("draft_model", {"draft_model": "a", "from_scratch": {}}, "got both"),
            ("eagle", {"noise": -1.0}, "`noise` must be a number of at least 0"),
            ("eagle3", {"aux_layer_ids": ()}, "at least one state"),
            ("eagle3", {"aux_layer_ids": (1, 3)}, "from 0 to 2, the number of layers of LlamaForCausalLM, got 3"),
            ("eagle3", {"draft_vocab_size": 65}, "`draft_vocab_size` must be at most 64, the target's, got 65"),
            ("eagle3", {"own_head": False, "hidden_size": 8}, "`own_head=False` shares the target's lm_head"),
            ("mtp", {"intermediate_size": 65}, "`intermediate_size` must be at most 64, that of Llama.*, got 65"),
            ("dflash", {"block_size": 1}, "`block_size` must be an integer of at least 2, got 1"),
            ("dflash", {"num_denoising_steps": 3}, "=3 needs a draft that has seen revealed tokens"),
            ("dflash", {"target_layer_ids": ()}, "at least one layer of the target"),
            ("dflash", {"target_layer_ids": (0, 2)}, "from 0 to 1, the layers of LlamaForCausalLM, got 2"),
            ("dflash", {"mask_token_id": 64}, "`mask_token_id` must be from 0 to 63, the tokens that the"),
        ],
    )
    def test_of_recipes(self, method, given, message, target):
        with pytest.raises(SpecConfigError, match=message):
            make_recipe(method, given).check(target)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"batch_size": 0}, "`batch_size` must be an integer of at least 1"),
            ({"seq_length": 4}, "`seq_length` must be an integer of at least 8"),
            ({"held_out": 1.0}, "`held_out` must be a number between 0 and 1"),
            ({"epochs": 0}, "`epochs` must be a number above 0"),
            ({"self_generate": 0, "keep_text": True}, "`keep_text` adds text"),
        ],
    )
    def test_of_run_options(self, changed, message, run_options):
        with pytest.raises(SpecConfigError, match=message):
            run_options(**changed)

    def test_sizes_that_give_no_model(self, target):
        with pytest.raises(SpecConfigError, match="does not have: depth"):
            DraftModelRecipe(from_scratch={"depth": 3}).build(target)

    def test_output_folders(self, tmp_path, run_options):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(SpecConfigError, match="is not empty. Name another one."):
            TrainingRun(MedusaRecipe(), run_options(), tmp_path)
        with pytest.raises(SpecConfigError, match="no run to resume"):
            TrainingRun(MedusaRecipe(), run_options(resume=True), tmp_path / "new")
        with pytest.raises(SpecConfigError, match="is a file"):
            TrainingRun(MedusaRecipe(), run_options(), tmp_path / "notes.txt")


def test_two_processes_train_one_head(target, data, tmp_path):
    target.save_pretrained(tmp_path / "target")
    letter_tokenizer().save_pretrained(tmp_path / "target")
    arguments = ["train", "medusa", "--target", tmp_path / "target", "--data", data, "--output", tmp_path / "out"]
    arguments += ["--seq-length", LENGTH, "--batch-size", 8, "--steps", 30, "--self-generate", 24, "--num-heads", 2]
    arguments += ["--held-out", 0.2, "--lr", 0.015, "--no-bf16", "--cpu", "--json"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "hf_specdec", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["steps"] == 30
    assert report["tokens_per_cycle"] > report["untrained_tokens_per_cycle"]
    assert math.isfinite(report["loss"])
    inputs = prompts(1, padding=False)
    arguments = {"do_sample": False, "max_new_tokens": 24}
    drafted = target.generate(**inputs, **arguments, spec_method="medusa", spec_model=str(tmp_path / "out"))
    assert torch.equal(drafted, target.generate(**inputs, **arguments))
