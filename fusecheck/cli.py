"""Arguments -> operation -> render; error -> exit code. Only cli*.py know typer. Heavy imports inside the verbs."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from fusecheck import __version__
from fusecheck.cli_jobs import jobs
from fusecheck.cli_options import (
    EPILOG,
    AllowUnconditional,
    Checksums,
    Device,
    DropTiedLmHead,
    DryRun,
    Experts,
    ExpertsForm,
    FollowLinks,
    Force,
    Json,
    KeepSplit,
    MaxHeaderSize,
    MaxShardSize,
    NoProgress,
    Quiet,
    RankList,
    ReportFile,
    Revision,
    Seed,
    SplitSource,
    TargetLayout,
    TensorParallel,
    Threads,
    Verbose,
    size_in_bytes,
)
from fusecheck.cli_process import leave_with
from fusecheck.render import Screen, to_json
from fusecheck.report_file import require_place, write_report

app = typer.Typer(
    name="fusecheck",
    help="Fuse the split projections of a Hugging Face checkpoint offline, and prove that nothing changed.",
    epilog=EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer calls it so
    if wanted:
        typer.echo(f"fusecheck {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog=EPILOG)
def fuse(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: folder, hub id owner/name, or URL.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to make, or a bucket's URL.")],
    *,
    dry_run: DryRun = False,
    force: Force = False,
    revision: Revision = None,
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
    threads: Threads = 2,
    allow_unconditional: AllowUnconditional = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
) -> None:
    """Write the fused form of the checkpoint SRC to the new OUT.

    q_proj, k_proj, v_proj become qkv_proj; gate_proj, up_proj become gate_up_proj. No value changes. OUT appears complete
    or not at all. No LoRA adapters are merged, as other tools' `fuse` does.

    hf://owner/name[@revision], s3://, gs:// and az:// are read by range, in one pass, with nothing stored; a bucket as OUT
    has to be fresh, and counts once its fusecheck.json is there, which is written last.
    """
    from fusecheck.operations.fuse import fuse as operation  # noqa: PLC0415

    screen = Screen(quiet=quiet, verbose=verbose, progress=not no_progress)
    with screen.progress() as phase:
        report = operation(
            source,
            out,
            revision=revision,
            dry_run=dry_run,
            force=force,
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
            threads=threads,
            allow_unconditional=allow_unconditional,
            on_progress=phase("fusing"),
            on_download=phase("downloading"),
        )
    screen.fuse(report, as_json=as_json)


@app.command(epilog=EPILOG)
def unfuse(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A fused checkpoint folder, or a hub id owner/name.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to make.")],
    *,
    dry_run: DryRun = False,
    force: Force = False,
    revision: Revision = None,
    follow_links: FollowLinks = False,
    max_header_size: MaxHeaderSize = "16MiB",
    threads: Threads = 2,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
) -> None:
    """Write the split checkpoint again: the exact inverse of fuse.

    By SRC's manifest every tensor is the original's, checked by its digest. Without one, by names and config.json.
    """
    from fusecheck.operations.unfuse import unfuse as operation  # noqa: PLC0415

    screen = Screen(quiet=quiet, verbose=verbose, progress=not no_progress)
    with screen.progress() as phase:
        report = operation(
            source,
            out,
            revision=revision,
            dry_run=dry_run,
            force=force,
            follow_links=follow_links,
            max_header_bytes=size_in_bytes(max_header_size),
            threads=threads,
            on_progress=phase("unfusing"),
            on_download=phase("downloading"),
        )
    screen.unfuse(report, as_json=as_json)


@app.command(epilog=EPILOG)
def verify(
    out: Annotated[str, typer.Argument(metavar="OUT", help="A fused checkpoint: a folder, or a URL.")],
    *,
    source: SplitSource = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(
            "--layer", metavar="N", help="Layer for probe and numeric; repeatable. Default: first, middle, last."
        ),
    ] = None,
    all_experts: Annotated[
        bool, typer.Option("--all-experts", help="Probe and numeric of every expert, not of four a layer.")
    ] = False,
    check_source: Annotated[
        bool, typer.Option("--check-source", help="Hash SRC's whole files too, where the hub names their SHA-256.")
    ] = False,
    device: Device = "auto",
    seed: Seed = 0,
    report_file: ReportFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
) -> None:
    """Prove that OUT holds exactly what its source holds.

    exact compares every byte of every tensor; probe and numeric run the projections of some layers on the device.
    """
    from fusecheck.operations.verify import verify as operation  # noqa: PLC0415

    require_place(report_file)
    screen = Screen(quiet=quiet, verbose=verbose, progress=not no_progress)
    with screen.progress() as phase:
        report = operation(
            out,
            source=source,
            layers=layer or (),
            device=device,
            seed=seed,
            all_experts=all_experts,
            check_source=check_source,
            on_source=phase("hashing the source") if check_source else None,
            on_progress=phase("verifying"),
        )
    if not as_json:
        screen.verify(report)
    if report_file is not None:  # before the JSON document: one that fails is the only one
        from fusecheck.html.verify import verify_html  # noqa: PLC0415

        write_report(report_file, verify_html(report), failed=report.verdict != "equal")
    if as_json:
        screen.result(to_json(report.verdict, report))
    if report.verdict != "equal":
        raise typer.Exit(1)


@app.command(epilog=EPILOG)
def bench(
    out: Annotated[str, typer.Argument(metavar="OUT", help="A fused checkpoint folder.")],
    *,
    source: SplitSource = None,
    device: Device = "auto",
    layer: Annotated[int, typer.Option("--layer", metavar="N", min=0, help="The layer that is measured.")] = 0,
    seed: Seed = 0,
    report_file: ReportFile = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
) -> None:
    """Measure what fusing buys on this device.

    Latency, launches, reads of the hidden states, load time. Says so where fusing gains nothing beyond the noise.
    """
    from fusecheck.operations.bench import bench as operation  # noqa: PLC0415

    require_place(report_file)
    screen = Screen(quiet=quiet, verbose=verbose, progress=not no_progress)
    with screen.progress(steps=True) as phase:
        report = operation(out, source=source, device=device, layer=layer, seed=seed, on_progress=phase("measuring"))
    if not as_json:
        screen.bench(report)
    if report_file is not None:
        from fusecheck.html.bench import bench_html  # noqa: PLC0415

        write_report(report_file, bench_html(report))
    if as_json:
        screen.result(to_json(report.verdict, report))


@app.command(epilog=EPILOG)
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, split or fused: a folder, hub id or URL.")],
    *,
    follow_links: FollowLinks = False,
    max_header_size: MaxHeaderSize = "16MiB",
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,  # noqa: ARG001 - every verb takes it; headers are read at once
) -> None:
    """Say what PATH holds, and what `fuse` would do or why not.

    Also which engines load the result. Reads headers only.
    """
    from fusecheck.operations.inspect import inspect as operation  # noqa: PLC0415

    screen = Screen(quiet=quiet, verbose=verbose)
    report = operation(path, follow_links=follow_links, max_header_bytes=size_in_bytes(max_header_size))
    if as_json:
        screen.result(to_json(report.verdict, report))
    else:
        screen.inspect(report)


app.registered_commands += jobs.registered_commands


def main() -> NoReturn:
    """Run the command line and leave with the documented exit code."""
    leave_with(app, sys.argv[1:])


if __name__ == "__main__":
    main()
