"""The published formats of Medusa heads, told apart by the names of their tensors.

    medusa_lm_head.{safetensors,pt}          {i}.{j}.linear.{weight,bias}, {i}.{L}.weight (absent in version 2)
    merged into the target's own weights     the same after `medusa_head.`
    converted for vLLM, model.safetensors    blocks.{i}.layers.{j}.{weight,bias}, lm_heads.{i}.weight, token_map, each
                                             after `medusa_heads.` or nothing

Heads and layers are counted in the weights: published configs are wrong about them.

Shapes: K heads, L layers, H hidden size, V vocabulary of the target, U rows of an own lm_head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from ...checkpoints.format import Format
from ...checkpoints.header import Header, TargetNeeds, TargetSizes
from ...checkpoints.reader import CheckpointReader
from ...checkpoints.schema import COUNT, FLAG, NAME, POSITIVE, Key, Kind, Tensor, list_of, pattern_of
from ...checkpoints.weights import WEIGHT_FILES
from ...settings.checks import is_number


MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *WEIGHT_FILES)

# In the original format the lm_head is the layer after the last one.
_ORIGINAL = {
    "{head}.{layer}.linear.": "blocks.{head}.layers.{layer}.",
    "{head}.{layer}.weight": "lm_heads.{head}.weight",
}


class MedusaReader(CheckpointReader):
    """A checkpoint with Medusa heads."""

    noun = "Medusa heads"
    keys: ClassVar[tuple[Key, ...]] = (
        *CheckpointReader.keys,
        Key("base_model_name_or_path", NAME),
        Key("logit_scale", POSITIVE, 1),
        Key("original_lm_head", FLAG, False),
        Key("truncated_vocab_size", COUNT),
    )
    notes = "max_paths max_seq_len medusa_accuracies medusa_fc_bias medusa_num_heads medusa_num_layers num_heads topk"
    weight_files: ClassVar[tuple[str, ...]] = MEDUSA_FILES

    renamed: ClassVar[Mapping[str, str]] = {
        **{f"medusa_head.{old}": new for old, new in _ORIGINAL.items()},
        **_ORIGINAL,
    }

    def __init__(self, header: Header, options: Any = None, target_model: nn.Module | None = None):
        super().__init__(header, options, target_model)
        self._has_lm_heads = any(map(pattern_of("lm_heads.{head}.weight").fullmatch, self.stored))
        # Name of the lm_heads, or of the one for all heads.
        self._lm_head = "lm_heads.0.weight" if self.setting("original_lm_head") else "lm_heads.{head}.weight"
        self._num_rows = next(iter(self.shape("lm_heads.0.weight")), None)  # U, as stored
        size, whole = map(self.setting, ("truncated_vocab_size", "vocab_size"))
        # Tokens of a cut vocabulary.
        self.cut_size: int | None = size if size and whole and size < whole else None

    @property
    def table(self) -> tuple[Tensor, ...]:
        has_bias = any(name.startswith("blocks.") and name.endswith(".bias") for name in self.stored)
        return (
            Tensor("blocks.{head}.layers.{layer}.weight", "H H"),
            Tensor("blocks.{head}.layers.{layer}.bias", "H", has_bias),
            Tensor(self._lm_head, "* H", self._has_lm_heads),
            Tensor("token_map", needed="a cut vocabulary" if self.cut_size else False),
        )

    @property
    def needs(self) -> TargetNeeds:
        # Heads without an lm_head speak the target's tokens, and of a cut one the rows do not tell.
        size = self._num_rows
        if size and self.cut_size:
            size = self.setting("vocab_size")
        return TargetNeeds(None, self.sizes["H"], size)

    @property
    def num_draft_tokens(self) -> int:
        return self.sizes["head"]

    def record(self, target: TargetSizes) -> dict[str, Any]:
        """The arguments of a [`MedusaHeads`], and what it remembers beside them."""
        self.check_target(target)
        token_map, rows = self.read_token_map(), None
        if self._has_lm_heads:
            # Rows after the target's vocabulary are padding.
            rows = min(self._num_rows, target.vocab_size) if token_map is None else len(token_map)
        what = f"a list of numbers from 0 to 1 for each of the {self.sizes['head']} heads"
        shares = list_of(Kind(lambda value: is_number(value) and 0 <= value <= 1, "a share"), "shares")
        of_a_head = Kind(lambda value: value != [] and shares.is_valid(value), "shares")
        return {
            "hidden_size": self.sizes["H"],
            "vocab_size": target.vocab_size,
            "num_heads": self.sizes["head"],
            "num_layers": self.sizes["layer"],
            "own_lm_heads": rows is not None,
            "bias": self.table[1].needed,
            "one_lm_head": self._has_lm_heads and ("{" not in self._lm_head or self.sizes["head"] == 1),
            "lm_head_size": rows,
            "has_token_map": rows is not None and token_map is not None,
            "logit_scale": float(self.setting("logit_scale")),
            "accuracies": self.setting("medusa_accuracies", list_of(of_a_head, what, self.sizes["head"])),
            "base_model": self.setting("base_model_name_or_path"),
        }

    def read_token_map(self) -> torch.LongTensor | None:
        """Tokens of a cut vocabulary, of shape `(U,)`."""
        if self.cut_size is None:
            return None
        tokens = self.read("token_map")
        is_integer = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
        if tokens.shape != (self.cut_size,) or not is_integer:
            what = f"{tokens.dtype} of the shape {list(tokens.shape)}"
        elif tokens.min() < 0 or len(tokens.unique()) < len(tokens):
            what = f"{len(tokens.unique())}, from {tokens.min()} on"
        else:
            self.tables["token_map"] = tokens.long()
            return self.tables["token_map"]
        raise self.wrong(
            f"has {self.stored['token_map']}, which must hold the ids of {self.cut_size} different tokens, got {what}",
            self.fitting,
        )

    # Tensors

    def sources(self, name: str, shape: tuple[int, ...]) -> Sequence[Sequence[str]]:
        kind, _, layer = name.partition(".")
        if kind == "lm_heads":
            return [[self._lm_head.format(head=head)] for head in range(shape[0])]
        part = "weight" if kind == "weights" else "bias"
        return [[f"blocks.{head}.layers.{layer}.{part}"] for head in range(shape[0])]

    def fitted(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if name != "lm_heads":
            return tensor
        tokens = self.tables.get("token_map")
        if tokens is None:
            return tensor[: shape[0]] if len(tensor) == self._num_rows else tensor
        # Not every lm_head is stored cut.
        return tensor[tokens.to(tensor.device)] if len(tensor) > max(shape[0], int(tokens.max())) else tensor


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
