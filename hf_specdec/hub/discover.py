"""Discovery: which drafters there are for a target, and which of them is the best choice.

Three places are searched, in this order:

    target   the target's own checkpoint, for multi-token-prediction layers
    entry    `speculative` in the target's generation config or in its model card
    hub      the repositories whose card says that they are based on the target: those of the Hub, and offline those in
             its local cache

followed by the methods that need no weights. A search may be for the drafters of one method only. Only configs, cards
and the headers of weights are read. A place that cannot be reached, or that is too slow, offers less: a search never
fails. Nobody has named what is found here, so it is taken only where nothing of it has to be trusted: no pickled
weights, no code, no more bytes than the target has, and of allowed owners.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from huggingface_hub import CachedRepoInfo, ModelInfo, constants, get_session, is_offline_mode, scan_cache_dir
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
from transformers import CONFIG_MAPPING
from transformers.utils import logging

from ..arguments import is_off
from ..checkpoints.files import MAX_CONFIG_BYTES, RepoFiles
from ..checkpoints.weights import shards_of
from ..errors import CheckpointFormatError, SpecConfigError
from ..method import (
    NO_DRAFTS,
    built_in_methods,
    drafting_method,
    is_language_model,
    methods,
    names_without_weights,
    own_layers_method,
    parts_of,
    preferred_methods,
)
from ..settings import AUTO, SpeculativeConfig
from ..threads import cached_property
from .candidate import FOUND, Candidate, rank, without
from .detect import Detection, detect, known_formats
from .inspect import is_repo_id, is_same_checkpoint, own_layer_problems, repo_id_of, sizes_in, target_problems
from .published import CARD_KEY, CARD_NAME, read_entry, saved_settings, target_entry
from .trust import PLACE_SETTINGS, one_line, owner_of, texts_in, trusted_owners_of, why_not_unasked


logger = logging.get_logger(__name__)

# After so many seconds nothing more is begun in a place; a single request has the time that the Hub's client gives it.
SECONDS_PER_PLACE = 15.0

# Repositories of the Hub that are looked into.
DEFAULT_LIMIT = 8

# Each token of a draft model costs about this share of a target's; beyond the last one it cannot pay.
_MOST_DRAFT_WORK = 1 / 4

# A drafter that nobody has named has at most this share of the target's bytes, or so many.
_MOST_SHARE = 1 / 4
_LEAST_BOUND = 2**20

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")

# Files that come along with a whole model.
_BESIDE_WEIGHTS = (".json", ".txt", ".model", ".jinja")

# Tags of drafters' cards. The Hub is asked for the first ones; a query cannot say "or".
_TAG = "speculative-decoding"
_TAGS_ASKED_FOR = (_TAG, *(method.name for method in preferred_methods()[:2]))
_TAGS = frozenset(
    [_TAG, "speculator", "speculators", *(tag for method in built_in_methods() for tag in (method.name, *method.tags))]
)

# Most repositories based on a target are fine-tunes; the most downloaded come first.
_MOST_LISTED = 100
# Each costs a request.
_MOST_OWNERS = 4
_LISTED_PROPERTIES = ["config", "downloads", "sha", "tags"]


@dataclass(frozen=True)
class Target:
    """A target's name, config, published entry and size."""

    name: str  # repo id or folder; empty if it was not loaded from one
    config: Mapping[str, Any]  # its `config.json`
    revision: str | None = None  # branch, tag or commit of its repository
    entry: Any = None  # `speculative` of its generation config
    num_bytes: int | None = None  # of its weights

    @classmethod
    def of_model(cls, model: Any) -> Target:
        """A loaded model."""
        source = model.config
        return cls(
            str(getattr(source, "_name_or_path", None) or ""),
            source.to_dict(),
            getattr(source, "_commit_hash", None),
            getattr(getattr(model, "generation_config", None), "speculative", None),
            sum(weight.numel() * weight.element_size() for weight in model.parameters()),
        )

    @classmethod
    def of_files(cls, files: RepoFiles) -> Target:
        """A repository or folder."""
        settings = files.read_json("generation_config.json") if "generation_config.json" in files else {}
        sizes = [size for file, size in files.sizes.items() if file.endswith(WEIGHTS) and size]
        return cls(files.name, files.config, files.revision, settings.get("speculative"), sum(sizes) or None)

    @property
    def repo_id(self) -> str | None:
        """The target's id on the Hub, as far as its name tells."""
        return repo_id_of(self.name)

    @property
    def most_draft_bytes(self) -> int | None:
        """The most that the weights of a drafter which nobody has named may have; `None`: nothing tells."""
        if self.num_bytes is None:
            return None
        # Of a target that is spread over processes each knows its own part; its config knows the whole.
        sizes = sizes_in(self.config)
        by_config = 2 * (12 * work(self.config) + 2 * (sizes.vocab_size or 0) * (sizes.hidden_size or 0))
        return max(int(max(self.num_bytes, by_config) * _MOST_SHARE), _LEAST_BOUND)


def work(config: Mapping[str, Any]) -> int:
    """Work of a model per token, up to factors that most models have in common."""
    sizes = sizes_in(config)
    return (sizes.num_hidden_layers or 0) * (sizes.hidden_size or 0) ** 2


class Search:
    """A search for the drafters of a target that settings allow: with `method` for those of one method."""

    def __init__(self, target: Target, config: SpeculativeConfig | None = None, limit: int = DEFAULT_LIMIT):
        self.target: Target = target
        self.config: SpeculativeConfig = config or SpeculativeConfig(AUTO)
        self.limit: int = limit
        self.method: str | None = None if self.config.method == AUTO else parts_of(self.config.method)[-1]
        self.notes: list[str] = []
        self.rejected: list[str] = []
        self.owners: dict[str, str] = trusted_owners_of(target.repo_id, self.config.trusted_owners)
        self._seen: set[tuple[Any, ...]] = set()

    def files(self, name: str, **options: Any) -> RepoFiles:
        """Files of a checkpoint, reached as the settings say; `options` are what else [`RepoFiles`] takes."""
        access = {key: getattr(self.config, key) for key in ("token", "cache_dir", "local_files_only")}
        return RepoFiles(name, **{**access, **options})

    def usable(self) -> Iterator[Candidate]:
        """Yields usable drafters in the order of `rank`, and notes why the others are not.

        A place is searched once those before it are exhausted.
        """
        others: list[Candidate] = []
        for place in _SEARCHES:
            fitting = []
            # Who names a method wants no other.
            for candidate in self._found_in(place) if self.method is None or place != "none" else ():
                problems = candidate.problems
                if not problems and self.method not in (None, parts_of(candidate.method)[-1]):
                    problems = (f"It is for method='{candidate.method}'.",)
                if problems:
                    self.rejected.append(f"{candidate.title}, {candidate.reason}: {' '.join(problems)}")
                else:
                    fitting.append(candidate)
            yield from sorted((candidate for candidate in fitting if candidate.is_trusted), key=rank)
            others += [candidate for candidate in fitting if not candidate.is_trusted]
        yield from sorted(others, key=rank)

    def all(self) -> list[Candidate]:
        """All of them in the order of `rank`, with those that cannot be used."""
        return sorted((candidate for place in _SEARCHES for candidate in self._found_in(place)), key=rank)

    def _found_in(self, place: str) -> list[Candidate]:
        """Drafters that a place offers, as far as it can be reached in time."""
        found: list[Candidate] = []
        began = monotonic()
        try:
            for candidate in _SEARCHES[place](self):
                key = (candidate.method, candidate.model, candidate.settings.get("subfolder"))
                # What always works is never left out, whatever has failed before.
                if key not in self._seen or candidate.place == "none":
                    self._seen.add(key)
                    found.append(candidate)
                if monotonic() - began > SECONDS_PER_PLACE:
                    self.notes.append(f"{FOUND[place]}: it is slow, and was not searched to the end")
                    break
        except Exception as error:
            # Texts of strangers and answers of servers may raise anything.
            self.notes.append(f"{FOUND[place]}: {one_line(error)}")
            logger.debug(f"Discovery {self.notes[-1]}", exc_info=True)
        return found

    @cached_property
    def target_files(self) -> RepoFiles:
        """Files of the target."""
        return self.files(self.target.name, revision=self.target.revision)

    @property
    def is_offline(self) -> bool:
        """Nothing can be asked of the Hub."""
        is_offline = self.config.local_files_only or is_offline_mode()
        return is_offline or (bool(self.target.name) and self.target_files.is_offline)

    def examined(self, name: str, place: str, *, downloads: int = 0, **location: Any) -> Candidate:
        """A checkpoint that is said to be made for the target, as a candidate; `location`: revision, subfolder."""
        location = {key: value for key, value in location.items() if value}
        is_trusted = place == "entry" or owner_of(name).lower() in self.owners
        candidate = Candidate(None, name, place, location, downloads=downloads, is_trusted=is_trusted)
        is_folder = os.path.isdir(name)
        try:
            # What the call or the environment rules out is refused before anything of it is read.
            if is_folder and place != "entry":
                raise SpecConfigError("A folder here has the same name: name the one that you mean as `model`.")
            if not is_folder and (reason := why_not_unasked(name, self.config.trusted_owners)) is not None:
                raise SpecConfigError(reason)
            # Of one in the cache nothing is asked of the Hub.
            is_local = self.config.local_files_only or place == "cache"
            files = self.files(name, local_files_only=is_local, **location)
            found = detect(files, reads_pickles=False)
            problems = [*found.problems, *target_problems(found, self.target.config)]
            problems += self._reasons_not_to_choose(files, found, candidate)
            settings, left_out = _own_settings(files, found.method)
            return replace(
                candidate,
                method=found.method,
                settings={**settings, **location},
                format=found.format,
                num_bytes=found.num_bytes,
                num_draft_tokens=found.num_draft_tokens,
                problems=tuple(one_line(problem, 500) for problem in problems),
                left_out=left_out,
            )
        except Exception as error:  # noqa: BLE001 - configs and weights of strangers may raise anything
            return replace(candidate, problems=(one_line(error, 500),))

    def _reasons_not_to_choose(self, files: RepoFiles, found: Detection, candidate: Candidate) -> Iterator[str]:
        """Reasons against choosing a loadable drafter that nobody has named."""
        if found.is_pickled:
            yield "Its weights are pickled: name it as `model` if you trust it."
        most, is_whole_model = self.target.most_draft_bytes, is_language_model(found.method)
        if most is not None and found.weight_file is not None:
            names = shards_of(files, found.weight_file)
            if is_whole_model:
                names += [name for name in files.sizes if "/" not in name and name.endswith(_BESIDE_WEIGHTS)]
            sizes = [files.sizes.get(name) for name in names]
            if None in sizes:
                yield "The size of its weights is not known."
            elif sum(sizes) > most:
                yield (
                    f"It has {sum(sizes) / 1e6:.0f} MB, and what nobody has named may have {most / 1e6:.0f} MB for "
                    "this target: name it as `model` if that is meant."
                )
        if not is_whole_model:
            return
        if "auto_map" in files.config and files.config.get("model_type") not in CONFIG_MAPPING:
            yield "It needs code from its repository: name it as `model` with `trust_remote_code` if you trust it."
        share = work(files.config) / (work(self.target.config) or 1)
        # The publisher of a target may know what pays for it.
        if share > _MOST_DRAFT_WORK and candidate.place != "entry":
            yield (
                f"It does {share:.2f} of the target's work for each token, and drafting pays with at most "
                f"{_MOST_DRAFT_WORK:g}."
            )

    def from_entry(self, entry: Any) -> list[Candidate]:
        """The drafter that an entry of the target names, with the settings that it states; empty if it names none."""
        if entry is None or is_off(entry):
            return []
        named = Candidate(None, place="entry", is_trusted=True)
        try:
            config, left_out = read_entry(entry, _ENTRY, with_place=True)
            if config.method in (AUTO, NO_DRAFTS):
                return []
            named = replace(named, method=config.method, model=config.model, left_out=left_out)
            if config.model is None:
                drafting = drafting_method(config.method)
                if drafting is not None and drafting.weights is not None and not drafting.in_target_checkpoint:
                    raise SpecConfigError(f"{_ENTRY} names the method '{config.method}' and no model for it.")
                return [replace(named, settings=_settings_of(config))]
            if config.subfolder is None and is_same_checkpoint(config.model, self.target.name):
                raise SpecConfigError(
                    f"{_ENTRY} names the target itself. Its own layers are method='{own_layers_method().name}'."
                )
            location = {"revision": config.revision, "subfolder": config.subfolder}
            found = self.examined(self._path_of(config.model), "entry", **location)
            if found.method is None:
                return [found]
            if config.method is not None and parts_of(config.method)[-1] != found.method:
                raise SpecConfigError(f"{_ENTRY} names the method '{config.method}', and it is {found.method}'s.")
            # With the method it is known what its settings are.
            method = config.method or found.method
            settings = _settings_of(config.replace(method=method))
            left_out = tuple(dict.fromkeys((*left_out, *found.left_out)))
            return [replace(found, method=method, settings={**found.settings, **settings}, left_out=left_out)]
        except SpecConfigError as error:
            return [replace(named, problems=(one_line(error, 500),))]

    def _path_of(self, name: str) -> str:
        """A model that an entry names: a repository, or a folder inside of the target's."""
        folder = Path(self.target.name).resolve()
        if self.target.name and folder.is_dir() and (folder / name).is_dir():
            inside = (folder / name).resolve()
            if inside != folder and inside.is_relative_to(folder):
                return os.path.join(self.target.name, name)
        if is_repo_id(name) and not os.path.isdir(name):
            return name
        raise SpecConfigError(
            f"{_ENTRY} names the model '{one_line(name)}', which is no id of a repository and no folder inside of the "
            "target's. Name folders of this machine in the call."
        )

    def keep_card(self, candidate: Candidate) -> None:
        """Downloads the card of a drafter that was taken from the Hub: offline it is found by that."""
        if candidate.place == "hub":
            with suppress(CheckpointFormatError, OSError):
                files = self.files(candidate.model, revision=candidate.settings.get("revision"))
                if (files.sizes.get(CARD_NAME) or MAX_CONFIG_BYTES) < MAX_CONFIG_BYTES:
                    files.path(CARD_NAME)


_ENTRY = "The target's entry `speculative`"


def _settings_of(config: SpeculativeConfig) -> dict[str, Any]:
    """Settings of a drafter without method and model."""
    return without(config.to_dict(), "method", "model")


def _own_settings(files: RepoFiles, method: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settings that a drafter was saved with, beside its weights or in its card, and the names of those left out."""
    saved = saved_settings(files) or files.card.get(CARD_KEY)
    if not isinstance(saved, Mapping):
        return {}, ()
    # A card says for which target it is.
    saved = {**without(saved, "target"), "method": method}
    config, left_out = read_entry(saved, f"The settings of '{files.name}'")
    return _settings_of(config), tuple(name for name in left_out if name not in PLACE_SETTINGS)


def discover_drafters(
    target: str | os.PathLike[str],
    *,
    revision: str | None = None,
    limit: int = DEFAULT_LIMIT,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> list[Candidate]:
    """The drafters for a target, the best first; those that cannot be used stand at the end, with the reason.

    Args:
        target (`str` or `os.PathLike`): Repo id or folder of the target.
        revision (`str`, *optional*): Branch, tag or commit of its repository.
        limit (`int`): Repositories of the Hub that are looked into.
        token, cache_dir, local_files_only: As in [`SpeculativeConfig`].

    Raises:
        CheckpointFormatError: The target has no readable `config.json`.
    """
    access = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
    return search_for(target, revision, limit, **access).all()


def search_for(
    name: str | os.PathLike[str], revision: str | None = None, limit: int = DEFAULT_LIMIT, **access: Any
) -> Search:
    """A search for the drafters of a target that is not loaded; `access` is `token`, `cache_dir` and the like."""
    files = RepoFiles(name, revision=revision, **access)
    return Search(Target.of_files(files), SpeculativeConfig(AUTO, **access), limit)


# ---------------------------------------------------------------------------------------------------------- the places


def _in_target(search: Search) -> Iterator[Candidate]:
    """Multi-token-prediction layers in the target's checkpoint."""
    target = search.target
    own = own_layers_method().name
    if search.method == own:
        # Who asks for them hears from their loader what is wrong with them.
        yield Candidate(own, None, "target", is_trusted=True)
    elif target.name:
        found = detect(search.target_files, reads_pickles=False)
        if found.mtp_layers:
            length = found.mtp_layers if found.mtp_layers > 1 else None
            problems = tuple(own_layer_problems(found, target.config))
            about = {"format": found.format, "num_draft_tokens": length, "problems": problems}
            yield Candidate(own, None, "target", is_trusted=True, **about)


def _named_by_target(search: Search) -> Iterator[Candidate]:
    """The drafters of the entries `speculative` of the target's generation config and of its card."""
    yield from search.from_entry(search.target.entry)
    if search.target.name:
        yield from search.from_entry(target_entry(search.target_files.card))


def _in_cache(search: Search) -> Iterator[Candidate]:
    """Offline: repositories in the local cache that say they are based on the target, and are drafters."""
    if search.target.repo_id is None or not search.is_offline:
        return
    cache = Path(search.config.cache_dir or constants.HF_HUB_CACHE)
    repositories = scan_cache_dir(cache).repos if cache.is_dir() else ()
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        name, commit = repository.repo_id, _commit_with_weights(repository)
        if repository.repo_type != "model" or commit is None or not is_repo_id(name):
            continue
        files = search.files(name, revision=commit, local_files_only=True)
        with suppress(CheckpointFormatError):
            bases = {base.lower() for base in texts_in(files.card.get("base_model"))}
            if search.target.repo_id.lower() in bases and _is_drafter(texts_in(files.card.get("tags")), files.config):
                yield search.examined(name, "cache", revision=commit)


def _commit_with_weights(repository: CachedRepoInfo) -> str | None:
    """The commit of which the cache has weights: that of the main branch, else the latest."""
    found = {revision: {file.file_name for file in revision.files} for revision in repository.revisions}
    whole = [
        one for one, names in found.items() if "config.json" in names and any(name.endswith(WEIGHTS) for name in names)
    ]
    latest = max(whole, key=lambda revision: ("main" in revision.refs, revision.last_modified), default=None)
    return None if latest is None else latest.commit_hash


def _on_hub(search: Search) -> Iterator[Candidate]:
    """Repositories of the Hub that say they are based on the target, and by tags or config are drafters."""
    base_model = search.target.repo_id
    if search.is_offline or base_model is None:
        search.notes += [f"{FOUND['hub']}: it is offline"] if search.is_offline else []
        return
    found: dict[str, ModelInfo] = {}
    # However many others there are, those of trusted owners are among them.
    queries = [([], owner) for owner in list(search.owners.values())[:_MOST_OWNERS]]
    queries += [([tag], None) for tag in _TAGS_ASKED_FOR]
    for tags, owner in [*queries, ([], None)]:
        for info in _listed([f"base_model:{base_model}", *tags], owner, search.config.token):
            is_quantised = f"base_model:quantized:{base_model}" in (info.tags or ())
            if is_repo_id(info.id) and not is_quantised and _is_drafter(info.tags or (), info.config or {}):
                found[info.id] = info

    def order(info: ModelInfo) -> tuple[bool, bool, int]:
        # The most downloaded first; last those not allowed.
        is_excluded = why_not_unasked(info.id, search.config.trusted_owners) is not None
        return is_excluded, owner_of(info.id).lower() not in search.owners, -(info.downloads or 0)

    for info in sorted(found.values(), key=order)[: search.limit]:
        yield search.examined(info.id, "hub", downloads=info.downloads or 0, revision=info.sha)


def _listed(tags: list[str], owner: str | None, token: str | bool | None) -> list[ModelInfo]:
    """Repositories with these tags. Once and with a limit of time, where `HfApi.list_models` waits and tries again."""
    query = {"filter": tags, "sort": "downloads", "limit": _MOST_LISTED, "expand": _LISTED_PROPERTIES}
    response = get_session().get(
        f"{constants.ENDPOINT}/api/models",
        params=query if owner is None else {**query, "author": owner},
        headers=build_hf_headers(token=token),
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
    )
    hf_raise_for_status(response)
    return [ModelInfo(**item) for item in response.json()]


def _is_drafter(tags: Iterable[str], config: Mapping[str, Any]) -> bool:
    """Tells a drafter by the tags of its card, or by its config."""
    return not _TAGS.isdisjoint(tags) or any(row.is_marked(config) for row in known_formats() if not row.is_hint)


def _without_weights(search: Search) -> Iterator[Candidate]:
    """Methods that work with every target. Their gain differs from text to text, and their lengths adapt to it."""
    for name in names_without_weights():
        packages = [package for part in parts_of(name) if (package := methods()[part].package)]
        missing = [package for package in packages if find_spec(package.replace("-", "_")) is None]
        yield Candidate(name, problems=tuple(f"The package {package} is not installed." for package in missing))


_SEARCHES: dict[str, Callable[[Search], Iterator[Candidate]]] = {
    "target": _in_target,
    "entry": _named_by_target,
    "cache": _in_cache,
    "hub": _on_hub,
    "none": _without_weights,
}
