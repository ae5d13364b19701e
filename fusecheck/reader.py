"""Where bytes come from, and how a run tells how far it has come with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (done, in total), bytes unless said otherwise, from any thread, one call at a time."""


class Reader(Protocol):
    """Bytes of named files: one method, so that a remote source needs no other."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with exactly the bytes at `offset` of `file`, or raise SystemFailure. Safe from many threads."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a source: its size in bytes, and what tells this content from any other (a commit and a SHA-256, an ETag)."""

    size: int
    identity: Mapping[str, str]


class Source(Reader, Protocol):
    """The files of a checkpoint, wherever they are, frozen at one moment: what changes later is an error, never a mix."""

    def files(self) -> Mapping[str, StoredFile]:
        """Every file, by its POSIX path below the source; one listing, remembered."""

    def close(self) -> None:
        """Give back connections and descriptors."""


class Publisher(Protocol):
    """Where an output goes: every file whole or not at all, and nothing counts before `commit`."""

    def have(self, name: str) -> StoredFile | None:
        """What stands there under a name, or None."""

    def put(self, name: str, blocks: Iterator[memoryview], size: int) -> StoredFile:
        """Write one file of `size` bytes, in order, in bounded memory; a failure leaves nothing behind.

        A block may be other bytes once the next one has been asked for.
        """

    def commit(self, manifest: bytes) -> bool:
        """Write the manifest, last, if none stands there. False: this very one stands there already."""
