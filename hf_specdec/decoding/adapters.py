"""PEFT's adapters that differ from row to row: `generate(adapter_names=[...])` of a `PeftModel`.

PEFT tells every adapted layer the names of all rows of the call, by hooks that last as long as the call. Here rows
leave and change places, so a forward of the loop is told those of its own rows.

Shapes: B rows of the call, R active rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch


_KEY = "adapter_names"

# On a hook, the names of all rows of the call, while its layer is told none.
_OF_CALL = "of_call"

# Among the inputs that rows repeat, the number of a row in its call.
ADAPTED_ROW = "row of adapter_names"


class RowAdapters:
    """The names that the layers of a model are told in this call.

    Args:
        hooks (`list[partial]`): PEFT's hooks of the layers.
    """

    def __init__(self, hooks: list[partial]):
        self._given = [(hook, vars(hook).get(_OF_CALL) or hook.keywords[_KEY]) for hook in hooks]
        self._now: list[list[str] | None] = [hook.keywords[_KEY] for hook in hooks]

    @classmethod
    def of(cls, model: torch.nn.Module) -> RowAdapters:
        """Those of a model, or a part of it; false where all rows have the same adapters."""
        hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
        hooks = [hook for hook in hooks if isinstance(hook, partial) and _KEY in hook.keywords]
        return cls(hooks)

    def __bool__(self) -> bool:
        return bool(self._given)

    @contextmanager
    def of_rows(self, rows: torch.LongTensor) -> Iterator[None]:
        """Tells the layers the names of rows `(R,)` of the call inside the block."""
        places = rows.tolist()
        with self._told([[names[row] for row in places] for _, names in self._given]):
            yield

    @contextmanager
    def of_no_row(self) -> Iterator[None]:
        """Tells the layers no names inside the block: those that a draft network shares have the active adapters."""
        for hook, names in self._given:
            vars(hook)[_OF_CALL] = names
        try:
            with self._told([None] * len(self._given)):
                yield
        finally:
            for hook, _ in self._given:
                del vars(hook)[_OF_CALL]

    @contextmanager
    def _told(self, values: list[list[str] | None]) -> Iterator[None]:
        self._tell(values)
        try:
            yield
        finally:
            self.tell_all()

    def tell(self, rows: Sequence[int]) -> None:
        """Tells the layers the names of these of the rows that they were told when this was made."""
        self._tell([names and [names[row] for row in rows] for names in self._now])

    def tell_all(self) -> None:
        """Tells them the names of all these rows again."""
        self._tell(self._now)

    def _tell(self, values: list[list[str] | None]) -> None:
        for (hook, _), value in zip(self._given, values):
            hook.keywords[_KEY] = value
