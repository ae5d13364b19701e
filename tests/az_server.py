"""Azure's blobs on loopback for tests, as far as a checkpoint needs them: a listing, ranges, blobs in one piece or in blocks.

    with AzServer() as az:
        monkeypatch.setenv(...) for az.environment

As Azure does it, a listing gives ETags without the quotes that every other answer has.
"""

from __future__ import annotations

import hashlib
import re
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

CONTAINER = "container"
_DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


class AzServer:
    """A server in threads with one empty container. A context manager; leaving it stops it."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.blocks: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._server.daemon_threads = True
        self.environment = {
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{self._server.server_address[1]}",
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0",
        }

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, az: AzServer, *arguments: object) -> None:
        self.az = az
        super().__init__(*arguments)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "comp" in query:
            self._answer(200, self._listing(query.get("prefix", [""])[0]))
            return
        body = self.az.blobs.get(self._name())
        if body is None:
            self._refuse(404, "BlobNotFound")
        elif self.headers.get("If-Match", _tag(body)) != _tag(body):
            self._refuse(412, "ConditionNotMet")
        elif span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("x-ms-range", self.headers.get("Range", ""))):
            part = body[int(span[1]) : int(span[2]) + 1]
            where = f"bytes {span[1]}-{int(span[1]) + len(part) - 1}/{len(body)}"
            self._answer(206, part, {"ETag": _tag(body), "Content-Range": where})
        else:
            self._answer(200, body, {"ETag": _tag(body)})

    do_HEAD = do_GET  # noqa: N815 - its name is the method's

    def do_PUT(self) -> None:
        query, data = parse_qs(urlsplit(self.path).query), self.rfile.read(int(self.headers["Content-Length"]))
        with self.az.lock:
            if "blockid" in query:
                self.az.blocks[query["blockid"][0]] = data
            elif self.headers.get("If-None-Match") == "*" and self._name() in self.az.blobs:
                return self._refuse(409, "BlobAlreadyExists")
            else:
                names = re.findall(r"<(?:Uncommitted|Latest)>([^<]*)<", data.decode()) if "comp" in query else []
                data = b"".join(self.az.blocks[name] for name in names) if "comp" in query else data
                self.az.blobs[self._name()] = data
        return self._answer(201, b"", {"ETag": _tag(data)})

    def do_DELETE(self) -> None:
        found = self.az.blobs.pop(self._name(), None)
        self._answer(404 if found is None else 202)

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{CONTAINER}/")

    def _listing(self, prefix: str) -> bytes:
        rows = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{_DATE}</Last-Modified>"
            f"<Content-Length>{len(data)}</Content-Length><Content-Type>x</Content-Type>"
            f"<Etag>{_tag(data)[1:-1]}</Etag></Properties></Blob>"
            for name, data in sorted(self.az.blobs.items())
            if name.startswith(prefix)
        )
        return f"<EnumerationResults><Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>".encode()

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode(), {"x-ms-error-code": code})

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), "Last-Modified": _DATE, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _tag(data: bytes) -> str:
    return f'"0x{hashlib.sha256(data).hexdigest()[:15].upper()}"'
