"""The published formats of block drafters of the DFlash family, brought to one record and one set of tensor names.

    z-lab, SpecForge, ModelOpt      what is special lies under `dflash_config`, in early files beside it
    speculators, types "dflash", "dflash2" and "dspark"
                                    layers under `transformer_layer_config`; own embedding and lm_head, `d2t`
    DeepSpec (`Qwen3DSparkModel`)   everything at the top; own embedding and lm_head, `markov_head`
    transformers (Muse Glimmer)     everything at the top; `encoder.fc`, `encoder.output_norm_enc`

The class and the keys of a config decide what a checkpoint is, the shapes of the tensors how large.

Shapes as in [`~candidate_generators.dflash.network`].
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from ...checkpoints.draft_reader import FIRST_LAYER, LAYERS, DraftReader, share_of
from ...checkpoints.format import Format, Unsupported
from ...checkpoints.header import TargetNeeds, TargetSizes, listed
from ...checkpoints.schema import COUNT, FLAG, INDEX, INDICES, NAME, NUMBER, POSITIVE, Key, Tensor, keys
from ...layers.mask_token import mask_token_in, tokenizer_of
from ...threads import cached_property
from .heads import BLOCK, HEAD, HeadConfig
from .heads.domino import DominoConfig
from .heads.lilicorr import LiLiCorrConfig
from .heads.markov import MarkovConfig
from .heads.selector import SelectorConfig
from .heads.xpress import XPressConfig
from .network import SCALES, BlockView, DFlashConfig, default_layer_ids


# All variants beside the plain one.
HEADS: list[type[HeadConfig]] = [SelectorConfig, MarkovConfig, DominoConfig, XPressConfig, LiLiCorrConfig]

_GEMMA4 = ("architectures=Gemma4DSpark.*",)

# Keys that change nothing here.
_NOTES = (
    "attention_sink_bias attention_value_scale dflash_config partial_rotary_factor projector_type quantization_config "
    "use_swa *loss* auf dflasher draft_attn_impl draft_vocab_size eagle_aux_hidden_state_layer_ids "
    "embed_requires_grad lambda_base_* max_anchors num_anchors swa_window_size target_model_type use_aux_hidden_state"
)


class DFlashReader(DraftReader):
    """A checkpoint with a block drafter; a mask token named by the user goes before config and tokenizer."""

    record_class: ClassVar[type[DFlashConfig]] = DFlashConfig
    kind_keys: ClassVar[tuple[str, ...]] = ("speculators_model_type", "projector_type")
    blocks: ClassVar[tuple[str, ...]] = ("dflash_config", "", "transformer_layer_config")
    unsupported: ClassVar[tuple[Unsupported, ...]] = (
        Unsupported(
            "is a Laguna draft (gated attention, norms for each captured state)",
            ("architectures=.*Laguna.*",),
            ("*aux_hidden_norms.*",),
        ),
        Unsupported("is a DSpark draft with Gemma 4 layers", _GEMMA4, instead="Pass one with Qwen3 layers."),
        Unsupported("is a P-EAGLE head", ("architectures=(?i:peagle).*",), ("mask_hidden",)),
        Unsupported(
            "is a MiMo draft (attention sinks, scaled values)",
            ("use_swa", "attention_sink_bias", "attention_value_scale"),
            ("*attention_sink_bias",),
        ),
    )
    instead = "Pass a DFlash draft."

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.header.config

    @property
    def is_native(self) -> bool:
        """Of transformers' own kind."""
        return self.header.config.get("model_type") == "muse_glimmer_assistant"

    # What all drafts have, and what the variants have beside it

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(kind for head in (HeadConfig, *HEADS) for kind in head.kinds)

    @property
    def keys(self) -> tuple[Key, ...]:
        return (
            *DraftReader.keys,
            *keys("aux_hidden_state_layer_ids target_layer_ids", INDICES, ()),
            Key("num_denoising_steps dflash_num_denoising_steps", BLOCK),
            Key("is_causal causal causal_head", FLAG),
            *keys("sliding_window_non_causal iterative_denoising use_sliding_window", FLAG),
            Key("mask_token_id dspark_noise_token_id pard_token ptd_token_id", INDEX),
            Key("mask_token", NAME),
            *keys("num_target_layers conv_group_size", COUNT),
            Key("conv_kernel_size", COUNT, size="w"),
            *keys("input_embedding_scale output_multiplier", POSITIVE, 1),
            Key("final_logit_softcapping", NUMBER, 0),
            Key("rope_theta", POSITIVE, 500000.0 if self.is_native else 1000000.0),
            Key("rms_norm_eps", POSITIVE, 1e-5 if self.is_native else 1e-6),
            Key("max_position_embeddings", COUNT, 32768),
            *(key for head in (HeadConfig, *HEADS) for key in head.all_keys()),
        )

    @property
    def notes(self) -> str:
        return " ".join((_NOTES, *(head.notes for head in HEADS)))

    @cached_property
    def renamed(self) -> Mapping[str, str]:
        of_heads = {old: HEAD + new for head in HEADS for old, new in {**head.spellings, **head.names}.items()}
        return {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", **of_heads}

    @property
    def token_tables(self) -> tuple[str, ...]:
        return (*DraftReader.token_tables, *(HEAD + name for name in self.head.token_tables))

    @property
    def unused(self) -> re.Pattern[str]:
        # Buffers, and what only training needs.
        return re.compile(f"d2t|t2d|.*inv_freq|verifier_.*|{self.head.unused}")

    @property
    def table(self) -> tuple[Tensor, ...]:
        is_stated = any(map(self.stated, ("conv_kernel_size", "conv_group_size")))
        of_convolutions = "its convolutions" if is_stated or any("_conv." in name for name in self.stored) else False
        return (
            *LAYERS,
            Tensor("layers.{layer}.self_attn.(q|k)_norm.weight", "d"),
            Tensor("layers.{layer}.(attention|mlp)_conv.base_kernel", "* w h", of_convolutions),
            Tensor("layers.{layer}.(attention|mlp)_conv.kernel_projection.weight", "n h", of_convolutions),
            Tensor("fc.weight", "h f"),
            Tensor("(hidden_norm|norm).weight", "h"),
            Tensor("(embed_tokens|lm_head).weight", "* h", needed=False),
            *(row._replace(name=HEAD + row.name) for row in self.head.table),
        )

    # What it is

    @cached_property
    def head(self) -> type[HeadConfig]:
        """The variant."""
        heads = [head for head in HEADS if head.is_there(self)]
        if len(heads) > 1:
            raise self.wrong(f"is {heads[0].kind} with {heads[1].what}, which is not supported", self.instead)
        return heads[0] if heads else HeadConfig

    @cached_property
    def predicts_next(self) -> bool:
        """True where the anchor's position predicts the first token."""
        return self.head.predicts_next(self)

    @property
    def block_size(self) -> int:
        """B as it is stated, else the usual one."""
        return self.setting(self.head.block_size_key)

    def name_in_file(self, name: str) -> str:
        return self.head.name_in_file(name)

    @property
    def num_draft_tokens(self) -> int | None:
        uses_all = self.predicts_next and self.head.uses_last_output
        return (self.block_size if uses_all else self.block_size - 1) or None

    @property
    def needs(self) -> TargetNeeds:
        ids, vocab_size = self.stated_layer_ids, self.stated_vocab_size
        # Where z-lab's files name none, there is one state for each layer of the draft.
        states = len(ids) or (3 if self.is_speculators else self.sizes["layer"])
        width = share_of(self.sizes["f"], states)
        layers = self.setting("num_target_layers")
        return TargetNeeds(None, width, vocab_size, layers, max((index + 1 for index in ids), default=None))

    # The record

    def own_fields(self) -> dict[str, Any]:
        least = 1 if self.predicts_next else 2
        if self.block_size < least:
            raise self.wrong(
                f"has `block_size`={self.block_size}, and needs at least {least}", "Correct its config.json."
            )
        for name, is_there, what in (
            ("predicts_next", self.predicts_next, "positions that predict the next token (`sample_from_anchor`)"),
            ("has_own_vocabulary", {"d2t", "t2d"} & self.stored.keys(), "a vocabulary of its own (`d2t`)"),
        ):
            if is_there and name in self.head.excludes:
                raise self.wrong(f"is {self.head.kind} with {what}, which is not supported", self.instead)
        for key, field in SCALES.items():
            if self.setting(key) != getattr(DFlashConfig, field) and not self.head.has_own_scales:
                what = f"which {self.head.kind} does not have"
                raise self.wrong_setting(key, self.setting(key), what, self.instead)
        # Some declare to refine their blocks and do not say how often.
        usual_steps = 3 if self.setting("iterative_denoising") else 1
        return {
            **super().own_fields(),
            "block_size": self.block_size,
            "views": self.views,
            "predicts_next": self.predicts_next,
            "head": self.head.read(self),
            **self._convolutions(),
            **{field: max(self.setting(key), 0) for key, field in SCALES.items()},
            "num_denoising_steps": self.setting("num_denoising_steps") or usual_steps,
            "attention_bias": f"{FIRST_LAYER}.self_attn.q_proj.bias" in self.stored,
        }

    def target_fields(self, target: TargetSizes) -> dict[str, Any]:
        ids, layers, embedding = self.stated_layer_ids, target.num_hidden_layers, self.shape("embed_tokens.weight")
        if not ids:
            assert layers is not None, "sizes of a target without its layers"
            usual = (1, layers // 2 - 1, layers - 4)
            ids = usual if self.is_speculators else default_layer_ids(self.sizes["layer"], layers)
        self.check_states([index + 1 for index in ids], target, self.for_target)
        return {
            **super().target_fields(target),
            "target_layer_ids": ids,
            "num_target_layers": layers,
            "mask_token_id": self._mask_token_id(),
            "num_embeddings": max(embedding[0], target.vocab_size) if embedding else None,
        }

    def _convolutions(self) -> dict[str, int]:
        taps, rows, size = self.sizes.get("w", 0), self.sizes.get("n", 0), self.sizes["h"]
        if not (taps or rows):
            return {}
        groups = rows // (2 * taps) if taps else 0
        if not groups or size % groups:
            raise self.wrong(
                f"has {taps} taps of `base_kernel` and {rows} rows of `kernel_projection`, which make no groups of "
                f"{size} channels",
                "Pass an intact checkpoint.",
            )
        channels = size // groups
        if (stated := self.setting("conv_group_size")) not in (None, channels):
            raise self.wrong_setting("conv_group_size", stated, f"and its tensors have {channels}")
        return {"conv_kernel_size": taps, "conv_group_size": channels}

    def _mask_token_id(self) -> int | None:
        """Named by the user, the config, or the tokenizer; `None` where there is no tokenizer to be asked."""
        named = getattr(self.options, "dflash_mask_token_id", None)
        token = self.setting("mask_token_id") if named is None else named
        if token is None and self.target_model is not None:
            token = mask_token_in(tokenizer_of(self.target_model), self.setting("mask_token"))
        if token is None and self.target_model is not None:
            raise self.wrong(
                "does not say which token its masks are, and the tokenizer has none that looks like it",
                "Name it with `dflash_mask_token_id`.",
            )
        return token

    def rope_parameters(self) -> dict[str, Any]:
        # Copied from targets: drafts count along one axis and rotate whole heads.
        left_out = ("mrope_interleaved", "partial_rotary_factor")
        return {name: value for name, value in super().rope_parameters().items() if name not in left_out}

    @property
    def views(self) -> tuple[BlockView, ...]:
        """Views of the layers. Where nothing is said, layers with a window are causal, and the others are not."""
        count, says = self.sizes["layer"], self.setting
        kinds = says("layer_types") or ["sliding_attention" if self.is_native else "full_attention"] * count
        if len(kinds) < count or set(kinds) - {"full_attention", "sliding_attention"}:
            what = f"which must name full_attention or sliding_attention for each of its {count} layers"
            raise self.wrong_setting("layer_types", kinds, what)
        window = None
        if "sliding_attention" in kinds and says("use_sliding_window") is not False:
            # transformers counts the distance, the others the positions.
            window = (says("sliding_window") or 2048) + 1 if self.is_native else self.value("sliding_window")
        causal = False if self.is_native else says("is_causal")
        if self.is_speculators:
            # Left out, it stands for what its class has.
            non_causal = says("sliding_window_non_causal")
            causal = not (self.head.looks_ahead_in_windows if non_causal is None else non_causal)
        views = []
        for slides in [kind == "sliding_attention" for kind in kinds[:count]]:
            view = BlockView(window if slides else None, slides if causal is None else causal)
            # For speculators the key is about the layers with a window.
            views.append(BlockView() if self.is_speculators and view.window is None else view)
        return () if all(view.sees_all for view in views) else tuple(views)

    @property
    def stated_layer_ids(self) -> tuple[int, ...]:
        """Layers whose outputs are read, by the config; empty where it names none."""
        if self.is_speculators:
            # Those say what enters a layer.
            return tuple(index - 1 for index in self.setting("aux_hidden_state_layer_ids"))
        return tuple(self.setting("target_layer_ids") or ([1, 13, 25, 37, 49] if self.is_native else ()))

    # Tensors

    def absolute_ids(self, table: torch.LongTensor, vocab_size: int) -> torch.LongTensor:
        # Whatever its shape.
        return super().absolute_ids(table.flatten(), vocab_size)

    def judge_unknown(self, names: Sequence[str]) -> None:
        raise self.wrong(
            f"has {len(names)} tensors that no DFlash draft with this config has: "
            f"{listed(self.stored[name] for name in names)}",
            "Pass a checkpoint of a published DFlash format.",
        )


_SHOWN = ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight")
_OF_HEADS = tuple(dict.fromkeys(name for head in HEADS for *_, tensors in head.formats for name in tensors))

_format = partial(Format, method="dflash", reader=DFlashReader, without=_OF_HEADS)

# The special before the usual.
FORMATS = (
    _format("dspark-gemma4", "DeepSpec", _GEMMA4, _SHOWN),
    *(
        _format(name, producer, marks, (*_SHOWN, *tensors), without=() if tensors else _OF_HEADS)
        for head in HEADS
        for name, producer, marks, tensors in head.formats
    ),
    _format("dflash-speculators", "speculators", ("speculators_model_type=dflash",), _SHOWN),
    _format(
        "dflash-laguna",
        "Poolside",
        ("architectures=.*DFlashLaguna.*", "architectures=.*Laguna.*&dflash_config=.*"),
        ("fc.weight", "aux_hidden_norms."),
    ),
    _format("dflash-mimo", "Xiaomi", ("dflash_config.use_swa=True",), _SHOWN),
    _format(
        "dflash-muse",
        "transformers",
        ("model_type=muse_glimmer_assistant", "architectures=MuseGlimmerAssistant.*"),
        ("encoder.fc.weight", "encoder.output_norm_enc.weight"),
    ),
    _format(
        "dflash-zlab",
        "z-lab, SpecForge, ModelOpt, hf_specdec",
        ("architectures=.*DFlash.*", "dflash_config=.*"),
        _SHOWN,
    ),
)
