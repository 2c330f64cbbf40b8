"""Drafts with decoder layers of their own: the record that their formats are brought to, and what all of them share.

Shapes: V vocabulary of the target, U that of the draft, L layers of the draft, N decoder layers of the target, h and
th hidden sizes of draft and target.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from ..errors import shown
from ..threads import cached_property
from .header import TargetNeeds, TargetSizes
from .reader import CheckpointReader
from .settings import ACTIVATION, COUNT, MAPPING, NAMES, NUMBER, POSITIVE


if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .settings import Kind


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
    """Record of a draft with layers of its own.

    Args:
        hidden_size (`int`): h.
        target_hidden_size (`int`): th.
        vocab_size (`int`): V.
        draft_vocab_size (`int`): U.
        num_hidden_layers (`int`): L.
        num_attention_heads, num_key_value_heads, head_dim, intermediate_size (`int`): Of the layers; the query heads
            need not have h elements together.
        rope_parameters (`Mapping`): `rope_type`, `rope_theta` and what the type needs, as in transformers. They are
            the draft's own, never the target's.
        hidden_act (`str`): Of the MLPs.
        rms_norm_eps (`float`): Of all norms.
        max_position_embeddings (`int`): Only rotary embeddings that depend on the length of the text look at it.
        own_head, has_token_ids (`bool`): The draft has these; it shares the lm_head with the target
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
    rope_parameters: Mapping[str, Any]
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    own_head: bool = False
    has_token_ids: bool = False

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


class DraftReader(CheckpointReader):
    """A checkpoint of a draft with layers of its own.

    Beside those of [`CheckpointReader`] formats set these class attributes:

    - `kinds` (`tuple[str, ...]`): What configs call drafts of this method, under the keys of `kind_keys`.
    - `unused` (`re.Pattern`): Tensors that files may hold and drafting has no use for.
    - `token_tables` (`tuple[str, ...]`): Tensors with a row for every token.
    - `usual` (`Mapping`): Settings where a config leaves them out: `rope_theta`, `rms_norm_eps`,
      `max_position_embeddings`.
    """

    noun = "draft"
    kinds: ClassVar[tuple[str, ...]]
    kind_keys: ClassVar[tuple[str, ...]] = ("speculators_model_type",)
    settings: ClassVar[dict[str, Kind]] = CheckpointReader.settings | {
        "hidden_act": ACTIVATION,
        "layer_types": NAMES,
        "max_position_embeddings": COUNT,
        "num_attention_heads": COUNT,
        "rms_norm_eps": POSITIVE,
        "rope_parameters": MAPPING,
        "rope_scaling": MAPPING,
        "rope_theta": POSITIVE,
        "sliding_window": COUNT,
        "target_hidden_size": COUNT,
    }
    unused: ClassVar[re.Pattern[str]]
    token_tables: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "lm_head.weight")
    usual: Mapping[str, float]

    def check(self) -> None:
        super().check()
        for key in self.kind_keys:
            if (kind := self.stated(key)) not in (None, *self.kinds):
                raise self.wrong(f"is of the kind {shown(kind)} (`{key}`), which is not known", self.instead)

    @property
    def token_ids(self) -> torch.LongTensor | None:
        """The target's id of each draft id, `None` where they are equal; known once the vocabulary has been read."""
        return self.tables.get("token_ids")

    @property
    def own_head(self) -> bool:
        """True where the draft has an lm_head."""
        return "lm_head.weight" in self.stored

    @cached_property
    def hidden_size(self) -> int:
        """h."""
        return self.linear(f"{FIRST_LAYER}.self_attn.o_proj")[0]

    @property
    def stated_vocab_size(self) -> int | None:
        """V, by a tensor that has a row for each token, or by the config."""
        shapes = (self.shape(name) for name in ("embed_tokens.weight", "t2d"))
        rows = next((shape[0] for shape in shapes if shape), None)
        return self.setting("vocab_size") if rows is None else rows

    def linear(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a linear layer, by its weight."""
        return self.matrix(f"{name}.weight")

    def check_states(self, boundaries: Sequence[int], target: TargetSizes, todo: str) -> None:
        """Checks the target's states that are read against the width of `fc`.

        Args:
            boundaries (`Sequence[int]`): i is what enters decoder layer i of the target, N what enters its final norm.
            target (`TargetSizes`): The target.
            todo (`str`): What to do where they do not fit.
        """
        width, hidden_size, layers = self.linear("fc")[1], target.hidden_size, target.num_hidden_layers
        assert hidden_size is not None, "sizes of a target that is not loaded"
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

    def check_shared_parts(self, target: TargetSizes) -> None:
        """Checks that a draft without embedding or lm_head is as wide as the target, whose are used then."""
        has = {"embed_tokens": "embed_tokens.weight" in self.stored, "lm_head": self.own_head}
        for part, is_own in has.items():
            if not is_own and self.hidden_size != target.hidden_size:
                raise self.wrong(
                    f"has no `{part}.weight`, and its hidden size {self.hidden_size} does not fit that of "
                    f"{target.name} ({target.hidden_size})",
                    self.for_target,
                )

    # The record

    def common_settings(self, checkpoint: Checkpoint, target: TargetSizes) -> dict[str, Any]:
        """The fields of a [`DraftConfig`], and as `token_ids` the table that they speak of."""
        if (token_ids := self.read_token_ids(checkpoint, target)) is not None:
            self.tables["token_ids"] = token_ids
        return {
            "hidden_size": self.hidden_size,
            "target_hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": self._draft_vocab_size(target),
            "num_hidden_layers": self.num_layers,
            **self._attention_sizes(),
            "intermediate_size": self.linear(f"{FIRST_LAYER}.mlp.gate_proj")[0],
            "rope_parameters": self.rope_parameters(),
            "hidden_act": self.setting("hidden_act") or "silu",
            **{key: self.setting(key) or self.usual[key] for key in ("rms_norm_eps", "max_position_embeddings")},
            "own_head": self.own_head,
            "has_token_ids": token_ids is not None,
        }

    @cached_property
    def num_layers(self) -> int:
        """L."""
        layers = {int(found[1]) for found in map(re.compile(r"layers\.(\d+)\.").match, self.stored) if found}
        if layers != set(range(len(layers))):
            raise self.wrong(f"has the layers {sorted(layers)}, not all from 0 on", "Pass a complete checkpoint.")
        return len(layers)

    def _attention_sizes(self) -> dict[str, int]:
        queries, keys = (self.linear(f"{FIRST_LAYER}.self_attn.{part}_proj")[0] for part in "qk")
        norm = self.shape(f"{FIRST_LAYER}.self_attn.q_norm.weight")
        if norm is not None:
            size = math.prod(norm)
            heads = queries // size if size else 0
        else:
            heads = self.setting("num_attention_heads")
            if not heads:
                raise self.wrong("does not say `num_attention_heads` in its config.json", "Add it there.")
            size = queries // heads
        if not size or size % 2 or queries != heads * size or keys < size or keys % size or queries % keys:
            raise self.wrong(
                f"has {queries} rows of q_proj and {keys} of k_proj, which do not fit {heads} query heads of {size} "
                "elements",
                "Pass a checkpoint whose config fits its weights.",
            )
        return {"num_attention_heads": heads, "num_key_value_heads": keys // size, "head_dim": size}

    def rope_parameters(self) -> dict[str, Any]:
        """The rotary embedding in transformers' notation, of a type that is known, with what the type needs."""
        given = self.setting("rope_parameters") or self.setting("rope_scaling") or {}
        parameters = dict(self._rope_of_layers(given))
        kind = parameters.pop("type", None)
        kind = str(parameters.get("rope_type") or kind or "default")
        kind = parameters["rope_type"] = _ROPE_NAMES.get(kind, kind)
        theta = parameters.get("rope_theta") or self.setting("rope_theta")
        parameters["rope_theta"] = theta or self.usual["rope_theta"]
        # For text, three axes are one.
        parameters.pop("mrope_section", None)
        missing = [name for name in _ROPE_NEEDS.get(kind, ()) if parameters.get(name) is None]
        if kind not in _ROPE_NEEDS or missing:
            lacking = f" without {' and '.join(missing)}" if missing else ""
            raise self.wrong(
                f"has a rotary embedding of rope_type '{kind}'{lacking}",
                f"Pass one of the types {', '.join(_ROPE_NEEDS)}.",
            )
        for name in _ROPE_NUMBERS:
            if (value := parameters.get(name)) is not None and not NUMBER.is_valid(value):
                raise self.wrong(
                    f"has `{name}`={shown(value)} in its config.json, which must be {NUMBER.what}", "Correct it."
                )
        if kind == "longrope":
            # One of the two is looked at in long texts only.
            half = self._attention_sizes()["head_dim"] // 2
            for name in _ROPE_NEEDS[kind]:
                value = parameters[name]
                if not (isinstance(value, list) and len(value) == half and all(map(POSITIVE.is_valid, value))):
                    raise self.wrong(
                        f"has `{name}`={shown(value)} in its config.json, which must be {half} positive numbers",
                        "Correct it.",
                    )
        return parameters

    def _rope_of_layers(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The one set of parameters for the layers there are, where a config has one for each kind of layer."""
        kinds = self.setting("layer_types") or ["full_attention"]
        sets = {kind: given[kind] for kind in kinds[: self.num_layers] if isinstance(given.get(kind), Mapping)}
        if not sets:
            full = given.get("full_attention")
            return full if isinstance(full, Mapping) else given
        one, *others = sets.values()
        if any(other != one for other in others):
            raise self.wrong(
                f"has other rotary embeddings for each of {', '.join(sets)}", "Pass a draft whose layers share one."
            )
        return one

    # Vocabulary

    def read_token_ids(self, checkpoint: Checkpoint, target: TargetSizes) -> torch.LongTensor | None:
        """The target's id of each draft id, of shape `(U,)`; `None` where they are the same."""
        rows, vocab_size = self._num_head_rows(), target.vocab_size
        assert vocab_size is not None, "sizes of a target that is not loaded"
        if "d2t" in self.stored:
            ids = self.absolute_ids(checkpoint.read(self.stored["d2t"]).long(), vocab_size)
        elif rows is None or rows == self.setting("vocab_size") or rows >= vocab_size:
            return None
        elif "t2d" in self.stored:
            ids = checkpoint.read(self.stored["t2d"]).bool().flatten().nonzero()[:, 0]
        else:
            raise self.wrong(
                f"drafts {rows} of {vocab_size} tokens and does not say which: it has neither `d2t` nor `t2d`",
                "Pass a complete checkpoint.",
            )
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
        return self.linear("lm_head")[0] if "lm_head.weight" in self.stored else None

    def _draft_vocab_size(self, target: TargetSizes) -> int:
        """U."""
        if self.token_ids is not None:
            return len(self.token_ids)
        # Rows after the target's vocabulary are padding.
        return min(self._num_head_rows(), target.vocab_size) if self.own_head else target.vocab_size

    # Tensors

    def fitted(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if name in self.token_tables and tensor.shape[1:] == shape[1:]:
            missing = shape[0] - len(tensor)
            # Ids that only the target's padding has are embedded as zeros.
            return F.pad(tensor, (0, 0, 0, missing)) if missing > 0 else tensor[: shape[0]]
        return tensor

    def judge_left_over(self, names: Sequence[str]) -> None:
        if unknown := [name for name in names if not self.unused.fullmatch(name)]:
            self.judge_unknown(unknown)

    def judge_unknown(self, names: Sequence[str]) -> None:
        """Warns of tensors that the network does not have and that are not among the unused, or refuses them."""
        raise NotImplementedError(f"{type(self).__name__} must implement judge_unknown().")


def share_of(columns: int, states: int) -> int | None:
    """Width of each of so many states that are read side by side, `None` where they are not equally wide."""
    return columns // states if states and columns % states == 0 else None


def is_selection(ids: torch.LongTensor, vocab_size: int) -> bool:
    """True for rising ids of a vocabulary, at least one."""
    if ids.dim() != 1 or len(ids) == 0:
        return False
    return bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocab_size


def projections(*parts: str) -> tuple[str, ...]:
    """Names of the weights of the first layer's projections, and of its other parts."""
    attention = tuple(f"self_attn.{part}_proj" for part in "qkvo")
    mlp = tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
    return tuple(f"{FIRST_LAYER}.{part}.weight" for part in (*parts, *attention, *mlp))


def stored_vocabulary(tensors: Mapping[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """Returns a network's tensors as files store them: with `d2t` and `t2d` in place of its table of ids.

    Args:
        tensors (`Mapping[str, torch.Tensor]`): Its state dict.
        vocab_size (`int`): V.
    """
    stored = {name: tensor.contiguous() for name, tensor in tensors.items() if name != "token_ids"}
    if "token_ids" in tensors:
        ids = tensors["token_ids"]
        stored["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        stored["t2d"] = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return stored
