"""Sizes, layers and device of a causal language model, read from its modules and config."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Container
from functools import lru_cache
from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import SpecConfigError, UnsupportedModelError


# Vocabularies of one tokenizer differ by rows of padding and added tokens, at most by this share.
MAX_VOCABULARY_GAP = 0.05

# Model types of transformers whose only keys and values are those of their target.
CACHE_READERS = ("gemma4_assistant", "gemma4_unified_assistant")

# Names of a cache, as an argument of forwards and as a field of outputs. Transformers 5.24 has renamed the next two.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")

# Names that decoders give to the list of their layers.
_LAYER_LISTS = ("layers", "h", "blocks", "block", "layer")


# Wrappers of models, by what has the model inside.
_INSIDE = {"get_base_model": "get_base_model()", "_orig_mod": "_orig_mod", "module": "module"}


def no_target(model: Any) -> SpecConfigError:
    """The error that something is no model of transformers, with how to get at the one inside of it."""
    inside = next((code for name, code in _INSIDE.items() if hasattr(model, name)), None)
    remedy = "Load one with AutoModelForCausalLM.from_pretrained()."
    if inside is not None:
        remedy = f"It is a wrapper: pass the model inside, `model.{inside}`."
    return SpecConfigError(f"The target must be a model of transformers, got {type(model).__name__}. {remedy}")


def model_name(model: torch.nn.Module) -> str:
    """Repo id or folder of a model; its class where it was loaded from neither."""
    return str(getattr(model.config, "_name_or_path", "") or type(model).__name__)


def cache_name_among(names: Container[str]) -> str | None:
    """The name of the cache among those of a forward's arguments or an output's fields; `None` without a cache."""
    return next((name for name in CACHE_NAMES if name in names), None)


@lru_cache(maxsize=4096)
def forward_arguments(module_class: type) -> tuple[str, ...]:
    """Names of the arguments of a forward, without `self`."""
    return tuple(inspect.signature(module_class.forward).parameters)[1:]


def vocabulary_size(model: torch.nn.Module) -> int:
    """Width of a model's logits."""
    head = model.get_output_embeddings()
    features = getattr(head, "out_features", None)
    return features or model.config.get_text_config(decoder=True).vocab_size


def num_embeddings(embedding: torch.nn.Module) -> int:
    """Number of tokens that an embedding has a row for."""
    # Packed weights have another shape.
    return getattr(embedding, "num_embeddings", None) or embedding.weight.shape[0]


def hidden_size(target_model: torch.nn.Module) -> int:
    """Width of the hidden states that a model's output embeddings read."""
    head = target_model.get_output_embeddings()
    return getattr(head, "in_features", None) or head.weight.shape[-1]


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Layers of the decoder (of a multimodal model: of its text part), in order."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for decoder in (model.get_decoder(), model):
        named = [getattr(decoder, name, None) for name in _LAYER_LISTS]
        lists = [module for module in (*named, *decoder.modules()) if isinstance(module, torch.nn.ModuleList)]
        layers = next((module for module in lists if len(module) == count), None)
        # A config may count the parts of a layer.
        layers = layers or next((module for module in named if isinstance(module, torch.nn.ModuleList)), None)
        if layers is not None:
            return layers
    raise UnsupportedModelError(
        f"The {count} decoder layers of {type(model).__name__} cannot be found, whose hidden states were asked for. "
        "Use a drafter that reads no hidden states, such as spec_method='ngram'."
    )


def reads_target_cache(draft_model: Any) -> bool:
    """Tells a draft model that works on the keys and values of its target."""
    return getattr(getattr(draft_model, "config", None), "model_type", None) in CACHE_READERS


def layers_owner(model: torch.nn.Module, layers: torch.nn.ModuleList) -> torch.nn.Module:
    """Module that holds the list of layers."""
    return next(module for module in model.modules() if any(child is layers for child in module.children()))


def active_adapters(model: torch.nn.Module) -> list[str]:
    """Names of PEFT's adapters that change a model's layers now, by name; merged ones among them."""
    layer = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    if layer is None:
        return []
    adapted = (module for module in model.modules() if isinstance(module, layer) and not module.disable_adapters)
    return sorted({name for module in adapted for name in cast(Any, module).active_adapters})


def quantisation(model: torch.nn.Module) -> str | None:
    """The kind of quantised weights, such as "torchao"; `None` where all are plain, or were dequantised on loading."""
    if getattr(model, "is_quantized", False):
        method = getattr(model, "quantization_method", None)
        return str(getattr(method, "value", method) or "quantised")
    for module in model.modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            return "torch"
        for weight in module._parameters.values():
            if weight is not None and is_packed(weight):
                return type(weight).__module__.partition(".")[0]
    return None


def is_packed(weight: torch.Tensor) -> bool:
    """Tells a weight that is stored as something else than its numbers; in parts on several processes it is plain."""
    is_other = is_traceable_wrapper_subclass(weight) and not hasattr(weight, "full_tensor")
    return is_other or weight.dtype.itemsize < 2 or not weight.is_floating_point()


def numbers_of(weight: torch.Tensor) -> torch.Tensor | None:
    """The numbers of a weight; `None` where only the module around it can tell them."""
    if not is_packed(weight):
        return weight
    return weight.dequantize() if weight.is_floating_point() and weight.dtype.itemsize > 1 else None


def draft_device(config: Any, target_model: torch.nn.Module, part: torch.nn.Module | None = None) -> torch.device:
    """The usable device that the config names, or else the one where the target, or `part` of it, computes."""
    if config.device is None:
        return computing_device(target_model, part)
    try:
        device = torch.device(config.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, ValueError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SpecConfigError(
            f"`device`='{config.device}' cannot be used here: {reason}. Name a device that this machine has, such as "
            "'cpu', or leave it out for the target's."
        ) from error
    if device.type == "meta":
        raise SpecConfigError("`device`='meta' holds no data to compute with. Leave it out for the target's device.")
    return device


def computing_device(target_model: torch.nn.Module, part: torch.nn.Module | None = None) -> torch.device:
    """Device where a model, or a part of it, computes, also where its weights are elsewhere between its forwards."""
    part = target_model if part is None else part
    hook, weight = getattr(part, "_hf_hook", None), next(part.parameters(), None)
    # Between its forwards an offloaded module has its weights nowhere; its hook knows where they go.
    owners = ((hook, "execution_device"), (weight, "device"), (target_model, "device"))
    devices = [torch.device(device) for owner, name in owners if (device := getattr(owner, name, None)) is not None]
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def device_of(module: torch.nn.Module, device: torch.device) -> torch.device:
    """The device where a module's weights are, or where it computes if it is offloaded and they are nowhere now."""
    return computing_device(module) if device.type == "meta" and hasattr(module, "_hf_hook") else device
