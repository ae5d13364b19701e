"""A bucket prefix as a source: listed once, and every byte asked for under the identity that the listing gave."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fusecheck.daemons import aside
from fusecheck.errors import FusecheckError, SystemFailure, UsageError
from fusecheck.reader import StoredFile
from fusecheck.stores.address import Address
from fusecheck.stores.bucket import connect, failure, told
from fusecheck.stores.frozen import agreed, changed, stored
from fusecheck.stores.patience import Attempts, Patience, Pause

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ObjectStore

_CHUNK = 1 << 20
"""Bytes that obstore hands over at a time."""


class BucketSource:
    """Reads by range with If-Match, and the version where the listing gives one. Safe from many threads."""

    def __init__(self, address: Address, *, frozen: Mapping[str, StoredFile] | None = None) -> None:
        self.requests = 0
        self.retries = 0
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._pause = Pause(Patience())
        self._store = connect(address)
        self._files = agreed(aside(lambda: list_bucket(self._store, str(address))), frozen)
        if not self._files:
            raise UsageError("there is nothing", file=str(address), remedy="check the bucket and the prefix")
        untold = next((name for name, file in self._files.items() if "etag" not in file.identity), None)
        if untold is not None:
            raise SystemFailure("the store gives it no ETag, so that no change would show", file=untold)

    def files(self) -> Mapping[str, StoredFile]:
        """Every object, by its key below the prefix."""
        return self._files

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; a body that ends early is asked for again from where it ended."""
        if threading.current_thread() is threading.main_thread():  # obstore does not look for signals
            aside(lambda: self._read_into(file, offset, buffer))
        else:
            self._read_into(file, offset, buffer)

    def _read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        known = stored(self._files, file, offset, len(buffer))
        done, attempts = 0, Attempts(self._pause)
        while done < len(buffer):
            result = self._get(file, known, offset + done, offset + len(buffer))
            got, error = self._drain(result, buffer[done:])
            attempts.came(got, len(buffer) - done)
            done += got
            with self._lock:
                self.bytes_read += got
                self.retries += done < len(buffer)
            if done < len(buffer):
                early = failure(error, file, "read") if error else SystemFailure("ends early each time", file=file)
                attempts.failed(early, at_once=True)

    def close(self) -> None:
        """End every read; obstore closes its connections with the last use."""
        self._pause.close()

    def _get(self, file: str, known: StoredFile, start: int, stop: int) -> GetResult:
        import obstore  # noqa: PLC0415 - an extra
        from obstore.exceptions import PreconditionError  # noqa: PLC0415

        options: GetOptions = {"range": (start, stop), "if_match": known.identity["etag"]}
        if "version" in known.identity:
            options["version"] = known.identity["version"]
        self._pause.check_open()
        with self._lock:
            self.requests += 1
        with told(file, "read"):
            try:
                result = obstore.get(self._store, file, options=options)
            except (PreconditionError, FileNotFoundError):
                raise changed(file) from None
        here = stored_object(result.meta)  # some servers do not know If-Match
        if (here.size, here.identity.get("etag")) != (known.size, known.identity.get("etag")):
            raise changed(file)
        if result.range != (start, stop):
            raise SystemFailure("the store gives other bytes than asked for", file=file, found=result.range)
        return result

    def _drain(self, result: GetResult, buffer: memoryview) -> tuple[int, Exception | None]:
        """(bytes that came, what ended them early)."""
        done = 0
        try:
            for chunk in result.stream(min_chunk_size=_CHUNK):
                self._pause.check_open()
                part = memoryview(chunk)[: len(buffer) - done]
                buffer[done : done + len(part)] = part
                done += len(part)
        except FusecheckError:
            raise
        except Exception as error:  # noqa: BLE001 - as in `told`
            return done, error
        return done, None


def list_bucket(store: ObjectStore, where: str) -> dict[str, StoredFile]:
    """Every object below the prefix, in order of the keys. UsageError for a key that no path can be."""
    import obstore  # noqa: PLC0415 - an extra
    from obstore.exceptions import InvalidPathError  # noqa: PLC0415

    with told(where, "list"):
        try:
            found: dict[str, ObjectMeta] = {}
            for meta in (meta for page in obstore.list(store, chunk_size=1000) for meta in page):
                if meta["size"] or meta["path"] not in found:  # a marker is cut to the name of a file beside it
                    found[meta["path"]] = meta
        except InvalidPathError:
            raise UsageError("holds a key that is no path", file=where, remedy="remove it, such as a//b") from None
        names = sorted(name for name, meta in found.items() if name and (meta["size"] or not _is_marker(store, name)))
    return {name: stored_object(found[name]) for name in names}


def _is_marker(store: ObjectStore, name: str) -> bool:
    """Whether an empty object is what consoles make of a folder: its key ends with a slash, which obstore cuts off."""
    import obstore  # noqa: PLC0415 - an extra

    try:
        obstore.head(store, name)
    except FileNotFoundError:
        return True
    return False


def stored_object(meta: ObjectMeta) -> StoredFile:
    """Size, ETag and version (S3 lists none; "null" is what it says where there are none).

    Azure lists ETags without the quotes that its other answers have, and that If-Match needs.
    """
    tag = meta["e_tag"]
    quoted = tag if not tag or tag.endswith('"') else f'"{tag}"'
    identity = {"etag": quoted, "version": meta["version"] if meta["version"] != "null" else None}
    return StoredFile(meta["size"], {key: value for key, value in identity.items() if value})
