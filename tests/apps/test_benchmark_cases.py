"""`benchmarks/run.py`: every case can be measured, and its options reach `hf-specdec bench`."""

from __future__ import annotations

import json

import pytest
import run

from hf_specdec import SpeculativeConfig, demo
from hf_specdec.bench.decoders import read_spec


@pytest.mark.parametrize("name", run.CASES)
def test_settings_are_known(name):
    arguments = run.command(run.CASES[name], None)
    specs = [text for option, text in zip(arguments, arguments[1:]) if option == "--spec"]
    assert len(specs) == len(run.CASES[name].specs)
    for text in specs:
        settings = read_spec(text, demo.settings())
        assert SpeculativeConfig.resolve(settings).method == json.loads(text)["method"]


def test_another_drafter_is_that_of_the_methods_with_one():
    specs = [json.loads(text) for text in run.command(run.CASES["combined"], "user/head") if text.startswith("{")]
    assert {spec["method"] for spec in specs if "model" not in spec} == {"suffix"}
    assert {spec["model"] for spec in specs if "model" in spec} == {"user/head"}


def test_figures_of_several_cases_are_files_of_their_own(tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def add(one, two):")
    short = ["--prompts", str(prompts), "--rounds", "1", "-n", "4", "--no-stock"]
    run.main(["medusa", "mtp", "--output", str(tmp_path / "out.json"), *short])
    for name in ("medusa", "mtp"):
        report = json.loads((tmp_path / f"out-{name}.json").read_text())
        # Beside the two baselines.
        assert len(report["rows"]) == 2 + len(run.CASES[name].specs)
    assert "way of decoding" in capsys.readouterr().out


def test_unknown_cases(capsys):
    with pytest.raises(SystemExit):
        run.main(["nothing"])
    assert "there is no case 'nothing'; there are medusa, " in capsys.readouterr().err


def test_other_options_are_passed_on(monkeypatch):
    given = []
    monkeypatch.setattr(run, "app", lambda arguments, **_: given.append(arguments))
    run.main(["rules", "--num-prompts", "1"])
    assert given == [[*run.command(run.CASES["rules"], None), "--num-prompts", "1"]]
    assert "--temperature" in given[0]
