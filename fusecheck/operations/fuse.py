"""fuse: a split checkpoint in, a complete fused one out, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from fusecheck.checkpoint import open_checkpoint
from fusecheck.collector import collector_paused
from fusecheck.errors import UsageError
from fusecheck.header import MAX_HEADER_BYTES
from fusecheck.hub import Source, check_shard_size, resolve
from fusecheck.job import Job, Options, Outcome, carry_out, compare_heads, decide, produce, stands_at
from fusecheck.mapping import Experts
from fusecheck.model import LeftSplit
from fusecheck.reader import Progress
from fusecheck.sidefiles import LeftOut
from fusecheck.target import Target, TargetOccupied, check_target

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
    target: str | None = None
    tp: int | None = None
    ranks: tuple[int, ...] = ()
    """Those whose files were written, with a target."""


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
    experts: Experts = "per-expert",
    target: str | None = None,
    tp: int | None = None,
    ranks: str | None = None,
    follow_links: bool = False,
    max_header_bytes: int = MAX_HEADER_BYTES,
    threads: int = DEFAULT_THREADS,
    on_progress: Progress | None = None,
    on_download: Progress | None = None,
) -> FuseReport:
    """Write the fused form of the checkpoint `source`, a folder or a hub id, to the folder `out`.

    OUT appears complete and durable, or not at all. With a `target`, files for `tp` ranks of an engine are written instead,
    or for those `ranks` ("0,1") alone. Raises UsageError (exit 2), CheckpointError (3), SystemFailure (4).
    """
    options = Options(max_shard_size, checksums, drop_tied_lm_head, keep_split, experts, target, tp, ranks)
    _ = options.wanted_ranks
    if experts not in get_args(Experts):
        raise UsageError("--experts has no such form", found=experts, wanted=", ".join(get_args(Experts)))
    if max_shard_size is not None:
        check_shard_size(max_shard_size)
    place = Path(out) if os.fspath(out) else Path()
    with suppress(TargetOccupied):  # before a download of hours; whether it is this very result is seen below
        check_target(place, None, force=force)
    found = resolve(os.fspath(source), revision=revision, on_progress=on_download)
    with open_checkpoint(found.folder, follow_links=follow_links, max_header_bytes=max_header_bytes) as checkpoint:
        with collector_paused():
            job = decide(checkpoint, options)

        def write(target: Target, folder: Path) -> Iterable[str]:
            provenance = found.provenance(target.path)
            return compare_heads(job, carry_out(job, folder, provenance, threads=threads, on_progress=on_progress))

        outcome = produce(
            place,
            found.folder,
            size=job.size,
            force=force,
            dry_run=dry_run,
            write=write,
            stands=lambda: stands_at(place, job),
        )
        return _report(outcome, found, place, job)


def _report(outcome: Outcome, source: Source, out: Path, job: Job) -> FuseReport:
    written: Literal["fused", "copied"] = "fused" if job.model.split or job.ranks else "copied"
    verdicts: dict[str, Literal["already_done", "would_fuse"]] = {"stands": "already_done", "would_write": "would_fuse"}
    return FuseReport(
        verdict=verdicts.get(outcome.kind, written),
        source=str(source.folder),
        out=str(out),
        layers=job.checkpoint.config.num_hidden_layers,
        fused=len(job.model.split) if job.ranks is None else 0,
        already_fused=len(job.model.fused),
        left_split=job.model.left_split,
        source_tensors=len(job.checkpoint.tensors),
        output_tensors=sum(len(shard.tensors) for shard in job.shards),
        dropped=tuple(job.dropped),
        output_bytes=job.size,
        shards=tuple(shard.file.path for shard in job.shards),
        side_files=tuple(side.path for side in job.checkpoint.side_files),
        left_out=job.checkpoint.left_out,
        warnings=(*job.warnings, *outcome.warnings),
        target=job.options.target,
        tp=job.options.tp,
        ranks=job.ranks.numbers if job.ranks is not None else (),
    )
