"""A source and a target in memory, with everything that a run may meet there: what was read is counted, puts can fail."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from fusecheck.errors import SystemFailure
from fusecheck.reader import StoredFile


def folder_files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for what the three verbs write beside a checkpoint."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return {name: data for name, data in files.items() if not name.startswith(".fusecheck/")}


class MemorySource:
    """Files by name; `seen` holds every range that was read."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.contents = dict(files)
        self.seen: list[tuple[str, int, int]] = []
        self.closed = False
        self._lock = threading.Lock()

    @classmethod
    def of(cls, folder: Path) -> MemorySource:
        return cls(folder_files(folder))

    def files(self) -> Mapping[str, StoredFile]:
        return {name: StoredFile(len(data), {"etag": str(hash(data))}) for name, data in self.contents.items()}

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        with self._lock:
            self.seen.append((file, offset, len(buffer)))
        data = self.contents[file][offset : offset + len(buffer)]
        if len(data) != len(buffer):
            raise SystemFailure("is read beyond its end", file=file)
        buffer[:] = data

    def close(self) -> None:
        self.closed = True


class MemoryPublisher:
    """Files by name. `fail` names one whose put stops in the middle."""

    def __init__(self, *, fail: str | None = None) -> None:
        self.contents: dict[str, bytes] = {}
        self._fail = fail
        self._numbers = itertools.count()

    def have(self, name: str) -> StoredFile | None:
        data = self.contents.get(name)
        return None if data is None else StoredFile(len(data), {"etag": str(hash(data))})

    def put(self, name: str, blocks: Iterator[memoryview], size: int) -> StoredFile:
        data = bytearray()
        for block in blocks:
            data += block
            if name == self._fail and len(data) > size // 2:
                raise SystemFailure("the store is gone", file=name)
        assert len(data) == size
        self.contents[name] = bytes(data)
        return StoredFile(size, {"etag": str(hash(bytes(data)))})

    def commit(self, manifest: bytes) -> bool:
        raise NotImplementedError
