"""Two versions of the package side by side: `overhead.py --against FOLDER`.

Each version runs in a process of its own, with the folder that holds its `hf_specdec` on PYTHONPATH. The processes are
asked in turn for the same calls, on the embedded target, and answer with the processor time that they took; times of
different runs, minutes apart on a shared machine, differ by more than versions do.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import process_time

from rich.console import Console
from rich.table import Table


CONTEXT = 128
BATCH_SIZES = (1, 4)

# Names of calls; what they ask for is in `_settings`.
SIDES = ("no drafts", "ngram", "draft model", "draft model, sampled", "medusa", "eagle3")


@dataclass
class Comparison:
    """One kind of call under both versions.

    Attributes:
        side (`str`), batch_size (`int`): The call.
        cycle_ms (`float`): Processor time of a cycle of this version, prefill included, in the fastest round.
        ratio (`list[float]`): This version's time over the other's, each within a round: median, least, greatest.
        same_texts (`bool`): Both wrote the same, in as many cycles.
    """

    side: str
    batch_size: int
    cycle_ms: float
    ratio: list[float]
    same_texts: bool


class Worker:
    """A process that runs calls with the version in `folder`.

    It uses what all versions have: the demo, `record()`, and the settings of `generate()`.

    Args:
        folder (`Path`): Holds `hf_specdec`.
        new_tokens (`int`): Of each row.
        prompts (`list[list[int]]`): Token ids of the rows of the largest batch.
    """

    def __init__(self, folder: Path, new_tokens: int, prompts: list[list[int]]):
        self.folder, self.prompts = folder.resolve(), prompts
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONSAFEPATH": ""}
        command = [sys.executable, str(Path(__file__).resolve()), str(self.folder), str(new_tokens)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, side: str, batch_size: int) -> dict:
        """Seconds, cycles and texts of one call."""
        try:
            print(json.dumps([side, self.prompts[:batch_size]]), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            # It has ended, before or after it read the question.
            raise SystemExit(f"The version in {self.folder} has failed; its error is above.") from None

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def compare(other: Path, rounds: int, new_tokens: int, console: Console) -> list[Comparison]:
    """Compares this version with the one in the folder `other`; prints a table."""
    if not (other / "hf_specdec" / "__init__.py").is_file():
        raise SystemExit(f"--against wants a folder that holds a version of hf_specdec, got {other}.")
    from common import demo_prompts

    prompts = demo_prompts(max(BATCH_SIZES), CONTEXT).tolist()
    workers = [Worker(folder, new_tokens, prompts) for folder in (Path(__file__).parents[1], other)]
    try:
        found = [_compare_side(workers, side, size, rounds) for size in BATCH_SIZES for side in SIDES]
    finally:
        for worker in workers:
            worker.close()
    console.print(_table(found, other, rounds))
    return found


def _compare_side(workers: list[Worker], side: str, batch_size: int, rounds: int) -> Comparison:
    for worker in workers:
        worker.run(side, batch_size)
    ours, theirs = [], []
    for number in range(rounds):
        order = workers if number % 2 == 0 else workers[::-1]
        answers = {id(worker): worker.run(side, batch_size) for worker in order}
        ours.append(answers[id(workers[0])])
        theirs.append(answers[id(workers[1])])
    ratios = [mine["seconds"] / other["seconds"] for mine, other in zip(ours, theirs)]
    fastest = min(ours, key=lambda answer: answer["seconds"])
    return Comparison(
        side,
        batch_size,
        1000 * fastest["seconds"] / fastest["cycles"],
        [statistics.median(ratios), min(ratios), max(ratios)],
        all((mine["texts"], mine["cycles"]) == (other["texts"], other["cycles"]) for mine, other in zip(ours, theirs)),
    )


def _table(found: list[Comparison], other: Path, rounds: int) -> Table:
    table = Table(title=f"Processor time beside {other}, {rounds} rounds", title_justify="left")
    for column in ("call", "batch", "ms/cycle", "x the other (range)", "same texts"):
        table.add_column(column, justify="left" if column == "call" else "right", no_wrap=True)
    for row in found:
        median, least, greatest = row.ratio
        cells = row.side, str(row.batch_size), f"{row.cycle_ms:.2f}", f"{median:.3f} ({least:.3f}-{greatest:.3f})"
        table.add_row(*cells, "yes" if row.same_texts else "NO")
    all_ratios = [row.ratio[0] for row in found]
    table.add_row("all", "", "", f"{statistics.geometric_mean(all_ratios):.3f}", "")
    return table


# --------------------------------------------------------------------------------------------------------- in a worker


def _settings(side: str) -> dict:
    from hf_specdec import demo

    draft_model = {"method": "draft_model", "model": demo.drafter_path("draft_model"), "same_tokenizer": True}
    return {
        # In words of all versions: rows are too long for drafts from their first token on.
        "no drafts": {"method": "ngram", "max_model_len": 2},
        "ngram": {"method": "ngram"},
        "draft model": draft_model,
        "draft model, sampled": draft_model,
        "medusa": {"method": "medusa", "model": demo.drafter_path("medusa")},
        "eagle3": {"method": "eagle3", "model": demo.drafter_path("eagle3")},
    }[side]


def _serve(folder: Path, new_tokens: int) -> None:
    """Answers each line of stdin, `[side, prompts]`, with a line of seconds, cycles and texts."""
    # Nothing else may come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    import hf_specdec

    if Path(hf_specdec.__file__).resolve().parents[1] != folder:
        raise SystemExit(f"Wanted the version in {folder}, and Python found {hf_specdec.__file__}.")
    run = _caller(new_tokens)
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), file=answers, flush=True)


def _caller(new_tokens: int) -> Callable[[str, list[list[int]]], dict]:
    import torch
    from transformers.utils import logging

    from hf_specdec import demo, record

    logging.set_verbosity_error()
    torch.set_num_threads(1)
    target = demo.load_target(torch.float32)
    # All texts have the length asked for.
    target.config.eos_token_id = target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0

    def run(side: str, prompts: list[list[int]]) -> dict:
        sampling = {"do_sample": True, "temperature": 0.8} if side.endswith("sampled") else {"do_sample": False}
        input_ids = torch.tensor(prompts)
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        torch.manual_seed(0)
        with record() as made:
            began = process_time()
            texts = target.generate(**inputs, max_new_tokens=new_tokens, speculative=_settings(side), **sampling)
            seconds = process_time() - began
        return {"seconds": seconds, "cycles": made.calls[0].stats.num_target_forwards, "texts": texts.tolist()}

    return run


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
