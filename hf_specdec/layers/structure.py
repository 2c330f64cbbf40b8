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
from types import CodeType
from typing import Any, NamedTuple


class NormForm(NamedTuple):
    """Attributes of a root mean square norm, see [`~kernels.norms.Norm`], and where the module keeps eps."""

    offset: float = 0.0
    rounds_last: bool = False
    eps: str = "variance_epsilon"


class LayerForm(NamedTuple):
    """Names of a decoder layer's norms: of what attention and MLP read, and of what they add to the stream."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


class AttentionForm(NamedTuple):
    """Attributes: whether one product makes queries, keys and values, and norms are of all heads together."""

    is_packed: bool = False
    norms_whole: bool = False


_PRE_NORM = LayerForm("input_layernorm", None, "post_attention_layernorm", None)

_NORMS = {
    "llama.LlamaRMSNorm": NormForm(),
    "gemma2.Gemma2RMSNorm": NormForm(1.0, True, "eps"),
    "olmo2.Olmo2RMSNorm": NormForm(0.0, True),
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
    "olmo2.Olmo2DecoderLayer": LayerForm(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
}

_ATTENTIONS = {
    "llama.LlamaAttention": AttentionForm(),
    "mistral.MistralAttention": AttentionForm(),
    "qwen2.Qwen2Attention": AttentionForm(),
    "qwen3.Qwen3Attention": AttentionForm(),
    "gemma3.Gemma3Attention": AttentionForm(),
    "phi3.Phi3Attention": AttentionForm(is_packed=True),
    "olmo2.Olmo2Attention": AttentionForm(norms_whole=True),
    "olmo3.Olmo3Attention": AttentionForm(norms_whole=True),
}

# By file alone: whether neighbours turn together.
_ROTATIONS = {"llama": False, "phi3": False, "olmo2": False, "glm4": True}

# Whether one product makes both halves.
_MLPS = {"llama.LlamaMLP": False, "phi3.Phi3MLP": True}

# Whether there are angles for each type of layer.
_DECODERS = {
    **dict.fromkeys(("llama.LlamaModel", "mistral.MistralModel", "qwen2.Qwen2Model", "gemma2.Gemma2Model"), False),
    **dict.fromkeys(("gemma.GemmaModel", "mixtral.MixtralModel", "qwen2_moe.Qwen2MoeModel"), False),
    "gemma3.Gemma3TextModel": True,
}

# Whether the logits may be capped.
_MODELS = {
    "llama.LlamaForCausalLM": False,
    "mixtral.MixtralForCausalLM": False,
    "gemma2.Gemma2ForCausalLM": True,
}


_TABLES: dict[str, Mapping] = {
    "norm": _NORMS,
    "layer": _LAYERS,
    "attention": _ATTENTIONS,
    "rotation": _ROTATIONS,
    "mlp": _MLPS,
    "decoder": _DECODERS,
    "model": _MODELS,
}


def form_of(module: Any, kind: str) -> Any:
    """The form of a module, `None` where it is not of this kind or computes something else.

    Args:
        module (`nn.Module`): The module.
        kind (`str`): "norm" gives a [`NormForm`], "layer" a [`LayerForm`], "attention" an [`AttentionForm`];
            "rotation" of attention tells whether neighbours of a head turn together, "mlp" whether one product makes
            both halves, "decoder" whether each type of layer has angles of its own, and "model" whether logits may be
            capped.
    """
    return _form_of(type(module).forward, kind)


@lru_cache(maxsize=256)
def _form_of(forward: Callable, kind: str) -> Any:
    # Files of other models are read only where none before is alike.
    for path, form in _TABLES[kind].items():
        file, _, name = path.partition(".")
        known = import_module(f"transformers.models.{file}.modeling_{file}")
        if kind == "rotation":
            own = inspect.unwrap(forward).__globals__
            pairs = [(own.get(part), getattr(known, part)) for part in ("apply_rotary_pos_emb", "rotate_half")]
        else:
            pairs = [(forward, getattr(known, name).forward)]
        if all(same_code(*pair) for pair in pairs):
            return form
    return None


def same_code(one: Any, other: Callable) -> bool:
    """Tells whether two functions have the same code but for their docstrings, and the names of their classes."""
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in (one, other)]
    return all(codes) and _described(codes[0]) == _described(codes[1])


def _described(code: CodeType) -> tuple:
    constants = [_described(part) if isinstance(part, CodeType) else part for part in code.co_consts]
    constants = [part for part in constants if not isinstance(part, str) or len(part) < _SHORTEST_DOCSTRING]
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return code.co_code, code.co_names, arguments, tuple(constants)


_SHORTEST_DOCSTRING = 60
