"""Nothing half-written: OUT is absent or complete, after a signal, a full disk, a crash or a power cut.

A run writes into a temp folder beside OUT and renames it onto OUT once every byte is on the disk. The temp folder's
name holds a hash of OUT's name, so that a name of 250 characters works, and its owner holds a lock (flock) on it:
whatever carries such a name and is not locked belongs to a dead run, and the next run into that parent removes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import stat
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from fusecheck.errors import Interrupted, SystemFailure, UsageError
from fusecheck.target import OWN_MACHINE, Target, failure, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TEMP_NAME = re.compile(r"\.fusecheck-[0-9a-f]{16}-[0-9a-f]{8}")
_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""What a file system answers that cannot fsync a folder at all; EIO, in contrast, means that data is lost."""
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


class TargetTaken(SystemFailure):
    """Something appeared at OUT while we wrote: another run won. It may be this very result: the caller looks."""


def staging_folder(target: Target) -> Staging:
    """Make the temp folder of `target` for a `with` block: write below its `path`, then call its `commit`."""
    return Staging(target)


@dataclass(slots=True)
class Staging:
    """The temp folder of one run. Leaving the `with` block without `commit` removes it and the parents made for it."""

    target: Target
    path: Path = field(init=False, default=Path())
    """Where to write, between `with` and `commit`. Every file must be fsynced by whoever wrote it."""
    warnings: list[str] = field(init=False, default_factory=list)
    """What did not work although OUT is right; complete after the `with` block."""
    committed: bool = field(init=False, default=False)
    _lock: int = field(init=False, default=-1)
    _parents: list[Path] = field(init=False, default_factory=list)

    def __enter__(self) -> Self:
        # A class and not a generator: between this `return` and the block Python does not look for signals.
        try:
            with _signals_held():
                self._make_parents()
            self._sweep()
            with _signals_held():
                self.path, self._lock = _make_temp(self.target.path, self.warnings)
            if self.target.replaces:
                self._try_exchange()
            return self  # noqa: TRY300  # nothing may happen behind the `except`
        except BaseException as error:
            self._clean()
            if isinstance(error, OSError):
                raise failure(error, self.target.shown, "create a folder beside it") from error
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._clean()

    def commit(self) -> None:
        """Make everything durable and let it appear as OUT in one step. Once it has appeared, nothing takes it back.

        TargetTaken: another run was faster. SystemFailure: the rename, or an fsync before or after it, failed.
        """
        try:
            self._commit()
        except OSError as error:
            raise failure(error, self.target.shown, "finish it") from error

    def _commit(self) -> None:
        for folder, _, _ in os.walk(self.path, topdown=False, onerror=_reraise):
            with _opened(Path(folder)) as handle:
                self._sync(handle, folder)
        parents = dict.fromkeys([self.target.path.parent, *(folder.parent for folder in self.target.missing)])
        with ExitStack() as stack:
            # Opened before the rename, so that a lack of file descriptors cannot come after it.
            handles = [(stack.enter_context(_opened(parent)), str(parent)) for parent in parents]
            with _signals_held():
                self._rename()
                self.committed = True
                try:
                    for handle, name in handles:
                        self._sync(handle, name)
                finally:
                    self._discard()

    def _make_parents(self) -> None:
        for folder in self.target.missing:
            with suppress(FileExistsError):  # another run makes the same one; its durability is then our matter too
                folder.mkdir()
                self._parents.append(folder)

    def _sweep(self) -> None:
        """Remove what dead runs left in the parent."""
        parent = self.target.path.parent
        with os.scandir(parent) as entries:
            names = sorted(entry.name for entry in entries if _TEMP_NAME.fullmatch(entry.name))
        place = place_of(parent) if names else None
        if place and place.kind not in OWN_MACHINE:
            self._warn(f"{parent}: {names[0]} was left alone: its run may be alive on another machine")
            return
        for path in (parent / name for name in names):
            with suppress(OSError), ExitStack() as stack:
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                stack.callback(os.close, handle)
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _remove_tree(path):
                    self._warn(f"{path}: left by a run that died, and cannot be removed")

    def _try_exchange(self) -> None:
        one, other = self.path / "one", self.path / "other"
        one.mkdir()
        other.mkdir()
        try:
            _exchange(one, other)
        except OSError as error:
            raise SystemFailure(
                f"this file system cannot exchange two folders in one step ({error.strerror}), so --force is not safe",
                file=self.target.shown,
                remedy="write to a new folder",
            ) from error
        one.rmdir()
        other.rmdir()

    def _rename(self) -> None:
        out = self.target
        try:
            if out.replaces:
                with suppress(FileNotFoundError):
                    _exchange(self.path, out.path)
                    return
            self.path.rename(out.path)
        except OSError as error:
            if error.errno in _TAKEN:
                raise TargetTaken("something appeared there while this run wrote", file=out.shown) from error
            raise failure(error, out.shown, "rename the finished folder to it") from error

    def _sync(self, handle: int, name: str) -> None:
        try:
            refusal = _sync_folder(handle)
        except OSError as error:
            state = "complete, but it may not survive a power cut: " if self.committed else ""
            raise SystemFailure(f"{state}cannot fsync {name}: {error.strerror}", file=self.target.shown) from error
        if refusal:
            self._warn(f"{self.target.shown}: this file system cannot fsync a folder ({refusal})")

    def _discard(self) -> None:
        """Remove whatever carries the temp name: what was half written, or after an exchange the old OUT."""
        if self.path.name and not _remove_tree(self.path):
            self._warn(f"{self.path}: this temporary folder cannot be removed")

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _clean(self) -> None:
        while True:
            try:
                with _signals_held(deliver=False):
                    self._tidy()
            except (Interrupted, KeyboardInterrupt):  # it came just before the hold; the answer is given already
                continue
            return

    def _tidy(self) -> None:
        self._discard()
        if not self.committed:
            with suppress(OSError):
                while self._parents:
                    self._parents.pop().rmdir()
        _release(self._lock)
        self._lock = -1


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into `Interrupted` in the main thread.

    Later ones are ignored: they must not stop the cleaning up. A signal that was ignored stays so (nohup). The former
    handlers come back. Outside the main thread: no effect.
    """
    stopping = False

    def stop(signum: int, _: FrameType | None) -> None:
        nonlocal stopping
        if not stopping:
            stopping = True
            raise Interrupted(signum)

    with _handlers(stop):
        yield


def ignore_signals() -> None:
    """For the exit of a program that has done and told all: a signal must neither change its code nor bring a traceback."""
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


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
        with _signals_held(), ExitStack() as stack:
            folder, lock = _make_temp(real, [])
            stack.callback(_release, lock)
            stack.callback(_remove_tree, folder)
            _create(folder / "new", data)
            (folder / "new").replace(real)
            with _opened(real.parent) as handle:
                _sync_folder(handle)
    except OSError as error:
        raise failure(error, str(path), "write") from error


# --- temp folders, locks, signals ---


def _make_temp(beside: Path, warnings: list[str]) -> tuple[Path, int]:
    """Make and lock a temp folder; -1 where the file system has no locks. Call it while signals are held.

    Another run's sweep may lock or remove the folder before we lock it. Then it is theirs, and we take a new name: no
    run ever waits for another one.
    """
    digest = hashlib.blake2b(os.fsencode(beside.name), digest_size=8).hexdigest()
    while True:
        path = beside.parent / f".fusecheck-{digest}-{os.urandom(4).hex()}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        handle = -1
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), path.stat()):
                return path, handle
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            if handle >= 0:
                warnings.append(f"{beside.parent}: no locks here ({error.strerror}): what dead runs left stays")
                return path, handle
            _remove_tree(path)
            raise
        _release(handle)


def _release(handle: int) -> None:
    if handle >= 0:
        os.close(handle)


def _remove_tree(path: Path) -> bool:
    """Remove what is there, if anything; whether it is gone. Never raises: it must not hide the error that led here."""
    shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        return True
    with suppress(OSError):  # folders that forbid to remove what is in them
        path.chmod(0o700)
        for folder, names, _ in os.walk(path):
            for inner in (Path(folder) / name for name in names):
                if not inner.is_symlink():
                    inner.chmod(0o700)
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # the way that needs no file descriptor
        path.rmdir()
    return not os.path.lexists(path)


@contextmanager
def _signals_held(*, deliver: bool = True) -> Iterator[None]:
    """Put signals off until the block is done; without `deliver`, drop them.

    Done with handlers and not with a mask: another thread would take a masked signal, and Python would still run the
    handler in the main thread.
    """
    came: list[int] = []
    with _handlers(lambda signum, _: came.append(signum)):
        yield
    if came and deliver:
        signal.raise_signal(came[0])


@contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    with ExitStack() as stack:
        for signum in _SIGNALS if threading.current_thread() is threading.main_thread() else ():
            former = signal.getsignal(signum)
            if former not in (signal.SIG_IGN, None):
                stack.callback(signal.signal, signum, former)
                signal.signal(signum, handler)
        yield


# --- small pieces of I/O ---


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
def _opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def _sync_folder(handle: int) -> str | None:
    """Make a folder's entries durable; the reason where the file system knows no such thing."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return error.strerror
    return None


def _reraise(error: OSError) -> None:
    raise error


def _exchange(one: Path, other: Path) -> None:
    """Exchange two folders in one step: renameat2(2) with RENAME_EXCHANGE, which Python does not offer."""
    import ctypes  # noqa: PLC0415  # only --force needs it

    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, exchange = -100, 2
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if libc.renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
