"""What needs rich's console: styled lines, tables, a bar. Imported when there is something to show that way."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from fusecheck.render.streams import discard


class PipeConsole(Console):
    """rich's console leaves with 1 when the reader of a pipe goes away, and 1 says NOT equal."""

    def on_broken_pipe(self) -> None:
        """Say nothing more, and leave the exit code alone."""
        self.quiet = True
        discard(self.file.fileno())


def bar_on(console: Console, *, steps: bool) -> Progress:
    """A bar that is gone once it is done; it counts bytes, or `steps`."""
    counted = (MofNCompleteColumn(),) if steps else (DownloadColumn(), TransferSpeedColumn())
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counted,
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def task_on(bar: Progress, doing: str) -> Callable[[int, int], None]:
    """One line of the bar, which shows from its first update on."""
    task = bar.add_task(doing, total=None, visible=False)
    return lambda done, total: bar.update(task, completed=done, total=total, visible=True)
