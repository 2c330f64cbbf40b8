"""Run by torchrun on two ranks: one model in two halves, decoded speculatively by both; rank 0 prints the tokens."""

import json
import os
import random
import sys

import torch
from transformers import AutoModelForCausalLM

import hf_specdec  # noqa: F401 - teaches generate() the speculative arguments
from hf_specdec.control import clock


model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto", dtype=torch.float32).eval()
model.generation_config.eos_token_id = None
rank = torch.distributed.get_rank()
inputs = {"input_ids": torch.tensor(json.loads(sys.argv[2])), "max_new_tokens": 24, "return_dict_in_generate": True}
inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
draft = AutoModelForCausalLM.from_pretrained(sys.argv[3], dtype=torch.float32).eval()
parallel_draft = AutoModelForCausalLM.from_pretrained(sys.argv[3], tp_plan="auto", dtype=torch.float32).eval()

noise, seconds = random.Random(0), [0.0]


def odd_clock():
    """Of another pace at every look, as the clock of another machine is."""
    seconds[0] += noise.random() ** 4
    return seconds[0]


if rank == 1:
    clock.clock_of = lambda device: odd_clock

results = {}


def decode(name, **settings):
    # The ranks' own generators differ; what is drawn must not.
    torch.manual_seed(rank)
    output = model.generate(**{"do_sample": False, **inputs, **settings})
    stats = output.speculative
    gathered = [None, None]
    torch.distributed.all_gather_object(
        gathered, (output.sequences.tolist(), stats.num_target_forwards, stats.num_draft_tokens)
    )
    results[name] = {
        "text": gathered[0][0],
        "accepted": stats.num_accepted_tokens,
        "drafted": stats.num_draft_tokens,
        "ranks_agree": gathered[0] == gathered[1],
    }


for name, settings in json.loads(sys.argv[4]).items():
    decode(name, **settings)
decode("assistant", assistant=draft, num_speculative_tokens=3)
parallel = {"method": "draft_model", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 2}
decode("parallel_assistant", assistant=parallel_draft, speculative=parallel)
if rank == 0:
    sys.stdout.write("RESULT " + json.dumps(results) + "\n")
sys.stdout.flush()
torch.distributed.barrier()
# Without torch's teardown of the group, which now and then aborts a process whose work is done.
os._exit(0)
