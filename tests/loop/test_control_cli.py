"""Adaptive length on the command line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hf_specdec.cli import app


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPECDEC_PROFILES", str(tmp_path))


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_generate_takes_auto_for_the_length():
    result = run("generate", "def f(a):", "-k", "auto", "--method", "ngram", "--max-new-tokens", "12", "--json")
    assert result.exit_code == 0, result.output
    assert any(note.startswith("adaptive length: ") for note in json.loads(result.stdout)["stats"]["notes"])


def test_generate_still_takes_numbers_and_names_what_is_wrong():
    options = ("--method", "ngram", "--max-new-tokens", "4")
    assert run("generate", "a", "-k", "3", *options).exit_code == 0
    for wrong in ("atuo", "0", "-2", "2.5"):
        result = run("generate", "a", "-k", wrong, *options)
        assert result.exit_code == 2
        assert "num_speculative_tokens" in result.output


def test_demo_has_a_row_with_fixed_length_beside_each_method():
    result = run("demo", "--fixed", "--methods", "ngram", "--max-new-tokens", "8", "--rounds", "1", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {row["method"] for row in rows} >= {"ngram", "ngram fixed"}
    assert all(row["identical"] for row in rows)
