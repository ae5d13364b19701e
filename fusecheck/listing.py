"""What a checkpoint asks of the files that it is made of, in a folder or in a store; and the survey of a store's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from fusecheck.errors import CheckpointError
from fusecheck.reader import Reader
from fusecheck.sidefiles import (
    MAX_FOLDERS_DEEP,
    WEIGHT_SUFFIXES,
    LeftOut,
    SideFile,
    bad_name,
    is_with_adapter,
    left_out_reason,
)


class Sized(Protocol):
    """What is known of a file that was added: at least its size in bytes."""

    @property
    def size(self) -> int:
        """Bytes."""


class CheckpointFiles(Reader, Protocol):
    """The files of one checkpoint, known to be the same until the end."""

    @property
    def root(self) -> Path | None:
        """The folder; None where they lie in a store."""

    @property
    def place(self) -> str:
        """Where they are, for people."""

    def is_folder(self, name: str) -> bool:
        """Whether an entry is a folder."""

    def add(self, name: str) -> Sized:
        """Remember what `name` is. CheckpointError unless it is a regular file that is there."""

    def read(self, file: str, limit: int) -> bytes:
        """All bytes of a small file; CheckpointError above `limit` bytes."""

    def digest(self, file: str, start: int = 0, stop: int | None = None) -> str:
        """BLAKE3 of a file, or of its bytes [start, stop), as hex."""

    def expect_heads(self, names: Sequence[str]) -> None:
        """The first bytes of these files are asked for next, in this order."""

    def side_files(
        self, taken: frozenset[str], *, follow_links: bool
    ) -> tuple[tuple[SideFile, ...], tuple[LeftOut, ...]]:
        """All files that go along and all entries left out; `taken` are the checkpoint's others."""

    def changed_since(self, moment_ns: int) -> bool:
        """Whether any file was written, or came to be, after a moment, as far as that is known."""

    def check_unchanged(self) -> None:
        """SystemFailure when any file is no longer what it was when it was added."""

    def close(self) -> None:
        """Give back connections and descriptors."""


def survey_names(
    sizes: Mapping[str, int], taken: frozenset[str], modules: frozenset[str]
) -> tuple[tuple[SideFile, ...], tuple[LeftOut, ...]]:
    """`survey_side_files` for a store, which has names and sizes and neither links nor special files."""
    found: list[SideFile] = []
    left_out: dict[str, LeftOut] = {}
    folders = {path[:at] for path in sizes for at, letter in enumerate(path) if letter == "/"}
    with_adapter = is_with_adapter(sizes)
    for path, size in sizes.items():
        if path in taken:
            continue
        if path in folders:
            raise CheckpointError("is a file and a folder at once, which no folder can hold", file=path)
        reason = left_out_reason(path, modules, with_adapter=with_adapter)
        where = next(_odd_folders(path), None) or (LeftOut(path, reason) if reason else None)
        if where is None:
            found.append(SideFile(path, size))
        else:
            left_out.setdefault(where.path, where)
    return tuple(sorted(found)), tuple(sorted(left_out.values()))


def _odd_folders(path: str) -> Iterator[LeftOut]:
    """The outermost folder above a file, or the file itself, that is left out by its name or its depth."""
    pieces = path.split("/")
    for depth, piece in enumerate(pieces):
        here = "/".join(pieces[: depth + 1])
        reason = bad_name(piece)
        if reason:
            yield LeftOut(here, reason)
        elif depth < len(pieces) - 1 and piece.lower().endswith(WEIGHT_SUFFIXES):
            yield LeftOut(here, "a folder named like a weight file")
        elif depth < len(pieces) - 1 and depth == MAX_FOLDERS_DEEP:
            yield LeftOut(here, f"deeper than {MAX_FOLDERS_DEEP} folders")
