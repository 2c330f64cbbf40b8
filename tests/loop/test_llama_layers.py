"""Layers of the Llama family: transformers' own numbers, in whatever form their parts are."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_specdec.decoding.attention import NAME, VerificationForward, running
from hf_specdec.decoding.cache import SlotCache
from hf_specdec.layers import structure
from hf_specdec.layers.known import is_llama_layer
from hf_specdec.layers.llama import DecoderLayer, with_query_groups
from hf_specdec.layers.rope import signed_angles
from tests.helpers.caches import CACHE
from tests.helpers.levels import in_full
from tests.helpers.models import VOCAB_SIZE


SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama_biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_one_head_each": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama_one_key_head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}),
    "llama_head_dim": (LlamaForCausalLM, LlamaConfig, {"head_dim": 24}),
    "llama_gelu": (LlamaForCausalLM, LlamaConfig, {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 0.1}),
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}


@torch.no_grad()
def make(name="llama", dtype=torch.float32, **changed):
    kind, config, settings = MODELS[name]
    torch.manual_seed(0)
    model = kind(config(**{**SIZES, **settings, **changed})).eval()
    for parameter in model.parameters():
        # Norms and biases that do something.
        parameter.add_(torch.randn_like(parameter) * 0.3)
    model.config._attn_implementation = NAME
    return model.to(dtype)


def drawn(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Reading:
    """Reads tokens with transformers' layer and with our own, one after the other into a cache of each."""

    def __init__(self, model, theirs=None, ours=None):
        self.model = model
        self.theirs = theirs or model.get_decoder().layers[0]
        self.ours = ours or DecoderLayer.of(model.get_decoder().layers[0], 0)
        self.caches = SlotCache(4), SlotCache(4)

    def read(self, stream, mask=None, cached=True):
        first = self.caches[0].get_seq_length() if cached else 0
        positions = torch.arange(first, first + stream.shape[1])[None]
        cosine, sine = self.model.get_decoder().rotary_emb(stream, positions)
        theirs, ours = self.caches if cached else (None, None)
        with running(VerificationForward()):
            expected = self.theirs(stream, attention_mask=mask, position_embeddings=(cosine, sine), **{CACHE: theirs})
        mask = with_query_groups(mask, self.ours.self_attn.groups)
        return expected, self.ours(stream, signed_angles(cosine, sine), mask, ours)

    def both(self, **how):
        """Two outputs of each: of a prompt, and of a tree of three tokens after it."""
        dtype = self.model.dtype
        prompt = self.read(drawn(2, 5, 32, dtype=dtype), **how)
        mask = torch.zeros(2, 1, 3, 8)
        mask[..., 1, 6] = mask[0, :, :, 0] = torch.finfo(dtype).min
        tree = self.read(drawn(2, 3, 32, dtype=dtype, seed=2), mask=mask.to(dtype), **how)
        return zip(prompt, tree)


# Numbers


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama_biases", "llama_head_dim", "qwen2", "qwen3"),
        *in_full("llama_one_head_each", "llama_one_key_head", "llama_gelu", "mistral"),
    ],
)
def test_numbers_and_gradients_are_those_of_transformers(name):
    for dtype in (torch.float32, torch.bfloat16):
        model = make(name, dtype)
        assert is_llama_layer(model.get_decoder().layers[0])
        with torch.no_grad():
            expected, found = Reading(model).both()
        assert all(map(torch.equal, expected, found))
        assert not torch.equal(expected[0], drawn(2, 5, 32, dtype=dtype))
    model, gradients = make(name), []
    for output in Reading(model).read(drawn(2, 5, 32), cached=False):
        model.zero_grad()
        output.square().mean().backward()
        gradients.append([parameter.grad for parameter in model.get_decoder().layers[0].parameters()])
    assert all(gradient.abs().max() > 0 for gradient in gradients[0])
    torch.testing.assert_close(*gradients)


@torch.no_grad()
def test_numbers_without_a_cache_with_one_token_and_with_boolean_masks():
    reading = Reading(make())
    for tokens in (1, 6):
        assert torch.equal(*reading.read(drawn(2, tokens, 32), cached=False))
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    seen[1, 0, 3, 1] = False
    assert torch.equal(*Reading(make("qwen3")).read(drawn(2, 5, 32), mask=seen, cached=False))


@torch.no_grad()
def test_everything_is_seen_where_attention_is_not_causal():
    layer = DecoderLayer.of(make().get_decoder().layers[0], 0)
    angles = torch.ones(1, 6, 1, 8), torch.zeros(1, 6, 1, 8)
    stream = drawn(1, 6, 32)
    causal = layer(stream, angles, None, None)
    layer.self_attn.is_causal = False
    everything = layer(stream, angles, None, None)
    assert torch.equal(everything, layer(stream, angles, torch.zeros(1, 1, 12, 6), None))
    torch.testing.assert_close(causal[:, -1], everything[:, -1])
    assert not torch.allclose(causal[:, 0], everything[:, 0])


def test_names_of_the_state_and_models_that_this_transformers_does_not_have(monkeypatch):
    layer = make("qwen3").get_decoder().layers[0]
    assert DecoderLayer.of(layer, 0).state_dict().keys() == layer.state_dict().keys()
    tables = {"norm": {"no_such.NoNorm": "a", "llama.NoSuchNorm": "b", "llama.LlamaRMSNorm": "c"}}
    tables["rotation"] = {"no_such": False, "llama": True}
    monkeypatch.setattr(structure, "_TABLES", tables)
    structure._form_of.cache_clear()
    layer = make().get_decoder().layers[0]
    assert structure.form_of(layer.input_layernorm, "norm") == "c"
    assert structure.form_of(layer.self_attn, "rotation")
    structure._form_of.cache_clear()


# Parts that a user has changed count, as they do in transformers' layer


class Wrapped(nn.Module):
    """An adapter: the layer inside, and more than it returns outside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) * 2


class DoubledLinear(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden) * 2


def double_output(module, args, output):
    return output * 2


def wrap(layer, name):
    parent, _, child = name.rpartition(".")
    setattr(layer.get_submodule(parent), child, Wrapped(layer.get_submodule(name)))


def replace_forward(layer, name):
    part = layer.get_submodule(name)
    part.forward = lambda hidden: type(part).forward(part, hidden) * 2


def replace_class(layer, name):
    layer.get_submodule(name).__class__ = DoubledLinear


LINEARS = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
MODULES = [*LINEARS, "mlp", "mlp.act_fn", "input_layernorm", "post_attention_layernorm", "self_attn.q_norm"]
CHANGES = {
    "hook": lambda layer, name: layer.get_submodule(name).register_forward_hook(double_output),
    "pre_hook": lambda layer, name: layer.get_submodule(name).register_forward_pre_hook(
        lambda module, args: (args[0] * 3,)
    ),
    "forward": replace_forward,
    "wrapped": wrap,
}


@pytest.mark.parametrize("change", [*CHANGES, "other class"])
@torch.no_grad()
def test_changed_parts_count(change):
    for part in LINEARS if change == "other class" else MODULES:
        model = make("qwen3")
        theirs = model.get_decoder().layers[0]
        unchanged, _ = Reading(model).both()
        ours = DecoderLayer.of(copy.deepcopy(theirs), 0)
        for layer in (theirs, ours):
            CHANGES.get(change, replace_class)(layer, part)
        expected, found = Reading(model, theirs, ours).both()
        assert all(map(torch.equal, expected, found)), part
        assert not torch.equal(expected[1], unchanged[1]), part


@torch.no_grad()
def test_hooks_of_attention_and_layer():
    """Calls of hooks have other arguments than transformers', and the same output."""
    outputs, reading = [], Reading(make())
    expected, _ = reading.read(drawn(1, 4, 32), cached=False)
    handles = [
        part.register_forward_hook(lambda module, args, output: outputs.append(output))
        for part in (reading.ours, reading.ours.self_attn)
    ]
    _, found = reading.read(drawn(1, 4, 32), cached=False)
    assert torch.equal(found, expected)
    assert len(outputs) == 2
    assert torch.equal(outputs[1], expected)
    for handle in handles:
        handle.remove()
    reading.read(drawn(1, 4, 32), cached=False)
    assert len(outputs) == 2


@torch.no_grad()
def test_weights_are_read_where_they_are():
    reading = Reading(make())
    before, _ = reading.read(drawn(1, 4, 32), cached=False)
    reading.theirs.self_attn.v_proj.weight.mul_(2)
    reading.theirs.input_layernorm.weight.mul_(2)
    expected, found = reading.read(drawn(1, 4, 32), cached=False)
    assert torch.equal(expected, found)
    assert not torch.equal(expected, before)


def test_layers_that_are_changed_drop_out_or_are_of_another_family_are_not_llamas(monkeypatch):
    for change in CHANGES.values():
        layer = make().get_decoder().layers[0]
        layer.mlp.register_forward_hook(double_output).remove()
        assert is_llama_layer(layer)
        change(layer, "mlp")
        assert not is_llama_layer(layer)
    assert not is_llama_layer(make(attention_dropout=0.1).get_decoder().layers[0])
    other = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    assert not is_llama_layer(other.get_decoder().layers[0])
    layer = make().get_decoder().layers[0]
    monkeypatch.setattr(type(layer.mlp), "forward", lambda self, hidden: hidden)
    assert not is_llama_layer(layer)
