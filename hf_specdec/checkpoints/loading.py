"""Loading and saving of networks. Whatever is wrong with a stranger's checkpoint ends in an error of this package."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
from safetensors.torch import save_file
from torch import nn
from transformers.utils import logging

from ..errors import MOST_SHOWN, CheckpointAccessError, CheckpointFormatError, SpecConfigError, SpecDecError
from ..method import drafting_method
from ..settings import SpeculativeConfig
from ..target_facts import MAX_VOCABULARY_GAP, draft_device
from .header import Header, TargetNeeds, TargetSizes, listed, misfits
from .reader import CheckpointReader
from .weights import WEIGHT_DTYPES, WEIGHT_FILES


logger = logging.get_logger(__name__)

# Settings that [`load`] reads, whatever the method.
LOADED_BY = ("model", "revision", "subfolder", "cache_dir", "dtype", "device", "quantization")

# Stacked biases, and adapters that have not been trained.
_MAY_BE_ZERO = re.compile(r"bias|lora_")

# Not for the checkpoint to answer for.
_PASSED_ON = (SpecDecError, MemoryError, torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError))


@contextmanager
def checkpoint_errors(name: str) -> Iterator[None]:
    """Turns what reading the checkpoint `name` trips over into errors of this package."""
    try:
        yield
    except _PASSED_ON:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        text = text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
        reason = ": ".join(filter(None, (type(error).__name__, text))).rstrip(".")
        if isinstance(error, (HTTPError, OfflineModeIsEnabled, ConnectionError, TimeoutError)):
            raise CheckpointAccessError(f"'{name}' cannot be reached: {reason}. Try again later.") from error
        raise CheckpointFormatError(
            f"'{name}' cannot be loaded, for its config.json and its weights do not fit together, or are damaged: "
            f"{reason}. Pass an intact checkpoint."
        ) from error


class LoadedNetwork(nn.Module):
    """Network of a draft that [`load`] makes of a checkpoint."""

    reader_class: ClassVar[type[CheckpointReader]]
    most_gap: ClassVar[float] = MAX_VOCABULARY_GAP  # share by which its vocabulary may differ from the target's
    needs: TargetNeeds

    @classmethod
    def of_record(cls, record: Any, target_model: nn.Module) -> LoadedNetwork:
        """The network that a reader's record describes, with weights of any values."""
        return cls(record)

    def fitted(
        self, config: SpeculativeConfig, target_model: nn.Module, reader: CheckpointReader | None = None
    ) -> LoadedNetwork:
        """The network as it drafts for this target and these settings; without a `reader` it was made elsewhere."""
        return self


def load(
    network_class: type[LoadedNetwork],
    config: SpeculativeConfig,
    target_model: nn.Module,
    given: nn.Module | None = None,
) -> Any:
    """Loads the network of `config.model`, or checks one that is `given` and was made elsewhere, as in training."""
    if given is not None:
        if not isinstance(given, network_class):
            raise SpecConfigError(
                f"spec_method='{config.method}' drafts with a network of the class {network_class.__name__}, got a "
                f"{type(given).__name__}. Pass one, or the folder or repo id of its checkpoint as `spec_model`."
            )
        has_layers = (given.needs.num_hidden_layers, given.needs.min_hidden_layers) != (None, None)
        sizes = TargetSizes.of(target_model, with_layers=has_layers)
        for reason in misfits(given.needs, sizes, given.most_gap):
            raise SpecConfigError(f"The {type(given).__name__} {reason}. Pass one that was trained for this target.")
        return given.fitted(config, target_model)
    name = named_checkpoint(config)
    with checkpoint_errors(name):
        placement, reader_class = head_placement(config, target_model), network_class.reader_class
        reader = reader_class(Header.of(config, reader_class.weight_files), config.options, target_model)
        reader.check()
        record = reader.record(TargetSizes.of(target_model, with_layers=reader.reads_layers))
        # Its own weights take no memory.
        with torch.device("meta"):
            network = network_class.of_record(record, target_model)
        tensors = reader.tensors(tensor_shapes(network), *placement)
        network.load_state_dict(tensors, assign=True)
        network = network.eval().requires_grad_(False).fitted(config, target_model, reader)
    warn_of_dead_weights(name, network)
    return network


def named_checkpoint(config: SpeculativeConfig) -> str:
    """The checkpoint that the settings name."""
    if config.model is None:
        raise SpecConfigError(
            f"spec_method='{config.method}' needs {drafting_method(config.method).weights}. Pass the folder or repo "
            "id of a checkpoint, or the loaded network, as `spec_model`."
        )
    return config.model


def warn_of_dead_weights(name: str, network: nn.Module) -> None:
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
    problems = [
        f"{len(keys)} {what} ({listed(keys)})"
        for keys, what in ((broken, "tensors with NaN or infinite values"), (empty, "matrices of zeros alone"))
        if keys
    ]
    if problems:
        logger.warning(
            f"'{name}' has {' and '.join(problems)}: few of its drafts will be accepted, if any. Pass an "
            "intact checkpoint."
        )


def tensor_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in the state dict of a module."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def save_checkpoint(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    weight_file: str = WEIGHT_FILES[0],
) -> None:
    """Writes `config.json` and a safetensors file of contiguous tensors into a folder, which is made if needed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(dict(tensors), folder / weight_file, metadata={"format": "pt"})


def head_placement(config: SpeculativeConfig, target_model: nn.Module) -> tuple[torch.dtype | None, torch.device]:
    """Dtype (`None`: as stored) and device of heads: the target's, unless the settings say otherwise."""
    if config.quantization is not None:
        raise SpecConfigError(
            f"`quantization`='{config.quantization}' is for draft models; the heads of method='{config.method}' are "
            "small and stay in a floating-point type. Leave it out, or use `dtype`."
        )
    device = draft_device(config, target_model, target_model.get_output_embeddings())
    if config.dtype is None:
        return target_model.dtype, device
    return None if config.dtype == "auto" else getattr(torch, config.dtype), device
