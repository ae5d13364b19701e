"""fuse: a split checkpoint in, a complete fused one out, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from fusecheck.collector import collector_paused
from fusecheck.errors import UsageError
from fusecheck.finishing import finish
from fusecheck.header import MAX_HEADER_BYTES
from fusecheck.job import Job, Options, carry_out, compare_heads, decide, stands_at
from fusecheck.ledger import judge
from fusecheck.mapping import Experts
from fusecheck.model import LeftSplit
from fusecheck.origin import Origin, Reading, Traffic, open_origin
from fusecheck.parts import opened_target, run_objects
from fusecheck.produce import Outcome, produce
from fusecheck.reader import Progress
from fusecheck.sidefiles import LeftOut
from fusecheck.stores import Target as StoreTarget
from fusecheck.stores import is_remote
from fusecheck.target import Target, TargetOccupied, check_target
from fusecheck.work import checked_options, planned_work, reader_of, refuse_nested

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
    traffic: Traffic | None = None
    """What was asked of the source's store; None for a folder."""


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
    allow_unconditional: bool = False,
    on_progress: Progress | None = None,
    on_download: Progress | None = None,
) -> FuseReport:
    """Write the fused form of the checkpoint `source`, a folder, a hub id or a URL, to `out`, a folder or a bucket's URL.

    A folder appears complete and durable, or not at all; in a bucket nothing counts before the manifest, which comes last.
    With a `target`, files for `tp` ranks of an engine are written instead, or for those `ranks` ("0,1") alone.
    Raises UsageError (exit 2), CheckpointError (3), SystemFailure (4).
    """
    options = checked_options(
        Options(max_shard_size, checksums, drop_tied_lm_head, keep_split, experts, target, tp, ranks)
    )
    reading = Reading(follow_links, max_header_bytes)
    opening = partial(open_origin, os.fspath(source), reading=reading, revision=revision, on_download=on_download)
    if not is_remote(os.fspath(out)):
        return _to_folder(
            opening, os.fspath(out), options, dry_run=dry_run, force=force, threads=threads, on_progress=on_progress
        )
    if force:
        raise UsageError("--force is for a folder: a store exchanges nothing in one step", file=os.fspath(out))
    refuse_nested(os.fspath(source), os.fspath(out))
    with opened_target(os.fspath(out), allow_unconditional=allow_unconditional) as store:
        return _to_store(opening, os.fspath(out), store, options, reading, dry_run=dry_run, on_progress=on_progress)


def _to_folder(
    opening: Callable[[], Origin],
    out: str,
    options: Options,
    *,
    dry_run: bool,
    force: bool,
    threads: int,
    on_progress: Progress | None,
) -> FuseReport:
    place = Path(out) if out else Path()
    with suppress(TargetOccupied):  # before a download of hours; whether it is this very result is seen below
        check_target(place, None, force=force)
    origin = opening()
    with origin.checkpoint as checkpoint:
        with collector_paused():
            job = decide(checkpoint, options)

        def write(target: Target, folder: Path) -> Iterable[str]:
            provenance = origin.provenance(str(target.path))
            with reader_of(origin, job.files, out) as reader:
                manifest = carry_out(job, reader, folder, provenance, threads=threads, on_progress=on_progress)
            return compare_heads(job, manifest)

        outcome = produce(
            place,
            None if origin.folder is None else origin.folder.folder,
            size=job.size,
            force=force,
            dry_run=dry_run,
            write=write,
            stands=lambda: stands_at(place, job) and origin.is_of(place),
        )
        return _report(outcome, origin, str(place), job)


def _to_store(
    opening: Callable[[], Origin],
    out: str,
    target: StoreTarget,
    options: Options,
    reading: Reading,
    *,
    dry_run: bool,
    on_progress: Progress | None,
) -> FuseReport:
    """plan, run of all parts, finalize, in one process."""
    if not dry_run:  # before a download of hours
        target.check()
    with planned_work(opening(), out, options, reading, alone=True) as work:
        standing = judge(target, work.plan)
        if dry_run:
            outcome = Outcome("stands" if standing.committed else "would_write")
        else:
            run_objects(work, target, (0, 1), on_progress)
            done = finish(work, target, None)
            outcome = Outcome("stands" if done.already else "written", done.warnings)
        return _report(outcome, work.origin, out, work.job)


def _report(outcome: Outcome, origin: Origin, out: str, job: Job) -> FuseReport:
    written: Literal["fused", "copied"] = "fused" if job.model.split or job.ranks else "copied"
    verdicts: dict[str, Literal["already_done", "would_fuse"]] = {"stands": "already_done", "would_write": "would_fuse"}
    return FuseReport(
        verdict=verdicts.get(outcome.kind, written),
        source=origin.place if origin.folder is None else str(origin.folder.folder),
        out=out,
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
        traffic=None if origin.source is None else origin.traffic,
    )
