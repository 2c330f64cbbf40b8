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

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from transformers.utils import logging

from ...checkpoints.draft_reader import (
    FIRST_LAYER,
    DraftConfig,
    DraftReader,
    is_selection,
    projections,
    share_of,
    stored_vocabulary,
)
from ...checkpoints.format import Format, Unsupported, is_marked
from ...checkpoints.header import Header, TargetNeeds, TargetSizes, listed
from ...checkpoints.settings import COUNT, FLAG, INDEX, INDICES, POSITIVE


if TYPE_CHECKING:
    from ...checkpoints.checkpoint import Checkpoint
    from ...checkpoints.settings import Kind


logger = logging.get_logger(__name__)

# Exit signals of a variant: rows of `fc` after those of the state.
_MAX_EXTRA_ROWS = 3


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DraftConfig):
    """Record of an EAGLE head; see also [`DraftConfig`].

    Args:
        method (`str`): "eagle" (EAGLE-1, EAGLE-2, HASS) or "eagle3".
        sliding_window (`int`, *optional*): How many positions the layers look back.
        aux_layer_ids (`tuple[int, ...]` of length A): The captured boundaries in increasing order: i is the residual
            stream that enters decoder layer i of the target, N the one that enters its final norm. Empty: the state
            after the final norm.
        norms (`tuple[str, ...]`): Names of the norms there are, such as "layers.0.hidden_norm".
        biases (`tuple[str, ...]`): Names of the linear layers with a bias, such as "fc".
        has_fc, own_embedding (`bool`): The head has these; it shares the embedding with the target otherwise.
        norm_before_residual (`bool`): EAGLE-3's first layer adds to the normed state, not to the state itself.
        norm_output (`bool`): What is fed back has gone through the final norm.
        logit_scale (`float`): Factor of the logits.
        mask_token_id (`int`, *optional*): Token of the masks with which a P-EAGLE head drafts all tokens at once.
        num_parallel_tokens (`int`): Tokens that it was trained to draft so.
    """

    method: Literal["eagle", "eagle3"]
    sliding_window: int | None = None
    aux_layer_ids: tuple[int, ...] = ()
    norms: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    has_fc: bool = True
    own_embedding: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    logit_scale: float = 1.0
    mask_token_id: int | None = None
    num_parallel_tokens: int = 0

    @property
    def num_states(self) -> int:
        """A; 1 where the state after the final norm is read."""
        return len(self.aux_layer_ids) or 1

    @property
    def fc_inputs(self) -> int:
        """Input width of the fully connected layer."""
        if self.method == "eagle":
            return self.hidden_size + self.target_hidden_size
        return self.num_states * self.target_hidden_size

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
            config |= {"layer_types": ["sliding_attention"] * self.num_hidden_layers}
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
            config |= {
                "mask_token_id": self.mask_token_id,
                "speculators_config": {"proposal_methods": [proposal]},
            }
        return config


def stored_tensors(config: EagleConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a network under the names of the first publishers, `d2t` and `t2d` for its table of ids."""
    stored = stored_vocabulary(tensors, config.vocab_size)
    if config.method == "eagle3":
        first = f"{FIRST_LAYER}."
        stored = {f"midlayer.{n.removeprefix(first)}" if n.startswith(first) else n: t for n, t in stored.items()}
    return stored


_MLA = ("architectures=Eagle3Deepseek.*",)
_LLAMA4 = ("architectures=EagleLlama4.*",)
_COHERE = ("architectures=EagleCohere.*",)
_MINICPM = ("architectures=EagleMiniCPM.*",)
_MTP = ("architectures=Eagle(DeepSeekMTP|MistralLarge3).*",)
_PARALLEL = ("architectures=(?i:peagle).*", "speculators_model_type=peagle")
_MASK = "mask_hidden"

# Keys for the token of its masks.
_MASK_TOKENS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")

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
    """A checkpoint with an EAGLE head.

    Args:
        header (`Header`): Of any of the formats.
        aux_layer_ids (`Sequence[int]`, *optional*): Boundaries that the user has named; they go before the config's.
    """

    noun = "head"
    kinds: ClassVar[tuple[str, ...]] = ("eagle", "eagle3", "peagle")
    # Some formats have the config of a model, that of the layers, inside of it.
    blocks: ClassVar[tuple[str, ...]] = ("dflash_config", "transformer_layer_config", "model", "", "eagle_config")
    settings: ClassVar[dict[str, Kind]] = DraftReader.settings | {
        **dict.fromkeys(("aux_layer_ids", "eagle_aux_hidden_state_layer_ids", "layer_ids"), INDICES),
        **dict.fromkeys(("fc_norm", "use_aux_norm", "norm_before_fc", "norm_before_residual", "norm_output"), FLAG),
        **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm"), FLAG),
        **dict.fromkeys(_MASK_TOKENS, INDEX),
        "logit_scale": POSITIVE,
        "original_max_position_embeddings": COUNT,
        "partial_rotary_factor": POSITIVE,
    }
    notes = (
        "eagle_config layernorms model parallel_draft_step quantization_config use_sliding_window "
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
    usual: ClassVar[dict[str, float | int]] = {
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
    }

    def __init__(self, header: Header, aux_layer_ids: Sequence[int] | None = None):
        super().__init__(header)
        self._named_ids = None if aux_layer_ids is None else sorted(set(aux_layer_ids))

    # What it is

    @property
    def method(self) -> Literal["eagle", "eagle3"]:
        # Not by `fc`: with two captured states it is as wide as that of EAGLE-1.
        if f"{FIRST_LAYER}.hidden_norm.weight" in self.stored:
            return "eagle3"
        queries = self.shape(f"{FIRST_LAYER}.self_attn.q_proj.weight") or ()
        return "eagle3" if queries[1:] == (2 * self.hidden_size,) else "eagle"

    def check(self) -> None:
        super().check()
        if self.header.shapes is None:
            return
        parts = ("fc.weight", f"{FIRST_LAYER}.self_attn.q_proj.weight")
        if f"{FIRST_LAYER}.hidden_norm.weight" not in self.stored and not all(part in self.stored for part in parts):
            raise self.wrong(
                f"is no EAGLE head: {self.header.file} has neither `fc.weight` nor `hidden_norm.weight` of a first "
                f"layer (its tensors: {listed(self.stored.values())})",
                "Pass an EAGLE checkpoint, or name the method that this one is for.",
            )
        for name in self.stored:
            if "norm" in name and name.endswith(".weight") and not self.unused.fullmatch(name):
                size = math.prod(self.shape(name))
                if self.shape(name) != (size,):
                    raise self.wrong_shape(name, (size,))
        self.require(projections(), "the first layer")
        if self.is_parallel:
            self.require([_MASK], "a P-EAGLE head")
            self._mask_token_id()

    @property
    def is_parallel(self) -> bool:
        """True where it drafts all tokens at once."""
        return _MASK in self.stored or is_marked(self.header.config, _PARALLEL)

    def _mask_token_id(self) -> int:
        found = self.first_setting(*_MASK_TOKENS)
        if found is None:
            raise self.wrong(
                f"is a P-EAGLE head (`{_MASK}`) and does not say which token its masks are",
                "Add `mask_token_id` to its config.json.",
            )
        return found

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
        width, ids = self.setting("target_hidden_size"), self._stated_ids()
        if self.header.shapes is None:
            return TargetNeeds(None, width or self.setting("hidden_size"), self.stated_vocab_size)
        if self.reads_last_state:
            return TargetNeeds(None, width or self.hidden_size, self.stated_vocab_size)
        # Without names of states there are three. In one of two notations they are one less than the layers needed.
        width = width or share_of(self.linear("fc")[1], len(ids) or 3)
        return TargetNeeds(None, width, self.stated_vocab_size, min_hidden_layers=max(ids, default=None))

    # The record

    def configured(self, checkpoint: Checkpoint, target: TargetSizes) -> EagleConfig:
        """The record of the head for a target.

        Raises:
            CheckpointFormatError: The checkpoint is incomplete, contradicts itself, or was made for another target.
        """
        self.check()
        ids = () if self.reads_last_state else self._boundaries(target)
        self.check_target(target)
        self.check_shared_parts(target)
        norms = tuple(name.removesuffix(".weight") for name in self.stored if self._is_norm(name))
        config = EagleConfig(
            method=self.method,
            **self.common_settings(checkpoint, target),
            sliding_window=self._sliding_window(),
            aux_layer_ids=ids,
            norms=norms,
            biases=tuple(name.removesuffix(".bias") for name in self.stored if name.endswith(".bias")),
            has_fc="fc.weight" in self.stored,
            own_embedding="embed_tokens.weight" in self.stored,
            norm_before_residual=bool(self.setting("norm_before_residual")),
            norm_output=self._norm_output("fc_norm.0" in norms),
            logit_scale=float(self.setting("logit_scale") or 1),
            mask_token_id=self._mask_token_id() if self.is_parallel else None,
            num_parallel_tokens=self.num_draft_tokens if self.is_parallel else 0,
        )
        self.require([f"{name}.weight" for name in self._required_norms(config)], "its norms")
        if config.mask_token_id is not None and config.mask_token_id >= config.vocab_size:
            raise self.wrong(
                f"has the mask token {config.mask_token_id}, and its embedding has {config.vocab_size} tokens",
                "Correct its config.json.",
            )
        return config

    def _is_norm(self, name: str) -> bool:
        return name.endswith(".weight") and len(self.shape(name)) == 1 and not self.unused.fullmatch(name)

    def rope_parameters(self) -> dict[str, Any]:
        parameters = super().rope_parameters()
        if original := self.setting("original_max_position_embeddings"):
            parameters.setdefault("original_max_position_embeddings", original)
        partial = parameters.get("partial_rotary_factor") or self.setting("partial_rotary_factor") or 1
        if partial != 1:
            raise self.wrong(
                f"has a rotary embedding with partial_rotary_factor={partial}",
                "Pass a head that rotates whole attention heads.",
            )
        return parameters

    def _sliding_window(self) -> int | None:
        kinds = set((self.setting("layer_types") or ())[: self.num_layers])
        if "sliding_attention" not in kinds:
            return None
        if len(kinds) > 1:
            raise self.wrong("mixes layers with and without a sliding window", "Pass a head with layers of one kind.")
        return self.setting("sliding_window")

    def _norm_output(self, has_chunk_norms: bool) -> bool:
        given = bool(self.setting("norm_output"))
        # A training framework has the same key for the norm before the lm_head, and feeds back the state before it.
        trusted = has_chunk_norms or not {"speculators_model_type", "aux_layer_ids"}.isdisjoint(self.header.config)
        if given and not trusted:
            logger.info(f"'{self.name}': `norm_output` is read as the norm before the lm_head; its input is fed back.")
        return given and trusted

    def _required_norms(self, config: EagleConfig) -> list[str]:
        layers = range(config.num_hidden_layers)
        names = [f"layers.{index}.post_attention_layernorm" for index in layers]
        names += [f"layers.{index}.input_layernorm" for index in layers[1:]]
        if config.method == "eagle":
            return names
        names.append(f"{FIRST_LAYER}.hidden_norm")
        if self.setting("use_input_layernorm_in_first_layer") is not False:
            names.append(f"{FIRST_LAYER}.input_layernorm")
        if self.setting("use_last_layernorm") is not False:
            names.append("norm")
        if self.setting("norm_before_fc"):
            names.append("input_norm")
        chunk_norms = any(self.setting(key) for key in ("fc_norm", "use_aux_norm"))
        if chunk_norms or any(name.startswith("fc_norm.") for name in config.norms):
            names += [f"fc_norm.{index}" for index in range(config.num_states)]
        return names

    # Captured states

    def _stated_ids(self) -> list[int]:
        """Numbers of layers as the user or the config names them, rising."""
        if self._named_ids is not None:
            return self._named_ids
        stated = self.first_setting("aux_layer_ids", "eagle_aux_hidden_state_layer_ids", "layer_ids")
        return sorted(set(stated or ()))

    def _boundaries(self, target: TargetSizes) -> tuple[int, ...]:
        """The boundaries, which configs have in one of two notations without saying which."""
        ids, layers = self._stated_ids(), target.num_hidden_layers
        assert layers is not None, "sizes of a target without its layers"
        usual = sorted({2, layers // 2, layers - 3} & set(range(layers)))
        is_clear = self._named_ids is not None or self.setting("aux_layer_ids")
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

    def read_token_ids(self, checkpoint: Checkpoint, target: TargetSizes) -> torch.LongTensor | None:
        # EAGLE-1 has no vocabulary of its own.
        return None if self.method == "eagle" else super().read_token_ids(checkpoint, target)

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
