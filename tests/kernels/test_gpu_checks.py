"""The GPU benchmark's checks of the kernels: right ones pass, and wrong ones are seen."""

from __future__ import annotations

import gpu_checks

from hf_specdec.kernels import acceptance, best, cache
from tests.helpers.levels import full


@full
def test_wrong_kernels_are_seen(device, monkeypatch):
    def failed(*operations):
        checks = gpu_checks.kernel_checks(device)
        found = [check for operation in operations or checks for check in checks[operation]()]
        return sorted({check.what.split(",")[0] for check in found if not check.is_right})

    assert failed() == []
    follow = acceptance._follow_torch
    monkeypatch.setattr(cache, "_move_triton", lambda *arguments: None)
    monkeypatch.setattr(acceptance, "_follow_triton", lambda draft, tokens: follow(draft, tokens.flip(1)))
    monkeypatch.setattr(best, "_best_triton", lambda scores: scores.argmin(-1))
    assert failed("slots", "acceptance", "best tokens") == ["best_tokens", "follow", "write_slots"]
