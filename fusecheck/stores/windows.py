"""One pass over ranges known beforehand: joined into large requests, several in flight ahead of the reader."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from enum import Enum, auto
from mmap import mmap
from types import TracebackType
from typing import Self, TypeAlias

from fusecheck.daemons import LOOK_SECONDS, Daemons
from fusecheck.errors import SystemFailure
from fusecheck.reader import Reader
from fusecheck.stores.schedule import GAP, LARGEST, MIB, OPEN, Window, by_grain, schedule

HELD = 448 * MIB
"""Bytes that are fetched or in flight and not yet read, at most."""
IN_FLIGHT = 8
"""Requests at one time."""


class _State(Enum):
    PLANNED = auto()
    FETCHING = auto()
    READY = auto()
    FAILED = auto()
    DROPPED = auto()


Memory: TypeAlias = bytes | mmap
"""Of one window. Mapped, since blocks of just these sizes, freed by other threads, leave malloc with 200 MB of holes."""
_NOTHING: Memory = b""


class _Slot:
    """A window and what has become of it; guarded by the lock of its `Windows`, but for the bytes once READY."""

    __slots__ = ("data", "error", "left", "readers", "state", "window")

    def __init__(self, window: Window) -> None:
        self.window = window
        self.left = window.expected
        self.state = _State.PLANNED
        self.readers = 0
        """Who copies out of `data` now: so long it is not used for another window."""
        self.data = _NOTHING
        self.error: BaseException | None = None


class Windows:
    """A Reader for the ranges (file, offset, size) that will be read, in about this order, each as often as it stands here.

    Ranges may be read in pieces, from several threads, slightly out of order. What was read as often as announced is
    dropped. What was not announced, or is asked for again, or comes so early that there is no room for it, is read from
    the source directly; what was announced and is never read holds its memory until the end. Close it before the source.
    """

    def __init__(
        self,
        source: Reader,
        ranges: Iterable[tuple[str, int, int]],
        *,
        held: int = HELD,
        in_flight: int = IN_FLIGHT,
        largest: int = LARGEST,
        gap: int = GAP,
    ) -> None:
        self.requests = 0
        """Made of the source so far, direct ones too."""
        self.bytes_fetched = 0
        self.peak = 0
        """Most bytes held at one time."""
        self._source = source
        self._limit = held
        self._grain = largest = max(1, min(largest, held // (2 * OPEN)))  # what is being read takes half at most
        self._slots = [_Slot(window) for window in schedule(ranges, largest=largest, gap=gap)]
        self._index = by_grain([slot.window for slot in self._slots], largest)
        self._spare: list[mmap] = []  # a fresh one costs more than what is copied into it
        self._change = threading.Condition()
        self._next = self._flying = self._held = 0
        self._in_flight = in_flight
        self._closed = False
        self._threads = Daemons(in_flight, "fusecheck-fetch")
        with self._change:
            self._advance()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def planned(self) -> int:
        """Requests that one pass takes."""
        return len(self._slots)

    @property
    def held(self) -> int:
        """Bytes held now, fetched or in flight."""
        return self._held

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; what failed while it was fetched ahead is raised here, for each who needs it."""
        done = 0
        while done < len(buffer):
            done += self._piece(file, offset + done, buffer[done:])

    def close(self) -> None:
        """Give up what is still to come. Requests in flight end by themselves, or with the source."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._threads.close()

    def _piece(self, file: str, offset: int, buffer: memoryview) -> int:
        """Serve what one window has of a read, or the source where none has the beginning; bytes served."""
        with self._change:
            slot, size = self._find(file, offset, len(buffer))
            if slot is not None and slot.state is _State.PLANNED and self._room(slot):
                self._start(slot)
            while slot is not None and slot.state is _State.FETCHING and not self._closed:
                self._change.wait(LOOK_SECONDS)
            if self._closed:
                raise SystemFailure("the pass over the source has ended", file=file)
            if slot is not None and slot.state is _State.FAILED and slot.error is not None:
                raise slot.error
            ready = slot is not None and slot.state is _State.READY
            if slot is not None and ready:
                slot.readers += 1
            else:
                self._count(size)
        if slot is not None and ready:
            at = offset - slot.window.start
            buffer[:size] = memoryview(slot.data)[at : at + size]
        else:
            self._source.read_into(file, offset, buffer[:size])
        if slot is not None:
            with self._change:
                slot.readers -= ready
                self._served(slot, size)
        return size

    def _find(self, file: str, offset: int, size: int) -> tuple[_Slot | None, int]:
        """The first window with bytes left to serve that holds `offset`, and how far it serves the read."""
        here = offset // self._grain
        stop = min(offset + size, (here + 1) * self._grain)
        for number in self._index.get((file, here), ()):
            slot = self._slots[number]
            if slot.state is _State.DROPPED:
                continue
            if slot.window.start <= offset < slot.window.stop:
                return slot, min(offset + size, slot.window.stop) - offset
            if slot.window.start > offset:
                stop = min(stop, slot.window.start)
        return None, stop - offset

    def _served(self, slot: _Slot, size: int) -> None:
        slot.left -= size
        if slot.left > 0 or slot.readers or slot.state in {_State.DROPPED, _State.FETCHING}:
            return
        if slot.state in {_State.READY, _State.FAILED}:
            self._held -= slot.window.size
        if isinstance(slot.data, mmap) and len(slot.data) == self._grain:
            self._spare.append(slot.data)
        slot.state, slot.data = _State.DROPPED, _NOTHING
        self._advance()

    def _room(self, slot: _Slot) -> bool:
        return not self._closed and self._held + slot.window.size <= self._limit

    def _advance(self) -> None:
        """Begin requests in order, while there is room and a thread for them."""
        while self._next < len(self._slots) and self._flying < self._in_flight:
            slot = self._slots[self._next]
            if slot.state is _State.PLANNED:
                if not self._room(slot):
                    return
                self._start(slot)
            self._next += 1

    def _start(self, slot: _Slot) -> None:
        slot.state = _State.FETCHING
        self._flying += 1
        self._held += slot.window.size
        while self._spare and self._held + len(self._spare) * self._grain > self._limit:
            self._spare.pop()
        self.peak = max(self.peak, self._held)
        self._count(slot.window.size)
        self._threads.submit(lambda: self._fetch(slot))

    def _count(self, size: int) -> None:
        self.requests += 1
        self.bytes_fetched += size

    def _fetch(self, slot: _Slot) -> None:
        error: BaseException | None = None
        data = _NOTHING
        try:
            data = self._buffer(slot.window.size)
            self._source.read_into(slot.window.file, slot.window.start, memoryview(data))
        except BaseException as caught:  # noqa: BLE001 - it is raised where the bytes are needed
            error = caught
        with self._change:
            self._flying -= 1
            slot.state = _State.READY if error is None else _State.FAILED
            slot.data, slot.error = (data, None) if error is None else (_NOTHING, error)
            if slot.left <= 0:  # read directly meanwhile
                self._served(slot, 0)
            elif not self._closed:
                self._advance()
            self._change.notify_all()

    def _buffer(self, size: int) -> mmap:
        with self._change:
            if size == self._grain and self._spare:
                return self._spare.pop()
        try:
            return mmap(-1, size)
        except OSError as error:
            raise SystemFailure(f"no memory to read ahead: {error.strerror}", found=f"{size} bytes") from None
