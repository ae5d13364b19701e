"""A hub of two hosts on loopback for tests: what `snapshot_download` asks for, and the ways in which it can go wrong.

    with HubServer() as hub:
        commit = hub.publish("test/tiny", folder)
        run(..., env={"HF_ENDPOINT": hub.endpoint})

The hub answers small files itself and sends readers of weights to a second host, the store, with a signed URL, as the
real one does. `hub.ills` turns faults on; `hub.seen` holds every request in order.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 4
"""Entries of a listing that one answer holds; the rest is behind its Link header."""
LARGE = 4096
"""Bytes from which a file lies in the store."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One file of a commit. `sha256` is None for files that the hub keeps itself."""

    data: bytes
    oid: str
    sha256: str | None


@dataclass(slots=True)
class Repository:
    """Commits by hash, each path -> file; names of branches and tags; who may read."""

    commits: dict[str, dict[str, Stored]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    """Without it the repository does not exist for the caller."""
    gated: bool = False
    """Anybody may list it, nobody may have its files."""
    disabled: bool = False


@dataclass(slots=True)
class Ills:
    """Faults, all off at first."""

    hub_status: int = 0
    """Every request to the hub itself is answered so."""
    store_status: int = 0
    silent: bool = False
    """The hub accepts a request and never answers."""
    cut: int = 0
    """This many bodies of the store end in the middle, with the connection."""
    bytes_per_second: int = 0
    nonsense: bool = False
    """The hub answers 200 and a page of HTML, as a captive portal does."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it came in."""

    host: str
    method: str
    path: str
    authorization: str | None


class HubServer:
    """Two servers in threads. A context manager; leaving it stops them."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.ills = Ills()
        self.seen: list[Seen] = []
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self.key = secrets.token_hex(8)
        self._servers = [self._serve("hub"), self._serve("store")]
        hub, store = (server.server_address[1] for server in self._servers)
        self.endpoint = f"http://127.0.0.1:{hub}"
        self.store = f"http://localhost:{store}"  # another name, since some clients tell hosts apart by that alone

    def _serve(self, host: str) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self, host))
        server.daemon_threads = True
        server.block_on_close = False
        return server

    def __enter__(self) -> Self:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @contextmanager
    def ill(self, ills: Ills) -> Iterator[None]:
        """Turn faults on for a while."""
        before = self.ills
        self.ills = ills
        try:
            yield
        finally:
            self.ills = before

    def publish(self, repo_id: str, folder: Path, *, branch: str = "main") -> str:
        """Make the files of `folder` the newest commit of `branch`; return the commit's hash."""
        repository = self.repositories.setdefault(repo_id, Repository())
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): _stored(path) for path in paths}
        text = json.dumps([repo_id, len(repository.commits), *((name, file.oid) for name, file in files.items())])
        commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        repository.commits[commit], repository.refs[branch] = files, commit
        return commit

    def sign(self, sha256: str) -> str:
        """The query that makes an URL of the store a credential."""
        return f"X-Signature={hashlib.sha256((self.key + sha256).encode()).hexdigest()}"

    def blob(self, sha256: str) -> bytes | None:
        """What the store holds under this name."""
        commits = (files for repository in self.repositories.values() for files in repository.commits.values())
        return next((file.data for files in commits for file in files.values() if file.sha256 == sha256), None)

    def paths(self, host: str = "hub") -> list[str]:
        """What was asked of one host, without queries."""
        return [unquote(urlsplit(seen.path).path) for seen in self.seen if seen.host == host]


def _stored(path: Path) -> Stored:
    data = path.read_bytes()
    large = len(data) >= LARGE or path.suffix in {".safetensors", ".bin", ".gguf"}
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return Stored(data, oid, hashlib.sha256(data).hexdigest() if large else None)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(
        self, hub: HubServer, host: str, request: socket.socket, address: tuple[str, int], server: BaseServer
    ) -> None:
        self.hub = hub
        self.host = host
        super().__init__(request, address, server)

    def log_message(self, *_: object) -> None:
        """Tests look at `seen`."""

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # a client that hangs up is no news
            self.close_connection = True

    def do_GET(self) -> None:
        with self.hub.lock:
            self.hub.seen.append(Seen(self.host, self.command, self.path, self.headers["Authorization"]))
        if self.host == "store":
            self._from_store()
        elif self.hub.ills.silent:
            self.hub.closing.wait(30)
            self.close_connection = True
        elif self.hub.ills.hub_status:
            self._answer(self.hub.ills.hub_status)
        elif self.hub.ills.nonsense:
            self._answer(200, b"<html>Please log in to this network</html>", {"Content-Type": "text/html"})
        else:
            self._from_hub()

    do_HEAD = do_GET  # noqa: N815 - its name is the method's

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self._send(body)

    def _send(self, body: bytes) -> None:
        rate = self.hub.ills.bytes_per_second
        step = max(1, rate // 20) if rate else max(1, len(body))
        for at in range(0, len(body), step):
            self.wfile.write(body[at : at + step])
            if rate and self.hub.closing.wait(0.05):
                return

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": f"{code} says the hub"})

    def _from_hub(self) -> None:
        path = unquote(urlsplit(self.path).path)
        routes: tuple[tuple[str, Callable[[Repository, re.Match[str]], None]], ...] = (
            (r"/api/models/(?P<repo>[^/]+/[^/]+)", self._info),
            (r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>.+)", self._info),
            (r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>.+)", self._tree),
            (r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[0-9a-f]{40}|[^/]+)/(?P<file>.+)", self._resolve),
        )
        for pattern, answer in routes:
            match = re.fullmatch(pattern, path)
            if match is None:
                continue
            repository = self.hub.repositories.get(match["repo"])
            if repository is None or (
                repository.token and self.headers["Authorization"] != f"Bearer {repository.token}"
            ):
                return self._refuse(401, "RepoNotFound")
            if repository.disabled:
                return self._answer(403, b"", {"X-Error-Message": "Access to this resource is disabled."})
            return answer(repository, match)
        return self._refuse(404, "EntryNotFound")

    def _commit(self, repository: Repository, match: re.Match[str]) -> str | None:
        asked = match.groupdict().get("revision") or "main"
        commit = repository.refs.get(asked, asked)
        if commit in repository.commits:
            return commit
        self._refuse(404, "RevisionNotFound")
        return None

    def _info(self, repository: Repository, match: re.Match[str]) -> None:
        commit = self._commit(repository, match)
        if commit is not None:
            siblings = [{"rfilename": name} for name in repository.commits[commit]]
            about = {"id": match["repo"], "sha": commit, "siblings": siblings, "private": False, "tags": []}
            self._answer(200, json.dumps(about).encode())

    def _tree(self, repository: Repository, match: re.Match[str]) -> None:
        commit = self._commit(repository, match)
        if commit is None:
            return
        start = int(parse_qs(urlsplit(self.path).query).get("cursor", ["0"])[0])
        entries = [self._entry(name, file) for name, file in repository.commits[commit].items()]
        headers = {}
        if start + PAGE < len(entries):
            url = f"{self.hub.endpoint}{urlsplit(self.path).path}?recursive=True&cursor={start + PAGE}"
            headers["Link"] = f'<{url}>; rel="next"'
        self._answer(200, json.dumps(entries[start : start + PAGE]).encode(), headers)

    @staticmethod
    def _entry(name: str, file: Stored) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(file.data), "oid": file.oid}
        if file.sha256:
            entry["lfs"] = {"oid": file.sha256, "size": len(file.data), "pointerSize": 134}
        return entry

    def _resolve(self, repository: Repository, match: re.Match[str]) -> None:
        commit = self._commit(repository, match)
        if commit is None:
            return
        file = repository.commits[commit].get(match["file"])
        if repository.gated:
            self._refuse(403, "GatedRepo")
        elif file is None:
            self._refuse(404, "EntryNotFound")
        elif file.sha256 is None:
            self._answer(200, file.data, {"X-Repo-Commit": commit, "ETag": f'"{file.oid}"'})
        else:
            linked = {
                "X-Linked-Size": str(len(file.data)),
                "X-Linked-Etag": f'"{file.sha256}"',
                "ETag": f'"{file.oid}"',
            }
            location = f"{self.hub.store}/{file.sha256}?{self.hub.sign(file.sha256)}"
            self._answer(302, b"", {"X-Repo-Commit": commit, "Location": location, **linked})

    def _from_store(self) -> None:
        url = urlsplit(self.path)
        name = url.path.removeprefix("/")
        body = self.hub.blob(name)
        if self.hub.ills.store_status or body is None or url.query != self.hub.sign(name):
            self._answer(self.hub.ills.store_status or 403)
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        span = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        with self.hub.lock:
            cut = self.hub.ills.cut > 0
            self.hub.ills.cut -= cut
        if cut:
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            self.wfile.write(body[start : start + (len(body) - start) // 2])
            self.close_connection = True
        else:
            self._answer(206 if start else 200, body[start:], {"ETag": f'"{name}"', **span})


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
