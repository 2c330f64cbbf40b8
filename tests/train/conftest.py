"""Training in these tests runs on the CPU, also where accelerate would find a GPU."""

import os

import pytest
import torch

from hf_specdec.candidate_generators.draft_model.recipe import DraftModelRecipe
from hf_specdec.training.options import TrainingOptions
from hf_specdec.training.reading import TargetReader
from hf_specdec.training.run import RunOptions
from hf_specdec.training.text import load_documents, pack
from hf_specdec.training.trainer import train
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, tiny_llama


os.environ.setdefault("ACCELERATE_USE_CPU", "true")

LENGTH = 48


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Pieces of text in which each token has one successor."""
    successors = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).tolist()
    tokens = []
    for token in torch.randint(VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(1)).tolist():
        for _ in range(40):
            tokens.append(token)
            token = successors[token]
    path = tmp_path_factory.mktemp("data") / "letters.txt"
    path.write_text(letter_tokenizer().decode(tokens))
    return path


@pytest.fixture(scope="session")
def target(data):
    """A tiny model that has learned most of it."""
    model = tiny_llama(3, initializer_range=0.1)
    recipe = DraftModelRecipe(from_scratch={}, kl_weight=0.0)
    rows = pack(load_documents([str(data)], letter_tokenizer()), LENGTH, None)
    settings = TrainingOptions(steps=60, learning_rate=1e-2, warmup_steps=5, bf16=False)
    losses = train(model, rows.batches(8, 0), recipe.objective(model, TargetReader(None, ())), settings)
    assert losses[-1] < 0.5 * losses[0]
    return model.requires_grad_(False)


@pytest.fixture(scope="session")
def run_options(data):
    """Options of a small run, with some of them changed."""
    settings = {"data": (str(data),), "seq_length": LENGTH, "batch_size": 8, "steps": 32, "self_generate": 32}
    settings |= {"learning_rate": 1e-2, "held_out": 0.2, "bf16": False}
    return lambda **changed: RunOptions(**settings | changed)
