"""The files of a checkpoint, in a folder or in a repository of the Hub: one view of both.

Sizes, JSON files and the headers of weight files are read without downloading weights. What a repository says is data
from a stranger: names of files cannot lead out of it, and what is parsed is limited in size.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import (
    HfApi,
    ModelInfo,
    constants,
    hf_hub_download,
    is_offline_mode,
    metadata_load,
    try_to_load_from_cache,
)

# The base of what its HTTP client raises, whichever client that is.
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError
from huggingface_hub.utils.sha import git_hash, sha_fileobj
from transformers.utils import logging

from ..errors import CheckpointAccessError, CheckpointFormatError
from ..settings import SpeculativeConfig
from ..threads import Recent, cached_property
from .access_errors import is_missing_file, is_outage, reason_of


logger = logging.get_logger(__name__)

_only_safetensors = ContextVar("only_safetensors", default=False)


@contextmanager
def only_safetensors() -> Iterator[None]:
    """Refuses pickled weights inside of the block: for drafters that nobody has named."""
    before = _only_safetensors.set(True)
    try:
        yield
    finally:
        _only_safetensors.reset(before)


def is_pickled(name: str) -> bool:
    """Tells the name of weights of `torch.save`, or of the index of such files."""
    return name.endswith((".pt", ".pth", ".bin", ".bin.index.json"))


# Bytes. Real configs have some thousand.
MAX_CONFIG_BYTES = 4 * 2**20

# Metadata of a card, which are read at about 100 kB a second.
_MAX_CARD_CHARACTERS = 128 * 2**10
_END_OF_METADATA = re.compile(r"[\r\n]---")

# Files that loaders read; logs and the like may change beside them.
_PARTS_OF_CHECKPOINTS = (".json", ".safetensors", ".bin", ".pt", ".model", ".txt", ".py")

# Large files are named by the SHA-256 of their content, others by that of git.
_SHA256, _GIT_SHA1 = 64, 40
_HEXADECIMAL = re.compile(r"[0-9a-f]+")


class ReadOfRepositories(Recent[Any]):
    """Remembers facts read from repositories of the Hub until the cache has another commit: every call asks again."""

    def __init__(self):
        super().__init__(most=256)

    def recall(self, fact: str, files: RepoFiles, read: Callable[[], Any]) -> Any:
        """What `read` tells about the checkpoint; of a repository it is asked once."""
        if files.folder is not None:
            return read()
        key = fact, constants.ENDPOINT, files.name, files.revision, files.subfolder
        commit = files.identity()
        known_commit, value = self.get(key, (None, None))
        if key not in self or None not in (known_commit, commit) and known_commit != commit:
            value, commit = read(), files.identity()
        if commit is not None or key not in self:
            # It may have been read before anything was downloaded.
            self.put(key, (commit, value))
        return value


read_of_repositories: ReadOfRepositories = ReadOfRepositories()


def file_identity(path: str | os.PathLike[str] | None) -> tuple[int, int] | None:
    """Size and time of the last change of a file; `None` where there is none."""
    try:
        stat = os.stat(path) if path is not None else None
    except (OSError, ValueError):
        return None
    # Numbers of files are not always the same on network file systems.
    return None if stat is None else (stat.st_size, stat.st_mtime_ns)


class RepoFiles:
    """The files of one checkpoint: of a folder, or of a repository on the Hub, relative to a `subfolder` of it.

    All methods raise `CheckpointAccessError` where the checkpoint cannot be reached, and `CheckpointFormatError` where
    a file is damaged, too large, or outside of the checkpoint.
    """

    def __init__(
        self,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        subfolder: str | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ):
        self.name: str = str(name)
        self.revision = revision
        self.subfolder: str = subfolder or ""
        self.cache_dir = cache_dir
        self.token = token
        # `None`: it is on the Hub.
        self.folder: Path | None = Path(self.name, self.subfolder) if os.path.isdir(self.name) else None
        self.is_offline: bool = local_files_only or is_offline_mode()
        # Once a file has come from a commit, all others come from the same.
        self._commit: str | None = None

    @classmethod
    def of(cls, config: SpeculativeConfig) -> RepoFiles:
        """Files of `config.model`."""
        names = ("revision", "subfolder", "cache_dir", "token", "local_files_only")
        return cls(config.model, **{name: getattr(config, name) for name in names})

    def identity(self) -> Hashable:
        """Tells without reading them whether the files have changed: equal as long as they have not.

        Of a folder the sizes and times of its files, at a few microseconds each; of a repository the commit in the
        cache. `None` where there is nothing to look at.
        """
        if self.folder is None:
            config = self.cached("config.json")
            return None if config is None else str(config.parent)
        try:
            names = sorted(name for name in os.listdir(self.folder) if name.endswith(_PARTS_OF_CHECKPOINTS))
        except OSError:
            return None
        return tuple((name, file_identity(self.folder / name)) for name in names)

    # What there is

    @cached_property
    def sizes(self) -> dict[str, int | None]:
        """Name and size in bytes of every file; of a folder those at its top, offline those in the cache."""
        if self.folder is not None:
            return _sizes_in(self.folder)
        info = self._info
        if info is None:
            return _sizes_in(self.path("config.json").parent)
        prefix = f"{self.subfolder.strip('/')}/" if self.subfolder else ""
        siblings = [file for file in info.siblings or () if file.rfilename.startswith(prefix)]
        return {file.rfilename.removeprefix(prefix): file.size for file in siblings}

    def __contains__(self, name: str) -> bool:
        return name in self.sizes or (self.folder is not None and (self.folder / name).is_file())

    def first_of(self, names: Sequence[str]) -> str | None:
        """The file with the first of some names or shell patterns; `None` where there is none that may be read."""
        at_top = [file for file in sorted(self.sizes) if "/" not in file]
        if _only_safetensors.get():
            at_top = [file for file in at_top if not is_pickled(file)]
        return next((file for name in names for file in at_top if fnmatchcase(file, name)), None)

    @cached_property
    def card(self) -> dict[str, Any]:
        """The metadata of the model card, empty where there is none that can be read."""
        if self.folder is None and self._info is not None:
            data = self._info.card_data
            return data.to_dict() if data is not None else {}
        if "README.md" not in self or (self.sizes["README.md"] or 0) > MAX_CONFIG_BYTES:
            return {}
        try:
            path = self.path("README.md")
            end = _END_OF_METADATA.search(path.read_text(encoding="utf-8", errors="replace").lstrip(), 3)
            if end and end.start() > _MAX_CARD_CHARACTERS:
                raise ValueError(f"its metadata have more than {_MAX_CARD_CHARACTERS} characters")
            metadata = metadata_load(path)
        except Exception as error:  # noqa: BLE001 - whatever a parser makes of a stranger's text
            logger.debug(f"The card of '{self.name}' cannot be read: {error!r}")
            return {}
        return metadata if isinstance(metadata, dict) else {}

    @cached_property
    def _info(self) -> ModelInfo | None:
        """Repository information from the Hub; `None` offline, or where only the cache can be reached."""
        if self.is_offline:
            return None
        api = HfApi(endpoint=constants.ENDPOINT, token=self.token)
        try:
            with self.explained("its list of files"):
                timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
                return api.model_info(self.name, revision=self.asked_revision, files_metadata=True, timeout=timeout)
        except CheckpointAccessError as error:
            if not is_outage(error.__cause__) or self.cached("config.json") is None:
                raise
            logger.warning(f"{error} What is in the cache is used.")
            self.is_offline = True
            return None

    def in_repository(self, name: str) -> str:
        """The name of a file from the top of the repository on."""
        return f"{self.subfolder.strip('/')}/{name}" if self.subfolder else name

    @property
    def asked_revision(self) -> str | None:
        return self._commit or self.revision

    def cached(self, name: str) -> Path | None:
        file = self.in_repository(name)
        try:
            path = try_to_load_from_cache(self.name, file, cache_dir=self.cache_dir, revision=self.asked_revision)
        except HFValidationError:
            return None
        return Path(path) if isinstance(path, str) else None

    # Contents

    def path(self, name: str) -> Path:
        """The local path of a file, which is downloaded if need be."""
        check_is_inside(self.name, name)
        if self.folder is None:
            return self._downloaded(name)
        path = self.folder / name
        if not path.is_file():
            if path.exists() and not path.is_dir():
                raise CheckpointFormatError(
                    f"'{self.name}': {name} is no ordinary file (a pipe, socket or device), so it is not opened. Pass "
                    "the folder of a checkpoint."
                )
            raise CheckpointAccessError(f"There is no {name} in '{self.folder}'. Pass the folder of a checkpoint.")
        if not path.resolve().is_relative_to(_outermost(self.folder.resolve())):
            raise CheckpointFormatError(
                f"'{self.name}': {name} is a link that leads out of the folder, to {path.resolve()}. Pass the folder "
                "where the files are, or copy them."
            )
        return path

    def read_json(self, name: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
        """The object in a JSON file of at most `max_bytes`."""
        # What is too large is not downloaded, if its size is known before.
        path, size = None, self.sizes.get(name) or 0
        if size <= max_bytes:
            path = self.path(name)
            size = path.stat().st_size
        if path is None or size > max_bytes:
            raise CheckpointFormatError(
                f"'{self.name}': {name} has {size} bytes, and such files have at most {max_bytes}. Pass an intact "
                "checkpoint."
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self.damaged(name, f"is no JSON: {error}", path) from error
        if not isinstance(content, dict):
            raise self.damaged(name, f"must hold an object, and holds a {type(content).__name__}", path)
        return content

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`."""
        try:
            return self.read_json("config.json")
        except CheckpointFormatError as error:
            if self.folder is None and isinstance(error, CheckpointAccessError) and not is_missing_file(error):
                raise
            reason = str(error).removeprefix(f"'{self.name}': ")
            raise type(error)(
                f"'{self.name}' has no readable config.json: {reason} Or name a `spec_method` that needs no "
                "checkpoint, such as 'ngram'."
            ) from error

    @property
    def is_partial(self) -> bool:
        """True where only a part of a repository may be here."""
        return self.folder is None and self._info is None

    def local(self, name: str) -> Path | None:
        """The path of a file that need not be downloaded."""
        if self.folder is not None or self.is_offline:
            return self.path(name)
        # The cache may have an older commit of a branch.
        return self.cached(name) if self._commit else None

    # Downloads

    def _downloaded(self, name: str) -> Path:
        cached = self.cached(name)
        with self.explained(name):
            path = self._download(name)
            if path != cached and not _is_intact(path):
                logger.warning(f"'{self.name}': {name} has arrived damaged. It is downloaded again.")
                path = self._download(name, force_download=True)
        if path != cached and not _is_intact(path):
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise CheckpointFormatError(
                f"'{self.name}': what comes as {name} has not the checksum that {constants.ENDPOINT} states, also the "
                "second time. It was removed from the cache. Try again later, or name another `revision`."
            )
        if "snapshots" in path.parts:
            # The cache has a folder for each commit.
            self._commit = self._commit or path.parts[path.parts.index("snapshots") + 1]
        return path

    def _download(self, name: str, **options) -> Path:
        path = hf_hub_download(
            self.name,
            self.in_repository(name),
            revision=self.asked_revision,
            cache_dir=self.cache_dir,
            token=self.token,
            local_files_only=self.is_offline,
            library_name="hf_specdec",
            **options,
        )
        return Path(path)

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """The errors of the Hub's client as errors of this package, which say what to do."""
        try:
            yield
        except (HTTPError, OSError, EntryNotFoundError, ValueError) as error:
            if isinstance(error, CheckpointFormatError):
                raise
            raise CheckpointAccessError(
                f"'{self.name}': {what} cannot be had: {reason_of(error, self.name, self.revision, self.is_offline)}"
            ) from error

    def damaged(self, name: str, what: str, path: Path | None = None) -> CheckpointFormatError:
        """The error that a file is not as it should be; of a download (`path`) it says how to have it again."""
        todo = "Pass an intact checkpoint."
        if self.folder is None:
            place = f"Delete {path.resolve()}, so that it is" if path is not None else "See whether it can be"
            todo = f"{place} downloaded again, or pass another checkpoint."
        return CheckpointFormatError(f"'{self.name}': {name} {what}. {todo}")


# Names


def check_is_inside(checkpoint: str, name: str) -> None:
    """Refuses names that lead out of a checkpoint."""
    path = PurePosixPath(name)
    is_plain = name and not path.is_absolute() and not {"..", ".", ""} & set(name.split("/"))
    if not is_plain or "\\" in name or ":" in name or "\0" in name:
        raise CheckpointFormatError(
            f"'{checkpoint}' names the file {name!r}, which is no plain name inside of it, so it is not read. Pass a "
            "checkpoint that you trust."
        )


def _outermost(folder: Path) -> Path:
    """Folder that links may lead to: the folder itself, or the cache for a snapshot in the Hub's cache."""
    for snapshots in folder.parents:
        if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
            return snapshots.parent.parent
    return folder


def _sizes_in(folder: Path) -> dict[str, int | None]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: path.stat().st_size for path in paths if path.is_file()}


# Downloads


def _is_intact(path: Path) -> bool:
    """Compares a file in the cache with the checksum that it is named by; without links it has no such name."""
    blob = path.resolve()
    if blob.parent.name != "blobs" or not _HEXADECIMAL.fullmatch(blob.name):
        return True
    if len(blob.name) == _GIT_SHA1:
        return git_hash(blob.read_bytes()) == blob.name
    if len(blob.name) == _SHA256:
        with blob.open("rb") as file:
            return sha_fileobj(file).hex() == blob.name
    return True
