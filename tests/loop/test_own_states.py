"""Layers that keep their recurrent states elsewhere than in a cache: during a call they are in it."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from hf_specdec import SpecConfigError, UnsupportedModelError, generate_many
from hf_specdec.target import check
from hf_specdec.target.parts.own_states import own_layers
from tests.helpers.architectures import tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.levels import full, split
from tests.helpers.scripted import scripted_speculator
from tests.helpers.threads import in_threads


NAMES = ["recurrent_gemma", "rwkv", "xlstm", "minimax"]
NEW_TOKENS = 12
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    made = {name: tiny_model(name) for name in NAMES}
    # Means of earlier values count beside the newest one.
    with torch.no_grad():
        for block in made["rwkv"].rwkv.blocks:
            block.attention.time_first.sub_(1)
            block.attention.time_decay.sub_(2)
        for block in made["xlstm"].backbone.blocks:
            for gate in (block.mlstm_layer.igate_preact, block.mlstm_layer.fgate_preact):
                gate.weight.normal_(std=0.3)
                gate.bias.normal_()
    return made


def tokens(*shape: int, seed: int = 0) -> torch.LongTensor:
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))


def speculate(model, prompt, **script):
    """An output whose text is that of plain generation."""
    expected = model.generate(prompt, **GREEDY)
    script = scripted_speculator(expected, [0] * len(prompt), 99, **{"num_speculative_tokens": 3, **script})
    output = model.generate(prompt, assistant=script, **GREEDY, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert output.speculative.num_accepted_tokens > 0
    return output


def parts_of(state) -> list[torch.Tensor]:
    """All tensors of a cache of a model's own class."""
    if isinstance(state, list):
        return state
    if hasattr(state, "rnn_state"):
        return [part for parts in state.rnn_state.values() for part in parts]
    slots = [part for layer in state.layers if layer.is_initialized for part in (layer.keys, layer.values)]
    return [*filter(torch.is_tensor, state.linear_cache), *slots]


@pytest.mark.parametrize("name", split(NAMES, ["xlstm", "rwkv"]))
def test_texts_and_returned_states(models, name):
    """Drafts are chains and trees; RWKV's model mixes the rows of a batch."""
    model, prompts = models[name], tokens(1 if name == "rwkv" else 3, 9)
    theirs = model.generate(prompts, **GREEDY, return_dict_in_generate=True)[CACHE]
    for script in ({}, {"tree": "random", "num_speculative_tokens": 6}):
        ours = speculate(model, prompts, **script)[CACHE]
        assert type(ours) is type(theirs)
        if name != "recurrent_gemma":
            for own, other in zip(parts_of(ours), parts_of(theirs), strict=True):
                torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4 * other.abs().max().item())


@pytest.mark.parametrize("name", split(NAMES, ["rwkv"]))
def test_requests_that_join_are_each_as_alone(models, name, monkeypatch):
    # Some join before the first of them has been checked, and some of equal length are read together.
    monkeypatch.setattr(check, "_checked", {})
    prompts = [tokens(1, length, seed=length) for length in (5, 9, 3, 7, 7)]
    requests = [{"input_ids": ids[0], "max_new_tokens": 4 + 3 * (number % 4)} for number, ids in enumerate(prompts)]
    results = generate_many(models[name], requests, 3, in_order=True, spec_method="ngram", do_sample=False)
    for result, ids, request in zip(results, prompts, requests):
        plain = models[name].generate(ids, do_sample=False, max_new_tokens=request["max_new_tokens"])
        assert result.tokens == plain[0, ids.shape[1] :].tolist()
    assert check._checked


def test_calls_that_plain_generation_gets_wrong_are_refused(models):
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    padded = {"input_ids": tokens(2, 9) * mask, "attention_mask": mask}
    window = tiny_model("minimax", sliding_window=8)
    for model, call, words in (
        (models["minimax"], padded, "loses the mask of padding"),
        (window, {"inputs": tokens(1, 4)}, "has a sliding window"),
        (models["rwkv"], {"inputs": tokens(2, 6)}, "mixes the rows of a batch, and this call has 2"),
    ):
        with pytest.raises(UnsupportedModelError, match=words):
            model.generate(**call, spec_method="ngram", **GREEDY)


def test_padding_and_chunks_of_xlstm(models):
    """It has no mask to keep padding out of its states, and cuts long prompts by itself."""
    model, mask = models["xlstm"], torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [0] * 2 + [1] * 7])
    padded = {"input_ids": tokens(3, 9) * mask, "attention_mask": mask}
    expected = model.generate(**padded, **GREEDY)
    script = scripted_speculator(expected, [0, 4, 2], 99, num_speculative_tokens=3)
    output = model.generate(**padded, assistant=script, **GREEDY, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert output.speculative.num_accepted_tokens > NEW_TOKENS
    whole = model.generate(tokens(2, 21), **GREEDY)
    model.config.max_inference_chunksize = 4
    try:
        assert speculate(model, tokens(2, 21)).sequences.tolist() == whole.tolist()
    finally:
        model.config.max_inference_chunksize = 16384


def test_caches_of_earlier_calls(models):
    """Without the states after them they are refused; the own one is continued."""
    text = tokens(1, 6)
    with pytest.raises(SpecConfigError, match="`state`: a DynamicCache or a StaticCache can be continued, got list"):
        models["rwkv"].generate(text, state=models["rwkv"](text).state, spec_method="ngram", **GREEDY)
    model = models["recurrent_gemma"]
    first, expected = tokens(2, 9), model.generate(tokens(2, 9), max_new_tokens=2 * NEW_TOKENS, do_sample=False)
    cache = DynamicCache(config=model.config)
    model.generate(first, **{CACHE: cache}, **GREEDY)
    with pytest.raises(UnsupportedModelError, match="and not the recurrent states after them"):
        model.generate(expected[:, :30], **{CACHE: cache}, spec_method="ngram", **GREEDY)
    output = speculate(model, first)
    script = scripted_speculator(expected, [0, 0], 99)
    output = model.generate(output.sequences, **{CACHE: output[CACHE]}, assistant=script, **GREEDY)
    assert output.tolist() == expected.tolist()


def test_nothing_is_kept_in_the_modules(models):
    model = models["recurrent_gemma"]
    layers, script = own_layers(model), scripted_speculator(model.generate(tokens(1, 9), **GREEDY), [0], 99)
    assert list(layers.values()) == [0, 1]
    before = [(layer.conv1d_state, layer.rg_lru.recurrent_states) for layer in layers]
    model.generate(tokens(1, 9), assistant=script, **GREEDY)
    for layer, (inputs, state) in zip(layers, before):
        assert layer.conv1d_state is inputs
        assert layer.rg_lru.recurrent_states is state
        assert vars(layer).keys().isdisjoint({"forward", "conv_1d", "rg_lru"})
        assert "_rnn_scan" not in vars(layer.rg_lru)


@full
@pytest.mark.parametrize("name", ["recurrent_gemma", "rwkv"])
def test_calls_of_two_threads(models, name):
    model, prompts = models[name], [tokens(1, 9), tokens(1, 7, seed=1)]
    expected = [model.generate(prompt, **GREEDY) for prompt in prompts]

    def call(prompt, text):
        script = scripted_speculator(text, [0], 99)
        return [model.generate(prompt, assistant=script, **GREEDY).tolist() for _ in range(3)]

    found = in_threads(*(partial(call, *pair) for pair in zip(prompts, expected)))
    assert found == [[text.tolist()] * 3 for text in expected]


@pytest.mark.parametrize("name", split(NAMES, ["recurrent_gemma"]))
def test_draft_models(models, name):
    """One is always right, the other one sometimes."""
    prompt, other = tokens(1, 9), deepcopy(models[name])
    with torch.no_grad():
        other.get_output_embeddings().weight[3:40].mul_(1.5)
    for draft_model in (models[name], other):
        output = models[name].generate(prompt, assistant=draft_model, return_dict_in_generate=True, **GREEDY)
        assert output.sequences.tolist() == models[name].generate(prompt, **GREEDY).tolist()
        accepted, drafted = output.speculative.num_accepted_tokens, output.speculative.num_draft_tokens
        assert accepted == drafted > 0 if draft_model is models[name] else 0 < accepted < drafted


@full
def test_parts_with_a_forward_of_their_own_are_refused(models):
    for name, part in zip(NAMES, ("rg_lru", "attention", "mlstm_layer")):
        module = getattr(next(iter(own_layers(models[name]))), part)
        module.forward = lambda *args, **kwargs: None
        try:
            with pytest.raises(UnsupportedModelError, match="cannot be told the recurrent state"):
                models[name].generate(tokens(1, 4), spec_method="ngram", **GREEDY)
        finally:
            del module.forward
