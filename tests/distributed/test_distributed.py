"""Several processes, started by torchrun on the CPU: tensor-parallel targets, and ranks that wait for each other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_specdec import SpecConfigError, demo, load_speculator
from tests.methods import CHECKPOINTS
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


DEMO = {**CHECKPOINTS, "suffix+eagle3": CHECKPOINTS["eagle3"], "ngram": None, "suffix": None}
PATIENCE = {"max_new_tokens": 24, "eos_token_id": None, "return_dict_in_generate": True}


def speculation(method, **settings):
    place = {} if DEMO[method] is None else {"model": DEMO[method]}
    return {"speculative": {"method": method, **place, **settings}}


GREEDY = {method: speculation(method) for method in DEMO if method != "suffix+eagle3"}
# Decided by the clock: how long drafts are, how large their trees, and who drafts.
BY_THE_CLOCK = {
    "suffix+eagle3": speculation("suffix+eagle3"),
    "eagle3, auto": speculation(
        "eagle3", num_speculative_tokens="auto", draft_tree_top_k=4, num_draft_nodes=15, draft_tree_depth=4
    ),
    "draft_model, auto": speculation("draft_model", num_speculative_tokens="auto"),
    "ngram, auto": speculation("ngram", num_speculative_tokens="auto"),
}
SAMPLED = {
    f"{method}, sampled": {**speculation(method, **settings), "do_sample": True}
    for method, settings in {
        "ngram": {},
        "eagle3": {"draft_sample_method": "probabilistic"},
        "draft_model": {},
    }.items()
}


@pytest.fixture(scope="module")
def tensor_parallel():
    """The texts of a target in two halves, by method, and its prompts."""
    inputs = prompts(2, length=20, padding=False)["input_ids"]
    calls = {**GREEDY, **BY_THE_CLOCK, **SAMPLED}
    arguments = [demo.target_path(), json.dumps(inputs.tolist()), demo.drafter_path("draft_model"), json.dumps(calls)]
    return inputs, torchrun("tensor_parallel.py", *arguments)


def test_tensor_parallel_target_writes_the_text_of_one_process(tensor_parallel):
    inputs, results = tensor_parallel
    target = demo.load_target()
    call = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "do_sample": False, **PATIENCE}
    plain = target.generate(**call).sequences.tolist()
    for method, settings in GREEDY.items():
        alone = target.generate(**call, **settings)
        assert results[method]["text"] == plain, method
        assert results[method]["accepted"] == alone.speculative.num_accepted_tokens, method
    for name in (*BY_THE_CLOCK, "assistant", "parallel_assistant"):
        assert results[name]["text"] == plain, name
    assert results["assistant"]["accepted"] == results["parallel_assistant"]["accepted"] > 0


def test_ranks_draft_and_draw_alike(tensor_parallel):
    inputs, results = tensor_parallel
    assert [name for name, result in results.items() if not result["ranks_agree"]] == []
    for name in SAMPLED:
        assert torch.tensor(results[name]["text"]).shape == (2, 20 + 24)
    assert max(results[name]["drafted"] for name in BY_THE_CLOCK) > 0


def test_size_of_a_tensor_parallel_draft(model, checkpoint):
    with pytest.raises(SpecConfigError, match="loaded by name is held by 1 process. .* pass it as `assistant`"):
        load_speculator(model, model=str(checkpoint), method="draft_model", draft_tensor_parallel_size=2)
    with pytest.raises(SpecConfigError, match="this LlamaForCausalLM is held by 1 process"):
        load_speculator(model, draft_model=tiny_llama(seed=1), draft_tensor_parallel_size=2)


def test_synced_ranks_do_the_same_number_of_forwards(model, checkpoint):
    inputs = prompts(2, padding=False)
    result = torchrun("synced.py", str(checkpoint), json.dumps(inputs["input_ids"].tolist()))
    plain = [
        model.generate(inputs["input_ids"][[rank]], do_sample=False, max_new_tokens=count).tolist()
        for rank, count in enumerate((6, 30))
    ]
    assert result["texts"] == plain
    assert result["forwards"][0] == result["forwards"][1]
