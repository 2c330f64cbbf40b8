"""`hf-specdec train` from end to end, on a tiny saved target and a text file."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec import cli
from hf_specdec.method import trainings
from hf_specdec.training.options import flags_of, options_of
from hf_specdec.training.run import RunOptions, recipes
from tests.helpers.models import VOCAB_SIZE, letter_tokenizer, prompts, tiny_llama


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["train", *map(str, arguments)], prog_name="hf-specdec")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    tokens = torch.randint(1, VOCAB_SIZE, (800,), generator=torch.Generator().manual_seed(0))
    path = tmp_path_factory.mktemp("data") / "letters.txt"
    path.write_text(letter_tokenizer().decode(tokens))
    return path


@pytest.fixture
def common(target, data, tmp_path):
    sizes = ["--seq-length", 32, "--batch-size", 4, "--steps", 3, "--held-out", 0.2, "--threads", 1, "--cpu"]
    return ["--target", target, "--data", data, "--output", tmp_path / "out", *sizes]


METHODS = {
    "medusa": ["--num-heads", 2, "--own-lm-heads", "--kl-weight", 0.5],
    "mlp_speculator": ["--n-predict", 2, "--inner-dim", 8, "--no-tie-weights"],
    "draft_model": [
        "--from-scratch",
        "hidden_size=16,intermediate_size=16,num_hidden_layers=1,num_attention_heads=2",
    ],
    "eagle": ["--ttt-steps", 2, "--noise", 0, "--token-weight", 1],
    "eagle3": ["--aux-layer-ids", "0,2", "--draft-vocab-size", 40, "--ttt-steps", 2, "--intermediate-size", 16],
    "dflash": ["--block-size", 5, "--num-layers", 1, "--target-layer-ids", "1,0", "--reveal-share", 0.5],
    "mtp": ["--ttt-steps", 2, "--intermediate-size", 16, "--head-decay", 0.7, "--kl-weight", 0.9],
}
SAVED = {
    "eagle3": {"aux_layer_ids": [0, 2], "draft_vocab_size": 40, "intermediate_size": 16},
    "dflash": {
        "block_size": 5,
        "num_hidden_layers": 1,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 0], "num_denoising_steps": 3},
    },
    "mtp": {"mtp_intermediate_size": 16},
}


@pytest.mark.parametrize("method", METHODS)
def test_trains_a_draft_that_can_be_used(method, common, tmp_path):
    result = invoke(method, *common, *METHODS[method], "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["method"] == method
    assert report["steps"] == 3
    assert len(report["accuracies"]) == {"medusa": 2, "mlp_speculator": 2}.get(method, 4)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved.items() >= SAVED.get(method, {}).items()
    model, inputs = tiny_llama(), prompts(2)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    drafted = model.generate(
        **inputs, do_sample=False, max_new_tokens=12, spec_method=method, spec_model=str(tmp_path / "out")
    )
    assert torch.equal(plain, drafted)


@pytest.mark.parametrize(
    ("trained", "method", "options"),
    [("medusa", "medusa", ()), ("peagle", "eagle3", ("--num-layers", 1, "--ttt-steps", 2))],
)
def test_prints_the_acceptance_and_the_line_that_uses_the_draft(trained, method, options, common, target, tmp_path):
    result = invoke(trained, *common, *options)
    assert result.exit_code == 0, result.stderr
    assert "tokens per cycle (untrained" in result.stdout
    usage = next(line.strip() for line in result.stdout.splitlines() if line.startswith("  hf-specdec"))
    assert usage == f"hf-specdec generate --model {target} --method {method} --spec-model {tmp_path / 'out'}"
    generated = CliRunner().invoke(cli.app, [*usage.split()[1:], "--no-stats", "-n", "5", "abc"])
    assert generated.exit_code == 0, generated.stderr
    assert len(generated.stdout.strip()) == 5


def test_resumes(common, tmp_path):
    assert invoke("medusa", *common, "--self-generate", 8).exit_code == 0
    first = (tmp_path / "out" / "training.json").read_text()
    again = invoke("medusa", *common, "--self-generate", 8, "--resume")
    assert again.exit_code == 0, again.stderr
    assert (tmp_path / "out" / "training.json").read_text() == first


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("eagle9", [], "There is no training recipe for 'eagle9'"),
        ("medusa", ["--n-predict", 3], "`n_predict` is no option of the recipe for medusa"),
        ("draft_model", [], "needs either `draft_model`"),
        ("draft_model", ["--from-scratch", "small"], "--from-scratch must be sizes"),
        ("eagle3", ["--aux-layer-ids", "low"], "--aux-layer-ids must be numbers"),
        ("mtp", ["--num-layers", 2], "`num_layers` is no option of the recipe for mtp"),
        ("dflash", ["--num-denoising-steps", 2], "`num_denoising_steps`=2 needs a draft that has seen revealed"),
        ("medusa", ["--held-out", 2], "`held_out` must be a number between 0 and 1"),
        ("medusa", ["--data", "missing.txt"], "There is no file or folder 'missing.txt'"),
    ],
)
def test_errors_come_before_the_target_is_loaded(method, arguments, message, data, tmp_path):
    common = ["--target", tmp_path / "nowhere", "--data", data, "--output", tmp_path / "out"]
    result = invoke(method, *common, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_too_little_text(common, tmp_path):
    (tmp_path / "short.txt").write_text("abc")
    common[common.index("--data") + 1] = tmp_path / "short.txt"
    result = invoke("medusa", *common)
    assert result.exit_code == 2
    assert "The data have 3 tokens, fewer than one row of 32" in result.stderr


def flags(options):
    return [flag for item, kind in options_of(options) for flag in flags_of(item, kind)]


def test_help_names_every_option(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = invoke("--help")
    assert result.exit_code == 0
    for options in (RunOptions, *recipes().values()):
        for flag in flags(options):
            assert all(f" {part}" in result.stdout.replace(",", " ") for part in flag.split("/"))
    assert (
        "Weight of a draft's loss relative to the one before it. (0.8; dflash, dflash2, domino, lilicorr: 0.87; "
        "mlp_speculator: 0.9" in result.stdout
    )
    assert re.search(r"Options of (\w+, )*medusa(,| and) mlp_speculator ", result.stdout)


def test_recipes_name_their_methods():
    assert all(recipe.method == trainings()[name].method.name for name, recipe in recipes().items())
