"""The published formats of block drafters of the DFlash family, brought to one record and one set of tensor names.

    z-lab, SpecForge, ModelOpt      what is special lies under `dflash_config`, in early files beside it
    speculators, types "dflash", "dflash2" and "dspark"
                                    layers under `transformer_layer_config`; own embedding and lm_head, `d2t`
    DeepSpec (`Qwen3DSparkModel`)   everything at the top; own embedding and lm_head, `markov_head`
    transformers (Muse Glimmer)     everything at the top; `encoder.fc`, `encoder.output_norm_enc`

The class and the keys of a config decide what a checkpoint is, the shapes of the tensors how large.

Shapes as in [`~candidate_generators.dflash.config`].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...checkpoints.draft_reader import FIRST_LAYER, projections, share_of
from ...checkpoints.format import Format, Unsupported
from ...checkpoints.header import Header, TargetNeeds, TargetSizes, listed
from ...checkpoints.settings import COUNT, FLAG, INDEX, INDICES, NAME
from .config import BlockView, DFlashConfig, default_layer_ids
from .parts import BLOCK, DFLASH2, DOMINO, LATTICE, LILICORR, REFINER, SELECTOR, XPRESS, PartsReader


if TYPE_CHECKING:
    from ...checkpoints.checkpoint import Checkpoint
    from ...checkpoints.settings import Kind


# Steps of a checkpoint that declares to refine its blocks and does not say how often.
_DENOISING_STEPS = 3

_GEMMA4 = ("architectures=Gemma4DSpark.*",)

_UNSUPPORTED = (
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


class DFlashReader(PartsReader):
    """A checkpoint with a block drafter.

    Args:
        header (`Header`): Of any of the formats.
    """

    kinds: ClassVar[tuple[str, ...]] = ("dflash", "dflash2", "dspark", "domino", "lilicorr", "xpress")
    kind_keys: ClassVar[tuple[str, ...]] = ("speculators_model_type", "projector_type")
    blocks: ClassVar[tuple[str, ...]] = ("dflash_config", "", "transformer_layer_config")
    settings: ClassVar[dict[str, Kind]] = PartsReader.settings | {
        **dict.fromkeys(("aux_hidden_state_layer_ids", "target_layer_ids"), INDICES),
        **dict.fromkeys(("num_denoising_steps", "dflash_num_denoising_steps"), BLOCK),
        **dict.fromkeys(("causal", "causal_head", "is_causal", "sliding_window_non_causal"), FLAG),
        **dict.fromkeys(("iterative_denoising", "use_sliding_window"), FLAG),
        **dict.fromkeys(("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"), INDEX),
        "mask_token": NAME,
        "num_target_layers": COUNT,
    }
    notes = (
        "attention_sink_bias attention_value_scale dflash_config markov_head_type partial_rotary_factor "
        "projector_type quantization_config use_swa "
        "*confidence_head* *loss* auf dflasher draft_attn_impl draft_vocab_size dspark_target_layer_ids "
        "eagle_aux_hidden_state_layer_ids embed_requires_grad lambda_base_* max_anchors num_anchors swa_window_size "
        "target_model_type use_aux_hidden_state lilicorr_mlp_ratio xpress_mlp_ratio xpress_topc"
    )
    renamed: ClassVar[Mapping[str, str]] = {
        "encoder.fc.": "fc.",
        "encoder.output_norm_enc.": "hidden_norm.",
        **PartsReader.renamed,
    }
    unsupported: ClassVar[tuple[Unsupported, ...]] = _UNSUPPORTED
    instead = "Pass a DFlash draft."
    # Buffers, what only training needs, and a head that the config switches off.
    unused: ClassVar[re.Pattern[str]] = re.compile(r"d2t|t2d|.*inv_freq|verifier_.*|confidence_head\.proj\..*")

    def __init__(self, header: Header):
        super().__init__(header)
        self.is_speculators: bool = "speculators_model_type" in header.config
        # Of transformers' own kind.
        self.is_native: bool = header.config.get("model_type") == "muse_glimmer_assistant"
        theta, epsilon = (500000.0, 1e-5) if self.is_native else (1000000.0, 1e-6)
        self.usual: dict[str, float | int] = {
            "rope_theta": theta,
            "rms_norm_eps": epsilon,
            "max_position_embeddings": 32768,
        }

    # What it is

    def check(self) -> None:
        super().check()
        least = 1 if self.predicts_next else 2
        if self.block_size < least:
            raise self.wrong(
                f"has `block_size`={self.block_size}, and needs at least {least}", "Correct its config.json."
            )
        if self.header.shapes is not None:
            self.require(_EVERY_DRAFT, "a DFlash draft")
        self.check_parts()

    @property
    def num_draft_tokens(self) -> int | None:
        return (self.block_size if self.predicts_next and not self.is_domino else self.block_size - 1) or None

    @property
    def needs(self) -> TargetNeeds:
        ids, vocab_size = self._stated_layer_ids(), self.stated_vocab_size
        if self.header.shapes is None:
            width = self.setting("target_hidden_size") or self.setting("hidden_size")
        else:
            # Where z-lab's files name none, there is one state for each layer of the draft.
            states = len(ids) or (3 if self.is_speculators else self.num_layers)
            width = share_of(self.linear("fc")[1], states)
        layers = self.setting("num_target_layers")
        return TargetNeeds(None, width, vocab_size, layers, max((index + 1 for index in ids), default=None))

    # The record

    def configured(
        self,
        checkpoint: Checkpoint,
        target: TargetSizes,
        mask_token_id: int | None = None,
        find_mask_token: Callable[[str | None], int | None] = lambda spelling: None,
    ) -> DFlashConfig:
        """The record of the draft for a target.

        Args:
            checkpoint (`Checkpoint`): The one that the header is of.
            target (`TargetSizes`): The target.
            mask_token_id (`int`, *optional*): Named by the user; it goes before the config's.
            find_mask_token (`Callable`): Looks for a mask token in the tokenizer, given how the config spells it or
                `None`; asked only where no id is stated.

        Raises:
            CheckpointFormatError: The checkpoint is incomplete, contradicts itself, or was made for another target.
        """
        self.check()
        ids = self._target_layer_ids(target)
        self.check_states([index + 1 for index in ids], target, self.for_target)
        self.check_target(target)
        self.check_shared_parts(target)
        embedding = self.shape("embed_tokens.weight")
        return DFlashConfig(
            **self.common_settings(checkpoint, target),
            block_size=self.block_size,
            mask_token_id=self._mask_token_id(mask_token_id, find_mask_token),
            target_layer_ids=ids,
            num_target_layers=target.num_hidden_layers,
            views=self._views(),
            predicts_next=self.predicts_next,
            **self.part_settings(),
            num_denoising_steps=self._num_denoising_steps(),
            attention_bias=f"{FIRST_LAYER}.self_attn.q_proj.bias" in self.stored,
            num_embeddings=max(embedding[0], target.vocab_size) if embedding else None,
        )

    def _num_denoising_steps(self) -> int:
        found = self.first_setting("num_denoising_steps", "dflash_num_denoising_steps")
        return found or (_DENOISING_STEPS if self.setting("iterative_denoising") else 1)

    def _mask_token_id(self, named: int | None, find_mask_token: Callable) -> int:
        found = named
        if found is None:
            found = self.first_setting("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
        if found is None:
            found = find_mask_token(self.setting("mask_token"))
        if found is None:
            raise self.wrong(
                "does not say which token its masks are, and the tokenizer has none that looks like it",
                "Name it with `dflash_mask_token_id`.",
            )
        return found

    def rope_parameters(self) -> dict[str, Any]:
        # Copied from targets: drafts count along one axis and rotate whole heads.
        left_out = ("mrope_interleaved", "partial_rotary_factor")
        return {name: value for name, value in super().rope_parameters().items() if name not in left_out}

    def _views(self) -> tuple[BlockView, ...]:
        """Views of the layers. Where nothing is said, layers with a window are causal, and the others are not."""
        usual = ["sliding_attention" if self.is_native else "full_attention"] * self.num_layers
        kinds = self.setting("layer_types") or usual
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if len(kinds) < self.num_layers or unknown:
            raise self.wrong(
                f"has `layer_types`={kinds} in its config.json, which must name full_attention or sliding_attention "
                f"for each of its {self.num_layers} layers",
                "Correct it.",
            )
        causal, window = self._causal(), self._window(kinds)
        views = []
        for kind in kinds[: self.num_layers]:
            slides = kind == "sliding_attention"
            views.append(BlockView(window if slides else None, slides if causal is None else causal))
        if self.is_speculators:
            # There the key is about the layers with a window.
            views = [view if view.window is not None else BlockView() for view in views]
        return () if all(view.sees_all for view in views) else tuple(views)

    def _causal(self) -> bool | None:
        """True for causal layers, `None` where their types decide."""
        if self.is_native:
            return False
        if self.is_speculators:
            non_causal = self.setting("sliding_window_non_causal")
            # Left out, it stands for what its class has.
            return not (self.is_dflash2 if non_causal is None else non_causal)
        return self.first_setting("is_causal", "causal", "causal_head")

    def _window(self, kinds: Sequence[str]) -> int | None:
        if "sliding_attention" not in kinds or self.setting("use_sliding_window") is False:
            return None
        window = self.setting("sliding_window")
        if window is None and self.is_native:
            window = 2048
        if window is None:
            raise self.wrong("has sliding layers and no `sliding_window` in its config.json", "Add it there.")
        # transformers counts the distance, the others the positions.
        return window + 1 if self.is_native else window

    # Captured states

    def _stated_layer_ids(self) -> tuple[int, ...]:
        """Layers whose outputs are read, by the config; empty where it names none."""
        if self.is_speculators:
            # Those say what enters a layer.
            return tuple(index - 1 for index in self.setting("aux_hidden_state_layer_ids") or ())
        return tuple(self.setting("target_layer_ids") or ([1, 13, 25, 37, 49] if self.is_native else ()))

    def _target_layer_ids(self, target: TargetSizes) -> tuple[int, ...]:
        if found := self._stated_layer_ids():
            return found
        layers = target.num_hidden_layers
        assert layers is not None, "sizes of a target without its layers"
        return (1, layers // 2 - 1, layers - 4) if self.is_speculators else default_layer_ids(self.num_layers, layers)

    # Tensors

    def absolute_ids(self, table: torch.LongTensor, vocab_size: int) -> torch.LongTensor:
        # Whatever its shape.
        return super().absolute_ids(table.flatten(), vocab_size)

    def judge_unknown(self, names: Sequence[str]) -> None:
        raise self.wrong(
            f"has {len(names)} tensors that no DFlash draft with this config has: {listed(names)}",
            "Pass a checkpoint of a published DFlash format.",
        )


_EVERY_DRAFT = ("fc.weight", "hidden_norm.weight", "norm.weight")
_EVERY_DRAFT += projections("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
_PROJECTOR = "dflash_config.projector_type="
_SHOWN = ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight")

# Parts that only some kinds have, as files call them.
_REFINER = f"{REFINER}|refiner_head."
_CORRECTIONS = "prefix_gru.|logit_head."

_format = partial(Format, method="dflash", reader=DFlashReader, without=(SELECTOR, _CORRECTIONS, LATTICE, _REFINER))
_format2 = partial(_format, tensors=(*_SHOWN, SELECTOR), without=())

# The special before the usual.
FORMATS = (
    _format2("dflash2-speculators", "speculators", ("speculators_model_type=dflash2",)),
    _format2("dflash2", "z-lab, inco, hf_specdec", DFLASH2[:1]),
    _format("dspark-speculators", "speculators", ("speculators_model_type=dspark",), _SHOWN),
    _format("dflash-speculators", "speculators", ("speculators_model_type=dflash",), _SHOWN),
    _format("dspark-gemma4", "DeepSpec", _GEMMA4, _SHOWN),
    _format("dspark-deepspec", "DeepSpec", ("architectures=Qwen3DSpark.*",), _SHOWN),
    _format("dspark-specforge", "SpecForge", ("architectures=.*DSpark.*", _PROJECTOR + "dspark"), _SHOWN),
    _format(
        "domino",
        "SpecForge, hf_specdec",
        (*DOMINO, _PROJECTOR + "domino", "projector_type=domino"),
        (*_SHOWN, _CORRECTIONS),
        without=(),
    ),
    _format("xpress", "XPress, speculators, hf_specdec", XPRESS, (*_SHOWN, _REFINER), without=()),
    _format(
        "lilicorr",
        "ModelOpt, hf_specdec",
        (*LILICORR, _PROJECTOR + "lilicorr", "projector_type=lilicorr"),
        (*_SHOWN, LATTICE),
        without=(),
    ),
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
