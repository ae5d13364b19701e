"""stdout and stderr of one run: what each may show of reports, warnings, errors and progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from fusecheck.engines.table import engines_line
from fusecheck.errors import FusecheckError, printable
from fusecheck.render.document import to_json
from fusecheck.render.fuse import fuse_lines
from fusecheck.render.jobs import finalize_lines, plan_line, run_lines
from fusecheck.render.progress import Lines, Phase
from fusecheck.render.streams import discard
from fusecheck.render.unfuse import unfuse_lines

if TYPE_CHECKING:
    from fusecheck.operations.bench import BenchReport
    from fusecheck.operations.finalize import FinalizeReport
    from fusecheck.operations.fuse import FuseReport
    from fusecheck.operations.inspect import InspectReport
    from fusecheck.operations.plan import PlanReport
    from fusecheck.operations.run import RunReport
    from fusecheck.operations.unfuse import UnfuseReport
    from fusecheck.operations.verify import VerifyReport
    from fusecheck.render.terminal import PipeConsole


class Screen:
    """stdout for results, stderr for everything else; knows what each may show."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False, progress: bool = True) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self._progress = progress and not quiet

    @cached_property
    def _out(self) -> PipeConsole:
        from fusecheck.render.terminal import PipeConsole  # noqa: PLC0415 - a pipeline that prints no table pays nothing

        return PipeConsole(file=sys.stdout, highlight=False, soft_wrap=False)

    @cached_property
    def _err(self) -> PipeConsole:
        from fusecheck.render.terminal import PipeConsole  # noqa: PLC0415 - see _out

        return PipeConsole(file=sys.stderr, highlight=False, soft_wrap=True)

    def result(self, text: str) -> None:
        """A line of plain text on stdout, never wrapped, never interpreted."""
        try:
            sys.stdout.write(f"{text}\n")
        except BrokenPipeError:  # a reader that has seen enough must not cost the verdict its exit code
            discard(sys.stdout.fileno())

    def warn(self, text: str) -> None:
        """A warning on stderr, one line."""
        if not self.quiet:
            self._say("warning", text, "yellow")

    def note(self, text: str) -> None:
        """Something worth knowing on stderr, one line."""
        if not self.quiet:
            self._say("note", text, "cyan")

    def error(self, error: FusecheckError) -> None:
        """The one line `error: ...` on stderr."""
        self._say("error", str(error), "bold red")

    def _say(self, label: str, text: str, style: str) -> None:
        if not sys.stderr.isatty() and not os.environ.get("FORCE_COLOR"):
            self._tell(f"{label}: {printable(text)}")
            return
        from rich.text import Text  # noqa: PLC0415 - see _out

        try:
            self._err.print(Text.assemble((f"{label}: ", style), printable(text)))
        except OSError:
            self._err.quiet = True
            discard(sys.stderr.fileno())

    def _tell(self, line: str) -> None:
        """A plain line on stderr. A full one changes no result, nor the exit code when Python flushes it."""
        try:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        except OSError:
            discard(sys.stderr.fileno())

    @contextmanager
    def progress(self, *, steps: bool = False) -> Iterator[Phase]:
        """Gives a callback per phase: a bar on a terminal; elsewhere a line every 10 % or 30 s; None when quiet.

        What is counted are bytes, or `steps`.
        """
        if not self._progress:
            yield lambda _: None
        elif sys.stderr.isatty() and not self._err.is_dumb_terminal and not os.environ.get("CI"):
            from fusecheck.render.terminal import bar_on, task_on  # noqa: PLC0415 - see _out

            with bar_on(self._err, steps=steps) as bar:
                yield lambda doing: task_on(bar, doing)
        else:
            yield lambda doing: Lines(doing, self._tell, steps=steps).update

    def fuse(self, report: FuseReport, *, as_json: bool) -> None:
        """What fuse did: a summary or document on stdout, warnings on stderr, and at last which engines load the output."""
        self._warnings(report.warnings)
        if as_json:
            self.result(to_json(report.verdict, report))
        else:
            for line in () if self.quiet else fuse_lines(report, verbose=self.verbose):
                self.result(line)
        if not self.quiet:
            self._say("engines", engines_line(report.tp), "bold")

    def unfuse(self, report: UnfuseReport, *, as_json: bool) -> None:
        """What unfuse did: a summary or document on stdout, warnings on stderr."""
        self._warnings(report.warnings)
        if as_json:
            self.result(to_json(report.verdict, report))
            return
        for line in () if self.quiet else unfuse_lines(report, verbose=self.verbose):
            self.result(line)

    def plan(self, report: PlanReport) -> None:
        """The plan on stdout, as it is to be stored; on stderr what it will take."""
        self._warnings(report.warnings)
        self.result(report.text.rstrip("\n"))
        self.note(plan_line(report))

    def run(self, report: RunReport, *, as_json: bool) -> None:
        """What a part did."""
        self._warnings(report.warnings)
        for line in () if self.quiet or as_json else run_lines(report, verbose=self.verbose):
            self.result(line)
        if as_json:
            self.result(to_json(report.verdict, report))

    def finalize(self, report: FinalizeReport, *, as_json: bool) -> None:
        """How a commit ended, and which engines load the output."""
        self._warnings(report.warnings)
        for line in () if self.quiet or as_json else finalize_lines(report):
            self.result(line)
        if as_json:
            self.result(to_json(report.verdict, report))
        if not self.quiet:
            self._say("engines", engines_line(report.tp), "bold")

    def inspect(self, report: InspectReport) -> None:
        """What is there: a table of layers on stdout, what fuse would do, which engines load what."""
        from fusecheck.render.inspect import (  # noqa: PLC0415 - see _out
            engines_table,
            inspect_foot,
            inspect_head,
            inspect_table,
        )

        self._warnings(report.warnings)
        if self.quiet:
            self.result(next(inspect_foot(report, verbose=False)))
            return
        for line in inspect_head(report):
            self.result(line)
        if report.layers:
            self._out.table(inspect_table(report))
        for line in inspect_foot(report, verbose=self.verbose):
            self.result(line)
        if report.engines:
            self._out.table(engines_table(report))

    def verify(self, report: VerifyReport) -> None:
        """What verify found: a table on stdout, then the differences, then the verdict."""
        from fusecheck.render.verify import verify_lines, verify_table  # noqa: PLC0415 - see _out

        self._warnings(report.warnings)
        for note in report.notes:
            self.note(note)
        if report.projections and not self.quiet:
            self._out.table(verify_table(report))
        for line in verify_lines(report, quiet=self.quiet, verbose=self.verbose):
            self.result(line)

    def bench(self, report: BenchReport) -> None:
        """What bench measured: a table per projection on stdout, then the result in words."""
        from fusecheck.render.bench import bench_lines, bench_table  # noqa: PLC0415 - see _out

        self._warnings(report.warnings)
        for note in report.notes:
            self.note(note)
        for projection in () if self.quiet else report.projections:
            self._out.table(bench_table(projection))
        for line in bench_lines(report, quiet=self.quiet, verbose=self.verbose):
            self.result(line)

    def _warnings(self, warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            self.warn(warning)
