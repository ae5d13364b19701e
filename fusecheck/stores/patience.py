"""How often, and after what waits, something is asked again."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from fusecheck.errors import FusecheckError, SystemFailure

_SECONDS = re.compile(r"[0-9]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits, in seconds unless said otherwise."""

    tries: int = 7
    """Failures one after the other, by number, without progress in between."""
    first: float = 0.5
    """Wait after the first failure; each further one doubles it."""
    longest: float = 30.0
    told: float = 300.0
    """What a server that names a time (Retry-After) is waited for at most: the hub counts in windows of 5 minutes."""
    stall: float = 60.0
    """In so long an answer brings `least` bytes, or is given up: a server that drips would be waited for for ever."""
    least: int = 64 << 10
    """Bytes."""


class Pause:
    """Waits of all threads of one source: what one is told by the server holds for all. `close` ends every wait."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._not_before = 0.0

    def close(self) -> None:
        """End all waits, and refuse further ones."""
        self._closed.set()

    def check_open(self) -> None:
        """SystemFailure once the source has been closed: its readers are to end."""
        if self._closed.is_set():
            raise SystemFailure("the source was closed while it was read")

    def told(self, seconds: float) -> None:
        """The server names a time before which nobody should ask. SystemFailure where that is too far away."""
        if seconds > self.patience.told:
            found, wanted = f"{seconds:.0f} s", f"<= {self.patience.told:.0f} s"
            raise SystemFailure("the server asks to wait too long", found=found, wanted=wanted, remedy="run again then")
        until = time.monotonic() + seconds
        with self._lock:
            self._not_before = max(self._not_before, until)

    def before_request(self) -> None:
        """Wait until the server wants to be asked again."""
        while (left := self._not_before - time.monotonic()) > 0:
            self._closed.wait(left)
            self.check_open()
        self.check_open()

    def after_failure(self, failures: int) -> None:
        """Wait longer after each failure, by chance up to half of it more, so that threads do not ask in step."""
        seconds = min(self.patience.longest, self.patience.first * 2 ** (failures - 1))
        self._closed.wait(seconds * random.uniform(1, 1.5))  # noqa: S311 - no secret
        self.check_open()


class Attempts:
    """Counts what fails one after the other within one read, and gives up in time."""

    def __init__(self, pause: Pause) -> None:
        self._pause = pause
        self._failures = 0

    def came(self, size: int, asked: int) -> None:
        """An answer brought `size` of `asked` bytes: progress, unless that is so little that there would be no end."""
        if size >= max(1, min(self._pause.patience.least, asked // 4)):
            self._failures = 0

    def failed(self, reason: FusecheckError, *, at_once: bool = False) -> None:
        """Wait before the next attempt, unless it can come at once; raise the reason after the last one."""
        self._failures += 1
        if self._failures >= self._pause.patience.tries:
            raise reason
        if not (at_once and self._failures == 1):
            self._pause.after_failure(self._failures)


class Pace:
    """Whether one answer comes fast enough to wait for the rest of it."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._size, self._since = 0, time.monotonic()

    def keeps(self, size: int) -> bool:
        """`size` more bytes are there."""
        now = time.monotonic()
        self._size += size
        if self._size >= self._patience.least:
            self._size, self._since = 0, now
        return now - self._since <= self._patience.stall


def asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that a 429 or 503 names in Retry-After (seconds or a date), or in the hub's RateLimit; None without."""
    value = headers.get("retry-after", "").strip()
    if _SECONDS.fullmatch(value):
        return float(value[:9])
    if value:
        try:
            then = parsedate_to_datetime(value)
        except (ValueError, OverflowError):
            return None
        return max(0.0, (then - datetime.now(UTC)).total_seconds()) if then.tzinfo else None
    for field in headers.get("ratelimit", "").split(";"):
        name, _, number = field.strip().partition("=")
        if name == "t" and _SECONDS.fullmatch(number):
            return float(number[:9])
    return None
