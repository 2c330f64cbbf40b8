"""Two ranks, as torchrun starts them, which decode speculatively; rank 0 prints what they wrote.

Once with one model in two halves, once with a model and a text of its own for each rank, and once with the command for
files of requests.
"""

import itertools
import json
import os
import random
import socket
import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama  # noqa: F401 - before there are two processes
from typer.testing import CliRunner

import hf_specdec  # noqa: F401 - teaches generate() the speculative arguments
from hf_specdec import cli
from hf_specdec.control import clock


target_path, draft_path, arguments = sys.argv[1:]
arguments = json.loads(arguments)
with socket.socket() as unused:
    unused.bind(("127.0.0.1", 0))
    port = str(unused.getsockname()[1])
# Imports take longer than all that follows, so the second rank is a copy of the first.
rank = 0 if os.fork() else 1
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
model = AutoModelForCausalLM.from_pretrained(target_path, tp_plan="auto", dtype=torch.float32).eval()
model.generation_config.eos_token_id = None
assert torch.distributed.get_rank() == rank
inputs = {"input_ids": torch.tensor(arguments["prompts"]), "return_dict_in_generate": True}
inputs |= {"attention_mask": torch.ones_like(inputs["input_ids"]), "max_new_tokens": arguments["max_new_tokens"]}
draft = AutoModelForCausalLM.from_pretrained(draft_path, dtype=torch.float32).eval()
parallel_draft = AutoModelForCausalLM.from_pretrained(draft_path, tp_plan="auto", dtype=torch.float32).eval()

if rank == 1:
    # A clock of another pace at every look, as the clock of another machine is.
    noise = random.Random(0)
    times = itertools.accumulate(noise.random() ** 4 for _ in itertools.count())
    clock.thread_time = clock.perf_counter = lambda: next(times)

results = {}


def of_both_ranks(value) -> list:
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def decode(name, **settings):
    # The ranks' own generators differ; what is drawn must not.
    torch.manual_seed(rank)
    output = model.generate(**{"do_sample": False, **inputs, **settings})
    stats = output.speculative
    first, second = of_both_ranks((output.sequences.tolist(), stats.num_target_forwards, stats.num_draft_tokens))
    results[name] = {
        "text": first[0],
        "accepted": stats.num_accepted_tokens,
        "drafted": stats.num_draft_tokens,
        "ranks_agree": first == second,
    }


def decode_in_sync():
    """Texts of different lengths, in as many forwards."""
    forwards = []
    alone = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    alone.register_forward_pre_hook(lambda module, args: forwards.append(1))
    alone.generation_config.eos_token_id = None
    text = alone.generate(
        inputs["input_ids"][[rank]],
        do_sample=False,
        max_new_tokens=arguments["synced_lengths"][rank],
        spec_method="ngram",
        synced_gpus=True,
    )
    results["synced"] = of_both_ranks((len(forwards), text.tolist()))


for name, settings in arguments["calls"].items():
    decode(name, **settings)
decode("assistant", assistant=draft, num_speculative_tokens=3)
parallel = {"method": "draft_model", "num_speculative_tokens": 3}
decode("parallel_assistant", assistant=parallel_draft, speculative=parallel)
decode_in_sync()
answered = CliRunner().invoke(cli.app, arguments["command"])
assert answered.exit_code == 0, answered.output
if rank == 0:
    results["command"] = json.loads(answered.stdout)
    sys.stdout.write("RESULT " + json.dumps(results) + "\n")
sys.stdout.flush()
torch.distributed.barrier()
# Without torch's teardown of the group, which now and then aborts a process whose work is done.
os._exit(0)
