"""A Hub on the loopback interface: real HTTP, and as much of the Hub's protocol as loading and publishing need.

Model info, search, downloads (ranges, etags, large files behind a redirect to another origin), gated and private
repositories, uploads (regular and LFS). Every request is logged, and faults can be put in its way:

```python
with LoopbackHub(home) as hub:
    hub.add("user/head", folder, downloads=12)
    hub.fault("*model.safetensors", status=500, times=2)
    subprocess.run([...], env=hub.environment())
    assert sum(request.num_bytes for request in hub.requests) < 100_000
```
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
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml


USER, TOKEN, STRANGERS_TOKEN = "user", "hf_loopback", "hf_stranger"
_USERS = {TOKEN: USER, STRANGERS_TOKEN: "stranger"}

_LARGE_FILE_SUFFIXES = (".safetensors", ".bin", ".pt")


@dataclass(frozen=True)
class Blob:
    """One version of a file. Large ones are named by their SHA-256, others as in git."""

    data: bytes
    is_large: bool

    @functools.cached_property
    def etag(self) -> str:
        if self.is_large:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


@dataclass
class Repo:
    """A model repository: files by commit, commits by branch."""

    id: str
    downloads: int = 0
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    @property
    def author(self) -> str:
        return self.id.split("/")[0]

    def commit(self, files: Mapping[str, Blob], branch: str = "main") -> str:
        """Makes `files` the content of a branch; the new commit's hash."""
        parent = self.branches.get(branch, "")
        listing = [f"{path} {blob.etag}" for path, blob in sorted(files.items())]
        sha = hashlib.sha1("\n".join([self.id, parent, *listing]).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha

    def files(self, branch: str = "main") -> dict[str, Blob]:
        return self.commits[self.branches[branch]] if branch in self.branches else {}

    def tags(self) -> list[str]:
        """The tags of the card, and those that the Hub derives from it."""
        card = _card_data(self.files())
        relation, bases = card.get("base_model_relation", "finetune"), _as_list(card.get("base_model"))
        tags = [tag for base in bases for tag in (f"base_model:{base}", f"base_model:{relation}:{base}")]
        return [*_as_list(card.get("tags")), *_as_list(card.get("library_name")), *tags]


@dataclass(frozen=True)
class LoggedRequest:
    """A request and what was answered. `path` has no query; `num_bytes` counts the body that was sent."""

    method: str
    path: str
    status: int
    num_bytes: int


@dataclass
class Fault:
    """A fault of matching requests, for the first `times` of them (`None`: always)."""

    pattern: str
    method: str | None = None
    status: int | None = None
    redirect: str | None = None
    delay: float = 0.0
    break_at: int | None = None
    replace: Callable[[bytes], bytes] | None = None
    times: int | None = None
    hits: int = 0

    def takes(self, method: str, path: str) -> bool:
        is_left = self.times is None or self.hits < self.times
        return is_left and self.method in (None, method) and fnmatchcase(path, self.pattern)


class LoopbackHub:
    """The server; a context manager that runs it in threads of its own.

    Args:
        home (`Path`): Folder that takes the place of `~/.cache/huggingface` for its clients.

    Attributes:
        url (`str`): The endpoint.
        requests (`list[LoggedRequest]`): All requests, in the order of their answers.
        repos (`dict[str, Repo]`): By id.
    """

    def __init__(self, home: Path):
        self.home = Path(home)
        self.repos: dict[str, Repo] = {}
        self.requests: list[LoggedRequest] = []
        self.large_files: dict[str, bytes] = {}
        self.lock = threading.RLock()
        self._faults: list[Fault] = []
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{port}"
        # The same server under another name: to clients this is a foreign origin, as the Hub's storage is.
        self.storage_url = f"http://localhost:{port}"

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def add(
        self,
        repo_id: str,
        folder: str | os.PathLike | None = None,
        *,
        files: Mapping[str, bytes | str] | None = None,
        card: str | None = None,
        downloads: int = 0,
        gated: bool = False,
        private: bool = False,
        revision: str = "main",
    ) -> Repo:
        """Adds a repository, or a branch to one, with the files of a folder and those given by name.

        Args:
            repo_id (`str`): "name/repo".
            folder (`str` or `os.PathLike`, *optional*): Read now; later changes do not show.
            files (`dict`, *optional*): Further files by name; texts are encoded as UTF-8.
            card (`str`, *optional*): README.md.
            downloads (`int`): What searches sort by.
            gated, private (`bool`): Only with `TOKEN`, not without and not with `STRANGERS_TOKEN`.
            revision (`str`): Name of the branch.
        """
        contents: dict[str, bytes | str] = {}
        if folder is not None:
            paths = (path for path in Path(folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
            contents = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        contents |= files or {}
        if card is not None:
            contents["README.md"] = card
        encoded = {path: data.encode() if isinstance(data, str) else data for path, data in contents.items()}
        with self.lock:
            repo = self.repos.setdefault(repo_id, Repo(repo_id))
            repo.downloads, repo.gated, repo.private = downloads, gated, private
            blobs = {path: Blob(data, path.endswith(_LARGE_FILE_SUFFIXES)) for path, data in encoded.items()}
            repo.commit(blobs, revision)
        return repo

    def fault(self, pattern: str, **what) -> Fault:
        """Lets requests go wrong whose path matches a shell pattern.

        The path is that of the URL, "/user/repo/resolve/main/config.json"; the storage of large files has paths that
        end alike, so "*model.safetensors" takes both.

        Args:
            pattern (`str`): As in `fnmatch`.
            what: `status`: answered instead. `redirect`: location of a 302 instead. `delay`:
                seconds before the answer. `break_at`: the connection breaks off after so many bytes of the file.
                `replace`: function that changes the body. `method`: only such requests ("HEAD", "GET", ...). `times`:
                only for the first so many.
        """
        fault = Fault(pattern, **what)
        with self.lock:
            self._faults.append(fault)
        return fault

    def clear_faults(self) -> None:
        with self.lock:
            self._faults.clear()

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            fault = next((fault for fault in self._faults if fault.takes(method, path)), None)
            if fault is not None:
                fault.hits += 1
        return fault

    def wait(self, seconds: float) -> None:
        """Sleeps, but not longer than the server lives."""
        self._closing.wait(seconds)

    def sent(self, pattern: str = "*") -> int:
        """Bytes of the bodies that were sent for matching paths."""
        return sum(request.num_bytes for request in self.requests if fnmatchcase(request.path, pattern))

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


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: LoopbackHub


class _HttpError(Exception):
    def __init__(self, status: int, code: str | None = None, message: str = "", **headers: str):
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers


@dataclass
class _Response:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    is_file: bool = False


def _json(value: Any, status: int = 200) -> _Response:
    return _Response(json.dumps(value).encode(), status, {"Content-Type": "application/json"})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    @property
    def hub(self) -> LoopbackHub:
        return self.server.hub

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self.raw_path, self.query = url.path, parse_qs(url.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.raw_path)
        fault = self.hub.take_fault(self.command, path)
        if fault is not None and fault.delay:
            self.hub.wait(fault.delay)
        try:
            if fault is not None and fault.status is not None:
                raise _HttpError(fault.status, message="A fault of the test.")
            if fault is not None and fault.redirect is not None:
                response = _Response(status=302, headers={"Location": fault.redirect})
            else:
                response = self._answer()
        except _HttpError as error:
            response = _json({"error": error.message}, error.status)
            response.headers |= {"X-Error-Message": error.message, **error.headers}
            if error.code is not None:
                response.headers["X-Error-Code"] = error.code
        if fault is not None and fault.replace is not None:
            response.body = fault.replace(response.body)
        self._send(path, response, None if fault is None else fault.break_at)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def log_message(self, *_) -> None:
        pass

    def _answer(self) -> _Response:
        method = "GET" if self.command == "HEAD" else self.command
        for route_method, pattern, name in _ROUTES:
            found = pattern.fullmatch(self.raw_path)
            if found and route_method == method:
                groups = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
                with self.hub.lock:
                    return getattr(self, name)(**groups)
        raise _HttpError(404, message=f"No such page: {self.raw_path}")

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
        is_broken = self.command != "HEAD" and len(sent) < len(body)
        request = LoggedRequest(self.command, path, status, len(sent))
        # Before it is sent: a client that has its answer finds it in the log.
        with self.hub.lock:
            self.hub.requests.append(request)
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
        self.close_connection |= is_broken

    # ------------------------------------------------------------------------------------------------- who may what

    @property
    def _user(self) -> str | None:
        authorization = self.headers.get("Authorization")
        if authorization is None:
            return None
        user = _USERS.get(authorization.removeprefix("Bearer "))
        if user is None:
            raise _HttpError(401, message="Invalid credentials in Authorization header")
        return user

    def _repo(self, repo: str) -> Repo:
        user, found = self._user, self.hub.repos.get(repo)
        if found is None or (found.private and user != USER):
            message = "Repository not found" if user else "Invalid username or password."
            raise _HttpError(404 if user else 401, "RepoNotFound", message)
        return found

    def _repo_with_files(self, repo: str) -> Repo:
        """Refuses files of gated repositories, of which everybody may know."""
        found, user = self._repo(repo), self._user
        if found.gated and user != USER:
            message = f"Access to model {repo} is restricted. You must be authorized to access it."
            raise _HttpError(403 if user else 401, "GatedRepo", message)
        return found

    def _repo_to_write(self, repo: str) -> Repo:
        found, user = self._repo(repo), self._user
        if user is None:
            raise _HttpError(401, message="You must be logged in to write.")
        if user != found.author:
            raise _HttpError(403, message=f"You don't have the rights to write to {repo}.")
        return found

    @staticmethod
    def _commit(repo: Repo, revision: str) -> str:
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            raise _HttpError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    # ------------------------------------------------------------------------------------------------------- reading

    def model_info(self, repo: str, revision: str = "main") -> _Response:
        found = self._repo(repo)
        return _json(self._info(found, self._commit(found, revision)))

    def search(self) -> _Response:
        wanted = [tag for value in self.query.get("filter", []) for tag in value.split(",")]
        visible = (repo for repo in self.hub.repos.values() if not repo.private or self._user == USER)
        found = [repo for repo in visible if "main" in repo.branches and {*repo.tags()}.issuperset(wanted)]
        found = [repo for repo in found if repo.author in self.query.get("author", [repo.author])]
        found.sort(key=lambda repo: repo.downloads, reverse=True)
        limit = int(self.query.get("limit", ["1000"])[0])
        return _json([self._info(repo, repo.branches["main"]) for repo in found[:limit]])

    def _info(self, repo: Repo, sha: str) -> dict[str, Any]:
        files = repo.commits[sha]
        card, config = _card_data(files), _config(files)
        info = {
            "_id": hashlib.sha1(repo.id.encode()).hexdigest()[:24],
            "id": repo.id,
            "modelId": repo.id,
            "author": repo.author,
            "sha": sha,
            "private": repo.private,
            "gated": "auto" if repo.gated else False,
            "downloads": repo.downloads,
            "tags": repo.tags(),
            "siblings": [_sibling(path, blob, "blobs" in self.query) for path, blob in sorted(files.items())],
            "config": {key: config[key] for key in ("architectures", "model_type") if key in config},
            "cardData": card,
        }
        wanted = ("_id", "id", "modelId", *self.query.get("expand", info))
        return {key: info[key] for key in wanted if key in info}

    def tree(self, repo: str, revision: str, folder: str = "") -> _Response:
        found = self._repo(repo)
        files = found.commits[self._commit(found, revision)].items()
        inside = [(path, blob) for path, blob in sorted(files) if path.startswith(f"{folder}/" if folder else "")]
        if not inside:
            raise _HttpError(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        entries = [{"type": "file", "path": path, "oid": blob.etag, "size": len(blob.data)} for path, blob in inside]
        return _json(entries)

    def resolve(self, repo: str, revision: str, path: str) -> _Response:
        found = self._repo_with_files(repo)
        sha = self._commit(found, revision)
        blob = found.commits[sha].get(path)
        if blob is None:
            raise _HttpError(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": sha})
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if not blob.is_large:
            return _Response(blob.data, headers=headers, is_file=True)
        self.hub.large_files[blob.etag] = blob.data
        headers |= {"X-Linked-Size": str(len(blob.data)), "X-Linked-Etag": f'"{blob.etag}"'}
        headers["Location"] = f"{self.hub.storage_url}/storage/{repo}/{blob.etag}/{quote(path)}"
        return _Response(status=302, headers=headers)

    def storage(self, repo: str, oid: str, path: str) -> _Response:
        if self.headers.get("Authorization") is not None:
            raise _HttpError(400, message="The storage takes signed URLs; a token must not get here.")
        return _Response(self.hub.large_files[oid], headers={"ETag": f'"{oid}"'}, is_file=True)

    # ------------------------------------------------------------------------------------------------------- writing

    def create_repo(self) -> _Response:
        asked = json.loads(self.body)
        if self._user is None:
            raise _HttpError(401, message="You must be logged in to create a repository.")
        owner = asked.get("organization") or self._user
        repo_id = f"{owner}/{asked['name']}"
        if owner != self._user:
            raise _HttpError(403, message=f"You don't have the rights to create a model under {owner}.")
        answer = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repos:
            return _json({**answer, "error": "You already created this model repo"}, 409)
        is_private = asked.get("private", False) or asked.get("visibility") == "private"
        repo = self.hub.repos[repo_id] = Repo(repo_id, private=is_private)
        repo.commit({".gitattributes": Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", is_large=False)})
        return _json(answer)

    def validate_yaml(self) -> _Response:
        try:
            _card_data({"README.md": Blob(json.loads(self.body)["content"].encode(), is_large=False)})
        except yaml.YAMLError as error:
            return _json({"errors": [{"message": f"Invalid YAML: {error}"}], "warnings": []}, 400)
        return _json({"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str) -> _Response:
        self._repo_to_write(repo)
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        modes = {path: "lfs" if path.endswith(_LARGE_FILE_SUFFIXES) else "regular" for path in paths}
        return _json({"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]})

    def lfs_batch(self, repo: str) -> _Response:
        self._repo_to_write(repo)
        objects = [{"oid": item["oid"], "size": item["size"]} for item in json.loads(self.body)["objects"]]
        for item in objects:
            if item["oid"] not in self.hub.large_files:
                upload = {"href": f"{self.hub.storage_url}/upload/{item['oid']}"}
                item["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/upload-verify"}}
        return _json({"transfer": "basic", "objects": objects})

    def upload(self, oid: str) -> _Response:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise _HttpError(400, message="The content has another hash.")
        self.hub.large_files[oid] = self.body
        return _Response()

    def verify_upload(self) -> _Response:
        asked = json.loads(self.body)
        if len(self.hub.large_files[asked["oid"]]) != asked["size"]:
            raise _HttpError(404, message="The object was not uploaded.")
        return _json({})

    def commit(self, repo: str, revision: str) -> _Response:
        found = self._repo_to_write(repo)
        self._commit(found, revision)
        files = dict(found.files(revision))
        for item in map(json.loads, self.body.splitlines()):
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), is_large=False)
            elif item["key"] == "lfsFile":
                files[value["path"]] = Blob(self.hub.large_files[value["oid"]], is_large=True)
            elif item["key"] != "header":
                raise _HttpError(400, message=f"Unknown operation {item['key']}")
        sha = found.commit(files, revision)
        return _json({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.url}/{repo}/commit/{sha}"})


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
_OID = r"(?P<oid>[0-9a-f]{64})"
_ROUTES = tuple(
    (method, re.compile(pattern), name)
    for method, pattern, name in (
        ("GET", r"/api/models", "search"),
        ("POST", r"/api/repos/create", "create_repo"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("GET", rf"/api/models/{_REPO}", "model_info"),
        ("GET", rf"/api/models/{_REPO}/revision/{_REVISION}", "model_info"),
        ("GET", rf"/api/models/{_REPO}/tree/{_REVISION}(?:/(?P<folder>.+))?", "tree"),
        ("POST", rf"/api/models/{_REPO}/preupload/{_REVISION}", "preupload"),
        ("POST", rf"/api/models/{_REPO}/commit/{_REVISION}", "commit"),
        ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
        ("PUT", rf"/upload/{_OID}", "upload"),
        ("POST", r"/upload-verify", "verify_upload"),
        ("GET", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve"),
        ("GET", rf"/storage/{_REPO}/{_OID}/(?P<path>.+)", "storage"),
    )
)


def _card_data(files: Mapping[str, Blob]) -> dict[str, Any]:
    """The YAML at the top of a card."""
    card = files["README.md"].data.decode() if "README.md" in files else ""
    found = re.match(r"\s*---\r?\n(.*?)\r?\n---", card, re.DOTALL)
    return yaml.safe_load(found[1]) if found else {}


def _config(files: Mapping[str, Blob]) -> dict[str, Any]:
    try:
        config = json.loads(files["config.json"].data)
    except (KeyError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _as_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _sibling(path: str, blob: Blob, with_sizes: bool) -> dict[str, Any]:
    size = len(blob.data)
    lfs = {"lfs": {"sha256": blob.etag, "size": size, "pointerSize": 134}} if blob.is_large else {}
    return {"rfilename": path} | ({"blobId": blob.etag, "size": size, **lfs} if with_sizes else {})
