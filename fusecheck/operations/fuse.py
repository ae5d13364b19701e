"""fuse: a split checkpoint in, a complete fused one out, or nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusecheck.checkpoint import open_checkpoint
from fusecheck.header import MAX_HEADER_BYTES
from fusecheck.hub import Source, check_shard_size, resolve
from fusecheck.job import Job, Options, Progress, carry_out, compare_heads, decide, stands_at
from fusecheck.model import LeftSplit
from fusecheck.publish import TargetTaken, staging_folder
from fusecheck.sidefiles import LeftOut
from fusecheck.target import TargetOccupied, check_target, require_space

DEFAULT_THREADS = 2


@dataclass(frozen=True, slots=True)
class FuseReport:
    """What `fuse` did, or would do. Counts are tensors; sizes are bytes."""

    verdict: Literal["fused", "copied", "already_done", "would_fuse"]
    source: str
    out: str
    layers: int
    fused: int
    """Fused tensors that were made."""
    already_fused: int
    left_split: tuple[LeftSplit, ...]
    source_tensors: int
    output_tensors: int
    dropped: tuple[str, ...]
    """Tensors whose bytes stand in another one (`--drop-tied-lm-head`)."""
    output_bytes: int
    shards: tuple[str, ...]
    side_files: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...]


def fuse(
    source: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    max_shard_size: str | None = None,
    checksums: bool = False,
    drop_tied_lm_head: bool = False,
    keep_split: bool = False,
    follow_links: bool = False,
    max_header_bytes: int = MAX_HEADER_BYTES,
    threads: int = DEFAULT_THREADS,
    on_progress: Progress | None = None,
    on_download: Progress | None = None,
) -> FuseReport:
    """Write the fused form of the checkpoint `source`, a folder or a hub id, to the folder `out`.

    OUT appears complete and durable, or not at all. Raises UsageError (exit 2), CheckpointError (3), SystemFailure (4).
    """
    options = Options(max_shard_size, checksums, drop_tied_lm_head, keep_split)
    if max_shard_size is not None:
        check_shard_size(max_shard_size)
    place = Path(out) if os.fspath(out) else Path()
    with suppress(TargetOccupied):  # before a download of hours; whether it is this very result is seen below
        check_target(place, None, force=force)
    found = resolve(os.fspath(source), revision=revision, on_progress=on_download)
    with open_checkpoint(found.folder, follow_links=follow_links, max_header_bytes=max_header_bytes) as checkpoint:
        job = decide(checkpoint, options)
        try:
            target = check_target(place, found.folder, force=force)
            if dry_run:
                return _report("would_fuse", found, place, job, ())
            with staging_folder(target) as staging:
                require_space(target, job.size)
                provenance = found.provenance(target.path)
                manifest = carry_out(job, staging.path, provenance, threads=threads, on_progress=on_progress)
                staging.commit()
        except (TargetOccupied, TargetTaken):
            if not stands_at(place, job):
                raise
            return _report("already_done", found, place, job, ())
        warnings = (*compare_heads(job, manifest), *staging.warnings)
        return _report("fused" if job.model.split else "copied", found, place, job, warnings)


def _report(
    verdict: Literal["fused", "copied", "already_done", "would_fuse"],
    source: Source,
    out: Path,
    job: Job,
    warnings: tuple[str, ...],
) -> FuseReport:
    return FuseReport(
        verdict=verdict,
        source=str(source.folder),
        out=str(out),
        layers=job.checkpoint.config.num_hidden_layers,
        fused=len(job.model.split),
        already_fused=len(job.model.fused),
        left_split=job.model.left_split,
        source_tensors=len(job.checkpoint.tensors),
        output_tensors=sum(len(shard.tensors) for shard in job.shards),
        dropped=tuple(job.dropped),
        output_bytes=job.size,
        shards=tuple(shard.file.path for shard in job.shards),
        side_files=tuple(side.path for side in job.checkpoint.side_files),
        left_out=job.checkpoint.left_out,
        warnings=(*job.warnings, *warnings),
    )
