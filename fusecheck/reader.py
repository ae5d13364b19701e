"""Where bytes come from."""

from __future__ import annotations

from typing import Protocol


class Reader(Protocol):
    """Bytes of named files: one method, so that a remote source needs no other."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with exactly the bytes at `offset` of `file`, or raise SystemFailure. Safe from many threads."""
