"""Whether what a run would write stands at OUT already. Nothing is written, and nothing there is trusted."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path, PurePosixPath

from fusecheck.digest import digest_of, hasher
from fusecheck.errors import FusecheckError
from fusecheck.execute import BLOCK_BYTES
from fusecheck.files import Files
from fusecheck.plan import Block, Constant, OutputTensor, PlannedFile, Strip, strip_bytes


def holds(out: Path, files: Sequence[PlannedFile], *, beside: Iterable[str] = ()) -> bool:
    """Whether a folder holds these files, by names, sizes and first bytes, those `beside` them, and nothing else."""
    planned = {file.path: file for file in files}
    entries = {path.relative_to(out).as_posix(): path.lstat() for path in out.rglob("*")}
    folders = {path for path, status in entries.items() if stat.S_ISDIR(status.st_mode)}
    found = {path: status.st_size for path, status in entries.items() if stat.S_ISREG(status.st_mode)}
    if len(found) + len(folders) != len(entries) or folders != _folders(planned):
        return False  # a link or a folder that this run would not have made
    if any(found.pop(path, None) is None for path in beside):
        return False
    if found != {path: file.size for path, file in planned.items()}:
        return False
    return all(_starts_with(out / path, file.head) for path, file in planned.items())


def _folders(paths: Iterable[str]) -> set[str]:
    return {parent.as_posix() for path in paths for parent in PurePosixPath(path).parents} - {"."}


def _starts_with(path: Path, head: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(head)) == head


def stands(
    out: Path, files: Sequence[PlannedFile], source: Files, known: Mapping[tuple[str, int], tuple[str, ...]]
) -> bool:
    """Whether a folder holds these very files: `holds`, and the digest of all data.

    `known` gives the digests that need no reading: (path, number of the strip) -> BLAKE3 of each block.
    """
    try:
        if not holds(out, files):
            return False
        with Files(out) as ours:
            for file in files:
                ours.add(file.path)
            return all(_same_data(file, ours, source, known) for file in files)
    except (OSError, FusecheckError):
        return False


def _same_data(file: PlannedFile, ours: Files, source: Files, known: Mapping[tuple[str, int], tuple[str, ...]]) -> bool:
    at = len(file.head)
    for number, strip in enumerate(file.strips):
        stop = at + strip_bytes(strip)
        recorded = known.get((file.path, number), ())
        wanted = recorded[0] if len(recorded) == 1 else _digest(strip, source)
        if ours.digest(file.path, at, stop) != wanted:
            return False
        at = stop
    return True


def same_pieces(tensors: Iterable[OutputTensor], recorded: Mapping[str, tuple[str, ...]], source: Files) -> bool:
    """Whether every block of these tensors has the digest that was recorded for it."""
    return all(recorded.get(tensor.name) == tuple(_piece_digests(tensor.strips, source)) for tensor in tensors)


def _piece_digests(strips: Iterable[Strip], source: Files) -> Iterator[str]:
    for strip in strips:
        if isinstance(strip, Constant):
            yield digest_of(strip.data)
        else:
            yield from (_digest((block,), source) for block in strip)


def _digest(strip: Strip, files: Files) -> str:
    if isinstance(strip, Constant):
        return digest_of(strip.data)
    if len(strip) == 1 and strip[0].stride == strip[0].row_bytes:
        return files.digest(strip[0].file, strip[0].offset, strip[0].offset + strip[0].nbytes)
    state, batch = hasher(), max(1, BLOCK_BYTES // max(block.stride for block in strip))
    for row in range(0, strip[0].rows, batch):
        count = min(batch, strip[0].rows - row)
        columns = [_rows(block, row, count, files) for block in strip]
        state.update(b"".join(chain.from_iterable(zip(*columns, strict=True))))
    return state.hexdigest()


def _rows(block: Block, row: int, count: int, files: Files) -> list[bytearray]:
    span = bytearray((count - 1) * block.stride + block.row_bytes)
    files.read_into(block.file, block.offset + row * block.stride, memoryview(span))
    return [span[start : start + block.row_bytes] for start in range(0, len(span), block.stride)]
