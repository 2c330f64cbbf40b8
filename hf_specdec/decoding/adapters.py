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

# Among the inputs that rows repeat, the number of a row in its call.
ADAPTED_ROW = "row of adapter_names"


class RowAdapters:
    """The names that layers of a model are told, as they are when this is made.

    Args:
        hooks (`list[partial]`): PEFT's hooks of the layers.
    """

    def __init__(self, hooks: list[partial]):
        self._given = [(hook.keywords, hook.keywords[_KEY]) for hook in hooks]

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
        self.tell(rows.tolist())
        try:
            yield
        finally:
            self.tell_all()

    def tell(self, rows: Sequence[int]) -> None:
        """Tells the layers the names of these of the rows that they were told before."""
        for told, names in self._given:
            told[_KEY] = [names[row] for row in rows]

    def tell_all(self) -> None:
        """Tells them the names of all these rows again."""
        for told, names in self._given:
            told[_KEY] = names
