"""Carries out planned files: one copy loop, bytes and digests together. It decides nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fusecheck.digest import Hasher, hasher
from fusecheck.errors import SystemFailure, UsageError
from fusecheck.plan import Piece, PlannedFile
from fusecheck.reader import Reader

BLOCK_BYTES = 1 << 20
"""One buffer; it stays in the cache between read, hash and write, which larger ones do not."""

OnBytes = Callable[[int], None]
"""Progress: bytes written since the last call. Called from worker threads, one at a time."""


@dataclass(frozen=True, slots=True)
class Written:
    """BLAKE3 (hex) of what one output file was made of: its head, and each of its pieces."""

    head: str
    pieces: tuple[str, ...]


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
        self._left = [1 + len(file.pieces) for file in files]
        self._digests = [[""] * (1 + len(file.pieces)) for file in files]
        self._jobs = self._queue()

    def _queue(self) -> Iterator[tuple[int, int, Piece | None, int]]:
        for number, file in enumerate(self._files):
            yield number, 0, None, 0
            at = len(file.head)
            for slot, piece in enumerate(file.pieces, start=1):
                yield number, slot, piece, at
                at += piece.stop - piece.start

    def work(self) -> None:
        """Take jobs until there are none left or the run stops."""
        buffer = memoryview(bytearray(BLOCK_BYTES))
        try:
            while not self.stop.is_set():
                with self._lock:
                    job = next(self._jobs, None)
                if job is None:
                    return
                self._do(job, buffer)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits in execute()
            with self._lock:
                self.failure = self.failure or error
            self.stop.set()

    def _do(self, job: tuple[int, int, Piece | None, int], buffer: memoryview) -> None:
        number, slot, piece, at = job
        file = self._files[number]
        descriptor = self._descriptor(number)
        state = hasher()
        try:
            if piece is None:
                state.update(file.head)
                _write(descriptor, memoryview(file.head), 0)
                self._tell(len(file.head))
            else:
                self._copy(piece, descriptor, at, state, buffer)
            self._digests[number][slot] = state.hexdigest()
            self._finish(number)
        except OSError as error:
            raise SystemFailure.from_os(error, file.path, "write") from None

    def _copy(self, piece: Piece, descriptor: int, at: int, state: Hasher, buffer: memoryview) -> None:
        offset = piece.start
        while offset < piece.stop and not self.stop.is_set():
            block = buffer[: min(len(buffer), piece.stop - offset)]
            self._reader.read_into(piece.file, offset, block)
            state.update(block)
            _write(descriptor, block, at)
            offset += len(block)
            at += len(block)
            self._tell(len(block))

    def _descriptor(self, number: int) -> int:
        with self._lock:
            if number not in self._open:
                path = self._folder / self._files[number].path
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._open[number] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
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
        return tuple(Written(head, tuple(pieces)) for head, *pieces in self._digests)


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, at)
        data = data[done:]
        at += done
