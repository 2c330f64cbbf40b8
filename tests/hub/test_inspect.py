"""Configs and headers tell whether a drafter fits a target, of every published form."""

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
from tests.helpers import drafters
from tests.helpers.heads import HEADS, WITH_LAYERS, copy_of, load, loaded_target, method_of, put, target_of, without
from tests.helpers.levels import full
from tests.helpers.loopback_hub import TOKEN


DEMO = Path(demo.target_path()).parent
EAGLE3, DFLASH = "eagle/eagle3_llama", "dflash/qwen3_random_b8"
PUBLISHED = {**HEADS, **WITH_LAYERS}
PUBLISHED |= {f"demo/{path.name}": path for path in DEMO.iterdir() if (path / "config.json").is_file()}
PUBLISHED.pop("demo/target")


def run(*arguments, **options):
    return CliRunner().invoke(cli.app, ["inspect", *map(str, arguments)], prog_name="hf-specdec", **options)


def demo_target(folder, **changes):
    """The config of the demo's target with other values."""
    folder.mkdir()
    config = json.loads((DEMO / "target" / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_inspect_names_method_and_target():
    for name, folder in PUBLISHED.items():
        found = inspect_checkpoint(folder, target_of(folder))
        assert (found.fits, found.problems) == (True, ())
        assert inspect_checkpoint(folder).fits is None
        is_own = name in WITH_LAYERS
        assert ("use spec_method='mtp'" in (found.hint or "")) == is_own
        if is_own or name == "demo/draft":
            assert found.found.method == "draft_model"
            continue
        assert found.found.method == (folder.name if name.startswith("demo") else method_of(name))
        config = json.loads((target_of(folder) / "config.json").read_text())
        assert found.found.target.hidden_size == config["hidden_size"]
        # A head that goes through the target's lm_head works with every vocabulary.
        assert found.found.format == "medusa-v2" or found.found.target.vocab_size == config["vocab_size"]


def test_drafters_of_other_targets_do_not_fit(tmp_path):
    for index, (drafter, changes, problem) in enumerate(
        (
            ("eagle", {"hidden_size": 512}, "It reads states of hidden size 256, and the target has 512."),
            ("medusa", {"hidden_size": 512}, "It reads states of hidden size 256, and the target has 512."),
            ("mlp_speculator", {"vocab_size": 9000}, "It has a vocabulary of 4096 tokens, and the target has 9000"),
            ("draft", {"vocab_size": 9000}, "different tokenizers"),
            ("eagle3", {"num_hidden_layers": 4}, "It reads the states of 5 decoder layers, and the target has 4."),
            ("dflash", {"num_hidden_layers": 8}, "made for a target with 5 decoder layers, and the target has 8."),
            ("eagle", {"is_encoder_decoder": True}, "reads the states of decoder-only ones"),
            ("mtp", {"model_type": "mistral"}, "the model_type 'llama', and the target is of 'mistral'."),
            ("mtp", {"model_type": "gpt2"}, "The MTP layers of targets of the model_type 'gpt2' are not supported."),
        )
    ):
        target = demo_target(tmp_path / str(index), **changes)
        found = inspect_checkpoint(DEMO / drafter, target)
        assert found.fits is False
        assert any(problem in sentence for sentence in found.problems)
    assert run(DEMO / drafter, "--target", target).exit_code == 1
    # Padding of the vocabulary is no difference.
    padded = demo_target(tmp_path / "padded", vocab_size=4100)
    for drafter in ("eagle", "draft", "mlp_speculator", "mtp"):
        assert inspect_checkpoint(DEMO / drafter, padded).fits is True


def test_what_its_loader_refuses_does_not_fit(tmp_path):
    for index, (name, change, config, problem) in enumerate(
        (
            (EAGLE3, put("fc.weight", torch.ones(63, 192)), {}, r"It has fc.weight of the shape \[63, 192\]"),
            (EAGLE3, None, {"rope_theta": [1]}, "It has `rope_theta`=.1. in its config.json, which must be"),
            (DFLASH, None, {"dflash_config.mask_token_id": "x"}, "It has `mask_token_id`='x' in its conf"),
            (DFLASH, put("x.weight", torch.ones(2)), {}, "It has 1 tensors that no DFlash draft"),
            ("medusa/vllm_converted", put("lm_heads.1.weight", torch.ones(3)), {}, "It has lm_heads.1.weight of the"),
            ("mlp_speculator/untied_plain", without("ln.2.bias"), {}, "It lacks 1 tensors of the MLP spec"),
            ("demo/mtp", put("mtp.fc.weight", torch.ones(3, 3)), {}, r"It has mtp.fc.weight of the shape \[3, 3\]"),
        )
    ):
        folder = copy_of(name, tmp_path / str(index), config, change)
        found = inspect_checkpoint(folder, target_of(HEADS[name]))
        assert found.fits is False
        assert re.match(problem, found.problems[0])
        with pytest.raises(CheckpointFormatError):
            load(method_of(name), folder, loaded_target(HEADS[name]))


def test_language_model_of_a_multimodal_target(tmp_path):
    inner = json.loads((DEMO / "target" / "config.json").read_text())
    for size, fits in ((256, True), (512, False)):
        target = demo_target(tmp_path / str(size), text_config={**inner, "hidden_size": size})
        assert inspect_checkpoint(DEMO / "eagle3", target).fits is fits


def test_hints_about_the_target_itself():
    found = inspect_checkpoint(DEMO / "target", DEMO / ".." / "demo" / "target")
    assert "is the target itself and has no multi-token-prediction layers" in found.hint
    assert inspect_checkpoint(DEMO / "draft", DEMO / "target").hint is None
    target = WITH_LAYERS["mtp/deepseek_v3"]
    for found in (inspect_checkpoint(target), inspect_checkpoint(target, target)):
        assert "use spec_method='mtp'" in found.to_dict()["hint"]
    assert "use spec_method='mtp'" in run(target, env={"COLUMNS": "200"}).stdout


def test_texts_of_strangers_stay_on_one_line(tmp_path):
    shutil.copytree(DEMO / "eagle3", tmp_path / "head")
    (tmp_path / "head" / "README.md").write_text('---\nbase_model: "a\\x1b[2J\\n\\u202eb"\n---\n')
    assert inspect_checkpoint(tmp_path / "head", "demo").found.target.name.isprintable()
    assert "\x1b[2J" not in run(tmp_path / "head", "--target", "demo").stdout


def test_what_is_not_supported_fits_nothing(tmp_path):
    save_file({"fc.bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architectures": ["EagleCohereForCausalLM"]}')
    found = inspect_checkpoint(tmp_path)
    assert (found.found.format, found.fits) == ("eagle-cohere", None)
    assert "Cohere layer" in found.problems[0]
    assert inspect_checkpoint(tmp_path, "demo").fits is False
    assert run(tmp_path).exit_code == 1


class TestCommand:
    def test_json(self, hub):
        hub.add("user/head", DEMO / "eagle3", card=drafters.card_of("user/target"))
        hub.add("user/target", DEMO / "target")
        result = run("user/head", "--target", "user/target", "--json")
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        assert set(found) == {
            *("name", "method", "format", "producer", "target", "num_draft_tokens", "tensors", "bytes", "mtp_layers"),
            *("fits", "problems"),
        }
        assert (found["method"], found["format"], found["tensors"]) == ("eagle3", "eagle3-safeailab", 12)
        assert (found["target"]["name"], found["target"]["hidden_size"]) == ("user/target", 256)
        assert (found["fits"], found["problems"]) == (True, [])
        assert 0 < found["bytes"] < (DEMO / "eagle3" / "model.safetensors").stat().st_size
        assert hub.sent("/storage/*") < 110_000

    def test_table_for_people(self):
        result = run(DEMO / "dflash", "--target", "demo", env={"COLUMNS": "200"})
        assert result.exit_code == 0
        for words in ("dflash-zlab (z-lab", "hidden size 256, vocabulary 4096, layers 5", "7 tokens", "1.4 MB", "yes"):
            assert words in result.stdout
        result = run(DEMO / "dflash", "--target", DEMO / "draft", env={"COLUMNS": "200"})
        assert result.exit_code == 1
        assert "hidden size 256, and the target has 128" in result.stdout

    @full
    def test_revision_subfolder_cache_token_and_offline(self, hub, tmp_path):
        files = {f"inner/{path.name}": path.read_bytes() for path in (DEMO / "medusa").iterdir()}
        hub.add("user/head", files=files, revision="v2", private=True)
        hub.add("user/target", DEMO / "target", gated=True)
        place = {"revision": "v2", "subfolder": "inner", "cache_dir": tmp_path}
        assert inspect_checkpoint("user/head", "user/target", **place, token=TOKEN).fits is True
        assert (tmp_path / "models--user--target").is_dir()
        with pytest.raises(CheckpointAccessError):
            inspect_checkpoint("user/head", "user/target", **place)
        hub.requests.clear()
        result = run("user/head", "--offline")
        assert result.exit_code == 2
        assert "not in the cache" in result.stderr
        assert not hub.requests

    def test_errors(self, hub, tmp_path):
        (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
        absent = "neither a local folder nor a repository of this name"
        for message, *arguments in (
            (absent, "user/none"),
            (absent, DEMO / "eagle", "--target", "user/none"),
            ("BertModel", tmp_path),
        ):
            result = run(*arguments)
            assert result.exit_code == 2
            assert message in result.stderr
            assert "Traceback" not in result.stderr
