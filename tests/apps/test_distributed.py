"""Several processes, started by torchrun on the CPU: tensor-parallel targets, and ranks that wait for each other."""

import json
import os
import subprocess
import sys

import pytest
import torch

from hf_specdec import SpecConfigError, demo, load_speculator
from tests.helpers.methods import CHECKPOINTS, demo_target
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.paths import ROOT


DEMO = {**CHECKPOINTS, "suffix+eagle3": CHECKPOINTS["eagle3"], "ngram": None, "suffix": None}
NEW = 14
SYNCED_LENGTHS = 4, 12


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
def inputs():
    return prompts(2, length=20, padding=False)


@pytest.fixture(scope="module")
def results(inputs):
    """Results of the two ranks of `two_ranks.py`, by method."""
    arguments = {"prompts": inputs["input_ids"].tolist(), "calls": {**GREEDY, **BY_THE_CLOCK, **SAMPLED}}
    arguments |= {"max_new_tokens": NEW, "synced_lengths": SYNCED_LENGTHS}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        ROOT / "tests" / "helpers" / "two_ranks.py",
        demo.target_path(),
        demo.drafter_path("draft_model"),
        json.dumps(arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def test_tensor_parallel_target_writes_the_text_of_one_process(inputs, results):
    call = {**inputs, "do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    plain = demo_target().generate(**call).tolist()
    for method, settings in GREEDY.items():
        alone = demo_target().generate(**call, **settings, return_dict_in_generate=True)
        assert results[method]["text"] == plain, method
        assert results[method]["accepted"] == alone.speculative.num_accepted_tokens, method
    for name in (*BY_THE_CLOCK, "assistant", "parallel_assistant"):
        assert results[name]["text"] == plain, name
    assert results["assistant"]["accepted"] == results["parallel_assistant"]["accepted"] > 0


def test_ranks_draft_and_draw_alike(results):
    results = {name: result for name, result in results.items() if name != "synced"}
    assert [name for name, result in results.items() if not result["ranks_agree"]] == []
    for name in SAMPLED:
        assert torch.tensor(results[name]["text"]).shape == (2, 20 + NEW)
    assert max(results[name]["drafted"] for name in BY_THE_CLOCK) > 0


def test_synced_ranks_do_the_same_number_of_forwards(inputs, results):
    (forwards, first), (others, second) = results["synced"]
    call = {"do_sample": False, "eos_token_id": None}
    for rank, (count, text) in enumerate(zip(SYNCED_LENGTHS, (first, second))):
        assert demo_target().generate(inputs["input_ids"][[rank]], **call, max_new_tokens=count).tolist() == text
    assert forwards == others


def test_size_of_a_tensor_parallel_draft(model, tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(SpecConfigError, match="loaded by name is held by 1 process. .* pass it as `assistant`"):
        load_speculator(model, model=str(tmp_path), method="draft_model", draft_tensor_parallel_size=2)
    with pytest.raises(SpecConfigError, match="this LlamaForCausalLM is held by 1 process"):
        load_speculator(model, draft_model=tiny_llama(seed=1), draft_tensor_parallel_size=2)
