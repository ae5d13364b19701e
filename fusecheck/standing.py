"""Whether what a run would write stands at OUT already. Nothing is written, and nothing there is trusted."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from fusecheck.digest import digest_of, hasher
from fusecheck.errors import FusecheckError
from fusecheck.files import Files
from fusecheck.gather import ReusedBuffers, pieces
from fusecheck.listing import CheckpointFiles
from fusecheck.plan import Constant, OutputTensor, PlannedFile, Strip, strip_bytes
from fusecheck.sidefiles import OWN


def holds(out: Path, files: Sequence[PlannedFile], *, beside: Iterable[str] = ()) -> bool:
    """Whether a folder holds these files, by names, sizes and first bytes, those `beside` them, and nothing else."""
    planned = {file.path: file for file in files}
    names = {path.relative_to(out).as_posix(): path for path in out.rglob("*")}
    entries = {name: path.lstat() for name, path in names.items() if name != OWN and not name.startswith(f"{OWN}/")}
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
    out: Path,
    files: Sequence[PlannedFile],
    source: CheckpointFiles,
    known: Mapping[tuple[str, int], tuple[str, ...]],
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


def _same_data(
    file: PlannedFile, ours: Files, source: CheckpointFiles, known: Mapping[tuple[str, int], tuple[str, ...]]
) -> bool:
    at = len(file.head)
    for number, strip in enumerate(file.strips):
        stop = at + strip_bytes(strip)
        recorded = known.get((file.path, number), ())
        wanted = recorded[0] if len(recorded) == 1 else _digest(strip, source)
        if ours.digest(file.path, at, stop) != wanted:
            return False
        at = stop
    return True


def same_pieces(
    tensors: Iterable[OutputTensor], recorded: Mapping[str, tuple[str, ...]], source: CheckpointFiles
) -> bool:
    """Whether every block of these tensors has the digest that was recorded for it."""
    return all(recorded.get(tensor.name) == tuple(_piece_digests(tensor.strips, source)) for tensor in tensors)


def _piece_digests(strips: Iterable[Strip], source: CheckpointFiles) -> Iterator[str]:
    for strip in strips:
        if isinstance(strip, Constant):
            yield digest_of(strip.data)
        else:
            yield from (_digest((block,), source) for block in strip)


def _digest(strip: Strip, files: CheckpointFiles) -> str:
    if isinstance(strip, Constant):
        return digest_of(strip.data)
    state = hasher()
    for piece in pieces(strip, files, ReusedBuffers(), [hasher() for _ in strip]):
        state.update(piece)
    return state.hexdigest()
