"""What every verb that writes a checkpoint does alike: side files, the staging folder, progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusecheck.checkpoint import Checkpoint
from fusecheck.execute import Written, execute
from fusecheck.plan import PlannedFile, whole_file
from fusecheck.publish import TargetTaken, staging_folder
from fusecheck.reader import Progress, Reader
from fusecheck.target import Target, TargetOccupied, check_target, require_space


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and what did not work although OUT is right."""

    kind: Literal["written", "would_write", "stands"]
    warnings: tuple[str, ...] = ()


def produce(
    out: Path,
    source: Path | None,
    *,
    size: int,
    force: bool,
    dry_run: bool,
    write: Callable[[Target, Path], Iterable[str]],
    stands: Callable[[], bool],
) -> Outcome:
    """Let `write` fill a staging folder with `size` bytes, and publish it as `out`; `write` returns its warnings.

    Where OUT is taken, before or meanwhile, `stands` says whether it is this very result.
    """
    try:
        target = check_target(out, source, force=force)
        if dry_run:
            return Outcome("would_write")
        with staging_folder(target) as staging:
            require_space(target.path, size, target.shown)
            warnings = write(target, staging.path)
            staging.commit()
    except (TargetOccupied, TargetTaken):
        if not stands():
            raise
        return Outcome("stands")
    return Outcome("written", (*warnings, *staging.warnings))


def side_files(checkpoint: Checkpoint) -> list[PlannedFile]:
    """Every side file, byte for byte."""
    return [whole_file(side.path, side.size) for side in checkpoint.side_files]


def write_files(
    files: Sequence[PlannedFile], reader: Reader, folder: Path, *, threads: int, on_progress: Progress | None
) -> tuple[Written, ...]:
    """`execute`, with progress counted against the whole."""
    total, done = sum(file.size for file in files), 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    return execute(files, reader, folder, threads=threads, on_bytes=on_bytes)
