"""Arguments -> operation -> render; error -> exit code. The only file that knows typer. Heavy imports inside the verbs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from fusecheck import __version__
from fusecheck.errors import CheckpointError, FusecheckError, Interrupted, SystemFailure, UsageError
from fusecheck.publish import signals_as_exceptions
from fusecheck.render import Screen, discard_stdout, error_fields, to_json, tolerate_any_text

EPILOG = (
    "Exit codes: 0 done or equal; 1 checked and not equal; 2 usage; 3 the checkpoint is malformed or unsupported, do not "
    "retry; 4 the environment failed, a retry may help; 70 a bug; 129, 130, 143 signals."
)

app = typer.Typer(
    name="fusecheck",
    help="Fuse the split projections of a Hugging Face checkpoint offline, and prove that nothing changed.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing but errors and the verdict.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more: what was left out, and why.")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="No progress bar or lines.")]


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
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint folder.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The folder to make.")],
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, write nothing.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
) -> None:
    """Write the fused form of the checkpoint SRC to the new folder OUT.

    q_proj, k_proj, v_proj become qkv_proj; gate_proj, up_proj become gate_up_proj. No value changes. OUT appears complete
    or not at all. (mlx-lm's `fuse` merges LoRA adapters; this one does not.)
    """
    from fusecheck.operations.fuse import fuse as operation  # noqa: PLC0415

    screen = Screen(quiet=quiet, verbose=verbose, progress=not no_progress)
    with screen.progress("fusing") as on_progress:
        report = operation(source, out, dry_run=dry_run, on_progress=on_progress)
    if as_json:
        screen.result(to_json(report.verdict, report))
        for warning in report.warnings:
            screen.warn(warning)
    else:
        screen.fuse(report)


@app.command(epilog=EPILOG)
def verify(
    out: Annotated[str, typer.Argument(metavar="OUT", help="A fused checkpoint folder.")],
    *,
    source: Annotated[
        str | None,
        typer.Option("--source", metavar="SRC", help="The split checkpoint; default: what OUT's manifest names."),
    ] = None,
    layer: Annotated[
        list[int] | None,
        typer.Option("--layer", help="Layer for probe and numeric; repeatable. Default: first, middle, last."),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed of the random hidden states.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
) -> None:
    """Prove that the fused checkpoint OUT holds exactly what its source holds.

    exact compares every byte of every tensor; probe and numeric run the projections of some layers on the device.
    """
    from fusecheck.operations.verify import verify as operation  # noqa: PLC0415

    screen = Screen(quiet=quiet, verbose=verbose, progress=not no_progress)
    with screen.progress("verifying") as on_progress:
        report = operation(out, source=source, layers=layer or (), device=device, seed=seed, on_progress=on_progress)
    if as_json:
        screen.result(to_json(report.verdict, report))
    else:
        screen.verify(report)
    if report.verdict != "equal":
        raise typer.Exit(1)


@app.command(epilog=EPILOG)
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint folder, split or fused.")],
    *,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,  # noqa: ARG001 - every verb takes it; headers are read at once
) -> None:
    """Say what is in PATH, what `fuse` would do with it or why not, and which engines load the result.

    Reads headers only.
    """
    from fusecheck.operations.inspect import inspect as operation  # noqa: PLC0415

    screen = Screen(quiet=quiet, verbose=verbose)
    report = operation(path)
    if as_json:
        screen.result(to_json(report.verdict, report))
    else:
        screen.inspect(report)


def main() -> NoReturn:
    """Run the command line and leave with the documented exit code."""
    tolerate_any_text()
    arguments = sys.argv[1:]
    code = _guarded(lambda: _run(arguments), arguments)
    sys.exit(_guarded(_flush, arguments) or code)


def _run(arguments: list[str]) -> int:
    with signals_as_exceptions():
        try:
            code = app(arguments, standalone_mode=False)
        except typer.TyperException as error:
            raise UsageError(error.format_message(), remedy="see --help") from None
        except typer.Abort:
            raise Interrupted(2) from None
    return code if isinstance(code, int) else 0


def _flush() -> int:
    """Buffered output must fail here, not in the interpreter's exit, where nobody sees the code."""
    sys.stdout.flush()
    return 0


def _guarded(action: Callable[[], int], arguments: list[str]) -> int:
    try:
        return action()
    except BrokenPipeError:
        discard_stdout()  # a reader that has seen enough is no failure
        return 0
    except FusecheckError as error:
        failure = error
    except OSError as error:
        failure = SystemFailure.from_os(error, str(error.filename or "stdout"), "write")
        discard_stdout()
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug is named and reported, never a traceback
        failure = FusecheckError(
            f"a bug in fusecheck: {type(error).__name__}: {error}", remedy="set FUSECHECK_DEBUG=1, report it"
        )
        failure.__cause__ = error
    if os.environ.get("FUSECHECK_DEBUG") == "1":
        traceback.print_exception(failure)
    return _report_failure(failure, arguments)


def _report_failure(failure: FusecheckError, arguments: list[str]) -> int:
    try:
        if "--json" in arguments and failure.exit_code != 1:
            refused = "--dry-run" in arguments and isinstance(failure, CheckpointError)
            sys.stdout.write(to_json("would_refuse" if refused else "error", error_fields(failure)) + "\n")
            sys.stdout.flush()
        Screen().error(failure)
    except OSError:
        discard_stdout()
    return failure.exit_code


if __name__ == "__main__":
    main()
