"""Requests to the hub and to the stores behind it: the token goes to the hub alone, redirects are never followed blindly.

The client is the one that huggingface_hub makes (its proxies and certificates, its refusal to work offline), whichever
HTTP library that is built on.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from fusecheck import __version__
from fusecheck.errors import FusecheckError, SystemFailure, UsageError
from fusecheck.hub.failure import failure
from fusecheck.stores.hosts import check_endpoint, check_redirect, joined, origin
from fusecheck.stores.patience import Attempts, Pace, Patience, Pause, asked_to_wait

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers that a later one may not repeat."""
MOVED = frozenset({301, 302, 303, 307, 308})
_QUERY = re.compile(r"\?[^\s'\"<>]+")
MAX_LISTING = 64 << 20
"""Bytes of one page of a listing that are taken."""


class Response(Protocol):
    """What we use of the HTTP library's answer."""

    status_code: int

    @property
    def headers(self) -> Mapping[str, str]:
        """By name in any case."""

    def iter_raw(self) -> Iterator[bytes]:
        """The body as it comes."""

    def read(self) -> bytes:
        """All of the body."""


class _Client(Protocol):
    def stream(
        self, method: str, url: str, *, headers: dict[str, str], follow_redirects: bool, timeout: float
    ) -> AbstractContextManager[Response]: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What the hub said; the body only where there is one to read."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HubHttp:
    """One repository's requests, counted. Safe from many threads."""

    def __init__(self, repo_id: str, patience: Patience | None = None) -> None:
        try:
            from huggingface_hub import constants, errors, get_session, get_token  # noqa: PLC0415 - heavy, reads the environment
        except (ImportError, ValueError) as error:
            raise SystemFailure(
                f"huggingface_hub cannot be loaded: {error}", remedy="check the HF_ variables"
            ) from None
        if constants.HF_HUB_OFFLINE:
            what = "is read over the network, and HF_HUB_OFFLINE is set"
            raise SystemFailure(what, file=f"hf://{repo_id}", remedy=f"unset it, or name {repo_id} without hf://")
        self.endpoint = constants.ENDPOINT.rstrip("/")
        check_endpoint(self.endpoint)
        self.repo_id = repo_id
        self.requests = 0
        self.retries = 0
        self.pause = Pause(patience or Patience())
        self._lock = threading.Lock()
        self._client = cast("_Client", get_session())
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        if token and not (token.isascii() and token.isprintable()):
            raise UsageError("the hub's token is none: it holds what no token can", remedy="check HF_TOKEN")
        self._token = f"Bearer {token}" if token else None
        self._headers = {"user-agent": f"fusecheck/{__version__}", "accept-encoding": "identity"}
        self._timeout = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        broken = next(kind for kind in errors.HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
        library = type(self._client).__module__.partition(".")[0]
        self.broken: tuple[type[BaseException], ...] = (broken, sys.modules[library].InvalidURL, OSError)
        """What the HTTP library raises when a connection fails, or can never be made."""
        _hush(library)

    def attempts(self) -> Attempts:
        """For one read."""
        return Attempts(self.pause)

    @contextmanager
    def open(self, method: str, url: str, headers: Mapping[str, str] | None = None) -> Iterator[Response]:
        """One request, redirects not followed; the token goes along only to the hub itself."""
        self.pause.before_request()
        sent = {**self._headers, **(headers or {})}
        if self._token is not None and origin(url) == origin(self.endpoint):
            sent["authorization"] = self._token
        with self._lock:
            self.requests += 1
        with self._client.stream(method, url, headers=sent, follow_redirects=False, timeout=self._timeout) as response:
            wait = asked_to_wait(response.headers) if response.status_code in {429, 503} else None
            if wait is not None:
                self.pause.told(wait)
            yield response

    def count_retry(self) -> None:
        """Something is asked for again."""
        with self._lock:
            self.retries += 1

    def ask(self, method: str, url: str, *, revision: str | None, headers: Mapping[str, str] | None = None) -> Answer:
        """A question to the hub itself, asked again while that may help. Its refusals are FusecheckErrors, as in `fuse`.

        With headers of its own it is for the answer's headers: a body of more than some bytes is left there.
        """
        attempts = self.attempts()
        while True:
            try:
                with self.open(method, url, headers) as response:
                    if response.status_code < 400:
                        short = len(response.headers.get("content-length", "")) <= 4
                        body = self._body(response) if headers is None or short else b""
                        return Answer(response.status_code, response.headers, body)
                    response.read()
                    reason, again = self.refusal(response, revision), response.status_code in AGAIN
            except self.broken as error:
                reason, again = failure(cast("Exception", error), self.repo_id, revision), True
            if not again:
                raise reason
            self.count_retry()
            attempts.failed(reason)

    def refusal(self, response: Response, revision: str | None) -> FusecheckError:
        """What an answer of the hub from 400 on means; its body has been read."""
        from huggingface_hub import errors  # noqa: PLC0415 - as above
        from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined] # noqa: PLC0415

        try:
            hf_raise_for_status(cast("Any", response))
        except errors.HfHubHTTPError as error:
            return failure(error, self.repo_id, revision)
        return SystemFailure(f"the hub answered {response.status_code}", file=self.repo_id)

    def redirected(self, url: str, headers: Mapping[str, str]) -> str:
        """Where a redirect leads, once that is seen to be allowed. SystemFailure."""
        target = joined(url, headers.get("location", ""))
        check_redirect(target, self.endpoint)
        return target

    def json(self, url: str, *, revision: str | None) -> tuple[object, Mapping[str, str]]:
        """(document, headers) of a question to the hub's API."""
        answer = self.ask("GET", url, revision=revision)
        for _ in range(5):  # a repository that was renamed
            if answer.status not in MOVED:
                break
            url = self.redirected(url, answer.headers)
            answer = self.ask("GET", url, revision=revision)
        try:
            if answer.status == 200:
                return json.loads(answer.body), answer.headers
        except (ValueError, RecursionError):
            pass
        raise SystemFailure(
            "the hub's answer is none",
            file=self.repo_id,
            found=answer.status,
            remedy="check the network and HF_ENDPOINT",
        )

    def _body(self, response: Response) -> bytes:
        body, pace = bytearray(), Pace(self.pause.patience)
        for chunk in response.iter_raw():
            body += chunk
            if len(body) > MAX_LISTING:
                raise SystemFailure("the hub's answer is too long", wanted=f"<= {MAX_LISTING} bytes")
            if not pace.keeps(len(chunk)):
                raise SystemFailure("the hub's answer does not come to its end", file=self.repo_id, remedy="run again")
        return bytes(body)


def _hush(library: str) -> None:
    """Cut the queries, which sign, out of the lines that the libraries log, for whoever shows those."""
    for name in (library, f"{library.replace('httpx', 'httpcore')}.http11", "huggingface_hub.utils._http"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, _NoQueries) for known in logger.filters):
            logger.addFilter(_NoQueries())


class _NoQueries(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every line."""
        record.msg = _QUERY.sub("?", str(record.msg))
        if isinstance(record.args, tuple):
            record.args = tuple(
                arg if isinstance(arg, int | float) else _QUERY.sub("?", str(arg)) for arg in record.args
            )
        return True
