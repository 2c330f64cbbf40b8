"""Statistics of one call: drafted and accepted tokens, and times."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any


# Acceptance rules that keep the target's distribution.
LOSSLESS_RULES = ("standard", "block")


@dataclass
class SpecDecodingStats:
    """Counts and times of one `generate()` call.

    Attributes:
        method (`str`): Name of the method.
        rejection_sample_method (`str`): The acceptance rule that was applied: "standard" also where "block" or
            "typical" was asked for and the target is greedy, or "block" and the method draws nothing.
        batch_size (`int`): Rows of the call.
        num_drafts (`int`): Non-empty drafts verified, one per row and cycle.
        num_drafts_per_depth (`list[int]`): Of the drafts, how many were 1, 2, ... tokens deep: of chains, long.
        num_draft_tokens (`int`): Tokens in them.
        num_accepted_tokens (`int`): Tokens of them that were committed.
        num_accepted_tokens_per_pos (`list[int]`): Of these, how many at depth 1, 2, ... of a draft.
        num_reached_tokens (`int`): Draft tokens that were compared with the target's: the accepted ones and, where a
            draft was not accepted to its end, the first rejected one.
        num_committed_tokens (`int`): Tokens generated, those without a draft included.
        num_row_cycles (`int`): Verifications, counted per row: a forward over 4 active rows counts 4.
        num_cycles_without_drafts (`dict[str, int]`): Verifications of the anchors alone, counted per forward, by
            reason: "batch_size" (a setting allows none for this many rows), "does_not_pay" (the adaptive length
            chose none, or measured plain decoding), "length_limit" (one token is left to generate, or requests allow
            none), "max_model_len" (all rows are too long for the drafter), "nothing_found" (the method had no draft),
            "not_asked" (there is no drafter).
        num_spec_tokens (`int`): Speculation length k of the call: most draft tokens of a chain, most depth of a tree.
        num_lookups (`int`): For methods that retrieve: how often a row's text was looked up.
        num_lookup_hits (`int`): Of these, how often a draft was found.
        cache_tokens, cache_bytes (`int`): Tokens that the last lookup searched, and roughly their memory: for "ngram"
            the rows' own texts, for "suffix" the past responses.
        num_target_forwards (`int`): Forwards of the target model, the prefill included; not the one that checks a
            class of models.
        draft_seconds, verify_seconds, prefill_seconds, total_seconds (`float`): Wall-clock time. Verification is the
            target's forward, acceptance and stop rules. The total begins with the prefill.
        setup_seconds (`float`): Before that: from the call of `generate()` on, with transformers' preparation and, in
            a drafter's first call, its loading.
        attention (`str`): What computed the attention of the last verification: "tree kernel" (of Triton, on a GPU),
            "masked", or how many layers each and why.
        graphs (`str`): Whether verifications ran as CUDA graphs: "on", or "off" and why.
        num_graph_replays (`int`): Verifications that ran as graphs.
        num_graph_captures (`int`): Graphs that were captured for verifications in this call.
        draft_graphs (`str`): Whether draft networks ran as CUDA graphs; empty on other devices and for methods without
            a network.
        num_draft_graph_replays, num_draft_graph_captures (`int`): The same counts for draft networks.
        peak_memory_bytes (`int`): Peak memory of the target's GPU, as torch counts it since the process began or its
            peak statistics were reset. 0 on a CPU.
        drafter (`dict[str, str | None]`): Of a drafter that discovery found: `model`, `owner`, `revision` and the
            `place` where it was found. Empty otherwise.
        notes (`list[str]`): What was switched off or limited in this call, and why.
    """

    method: str = ""
    rejection_sample_method: str = "standard"
    batch_size: int = 0
    num_drafts: int = 0
    num_drafts_per_depth: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_reached_tokens: int = 0
    num_committed_tokens: int = 0
    num_row_cycles: int = 0
    num_cycles_without_drafts: dict[str, int] = field(default_factory=dict)
    num_spec_tokens: int = 0
    num_lookups: int = 0
    num_lookup_hits: int = 0
    cache_tokens: int = 0
    cache_bytes: int = 0
    num_target_forwards: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    setup_seconds: float = 0.0
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    attention: str = "masked"
    graphs: str = "off: not on a CUDA device"
    num_graph_replays: int = 0
    num_graph_captures: int = 0
    draft_graphs: str = ""
    num_draft_graph_replays: int = 0
    num_draft_graph_captures: int = 0
    peak_memory_bytes: int = 0
    drafter: dict[str, str | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def other_seconds(self) -> float:
        """Seconds outside of prefill, drafting and verification: bookkeeping and streaming."""
        return self.total_seconds - self.prefill_seconds - self.draft_seconds - self.verify_seconds

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the call of `generate()` until every row had its first token, which the streamer got."""
        return self.setup_seconds + self.prefill_seconds

    @property
    def is_lossless(self) -> bool:
        """The acceptance rule keeps the target's distribution."""
        return self.rejection_sample_method in LOSSLESS_RULES

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens among those that were reached. 0 without drafts.

        An estimate of `sum_x min(p, q)` where tokens are judged one after the other, by the rule "standard".
        """
        return _ratio(self.num_accepted_tokens, self.num_reached_tokens)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted draft tokens among all drafted ones. 0 without drafts."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def lookup_hit_rate(self) -> float:
        """Share of the lookups that have found a draft. 0 for methods that look nothing up."""
        return _ratio(self.num_lookup_hits, self.num_lookups)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per verification of a row: accepted ones and one more, cut where a row ends.

        The first token of each row comes from the prefill and is not counted. 1 without drafts.
        """
        if self.num_row_cycles == 0:
            return 1.0
        return (self.num_committed_tokens - self.batch_size) / self.num_row_cycles

    def count(self, num_nodes: int, max_depth: int, num_accepted: int, num_committed: int) -> None:
        """Adds one row's part of a cycle: nodes drafted and their depth, draft tokens accepted, tokens committed."""
        self.num_row_cycles += 1
        self.num_committed_tokens += num_committed
        if num_nodes == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_nodes
        self.num_accepted_tokens += num_accepted
        self.num_reached_tokens += min(num_accepted + 1, max_depth)
        per_position, per_depth = self.num_accepted_tokens_per_pos, self.num_drafts_per_depth
        if len(per_depth) < max_depth:
            longer = [0] * (max_depth - len(per_depth))
            per_position.extend(longer)
            per_depth.extend(longer)
        per_depth[max_depth - 1] += 1
        for depth in range(num_accepted):
            per_position[depth] += 1

    def count_without_drafts(self, reason: str, cycles: int = 1) -> None:
        """Adds cycles in which no row had a draft."""
        counts = self.num_cycles_without_drafts
        counts[reason] = counts.get(reason, 0) + cycles

    def add(self, other: SpecDecodingStats) -> None:
        """Adds another's counts and seconds. What is no sum (method, notes, memory, ...) stays."""
        # By the attributes' dicts, because listeners have it done in every cycle.
        mine, theirs = vars(self), vars(other)
        for name in _SUMS:
            mine[name] += theirs[name]
        for name in _LISTS:
            mine[name] = [sum(pair) for pair in zip_longest(mine[name], theirs[name], fillvalue=0)]
        for reason, count in other.num_cycles_without_drafts.items():
            self.count_without_drafts(reason, count)

    def since(self, earlier: SpecDecodingStats) -> SpecDecodingStats:
        """The counts and seconds that come to earlier ones; what is no sum is not filled."""
        new = SpecDecodingStats()
        now, before, found = vars(self), vars(earlier), vars(new)
        for name in _SUMS:
            found[name] = now[name] - before[name]
        for name in _LISTS:
            found[name] = [count - told for count, told in zip_longest(now[name], before[name], fillvalue=0)]
        for reason, count in self.num_cycles_without_drafts.items():
            if more := count - earlier.num_cycles_without_drafts.get(reason, 0):
                new.count_without_drafts(reason, more)
        return new

    def copy(self) -> SpecDecodingStats:
        """The same, whatever is counted later."""
        return replace(self, **{name: copy(value) for name, value in vars(self).items()})

    @classmethod
    def total(cls, calls: Iterable[SpecDecodingStats]) -> SpecDecodingStats:
        """Sums several calls of one method; the notes of all of them, each once."""
        total = cls()
        for call in calls:
            total.add(call)
            total.method, total.rejection_sample_method = call.method, call.rejection_sample_method
            total.notes += [note for note in call.notes if note not in total.notes]
        return total

    def to_dict(self) -> dict[str, Any]:
        """All counts and rates as plain values, for JSON."""
        derived = [name for name, member in vars(SpecDecodingStats).items() if isinstance(member, property)]
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def __str__(self) -> str:
        rule = "" if self.rejection_sample_method == "standard" else f", {self.rejection_sample_method} acceptance"
        notes = "".join(f"; {note}" for note in self.notes)
        return (
            f"SpecDecoding [{self.method}{rule}]: mean acceptance length {self.mean_acceptance_length:.2f}, "
            f"accepted {self.num_accepted_tokens} of {self.num_draft_tokens} draft tokens "
            f"({100 * self.draft_acceptance_rate:.1f} %), {self.num_committed_tokens} tokens in "
            f"{self.num_target_forwards} target forwards, {self.total_seconds:.2f} s "
            f"(draft {self.draft_seconds:.2f}, verify {self.verify_seconds:.2f}, other {self.other_seconds:.2f})"
            + notes
        )


_LISTS = ("num_drafts_per_depth", "num_accepted_tokens_per_pos")
# The other counts, and the seconds.
_NO_SUMS = ("num_spec_tokens", "cache_tokens", "cache_bytes", "peak_memory_bytes")
_SUMS = tuple(item.name for item in fields(SpecDecodingStats) if item.type in ("int", "float"))
_SUMS = tuple(name for name in _SUMS if name not in _NO_SUMS)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
