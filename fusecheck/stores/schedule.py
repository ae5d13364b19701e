"""Ranges that will be read, in order -> the requests that fetch them; pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MIB = 1 << 20
GAP = MIB
"""Bytes between two ranges that are fetched with them rather than leaving a request of their own."""
LARGEST = 32 * MIB
"""Bytes of one request at most: of the 8 to 64 MiB that stores serve well, so that many fit into the memory."""
OPEN = 8
"""Requests that may still grow at one time, so that as many places may be read in turns."""


@dataclass(slots=True, eq=False)
class Window:
    """One request: bytes [start, stop) of a file. `expected` counts the bytes that will be read of it, each time."""

    file: str
    start: int
    stop: int
    expected: int = 0

    @property
    def size(self) -> int:
        """In bytes."""
        return self.stop - self.start


@dataclass(slots=True)
class _Planner:
    """Cuts each range among windows that may still grow, newest first, and opens new ones for the rest."""

    largest: int
    gap: int
    windows: list[Window] = field(default_factory=list)
    growing: list[Window] = field(default_factory=list)

    def add(self, file: str, start: int, stop: int) -> None:
        """Take one range, piece by piece."""
        while start < stop:
            window = self._window(file, start, stop)
            end = min(stop, window.stop)
            window.expected += end - start
            self.growing.remove(window)
            self.growing.append(window)
            start = end

    def _window(self, file: str, start: int, stop: int) -> Window:
        """A window that holds `start` now: one that has it, one that grows to it, or a new one. None overlap as they grow."""
        mine = [window for window in self.growing if window.file == file]
        above = min((window for window in mine if window.start > start), key=lambda window: window.start, default=None)
        end = stop if above is None else min(stop, above.start)
        holding = (window for window in mine if window.start <= start < window.stop)
        below = (w for w in mine if w.stop <= start <= w.stop + self.gap and start < w.start + self.largest)
        window = next(holding, None) or max(below, key=lambda window: window.stop, default=None)
        if window is not None:
            window.stop = max(window.stop, min(end, window.start + self.largest))
            return window
        if above is not None and above.start <= stop + self.gap and above.stop - start <= self.largest:
            above.start = start
            return above
        window = Window(file, start, min(end, start + self.largest))
        self.windows.append(window)
        self.growing.append(window)
        del self.growing[:-OPEN]
        return window


def schedule(ranges: Iterable[tuple[str, int, int]], *, largest: int = LARGEST, gap: int = GAP) -> list[Window]:
    """Windows in the order in which they are first needed, for ranges (file, offset, size) in the order of reading.

    A range that is read again while its window may still grow is fetched once. No more than OPEN windows are needed at
    one time, if the reads come in the order of the ranges.
    """
    planner = _Planner(largest, gap)
    for file, offset, size in ranges:
        planner.add(file, offset, offset + size)
    return planner.windows


def by_grain(windows: list[Window], grain: int) -> dict[tuple[str, int], list[int]]:
    """(file, offset // grain) -> numbers of the windows that hold bytes there, in order."""
    found: dict[tuple[str, int], list[int]] = {}
    for number, window in enumerate(windows):
        for place in range(window.start // grain, (window.stop - 1) // grain + 1):
            found.setdefault((window.file, place), []).append(number)
    return found
