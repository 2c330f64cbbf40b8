"""The heads of the demo's real model, which lie in the repository and not in the wheel."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec import load_speculator, record
from hf_specdec.hub.inspect import inspect_checkpoint
from tests.helpers.paths import ROOT


HEADS = ROOT / "heads" / "smollm2"
FOLDERS = sorted(folder for folder in HEADS.iterdir() if folder.is_dir())

# Bytes of all of them together.
MOST_BYTES = 30_000_000


@pytest.fixture(scope="module")
def target():
    """A model with the sizes of SmolLM2-135M and random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_head_drafts(folder, target, tmp_path):
    """Drafts for a target of random weights are rejected, and the text is that of plain generation."""
    target.config.save_pretrained(tmp_path)
    found = inspect_checkpoint(folder, tmp_path)
    assert (found.fits, found.found.method) == (True, folder.name), found.problems
    inputs = {"input_ids": torch.arange(3, 19)[None], "max_new_tokens": 6, "do_sample": False}
    plain = target.generate(**inputs)
    head = load_speculator(target, folder.name, model=str(folder), num_speculative_tokens=2)
    with record() as r:
        assert torch.equal(target.generate(**inputs, assistant=head), plain)
    assert r.calls[0].stats.num_draft_tokens > 0


def test_size():
    assert FOLDERS
    assert sum(file.stat().st_size for file in HEADS.rglob("*") if file.is_file()) <= MOST_BYTES


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_cards(folder):
    """Cards say how the head was trained."""
    assert f"hf-specdec train {folder.name}" in (folder / "README.md").read_text(encoding="utf-8")
