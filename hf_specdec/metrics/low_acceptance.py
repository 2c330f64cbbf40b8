"""A warning where drafts are hardly ever accepted, so that calls are slower than without."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

from ..threads import Lock, Recent
from .listeners import logger
from .stats import SpecDecodingStats


# Of so many drafts in a row fewer tokens than this were accepted each, so that drafting can hardly pay.
NUM_DRAFTS = 256
LEAST_ACCEPTED = 0.1

# Of a target.
_MOST_SETTINGS = 64


class _Watch:
    """The last drafts with one choice of settings."""

    def __init__(self):
        self.sums, self.has_warned = SpecDecodingStats(), False

    def observe(self, stats: SpecDecodingStats) -> SpecDecodingStats | None:
        """The sums of enough drafts that were hardly accepted, once."""
        self.sums.add(stats)
        if self.has_warned or self.sums.num_drafts < NUM_DRAFTS:
            return None
        seen, self.sums = self.sums, SpecDecodingStats()
        self.has_warned = seen.num_accepted_tokens < LEAST_ACCEPTED * seen.num_drafts
        return seen if self.has_warned else None


_watches: WeakKeyDictionary[Any, Recent[_Watch]] = WeakKeyDictionary()
_lock = Lock()


def watch_acceptance(target: Any, settings: Hashable, stats: SpecDecodingStats) -> None:
    """Warns once for each target and choice of settings where the drafts of several calls are hardly ever accepted.

    Args:
        target (`PreTrainedModel`): The target; it is not kept alive.
        settings (`Hashable`): What the calls have in common.
        stats (`SpecDecodingStats`): Of a call that has ended.
    """
    if stats.num_drafts == 0 or stats.rejection_sample_method == "synthetic":
        return
    with _lock:
        watches = _watches.setdefault(target, Recent(_MOST_SETTINGS))
        watch = watches.get(settings) or _Watch()
        watches.put(settings, watch)
        low = watch.observe(stats)
    if low is not None:
        logger.warning(
            "Speculation with method='%s' hardly pays: of the last %d drafts %.2f tokens each were accepted (%.1f %% "
            "of the draft tokens). Set num_speculative_tokens='auto', which drafts only where that pays, or take "
            "another drafter: `hf-specdec doctor` examines this one, `hf-specdec advise` compares others.",
            stats.method,
            low.num_drafts,
            low.num_accepted_tokens / low.num_drafts,
            100 * low.draft_acceptance_rate,
        )
