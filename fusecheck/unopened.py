"""An OUT that is no checkpoint any more, held against its manifest file by file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from fusecheck.config import CONFIG
from fusecheck.digest import available, digest_of
from fusecheck.errors import CheckpointError, invisible
from fusecheck.exact import Finding
from fusecheck.header import LIBRARY_HEADER_BYTES
from fusecheck.listing import CheckpointFiles
from fusecheck.manifest import FileEntry, Manifest, OutputFile
from fusecheck.sidefiles import MANIFEST


def check_unopened(manifest: Manifest, files: CheckpointFiles) -> Iterator[Finding]:
    """What can be said of it: each file, but no tensor. Closes `files`."""
    entries: dict[str, OutputFile | FileEntry] = {**manifest.side_files, CONFIG: manifest.config, **manifest.files}
    with closing(files):
        for path, entry in entries.items():
            # names come from the manifest and must not lead out of the folder
            if any(not piece or piece.startswith(".") or any(map(invisible, piece)) for piece in path.split("/")):
                yield Finding("is no path that an output has", MANIFEST, path)
                continue
            try:
                size = files.add(path).size
            except CheckpointError as error:
                yield Finding(error.problem, path)
                continue
            if size != entry.size:
                yield Finding(f"has {size} bytes, the manifest says {entry.size}", path)
            elif available():
                yield from _check_digest(files, path, size, entry)


def _check_digest(files: CheckpointFiles, path: str, size: int, entry: OutputFile | FileEntry) -> Iterator[Finding]:
    if isinstance(entry, FileEntry):
        if files.digest(path) != entry.digest:
            yield Finding("differs from the manifest's digest", path)
        return
    prefix = bytearray(min(8, size))
    files.read_into(path, 0, memoryview(prefix))
    blob = bytearray(min(8 + int.from_bytes(prefix, "little"), size, LIBRARY_HEADER_BYTES))
    files.read_into(path, 0, memoryview(blob))
    if digest_of(blob) != entry.header_digest:
        yield Finding("header differs from the manifest's digest", path)
