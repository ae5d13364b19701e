"""How far a run has come: plain lines for logs; the bar of a terminal is rich's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from rich.filesize import decimal

Phase: TypeAlias = "Callable[[str], Callable[[int, int], None] | None]"
"""What is being done -> a callback for (bytes done, bytes in total), or None where nothing is to be shown."""

_LINE_SECONDS = 30.0
_LINE_SHARE = 0.1


class Lines:
    """Progress as plain lines."""

    def __init__(self, doing: str, tell: Callable[[str], None], *, steps: bool = False) -> None:
        self._steps = steps
        self._doing = doing
        self._tell = tell
        self._last = time.monotonic()
        self._share = 0.0
        self._first: tuple[float, int] | None = None
        """When the first bytes were done, and how many: what is made ready before them says nothing of the rate."""

    def update(self, done: int, total: int) -> None:
        """Print a line when enough has happened, but never more than one a second."""
        now, share = time.monotonic(), done / total if total else 1.0
        self._first = self._first or (now, done)
        if now - self._last >= _LINE_SECONDS or (share - self._share >= _LINE_SHARE and now - self._last >= 1):
            began, before = self._first
            rate = (done - before) / (now - began) if now > began else 0.0
            line = f"{self._doing}: {share:.0%}, {decimal(done)} of {decimal(total)}, {decimal(int(rate))}/s"
            line = f"{self._doing}: {done} of {total}" if self._steps else line
            self._tell(line)
            self._last, self._share = now, share
