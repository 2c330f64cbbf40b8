"""Recorded cases: a target, the folder of its drafter, and tensors that the official code has written for them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from tests.helpers import heads
from tests.helpers.paths import FIXTURES


MTP = FIXTURES / "mtp"
# Cases of MTP whose targets have recurrent layers, which verify chains only.
HYBRID = ("qwen3_5", "qwen3_next")


class Published(NamedTuple):
    target: PreTrainedModel
    folder: str
    expected: dict[str, torch.Tensor]


@cache
def target_of(path: str) -> PreTrainedModel:
    """The target in this folder, in float32."""
    # MiMo is Qwen2 with further layers, and no type of transformers.
    is_mimo = json.loads((Path(path) / "config.json").read_text()).get("model_type") == "mimo"
    model = (Qwen2ForCausalLM if is_mimo else AutoModelForCausalLM).from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model


@cache
def published(name: str) -> Published:
    """A recorded case by its folder below the fixtures: `eagle/eagle3_llama`."""
    folder = FIXTURES / name
    # The case of PARD-2 is of PARD's target.
    target = folder.parent / "pard" if folder.name == "pard2" else folder
    expected = load_file(folder / "expected.safetensors")
    return Published(target_of(str(heads.target_of(target))), str(folder), expected)
