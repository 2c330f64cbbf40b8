"""Whether a checkpoint fits a target, by what their configs and headers say."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .detect import Detection, detect
from .files import RepoFiles


# The name of the embedded target.
EMBEDDED = "demo"

# How the configs of transformers call what a drafter must share with its target.
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint is, and whether it fits a target.

    Args:
        name (`str`): Folder or repo id.
        found (`Detection`): What it is.
        fits (`bool`, *optional*): Whether it can draft for the target; `None` where none was named.
        problems (`tuple[str, ...]`): Why it cannot, in sentences.
    """

    name: str
    found: Detection
    fits: bool | None = None
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain Python and JSON types."""
        found = self.found.to_dict()
        return {
            "name": self.name,
            **{key: found[key] for key in ("method", "format", "producer", "target", "num_draft_tokens")},
            "tensors": self.found.num_tensors,
            "bytes": self.found.num_bytes,
            "mtp_layers": self.found.mtp_layers,
            "fits": self.fits,
            "problems": list(self.problems),
        }


def inspect_checkpoint(
    name: str | os.PathLike,
    target: str | os.PathLike | None = None,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    target_revision: str | None = None,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Inspection:
    """Looks into the checkpoint of a drafter without loading it.

    Args:
        name (`str` or `os.PathLike`): Folder or repo id.
        target (`str` or `os.PathLike`, *optional*): Folder or repo id of the target, of which only the config is read,
            or "demo" for the embedded one.
        revision, subfolder (`str`, *optional*): Where in its repository the checkpoint is.
        target_revision (`str`, *optional*): Branch, tag or commit of the target's repository.
        cache_dir, token, local_files_only: As in [`SpeculativeConfig`].

    Raises:
        CheckpointAccessError: One of the two cannot be reached.
        CheckpointFormatError: The checkpoint is damaged, of no known format, or ambiguous.
    """
    access = {"cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
    found = detect(RepoFiles(name, revision=revision, subfolder=subfolder, **access))
    if target is None:
        return Inspection(str(name), found, None, found.problems)
    if str(target) == EMBEDDED:
        from ..demo import target_path

        target = target_path()
    config = RepoFiles(target, revision=target_revision, **access).config
    problems = (*found.problems, *target_problems(found, config))
    return Inspection(str(name), found, not problems, problems)


def target_problems(found: Detection, config: Mapping[str, Any]) -> list[str]:
    """Why a checkpoint cannot draft for the target with this `config.json`, in sentences; empty: nothing shows."""
    return list(_misfits(found, config))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _misfits(found: Detection, config: Mapping[str, Any]) -> Iterator[str]:
    from ..models.draft_model import MAX_VOCABULARY_GAP

    needs, text = found.target, text_config(config)
    if config.get("is_encoder_decoder"):
        yield "The target is an encoder-decoder model. Only decoder-only models can be drafted for."
    width = _first(text, _HIDDEN_SIZE)
    if None not in (needs.hidden_size, width) and needs.hidden_size != width:
        yield f"It reads states of hidden size {needs.hidden_size}, and the target has {width}."
    size = text.get("vocab_size")
    if None not in (needs.vocab_size, size) and abs(needs.vocab_size - size) > MAX_VOCABULARY_GAP * size:
        yield (
            f"It has a vocabulary of {needs.vocab_size} tokens, and the target has {size}: these are different "
            "tokenizers."
        )
    layers = _first(text, _NUM_LAYERS)
    if layers is not None and needs.num_hidden_layers not in (None, layers):
        yield f"It was made for a target with {needs.num_hidden_layers} decoder layers, and the target has {layers}."
    elif layers is not None and (needs.min_hidden_layers or 0) > layers:
        yield f"It reads the states of {needs.min_hidden_layers} decoder layers, and the target has {layers}."
    if found.method == "mtp" and not found.format.startswith("gemma4"):
        yield from _mtp_misfits(found, text)


def _mtp_misfits(found: Detection, text: Mapping[str, Any]) -> Iterator[str]:
    from ..models.mtp import SUPPORTED_MODEL_TYPES

    kind = text.get("model_type")
    # The type of what multimodal configs nest is often left out.
    kinds = (kind, f"{kind}_text")
    if found.target.model_type not in (None, *kinds):
        yield f"Its layers are those of the model_type '{found.target.model_type}', and the target is of '{kind}'."
    if not set(kinds) & set(SUPPORTED_MODEL_TYPES):
        yield f"The MTP layers of targets of the model_type '{kind}' are not supported."


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int)), None)
