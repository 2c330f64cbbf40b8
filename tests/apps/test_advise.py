"""All that can be measured is measured, the rest is named with the reason, and the advice can be used as it is."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_specdec import SpeculativeConfig, cli, demo, forget_speculators
from hf_specdec.bench.prompts import Prompt, make_batches
from hf_specdec.diagnosis import advice, advise
from hf_specdec.method import names_without_weights
from tests.helpers.levels import full


@pytest.fixture(scope="module")
def batches():
    chosen = demo.prompts()[1:6:4]
    return make_batches(demo.load_tokenizer(), [Prompt(one.name, one.text, one.kind, 24) for one in chosen])


@pytest.fixture(autouse=True)
def nothing_loaded(target):
    yield
    forget_speculators(target)


def ask(target, batches, **options):
    return advise(target, batches, **{"rounds": 1, "local_files_only": True, "try_lengths": False, **options})


@full
def test_free_methods_and_named_drafters_are_measured(target, batches, tmp_path, monkeypatch):
    monkeypatch.setattr(advice, "_is_worthwhile", lambda option: option.name != "none")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    broken = {"method": "eagle3", "model": str(tmp_path)}
    found = ask(target, batches, specs={"head": demo.drafter_path("eagle"), "broken": broken})
    missing = {item.name for item in found.rejected if "arctic" in item.reason}
    assert {option.name for option in found.options} | missing == {"none", "head", *names_without_weights()}
    assert [item.name for item in found.rejected if item.origin == "named by the user"] == ["broken"]
    speeds = [option.speedup for option in found.options]
    assert speeds == sorted(speeds, reverse=True)
    for option in found.options:
        assert option.mean_acceptance_length >= 1
        assert 0 <= option.acceptance_rate <= 1
        assert (0 < option.drafted_share <= 1) == (option.name != "none")
        assert min(option.step_seconds, option.verify_seconds) > 0
        assert option.verdict
    head = next(option for option in found.options if option.name == "head")
    assert 1 <= head.draft_length <= 4
    assert head.draft_bytes > 0
    assert head.settings["method"] == "eagle"
    assert any("it is offline" in note for note in found.notes)
    # The fastest is recommended as it can be used.
    assert found.best is next(option for option in found.options if option.name != "none")
    assert found.best.verdict.startswith("The fastest")
    settings = json.loads(found.snippets["json"])
    assert SpeculativeConfig.resolve(settings).method == found.best.settings["method"]
    python = found.snippets["python"].replace("model.generate", "dict").replace("**inputs, ", "")
    assert eval(python) == {"speculative": settings}
    assert json.loads(json.dumps(found.to_dict()))["best"]["name"] == found.best.name


@full
def test_nothing_is_recommended_that_is_not_faster(target, batches, monkeypatch):
    monkeypatch.setattr(advice, "_WORTHWHILE", 1e9)
    found = ask(target, batches, discover=False)
    assert found.best is None
    assert found.snippets["python"] == "model.generate(**inputs)"
    assert all(option.verdict.startswith("Not worth it") for option in found.options if option.name != "none")


@full
def test_other_lengths_are_measured_beside_the_fastest(target, batches, monkeypatch):
    found = ask(target, batches, specs={"draft": demo.settings()["draft_model"]}, discover=False, try_lengths=True)
    tried = [option for option in found.options if ", k=" in option.name]
    assert any(option.settings["num_speculative_tokens"] == "auto" for option in tried)
    assert len({option.name for option in found.options}) == len(found.options)
    monkeypatch.setattr(advice, "_best_length", lambda option: 3)
    found = ask(target, batches, discover=False, try_lengths=True)
    (tried,) = (option for option in found.options if ", k=3" in option.name)
    assert tried.settings == {"method": tried.name.partition(",")[0], "num_speculative_tokens": 3}
    assert sum(option.name == "none" for option in found.options) == 1


@full
def test_a_drafter_that_the_target_names_is_found(batches, tmp_path, monkeypatch):
    folder = shutil.copytree(demo.target_path(), tmp_path / "target")
    shutil.copytree(demo.drafter_path("mtp"), folder / "head")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    target.generation_config.speculative = {"model": "head"}
    found = ask(target, batches)
    (option,) = (option for option in found.options if option.settings["method"] == "mtp")
    assert option.origin == "named by the target"
    # What does not fit into memory is not loaded.
    monkeypatch.setattr(advice, "free_bytes", lambda device: 1000)
    found = ask(target, batches)
    assert any("do not fit" in item.reason for item in found.rejected)
    assert all(option.settings["method"] != "mtp" for option in found.options)


def option(method="x", **changes):
    figures = {"speedup": 1.5, "speedup_range": (1.4, 1.6), "over_none": 1.3, "over_none_range": (1.2, 1.4)}
    figures |= {"tokens_per_second": 100.0, "mean_acceptance_length": 3.0, "acceptance_rate": 0.8, "draft_bytes": 0}
    figures |= {"drafted_share": 1.0, "draft_length": 4.0, "break_even": 0.4}
    figures |= {"draft_seconds": 0.4, "verify_seconds": 1.2, "step_seconds": 1.0}
    return advice.Option("x", {"method": method}, "", **{**figures, **changes})


def test_drafts_must_beat_the_loop_without_them():
    none, slower = option("none", over_none=1.0), option(speedup=1.6, over_none=1.07, over_none_range=(0.99, 1.2))
    assert advice._is_worthwhile(none)
    assert not advice._is_worthwhile(slower)  # in one round
    assert not advice._is_worthwhile(option(speedup=1.51, over_none=1.005, over_none_range=(1.0, 1.01)))
    assert advice._is_worthwhile(option(speedup=1.53, over_none=1.02, over_none_range=(1.01, 1.03)))
    assert not advice._is_worthwhile(option(speedup=0.9, speedup_range=(0.8, 0.95)))
    assert advice._verdict(none, none).startswith("The loop without drafts: 1.50 times")
    assert advice._verdict(slower, none).startswith("Not surely faster")


def test_verdicts_and_best_lengths():
    best = option()
    losers = {
        "Not worth it": option(speedup=0.9, speedup_range=(0.8, 1.0)),
        "As fast as the fastest": option(speedup=1.45, speedup_range=(1.3, 1.5)),
        "Fewer tokens a cycle": option(speedup=1.2, speedup_range=(1.1, 1.3), mean_acceptance_length=2.0),
        "A more expensive cycle": option(speedup=1.2, speedup_range=(1.1, 1.3), verify_seconds=2.0),
    }
    for beginning, loser in losers.items():
        assert advice._verdict(loser, best).startswith(beginning)
    assert "acceptance rate of 0.40, and it has 0.80" in advice._verdict(losers["Not worth it"], best)
    assert advice._verdict(option(), None).startswith("Not surely faster")
    # Twice what was drafted is the most that is looked at.
    assert advice._best_length(option(acceptance_rate=0.95, draft_seconds=0.04, verify_seconds=1.0)) == 8
    assert advice._best_length(option(acceptance_rate=0.5, draft_seconds=1.2, verify_seconds=1.4)) <= 1


def test_command():
    arguments = [
        "advise",
        "-s",
        "medusa",
        "-p",
        "import os\n",
        "-n",
        "8",
        "--rounds",
        "1",
        "--no-lengths",
        "--offline",
    ]
    result = CliRunner().invoke(cli.app, [*arguments, "--json"], prog_name="hf-specdec")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert "medusa" in {option["name"] for option in report["options"]}
    assert report["environment"]["dtype"] == "float32"
