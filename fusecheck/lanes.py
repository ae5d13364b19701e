"""Planned files as streams: pieces in order, with the digests that `execute` makes, each file to a publisher of its own.

A lane is several files that are cut out of the same source tensors and advance together, strip by strip, so that each
byte of the source is read once. Their strips correspond: the third strip of each is cut out of the same tensor.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias, TypeVar

from fusecheck.digest import digest_of, hasher
from fusecheck.errors import SystemFailure
from fusecheck.execute import Written
from fusecheck.gather import Buffers, FreshBuffers, ReusedBuffers, pieces, reads
from fusecheck.plan import Block, Constant, PlannedFile, Strip
from fusecheck.reader import Publisher, Reader, StoredFile
from fusecheck.shards import lane_name

Lane: TypeAlias = tuple[PlannedFile, ...]
"""Files that are written in one pass over their sources."""

OnBytes: TypeAlias = Callable[[int], None]
"""Bytes made since the last call."""

_Item = TypeVar("_Item")

QUEUED = 16
"""Pieces, of about a MiB each, that wait for the publishers of a lane; one for each at least."""

_WAIT_SECONDS = 0.5

_GIVE_UP_SECONDS = 25
"""What puts that are given up have for their cleaning up: less than a scheduler leaves between its two signals."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A file as it stands at its publisher, and what it was made of. `sha256` only where it was asked for."""

    file: PlannedFile
    stored: StoredFile
    written: Written
    sha256: str | None = None


def lanes_of(files: Iterable[PlannedFile]) -> tuple[Lane, ...]:
    """Files that belong together, in the order of the first of each: the ranks of one part, all others on their own."""
    lanes: dict[str, list[PlannedFile]] = {}
    for file in files:
        lanes.setdefault(lane_name(file.path), []).append(file)
    return tuple(map(tuple, lanes.values()))


def lane_reads(lane: Lane) -> Iterator[tuple[str, int, int]]:
    """(file, offset, size) of all that a lane reads, in its order."""
    for strips in _rounds(lane):
        runs = [reads(strip) for _, strip in strips if not isinstance(strip, Constant)]
        yield from (read for _, read in _in_turn(runs, together=_together(strips)))


def send(
    lane: Lane, reader: Reader, publisher: Publisher, on_bytes: OnBytes, *, sha256: bool = False
) -> tuple[Sent, ...]:
    """Write all files of a lane. What fails for one of them fails for all, and leaves nothing half written."""
    if len(lane) == 1:  # without a queue: a publisher is done with a piece when it asks for the next
        makers = [_Maker(lane[0], ReusedBuffers(), sha256=sha256)]
        stream = (piece for _, piece in _told(_stream(makers, reader), on_bytes))
        return (makers[0].sent(publisher.put(lane[0].path, stream, lane[0].size)),)
    makers = [_Maker(file, FreshBuffers(), sha256=sha256) for file in lane]
    sinks = [_Sink(publisher, file, max(1, QUEUED // len(lane))) for file in lane]
    try:
        for sink in sinks:
            sink.begun.wait()
        for number, piece in _told(_stream(makers, reader), on_bytes):
            sinks[number].take(piece)
        return tuple(maker.sent(sink.finish()) for maker, sink in zip(makers, sinks, strict=True))
    finally:
        _give_up(sinks)


def _told(stream: Iterable[tuple[int, memoryview]], on_bytes: OnBytes) -> Generator[tuple[int, memoryview], None, None]:
    for number, piece in stream:
        on_bytes(len(piece))
        yield number, piece


class _Maker:
    """The digests of one file while its pieces are made."""

    def __init__(self, file: PlannedFile, buffers: Buffers, *, sha256: bool) -> None:
        self.file = file
        self._buffers = buffers
        self._sha = hashlib.sha256() if sha256 else None
        self._strips: list[tuple[str, ...]] = []

    def head(self) -> memoryview:
        """What stands before the first strip."""
        return self._seen(memoryview(self.file.head))

    def pieces(self, strip: Strip, reader: Reader) -> Iterator[memoryview]:
        """One strip."""
        if isinstance(strip, Constant):
            self._strips.append((digest_of(strip.data),))
            yield self._seen(memoryview(strip.data))
            return
        states = [hasher() for _ in strip]
        for piece in pieces(strip, reader, self._buffers, states):
            yield self._seen(piece)
        self._strips.append(tuple(state.hexdigest() for state in states))

    def sent(self, stored: StoredFile) -> Sent:
        """Once all of it has been taken."""
        written = Written(digest_of(self.file.head), tuple(self._strips))
        return Sent(self.file, stored, written, self._sha.hexdigest() if self._sha else None)

    def _seen(self, piece: memoryview) -> memoryview:
        if self._sha is not None:
            self._sha.update(piece)
        return piece


def _stream(makers: Sequence[_Maker], reader: Reader) -> Iterator[tuple[int, memoryview]]:
    """(number of the file, its next piece)."""
    for number, maker in enumerate(makers):
        if maker.file.head:
            yield number, maker.head()
    for strips in _rounds([maker.file for maker in makers]):
        runs = [makers[number].pieces(strip, reader) for number, strip in strips]
        for turn, piece in _in_turn(runs, together=_together(strips)):
            if piece:
                yield strips[turn][0], piece


def _rounds(files: Sequence[PlannedFile]) -> Iterator[list[tuple[int, Strip]]]:
    """The first strip of each file, the second, and so on: (number of the file, strip)."""
    for strips in zip_longest(*(file.strips for file in files)):
        yield [(number, strip) for number, strip in enumerate(strips) if strip is not None]


def _together(strips: Sequence[tuple[int, Strip]]) -> bool:
    """Whether strips read between one another's rows; ranges that stand one after another are read one after another."""
    return any(_is_strided(strip) for _, strip in strips)


def _is_strided(strip: Strip) -> bool:
    return not isinstance(strip, Constant) and any(_gap(block) for block in strip)


def _gap(block: Block) -> bool:
    return block.stride != block.row_bytes


def _in_turn(runs: Sequence[Iterator[_Item]], *, together: bool) -> Iterator[tuple[int, _Item]]:
    """(number, item): one of each in turn, or all of the first, then all of the second."""
    if not together:
        for number, run in enumerate(runs):
            yield from ((number, item) for item in run)
        return
    left = dict(enumerate(runs))
    while left:
        for number in tuple(left):
            item = next(left[number], None)
            if item is None:
                del left[number]
            else:
                yield number, item


class _Sink:
    """One publisher's put in a thread, fed through a small queue."""

    def __init__(self, publisher: Publisher, file: PlannedFile, queued: int) -> None:
        self._file = file
        self._queue: queue.Queue[memoryview | None] = queue.Queue(queued)
        self._stopped = threading.Event()
        self.begun = threading.Event()
        """Its put has asked for the first piece: all do before any gets one, so that a publisher knows how many share."""
        self._result: StoredFile | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(publisher,), name="fusecheck-put", daemon=True)
        self._thread.start()

    def take(self, piece: memoryview | None) -> None:
        """Hand over a piece; raises what the put has raised."""
        while True:
            if self._error is not None:
                raise self._error
            with suppress(queue.Full):
                self._queue.put(piece, timeout=_WAIT_SECONDS)
                return

    def finish(self) -> StoredFile:
        """That was all: what stands there now."""
        self.take(None)
        while self._thread.is_alive():
            self._thread.join(_WAIT_SECONDS)
        if self._error is not None or self._result is None:
            raise self._error or SystemFailure("was not stored", file=self._file.path)
        return self._result

    def stop(self) -> None:
        """Let a put that is still running fail; nothing happens to one that has finished."""
        self._stopped.set()

    def join(self, seconds: float) -> None:
        """Wait for its end."""
        self._thread.join(max(0.0, seconds))

    def _run(self, publisher: Publisher) -> None:
        try:
            self._result = publisher.put(self._file.path, self._blocks(), self._file.size)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that feeds it
            self._error = error
        finally:
            self.begun.set()

    def _blocks(self) -> Iterator[memoryview]:
        self.begun.set()
        while not self._stopped.is_set():
            with suppress(queue.Empty):
                piece = self._queue.get(timeout=_WAIT_SECONDS)
                if piece is None:
                    return
                yield piece
        raise SystemFailure("was given up", file=self._file.path)


def _give_up(sinks: Sequence[_Sink]) -> None:
    """Stop every put that is still running, and wait, not for ever, for what each does to leave nothing behind."""
    end = time.monotonic() + _GIVE_UP_SECONDS
    for sink in sinks:
        sink.stop()
    for sink in sinks:
        sink.join(end - time.monotonic())
