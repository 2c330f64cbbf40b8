"""Story of a call, as plain values: who wrote each token, what was drafted, where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...version import __version__
from .pieces import Pieces


if TYPE_CHECKING:
    from ..records import CallRecord, CycleTrace, TokenScore


# Why a token is the target's own and not a draft's.
CORRECTED, BONUS, PLAIN = "corrected", "bonus", "plain"
ACCEPTED = "accepted"


def story_of(call: CallRecord, pieces: Pieces) -> dict[str, Any]:
    """Collects all that a page needs to know of a call whose trace has begun."""
    stats, trace = call.stats, call.trace
    cycles = [trace.first, *trace.cycles]
    drafters = {row.drafter for cycle in cycles[1:] for row in cycle.rows if row.draft_tokens}
    # In the order in which a combination names them.
    drafters = sorted(drafters, key=lambda drafter: (stats.method.find(drafter), drafter))
    return {
        "version": __version__,
        # Of a folder its name: whose machine it lies on is nobody's business.
        "model": Path(call.model_name).name if Path(call.model_name).is_absolute() else call.model_name,
        "method": stats.method,
        "rule": stats.rejection_sample_method,
        "lossless": stats.is_lossless,
        "text": pieces.shows_text,
        "notes": stats.notes,
        "drafters": drafters,
        "forwards": stats.num_target_forwards,
        "seconds": {
            "total": _number(stats.total_seconds),
            "first": _number(stats.time_to_first_token),
            "prefill": _number(stats.prefill_seconds),
            "draft": _number(stats.draft_seconds),
            "verify": _number(stats.verify_seconds),
        },
        # The last cycle of a call that failed may lack its times.
        "cycles": [
            {
                "seconds": [_number(value) for value in (timing.draft_seconds, timing.verify_seconds, timing.seconds)],
                "why": cycle.why_empty,
            }
            for cycle, timing in zip(trace.cycles, call.timings)
        ],
        "rows": [_row_story(row, cycles, prompt, drafters, pieces) for row, prompt in enumerate(trace.prompts)],
    }


def _row_story(
    row: int, cycles: Sequence[CycleTrace], prompt: list[int], drafters: list[str], pieces: Pieces
) -> dict[str, Any]:
    steps = []
    for number, cycle in enumerate(cycles):
        steps += [(number, trace) for trace in cycle.rows if trace.row == row]
    generated = [token for _, trace in steps for token in trace.committed_tokens]
    texts = iter(pieces.of_row(generated, prompt))
    told, told_steps = list(prompt), []
    for number, trace in steps:
        # The accepted nodes, from the anchor on.
        path, nodes = [], list(zip(trace.draft_tokens, trace.parents))
        for token in trace.committed_tokens[: trace.num_accepted]:
            path.append(nodes.index((token, path[-1] if path else -1)))
        own = PLAIN if not trace.draft_tokens else CORRECTED if [-1, *path][-1] in trace.parents else BONUS
        who = [ACCEPTED] * trace.num_accepted + [own]
        scores = [*trace.committed_scores, *[None] * len(trace.committed_tokens)]
        unknown = [None] * len(trace.draft_tokens)
        node_scores = trace.draft_scores or unknown
        sampled_with = [_number(value) for value in trace.draft_probs] or unknown
        node_texts = pieces.of_draft(trace.draft_tokens, trace.parents, told)
        told_steps.append(
            {
                # 0 is the prefill.
                "cycle": number,
                "drafter": drafters.index(trace.drafter) if trace.draft_tokens else None,
                "accepted": trace.num_accepted,
                "path": path,
                "nodes": [
                    [text, token, parent, *_score(score), sampled]
                    for text, token, parent, score, sampled in zip(
                        node_texts, trace.draft_tokens, trace.parents, node_scores, sampled_with
                    )
                ],
                "tokens": [
                    [next(texts), token, of, *_score(score)]
                    for token, of, score in zip(trace.committed_tokens, who, scores)
                ],
            }
        )
        told += trace.committed_tokens
    return {"prompt": pieces.text(prompt), "steps": told_steps}


def _score(score: TokenScore | None) -> tuple[float | None, int | None, float | None]:
    return (None, None, None) if score is None else (_number(score.prob), score.rank, _number(score.margin))


def _number(value: float) -> float | None:
    """A number as JSON has it: short, and `None` in the place of what it cannot say."""
    return float(f"{value:.4g}") if isfinite(value) else None
