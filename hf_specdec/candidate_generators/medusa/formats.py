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
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...checkpoints.format import Format
from ...checkpoints.header import WEIGHT_FILES, Header, TargetNeeds
from ...checkpoints.reader import CheckpointReader
from ...checkpoints.settings import COUNT, FLAG, NAME, POSITIVE, Kind, is_number


if TYPE_CHECKING:
    from ...checkpoints.checkpoint import Checkpoint


MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *WEIGHT_FILES)

_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class _Names:
    """Names of the tensors in a format. The lm_head of the original format counts as the layer after the last one."""

    prefix: str
    block: str
    lm_head: str

    def weight(self, head: int, layer: int) -> str:
        return self.prefix + self.block.format(head=head, layer=layer) + ".weight"

    def bias(self, head: int, layer: int) -> str:
        return self.prefix + self.block.format(head=head, layer=layer) + ".bias"

    def lm_head_weight(self, head: int, num_layers: int) -> str:
        return self.prefix + self.lm_head.format(head=head, layer=num_layers)

    def heads_and_layers(self, template: str, names: Iterable[str]) -> list[tuple[int, int]]:
        """Head and layer of every name that a template of this format gives."""
        parts = map(re.escape, re.split(r"\{\w+\}", self.prefix + template))
        pattern = re.compile("([0-9]{1,9})".join(parts))
        found = [match.groups() for match in map(pattern.fullmatch, names) if match]
        return [(int(indices[0]), int(indices[-1])) for indices in found]


_NAMES = (
    _Names("", "blocks.{head}.layers.{layer}", "lm_heads.{head}.weight"),
    _Names("medusa_head.", "{head}.{layer}.linear", "{head}.{layer}.weight"),
    _Names("", "{head}.{layer}.linear", "{head}.{layer}.weight"),
)


class MedusaReader(CheckpointReader):
    """A checkpoint with Medusa heads.

    Attributes:
        num_heads, num_layers (`int`): K and L; 0 where there are no heads.
        has_bias (`bool`): The blocks have biases.
        num_lm_heads (`int`): Own lm_heads: one for each head, one for all, or none.
    """

    noun = "heads"
    settings = CheckpointReader.settings | {
        "base_model_name_or_path": NAME,
        "logit_scale": POSITIVE,
        "medusa_num_heads": COUNT,
        "num_heads": COUNT,
        "original_lm_head": FLAG,
        "truncated_vocab_size": COUNT,
    }
    notes = "max_paths max_seq_len medusa_accuracies medusa_fc_bias medusa_num_layers topk"
    weight_files = MEDUSA_FILES

    def __init__(self, header: Header):
        super().__init__(header)
        self.num_heads = self.num_layers = self.num_lm_heads = 0
        for names in _NAMES:
            if blocks := names.heads_and_layers(names.block + ".weight", self.stored):
                own = names.heads_and_layers(names.lm_head, self.stored)
                self._names, self.num_heads = names, 1 + max(head for head, _ in [*blocks, *own])
                self.num_layers = 1 + max(layer for _, layer in blocks)
                self.has_bias = bool(names.heads_and_layers(names.block + ".bias", self.stored))
                self.num_lm_heads = 0 if not own else 1 if self.setting("original_lm_head") else self.num_heads
                self._require_all()
                return

    def _require_all(self) -> None:
        what = f"{self.num_heads} Medusa heads with {self.num_layers} layers"
        self.check_count(self.num_heads * self.num_layers, what)
        layers = range(self.num_layers)
        wanted = [name for layer in layers for name in (*self.weight_names(layer), *self.bias_names(layer))]
        self.require([*wanted, *self.lm_head_names], what)

    def check(self):
        super().check()
        if not self.num_heads and self.header.shapes is not None:
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
        return self.matrix(self._names.weight(0, 0))[1]

    @property
    def num_rows(self) -> int:
        """U, as stored."""
        return self.matrix(self.lm_head_names[0])[0]

    @property
    def cut_size(self) -> int | None:
        """Tokens of a cut vocabulary, `None` where it is whole."""
        size, whole = (self.setting(key, COUNT) for key in ("truncated_vocab_size", "vocab_size"))
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

    def weight_names(self, layer: int) -> list[str]:
        """Weights of a block, one for each head."""
        return [self._names.weight(head, layer) for head in range(self.num_heads)]

    def bias_names(self, layer: int) -> list[str]:
        """Biases of a block, one for each head, or none."""
        return [self._names.bias(head, layer) for head in range(self.num_heads if self.has_bias else 0)]

    @property
    def lm_head_names(self) -> list[str]:
        return [self._names.lm_head_weight(head, self.num_layers) for head in range(self.num_lm_heads)]

    def read_token_map(self, checkpoint: Checkpoint) -> torch.LongTensor | None:
        """Tokens of a cut vocabulary, of shape `(U,)`."""
        if self.cut_size is None:
            return None
        name = self._names.prefix + "token_map"
        self.require([name], "a cut vocabulary")
        tokens = checkpoint.read(self.stored[name])
        if tokens.shape != (self.cut_size,) or tokens.dtype not in _INTEGERS:
            found = f"{tokens.dtype} of the shape {list(tokens.shape)}"
        elif tokens.min() < 0 or len(tokens.unique()) < len(tokens):
            found = f"{len(tokens.unique())}, from {tokens.min()} on"
        else:
            self.tables["token_map"] = tokens.long()
            return self.tables["token_map"]
        raise self.wrong(
            f"has {name}, which must hold the ids of {self.cut_size} different tokens, got {found}", self.fitting
        )

    def sources(self, name, shape):
        kind, _, layer = name.partition(".")
        if kind == "lm_heads":
            return [[name] for name in self.lm_head_names]
        names = self.weight_names if kind == "weights" else self.bias_names
        return [[name] for name in names(int(layer))]

    def fitted(self, name, tensor, shape):
        if name != "lm_heads" or tensor.dim() != 2:
            return tensor
        tokens = self.tables.get("token_map")
        if tokens is None:
            # Rows after the target's vocabulary are padding.
            return tensor[: shape[0]] if len(tensor) == self.num_rows else tensor
        # Not every lm_head is stored cut.
        return tensor[tokens.to(tensor.device)] if len(tensor) > max(shape[0], int(tokens.max())) else tensor


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
