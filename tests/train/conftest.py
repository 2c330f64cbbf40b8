"""Training in these tests runs on the CPU, and leaves nothing in the cache of data sets."""

import pytest
import torch

from hf_specdec.candidate_generators.draft_model.recipe import DraftModelRecipe
from hf_specdec.training.options import TextOptions
from hf_specdec.training.run import TrainingRun
from hf_specdec.training.text import load_documents, pack
from hf_specdec.training.trainer import DraftTrainer
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, tiny_llama
from tests.helpers.recipes import training_arguments


LENGTH = 48


@pytest.fixture(scope="session", autouse=True)
def datasets_cache(tmp_path_factory):
    datasets = pytest.importorskip("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


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
def target(data, datasets_cache, tmp_path_factory):
    """A tiny model that has learned most of it."""
    model = tiny_llama(3, initializer_range=0.1)
    recipe = DraftModelRecipe(from_scratch={}, kl_weight=0.0)
    rows = pack(load_documents([str(data)], letter_tokenizer()), LENGTH, None)
    folder = tmp_path_factory.mktemp("target")
    arguments = training_arguments(folder, max_steps=60, learning_rate=1e-2, save_strategy="no", logging_steps=1)
    trainer = DraftTrainer(recipe, model, None, arguments, rows)
    trainer.train()
    first, *_, last = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert last < 0.5 * first
    return model.requires_grad_(False).eval()


@pytest.fixture
def run(data, target):
    """Runs a recipe on a little text; fields of `TextOptions` and of the arguments can be changed."""

    def run(recipe, folder, **changed):
        text = {"data": (str(data),), "seq_length": LENGTH, "held_out": 0.2, "self_generate": 32}
        text |= {name: changed.pop(name) for name in TextOptions.__dataclass_fields__ if name in changed}
        settings = {"max_steps": 32, "learning_rate": 1e-2, "logging_steps": 1} | changed
        arguments = training_arguments(folder, **settings)
        return TrainingRun(recipe, TextOptions(**text), arguments).run(target, letter_tokenizer(), "tiny")

    return run
