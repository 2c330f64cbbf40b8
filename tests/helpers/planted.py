"""Copies of the demo's drafters with a defect, and a target whose states are not those that they know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hf_specdec import demo


def damaged(source: str, folder: Path, change: Callable[[dict, dict], None]) -> str:
    """A copy of a checkpoint in `folder` after `change(config, tensors)`."""
    folder.mkdir()
    config = json.loads(Path(source, "config.json").read_text())
    tensors = load_file(Path(source, "model.safetensors"))
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def give_draft_vocabulary(config: dict, tensors: dict, ids: torch.Tensor) -> None:
    """The target's lm_head cut to these ids, as the head's own."""
    embedding = load_file(Path(demo.target_path(), "model.safetensors"))["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding[ids].clone()
    tensors["d2t"] = ids - torch.arange(len(ids))
    config["draft_vocab_size"] = len(ids)


def shuffle_states(model) -> None:
    """Puts the elements of the hidden states into another order: the same text from other states."""
    order = torch.randperm(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")) or weight.dim() == 1:
                weight.copy_(weight[order])
            else:
                weight.copy_(weight[:, order])
