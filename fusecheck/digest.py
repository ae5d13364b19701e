"""BLAKE3, by the `blake3` package: about 5 GB/s a core, so every byte is digested as it passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from fusecheck.errors import SystemFailure

try:
    from blake3 import blake3
except ImportError:  # verify compares with a source that is there without it
    blake3 = None  # type: ignore[assignment, misc]


class Hasher(Protocol):
    """What is used of a hash object."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object:
        """Take more bytes."""

    def hexdigest(self) -> str:
        """64 hex digits."""


def available() -> bool:
    """Whether digests can be made here."""
    return blake3 is not None


def hasher() -> Hasher:
    """A fresh BLAKE3 state. SystemFailure where the package is missing."""
    if blake3 is None:
        raise SystemFailure("the blake3 package is missing", remedy="pip install blake3")
    return blake3()


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """BLAKE3 of some bytes, as 64 hex digits."""
    state = hasher()
    state.update(data)
    return state.hexdigest()


def digest_over(digests: Iterable[str]) -> str:
    """BLAKE3 over the 32 raw bytes of each digest, in order."""
    state = hasher()
    for digest in digests:
        state.update(bytes.fromhex(digest))
    return state.hexdigest()
