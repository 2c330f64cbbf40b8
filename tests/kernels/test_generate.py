"""`generate()` through the kernels: the text of plain generation, and the samples of the references."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.kernels import (
    _triton,
    acceptance,
    cache,
    experts,
    gates,
    heads,
    norms,
    sampling,
    tree_attention,
    warpers,
)
from hf_specdec.target.graphs import forget_graphs
from tests.helpers.architectures import tiny_model
from tests.helpers.levels import in_full
from tests.helpers.models import prompts, scripted_for, tiny_llama
from tests.helpers.sampled import sampled_speculator
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
        (tree_attention, "tree_attention_triton"),
        (norms, "add_norm_triton"),
        (heads, "place_heads_triton"),
        (gates, "gated_triton"),
        (experts, "mixture_triton"),
        (acceptance, "_follow_triton"),
        (acceptance, "_reject_triton"),
        (sampling, "_sample_triton"),
        (warpers, "warped_triton"),
    )


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        ("llama", True),
        *in_full(("llama", False), *((name, True) for name in MODELS if name != "llama")),
    ],
)
def test_greedy_trees_match_generate(name, padding, device, launches, monkeypatch):
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
    fused = {"_write_triton", "_follow_triton"}
    if name in {**LEAN, **MIXTURES}:
        mlp = {"mixture_triton"} if name in MIXTURES else {"gated_triton"}
        mlp |= {"gated_triton"} if name == "qwen2_moe" else set()
        fused = {"place_heads_triton", "add_norm_triton", "_follow_triton", *mlp}
    # What lies in place is not moved on a CPU.
    assert set(launches) - {"_move_triton"} == {"tree_attention_triton", *fused}


WARPED = {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.02}


@pytest.mark.parametrize(
    ("widths", "settings"),
    [*in_full(pytest.param((2, 1), {}, marks=pytest.mark.smoke), ((1, 1, 1), {}), ((1, 1, 1), WARPED), (None, {}))],
    ids=str,
)
def test_samples(widths, settings, device, launches, monkeypatch):
    """Of drawn drafts, with warpers of the draft's logits and of the target's; or a draw at every node of a tree."""
    model = tiny_llama(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1).to(device)
    inputs = {name: values.to(device) for name, values in prompts(2).items()}

    def run(choice, text):
        monkeypatch.setattr(_triton, "CHOICE", choice)
        # Those of the other choice.
        forget_graphs(model)
        torch.manual_seed(0)
        drafter = sampled_speculator(3, widths=widths) if widths else scripted_for(text, prompts(2), tree="random")
        return model.generate(**inputs, assistant=drafter, do_sample=True, max_new_tokens=4, **settings).cpu()

    text = run("torch", model.generate(**inputs, do_sample=False, max_new_tokens=4).cpu())
    assert not launches
    assert torch.equal(run("triton", text), text)
    expected = {"_reject_triton"} if widths else {"_follow_triton", "_sample_triton"}
    assert expected | ({"warped_triton"} if settings else set()) <= set(launches)
    assert widths or "_reject_triton" not in launches
