"""Defaults: if nothing says how much to draft, every row drafts as much as pays, and the text is the same."""

from __future__ import annotations

import torch

from hf_specdec import record
from hf_specdec.control.profile import ControlProfile
from tests.helpers.calls import NEW, inputs, plain
from tests.helpers.methods import demo_target, fresh_speculator, settings_of


SHAPES = ("num_speculative_tokens", "speculative_token_tree")


def test_lengths_are_chosen_by_what_pays(row, monkeypatch):
    monkeypatch.delenv("HF_SPECDEC_ADAPTIVE")
    settings = settings_of(row)
    speculator = fresh_speculator(settings)
    speculator.profile = ControlProfile()
    with record() as made:
        for batch_size in (1, 3):
            limits = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
            ours = demo_target().generate(**inputs(batch_size), **limits, assistant=speculator)
            assert torch.equal(ours, plain(batch_size))
    is_adaptive = not any(name in settings for name in SHAPES)
    assert speculator.config.is_adaptive == is_adaptive
    for call in made.calls:
        assert any(note.startswith("adaptive length: ") for note in call.stats.notes) == is_adaptive
    # The first call tries both; later ones have learnt.
    assert made.calls[0].stats.num_draft_tokens > 0
