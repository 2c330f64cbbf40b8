"""The published formats of block drafters of the DFlash family, brought to one record and one set of tensor names.

    z-lab, SpecForge, ModelOpt      what is special lies under `dflash_config`, in early files beside it
    speculators, types "dflash" and "dspark"
                                    layers under `transformer_layer_config`; own embedding and lm_head, `d2t`
    DeepSpec (`Qwen3DSparkModel`)   everything at the top; own embedding and lm_head, `markov_head`
    transformers (Muse Glimmer)     everything at the top; `encoder.fc`, `encoder.output_norm_enc`

The class and the keys of a config decide what a checkpoint is, the shapes of the tensors how large.

Shapes: h and th hidden sizes of draft and target, A captured states, V vocabulary of the target, U that of the draft,
L layers of the draft, N decoder layers of the target, B tokens of a block.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...checkpoints.checkpoint import Checkpoint, listed
from ...checkpoints.config_keys import refused_key
from ...checkpoints.draft_checkpoint import ROPE_NEEDS, DraftCheckpoint, TargetSizes, stated
from ...checkpoints.settings import ACTIVATION, COUNT, FLAG, INDEX, INDICES, NAME, NAMES, POSITIVE, Kind
from ...errors import CheckpointFormatError, shown
from ...hub.formats import unwrapped


_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}

_LAYER = "layers.0"

_MARKOV = "markov_head.markov_w1"

_TABLES = (*DraftCheckpoint.tables, f"{_MARKOV}.weight", "markov_head.markov_w2.weight")

# What some files hold and drafting has no use for: buffers, what only training needs, and a head that foresees how
# many drafts are kept.
_UNUSED = re.compile(r"d2t|t2d|.*inv_freq|verifier_.*|confidence_head\..*")

# Steps of a checkpoint that declares to refine its blocks and does not say how often.
_DENOISING_STEPS = 3

_BLOCK_SIZE = 16

# Tokens of a block, and forwards for one: published drafts have 16. Each token of a block has logits over the whole
# vocabulary, so that a config must not be able to ask for any number.
MOST_TOKENS = 256
BLOCK = Kind(
    lambda value: COUNT.is_valid(value) and value <= MOST_TOKENS, f"a positive integer of at most {MOST_TOKENS}"
)
STEPS = BLOCK

# Keys of configs that are read or judged here.
_READ = frozenset(
    "attention_sink_bias attention_value_scale aux_hidden_state_layer_ids block_size causal causal_head dflash_config "
    "dflash_num_denoising_steps dspark_noise_token_id hidden_act is_causal iterative_denoising layer_types "
    "markov_head_type markov_rank mask_token mask_token_id max_position_embeddings num_denoising_steps "
    "num_target_layers pard_token partial_rotary_factor projector_type ptd_token_id quantization_config rms_norm_eps "
    "rope_parameters rope_scaling rope_theta sample_from_anchor shift_label sliding_window sliding_window_non_causal "
    "target_layer_ids use_sliding_window use_swa".split()
)


@dataclass(frozen=True)
class BlockView:
    """What a layer lets the positions of a block see: of the text before it, and of the block itself.

    Args:
        window (`int`, *optional*): How many positions it looks back, its own included; without `causal` as many
            forward. `None`: no limit.
        causal (`bool`): It does not look forward inside of the block.
    """

    window: int | None = None
    causal: bool = False

    @property
    def sees_all(self) -> bool:
        return self.window is None and not self.causal

    def hidden(self, distance: torch.LongTensor) -> torch.BoolTensor:
        """Where the distance from the key to the query, in positions, puts the key out of sight."""
        if self.window is None:
            return distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        far = distance >= self.window
        return far | (distance < 0 if self.causal else distance <= -self.window)


@dataclass(frozen=True)
class DFlashConfig:
    """What a block drafter consists of.

    Args:
        hidden_size (`int`): h.
        target_hidden_size (`int`): th.
        vocab_size (`int`): V.
        draft_vocab_size (`int`): U.
        num_hidden_layers (`int`): L.
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size (`int`): Of the layers; the query heads
            need not have h elements together.
        block_size (`int`): B, the anchor included.
        mask_token_id (`int`): The token of the positions that are to be filled.
        target_layer_ids (`tuple[int, ...]` of length A): The decoder layers of the target whose outputs are read, in
            this order; -1 is the output of its embedding.
        rope_parameters (`Mapping`): `rope_type`, `rope_theta` and what the type needs, as in transformers. They are
            the draft's own, never the target's.
        views (`tuple[BlockView, ...]` of length L): What each layer sees; empty: all see everything.
        predicts_next (`bool`): A position of the block predicts the token behind it, so that the anchor's predicts
            the first one (DSpark). Otherwise every position predicts its own token, and the anchor none.
        markov_rank (`int`): Rank of the table of corrections by the token before (DSpark); 0: there is none.
        num_denoising_steps (`int`): Forwards for a block that the draft was trained for.
        attention_bias (`bool`): The projections of the attention have biases.
        hidden_act (`str`): Of the MLPs.
        rms_norm_eps (`float`): Of all norms.
        max_position_embeddings (`int`): Only rotary embeddings that depend on the length of the text look at it.
        num_target_layers (`int`): N.
        num_embeddings (`int`, *optional*): Rows of the draft's own embedding; `None`: it shares the target's.
        own_head, has_token_ids (`bool`): Whether the draft has these; it shares the lm_head with the target
            otherwise, and a draft id is the target's id otherwise.
    """

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    rope_parameters: Mapping[str, Any]
    num_target_layers: int
    views: tuple[BlockView, ...] = ()
    predicts_next: bool = False
    markov_rank: int = 0
    num_denoising_steps: int = 1
    attention_bias: bool = False
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    num_embeddings: int | None = None
    own_head: bool = False
    has_token_ids: bool = False

    def num_drafts(self, block_size: int) -> int:
        """Tokens that a block of this many yields."""
        return block_size if self.predicts_next else block_size - 1

    def view(self, layer: int) -> BlockView:
        return self.views[layer] if self.views else BlockView()

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`: z-lab's layout, DeepSpec's where a position predicts the next token."""
        rope = {name: value for name, value in self.rope_parameters.items() if name != "rope_theta"}
        windows = {view.window for view in self.views} - {None}
        sliding = [self.view(layer).window is not None for layer in range(self.num_hidden_layers)]
        config = {
            "model_type": "qwen3",
            **{name: getattr(self, name) for name in _STORED_AS_THEY_ARE},
            "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
            "sliding_window": next(iter(windows), None),
            "use_sliding_window": bool(windows),
            "rope_theta": self.rope_parameters["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else rope,
            "tie_word_embeddings": False,
        }
        own = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.target_layer_ids)}
        if self.num_denoising_steps > 1:
            own["num_denoising_steps"] = self.num_denoising_steps
        # By itself a layer is causal if and only if it slides.
        if any(self.view(layer).causal != slides for layer, slides in enumerate(sliding)):
            own["causal"] = self.view(0).causal
        if self.predicts_next:
            markov = {"markov_rank": self.markov_rank, "markov_head_type": "vanilla"}
            if "causal" in own:
                markov["is_causal"] = own.pop("causal")
            return {"architectures": ["Qwen3DSparkModel"], **config, **own, **markov}
        return {"architectures": ["DFlashDraftModel"], **config, "dflash_config": own}


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
    "attention_bias",
    "vocab_size",
    "draft_vocab_size",
    "block_size",
    "num_target_layers",
)


def default_layer_ids(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """The layers that a z-lab draft of `num_layers` layers reads where its config names none."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + index * (num_target_layers - 4) / (num_layers - 1)) for index in range(num_layers))


class DFlashCheckpoint(DraftCheckpoint):
    """A checkpoint under the names used here, with what follows from the shapes.

    Args:
        checkpoint (`Checkpoint`): Of any of the formats.
        target (`TargetSizes`): The target.
        mask_token_id (`int`, *optional*): Named by the user; it goes before the config's.
        find_mask_token (`Callable`): Looks for a mask token in the tokenizer, given how the config spells it or
            `None`; asked only where no id is stated.

    Attributes:
        config (`DFlashConfig`): The draft.

    Raises:
        CheckpointFormatError: The checkpoint is incomplete, contradicts itself, is no draft that this package knows,
            or was made for another target.
    """

    unused = _UNUSED
    tables = _TABLES

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetSizes,
        mask_token_id: int | None = None,
        find_mask_token: Callable[[str | None], int | None] = lambda spelling: None,
    ):
        super().__init__(checkpoint, target, _name, places_in(checkpoint.config))
        self._check_kind()
        self._require(_EVERY_DRAFT, "a DFlash draft")
        self.hidden_size, self.num_layers = self._matrix("fc")[0], self._num_layers()
        self._check_target()
        self.token_ids = self._read_token_ids()
        self.config = self._config(mask_token_id, find_mask_token)

    def _judge_left_over(self, names):
        raise self._wrong(
            f"has {len(names)} tensors that no DFlash draft with this config has: {listed(names)}",
            "Pass a checkpoint of a published DFlash format.",
        )

    def _absolute_ids(self, table):
        # Whatever its shape.
        return super()._absolute_ids(table.flatten())

    # What it is

    def _check_kind(self) -> None:
        if what := refusal(self.stored.values(), self.settings):
            raise CheckpointFormatError(f"'{self.name}' {what}")

    @property
    def _is_speculators(self) -> bool:
        return "speculators_model_type" in self.settings

    @property
    def _is_native(self) -> bool:
        """Whether it is of transformers' own kind."""
        return self.settings.get("model_type") == "muse_glimmer_assistant"

    def _check_target(self) -> None:
        """Refuses drafts of another target, by everything that tells sizes of the target."""
        self._check_vocabulary()
        target = self.target
        layers = self._setting("num_target_layers", COUNT) or target.num_hidden_layers
        if layers != target.num_hidden_layers:
            raise self._wrong(
                f"was made for a target of {layers} layers, and {target.name} has {target.num_hidden_layers}",
                self._for_target,
            )
        for part, what in (("embed_tokens", "embedding"), ("lm_head", "lm_head")):
            if f"{part}.weight" not in self.shapes and self.hidden_size != target.hidden_size:
                raise self._wrong(
                    f"has no `{part}.weight`, and its hidden size {self.hidden_size} does not fit the {what} of "
                    f"{target.name} ({target.hidden_size})",
                    self._for_target,
                )

    # The record

    def _config(self, mask_token_id: int | None, find_mask_token: Callable) -> DFlashConfig:
        own_head = "lm_head.weight" in self.shapes
        embedding = self.shapes.get("embed_tokens.weight")
        return DFlashConfig(
            hidden_size=self.hidden_size,
            target_hidden_size=self.target.hidden_size,
            vocab_size=self.target.vocab_size,
            draft_vocab_size=self._draft_vocab_size(own_head),
            num_hidden_layers=self.num_layers,
            **self._attention_sizes(),
            intermediate_size=self._matrix(f"{_LAYER}.mlp.gate_proj")[0],
            block_size=block_size(self.settings),
            mask_token_id=self._mask_token_id(mask_token_id, find_mask_token),
            target_layer_ids=self._target_layer_ids(),
            rope_parameters=self._rope_parameters(),
            views=self._views(),
            predicts_next=predicts_next(self.settings),
            markov_rank=self._markov_rank(),
            num_denoising_steps=self._num_denoising_steps(),
            attention_bias=f"{_LAYER}.self_attn.q_proj.bias" in self.shapes,
            hidden_act=self._setting("hidden_act", ACTIVATION) or "silu",
            rms_norm_eps=self._setting("rms_norm_eps", POSITIVE) or (1e-5 if self._is_native else 1e-6),
            max_position_embeddings=self._setting("max_position_embeddings", COUNT) or 32768,
            num_target_layers=self.target.num_hidden_layers,
            num_embeddings=max(embedding[0], self.target.vocab_size) if embedding else None,
            own_head=own_head,
            has_token_ids=self.token_ids is not None,
        )

    def _attention_sizes(self) -> dict[str, int]:
        queries, keys = (self._matrix(f"{_LAYER}.self_attn.{part}_proj")[0] for part in "qk")
        size = math.prod(self.shapes[f"{_LAYER}.self_attn.q_norm.weight"])
        if not size or size % 2 or queries % size or keys % size or not keys or queries % keys:
            raise self._wrong(
                f"has {queries} rows of q_proj and {keys} of k_proj, which do not fit heads of {size} elements",
                "Pass a complete checkpoint.",
            )
        return {"num_attention_heads": queries // size, "num_key_value_heads": keys // size, "head_dim": size}

    def _markov_rank(self) -> int:
        if f"{_MARKOV}.weight" not in self.shapes and not self._setting("markov_rank", INDEX):
            return 0
        self._require([f"{_MARKOV}.weight"], "its Markov head")
        return self._matrix(_MARKOV)[1]

    def _num_denoising_steps(self) -> int:
        keys = ("num_denoising_steps", "dflash_num_denoising_steps")
        found = next(filter(None, (self._setting(key, STEPS) for key in keys)), None)
        return found or (_DENOISING_STEPS if self._setting("iterative_denoising", FLAG) else 1)

    def _mask_token_id(self, named: int | None, find_mask_token: Callable) -> int:
        keys = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
        tokens = (self._setting(key, INDEX) for key in keys)
        found = named if named is not None else next((token for token in tokens if token is not None), None)
        if found is None:
            found = find_mask_token(self._setting("mask_token", NAME))
        if found is None:
            raise self._wrong(
                "does not say which token its masks are, and the tokenizer has none that looks like it",
                "Name it with `dflash_mask_token_id`.",
            )
        return found

    def _rope_parameters(self) -> dict[str, Any]:
        parameters, missing = self._stated_rope(500000.0 if self._is_native else 1000000.0)
        kind = parameters["rope_type"]
        if kind not in ROPE_NEEDS or missing:
            lacking = f" without {' and '.join(missing)}" if missing else ""
            raise self._wrong(
                f"has a rotary embedding of rope_type '{kind}'{lacking}",
                f"Drafts of the types {', '.join(ROPE_NEEDS)} can be used.",
            )
        # Copied from targets: drafts count along one axis and rotate whole heads.
        parameters.pop("mrope_interleaved", None)
        parameters.pop("partial_rotary_factor", None)
        return parameters

    def _views(self) -> tuple[BlockView, ...]:
        """What each layer sees. Where nothing is said, layers with a window are causal, and the others are not."""
        usual = ["sliding_attention" if self._is_native else "full_attention"] * self.num_layers
        kinds = self._setting("layer_types", NAMES) or usual
        unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if len(kinds) < self.num_layers or unknown:
            raise self._wrong(
                f"has `layer_types`={kinds} in its config.json, which must name full_attention or sliding_attention "
                f"for each of its {self.num_layers} layers",
                "Correct it.",
            )
        causal, window = self._causal(), self._window(kinds)
        views = []
        for kind in kinds[: self.num_layers]:
            slides = kind == "sliding_attention"
            views.append(BlockView(window if slides else None, slides if causal is None else causal))
        if self._is_speculators:
            # There the key is about the layers with a window.
            views = [view if view.window is not None else BlockView() for view in views]
        return () if all(view.sees_all for view in views) else tuple(views)

    def _causal(self) -> bool | None:
        """Whether layers are causal, `None` where their types decide."""
        if self._is_native:
            return False
        if self._is_speculators:
            return not self._setting("sliding_window_non_causal", FLAG)
        found = (self._setting(key, FLAG) for key in ("is_causal", "causal", "causal_head"))
        return next((value for value in found if value is not None), None)

    def _window(self, kinds: Sequence[str]) -> int | None:
        if "sliding_attention" not in kinds or self._setting("use_sliding_window", FLAG) is False:
            return None
        window = self._setting("sliding_window", COUNT)
        if window is None and self._is_native:
            window = 2048
        if window is None:
            raise self._wrong("has sliding layers and no `sliding_window` in its config.json", "Add it there.")
        # transformers counts the distance, the others the positions.
        return window + 1 if self._is_native else window

    # Captured states

    def _target_layer_ids(self) -> tuple[int, ...]:
        """The layers, checked against the width of `fc` and the target's layers."""
        target, width = self.target, self._matrix("fc")[1]
        states, rest = divmod(width, target.hidden_size)
        ids = self._stated_layer_ids()
        if rest or len(ids) != states:
            raise self._wrong(
                f"reads {width} values of the target's states (`fc`), and the outputs of {len(ids)} layers of "
                f"{target.name} (`target_layer_ids`: {list(ids)}) have {len(ids)} * {target.hidden_size}",
                self._for_target,
            )
        outside = [index for index in ids if not -1 <= index < target.num_hidden_layers]
        if outside:
            raise self._wrong(
                f"reads the outputs of the layers {list(ids)} (`target_layer_ids`), and {target.name} has the layers "
                f"0 to {target.num_hidden_layers - 1}",
                self._for_target,
            )
        return ids

    def _stated_layer_ids(self) -> tuple[int, ...]:
        layers = self.target.num_hidden_layers
        if self._is_speculators:
            # Those say what enters a layer.
            inputs = self._setting("aux_hidden_state_layer_ids", INDICES) or [2, layers // 2, layers - 3]
            return tuple(index - 1 for index in inputs)
        found = self._setting("target_layer_ids", INDICES)
        if not found and self._is_native:
            found = [1, 13, 25, 37, 49]
        return tuple(found or default_layer_ids(self.num_layers, layers))


def refusal(names: Iterable[str], config: Mapping[str, Any]) -> str | None:
    """Why a draft with tensors of these names, in any format, and this config is not supported; `None` where it is."""
    names, places, kind = set(map(_name, names)), places_in(config), _architecture(config)
    known = next((what for belongs, what in _REFUSED if belongs(names, places, kind)), None)
    return known or _unknown_kind(config, places) or _wrong_block(config) or refused_key(config, "dflash", _READ)


def _unknown_kind(config: Mapping[str, Any], places: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a draft that calls itself one of another kind is not taken for one of these."""
    known = {"speculators_model_type": ("dflash", "dspark"), "projector_type": ("dflash", "dspark")}
    for key, kinds in known.items():
        value = stated(places, key)
        if value is not None and value not in kinds:
            return f"is of the kind {shown(value)} (`{key}`), which is not known. Pass a DFlash or DSpark draft."
    if stated(places, "shift_label") is True and not predicts_next(config):
        return "has `shift_label` without `sample_from_anchor` in its config.json, which is not known. Pass another."
    return None


def _wrong_block(config: Mapping[str, Any]) -> str | None:
    """Why no blocks can be drafted by what a config says of them."""
    size, anchored = block_size(config), predicts_next(config)
    for key, value, kind in (("block_size", size, BLOCK), ("sample_from_anchor", anchored, FLAG)):
        if not kind.is_valid(value):
            return f"has `{key}`={shown(value)} in its config.json, which must be {kind.what}. Correct it."
    least = 1 if anchored else 2
    return None if size >= least else f"has `block_size`={size}, and needs at least {least}. Correct its config.json."


# How long drafts are: read by the loader, and by detection.


def num_drafts(config: Mapping[str, Any]) -> int | None:
    """Tokens of a draft by a config, `None` where it says nothing that can be used."""
    if _wrong_block(config):
        return None
    return block_size(config) if predicts_next(config) else block_size(config) - 1


def block_size(config: Mapping[str, Any]) -> Any:
    """B as it is stated, else the usual one."""
    found = stated(places_in(config), "block_size")
    return _BLOCK_SIZE if found is None else found


def predicts_next(config: Mapping[str, Any]) -> Any:
    """Whether the anchor's position predicts the first drafted token, as it is stated, else by the kind of draft."""
    found = stated(places_in(config), "sample_from_anchor")
    kinds = (config.get("speculators_model_type"), stated(places_in(config), "projector_type"))
    return "DSpark" in _architecture(config) or "dspark" in kinds if found is None else found


def _name(stored: str) -> str:
    """The name used here of a tensor in a file."""
    stored = unwrapped(stored)
    for old, new in _RENAMED.items():
        if stored.startswith(old):
            return new + stored.removeprefix(old)
    return stored


def places_in(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Where a config may say something, the most special place first."""
    inner = (config.get("dflash_config"), config, config.get("transformer_layer_config"))
    return tuple(place for place in inner if isinstance(place, Mapping))


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


_EVERY_DRAFT = ("fc.weight", "hidden_norm.weight", "norm.weight") + tuple(
    f"{_LAYER}.{part}.weight"
    for part in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    + tuple(f"self_attn.{part}_proj" for part in "qkvo")
    + tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
)


def _states(places: Sequence[Mapping[str, Any]], key: str, *values: Any) -> bool:
    """Whether a config says one of these; without values, whether it says anything that counts as true."""
    found = [place[key] for place in places if place.get(key) is not None]
    return any(value in values if values else bool(value) for value in found)


# What is not supported: how it is recognised, and what it is.
_REFUSED = (
    (
        lambda names, places, kind: "DFlash2" in kind or any("_conv." in name for name in names),
        "is a DFlash2 draft (convolutions along the block, candidate selector), which is not supported. Pass a DFlash "
        "draft.",
    ),
    (
        lambda names, places, kind: "LiLiCorr" in kind or any(_states(places, f"lilicorr_{k}") for k in _LILICORR),
        "is a LiLiCorr draft (a transformer over the lattice of candidates), which is not supported. Pass a DFlash "
        "draft.",
    ),
    (
        lambda names, places, kind: "Domino" in kind or _states(places, "projector_type", "domino"),
        "is a Domino draft (corrections by a recurrent network), which is not supported. Pass a DFlash draft.",
    ),
    (
        lambda names, places, kind: "XPress" in kind or any(name.startswith("xpress_head.") for name in names),
        "is an XPress draft (refinement of the logits along the block), which is not supported. Pass a DFlash draft.",
    ),
    (
        lambda names, places, kind: "Laguna" in kind or any("aux_hidden_norms." in name for name in names),
        "is a Laguna draft (gated attention, norms for each captured state), which is not supported. Pass a DFlash "
        "draft.",
    ),
    (
        lambda names, places, kind: "Gemma4DSpark" in kind,
        "is a DSpark draft with Gemma 4 layers, which is not supported. Pass one with Qwen3 layers.",
    ),
    (
        lambda names, places, kind: kind.lower().startswith("peagle") or "mask_hidden" in names,
        "is a P-EAGLE head, which is not supported. Pass a DFlash draft.",
    ),
    (
        lambda names, places, kind: (
            any(name.endswith("attention_sink_bias") for name in names)
            or any(_states(places, key) for key in ("use_swa", "attention_sink_bias", "attention_value_scale"))
        ),
        "is a MiMo draft (attention sinks, scaled values), which is not supported. Pass a DFlash draft.",
    ),
    (
        lambda names, places, kind: (
            any(_states(places, key) for key in ("use_gemma_norm", "output_multiplier", "final_logit_softcapping"))
            or any(_states(places, key, False) for key in ("is_neox_style", "rope_is_neox_style"))
        ),
        "has layers of another kind than Qwen3's (`use_gemma_norm`, `output_multiplier`, `final_logit_softcapping` "
        "or `is_neox_style: false` in its config.json), which are not supported. Pass a draft with Qwen3 layers.",
    ),
    (
        lambda names, places, kind: (
            (_states(places, "markov_head_type") and not _states(places, "markov_head_type", "vanilla"))
            or any(name.startswith(("markov_head.gate_proj", "markov_head.joint_proj")) for name in names)
        ),
        "has a Markov head with a gate or a state (`markov_head_type` in its config.json), which is not supported. "
        "Pass a draft with a vanilla one.",
    ),
    (
        lambda names, places, kind: (
            _states(places, "quantization_config")
            or any(name.endswith(("weight_scale", "weight_packed", "qweight")) for name in names)
        ),
        "holds quantised weights, which are not supported. Pass the draft in a floating-point type.",
    ),
)
_LILICORR = ("rank", "top_k", "num_layers", "hidden_size")
