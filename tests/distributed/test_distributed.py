"""Several processes, started by torchrun on the CPU: tensor-parallel targets, and ranks that wait for each other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models import prompts, tiny_llama


FOLDER = Path(__file__).parent


def torchrun(script: str, *arguments: str) -> dict:
    """Runs a script of this folder on two ranks and returns the result that rank 0 prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(FOLDER / script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return folder


def test_tensor_parallel_target_writes_the_text_of_one_process(model, checkpoint):
    inputs = prompts(2, padding=False)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=24).tolist()
    result = torchrun("tensor_parallel.py", str(checkpoint), json.dumps(inputs["input_ids"].tolist()))
    assert result["ngram"] == plain
    assert result["draft_model"] == plain
    assert result["ranks_agree"]
    assert torch.tensor(result["sampled"]).shape == (2, 31)


def test_synced_ranks_do_the_same_number_of_forwards(model, checkpoint):
    inputs = prompts(2, padding=False)
    result = torchrun("synced.py", str(checkpoint), json.dumps(inputs["input_ids"].tolist()))
    plain = [
        model.generate(inputs["input_ids"][[rank]], do_sample=False, max_new_tokens=count).tolist()
        for rank, count in enumerate((6, 30))
    ]
    assert result["texts"] == plain
    assert result["forwards"][0] == result["forwards"][1]
