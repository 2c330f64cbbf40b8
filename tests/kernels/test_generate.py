"""`generate()` through the kernels: the same text as through the references."""

from __future__ import annotations

import pytest
import torch

from hf_specdec.decoding.graphs import forget_graphs
from hf_specdec.kernels import _triton, acceptance, sampling, warpers
from tests.helpers.models import prompts, scripted_for, tiny_llama
from tests.helpers.sampled import sampled_speculator
from tests.kernels.conftest import watched


@pytest.fixture
def launches(monkeypatch):
    """The names of the kernels of acceptance that were launched."""
    return watched(
        monkeypatch, (acceptance, "_follow_triton"), (acceptance, "_reject_triton"), (sampling, "_sample_triton")
    )


def small_llama():
    """One group of heads in one layer: the interpreter takes its time for each program."""
    return tiny_llama(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture
def generate(device, monkeypatch):
    """Generates on the device with kernels ("triton") or references ("torch")."""
    model = small_llama().to(device)
    inputs = {name: values.to(device) for name, values in prompts(2).items()}

    def run(choice, drafter, do_sample, **settings):
        monkeypatch.setattr(_triton, "CHOICE", choice)
        # Those of the other choice.
        forget_graphs(model)
        torch.manual_seed(0)
        return model.generate(**inputs, assistant=drafter, do_sample=do_sample, max_new_tokens=5, **settings).cpu()

    return run


def scripted_tree(text):
    return scripted_for(text, prompts(2), tree="random")


@pytest.mark.smoke
def test_greedy_trees(generate, launches):
    text = small_llama().generate(**prompts(2), do_sample=False, max_new_tokens=5)
    assert torch.equal(generate("triton", scripted_tree(text), do_sample=False), text)
    assert set(launches) == {"_follow_triton"}


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 1)], ids=["chain", "tree"])
def test_drawn_drafts(widths, generate, launches):
    drafter = sampled_speculator(3, widths=widths)
    text = generate("torch", drafter, do_sample=True)
    assert not launches
    assert torch.equal(generate("triton", drafter, do_sample=True), text)
    assert "_reject_triton" in launches


@pytest.mark.smoke
def test_draws_at_every_node(generate, launches):
    unlikely = small_llama().generate(**prompts(2), do_sample=False, max_new_tokens=5)
    text = generate("torch", scripted_tree(unlikely), do_sample=True)
    assert not launches
    assert torch.equal(generate("triton", scripted_tree(text), do_sample=True), text)
    assert set(launches) == {"_follow_triton", "_sample_triton"}


def test_drawn_drafts_after_all_warpers(generate, monkeypatch):
    """Of the draft's logits and of the target's."""
    launches = watched(monkeypatch, (warpers, "_warped_triton"))
    drafter, settings = sampled_speculator(3), {"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.02}
    text = generate("torch", drafter, do_sample=True, **settings)
    assert not launches
    assert torch.equal(generate("triton", drafter, do_sample=True, **settings), text)
    assert launches
