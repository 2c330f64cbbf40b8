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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from transformers.utils import logging

from ...checkpoints.format import Format
from ...checkpoints.header import Header, TargetNeeds, TargetSizes, listed, unwrapped
from ...checkpoints.reader import CheckpointReader
from ...checkpoints.schema import COUNT, INDEX, Key, Tensor, renamed
from ...checkpoints.weights import WEIGHT_FILES
from ...errors import CheckpointFormatError
from ...target_facts import CACHE_READERS, decoder_layers


logger = logging.get_logger(__name__)

# Some targets have their MTP layers in a file that their index does not name.
MTP_FILES = "*mtp*.safetensors"

# The model types of targets whose decoder layers have been checked as MTP layers.
SUPPORTED_MODEL_TYPES = (
    "deepseek_v3 ernie4_5_moe glm4_moe glm4_moe_lite hy_v3 llama longcat_flash mellum mimo mistral qwen2 qwen3 "
    "qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next"
).split()

# Of layers that this package has trained with narrower MLPs than the target's.
WIDTH_KEY = "mtp_intermediate_size"

# What names of copies of the target's own tensors begin with here.
_COPY = "target."


@dataclass(frozen=True)
class MtpLayout:
    """Layout of a family's MTP layers, and what is computed around them."""

    name: str  # what messages call it
    # Beginnings of names in files, and what they are here, see `CheckpointReader.renamed`.
    names: Mapping[str, str]
    follows_target: bool = False  # layers are numbered after those of the target
    is_shared: bool = False  # all layers have one projection and one set of norms
    hidden_first: bool = False  # the first columns of the projection read the state, not the embedding
    # States are those before the target's final norm, which then serves the MTP layers, too; their own are handed on
    # before it.
    before_norm: bool = False
    is_half_layer: bool = False  # the target's layers are two in one, and an MTP layer is one: attention and dense MLP

    def name_of(self, stored: str, num_target_layers: int) -> str | None:
        """The name used here of a tensor, `None` for what is no MTP layer's."""
        name = renamed(stored, self.names)
        if name is None or name.startswith(_COPY):
            return None
        if not self.follows_target:
            return name
        number = _number(name) - num_target_layers
        return _numbered(name, number) if number >= 0 else None

    def stored_name(self, name: str, num_target_layers: int) -> str:
        """The name in a file of a tensor of this name."""
        if self.follows_target:
            name = _numbered(name, _number(name) + num_target_layers)
        return renamed(name, {new: old for old, new in self.names.items()}) or name


def _number(name: str) -> int:
    return int(name.split(".")[1])


def _numbered(name: str, number: int) -> str:
    """The name with another number of its layer."""
    kind, _, *rest = name.split(".")
    return ".".join((kind, str(number), *rest))


def _parts(prefix: str, **parts: str) -> dict[str, str]:
    """Names of a layout whose tensors all begin with the prefix of their layer."""
    names = {f"{prefix}{stored}.": f"{part}.{{layer}}." for part, stored in parts.items()}
    return {**names, prefix: "layers.{layer}."}


_OWN_PARTS = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"}
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
        "mtp.layers.{layer}.": "layers.{layer}.",
    },
    is_shared=True,
)

_LAYOUTS = (
    MTP_LAYOUT,
    MtpLayout(
        "longcat",
        {
            "model.mtp.norm.": "norm.0.",
            "model.mtp.embed_tokens.": _COPY,
            "model.mtp.layers.{layer}.transformer_layer.mlp.": "layers.{layer}.mlp.",
            **_parts("model.mtp.layers.{layer}.", enorm="enorm.m", hnorm="hnorm.m", eh_proj="eh_proj"),
        },
        is_half_layer=True,
    ),
    MtpLayout("mimo", _parts("model.mtp_layers.{layer}.", **_MIMO_PARTS), hidden_first=True),
    MtpLayout("speculators", _parts("mtp_layers.{layer}.", **_MIMO_PARTS)),
    MtpLayout(
        "ernie",
        {
            "model.mtp_emb_norm.{layer}.": "enorm.{layer}.",
            "model.mtp_hidden_norm.{layer}.": "hnorm.{layer}.",
            "model.mtp_linear_proj.{layer}.": "eh_proj.{layer}.",
            "model.mtp_block.{layer}.": "layers.{layer}.",
        },
        before_norm=True,
    ),
    # Last: the layers of every target have such names.
    MtpLayout(
        "deepseek",
        {
            "model.layers.{layer}.shared_head.head.": _COPY,
            "model.layers.{layer}.embed_tokens.": _COPY,
            "model.layers.{layer}.final_layernorm.": "norm.{layer}.",
            "model.layers.{layer}.mlp.router.gate.": "layers.{layer}.mlp.gate.",
            "model.layers.{layer}.mlp.expert_bias": "layers.{layer}.mlp.e_score_correction_bias",
            "model.layers.{layer}.mlp.shared_mlp.": "layers.{layer}.mlp.shared_experts.",
            **_parts("model.layers.{layer}.", norm="shared_head.norm", **_OWN_PARTS),
        },
        follows_target=True,
    ),
)


@dataclass(frozen=True)
class MtpConfig:
    """Record of the MTP layers of a target."""

    layout: MtpLayout = MTP_LAYOUT  # where they come from, and with it what is computed around them
    num_layers: int = 1  # K
    has_bias: bool = False  # of the projections
    intermediate_size: int | None = None  # width of dense MLPs, where it is not that of the target's

    @property
    def num_projections(self) -> int:
        """Number of projections, each with its norms."""
        return 1 if self.layout.is_shared else self.num_layers


class MtpReader(CheckpointReader):
    """MTP layers in a checkpoint of their own, or in that of a whole target; N is by default as its config says."""

    noun = "MTP layers"
    blocks: ClassVar[tuple[str, ...]] = ("", "text_config", "transformer_layer_config")
    keys: ClassVar[tuple[Key, ...]] = (
        *CheckpointReader.keys,
        Key(WIDTH_KEY, COUNT),
        Key("num_nextn_predict_layers mtp_num_hidden_layers num_mtp_layers", INDEX),
    )
    notes = "*loss* num_speculative_steps target_model_type transformer_layer_config"
    sizes_by = "the target asks"
    fitting = "Pass the MTP layers of this target."
    unused: ClassVar[re.Pattern[str]] = re.compile("")
    weight_files: ClassVar[tuple[str, ...]] = (MTP_FILES, *WEIGHT_FILES)
    target_files: ClassVar[str | None] = MTP_FILES

    def _stored_names(self):
        if self.target_model is None:
            counts = map(self.stated, ("num_hidden_layers", "num_layers", "n_layer"))
            self.num_target_layers: int = next(filter(COUNT.is_valid, counts), 0)
        else:
            self.num_target_layers = len(decoder_layers(self.target_model))
        # Layouts tell themselves apart by `model.`, so that it is only taken off where nothing is known with it.
        for keeps_model, layout in product((True, False), _LAYOUTS):
            names: dict[str, str] = {}
            for stored in self.header.tensors:
                bare = unwrapped(stored)
                if keeps_model and "model." in stored[: len(stored) - len(bare)]:
                    bare = f"model.{bare}"
                if name := layout.name_of(bare, self.num_target_layers):
                    names[name] = stored
            if "eh_proj.0.weight" in names:
                self.layout: MtpLayout | None = layout
                return names
        self.layout = None  # it has no MTP layers
        return {}

    @classmethod
    def count_in_target(cls, header: Header) -> int:
        return len(cls(header)._stored_layers)

    @classmethod
    def family_misfits(cls, needs: TargetNeeds, target_config: Mapping[str, Any]) -> Iterator[str]:
        kind = target_config.get("model_type")
        # The type of what multimodal configs nest is often left out.
        kinds = (kind, f"{kind}_text")
        if needs.model_type not in (None, *kinds):
            yield f"Its layers are those of the model_type '{needs.model_type}', and the target is of '{kind}'."
        if not set(kinds) & set(SUPPORTED_MODEL_TYPES):
            yield f"The MTP layers of targets of the model_type '{kind}' are not supported."

    @property
    def table(self) -> tuple[Tensor, ...]:
        """h: hidden size. What else a layer has the target's own layers say."""
        assert self.layout is not None, "no MTP layers"
        return (
            # Some files hold it transposed.
            Tensor("eh_proj.{projection}.weight"),
            Tensor("eh_proj.{projection}.bias", "h", needed=False),
            Tensor("(enorm|hnorm).{projection}.weight", "h"),
            Tensor("norm.{projection}.weight", "h", not self.layout.before_norm),
            # Layers of LongCat have two of each.
            Tensor("layers.{layer}.(input|post_attention)_layernorm.weight", "h", needed=False),
        )

    def check(self) -> None:
        if self.layout is None:
            raise self.wrong(
                f"has no MTP layers among its {len(self.header.tensors)} tensors in {self.header.file}. Copies of a "
                "model, quantised ones above all, often leave them out",
                "Pass a checkpoint that has them as `spec_model`, together with spec_method='mtp'.",
            )
        super().check()
        numbers, count = self._stored_layers, self.num_layers
        if count > len(numbers) or not numbers.issuperset(range(count)):
            raise self.wrong(
                f"has {count} MTP layers by its config.json, and tensors of those with the numbers {sorted(numbers)}",
                "Pass a complete checkpoint.",
            )

    @property
    def needs(self) -> TargetNeeds:
        layer, own = self.header.config.get("transformer_layer_config"), self.header.config.get("target_model_type")
        kind = layer.get("model_type") if isinstance(layer, Mapping) else own
        sizes = (self.setting(key) for key in ("hidden_size", "vocab_size"))
        return TargetNeeds(None, *sizes, model_type=kind if isinstance(kind, str) else None)

    @property
    def num_draft_tokens(self) -> int | None:
        # One layer drafts any number of tokens.
        return self.num_layers if self.num_layers > 1 else super().num_draft_tokens

    @property
    def num_layers(self) -> int:
        """K: as the config states it, unless it says nothing or 0, else as many as are stored."""
        return self.setting("num_nextn_predict_layers") or len(self._stored_layers)

    @property
    def _stored_layers(self) -> set[int]:
        return {_number(name) for name in self.stored if name.startswith("layers.")}

    def record(self, target: TargetSizes) -> MtpConfig:
        if self.target_model is None or self.header.name != getattr(self.target_model.config, "_name_or_path", None):
            self.check_target(target)
        return MtpConfig(self.layout, self.num_layers, "eh_proj.0.bias" in self.stored, self.setting(WIDTH_KEY))

    # Tensors

    def name_in_file(self, name: str) -> str:
        return self.layout.stored_name(name, self.num_target_layers)

    def sources(self, name: str, shape: tuple[int, ...]) -> Sequence[Sequence[str]]:
        # Experts are stored one by one, and computed together.
        if name in self.stored or not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            return [[name]]
        prefix, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        return [[f"{prefix}.{expert}.{part}.weight" for part in parts] for expert in range(shape[0])]

    def weight(self, name: str, dtype: torch.dtype | None, device: torch.device | str) -> torch.Tensor:
        # Some tensors are in float32 whatever the others are in.
        in_float32 = getattr(self.target_model, "_keep_in_fp32_modules_strict", None) or ()
        dtype = torch.float32 if any(part in name for part in in_float32) else dtype
        return super().weight(name, dtype, device)

    def fitted(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        # Some files hold it transposed.
        is_turned = name.startswith("eh_proj.") and tuple(tensor.shape) == shape[::-1]
        return tensor.t().contiguous() if is_turned else tensor

    def judge_unknown(self, names: Sequence[str]) -> None:
        if unused := [self.stored[name] for name in names if _number(name) < self.num_layers]:
            logger.warning(f"'{self.name}': {len(unused)} tensors of MTP layers are not used: {listed(unused)}.")


class AssistantReader(CheckpointReader):
    """A small model of transformers that reads the keys and values of its target."""

    keys: ClassVar[tuple[Key, ...]] = (*CheckpointReader.keys, Key("backbone_hidden_size hidden_size", COUNT))

    @property
    def needs(self) -> TargetNeeds:
        return TargetNeeds(None, self.setting("backbone_hidden_size"), self.setting("vocab_size"))

    def check(self) -> None:
        # transformers loads and drives it.
        pass


def stored_tensors(config: MtpConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a network in the `mtp` layout, if that can hold it."""
    layout = config.layout
    if layout.before_norm or layout.is_half_layer or config.num_projections > 1:
        raise CheckpointFormatError(
            f"MTP layers of the layout '{layout.name}' with {config.num_projections} projections cannot be written as "
            "`mtp.*`, which has one projection and states after the final norm. Keep their own checkpoint."
        )
    stored = {MTP_LAYOUT.stored_name(name, 0): tensor.detach().contiguous() for name, tensor in tensors.items()}
    if layout.hidden_first:
        stored["mtp.fc.weight"] = torch.cat(stored["mtp.fc.weight"].chunk(2, dim=1)[::-1], dim=1)
    return stored


# The layers of a target, which a checkpoint of MTP layers alone lacks.
_TARGETS_OWN = ("layers.0.",)

_format = partial(Format, method="mtp", reader=MtpReader, without=_TARGETS_OWN)

# The special before the usual.
FORMATS = (
    _format("mtp", "hf_specdec", ("model_type=mtp",), ("mtp.fc.weight",)),
    _format("mtp-speculators", "speculators", ("speculators_model_type=mtp",), ("mtp_layers.",)),
    _format("mtp-mimo", "Xiaomi, FastMTP", (), ("mtp_layers.", ".input_proj.weight")),
    _format("mtp-ernie", "Baidu", (), ("mtp_block.", "mtp_linear_proj.")),
    _format("mtp-longcat", "Meituan", (), ("mtp.layers.", ".eh_proj.weight")),
    _format("mtp-deepseek", "DeepSeek, Z.ai, Tencent", (), ("layers.", ".eh_proj.weight")),
    Format(
        "gemma4-assistant",
        "Google",
        (f"model_type=({'|'.join(CACHE_READERS)})",),
        method="mtp",
        reader=AssistantReader,
    ),
)
