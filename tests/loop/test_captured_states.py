"""Hidden states between the layers, and before and after the final norm, are those of their forward alone."""

from __future__ import annotations

import pytest
import torch

from hf_specdec import CandidateGenerator, DraftTree, UnsupportedModelError
from hf_specdec.target.states import captured_states
from hf_specdec.target_facts import decoder_layers
from tests.helpers.families import TOKENS, assert_boundaries, outputs_and_states
from tests.helpers.images import MODELS, build, image_inputs
from tests.helpers.levels import in_full
from tests.helpers.models import prompts, tiny_llama
from tests.helpers.threads import in_threads


FIRST, *OTHERS = MODELS


@pytest.mark.parametrize("make", [FIRST, *in_full(*OTHERS)])
def test_multimodal_models(make):
    """A state that is added to the stream between two layers is part of the next one's input."""
    model, inputs = build(make), image_inputs(make)
    assert_boundaries(model, input_ids=TOKENS.clamp(max=59))
    entered = []
    handle = decoder_layers(model)[1].register_forward_pre_hook(
        lambda module, args, kwargs: entered.append((*args, *kwargs.values())[0]), with_kwargs=True
    )
    _, states = outputs_and_states(model, (1,), **inputs)
    handle.remove()
    assert torch.equal(states[1], entered[0])
    assert states[1].shape[1] == inputs["input_ids"].shape[1]


def test_each_forward_replaces_the_states_unless_they_are_joined(model):
    tokens, keys = prompts(2, length=7, padding=False)["input_ids"], (0, 2, "last")
    for joined in (False, True):
        with captured_states(model, keys, joined) as states, torch.no_grad():
            model(tokens[:, :4])
            first = dict(states)
            model(tokens[:, 4:])
            second = dict(states)
        assert set(second) == set(keys)
        for key in keys:
            assert [part[key].shape[1] for part in (first, second)] == [4, 3]
            expected = torch.cat([first[key], second[key]], dim=1) if joined else second[key]
            assert torch.equal(states[key], expected)
    assert outputs_and_states(model, (), **prompts(2))[1] == {}


def test_other_threads_are_neither_seen_nor_disturbed():
    """Torch lists the hooks of a module, and asks later, one by one, whether they take keyword arguments."""
    model = tiny_llama()
    with captured_states(model, (0, 1, "last"), joined=True) as states:
        in_threads(lambda: model(**prompts(1)))
        # As while they are being taken back.
        decoder_layers(model)[0]._forward_pre_hooks_with_kwargs.clear()
        in_threads(lambda: model(**prompts(1)))
    assert states == {}
    with pytest.raises(ZeroDivisionError), captured_states(model, (0, 1, 2, "last"), joined=True):
        raise ZeroDivisionError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_stock_protocol_hands_over_the_same_states(model):
    """States from transformers' tuple, which lacks what enters the final norm."""

    class Reader(CandidateGenerator):
        def __init__(self, *keys):
            super().__init__()
            self.target_hidden_states = keys

        def prefill(self, prompt):
            self.states = prompt.hidden_states

        def propose(self, step):
            return DraftTree.empty(1)

    tokens = torch.cat([prompts(1)["input_ids"], torch.tensor([[3]])], dim=1)
    reader = Reader(0, 1, "last")
    output, states = outputs_and_states(model, reader.target_hidden_states, **prompts(1))
    reader.get_candidates(tokens, model_outputs=output)
    assert reader.states.keys() == states.keys()
    assert all(torch.equal(reader.states[key], states[key]) for key in states)
    with pytest.raises(UnsupportedModelError, match="what enters the target's final norm"):
        Reader(1, 2).get_candidates(tokens, model_outputs=output)
