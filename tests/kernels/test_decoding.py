"""`generate()` with slots written, read and moved by kernels: the same text as plain generation."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.kernels import _triton, cache, tree_attention
from hf_specdec.layers import experts, llama
from tests.helpers.architectures import tiny_model
from tests.helpers.models import prompts, scripted_for
from tests.kernels.conftest import watched


# Through the lean forward: with windows, norms of heads or of what is added, joined products, turning neighbours, soft
# caps, layer norms without weights, heads that do not turn, and factors.
LEAN = {
    "llama": {},
    "mistral": {},
    "qwen3": {"layer_types": None, "use_sliding_window": False},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {},
    "phi3": {},
    "glm4": {},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo": {},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"layer_types": None, "use_sliding_window": False, "no_rope_layers": [1, 0]},
    "granite": {"residual_multiplier": 0.4, "embedding_multiplier": 3.0},
}
# The same with experts; those of Qwen2 have a shared one, an MLP.
MIXTURES = {
    "mixtral": {},
    "olmoe": {},
    "qwen2_moe": {"layer_types": None, "use_sliding_window": False},
    "qwen3_moe": {"use_sliding_window": False},
}
# Through their own forward: sinks and windows, chunks; a layer of each kind.
MODELS = {
    **LEAN,
    **MIXTURES,
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"]},
}


def model_of(name):
    """Two layers of one group of heads: the interpreter takes its time for each program."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model(name, **sizes, **MODELS[name])
    if name == "gemma2":
        # Torch's own attention, the default in transformers 5.17, has no soft cap.
        model.set_attn_implementation("eager")
    return model


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels that were launched."""
    return watched(
        monkeypatch,
        (cache, "_write_triton"),
        (cache, "_move_triton"),
        (tree_attention, "_tree_attention_triton"),
        (llama, "add_norm"),
        (llama, "place_heads"),
        (llama, "gated"),
        (experts, "mixture"),
    )


@pytest.mark.parametrize(("name", "padding"), [*((name, True) for name in MODELS), ("llama", False)])
def test_text_is_that_of_plain_generation(name, padding, device, launches, monkeypatch):
    model, inputs = model_of(name).to(device), prompts(2, length=7, padding=padding)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    moved = {key: values.to(device) for key, values in inputs.items()}
    text = model.generate(**moved, **settings).cpu()
    assert not launches
    monkeypatch.setattr(_triton, "CHOICE", "triton")
    output = model.generate(
        **moved, **settings, assistant=scripted_for(text, inputs, tree="random"), return_dict_in_generate=True
    )
    assert torch.equal(output.sequences.cpu(), text)
    assert 0 < output.speculative.num_accepted_tokens
    assert output.speculative.attention == "tree kernel"
    fused = {"_write_triton"}
    if name in {**LEAN, **MIXTURES}:
        mlp = {"mixture", "gated"} if name == "qwen2_moe" else {"mixture"} if name in MIXTURES else {"gated"}
        fused = {"place_heads", "add_norm", *mlp}
    # What lies in place is not moved on a CPU.
    assert set(launches) - {"_move_triton"} == {"_tree_attention_triton", *fused}
