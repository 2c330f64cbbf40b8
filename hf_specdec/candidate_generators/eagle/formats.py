"""The published formats of EAGLE heads, brought to one record and one set of tensor names.

Names and shapes of the tensors decide; the config only tells what they cannot. The formats differ in names alone:

    SafeAILab, HASS (EAGLE-1)       fc, layers.{i}
    speculators, type "eagle"       fusion_fc, transformer
    SafeAILab (EAGLE-3), SpecForge, SGLang, AngelSlim
                                    fc, midlayer, norm, lm_head, d2t, t2d
    speculators, type "eagle3"; ModelOpt
                                    fc, layers.{i}, norm, lm_head, d2t, t2d, input_norm, fc_norm.{a}

Shapes: h and th hidden sizes of draft and target, A captured states, V vocabulary of the target, U that of the draft,
N decoder layers of the target.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.utils import logging

from ...checkpoints.checkpoint import Checkpoint, listed
from ...checkpoints.config_keys import refused_key
from ...checkpoints.draft_checkpoint import ROPE_NEEDS, DraftCheckpoint, TargetSizes, stored_vocabulary
from ...checkpoints.settings import ACTIVATION, COUNT, FLAG, INDICES, NAMES, POSITIVE
from ...errors import CheckpointFormatError, shown
from ...hub.formats import unwrapped


logger = logging.get_logger(__name__)

_RENAMED = {
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "eagle_linear.": "fc.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}

_LAYER = "layers.0"

# Keys of configs that are read or judged here.
_READ = frozenset(
    "aux_layer_ids eagle_aux_hidden_state_layer_ids eagle_config fc_norm hidden_act layer_ids layer_types layernorms "
    "logit_scale max_position_embeddings model norm_before_fc norm_before_residual norm_output "
    "original_max_position_embeddings parallel_draft_step partial_rotary_factor quantization_config rms_norm_eps "
    "rope_parameters rope_scaling rope_theta sliding_window target_hidden_size use_aux_norm "
    "use_input_layernorm_in_first_layer use_last_layernorm use_sliding_window".split()
)

# What some files hold and drafting has no use for: buffers, what only training needs, and EAGLE-1's copy of the
# target's lm_head.
_UNUSED = re.compile(r"d2t|t2d|token_map|.*inv_freq|verifier_.*|lm_head\.weight")

# Exit signals of a variant: rows of `fc` behind those of the state.
_MAX_EXTRA_ROWS = 3


@dataclass(frozen=True)
class EagleConfig:
    """What an EAGLE head consists of.

    Args:
        method (`str`): "eagle" (EAGLE-1, EAGLE-2, HASS) or "eagle3".
        hidden_size (`int`): h.
        target_hidden_size (`int`): th.
        vocab_size (`int`): V.
        draft_vocab_size (`int`): U.
        num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, intermediate_size (`int`): Of the
            layers; the query heads need not have h elements together.
        hidden_act (`str`): Of the MLPs.
        rms_norm_eps (`float`): Of all norms.
        rope_parameters (`Mapping`): `rope_type`, `rope_theta` and what the type needs, as in transformers. They are
            the head's own, never the target's.
        max_position_embeddings (`int`): Only rotary embeddings that depend on the length of the text look at it.
        sliding_window (`int`, *optional*): How many positions the layers look back.
        aux_layer_ids (`tuple[int, ...]` of length A): The captured boundaries in increasing order: i is the residual
            stream that enters decoder layer i of the target, N the one that enters its final norm. Empty: the state
            behind the final norm.
        norms (`tuple[str, ...]`): Names of the norms there are, such as "layers.0.hidden_norm".
        biases (`tuple[str, ...]`): Names of the linear layers with a bias, such as "fc".
        has_fc, own_embedding, own_head, has_token_ids (`bool`): Whether the head has these; it shares embedding and
            lm_head with the target otherwise, and a draft id is the target's id otherwise.
        norm_before_residual (`bool`): EAGLE-3's first layer adds to the normed state, not to the state itself.
        norm_output (`bool`): What is fed back has gone through the final norm.
        logit_scale (`float`): Factor of the logits.
    """

    method: Literal["eagle", "eagle3"]
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_parameters: Mapping[str, Any]
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    sliding_window: int | None = None
    aux_layer_ids: tuple[int, ...] = ()
    norms: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    has_fc: bool = True
    own_embedding: bool = False
    own_head: bool = False
    has_token_ids: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0

    @property
    def num_states(self) -> int:
        """A; 1 where the state behind the final norm is read."""
        return len(self.aux_layer_ids) or 1

    @property
    def fc_inputs(self) -> int:
        """Input width of the fully connected layer."""
        if self.method == "eagle":
            return self.hidden_size + self.target_hidden_size
        return self.num_states * self.target_hidden_size

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json` in the layout of the first publishers, with what they lack under own keys."""
        rope = {name: value for name, value in self.rope_parameters.items() if name != "rope_theta"}
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rope_theta": self.rope_parameters["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else rope,
            "bias": "fc" in self.biases,
            **{name: getattr(self, name) for name in _STORED_AS_THEY_ARE},
        }
        if self.sliding_window:
            config |= {"layer_types": ["sliding_attention"] * self.num_hidden_layers}
        if self.method == "eagle3":
            config |= {
                "draft_vocab_size": self.draft_vocab_size,
                "aux_layer_ids": list(self.aux_layer_ids),
                "eagle_config": {
                    "use_aux_hidden_state": bool(self.aux_layer_ids),
                    "use_input_layernorm_in_first_layer": f"{_LAYER}.input_layernorm" in self.norms,
                    "use_last_layernorm": "norm" in self.norms,
                },
            }
        return config


_STORED_AS_THEY_ARE = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "sliding_window",
    "vocab_size",
    "norm_before_residual",
    "norm_output",
    "logit_scale",
)


def stored_tensors(config: EagleConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a network under the names of the first publishers, `d2t` and `t2d` for its table of ids."""
    stored = stored_vocabulary(tensors, config.vocab_size)
    if config.method == "eagle3":
        first = f"{_LAYER}."
        stored = {f"midlayer.{n.removeprefix(first)}" if n.startswith(first) else n: t for n, t in stored.items()}
    return stored


def method_of(names: Iterable[str]) -> str | None:
    """The method of a head with tensors of these names, in any format; `None` where they are no EAGLE head's."""
    names = set(map(_name, names))
    if "layers.0.hidden_norm.weight" in names:
        return "eagle3"
    return "eagle" if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names else None


def refusal(names: Iterable[str], config: Mapping[str, Any]) -> str | None:
    """Why a head with tensors of these names, in any format, and this config is not supported; `None` where it is."""
    names, kind = set(map(_name, names)), config.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3", "peagle"):
        return f"is of the kind {shown(kind)} (`speculators_model_type`), no EAGLE head. Pass an EAGLE head."
    known = next((what for belongs, what in _REFUSED if belongs(names, config)), None)
    return known or refused_key(config, "eagle3", _READ)


def _name(stored: str) -> str:
    """The name used here of a tensor in a file."""
    stored = unwrapped(stored)
    for old, new in _RENAMED.items():
        if stored.startswith(old):
            return new + stored.removeprefix(old)
    return stored


class EagleCheckpoint(DraftCheckpoint):
    """A checkpoint under the names used here, with what follows from the shapes.

    Args:
        checkpoint (`Checkpoint`): Of any of the formats.
        target (`TargetSizes`): The target.
        aux_layer_ids (`Sequence[int]`, *optional*): Boundaries that the user has named; they go before the config's.

    Attributes:
        config (`EagleConfig`): The head.

    Raises:
        CheckpointFormatError: The checkpoint is incomplete, contradicts itself, is no EAGLE head that this package
            knows, or was made for another target.
    """

    noun = "head"
    unused = _UNUSED

    def __init__(self, checkpoint: Checkpoint, target: TargetSizes, aux_layer_ids: Sequence[int] | None = None):
        super().__init__(checkpoint, target, _name, places_in(checkpoint.config))
        self._check_kind()
        projections = [f"{_LAYER}.self_attn.{part}_proj" for part in "qkvo"]
        projections += [f"{_LAYER}.mlp.{part}_proj" for part in ("gate", "up", "down")]
        self._require([f"{name}.weight" for name in projections], "the first layer")
        self.hidden_size = self._matrix(f"{_LAYER}.self_attn.o_proj")[0]
        # Not by `fc`: with two captured states it is as wide as that of EAGLE-1.
        twice = self._matrix(f"{_LAYER}.self_attn.q_proj")[1] == 2 * self.hidden_size
        self.method = "eagle3" if twice or f"{_LAYER}.hidden_norm.weight" in self.shapes else "eagle"
        self._check_target()
        # EAGLE-1 has no vocabulary of its own.
        self.token_ids = None if self.method == "eagle" else self._read_token_ids()
        self.config = self._config(aux_layer_ids)
        self._require([f"{name}.weight" for name in self._required_norms()], "its norms")

    def _judge_left_over(self, names):
        logger.warning(f"'{self.name}': {len(names)} tensors are not used: {listed(names)}.")

    def _fitted(self, name, tensor, shape):
        if name.startswith("fc.") and 0 < len(tensor) - shape[0] <= _MAX_EXTRA_ROWS:
            return tensor[: shape[0]].clone()
        return super()._fitted(name, tensor, shape)

    # What it is

    def _check_kind(self) -> None:
        if what := refusal(self.stored.values(), self.settings):
            raise CheckpointFormatError(f"'{self.name}' {what}")
        if method_of(self.stored.values()) is None:
            raise self._wrong(
                f"is no EAGLE head: {self.checkpoint.file} has neither `fc.weight` nor `hidden_norm.weight` of a "
                f"first layer (its tensors: {listed(self.stored.values())})",
                "Pass an EAGLE checkpoint, or name the method that this one is for.",
            )

    def _check_target(self) -> None:
        """Refuses heads of another target, by everything that tells sizes of the target."""
        self._check_vocabulary()
        stated = self._setting("target_hidden_size", COUNT)
        size = stated or (self.hidden_size if self._reads_last_state else self.target.hidden_size)
        if size != self.target.hidden_size:
            raise self._wrong(
                f"was made for a target with hidden size {size}, and {self.target.name} has {self.target.hidden_size}",
                self._for_target,
            )
        rows = self.shapes.get("embed_tokens.weight")
        if rows is None and self.hidden_size != self.target.hidden_size:
            raise self._wrong(
                f"has no `embed_tokens.weight`, and its hidden size {self.hidden_size} does not fit the embedding of "
                f"{self.target.name} ({self.target.hidden_size})",
                self._for_target,
            )

    @property
    def _reads_last_state(self) -> bool:
        """Whether it reads the state behind the target's final norm."""
        return self.method == "eagle" or "fc.weight" not in self.shapes

    # The record

    def _config(self, aux_layer_ids: Sequence[int] | None) -> EagleConfig:
        norms = tuple(name.removesuffix(".weight") for name in self.shapes if self._is_norm(name))
        ids = () if self._reads_last_state else self._aux_layer_ids(aux_layer_ids)
        own_head = self.method == "eagle3" and "lm_head.weight" in self.shapes
        return EagleConfig(
            method=self.method,
            hidden_size=self.hidden_size,
            target_hidden_size=self.target.hidden_size,
            vocab_size=self.target.vocab_size,
            draft_vocab_size=self._draft_vocab_size(own_head),
            num_hidden_layers=self._num_layers(),
            **self._attention_sizes(),
            intermediate_size=self._matrix(f"{_LAYER}.mlp.gate_proj")[0],
            rope_parameters=self._rope_parameters(),
            hidden_act=self._setting("hidden_act", ACTIVATION) or "silu",
            rms_norm_eps=self._setting("rms_norm_eps", POSITIVE) or 1e-6,
            max_position_embeddings=self._setting("max_position_embeddings", COUNT) or 2048,
            sliding_window=self._sliding_window(),
            aux_layer_ids=ids,
            norms=norms,
            biases=tuple(name.removesuffix(".bias") for name in self.shapes if name.endswith(".bias")),
            has_fc="fc.weight" in self.shapes,
            own_embedding="embed_tokens.weight" in self.shapes,
            own_head=own_head,
            has_token_ids=self.token_ids is not None,
            norm_before_residual=bool(self._setting("norm_before_residual", FLAG)),
            norm_output=self._norm_output("fc_norm.0" in norms),
            logit_scale=float(self._setting("logit_scale", POSITIVE) or 1),
        )

    def _is_norm(self, name: str) -> bool:
        return name.endswith(".weight") and len(self.shapes[name]) == 1 and not _UNUSED.fullmatch(name)

    def _attention_sizes(self) -> dict[str, int]:
        queries, keys = (self._matrix(f"{_LAYER}.self_attn.{part}_proj")[0] for part in "qk")
        normed = self.shapes.get(f"{_LAYER}.self_attn.q_norm.weight")
        heads = queries // normed[0] if normed else self._setting("num_attention_heads", COUNT)
        if not heads:
            raise self._wrong("does not say `num_attention_heads` in its config.json", "Add it there.")
        size = queries // heads
        if queries % heads or keys < size or keys % size or heads % (keys // size) or size % 2:
            raise self._wrong(
                f"has {heads} query heads, which do not fit its {queries} rows of q_proj and {keys} of k_proj",
                "Pass a checkpoint whose config fits its weights.",
            )
        return {"num_attention_heads": heads, "num_key_value_heads": keys // size, "head_dim": size}

    def _rope_parameters(self) -> dict[str, Any]:
        parameters, missing = self._stated_rope(10000.0)
        kind = parameters["rope_type"]
        if original := self._setting("original_max_position_embeddings", COUNT):
            parameters.setdefault("original_max_position_embeddings", original)
        partial = parameters.get("partial_rotary_factor") or self._setting("partial_rotary_factor", POSITIVE) or 1
        if kind not in ROPE_NEEDS or missing or partial != 1:
            what = f"no {' and '.join(missing)}" if missing else f"partial_rotary_factor={partial}"
            raise self._wrong(
                f"has a rotary embedding of rope_type '{kind}'" + (f" with {what}" if kind in ROPE_NEEDS else ""),
                f"Heads of the types {', '.join(ROPE_NEEDS)} on whole attention heads can be used.",
            )
        return parameters

    def _sliding_window(self) -> int | None:
        kinds = set((self._setting("layer_types", NAMES) or ())[: self._num_layers()])
        if "sliding_attention" not in kinds:
            return None
        if len(kinds) > 1:
            raise self._wrong("mixes layers with and without a sliding window", "Pass a head with layers of one kind.")
        return self._setting("sliding_window", COUNT)

    def _norm_output(self, has_chunk_norms: bool) -> bool:
        given = bool(self._setting("norm_output", FLAG))
        # A training framework has the same key for the norm before the lm_head, and feeds back the state before it.
        trusted = has_chunk_norms or not {"speculators_model_type", "aux_layer_ids"}.isdisjoint(self.settings)
        if given and not trusted:
            logger.info(f"'{self.name}': `norm_output` is read as the norm before the lm_head; its input is fed back.")
        return given and trusted

    def _required_norms(self) -> list[str]:
        layers = range(self.config.num_hidden_layers)
        names = [f"layers.{index}.post_attention_layernorm" for index in layers]
        names += [f"layers.{index}.input_layernorm" for index in layers[1:]]
        if self.method == "eagle":
            return names
        names.append(f"{_LAYER}.hidden_norm")
        if self._setting("use_input_layernorm_in_first_layer", FLAG) is not False:
            names.append(f"{_LAYER}.input_layernorm")
        if self._setting("use_last_layernorm", FLAG) is not False:
            names.append("norm")
        if self._setting("norm_before_fc", FLAG):
            names.append("input_norm")
        chunk_norms = any(self._setting(key, FLAG) for key in ("fc_norm", "use_aux_norm"))
        if chunk_norms or any(name.startswith("fc_norm.") for name in self.config.norms):
            names += [f"fc_norm.{index}" for index in range(self.config.num_states)]
        return names

    # Captured states

    def _aux_layer_ids(self, named: Sequence[int] | None) -> tuple[int, ...]:
        """The boundaries, checked against the width of `fc` and the target's layers."""
        layers, width = self.target.num_hidden_layers, self._matrix("fc")[1]
        states, rest = divmod(width, self.target.hidden_size)
        if rest:
            raise self._wrong(
                f"reads {width} values of the target's states, which is no multiple of the hidden size of "
                f"{self.target.name}, {self.target.hidden_size}",
                self._for_target,
            )
        ids = self._stated_ids() if named is None else sorted(set(named))
        outside = [index for index in ids if not 0 <= index <= layers]
        if outside:
            raise self._wrong(
                f"captures the target's states at the layers {ids}, and {self.target.name} has {layers}",
                self._for_target,
            )
        if len(ids) != states:
            raise self._wrong(
                f"reads {states} states of hidden size {self.target.hidden_size} from the target (`fc` has {width} "
                f"inputs), and {len(ids)} layers are named: {ids}",
                "Name them with `aux_layer_ids` (i: what enters decoder layer i of the target), or pass the head "
                "that was trained for this target.",
            )
        return tuple(ids)

    def _stated_ids(self) -> list[int]:
        """The boundaries by the config, which has them in one of two notations without saying which."""
        layers = self.target.num_hidden_layers
        usual = sorted({2, layers // 2, layers - 3} & set(range(layers)))
        if own := self._setting("aux_layer_ids", INDICES):
            return sorted(set(own))
        names = ("eagle_aux_hidden_state_layer_ids", "layer_ids")
        given = next(filter(None, (self._setting(name, INDICES) for name in names)), None)
        if not given:
            return usual
        ids = sorted(set(given))
        if "speculators_model_type" in self.settings or max(ids) == layers or ids == usual:
            return ids
        if ids[0] == 1:
            # Numbers of the layers whose outputs are meant.
            return [index + 1 for index in ids]
        logger.warning(
            f"'{self.name}' does not say whether {ids} are the layers that the captured states enter or leave; the "
            f"former is assumed. If few drafts are accepted, try aux_layer_ids={[index + 1 for index in ids]}."
        )
        return ids

    # Vocabulary

    def _absolute_ids(self, table):
        try:
            return super()._absolute_ids(table)
        except CheckpointFormatError:
            if not self._is_selection(table):
                raise
        logger.warning(f"'{self.name}': `d2t` holds ids, where the format has distances; it is read as ids.")
        return table

    def _draft_vocab_size(self, own_head: bool) -> int:
        if self.token_ids is not None:
            return len(self.token_ids)
        if not own_head and self.hidden_size != self.target.hidden_size:
            raise self._wrong(
                f"has no `lm_head.weight`, and its hidden size {self.hidden_size} does not fit the lm_head of "
                f"{self.target.name} ({self.target.hidden_size})",
                "Pass a complete checkpoint.",
            )
        return super()._draft_vocab_size(own_head)


# What is not supported: how it is recognised, and what it is.
_REFUSED = (
    (
        lambda names, config: (
            config.get("speculators_model_type") == "peagle"
            or "mask_hidden" in names
            or _eagle_config(config).get("parallel_draft_step") not in (None, 0, 1)
        ),
        "is a head that drafts several tokens in one forward (P-EAGLE, parallel drafting), which is not supported. "
        "Pass an EAGLE-1, EAGLE-2 or EAGLE-3 head.",
    ),
    (
        lambda names, config: "eh_proj.weight" in names or {"enorm.weight", "hnorm.weight"} <= names,
        "is a layer for multi-token prediction (`eh_proj`, `enorm`, `hnorm`), no EAGLE head. Pass an EAGLE head.",
    ),
    (
        lambda names, config: any(f"{_LAYER}.self_attn.{part}.weight" in names for part in _LATENT),
        "has a layer with multi-head latent attention (MLA), which is not supported. Pass a head with ordinary "
        "attention.",
    ),
    (
        lambda names, config: bool(config.get("layernorms")) or not names.isdisjoint(_LAYERNORMS),
        "has norms before `fc` and before the lm_head (`layernorms: true`); no published description says which state "
        "such a head feeds back, so it is not supported. Pass a head without them.",
    ),
    (
        lambda names, config: any("lora_" in name for name in names),
        "holds adapter weights (LoRA) for the target, which are not supported: the target is used as it is loaded. "
        "Pass a head without them.",
    ),
    (
        lambda names, config: bool(config.get("quantization_config")) or not names.isdisjoint(_PACKED),
        "holds quantised weights, which are not supported. Pass the head in a floating-point type.",
    ),
    (
        lambda names, config: any(".experts." in name for name in names),
        "has a layer with experts, which is not supported. Pass a head with an ordinary MLP.",
    ),
    (
        lambda names, config: "EagleLlama4ForCausalLM" in str(config.get("architectures")),
        "has a Llama-4 layer (rotary embedding by interleaved pairs), which is not supported. Pass an EAGLE-3 head.",
    ),
    (
        lambda names, config: "EagleCohere" in str(config.get("architectures")),
        "has a Cohere layer (attention and MLP side by side), which is not supported. Pass a head with a Llama layer.",
    ),
    (
        lambda names, config: "input_norm1.weight" in names or any(name.startswith("eagle_layers.") for name in names),
        "has a MiniCPM layer (scaled embeddings and residuals), which is not supported. Pass a head with a Llama "
        "layer.",
    ),
)
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_LAYERNORMS = {
    f"{name}.weight"
    for name in ("embedding_layernorm", "embed_layernorm", "pre_lm_head_layernorm", "lm_head_layernorm")
}
_PACKED = {f"{_LAYER}.mlp.down_proj.{part}" for part in ("weight_scale", "weight_packed", "qweight")}


def places_in(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Where a config may say something. Some formats have the config of a model, that of the layers, inside of it."""
    nested = (config.get(key) for key in ("transformer_layer_config", "model"))
    layer = next((part for part in nested if isinstance(part, Mapping)), config)
    return layer, config, _eagle_config(config)


def _eagle_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where some formats keep what a whole model has not."""
    found = config.get("eagle_config")
    return found if isinstance(found, Mapping) else {}
