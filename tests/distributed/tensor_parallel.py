"""Run by torchrun on two ranks: one model in two halves, decoded speculatively by both; rank 0 prints the tokens."""

import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM

import hf_specdec  # noqa: F401 - teaches generate() the speculative arguments


model = AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto").eval()
rank = torch.distributed.get_rank()
inputs = {"input_ids": torch.tensor(json.loads(sys.argv[2])), "max_new_tokens": 24}
draft = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
texts = {
    "ngram": model.generate(**inputs, do_sample=False, spec_method="ngram"),
    "draft_model": model.generate(**inputs, do_sample=False, assistant=draft, num_speculative_tokens=3),
}
# The ranks' own generators differ; what is drawn must not.
torch.manual_seed(rank)
texts["sampled"] = model.generate(**inputs, do_sample=True, spec_method="ngram")
gathered = [None, None]
torch.distributed.all_gather_object(gathered, texts["sampled"].tolist())
if rank == 0:
    result = {name: text.tolist() for name, text in texts.items()}
    sys.stdout.write("RESULT " + json.dumps({**result, "ranks_agree": gathered[0] == gathered[1]}) + "\n")
sys.stdout.flush()
torch.distributed.barrier()
# Without torch's teardown of the group, which now and then aborts a process whose work is done.
os._exit(0)
