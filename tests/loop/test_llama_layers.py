"""Layers of the Llama family and rotary angles: transformers' own numbers, in whatever form their parts are."""

import copy
import itertools

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_specdec.kernels import heads as kernels
from hf_specdec.kernels.heads import signed_angles
from hf_specdec.layers import llama
from hf_specdec.layers.known import is_llama_layer
from hf_specdec.layers.llama import (
    DecoderLayer,
    RotaryAngles,
    has_static_frequencies,
    rotate,
    with_query_groups,
)
from hf_specdec.layers.plan import Way
from hf_specdec.target.attention import NAME
from hf_specdec.target.cache import SlotCache
from hf_specdec.target.forward import SlotForward, told
from tests.helpers.architectures import tiny_model
from tests.helpers.caches import CACHE
from tests.helpers.layer_references import rotary_angles
from tests.helpers.levels import in_full, split
from tests.helpers.models import VOCAB_SIZE


SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": {},
    "llama_biases": {"attention_bias": True, "mlp_bias": True},
    "llama_one_head_each": {"num_key_value_heads": 4},
    "llama_one_key_head": {"num_key_value_heads": 1},
    "llama_head_dim": {"head_dim": 24},
    "llama_gelu": {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 0.1},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}


@torch.no_grad()
def make(name="llama", dtype=torch.float32, **changed):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition("_")[0], **{**SIZES, **HEADS, **MODELS[name], **changed})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        # Norms and biases that do something.
        parameter.add_(torch.randn_like(parameter) * 0.3)
    model.config._attn_implementation = NAME
    return model.to(dtype)


def first_layer(*given, **changed):
    return make(*given, **changed).get_decoder().layers[0]


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
        with told(SlotForward(stream)):
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


@pytest.mark.parametrize("name", split(MODELS, ["llama_biases", "qwen3"]))
def test_numbers_and_gradients_are_those_of_transformers(name):
    for dtype in (torch.float32, torch.bfloat16):
        model = make(name, dtype)
        reading = Reading(model)
        assert is_llama_layer(reading.theirs)
        assert reading.ours.state_dict().keys() == reading.theirs.state_dict().keys()
        with torch.no_grad():
            expected, found = reading.both()
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
def test_numbers_without_a_cache_with_one_token_with_boolean_masks_and_of_weights_changed_in_place():
    reading = Reading(make())
    for tokens in (1, 6):
        assert torch.equal(*reading.read(drawn(2, tokens, 32), cached=False))
    before, _ = reading.read(drawn(2, 6, 32), cached=False)
    for name in ("mlp.up_proj", "self_attn.o_proj", "input_layernorm"):
        reading.theirs.get_submodule(name).weight.mul_(2)
    after, found = reading.read(drawn(2, 6, 32), cached=False)
    assert torch.equal(found, after)
    assert not torch.equal(before, after)
    seen = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    seen[1, 0, 3, 1] = False
    assert torch.equal(*Reading(make("qwen3")).read(drawn(2, 5, 32), mask=seen, cached=False))


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
    "hook": lambda layer, name: layer.get_submodule(name).register_forward_hook(lambda part, x, output: output * 2),
    "pre_hook": lambda layer, name: layer.get_submodule(name).register_forward_pre_hook(lambda part, x: (x[0] * 3,)),
    "forward": replace_forward,
    "wrapped": wrap,
}


@pytest.mark.parametrize("change", ["hook", *in_full("other class", "pre_hook", "forward", "wrapped")])
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
def test_hooks_count_from_the_next_forward_on_over_the_same_cache_as_well():
    reading = Reading(make("qwen3"))
    for part in MODULES:
        expected, found = reading.read(drawn(2, 1, 32))
        torch.testing.assert_close(expected, found)
        handles = [CHANGES["hook"](layer, part) for layer in (reading.theirs, reading.ours)]
        hooked, found = reading.read(drawn(2, 1, 32))
        torch.testing.assert_close(hooked, found)
        for handle in handles:
            handle.remove()
    assert not torch.equal(hooked, expected)


def test_layers_that_are_changed_drop_out_or_are_of_another_family_are_not_llamas(monkeypatch):
    layers = [first_layer(attention_dropout=0.1), tiny_model("mixtral").get_decoder().layers[0]]
    for change in CHANGES.values():
        layer = first_layer()
        layer.mlp.register_forward_hook(lambda *given: None).remove()
        assert is_llama_layer(layer)
        change(layer, "mlp")
        layers.append(layer)
    assert not any(map(is_llama_layer, layers))
    layer = first_layer()
    monkeypatch.setattr(type(layer.mlp), "forward", lambda self, hidden: hidden)
    assert not is_llama_layer(layer)


# Rotary angles


KINDS = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 8.0},
}
POSITIONS = torch.tensor([[0, 3, 4, 5], [7, 8, 30, 31]])


def embedding(kind):
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind]}
    return LlamaRotaryEmbedding(LlamaConfig(head_dim=16, max_position_embeddings=16, rope_parameters=parameters))


# By model: types of layer that have angles of their own, and whether neighbours turn together.
EMBEDDINGS = {
    **dict.fromkeys(("llama", "gemma2", "phi3", "granite", "olmo", "olmo2", "smollm3"), ((), False)),
    "glm4": ((), True),
    **dict.fromkeys(("gemma3_text", "olmo3"), (("full_attention", "sliding_attention"), False)),
}


def test_angles_are_those_of_the_embedding_looked_up_or_computed():
    for kind, dtype in itertools.product(KINDS, (torch.float32, torch.bfloat16)):
        like, looked_up, computed = torch.zeros(1, dtype=dtype), *(RotaryAngles(embedding(kind)) for _ in range(2))
        for bound in (32, 40, 500):
            # A dynamic embedding remembers the longest text.
            expected = signed_angles(*embedding(kind)(like, POSITIONS))
            found = looked_up(POSITIONS, like, bound)
            assert [part.shape for part in found] == [(2, 4, 1, 16)] * 2
            assert all(map(torch.equal, found, expected))
            for beyond in (None, 2 * llama._LONGEST_TABLE):
                assert all(map(torch.equal, computed(POSITIONS, like, beyond), expected))
        assert not computed.tables
        if has_static_frequencies({"rope_type": kind}):
            slices = (angles(slice(7, 9), like, bound) for angles, bound in ((looked_up, 32), (computed, 1 << 20)))
            assert all(torch.equal(one, other[0]) for one, other in zip(*slices))
        # Heads turn as in transformers.
        heads = drawn(2, 4, 3, 16)
        cosine, sine = embedding(kind)(heads, POSITIONS)
        turned, _ = apply_rotary_pos_emb(heads.transpose(1, 2), heads.transpose(1, 2), cosine, sine)
        assert torch.equal(rotate(heads, *signed_angles(cosine, sine)), turned.transpose(1, 2))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Calls of the kernel that computes angles, which torch computes here."""
    calls = []
    monkeypatch.setattr(llama, "way_of", lambda tensor: Way.KERNELS)
    monkeypatch.setattr(kernels, "rotary_angles_triton", lambda *args: calls.append(args) or rotary_angles(*args))
    return calls


@pytest.mark.parametrize("name", split(EMBEDDINGS, ["glm4", "gemma3_text"]))
@torch.no_grad()
def test_angles_of_known_models_are_one_operation_on_a_gpu(name, as_on_a_gpu):
    known, (types, is_interleaved) = tiny_model(name).get_decoder().rotary_emb, EMBEDDINGS[name]
    for dtype in (torch.float32, torch.bfloat16):
        like = torch.zeros(1, dtype=dtype)
        as_on_a_gpu.clear()
        for layer_type in types or (None,):
            own = () if layer_type is None else (layer_type,)
            expected = signed_angles(*known(like, POSITIONS, *own), is_interleaved)
            found = RotaryAngles(known, layer_type, is_interleaved)(POSITIONS, like)
            assert all(map(torch.equal, found, expected))
            assert [part.dtype for part in found] == [part.dtype for part in expected]
        assert len(as_on_a_gpu) == max(len(types), 1)
    # Hooks of an embedding run, and so it is called.
    known.register_forward_hook(lambda *given: as_on_a_gpu.clear())
    RotaryAngles(known, (types or (None,))[0], is_interleaved)(POSITIONS, torch.zeros(1))
    assert not as_on_a_gpu
