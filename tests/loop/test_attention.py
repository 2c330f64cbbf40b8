"""The attention function of verification forwards, and how it takes its place for their time only."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import AttentionInterface

from hf_specdec import UnsupportedModelError
from hf_specdec.drafts import chain_topology
from hf_specdec.kernels.tree_attention import MAX_NODES
from hf_specdec.target import attention
from hf_specdec.target import model as target
from hf_specdec.target.attention import (
    NAME,
    attention_switch,
    name_masks,
    slot_attention,
)
from hf_specdec.target.forward import SlotForward, told
from hf_specdec.target.lean import has_lean_forward
from hf_specdec.target.masks import FULL, RowPlaces, Span, TreeMask, node_masks, slot_tree
from tests.helpers.architectures import CHAINS_ONLY, tiny_model
from tests.helpers.families import TREE, Case, implementations
from tests.helpers.levels import full, in_full
from tests.helpers.models import tiny_llama
from tests.helpers.tape import tape_everything


def test_other_calls_go_to_transformers():
    torch.manual_seed(0)
    states = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=False)
    by_head, plain = torch.randn(2, 4, 3, 5), torch.randn(2, 1, 3, 5)
    for mask, inside in ((by_head, True), (None, True), (plain, False)):
        expected = sdpa_attention_forward(module, *states, mask, scaling=0.5)[0]
        with attention_switch(tiny_llama()).in_place() if inside else contextlib.nullcontext():
            assert torch.equal(slot_attention(module, *states, mask, scaling=0.5)[0], expected)


KERNEL, OWN_MASK, BIAS = "tree kernel", "masked: a mask of the model's own", "masked: a position bias"
# One for every way to hand over a mask, and the others' reasons.
COMPUTED_BY = [
    ("gemma2", None, KERNEL),
    ("bloom", None, "masked"),
    *in_full(
        *((name, "eager", KERNEL) for name in ("gemma3_text", "mistral", "gpt2")),
        *((name, None, KERNEL) for name in ("bert", "gemma3_text", "gpt2", "gpt_oss", "granite_swa", "llama")),
        *((name, None, KERNEL) for name in ("llama4_text", "modernbert-decoder", "qwen2", "qwen3_next", "whisper")),
        *((name, None, "masked") for name in ("deepseek_v32", "falcon")),
        ("doge", None, OWN_MASK),
        ("inkling_text", None, BIAS),
    ),
]


@pytest.mark.parametrize(("name", "own", "computed_by"), COMPUTED_BY)
def test_what_computes_the_attention(name, own, computed_by, with_kernel):
    case = Case(name, tiny_model(name, attn_implementation=own), new_tokens=8)
    before = implementations(case.model)
    tree = None if name in CHAINS_ONLY else "random"
    output = case.speculate(4, num_speculative_tokens=6, tree=tree)
    assert output.sequences.tolist() == case.expected(4).tolist()
    assert output.speculative.attention == computed_by
    assert implementations(case.model) == before


@pytest.mark.parametrize(
    ("name", "chunk"),
    [("gemma3_text", 5), *in_full(("llama", None), ("mistral", 5))],
)
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


@full
def test_more_nodes_than_bits_are_masked(with_kernel):
    case = Case("llama", tiny_model("llama"), new_tokens=8)
    output = case.speculate(1, num_speculative_tokens=2, tree=(-1,) * MAX_NODES, accuracy=0.0)
    assert output.sequences.tolist() == case.expected(1).tolist()
    assert output.speculative.attention == "masked"


BEYOND_THE_KERNEL = [
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
]


def test_calls_beyond_the_kernel():
    topology, rows = chain_topology(2, torch.device("cpu")), RowPlaces([5, 4], [0, 1], [0, 0])
    spans, size = (FULL, Span("sliding", 3)), torch.zeros(2, 2, 8, 16)
    for change, reason in BEYOND_THE_KERNEL:
        forward = SlotForward(size, columns=8, tree=slot_tree(topology, rows))
        masks = node_masks(topology, rows, 8, spans, torch.float32)
        name_masks(forward, masks, spans)
        call = {"query": torch.zeros(2, 4, 3, 16), "key": size, "value": size, "attention_mask": masks[1], **change}
        if isinstance(call["attention_mask"], str):
            call["attention_mask"] = masks[1][..., :8]
        # What does not fit together is nothing for the other function either.
        with told(forward), contextlib.suppress(RuntimeError, AttributeError, TypeError):
            slot_attention(SimpleNamespace(num_key_value_groups=2, is_causal=False), **call)
        assert dict(forward.layers) == {"tree kernel" if reason is None else f"masked: {reason}": 1}, change


def test_the_switch_is_on_until_the_last_thread_is_out():
    model = tiny_llama()
    switch = attention_switch(model)
    assert attention_switch(model) is switch
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with switch.in_place():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(KeyboardInterrupt), switch.in_place(), switch.in_place():
        raise KeyboardInterrupt
    assert model.config._attn_implementation == NAME
    leave.set()
    thread.join(60)
    assert model.config._attn_implementation == "sdpa"


@full
def test_stand_in_for_each_implementation():
    def during(model) -> str:
        with attention_switch(model).in_place():
            return model.config._attn_implementation

    model = tiny_llama()
    for own in ("sdpa", "eager", "flash_attention_2", "flex_attention", "sdpa"):
        # A change is noticed.
        model.config._attn_implementation_internal = own
        assert during(model) == ("eager" if own == "eager" else NAME)
        assert model.config._attn_implementation == own
    # Soft caps of flash attention.
    model = tiny_llama()
    model.config._attn_implementation_internal = "flash_attention_2"
    model.config.attn_logit_softcapping = 30.0
    assert during(model) == "eager"


def test_unknown_implementation_is_refused_before_the_first_forward():
    AttentionInterface.register("my_attention", pytest.fail)
    try:
        model = tiny_llama()
        model.set_attn_implementation("my_attention")
        with pytest.raises(UnsupportedModelError, match="'my_attention'.*set_attn_implementation"):
            model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, spec_method="ngram")
    finally:
        AttentionInterface._global_mapping.pop("my_attention")


@pytest.mark.parametrize(
    ("name", "masks_are_read"),
    [("gpt_oss", False), ("falcon", True), *in_full(("doge", True), ("llama", False), ("gpt2", False))],
)
def test_captured_forwards_make_no_masks_that_nothing_reads(name, masks_are_read, with_kernel, monkeypatch):
    tape_everything(monkeypatch)
    made, node_masks, stand_in = [], target.node_masks, TreeMask.stand_in

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
    case = Case(name, tiny_model(name))
    output = case.speculate(4, num_speculative_tokens=3, tree=TREE)
    assert output.sequences.tolist() == case.expected(4).tolist()
    stats, num_spans = output.speculative, len(target.model_profile(case.model).spans)
    assert stats.graphs == "on"
    if masks_are_read:
        assert set(made) == {"additive"}
    elif has_lean_forward(case.model):
        assert not made
    else:
        # That no layer looks at them has been seen where the model's way to go on was checked.
        assert made == ["stand_in"] * num_spans * 2 * stats.num_graph_captures
