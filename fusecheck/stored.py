"""The files of a checkpoint in a store, behind the same protocol as those of a folder: names, sizes, ranges of bytes.

A store has no links and no FIFOs, and every read demands the identity that was frozen at the start, so that nothing has
to be looked at again afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial

from fusecheck import digest
from fusecheck.daemons import apart, result_of
from fusecheck.errors import CheckpointError, UsageError
from fusecheck.listing import survey_names
from fusecheck.reader import Source, StoredFile
from fusecheck.sidefiles import MAX_MODULES_BYTES, MODULES, LeftOut, SideFile, module_folders

HEAD_BYTES = 256 << 10
"""What is guessed to hold a whole header: Qwen3-235B's have about 40 KB each."""

HEADS_AT_ONCE = 16
"""Headers asked for together; a store answers each in tens of milliseconds, however few bytes it sends."""

_BLOCK_BYTES = 8 << 20


class StoredFiles:
    """A Source as a checkpoint reads it. It closes the source."""

    root = None

    def __init__(self, source: Source, place: str) -> None:
        self.source = source
        self.place = place
        self._expected: list[str] = []
        self._heads: dict[str, bytes] = {}

    @cached_property
    def _files(self) -> Mapping[str, StoredFile]:
        return {path: file for path, file in self.source.files().items() if not path.endswith("/")}

    def names(self) -> frozenset[str]:
        """The entries of the uppermost folder. UsageError where there is nothing at all."""
        if not self._files:
            raise UsageError("nothing is there", file=self.place)
        return frozenset(path.partition("/")[0] for path in self._files)

    def is_folder(self, name: str) -> bool:
        """A folder is a name that others begin with."""
        return name not in self._files

    def add(self, name: str) -> StoredFile:
        """CheckpointError where it is not there."""
        found = self._files.get(name)
        if found is None:
            raise CheckpointError("is a folder, no file" if name in self.names() else "is missing", file=name)
        return found

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """From the first bytes that were fetched ahead, or by a request."""
        head = self._head(file) if offset < HEAD_BYTES and file in self._expected else b""
        known = head[offset : offset + len(buffer)]
        buffer[: len(known)] = known
        if len(known) < len(buffer):
            self.source.read_into(file, offset + len(known), buffer[len(known) :])

    def read(self, file: str, limit: int) -> bytes:
        """All bytes of a small file, in one request."""
        size = self.add(file).size
        if size > limit:
            raise CheckpointError("is too large", file=file, found=f"{size} bytes", wanted=f"<= {limit}")
        data = bytearray(size)
        if size:
            self.source.read_into(file, 0, memoryview(data))
        return bytes(data)

    def digest(self, file: str, start: int = 0, stop: int | None = None) -> str:
        """BLAKE3 of the bytes [start, stop) of a file, or of all."""
        state, at = digest.hasher(), start
        end = self.add(file).size if stop is None else stop
        buffer = memoryview(bytearray(min(end - start, _BLOCK_BYTES)))
        while at < end:
            block = buffer[: min(len(buffer), end - at)]
            self.source.read_into(file, at, block)
            state.update(block)
            at += len(block)
        return state.hexdigest()

    def expect_heads(self, names: Sequence[str]) -> None:
        """Fetch the first bytes of these files some at a time, when the first of each such group is asked for."""
        self._expected = list(names)
        self._heads = {}

    def side_files(
        self, taken: frozenset[str], *, follow_links: bool
    ) -> tuple[tuple[SideFile, ...], tuple[LeftOut, ...]]:
        """By names alone, and modules.json; there are no links to follow."""
        del follow_links
        sizes = {path: file.size for path, file in self._files.items()}
        known = MODULES in sizes and sizes[MODULES] <= MAX_MODULES_BYTES
        modules = module_folders(self.read(MODULES, MAX_MODULES_BYTES)) if known else frozenset[str]()
        return survey_names(sizes, taken, modules)

    def changed_since(self, moment_ns: int) -> bool:
        """Never, by the identities: whoever has to know compares those."""
        del moment_ns
        return False

    def check_unchanged(self) -> None:
        """Every read demanded the frozen identity."""

    def close(self) -> None:
        """Close the source."""
        self.source.close()

    def _head(self, name: str) -> bytes:
        if name not in self._heads:
            at = self._expected.index(name)
            group = self._expected[at : at + HEADS_AT_ONCE]
            coming = [apart(partial(self._fetch_head, each), "fusecheck-head") for each in group]
            self._heads = {each: result_of(head) for each, head in zip(group, coming, strict=True)}
        return self._heads[name]

    def _fetch_head(self, name: str) -> bytes:
        data = bytearray(min(HEAD_BYTES, self._files[name].size if name in self._files else 0))
        if data:
            self.source.read_into(name, 0, memoryview(data))
        return bytes(data)
