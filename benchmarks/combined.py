"""What combined drafting gives beside each of its parts, on the embedded demo target.

    python benchmarks/combined.py                    # about 10 minutes on one core
    python benchmarks/combined.py --quick            # one round of few prompts, to see that it runs
    python benchmarks/combined.py --json out.json    # the same figures as a file
    python benchmarks/combined.py --draft-cost 0.1   # as if times were these: about 3 minutes

Every way of decoding writes the same texts in turn: of each kind of prompt, greedily and sampled at temperature 1, one
by one and in batches. A round gives each way the process time of all its texts, and each pair the ratio of the
combination to plain `generate()` and to the faster of its two parts; the table has the median of the rounds and, in
brackets, their range. The parts' drafts are deterministic, so that all of them write the same tokens from one seed,
which is checked. No response of another call is searched: the way that comes later would gain by it.

On a CPU a draft of this tiny target's drafters costs about as much as a verification. With `--draft-cost C` nothing
is timed: every verification counts as 1 and every draft with weights as C, whatever their sizes, as is nearly so on a
GPU. The combination chooses by these times, and its speed follows from the numbers of verifications and drafts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from time import process_time

import torch
from common import without_end
from rich.console import Console
from rich.table import Table

from hf_specdec import benchmarking, demo, forget_speculators, load_speculator, record
from hf_specdec.candidate_generators.combined import generator as combined
from hf_specdec.integration import generate


PLAIN = "plain"

RETRIEVAL = {"ngram": {}, "suffix": {"suffix_decoding_max_cached_requests": 0}}

MODELS = {
    "eagle3": {"model": demo.eagle3_path()},
    "draft_model": {"model": demo.draft_path(), "same_tokenizer": True, "draft_sample_method": "greedy"},
}

PAIRS = [("suffix", "eagle3"), ("suffix", "draft_model"), ("ngram", "eagle3")]

DECODING = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 1.0}}


@dataclass
class Way:
    """One way of decoding one kind of text.

    Attributes:
        tokens_per_second (`float`): Of process time, median of the rounds.
        acceptance_length (`float`): Tokens committed per verification of a row.
        over_plain (`tuple[float, float, float]`): Speed beside plain generation: median, least and most of the rounds.
    """

    tokens_per_second: float
    acceptance_length: float
    over_plain: tuple[float, float, float]


def ways(pairs: list[tuple[str, str]]) -> dict[str, dict]:
    """Settings of the parts and of the combinations by name."""
    found = {}
    for retrieval, model in pairs:
        found[retrieval] = {"method": retrieval, **RETRIEVAL[retrieval]}
        found[model] = {"method": model, **MODELS[model]}
        found[f"{retrieval}+{model}"] = {**found[retrieval], **found[model], "method": f"{retrieval}+{model}"}
    return found


class CountingClock:
    """A clock of cycles by which every verification takes 1, and every draft the same. It counts the drafts.

    Args:
        device (`torch.device`): Not looked at.
    """

    draft_cost, num_drafts = 0.0, 0

    def __init__(self, device: torch.device):
        self.has_drafted = False

    def begin(self) -> None:
        self.has_drafted = False

    def drafted(self) -> None:
        self.has_drafted = True
        CountingClock.num_drafts += 1

    def end(self) -> tuple[float | None, float]:
        return self.draft_cost if self.has_drafted else None, 1.0


class Contest:
    """All ways of decoding on the batches of one kind.

    Args:
        target (`PreTrainedModel`): The demo target, without an end of text.
        settings (`dict`): Of each way.
        batches (`list[benchmarking.Batch]`): What is generated.
        arguments (`dict`): How.
        draft_cost (`float`, *optional*): Of a draft beside a verification; `None`: times are measured.
    """

    def __init__(self, target, settings: dict[str, dict], batches, arguments: dict, draft_cost: float | None = None):
        self.draft_cost = draft_cost
        self.target, self.settings, self.batches, self.arguments = target, settings, batches, arguments
        self.seconds: dict[str, list[float]] = {name: [] for name in (PLAIN, *settings)}
        self.lengths: dict[str, float] = {PLAIN: 1.0}
        self.num_tokens = sum(len(batch.names) * batch.max_new_tokens for batch in batches)

    def run_round(self, number: int) -> None:
        """Generates everything once, each batch in another order of the ways."""
        forget_speculators(self.target)
        speculators = {name: load_speculator(self.target, **given) for name, given in self.settings.items()}
        ours, spent = {}, dict.fromkeys(self.seconds, 0.0)
        counted = {name: [0, 0] for name in self.settings}
        names = list(self.seconds)
        for name in names:
            self._call(self.batches[0], speculators.get(name), max_new_tokens=8)
        for index, batch in enumerate(self.batches):
            turn = (number + index) % len(names)
            for name in names[turn:] + names[:turn]:
                seconds, text, stats = self._call(batch, speculators.get(name), max_new_tokens=batch.max_new_tokens)
                spent[name] += seconds
                if stats is None:
                    continue
                counted[name][0] += stats.num_committed_tokens - stats.batch_size
                counted[name][1] += stats.num_row_cycles
                if ours.setdefault(index, text) != text:
                    raise SystemExit(f"{name} writes another text than another way on {', '.join(batch.names)}.")
        for name, seconds in spent.items():
            self.seconds[name].append(seconds)
        self.lengths |= {name: tokens / cycles for name, (tokens, cycles) in counted.items()}

    def _call(self, batch, speculator, max_new_tokens: int):
        torch.manual_seed(0)
        with record() as recorded:
            began = process_time()
            output = generate(
                self.target, **batch.inputs, **self.arguments, max_new_tokens=max_new_tokens, assistant=speculator
            )
            seconds = process_time() - began
        stats = recorded.calls[0].stats if recorded.calls else None
        if self.draft_cost is not None:
            seconds = self._counted_seconds(speculator, stats, batch.max_new_tokens)
        return seconds, output.tolist(), stats

    def _counted_seconds(self, speculator, stats, max_new_tokens: int) -> float:
        if stats is None:
            return float(max_new_tokens - 1)
        num_cycles, num_drafts = stats.num_target_forwards - 1, CountingClock.num_drafts
        CountingClock.num_drafts = 0
        if "+" not in speculator.method:
            num_drafts = 0 if speculator.method in RETRIEVAL else num_cycles
        return num_cycles + self.draft_cost * num_drafts

    def ways(self) -> dict[str, Way]:
        return {
            name: Way(self.num_tokens / statistics.median(seconds), self.lengths[name], self.ratio(name, [PLAIN]))
            for name, seconds in self.seconds.items()
        }

    def ratio(self, name: str, others: list[str]) -> tuple[float, float, float]:
        """Speed of a way beside the fastest of others, that of all rounds together: median, least and most."""
        best = min(others, key=lambda other: statistics.median(self.seconds[other]))
        ratios = [theirs / own for own, theirs in zip(self.seconds[name], self.seconds[best])]
        return statistics.median(ratios), min(ratios), max(ratios)


def measure(arguments: argparse.Namespace) -> list[dict]:
    target, tokenizer = without_end(demo.load_target(torch.float32)), demo.load_tokenizer()
    prompts = demo.prompts()
    if arguments.quick:
        prompts = [prompt for kind in ("edit", "complete") for prompt in [p for p in prompts if p.kind == kind][:2]]
    rows = []
    for batch_size in arguments.batch_sizes:
        batches = benchmarking.make_batches(tokenizer, prompts, batch_size, arguments.max_new_tokens)
        for decoding, how in DECODING.items():
            for kind in dict.fromkeys(batch.kind for batch in batches):
                chosen = [batch for batch in batches if batch.kind == kind]
                contest = Contest(target, ways(PAIRS), chosen, how, arguments.draft_cost)
                for number in range(arguments.rounds):
                    contest.run_round(number)
                rows.append(
                    {
                        "kind": kind,
                        "decoding": decoding,
                        "batch_size": batch_size,
                        "ways": {name: asdict(way) for name, way in contest.ways().items()},
                        "over_better_part": {
                            "+".join(pair): contest.ratio("+".join(pair), list(pair)) for pair in PAIRS
                        },
                    }
                )
    return rows


def show(console: Console, rows: list[dict], draft_cost: float | None) -> None:
    unit, digits = ("second", 0) if draft_cost is None else (f"unit of time, {draft_cost:g} for a draft", 2)
    table = Table(title=f"Tokens per {unit}, and speed beside plain generate()")
    for heading in ("text", "decoding", "batch", "way", "tokens", "length", "over plain", "over the better part"):
        table.add_column(heading, justify="left" if heading in ("text", "decoding", "way") else "right")
    for row in rows:
        where = [row["kind"], row["decoding"], str(row["batch_size"])]
        for name, way in row["ways"].items():
            figures = [
                f"{way['tokens_per_second']:.{digits}f}",
                f"{way['acceptance_length']:.2f}",
                spread(way["over_plain"]),
            ]
            better = row["over_better_part"].get(name)
            table.add_row(*where, name, *figures, "" if better is None else spread(better), end_section=False)
            where = ["", "", ""]
        table.add_section()
    console.print(table)


def spread(ratio: tuple[float, float, float]) -> str:
    median, least, most = ratio
    return f"{median:.2f} ({least:.2f}-{most:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="one round of two prompts of each kind")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--draft-cost", type=float, metavar="C", help="count instead of timing")
    arguments = parser.parse_args()
    if arguments.draft_cost is not None:
        # Every round would be the same.
        arguments.rounds, CountingClock.draft_cost = 1, arguments.draft_cost
        combined.CycleClock = CountingClock
    if arguments.quick:
        arguments.rounds, arguments.max_new_tokens = 1, min(arguments.max_new_tokens, 48)
    with benchmarking.num_threads(1):
        rows = measure(arguments)
        show(Console(width=140), rows, arguments.draft_cost)
        environment = benchmarking.describe_environment("cpu", torch.float32)
        report = {"environment": environment, "draft_cost": arguments.draft_cost, "rows": rows}
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
