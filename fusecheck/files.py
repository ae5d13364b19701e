"""The regular files of one folder, opened once, read by pread, and known to be the same until the end."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from fusecheck import digest
from fusecheck.errors import CheckpointError, SystemFailure
from fusecheck.reader import Reader
from fusecheck.sidefiles import LeftOut, SideFile, survey_side_files

MAX_JSON_BYTES = 64 * 1024 * 1024
"""Largest index or config that is read."""

MAX_OPEN = 256
"""Files of one checkpoint held open at once; those beyond are opened for each read and checked to be the same."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What fstat says of a file; a difference between two looks means that it changed."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Take the fields of one stat result."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Files:
    """Regular files of one folder, opened once, read by pread. A context manager; close() gives the descriptors back."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._identity: dict[str, Identity] = {}
        self._open: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor."""
        while self._open:
            os.close(self._open.popitem()[1])

    @property
    def place(self) -> str:
        """The folder, for people."""
        return str(self.root)

    def is_folder(self, name: str) -> bool:
        """Whether an entry is a folder, or a link to one."""
        return stat.S_ISDIR(mode_of(self.root / name))

    def expect_heads(self, names: Sequence[str]) -> None:
        """A disk needs no warning."""

    def side_files(
        self, taken: frozenset[str], *, follow_links: bool
    ) -> tuple[tuple[SideFile, ...], tuple[LeftOut, ...]]:
        """Everything beside the files that are `taken`: what goes along, and what is left out."""
        return survey_side_files(self.root, taken, follow_links=follow_links)

    def add(self, name: str) -> Identity:
        """Open `name` and remember what it is. CheckpointError unless it is a regular file."""
        descriptor, status = self._open_file(name)
        self._identity[name] = Identity.of(status)
        if len(self._open) < MAX_OPEN:
            self._open[name] = descriptor
        else:
            os.close(descriptor)
        return self._identity[name]

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of `file`; a short file is a source that changed (SystemFailure)."""
        kept = self._open.get(file)
        descriptor = self._reopen(file) if kept is None else kept
        try:
            done = 0
            while done < len(buffer):
                got = os.preadv(descriptor, [buffer[done:]], offset + done)
                if not got:
                    raise SystemFailure("became shorter while it was read", file=file, found=f"end at {offset + done}")
                done += got
        except OSError as error:
            raise SystemFailure.from_os(error, file, "read") from None
        finally:
            if kept is None:
                os.close(descriptor)

    def read(self, file: str, limit: int) -> bytes:
        """All bytes of a small file of this folder; CheckpointError above `limit` bytes."""
        size = self._identity[file].size
        if size > limit:
            raise CheckpointError("is too large", file=file, found=f"{size} bytes", wanted=f"<= {limit}")
        data = bytearray(size)
        self.read_into(file, 0, memoryview(data))
        return bytes(data)

    def digest(self, file: str, start: int = 0, stop: int | None = None) -> str:
        """BLAKE3 of a file, or of its bytes [start, stop), as hex."""
        state, at = digest.hasher(), start
        end = self._identity[file].size if stop is None else stop
        buffer = memoryview(bytearray(min(end - start, 1 << 20)))
        while at < end:
            block = buffer[: min(len(buffer), end - at)]
            self.read_into(file, at, block)
            state.update(block)
            at += len(block)
        return state.hexdigest()

    def changed_since(self, moment_ns: int) -> bool:
        """Whether any file was written, or came to be, after a moment. Copies that keep mtime still renew ctime."""
        return any(max(file.mtime_ns, file.ctime_ns) > moment_ns for file in self._identity.values())

    def check_unchanged(self) -> None:
        """SystemFailure when any file is no longer what it was when it was opened."""
        for name, was in self._identity.items():
            descriptor = self._open.get(name)
            try:
                now = Identity.of(os.fstat(descriptor) if descriptor is not None else (self.root / name).stat())
            except OSError as error:
                raise SystemFailure.from_os(error, name, "look at") from None
            if now != was:
                raise _changed(name)

    def _reopen(self, name: str) -> int:
        try:
            descriptor, status = self._open_file(name)
        except CheckpointError:  # gone, or no regular file any more
            raise _changed(name) from None
        if Identity.of(status) != self._identity[name]:
            os.close(descriptor)
            raise _changed(name)
        return descriptor

    def _open_file(self, name: str) -> tuple[int, os.stat_result]:
        try:
            # without O_NONBLOCK a FIFO blocks for ever; regular files ignore it
            descriptor = os.open(self.root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            dangling = (self.root / name).is_symlink()
            if dangling:
                raise CheckpointError("is a dangling link", file=name, remedy="download it again") from None
            raise CheckpointError("is missing", file=name) from None
        except OSError as error:
            if stat.S_ISSOCK(mode_of(self.root / name)):
                raise CheckpointError("is no regular file", file=name, found="a socket") from None
            if error.errno == errno.ELOOP:
                raise CheckpointError("is a link that leads to itself", file=name) from None
            raise SystemFailure.from_os(error, name, "open") from None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise CheckpointError("is no regular file", file=name, found=_kind(status.st_mode))
        return descriptor, status


def same_bytes(one: Reader, ours: tuple[str, int], other: Reader, theirs: tuple[str, int], size: int) -> bool:
    """Whether `size` bytes from (file, offset) `ours` of one reader equal those from `theirs` of the other."""
    for at in range(0, size, 1 << 20):
        blocks = bytearray(min(1 << 20, size - at)), bytearray(min(1 << 20, size - at))
        one.read_into(ours[0], ours[1] + at, memoryview(blocks[0]))
        other.read_into(theirs[0], theirs[1] + at, memoryview(blocks[1]))
        if blocks[0] != blocks[1]:
            return False
    return True


def _changed(name: str) -> SystemFailure:
    return SystemFailure("changed while it was read", file=name, remedy="run again once nothing writes to the source")


def mode_of(path: Path) -> int:
    """st_mode behind a path, links followed; 0 where nothing can be seen."""
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for test, name in kinds if test(mode)), "a special file")
