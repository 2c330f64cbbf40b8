"""Drafters and targets to make repositories of, and calls that must write what plain generation writes."""

import json
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM

from tests.helpers.paths import FIXTURES


EAGLE = FIXTURES / "eagle" / "eagle3_llama"
DFLASH = FIXTURES / "dflash" / "qwen3_random_b8"
MEDUSA = FIXTURES / "medusa"
MTP = FIXTURES / "mtp"

# Whatever may stand in a file of strangers.
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def card_of(base_model, *tags, **metadata):
    """A drafter's model card."""
    data = {"base_model": base_model, "tags": list(tags), **metadata}
    return f"---\n{json.dumps(data)}\n---\n# A drafter\n"


def entry_of(entry):
    """The generation config of a target that names a drafter."""
    return {"generation_config.json": json.dumps({"speculative": entry})}


def saved_with(**settings):
    """Settings beside a checkpoint."""
    return {"speculation_config.json": json.dumps(settings)}


def with_integers(folder):
    """Weights of which one is of integers: only the loader looks at that."""
    tensors = load_file(Path(folder, "model.safetensors"))
    tensors["norm.weight"] = tensors["norm.weight"].long()
    return {"model.safetensors": save(tensors)}


def load(name="user/target"):
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()


def speculated(model, inputs, **arguments):
    """The statistics of a greedy call, which must have the tokens of plain generation."""
    inputs = {**inputs, "do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True}
    plain = model.generate(**inputs, spec_method="off")
    output = model.generate(**inputs, **arguments)
    assert torch.equal(output.sequences, plain.sequences)
    return output.speculative
