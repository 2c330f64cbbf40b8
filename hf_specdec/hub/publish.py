"""Saving a drafter, and pushing it to the Hub: weights as they were published, settings, and a card.

What was loaded from a checkpoint is copied, byte for byte; a network that was made here is written in the format of
its method's first publishers. Both load in other engines as far as these know the method.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from huggingface_hub import HfApi, ModelCard, constants
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from transformers import AutoTokenizer, PreTrainedModel

from ..checkpoints.files import RepoFiles, read_of_repositories
from ..checkpoints.weights import shards_of
from ..errors import SpecConfigError
from ..method import drafting_method, is_language_model
from ..settings import CONFIG_NAME, SpeculativeConfig
from ..version import __version__
from .card import load_card, make_card, repository_name
from .detect import detect, target_in_card
from .inspect import repo_id_of
from .published import CARD_NAME, settings_to_publish


if TYPE_CHECKING:
    from ..speculator import Speculator

# Files that belong to weights: configs, the tokenizer, and the terms they come under.
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
_NOT_COMPANIONS = (CONFIG_NAME, "*.index.json", "trainer_state.json", "requirements.txt")


def save_speculator(
    speculator: Speculator,
    folder: str | os.PathLike[str],
    *,
    name: str | None = None,
    target: str | None = None,
    **card: Any,
) -> Path:
    """Saves weights, settings and a card to a folder, see [`Speculator.save_pretrained`]."""
    folder, config = Path(folder), speculator.config
    folder.mkdir(parents=True, exist_ok=True)
    _save_weights(speculator, folder)
    # Without what concerns this machine, and without where the drafter was.
    SpeculativeConfig.from_dict(settings_to_publish(config, with_place=False)).save_pretrained(folder)
    revision = None
    if target is None and (target := repo_id_of(speculator.target_name or "")) is not None:
        revision = speculator.target_revision
    origin = speculator.origin
    if origin.get("owner") is not None:
        # Nobody has named it, so that its users are told whose it is.
        card.setdefault("source", (origin["model"], origin["revision"]))
    made = card_of_folder(folder, config, name=name, target=target, target_revision=revision, **card)
    made.save(folder / CARD_NAME)
    return folder


def push_speculator(
    speculator: Speculator,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    **card: Any,
) -> str:
    """Uploads what `save_speculator` saves, see [`Speculator.push_to_hub`]."""
    api = _api(repo_id, token)
    with TemporaryDirectory() as folder:
        # Whether the repository can be written to is found out in time.
        with suppress(EntryNotFoundError, HfHubHTTPError):
            shutil.copyfile(api.hf_hub_download(repo_id, CARD_NAME, revision=revision), Path(folder, CARD_NAME))
        # What can be wrong here is found before anything is made there.
        save_speculator(speculator, folder, name=repo_id, **card)
        message = commit_message or f"Upload a drafter (method '{speculator.config.method}')"
        return _upload(api, repo_id, folder, private, message, revision=revision, create_pr=create_pr)


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    **card: Any,
) -> str:
    """Writes the card of a folder that holds a drafter, uploads all of it, and returns the address of the commit."""
    api = _api(repo_id, token)
    write_card(folder, name=repo_id, **card)
    return _upload(api, repo_id, folder, private, "Upload a drafter")


def _api(repo_id: str, token: str | bool | None) -> HfApi:
    """The Hub, once it is known that a repository can have this id."""
    repository_name(repo_id, Path())
    return HfApi(endpoint=constants.ENDPOINT, token=token, library_name="hf_specdec", library_version=__version__)


def _upload(
    api: HfApi, repo_id: str, folder: str | os.PathLike[str], private: bool | None, message: str, **options: Any
) -> str:
    """Makes the repository if needed, uploads a folder and returns the address of the commit."""
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, **options)
    # It has changed.
    read_of_repositories.forget(lambda key: repo_id in key)
    return commit.commit_url


def write_card(folder: str | os.PathLike[str], *, name: str | None = None, **card: Any) -> Path:
    """Writes the card of a folder that holds a drafter; one that is there keeps its text and other metadata."""
    folder = Path(folder)
    if not folder.is_dir():
        raise SpecConfigError(
            f"'{folder}' is no folder. Pass the folder of a drafter, such as one of save_pretrained()."
        )
    config = SpeculativeConfig.resolve(folder)
    if card.get("target") is None:
        card["target"] = target_in_card(RepoFiles(folder).card, is_language_model(config.method))
        if card["target"] is None and (folder / "config.json").is_file():
            card["target"] = detect(RepoFiles(folder)).target.name
    card_of_folder(folder, config, name=name, **card).save(folder / CARD_NAME)
    return folder / CARD_NAME


def card_of_folder(folder: Path, config: SpeculativeConfig, *, name: str | None = None, **options: Any) -> ModelCard:
    """The card of what is in a folder: its metadata made anew, its text kept if it has one."""
    length = detect(RepoFiles(folder)).num_draft_tokens if (folder / "config.json").is_file() else None
    name, existing = repository_name(name, folder), load_card(folder)
    return make_card(config, name=name, num_draft_tokens=length, existing=existing, **options)


def _save_weights(speculator: Speculator, folder: Path) -> None:
    config, network = speculator.config, speculator.generator_class.network(speculator.resources)
    if network is None:
        return
    files = None if config.model is None else RepoFiles.of(config)
    found = None if files is None else detect(files)
    # Of a whole model that has multi-token-prediction layers only these are wanted.
    if found and not (drafting_method(config.method).in_target_checkpoint and is_language_model(found.method)):
        # Its own format, and the small files beside it.
        names = {
            name
            for name in files.sizes
            if any(fnmatchcase(name, pattern) for pattern in _COMPANIONS)
            and not ("/" in name or any(fnmatchcase(name, pattern) for pattern in _NOT_COMPANIONS))
        }
        if config.trust_remote_code:
            names |= {name for name in files.sizes if name.endswith(".py")}
        if found.weight_file is not None:
            names |= {found.weight_file, *shards_of(files, found.weight_file)}
        for name in sorted(names):
            source, copy = files.path(name), folder / name
            if not (copy.exists() and copy.samefile(source)):
                shutil.copyfile(source, copy)
    elif isinstance(network, PreTrainedModel):
        network.save_pretrained(folder)
        # The tokenizer, if there is one, is for loading to compare it with the target's.
        if name := network.config.name_or_path:
            with suppress(OSError, ValueError, KeyError, ImportError, TypeError, AttributeError):
                AutoTokenizer.from_pretrained(name).save_pretrained(folder)
    elif hasattr(network, "save"):
        network.save(folder)
    else:
        raise SpecConfigError(
            f"A {type(network).__name__} cannot be saved: it has neither save() nor save_pretrained(). Save its "
            "weights yourself, and publish the folder with `hf-specdec publish`."
        )
