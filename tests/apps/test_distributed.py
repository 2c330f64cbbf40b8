"""Several processes, started by torchrun on the CPU: tensor-parallel targets, and ranks that wait for each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hf_specdec import SpecConfigError, demo, load_speculator
from tests.helpers.levels import full
from tests.helpers.methods import CHECKPOINTS, demo_target
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import ROOT


NEW, SYNCED_LENGTHS = 14, (4, 12)


def speculation(method, **settings):
    place = {} if method in ("ngram", "suffix") else {"model": CHECKPOINTS[method.rpartition("+")[2]]}
    return {"speculative": {"method": method, **place, **settings}}


TREE = {"draft_tree_top_k": 4, "num_draft_nodes": 15, "draft_tree_depth": 4}
GREEDY = {method: speculation(method) for method in (*CHECKPOINTS, "ngram", "suffix")}
# Decided by the clock: how long drafts are, how large their trees, and who drafts.
BY_THE_CLOCK = {
    "suffix+eagle3": speculation("suffix+eagle3"),
    "eagle3, auto": speculation("eagle3", num_speculative_tokens="auto", **TREE),
    "draft_model, auto": speculation("draft_model", num_speculative_tokens="auto"),
    "ngram, auto": speculation("ngram", num_speculative_tokens="auto"),
}
SAMPLED = {
    "ngram, sampled": {**speculation("ngram"), "do_sample": True},
    "eagle3, sampled": {**speculation("eagle3", draft_sample_method="probabilistic"), "do_sample": True},
    "draft_model, sampled": {**speculation("draft_model"), "do_sample": True},
}


@full
def test_ranks_write_the_text_of_one_process():
    """Results of the two ranks of `two_ranks.py`, by method."""
    inputs = prompts(2, length=20, padding=False)
    arguments = {"prompts": inputs["input_ids"].tolist(), "calls": {**GREEDY, **BY_THE_CLOCK, **SAMPLED}}
    arguments |= {"max_new_tokens": NEW, "synced_lengths": SYNCED_LENGTHS}
    paths = [demo.target_path(), demo.drafter_path("draft_model")]
    # As a module: the folder of a script is searched for modules, and it has names of Python's own.
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.helpers.two_ranks"]
    command += [*paths, json.dumps(arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    results = json.loads(line.removeprefix("RESULT "))

    # Ranks that wait for each other do the same number of forwards, for texts of different lengths.
    (forwards, first), (others, second) = results.pop("synced")
    call = {"do_sample": False, "eos_token_id": None}
    for rank, (count, text) in enumerate(zip(SYNCED_LENGTHS, (first, second))):
        assert demo_target().generate(inputs["input_ids"][[rank]], **call, max_new_tokens=count).tolist() == text
    assert forwards == others

    assert [name for name, result in results.items() if not result["ranks_agree"]] == []
    call |= {**inputs, "max_new_tokens": NEW}
    plain = demo_target().generate(**call).tolist()
    for name, result in results.items():
        assert name in SAMPLED or result["text"] == plain, name
        assert [len(row) for row in result["text"]] == [20 + NEW] * 2
    for method, settings in GREEDY.items():
        alone = demo_target().generate(**call, **settings, return_dict_in_generate=True)
        assert results[method]["accepted"] == alone.speculative.num_accepted_tokens, method
    assert results["assistant"]["accepted"] == results["parallel_assistant"]["accepted"] > 0
    assert max(results[name]["drafted"] for name in BY_THE_CLOCK) > 0


def test_size_of_a_tensor_parallel_draft(model, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(SpecConfigError, match="loaded by name is held by 1 process. .* pass it as `assistant`"):
        load_speculator(model, model=str(tmp_path), method="draft_model", draft_tensor_parallel_size=2)
    with pytest.raises(SpecConfigError, match="this LlamaForCausalLM is held by 1 process"):
        load_speculator(model, draft_model=tiny_llama(seed=1), draft_tensor_parallel_size=2)
