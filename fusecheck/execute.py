"""Carries out planned files: one copy loop, bytes and digests together. It decides nothing."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path

from fusecheck.digest import digest_of, hasher
from fusecheck.errors import SystemFailure, UsageError
from fusecheck.gather import ReusedBuffers, pieces
from fusecheck.plan import Block, Constant, PlannedFile, Strip, strip_bytes
from fusecheck.reader import Reader
from fusecheck.shards import lane_name

WRITEBACK_BYTES = 8 << 20
"""How much is written before the disk is told to begin; smaller files are not preallocated either."""

OnBytes = Callable[[int], None]
"""Progress: bytes written since the last call. Called from worker threads, one at a time."""


@dataclass(frozen=True, slots=True)
class Written:
    """BLAKE3 (hex) of what one output file was made of: its head, and the blocks of each of its strips."""

    head: str
    strips: tuple[tuple[str, ...], ...]


def execute(
    files: Sequence[PlannedFile], reader: Reader, folder: Path, *, threads: int, on_bytes: OnBytes
) -> tuple[Written, ...]:
    """Write all files below `folder`, each fsynced, and return their digests in the same order.

    Every byte is read once and hashed as it passes. The first failure stops all workers and is raised here.
    """
    if threads < 1:  # no worker would write nothing, and call it done
        raise UsageError("the number of threads is below 1", found=threads)
    run = _Run(files, reader, folder, on_bytes)
    workers = [threading.Thread(target=run.work, name=f"fusecheck-{n}", daemon=True) for n in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        # a signal raised in join() must not leave a worker writing into a folder that is being removed
        run.stop.set()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        run.close()
    if run.failure is not None:
        raise run.failure
    return run.written()


class _Run:
    """State shared by the workers of one execute(): the queue of jobs, the open outputs, the digests."""

    def __init__(self, files: Sequence[PlannedFile], reader: Reader, folder: Path, on_bytes: OnBytes) -> None:
        self.stop = threading.Event()
        self.failure: BaseException | None = None
        self._files = files
        self._reader = reader
        self._folder = folder
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._open: dict[int, int] = {}
        self._left = [1 + len(file.strips) for file in files]
        self._digests: list[list[tuple[str, ...]]] = [[()] * (1 + len(file.strips)) for file in files]
        self._jobs = self._queue()

    def _queue(self) -> Iterator[tuple[int, int, Strip, int]]:
        """(file, slot, strip, offset in the file); the head of a file is its first strip."""
        for _, lane in groupby(enumerate(self._files), key=lambda item: lane_name(item[1].path)):
            yield from _in_turn([_slots(number, file) for number, file in lane])

    def work(self) -> None:
        """Take jobs until there are none left or the run stops."""
        buffers = ReusedBuffers()
        try:
            while not self.stop.is_set():
                with self._lock:
                    job = next(self._jobs, None)
                if job is None:
                    return
                self._do(job, buffers)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in execute()
            with self._lock:
                self.failure = self.failure or error
            self.stop.set()

    def _do(self, job: tuple[int, int, Strip, int], buffers: ReusedBuffers) -> None:
        number, slot, strip, at = job
        descriptor = self._descriptor(number)
        try:
            if isinstance(strip, Constant):
                _write(descriptor, memoryview(strip.data), at)
                self._tell(strip.nbytes)
                self._digests[number][slot] = (digest_of(strip.data),)
            else:
                self._digests[number][slot] = self._copy(strip, descriptor, at, buffers)
            self._finish(number)
        except OSError as error:
            raise SystemFailure.from_os(error, self._files[number].path, "write") from None

    def _copy(self, blocks: tuple[Block, ...], descriptor: int, at: int, buffers: ReusedBuffers) -> tuple[str, ...]:
        """One strip, piece by piece."""
        states = [hasher() for _ in blocks]
        for piece in pieces(blocks, self._reader, buffers, states):
            _write(descriptor, piece, at)
            _begin_writeback(descriptor, at, len(piece))
            at += len(piece)
            self._tell(len(piece))
            if self.stop.is_set():
                break
        return tuple(state.hexdigest() for state in states)

    def _descriptor(self, number: int) -> int:
        with self._lock:
            if number not in self._open:
                path = self._folder / self._files[number].path
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._open[number] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                    _preallocate(self._open[number], self._files[number].size)
                except OSError as error:
                    raise SystemFailure.from_os(error, self._files[number].path, "create") from None
            return self._open[number]

    def _finish(self, number: int) -> None:
        """Count a job off; whoever does the file's last one makes it durable and closes it."""
        with self._lock:
            self._left[number] -= 1
            descriptor = self._open.pop(number) if self._left[number] == 0 else None
        if descriptor is not None:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _tell(self, count: int) -> None:
        with self._lock:
            self._on_bytes(count)

    def close(self) -> None:
        while self._open:
            with suppress(OSError):
                os.close(self._open.popitem()[1])

    def written(self) -> tuple[Written, ...]:
        return tuple(Written(head[0], tuple(strips)) for head, *strips in self._digests)


def _slots(number: int, file: PlannedFile) -> Iterator[tuple[int, int, Strip, int]]:
    at = 0
    for slot, strip in enumerate((Constant(file.head), *file.strips)):
        yield number, slot, strip, at
        at += strip_bytes(strip)


def _in_turn(files: list[Iterator[tuple[int, int, Strip, int]]]) -> Iterator[tuple[int, int, Strip, int]]:
    return (job for slot in zip_longest(*files) for job in slot if job is not None)


def _preallocate(descriptor: int, size: int) -> None:
    """Lay the file out in one piece and meet a full disk before the first byte; file systems that cannot are left alone."""
    if size < WRITEBACK_BYTES:
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise


def _begin_writeback(descriptor: int, at: int, size: int) -> None:
    """Let the disk work while we copy on, instead of all at once in fsync. What is dirty is written, not dropped."""
    start, stop = at // WRITEBACK_BYTES * WRITEBACK_BYTES, (at + size) // WRITEBACK_BYTES * WRITEBACK_BYTES
    if start < stop:
        with suppress(OSError):  # advice, which a file system may not take
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, at)
        data = data[done:]
        at += done
