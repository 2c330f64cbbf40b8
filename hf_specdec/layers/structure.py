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
    is_centered: bool = False
    eps: str | float = "variance_epsilon"


class LayerForm(NamedTuple):
    """Names of a decoder layer's norms, and of the number that what it adds to the stream is multiplied by."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None
    factor: str | None = None


class AttentionForm(NamedTuple):
    """How attention is made up, and attributes of the module."""

    is_packed: bool = False  # one product makes queries, keys and values
    norms_whole: bool = False  # norms are of all heads together
    turns: str | None = None  # attribute: heads turn
    softcap: str | None = None  # attribute: bound of the scores


class DecoderForm(NamedTuple):
    """Attributes: whether there are angles for each type of layer, and what embeddings are multiplied by."""

    has_angles_by_type: bool = False
    factor: str | None = None


class ModelForm(NamedTuple):
    """Names in the config of the bound of the logits, and of what they are divided by."""

    softcap: str | None = None
    divisor: str | None = None


class RouterForm(NamedTuple):
    """Attributes: those of [`~kernels.experts.Routing`], or where the module says it."""

    normalizes: bool | str = True
    rounds: bool = False


_PRE_NORM = LayerForm("input_layernorm", None, "post_attention_layernorm", None)

_PLAIN_DECODERS = (
    *("llama.LlamaModel", "mistral.MistralModel", "qwen2.Qwen2Model", "gemma2.Gemma2Model", "gemma.GemmaModel"),
    *("mixtral.MixtralModel", "qwen2_moe.Qwen2MoeModel", "olmoe.OlmoeModel"),
    *("ministral.MinistralModel", "cwm.CwmModel"),
)

_TABLES: dict[str, Mapping[str, Any]] = {
    "norm": {
        "llama.LlamaRMSNorm": NormForm(),
        "gemma2.Gemma2RMSNorm": NormForm(1.0, True, eps="eps"),
        "olmo2.Olmo2RMSNorm": NormForm(0.0, True),
        # Without weights.
        "olmo.OlmoLayerNorm": NormForm(is_centered=True, eps=1e-5),
    },
    "layer": {
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
    },
    "attention": {
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
    },
    # By file alone: whether neighbours turn together.
    "rotation": {"llama": False, "phi3": False, "olmo2": False, "glm4": True},
    # Whether angles have the dtype of what turns, and not float32. Frequencies may depend on the type of layer.
    "rotary": {
        "llama.LlamaRotaryEmbedding": True,
        # Written in other words up to transformers 5.17.
        "gemma2.Gemma2RotaryEmbedding": True,
        "gemma3.Gemma3RotaryEmbedding": True,
        "olmo.OlmoRotaryEmbedding": False,
        "olmo3.Olmo3RotaryEmbedding": False,
    },
    # Whether one product makes both halves.
    "mlp": {"llama.LlamaMLP": False, "phi3.Phi3MLP": True, "seed_oss.SeedOssMLP": False},
    # Whether every token goes through a shared expert as well, by a gate of its own.
    "mixture": {
        "mixtral.MixtralSparseMoeBlock": False,
        "qwen3_moe.Qwen3MoeSparseMoeBlock": False,
        "olmoe.OlmoeSparseMoeBlock": False,
        "qwen2_moe.Qwen2MoeSparseMoeBlock": True,
    },
    "router": {
        "mixtral.MixtralTopKRouter": RouterForm(),
        "qwen2_moe.Qwen2MoeTopKRouter": RouterForm("norm_topk_prob", rounds=True),
    },
    # That they are the usual ones.
    "experts": {"mixtral.MixtralExperts": True},
    "decoder": {
        **dict.fromkeys(_PLAIN_DECODERS, DecoderForm()),
        "gemma3.Gemma3TextModel": DecoderForm(has_angles_by_type=True),
        "olmo3.Olmo3Model": DecoderForm(has_angles_by_type=True),
        "granite.GraniteModel": DecoderForm(factor="embedding_multiplier"),
    },
    "model": {
        "llama.LlamaForCausalLM": ModelForm(),
        "mixtral.MixtralForCausalLM": ModelForm(),
        "gemma2.Gemma2ForCausalLM": ModelForm(softcap="final_logit_softcapping"),
        "granite.GraniteForCausalLM": ModelForm(divisor="logits_scaling"),
    },
}


def form_of(module: Any, kind: str) -> Any:
    """The entry of a module in the table of a kind; `None` where it is not of this kind or computes something else."""
    return _form_of(type(module).forward, kind)


@lru_cache(maxsize=256)
def _form_of(forward: Callable, kind: str) -> Any:
    # Files of other models are read only where none before is alike.
    for path, form in _TABLES[kind].items():
        file, _, name = path.partition(".")
        modeling = _modeling(file)
        if kind == "rotation":
            globals_of = inspect.unwrap(forward).__globals__
            names = ("apply_rotary_pos_emb", "rotate_half")
            pairs = [(globals_of.get(part), getattr(modeling, part, None)) for part in names]
        else:
            pairs = [(forward, getattr(getattr(modeling, name, None), "forward", None))]
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
