"""The attention function of verification forwards, and how it takes its place for their time only."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from hf_specdec import UnsupportedModelError
from hf_specdec.decoding.attention import NAME, attention_switch, slot_attention


def tiny_llama(**values) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes, **values)).eval()


def plain_attention(query, key, value, mask, scaling):
    """Softmax attention head by head, `(R, T, H, D)`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    weights = (query @ key.transpose(-1, -2) * scaling + mask).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("nodes", [1, 5])
@pytest.mark.parametrize("mask_rows", [1, 3])
@pytest.mark.parametrize("value_size", [16, 8])
def test_equals_softmax_attention(heads, kv_heads, nodes, mask_rows, value_size):
    torch.manual_seed(0)
    rows, slots, size, scaling = 3, 9, 16, 0.3
    query = torch.randn(rows, heads, nodes, size)
    key, value = torch.randn(rows, kv_heads, slots, size), torch.randn(rows, kv_heads, slots, value_size)
    hidden = torch.rand(mask_rows, 1, nodes, slots) < 0.4
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)
    expected = plain_attention(query, key, value, mask, scaling)
    with attention_switch(tiny_llama())():
        # Twice: the second layer finds the folded mask of the first.
        for _ in range(2):
            output, weights = slot_attention(module, query, key, value, mask, scaling=scaling)
            assert weights is None
            assert output.is_contiguous()
            # Sums in another order.
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beyond", ["mask by head", "no mask", "outside"])
def test_other_calls_go_to_transformers(beyond):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    mask = None if beyond == "no mask" else torch.randn(2, 4 if beyond == "mask by head" else 1, 3, 5)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=False)
    expected = sdpa_attention_forward(module, query, key, value, mask, scaling=0.5)[0]
    if beyond == "outside":
        assert torch.equal(slot_attention(module, query, key, value, mask, scaling=0.5)[0], expected)
        return
    with attention_switch(tiny_llama())():
        assert torch.equal(slot_attention(module, query, key, value, mask, scaling=0.5)[0], expected)


def test_the_switch_is_on_inside_only():
    model = tiny_llama()
    switch = attention_switch(model)
    assert attention_switch(model) is switch
    with switch():
        assert model.config._attn_implementation == NAME
        with switch():
            assert model.config._attn_implementation == NAME
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(KeyboardInterrupt), switch():
        raise KeyboardInterrupt
    assert model.config._attn_implementation == "sdpa"


def test_the_last_thread_out_restores():
    model = tiny_llama()
    switch = attention_switch(model)
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with switch():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(10)
    with switch():
        pass
    assert model.config._attn_implementation == NAME
    leave.set()
    thread.join(10)
    assert model.config._attn_implementation == "sdpa"


def test_plain_forward_in_another_thread_is_not_disturbed():
    """While the name is switched, a forward outside of any verification gives what it always gives."""
    torch.manual_seed(0)
    model = tiny_llama()
    tokens = torch.randint(0, 50, (2, 7))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    found = []

    def forward():
        with torch.no_grad():
            found.append(model(tokens, attention_mask=mask).logits)

    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).logits
    with attention_switch(model)():
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join(10)
    assert torch.equal(found[0], expected)


def test_other_implementations_are_left_alone():
    model = tiny_llama(attn_implementation="eager")
    with attention_switch(model)():
        assert model.config._attn_implementation == "eager"


def test_a_changed_implementation_is_noticed():
    model = tiny_llama()
    attention_switch(model)
    model.set_attn_implementation("eager")
    with attention_switch(model)():
        assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    with attention_switch(model)():
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == "sdpa"


def test_configs_without_attention_are_no_obstacle():
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20))
    with attention_switch(model)():
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("own", "during"), [("sdpa", NAME), ("eager", "eager"), ("flash_attention_2", NAME), ("flex_attention", NAME)]
)
def test_stand_in_while_drafts_are_verified(own, during):
    model = tiny_llama()
    model.config._attn_implementation_internal = own
    switch = attention_switch(model)
    with switch():
        assert model.config._attn_implementation == during
    assert model.config._attn_implementation == own


def test_soft_caps_behind_flash_attention_are_verified_eagerly():
    model = tiny_llama()
    model.config._attn_implementation_internal = "flash_attention_2"
    model.config.attn_logit_softcapping = 30.0
    with attention_switch(model)():
        assert model.config._attn_implementation == "eager"


def test_unknown_implementation_is_refused_before_the_first_forward():
    calls = []

    def unknown(module, query, key, value, attention_mask, **kwargs):
        calls.append(attention_mask)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("my_attention", unknown)
    try:
        model = tiny_llama()
        model.set_attn_implementation("my_attention")
        with pytest.raises(UnsupportedModelError, match="'my_attention'.*set_attn_implementation"):
            model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, spec_method="ngram")
    finally:
        AttentionInterface._global_mapping.pop("my_attention")
    assert not calls
