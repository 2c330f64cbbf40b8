"""Checkpoints of drafts that have layers of their own, under the names used here: what their formats share.

A format is a subclass. It knows how tensors are called in files and where the config says what, and makes the record
of the draft from both; the vocabulary, the layers and the rotary embedding are stated alike by all of them.

Shapes: V vocabulary of the target, U that of the draft, N decoder layers of the target, h and th hidden sizes of draft
and target.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import CheckpointFormatError, shown
from ..target_facts import MAX_VOCABULARY_GAP, decoder_layers, hidden_size, vocabulary_size
from .checkpoint import Checkpoint
from .settings import COUNT, MAPPING, NAMES, POSITIVE, Kind


# The rotary embeddings that drafts have, and what each needs; some configs have other names for them.
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_ROPE_NAMES = {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True)
class TargetSizes:
    """What a draft must fit: class name, th, V and N of the target."""

    name: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int

    @classmethod
    def of(cls, target_model: nn.Module) -> TargetSizes:
        return cls(
            type(target_model).__name__,
            hidden_size(target_model),
            vocabulary_size(target_model),
            len(decoder_layers(target_model)),
        )


class DraftCheckpoint:
    """A checkpoint under the names used here.

    Class attributes are what the formats differ in.

    Attributes:
        noun (`str`): What messages call the draft.
        unused (`re.Pattern`): Tensors that files may hold and drafting has no use for.
        tables (`tuple[str, ...]`): Tensors with a row for every token.

    Args:
        checkpoint (`Checkpoint`): Of any of the formats.
        target (`TargetSizes`): The target.
        rename (`Callable`): The name used here of a tensor in a file.
        places (`Sequence[Mapping]`): Where the config may say something; the first that does counts.
    """

    noun: ClassVar[str] = "draft"
    unused: ClassVar[re.Pattern]
    tables: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "lm_head.weight")

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: TargetSizes,
        rename: Callable[[str], str],
        places: Sequence[Mapping[str, Any]],
    ):
        self.checkpoint, self.target, self.name = checkpoint, target, checkpoint.name
        self.settings, self.places = checkpoint.config, places
        self.stored: dict[str, str] = {}
        for name in checkpoint.shapes:
            if rename(name) in self.stored:
                raise self._wrong(
                    f"has {name} and {self.stored[rename(name)]}, which are two writings of one tensor",
                    "Pass a checkpoint with one of them.",
                )
            self.stored[rename(name)] = name
        self.shapes = {name: checkpoint.shapes[stored] for name, stored in self.stored.items()}
        # The target's id of each draft id, `None` where they are the same.
        self.token_ids: torch.LongTensor | None = None

    def read(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """The tensors of a network.

        Args:
            shapes (`Mapping[str, tuple[int, ...]]`): What its state dict holds.
            dtype (`torch.dtype`, *optional*): Of the floating-point ones; `None`: as stored.
            device (`torch.device`): Where to.

        Raises:
            CheckpointFormatError: Some are missing, have other shapes, or are not known to the format.
        """
        names = [name for name in shapes if name != "token_ids"]
        self._require(names, f"the {self.noun}")
        left_over = [name for name in self.stored if name not in shapes and not self.unused.fullmatch(name)]
        if left_over:
            self._judge_left_over(left_over)
        stored = self.checkpoint.read_weights([self.stored[name] for name in names], dtype, device)
        tensors = {name: self._fitted(name, stored[self.stored[name]], shapes[name]) for name in names}
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != shapes[name]:
                raise self._wrong(
                    f"has {self.stored[name]} of the shape {list(self.shapes[name])}, where its other tensors ask for "
                    f"{list(shapes[name])}",
                    "Pass a complete checkpoint.",
                )
        if self.token_ids is not None:
            tensors["token_ids"] = self.token_ids.to(device)
        return tensors

    def _judge_left_over(self, names: list[str]) -> None:
        """What the format thinks of tensors that the network does not have: it warns or refuses."""
        raise NotImplementedError(f"{type(self).__name__} must implement _judge_left_over().")

    def _fitted(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor with the rows that are used of it."""
        if name in self.tables and tensor.shape[1:] == shape[1:]:
            missing = shape[0] - len(tensor)
            # Ids that only the target's padding has are embedded as zeros.
            return F.pad(tensor, (0, 0, 0, missing)) if missing > 0 else tensor[: shape[0]]
        return tensor

    def _require(self, names: Iterable[str], of: str) -> None:
        self.checkpoint.require([self.stored.get(name, name) for name in names], of)

    def _matrix(self, name: str) -> tuple[int, int]:
        return self.checkpoint.matrix(self.stored[f"{name}.weight"])

    def _wrong(self, what: str, todo: str) -> CheckpointFormatError:
        return CheckpointFormatError(f"'{self.name}' {what}. {todo}")

    @property
    def _for_target(self) -> str:
        """What to do about a draft of another target."""
        return f"Pass the {self.noun} that was trained for this target."

    def _setting(self, key: str, kind: Kind) -> Any:
        """A setting from wherever the formats put it, `None` where it is left out."""
        value = stated(self.places, key)
        if value is not None and not kind.is_valid(value):
            raise self._wrong(
                f"has `{key}`={shown(value)} in its config.json, which must be {kind.what}", "Correct it."
            )
        return value

    # Layers

    def _num_layers(self) -> int:
        layers = {int(found[1]) for found in map(re.compile(r"layers\.(\d+)\.").match, self.shapes) if found}
        if layers != set(range(len(layers))):
            raise self._wrong(f"has the layers {sorted(layers)}, not all from 0 on", "Pass a complete checkpoint.")
        return len(layers)

    def _stated_rope(self, usual_theta: float) -> tuple[dict[str, Any], list[str]]:
        """The rotary embedding in transformers' notation, and what its type, if it is known, needs and is not given.

        Args:
            usual_theta (`float`): `rope_theta` where none is stated.
        """
        given = self._setting("rope_parameters", MAPPING) or self._setting("rope_scaling", MAPPING) or {}
        parameters = dict(self._rope_of_layers(given))
        kind = parameters.pop("type", None)
        kind = str(parameters.get("rope_type") or kind or "default")
        kind = parameters["rope_type"] = _ROPE_NAMES.get(kind, kind)
        parameters["rope_theta"] = parameters.get("rope_theta") or self._setting("rope_theta", POSITIVE) or usual_theta
        # For text, three axes are one.
        parameters.pop("mrope_section", None)
        return parameters, [name for name in ROPE_NEEDS.get(kind, ()) if parameters.get(name) is None]

    def _rope_of_layers(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The one set of parameters for the layers there are, where a config has one for each kind of layer."""
        kinds = self._setting("layer_types", NAMES) or ["full_attention"]
        sets = {kind: given[kind] for kind in kinds[: self._num_layers()] if isinstance(given.get(kind), Mapping)}
        if not sets:
            full = given.get("full_attention")
            return full if isinstance(full, Mapping) else given
        one, *others = sets.values()
        if any(other != one for other in others):
            raise self._wrong(
                f"has other rotary embeddings for each of {', '.join(sets)}", "Pass a draft whose layers share one."
            )
        return one

    # Vocabulary

    def _check_vocabulary(self) -> None:
        """Refuses drafts of another vocabulary, by whatever tells the target's size of it."""
        target = self.target
        known = [size for name in ("embed_tokens.weight", "t2d") for size in self.shapes.get(name, ())[:1]]
        for size in known or [self._setting("vocab_size", COUNT) or target.vocab_size]:
            if abs(size - target.vocab_size) > MAX_VOCABULARY_GAP * target.vocab_size:
                raise self._wrong(
                    f"has a vocabulary of {size} tokens, and {target.name} has {target.vocab_size}: these are "
                    "different tokenizers",
                    self._for_target,
                )

    def _read_token_ids(self) -> torch.LongTensor | None:
        """The target's id of each draft id, `None` where they are the same."""
        rows, vocab_size = self._num_head_rows(), self.target.vocab_size
        if "d2t" in self.shapes:
            ids = self._absolute_ids(self._table("d2t").long())
        elif rows is None or rows == self._setting("vocab_size", COUNT) or rows >= vocab_size:
            return None
        elif "t2d" in self.shapes:
            ids = self._table("t2d").bool().flatten().nonzero()[:, 0]
        else:
            raise self._wrong(
                f"drafts {rows} of {vocab_size} tokens and does not say which: it has neither `d2t` nor `t2d`",
                "Pass a complete checkpoint.",
            )
        if rows != len(ids):
            raise self._wrong(
                f"has a table of {len(ids)} draft tokens (`d2t` or `t2d`) and "
                + ("no `lm_head.weight`" if rows is None else f"{rows} rows of `lm_head.weight`"),
                "Pass a complete checkpoint.",
            )
        return None if torch.equal(ids, torch.arange(vocab_size)) else ids

    def _table(self, name: str) -> torch.Tensor:
        return self.checkpoint.read([self.stored[name]])[self.stored[name]]

    def _absolute_ids(self, table: torch.LongTensor) -> torch.LongTensor:
        """Ids from `d2t`, which holds what is to be added to each draft id."""
        ids = table.flatten() + torch.arange(table.numel())
        if table.dim() != 1 or not self._is_selection(ids):
            raise self._wrong(
                f"has a table `d2t` that selects no rising ids below {self.target.vocab_size}, the vocabulary of "
                f"{self.target.name}",
                self._for_target,
            )
        return ids

    def _is_selection(self, ids: torch.LongTensor) -> bool:
        if ids.dim() != 1 or len(ids) == 0:
            return False
        return bool((ids.diff() > 0).all()) and int(ids[0]) >= 0 and int(ids[-1]) < self.target.vocab_size

    def _draft_vocab_size(self, own_head: bool) -> int:
        """U, of a draft with an lm_head of its own or without."""
        if self.token_ids is not None:
            return len(self.token_ids)
        # Rows behind the target's vocabulary are padding.
        return min(self._num_head_rows(), self.target.vocab_size) if own_head else self.target.vocab_size

    def _num_head_rows(self) -> int | None:
        return self._matrix("lm_head")[0] if "lm_head.weight" in self.shapes else None


def stated(places: Sequence[Mapping[str, Any]], key: str) -> Any:
    """What a config says of a key in the first place that says something; `None` where none does."""
    return next((place[key] for place in places if place.get(key) is not None), None)


def stored_vocabulary(tensors: Mapping[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """The tensors of a network with `d2t` and `t2d`, as files have them, in the place of its table of ids.

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
