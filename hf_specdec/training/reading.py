"""Rows of tokens, and their reading by the frozen target: hidden states, logits and labels for a draft's loss.

Shapes: B rows, T tokens of a row, C cycles of a row, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from ..errors import SpecConfigError, UnsupportedModelError
from ..target.states import captured_states
from ..target_facts import num_embeddings


# Label of tokens without a loss.
IGNORED = -100

# Batches whose rows are sorted by length before they are dealt out.
_SORTED_BATCHES = 16


@dataclass(frozen=True)
class Rows:
    """
    Rows of tokens, of equal length.

    Args:
        tokens (`torch.LongTensor` of shape `(B, T)`): Token ids.
        counted (`torch.BoolTensor` of shape `(B, T)`): Tokens that a draft is to predict: not those of a prompt that
            the target continued, and not the padding after its answer.
        index (`torch.LongTensor` of shape `(B,)`, *optional*): Indices of a batch's rows among all rows.
    """

    tokens: torch.LongTensor
    counted: torch.BoolTensor
    index: torch.LongTensor | None = None

    @classmethod
    def of(cls, tokens: torch.LongTensor | Rows) -> Rows:
        """Makes rows in which every token counts of tokens; rows stay as they are."""
        return tokens if isinstance(tokens, Rows) else cls(tokens, torch.ones_like(tokens, dtype=torch.bool))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: Any) -> Rows:
        return Rows(self.tokens[rows], self.counted[rows], None if self.index is None else self.index[rows])

    def __add__(self, other: Rows) -> Rows:
        return Rows(torch.cat((self.tokens, other.tokens)), torch.cat((self.counted, other.counted)))

    def to(self, device: torch.device) -> Rows:
        # The index stays with what it points into.
        return Rows(self.tokens.to(device), self.counted.to(device), self.index)

    def numel(self) -> int:
        return self.tokens.numel()

    def batches(self, batch_size: int, seed: int) -> Iterator[Rows]:
        """
        Yields endless batches; every pass has an order of its own, which the seed alone decides. Rows that end at
        about the same place share a batch, as far as few batches allow: the target does not read the padding.
        """
        order = torch.empty(0, dtype=torch.long)
        generator = torch.Generator().manual_seed(seed)
        ends = self.counted.shape[1] - self.counted.flip(1).to(torch.uint8).argmax(1)
        while True:
            order = torch.cat((order, torch.randperm(len(self), generator=generator)))
            while len(order) >= batch_size:
                count = min(_SORTED_BATCHES, len(order) // batch_size) * batch_size
                rows, order = order[:count], order[count:]
                batches = rows[ends[rows].argsort(stable=True)].split(batch_size)
                for place in torch.randperm(len(batches), generator=generator).tolist():
                    index = batches[place]
                    yield Rows(self.tokens[index], self.counted[index], index)

    def once(self, batch_size: int) -> list[Rows]:
        """Returns all rows in order, in batches."""
        return [self[start : start + batch_size] for start in range(0, len(self), batch_size)]

    def split(self, share: float, seed: int) -> tuple[Rows, Rows]:
        """Divides the rows at random: the rest to train on, and a share of at least one row to measure on.

        Raises:
            SpecConfigError: There are fewer than two.
        """
        if len(self) < 2:
            raise SpecConfigError(
                f"The data fill {len(self)} row, and training needs at least two, one of them held out. Give more "
                "text, or shorter rows."
            )
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        count = min(max(1, round(share * len(self))), len(self) - 1)
        held_out, rest = order[:count].sort().values, order[count:].sort().values
        return self[rest], self[held_out]


@dataclass(frozen=True)
class Reading:
    """
    Rows that the target has read.

    Args:
        tokens, counted: See [`Rows`].
        states (`dict`): The hidden states asked for, each `(B, T, H)`, see [`captured_states`].
        head (`nn.Module`, *optional*): The target's lm_head.
    """

    tokens: torch.LongTensor
    counted: torch.BoolTensor
    states: dict[int | str, torch.Tensor] = field(default_factory=dict)
    head: nn.Module | None = None

    def flat_states(self) -> torch.Tensor:
        """Returns the last hidden states of all positions, row after row: `(B * T, H)`."""
        return self.states["last"].flatten(0, 1)

    @torch.no_grad()
    def target_logits(self, positions: torch.LongTensor) -> torch.Tensor:
        """Computes the target's logits at some of the B * T positions, `(*positions.shape, V)`."""
        assert self.head is not None, "read without the lm_head"
        return self.head(self.flat_states()[positions])

    @property
    def vocab_size(self) -> int:
        """V, also where the weights of the head are packed."""
        return getattr(self.head, "out_features", None) or self.head.weight.shape[0]

    def next_tokens(self, offset: int) -> torch.LongTensor:
        """Returns the tokens `offset` places on, `(B, T)`; -100 where there is none or it does not count."""
        tokens = torch.where(self.counted, self.tokens, IGNORED)
        return F.pad(tokens[:, offset:], (0, min(offset, tokens.shape[1])), value=IGNORED)

    def cycle_anchors(self) -> torch.LongTensor:
        """
        Finds the positions `(B, C)` at which cycles begin: the first token that such a cycle drafts counts. Rows with
        fewer than C are filled up with other positions.
        """
        begins = self.next_tokens(2) != IGNORED
        most = int(begins.sum(1).max()) if begins.numel() else 0
        return begins.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]

    def begins_at(self, anchors: torch.LongTensor) -> torch.BoolTensor:
        """Tells anchors `(B, C)` at which cycles begin from those that fill up their rows."""
        return self.next_tokens(2).gather(1, anchors) != IGNORED

    def labels_at(self, anchors: torch.LongTensor, count: int) -> torch.LongTensor:
        """
        Returns the first `count` tokens that the cycles at the anchors are to draft: `(count, B, C)`; -100 where there
        is none, it does not count, or no cycle begins.
        """
        labels = torch.stack([self.next_tokens(2 + draft).gather(1, anchors) for draft in range(count)])
        return labels.masked_fill(~self.begins_at(anchors), IGNORED)


class TargetReader:
    """
    Reads batches with the frozen target.

    Args:
        target (`PreTrainedModel`, *optional*): The target; `None` if a recipe needs nothing of it.
        states (`tuple`): Hidden states to capture, see [`captured_states`].
    """

    def __init__(self, target: PreTrainedModel | None, states: tuple[int | str, ...]):
        self.target = target
        self.states = states
        self._kept: dict[Any, torch.Tensor] = {}
        if states:
            target.requires_grad_(False).eval()

    def keep(self, batches: Iterable[Rows]) -> None:
        """
        Reads all rows, in order, and keeps their states in the host's memory, for several passes.

        Memory: H values of the target's dtype for every token and state.
        """
        parts: dict[Any, list[torch.Tensor]] = {key: [] for key in self.states}
        for batch in batches:
            for key, state in self.read(batch.to(self.target.device)).states.items():
                parts[key].append(state.cpu())
        self._kept = {key: torch.cat(states) for key, states in parts.items()}

    @torch.no_grad()
    def read(self, rows: torch.LongTensor | Rows) -> Reading:
        rows = Rows.of(rows)
        tokens, counted = rows.tokens, rows.counted
        if not self.states:
            return Reading(tokens, counted)
        if self._kept and rows.index is not None:
            states = {key: kept[rows.index].to(tokens.device) for key, kept in self._kept.items()}
        else:
            ends = counted.any(0).nonzero()
            width = int(ends[-1]) + 1 if len(ends) else 1
            # In its own dtype, whatever the draft trains in.
            with (
                captured_states(self.target, self.states) as states,
                torch.autocast(tokens.device.type, enabled=False),
            ):
                self.target.get_decoder()(input_ids=tokens[:, :width], use_cache=False)
            # Nothing is predicted from the padding at the end.
            states = {key: F.pad(state, (0, 0, 0, tokens.shape[1] - width)) for key, state in states.items()}
        return Reading(tokens, counted, states, self.target.get_output_embeddings())


@torch.no_grad()
def check_plain_head(model: PreTrainedModel, what: str) -> None:
    """Checks that a model's logits are those of its lm_head on the last hidden state, without anything in between.

    Raises:
        UnsupportedModelError: They are scaled or capped.
    """
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
