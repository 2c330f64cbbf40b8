"""The demo's target and its tokenizer, for tests that change neither."""

from __future__ import annotations

import pytest

from hf_specdec import demo


@pytest.fixture(scope="session")
def target():
    return demo.load_target()


@pytest.fixture(scope="session")
def demo_tokenizer():
    return demo.load_tokenizer()
