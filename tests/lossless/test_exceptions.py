"""Errors of the user's own objects in the middle of a call come out as they are, and leave nothing behind."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec import demo, record
from tests.helpers.models import prompts, tiny_llama


SETTINGS = {"do_sample": False, "max_new_tokens": 16}
METHODS = {
    "ngram": {"spec_method": "ngram"},
    "auto length": {"spec_method": "ngram", "num_speculative_tokens": "auto"},
    "suffix": {"spec_method": "suffix"},
    "draft_model": {"spec_method": "draft_model", "spec_model": demo.drafter_path("draft_model")},
    "eagle3": {"spec_method": "eagle3", "spec_model": demo.drafter_path("eagle3")},
    "suffix+eagle3": {"spec_method": "suffix+eagle3", "spec_model": demo.drafter_path("eagle3")},
}


# Their drafts do not depend on earlier calls.
WITHOUT_MEMORY = ("ngram", "draft_model", "eagle3")


class Mine(Exception):
    """An error that this package cannot know."""


class Fails:
    """Raises at its n-th use."""

    def __init__(self, error, at):
        self.error, self.left = error, at

    def use(self):
        self.left -= 1
        if self.left == 0:
            raise self.error


class Processor(Fails, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.use()
        return scores


class Criterion(Fails, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.use()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Streamer(Fails, BaseStreamer):
    def put(self, value):
        self.use()

    def end(self):
        self.left = 1
        self.use()


def arguments_of(kind, error, at):
    if kind == "processor":
        return {"logits_processor": LogitsProcessorList([Processor(error, at)])}
    if kind == "criterion":
        return {"stopping_criteria": StoppingCriteriaList([Criterion(error, at)])}
    return {"streamer": Streamer(error, at)}


@pytest.fixture(scope="module")
def target():
    return demo.load_target()


def state_of(model):
    """All that a call could have left on a model."""
    hooks = [
        (name, len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module)))
        for name, module in model.named_modules()
    ]
    tensors = [(name, id(tensor), tensor._version) for name, tensor in model.named_parameters()]
    return hooks, tensors, model.config.to_dict(), model.generation_config.to_dict(), model.training


# Criteria that raise are tried with all drafters in `tests/lossless/test_contract.py`.
@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("ngram", "processor"),
        ("auto length", "criterion"),
        ("suffix", "streamer"),
        ("draft_model", "processor"),
        ("eagle3", "streamer"),
        ("suffix+eagle3", "processor"),
    ],
)
def test_the_users_error_comes_out_and_the_next_call_works(target, method, kind):
    inputs = prompts(1, padding=False)
    plain = target.generate(**inputs, **SETTINGS)
    arguments = {**inputs, **SETTINGS, **METHODS[method]}
    with record(trace=True) as first:
        assert torch.equal(target.generate(**arguments), plain)
    before = state_of(target)
    for at, error in ((1, Mine("first")), (2, KeyboardInterrupt()), (5, ValueError("later"))):
        with pytest.raises(type(error)) as caught:
            target.generate(**arguments, **arguments_of(kind, error, at))
        assert caught.value is error
        assert state_of(target) == before
        with record(trace=True) as made:
            assert torch.equal(target.generate(**arguments), plain)
        if method in WITHOUT_MEMORY:
            assert made.calls[0].cycles == first.calls[0].cycles


def test_in_a_batch_whose_rows_have_ended():
    model, inputs = tiny_llama(), prompts(3)
    settings = {**SETTINGS, "max_new_tokens": 30, "eos_token_id": [6, 15, 20]}
    plain = model.generate(**inputs, **settings)
    before = state_of(model)
    for at in (1, 2, 4):
        for kind in ("processor", "criterion"):
            error = Mine(at)
            with pytest.raises(Mine) as caught:
                model.generate(**inputs, **settings, spec_method="suffix", **arguments_of(kind, error, at))
            assert caught.value is error
            assert state_of(model) == before
    assert torch.equal(model.generate(**inputs, **settings, spec_method="suffix"), plain)
