"""TRL's GRPO: the drafter changes no text, acceptance is logged, and drafters that have grown stale are seen to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hf_specdec import SpecConfigError, demo
from hf_specdec.loaded import record_of
from hf_specdec.many.batching import generate_batch
from tests.helpers.levels import full
from tests.helpers.models import tiny_llama


pytest.importorskip("trl")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from hf_specdec.integrations.trl import SpeculationCallback


# TRL and transformers' own trainer.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

NGRAM = {"spec_method": "ngram", "num_speculative_tokens": 4}
STEPS = 3


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("prompts")
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt.text[-60:]}) for prompt in demo.prompts()[:4]))
    return Dataset.from_json(str(file), cache_dir=str(folder))


def reward(completions: list[str], **columns) -> list[float]:
    return [float(len(set(text))) for text in completions]


def trainer(prompts: Dataset, folder: Path, generation: dict, **settings) -> GRPOTrainer:
    settings |= {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 24, "beta": 0.0}
    settings |= {"max_steps": STEPS, "learning_rate": 1e-5, "temperature": 0.7, "logging_steps": 1, "report_to": []}
    settings |= {"save_strategy": "no", "use_cpu": True, "bf16": False, "seed": 3}
    config = GRPOConfig(output_dir=str(folder), generation_kwargs=generation, **settings)
    return GRPOTrainer(
        model=demo.load_target(torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=prompts,
        processing_class=demo.load_tokenizer(),
    )


def logged(trained: GRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trained.state.log_history if name in entry]


@full
def test_drafters_change_no_text(prompts, tmp_path, monkeypatch):
    rewards, batches = [], []

    def counting(*args, **kwargs):
        batches.append(generate_batch(*args, **kwargs))
        return batches[-1]

    monkeypatch.setattr("hf_specdec.many.batching.generate_batch", counting)
    eagle3 = {"method": "eagle3", "model": demo.drafter_path("eagle3"), "num_speculative_tokens": 4}
    batching = {"use_transformers_continuous_batching": True}
    for generation, settings in (({"speculative": eagle3}, {}), (NGRAM, {}), (NGRAM, batching)):
        trained = trainer(prompts, tmp_path, generation, **settings)
        SpeculationCallback().add_to(trained)
        trained.train()
        rewards.append(logged(trained, "reward"))
        assert len(logged(trained, "speculation/acceptance_length")) == STEPS
        assert min(logged(trained, "speculation/acceptance_length")) > 1
        assert min(logged(trained, "speculation/draft_tokens")) > 0
        assert trained.model.training
    assert rewards[0] == rewards[1] == rewards[2]
    assert len(rewards[0]) == len(batches) == STEPS


@full
def test_texts_of_older_policies_are_forgotten_and_calls_of_others_not_counted(prompts, tmp_path):
    judge, kept, counts = tiny_llama(), [], []

    def judged(completions: list[str], **columns) -> list[float]:
        judge.generate(torch.tensor([[1, 2, 1, 2]]), max_new_tokens=8, **NGRAM)
        return reward(completions)

    for most_age, rewards in ((None, reward), (1, reward), (None, judged)):
        trained = trainer(prompts, tmp_path, {"spec_method": "suffix", "num_speculative_tokens": 4})
        trained.reward_funcs = [rewards]
        SpeculationCallback(most_text_age=most_age).add_to(trained)
        trained.train()
        (entry,) = record_of(trained.model).loaded
        kept.append(len(entry.resources.cached_requests))
        counts.append(logged(trained, "speculation/draft_tokens"))
    assert kept == [4 * STEPS, 4, 4 * STEPS]
    assert counts[0] == counts[2]


@full
def test_stale_drafters(prompts, tmp_path):
    trained = trainer(prompts, tmp_path, dict(NGRAM))
    SpeculationCallback(least_acceptance_length=50, window=2).add_to(trained)
    trained.train()
    assert len(logged(trained, "speculation/acceptance_length")) == 2
    assert not hasattr(trained.generation_config, "speculative")
    refreshed = []
    trained = trainer(prompts, tmp_path, dict(NGRAM))
    SpeculationCallback(least_acceptance_length=50, window=1, refresh=refreshed.append).add_to(trained)
    trained.train()
    assert refreshed == [trained.model] * STEPS
    assert len(logged(trained, "speculation/acceptance_length")) == STEPS
    assert record_of(trained.model).loaded == []


@full
def test_wrong_settings(prompts, tmp_path):
    with pytest.raises(SpecConfigError, match="at least 1"):
        SpeculationCallback(least_acceptance_length=0.5)
    with pytest.raises(SpecConfigError, match="Say what is too little"):
        SpeculationCallback(refresh=print)
    with pytest.raises(SpecConfigError, match="window"):
        SpeculationCallback(window=0)
    for generation, message in (
        (None, "without speculation"),
        ({"spec_method": "off"}, "without speculation"),
        ({"speculative": {"method": "ngram", "rejection_sample_method": "typical"}}, "off policy"),
    ):
        with pytest.raises(SpecConfigError, match=message):
            SpeculationCallback().add_to(trainer(prompts, tmp_path, generation))
