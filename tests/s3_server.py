"""moto's S3 on loopback for tests, with what other stores do wrong put before it.

    with S3Server() as s3:
        monkeypatch.setenv(...) for s3.environment
        s3.faults.ignore_if_none_match = True

moto itself looks and then writes; here conditional writes wait for each other, as those of a real store do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "bucket"
ACCOUNT = "123456789012"
"""The one that moto serves to whoever asks."""


@dataclass(slots=True)
class Faults:
    """What the store does wrong, nothing at first."""

    ignore_if_none_match: bool = False
    refuse_if_none_match: bool = False
    """It answers 501, as S3 did for years."""
    ignore_if_match: bool = False
    ignore_range: bool = False
    refuse_part: int = 0
    """The part of this number is refused with 403."""
    conflicts: int = 0
    """So many conditional writes are answered 409, as S3 does while another one is under way."""
    cut_every: int = 0
    """Each so-manieth body of an object ends in the middle, with the connection."""
    deny: bool = False
    """Everything is answered 403."""
    silent: str = ""
    """Requests whose path holds this are not answered before the server stops; `heard` is set by the first."""
    silent_after: int = 0
    """So many of them are answered all the same."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came in."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: object) -> None:  # noqa: A002 - as its base names it
        """Tests look at `seen`."""


class S3Server:
    """A server in threads with one empty bucket. A context manager; leaving it stops it."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.seen: list[Asked] = []
        self._lock = threading.Lock()
        self._conditional = threading.RLock()
        self._bodies = 0
        self.heard, self._stopping = threading.Event(), threading.Event()
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=_Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._backend = s3_backends[ACCOUNT]["aws"]
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-key",
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self) -> Self:
        self._backend.reset()
        self._backend.create_bucket(BUCKET, "us-east-1")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._backend.reset()

    def reset(self) -> None:
        """An empty bucket again, and no faults."""
        self._backend.reset()
        self._backend.create_bucket(BUCKET, "us-east-1")
        self.faults = Faults()
        self.seen.clear()

    def put(self, key: str, data: bytes) -> None:
        """Let an object be there."""
        self._backend.put_object(BUCKET, key, data)

    def version(self) -> None:
        """Keep versions from now on."""
        self._backend.put_bucket_versioning(BUCKET, "Enabled")

    def objects(self) -> dict[str, bytes]:
        """Every object's bytes, by key."""
        return {str(name): bytes(key.value) for name, key in self._backend.buckets[BUCKET].keys.items()}

    def open_multiparts(self) -> int:
        """Multipart uploads that are neither complete nor aborted."""
        return len(self._backend.buckets[BUCKET].multiparts)

    def asked(self, method: str, part: str = "") -> list[Asked]:
        """Requests of one method whose path holds a text."""
        return [seen for seen in self.seen if seen.method == method and part in seen.path]

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        names = {key[5:].lower().replace("_", "-"): str(value) for key, value in environ.items() if key[:5] == "HTTP_"}
        asked = Asked(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("QUERY_STRING", ""), names)
        part = parse_qs(asked.query).get("partNumber", ["0"])[0]
        silent = bool(self.faults.silent) and self.faults.silent in asked.path
        with self._lock:
            self.seen.append(asked)
            answered, self.faults.silent_after = self.faults.silent_after, max(0, self.faults.silent_after - silent)
        if silent and not answered:
            self.heard.set()
            self._stopping.wait(60)
        if self.faults.deny or (self.faults.refuse_part and part == str(self.faults.refuse_part)):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"]
        if "HTTP_IF_NONE_MATCH" in environ and (self.faults.conflicts or self.faults.refuse_if_none_match):
            known = not self.faults.refuse_if_none_match
            self.faults.conflicts -= known
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("409 Conflict" if known else "501 Unknown", [("Content-Type", "application/xml")])
            code = b"ConditionalRequestConflict" if known else b"NotImplemented"
            return [b"<?xml version='1.0'?><Error><Code>%s</Code></Error>" % code]
        if self.faults.ignore_if_none_match:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if self.faults.ignore_range:
            environ.pop("HTTP_RANGE", None)
        if self.faults.ignore_if_match:
            environ.pop("HTTP_IF_MATCH", None)
        if "HTTP_IF_NONE_MATCH" in environ:
            with self._conditional:
                return list(self._app(environ, start_response))
        answer: Iterable[bytes] = self._app(environ, start_response)
        return self._cut(b"".join(answer)) if asked.method == "GET" and "range" in names else answer

    def _cut(self, body: bytes) -> Iterator[bytes]:
        with self._lock:
            self._bodies += 1
            cut = self.faults.cut_every and self._bodies % self.faults.cut_every == 0
        if not cut:
            yield body
            return
        yield body[: len(body) // 2]
        raise ConnectionResetError
