"""The boundary of all loaders: whatever is wrong with a stranger's checkpoint ends in an error of this package."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
from torch import nn
from transformers.utils import logging

from ..errors import MOST_SHOWN, CheckpointAccessError, CheckpointFormatError, SpecDecError


logger = logging.get_logger(__name__)

_PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

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
    """Puts a loader, called with the settings and the target, inside of the boundary, and looks at what it loads."""

    @wraps(load)
    def loaded(config: Any, target_model: nn.Module) -> Network:
        name = config.model or f"the checkpoint of the {type(target_model).__name__}"
        with checkpoint_errors(name):
            network = load(config, target_model)
        _warn_of_dead_weights(name, network)
        return network

    return loaded


def _warn_of_dead_weights(name: str, network: nn.Module) -> None:
    """Says what can draft nothing: numbers that are none, and matrices of zeros."""
    broken, empty = [], []
    for key, weight in network.named_parameters():
        # Weights in other forms (8 bits, in parts) do not have all operations.
        is_plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.dtype in _PLAIN_DTYPES
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
