"""Errors of the Hub's client, told to people."""

from __future__ import annotations

from huggingface_hub import constants

# The base of what its HTTP client raises, whichever client that is.
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import CheckpointAccessError


def reason_of(error: Exception, name: str, revision: str | None, is_offline: bool) -> str:
    """The reason of a failed request, and what to do about it."""
    page = f"{constants.ENDPOINT}/{name}"
    at_revision = f" at revision '{revision}'" if revision else ""
    login = "log in with `hf auth login` or pass `token`"
    if isinstance(error, GatedRepoError):
        return f"the repository is gated. Ask for access at {page}, then {login}."
    if isinstance(error, RepositoryNotFoundError) or _status(error) in (401, 403):
        return f"there is neither a local folder nor a repository of this name, or it is private: then {login}."
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision '{revision}'. Name a branch, tag or commit of {page}."
    if isinstance(error, HFValidationError):
        return "it is neither a local folder nor the id of a repository, such as 'user/name'. Correct the path."
    if isinstance(error, LocalEntryNotFoundError) and is_offline:
        return (
            f"it is not in the cache{at_revision}, and nothing may be downloaded (`local_files_only`, or the "
            "environment variable HF_HUB_OFFLINE). Download it once while online."
        )
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        error = error.__cause__ or error
    if isinstance(error, EntryNotFoundError):
        return f"the repository has no such file{at_revision}. Pass the repository of a complete checkpoint."
    if isinstance(error, HTTPError):
        status = _status(error)
        answer = f"answers with the status {status}" if status else f"cannot be reached ({_first_line(error)})"
        return f"{constants.ENDPOINT} {answer}. Try again later, or pass a local folder."
    return f"{_first_line(error)} Try again, or pass a local folder."


def _status(error: Exception) -> int | None:
    """Status code of an answer of the Hub."""
    return getattr(getattr(error, "response", None), "status_code", None)


def is_outage(error: BaseException | None) -> bool:
    """Tells failures of the Hub or the network from wrong names and missing rights."""
    if isinstance(error, HfHubHTTPError):
        return (_status(error) or 0) >= 500
    return isinstance(error, (HTTPError, OfflineModeIsEnabled, ConnectionError, TimeoutError))


def is_missing_file(error: CheckpointAccessError) -> bool:
    """Tells a missing file of a repository that exists."""
    cause = error.__cause__
    return isinstance(cause, EntryNotFoundError) and not isinstance(cause, LocalEntryNotFoundError)


def _first_line(error: Exception) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if line.endswith(".") else f"{line}."
