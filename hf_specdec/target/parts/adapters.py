"""PEFT's adapters that differ from row to row: `generate(adapter_names=[...])` of a `PeftModel`.

PEFT tells every adapted layer the names of all rows of the call, by hooks that last as long as the call. Here rows
leave and change places, so a forward of the target is told those of its own rows. Whatever else runs in the call, such
as a drafter that shares layers, has the active adapters. Where rows of several calls stand beside each other, the
hooks list all adapters of the model, and each row has a place in that list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ...errors import SpecConfigError, shown
from ...transfers import select_rows
from ..forward import Part, SlotForward


_KEY = "adapter_names"

# On a hook, the names of all rows of the call.
_OF_CALL = "of_call"

# Among the inputs that rows repeat, the place of a row's adapter among the names that the hooks have.
ADAPTED_ROW = "row of adapter_names"


def adapter_hooks(model: torch.nn.Module) -> list[Any]:
    """What tells adapted layers of a model, or a part of it, the names of their rows; none where these have none."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return [hook for hook in hooks if isinstance(hook, partial) and _KEY in hook.keywords]


@contextmanager
def telling(hooks: list[Any], rows: Sequence[int], of_call: bool = True) -> Iterator[None]:
    """Tells the layers, inside the block, the names at these places among those of the call, or those told now."""
    before = [hook.keywords[_KEY] for hook in hooks]
    try:
        for hook, told in zip(hooks, before):
            names = vars(hook)[_OF_CALL] if of_call else told
            hook.keywords[_KEY] = None if names is None else [names[row] for row in rows]
        yield
    finally:
        for hook, names in zip(hooks, before):
            hook.keywords[_KEY] = names


class RowInputs(Part):
    """What the target reads of each row beside its tokens: arguments `(R, 1)` of its forward, and its adapter."""

    def __init__(self, model: torch.nn.Module, values: dict[str, torch.Tensor]):
        self.model = model
        self.values: dict[str, torch.Tensor] = values
        if ADAPTED_ROW in values:
            # Outside of forwards of the target layers are told no names from now on.
            for hook in adapter_hooks(model):
                vars(hook).setdefault(_OF_CALL, hook.keywords[_KEY])
                hook.keywords[_KEY] = None

    def reading(self, nodes: SlotForward) -> AbstractContextManager[None]:
        if nodes.topology is not None:
            repeated = {name: values for name, values in self.values.items() if name != ADAPTED_ROW}
            nodes.inputs |= {name: values.expand(-1, nodes.tokens.shape[1]) for name, values in repeated.items()}
        if ADAPTED_ROW not in self.values:
            return nullcontext()
        return telling(adapter_hooks(self.model), self.values[ADAPTED_ROW][:, 0].tolist())

    def keep_rows(self, keep: list[int]) -> None:
        self.values = {name: select_rows(values, keep) for name, values in self.values.items()}

    def join(self, other: RowInputs) -> None:
        self.values = {name: torch.cat([values, other.values[name]]) for name, values in self.values.items()}


class AdapterChoice:
    """All adapters of a model, which may differ from row to row, for requests of which each names its own."""

    def __init__(self, model: torch.nn.Module):
        self._layers: list[Any] = [module for module in model.modules() if hasattr(module, "_mixed_batch_forward")]
        tuned = {type(module) for module in model.modules() if hasattr(module, "adapter_layer_names")}
        others = {kind.__name__ for kind in tuned if not hasattr(kind, "_mixed_batch_forward")}
        if others or not self._layers:
            reason = f"layers of PEFT that cannot: {', '.join(sorted(others))}" if others else "no adapters"
            raise SpecConfigError(
                f"`adapter_names` needs adapters that can differ from row to row, such as LoRA's, and "
                f"{type(model).__name__} has {reason}. Leave it out."
            )
        self._names: list[str] = ["__base__", *getattr(model, "peft_config", {})]  # PEFT's name for none, and all

        def name_adapters(layer: Any, args: Any, kwargs: dict[str, Any], adapter_names: list[str] | None) -> Any:
            return args, {**kwargs, _KEY: adapter_names}

        # The same objects each time: who looks for hooks may have found them before.
        self._hooks = [partial(name_adapters, **{_KEY: self._names}) for _ in self._layers]

    def place(self, names: Any) -> int:
        """Place among all of them of a request's adapter, which is a list of one name, as for a call with one row."""
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
