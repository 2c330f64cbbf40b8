"""A Hub on the loopback interface: real HTTP, and as much of the Hub's protocol as loading and publishing need.

Model info, search, downloads (ranges, etags, large files behind a redirect to another origin), gated and private
repositories, uploads (regular and LFS). Every request is logged, and faults can be put in its way.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml


USER, TOKEN, STRANGERS_TOKEN = "user", "hf_loopback", "hf_stranger"
_USERS = {TOKEN: USER, STRANGERS_TOKEN: "stranger"}

_LARGE = (".safetensors", ".bin", ".pt")


@dataclass(frozen=True)
class Blob:
    """One version of a file. Large ones are named by their SHA-256, others as in git."""

    data: bytes
    is_large: bool

    @functools.cached_property
    def etag(self) -> str:
        git = hashlib.sha1(b"blob %d\0" % len(self.data) + self.data)
        return (hashlib.sha256(self.data) if self.is_large else git).hexdigest()


@dataclass
class Repo:
    """A model repository: files by commit, commits by branch."""

    id: str
    downloads: int = 0
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, Blob], branch: str = "main") -> str:
        """Makes `files` the content of a branch; the new commit's hash."""
        listing = [f"{path} {blob.etag}" for path, blob in sorted(files.items())]
        sha = hashlib.sha1("\n".join([self.id, self.branches.get(branch, ""), *listing]).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def info(self, sha: str, with_sizes: bool = False) -> dict[str, Any]:
        """What the API says of the repository at a commit."""
        files = self.commits[sha]
        card = _card_of(files)
        relation, bases = card.get("base_model_relation", "finetune"), _as_list(card.get("base_model"))
        derived = [tag for base in bases for tag in (f"base_model:{base}", f"base_model:{relation}:{base}")]
        return {
            "id": self.id,
            "author": self.id.partition("/")[0],
            "sha": sha,
            "private": self.private,
            "gated": "auto" if self.gated else False,
            "downloads": self.downloads,
            "tags": [*_as_list(card.get("tags")), *_as_list(card.get("library_name")), *derived],
            "siblings": [_sibling(path, blob, with_sizes) for path, blob in sorted(files.items())],
            "config": _config_of(files),
            "cardData": card,
        }


class LoggedRequest(NamedTuple):
    """A request and what was answered. `path` has no query; `num_bytes` counts the body that was sent."""

    path: str
    num_bytes: int


@dataclass
class Fault:
    """A fault of matching requests, for the first `times` of them (`None`: always).

    A status is answered instead; what hangs is answered when the server closes; the connection breaks off after so
    many bytes of the file; the body is replaced by what the function makes of it.
    """

    pattern: str
    method: str | None = None
    status: int | None = None
    hangs: bool = False
    break_at: int | None = None
    replace: Callable[[bytes], bytes] | None = None
    times: int | None = None
    hits: int = 0

    def takes(self, method: str, path: str) -> bool:
        is_left = self.times is None or self.hits < self.times
        return is_left and self.method in (None, method) and fnmatchcase(path, self.pattern)


class LoopbackHub:
    """The server; a context manager that runs it in threads of its own.

    `home` takes the place of `~/.cache/huggingface` for its clients.
    """

    def __init__(self, home: Path):
        self.home = Path(home)
        self.repos: dict[str, Repo] = {}
        self.requests: list[LoggedRequest] = []
        self.large_files: dict[str, bytes] = {}
        self.lock = threading.RLock()
        self.closing = threading.Event()
        self.faults: list[Fault] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{port}"
        # The same server under another name: to clients this is a foreign origin, as the Hub's storage is.
        self.storage_url = f"http://localhost:{port}"

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def add(
        self,
        repo_id: str,
        folder: str | os.PathLike | None = None,
        *,
        files: Mapping[str, bytes | str] | None = None,
        card: str | None = None,
        revision: str = "main",
        **flags: Any,
    ) -> Repo:
        """Adds a repository, or a commit to a branch of one, with the files of a folder and those given by name.

        `flags` are `downloads`, `gated` and `private`: these can be had with `TOKEN`, not without and not with
        `STRANGERS_TOKEN`.
        """
        paths = [] if folder is None else [path for path in Path(folder).rglob("*") if path.is_file()]
        contents: dict[str, bytes | str] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        contents |= {**(files or {}), **({} if card is None else {"README.md": card})}
        encoded = {path: data.encode() if isinstance(data, str) else data for path, data in contents.items()}
        with self.lock:
            repo = self.repos.setdefault(repo_id, Repo(repo_id))
            vars(repo).update({"downloads": 0, "gated": False, "private": False, **flags})
            repo.commit({path: Blob(data, path.endswith(_LARGE)) for path, data in encoded.items()}, revision)
        return repo

    def fault(self, pattern: str, **what) -> Fault:
        """Lets requests go wrong whose path matches a shell pattern; `what` are the fields of a `Fault`.

        The path is that of the URL, "/user/repo/resolve/main/config.json"; the storage of large files has paths that
        end alike, so "*model.safetensors" takes both.
        """
        self.faults.append(Fault(pattern, **what))
        return self.faults[-1]

    def take_fault(self, method: str, path: str) -> Fault:
        with self.lock:
            fault = next((fault for fault in self.faults if fault.takes(method, path)), Fault(path))
            fault.hits += 1
        return fault

    def sent(self, pattern: str = "*") -> int:
        """Bytes of the bodies that were sent for matching paths."""
        return sum(request.num_bytes for request in self.requests if fnmatchcase(request.path, pattern))

    def asked(self, pattern: str) -> int:
        """Number of requests for matching paths."""
        return sum(fnmatchcase(request.path, pattern) for request in self.requests)

    def environment(self) -> dict[str, str]:
        """Environment variables for a fresh process that is to use this Hub."""
        lost = ("TRANSFORMERS_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
        return {name: value for name, value in os.environ.items() if name not in lost} | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "DISABLE_SAFETENSORS_CONVERSION": "1",
        }


class _Response(Exception):
    """An answer, returned or raised."""

    def __init__(self, body: bytes = b"", status: int = 200, headers: dict[str, str] | None = None, is_file=False):
        self.body, self.status, self.headers, self.is_file = body, status, headers or {}, is_file


def _json(value: Any, status: int = 200, **headers: str) -> _Response:
    return _Response(json.dumps(value).encode(), status, {"Content-Type": "application/json", **headers})


def _refusal(status: int, message: str, code: str = "", **headers: str) -> _Response:
    return _json({"error": message}, status, **{"X-Error-Message": message, "X-Error-Code": code, **headers})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        self.hub, url = self.server.hub, urlsplit(self.path)
        self.query, path = parse_qs(url.query), unquote(url.path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.hub.take_fault(self.command, path)
        if fault.hangs:
            self.hub.closing.wait()
        try:
            response = _refusal(fault.status, "A fault of the test.") if fault.status else self._answer(url.path)
        except _Response as raised:
            response = raised
        if fault.replace is not None:
            response.body = fault.replace(response.body)
        self._send(path, response, fault.break_at)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def log_message(self, *_) -> None:
        pass

    def _answer(self, path: str) -> _Response:
        for method, pattern, name in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found and method == self.command.replace("HEAD", "GET"):
                groups = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
                with self.hub.lock:
                    return getattr(self, name)(**groups)
        return _refusal(404, f"No such page: {path}")

    def _send(self, path: str, response: _Response, break_at: int | None) -> None:
        body, status, start = response.body, response.status, 0
        headers = {"Content-Type": "application/octet-stream", **response.headers}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if response.is_file and wanted:
            start, end = int(wanted[1]), min(int(wanted[2] or len(body)) + 1, len(body))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(body)}"
            body, status = body[start:end], 206
        sent = b"" if self.command == "HEAD" else body
        if break_at is not None:
            sent = sent[: max(0, break_at - start)]
        # Before it is sent: a client that has its answer finds it in the log.
        with self.hub.lock:
            self.hub.requests.append(LoggedRequest(path, len(sent)))
        try:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(sent)
            self.wfile.flush()
        except OSError:
            # The client has gone, e.g. for it had set itself a time limit.
            self.close_connection = True
        self.close_connection |= self.command != "HEAD" and len(sent) < len(body)

    @property
    def _user(self) -> str | None:
        authorization = self.headers.get("Authorization")
        user = _USERS.get((authorization or "").removeprefix("Bearer "))
        if authorization is not None and user is None:
            raise _refusal(401, "Invalid credentials in Authorization header")
        return user

    def _check_may_write(self, owner: str) -> None:
        if self._user != owner:
            raise _refusal(403 if self._user else 401, f"You don't have the rights to write to models of {owner}.")

    def _repo(self, repo: str, writes: bool = False) -> Repo:
        user, found = self._user, self.hub.repos.get(repo)
        if found is None or (found.private and user != USER):
            raise _refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        if writes:
            self._check_may_write(repo.partition("/")[0])
        return found

    @staticmethod
    def _commit(repo: Repo, revision: str) -> str:
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            raise _refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def model_info(self, repo: str, revision: str = "main") -> _Response:
        found = self._repo(repo)
        return _json(found.info(self._commit(found, revision), "blobs" in self.query))

    def search(self) -> _Response:
        wanted = {tag for value in self.query.get("filter", []) for tag in value.split(",")}
        visible = [repo for repo in self.hub.repos.values() if not repo.private or self._user == USER]
        infos = [repo.info(repo.branches["main"]) for repo in visible if "main" in repo.branches]
        infos = [info for info in infos if wanted.issubset(info["tags"])]
        if "author" in self.query:
            infos = [info for info in infos if info["author"] in self.query["author"]]
        infos.sort(key=lambda info: info["downloads"], reverse=True)
        # What is asked for, and no more.
        infos = [{key: info[key] for key in ("id", *self.query.get("expand", info))} for info in infos]
        return _json(infos[: int(self.query.get("limit", ["1000"])[0])])

    def tree(self, repo: str, revision: str) -> _Response:
        found = self._repo(repo)
        files = sorted(found.commits[self._commit(found, revision)].items())
        return _json([{"type": "file", "path": p, "oid": blob.etag, "size": len(blob.data)} for p, blob in files])

    def resolve(self, repo: str, revision: str, path: str) -> _Response:
        found = self._repo(repo)
        if found.gated and self._user != USER:
            # Everybody may know that it is there.
            message = f"Access to model {repo} is restricted. You must be authorized to access it."
            return _refusal(403 if self._user else 401, message, "GatedRepo")
        sha = self._commit(found, revision)
        blob = found.commits[sha].get(path)
        if blob is None:
            return _refusal(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": sha})
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if not blob.is_large:
            return _Response(blob.data, headers=headers, is_file=True)
        self.hub.large_files[blob.etag] = blob.data
        headers |= {"X-Linked-Size": str(len(blob.data)), "X-Linked-Etag": f'"{blob.etag}"'}
        headers["Location"] = f"{self.hub.storage_url}/storage/{repo}/{blob.etag}/{quote(path)}"
        return _Response(status=302, headers=headers)

    def storage(self, oid: str) -> _Response:
        if self.headers.get("Authorization") is not None:
            return _refusal(400, "The storage takes signed URLs; a token must not get here.")
        return _Response(self.hub.large_files[oid], headers={"ETag": f'"{oid}"'}, is_file=True)

    def create_repo(self) -> _Response:
        asked = json.loads(self.body)
        owner = asked.get("organization") or self._user
        self._check_may_write(owner)
        repo_id = f"{owner}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repos:
            return _json({**answer, "error": "You already created this model repo"}, 409)
        is_private = asked.get("private", False) or asked.get("visibility") == "private"
        repo = self.hub.repos[repo_id] = Repo(repo_id, private=is_private)
        repo.commit({})
        return _json(answer)

    def validate_yaml(self) -> _Response:
        return _json({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> _Response:
        self._repo(repo, writes=True)
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        modes = {path: "lfs" if path.endswith(_LARGE) else "regular" for path in paths}
        return _json({"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]})

    def lfs_batch(self, repo: str) -> _Response:
        self._repo(repo, writes=True)
        objects = [{"oid": item["oid"], "size": item["size"]} for item in json.loads(self.body)["objects"]]
        for item in objects:
            item["actions"] = {"upload": {"href": f"{self.hub.storage_url}/upload/{item['oid']}"}}
        return _json({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> _Response:
        self.hub.large_files[oid] = self.body
        return _Response()

    def commit(self, repo: str, revision: str) -> _Response:
        found = self._repo(repo, writes=True)
        files = dict(found.commits[self._commit(found, revision)])
        for item in map(json.loads, self.body.splitlines()):
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), is_large=False)
            elif item["key"] == "lfsFile":
                files[value["path"]] = Blob(self.hub.large_files[value["oid"]], is_large=True)
        sha = found.commit(files, revision)
        return _json({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})


_REPO, _REVISION, _OID = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)", r"(?P<oid>[0-9a-f]{64})"
_ROUTES = [
    ("GET", r"/api/models", "search"),
    ("POST", r"/api/repos/create", "create_repo"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("GET", rf"/api/models/{_REPO}(?:/revision/{_REVISION})?", "model_info"),
    ("GET", rf"/api/models/{_REPO}/tree/{_REVISION}", "tree"),
    ("POST", rf"/api/models/{_REPO}/preupload/{_REVISION}", "preupload"),
    ("POST", rf"/api/models/{_REPO}/commit/{_REVISION}", "commit"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", rf"/upload/{_OID}", "upload"),
    ("GET", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve"),
    ("GET", rf"/storage/[^/]+/[^/]+/{_OID}/.+", "storage"),
]


def _card_of(files: Mapping[str, Blob]) -> dict[str, Any]:
    """The YAML at the top of a card."""
    card = files["README.md"].data.decode() if "README.md" in files else ""
    found = re.match(r"\s*---\r?\n(.*?)\r?\n---", card, re.DOTALL)
    return yaml.safe_load(found[1]) if found else {}


def _config_of(files: Mapping[str, Blob]) -> dict[str, Any]:
    try:
        config = dict(json.loads(files["config.json"].data))
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return {key: config[key] for key in ("architectures", "model_type") if key in config}


def _as_list(value: Any) -> list[str]:
    return [] if value is None else [str(item) for item in (value if isinstance(value, list) else [value])]


def _sibling(path: str, blob: Blob, with_sizes: bool) -> dict[str, Any]:
    size = len(blob.data)
    lfs = {"lfs": {"sha256": blob.etag, "size": size, "pointerSize": 134}} if blob.is_large else {}
    return {"rfilename": path} | ({"blobId": blob.etag, "size": size, **lfs} if with_sizes else {})
