"""The file of --report: whether there is a place for it, before the work; the page in it, after."""

from __future__ import annotations

import sys
from pathlib import Path

from fusecheck.errors import SystemFailure, UsageError
from fusecheck.render import Screen


def require_place(path: str | None) -> None:
    """A report that has nowhere to go is refused before the work, not after it."""
    if path is None:
        return
    folder = Path(path).parent
    if not path or Path(path).is_dir():
        raise UsageError("--report is a folder", file=path, remedy="name a file")
    if not folder.is_dir():
        raise UsageError(f"--report cannot be written: there is no folder {folder}", file=path, remedy="make it first")


def write_report(path: str, page: str, *, failed: bool = False) -> None:
    """Write a page; where that fails, a run that found a difference still says so by its exit code."""
    from fusecheck.durable import replace_file  # noqa: PLC0415

    sys.stdout.flush()  # the page may go to stdout too
    try:
        replace_file(Path(path), page.encode())
    except SystemFailure as error:
        if not failed:
            raise
        Screen().error(error)
