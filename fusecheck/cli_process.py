"""The frame of the process: streams, signals, and an exit code for every way to end."""

from __future__ import annotations

import atexit
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn

import typer

from fusecheck.errors import CheckpointError, FusecheckError, Interrupted, SystemFailure, UsageError
from fusecheck.render import Screen, discard, error_fields, prepare_streams, to_json
from fusecheck.signals import ignore_signals, signals_as_exceptions


def leave_with(app: typer.Typer, arguments: list[str]) -> NoReturn:
    """Run the command line and leave with the documented exit code."""
    prepare_streams()
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch's; nothing here needs NumPy
    atexit.register(ignore_signals)
    with signals_as_exceptions():  # to the very end: a second Ctrl-C while the first is told must not be a traceback
        try:
            code = _guarded(lambda: _run(app, arguments), arguments)
            code = _guarded(_flush, arguments) or code
        except Interrupted as late:  # it came while an error was told
            code = late.exit_code
    sys.exit(code)


def _run(app: typer.Typer, arguments: list[str]) -> int:
    try:
        code = app(arguments or ["--help"], standalone_mode=False)
    except typer.TyperException as error:
        raise UsageError(
            error.format_message().replace("Value error, ", "").rstrip(".?"), remedy="see --help"
        ) from None
    except typer.Abort:
        raise Interrupted(2) from None
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        raise error.__context__ from None  # typer answers a closed pipe with 1, which means NOT equal
    if not arguments:
        return UsageError.exit_code  # the help is shown, yet nothing was asked for
    return code if isinstance(code, int) else 0


def _flush() -> int:
    """Buffered output must fail here, not in the interpreter's exit, where nobody sees the code."""
    sys.stdout.flush()
    return 0


def _guarded(action: Callable[[], int], arguments: list[str]) -> int:
    try:
        return action()
    except BrokenPipeError:
        discard(1)  # a reader that has seen enough is no failure
        return 0
    except FusecheckError as error:
        failure = error
    except Interrupted as error:
        failure = FusecheckError(str(error))
        failure.exit_code = error.exit_code
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            failure = UsageError("no file can have a name this long", file=str(error.filename))
        else:
            failure = SystemFailure.from_os(error, str(error.filename or "stdout"), "write")
        if error.filename is None:
            discard(1)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug is named and reported, never a traceback
        failure = FusecheckError(
            f"a bug in fusecheck: {type(error).__name__}: {error}", remedy="set FUSECHECK_DEBUG=1, report it"
        )
        failure.__cause__ = error
    if os.environ.get("FUSECHECK_DEBUG") == "1":
        traceback.print_exception(failure)
    return _report_failure(failure, arguments)


def _report_failure(failure: FusecheckError, arguments: list[str]) -> int:
    if "--json" in arguments and failure.exit_code != 1:
        refused = "--dry-run" in arguments and isinstance(failure, CheckpointError)
        try:
            sys.stdout.write(to_json("would_refuse" if refused else "error", error_fields(failure)) + "\n")
            sys.stdout.flush()
        except OSError:  # stderr still says it
            discard(1)
    Screen().error(failure)
    return failure.exit_code
