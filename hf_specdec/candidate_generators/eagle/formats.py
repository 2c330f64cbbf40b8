"""The published formats of EAGLE heads, brought to one record and one set of tensor names.

Names and shapes of the tensors decide; the config only tells what they cannot. The formats differ in names alone:

    SafeAILab, HASS (EAGLE-1)       fc, layers.{i}
    speculators, type "eagle"       fusion_fc, transformer
    SafeAILab (EAGLE-3), SpecForge, SGLang, AngelSlim
                                    fc, midlayer, norm, lm_head, d2t, t2d
    speculators, type "eagle3"; ModelOpt
                                    fc, layers.{i}, norm, lm_head, d2t, t2d, input_norm, fc_norm.{a}
    P-EAGLE (speculators, type "peagle"; AWS)
                                    the same or with midlayer, and mask_hidden

Shapes: h and th hidden sizes of draft and target, A captured states, V vocabulary of the target, U that of the draft,
N decoder layers of the target.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from transformers.utils import logging

from ...checkpoints.draft_reader import (
    FIRST_LAYER,
    LAYERS,
    DraftConfig,
    DraftReader,
    is_selection,
    share_of,
    stored_vocabulary,
)
from ...checkpoints.format import Format, Unsupported, is_marked
from ...checkpoints.header import TargetNeeds, TargetSizes, listed
from ...checkpoints.schema import COUNT, FLAG, INDEX, INDICES, POSITIVE, Key, Tensor, keys, renamed


logger = logging.get_logger(__name__)

# Exit signals of a variant: rows of `fc` after those of the state.
_MAX_EXTRA_ROWS = 3


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DraftConfig):
    """Record of an EAGLE head; see also [`DraftConfig`]."""

    method: Literal["eagle", "eagle3"]  # "eagle": EAGLE-1, EAGLE-2, HASS
    sliding_window: int | None = None  # how many positions the layers look back, its own included
    full_layers: tuple[int, ...] = ()  # that look back to the beginning although others have a window
    # The A captured boundaries in increasing order: i is the residual stream that enters decoder layer i of the
    # target, N the one that enters its final norm. Empty: the state after the final norm.
    aux_layer_ids: tuple[int, ...] = ()
    norms: tuple[str, ...] = ()  # those there are, such as "layers.0.hidden_norm"
    biases: tuple[str, ...] = ()  # the linear layers with a bias, such as "fc"
    has_fc: bool = True
    own_embedding: bool = False  # else it shares the target's
    norm_before_residual: bool = False  # EAGLE-3's first layer adds to the normed state, not to the state itself
    norm_output: bool = False  # what is fed back has gone through the final norm
    logit_scale: float = 1.0
    mask_token_id: int | None = None  # of the masks with which a P-EAGLE head drafts all tokens at once
    num_parallel_tokens: int = 0  # that it was trained to draft so

    @property
    def num_states(self) -> int:
        """A; 1 where the state after the final norm is read."""
        return len(self.aux_layer_ids) or 1

    @property
    def needs(self) -> TargetNeeds:
        """The target that it was made for."""
        layers = max(self.aux_layer_ids, default=None)
        return TargetNeeds(None, self.target_hidden_size, self.vocab_size, min_hidden_layers=layers)

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json` in the layout of the first publishers, with what they lack under own keys."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **super().to_dict(),
            "bias": "fc" in self.biases,
            "sliding_window": self.sliding_window,
            "norm_before_residual": self.norm_before_residual,
            "norm_output": self.norm_output,
            "logit_scale": self.logit_scale,
        }
        if self.sliding_window:
            kinds = ("full" if index in self.full_layers else "sliding" for index in range(self.num_hidden_layers))
            config |= {"layer_types": [f"{kind}_attention" for kind in kinds]}
        if self.method == "eagle3":
            config |= {
                "draft_vocab_size": self.draft_vocab_size,
                "aux_layer_ids": list(self.aux_layer_ids),
                "eagle_config": {
                    "use_aux_hidden_state": bool(self.aux_layer_ids),
                    "use_input_layernorm_in_first_layer": f"{FIRST_LAYER}.input_layernorm" in self.norms,
                    "use_last_layernorm": "norm" in self.norms,
                },
            }
        if self.mask_token_id is not None:
            proposal = {"proposal_type": "greedy", "speculative_tokens": self.num_parallel_tokens}
            config |= {"mask_token_id": self.mask_token_id, "speculators_config": {"proposal_methods": [proposal]}}
        return config


def stored_tensors(config: EagleConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a network under the names of the first publishers, `d2t` and `t2d` for its table of ids."""
    stored = stored_vocabulary(tensors, config.vocab_size)
    if config.method == "eagle3":
        stored = {renamed(name, {f"{FIRST_LAYER}.": "midlayer."}) or name: part for name, part in stored.items()}
    return stored


_MLA = ("architectures=Eagle3Deepseek.*",)
_LLAMA4 = ("architectures=EagleLlama4.*",)
_COHERE = ("architectures=EagleCohere.*",)
_MINICPM = ("architectures=EagleMiniCPM.*",)
_MTP = ("architectures=Eagle(DeepSeekMTP|MistralLarge3).*",)
_PARALLEL = ("architectures=(?i:peagle).*", "speculators_model_type=peagle")
_MASK = "mask_hidden"

# Tokens that a head of this kind drafts where its config does not say how many it was trained for.
_TOKENS_AT_ONCE = 7

_UNSUPPORTED = (
    Unsupported(
        "is a head whose tokens are drafted by heads of their own (ModelOpt's parallel drafting)",
        ("parallel_draft_step=(?!(0|1|False|True)$).+",),
    ),
    Unsupported(
        "is a layer for multi-token prediction (`eh_proj`, `enorm`, `hnorm`)", _MTP, ("eh_proj.weight", "enorm.weight")
    ),
    Unsupported(
        "has a layer with multi-head latent attention (MLA)",
        _MLA,
        (f"{FIRST_LAYER}.self_attn.q_[ab]_proj.weight", f"{FIRST_LAYER}.self_attn.kv_[ab]_proj*.weight"),
    ),
    Unsupported(
        "has norms before `fc` and before the lm_head (`layernorms: true`; no published description says which state "
        "such a head feeds back)",
        ("layernorms",),
        ("embed*_layernorm.weight", "*lm_head_layernorm.weight"),
    ),
    Unsupported("holds adapter weights (LoRA) for the target, which is used as it is loaded", (), ("*lora_*",)),
    Unsupported("has a layer with experts", (), ("*.experts.*",)),
    Unsupported("has a Llama-4 layer (rotary embedding by interleaved pairs)", _LLAMA4),
    Unsupported("has a Cohere layer (attention and MLP side by side)", _COHERE),
    Unsupported(
        "has a MiniCPM layer (scaled embeddings and residuals)", _MINICPM, ("input_norm1.weight", "eagle_layers.*")
    ),
)


class EagleReader(DraftReader):
    """A checkpoint with an EAGLE head; boundaries that the user has named go before the config's."""

    record_class: ClassVar[type[EagleConfig]] = EagleConfig
    noun = "head"
    kinds: ClassVar[tuple[str, ...]] = ("eagle", "eagle3", "peagle")
    # Some formats have the config of a model, that of the layers, inside of it.
    blocks: ClassVar[tuple[str, ...]] = ("dflash_config", "transformer_layer_config", "model", "", "eagle_config")
    keys: ClassVar[tuple[Key, ...]] = (
        *DraftReader.keys,
        Key("rope_theta", POSITIVE, 10000.0),
        Key("rms_norm_eps", POSITIVE, 1e-6),
        Key("max_position_embeddings", COUNT, 2048),
        Key("logit_scale", POSITIVE, 1),
        # One of two notations: of the first it is known which.
        *keys("aux_layer_ids", INDICES, ()),
        Key("eagle_aux_hidden_state_layer_ids layer_ids", INDICES, ()),
        *keys("fc_norm use_aux_norm norm_before_fc norm_before_residual norm_output", FLAG, False),
        *keys("use_input_layernorm_in_first_layer use_last_layernorm", FLAG, True),
        Key("mask_token_id dspark_noise_token_id pard_token ptd_token_id", INDEX),
        Key("use_sliding_window", FLAG),
        Key("original_max_position_embeddings", COUNT),
        Key("partial_rotary_factor", POSITIVE, 1),
    )
    notes = (
        "eagle_config layernorms model parallel_draft_step quantization_config "
        "*loss* draft_attn_impl draft_vocab_size eagle_decoder_type eagle_fc_bias eagle_freeze_base_model "
        "dflash_config down_sample_* num_depths para_depths parallel_drafting "
        "embed_requires_grad enable_sp_ulysses fusion_bias has_lm_head hot_vocab_size num_aux_* num_eagle_features "
        "parallel_draft_heads_num_layers target_model_type truncated_vocab_size ttt_* use_aux_hidden_state"
    )
    renamed: ClassVar[Mapping[str, str]] = {
        "midlayer.": "layers.0.",
        "transformer.": "layers.0.",
        "fusion_fc.": "fc.",
        "eagle_linear.": "fc.",
        "aux_norm_low.": "fc_norm.0.",
        "aux_norm_mid.": "fc_norm.1.",
        "aux_norm_high.": "fc_norm.2.",
    }
    unsupported: ClassVar[tuple[Unsupported, ...]] = _UNSUPPORTED
    instead = "Pass an EAGLE-1, EAGLE-2 or EAGLE-3 head with layers of the Llama kind."
    # Buffers, what only training needs, and EAGLE-1's copy of the target's lm_head.
    unused: ClassVar[re.Pattern[str]] = re.compile(r"d2t|t2d|token_map|.*inv_freq|verifier_.*|lm_head\.weight")

    # What it is

    @property
    def method(self) -> Literal["eagle", "eagle3"]:
        # Not by `fc`: with two captured states it is as wide as that of EAGLE-1.
        if f"{FIRST_LAYER}.hidden_norm.weight" in self.stored:
            return "eagle3"
        rows, columns = (self.shape(f"{FIRST_LAYER}.self_attn.{part}_proj.weight") or () for part in "oq")
        return "eagle3" if columns[1:] == (2 * rows[0] if rows else 0,) else "eagle"

    @property
    def table(self) -> tuple[Tensor, ...]:
        """h: hidden size, f: inputs of `fc`, t: width of a captured state; further symbols as in [`LAYERS`]."""
        is_third, says = self.method == "eagle3", self.setting
        return (
            LAYERS[0],
            Tensor("layers.0.self_attn.q_proj.weight", "q 2h" if is_third else "q h"),
            Tensor("layers.0.self_attn.(k|v)_proj.weight", "k 2h" if is_third else "k h"),
            Tensor("layers.0.input_layernorm.weight", "h", is_third and says("use_input_layernorm_in_first_layer")),
            Tensor("layers.0.hidden_norm.weight", "h", is_third),
            *LAYERS,
            # Some have rows after those of the state.
            Tensor("fc.weight", "* f", needed=not is_third),
            Tensor("input_norm.weight", "f", says("norm_before_fc")),
            Tensor("fc_norm.{chunk}.weight", "t", needed=False),
            Tensor("norm.weight", "h", is_third and says("use_last_layernorm")),
            Tensor("embed_tokens.weight", "* h", needed=False),
            *([Tensor("lm_head.weight", "* h")] if self.own_head else []),
            Tensor(_MASK, needed="a P-EAGLE head" if self.is_parallel else False),
        )

    @property
    def is_parallel(self) -> bool:
        """True where it drafts all tokens at once."""
        return _MASK in self.stored or is_marked(self.header.config, _PARALLEL)

    @property
    def num_draft_tokens(self) -> int | None:
        return super().num_draft_tokens or (_TOKENS_AT_ONCE if self.is_parallel else None)

    @property
    def reads_last_state(self) -> bool:
        """True where it reads the state after the target's final norm."""
        return self.method == "eagle" or "fc.weight" not in self.stored

    @property
    def own_head(self) -> bool:
        return self.method == "eagle3" and super().own_head

    @property
    def needs(self) -> TargetNeeds:
        width, (ids, _) = self.setting("target_hidden_size"), self._stated_ids()
        if self.reads_last_state:
            return TargetNeeds(None, width or self.sizes["h"], self.stated_vocab_size)
        # Without names of states there are three. In one of two notations they are one less than the layers needed.
        width = width or share_of(self.sizes["f"], len(ids) or 3)
        return TargetNeeds(None, width, self.stated_vocab_size, min_hidden_layers=max(ids, default=None))

    # The record

    def own_fields(self) -> dict[str, Any]:
        weights = (name for name in self.stored if name.endswith(".weight") and not self.unused.fullmatch(name))
        norms = tuple(name.removesuffix(".weight") for name in weights if len(self.shape(name)) == 1)
        # A training framework has the same key for the norm before the lm_head, and feeds back the state before it.
        is_clear = "fc_norm.0" in norms or {"speculators_model_type", "aux_layer_ids"} & self.header.config.keys()
        if self.setting("norm_output") and not is_clear:
            logger.info(f"'{self.name}': `norm_output` is read as the norm before the lm_head; its input is fed back.")
        mask_token_id = self.setting("mask_token_id") if self.is_parallel else None
        if self.is_parallel and mask_token_id is None:
            raise self.wrong(
                f"is a P-EAGLE head (`{_MASK}`) and does not say which token its masks are",
                "Add `mask_token_id` to its config.json.",
            )
        return {
            "method": self.method,
            **super().own_fields(),
            **self._windows(),
            "norms": norms,
            "biases": tuple(name.removesuffix(".bias") for name in self.stored if name.endswith(".bias")),
            "has_fc": "fc.weight" in self.stored,
            "own_embedding": "embed_tokens.weight" in self.stored,
            "norm_before_residual": self.setting("norm_before_residual"),
            "norm_output": self.setting("norm_output") and bool(is_clear),
            "logit_scale": float(self.setting("logit_scale")),
            "mask_token_id": mask_token_id,
            "num_parallel_tokens": self.num_draft_tokens if self.is_parallel else 0,
        }

    def target_fields(self, target: TargetSizes) -> dict[str, Any]:
        ids = () if self.reads_last_state else self._boundaries(target)
        fields = super().target_fields(target)
        norms_states = self.setting("fc_norm") or self.setting("use_aux_norm")
        if norms_states or any(name.startswith("fc_norm.") for name in self.stored):
            self.require([f"fc_norm.{index}.weight" for index in range(len(ids) or 1)], "its norms")
        token = self.setting("mask_token_id")
        if self.is_parallel and token >= (target.vocab_size or 0):
            raise self.wrong(
                f"has the mask token {token}, and its embedding has {target.vocab_size} tokens",
                "Correct its config.json.",
            )
        return {**fields, "aux_layer_ids": ids}

    def rope_parameters(self) -> dict[str, Any]:
        parameters = super().rope_parameters()
        if original := self.setting("original_max_position_embeddings"):
            parameters.setdefault("original_max_position_embeddings", original)
        partial = parameters.get("partial_rotary_factor") or self.setting("partial_rotary_factor")
        if partial != 1:
            raise self.wrong(
                f"has a rotary embedding with partial_rotary_factor={partial}",
                "Pass a head that rotates whole attention heads.",
            )
        return parameters

    def _windows(self) -> dict[str, Any]:
        """The window of the layers that slide, and the layers that do not; kinds that no head has count as these."""
        kinds, count = self.setting("layer_types") or (), self.sizes["layer"]
        window = None if self.setting("use_sliding_window") is False else self.setting("sliding_window")
        if "sliding_attention" not in kinds[:count] or window is None:
            return {}
        if len(kinds) < count:
            raise self.wrong_setting("layer_types", kinds, f"and {count} layers")
        full = (index for index, kind in enumerate(kinds[:count]) if kind != "sliding_attention")
        return {"sliding_window": window, "full_layers": tuple(full)}

    # Captured states

    def _stated_ids(self) -> tuple[list[int], bool]:
        """Numbers of layers as the user or the config names them, rising, and whether they are boundaries for sure."""
        boundaries = getattr(self.options, "aux_layer_ids", None) or self.setting("aux_layer_ids")
        return sorted(set(boundaries or self.setting("eagle_aux_hidden_state_layer_ids"))), bool(boundaries)

    def _boundaries(self, target: TargetSizes) -> tuple[int, ...]:
        """The boundaries, which configs have in one of two notations without saying which."""
        (ids, is_clear), layers = self._stated_ids(), target.num_hidden_layers
        assert layers is not None, "sizes of a target without its layers"
        usual = sorted({2, layers // 2, layers - 3} & set(range(layers)))
        if not ids:
            ids = usual
        elif not (is_clear or "speculators_model_type" in self.header.config or max(ids) == layers or ids == usual):
            if ids[0] == 1:
                # Numbers of the layers whose outputs are meant.
                ids = [index + 1 for index in ids]
            else:
                logger.warning(
                    f"'{self.name}' does not say whether {ids} are the layers that the captured states enter or "
                    "leave; the former is assumed. If few drafts are accepted, try "
                    f"aux_layer_ids={[index + 1 for index in ids]}."
                )
        todo = "Name them with `aux_layer_ids` (i: what enters decoder layer i of the target), or pass the head that "
        self.check_states(ids, target, f"{todo}was trained for this target.")
        return tuple(ids)

    # Tensors

    def read_token_ids(self, target: TargetSizes) -> torch.LongTensor | None:
        # EAGLE-1 has no vocabulary of its own.
        return None if self.method == "eagle" else super().read_token_ids(target)

    def absolute_ids(self, table: torch.LongTensor, vocab_size: int) -> torch.LongTensor:
        ids = super().absolute_ids(table, vocab_size)
        if is_selection(ids, vocab_size) or not is_selection(table, vocab_size):
            return ids
        logger.warning(f"'{self.name}': `d2t` holds ids, where the format has distances; it is read as ids.")
        return table

    def judge_unknown(self, names: Sequence[str]) -> None:
        logger.warning(f"'{self.name}': {len(names)} tensors are not used: {listed(names)}.")

    def fitted(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if name.startswith("fc.") and 0 < len(tensor) - shape[0] <= _MAX_EXTRA_ROWS:
            return tensor[: shape[0]].clone()
        if name == _MASK:
            return tensor.flatten()
        return super().fitted(name, tensor, shape)


_EAGLE_1 = ("fc.weight|eagle_linear.weight|fusion_fc.weight",)
_EAGLE_1 += ("layers.0.self_attn.q_proj.weight|transformer.self_attn.q_proj.weight",)
_NO_EAGLE_1 = ("hidden_norm.weight", "layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight", "enorm.weight")
_EAGLE_3 = ("midlayer.hidden_norm.weight|layers.0.hidden_norm.weight",)
_LATENT = "|".join(f"{layer}.self_attn.kv_a_proj_with_mqa.weight" for layer in ("midlayer", "layers.0"))
_SPECFORGE = ("architectures=LlamaForCausalLMEagle3",)

_eagle = partial(Format, method="eagle", reader=EagleReader)
_eagle3 = partial(Format, method="eagle3", reader=EagleReader, without=(_MASK,))

# The special before the usual.
FORMATS = (
    _eagle3("peagle-speculators", "speculators", ("speculators_model_type=peagle",), (*_EAGLE_3, _MASK), without=()),
    _eagle3("peagle", "AWS, vLLM, SpecForge", _PARALLEL[:1], (*_EAGLE_3, _MASK), without=()),
    _eagle3("eagle3-speculators", "speculators", ("speculators_model_type=eagle3",), _EAGLE_3),
    _eagle3("eagle3-mla", "SpecForge, ModelOpt", _MLA, (*_EAGLE_3, _LATENT)),
    _eagle3("eagle3-specforge", "SpecForge, SGLang", _SPECFORGE, ("midlayer.hidden_norm.weight",)),
    _eagle3("eagle3-modelopt", "ModelOpt", _SPECFORGE, ("layers.0.hidden_norm.weight",)),
    _eagle3("eagle3-angelslim", "AngelSlim, vLLM", ("architectures=.*Eagle3.*",), _EAGLE_3),
    _eagle3("eagle3-safeailab", "SafeAILab, hf_specdec", ("draft_vocab_size=.*",), _EAGLE_3, is_hint=True),
    _eagle("eagle-speculators", "speculators", ("speculators_model_type=eagle",), ("fusion_fc.weight",)),
    _eagle("eagle-llama4", "vLLM", _LLAMA4),
    _eagle("eagle-cohere", "vLLM", _COHERE),
    _eagle("eagle-minicpm", "vLLM", _MINICPM, ("eagle_layers.",)),
    _eagle("eagle-mistral", "vLLM", ("architectures=EagleMistralFor.*",), ("eagle_linear.weight",)),
    _eagle("eagle-mtp", "vLLM", _MTP),
    _eagle("eagle-sglang", "SGLang", ("architectures=LlamaForCausalLMEagle",), _EAGLE_1, _NO_EAGLE_1),
    _eagle("eagle-vllm", "vLLM", ("model_type=eagle", "architectures=.*(?<!P)Eagle(?!3).*"), _EAGLE_1, _NO_EAGLE_1),
    _eagle("eagle-safeailab", "SafeAILab, HASS, hf_specdec", (), _EAGLE_1, _NO_EAGLE_1),
)
