"""Known parts of transformers: layers that [`~layers.llama`] computes, and modules that nobody has changed."""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from typing import Any

from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .llama import HEAD_NORMS, DecoderLayer, has_static_frequencies
from .plan import is_hooked
from .structure import AttentionForm, NormForm, form_of


def has_known_layers(model: Any) -> bool:
    """Tells whether [`DecoderLayer`] computes all layers of a model that adds nothing unknown around them."""
    if not is_published(type(model)) or form_of(model, "model") is None:
        return False
    config, decoder = model.config, model.get_decoder()
    form = form_of(decoder, "decoder")
    is_known = form is not None and form_of(decoder.norm, "norm") is not None and hasattr(decoder, "rotary_emb")
    if not is_known or getattr(config, "use_bidirectional_attention", False):
        return False
    # Settings of the rotary embeddings, by type of layer where each has its own.
    parameters = getattr(config, "rope_parameters", None) or {}
    if not all(isinstance(part, dict) for part in parameters.values()):
        parameters = {"": parameters}
    if form.has_angles_by_type == ("" in parameters) or not all(map(has_static_frequencies, parameters.values())):
        return False
    return all(map(is_known_layer, decoder.layers))


def is_known_layer(layer: nn.Module) -> bool:
    """Tells whether [`DecoderLayer`] computes what this decoder layer does, if its modules are unchanged."""
    form, attention = form_of(layer, "layer"), getattr(layer, "self_attn", None)
    if form is None or attention is None or None in (form_of(attention, "attention"), form_of(attention, "rotation")):
        return False
    if getattr(attention.config, "clip_qkv", None) is not None:
        return False
    norms = [layer._modules.get(name) for name in form[:4] if name is not None]
    norms += [attention._modules[name] for name in HEAD_NORMS if name in attention._modules]
    return all(norm is not None and form_of(norm, "norm") is not None for norm in norms)


def is_llama_layer(layer: nn.Module) -> bool:
    """Tells whether a decoder layer of transformers is one of Llama's kind, unchanged, with one MLP and no dropout."""
    if not is_known_layer(layer) or layer.self_attn.attention_dropout:
        return False
    parts = {"layer": layer, "attention": layer.self_attn, "rotation": layer.self_attn, "mlp": layer.mlp}
    expected = {"layer": DecoderLayer.form, "attention": AttentionForm(), "rotation": False, "mlp": False}
    norms = [layer._modules[name] for name in DecoderLayer.form[:4] if name in layer._modules]
    is_plain = {kind: form_of(part, kind) for kind, part in parts.items()} == expected
    is_plain = is_plain and all(form_of(norm, "norm") == NormForm() for norm in norms)
    return is_plain and all(map(is_untouched, layer.modules()))


def is_untouched(module: nn.Module) -> bool:
    """Tells whether calling the module runs the forward that its class was published with, on plain weights."""
    if is_hooked(module) and not _only_captures_outputs(module):
        return False
    if not (is_published(type(module)) and is_published(getattr(type(module), "forward", None))):
        return False
    if "weight" in module._buffers:
        return False  # packed
    weight = module._parameters.get("weight")
    if is_traceable_wrapper_subclass(weight) or (weight is None and getattr(module, "weight", None) is not None):
        return False  # in parts on several processes, or packed
    return weight is None or weight.dim() != 2 or type(module) in (nn.Linear, nn.Embedding)


def _only_captures_outputs(module: nn.Module) -> bool:
    """Tells whether its calls are hooked by transformers' `output_hidden_states` alone.

    These hooks stay for good, and do nothing but in forwards of the model itself that were asked for such outputs.
    """
    others = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(others) or module._compiled_call_impl is not None or "forward" in vars(module):
        return False
    return all(hook.__module__ == "transformers.utils.output_capturing" for hook in module._forward_hooks.values())


def modules_of(model: nn.Module, left_out: Container[int] = ()) -> list[nn.Module]:
    """The model and all modules in it but `left_out` ids, shared ones repeatedly, in less time than `modules()`."""
    modules = [model]
    for module in modules:
        modules += [part for part in module._modules.values() if part is not None and id(part) not in left_out]
    return modules


@lru_cache(maxsize=256)
def is_published(definition: Any) -> bool:
    """Tells whether a class or function is torch's, transformers', or of this package."""
    return getattr(definition, "__module__", "").partition(".")[0] in ("torch", "transformers", "hf_specdec")
