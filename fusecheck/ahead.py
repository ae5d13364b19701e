"""One pass over ranges that are known beforehand: of a store in large requests made ahead, of a folder as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fusecheck.listing import CheckpointFiles
from fusecheck.reader import Reader
from fusecheck.stored import StoredFiles
from fusecheck.stores import Windows
from fusecheck.stores.windows import HELD


@contextmanager
def read_ahead(files: CheckpointFiles, ranges: Iterable[tuple[str, int, int]], *, held: int = HELD) -> Iterator[Reader]:
    """A reader for ranges (file, offset, size), which are read in about this order, in at most `held` bytes of memory."""
    if not isinstance(files, StoredFiles):
        yield files
        return
    with Windows(files.source, ranges, held=held) as windows:
        yield windows
