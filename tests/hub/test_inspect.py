"""Configs and headers tell if a checkpoint fits a target, in Python and on the command line."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hf_specdec import CheckpointFormatError, cli, demo
from hf_specdec.errors import CheckpointAccessError
from hf_specdec.hub import inspect_checkpoint
from tests.helpers.heads import HEADS, copy_of, load, loaded_target, method_of, put, target_of, without
from tests.helpers.loopback_hub import TOKEN
from tests.helpers.paths import FIXTURES


DEMO = Path(demo.target_path()).parent
KEYS = ["name", "method", "format", "producer", "target", "num_draft_tokens", "tensors", "bytes", "mtp_layers"]
KEYS += ["fits", "problems"]

PAIRS = {
    **{path.parent: path for path in FIXTURES.glob("*/*/target")},
    **{path: FIXTURES / path.parent.name / "target" for path in FIXTURES.glob("m[el]*/*_*") if path.is_dir()},
    **{path: DEMO / "target" for path in DEMO.iterdir() if (path / "config.json").is_file()},
}
PAIRS = {path: target for path, target in PAIRS.items() if (path / "config.json").is_file()}


def run(*arguments, **options):
    return CliRunner().invoke(cli.app, ["inspect", *map(str, arguments)], prog_name="hf-specdec", **options)


def target_with(tmp_path, **changes):
    folder = tmp_path / "target"
    folder.mkdir()
    config = json.loads((DEMO / "target" / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_drafters_fit_their_targets(path):
    found = inspect_checkpoint(path, PAIRS[path])
    assert found.problems == ()
    assert found.fits is True
    assert inspect_checkpoint(path).fits is None


@pytest.mark.parametrize(
    ("drafter", "changes", "problem"),
    [
        ("eagle", {"hidden_size": 512}, "It reads states of hidden size 256, and the target has 512."),
        ("medusa", {"hidden_size": 512}, "It reads states of hidden size 256, and the target has 512."),
        ("mlp_speculator", {"vocab_size": 9000}, "It has a vocabulary of 4096 tokens, and the target has 9000"),
        ("draft", {"vocab_size": 9000}, "different tokenizers"),
        ("eagle3", {"num_hidden_layers": 4}, "It reads the states of 5 decoder layers, and the target has 4."),
        ("dflash", {"num_hidden_layers": 8}, "It was made for a target with 5 decoder layers, and the target has 8."),
        ("eagle", {"is_encoder_decoder": True}, "reads the states of decoder-only ones"),
        ("mtp", {"model_type": "mistral"}, "the model_type 'llama', and the target is of 'mistral'."),
        ("mtp", {"model_type": "gpt2"}, "The MTP layers of targets of the model_type 'gpt2' are not supported."),
    ],
)
def test_drafters_of_other_targets_do_not(tmp_path, drafter, changes, problem):
    target = target_with(tmp_path, **changes)
    found = inspect_checkpoint(DEMO / drafter, target)
    assert found.fits is False
    assert any(problem in sentence for sentence in found.problems)
    assert run(DEMO / drafter, "--target", target).exit_code == 1


@pytest.mark.parametrize(
    ("name", "change", "config", "problem"),
    [
        (
            "eagle/eagle3_llama",
            put("fc.weight", torch.ones(63, 192)),
            {},
            r"It has fc.weight of the shape \[63, 192\]",
        ),
        (
            "dflash/qwen3_random_b8",
            None,
            {"dflash_config.mask_token_id": "x"},
            "It has `mask_token_id`='x' in its conf",
        ),
        ("dflash/qwen3_random_b8", put("x.weight", torch.ones(2)), {}, "It has 1 tensors that no DFlash draft"),
        (
            "medusa/vllm_converted",
            put("lm_heads.1.weight", torch.ones(3)),
            {},
            "It has lm_heads.1.weight of the shape",
        ),
        ("mlp_speculator/untied_plain", without("ln.2.bias"), {}, "It lacks 1 tensors of the MLP speculator: ln.2"),
        ("demo/mtp", put("mtp.fc.weight", torch.ones(3, 3)), {}, r"It has mtp.fc.weight of the shape \[3, 3\]"),
        ("eagle/eagle3_llama", None, {"rope_theta": [1]}, "It has `rope_theta`=.1. in its config.json, which must be"),
    ],
)
def test_what_its_loader_refuses_does_not_fit(tmp_path, name, change, config, problem):
    folder = copy_of(name, tmp_path / "head", config, change)
    found = inspect_checkpoint(folder, target_of(HEADS[name]))
    assert found.fits is False
    assert re.match(problem, found.problems[0])
    with pytest.raises(CheckpointFormatError):
        load(method_of(name), folder, loaded_target(HEADS[name]))


def test_layers_of_the_target_that_cannot_be_loaded(tmp_path):
    copy_of("mtp/mellum", tmp_path, {}, put("mtp.fc.weight", torch.ones(3, 3)))
    (problem,) = inspect_checkpoint(tmp_path, tmp_path).problems
    assert problem.startswith("It has mtp.fc.weight of the shape [3, 3]")


@pytest.mark.parametrize("drafter", ["eagle", "draft", "mlp_speculator", "mtp"])
def test_padded_vocabularies_fit(tmp_path, drafter):
    assert inspect_checkpoint(DEMO / drafter, target_with(tmp_path, vocab_size=4100)).fits is True


def test_the_language_model_of_a_multimodal_target(tmp_path):
    inner = json.loads((DEMO / "target" / "config.json").read_text())
    for size, fits in ((256, True), (512, False)):
        target = tmp_path / str(size)
        target.mkdir()
        (target / "config.json").write_text(json.dumps({"text_config": {**inner, "hidden_size": size}}))
        assert inspect_checkpoint(DEMO / "eagle3", target).fits is fits


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "mimo"])
def test_layers_of_a_target_are_used_by_their_method(family):
    target = FIXTURES / "mtp" / family / "target"
    for found in (inspect_checkpoint(target), inspect_checkpoint(target, target)):
        assert found.found.method == "draft_model"
        assert "use spec_method='mtp'" in found.hint
        assert found.to_dict()["hint"] == found.hint
    assert found.fits is True
    assert "use spec_method='mtp'" in run(target, env={"COLUMNS": "200"}).stdout


def test_a_target_that_cannot_draft_for_itself(tmp_path):
    found = inspect_checkpoint(DEMO / "target", DEMO / ".." / "demo" / "target")
    assert "is the target itself and has no multi-token-prediction layers" in found.hint
    assert inspect_checkpoint(DEMO / "draft", DEMO / "target").hint is None
    # Layers of a family that is not supported.
    shutil.copytree(FIXTURES / "mtp" / "deepseek_v3" / "target", tmp_path / "target")
    file = tmp_path / "target" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "pangu_ultra_moe"}))
    found = inspect_checkpoint(tmp_path / "target", tmp_path / "target")
    assert "'pangu_ultra_moe' are not supported" in found.problems[0]


def test_texts_of_strangers_stay_on_one_line(tmp_path):
    shutil.copytree(DEMO / "eagle3", tmp_path / "head")
    (tmp_path / "head" / "README.md").write_text('---\nbase_model: "a\\x1b[2J\\n\\u202eb"\n---\n')
    found = inspect_checkpoint(tmp_path / "head", "demo")
    assert found.found.target.name.isprintable()
    assert "\x1b[2J" not in run(tmp_path / "head", "--target", "demo").stdout


def test_what_cannot_be_used_at_all_fits_nothing(tmp_path):
    save_file({"fc.bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["EagleCohereForCausalLM"]}')
    found = inspect_checkpoint(tmp_path)
    assert (found.found.format, found.fits) == ("eagle-cohere", None)
    assert "Cohere layer" in found.problems[0]
    assert inspect_checkpoint(tmp_path, "demo").fits is False
    assert run(tmp_path).exit_code == 1


class TestCommand:
    def test_json(self, hub):
        hub.add("user/head", DEMO / "eagle3", card="---\nbase_model: user/target\n---\n")
        result = run("user/head", "--target", "demo", "--json")
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        assert list(found) == KEYS
        assert found["method"] == "eagle3"
        assert found["format"] == "eagle3-safeailab"
        assert found["target"]["name"] == "user/target"
        assert found["target"]["hidden_size"] == 256
        assert (found["fits"], found["problems"]) == (True, [])
        assert 0 < found["bytes"] < (DEMO / "eagle3" / "model.safetensors").stat().st_size
        assert found["tensors"] == 12
        assert hub.sent("/storage/*") < 110_000

    def test_without_a_target(self):
        result = run(DEMO / "dflash", "--json")
        assert result.exit_code == 0
        assert json.loads(result.stdout)["fits"] is None

    def test_a_table_for_people(self):
        result = run(DEMO / "dflash", "--target", "demo", env={"COLUMNS": "200"})
        assert result.exit_code == 0
        for words in ("dflash-zlab (z-lab", "hidden size 256, vocabulary 4096, layers 5", "7 tokens", "1.4 MB", "yes"):
            assert words in result.stdout
        result = run(DEMO / "dflash", "--target", DEMO / "draft", env={"COLUMNS": "200"})
        assert result.exit_code == 1
        assert "problem" in result.stdout
        assert "hidden size 256, and the target has 128" in result.stdout

    def test_a_target_on_the_hub(self, hub):
        hub.add("user/target", DEMO / "target")
        assert run(DEMO / "eagle", "--target", "user/target").exit_code == 0
        assert hub.sent("/storage/*") == 0

    def test_revision_subfolder_cache_and_offline(self, hub, tmp_path):
        files = {f"inner/{path.name}": path.read_bytes() for path in (DEMO / "medusa").iterdir()}
        hub.add("user/head", files=files, revision="v2")
        where = ("user/head", "--revision", "v2", "--subfolder", "inner", "--cache-dir", tmp_path)
        assert run(*where).exit_code == 0
        assert (tmp_path / "models--user--head").is_dir()
        hub.requests.clear()
        result = run("user/head", "--offline")
        assert result.exit_code == 2
        assert "not in the cache" in result.stderr
        assert not hub.requests

    @pytest.mark.parametrize("arguments", [("user/none",), (DEMO / "eagle", "--target", "user/none")])
    def test_errors(self, hub, arguments):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "neither a local folder nor a repository of this name" in result.stderr
        assert "Traceback" not in result.stderr

    def test_an_unknown_format(self, tmp_path):
        (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
        result = run(tmp_path)
        assert result.exit_code == 2
        assert "BertModel" in result.stderr
        with pytest.raises(CheckpointFormatError):
            inspect_checkpoint(tmp_path)


def test_a_token_goes_to_both_repositories(hub):
    hub.add("other/head", DEMO / "eagle", private=True)
    hub.add("other/target", DEMO / "target", gated=True)
    assert inspect_checkpoint("other/head", "other/target", token=TOKEN).fits is True
    with pytest.raises(CheckpointAccessError):
        inspect_checkpoint("other/head", "other/target")
