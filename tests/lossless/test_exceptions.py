"""Errors of a user's own objects come out of a call as they are, and no call leaves anything changed."""

import copy
from itertools import count

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec import load_speculator
from tests.helpers.levels import in_full
from tests.helpers.models import prompts, scripted_for, tiny_llama


CALL = {"do_sample": False, "max_new_tokens": 16}


class Mine(Exception):
    """An error that this package cannot know."""


def arguments_of(kind, error, at):
    """A processor, criterion or streamer that raises at its n-th use."""
    uses = count(1)

    def use(result=None):
        if next(uses) == at and error is not None:
            raise error
        return result

    def goes_on(input_ids, scores):
        return use(torch.zeros(len(input_ids)).bool())

    methods = {"put": lambda streamer, tokens: use(), "end": lambda streamer: None}
    return {
        "processor": {"logits_processor": LogitsProcessorList([lambda input_ids, scores: use(scores)])},
        "criterion": {"stopping_criteria": StoppingCriteriaList([goes_on])},
        "streamer": {"streamer": type("Streamer", (BaseStreamer,), methods)()},
    }[kind]


def state_of(model):
    """All that a call could have left on a model."""
    modules = [
        (dict(m._forward_hooks), dict(m._forward_pre_hooks), vars(m).get("forward"), sorted(vars(m)))
        for m in model.modules()
    ]
    attention = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    tensors = [(name, id(tensor), tensor._version) for name, tensor in model.named_parameters()]
    configs = copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict()))
    return modules, attention, tensors, configs, model.training


# Criteria that raise are tried with all methods in test_contract.py.
@pytest.mark.parametrize("drafter", ["captured_states", *in_full("draft_model")])
def test_nothing_is_left_changed_in_a_batch(drafter, monkeypatch):
    """Models, configs, the user's objects and tensors; some rows have ended before the error."""
    model, draft, inputs = tiny_llama(), tiny_llama(seed=1), prompts(3)
    config = GenerationConfig(**CALL, eos_token_id=[6, 15, 20], pad_token_id=0)
    call = {**inputs, "generation_config": config}
    plain = model.generate(**call)
    if drafter == "captured_states":
        speculator = scripted_for(plain, inputs)
        monkeypatch.setattr(speculator.generator_class, "target_hidden_states", ("last", 0))
    else:
        speculator = load_speculator(model, draft_model=draft)
    before = state_of(model), state_of(draft), copy.deepcopy(config.to_dict())
    tensors = {name: value.clone() for name, value in inputs.items()}
    for kind in ("processor", "criterion", "streamer"):
        for at, error in ((1, Mine()), (2, KeyboardInterrupt()), (4, Mine()), (1, None)):
            arguments = arguments_of(kind, error, at)
            if error is None:
                assert torch.equal(model.generate(**call, **arguments, assistant=speculator), plain)
            else:
                with pytest.raises(type(error)) as caught:
                    model.generate(**call, **arguments, assistant=speculator)
                assert caught.value is error
            assert kind == "streamer" or len(*arguments.values()) == 1
            assert before == (state_of(model), state_of(draft), config.to_dict())
            assert all(torch.equal(inputs[name], value) for name, value in tensors.items())
    assert torch.equal(model.generate(**call, assistant=speculator), plain)
