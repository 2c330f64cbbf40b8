"""Rows of tokens, and their reading by the frozen target: hidden states, logits and labels for a draft's loss.

Shapes: B rows, T tokens of a row, C cycles of a row, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..target.states import captured_states
from ..target_facts import num_embeddings


# Label of tokens without a loss.
IGNORED = -100


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Makes a batch, the arguments of [`TargetReader.read`], of the records of `text.py`, padded at their ends."""
    tokens = [torch.as_tensor(row["tokens"], dtype=torch.long) for row in rows]
    counted = [torch.arange(len(row["tokens"])) >= row["prompt_length"] for row in rows]
    batch = {"tokens": pad_sequence(tokens, batch_first=True), "counted": pad_sequence(counted, batch_first=True)}
    return batch | ({"index": torch.tensor([row["index"] for row in rows])} if "index" in rows[0] else {})


@dataclass(frozen=True)
class Reading:
    """Rows that the target has read: its hidden states, each `(B, T, H)`, and its lm_head."""

    tokens: torch.LongTensor  # (B, T)
    # (B, T): those that a draft is to predict, not those of a prompt that the target continued, and no padding.
    counted: torch.BoolTensor
    states: dict[int | str, torch.Tensor] = field(default_factory=dict)
    head: nn.Module | None = None

    def flat_states(self) -> torch.Tensor:
        """The last hidden states of all positions, row after row: `(B * T, H)`."""
        return self.states["last"].flatten(0, 1)

    @torch.no_grad()
    def target_logits(self, positions: torch.LongTensor) -> torch.Tensor:
        """The target's logits at some of the B * T positions, `(*positions.shape, V)`."""
        assert self.head is not None, "read without the lm_head"
        return self.head(self.flat_states()[positions])

    @property
    def vocab_size(self) -> int:
        """V, also where the weights of the head are packed."""
        return getattr(self.head, "out_features", None) or self.head.weight.shape[0]

    def next_tokens(self, offset: int) -> torch.LongTensor:
        """The tokens `offset` places on, `(B, T)`; -100 where there is none or it does not count."""
        tokens = torch.where(self.counted, self.tokens, IGNORED)
        return F.pad(tokens[:, offset:], (0, min(offset, tokens.shape[1])), value=IGNORED)

    def cycle_anchors(self) -> torch.LongTensor:
        """Positions `(B, C)` whose cycles' first draft counts; others fill up rows that have fewer."""
        begins = self.next_tokens(2) != IGNORED
        most = int(begins.sum(1).max()) if begins.numel() else 0
        return begins.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]

    def begins_at(self, anchors: torch.LongTensor) -> torch.BoolTensor:
        """Tells anchors `(B, C)` at which cycles begin from those that fill up their rows."""
        return self.next_tokens(2).gather(1, anchors) != IGNORED

    def labels_at(self, anchors: torch.LongTensor, count: int) -> torch.LongTensor:
        """The first tokens that cycles at the anchors are to draft, `(count, B, C)`; -100 where none is or counts."""
        labels = torch.stack([self.next_tokens(2 + draft).gather(1, anchors) for draft in range(count)])
        return labels.masked_fill(~self.begins_at(anchors), IGNORED)


class GrowingCache:
    """Keys and values of each layer, to begin with those of a text, that gradients pass through; a `KeyValueCache`."""

    plan = None

    def __init__(self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()):
        self._parts = defaultdict(list, {layer: [text] for layer, text in enumerate(layers)})

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._parts[layer_idx].append((keys, values))
        return tuple(torch.cat(parts, dim=2) for parts in zip(*self._parts[layer_idx]))


class TargetReader:
    """Reads batches with the frozen target, if a recipe needs any of its states, see [`captured_states`]."""

    def __init__(self, target: PreTrainedModel | None, states: tuple[int | str, ...], keeps: bool = False):
        self.target: PreTrainedModel | None = target
        self.states: tuple[int | str, ...] = states
        self._keeps = keeps
        self._kept: dict[int, dict[int | str, torch.Tensor]] = {}  # of rows with an index, which are read once
        if states:
            target.requires_grad_(False).eval()

    @torch.no_grad()
    def read(
        self,
        tokens: torch.LongTensor,
        counted: torch.BoolTensor | None = None,  # by default all
        index: torch.LongTensor | None = None,  # (B,), the rows' places among all that are trained on
    ) -> Reading:
        """Reads rows of tokens `(B, T)`."""
        counted = torch.ones_like(tokens, dtype=torch.bool) if counted is None else counted
        if not self.states:
            return Reading(tokens, counted)
        rows = index.tolist() if self._keeps and index is not None else []
        if rows and self._kept.keys() >= set(rows):
            states = {}
            for key in self.states:
                # Batches are as wide as their longest row.
                kept = [self._kept[row][key][: tokens.shape[1]] for row in rows]
                states[key] = pad_sequence(kept, batch_first=True).to(tokens.device)
        else:
            # In its own dtype, whatever the draft trains in.
            with (
                captured_states(self.target, self.states) as states,
                torch.autocast(tokens.device.type, enabled=False),
            ):
                self.target.get_decoder()(input_ids=tokens, use_cache=False)
            for place, row in enumerate(rows):
                self._kept[row] = {key: state[place].cpu() for key, state in states.items()}
        return Reading(tokens, counted, states, self.target.get_output_embeddings())


@torch.no_grad()
def check_plain_head(model: PreTrainedModel, what: str) -> None:
    """Refuses a model whose logits are not those of its lm_head on the last hidden state, but scaled or capped."""
    tokens = torch.arange(min(4, num_embeddings(model.get_input_embeddings())), device=model.device)[None]
    with captured_states(model, ("last",)) as states:
        logits = model(input_ids=tokens, use_cache=False).logits.float()
    head = model.get_output_embeddings()
    assert head is not None, "a language model without an lm_head"
    plain = head(states["last"]).float()
    if not torch.allclose(plain, logits, atol=1e-2, rtol=1e-2):
        raise UnsupportedModelError(
            f"{type(model).__name__} scales or caps the logits after its lm_head, which {what} does not follow. "
            "Set `kl_weight` to 0, or choose another model."
        )
