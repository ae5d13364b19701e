"""Whole source files against the SHA-256 that their store gives of them: what the hub calls an LFS file by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from fusecheck.ahead import read_ahead
from fusecheck.checkpoint import Checkpoint
from fusecheck.exact import Finding
from fusecheck.reader import Progress
from fusecheck.stored import StoredFiles

_BLOCK_BYTES = 1 << 20


def check_sha256(source: Checkpoint, on_progress: Progress | None) -> tuple[list[Finding], int, int]:
    """(files that are not what their store calls them, files that were hashed, files of which no SHA-256 is known).

    Every weight file and side file, from the first byte to the last: more than the tensors that `exact` compares.
    """
    files = source.files
    if not isinstance(files, StoredFiles):
        return [], 0, len(source.shards) + len(source.side_files)
    names = [*(shard.name for shard in source.shards), *(side.path for side in source.side_files)]
    known = {name: files.add(name) for name in names if "sha256" in files.add(name).identity}
    total, done = sum(file.size for file in known.values()), 0

    def tell(size: int) -> None:
        nonlocal done
        done += size
        if on_progress is not None:
            on_progress(done, total)

    findings = []
    with read_ahead(files, ((name, 0, file.size) for name, file in known.items())) as reader:
        for name, file in known.items():
            if _sha256(_blocks(reader.read_into, name, file.size), tell) != file.identity["sha256"]:
                findings.append(Finding("the source's file is not the one that its store names by SHA-256", name))
    return findings, len(known), len(names) - len(known)


def _blocks(read_into: Callable[[str, int, memoryview], None], name: str, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(size, _BLOCK_BYTES)))
    for at in range(0, size, _BLOCK_BYTES):
        block = buffer[: min(len(buffer), size - at)]
        read_into(name, at, block)
        yield block


def _sha256(blocks: Iterator[memoryview], tell: Callable[[int], None]) -> str:
    state = hashlib.sha256()
    for block in blocks:
        state.update(block)
        tell(len(block))
    return state.hexdigest()
