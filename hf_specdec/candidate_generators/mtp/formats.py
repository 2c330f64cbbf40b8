"""The published layouts of multi-token-prediction layers, brought to one set of tensor names.

Most lie in the checkpoint of their target. The names of the tensors tell the layout, and the layout tells what a name
cannot: which half of the projection reads the state, and whether states are taken before or after a norm.

    mtp          mtp.fc, mtp.layers.{j}           Qwen3-Next, Qwen3.5, Mellum; and what this package trains
    deepseek     model.layers.{N + j}             DeepSeek-V3, GLM-4.5 and later, Hunyuan 3
    mimo         model.mtp_layers.{j}             MiMo-7B, FastMTP
    ernie        model.mtp_block.{j}              ERNIE 4.5
    longcat      model.mtp.layers.{j}             LongCat-Flash
    speculators  mtp_layers.{j}                   a folder of its own, by vllm-project/speculators

Shapes: h hidden size, N decoder layers of the target, K MTP layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from ...checkpoints.checkpoint import Checkpoint, listed
from ...checkpoints.config_keys import refused_key
from ...checkpoints.draft_checkpoint import stated
from ...checkpoints.settings import COUNT, INDICES, MAPPING
from ...errors import CheckpointFormatError, shown
from ...hub.formats import unwrapped
from ...threads import cached_property


logger = logging.get_logger(__name__)

# What the sizes of blocks with a scale of their own are where the config does not say.
_FP8_BLOCK = (128, 128)
_SCALE = "_scale_inv"

_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")

# Of layers that this package has trained with narrower MLPs than the target's.
WIDTH_KEY = "mtp_intermediate_size"


@dataclass(frozen=True)
class MtpLayout:
    """How a family stores its MTP layers, and what is computed around them.

    Args:
        name (`str`): What messages call it.
        names (`Mapping[str, str]`): Beginnings of stored names, `{}` for the number of the layer, and what they are
            called here; an empty one is a copy of the target's own. The first that fits counts.
        follows_target (`bool`): Layers are numbered behind those of the target.
        is_shared (`bool`): All layers have one projection and one set of norms.
        hidden_first (`bool`): The first columns of the projection read the state, not the embedding.
        before_norm (`bool`): States are those before the target's final norm, which then serves the MTP layers, too;
            their own are handed on before it.
        is_half_layer (`bool`): The target's layers are two in one, and an MTP layer is one: attention and dense MLP.
    """

    name: str
    names: Mapping[str, str]
    follows_target: bool = False
    is_shared: bool = False
    hidden_first: bool = False
    before_norm: bool = False
    is_half_layer: bool = False

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern, str]]:
        return [(re.compile(re.escape(old).replace(r"\{\}", r"(\d+)")), new) for old, new in self.names.items()]

    def name_of(self, stored: str, num_target_layers: int) -> str | None:
        """The name used here of a tensor: empty for a copy of the target's, `None` for what is no MTP layer's."""
        for pattern, new in self._patterns:
            if found := pattern.match(stored):
                number = int(found[1]) if found.groups() else 0
                if self.follows_target:
                    number -= num_target_layers
                if number < 0:
                    return None
                return new and new.format(number) + stored[found.end() :]
        return None

    def stored_name(self, name: str, num_target_layers: int) -> str:
        """What a tensor of this name is called in a file."""
        number = re.search(r"\.(\d+)\.", name)[1]
        stored_number = int(number) + (num_target_layers if self.follows_target else 0)
        for old, new in self.names.items():
            if new and name.startswith(new.format(number)):
                return old.format(stored_number) + name.removeprefix(new.format(number))
        return name


def _parts(prefix: str, **parts: str) -> dict[str, str]:
    """Names of a layout whose tensors all begin with the prefix of their layer."""
    own = {f"{prefix}{stored}.": f"{part}.{{}}." for part, stored in parts.items()}
    return {**own, prefix: "layers.{}."}


_MIMO_PARTS = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
_MIMO_PARTS |= {"norm": "final_layernorm"}

# The layout that this package writes.
MTP_LAYOUT = MtpLayout(
    "mtp",
    {
        "mtp.pre_fc_norm_embedding.": "enorm.0.",
        "mtp.pre_fc_norm_hidden.": "hnorm.0.",
        "mtp.fc.": "eh_proj.0.",
        "mtp.norm.": "norm.0.",
        "mtp.layers.{}.": "layers.{}.",
    },
    is_shared=True,
)

_LAYOUTS = (
    MTP_LAYOUT,
    MtpLayout(
        "longcat",
        {
            "model.mtp.norm.": "norm.0.",
            "model.mtp.embed_tokens.": "",
            "model.mtp.layers.{}.transformer_layer.mlp.": "layers.{}.mlp.",
            **_parts("model.mtp.layers.{}.", enorm="enorm.m", hnorm="hnorm.m", eh_proj="eh_proj"),
        },
        is_half_layer=True,
    ),
    MtpLayout("mimo", _parts("model.mtp_layers.{}.", **_MIMO_PARTS), hidden_first=True),
    MtpLayout("speculators", _parts("mtp_layers.{}.", **_MIMO_PARTS)),
    MtpLayout(
        "ernie",
        {
            "model.mtp_emb_norm.{}.": "enorm.{}.",
            "model.mtp_hidden_norm.{}.": "hnorm.{}.",
            "model.mtp_linear_proj.{}.": "eh_proj.{}.",
            "model.mtp_block.{}.": "layers.{}.",
        },
        before_norm=True,
    ),
    # Last: the layers of every target have such names.
    MtpLayout(
        "deepseek",
        {
            "model.layers.{}.shared_head.head.": "",
            "model.layers.{}.embed_tokens.": "",
            "model.layers.{}.final_layernorm.": "norm.{}.",
            "model.layers.{}.mlp.router.gate.": "layers.{}.mlp.gate.",
            "model.layers.{}.mlp.expert_bias": "layers.{}.mlp.e_score_correction_bias",
            "model.layers.{}.mlp.shared_mlp.": "layers.{}.mlp.shared_experts.",
            **_parts("model.layers.{}.", norm="shared_head.norm", enorm="enorm", hnorm="hnorm", eh_proj="eh_proj"),
        },
        follows_target=True,
    ),
)


@dataclass(frozen=True)
class MtpConfig:
    """What the MTP layers of a target consist of.

    Args:
        layout (`MtpLayout`): Where they come from, and with it what is computed around them.
        num_layers (`int`): K.
        has_bias (`bool`): The projections have a bias.
        intermediate_size (`int`, *optional*): Width of dense MLPs, where it is not that of the target's.
    """

    layout: MtpLayout = MTP_LAYOUT
    num_layers: int = 1
    has_bias: bool = False
    intermediate_size: int | None = None

    @property
    def num_projections(self) -> int:
        """How many projections there are, each with its norms."""
        return 1 if self.layout.is_shared else self.num_layers


class MtpCheckpoint:
    """MTP layers in a checkpoint, under the names used here.

    Args:
        checkpoint (`Checkpoint`): That of a whole target, or of MTP layers alone.
        num_target_layers (`int`): N.

    Attributes:
        config (`MtpConfig`): What they consist of.

    Raises:
        CheckpointFormatError: There are none, or fewer than its config says.
    """

    def __init__(self, checkpoint: Checkpoint, num_target_layers: int):
        self.checkpoint, self.num_target_layers = checkpoint, num_target_layers
        self.layout, self.stored = self._recognised()
        found = {int(name.split(".")[1]) for name in self.stored if name.startswith("layers.")}
        count = _stated_count(checkpoint.config) or len(found)
        if not 0 < count <= len(found) or not found.issuperset(range(count)):
            raise CheckpointFormatError(
                f"'{checkpoint.name}' has {shown(count)} MTP layers by its config.json, and tensors of those with the "
                f"numbers {sorted(found)}. Pass a complete checkpoint."
            )
        width = checkpoint.setting(WIDTH_KEY, *COUNT)
        self.config = MtpConfig(self.layout, count, "eh_proj.0.bias" in self.stored, width)

    def _recognised(self) -> tuple[MtpLayout, dict[str, str]]:
        if reason := refused_key(self.checkpoint.config, "mtp", _READ):
            raise CheckpointFormatError(f"'{self.checkpoint.name}' {reason}")
        if found := _recognised(self.checkpoint.shapes, self.num_target_layers):
            return found
        raise CheckpointFormatError(
            f"'{self.checkpoint.name}' has no MTP layers among its {len(self.checkpoint.shapes)} tensors in "
            f"{self.checkpoint.file}. Copies of a model, quantised ones above all, often leave them out: pass a "
            "checkpoint that has them as `spec_model`, together with spec_method='mtp'."
        )

    def read(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype | None,
        device: torch.device | str,
        in_float32: Iterable[str] = (),
    ) -> dict[str, torch.Tensor]:
        """The tensors of a network.

        Args:
            shapes (`Mapping[str, tuple[int, ...]]`): What its state dict holds.
            dtype (`torch.dtype`, *optional*): Of the floating-point ones; `None`: as stored.
            device (`torch.device`): Where to.
            in_float32 (`Iterable[str]`): Parts of the names of tensors that stay in float32.

        Raises:
            CheckpointFormatError: Some are missing, or have other shapes.
        """
        plan = {name: self._sources(name, shape) for name, shape in shapes.items()}
        wanted = [source for sources in plan.values() for row in sources for source in row]
        missing = [self._stored_name(name) for name in wanted if name not in self.stored]
        self.checkpoint.require(missing, "the MTP layers")
        self._warn_of_unused({*wanted, *(name + _SCALE for name in wanted)})
        tensors = {}
        for name, sources in plan.items():
            # One row for each expert, one column for each part of a fused matrix.
            rows = [torch.cat([self._tensor(source, dtype, device) for source in row]) for row in sources]
            tensor = torch.stack(rows) if _is_fused(name, sources) else rows[0]
            if name.startswith("eh_proj.") and tuple(tensor.shape) == shapes[name][::-1]:
                # Some files hold it transposed.
                tensor = tensor.t().contiguous()
            if tuple(tensor.shape) != shapes[name]:
                raise CheckpointFormatError(
                    f"'{self.checkpoint.name}' has {self._stored_name(sources[0][0])} of the shape "
                    f"{list(self.checkpoint.shapes[self.stored[sources[0][0]]])}, where the target asks for "
                    f"{list(shapes[name])}. Pass the MTP layers of this target."
                )
            is_kept = any(part in name for part in in_float32) and tensor.is_floating_point()
            tensors[name] = tensor.float() if is_kept else tensor
        return tensors

    def _sources(self, name: str, shape: tuple[int, ...]) -> list[list[str]]:
        """Names of what a tensor is put together from: experts are stored one by one, and computed together."""
        if name in self.stored or not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            return [[name]]
        prefix, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        return [[f"{prefix}.{expert}.{part}.weight" for part in parts] for expert in range(shape[0])]

    def _tensor(self, name: str, dtype: torch.dtype | None, device) -> torch.Tensor:
        stored = self.stored[name]
        if name + _SCALE not in self.stored:
            return self.checkpoint.read_weights([stored], dtype, device)[stored]
        found = self.checkpoint.read([stored, stored + _SCALE], torch.float32, device)
        return self._scaled(found[stored], found[stored + _SCALE]).to(dtype or torch.bfloat16)

    def _scaled(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """8-bit weights times the scales of their blocks."""
        settings = self.checkpoint.setting("quantization_config", *MAPPING) or {}
        sizes = settings.get("weight_block_size") or _FP8_BLOCK
        if (
            not INDICES.is_valid([*sizes])
            or len(sizes) != weight.dim()
            or min(sizes) < 1
            or scales.dim() != len(sizes)
        ):
            raise CheckpointFormatError(
                f"'{self.checkpoint.name}': `weight_block_size`={shown(sizes)} in config.json does not fit matrices "
                f"of {weight.dim()} dimensions with scales of {scales.dim()}. Pass an intact checkpoint."
            )
        for dim, size in enumerate(sizes):
            # Of a block that is larger than the matrix, the rest is nowhere.
            blocks = scales.repeat_interleave(min(size, weight.shape[dim]), dim)
            if blocks.shape[dim] < weight.shape[dim]:
                raise CheckpointFormatError(
                    f"'{self.checkpoint.name}' has too few scales for blocks of {list(sizes)} (`weight_block_size`). "
                    "Pass an intact checkpoint."
                )
            scales = blocks.narrow(dim, 0, weight.shape[dim])
        return weight * scales

    def _stored_name(self, name: str) -> str:
        return self.stored.get(name) or self.layout.stored_name(name, self.num_target_layers)

    def _warn_of_unused(self, used: set[str]) -> None:
        count = self.config.num_layers
        unused = [stored for name, stored in self.stored.items() if name not in used and _number(name) < count]
        if unused:
            logger.warning(
                f"'{self.checkpoint.name}': {len(unused)} tensors of MTP layers are not used: {listed(unused)}."
            )


# Keys of configs that are read here.
_READ = frozenset((*_COUNT_KEYS, WIDTH_KEY, "quantization_config"))


def refusal(names: Iterable[str], config: Mapping[str, Any]) -> str | None:
    """Why MTP layers in a checkpoint of their own are not supported; `None` where they are."""
    layers = stated((config, *nested_configs(config)), "num_hidden_layers")
    if names and _recognised(names, layers if COUNT.is_valid(layers) else 0) is None:
        return "has no MTP layers of a known layout among its tensors. Pass the checkpoint of MTP layers."
    return refused_key(config, "mtp", _READ)


def count_layers(names: Iterable[str], num_target_layers: int) -> int:
    """MTP layers among tensors with these names in files, those of a target with so many layers or of MTP alone."""
    _, names = _recognised(names, num_target_layers) or (None, ())
    return len({_number(name) for name in names if name.startswith("layers.")})


def _recognised(stored: Iterable[str], num_target_layers: int) -> tuple[MtpLayout, dict[str, str]] | None:
    """The layout of MTP layers, and the stored name of each of their tensors by its name here."""
    stored = list(stored)
    # Layouts tell themselves apart by `model.`, so that it is only taken off where nothing is known with it.
    for bare in (_without_wrapper, unwrapped):
        for layout in _LAYOUTS:
            renamed = ((layout.name_of(bare(name), num_target_layers), name) for name in stored)
            names = {name: old for name, old in renamed if name}
            if "eh_proj.0.weight" in names:
                return layout, names
    return None


def _without_wrapper(name: str) -> str:
    """A name without wrappers but for `model.`."""
    return f"model.{unwrapped(name)}" if "model." in name[: len(name) - len(unwrapped(name))] else unwrapped(name)


def stored_tensors(config: MtpConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a network in the `mtp` layout, which must be able to hold it.

    Raises:
        CheckpointFormatError: It is not.
    """
    layout = config.layout
    if layout.before_norm or layout.is_half_layer or config.num_projections > 1:
        raise CheckpointFormatError(
            f"MTP layers of the layout '{layout.name}' with {config.num_projections} projections cannot be written as "
            "`mtp.*`, which has one projection and states behind the final norm. Keep their own checkpoint."
        )
    stored = {MTP_LAYOUT.stored_name(name, 0): tensor.detach().contiguous() for name, tensor in tensors.items()}
    if layout.hidden_first:
        stored["mtp.fc.weight"] = torch.cat(stored["mtp.fc.weight"].chunk(2, dim=1)[::-1], dim=1)
    return stored


def _stated_count(config: Mapping[str, Any]) -> int | None:
    """K by a config, `None` where it is left out or 0."""
    for place in (config, *nested_configs(config)):
        for key in _COUNT_KEYS:
            if isinstance(place.get(key), int) and place[key] > 0:
                return int(place[key])
    return None


def nested_configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The configs of a language model inside of one."""
    found = (config.get(key) for key in ("text_config", "transformer_layer_config"))
    return [part for part in found if isinstance(part, Mapping)]


def _is_fused(name: str, sources: list[list[str]]) -> bool:
    return sources != [[name]]


def _number(name: str) -> int:
    return int(name.split(".")[1])
