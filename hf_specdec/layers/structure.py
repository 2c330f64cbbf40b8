"""Recognition of transformers' models by what their forwards do: their compiled code, compared with known ones.

transformers writes the same layer out again in the file of every model that has it. Two functions whose code, names
and constants are equal compute the same from equal parts, whatever their classes are called. Of what they call in
their files only the rotation is asked about, for attention functions are replaced in any case.

Each table maps known classes, as `file.Class` of `transformers.models`, to what [`~layers.llama`] must know of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from types import CodeType, ModuleType
from typing import Any, NamedTuple


class NormForm(NamedTuple):
    """Attributes of a norm, see [`~kernels.norms.Norm`], and eps, or where the module keeps it."""

    offset: float = 0.0
    rounds_last: bool = False
    eps: str | float = "variance_epsilon"
    is_centered: bool = False


class LayerForm(NamedTuple):
    """Names of a decoder layer's norms: of what attention and MLP read, and of what they add to the stream.

    And of the number that both are multiplied by before they are added, if there is one.
    """

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    factor: str | None = None


class AttentionForm(NamedTuple):
    """Attributes: whether one product makes queries, keys and values, and norms are of all heads together.

    And where the module says whether heads turn, and the bound of the scores, if it does.
    """

    is_packed: bool = False
    norms_whole: bool = False
    turns: str | None = None
    softcap: str | None = None


class RotaryForm(NamedTuple):
    """Attributes: whether angles have the dtype of what turns, and not float32."""

    rounds: bool = True


class DecoderForm(NamedTuple):
    """Attributes: whether there are angles for each type of layer, and what embeddings are multiplied by."""

    has_angles_by_type: bool = False
    factor: str | None = None


class ModelForm(NamedTuple):
    """Names in the config of the bound of the logits, and of what they are divided by."""

    softcap: str | None = None
    divisor: str | None = None


class MixtureForm(NamedTuple):
    """Attributes: whether every token goes through a shared expert as well, by a gate of its own."""

    has_shared_expert: bool = False


class RouterForm(NamedTuple):
    """Attributes: those of [`~kernels.experts.Routing`], or where the module says it."""

    normalizes: bool | str = True
    rounds: bool = False


_PRE_NORM = LayerForm("input_layernorm", None, "post_attention_layernorm", None)

_NORMS = {
    "llama.LlamaRMSNorm": NormForm(),
    "gemma2.Gemma2RMSNorm": NormForm(1.0, True, "eps"),
    "olmo2.Olmo2RMSNorm": NormForm(0.0, True),
    # Without weights.
    "olmo.OlmoLayerNorm": NormForm(eps=1e-5, is_centered=True),
}

_LAYERS = {
    "llama.LlamaDecoderLayer": _PRE_NORM,
    "mixtral.MixtralDecoderLayer": _PRE_NORM,
    # It also drops out, but only in training.
    "phi3.Phi3DecoderLayer": _PRE_NORM,
    "gemma2.Gemma2DecoderLayer": LayerForm(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    "glm4.Glm4DecoderLayer": LayerForm(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    ),
    "granite.GraniteDecoderLayer": _PRE_NORM._replace(factor="residual_multiplier"),
    "olmo2.Olmo2DecoderLayer": LayerForm(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
}

_ATTENTIONS = {
    "llama.LlamaAttention": AttentionForm(),
    "mistral.MistralAttention": AttentionForm(),
    "qwen2.Qwen2Attention": AttentionForm(),
    "qwen3.Qwen3Attention": AttentionForm(),
    "gemma3.Gemma3Attention": AttentionForm(),
    "phi3.Phi3Attention": AttentionForm(is_packed=True),
    # A model whose config clips queries, keys and values is not known.
    "olmo.OlmoAttention": AttentionForm(),
    "olmo2.Olmo2Attention": AttentionForm(norms_whole=True),
    "olmoe.OlmoeAttention": AttentionForm(norms_whole=True),
    "olmo3.Olmo3Attention": AttentionForm(norms_whole=True),
    "gemma2.Gemma2Attention": AttentionForm(softcap="attn_logit_softcapping"),
    "smollm3.SmolLM3Attention": AttentionForm(turns="use_rope"),
    # It also drops out, but only in training, and so does its MLP.
    "seed_oss.SeedOssAttention": AttentionForm(),
}

# By file alone: whether neighbours turn together.
_ROTATIONS = {"llama": False, "phi3": False, "olmo2": False, "glm4": True}

# Their frequencies may depend on the type of layer.
_ROTARY_EMBEDDINGS = {
    "llama.LlamaRotaryEmbedding": RotaryForm(),
    # Written in other words up to transformers 5.17.
    "gemma2.Gemma2RotaryEmbedding": RotaryForm(),
    "gemma3.Gemma3RotaryEmbedding": RotaryForm(),
    "olmo.OlmoRotaryEmbedding": RotaryForm(rounds=False),
    "olmo3.Olmo3RotaryEmbedding": RotaryForm(rounds=False),
}

# Whether one product makes both halves.
_MLPS = {"llama.LlamaMLP": False, "phi3.Phi3MLP": True, "seed_oss.SeedOssMLP": False}

_MIXTURES = {
    "mixtral.MixtralSparseMoeBlock": MixtureForm(),
    "qwen3_moe.Qwen3MoeSparseMoeBlock": MixtureForm(),
    "olmoe.OlmoeSparseMoeBlock": MixtureForm(),
    "qwen2_moe.Qwen2MoeSparseMoeBlock": MixtureForm(has_shared_expert=True),
}

_ROUTERS = {
    "mixtral.MixtralTopKRouter": RouterForm(),
    "qwen2_moe.Qwen2MoeTopKRouter": RouterForm("norm_topk_prob", rounds=True),
}

# That they are the usual ones.
_EXPERTS = {"mixtral.MixtralExperts": True}

_PLAIN_DECODERS = (
    *("llama.LlamaModel", "mistral.MistralModel", "qwen2.Qwen2Model", "gemma2.Gemma2Model", "gemma.GemmaModel"),
    *("mixtral.MixtralModel", "qwen2_moe.Qwen2MoeModel", "olmoe.OlmoeModel"),
    *("ministral.MinistralModel", "cwm.CwmModel"),
)

_DECODERS = {
    **dict.fromkeys(_PLAIN_DECODERS, DecoderForm()),
    "gemma3.Gemma3TextModel": DecoderForm(has_angles_by_type=True),
    "olmo3.Olmo3Model": DecoderForm(has_angles_by_type=True),
    "granite.GraniteModel": DecoderForm(factor="embedding_multiplier"),
}

_MODELS = {
    "llama.LlamaForCausalLM": ModelForm(),
    "mixtral.MixtralForCausalLM": ModelForm(),
    "gemma2.Gemma2ForCausalLM": ModelForm(softcap="final_logit_softcapping"),
    "granite.GraniteForCausalLM": ModelForm(divisor="logits_scaling"),
}


_TABLES: dict[str, Mapping] = {
    "norm": _NORMS,
    "layer": _LAYERS,
    "attention": _ATTENTIONS,
    "rotation": _ROTATIONS,
    "rotary": _ROTARY_EMBEDDINGS,
    "mlp": _MLPS,
    "mixture": _MIXTURES,
    "router": _ROUTERS,
    "experts": _EXPERTS,
    "decoder": _DECODERS,
    "model": _MODELS,
}


def form_of(module: Any, kind: str) -> Any:
    """The form of a module, `None` where it is not of this kind or computes something else.

    Args:
        module (`nn.Module`): The module.
        kind (`str`): "norm" gives a [`NormForm`], "layer" a [`LayerForm`], "attention" an [`AttentionForm`], "rotary"
            a [`RotaryForm`], "decoder" a [`DecoderForm`], "model" a [`ModelForm`], "mixture" a [`MixtureForm`],
            "router" a [`RouterForm`], and "experts" tells that they are the usual ones; "rotation" of attention tells
            whether neighbours of a head turn together, and "mlp" whether one product makes both halves.
    """
    return _form_of(type(module).forward, kind)


@lru_cache(maxsize=256)
def _form_of(forward: Callable, kind: str) -> Any:
    # Files of other models are read only where none before is alike.
    for path, form in _TABLES[kind].items():
        file, _, name = path.partition(".")
        known = _modeling(file)
        if kind == "rotation":
            own = inspect.unwrap(forward).__globals__
            pairs = [(own.get(part), getattr(known, part, None)) for part in ("apply_rotary_pos_emb", "rotate_half")]
        else:
            pairs = [(forward, getattr(getattr(known, name, None), "forward", None))]
        if all(same_code(*pair) for pair in pairs):
            return form
    return None


def _modeling(model_type: str) -> ModuleType | None:
    """The code of a model type; `None` where this version of transformers does not have it."""
    name = f"transformers.models.{model_type}.modeling_{model_type}"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or name):
            raise
        return None


def same_code(one: Any, other: Any) -> bool:
    """Tells whether two functions have the same code but for their docstrings, and the names of their classes."""
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in (one, other)]
    return all(codes) and _described(codes[0]) == _described(codes[1])


def _described(code: CodeType) -> tuple:
    constants = [_described(part) if isinstance(part, CodeType) else part for part in code.co_consts]
    constants = [part for part in constants if not isinstance(part, str) or len(part) < _SHORTEST_DOCSTRING]
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return code.co_code, code.co_names, arguments, tuple(constants)


_SHORTEST_DOCSTRING = 60
