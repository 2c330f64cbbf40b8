"""Saving a drafter, and pushing it to the Hub: weights as they were published, settings, and a card.

What was loaded from a checkpoint is copied, byte for byte; a network that was made here is written in the format of
its method's first publishers. Both load in other engines as far as these know the method.
"""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from ..checkpoints.files import RepoFiles
from ..errors import SpecConfigError
from ..method import drafting_method, is_language_model
from ..settings import CONFIG_NAME, SpeculativeConfig
from ..version import __version__
from .card import CARD_NAME, load_card, make_card, repository_name
from .detect import detect, forget_method
from .published import forget_saved, settings_to_publish
from .target import Target


logger = logging.get_logger(__name__)

# What lies beside weights and belongs to them: configs, the tokenizer, and the terms they come under.
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
_NOT_COMPANIONS = (CONFIG_NAME, "*.index.json", "trainer_state.json", "requirements.txt")


class Drafter(Protocol):
    """The parts of a [`Speculator`] that are published."""

    config: SpeculativeConfig
    generator_class: type
    resources: Any
    origin: dict[str, str | None]
    target_name: str | None
    target_revision: str | None


def save_speculator(
    speculator: Drafter, folder: str | os.PathLike, *, name: str | None = None, target: str | None = None, **card
) -> Path:
    """Saves weights, settings and a card to a folder that loads again as `spec_model`.

    Args:
        speculator (`Speculator`): The drafter.
        folder (`str` or `os.PathLike`): Made if needed. A card that is there keeps its text.
        name (`str`, *optional*): Repo id for the card; `None`: the name of the folder.
        target (`str`, *optional*): Repo id of the target for the card; `None`: where the target was loaded from.
        card: `license`, `tags`, `base_model_relation`, `report` of [`make_card`].

    Returns:
        `Path` of the folder.

    Raises:
        SpecConfigError: The network has no format to be written in, or the card cannot be made.
        CheckpointFormatError: The checkpoint that it was loaded from is damaged or gone.
    """
    folder, config = Path(folder), speculator.config
    folder.mkdir(parents=True, exist_ok=True)
    _save_weights(speculator, folder)
    save_settings(config, folder)
    target, revision = _target_of(speculator) if target is None else (target, None)
    origin = speculator.origin
    if origin.get("owner") is not None:
        # Nobody has named it, so that its users are told whose it is.
        card.setdefault("source", (origin["model"], origin["revision"]))
    made = card_of_folder(folder, config, name=name, target=target, target_revision=revision, **card)
    made.save(folder / CARD_NAME)
    return folder


def push_speculator(
    speculator: Drafter,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    **card,
) -> str:
    """Uploads what `save_speculator` saves.

    Args:
        speculator (`Speculator`): The drafter.
        repo_id (`str`): The repository, made if needed. A card that it has keeps its text.
        private (`bool`, *optional*): Of a new repository; `None`: the default of the account.
        token (`str` or `bool`, *optional*): Access token; `None`: that of the login.
        revision (`str`, *optional*): Branch, which must be there; `None`: main.
        create_pr (`bool`, defaults to `False`): Open a pull request instead of writing to the branch.
        commit_message (`str`, *optional*): Title of the commit.
        card: `target`, `license`, `tags`, `base_model_relation`, `report`, see `save_speculator`.

    Returns:
        `str`: The address of the commit.

    Raises:
        SpecConfigError: As `save_speculator`, or `repo_id` is no valid id.
        huggingface_hub.errors.HfHubHTTPError: The Hub refuses: no login, no rights.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise SpecConfigError(f"'{repo_id}' cannot be the id of a repository: {error}") from error
    api = HfApi(endpoint=constants.ENDPOINT, token=token, library_name="hf_specdec", library_version=__version__)
    with TemporaryDirectory() as folder:
        existing = _card_on_hub(api, repo_id, revision)
        if existing is not None:
            shutil.copyfile(existing, Path(folder, CARD_NAME))
        # What can be wrong here is found before anything is made there.
        save_speculator(speculator, folder, name=repo_id, **card)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message or f"Upload a drafter (method '{speculator.config.method}')",
        )
    forget_method(repo_id)
    forget_saved(repo_id)
    return commit.commit_url


def save_settings(config: SpeculativeConfig, folder: Path) -> None:
    """Writes `speculation_config.json`, without what concerns this machine, and without where the drafter was."""
    SpeculativeConfig.from_dict(settings_to_publish(config, with_place=False)).save_pretrained(folder)


def card_of_folder(folder: Path, config: SpeculativeConfig, *, name: str | None = None, **options) -> ModelCard:
    """The card of what is in a folder: its metadata made anew, its text kept if it has one.

    Arguments are those of [`make_card`]; `name` may be left out for that of the folder.
    """
    name = repository_name(name, folder)
    num_draft_tokens, existing = _num_draft_tokens(folder), load_card(folder)
    return make_card(config, name=name, num_draft_tokens=num_draft_tokens, existing=existing, **options)


def _num_draft_tokens(folder: Path) -> int | None:
    """Draft length stated by the checkpoint in a folder."""
    return detect(RepoFiles(folder)).num_draft_tokens if (folder / "config.json").is_file() else None


def _target_of(speculator: Drafter) -> tuple[str | None, str | None]:
    """Repo id and commit of the target, as far as they are known."""
    target = Target(speculator.target_name or "", {})
    if target.repo_id is None:
        return None, None
    return target.repo_id, speculator.target_revision


def _card_on_hub(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    try:
        return api.hf_hub_download(repo_id, CARD_NAME, revision=revision)
    except (EntryNotFoundError, HfHubHTTPError):
        # Whether the repository can be written to is found out in time.
        return None


# ----------------------------------------------------------------------------------------------------------- weights


def _save_weights(speculator: Drafter, folder: Path) -> None:
    config, network = speculator.config, speculator.generator_class.network(speculator.resources)
    if network is None:
        return
    files = None if config.model is None else RepoFiles.of(config)
    # Of a whole model that has multi-token-prediction layers only these are wanted.
    if files is not None and not (
        drafting_method(config.method).in_target_checkpoint and is_language_model(detect(files).method)
    ):
        _copy_checkpoint(files, folder, with_code=config.trust_remote_code)
    elif isinstance(network, PreTrainedModel):
        network.save_pretrained(folder)
        _save_tokenizer(network, folder)
    elif hasattr(network, "save"):
        network.save(folder)
    else:
        raise SpecConfigError(
            f"A {type(network).__name__} cannot be saved: it has neither save() nor save_pretrained(). Save its "
            "weights yourself, and make the card with `hf-specdec card`."
        )


def _copy_checkpoint(files: RepoFiles, folder: Path, with_code: bool) -> None:
    """The weights that are loaded, in their own format, and the small files beside them."""
    found = detect(files)
    names = {name for name in files.sizes if _is_companion(name) or (with_code and name.endswith(".py"))}
    if found.weight_file is not None:
        names |= {found.weight_file, *files.parts(found.weight_file)}
    for name in sorted(names):
        source, copy = files.path(name), folder / name
        if not (copy.exists() and copy.samefile(source)):
            shutil.copyfile(source, copy)


def _is_companion(name: str) -> bool:
    if "/" in name or any(fnmatchcase(name, pattern) for pattern in _NOT_COMPANIONS):
        return False
    return any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)


def _save_tokenizer(model: PreTrainedModel, folder: Path) -> None:
    """Saves the tokenizer of the model's checkpoint, if any, for loading to compare it with the target's."""
    name = model.config.name_or_path
    if not name:
        return
    try:
        AutoTokenizer.from_pretrained(name).save_pretrained(folder)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        logger.debug(f"No tokenizer for '{name}': {error}")
