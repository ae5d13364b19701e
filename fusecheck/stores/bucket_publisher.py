"""Objects below a bucket prefix: each whole or not at all, the manifest last and only where none stands."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from fusecheck.daemons import apart, result_of, wait_for_one
from fusecheck.errors import FusecheckError, SystemFailure
from fusecheck.reader import StoredFile
from fusecheck.sidefiles import MANIFEST
from fusecheck.stores.address import Address, is_name
from fusecheck.stores.bucket import connect, is_unknown_to_store, told
from fusecheck.stores.bucket_source import list_bucket, stored_object
from fusecheck.stores.folder_publisher import OWN, taken

if TYPE_CHECKING:
    from obstore import PutResult

T = TypeVar("T")

MIB = 1 << 20
MAX_PARTS = 10_000
"""Parts of one object that every store allows."""
_PROBE = f"{OWN}/probe-"
_CONFLICTS = 5
"""Commits that are refused although nothing is there, one after the other."""
_ABORT_SECONDS = 20
"""How long the abort of a multipart is waited for: a store that is silent has the process no longer."""
_JOINED = timedelta(minutes=5)
"""How long a store may be silent: before it answers it takes a part in, or joins the parts of a large object."""
_HELD = 64 * MIB
"""Bytes of parts in flight, of all objects that are written together; one part of each where that is more."""

_QUEUED = 4
"""Blocks, of a MiB as they are made, that wait for the upload of one object."""


class BucketPublisher:
    """Puts by multipart from an iterator. obstore works in threads of ours, so that a signal ends a put at once."""

    def __init__(self, address: Address, *, allow_unconditional: bool = False) -> None:
        self._where = str(address)
        self._store = connect(address, silent=_JOINED)
        self._allow_unconditional = allow_unconditional
        self._conditional: bool | None = None
        self._puts = 0
        self._lock = threading.Lock()
        self._closed: Future[None] = Future()

    def check(self) -> None:
        """Create one object twice: a store that lets the second overwrite could lose a commit. SystemFailure."""
        name = f"{_PROBE}{os.urandom(8).hex()}"
        made = self._create(name, b"probe")
        self._conditional = not self._create(name, b"again")
        self._remove(name)
        if not made:
            raise SystemFailure("a new object is said to exist", file=self._where, found=name)
        if not self._conditional and not self._allow_unconditional:
            raise SystemFailure(
                "the store knows no If-None-Match, so that two runs could overwrite each other's commit",
                file=self._where,
                remedy="give --allow-unconditional if no other run writes there",
            )

    def _remove(self, name: str) -> None:
        with suppress(SystemFailure):  # who may write need not be allowed to delete
            self.delete(name)

    def have(self, name: str) -> StoredFile | None:
        """Size, ETag and version of what stands there."""
        import obstore  # noqa: PLC0415 - an extra

        with told(f"{self._where}/{name}", "look at"):
            try:
                return stored_object(self._call(lambda: obstore.head(self._store, self._key(name))))
            except FileNotFoundError:
                return None

    def put(self, name: str, blocks: Iterator[memoryview], size: int) -> StoredFile:
        """Stream `size` bytes; whatever fails or stops it aborts the multipart. Looked at afterwards."""
        key = self._key(name)
        part = part_size(size)
        feed = _Feed(blocks, name, size)
        self._count(1)
        try:
            feed.run(apart(lambda: self._upload(key, feed, size, part), "fusecheck-put"))
        finally:
            self._count(-1)
        found = self.have(name)
        if found is None or found.size != size:
            raise SystemFailure("was not stored whole", file=name, found=found and found.size, wanted=size)
        return found

    def commit(self, manifest: bytes) -> bool:
        """Create the manifest; where one stands, it is this very one (False) or another (UsageError)."""
        if self._conditional is None:
            self.check()
        if not self._conditional and self.have(MANIFEST) is None:
            self._call(lambda: self._single(MANIFEST, manifest))
            return True
        for attempt in range(_CONFLICTS):
            if self._conditional and self._create(MANIFEST, manifest):
                return True
            if self.have(MANIFEST) is not None:
                break
            time.sleep(0.2 * 2**attempt)  # S3 refuses one of two that come together before either is there
        if self.read(MANIFEST) != manifest:
            raise taken(self._where)
        return False

    def list(self) -> Mapping[str, StoredFile]:
        """Every object below the prefix, probes apart."""
        found = self._call(lambda: list_bucket(self._store, self._where))
        return {name: file for name, file in found.items() if not name.startswith(_PROBE)}

    def read(self, name: str) -> bytes:
        """All bytes of a small object."""
        import obstore  # noqa: PLC0415 - an extra

        with told(f"{self._where}/{name}", "read"):
            return self._call(lambda: bytes(obstore.get(self._store, self._key(name)).bytes()))

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
        import obstore  # noqa: PLC0415 - an extra

        with told(f"{self._where}/{name}", "remove"):
            try:
                self._call(lambda: obstore.delete(self._store, self._key(name)))
            except FileNotFoundError:
                return

    def close(self) -> None:
        """End every wait: what a silent store still owes holds nobody."""
        with self._lock:
            if not self._closed.done():
                self._closed.set_result(None)

    def _count(self, puts: int) -> None:
        with self._lock:
            self._puts += puts

    def _key(self, name: str) -> str:
        if not is_name(name):
            raise FusecheckError("is no name of an object", found=repr(name))
        return name

    def _call(self, work: Callable[[], T]) -> T:
        """Wait for a thread, which a signal and `close` interrupt; obstore itself would not be."""
        future = apart(work, "fusecheck-ask")
        wait_for_one(future, self._closed)
        if not future.done():
            raise SystemFailure("the target was closed", file=self._where)
        return future.result()

    def _create(self, name: str, data: bytes) -> bool:
        """Put if absent; False where something stands, True where the store wrote, conditionally or not."""
        import obstore  # noqa: PLC0415 - an extra
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        with told(f"{self._where}/{name}", "write"):
            try:
                self._call(lambda: obstore.put(self._store, self._key(name), data, mode="create"))
            except (AlreadyExistsError, PreconditionError):
                return False
            except Exception as error:
                if not is_unknown_to_store(error):
                    raise
                self._call(lambda: self._single(name, data))
        return True

    def _single(self, name: str, data: bytes) -> PutResult:
        import obstore  # noqa: PLC0415 - an extra

        with told(f"{self._where}/{name}", "write"):
            return obstore.put(self._store, self._key(name), data, use_multipart=False)

    def _upload(self, key: str, feed: _Feed, size: int, part: int) -> None:
        import obstore  # noqa: PLC0415 - an extra

        if size <= part:  # one request, and an ETag that is the MD5
            self._single(key, b"".join(feed))
            return
        blocks = iter(feed)
        blocks = chain([next(blocks)], blocks)  # now all that write together have begun
        flying = _in_flight(part, self._puts)
        with told(f"{self._where}/{key}", "write"):
            obstore.put(self._store, key, blocks, use_multipart=True, chunk_size=part, max_concurrency=flying)


def part_size(size: int) -> int:
    """Bytes of a part, whole MiB, so that an object has no more parts than every store allows."""
    least = -(-size // MAX_PARTS)
    return max(8 * MIB, -(-least // MIB) * MIB)


def _in_flight(part: int, puts: int) -> int:
    """Parts of one object under way at one time, of so many objects that are written together."""
    return max(1, min(8, _HELD // (part * puts)))


def put_memory(sizes: Sequence[int]) -> int:
    """Bytes held at most while objects of these sizes are written together."""
    parts = [min(size, part_size(size)) for size in sizes]
    return sum(part * (1 + _in_flight(part, len(sizes))) + _QUEUED * MIB for part in parts if part)


class _Stopped(Exception):
    """Ends an upload in its thread: raised in its iterator, it makes obstore abort."""


class _Feed:
    """Blocks from the thread that makes them to the one that uploads them, a few at a time, each a copy."""

    def __init__(self, blocks: Iterator[memoryview], name: str, size: int) -> None:
        self._blocks = blocks
        self._name = name
        self._size = size
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED)
        self._stop = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        """In the uploading thread: until the end, or until the other side stops."""
        while True:
            try:
                block = self._queue.get(timeout=0.1)
            except queue.Empty:
                if self._stop.is_set():
                    raise _Stopped from None
                continue
            if self._stop.is_set():
                raise _Stopped
            if block is None:
                return
            yield block

    def run(self, upload: Future[None]) -> None:
        """In the thread that owns the blocks: hand them over, wait for the end; any failure stops the upload first."""
        try:
            self._hand_all(upload)
            result_of(upload)
        except BaseException:
            self._stop.set()
            wait([upload], timeout=_ABORT_SECONDS)  # the abort is the upload's last request
            raise

    def _hand_all(self, upload: Future[None]) -> None:
        written = 0
        for block in self._blocks:
            for at in range(0, len(block), 8 * MIB):
                self._hand(bytes(block[at : at + 8 * MIB]), upload)
            written += len(block)
        if written != self._size:
            raise FusecheckError("was given as another size", file=self._name, found=written, wanted=self._size)
        self._hand(None, upload)

    def _hand(self, block: bytes | None, upload: Future[None]) -> None:
        while True:
            try:
                self._queue.put(block, timeout=0.1)
            except queue.Full:
                if upload.done():
                    upload.result()
                    raise FusecheckError("the upload ended before its file", file=self._name) from None
            else:
                return
