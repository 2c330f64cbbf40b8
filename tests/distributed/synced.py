"""Run by torchrun on two ranks with texts of different lengths: every rank must do as many target forwards."""

import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM

import hf_specdec  # noqa: F401 - teaches generate() the speculative arguments


torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
forwards = 0


def counted(module, args):
    global forwards
    forwards += 1


model.register_forward_pre_hook(counted)
input_ids = torch.tensor([json.loads(sys.argv[2])[rank]])
new_tokens = (6, 30)[rank]
text = model.generate(
    input_ids, do_sample=False, max_new_tokens=new_tokens, spec_method="ngram", synced_gpus=True
).tolist()
gathered = [None, None]
torch.distributed.all_gather_object(gathered, (forwards, text))
if rank == 0:
    counts, texts = zip(*gathered)
    sys.stdout.write("RESULT " + json.dumps({"forwards": counts, "texts": texts}) + "\n")
sys.stdout.flush()
torch.distributed.barrier()
# Without torch's teardown of the group, which now and then aborts a process whose work is done.
os._exit(0)
