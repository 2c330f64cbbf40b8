"""What calls have found of a model is found anew once the model is another, and does not keep it alive."""

from __future__ import annotations

import gc
from copy import deepcopy
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from hf_specdec import forget_speculators
from hf_specdec.kernels.products import OwnForward
from hf_specdec.layers.plan import is_hooked
from hf_specdec.modules import kept_for
from hf_specdec.target.lean import has_lean_forward
from tests.helpers.models import prompts, tiny_llama, tiny_mistral


CHANGES = {
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: None),
    "a hook in front": lambda model: model.lm_head.register_forward_pre_hook(lambda module, args: None),
    "a forward": lambda model: setattr(model.model.layers[1], "forward", lambda *args, **kwargs: None),
    "compiled code": lambda model: setattr(model.model.norm, "_compiled_call_impl", len),
    "a weight": lambda model: setattr(model.lm_head, "weight", nn.Parameter(model.lm_head.weight.detach().clone())),
    "a layer": lambda model: setattr(model.model.layers, "0", deepcopy(model.model.layers[0])),
    "a wrapper": lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head)),
    "vocabulary": lambda model: model.resize_token_embeddings(len(model.lm_head.weight) + 1),
    "dtype": lambda model: model.to(torch.bfloat16),
    "mode": lambda model: model.model.layers[1].self_attn.train(),
    "frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "memory": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
    "a sparse part": lambda model: model.model.register_buffer("links", torch.eye(3).to_sparse()),
    "a number": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
    "settings": lambda model: setattr(model.config, "rope_parameters", dict(model.config.rope_parameters)),
    "attention": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen(change):
    model, other = tiny_llama(), tiny_llama()
    kept, kept_with_other = kept_for(model), kept_for(other, model)
    assert kept_for(model) is kept
    assert kept_for(other, model) is kept_with_other
    CHANGES[change](model)
    assert kept_for(model) is not kept
    assert kept_for(other, model) is not kept_with_other


def test_frequencies_that_change_without_a_trace_are_read_again():
    model, prompt = tiny_llama(), torch.arange(2, 22)[None]
    for _ in range(2):
        ours, plain = (
            model.generate(prompt, max_new_tokens=24, do_sample=False, spec_method=method)
            for method in ("ngram", "off")
        )
        assert ours.tolist() == plain.tolist()
        model.model.rotary_emb.inv_freq.data.mul_(0.5)


def test_autocast_is_seen():
    model = tiny_llama()
    kept = kept_for(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kept_for(model) is not kept


def test_what_is_found_among_hooks_of_another_call_is_not_kept():
    """Beginning calls find what they can do while other threads read prompts, with hooks in the model's modules."""
    model, hooks = tiny_llama(), []

    def is_beside_others(model):
        hooks.append(model.model.norm.register_forward_hook(lambda module, args, output: None))
        return is_hooked(model.model.norm)

    kept = kept_for(model)
    assert kept[is_beside_others]
    assert is_beside_others not in kept
    hooks.pop().remove()
    assert is_beside_others not in kept_for(model)


def test_forwards_of_this_package_are_no_change():
    model = tiny_llama()
    kept = kept_for(model)
    model.lm_head.forward = OwnForward(model.lm_head)
    assert kept_for(model) is kept


def test_hooks_of_all_modules_run():
    model = tiny_llama()
    assert kept_for(model)[has_lean_forward]
    hook = register_module_forward_hook(lambda module, args, output: None)
    try:
        assert not kept_for(model)[has_lean_forward]
    finally:
        hook.remove()
    assert kept_for(model)[has_lean_forward]


def test_another_window_is_seen():
    model = tiny_mistral(sliding_window=8)
    for window in (8, 3, None):
        model.config.sliding_window = window
        call = {**prompts(2, length=16), "max_new_tokens": 12, "do_sample": False}
        plain = model.generate(**call, spec_method="off")
        assert torch.equal(model.generate(**call, spec_method="ngram"), plain)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traced_parts_run():
    """Their classes have no forward to look at."""
    model, call = tiny_llama(), {**prompts(2), "max_new_tokens": 8, "do_sample": False}
    plain = model.generate(**call, spec_method="off")
    model.lm_head = torch.jit.trace(deepcopy(model.lm_head), torch.zeros(1, 1, model.config.hidden_size))
    assert torch.equal(model.generate(**call, spec_method="ngram"), plain)


def test_calls_keep_no_model_alive():
    model = tiny_llama()
    model.generate(**prompts(1), max_new_tokens=4, do_sample=False, assistant=tiny_llama())
    kept = kept_for(model)
    assert kept
    model = ref(model)
    gc.collect()
    assert model() is None


def test_parts_that_were_replaced_can_be_freed():
    model = tiny_llama()
    model.generate(**prompts(1), max_new_tokens=4, do_sample=False, spec_method="ngram")
    head = ref(model.lm_head)
    model.lm_head = deepcopy(model.lm_head)
    forget_speculators(model)
    gc.collect()
    assert head() is None
