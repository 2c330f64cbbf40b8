import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec.candidate_generators.draft_model.recipe import DraftModelRecipe
from hf_specdec.errors import MissingDependencyError, SpecDecError
from hf_specdec.training import trainer
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.reading import TargetReader
from hf_specdec.training.recipe import sum_over_chunks
from hf_specdec.training.trainer import _optimizers, train


def next_token_loss(model):
    return DraftModelRecipe(from_scratch={}, kl_weight=0.0).objective(model, TargetReader(None, ()))


def distillation_loss(student, teacher):
    recipe = DraftModelRecipe(from_scratch={})
    return recipe.objective(student, TargetReader(teacher, recipe.target_hidden_states))


@pytest.fixture
def make_model():
    def make(seed):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
        return LlamaForCausalLM(config)

    return make


def test_next_token_loss_is_the_mean_cross_entropy(make_model):
    model = make_model(0)
    tokens = torch.randint(50, (3, 300), generator=torch.Generator().manual_seed(1))
    logits = make_model(0)(tokens).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(next_token_loss(model)(tokens), expected)


def test_distillation_loss_is_the_mean_kl(make_model):
    student, teacher = make_model(0), make_model(1)
    tokens = torch.randint(50, (2, 300), generator=torch.Generator().manual_seed(1))
    loss = distillation_loss(student, teacher)(tokens)
    # The last position has no token to draft.
    p, q = (model(tokens).logits[:, :-1].log_softmax(-1) for model in (teacher, student))
    torch.testing.assert_close(loss, (p.exp() * (p - q)).sum(-1).mean())
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert distillation_loss(student, student)(tokens).abs() < 1e-6


def test_chunks_cover_every_position_once():
    values = torch.arange(10.0)
    assert sum_over_chunks(lambda rows: values[rows].sum(), 10, logits_per_position=10**9) == values.sum()
    seen = []
    sum_over_chunks(lambda rows: seen.append(rows) or torch.zeros(()), 40, logits_per_position=10**9)
    assert seen == [slice(0, 16), slice(16, 32), slice(32, 48)]


def test_schedule_warms_up_and_decays():
    options = TrainingOptions(steps=100, learning_rate=1.0, warmup_steps=10, final_learning_rate=0.1)
    rates = [options.learning_rate_at(step, options.progress(step, 0.0)) for step in range(100)]
    assert rates[0] == pytest.approx(0.1, abs=0.01)
    assert max(rates) == pytest.approx(rates[9])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[9:]))
    assert options.learning_rate_at(100, 1.0) == pytest.approx(0.1)


def test_time_limit_moves_the_schedule():
    options = TrainingOptions(steps=100, max_minutes=2)
    assert options.progress(10, 60.0) == 0.5
    assert options.progress(70, 60.0) == 0.7
    assert options.progress(10, 1000.0) == 1.0
    with pytest.raises(ValueError, match="at least 1, got 0"):
        TrainingOptions(steps=0)


@pytest.mark.parametrize("muon", [False, True])
def test_training_lowers_the_loss_and_is_repeatable(make_model, muon):
    tokens = torch.randint(50, (4, 32), generator=torch.Generator().manual_seed(0))
    options = TrainingOptions(steps=12, learning_rate=1e-2, warmup_steps=1, bf16=False, muon=muon)
    runs = []
    for _ in range(2):
        model = make_model(0)
        losses = train(model, itertools.repeat(tokens), next_token_loss(model), options)
        assert len(losses) == 12
        assert not model.training
        runs.append(losses)
    assert runs[0] == runs[1]
    assert runs[0][-1] < runs[0][0] - 1


def test_training_stops_at_the_time_limit(make_model):
    model = make_model(0)
    options = TrainingOptions(steps=10**6, max_minutes=0.3 / 60)
    losses = train(model, itertools.repeat(torch.ones(1, 8, dtype=torch.long)), next_token_loss(model), options)
    assert 0 < len(losses) < 10**5


def test_frozen_parameters_stay(make_model):
    model = make_model(0)
    model.model.embed_tokens.requires_grad_(False)
    before = model.model.embed_tokens.weight.clone()
    train(
        model,
        itertools.repeat(torch.ones(1, 8, dtype=torch.long)),
        next_token_loss(model),
        TrainingOptions(steps=2, warmup_steps=1),
    )
    assert torch.equal(model.model.embed_tokens.weight, before)


@pytest.mark.parametrize(
    ("asked", "multiplies", "computed"),
    [
        (True, True, torch.bfloat16),
        (True, False, torch.float32),
        (True, None, torch.float32),
        (False, True, torch.float32),
    ],
)
def test_bfloat16_where_the_machine_computes_in_it(asked, multiplies, computed, monkeypatch):
    """Other CPUs take many times as long for it."""
    monkeypatch.setattr(trainer, "multiplies_bfloat16", lambda: multiplies)
    network, found = nn.Linear(4, 3), []

    def loss(batch):
        output = network(batch)
        found.append(output.dtype)
        return output.float().pow(2).sum()

    train(network, itertools.repeat(torch.ones(2, 4)), loss, TrainingOptions(steps=2, warmup_steps=1, bf16=asked))
    assert found == [computed] * 2


def test_muon_needs_a_recent_torch(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(MissingDependencyError, match="torch 2.9 or later"):
        TrainingOptions(steps=1, muon=True)


@pytest.mark.parametrize("tied", [False, True])
def test_muon_updates_only_hidden_matrices(make_model, tied):
    model = make_model(0)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    adamw, muon = _optimizers(model, TrainingOptions(steps=1, muon=True))
    updated = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    layers = {id(parameter) for parameter in model.model.layers.parameters() if parameter.ndim == 2}
    assert updated == layers
    others = [id(parameter) for group in adamw.param_groups for parameter in group["params"]]
    assert sorted([*updated, *others]) == sorted(id(parameter) for parameter in model.parameters())


def test_a_diverged_loss_is_an_error():
    model = nn.Linear(2, 1)
    with pytest.raises(SpecDecError, match="lower `learning_rate`"):
        train(model, [torch.zeros(1, 2)], lambda batch: model(batch).sum() * math.inf, TrainingOptions(steps=1))
