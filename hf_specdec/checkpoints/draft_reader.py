"""Drafts with decoder layers of their own: the record that their formats are brought to, and what all of them share.

Shapes: V vocabulary of the target, U that of the draft, L layers of the draft, N decoder layers of the target, h and
th hidden sizes of draft and target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ..errors import shown
from .header import TargetNeeds, TargetSizes
from .reader import CheckpointReader
from .schema import ACTIVATION, COUNT, MAPPING, NAMES, NUMBER, POSITIVE, Key, Tensor, keys, list_of


# The rotary embeddings that drafts have, and what each needs; some configs have other names for them.
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_ROPE_NUMBERS = "factor attention_factor beta_fast beta_slow mscale mscale_all_dim".split()
_ROPE_NUMBERS += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
_ROPE_NAMES = {"su": "longrope", "mrope": "default"}

FIRST_LAYER = "layers.0"


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """Record of a draft with layers of its own."""

    hidden_size: int  # h
    target_hidden_size: int  # th
    vocab_size: int  # V
    draft_vocab_size: int  # U
    num_hidden_layers: int  # L
    num_attention_heads: int  # which need not have h elements together
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    # `rope_type`, `rope_theta` and what the type needs, as in transformers: the draft's own, never the target's.
    rope_parameters: Mapping[str, Any]
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048  # only rotary embeddings that depend on the length of the text look at it
    own_head: bool = False  # else the lm_head is the target's
    has_token_ids: bool = False  # else a draft id is the target's id

    @property
    def needs(self) -> TargetNeeds:
        """The target that it was made for."""
        raise NotImplementedError(f"{type(self).__name__} must implement needs.")

    def to_dict(self) -> dict[str, Any]:
        """The content of `config.json`, as far as the formats agree on it."""
        rope = {name: value for name, value in self.rope_parameters.items() if name != "rope_theta"}
        return {
            **{name: getattr(self, name) for name in _STORED_AS_THEY_ARE},
            "rope_theta": self.rope_parameters["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else rope,
        }


_STORED_AS_THEY_ARE = (
    "hidden_size target_hidden_size vocab_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "intermediate_size hidden_act rms_norm_eps max_position_embeddings"
).split()


# The tensors of layers of the Llama and Qwen3 kind: q and k values of queries and keys, d of a head, m inside of MLPs.
LAYERS = (
    Tensor("layers.{layer}.self_attn.o_proj.weight", "h q"),
    Tensor("layers.{layer}.self_attn.q_proj.weight", "q h"),
    Tensor("layers.{layer}.self_attn.(k|v)_proj.weight", "k h"),
    Tensor("layers.{layer}.self_attn.(q|k)_norm.weight", "d", needed=False),
    Tensor("layers.{layer}.self_attn.q_proj.bias", "q", needed=False),
    Tensor("layers.{layer}.self_attn.(k|v)_proj.bias", "k", needed=False),
    Tensor("layers.{layer}.self_attn.o_proj.bias", "h", needed=False),
    Tensor("layers.{layer}.mlp.(gate|up)_proj.weight", "m h"),
    Tensor("layers.{layer}.mlp.down_proj.weight", "h m"),
    Tensor("layers.{layer}.mlp.(gate|up)_proj.bias", "m", needed=False),
    Tensor("layers.{layer}.mlp.down_proj.bias", "h", needed=False),
    Tensor("layers.{layer}.(input|post_attention)_layernorm.weight", "h"),
)


class DraftReader(CheckpointReader):
    """A checkpoint of a draft with layers of its own; formats have defaults for its norm and rotary embedding."""

    noun = "draft"
    reads_layers = True
    record_class: ClassVar[type[DraftConfig]]
    kinds: ClassVar[tuple[str, ...]]  # what configs call drafts of this method, under the keys of `kind_keys`
    kind_keys: ClassVar[tuple[str, ...]] = ("speculators_model_type",)
    token_tables: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "lm_head.weight")  # a row for every token
    keys: tuple[Key, ...] = (
        *CheckpointReader.keys,
        *keys("num_attention_heads sliding_window target_hidden_size", COUNT),
        *keys("rope_parameters rope_scaling", MAPPING),
        Key("hidden_act", ACTIVATION, "silu"),
        Key("layer_types", NAMES),
    )

    def check(self) -> None:
        super().check()
        for key in self.kind_keys:
            if (kind := self.stated(key)) not in (None, *self.kinds):
                raise self.wrong(f"is of the kind {shown(kind)} (`{key}`), which is not known", self.instead)
        self.own_fields()

    def check_target(self, target: TargetSizes) -> None:
        self.target_fields(target)

    def record(self, target: TargetSizes) -> DraftConfig:
        """The record of the draft for a target, whose table of ids it keeps."""
        fields = {**self.own_fields(), **self.target_fields(target)}
        if (token_ids := self.read_token_ids(target)) is not None:
            self.tables["token_ids"] = token_ids
        # Rows of an lm_head after the target's vocabulary are padding.
        sizes = [target.vocab_size, len(token_ids) if token_ids is not None else None, self._num_head_rows()]
        size = min(count for count in sizes if count is not None)
        return self.record_class(**fields, draft_vocab_size=size, has_token_ids=token_ids is not None)

    def own_fields(self) -> dict[str, Any]:
        """The fields of the record that need no target."""
        return {
            "hidden_size": self.sizes["h"],
            "num_hidden_layers": self.sizes["layer"],
            **self._attention_sizes(),
            "intermediate_size": self.sizes["m"],
            "rope_parameters": self.rope_parameters(),
            **{key: self.setting(key) for key in ("hidden_act", "rms_norm_eps", "max_position_embeddings")},
            "own_head": self.own_head,
        }

    def target_fields(self, target: TargetSizes) -> dict[str, Any]:
        """The fields of the record that follow the target's sizes, all of which are known."""
        super().check_target(target)
        has = {"embed_tokens": "embed_tokens.weight" in self.stored, "lm_head": self.own_head}
        for part, is_own in has.items():
            if not is_own and self.sizes["h"] != target.hidden_size:
                raise self.wrong(
                    f"has no `{part}.weight`, and its hidden size {self.sizes['h']} does not fit that of "
                    f"{target.name} ({target.hidden_size})",
                    self.for_target,
                )
        rows = self._num_head_rows()
        if not ({"d2t", "t2d"} & self.stored.keys() or self._is_whole(rows, target)):
            raise self.wrong(
                f"drafts {rows} of {target.vocab_size} tokens and does not say which: it has neither `d2t` nor `t2d`",
                "Pass a complete checkpoint.",
            )
        return {"target_hidden_size": target.hidden_size, "vocab_size": target.vocab_size}

    @property
    def own_head(self) -> bool:
        """True where the draft has an lm_head."""
        return "lm_head.weight" in self.stored

    @property
    def stated_vocab_size(self) -> int | None:
        """V, by a tensor that has a row for each token, or by the config."""
        shapes = (self.shape(name) for name in ("embed_tokens.weight", "t2d"))
        rows = next((shape[0] for shape in shapes if shape), None)
        return self.setting("vocab_size") if rows is None else rows

    def check_states(self, boundaries: Sequence[int], target: TargetSizes, todo: str) -> None:
        """Checks the states at these boundaries of the target against the width of `fc`; `todo` if they do not fit."""
        width, hidden_size, layers = self.shape("fc.weight")[1], target.hidden_size, target.num_hidden_layers
        assert hidden_size is not None, "sizes of a target that is not known"
        assert layers is not None, "sizes of a target without its layers"
        if width != len(boundaries) * hidden_size:
            raise self.wrong(
                f"reads {width} values of the target's states (`fc`), and the states at the {len(boundaries)} layers "
                f"{list(boundaries)} of {target.name} have {len(boundaries)} * {hidden_size}",
                todo,
            )
        if not 0 <= min(boundaries) <= max(boundaries) <= layers:
            raise self.wrong(
                f"reads the states at the layers {list(boundaries)}, and {target.name} has {layers} layers", todo
            )

    def _attention_sizes(self) -> dict[str, int]:
        queries, values, size = self.sizes["q"], self.sizes["k"], self.sizes.get("d")
        if size is None:
            heads = self.value("num_attention_heads")
            size = queries // heads
        else:
            heads = queries // size if size else 0
        if not size or size % 2 or queries != heads * size or values < size or values % size or queries % values:
            raise self.wrong(
                f"has {queries} rows of q_proj and {values} of k_proj, which do not fit {heads} query heads of {size} "
                "elements",
                "Pass a checkpoint whose config fits its weights.",
            )
        return {"num_attention_heads": heads, "num_key_value_heads": values // size, "head_dim": size}

    def rope_parameters(self) -> dict[str, Any]:
        """The rotary embedding in transformers' notation, of a type that is known, with what the type needs."""
        stated = self.setting("rope_parameters") or self.setting("rope_scaling") or {}
        parameters = dict(self._rope_of_layers(stated))
        kind = parameters.pop("type", None)
        kind = str(parameters.get("rope_type") or kind or "default")
        kind = parameters["rope_type"] = _ROPE_NAMES.get(kind, kind)
        parameters["rope_theta"] = parameters.get("rope_theta") or self.setting("rope_theta")
        # For text, three axes are one.
        parameters.pop("mrope_section", None)
        missing = [name for name in _ROPE_NEEDS.get(kind, ()) if parameters.get(name) is None]
        if kind not in _ROPE_NEEDS or missing:
            lacking = f" without {' and '.join(missing)}" if missing else ""
            raise self.wrong(
                f"has a rotary embedding of rope_type '{kind}'{lacking}",
                f"Pass one of the types {', '.join(_ROPE_NEEDS)}.",
            )
        kinds = dict.fromkeys(_ROPE_NUMBERS, NUMBER)
        if kind == "longrope":
            # One of the two is looked at in long texts only.
            half = self._attention_sizes()["head_dim"] // 2
            kinds |= dict.fromkeys(_ROPE_NEEDS[kind], list_of(POSITIVE, f"{half} positive numbers", half))
        for name, one in kinds.items():
            if (value := parameters.get(name)) is not None and not one.is_valid(value):
                raise self.wrong_setting(name, value, f"which must be {one.what}")
        return parameters

    def _rope_of_layers(self, stated: Mapping[str, Any]) -> Mapping[str, Any]:
        """The one set of parameters for the layers there are, where a config has one for each kind of layer."""
        kinds = self.setting("layer_types") or ["full_attention"]
        if "speculators_model_type" in self.header.config:
            # That library turns all layers like those with a window.
            kinds = ["sliding_attention"] * self.sizes["layer"]
        sets = {kind: stated[kind] for kind in kinds[: self.sizes["layer"]] if isinstance(stated.get(kind), Mapping)}
        if not sets:
            full = stated.get("full_attention")
            return full if isinstance(full, Mapping) else stated
        one, *others = sets.values()
        if any(other != one for other in others):
            raise self.wrong(
                f"has other rotary embeddings for each of {', '.join(sets)}", "Pass a draft whose layers share one."
            )
        return one

    # Vocabulary

    def read_token_ids(self, target: TargetSizes) -> torch.LongTensor | None:
        """The target's id of each draft id, of shape `(U,)`; `None` where they are the same."""
        rows, vocab_size = self._num_head_rows(), target.vocab_size
        if "d2t" in self.stored:
            ids = self.absolute_ids(self.read("d2t").long(), vocab_size)
        elif self._is_whole(rows, target):
            return None
        else:
            ids = self.read("t2d").bool().flatten().nonzero()[:, 0]
        if not is_selection(ids, vocab_size):
            raise self.wrong(
                f"has a table (`d2t` or `t2d`) that selects no rising ids below {vocab_size}, the vocabulary of "
                f"{target.name}",
                self.for_target,
            )
        if rows != len(ids):
            raise self.wrong(
                f"has a table of {len(ids)} draft tokens (`d2t` or `t2d`) and "
                + ("no `lm_head.weight`" if rows is None else f"{rows} rows of `lm_head.weight`"),
                "Pass a complete checkpoint.",
            )
        return None if torch.equal(ids, torch.arange(vocab_size)) else ids

    def absolute_ids(self, table: torch.LongTensor, vocab_size: int) -> torch.LongTensor:
        """Ids from `d2t`, which holds what is to be added to each draft id."""
        return table + torch.arange(table.numel()) if table.dim() == 1 else table

    def _num_head_rows(self) -> int | None:
        return self.shape("lm_head.weight")[0] if self.own_head else None

    def _is_whole(self, rows: int | None, target: TargetSizes) -> bool:
        """True for an lm_head with a row for each of the target's tokens, or none."""
        return rows is None or rows == self.setting("vocab_size") or rows >= (target.vocab_size or 0)

    # Tensors

    def fitted(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if name in self.token_tables and tensor.shape[1:] == shape[1:]:
            missing = shape[0] - len(tensor)
            # Ids that only the target's padding has are embedded as zeros.
            return F.pad(tensor, (0, 0, 0, missing)) if missing > 0 else tensor[: shape[0]]
        return tensor


def share_of(columns: int, states: int) -> int | None:
    """Width of each of so many states that are read side by side, `None` where they are not equally wide."""
    return columns // states if states and columns % states == 0 else None


def is_selection(ids: torch.LongTensor, vocab_size: int) -> bool:
    """True for rising ids of a vocabulary, at least one."""
    if ids.dim() != 1 or len(ids) == 0:
        return False
    return bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size


def stored_vocabulary(tensors: Mapping[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """A network's state dict as files store it: with `d2t` and `t2d` in place of its table of ids."""
    stored = {name: tensor.contiguous() for name, tensor in tensors.items() if name != "token_ids"}
    if "token_ids" in tensors:
        ids = tensors["token_ids"]
        stored["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        stored["t2d"] = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return stored
