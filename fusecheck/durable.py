"""Bytes and folder entries that are on the disk when a call returns."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fusecheck.errors import UsageError
from fusecheck.signals import signals_held
from fusecheck.target import failure
from fusecheck.temporary import make_temp, release, remove_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""What a file system answers that cannot fsync a folder at all; EIO, in contrast, means that data is lost."""


def write_file(path: Path, data: bytes) -> None:
    """Create `path` with these bytes and fsync it. Its mode follows the umask. SystemFailure: also when it exists."""
    try:
        _create(path, data)
    except OSError as error:
        raise failure(error, str(path), "write") from error


def replace_file(path: Path, data: bytes) -> None:
    """Let `path` hold these bytes, or what it held before; a link is kept, and what it points to replaced.

    A terminal, a pipe, a device and our own stdout or stderr (flush them before) are written directly.
    """
    try:
        stream = _open_stream(path)
        if stream is not None:
            with suppress(BrokenPipeError):  # a reader that went away has seen enough
                _write(stream, data)
            return
        real = Path(os.path.realpath(path))
        with signals_held(), ExitStack() as stack:
            folder, lock = make_temp(real, [])
            stack.callback(release, lock)
            stack.callback(remove_tree, folder)
            _create(folder / "new", data)
            (folder / "new").replace(real)
            with opened(real.parent) as handle:
                sync_folder(handle)
    except OSError as error:
        raise failure(error, str(path), "write") from error


def _create(path: Path, data: bytes) -> None:
    _write(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), data, durable=True)


def _write(handle: int, data: bytes, *, durable: bool = False) -> None:
    """Write all of it, however short each write is, and close the handle: some file systems report errors only then."""
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)


def _open_stream(path: Path) -> int | None:
    """Open what cannot be replaced but only written to; None for a regular file and for nothing."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise UsageError("is a folder, not a file", file=str(path))
    for stream in (1, 2):  # /dev/stdout may be a regular file, which has a position only through our own handle
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(stream)):
                return os.dup(stream)
    return None if stat.S_ISREG(found.st_mode) else os.open(path, os.O_WRONLY | os.O_NOCTTY)


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A folder's descriptor, for fsync."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def sync_folder(handle: int) -> str | None:
    """Make a folder's entries durable; the reason where the file system knows no such thing."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return error.strerror
    return None


def exchange(one: Path, other: Path) -> None:
    """Exchange two folders in one step: renameat2(2) with RENAME_EXCHANGE, which Python does not offer."""
    import ctypes  # noqa: PLC0415  # only --force needs it

    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, swap = -100, 2
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), swap):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
