"""A stand-in of the Hub: the part of its HTTP API that huggingface_hub calls to make, read and fill a repository."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOKEN = "hf_secretsecretsecret"
LARGE = (".parquet", ".safetensors")  # what .gitattributes gives to LFS


class Request(NamedTuple):
    """Method, path and token of a request."""

    method: str
    path: str
    token: str | None


class Repository:
    """Files of a repository of a kind (``"datasets"``, ``"models"``), those of its versions too."""

    def __init__(self, private: bool, kind: str = "datasets") -> None:
        self.private, self.kind = private, kind
        self.files: dict[str, bytes] = {".gitattributes": b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"}
        self.commits: list[str] = []
        self.tags: dict[str, str] = {}
        self._versions: dict[str, dict[str, bytes]] = {}

    def version(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Name and files of a version, the newest of the branch ``main``; None if there is none."""
        if revision != "main":
            name = self.tags.get(revision, revision)
            return (name, self._versions[name]) if name in self._versions else None
        name = hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()
        self._versions[name] = dict(self.files)
        return name, self.files

    def tag(self, name: str) -> None:
        """Give the newest version a name."""
        self.tags[name] = self.version("main")[0]


class Hub:
    """State of the stand-in, and how it misbehaves."""

    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        # Given method and path: None, a status with headers and text, or "drop" to close the connection.
        self.misbehave: Callable[[str, str], Any] = lambda method, path: None
        self._lock = threading.Lock()

    def sent(self, method: str, pattern: str) -> list[Request]:
        """Requests of a kind."""
        return [each for each in self.requests if each.method == method and re.search(pattern, each.path)]

    # Each of these gives a status and what is sent back as JSON, or as bytes; and headers, if need be.

    def respond(self, method: str, path: str, body: bytes) -> tuple[Any, ...]:
        with self._lock:
            if (method, path) == ("POST", "/api/repos/create"):
                return self._create(json.loads(body))
            if (method, path) == ("POST", "/api/validate-yaml"):
                return 200, {"warnings": [], "errors": []}
            if found := re.fullmatch(r"/lfs/(\w+)", path):
                assert hashlib.sha256(body).hexdigest() == found[1]
                self.objects[found[1]] = body
                return 200, b""
            if found := re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
                return 200, {"transfer": "basic", "objects": [self._lfs(each) for each in json.loads(body)["objects"]]}
            if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self._file("datasets" if found[1] else "models", *found.groups()[1:])
            if found := re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(\w[\w-]*)(?:/([^/]+))?.*)?", path):
                if getattr(self.repositories.get(found[2]), "kind", None) != found[1]:
                    return 404, {"error": "Repository not found"}
                return self._repository(found[2], found[3] or "revision", found[4] or "main", body)
        return 404, {"error": "Not found"}

    def _create(self, values: dict[str, Any]) -> tuple[int, Any]:
        name = f"{values['organization']}/{values['name']}"
        kind = f"{values.get('type', 'model')}s"
        answer = {"url": f"{self.url}/{'datasets/' * (kind == 'datasets')}{name}"}
        if name in self.repositories:
            return 409, answer | {"error": f"You already created this {kind} repo"}
        private = values.get("private") or values.get("visibility") == "private"
        self.repositories[name] = Repository(bool(private), kind)
        return 200, answer

    def _file(self, kind: str, name: str, revision: str, path: str) -> tuple[Any, ...]:
        repository = self.repositories.get(name)
        version = None if repository is None or repository.kind != kind else repository.version(revision)
        if version is None or path not in version[1]:
            return 404, {"error": "Entry not found"}
        return 200, version[1][path], {"X-Repo-Commit": version[0]}

    def _lfs(self, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["oid"] in self.objects:
            return entry
        return entry | {"actions": {"upload": {"href": f"{self.url}/lfs/{entry['oid']}"}}}

    def _repository(self, name: str, what: str, revision: str, body: bytes) -> tuple[int, Any]:
        repository = self.repositories[name]
        if what in ("revision", "tree"):
            version = repository.version(revision)
            if version is None:
                return 404, {"error": f"Invalid rev id: {revision}", "code": "RevisionNotFound"}
            sha, files = version
            if what == "tree":
                return 200, [self._entry(path, content) for path, content in sorted(files.items())]
            siblings = [{"rfilename": path} for path in files]
            return 200, {"id": name, "private": repository.private, "sha": sha, "siblings": siblings, "tags": []}
        if what == "preupload":
            files = json.loads(body)["files"]
            modes = [{"path": each["path"], "uploadMode": _mode(each["path"]), "shouldIgnore": False} for each in files]
            return 200, {"files": modes}
        assert what == "commit"
        self._commit(repository, [json.loads(line) for line in body.splitlines()])
        return 200, {"commitUrl": f"{self.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "size": len(content), "oid": _git_hash(content)}
        if _mode(path) == "lfs":
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry

    def _commit(self, repository: Repository, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.commits.append(value["summary"])
            elif line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.objects[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del repository.files[value["path"]]


def _mode(path: str) -> str:
    return "lfs" if path.endswith(LARGE) else "regular"


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None: ...

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.requests.append(Request(self.command, path, token))
        trouble = self.hub.misbehave(self.command, path)
        if trouble == "drop":
            self.close_connection = True
            self.connection.close()
            return
        status, headers, content = trouble or (None, {}, None)
        if status is None:
            status, content, *more = self.hub.respond(self.command, path, body)
            headers = more[0] if more else {}
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        standard = {"Content-Type": kind, "Content-Length": str(len(data)), "X-Repo-Commit": "0" * 40}
        if isinstance(content, dict) and "error" in content:
            headers = {"X-Error-Message": str(content["error"]), "X-Error-Code": content.get("code", "")} | headers
        for name, value in (standard | {"ETag": f'"{_git_hash(data)}"'} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    do_GET = do_HEAD = do_POST = do_PUT = _serve


@pytest.fixture
def no_other_network(monkeypatch) -> None:
    """Nothing but this computer can be spoken to."""
    find = socket.getaddrinfo

    def find_here(host: Any, *others: Any, **named: Any) -> Any:
        assert host in ("127.0.0.1", "localhost"), f"a test speaks to {host}"
        return find(host, *others, **named)

    monkeypatch.setattr(socket, "getaddrinfo", find_here)


@pytest.fixture
def hub(monkeypatch, tmp_path, no_other_network) -> Iterator[Hub]:
    """A stand-in of the Hub, to which huggingface_hub of this process speaks, with a token, and without waiting."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": state}))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", state.url)
    template = state.url + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, file_download):  # huggingface_hub < 1 has a copy in the second
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
