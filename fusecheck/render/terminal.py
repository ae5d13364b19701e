"""What needs rich's console: styled lines, tables, a bar. Imported when there is something to show that way."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.segment import Segments
from rich.table import Column, Table

from fusecheck.render.streams import discard

_UNBOUNDED = 10_000


class PipeConsole(Console):
    """rich's console leaves with 1 when the reader of a pipe goes away, and 1 says NOT equal."""

    def on_broken_pipe(self) -> None:
        """Say nothing more, and leave the exit code alone."""
        self.quiet = True
        discard(self.file.fileno())

    def table(self, table: Table) -> None:
        """Print a table whose cells are never cut: columns that may fold share what the terminal leaves, others are whole."""
        wide = self.options.update(width=_UNBOUNDED)
        gap = table.padding[1]

        def width(column: Column) -> int:
            return max(Measurement.get(self, wide, cell).maximum for cell in (column.header, *column.cells))

        folding = [column for column in table.columns if not column.no_wrap]
        for column in table.columns:
            column.width = width(column)
        left = self.width - gap * (len(table.columns) - 1) - sum(c.width or 0 for c in table.columns if c.no_wrap)
        for column in folding:
            column.width = min(width(column), max(left // len(folding), column.min_width or 1))
        whole = sum(column.width or 0 for column in table.columns) + gap * (len(table.columns) - 1)
        self.print(Segments(self.render(table, wide.update(width=whole))), crop=False)


def bar_on(console: Console, *, steps: bool) -> Progress:
    """A bar that is gone once it is done; it counts bytes, or `steps`."""
    whole = [Column(no_wrap=True) for _ in range(4)]  # the bar gives way, on a terminal of 40 columns too
    counted = (
        (MofNCompleteColumn(table_column=whole[0]),)
        if steps
        else (DownloadColumn(table_column=whole[0]), TransferSpeedColumn(table_column=whole[1]))
    )
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=whole[2]),
        BarColumn(),
        *counted,
        TimeRemainingColumn(table_column=whole[3]),
        console=console,
        transient=True,
    )


def task_on(bar: Progress, doing: str) -> Callable[[int, int], None]:
    """One line of the bar, which shows from its first update on."""
    task = bar.add_task(doing, total=None, visible=False)
    return lambda done, total: bar.update(task, completed=done, total=total, visible=True)
