"""A warning where drafts are hardly ever accepted, so that calls are slower than without."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..loaded import record_of
from .listeners import logger
from .stats import SpecDecodingStats


# Of so many drafts in a row fewer tokens than this were accepted each, so that drafting can hardly pay.
NUM_DRAFTS = 256
LEAST_ACCEPTED = 0.1

# In the place of sums where the warning has been given.
_WARNED = SpecDecodingStats()


def watch_acceptance(target: Any, settings: Hashable, stats: SpecDecodingStats) -> None:
    """Warns once for each target and choice of settings where drafts of several calls are hardly ever accepted."""
    if stats.num_drafts == 0 or stats.rejection_sample_method == "synthetic":
        return
    record = record_of(target)
    with record.lock:
        sums = record.accepted.get(settings) or SpecDecodingStats()
        if sums is _WARNED:
            return
        sums.add(stats)
        is_enough = sums.num_drafts >= NUM_DRAFTS
        is_low = is_enough and sums.num_accepted_tokens < LEAST_ACCEPTED * sums.num_drafts
        record.accepted.put(settings, _WARNED if is_low else SpecDecodingStats() if is_enough else sums)
    if is_low:
        logger.warning(
            "Speculation with method='%s' hardly pays: of the last %d drafts %.2f tokens each were accepted (%.1f %% "
            "of the draft tokens). Set num_speculative_tokens='auto', which drafts only where that pays, or take "
            "another drafter: `hf-specdec doctor` examines this one, `hf-specdec bench --recommend` compares others.",
            stats.method,
            sums.num_drafts,
            sums.num_accepted_tokens / sums.num_drafts,
            100 * sums.draft_acceptance_rate,
        )
