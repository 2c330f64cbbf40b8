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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from ..errors import UnsupportedModelError
from ..kernels._triton import use_triton
from ..kernels.tree_attention import DTYPES, MAX_HEAD_SIZE, SlotTree, tree_attention, visible_slots
from ..threads import Lock
from .masks import Span, additive_mask


# The stand-ins, by what they do with layers that the tree attention kernel cannot express.
NAME = "hf_specdec"
NAME_EAGER = "hf_specdec_eager"

# Arguments of transformers' attention functions beyond plain attention; those calls go to its own function.
_BEYOND_PLAIN = ("softcap", "s_aux", "position_bias", "cache")

# Names in statistics of what computed the attention of a layer.
TREE_KERNEL = "tree kernel"


@dataclass(frozen=True)
class TreeMask:
    """Content of an additive mask, for attention that needs none: the nodes of a forward, and a layer's span."""

    tree: SlotTree
    span: Span

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of shape `(R, T, H, D)`; the arguments are those of [`tree_attention`]."""
        return tree_attention(
            query, key, value, self.tree, scale, softcap=softcap or 0.0, sinks=sinks, **self.span.limits
        )

    def additive(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The mask `(R, 1, T, columns)`, made of nothing but the tensors of the tree."""
        return additive_mask(~visible_slots(self.tree, columns, **self.span.limits), dtype)[:, None]

    def stand_in(self, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """A mask without numbers, to be handed over where all attention goes by the tree; reading it raises."""
        shape = (len(self.tree.lengths), 1, self.tree.num_queries, columns)
        return torch.empty(shape, dtype=dtype, device="meta")

    def in_a_forward(self, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, VerificationForward]:
        """The additive mask, and a forward that knows what it stands for."""
        mask, forward = self.additive(columns, dtype), VerificationForward(self.tree, columns)
        forward.name_masks([mask], (self.span,))
        return mask, forward


def takes_trees(tensor: torch.Tensor, dtype: torch.dtype, head_size: int) -> bool:
    """Tells whether the tree attention kernel runs where a tensor lies, for states of a dtype and heads of a size."""
    return dtype in DTYPES and head_size <= MAX_HEAD_SIZE and use_triton(tensor)


@dataclass
class VerificationForward:
    """Knowledge that the attention of a forward has beside its masks."""

    tree: SlotTree | None = None  # the nodes, for the tree attention kernel; `None`: all attention is masked
    columns: int = 0  # S
    layers: Counter[str] = field(default_factory=Counter)  # attention layers by what computed them, if there is a tree
    reads_prompts: bool = False  # of a model whose layers hand all masks on to the kernel: they need no numbers
    _spans: dict[Any, tuple[Span, torch.Tensor]] = field(default_factory=dict)
    _folded: dict[Any, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def name_masks(self, masks: list[torch.Tensor], spans: tuple[Span, ...]) -> None:
        """Says which span each mask of the forward stands for."""
        # With the mask, whose memory must not come to another one.
        self._spans |= {_memory(mask): (span, mask) for mask, span in zip(masks, spans)}

    def tree_mask(self, mask: torch.Tensor | None) -> TreeMask | None:
        """Content of a mask of this forward; `None` for others, which the model has made, changed or copied."""
        named = None if mask is None else self._spans.get(_memory(mask))
        return None if named is None else TreeMask(self.tree, named[0])

    def prompt_mask(self, padding: torch.Tensor | None, how: dict[str, Any]) -> torch.Tensor | None:
        """A mask without numbers for prompts; `None` where they need none, or are more than padded on the left.

        Tokens that are not padding are `True` in the mask `(R, S)`; `how` has the other arguments of transformers'
        mask functions.
        """
        # Users' own functions, and those that pack several texts into a row, forbid to leave masks out.
        is_causal = how.get("allow_is_causal_skip", True) and not how.get("use_vmap") and not how.get("kv_offset")
        has_sizes = {"batch_size", "q_length", "kv_length", "device"} <= how.keys()
        if not (self.reads_prompts and is_causal and has_sizes and isinstance(how.get("q_offset"), int)):
            return None
        window, rows, columns = how.get("local_size"), how["batch_size"], how["kv_length"]
        if padding is not None:
            if padding.shape != (rows, columns) or bool((padding[:, 1:] < padding[:, :-1]).any()):
                return None
            padding = None if bool(padding[:, 0].all()) else padding
        if padding is None and (window is None or columns < window):
            return None
        lengths = torch.full((rows,), how["q_offset"], device=how["device"])
        starts = torch.zeros_like(lengths) if padding is None else columns - padding.sum(1)
        self.tree = SlotTree(lengths, starts, num_queries=how["q_length"])
        self.columns = columns
        span = Span() if window is None else Span("sliding", window)
        mask = TreeMask(self.tree, span).stand_in(columns, torch.bool)
        self.name_masks([mask], (span,))
        return mask

    def fold(self, mask: torch.Tensor, groups: int) -> torch.Tensor:
        """The mask repeated for query heads that are further query positions; once for all layers."""
        key = (id(mask), groups)
        if key not in self._folded:
            # The mask is kept beside its folded form, so that its id cannot be reused while the entry lives.
            shared = mask[:1] if mask.stride(0) == 0 else mask
            self._folded[key] = (mask, shared.repeat(1, 1, groups, 1))
        return self._folded[key][1]


def _memory(mask: torch.Tensor) -> tuple[Any, ...]:
    # Not the address: what only stands for a mask has none.
    return mask.untyped_storage()._cdata, mask.storage_offset(), mask.shape


# The running forward. Unset outside of one.
_running: ContextVar[VerificationForward | None] = ContextVar("hf_specdec_verification_forward", default=None)


@contextmanager
def running(forward: VerificationForward) -> Iterator[None]:
    """Lets `slot_attention` work for this forward, inside of the block."""
    token = _running.set(forward)
    try:
        yield
    finally:
        _running.reset(token)


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
    """Attention of `query` `(R, H, T, D)` over `key`, `value` `(R, K, S, D)` with an additive mask `(R | 1, 1, T, S)`.

    `attention_mask=None` means full attention if the module is not causal. Returns the output of shape `(R, T, H, D)`
    and no weights, as the attention interface wants it. What the kernel cannot express goes to `sdpa`, or eagerly to
    the model's own function, as does all outside of a verification forward (another thread runs plain `generate` on
    the same model).
    """
    forward = _running.get()
    if forward is not None and forward.tree is not None:
        tree_mask = forward.tree_mask(attention_mask)
        beyond_kernel = {
            "a mask of the model's own": tree_mask is None,
            "dropout": dropout > 0,
            "a position bias": kwargs.get("position_bias") is not None,
            "a paged cache": kwargs.get("cache") is not None,
            f"heads larger than {MAX_HEAD_SIZE}": max(query.shape[3], value.shape[3]) > MAX_HEAD_SIZE,
            "dtype": query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype,
            "keys outside of the slots": (query.shape[2], key.shape[2]) != (forward.tree.num_queries, forward.columns),
        }
        reason = next((why for why, holds in beyond_kernel.items() if holds), None)
        forward.layers[TREE_KERNEL if reason is None else f"masked: {reason}"] += 1
        if reason is None and tree_mask is not None:
            # Older transformers let sdpa leave soft caps out, so plain generation has none either.
            softcap = kwargs.get("softcap") if is_eager else None
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
            attention_mask = forward.fold(attention_mask, groups)
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
    **kwargs: Any,
) -> torch.Tensor | None:
    """Mask of a forward that is not given any: transformers' own, or one without numbers where the kernel runs."""
    forward = _running.get()
    if forward is not None and not args:
        mask = forward.prompt_mask(attention_mask, kwargs)
        if mask is not None:
            return mask
    return (of_transformers or sdpa_mask)(*args, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(NAME, slot_attention)
AttentionInterface.register(NAME_EAGER, partial(slot_attention, is_eager=True))
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, slot_mask)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME_EAGER, partial(slot_mask, of_transformers=eager_mask))


class AttentionSwitch:
    """Puts another attention in the place of a model's own while a verification forward runs.

    The implementation's name lives in the model's configs. Entering changes the names, leaving restores them, also
    after an error; several threads may be inside at once, the last one out restores.
    """

    def __init__(self, model: torch.nn.Module):
        self._changes = _changes(model)
        self._lock = Lock()
        self._num_inside = 0

    @contextmanager
    def __call__(self, forward: VerificationForward | None = None) -> Iterator[None]:
        if not self._changes:
            yield
            return
        has_entered = False
        try:
            with self._lock:
                self._num_inside, has_entered = self._num_inside + 1, True
                for config, _, stand_in in self._changes:
                    # Not the property: it would also write to sub-configs that have another implementation.
                    config._attn_implementation_internal = stand_in
            with running(forward or VerificationForward()):
                yield
        finally:
            with self._lock:
                self._num_inside -= has_entered
                if self._num_inside == 0:
                    for config, name, _ in self._changes:
                        config._attn_implementation_internal = name

    def fits(self, model: torch.nn.Module) -> bool:
        """Tells whether the model still has the implementations that this switch was made for."""
        with self._lock:
            if self._num_inside > 0:
                return True  # the configs hold the names of the stand-ins now
            signatures = [
                [(id(config), *names) for config, *names in every] for every in (self._changes, _changes(model))
            ]
            return signatures[0] == signatures[1]


_switches: WeakKeyDictionary[torch.nn.Module, AttentionSwitch] = WeakKeyDictionary()
_switches_lock = Lock()


def attention_switch(model: torch.nn.Module) -> AttentionSwitch:
    """The model's one switch, renewed when the user has chosen another implementation since."""
    with _switches_lock:
        switch = _switches.get(model)
        if switch is None or not switch.fits(model):
            switch = _switches[model] = AttentionSwitch(model)
        return switch


def _changes(model: torch.nn.Module) -> list[tuple[Any, str, str]]:
    """Every config that must name another implementation: the config, its own name, and the stand-in's."""
    has_kernel = use_triton(model.get_input_embeddings().weight)
    reads_text = (id(model.config), id(model.config.get_text_config(decoder=True)))
    owners: dict[int, torch.nn.Module] = {}  # the first model that holds a config
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            owners.setdefault(id(module.config), module)
    changes = []
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
            changes.append((config, name, stand_in))
    return changes


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
