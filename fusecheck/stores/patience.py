"""How often, and after what waits, something is asked again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from fusecheck.errors import FusecheckError, SystemFailure


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits, in seconds but for the first."""

    tries: int = 7
    """Failures one after the other without a byte in between."""
    first: float = 0.5
    """Wait after the first failure; each further one doubles it."""
    longest: float = 30.0
    told: float = 300.0
    """What a server that names a time (Retry-After) is waited for at most: the hub counts in windows of 5 minutes."""


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
        """The server names a time before which nobody should ask."""
        until = time.monotonic() + min(seconds, self.patience.told)
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

    def progressed(self) -> None:
        """Bytes came."""
        self._failures = 0

    def failed(self, reason: FusecheckError, *, at_once: bool = False) -> None:
        """Wait before the next attempt, unless it can come at once; raise the reason after the last one."""
        self._failures += 1
        if self._failures >= self._pause.patience.tries:
            raise reason
        if not (at_once and self._failures == 1):
            self._pause.after_failure(self._failures)


def asked_to_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that a 429 or 503 names in Retry-After (seconds or a date), or in the hub's RateLimit; None without."""
    value = headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value[:9])
    if value:
        try:
            then = parsedate_to_datetime(value)
        except ValueError:
            return None
        return max(0.0, (then - datetime.now(UTC)).total_seconds()) if then.tzinfo else None
    for field in headers.get("ratelimit", "").split(";"):
        name, _, number = field.strip().partition("=")
        if name == "t" and number.isdigit():
            return float(number[:9])
    return None
