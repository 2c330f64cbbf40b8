"""What calls have found of a model is found anew once the model is another, and does not keep it alive."""

from __future__ import annotations

import gc
from copy import deepcopy
from weakref import ref

import pytest
import torch
from torch import nn

from hf_specdec.modules import kept_for
from tests.helpers.models import prompts, tiny_llama


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


def test_autocast_is_seen():
    model = tiny_llama()
    kept = kept_for(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kept_for(model) is not kept


def test_calls_keep_no_model_alive():
    model = tiny_llama()
    model.generate(**prompts(1), max_new_tokens=4, do_sample=False, assistant=tiny_llama())
    kept = kept_for(model)
    assert kept
    model = ref(model)
    gc.collect()
    assert model() is None
