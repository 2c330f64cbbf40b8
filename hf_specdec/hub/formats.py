"""The formats of published checkpoints, and how each is recognised: one table, and the decision by it.

Evidence is what `config.json` says and how the tensors are called; names of repositories are none. Names of classes in
a config are often those of something else, so tensors count for more.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from ..errors import CheckpointFormatError
from ..threads import cached_property
from .files import MEDUSA_FILES, MTP_WEIGHT_FILES, WEIGHT_FILES


@dataclass(frozen=True)
class Format:
    """A row of the table.

    Args:
        name (`str`): Short and stable.
        method (`str`): What drafts with it.
        producer (`str`): Who publishes or writes it.
        config (`tuple[str, ...]`): Marks in `config.json`, of which one suffices: `key=regular expression` of the
            whole value, `a.b` for a key inside of another, `&` between marks that only count together. The first
            class stands for `architectures`.
        tensors (`tuple[str, ...]`): Names that all must be there, `|` between spellings. `x.` is the beginning of a
            name, `.x` the end of one. The wrappers that files put around a head (`model.`, ...) are left out.
        without (`tuple[str, ...]`): Names that must not be there.
        is_hint (`bool`): The marks also fit other checkpoints: they count where nothing else is known.
        unsupported (`str`, *optional*): Why this package cannot use it, where the method's own loader does not say.
        harmless (`tuple[str, ...]`): Keys of its config that no loader reads and that change nothing of what the
            drafter computes, as shell patterns, beside those that all formats may have.
        files (`tuple[str, ...]`): Names that its weights may have, the preferred first: its loader looks for these.
    """

    name: str
    method: str
    producer: str
    config: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    is_hint: bool = False
    unsupported: str | None = None
    harmless: tuple[str, ...] = ()
    files: tuple[str, ...] = WEIGHT_FILES

    def is_marked(self, config: Mapping[str, Any]) -> bool:
        """Whether a config has one of the marks."""
        return any(all(_says(config, part) for part in mark.split("&")) for mark in self.config)

    def is_shown(self, names: TensorNames) -> bool:
        """Whether the names of the tensors are those of this format."""
        return bool(self.tensors) and all(map(names.has, self.tensors)) and not any(map(names.has, self.without))


class TensorNames:
    """Names of tensors without the wrappers, to be asked in the language of the table."""

    def __init__(self, stored: Iterable[str]):
        self.stored = {unwrapped(name): name for name in stored}

    def has(self, names: str) -> bool:
        """Whether one of the spellings in `names` is there."""
        return any(map(self._has, names.split("|")))

    def _has(self, name: str) -> bool:
        if name.endswith("."):
            return name in self._beginnings
        return name in (self._ends if name.startswith(".") else self.stored)

    @cached_property
    def _beginnings(self) -> set[str]:
        return {name[: dot.end()] for name in self.stored for dot in re.finditer(r"\.", name)}

    @cached_property
    def _ends(self) -> set[str]:
        return {name[dot.start() :] for name in self.stored for dot in re.finditer(r"\.", name)}


def format_of(name: str, config: Mapping[str, Any], tensors: Iterable[str] | None) -> Format:
    """The format of a checkpoint.

    Args:
        name (`str`): What messages call the checkpoint.
        config (`Mapping`): `config.json`.
        tensors (`Iterable[str]`, *optional*): Names of its tensors; `None` where they are not known.

    Raises:
        CheckpointFormatError: It has none of the formats, or is said to be for two methods.
    """
    names = None if tensors is None else TensorNames(tensors)
    marked = [row for row in FORMATS if row.is_marked(config)]
    shown = [] if names is None else [row for row in FORMATS if row.is_shown(names)]
    certain = [row for row in FORMATS if row in shown or (row in marked and not row.is_hint)]
    methods = list(dict.fromkeys(row.method for row in certain))
    if len(methods) > 1:
        raise CheckpointFormatError(
            f"The method of '{name}' is ambiguous: its config.json ({_described(config)}) and its tensors fit "
            f"{' and '.join(f'{row.name} (method {row.method!r})' for row in _one_each(certain))}. Name the method "
            "with `spec_method`."
        )
    fitting = [row for row in certain or marked if row.method == (certain or marked)[0].method]
    if not fitting:
        seen = "" if names is None else f" and tensors such as {', '.join(list(names.stored.values())[:3]) or 'none'}"
        near = _near(config, names)
        raise CheckpointFormatError(
            f"The method of '{name}' cannot be read: its config.json ({_described(config)}){seen} are of no known "
            f"format.{f' Nearest: {near}.' if near else ''} Name it with `spec_method`."
        )
    agreed = [row for row in fitting if row in marked and (names is None or not row.tensors or row in shown)]
    # Without a mark the usual one.
    return (agreed or [row for row in fitting if row in shown][-1:] or fitting)[0]


def _one_each(rows: list[Format]) -> list[Format]:
    """The first row of each method."""
    return list({row.method: row for row in reversed(rows)}.values())[::-1]


def _described(config: Mapping[str, Any]) -> str:
    keys = ("architectures", "model_type", "speculators_model_type")
    return ", ".join(f"{key}: {config.get(key)}" for key in keys if key in config) or "no architectures, no model_type"


def _near(config: Mapping[str, Any], names: TensorNames | None) -> str:
    """Formats that have something in common with a checkpoint that has none of them."""
    shown = [row for row in FORMATS if names and any(map(names.has, row.tensors))]
    words = [str(value) for value in (architecture(config), config.get("model_type")) if value]
    known = {re.sub(r"\W|[.]", "", mark.partition("=")[2]): row for row in FORMATS for mark in row.config}
    close = [match for word in words for match in difflib.get_close_matches(word, known, n=2)]
    rows = dict.fromkeys([*(known[match] for match in close), *_one_each(shown)])
    return ", ".join(f"{row.name} (method '{row.method}')" for row in list(rows)[:3])


def architecture(config: Mapping[str, Any]) -> str:
    """The first class that a config names."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _says(config: Mapping[str, Any], mark: str) -> bool:
    key, _, pattern = mark.partition("=")
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if key == "architectures":
        value = architecture(config)
    return value is not None and re.fullmatch(pattern, str(value), re.DOTALL) is not None


_WRAPPERS = ("model.", "eagle.", "draft_model.", "eagle_module.", "medusa_heads.", "speculator.", "language_model.")


def unwrapped(name: str) -> str:
    """The name of a tensor without the wrappers that files put around a head: what loaders and this table go by."""
    while prefix := next(filter(name.startswith, _WRAPPERS), None):
        name = name.removeprefix(prefix)
    return name


# Notes of transformers and of whole models' configs, and what the shapes of the tensors say better.
_HARMLESS = tuple(
    "_* architectures auto_map model_type *dtype *_version version license name_or_path base_model* tokenizer_class "
    "*_token_id use_cache return_dict* output_* torchscript is_decoder is_encoder_decoder add_cross_attention "
    "tie_encoder_decoder tie_word_embeddings pruned_heads id2label label2id problem_type finetuning_task prefix "
    "task_specific_params chunk_size_feed_forward initializer_range *dropout* *_pdrop pretraining_tp "
    "max_window_layers attn_implementation cross_attention_hidden_size use_bfloat16 tf_legacy_loss "
    "has_no_defaults_at_init max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty *no_repeat_ngram_size "
    "bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty *suppress_tokens "
    "sep_token* hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "vocab_size attention_bias mlp_bias qkv_bias bias use_qk_norm qk_norm speculators_config speculators_model_type "
    "algorithm default_proposal_method proposal_methods verifier method num_lookahead_tokens medusa_choices "
    "num_parameters total_flos".split()
)

_HARMLESS_EAGLE = tuple(
    "draft_vocab_size embed_requires_grad enable_sp_ulysses fusion_bias eagle_fc_bias truncated_vocab_size "
    "hot_vocab_size has_lm_head num_aux_* num_eagle_features use_aux_hidden_state parallel_draft_heads_num_layers "
    "target_model_type draft_attn_impl *loss* ttt_* eagle_decoder_type eagle_freeze_base_model".split()
)

_HARMLESS_DFLASH = tuple(
    "draft_vocab_size embed_requires_grad num_anchors max_anchors *confidence_head* *loss* lambda_base_* auf "
    "pure_draft_prefix_len emb_dim gru_hidden_dim use_aux_hidden_state target_hidden_size target_model_type "
    "dflasher dspark_target_layer_ids eagle_aux_hidden_state_layer_ids swa_window_size draft_attn_impl".split()
)

_HARMLESS_MEDUSA = tuple("medusa_num_heads medusa_num_layers num_heads max_paths topk max_seq_len".split())

_HARMLESS_MTP = tuple("transformer_layer_config target_model_type *loss* num_speculative_steps".split())

# The layers of a target, which a checkpoint of MTP layers alone lacks.
_TARGETS_OWN = ("layers.0.",)

_EAGLE_1 = ("fc.weight|eagle_linear.weight|fusion_fc.weight",)
_EAGLE_1 += ("layers.0.self_attn.q_proj.weight|transformer.self_attn.q_proj.weight",)
_NO_EAGLE_1 = ("hidden_norm.weight", "layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight", "enorm.weight")

_EAGLE_3 = ("midlayer.hidden_norm.weight|layers.0.hidden_norm.weight",)

_DFLASH = ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight")

_OWN_LM_HEAD = "|".join(f"0.{layer}.weight" for layer in range(1, 5))

# The special before the usual: of one method the first row counts that config and tensors agree in, else the last one
# that the tensors show.
FORMATS = (
    # MTP layers in a checkpoint of their own
    Format(
        "mtp",
        "mtp",
        "hf_specdec",
        ("model_type=mtp",),
        ("mtp.fc.weight",),
        _TARGETS_OWN,
        files=MTP_WEIGHT_FILES,
        harmless=_HARMLESS_MTP,
    ),
    Format(
        "mtp-speculators",
        "mtp",
        "speculators",
        ("speculators_model_type=mtp",),
        ("mtp_layers.",),
        _TARGETS_OWN,
        files=MTP_WEIGHT_FILES,
        harmless=_HARMLESS_MTP,
    ),
    Format(
        "mtp-mimo",
        "mtp",
        "Xiaomi, FastMTP",
        (),
        ("mtp_layers.", ".input_proj.weight"),
        _TARGETS_OWN,
        files=MTP_WEIGHT_FILES,
    ),
    Format("mtp-ernie", "mtp", "Baidu", (), ("mtp_block.", "mtp_linear_proj."), _TARGETS_OWN, files=MTP_WEIGHT_FILES),
    Format(
        "mtp-longcat", "mtp", "Meituan", (), ("mtp.layers.", ".eh_proj.weight"), _TARGETS_OWN, files=MTP_WEIGHT_FILES
    ),
    Format(
        "mtp-deepseek",
        "mtp",
        "DeepSeek, Z.ai, Tencent",
        (),
        ("layers.", ".eh_proj.weight"),
        _TARGETS_OWN,
        files=MTP_WEIGHT_FILES,
    ),
    Format("gemma4-assistant", "mtp", "Google", ("model_type=gemma4(_unified)?_assistant",)),
    # Medusa
    Format(
        "medusa-vllm",
        "medusa",
        "vLLM",
        ("model_type=medusa",),
        ("blocks.0.layers.0.weight",),
        files=MEDUSA_FILES,
        harmless=_HARMLESS_MEDUSA,
    ),
    Format(
        "medusa-original",
        "medusa",
        "FasterDecoding",
        ("medusa_num_heads=.*",),
        ("0.0.linear.weight", _OWN_LM_HEAD),
        files=MEDUSA_FILES,
        harmless=_HARMLESS_MEDUSA,
    ),
    Format(
        "medusa-v2",
        "medusa",
        "text-generation-inference, Liger-Kernel, hf_specdec",
        ("medusa_num_heads=.*&version=2",),
        ("0.0.linear.weight",),
        (_OWN_LM_HEAD,),
        files=MEDUSA_FILES,
        harmless=_HARMLESS_MEDUSA,
    ),
    Format(
        "medusa-merged",
        "medusa",
        "FasterDecoding",
        ("medusa_num_heads=.*",),
        ("medusa_head.0.0.linear.weight",),
        files=MEDUSA_FILES,
        harmless=_HARMLESS_MEDUSA,
    ),
    # MLP speculators
    Format(
        "lstm-speculator",
        "mlp_speculator",
        "Snowflake",
        ("method=sum_lstm", "architectures=ArcticLSTM.*"),
        ("forget_emb.0.weight",),
        unsupported="is an LSTM speculator (Arctic), which is not supported. Pass an MLP speculator.",
    ),
    Format(
        "rnn-speculator",
        "mlp_speculator",
        "Snowflake",
        ("method=sum_rnn", "architectures=ArcticMLP.*"),
        unsupported="is an Arctic MLP speculator, whose stages may be deeper than the published ones, which is not "
        "supported. Pass an MLP speculator of the original format.",
    ),
    Format(
        "mlp-speculator",
        "mlp_speculator",
        "IBM, PyTorch, Nebius",
        ("model_type=mlp_speculator",),
        ("emb.0.weight", "proj.0.weight", "head.0.weight", "ln.0.weight"),
    ),
    # Block drafters
    Format(
        "dspark-speculators",
        "dflash",
        "speculators",
        ("speculators_model_type=dspark",),
        _DFLASH,
        harmless=_HARMLESS_DFLASH,
    ),
    Format(
        "dflash-speculators",
        "dflash",
        "speculators",
        ("speculators_model_type=dflash",),
        _DFLASH,
        harmless=_HARMLESS_DFLASH,
    ),
    Format("dspark-gemma4", "dflash", "DeepSpec", ("architectures=Gemma4DSpark.*",), _DFLASH),
    Format(
        "dspark-deepspec", "dflash", "DeepSpec", ("architectures=Qwen3DSpark.*",), _DFLASH, harmless=_HARMLESS_DFLASH
    ),
    Format(
        "dspark-specforge",
        "dflash",
        "SpecForge",
        ("architectures=.*DSpark.*", "dflash_config.projector_type=dspark"),
        _DFLASH,
        harmless=_HARMLESS_DFLASH,
    ),
    Format("dflash2", "dflash", "z-lab, inco", ("architectures=.*DFlash2.*",), _DFLASH),
    Format(
        "domino",
        "dflash",
        "SpecForge",
        ("architectures=.*Domino.*", "dflash_config.projector_type=domino"),
        _DFLASH,
    ),
    Format("xpress", "dflash", "XPress", ("architectures=.*XPress.*",), _DFLASH),
    Format("lilicorr", "dflash", "LiLiCorr", ("architectures=.*LiLiCorr.*",)),
    Format(
        "dflash-laguna",
        "dflash",
        "Poolside",
        ("architectures=.*DFlashLaguna.*", "architectures=.*Laguna.*&dflash_config=.*"),
        ("fc.weight", "aux_hidden_norms."),
    ),
    Format(
        "dflash-mimo",
        "dflash",
        "Xiaomi",
        ("dflash_config.use_swa=True",),
        _DFLASH,
    ),
    Format(
        "dflash-muse",
        "dflash",
        "transformers",
        ("model_type=muse_glimmer_assistant", "architectures=MuseGlimmerAssistant.*"),
        ("encoder.fc.weight", "encoder.output_norm_enc.weight"),
        harmless=_HARMLESS_DFLASH,
    ),
    Format(
        "dflash-zlab",
        "dflash",
        "z-lab, SpecForge, ModelOpt, hf_specdec",
        ("architectures=.*DFlash.*", "dflash_config=.*"),
        _DFLASH,
        harmless=_HARMLESS_DFLASH,
    ),
    # EAGLE-3
    Format("peagle-speculators", "eagle3", "speculators", ("speculators_model_type=peagle",)),
    Format(
        "peagle",
        "eagle3",
        "AWS, ModelOpt",
        ("architectures=P[Ee]agle.*", r"eagle_config.parallel_draft_step=([2-9]|\d\d+)"),
        (*_EAGLE_3, "mask_hidden"),
    ),
    Format(
        "eagle3-speculators",
        "eagle3",
        "speculators",
        ("speculators_model_type=eagle3",),
        _EAGLE_3,
        harmless=_HARMLESS_EAGLE,
    ),
    Format(
        "eagle3-mla",
        "eagle3",
        "SpecForge, ModelOpt",
        ("architectures=Eagle3Deepseek.*",),
        (*_EAGLE_3, "|".join(f"{layer}.self_attn.kv_a_proj_with_mqa.weight" for layer in ("midlayer", "layers.0"))),
    ),
    Format(
        "eagle3-specforge",
        "eagle3",
        "SpecForge, SGLang",
        ("architectures=LlamaForCausalLMEagle3",),
        ("midlayer.hidden_norm.weight",),
        harmless=_HARMLESS_EAGLE,
    ),
    Format(
        "eagle3-modelopt",
        "eagle3",
        "ModelOpt",
        ("architectures=LlamaForCausalLMEagle3",),
        ("layers.0.hidden_norm.weight",),
        harmless=_HARMLESS_EAGLE,
    ),
    Format(
        "eagle3-angelslim",
        "eagle3",
        "AngelSlim, vLLM",
        ("architectures=.*Eagle3.*",),
        _EAGLE_3,
        harmless=_HARMLESS_EAGLE,
    ),
    Format(
        "eagle3-safeailab",
        "eagle3",
        "SafeAILab, hf_specdec",
        ("draft_vocab_size=.*",),
        _EAGLE_3,
        is_hint=True,
        harmless=_HARMLESS_EAGLE,
    ),
    # EAGLE-1, EAGLE-2, HASS
    Format(
        "eagle-speculators",
        "eagle",
        "speculators",
        ("speculators_model_type=eagle",),
        ("fusion_fc.weight",),
        harmless=_HARMLESS_EAGLE,
    ),
    Format("eagle-llama4", "eagle", "vLLM", ("architectures=EagleLlama4.*",)),
    Format("eagle-cohere", "eagle", "vLLM", ("architectures=EagleCohere.*",)),
    Format("eagle-minicpm", "eagle", "vLLM", ("architectures=EagleMiniCPM.*",), ("eagle_layers.",)),
    Format(
        "eagle-mistral",
        "eagle",
        "vLLM",
        ("architectures=EagleMistralFor.*",),
        ("eagle_linear.weight",),
        harmless=_HARMLESS_EAGLE,
    ),
    Format("eagle-mtp", "eagle", "vLLM", ("architectures=Eagle(DeepSeekMTP|MistralLarge3).*",)),
    Format(
        "eagle-sglang",
        "eagle",
        "SGLang",
        ("architectures=LlamaForCausalLMEagle",),
        _EAGLE_1,
        _NO_EAGLE_1,
        harmless=_HARMLESS_EAGLE,
    ),
    Format(
        "eagle-vllm",
        "eagle",
        "vLLM",
        ("model_type=eagle", "architectures=.*(?<!P)Eagle(?!3).*"),
        _EAGLE_1,
        _NO_EAGLE_1,
        harmless=_HARMLESS_EAGLE,
    ),
    Format("eagle-safeailab", "eagle", "SafeAILab, HASS, hf_specdec", (), _EAGLE_1, _NO_EAGLE_1),
    # Whole models. The heads above often have their class names.
    Format(
        "pard",
        "draft_model",
        "AMD",
        ("pard_token=.*&architectures=.*ForCausalLM",),
        is_hint=True,
    ),
    Format(
        "causal-lm",
        "draft_model",
        "transformers",
        (
            "architectures=.*(ForCausalLM|LMHeadModel)",
            "architectures=.*ForConditionalGeneration&text_config=.*",
        ),
        is_hint=True,
    ),
)


def is_harmless(method: str, key: str) -> bool:
    """Whether a key of a config that no loader of a method reads changes nothing of what a drafter computes."""
    return any(fnmatchcase(key, pattern) for pattern in _harmless_keys(method))


@cache
def _harmless_keys(method: str) -> frozenset[str]:
    rows = (row.harmless for row in FORMATS if row.method == method)
    return frozenset(_HARMLESS).union(*rows)
