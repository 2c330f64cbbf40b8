"""Two versions of the package side by side: `overhead.py --against VERSION`.

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
import tempfile
from contextlib import suppress
from pathlib import Path
from time import process_time
from typing import Any


ROOT = Path(__file__).parents[1]
BATCH_SIZES = (1, 4)

# Names of calls; what they ask for is in `_settings`.
SIDES = ("none", "ngram", "draft_model", "draft_model, sampled", "medusa", "eagle3")


class Worker:
    """A process that runs calls with the version of the package that `folder` holds."""

    def __init__(self, folder: Path, new_tokens: int, prompts: list[list[int]]):
        self.folder, self.prompts = folder.resolve(), prompts
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONSAFEPATH": ""}
        command = [sys.executable, str(Path(__file__).resolve()), str(self.folder), str(new_tokens)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, side: str, batch_size: int) -> dict[str, Any]:
        """Seconds, cycles and texts of one call."""
        try:
            print(json.dumps([side, self.prompts[:batch_size]]), file=self.process.stdin, flush=True)
            return json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            # It has ended, before or after it read the question.
            raise SystemExit(f"The version in {self.folder} has failed; its error is above.") from None


def compare(version: str, rounds: int, new_tokens: int, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Rows of every kind of call: this version beside that of a commit, or of a folder that holds `hf_specdec`."""
    with tempfile.TemporaryDirectory() as archive:
        other = Path(version)
        if not (other / "hf_specdec" / "__init__.py").is_file():
            other = Path(archive)
            packed = subprocess.run(["git", "-C", ROOT, "archive", version, "hf_specdec"], capture_output=True)
            if packed.returncode:
                raise SystemExit(f"--against wants a commit, or a folder that holds hf_specdec, got {version}.")
            subprocess.run(["tar", "-x", "-C", archive], input=packed.stdout, check=True)
        workers = [Worker(folder, new_tokens, prompts) for folder in (ROOT, other)]
        try:
            return [_compare_side(workers, side, size, rounds) for size in BATCH_SIZES for side in SIDES]
        finally:
            for worker in workers:
                with worker.process, suppress(BrokenPipeError):
                    worker.process.stdin.close()


def _compare_side(workers: list[Worker], side: str, batch_size: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of a cycle, prefill included, in the fastest round; ratios are within one round."""
    ours, theirs = answers = [], []
    # The first round loads and measures, and does not count.
    for number in range(rounds + 1):
        for index in (0, 1) if number % 2 else (1, 0):
            answers[index].append(workers[index].run(side, batch_size))
    pairs = list(zip(ours, theirs))[1:]
    ratios = [mine["seconds"] / other["seconds"] for mine, other in pairs]
    fastest = min((mine for mine, _ in pairs), key=lambda answer: answer["seconds"])
    return {
        "side": side,
        "batch_size": batch_size,
        "cycle_ms": 1000 * fastest["seconds"] / fastest["cycles"],
        "time_to_the_other": [statistics.median(ratios), min(ratios), max(ratios)],
        "same_texts": all(mine[key] == other[key] for mine, other in pairs for key in ("texts", "cycles")),
    }


# --------------------------------------------------------------------------------------------------------- in a worker


def _settings(side: str) -> dict[str, Any]:
    from hf_specdec import demo

    if side == "none":
        # In words of all versions: rows are too long for drafts from their first token on.
        return {"method": "ngram", "max_model_len": 2}
    method = side.partition(",")[0]
    settings = {} if method == "ngram" else {"model": demo.drafter_path(method)}
    return {"method": method, **settings, **({"same_tokenizer": True} if method == "draft_model" else {})}


def _serve(folder: Path, new_tokens: int) -> None:
    """Answers each line of stdin, `[side, prompts]`, with a line of seconds, cycles and texts."""
    # Nothing else may come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch
    from transformers.utils import logging

    import hf_specdec
    from hf_specdec import demo, record

    if Path(hf_specdec.__file__).resolve().parents[1] != folder:
        raise SystemExit(f"Wanted the version in {folder}, and Python found {hf_specdec.__file__}.")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    target = demo.load_target(torch.float32)
    # All texts have the length asked for.
    target.config.eos_token_id = target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    for line in sys.stdin:
        side, prompts = json.loads(line)
        sampling = {"do_sample": True, "temperature": 0.8} if side.endswith("sampled") else {"do_sample": False}
        input_ids = torch.tensor(prompts)
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        torch.manual_seed(0)
        with record() as made:
            began = process_time()
            texts = target.generate(**inputs, max_new_tokens=new_tokens, speculative=_settings(side), **sampling)
            seconds = process_time() - began
        cycles = made.calls[0].stats.num_target_forwards
        print(json.dumps({"seconds": seconds, "cycles": cycles, "texts": texts.tolist()}), file=answers, flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]))
