"""The attention function of the verification forwards, registered with transformers' attention interface.

On a GPU with Triton, layers run through the tree attention kernel wherever it is known what their masks say. All other
attention is masked. transformers repeats the keys and values of grouped-query models before
`scaled_dot_product_attention` whenever there is a mask and more than one query. Here the query heads of a group become
further query positions of their one key/value head instead: the same result, and the cache is read once (32/8 heads,
head size 128, 2k context, 8 nodes on CPU: 3 ms a layer instead of 32).

Shapes: R rows, H query heads, K key/value heads, G = H / K, T nodes, S slots, D head size.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from ..errors import UnsupportedModelError
from ..kernels._triton import DTYPES, use_triton
from ..kernels.tree_attention import MAX_HEAD_SIZE, SlotTree
from ..threads import Lock, StandIns
from .forward import SlotForward, running
from .masks import FULL, Span, TreeMask


# The stand-ins, by what they do with layers that the tree attention kernel cannot express.
NAME = "hf_specdec"
NAME_EAGER = "hf_specdec_eager"

# Arguments of transformers' attention functions beyond plain attention; those calls go to its own function.
_BEYOND_PLAIN = ("softcap", "s_aux", "position_bias", "cache")

# Names in statistics of what computed the attention of a layer.
TREE_KERNEL = "tree kernel"


def takes_trees(tensor: torch.Tensor, dtype: torch.dtype, head_size: int) -> bool:
    """Tells whether the tree attention kernel runs where a tensor lies, for states of a dtype and heads of a size."""
    return dtype in DTYPES and head_size <= MAX_HEAD_SIZE and use_triton(tensor)


def name_masks(forward: SlotForward, masks: list[torch.Tensor], spans: tuple[Span, ...]) -> None:
    """Says which span each mask of the forward stands for."""
    # With the mask, whose memory must not come to another one.
    forward.spans |= {_memory(mask): (span, mask) for mask, span in zip(masks, spans)}


def _memory(mask: torch.Tensor) -> tuple[Any, ...]:
    # Not the address: what only stands for a mask has none.
    return mask.untyped_storage()._cdata, mask.storage_offset(), mask.shape


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_eager: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention `(R, T, H, D)` of queries `(R, H, T, D)` over `(R, K, S, D)` with a mask `(R | 1, 1, T, S)`."""
    forward = running.get()
    if forward is not None and forward.tree is not None:
        # Masks that the model has made, changed or copied have no span.
        span, _ = (None, None) if attention_mask is None else forward.spans.get(_memory(attention_mask), (None, None))
        beyond_kernel = {
            "a mask of the model's own": span is None,
            "dropout": dropout > 0,
            "a position bias": kwargs.get("position_bias") is not None,
            "a paged cache": kwargs.get("cache") is not None,
            f"heads larger than {MAX_HEAD_SIZE}": max(query.shape[3], value.shape[3]) > MAX_HEAD_SIZE,
            "dtype": query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype,
            "keys outside of the slots": (query.shape[2], key.shape[2]) != (forward.tree.num_queries, forward.columns),
        }
        reason = next((why for why, holds in beyond_kernel.items() if holds), None)
        forward.layers[TREE_KERNEL if reason is None else f"masked: {reason}"] += 1
        if reason is None and span is not None:
            # Older transformers let sdpa leave soft caps out, so plain generation has none either.
            softcap = kwargs.get("softcap") if is_eager else None
            tree_mask = TreeMask(forward.tree, span)
            return tree_mask.attend(query, key, value, scaling, softcap, kwargs.get("s_aux")), None
    if is_eager:
        attend = _eager_attention_of(type(module))
        assert attend is not None, "models without one are not set to this attention"
        return attend(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    sees_all = attention_mask is None and not getattr(module, "is_causal", True)
    is_plain = sees_all or (attention_mask is not None and attention_mask.shape[1] == 1)
    if forward is None or not is_plain or any(kwargs.get(name) is not None for name in _BEYOND_PLAIN):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    rows, heads, nodes, size = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(rows, key.shape[1], groups * nodes, size)
        if nodes > 1 and attention_mask is not None:
            # Once for all layers. The mask is kept beside, so that its id stays its own while the entry lives.
            key_of_mask = id(attention_mask), groups
            if key_of_mask not in forward.folded:
                shared = attention_mask[:1] if attention_mask.stride(0) == 0 else attention_mask
                forward.folded[key_of_mask] = attention_mask, shared.repeat(1, 1, groups, 1)
            attention_mask = forward.folded[key_of_mask][1]
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(rows, heads, nodes, -1).transpose(1, 2).contiguous(), None


def _eager_attention_of(owner: type) -> Callable[..., Any] | None:
    """The function that models call where their implementation is "eager": one beside each model's classes."""
    return getattr(sys.modules.get(owner.__module__), "eager_attention_forward", None)


def describe_layers(layers: Counter[str]) -> str:
    """Names of what computed the attention of the counted layers."""
    if len(layers) <= 1:
        return next(iter(layers), "masked")
    return ", ".join(f"{name} in {count} of {layers.total()} layers" for name, count in layers.most_common())


def slot_mask(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    of_transformers: Callable[..., Any] | None = None,
    **how: Any,
) -> torch.Tensor | None:
    """Mask of a forward that is not given any: transformers' own, or one without numbers where the kernel runs."""
    forward = running.get()
    # Users' own functions, and those that pack several texts into a row, forbid to leave masks out.
    is_causal = how.get("allow_is_causal_skip", True) and not how.get("use_vmap") and not how.get("kv_offset")
    has_sizes = {"batch_size", "q_length", "kv_length", "device"} <= how.keys()
    by_kernel = forward is not None and forward.reads_by_kernel and not args and is_causal and has_sizes
    if by_kernel and isinstance(how.get("q_offset"), int):
        rows, columns, window = how["batch_size"], how["kv_length"], how.get("local_size")
        is_padded = attention_mask is not None and not bool(attention_mask[:, 0].all())
        is_limited = window is not None and columns >= window
        if (is_padded or is_limited) and (attention_mask is None or attention_mask.shape == (rows, columns)):
            lengths = torch.full((rows,), how["q_offset"], device=how["device"])
            starts = columns - attention_mask.sum(1) if is_padded else torch.zeros_like(lengths)
            forward.tree, forward.columns = SlotTree(lengths, starts, num_queries=how["q_length"]), columns
            span = FULL if window is None else Span("sliding", window)
            mask = TreeMask(forward.tree, span).stand_in(columns, torch.bool)
            name_masks(forward, [mask], (span,))
            return mask
    return (of_transformers or sdpa_mask)(*args, attention_mask=attention_mask, **how)


AttentionInterface.register(NAME, slot_attention)
AttentionInterface.register(NAME_EAGER, partial(slot_attention, is_eager=True))
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, slot_mask)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME_EAGER, partial(slot_mask, of_transformers=eager_mask))


_switches: WeakKeyDictionary[torch.nn.Module, StandIns] = WeakKeyDictionary()
_switches_lock = Lock()


def attention_switch(model: torch.nn.Module) -> StandIns:
    """The model's one switch to another attention, renewed when the user has chosen another implementation since."""
    with _switches_lock:
        switch = _switches.get(model)
        if switch is not None:
            with switch._lock:
                # While it is on, the configs hold the names of the stand-ins.
                if switch._users or list(switch.places) == _stand_ins(model):
                    return switch
        switch = _switches[model] = StandIns(_stand_ins(model))
        return switch


def _stand_ins(model: torch.nn.Module) -> list[tuple[Any, str, str]]:
    """Every config that must name another implementation, and that one."""
    has_kernel = use_triton(model.get_input_embeddings().weight)
    reads_text = (id(model.config), id(model.config.get_text_config(decoder=True)))
    owners: dict[int, torch.nn.Module] = {}  # the first model that holds a config
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            owners.setdefault(id(module.config), module)
    places = []
    for number, owner in owners.items():
        config: Any = owner.config
        name = config._attn_implementation
        if name is None:
            continue
        stand_in = _stand_in(owner, config, name, has_kernel)
        if stand_in is None and number in reads_text:
            raise UnsupportedModelError(
                f"The attention implementation '{name}' of {type(owner).__name__} is not known to take the masks of a "
                "draft. Choose another one with model.set_attn_implementation('sdpa')."
            )
        if stand_in not in (None, name):
            # Not the property: it would also write to sub-configs that have another implementation.
            places.append((config, "_attn_implementation_internal", stand_in))
    return places


def _stand_in(owner: torch.nn.Module, config: Any, name: str, has_kernel: bool) -> str | None:
    """The implementation that verifies drafts in the place of another, `None` where nothing is known of that one."""
    # Some code treats `sdpa` by its name: that of layers that choose their keys, and of Falcon's alibi.
    chooses_keys = not {"indexed_attention", "deepseek_sparse_attention"}.isdisjoint(
        getattr(config, "layer_types", None) or ()
    )
    if chooses_keys or getattr(config, "alibi", False):
        return name
    if name == "sdpa":
        return NAME
    # Attention depends on the arguments of its function alone, if the model supports flash attention.
    declared = (getattr(owner, f"_supports_{what}", False) for what in ("attention_backend", "flash_attn"))
    hands_over_all = all(declared) and _eager_attention_of(type(owner)) is not None
    eager = NAME_EAGER if has_kernel and hands_over_all else "eager"
    if name == "eager":
        return eager
    if "flash" in name or name == "flex_attention":
        # Those take no additive masks. Soft caps and sinks are features of theirs that sdpa lacks and eager has.
        has_more = getattr(config, "attn_logit_softcapping", None) or not getattr(owner, "_supports_sdpa", False)
        return eager if has_more else NAME
    return None
