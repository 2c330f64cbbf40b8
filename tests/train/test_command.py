"""`hf-specdec train` from end to end, on a tiny saved target and a text file."""

import json

import pytest
import torch
from typer.testing import CliRunner

from hf_specdec import cli
from tests.helpers.levels import in_full
from tests.helpers.models import letter_tokenizer, prompts, tiny_llama


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["train", *map(str, arguments)], prog_name="hf-specdec")


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def common(saved_target, data, tmp_path):
    sizes = ["--seq-length", 32, "--batch-size", 4, "--steps", 3, "--held-out", 0.2, "--device", "cpu"]
    sizes += ["--max-tokens", 800, "--save_steps", 2, "--no-bf16", "--gradient-accumulation-steps", "2"]
    return [saved_target, data, "--output", tmp_path / "out", *sizes]


# By recipe its arguments, and what the settings of the draft say of them.
SIZES = "hidden_size=16,intermediate_size=16,num_hidden_layers=1,num_attention_heads=2"
EAGLE3 = ["--aux-layer-ids", "0,2", "--draft-vocab-size", 40, "--ttt-steps", 2, "--intermediate-size", 16]
METHODS = {
    "draft_model": (["--from-scratch", SIZES], {"hidden_size": 16}),
    "eagle3": (EAGLE3, {"aux_layer_ids": [0, 2], "draft_vocab_size": 40, "intermediate_size": 16}),
}


@pytest.mark.parametrize("method", ["eagle3", *in_full("draft_model")])
def test_a_trained_draft_can_be_used(method, common, tmp_path):
    arguments, settings = METHODS[method]
    result = invoke(method, *common, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["method"], report["steps"]) == (method, 3)
    assert sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")) == ["checkpoint-3"]
    assert "'loss'" in result.stderr
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved.items() >= settings.items()
    model, call = tiny_llama(), {**prompts(2), "do_sample": False, "max_new_tokens": 12}
    drafted = model.generate(**call, spec_method=method, spec_model=str(tmp_path / "out"))
    assert torch.equal(model.generate(**call), drafted)


ERRORS = [
    ("eagle9", [], "No such command 'eagle9'"),
    ("medusa", ["--n-predict", 3], "There is no option '--n-predict'."),
    ("medusa", ["--device", "cuda:1"], "training takes cpu, or the GPU of its process"),
    ("eagle3", ["--aux-layer-ids", "low"], "--aux-layer-ids must be numbers"),
    ("medusa", ["--held-out", 2], "`held_out` must be a number between 0 and 1"),
    ("medusa", ["--learning-rat", "1e-3"], "There is no option '--learning-rat'. Did you mean '--learning-rate'?"),
    (
        "medusa",
        ["--learning-rate", "low"],
        "Argument --learning_rate/--learning-rate/--lr: invalid float value: 'low'",
    ),
    ("medusa", ["--optim", "sgdd"], "Argument --optim: invalid choice: 'sgdd' (choose from 'adamw_torch',"),
    ("medusa", ["--gradient-checkpointing"], "`gradient_checkpointing` has no meaning for the training of a draft"),
]


def test_errors_come_before_the_target_is_loaded(common, tmp_path):
    _, data, *others = common
    nowhere = tmp_path / "nowhere"
    cases = [(method, [nowhere, data, *others, *arguments], message) for method, arguments, message in ERRORS]
    missing = "There is no file or folder 'missing.txt'"
    cases += [("medusa", [nowhere, data, "missing.txt", *others], missing)]
    cases += [("medusa", ["--lr", "1", nowhere, data, *others], "MODEL and DATA come first")]
    for method, arguments, message in cases:
        result = invoke(method, *arguments)
        assert result.exit_code == 2
        assert message in result.stderr.replace("\n", " ")
        assert not (tmp_path / "out").exists()


def test_help_lists_the_options_of_one_recipe():
    shown = " ".join(invoke("medusa", "--help").stdout.split())
    assert "--num-heads: Number of heads. (4)" in shown
    assert "--share-lm-head/--own-lm-heads" in shown
    assert "--ttt-steps" not in shown
