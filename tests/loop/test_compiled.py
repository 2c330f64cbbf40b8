"""Targets and draft models that `torch.compile` has been applied to."""

from __future__ import annotations

from copy import deepcopy
from itertools import product

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from transformers import AutoModelForCausalLM

from hf_specdec import demo, generate_many
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.target.cache import SlotCache
from hf_specdec.target.graphs import call_graphs
from hf_specdec.target.lean import LeanModel, slot_model
from hf_specdec.target.uncompiled import Uncompiled, _set_aside
from tests.helpers.interruptions import interrupted_everywhere
from tests.helpers.levels import full, slow
from tests.helpers.methods import CHECKPOINTS, demo_inputs, demo_target, plain_text
from tests.helpers.models import tiny_llama
from tests.helpers.threads import in_threads


pytestmark = full

# Graphs may not break in it, so that nothing of this package is traced without being noticed.
WHOLE = {"backend": "eager", "fullgraph": True}

NEW_TOKENS = 16


def compile_forward(model, **how):
    model.forward = torch.compile(model.forward, **how)


def compile_layers(model, **how):
    for index, layer in enumerate(model.model.layers):
        layer.compile(**how)
        model.model.layers[index] = torch.compile(layer, **how)


def compile_class(model, **how):
    """As in remote code with a decorated forward."""

    class Compiled(type(model.model)):
        forward = torch.compile(type(model.model).forward, **how)

    model.model.__class__ = Compiled


WAYS = {
    "forward": compile_forward,
    "module": lambda model, **how: model.compile(**how),
    "layers": compile_layers,
    "class": compile_class,
    "twice": lambda model, **how: (compile_forward(model, **how), compile_forward(model, **how), model.compile(**how)),
}


def compiled(model, way, **how):
    torch._dynamo.reset()
    model = deepcopy(model)
    WAYS[way](model, **how)
    return model


def attributes(model) -> list[dict]:
    return [dict(vars(module)) for module in model.modules()]


@pytest.mark.parametrize(("way", "method"), [*product(WAYS, ["ngram"]), ("forward", "eagle3"), ("layers", "dflash")])
def test_targets(way, method):
    model = compiled(demo_target(), way, **WHOLE)
    before = attributes(model)
    settings = {"spec_method": method, "spec_model": CHECKPOINTS.get(method), "do_sample": False}
    settings["max_new_tokens"] = NEW_TOKENS
    assert torch.equal(model.generate(**demo_inputs(2), **settings), plain_text(2, NEW_TOKENS))
    tokens = demo_inputs(1)["input_ids"][0].tolist()
    outputs = list(generate_many(model, [tokens] * 2, **settings))
    expected = plain_text(1, NEW_TOKENS)[0, len(tokens) :].tolist()
    assert [output.tokens for output in outputs] == [expected] * 2
    assert attributes(model) == before
    wrapped = torch.compile(model, **WHOLE)
    assert torch.equal(wrapped.generate(**demo_inputs(2), **settings), plain_text(2, NEW_TOKENS))


@pytest.mark.parametrize("way", ["forward", "module", "layers", "class", "wrapped"])
def test_draft_models(way):
    draft = AutoModelForCausalLM.from_pretrained(demo.drafter_path("draft_model"))
    draft = torch.compile(draft, **WHOLE) if way == "wrapped" else compiled(draft, way, **WHOLE)
    before = attributes(draft)
    settings = {"assistant": draft, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    output = demo_target().generate(**demo_inputs(2), **settings, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain_text(2, NEW_TOKENS))
    assert output.speculative.num_accepted_tokens
    assert attributes(draft) == before


@slow
def test_inductor():
    model = compiled(demo_target(), "forward")
    plain = model.generate(**demo_inputs(1), max_new_tokens=4, do_sample=False)
    text = model.generate(**demo_inputs(1), spec_method="ngram", max_new_tokens=4, do_sample=False)
    assert torch.equal(text, plain)


def test_lean_layers_and_graphs_are_those_of_a_model_that_is_not_compiled():
    model = compiled(tiny_llama(), "forward", **WHOLE)
    model.model.layers[0].mlp.compile(**WHOLE)
    target = slot_model(model, SlotCache(4))
    assert type(target) is LeanModel
    assert "compiled" not in str(call_graphs(model))
    target.close()


def test_calls_share_what_is_set_aside():
    model = compiled(tiny_llama(), "module", **WHOLE)
    compile_forward(model, **WHOLE)
    before = attributes(model)
    first, second = Uncompiled(model), Uncompiled(model)
    first.close()
    first.close()
    assert "forward" not in vars(model)
    assert model._compiled_call_impl is None
    second.close()
    assert attributes(model) == before
    # At once, also while the error is kept.
    with pytest.raises(UnsupportedModelError):
        slot_model(model, SlotCache(4), states=(9,))
    assert attributes(model) == before
    uncompiled = Uncompiled(model)
    del uncompiled
    assert attributes(model) == before

    def run():
        for _ in range(100):
            uncompiled = Uncompiled(model)
            assert model._compiled_call_impl is None
            uncompiled.close()

    in_threads(*[run] * 4)
    assert attributes(model) == before
    # A forward that is set meanwhile stays.
    uncompiled = Uncompiled(model)
    model.forward = print
    uncompiled.close()
    assert model.forward is print


def test_requests_join_that_come_after_the_model_was_compiled():
    model = tiny_llama()
    prompt = torch.tensor([3, 4, 5])

    def requests():
        yield {"input_ids": prompt, "max_new_tokens": 30}
        yield {"input_ids": prompt, "max_new_tokens": 4}
        model.compile(**WHOLE)
        yield {"input_ids": prompt, "max_new_tokens": 8}

    outputs = list(generate_many(model, requests(), batch_size=2, spec_method="ngram"))
    assert [output.error for output in outputs] == [None] * 3
    assert not _set_aside


def test_copies_of_attributes_are_not_followed():
    """accelerate's hooks put a function around the forward that has all attributes of it."""
    model = compiled(tiny_llama(), "forward", **WHOLE)
    add_hook_to_module(model, ModelHook())
    before = attributes(model)
    uncompiled = Uncompiled(model)
    assert vars(model)["forward"] is before[0]["forward"]
    assert vars(model)["_old_forward"] == type(model).forward.__get__(model)
    uncompiled.close()
    assert attributes(model) == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interruptions_leave_a_model_compiled():
    model = compiled(tiny_llama(), "layers", **WHOLE)
    compile_forward(model, **WHOLE)
    before = attributes(model)
    places = []
    for place in interrupted_everywhere(lambda: Uncompiled(model).close(), "uncompiled.py"):
        # Not as one expression: what differs is too long to be shown.
        is_as_before = attributes(model) == before
        assert is_as_before, place
        places.append(place)
    assert len(places) > 20
    assert not _set_aside
