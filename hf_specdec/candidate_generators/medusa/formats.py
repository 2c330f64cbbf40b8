"""The published formats of Medusa heads, told apart by the names of their tensors.

    medusa_lm_head.{safetensors,pt}          {i}.{j}.linear.{weight,bias}, {i}.{L}.weight (absent in version 2)
    merged into the target's own weights     the same after `medusa_head.`
    converted for vLLM, model.safetensors    blocks.{i}.layers.{j}.{weight,bias}, lm_heads.{i}.weight, token_map, each
                                             after `medusa_heads.` or nothing

Heads and layers are counted in the weights: published configs are wrong about them.

Shapes: K heads, L layers, H hidden size, V vocabulary of the target, U rows of an own lm_head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...checkpoints.format import Format
from ...checkpoints.header import WEIGHT_FILES, Header, TargetNeeds
from ...checkpoints.reader import CheckpointReader
from ...checkpoints.settings import COUNT, FLAG, NAME, POSITIVE, Kind, is_number


if TYPE_CHECKING:
    from ...checkpoints.checkpoint import Checkpoint


MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *WEIGHT_FILES)

_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


# Names of a block, by head and layer, and of a head's lm_head: in the original format the layer after the last one.
_NAMES = (
    ("blocks.{}.layers.{}", "lm_heads.{}.weight"),
    ("medusa_head.{}.{}.linear", "medusa_head.{}.{}.weight"),
    ("{}.{}.linear", "{}.{}.weight"),
)


class MedusaReader(CheckpointReader):
    """A checkpoint with Medusa heads.

    Attributes:
        num_heads, num_layers (`int`): K and L; 0 where there are no heads.
        has_bias (`bool`): The blocks have biases.
        num_lm_heads (`int`): Own lm_heads: one for each head, one for all, or none.
    """

    noun = "heads"
    settings: ClassVar[dict[str, Kind]] = CheckpointReader.settings | {
        "base_model_name_or_path": NAME,
        "logit_scale": POSITIVE,
        "medusa_num_heads": COUNT,
        "num_heads": COUNT,
        "original_lm_head": FLAG,
        "truncated_vocab_size": COUNT,
    }
    notes = "max_paths max_seq_len medusa_accuracies medusa_fc_bias medusa_num_layers topk"
    weight_files: ClassVar[tuple[str, ...]] = MEDUSA_FILES

    def __init__(self, header: Header):
        super().__init__(header)
        self.num_heads = self.num_layers = self.num_lm_heads = 0
        for self._block, self._lm_head in _NAMES:
            if blocks := _numbers(f"{self._block}.weight", self.stored):
                own = _numbers(self._lm_head, self.stored)
                self.num_heads: int = 1 + max(head for head, *_ in [*blocks, *own])
                self.num_layers: int = 1 + max(layer for _, layer in blocks)
                self.has_bias: bool = bool(_numbers(f"{self._block}.bias", self.stored))
                self.num_lm_heads: int = 0 if not own else 1 if self.setting("original_lm_head") else self.num_heads
                self.check_count(self.num_heads * self.num_layers, self._what)
                break

    @property
    def _what(self) -> str:
        return f"{self.num_heads} Medusa heads with {self.num_layers} layers"

    def check(self) -> None:
        super().check()
        if self.num_heads:
            parts = ("weight", "bias") if self.has_bias else ("weight",)
            blocks = [self._names_of(part, layer) for layer in range(self.num_layers) for part in parts]
            self.require([name for names in (*blocks, self._lm_head_names) for name in names], self._what)
        elif self.header.shapes is not None:
            names = list(self.header.shapes)
            such = f" such as {names[0]}" if names else ""
            raise self.wrong(
                f"holds no Medusa heads: {self.header.file} has {len(names)} tensors{such}, none of them named like "
                "'0.0.linear.weight', 'medusa_head.0.0.linear.weight' or 'blocks.0.layers.0.weight'",
                "Pass a checkpoint of Medusa heads.",
            )

    @property
    def needs(self) -> TargetNeeds:
        if not self.num_heads:
            return TargetNeeds(None, self.setting("hidden_size"), self.setting("vocab_size"))
        # Heads without an lm_head speak the target's tokens, and of a cut one the rows do not tell.
        size = None if not self.num_lm_heads else self.setting("vocab_size") if self.cut_size else self.num_rows
        return TargetNeeds(None, self.hidden_size, size)

    @property
    def num_draft_tokens(self) -> int | None:
        return self.num_heads or self.first_setting("medusa_num_heads", "num_heads")

    # Settings

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.matrix(self._names_of("weight", 0)[0])[1]

    @property
    def num_rows(self) -> int:
        """U, as stored."""
        return self.matrix(self._lm_head_names[0])[0]

    @property
    def cut_size(self) -> int | None:
        """Tokens of a cut vocabulary, `None` where it is whole."""
        size, whole = map(self.setting, ("truncated_vocab_size", "vocab_size"))
        return size if size and whole and size < whole else None

    @property
    def logit_scale(self) -> float:
        return float(self.setting("logit_scale") or 1)

    @property
    def base_model(self) -> str | None:
        return self.setting("base_model_name_or_path")

    @property
    def accuracies(self) -> list[list[float]] | None:
        what = f"a list of numbers from 0 to 1 for each of the {self.num_heads} heads"
        return self.setting("medusa_accuracies", Kind(lambda value: _is_table(value, self.num_heads), what))

    # Tensors

    def _names_of(self, part: str, layer: int) -> list[str]:
        """Names of the weights or biases of a layer, one for each head."""
        return [f"{self._block.format(head, layer)}.{part}" for head in range(self.num_heads)]

    @property
    def _lm_head_names(self) -> list[str]:
        return [self._lm_head.format(head, self.num_layers) for head in range(self.num_lm_heads)]

    def read_token_map(self, checkpoint: Checkpoint) -> torch.LongTensor | None:
        """Tokens of a cut vocabulary, of shape `(U,)`."""
        if self.cut_size is None:
            return None
        self.require(["token_map"], "a cut vocabulary")
        tokens = checkpoint.read(self.stored["token_map"])
        if tokens.shape != (self.cut_size,) or tokens.dtype not in _INTEGERS:
            found = f"{tokens.dtype} of the shape {list(tokens.shape)}"
        elif tokens.min() < 0 or len(tokens.unique()) < len(tokens):
            found = f"{len(tokens.unique())}, from {tokens.min()} on"
        else:
            self.tables["token_map"] = tokens.long()
            return self.tables["token_map"]
        raise self.wrong(
            f"has {self.stored['token_map']}, which must hold the ids of {self.cut_size} different tokens, got "
            f"{found}",
            self.fitting,
        )

    def sources(self, name: str, shape: tuple[int, ...]) -> Sequence[Sequence[str]]:
        kind, _, layer = name.partition(".")
        names = self._lm_head_names
        if kind != "lm_heads":
            names = self._names_of("weight" if kind == "weights" else "bias", int(layer))
        return [[name] for name in names]

    def fitted(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if name != "lm_heads" or tensor.dim() != 2:
            return tensor
        tokens = self.tables.get("token_map")
        if tokens is None:
            # Rows after the target's vocabulary are padding.
            return tensor[: shape[0]] if len(tensor) == self.num_rows else tensor
        # Not every lm_head is stored cut.
        return tensor[tokens.to(tensor.device)] if len(tensor) > max(shape[0], int(tokens.max())) else tensor


def _numbers(template: str, names: Iterable[str]) -> list[tuple[int, ...]]:
    """Numbers in every name that a template gives."""
    pattern = re.compile("([0-9]{1,9})".join(map(re.escape, template.split("{}"))))
    return [tuple(map(int, match.groups())) for match in map(pattern.fullmatch, names) if match]


def _is_table(value: Any, num_rows: int) -> bool:
    """True for a list of accuracies for each head."""
    rows = value if isinstance(value, list) and len(value) == num_rows else [None]
    return all(isinstance(row, list) and row and all(is_number(x) and 0 <= x <= 1 for x in row) for row in rows)


_OWN_LM_HEAD = "|".join(f"0.{layer}.weight" for layer in range(1, 5))
_BLOCK = "0.0.linear.weight"
_COUNTED = ("medusa_num_heads=.*",)

_format = partial(Format, method="medusa", reader=MedusaReader)

# The special before the usual.
FORMATS = (
    _format("medusa-vllm", "vLLM", ("model_type=medusa",), ("blocks.0.layers.0.weight",)),
    _format("medusa-original", "FasterDecoding", _COUNTED, (_BLOCK, _OWN_LM_HEAD)),
    _format(
        "medusa-v2",
        "text-generation-inference, Liger-Kernel, hf_specdec",
        ("medusa_num_heads=.*&version=2",),
        (_BLOCK,),
        without=(_OWN_LM_HEAD,),
    ),
    _format("medusa-merged", "FasterDecoding", _COUNTED, (f"medusa_head.{_BLOCK}",)),
)
