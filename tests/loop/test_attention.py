"""The attention function of verification forwards, and how it takes its place for their time only."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import AttentionInterface

from hf_specdec import UnsupportedModelError
from hf_specdec.decoding import attention, functional, target
from hf_specdec.decoding.attention import (
    NAME,
    TreeMask,
    VerificationForward,
    attention_switch,
    running,
    slot_attention,
    slot_mask,
)
from hf_specdec.decoding.functional import has_lean_forward
from hf_specdec.decoding.masks import FULL, RowState, Span, node_masks, slot_tree
from hf_specdec.drafts import chain_topology
from hf_specdec.kernels.tree_attention import MAX_NODES
from tests.helpers.architectures import CHAINS_ONLY, tiny_model
from tests.helpers.families import TREE, Case, implementations
from tests.helpers.tape import tape_everything
from tests.helpers.threads import in_threads


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


@pytest.fixture
def with_kernel(monkeypatch):
    """Verification as on a GPU with kernels; the operations themselves still run as their references."""
    for module in (attention, functional, target):
        monkeypatch.setattr(module, "use_triton", lambda *tensors: True)


# One for every way to hand over a mask, and the others' reasons.
THROUGH_THE_KERNEL = {
    "bert": "tree kernel",
    "bloom": "masked",
    "deepseek_v32": "masked",
    "doge": "masked: a mask of the model's own",
    "falcon": "masked",
    "gemma2": "tree kernel",
    "gemma3_text": "tree kernel",
    "gemma4_text": "tree kernel",
    "gpt2": "tree kernel",
    "gpt_oss": "tree kernel",
    "granite_swa": "tree kernel",
    "inkling_text": "masked: a position bias",
    "llama": "tree kernel",
    "llama4_text": "tree kernel",
    "modernbert-decoder": "tree kernel",
    "qwen2": "tree kernel",
    "qwen3_next": "tree kernel",
    "whisper": "tree kernel",
}


@pytest.mark.parametrize("name", THROUGH_THE_KERNEL)
def test_what_computes_the_attention(name, with_kernel):
    case = Case(name, tiny_model(name), new_tokens=8)
    before = implementations(case.model)
    tree = None if name in CHAINS_ONLY else "random"
    output = case.speculate(4, num_speculative_tokens=6, tree=tree)
    assert output.sequences.tolist() == case.expected(4).tolist()
    assert output.speculative.attention == THROUGH_THE_KERNEL[name]
    assert implementations(case.model) == before


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral", "gpt2"])
def test_eager_models_go_through_the_kernel(name, with_kernel):
    case = Case(name, tiny_model(name, attn_implementation="eager"), new_tokens=8)
    output = case.speculate(4, num_speculative_tokens=6, tree="random")
    assert output.sequences.tolist() == case.expected(4).tolist()
    assert output.speculative.attention == "tree kernel"


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "qwen2"])
def test_padded_prompts_need_no_masks(name, chunk, with_kernel, monkeypatch):
    """With windows shorter than the prompts, and in parts."""
    case = Case(name, tiny_model(name, attn_implementation="sdpa"), new_tokens=8)
    assert has_lean_forward(case.model)
    expected, masks, trees, attend = case.expected(4), [], [], TreeMask.attend
    monkeypatch.setattr(attention, "sdpa_mask", lambda **how: masks.append(sdpa_mask(**how)) or masks[-1])

    def counted(mask, *states):
        trees.append(mask.tree)
        return attend(mask, *states)

    monkeypatch.setattr(TreeMask, "attend", counted)
    monkeypatch.setattr(case.model.generation_config, "prefill_chunk_size", chunk)
    output = case.speculate(4, num_speculative_tokens=6, tree="random")
    assert output.sequences.tolist() == expected.tolist()
    assert not any(torch.is_tensor(mask) for mask in masks)
    prompts = [tree for tree in trees if tree.ancestors is None]
    assert any(tree.starts.any() for tree in prompts)
    assert any(tree.lengths.any() for tree in prompts) == (chunk is not None)


@pytest.mark.parametrize("padding", [[[1, 1, 0, 1, 1, 1]], [[0, 1, 1, 1, 0, 0]]], ids=["hole", "right"])
def test_other_padding_of_prompts_is_masked(padding):
    """As well as what a user adds to masks, and what has no padding and no window."""
    padding = torch.tensor(padding).bool()
    how = {"batch_size": 1, "q_length": 6, "kv_length": 6, "q_offset": 0, "device": "cpu"}
    with running(VerificationForward(reads_prompts=True)):
        assert slot_mask(attention_mask=padding, **how).dtype == torch.bool
        assert slot_mask(attention_mask=padding, **how).device.type == "cpu"
        left = torch.tensor([[0, 1, 1, 1, 1, 1]]).bool()
        assert slot_mask(attention_mask=left, **how).device.type == "meta"
        assert slot_mask(attention_mask=left, **how, allow_is_causal_skip=False).device.type == "cpu"
        assert slot_mask(attention_mask=None, **how) is None
        assert slot_mask(attention_mask=None, **how, local_size=4).device.type == "meta"
    assert slot_mask(attention_mask=left, **how).device.type == "cpu"


def test_layers_beyond_the_kernel_are_masked(with_kernel):
    """Eagerly, where the model caps its scores; the others go on through the kernel."""
    case = Case("gemma2", tiny_model("gemma2"))
    case.model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": kwargs["attention_mask"].clone()}),
        with_kwargs=True,
    )
    output = case.speculate(4, num_speculative_tokens=5)
    assert output.sequences.tolist() == case.expected(4).tolist()
    assert output.speculative.attention == (
        "tree kernel in 2 of 3 layers, masked: a mask of the model's own in 1 of 3 layers"
    )


def test_more_nodes_than_bits_are_masked(with_kernel):
    case = Case("llama", tiny_model("llama"))
    output = case.speculate(1, num_speculative_tokens=2, tree=(-1,) * MAX_NODES, accuracy=0.0)
    assert output.sequences.tolist() == case.expected(1).tolist()
    assert output.speculative.attention == "masked"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": torch.zeros(1, 4, 3, 8)}, "a position bias"),
        ({"cache": object()}, "a paged cache"),
        ({"query": torch.zeros(2, 4, 3, 264), "key": torch.zeros(2, 2, 8, 264)}, "heads larger than 256"),
        ({"value": torch.zeros(2, 2, 8, 16).double()}, "dtype"),
        ({"query": torch.zeros(2, 4, 2, 16)}, "keys outside of the slots"),
        ({"key": torch.zeros(2, 2, 7, 16), "value": torch.zeros(2, 2, 7, 16)}, "keys outside of the slots"),
        ({"attention_mask": torch.zeros(2, 1, 3, 8)}, "a mask of the model's own"),
        ({"attention_mask": None}, "a mask of the model's own"),
        ({"attention_mask": "a view"}, None),
        ({}, None),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_calls_beyond_the_kernel(change, reason):
    topology, rows = chain_topology(2, torch.device("cpu")), RowState([5, 4], [0, 1], [0, 0])
    forward = VerificationForward(slot_tree(topology, rows), columns=8)
    masks = node_masks(topology, rows, 8, (FULL, Span("sliding", 3)), torch.float32)
    forward.name_masks(masks, (FULL, Span("sliding", 3)))
    if change.get("attention_mask") == "a view":
        change = {"attention_mask": masks[1][..., :8]}
    size = torch.zeros(2, 2, 8, 16)
    call = {"query": torch.zeros(2, 4, 3, 16), "key": size, "value": size, "attention_mask": masks[1], **change}
    # What does not fit together is nothing for the other function either.
    with running(forward), contextlib.suppress(RuntimeError, AttributeError, TypeError):
        slot_attention(SimpleNamespace(num_key_value_groups=2, is_causal=False), **call)
    assert dict(forward.layers) == {"tree kernel" if reason is None else f"masked: {reason}": 1}


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

    @torch.no_grad()
    def forward():
        return model(tokens, attention_mask=mask).logits

    expected = forward()
    with attention_switch(model)():
        (found,) = in_threads(forward)
    assert torch.equal(found, expected)


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


def test_soft_caps_of_flash_attention_are_verified_eagerly():
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


class TestMasksOfCaptures:
    """Captured forwards make no masks where nothing looks at them."""

    @pytest.fixture
    def made(self, monkeypatch, with_kernel) -> list[str]:
        """Stand-ins for masks in the forwards that were recorded, in order."""
        tape_everything(monkeypatch)
        made = []

        node_masks, stand_in = target.node_masks, TreeMask.stand_in

        def masks(topology, rows, *args):
            found = node_masks(topology, rows, *args)
            made.extend([] if rows.are_known else ["additive"] * len(found))
            return found

        def note_and_stand_in(mask, *args):
            # Prompts are chains of any length.
            if mask.tree.ancestors is not None:
                made.append("stand_in")
            return stand_in(mask, *args)

        monkeypatch.setattr(target, "node_masks", masks)
        monkeypatch.setattr(TreeMask, "stand_in", note_and_stand_in)
        return made

    @pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "gpt2"])
    def test_left_out(self, name, made):
        case = Case(name, tiny_model(name))
        output = case.speculate(4, num_speculative_tokens=3, tree=TREE)
        assert output.sequences.tolist() == case.expected(4).tolist()
        stats = output.speculative
        assert (stats.graphs, stats.attention) == ("on", "tree kernel")
        if has_lean_forward(case.model):
            assert not made
            return
        # The first run shows that no layer looks at them.
        num_spans = len(target.model_profile(case.model).spans)
        runs = [made[index : index + num_spans] for index in range(0, len(made), num_spans)]
        assert runs == [["additive"] * num_spans] + [["stand_in"] * num_spans] * (2 * stats.num_graph_captures - 1)

    @pytest.mark.parametrize("name", ["doge", "falcon"])
    def test_kept(self, name, made):
        case = Case(name, tiny_model(name))
        output = case.speculate(4, num_speculative_tokens=3, tree=TREE)
        assert output.sequences.tolist() == case.expected(4).tolist()
        assert output.speculative.graphs == "on"
        assert set(made) == {"additive"}
