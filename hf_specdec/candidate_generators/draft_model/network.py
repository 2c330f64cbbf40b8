"""Draft models: any causal language model that transformers loads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ...checkpoints.files import RepoFiles, is_pickled
from ...checkpoints.header import WEIGHT_FILES
from ...checkpoints.loading import loads_checkpoint
from ...checkpoints.quantised import check_four_bits, quantization_config
from ...checkpoints.settings import INDEX, MOST, is_int
from ...checkpoints.weight_headers import TensorTable
from ...errors import MOST_SHOWN, CheckpointFormatError, SpecConfigError, shown
from ...target_facts import draft_device, num_embeddings
from ...threads import Lock
from .vocabulary import load_tokenizer


logger = logging.get_logger(__name__)

# While transformers builds a model, torch's default dtype is that of the model, in all threads: two at a time would
# leave the wrong one behind.
_building = Lock()


@loads_checkpoint
def load_draft_model(config: Any, target_model: torch.nn.Module) -> torch.nn.Module:
    """Loads `config.model` in the target's dtype, on its device, unless the settings say otherwise.

    Args:
        config (`SpeculativeConfig`): `model`, `revision`, `code_revision`, `subfolder`, `cache_dir`, `token`,
            `local_files_only`, `trust_remote_code`, `dtype`, `device`, `quantization`.
        target_model (`PreTrainedModel`): The target.

    Raises:
        SpecConfigError: No draft model was named, or its layers do not fit the quantisation.
        CheckpointAccessError: The checkpoint cannot be reached.
        CheckpointFormatError: The checkpoint cannot be loaded as a causal language model.
        MissingDependencyError: Quantisation was asked for and bitsandbytes is not installed.
    """
    if config.model is None:
        raise SpecConfigError(
            "spec_method='draft_model' needs a draft model. Pass its folder, repo id or the loaded model as "
            "`spec_model`."
        )
    weights = _checked_weights(RepoFiles.of(config))
    arguments = {"use_safetensors": not is_pickled(weights), **_loading_arguments(config, target_model)}
    device = draft_device(config, target_model)
    model = _from_pretrained(config.model, weights, checkpoint_location(config), arguments, target_model, device)
    check_four_bits(model, config.model)
    return model.eval()


def mask_token_of(model: torch.nn.Module, wanted: bool | None = None) -> int | None:
    """The mask token of a PARD model (`pard_token`); `None` for a model that drafts one token after the other.

    Args:
        wanted (`bool`, *optional*): The settings ask for masks, or for none.

    Raises:
        CheckpointFormatError: It is no token of the model.
        SpecConfigError: Masks are asked for, and the model was trained without.
    """
    if wanted is False:
        return None
    token = getattr(model.config.get_text_config(decoder=True), "pard_token", None)
    token = getattr(model.config, "pard_token", None) if token is None else token
    # -1 says that it was trained without.
    if token is None or token == -1:
        if wanted:
            raise SpecConfigError(
                f"`parallel_drafting`=True needs a draft model that was trained with mask tokens, and the config of "
                f"'{model.config.name_or_path}' has no `pard_token`. Leave it out to draft token by token."
            )
        return None
    readable = num_embeddings(model.get_input_embeddings())
    if not is_int(token) or not 0 <= token < readable:
        raise CheckpointFormatError(
            f"The draft model '{model.config.name_or_path}' has `pard_token`={shown(token)} in its config.json, and "
            f"its embedding has the tokens 0 to {readable - 1}. Correct it, or remove it to draft token by token."
        )
    return token


def _checked_weights(files: RepoFiles) -> str:
    """The weight file of a model, or its index, when all that transformers will read has been checked and is here."""
    try:
        files.path("config.json")
        weights = files.first_of(WEIGHT_FILES)
        if weights is None:
            raise CheckpointFormatError(
                f"'{files.name}' has none of the weight files that are read: {', '.join(WEIGHT_FILES)}. Pass a "
                "complete causal language model, and name it as `spec_model` where its weights are pickled."
            )
        _check_sizes(files, weights, files.tensors(weights))
        for part in files.parts(weights):
            files.pickled_path(part) if is_pickled(part) else files.path(part)
            files.header(part)
        if files.folder is None and "adapter_config.json" in files:
            raise CheckpointFormatError(
                f"'{files.name}' holds an adapter (adapter_config.json), and transformers would load the model "
                "that it names in the place of this one. Merge the adapter, and pass the whole model."
            )
        for name in filter(_is_read_along, files.sizes if files.folder is not None else ()):
            files.path(name)
    except CheckpointFormatError as error:
        raise type(error)(f"The draft model {error}") from error
    return weights


# Keys of configs for the number of layers and for the widths of weights. All else is no bound here.
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers", "decoder_layers")
_WIDTHS = re.compile(
    r".*_(size|dim|heads|experts|rank|channels)|(n|num|d)_(embd|head|inner|model|ff|kv)|(hidden|intermediate).*"
)


def _check_sizes(files: RepoFiles, weights: str, tensors: TensorTable | None) -> None:
    """Refuses a config whose model would be far larger than its files, before it is downloaded and built."""
    sizes = [files.sizes.get(part) for part in files.parts(weights)]
    if None in sizes:
        # Not all of it is in the cache, which is said where it is read.
        return
    num_bytes = sum(sizes)
    num_tensors = num_bytes if tensors is None else len(tensors)
    for name, value in _integers(files.config):
        key = name.rpartition(".")[2]
        # An element has at least four bits, and a layer a tensor.
        if key in _DEPTHS:
            most = num_tensors
        elif _WIDTHS.fullmatch(key):
            most = 2 * num_bytes
        else:
            most = MOST if "position" in key else value
        if value > most or (value < 1 and name in _DEPTHS):
            raise CheckpointFormatError(
                f"'{files.name}' has `{name}`={shown(value)} in its config.json, and {num_tensors} tensors of "
                f"{num_bytes} bytes in {weights}: no such model can be made of them. Pass an intact checkpoint."
            )


def _integers(config: Any, place: str = "") -> Iterator[tuple[str, int]]:
    """All integers in a config, with the way to each."""
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        name = f"{place}.{key}" if place and isinstance(config, dict) else place or str(key)
        if is_int(value):
            yield name, value
        else:
            yield from _integers(value, name)


def _is_read_along(name: str) -> bool:
    """Tells files that transformers may read beside the weights: settings, tokenizer, code, adapters."""
    return name.endswith((".json", ".jinja", ".model", ".py", ".txt")) or name.startswith("adapter_")


def checkpoint_location(config: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained` that say where in a repository a checkpoint and its tokenizer lie."""
    location = {"trust_remote_code": config.trust_remote_code, "local_files_only": config.local_files_only}
    given = {name: getattr(config, name) for name in ("revision", "code_revision", "subfolder", "cache_dir", "token")}
    return location | {name: value for name, value in given.items() if value not in (None, "")}


def draft_tokenizer(
    config: Any, beside: str | None, location: dict[str, Any] | None = None
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a draft model; `None` where none was named and none lies beside it.

    Args:
        config (`SpeculativeConfig`): `draft_tokenizer`, and how repositories are reached.
        beside (`str`, *optional*): Folder or repo id of the draft model.
        location (`dict`, *optional*): Where in there it lies, from [`checkpoint_location`].

    Raises:
        SpecConfigError: `draft_tokenizer` names none.
    """
    named = getattr(config.options, "draft_tokenizer", None)
    if named is None:
        return load_tokenizer(beside, location)
    # The others say where in the draft model's repository something is.
    access = {
        name: value
        for name, value in checkpoint_location(config).items()
        if name not in ("revision", "code_revision", "subfolder")
    }
    tokenizer = load_tokenizer(named, access)
    if tokenizer is None:
        raise SpecConfigError(
            f"`draft_tokenizer`={shown(named)} holds no tokenizer that can be loaded. Name a folder or repository "
            "that has one, or pass both tokenizers to generate() as `tokenizer` and `assistant_tokenizer`."
        )
    return tokenizer


def _loading_arguments(config: Any, target_model) -> dict[str, Any]:
    arguments = {"dtype": target_model.dtype if config.dtype is None else config.dtype}
    if config.quantization:
        compute_dtype = target_model.dtype if config.dtype in (None, "auto") else config.dtype
        arguments["quantization_config"] = quantization_config(config.quantization, compute_dtype)
    return arguments


def auto_model_class(model_config: Any) -> Any:
    """The class of transformers that makes a model of this config, with its encoder where it has one."""
    if not model_config.is_encoder_decoder:
        return AutoModelForCausalLM
    is_text = model_config.model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForSeq2SeqLM if is_text else AutoModelForSpeechSeq2Seq


def _from_pretrained(
    name: str,
    weights: str,
    location: dict[str, Any],
    arguments: dict[str, Any],
    target_model: Any,
    device: torch.device,
) -> torch.nn.Module:
    """The model, loaded completely: transformers would give weights that are missing random values."""
    try:
        model_config = AutoConfig.from_pretrained(name, **location)
        if getattr(model_config, "transformers_weights", None) not in (None, weights):
            raise ValueError(f"its config.json names other weights than {weights} (`transformers_weights`).")
        window = getattr(model_config.get_text_config(decoder=True), "sliding_window", None)
        if window is not None and not INDEX.is_valid(window):
            raise ValueError(f"its config.json has `sliding_window`={shown(window)}, which must be {INDEX.what}.")
        if model_config.is_encoder_decoder and not target_model.config.is_encoder_decoder:
            raise ValueError(f"{type(model_config).__name__} is of an encoder-decoder model. Use a decoder-only one.")
        model_class = auto_model_class(model_config)
        is_packed = (
            "quantization_config" in arguments or getattr(model_config, "quantization_config", None) is not None
        )
        if is_packed:
            # Packed weights cannot always be moved.
            arguments = {**arguments, "device_map": {"": device}}
        if not os.path.isdir(name):
            # Where PEFT is installed an adapter is looked for, with arguments of its own.
            places = ("revision", "subfolder", "cache_dir", "local_files_only")
            arguments = {**arguments, "adapter_kwargs": {key: location[key] for key in places if key in location}}
        with _building:
            # Transformers does not annotate what `output_loading_info` adds.
            model, loading = model_class.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
                name, config=model_config, output_loading_info=True, **location, **arguments
            )
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        # Further lines list everything that transformers knows.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:MOST_SHOWN]
        if isinstance(error, KeyError):
            reason = f"transformers does not know {reason}, or misses it in its config.json."
        if "custom code" in reason:
            reason += " Pass trust_remote_code=True if you trust it."
        raise CheckpointFormatError(f"The draft model '{name}' cannot be loaded: {reason}") from error
    missing = sorted(loading["missing_keys"])
    if missing:
        raise CheckpointFormatError(
            f"The draft model '{name}' lacks {len(missing)} of the weights of {type(model).__name__}: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Pass a complete causal language model."
        )
    if is_packed and not getattr(model, "is_quantized", False):
        # Dequantised weights have the type of their factors.
        return model.to(model.dtype)
    return model if is_packed else model.to(device)
