"""What a method keeps of its rows from cycle to cycle, and what it is given of them.

Rows leave a call when they have ended, and others take their places. Whatever a method keeps of its rows is an
attribute of a [`RowState`], which follows them; so no method says itself what becomes of its rows.

Shapes: R rows, T entries, X size of a state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..logits.randomness import RowKeys
from ..transfers import RowNumbers, last_of_each, select_rows, widened


class RowState:
    """What is kept of the active rows, in their order.

    An attribute is a tensor `(R, ...)`, a list with an item for each row, a dict of such values, `None`, or anything
    that has `select`, `cat` and `close` itself, such as slots or another state.
    """

    def __init__(self, **parts: Any):
        vars(self).update(parts)

    def select(self, keep: list[int]) -> RowState:
        """Keeps the rows at these positions, in this order."""
        for name, value in vars(self).items():
            setattr(self, name, _selected(value, keep))
        return self

    def cat(self, other: RowState) -> RowState:
        """Takes over the rows of another state of the same kind, after its own."""
        for name, value in vars(self).items():
            setattr(self, name, _joined(value, getattr(other, name)))
        return self

    def close(self) -> None:
        """Ends the call: gives everything up."""
        for name, value in vars(self).items():
            if hasattr(value, "close"):
                value.close()
            setattr(self, name, None)


def _selected(value: Any, keep: list[int]) -> Any:
    if isinstance(value, torch.Tensor):
        return select_rows(value, keep)
    if isinstance(value, list):
        return [value[row] for row in keep]
    if isinstance(value, dict):
        return {key: _selected(part, keep) for key, part in value.items()}
    return None if value is None else value.select(keep)


def _joined(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, torch.Tensor):
        if mine.dim() > 1:
            width = max(mine.shape[1], theirs.shape[1])
            mine, theirs = widened(mine, width), widened(theirs, width)
        return torch.cat([mine, theirs.to(mine)])
    if isinstance(mine, list):
        return mine + theirs
    if isinstance(mine, dict):
        return {key: _joined(part, theirs[key]) for key, part in mine.items()}
    return None if mine is None else mine.cat(theirs)


class Entries(NamedTuple):
    """What is new of each row, for one forward of a draft network; in a graph all numbers are tensors."""

    tokens: torch.LongTensor | None  # (R, T), padded on the right, anchors last; `None` for graphs that read none
    states: dict[Any, torch.Tensor]  # from which the target has predicted them, each (R, T, X)
    counts: RowNumbers  # (R,): tokens that were committed; where T is 1, the last of them alone is given
    keys: RowKeys | None = None  # of the numbers that draw a draft; positions are those of the first committed tokens
    limits: RowNumbers | None = None  # (R,): largest depth of each row's draft

    def last(self, values: torch.Tensor) -> torch.Tensor:
        """The last valid one of each row's values `(R, T, ...)`: `(R, ...)`."""
        return values[:, 0] if values.shape[1] == 1 else last_of_each(values, self.counts)


class NetworkState(RowState):
    """What a draft network keeps of its rows."""

    def __init__(self, slots: Any = None, kept: dict[Any, torch.Tensor] | None = None):
        # Keys and values of the text; tensors `(R, ...)` that one draft leaves to the next; what that one reads first.
        super().__init__(slots=slots, kept={} if kept is None else kept, pending=None)
