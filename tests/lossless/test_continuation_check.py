"""The check that a model goes on after its prompt as in plain generation: what cannot be followed is refused, and says
nothing before.
"""

from __future__ import annotations

from copy import deepcopy
from functools import wraps

import pytest
import torch
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.generation.streamers import BaseStreamer

from hf_specdec import UnsupportedModelError, load_speculator
from hf_specdec.many.engine import Engine
from hf_specdec.many.requests import RequestReader
from hf_specdec.target import check
from hf_specdec.target.prompts import Continuation
from tests.helpers.architectures import tiny_model
from tests.helpers.arrivals import prompt, said_alone
from tests.helpers.caches import CACHE
from tests.helpers.families import assert_drafts_change_nothing
from tests.helpers.images import text_model
from tests.helpers.levels import full, in_full
from tests.helpers.models import TINY, VOCAB_SIZE, prompts, scripted_for, tiny_gpt2, tiny_llama, tiny_mistral
from tests.helpers.scripted import scripted_speculator


pytestmark = pytest.mark.usefixtures("unchecked")
SETTINGS = {"do_sample": False, "max_new_tokens": 20}


def of_class(model_class, **attributes) -> LlamaForCausalLM:
    """The tiny Llama as a class of a user's own."""
    model = model_class(tiny_llama().config).eval()
    model.load_state_dict(tiny_llama().state_dict())
    model.generation_config.pad_token_id = 0
    vars(model).update(attributes)
    return model


class Preparing(LlamaForCausalLM):
    """Prepares inputs with code of a user's own, as the test says."""

    change = staticmethod(lambda model, inputs: inputs)

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return self.change(self, super().prepare_inputs_for_generation(input_ids, **kwargs))


def doubled_positions(model, inputs):
    return {**inputs, "position_ids": inputs["position_ids"] * 2}


def other_ids_later(model, inputs):
    is_late = int(inputs["position_ids"].max()) > 20
    return {**inputs, "input_ids": (inputs["input_ids"] + 1) % VOCAB_SIZE} if is_late else inputs


def length_for_the_forward(model, inputs):
    model.length = int(inputs["position_ids"].max())
    return inputs


def embeddings(model, inputs):
    return {**inputs, "input_ids": None, "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}


def test_preparation_of_inputs_by_a_user():
    model = of_class(Preparing)
    for batch_size in (1, 3):
        assert_drafts_change_nothing(model, prompts(batch_size), **SETTINGS)
    refused = {
        doubled_positions: "2 tokens after the prompts.*`position_ids`",
        other_ids_later: r"1\d tokens after the prompts.*`input_ids`",
        length_for_the_forward: "tokens after the prompts.*attributes of the model",
        embeddings: "",
    }
    call = {**prompts(1), "do_sample": False, "max_new_tokens": 30, "spec_method": "ngram"}
    for change, what in refused.items():
        with pytest.raises(UnsupportedModelError, match=f"Preparing.*prepare.*{what}"):
            of_class(Preparing, change=change).generate(**call)

    class Looping(LlamaForCausalLM):
        def _sample(self, input_ids, **kwargs):
            return input_ids

    with pytest.raises(UnsupportedModelError, match="Looping has a decoding loop of its own"):
        of_class(Looping).generate(**call)


def put_late_forward(module, change: str) -> None:
    """A forward of the module, as a user may write it, that changes what it returns later than at its first step."""
    original, num_calls, first = type(module).forward, 0, None

    @wraps(original)
    def forward(*args, **kwargs):
        nonlocal num_calls, first
        output = original(module, *args, **kwargs)
        length, num_calls = kwargs.get(CACHE).get_seq_length(), num_calls + 1
        values = next(iter(output.values())) if isinstance(output, dict) else output
        width = (args[0] if args else kwargs["input_ids"]).shape[1]
        first = length if first is None else first
        changes = {"second step": first + 1 < length, "late": length > first + 12, "single tokens": width == 1}
        if {**changes, "later calls": num_calls > 3, "nothing": False}[change]:
            values[..., ::2] *= -1
        return output

    module.forward = forward


PLACES = ("class", "model", "decoder", "layer")


def late(place: str, change: str):
    model = deepcopy(tiny_llama())
    part = {"class": model, "model": model, "decoder": model.model, "layer": model.model.layers[1]}[place]
    put_late_forward(part, change)
    if place in ("class", "layer"):
        # A class of the user's own.
        forward = vars(part).pop("forward")
        methods = {"forward": lambda self, *args, **kwargs: forward(*args, **kwargs)}
        part.__class__ = type("Own", (type(part),), methods)
    return model


def forwards_of(model, **call):
    """The output of a call, and how many tokens of a row each of its forwards reads."""
    widths = []

    def count(module, args, kwargs):
        widths.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    output = model.generate(**call, return_dict_in_generate=True)
    hook.remove()
    return output, widths


@pytest.mark.parametrize("change", ["late", *in_full("second step", "single tokens", "later calls")])
def test_forwards_of_users_that_differ_later_are_refused(change):
    inputs = prompts(2)
    how = scripted_for(tiny_llama().generate(**inputs, **SETTINGS), inputs)
    for place in PLACES:
        with pytest.raises(UnsupportedModelError, match="goes on after the prompt in a way"):
            late(place, change).generate(**inputs, **SETTINGS, assistant=how)
        assert not check._checked


@pytest.mark.parametrize("place", ["class", *in_full("model", "decoder", "layer")])
def test_forwards_of_users_that_can_be_followed(place):
    for dtype in (torch.float32, torch.bfloat16):
        check._checked.clear()
        model, inputs = late(place, "nothing").to(dtype), prompts(3)
        plain = model.generate(**inputs, **SETTINGS)
        # One forward for each token that is read after the prompts, and one over all of them.
        for extra in (SETTINGS["max_new_tokens"], 0):
            output, widths = forwards_of(model, **inputs, **SETTINGS, assistant=scripted_for(plain, inputs))
            assert dtype != torch.float32 or torch.equal(output.sequences, plain)
            if place != "model":
                assert len(widths) == output.speculative.num_target_forwards + extra


@full
def test_longer_calls_and_other_forwards_are_checked_again():
    inputs = prompts(1)
    how = scripted_for(tiny_llama().generate(**inputs, **SETTINGS), inputs)
    model = late("class", "late")
    model.generate(**inputs, do_sample=False, max_new_tokens=4, assistant=how)
    with pytest.raises(UnsupportedModelError):
        model.generate(**inputs, **SETTINGS, assistant=how)
    model = late("model", "nothing")
    model.generate(**inputs, **SETTINGS, assistant=how)
    put_late_forward(model, "late")
    with pytest.raises(UnsupportedModelError):
        model.generate(**inputs, **SETTINGS, assistant=how)


@full
def test_once_for_a_model_and_once_with_padding():
    model = tiny_mistral()
    # One new token needs no check.
    calls = [(prompts(1), 1), *((inputs, 20) for inputs in (prompts(1), prompts(2, padding=False), prompts(2)))]
    for (inputs, new_tokens), extra in zip([*calls, calls[-1]], (0, 2, 0, 2, 0)):
        call = {**inputs, "do_sample": False, "max_new_tokens": new_tokens}
        output, widths = forwards_of(model, **call, spec_method="ngram")
        assert len(widths) == output.speculative.num_target_forwards + extra


def test_wrong_positions_are_refused(monkeypatch):
    """Those that `generate()` prepares, and that these models do not take."""
    read = Continuation.read.__func__

    def count_tokens(cls, *args):
        found = read(cls, *args)
        found.offsets, found.counter = [0] * len(found.starts), None
        return found

    monkeypatch.setattr(Continuation, "read", classmethod(count_tokens))
    # Without padding the positions of this one are right, and with padding it is checked again.
    model, inputs = text_model("exaone4_5"), prompts(2, length=9, padding=False)
    plain = model.generate(**inputs, **SETTINGS)
    assert model.generate(**inputs, **SETTINGS, spec_method="ngram").tolist() == plain.tolist()
    for name in ("paligemma", "exaone4_5", "hyperclovax_vision_v2", "kosmos-2.5"):
        for batch_size in {"paligemma": (1,), "kosmos-2.5": (1, 2)}.get(name, (3,)):
            with pytest.raises(UnsupportedModelError, match=r"differ from those of plain generation by \d+\.\d% of"):
                text_model(name).generate(**prompts(batch_size, length=9), **SETTINGS, spec_method="ngram")


class Shifty(LlamaForCausalLM):
    """Reads a token alone in another way than among others."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        if input_ids.shape[1] == 1:
            position_ids = position_ids + 3
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


def test_nothing_of_a_wrong_text_is_streamed(monkeypatch):
    model, heard, inputs = of_class(Shifty), [], prompts(1)
    methods = {"put": lambda streamer, value: heard.extend(value.flatten().tolist()), "end": lambda streamer: None}
    streamer = type("Heard", (BaseStreamer,), methods)()
    plain = model.generate(**inputs, **SETTINGS)
    how = scripted_for(plain, inputs, accuracy=0.8)
    with pytest.raises(UnsupportedModelError, match="HF_SPECDEC_CHECK=0"):
        model.generate(**inputs, **SETTINGS, streamer=streamer, assistant=how)
    assert heard == inputs["input_ids"][0].tolist()
    assert not model._forward_pre_hooks
    monkeypatch.setenv("HF_SPECDEC_CHECK", "0")
    output, widths = forwards_of(model, **inputs, **SETTINGS, assistant=how)
    assert output.sequences.tolist() != plain.tolist()
    assert 1 not in widths[:2]


@pytest.mark.parametrize("name", ["qwen3_next", *in_full("llama", "moshi", "deepseek_v32")])
def test_neither_cache_nor_random_numbers_show_a_check(name, monkeypatch):
    model, inputs = tiny_model(name), prompts(2)
    outputs, drawn = [], []
    for value in ("1", "0"):
        monkeypatch.setenv("HF_SPECDEC_CHECK", value)
        outputs.append(model.generate(**inputs, **SETTINGS, return_dict_in_generate=True, spec_method="ngram"))
        check._checked.clear()
        torch.manual_seed(5)
        text = model.generate(**inputs, do_sample=True, max_new_tokens=8, spec_method="ngram")
        drawn.append((text.tolist(), torch.rand(3).tolist()))
    assert drawn[0] == drawn[1]
    first, second = outputs
    assert first.sequences.tolist() == second.sequences.tolist()
    for layer, other in zip(first[CACHE].layers, second[CACHE].layers):
        if getattr(layer, "keys", None) is not None:
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)


@full
def test_rounding_and_dropout_are_no_difference():
    for dtype in (torch.bfloat16, torch.float16):
        models = tiny_llama(), tiny_mistral(), tiny_gpt2(), tiny_model("qwen3_moe")
        for model in models:
            text = prompts(1, length=40)["input_ids"]
            how = scripted_speculator(text, [0], VOCAB_SIZE, num_speculative_tokens=6)
            model.to(dtype).generate(**prompts(1), do_sample=False, max_new_tokens=4, assistant=how)
        assert set(check._checked) == set(models)
        check._checked.clear()
    model = MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=2, attention_dropout=0.5)).train()
    model.generate(**prompts(1), **SETTINGS, spec_method="ngram")
    assert not check._checked


def test_a_request_that_differs_fails_alone(monkeypatch):
    """Those that came with it are read again by themselves, and those that are decoded never notice."""
    model, spoilt = tiny_llama(), []
    requests = [prompt(index) for index in range(4)]
    texts = [said_alone(model, tokens) for tokens in requests]
    assert sum(text[0] == texts[2][0] for text in texts) == 1
    read = check._plainly_read

    def spoiled(target, continuation, tokens, count):
        nodes, logits = read(target, continuation, tokens, count)
        if texts[2][0] in tokens.tolist():
            row = tokens.tolist().index(texts[2][0])
            logits[row] = -logits[row]
            spoilt.append(len(tokens))
        return nodes, logits

    class Forgetful(dict):
        def setdefault(self, key, default):
            return default

    monkeypatch.setattr(check, "_checked", Forgetful())
    monkeypatch.setattr(check, "_plainly_read", spoiled)
    reader = RequestReader(model, {"max_new_tokens": 12, "do_sample": False}, num_places=4)
    engine = Engine(load_speculator(model, "ngram"), reader)
    rows = [reader.row(index, tokens, {}) for index, tokens in enumerate(requests)]
    for pair in (rows[:2], rows[2:]):
        for row in pair:
            engine.add(row)
        engine.step()
    while not engine.is_idle:
        engine.step()
    assert spoilt == [2, 1]
    assert isinstance(rows[2].error, UnsupportedModelError)
    assert [row.tokens for row in rows if row is not rows[2]] == [*texts[:2], texts[3]]
    assert not rows[2].tokens
