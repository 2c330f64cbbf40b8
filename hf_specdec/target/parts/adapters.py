"""PEFT's adapters that differ from row to row: `generate(adapter_names=[...])` of a `PeftModel`.

PEFT tells every adapted layer the names of all rows of the call, by hooks that last as long as the call. Here rows
leave and change places, so a forward of the loop is told those of its own rows. Where rows of several calls stand
beside each other, the hooks list all adapters of the model, and each row has a place in that list.

Shapes: B rows of the call, R active rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ...errors import SpecConfigError, shown
from ...transfers import select_rows
from ..forward import Part, SlotNodes


_KEY = "adapter_names"

# On a hook, the names of all rows of the call, while its layer is told none.
_OF_CALL = "of_call"

# Among the inputs that rows repeat, the place of a row's adapter among the names that the hooks have.
ADAPTED_ROW = "row of adapter_names"

# PEFT's name for none at all.
_BASE = "__base__"


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
        """Tells the layers, inside the block, the names at these places `(R,)` of those of the call."""
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


class RowInputs(Part):
    """What the target reads of each row beside its tokens, the same for all of them.

    Args:
        model (`PreTrainedModel`): The target.
        values (`dict[str, torch.Tensor]`): Arguments of its forward, and [`ADAPTED_ROW`], each `(R, 1)`.
    """

    def __init__(self, model: torch.nn.Module, values: dict[str, torch.Tensor]):
        self.model = model
        self.values = values

    def reading(self, nodes: SlotNodes) -> AbstractContextManager[None]:
        if nodes.topology is not None:
            repeated = {name: values for name, values in self.values.items() if name != ADAPTED_ROW}
            nodes.inputs |= {name: values.expand(-1, nodes.tokens.shape[1]) for name, values in repeated.items()}
        return self.told(range(len(nodes.tokens)))

    def told(self, rows: Sequence[int]) -> AbstractContextManager[None]:
        """Tells adapted layers, inside the block, which adapters these of the rows have."""
        if ADAPTED_ROW not in self.values:
            return nullcontext()
        return RowAdapters.of(self.model).of_rows(self.values[ADAPTED_ROW][list(rows), 0])

    def keep_rows(self, keep: list[int]) -> None:
        self.values = {name: select_rows(values, keep) for name, values in self.values.items()}

    def join(self, other: RowInputs, num_rows: int) -> None:
        self.values = {name: torch.cat([values, other.values[name]]) for name, values in self.values.items()}


class AdapterChoice:
    """All adapters of a model, for requests of which each names its own.

    Args:
        model (`PreTrainedModel`): Has layers of PEFT.

    Raises:
        SpecConfigError: It has none, or some that cannot differ from row to row.
    """

    def __init__(self, model: torch.nn.Module):
        self._layers: list[Any] = [module for module in model.modules() if hasattr(module, "_mixed_batch_forward")]
        tuned = {type(module) for module in model.modules() if hasattr(module, "adapter_layer_names")}
        others = {kind.__name__ for kind in tuned if not hasattr(kind, "_mixed_batch_forward")}
        if others or not self._layers:
            found = f"layers of PEFT that cannot: {', '.join(sorted(others))}" if others else "no adapters"
            raise SpecConfigError(
                f"`adapter_names` needs adapters that can differ from row to row, such as LoRA's, and "
                f"{type(model).__name__} has {found}. Leave it out."
            )
        self._names: list[str] = [_BASE, *getattr(model, "peft_config", {})]
        # The same objects each time: who looks for hooks may have found them before.
        self._hooks = [partial(_name_adapters, **{_KEY: self._names}) for _ in self._layers]

    def place(self, names: Any) -> int:
        """Place of a request's adapter among all of them.

        Args:
            names (`list[str]`): One name, as a call with one row has it.

        Raises:
            SpecConfigError: That is something else, no adapter of the model, or one that rows cannot have.
        """
        if not isinstance(names, (list, tuple)) or len(names) != 1 or names[0] not in self._names:
            raise SpecConfigError(
                f"`adapter_names` of a request is a list of one name, one of {', '.join(self._names)}, got "
                f"{shown(names)}."
            )
        for layer in self._layers:
            try:
                layer._check_forward_args([None], adapter_names=list(names))
            except (TypeError, ValueError) as error:
                raise SpecConfigError(f"`adapter_names`={shown(names)} cannot be honoured: {error}") from error
        return self._names.index(names[0])

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tells the layers all names inside the block; forwards of the loop choose those of their rows."""
        with ExitStack() as handles:
            for layer, hook in zip(self._layers, self._hooks):
                handles.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield


def _name_adapters(
    layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], adapter_names: list[str] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, _KEY: adapter_names}
