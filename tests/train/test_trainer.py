"""The trainer: its schedule, what its optimizers update, and in which precision."""

import itertools
import math

import pytest
import torch
from torch import nn

from hf_specdec.candidate_generators.draft_model.recipe import DraftModelRecipe
from hf_specdec.errors import MissingDependencyError, SpecDecError
from hf_specdec.training import trainer
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.reading import TargetReader
from hf_specdec.training.trainer import train
from tests.helpers.levels import in_full
from tests.helpers.models import tiny_llama


TOKENS = torch.randint(50, (4, 32), generator=torch.Generator().manual_seed(0))


def next_token_loss(model):
    return DraftModelRecipe(from_scratch={}, kl_weight=0.0).objective(model, TargetReader(None, ()))


def test_the_schedule_warms_up_decays_and_moves_with_a_time_limit():
    options = TrainingOptions(steps=100, learning_rate=1.0, warmup_steps=10, final_learning_rate=0.1)
    rates = [options.learning_rate_at(step, options.progress(step, 0.0)) for step in range(100)]
    assert rates[0] == pytest.approx(0.1, abs=0.01)
    assert max(rates) == pytest.approx(rates[9])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[9:]))
    assert options.learning_rate_at(100, 1.0) == pytest.approx(0.1)
    options = TrainingOptions(steps=100, max_minutes=2)
    assert [options.progress(*at) for at in ((10, 60.0), (70, 60.0), (10, 1000.0))] == [0.5, 0.7, 1.0]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        TrainingOptions(steps=0)


@pytest.mark.parametrize("muon", [True, *in_full(False)])
def test_training_lowers_the_loss_and_is_repeatable(muon):
    options = TrainingOptions(steps=12, learning_rate=1e-2, warmup_steps=1, bf16=False, muon=muon)
    runs = []
    for _ in range(2):
        model = tiny_llama(initializer_range=0.2)
        frozen = model.model.embed_tokens.weight.requires_grad_(False)
        before = frozen.clone()
        runs.append(train(model, itertools.repeat(TOKENS), next_token_loss(model), options))
        assert torch.equal(frozen, before)
        assert not model.training
    assert runs[0] == runs[1]
    assert len(runs[0]) == 12
    assert runs[0][-1] < runs[0][0] - 1


def test_bfloat16_where_the_machine_computes_in_it(monkeypatch):
    """Other CPUs take many times as long for it."""
    network, found = nn.Linear(4, 3), []

    def loss(batch):
        output = network(batch)
        found.append(output.dtype)
        return output.float().pow(2).sum()

    for asked, multiplies in ((True, True), (True, False), (True, None), (False, True)):
        monkeypatch.setattr(trainer, "multiplies_bfloat16", lambda multiplies=multiplies: multiplies)
        options = TrainingOptions(steps=1, warmup_steps=1, bf16=asked)
        train(network, itertools.repeat(torch.ones(2, 4)), loss, options)
    assert found == [torch.bfloat16, *[torch.float32] * 3]


def test_a_diverged_loss_and_a_torch_without_muon_are_errors(monkeypatch):
    model = nn.Linear(2, 1)
    with pytest.raises(SpecDecError, match="lower `learning_rate`"):
        train(model, [torch.zeros(1, 2)], lambda batch: model(batch).sum() * math.inf, TrainingOptions(steps=1))
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(MissingDependencyError, match="torch 2.9 or later"):
        TrainingOptions(steps=1, muon=True)
