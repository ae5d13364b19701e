"""The verbs of several machines: plan, run, finalize."""

from __future__ import annotations

from typing import Annotated

import typer

from fusecheck.cli_options import (
    EPILOG,
    AllowUnconditional,
    Checksums,
    DropTiedLmHead,
    Experts,
    ExpertsForm,
    FollowLinks,
    Json,
    KeepSplit,
    MaxHeaderSize,
    MaxShardSize,
    NoProgress,
    PlanFile,
    Quiet,
    RankList,
    TargetLayout,
    TensorParallel,
    Verbose,
    size_in_bytes,
)
from fusecheck.render import Screen

jobs = typer.Typer()


@jobs.command(epilog=EPILOG)
def plan(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint folder or URL, as every machine sees it.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A folder or a bucket's URL, as every machine sees it.")],
    *,
    max_shard_size: MaxShardSize = None,
    checksums: Checksums = False,
    drop_tied_lm_head: DropTiedLmHead = False,
    keep_split: KeepSplit = False,
    experts: ExpertsForm = Experts.PER_EXPERT,
    target: TargetLayout = None,
    tp: TensorParallel = None,
    ranks: RankList = None,
    follow_links: FollowLinks = False,
    max_header_size: MaxHeaderSize = "16MiB",
    as_json: Json = False,  # noqa: ARG001 - what it prints is JSON anyhow
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,  # noqa: ARG001 - every verb takes it; headers are read at once
) -> None:
    """Decide how several machines fuse SRC to OUT; print it as JSON.

    fusecheck plan SRC OUT > plan.json reads headers only and writes nothing. The same source gives the same bytes. Then,
    anywhere, in any order:
    fusecheck run plan.json --part i/N. At last, once: fusecheck finalize plan.json.
    """
    from fusecheck.operations.plan import make_plan  # noqa: PLC0415

    screen = Screen(quiet=quiet, verbose=verbose)
    report = make_plan(
        source,
        out,
        max_shard_size=max_shard_size,
        checksums=checksums,
        drop_tied_lm_head=drop_tied_lm_head,
        keep_split=keep_split,
        experts=experts.value,
        target=target,
        tp=tp,
        ranks=ranks,
        follow_links=follow_links,
        max_header_bytes=size_in_bytes(max_header_size),
    )
    screen.plan(report)


@jobs.command(epilog=EPILOG)
def run(
    plan_file: PlanFile,
    *,
    part: Annotated[
        str | None, typer.Option("--part", metavar="i/N", help="Part i of N, from 0. Default: the whole.")
    ] = None,
    parts: Annotated[
        int | None,
        typer.Option(
            "--parts",
            metavar="N",
            min=1,
            max=100_000,
            help="N parts, of which this is JOB_COMPLETION_INDEX or SLURM_ARRAY_TASK_ID.",
        ),
    ] = None,
    allow_unconditional: AllowUnconditional = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
) -> None:
    """Write one part of a plan.

    Any part, on any machine, in any order; twice is harmless, and what stands is kept. Refuses (exit 4) where the source
    is no longer what was planned.
    """
    from fusecheck.operations.run import run_part, which_part  # noqa: PLC0415

    number, total = which_part(part, parts)
    screen = Screen(quiet=quiet, verbose=verbose, progress=not no_progress)
    with screen.progress() as phase:
        report = run_part(
            plan_file,
            part=number,
            parts=total,
            allow_unconditional=allow_unconditional,
            on_progress=phase(f"part {number}/{total}"),
        )
    screen.run(report, as_json=as_json)


@jobs.command(epilog=EPILOG)
def finalize(
    plan_file: PlanFile,
    *,
    allow_unconditional: AllowUnconditional = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
) -> None:
    """Check every object of a plan, write the rest, and commit.

    Only now OUT is a checkpoint. Names the part to run again (exit 4) where one is missing. Committed already by this
    plan: exit 0.
    """
    from fusecheck.operations.finalize import finalize as operation  # noqa: PLC0415

    screen = Screen(quiet=quiet, verbose=verbose, progress=not no_progress)
    with screen.progress() as phase:
        report = operation(plan_file, allow_unconditional=allow_unconditional, on_progress=phase("finishing"))
    screen.finalize(report, as_json=as_json)
