"""A folder as a source: what a Job on a shared volume reads."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path

from fusecheck.errors import SystemFailure, UsageError
from fusecheck.files import MAX_OPEN, Identity
from fusecheck.reader import StoredFile
from fusecheck.stores.frozen import agreed, changed, stored


class FolderSource:
    """The regular files of a folder (links to files are followed), told apart by size and time of the last write.

    Within one process a file must stay all that fstat says of it; between nodes only size and mtime mean the same.
    """

    def __init__(self, root: Path, *, frozen: Mapping[str, StoredFile] | None = None) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._open: dict[str, tuple[int, Identity]] = {}
        self._files = agreed(list_folder(root), frozen)

    def files(self) -> Mapping[str, StoredFile]:
        """Every regular file, by its path below the folder."""
        return self._files

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of `file`, which must not have changed before or after."""
        stored(self._files, file, offset, len(buffer))
        try:
            handle, identity, kept = self._opened(file)
            try:
                done = 0
                while done < len(buffer):
                    got = os.preadv(handle, [buffer[done:]], offset + done)
                    if not got:
                        raise changed(file)
                    done += got
                if Identity.of(os.fstat(handle)) != identity:
                    raise changed(file)
            finally:
                if not kept:
                    os.close(handle)
        except OSError as error:
            raise SystemFailure.from_os(error, file, "read") from None

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            while self._open:
                os.close(self._open.popitem()[1][0])

    def _opened(self, file: str) -> tuple[int, Identity, bool]:
        """(descriptor, what it was at first, whether it stays open)."""
        with self._lock:
            if file in self._open:
                return *self._open[file], True
            handle = os.open(self._root / file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or stored_file(status) != self._files[file]:
                os.close(handle)
                raise changed(file)
            kept = len(self._open) < MAX_OPEN
            if kept:
                self._open[file] = handle, Identity.of(status)
            return handle, Identity.of(status), kept


def stored_file(status: os.stat_result) -> StoredFile:
    """What tells a file from any other, on every node that mounts its folder."""
    return StoredFile(status.st_size, {"mtime_ns": str(status.st_mtime_ns)})


def list_folder(root: Path) -> dict[str, StoredFile]:
    """Every regular file below, links to files followed, in order of the names. UsageError where there is no folder."""
    found: dict[str, StoredFile] = {}

    def fail(error: OSError) -> None:
        raise error

    try:
        if not root.is_dir():
            raise UsageError("is no folder", file=str(root))
        for folder, _, names in os.walk(root, onerror=fail):
            for name in names:
                path = Path(folder, name)
                if path.is_file():
                    found[path.relative_to(root).as_posix()] = stored_file(path.stat())
    except OSError as error:
        raise SystemFailure.from_os(error, str(root), "list") from None
    return dict(sorted(found.items()))
