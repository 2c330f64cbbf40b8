"""`hf-specdec card` and `hf-specdec export-custom-generate`."""

import json

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hf_specdec import SpeculativeConfig, cli, demo, load_speculator
from hf_specdec.hub.card import read_card, read_target_card


def invoke(*arguments, exit_code=0):
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="hf-specdec")
    assert result.exit_code == exit_code, result.output
    return result.stdout if exit_code == 0 else " ".join(result.stderr.split())


@pytest.fixture
def head(tmp_path):
    folder = tmp_path / "head"
    return load_speculator(
        demo.load_target(), {"model": demo.drafter_path("eagle3"), "num_speculative_tokens": 4}
    ).save_pretrained(folder)


def test_a_card_is_printed_or_written(head, tmp_path):
    (head / "README.md").unlink()
    options = ("--target", "user/target", "--name", "user/head", "--license", "mit", "--tag", "a", "--tag", "b")
    printed = ModelCard(invoke("card", head, *options))
    assert not (head / "README.md").exists()
    assert {"a", "b", "eagle3"} <= set(printed.data.tags)
    assert (printed.data.license, printed.data.base_model) == ("mit", ["user/target"])
    assert 'speculative="user/head"' in printed.text
    assert invoke("card", head, *options, "--write").strip() == str(head / "README.md")
    assert (head / "README.md").read_text().strip() == str(printed).strip()
    assert read_card(head) == SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=4)
    # What the card says need not be said again.
    again = ModelCard(invoke("card", head))
    assert again.data.to_dict() == printed.data.to_dict()


def test_the_base_of_a_whole_model_is_not_its_target(tmp_path):
    folder = load_speculator(demo.load_target(), model=demo.drafter_path("draft_model")).save_pretrained(tmp_path)
    (folder / "README.md").write_text("---\nbase_model: user/parent\n---\n# A model\n")
    printed = ModelCard(invoke("card", folder))
    assert "target" not in printed.data.speculative
    assert printed.data.base_model == ["user/parent"]
    printed = ModelCard(invoke("card", folder, "--target", "user/target"))
    assert printed.data.base_model == ["user/parent", "user/target"]
    assert printed.data.speculative["target"] == "user/target"


def test_a_card_of_a_checkpoint_that_nobody_saved(tmp_path):
    printed = ModelCard(invoke("card", demo.drafter_path("dflash"), "--name", "user/draft"))
    assert printed.data.speculative == {"method": "dflash"}
    # The length comes from the checkpoint.
    assert "--speculative-num-draft-tokens" in printed.text


def test_measured_figures(head, tmp_path):
    (head / "README.md").unlink()
    rows = [{"method": "plain", "tokens_per_second": 10.0}, {"method": "eagle3", "tokens_per_second": 25.0}]
    (tmp_path / "bench.json").write_text(json.dumps({"rows": rows}))
    assert "| eagle3 | 25.0 |" in invoke("card", head, "--bench", tmp_path / "bench.json")
    (tmp_path / "bench.json").write_text("{")
    assert "cannot be read as JSON" in invoke("card", head, "--bench", tmp_path / "bench.json", exit_code=2)
    assert "cannot be read as JSON" in invoke("card", head, "--bench", tmp_path / "none.json", exit_code=2)


def test_the_card_of_a_target(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    invoke("card", tmp_path, "--drafter", '{"method": "eagle3", "model": "user/head"}', "--write")
    assert read_target_card(tmp_path) == SpeculativeConfig(method="eagle3", model="user/head")
    assert "# A model" in (tmp_path / "README.md").read_text()
    invoke("card", tmp_path, "--drafter", "none", "--write")
    assert read_target_card(tmp_path) is None
    (tmp_path / "README.md").unlink()
    assert "method: ngram" in invoke("card", tmp_path, "--drafter", "ngram")
    assert "--license: for the card of a drafter" in invoke(
        "card", tmp_path, "--drafter", "ngram", "--license", "mit", exit_code=2
    )


def test_what_is_no_drafter(tmp_path):
    assert "is no folder" in invoke("card", tmp_path / "none", exit_code=2)
    assert "config.json" in invoke("card", tmp_path, exit_code=2)


def test_an_export(tmp_path, head):
    files = invoke("export-custom-generate", tmp_path / "repo", "--method", "ngram", "-k", 4).split()
    assert len(files) == 2
    generate = (tmp_path / "repo" / "custom_generate" / "generate.py").read_text()
    assert "SETTINGS = {'method': 'ngram', 'num_speculative_tokens': 4}" in generate
    invoke("export-custom-generate", head, "--name", "user/head")
    generate = (head / "custom_generate" / "generate.py").read_text()
    assert "SETTINGS = {'method': 'eagle3', 'model': 'user/head', 'num_speculative_tokens': 4}" in generate
    invoke(
        "export-custom-generate", tmp_path / "repo", "--config", '{"method": "ngram", "prompt_lookup_max": 5}', "-k", 3
    )
    generate = (tmp_path / "repo" / "custom_generate" / "generate.py").read_text()
    assert "'prompt_lookup_max': 5" in generate
    assert "'num_speculative_tokens': 3" in generate
    invoke("export-custom-generate", tmp_path / "found", "--spec-model", "user/head")
    assert "{'model': 'user/head'}" in (tmp_path / "found" / "custom_generate" / "generate.py").read_text()
    assert "Name the repo id" in invoke("export-custom-generate", head, exit_code=2)
    assert "Unknown spec_method" in invoke("export-custom-generate", head, "--method", "ngrm", exit_code=2)
