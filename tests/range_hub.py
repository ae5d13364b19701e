"""The hub of `hub_server` with a store that serves ranges, and every way in which that can go wrong.

    with RangeHub() as hub:
        hub.add("test/tiny", {"model.safetensors": data})
        with hub.range_ill(RangeIlls(cut_every=3)): ...

Each signed URL has a number of its own, so that a test can say how long one lives and count how often one was asked for.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from hub_server import LARGE, HubServer, Repository, Stored, _Handler


@dataclass(slots=True)
class RangeIlls:
    """Faults of store and hub, all off at first."""

    cut_every: int = 0
    """Each so-manieth body ends in the middle, with the connection."""
    busy_every: int = 0
    """Each so-manieth answer, of both hosts, is 503."""
    uses: int = 0
    """So many requests a signed URL serves; then it answers 403."""
    no_ranges: bool = False
    """The store answers 200 and the whole file."""
    shift: int = 0
    """Bytes by which the store's ranges lie beside those asked for."""
    tag: str | None = None
    """The store's ETag in place of the SHA-256; `{n}` is the number of the request."""
    xet: str | None = None
    """The hub's other name for a file's content."""
    nameless: bool = False
    """Neither the hub nor the store says which content it gives."""
    other_bytes: bool = False
    """The store holds another file of the same size, and says so in its ETag."""
    limited: int = 0
    """So many answers of the store are 429 with `retry_after`."""
    retry_after: str = "0"
    latency: float = 0
    link: str | None = None
    """Where every page of a listing says that the next one is; `{n}` is a number of its own."""
    redirect: str | None = None
    """Where the hub sends readers in place of the store."""
    hop: bool = False
    """The store sends readers on to another place of its own once."""


class RangeHub(HubServer):
    """Two servers in threads, as `HubServer`; the faults of `range_ills` come first."""

    def __init__(self) -> None:
        self.range_ills = RangeIlls()
        self.renamed: dict[str, str] = {}
        """Repositories by their old names, which the hub sends on."""
        self.uses: dict[str, int] = {}
        self.numbers = itertools.count(1)
        self.cuts, self.answers = itertools.count(1), itertools.count(1)
        self.ranges: list[str] = []
        """Range headers that the store was asked for."""
        super().__init__()

    def _serve(self, host: str) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_RangeHandler, self, host))
        server.daemon_threads = True
        server.block_on_close = False
        return server

    @contextmanager
    def range_ill(self, ills: RangeIlls) -> Iterator[None]:
        """Turn faults on for a while."""
        before, self.range_ills = self.range_ills, ills
        self.uses.clear()
        self.cuts, self.answers = itertools.count(1), itertools.count(1)
        try:
            yield
        finally:
            self.range_ills = before

    def add(self, repo_id: str, files: Mapping[str, bytes], *, branch: str = "main") -> str:
        """Make these files the newest commit of `branch`; return the commit's hash."""
        repository = self.repositories.setdefault(repo_id, Repository())
        kept = {name: _stored(name, data) for name, data in files.items()}
        text = json.dumps([repo_id, len(repository.commits), *((name, file.oid) for name, file in kept.items())])
        commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        repository.commits[commit], repository.refs[branch] = kept, commit
        return commit

    def sign(self, sha256: str) -> str:
        """A new URL each time."""
        return f"{super().sign(sha256)}&n={next(self.numbers)}"

    def resolved(self, file: str) -> int:
        """How often the place of a file was asked for."""
        return sum(path.endswith(f"/{file}") for path in self.paths() if "/resolve/" in path)


def _stored(name: str, data: bytes) -> Stored:
    large = len(data) >= LARGE or name.endswith(".safetensors")
    oid = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    return Stored(data, oid, hashlib.sha256(data).hexdigest() if large else None)


class _RangeHandler(_Handler):
    hub: RangeHub

    def do_GET(self) -> None:  # noqa: N802 - as its base names it
        ills = self.hub.range_ills
        if ills.latency:
            time.sleep(ills.latency)
        if ills.busy_every and next(self.hub.answers) % ills.busy_every == 0:
            self._answer(503)
            return
        for old, new in self.hub.renamed.items():
            if f"/{old}/" in self.path:
                self._answer(307, b"", {"Location": self.path.replace(old, new)})
                return
        super().do_GET()

    do_HEAD = do_GET  # noqa: N815 - its name is the method's

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Small files of the hub itself are served by range too; a redirect may be bent."""
        headers = dict(headers or {})
        if "/tree/" in self.path and self.hub.range_ills.link:
            headers["Link"] = f'<{self.hub.range_ills.link.format(n=next(self.hub.numbers))}>; rel="next"'
        if self.host == "hub" and status == 302 and self.hub.range_ills.redirect:
            headers["Location"] = self.hub.range_ills.redirect
        if self.host == "hub" and status == 302 and self.hub.range_ills.xet:
            headers["X-Xet-Hash"] = self.hub.range_ills.xet
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if self.host == "hub" and status == 200 and span and "/resolve/" in self.path and self.command == "GET":
            start, last = int(span[1]), int(span[2])
            headers["Content-Range"] = f"bytes {start}-{last}/{len(body)}"
            status, body = 206, body[start : last + 1]
        if self.hub.range_ills.nameless:
            headers = {key: value for key, value in headers.items() if "etag" not in key.lower()}
        super()._answer(status, body, headers)

    def _from_store(self) -> None:
        url, ills = urlsplit(self.path), self.hub.range_ills
        name = url.path.removeprefix("/")
        body = self.hub.blob(name)
        signature, _, number = url.query.partition("&n=")
        with self.hub.lock:
            self.hub.ranges.append(self.headers.get("Range", ""))
            used = self.hub.uses[number] = self.hub.uses.get(number, 0) + 1
            limited, ills.limited = ills.limited > 0, max(0, ills.limited - 1)
        if limited:
            self._answer(429, b"", {"Retry-After": ills.retry_after})
        elif body is None or signature != HubServer.sign(self.hub, name) or (ills.uses and used > ills.uses):
            self._answer(403)
        elif ills.hop and "hop" not in parse_qs(url.query):
            self._answer(302, b"", {"Location": f"{self.path.partition('&n=')[0]}&n={number}&hop=1"})
        else:
            self._range(name, bytes(255 - byte for byte in body) if ills.other_bytes else body)

    def _range(self, name: str, body: bytes) -> None:
        ills = self.hub.range_ills
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        tag = ills.tag.format(n=len(self.hub.ranges)) if ills.tag else name
        if ills.other_bytes:
            tag = hashlib.sha256(body).hexdigest()
        if span is None or ills.no_ranges:
            self._answer(200, body, {"ETag": f'"{tag}"'})
            return
        start = int(span[1]) + ills.shift
        part = body[start : int(span[2]) + 1 + ills.shift]
        headers = {"ETag": f'"{tag}"', "Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(body)}"}
        if ills.cut_every and next(self.hub.cuts) % ills.cut_every == 0:
            self.send_response(206)
            for key, value in {"Content-Length": str(len(part)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
        else:
            self._answer(206, part, headers)
