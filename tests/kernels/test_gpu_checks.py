"""The GPU benchmark's checks of the kernels: right ones pass, and wrong ones are seen."""

from __future__ import annotations

import gpu_checks
import pytest

from hf_specdec.kernels import acceptance, best, cache, tree_attention, warpers
from hf_specdec.layers import rope


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_wrong_kernels_are_seen(device, monkeypatch):
    def failed(*operations):
        checks = gpu_checks.kernel_checks(device)
        found = [check for operation in operations or checks for check in checks[operation]()]
        return sorted({check.what.split(",")[0] for check in found if not check.is_right})

    assert failed() == []
    follow, attend = acceptance._follow_torch, tree_attention._tree_attention_triton
    turns = rope.rotary_angles
    monkeypatch.setattr(cache, "_move_triton", lambda *arguments: None)
    monkeypatch.setattr(acceptance, "_follow_triton", lambda draft, tokens: follow(draft, tokens.flip(1)))
    monkeypatch.setattr(tree_attention, "_tree_attention_triton", lambda *arguments: attend(*arguments) * 1.1)
    monkeypatch.setattr(best, "_best_triton", lambda scores: scores.argmin(-1))
    warp = warpers._warped_triton
    monkeypatch.setattr(warpers, "_warped_triton", lambda logits, warping: warp(logits, warping._replace(top_p=0.5)))
    monkeypatch.setattr(rope, "rotary_angles", lambda positions, *arguments: turns(positions + 1, *arguments))
    monkeypatch.setattr(gpu_checks, "products", lambda x, linears: [x.stream @ weight.T for weight, _ in linears])
    wrong = failed("tree_attention, float32", "slots", "acceptance", "best tokens", "warpers", "angles", "layers")
    others = ["best_tokens", "follow", "products", "rotary_angles", "tree_attention", "warped", "write_slots"]
    assert wrong == others
