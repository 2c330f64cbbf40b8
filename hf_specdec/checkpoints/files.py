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
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils.sha import git_hash, sha_fileobj
from transformers.utils import logging

from ..errors import CheckpointAccessError, CheckpointFormatError
from ..settings import SpeculativeConfig
from ..threads import Recent, cached_property


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


# Facts read from repositories of the Hub, each after the commit that the cache had: every call asks for them again.
read_of_repositories: Recent[tuple[Hashable, Any]] = Recent(256)


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
        # Of names of files, from the top of the repository on.
        self.prefix: str = f"{subfolder.strip('/')}/" if subfolder else ""
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
        """Equal as long as the files have not changed, told without reading them; `None` where there is nothing."""
        if self.folder is None:
            # The commit in the cache.
            config = self.cached("config.json")
            return None if config is None else str(config.parent)
        try:
            # Numbers of files are not always the same on network file systems.
            parts = [file for file in os.scandir(self.folder) if file.name.endswith(_PARTS_OF_CHECKPOINTS)]
            stats = {file.name: file.stat() for file in parts if file.is_file()}
        except OSError:
            return None
        return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()))

    def recall(self, fact: str, read: Callable[[], Any]) -> Any:
        """What `read` tells about the checkpoint; of a repository it is asked once for every commit."""
        if self.folder is not None:
            return read()
        key = fact, constants.ENDPOINT, self.name, self.revision, self.subfolder
        commit, (known_commit, value) = self.identity(), read_of_repositories.get(key, (None, None))
        if key not in read_of_repositories or None not in (known_commit, commit) and known_commit != commit:
            value, commit = read(), self.identity()
        # It may have been read before anything was downloaded.
        read_of_repositories.put(key, (commit or known_commit, value))
        return value

    # What there is

    @cached_property
    def sizes(self) -> dict[str, int | None]:
        """Name and size in bytes of every file; of a folder those at its top, offline those in the cache."""
        if self.folder is None and self.info is not None:
            siblings = [file for file in self.info.siblings or () if file.rfilename.startswith(self.prefix)]
            return {file.rfilename.removeprefix(self.prefix): file.size for file in siblings}
        folder = self.path("config.json").parent if self.folder is None else self.folder
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        return {path.name: path.stat().st_size for path in paths if path.is_file()}

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
        if self.folder is None and self.info is not None:
            data = self.info.card_data
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
    def info(self) -> ModelInfo | None:
        """Repository information from the Hub; `None` offline, or where only the cache can be reached."""
        if self.is_offline:
            return None
        api = HfApi(endpoint=constants.ENDPOINT, token=self.token)
        try:
            with self.explained("its list of files"):
                timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
                return api.model_info(self.name, revision=self.asked_revision, files_metadata=True, timeout=timeout)
        except CheckpointAccessError as error:
            if not _is_outage(error.__cause__) or self.cached("config.json") is None:
                raise
            logger.warning(f"{error} What is in the cache is used.")
            self.is_offline = True
            return None

    @property
    def asked_revision(self) -> str | None:
        return self._commit or self.revision

    def cached(self, name: str) -> Path | None:
        where = {"cache_dir": self.cache_dir, "revision": self.asked_revision}
        try:
            path = try_to_load_from_cache(self.name, self.prefix + name, **where)
        except hub_errors.HFValidationError:
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
        # Of a snapshot in the Hub's cache, links may lead to all of that.
        folder = self.folder.resolve()
        snapshots = (one for one in folder.parents if one.name == "snapshots" and one.parent.name[:8] == "models--")
        outermost = next((one.parent.parent for one in snapshots), folder)
        if not path.resolve().is_relative_to(outermost):
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
            cause = error.__cause__
            is_missing = isinstance(cause, hub_errors.EntryNotFoundError) and not isinstance(
                cause, hub_errors.LocalEntryNotFoundError
            )
            if self.folder is None and isinstance(error, CheckpointAccessError) and not is_missing:
                raise
            reason = str(error).removeprefix(f"'{self.name}': ")
            raise type(error)(
                f"'{self.name}' has no readable config.json: {reason} Or name a `spec_method` that needs no "
                "checkpoint, such as 'ngram'."
            ) from error

    def local(self, name: str) -> Path | None:
        """The path of a file that need not be downloaded."""
        if self.folder is not None or self.is_offline:
            return self.path(name)
        # The cache may have an older commit of a branch.
        return self.cached(name) if self._commit else None

    # Downloads

    def _downloaded(self, name: str) -> Path:
        cached = self.cached(name)
        for is_again in (False, True):
            with self.explained(name):
                file = hf_hub_download(
                    self.name,
                    self.prefix + name,
                    revision=self.asked_revision,
                    cache_dir=self.cache_dir,
                    token=self.token,
                    local_files_only=self.is_offline,
                    library_name="hf_specdec",
                    force_download=is_again,
                )
            path = Path(file)
            if path == cached or _is_intact(path):
                break
            if not is_again:
                logger.warning(f"'{self.name}': {name} has arrived damaged. It is downloaded again.")
        else:
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

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """The errors of the Hub's client as errors of this package, which say what to do."""
        try:
            yield
        except CheckpointFormatError:
            raise
        except (hub_errors.HTTPError, OSError, hub_errors.EntryNotFoundError, ValueError) as error:
            raise CheckpointAccessError(f"'{self.name}': {what} cannot be had: {self._reason_of(error)}") from error

    def _reason_of(self, error: BaseException) -> str:
        """The reason of a failed request, and what to do about it."""
        page = f"{constants.ENDPOINT}/{self.name}"
        at_revision = f" at revision '{self.revision}'" if self.revision else ""
        login = "log in with `hf auth login` or pass `token`"
        if isinstance(error, hub_errors.GatedRepoError):
            return f"the repository is gated. Ask for access at {page}, then {login}."
        if isinstance(error, hub_errors.RepositoryNotFoundError) or _status(error) in (401, 403):
            return f"there is neither a local folder nor a repository of this name, or it is private: then {login}."
        if isinstance(error, hub_errors.RevisionNotFoundError):
            return f"the repository has no revision '{self.revision}'. Name a branch, tag or commit of {page}."
        if isinstance(error, hub_errors.HFValidationError):
            return "it is neither a local folder nor the id of a repository, such as 'user/name'. Correct the path."
        is_local = isinstance(error, hub_errors.LocalEntryNotFoundError)
        if is_local and self.is_offline:
            return (
                f"it is not in the cache{at_revision}, and nothing may be downloaded (`local_files_only`, or the "
                "environment variable HF_HUB_OFFLINE). Download it once while online."
            )
        if is_local or isinstance(error, hub_errors.OfflineModeIsEnabled):
            error = error.__cause__ or error
        if isinstance(error, hub_errors.EntryNotFoundError):
            return f"the repository has no such file{at_revision}. Pass the repository of a complete checkpoint."
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        line = line if line.endswith(".") else f"{line}."
        if not isinstance(error, hub_errors.HTTPError):
            return f"{line} Try again, or pass a local folder."
        status = _status(error)
        answer = f"answers with the status {status}" if status else f"cannot be reached ({line})"
        return f"{constants.ENDPOINT} {answer}. Try again later, or pass a local folder."

    def damaged(self, name: str, what: str, path: Path | None = None) -> CheckpointFormatError:
        """The error that a file is not as it should be; of a download (`path`) it says how to have it again."""
        todo = "Pass an intact checkpoint."
        if self.folder is None:
            place = f"Delete {path.resolve()}, so that it is" if path is not None else "See whether it can be"
            todo = f"{place} downloaded again, or pass another checkpoint."
        return CheckpointFormatError(f"'{self.name}': {name} {what}. {todo}")


def check_is_inside(checkpoint: str, name: str) -> None:
    """Refuses names that lead out of a checkpoint."""
    path = PurePosixPath(name)
    is_plain = name and not path.is_absolute() and not {"..", ".", ""} & set(name.split("/"))
    if not is_plain or "\\" in name or ":" in name or "\0" in name:
        raise CheckpointFormatError(
            f"'{checkpoint}' names the file {name!r}, which is no plain name inside of it, so it is not read. Pass a "
            "checkpoint that you trust."
        )


def _status(error: BaseException | None) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _is_outage(error: BaseException | None) -> bool:
    """Tells failures of the Hub or the network from wrong names and missing rights."""
    if isinstance(error, hub_errors.HfHubHTTPError):
        return (_status(error) or 0) >= 500
    # The first is the base of what the Hub's HTTP client raises, whichever client that is.
    outages = (hub_errors.HTTPError, hub_errors.OfflineModeIsEnabled, ConnectionError, TimeoutError)
    return isinstance(error, outages)


def _is_intact(path: Path) -> bool:
    """Compares a file in the cache with the checksum that it is named by; without links it has no such name."""
    blob = path.resolve()
    # Large files are named by the SHA-256 of their content, others by that of git.
    if blob.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{40}", blob.name):
        return git_hash(blob.read_bytes()) == blob.name
    if blob.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", blob.name):
        with blob.open("rb") as file:
            return sha_fileobj(file).hex() == blob.name
    return True
