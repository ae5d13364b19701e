"""Where bytes come from, and how a run tells how far it has come with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (done, in total), bytes unless said otherwise, from any thread, one call at a time."""


class Reader(Protocol):
    """Bytes of named files: one method, so that a remote source needs no other."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with exactly the bytes at `offset` of `file`, or raise SystemFailure. Safe from many threads."""
