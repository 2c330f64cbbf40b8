"""Inspection of checkpoints: what one is and whether it fits a target, by configs and headers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import AutoConfig, AutoModelForCausalLM

from ..checkpoints.files import RepoFiles
from ..checkpoints.header import TargetNeeds, TargetSizes, misfits
from ..errors import SpecConfigError, SpecDecError
from ..method import is_language_model, own_layers_method, resolve_candidate_generator
from ..settings import SpeculativeConfig
from .detect import Detection, about_it, detect, gathered, known_formats
from .trust import one_line


_line = partial(one_line, most=500)

# The name of the embedded target.
EMBEDDED = "demo"


@dataclass(frozen=True)
class Inspection:
    """Result of an inspection."""

    name: str  # folder or repo id
    found: Detection  # what it is
    fits: bool | None = None  # it can draft for the target; `None` where none was named
    problems: tuple[str, ...] = ()  # why it cannot, in sentences
    hint: str | None = None  # how it is meant to be used, where its method does not say so

    def to_dict(self) -> dict[str, Any]:
        """Converts to plain Python and JSON types."""
        found = self.found.to_dict()
        return {
            "name": self.name,
            **{key: found[key] for key in ("method", "format", "producer", "target", "num_draft_tokens")},
            "tensors": self.found.num_tensors,
            "bytes": self.found.num_bytes,
            "mtp_layers": self.found.mtp_layers,
            "fits": self.fits,
            "problems": list(self.problems),
            **({"hint": self.hint} if self.hint else {}),
        }


def inspect_checkpoint(
    name: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    target_revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
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
    files = RepoFiles(name, revision=revision, subfolder=subfolder, **access)
    found = detect(files)
    # For people to read, and written by anybody.
    named = None if found.target.name is None else one_line(found.target.name)
    found = replace(found, target=replace(found.target, name=named), problems=tuple(map(_line, found.problems)))
    has_layers = found.mtp_layers > 0
    hint = _OWN_LAYERS.format(own_layers_method().name) if has_layers else None
    if target is None:
        return Inspection(str(name), found, None, found.problems, hint)
    if str(target) == EMBEDDED:
        from ..demo import target_path

        target = target_path()
    config = RepoFiles(target, revision=target_revision, **access).config
    is_itself = is_language_model(found.method) and subfolder is None and is_same_checkpoint(str(name), str(target))
    if is_itself and not has_layers:
        hint = _ITSELF.format(one_line(name))
    problems = own_layer_problems(found, config) if is_itself and has_layers else target_problems(found, config)
    method = own_layers_method().name if is_itself and has_layers else found.method
    # Of the Hub no weights are downloaded, and nothing is unpickled.
    is_readable = files.folder is not None and not found.is_pickled
    if is_readable and not (problems or found.problems or is_language_model(method)):
        settings = SpeculativeConfig(method, os.fspath(name), subfolder=subfolder)
        problems = _loading_problems(settings, config, str(target))
    problems = (*found.problems, *map(_line, problems))
    return Inspection(str(name), found, not problems, problems, hint)


_OWN_LAYERS = "It has multi-token-prediction layers. To draft with them for this model, use spec_method='{}'."
_ITSELF = (
    "'{}' is the target itself and has no multi-token-prediction layers, so as a draft model it would cost as much as "
    "it saves. Name a smaller model or a draft head, or use spec_method='auto'."
)


# A config that asks for more layers is no target's.
_MOST_LAYERS = 1000


def _loading_problems(settings: SpeculativeConfig, target_config: Mapping[str, Any], target: str) -> list[str]:
    """What the loader of a head in a folder says, in a sentence; the weights take no memory."""
    if (sizes_in(target_config).num_hidden_layers or 0) > _MOST_LAYERS:
        return []
    try:
        config = AutoConfig.for_model(**target_config)
        config.name_or_path = target
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # noqa: BLE001 - what transformers does not know is judged by its config alone
        return []
    try:
        resolve_candidate_generator(settings.method).load(settings, model)
    except SpecDecError as error:
        return [about_it(str(error), settings.model)]
    return []


def own_layer_problems(found: Detection, config: Mapping[str, Any]) -> list[str]:
    """Reasons why such layers of a target with this `config.json` cannot draft for it."""
    return target_problems(replace(found, method=own_layers_method().name, target=TargetNeeds()), config)


def method_for_target(config: SpeculativeConfig, method: str, target_config: Any) -> str:
    """The method of a checkpoint that may be the target's own, which needs layers that can draft for it."""
    own = str(getattr(target_config, "_name_or_path", None) or "")
    revisions = (None, "main", getattr(target_config, "_commit_hash", None))
    is_whole = is_language_model(method) and config.subfolder is None and config.revision in revisions
    if not (is_whole and own and is_same_checkpoint(config.model, own)):
        return method
    files = RepoFiles.of(config)
    found = detect(files)
    problems = own_layer_problems(found, files.config) if found.mtp_layers else [_ITSELF.format(own)]
    if problems:
        raise SpecConfigError(" ".join(problems))
    return own_layers_method().name


def is_repo_id(name: str) -> bool:
    """True for names that a repository on the Hub can have."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def repo_id_of(name: str) -> str | None:
    """The repository that a name or a folder in the Hub's cache is of, as far as it tells."""
    if not os.path.isdir(name):
        return name if is_repo_id(name) else None
    # A snapshot of the cache lies in models--user--name/snapshots/<commit>.
    kind, _, repository = Path(name).resolve().parent.parent.name.partition("--")
    repository = repository.replace("--", "/")
    return repository if kind == "models" and is_repo_id(repository) else None


def is_same_checkpoint(name: str, other: str) -> bool:
    """True for two names of one folder, or of one repository."""
    if os.path.isdir(name) and os.path.isdir(other) and os.path.samefile(name, other):
        return True
    repo_ids = repo_id_of(name), repo_id_of(other)
    return None not in repo_ids and repo_ids[0].lower() == repo_ids[1].lower()


def target_problems(found: Detection, config: Mapping[str, Any]) -> list[str]:
    """Reasons why a checkpoint cannot draft for the target with this `config.json`, in sentences."""
    sizes, problems = sizes_in(config), []
    if config.get("is_encoder_decoder") and found.target.hidden_size is not None:
        problems.append("The target is an encoder-decoder model, and it reads the states of decoder-only ones.")
    problems += [f"It {reason}." for reason in misfits(found.target, sizes)]
    rows = [row for row in known_formats() if row.method == found.method]
    row = next((row for row in rows if row.name == found.format), rows[0])
    problems += row.reader.family_misfits(found.target, text_config(config))
    is_known = None not in (sizes.hidden_size, sizes.vocab_size, sizes.num_hidden_layers)
    if found.reader is not None and is_known and not (problems or found.problems):
        with gathered(problems, found.reader.name):
            found.reader.check_target(sizes)
    return problems


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def sizes_in(config: Mapping[str, Any]) -> TargetSizes:
    """The sizes of the target with this `config.json`, by the names that transformers' configs have for them."""
    text = text_config(config)

    def first_of(*keys: str) -> int | None:
        values = map(text.get, keys)
        return next((value for value in values if isinstance(value, int) and 0 < value < 2**40), None)

    num_layers = first_of("num_hidden_layers", "n_layer", "num_layers")
    return TargetSizes("the target", first_of("hidden_size", "n_embd", "d_model"), first_of("vocab_size"), num_layers)
