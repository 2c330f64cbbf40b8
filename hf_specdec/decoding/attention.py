"""One attention function for the verification forwards, registered with transformers' attention interface.

transformers repeats the keys and values of grouped-query models before `scaled_dot_product_attention` whenever there
is a mask and more than one query. Here the query heads of a group become further query positions of their one
key/value head instead: the same result, and the cache is read once (32/8 heads, head size 128, 2k context, 8 nodes on
CPU: 3 ms a layer instead of 32).

Shapes: R rows, H query heads, K key/value heads, G = H / K, T nodes, S slots, D head size.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from ..errors import UnsupportedModelError


NAME = "hf_specdec"

# The masks of the running verification forward, folded once for all layers. Unset outside of such a forward.
_folded_masks: ContextVar[dict | None] = ContextVar("hf_specdec_folded_masks", default=None)

# What transformers' attention functions may be asked for beyond plain attention; those calls go to its own function.
_BEYOND_PLAIN = ("softcap", "s_aux", "position_bias", "cache")


def slot_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """Attention of `query` `(R, H, T, D)` over `key`, `value` `(R, K, S, D)` with an additive mask `(R | 1, 1, T, S)`.

    No mask stands for everything where the module is not causal. Returns the output of shape `(R, T, H, D)` and no
    weights, as the attention interface wants it. Outside of a verification forward (another thread runs plain
    `generate` on the same model) it is transformers' own function.
    """
    folded = _folded_masks.get()
    sees_all = attention_mask is None and not getattr(module, "is_causal", True)
    is_plain = sees_all or (attention_mask is not None and attention_mask.shape[1] == 1)
    if folded is None or not is_plain or any(kwargs.get(name) is not None for name in _BEYOND_PLAIN):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    rows, heads, nodes, size = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(rows, key.shape[1], groups * nodes, size)
        if nodes > 1 and attention_mask is not None:
            attention_mask = _fold(attention_mask, groups, folded)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return output.reshape(rows, heads, nodes, -1).transpose(1, 2).contiguous(), None


def _fold(mask: torch.Tensor, groups: int, folded: dict) -> torch.Tensor:
    key = (id(mask), groups)
    if key not in folded:
        # The mask is kept beside its folded form, so that its id cannot be reused while the entry lives.
        folded[key] = (mask, mask.repeat(1, 1, groups, 1))
    return folded[key][1]


@contextmanager
def folding_masks():
    """Inside, `slot_attention` folds query heads into positions, and each mask once for all layers."""
    token = _folded_masks.set({})
    try:
        yield
    finally:
        _folded_masks.reset(token)


AttentionInterface.register(NAME, slot_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


class AttentionSwitch:
    """Puts another attention in the place of a model's own while a verification forward runs.

    The implementation's name lives in the model's configs. Entering changes the names, leaving restores them, also
    after an error; several threads may be inside at once, the last one out restores.

    Raises:
        UnsupportedModelError: The model's implementation cannot take masks of a draft, and is not known well enough
            to be replaced.
    """

    def __init__(self, model: torch.nn.Module):
        self._changes = _changes(model)
        self._lock = threading.Lock()
        self._inside = 0

    @contextmanager
    def __call__(self):
        if not self._changes:
            yield
            return
        entered = False
        try:
            with self._lock:
                self._inside, entered = self._inside + 1, True
                for config, _, stand_in in self._changes:
                    # Not the property: it would also write to sub-configs that have another implementation.
                    config._attn_implementation_internal = stand_in
            with folding_masks():
                yield
        finally:
            with self._lock:
                self._inside -= entered
                if self._inside == 0:
                    for config, own, _ in self._changes:
                        config._attn_implementation_internal = own

    def fits(self, model: torch.nn.Module) -> bool:
        """Whether the model still has the implementations that this switch was made for."""
        with self._lock:
            # While a forward runs, the configs hold the names of the stand-ins.
            return self._inside > 0 or _signature(self._changes) == _signature(_changes(model))


_switches: WeakKeyDictionary[torch.nn.Module, AttentionSwitch] = WeakKeyDictionary()
_switches_lock = threading.Lock()


def attention_switch(model: torch.nn.Module) -> AttentionSwitch:
    """The model's one switch, renewed when the user has chosen another implementation since."""
    with _switches_lock:
        switch = _switches.get(model)
        if switch is None or not switch.fits(model):
            switch = _switches[model] = AttentionSwitch(model)
        return switch


def _changes(model: torch.nn.Module) -> list[tuple]:
    """Every config that must name another implementation: the config, its own name, and the stand-in's."""
    reads_text = (model.config, model.config.get_text_config(decoder=True))
    changes = []
    for owner, config in _configs(model):
        own = config._attn_implementation
        if own is None:
            continue
        stand_in = _stand_in(owner, config, own)
        if stand_in is None and any(config is one for one in reads_text):
            raise UnsupportedModelError(
                f"The attention implementation '{own}' of {type(owner).__name__} is not known to take the masks of a "
                "draft. Choose another one with model.set_attn_implementation('sdpa')."
            )
        if stand_in not in (None, own):
            changes.append((config, own, stand_in))
    return changes


def _signature(changes: list[tuple]) -> list[tuple]:
    return [(id(config), own, stand_in) for config, own, stand_in in changes]


def _stand_in(owner: torch.nn.Module, config, own: str) -> str | None:
    """The implementation that verifies drafts in the place of `own`, `None` where nothing is known of `own`."""
    if own == "eager" or _asks_for_the_name(config):
        return own
    if own == "sdpa":
        return NAME
    if "flash" in own or own == "flex_attention":
        # Those take no additive masks. Soft caps and sinks are features of theirs that sdpa lacks and eager has.
        beyond = getattr(config, "attn_logit_softcapping", None) or not getattr(owner, "_supports_sdpa", False)
        return "eager" if beyond else NAME
    return None


def _asks_for_the_name(config) -> bool:
    """Whether the model's code treats `sdpa` by its name: layers that choose their keys, and Falcon's alibi."""
    layer_types = getattr(config, "layer_types", None) or ()
    chooses_keys = not {"indexed_attention", "deepseek_sparse_attention"}.isdisjoint(layer_types)
    return chooses_keys or bool(getattr(config, "alibi", False))


def _configs(model: torch.nn.Module) -> list[tuple]:
    """Every distinct config object that a submodule reads, with the first model that holds it."""
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), (module, config))
    return list(found.values())
