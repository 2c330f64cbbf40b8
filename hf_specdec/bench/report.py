"""Reports a measurement as plain JSON types: the figures of every way of decoding at every batch size.

`rows` have a figure under its name, and those of several values under `spread` of the same name low, high and n.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import counted
from ..machine import describe_environment
from ..method import NO_DRAFTS
from .decoders import PLAIN, Decoder
from .engine import Call, Measurement, Round, first_difference
from .prompts import Batch


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def make_report(
    model: PreTrainedModel,
    decoders: Sequence[Decoder],
    found: Measurement,
    missing: Mapping[str, str],
    asked: Mapping[str, Any],
    *,
    sampling: Mapping[str, Any],
    seed: int = 0,
) -> dict[str, Any]:
    """Describes a measurement as plain JSON types, with what was `asked` and is `missing`, and the machine."""
    refused = [(None, missing), *found.refused.items()]
    greedy, sizes = not sampling["do_sample"], [*found.batches]
    # Every batch size has all of them.
    prompts = {name: batch.kind for batch in found.batches[sizes[0]] for name in batch.names}
    details = ", ".join(f"{key} {value}" for key, value in sampling.items() if key != "do_sample")
    return {
        "rows": make_rows(model, decoders, found, greedy=greedy),
        # Ways that could not run, at which batch size (`None`: at all), and the reasons.
        "unavailable": [
            {"method": name, "batch_size": size, "reason": reason}
            for size, reasons in refused
            for name, reason in reasons.items()
        ],
        "settings": {
            **asked,
            "prompts": prompts,
            "batch_size": sizes[0] if len(sizes) == 1 else sizes,
            "batch_sizes": sizes,
            # Rows that repeat a prompt, to fill the batches of its kind.
            "repeated_prompts": {
                str(size): sum(len(batch.names) for batch in group) - len(prompts)
                for size, group in found.batches.items()
            },
            "decoding": "greedy" if greedy else f"sampled ({details})" if details else "sampled",
            "sampling": sampling,
            "seed": seed,
            "rounds": len(found.rounds),
            "interrupted": found.interrupted,
        },
        "environment": describe_environment(model.device, model.dtype),
    }


def described_machine(environment: Mapping[str, Any]) -> str:
    """Device and versions that figures hold for, in words."""
    machine = environment["gpu"] or f"{environment['cpu']}, {counted(environment['threads'], 'thread')}"
    return f"{machine}; torch {environment['torch']}, transformers {environment['transformers']}"


def make_rows(
    model: PreTrainedModel, decoders: Sequence[Decoder], found: Measurement, *, greedy: bool
) -> list[dict[str, Any]]:
    """A row for each batch size and each way of decoding that could run, plain generation first."""
    rows = []
    for size, batches in found.batches.items():
        rounds = [one[size] for one in found.rounds]
        # Greedy rounds repeat one text, which is no further evidence of acceptance.
        with_texts = rounds[-1:] if greedy else rounds
        kinds: dict[str, list[int]] = {}
        for index, batch in enumerate(batches):
            kinds.setdefault(batch.kind, []).append(index)
        for decoder in decoders:
            name = decoder.name
            if name in rounds[0]:
                row = {"method": name, "batch_size": size, "settings": decoder.settings}
                row |= _figures(rounds, with_texts, name, range(len(batches)))
                row |= _details(rounds, with_texts, name)
                row |= _same_texts(rounds, name, batches) if greedy else {"identical": None}
                row["draft_bytes"] = decoder.draft_bytes(model)
                row["kinds"] = {kind: _figures(rounds, with_texts, name, places) for kind, places in kinds.items()}
                rows.append(row)
    return rows


def _figures(
    rounds: Sequence[Round], with_texts: Sequence[Round], name: str, indices: Sequence[int]
) -> dict[str, Any]:
    """Speed and acceptance over some batches."""
    speeds = [_tokens_per_second(one[name], indices) for one in rounds]
    # Of the same rounds: plain generation, and the loop without drafts, where that can run.
    bases = {"speedup": PLAIN, "speedup_over_none": NO_DRAFTS}
    paces = {
        key: [_tokens_per_second(one[base], indices) for one in rounds]
        for key, base in bases.items()
        if base in rounds[0]
    }
    calls = [one[name][index] for one in rounds for index in indices]
    texts = [one[name][index] for one in with_texts for index in indices]
    stats = [call.stats for call in texts if call.stats is not None]
    cycles = [len(call.cycle_seconds) if call.stats is None else call.stats.num_row_cycles for call in texts]
    accepted = [one.num_accepted_tokens for one in stats]
    # On a GPU it is what the drafter has waited for.
    drafting = [(call.stats.draft_seconds, call.seconds) for call in calls if call.stats is not None]
    figures = {
        "tokens_per_second": speeds,
        **{key: [a / b for a, b in zip(speeds, pace)] for key, pace in paces.items()},
        "first_token_seconds": [call.first_token_seconds for call in calls],
    }
    return {
        **{key: float(np.median(values)) for key, values in figures.items()},
        # Over all cycles of rows, the first token of each row apart.
        "mean_acceptance_length": pooled([call.mean_acceptance_length * n for call, n in zip(texts, cycles)], cycles)
        or 1.0,
        # Among those that were compared, and among all; `None` where nothing is known of drafts.
        "acceptance_rate": pooled(accepted, [one.num_reached_tokens for one in stats]),
        "draft_acceptance_rate": pooled(accepted, [one.num_draft_tokens for one in stats]),
        "draft_share": pooled(*zip(*drafting)) if drafting else None,
        "num_tokens": sum(rounds[-1][name][index].num_tokens for index in indices),
        "spread": {
            key: {"low": float(min(values)), "high": float(max(values)), "n": len(values)}
            for key, values in figures.items()
        },
    }


def _tokens_per_second(calls: Sequence[Call], indices: Sequence[int]) -> float:
    return sum(calls[index].num_tokens for index in indices) / sum(calls[index].seconds for index in indices)


def _details(rounds: Sequence[Round], with_texts: Sequence[Round], name: str) -> dict[str, Any]:
    """Times of cycles, acceptance by position, and memory, over all batches."""
    calls = [call for one in rounds for call in one[name]]
    cycles = np.concatenate([call.cycle_seconds for call in calls])
    percentiles = {f"p{share}": float(np.percentile(cycles, share)) for share in (50, 95, 99) if len(cycles)}
    stats = [call.stats for call in calls if call.stats is not None]
    memory = [call.memory_bytes for call in calls if call.memory_bytes is not None]
    drafted = [call.stats for one in with_texts for call in one[name] if call.stats is not None]
    accepted = [one.num_accepted_tokens_per_pos for one in drafted]
    num_drafts = sum(one.num_drafts for one in drafted)
    return {
        "cycle_seconds": None if not len(cycles) else {**percentiles, "n": len(cycles)},
        # Share of the drafts of which at least 1, 2, ... tokens were accepted.
        "accepted_per_position": [sum(counts) / num_drafts for counts in zip_longest(*accepted, fillvalue=0)],
        "peak_memory_bytes": max(memory, default=None),
        "is_lossless": all(one.is_lossless for one in stats),
        "notes": _distinct([note for one in stats for note in one.notes]),
    }


def _distinct(notes: Sequence[str]) -> list[str]:
    """The notes of calls; of those that differ in their numbers alone the first, and how many there are."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        alike.setdefault(re.sub(r"[\d.]+", "#", note), []).append(note)
    return [
        group[0] if len(set(group)) == 1 else f"{group[0]} (in one of {len(group)} calls)" for group in alike.values()
    ]


def _same_texts(rounds: Sequence[Round], name: str, batches: Sequence[Batch]) -> dict[str, Any]:
    """Rows whose tokens are those of plain generation, of all rounds, and where the others first differ."""
    differences: dict[str, int] = {}
    same = total = 0
    for one in rounds:
        for batch, plain, other in zip(batches, one[PLAIN], one[name]):
            for prompt, expected, tokens in zip(batch.names, plain.tokens, other.tokens):
                index = first_difference(expected, tokens)
                same, total = same + (index is None), total + 1
                if index is not None:
                    differences[prompt] = index
    return {
        "identical": same == total,
        "same_texts": same,
        "num_texts": total,
        "first_differences": differences,
    }


def pooled(numerators: Sequence[float], denominators: Sequence[float]) -> float | None:
    """Sum over sum, such as accepted over drafted tokens of all calls; `None` where there is nothing to divide by."""
    whole = sum(denominators)
    return sum(numerators) / whole if whole else None
