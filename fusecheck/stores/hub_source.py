"""A repository of the hub at one commit, read by range from the stores behind it.

One question for the commit, one listing, one per large file for its signed URL; all else are ranges of the files
themselves. Small files the hub keeps itself: they are asked for where they are.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from fusecheck.errors import FusecheckError, SystemFailure, UsageError
from fusecheck.reader import StoredFile
from fusecheck.stores.address import Address
from fusecheck.stores.frozen import changed, stored
from fusecheck.stores.hosts import origin
from fusecheck.stores.hub_answer import unfit
from fusecheck.stores.hub_http import AGAIN, MOVED, HubHttp, Response
from fusecheck.stores.hub_tree import commit_of, list_tree
from fusecheck.stores.patience import Pace, Patience

_EXPIRED = frozenset({400, 401, 403, 410})
"""What stores answer to a signed URL whose time is over."""
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(slots=True)
class _Link:
    """Where one file's bytes are. `url` is a credential where it is signed, that is not of the hub itself."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str | None = None
    named: bool = False
    """The hub said with it that the content is the commit's."""
    xet: str | None = None
    """The hub's other name for the content, which its newer store may give as ETag."""
    tag: str | None = None
    """The store's own ETag, where it is neither: from the first answer on it must stay."""


@dataclass(frozen=True, slots=True)
class _Got:
    """Bytes that came of one request, and why not all."""

    size: int
    short: FusecheckError | None = None
    gone: bool = False
    """The URL is not to be used again."""
    moved: str | None = None
    final: bool = False


class HubSource:
    """Reads by range, demanding the commit's content in each answer. Safe from many threads."""

    def __init__(
        self,
        address: Address,
        *,
        frozen: Mapping[str, StoredFile] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._http = HubHttp(address.root, patience)
        self._repo = address.root
        self.revision = address.revision
        """As asked for; None for the repository's default."""
        if frozen is None:
            self.commit = commit_of(self._http, address.revision)
            self._files: Mapping[str, StoredFile] = list_tree(self._http, self.commit)
        else:
            self.commit = _one_commit(frozen, str(address))
            self._files = dict(frozen)
        self._links = {name: _Link() for name in self._files}
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.resolves = 0
        """Questions for the place of a large file."""

    @property
    def requests(self) -> int:
        """Made so far, of every kind."""
        return self._http.requests

    @property
    def retries(self) -> int:
        """Of these, those that asked for something again."""
        return self._http.retries

    def files(self) -> Mapping[str, StoredFile]:
        """Every file of the commit: identified by the commit and its SHA-256, or its git object where the hub keeps it."""
        return self._files

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; a body that ends early is asked for again from where it ended."""
        stored(self._files, file, offset, len(buffer))
        done, attempts = 0, self._http.attempts()
        while done < len(buffer):
            url, fresh = self._url(file)
            got = self._part(file, url, offset + done, buffer[done:])
            done += got.size
            with self._lock:
                self.bytes_read += got.size
            attempts.came(got.size, len(buffer) - done + got.size)
            if got.short is None:
                continue
            if got.final:
                raise got.short
            if got.gone or got.moved:
                self._forget(file, url, got.moved)
            self._http.count_retry()
            if fresh or not got.gone:  # a URL that ran out during a wait is no failure; one refused when new is
                attempts.failed(got.short, at_once=got.gone or got.moved is not None)

    def close(self) -> None:
        """End every read and every wait. The connections are huggingface_hub's own."""
        self._http.pause.close()

    def _part(self, file: str, url: str, start: int, buffer: memoryview) -> _Got:
        """One request for a range; what came of it."""
        stop = start + len(buffer)
        done, pace = 0, Pace(self._http.pause.patience)
        try:
            with self._http.open("GET", url, {"range": f"bytes={start}-{stop - 1}"}) as response:
                refused = self._refused(file, url, response, start, stop)
                if refused is not None:
                    return refused
                for chunk in response.iter_raw():
                    if done + len(chunk) > len(buffer):
                        return _Got(0, self._wrong(file, "sends more bytes than asked for"), final=True)
                    buffer[done : done + len(chunk)] = chunk
                    done += len(chunk)
                    self._http.pause.check_open()
                    if not pace.keeps(len(chunk)):
                        return _Got(done, self._wrong(file, "sends next to nothing"))
        except self._http.broken as error:
            return _Got(done, self._wrong(file, f"cannot be read: {type(error).__name__}"))
        return _Got(done) if done == len(buffer) else _Got(done, self._wrong(file, "ends an answer early"))

    def _refused(self, file: str, url: str, response: Response, start: int, stop: int) -> _Got | None:
        """None where the answer holds what was asked for."""
        if response.status_code in AGAIN | MOVED | _EXPIRED:
            retry = self._retry(file, url, response)
            if retry is not None:
                return retry
        status, headers, size = response.status_code, response.headers, self._files[file].size
        ours = origin(url) == origin(self._http.endpoint)
        if status >= 400:
            response.read()
            refusal = self._http.refusal(response, self.revision) if ours else self._wrong(file, f"answered {status}")
            return _Got(0, changed(file) if status == 416 else refusal, final=True)
        wrong = unfit(status, headers, (start, stop, size), kept="sha256" not in self._files[file].identity)
        if wrong is not None:
            return _Got(0, self._wrong(file, wrong.what, found=wrong.found, wanted=wrong.wanted), final=True)
        if not self._same(file, headers, ours=ours):
            return _Got(0, changed(file), final=True)
        told = (_tag(headers, "etag"), _tag(headers, "x-linked-etag"))
        if not self._links[file].named and self._wanted(file) not in told:
            return _Got(0, self._wrong(file, "does not say which content it sends"), final=True)
        return None

    def _retry(self, file: str, url: str, response: Response) -> _Got | None:
        """What can be asked for again: later, elsewhere, or with a new URL."""
        status = response.status_code
        if status in AGAIN:
            return _Got(0, self._wrong(file, f"answered {status}"))
        if status in MOVED:
            moved = self._http.redirected(url, response.headers)
            return _Got(0, self._wrong(file, "redirects in a circle"), moved=moved)
        if origin(url) != origin(self._http.endpoint):
            return _Got(0, self._wrong(file, f"refuses a new signed URL: it answered {status}"), gone=True)
        return None

    def _same(self, file: str, headers: Mapping[str, str], *, ours: bool) -> bool:
        """Whether the ETags are those of the commit. Where a store has its own kind of them, it must stay the same."""
        wanted = self._wanted(file)
        linked, tag = _tag(headers, "x-linked-etag"), _tag(headers, "etag")
        if (linked and linked != wanted) or headers.get("x-repo-commit", self.commit) != self.commit:
            return False
        link = self._links[file]
        if not tag or ours or _SHA256.fullmatch(tag):
            return not tag or tag == wanted or (not ours and tag == link.xet)
        with self._lock:
            link.tag = link.tag or tag
            return link.tag == tag

    def _url(self, file: str) -> tuple[str, bool]:
        """The place of a file, asked for once for all threads where it is not with the hub; and whether it was just now."""
        link = self._links[file]
        with link.lock:
            fresh = link.url is None
            if link.url is None:
                url = f"{self._http.endpoint}/{self._repo}/resolve/{self.commit}/{quote(file)}"
                link.url = self._resolve(file, url) if "sha256" in self._files[file].identity else url
            return link.url, fresh

    def _forget(self, file: str, url: str, moved: str | None) -> None:
        """Do not use a URL again, unless another thread has a new one already."""
        link = self._links[file]
        with link.lock:
            if link.url == url:
                link.url = moved

    def _resolve(self, file: str, url: str) -> str:
        """Ask the hub where the bytes are. Redirects within the hub are followed; another host's URL is signed.

        By GET, for one byte where there is no redirect: a store may sign for the method that the hub was asked with.
        """
        link = self._links[file]
        with self._lock:
            self.resolves += 1
        for _ in range(5):
            answer = self._http.ask("GET", url, revision=self.revision, headers={"range": "bytes=0-0"})
            if not self._same(file, {k: v for k, v in answer.headers.items() if k.lower() != "etag"}, ours=True):
                raise changed(file)
            if answer.headers.get("x-linked-size", size := str(self._files[file].size)) != size:
                raise changed(file)
            link.xet = answer.headers.get("x-xet-hash")
            link.named = link.named or bool(link.xet or _tag(answer.headers, "x-linked-etag"))
            if answer.status not in MOVED:
                return url
            url = self._http.redirected(url, answer.headers)
            if origin(url) != origin(self._http.endpoint):
                return url
        raise self._wrong(file, "redirects in a circle")

    def _wanted(self, file: str) -> str:
        """The ETag of the commit's content."""
        identity = self._files[file].identity
        return identity.get("sha256") or identity.get("oid", "")

    def _wrong(self, file: str, what: str, *, found: object = None, wanted: object = None) -> SystemFailure:
        """Never with a URL."""
        what = f"the store behind the hub {what}"
        return SystemFailure(what, file=file, found=found, wanted=wanted, remedy="check the network, and run again")


def _tag(headers: Mapping[str, str], name: str) -> str:
    return headers.get(name, "").removeprefix("W/").strip('"')


def _one_commit(frozen: Mapping[str, StoredFile], where: str) -> str:
    commits = {file.identity.get("commit") for file in frozen.values()}
    commit = commits.pop() if len(commits) == 1 else None
    if commit is None:
        raise UsageError("the plan's files are not of one commit", file=where, remedy="plan again")
    return commit
