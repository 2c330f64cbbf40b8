"""The boundary of all loaders: whatever is wrong with a stranger's checkpoint ends in an error of this package."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
from torch import nn
from transformers.utils import logging

from ..errors import MOST_SHOWN, CheckpointAccessError, CheckpointFormatError, SpecConfigError, SpecDecError
from ..method import drafting_method
from ..target_facts import MAX_VOCABULARY_GAP
from .checkpoint import WEIGHT_DTYPES, Checkpoint, tensor_shapes
from .header import TargetNeeds, TargetSizes, misfits
from .reader import CheckpointReader


if TYPE_CHECKING:
    from ..settings import SpeculativeConfig


logger = logging.get_logger(__name__)

# Stacked biases, and adapters that have not been trained.
_MAY_BE_ZERO = re.compile(r"bias|lora_")

# Not for the checkpoint to answer for.
_PASSED_ON = (SpecDecError, MemoryError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError))


@contextmanager
def checkpoint_errors(name: str) -> Iterator[None]:
    """Turns what reading the checkpoint `name` trips over into a [`CheckpointFormatError`].

    What this package says itself, and what is for the machine to answer for, such as too little memory, stays as it
    is; a network that fails is a [`CheckpointAccessError`].
    """
    try:
        yield
    except _PASSED_ON:
        raise
    except (HTTPError, OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        raise CheckpointAccessError(f"'{name}' cannot be reached: {_reason(error)}. Try again later.") from error
    except Exception as error:
        raise CheckpointFormatError(
            f"'{name}' cannot be loaded, for its config.json and its weights do not fit together, or are damaged: "
            f"{_reason(error)}. Pass an intact checkpoint."
        ) from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
    return f"{type(error).__name__}: {text}".rstrip(".") if text else type(error).__name__


Network = TypeVar("Network", bound=nn.Module)


def loads_checkpoint(load: Callable[[Any, nn.Module], Network]) -> Callable[[Any, nn.Module], Network]:
    """Puts a loader, called with the settings and the target, inside of the boundary, and looks at what it loads.

    Its errors include a [`SpecConfigError`] where no checkpoint is named and the target's own cannot be meant.
    """

    @wraps(load)
    def loaded(config: Any, target_model: nn.Module) -> Network:
        method = drafting_method(config.method)
        if config.model is None and method is not None and not method.in_target_checkpoint:
            raise SpecConfigError(
                f"spec_method='{config.method}' needs {method.weights}. Pass the folder or repo id of a checkpoint, "
                "or the loaded network, as `spec_model`."
            )
        name = config.model or f"the checkpoint of the {type(target_model).__name__}"
        with checkpoint_errors(name):
            network = load(config, target_model)
        _warn_of_dead_weights(name, network)
        return network

    return loaded


def filled(
    make: Callable[[], Network],
    reader: CheckpointReader,
    checkpoint: Checkpoint,
    placement: tuple[torch.dtype | None, torch.device],
) -> Network:
    """Makes a network and puts the tensors of a checkpoint into it.

    Args:
        make (`Callable`): Makes the network; its own weights take no memory.
        reader (`CheckpointReader`): What knows the tensors.
        checkpoint (`Checkpoint`): Where they are.
        placement (`tuple`): Dtype (`None`: as stored) and device.
    """
    with torch.device("meta"):
        network = make()
    network.load_state_dict(reader.tensors(checkpoint, tensor_shapes(network), *placement), assign=True)
    return network.eval().requires_grad_(False)


def check_given(
    network: Any,
    expected: type[nn.Module],
    config: SpeculativeConfig,
    target_model: nn.Module,
    most_gap: float = MAX_VOCABULARY_GAP,
) -> None:
    """Checks a network that was not loaded here, such as one in training; it says what it `needs` of a target.

    Raises:
        SpecConfigError: It is no network of this class, or was made for a target of other sizes. Vocabularies may
            differ by the share `most_gap`.
    """
    if not isinstance(network, expected):
        raise SpecConfigError(
            f"spec_method='{config.method}' drafts with a network of the class {expected.__name__}, got a "
            f"{type(network).__name__}. Pass one, or the folder or repo id of its checkpoint as `spec_model`."
        )
    needs: TargetNeeds = network.needs
    has_layers = (needs.num_hidden_layers, needs.min_hidden_layers) != (None, None)
    for reason in misfits(needs, TargetSizes.of(target_model, with_layers=has_layers), most_gap):
        raise SpecConfigError(f"The {type(network).__name__} {reason}. Pass one that was trained for this target.")


def _warn_of_dead_weights(name: str, network: nn.Module) -> None:
    """Says what can draft nothing: numbers that are none, and matrices of zeros."""
    broken, empty = [], []
    for key, weight in network.named_parameters():
        # Weights in other forms (8 bits, in parts) do not have all operations.
        is_plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.dtype in WEIGHT_DTYPES
        if not is_plain or weight.is_meta or weight.numel() == 0:
            continue
        least, most = (bound.item() for bound in weight.detach().aminmax())
        if not -float("inf") < least <= most < float("inf"):
            broken.append(key)
        elif least == most == 0 and weight.dim() > 1 and not _MAY_BE_ZERO.search(key):
            empty.append(key)
    found = [
        f"{len(keys)} {what} ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})"
        for keys, what in ((broken, "tensors with NaN or infinite values"), (empty, "matrices of zeros alone"))
        if keys
    ]
    if found:
        logger.warning(
            f"'{name}' has {' and '.join(found)}: few of its drafts will be accepted, if any. Pass an "
            "intact checkpoint."
        )
