"""Reports -> text, tables, JSON; progress. The only file that knows rich. All foreign text is made printable here."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from fusecheck.engines.table import engines_line
from fusecheck.errors import FusecheckError, printable, shown
from fusecheck.measure.values import ProjectionBench
from fusecheck.units import duration
from fusecheck.verdicts import ProjectionCheck

if TYPE_CHECKING:
    from fusecheck.exact import Finding
    from fusecheck.operations.bench import BenchReport
    from fusecheck.operations.fuse import FuseReport
    from fusecheck.operations.inspect import InspectReport, ProjectionForm
    from fusecheck.operations.unfuse import UnfuseReport
    from fusecheck.operations.verify import VerifyReport
    from fusecheck.sidefiles import LeftOut

SCHEMA_VERSION = 1
"""Of the JSON documents on stdout."""

Phase: TypeAlias = "Callable[[str], Callable[[int, int], None] | None]"
"""What is being done -> a callback for (bytes done, bytes in total), or None where nothing is to be shown."""

_LINE_SECONDS = 30.0
_LINE_SHARE = 0.1
_FINDINGS_SHOWN = 10


def to_json(verdict: str, value: object) -> str:
    """One JSON document: schema_version, verdict, then the fields of a report or of an error. Plain ASCII."""
    fields = asdict(value) if is_dataclass(value) and not isinstance(value, type) else dict(value)  # type: ignore[call-overload]
    document = _finite({"schema_version": SCHEMA_VERSION, "verdict": verdict, **fields})
    return json.dumps(document, indent=2, allow_nan=False)


def _finite(value: object) -> object:
    """NaN and the infinities as strings ("NaN", "Infinity", "-Infinity"), since JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def error_fields(error: FusecheckError) -> dict[str, object]:
    """What the JSON document of a failed run carries."""
    return {
        "exit_code": error.exit_code,
        "message": str(error),
        "file": error.file,
        "tensor": error.tensor,
        "found": error.found,
        "wanted": error.wanted,
        "remedy": error.remedy,
    }


class _Console(Console):
    """rich's console leaves with 1 when the reader of a pipe goes away, and 1 says NOT equal."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard(self.file.fileno())


class Screen:
    """stdout for results, stderr for everything else; knows what each may show."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False, progress: bool = True) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self._progress = progress and not quiet
        self._out = _Console(file=sys.stdout, highlight=False, soft_wrap=False)
        self._err = _Console(file=sys.stderr, highlight=False, soft_wrap=True)

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
        self._tell(Text.assemble((f"{label}: ", style), printable(text)))

    def _tell(self, line: Text) -> None:
        try:
            self._err.print(line)
        except OSError:  # a full stderr changes no result, and must not change the exit code when Python flushes it
            self._err.quiet = True
            discard(sys.stderr.fileno())

    @contextmanager
    def progress(self, *, steps: bool = False) -> Iterator[Phase]:
        """Gives a callback per phase: a bar on a terminal; elsewhere a line every 10 % or 30 s; None when quiet.

        What is counted are bytes, or `steps`.
        """
        if not self._progress:
            yield lambda _: None
        elif sys.stderr.isatty() and not self._err.is_dumb_terminal and not os.environ.get("CI"):
            with self._bar(steps=steps) as bar:
                yield lambda doing: _task(bar, doing)
        else:
            yield lambda doing: _Lines(doing, self._tell, steps=steps).update

    def _bar(self, *, steps: bool) -> Progress:
        counted = (MofNCompleteColumn(),) if steps else (DownloadColumn(), TransferSpeedColumn())
        return Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *counted,
            TimeRemainingColumn(),
            console=self._err,
            transient=True,
        )

    def fuse(self, report: FuseReport, *, as_json: bool) -> None:
        """What fuse did: a summary or document on stdout, warnings on stderr, and at last which engines load the output."""
        self._warnings(report.warnings)
        if as_json:
            self.result(to_json(report.verdict, report))
        else:
            for line in () if self.quiet else fuse_lines(report, verbose=self.verbose):
                self.result(line)
        if not self.quiet:
            self._say("engines", engines_line(), "bold")

    def unfuse(self, report: UnfuseReport, *, as_json: bool) -> None:
        """What unfuse did: a summary or document on stdout, warnings on stderr."""
        self._warnings(report.warnings)
        if as_json:
            self.result(to_json(report.verdict, report))
            return
        for line in () if self.quiet else unfuse_lines(report, verbose=self.verbose):
            self.result(line)

    def inspect(self, report: InspectReport) -> None:
        """What is there: a table of layers on stdout, what fuse would do, which engines load what."""
        self._warnings(report.warnings)
        for line in inspect_head(report):
            self.result(line)
        if report.layers:
            self._out.print(inspect_table(report))
        for line in inspect_foot(report, verbose=self.verbose):
            self.result(line)
        self._out.print(engines_table(report))

    def verify(self, report: VerifyReport) -> None:
        """What verify found: a table on stdout, then the differences, then the verdict."""
        self._warnings(report.warnings)
        for note in report.notes:
            self.note(note)
        if report.projections and not self.quiet:
            self._out.print(verify_table(report))
        for line in verify_lines(report, quiet=self.quiet):
            self.result(line)

    def bench(self, report: BenchReport) -> None:
        """What bench measured: a table per projection on stdout, then the result in words."""
        self._warnings(report.warnings)
        for note in report.notes:
            self.note(note)
        for projection in () if self.quiet else report.projections:
            self._out.print(bench_table(projection))
        for line in bench_lines(report, quiet=self.quiet, verbose=self.verbose):
            self.result(line)

    def _warnings(self, warnings: tuple[str, ...]) -> None:
        for warning in warnings:
            self.warn(warning)


def _task(bar: Progress, doing: str) -> Callable[[int, int], None]:
    """One line of the bar, which shows from its first update on."""
    task = bar.add_task(doing, total=None, visible=False)
    return lambda done, total: bar.update(task, completed=done, total=total, visible=True)


class _Lines:
    """Progress as plain lines."""

    def __init__(self, doing: str, tell: Callable[[Text], None], *, steps: bool = False) -> None:
        self._steps = steps
        self._doing = doing
        self._tell = tell
        self._last = self._began = time.monotonic()
        self._share = 0.0

    def update(self, done: int, total: int) -> None:
        """Print a line when enough has happened, but never more than one a second."""
        now, share = time.monotonic(), done / total if total else 1.0
        if now - self._last >= _LINE_SECONDS or (share - self._share >= _LINE_SHARE and now - self._last >= 1):
            rate = done / (now - self._began) if now > self._began else 0.0
            line = f"{self._doing}: {share:.0%}, {decimal(done)} of {decimal(total)}, {decimal(int(rate))}/s"
            line = f"{self._doing}: {done} of {total}" if self._steps else line
            self._tell(Text(line))
            self._last, self._share = now, share


def fuse_lines(report: FuseReport, *, verbose: bool = False) -> Iterator[str]:
    """The summary of a fuse run."""
    what = {
        "fused": "fused",
        "copied": "already fused, copied",
        "already_done": "already done, nothing written:",
        "would_fuse": "would fuse",
    }[report.verdict]
    yield f"{what} {shown(report.source)} -> {shown(report.out)}"
    copied = report.output_tensors - report.fused
    yield (
        f"  {report.layers} layers: {report.source_tensors} tensors in, {report.output_tensors} out"
        f" ({report.fused} fused, {copied} copied"
        + (f", {report.already_fused} of them fused before)" if report.already_fused else ")")
    )
    shards, sides = len(report.shards), len(report.side_files)
    yield f"  {_count(shards, 'shard')}, {decimal(report.output_bytes)}, {_count(sides, 'side file')}"
    yield from _left_out(report.left_out, verbose=verbose)


def _left_out(items: tuple[LeftOut, ...], *, verbose: bool) -> Iterator[str]:
    if items and not verbose:
        some = ", ".join(shown(item.path, 40) for item in items[:3])
        yield f"  left out: {some}{' ...' if len(items) > 3 else ''} (-v says why)"
    for item in items if verbose else ():
        yield f"  left out: {shown(item.path)}: {item.reason}"


def unfuse_lines(report: UnfuseReport, *, verbose: bool = False) -> Iterator[str]:
    """The summary of an unfuse run."""
    what = {
        "unfused": "unfused",
        "copied": "nothing to split, copied",
        "already_done": "already done, nothing written:",
        "would_unfuse": "would unfuse",
    }[report.verdict]
    yield f"{what} {shown(report.source)} -> {shown(report.out)}"
    how = "by its manifest" if report.by_manifest else "by names and config.json, there is no manifest"
    made = f"{report.split} split {how}" + (
        f", {', '.join(map(shown, report.restored))} restored" * bool(report.restored)
    )
    yield f"  {report.layers} layers: {report.source_tensors} tensors in, {report.output_tensors} out ({made})"
    shards, sides = len(report.shards), len(report.side_files)
    yield f"  {_count(shards, 'shard')}, {decimal(report.output_bytes)}, {_count(sides, 'side file')}"
    if report.by_manifest:
        yield f"  weight files that are the original's byte for byte: {len(report.identical)} of {shards}"
    if report.reordered:
        names = report.reordered if verbose else report.reordered[:3]
        more = " ..." if len(names) < len(report.reordered) else ""
        yield f"  same tensors, but the original was not in canonical form: {', '.join(map(shown, names))}{more}"
    yield from _left_out(report.left_out, verbose=verbose)


def inspect_head(report: InspectReport) -> Iterator[str]:
    """Model, size, dtypes, shards."""
    architectures = f" ({', '.join(map(shown, report.architectures))})" if report.architectures else ""
    yield f"{shown(report.path)}: {shown(report.model_type or 'no model_type')}{architectures}"
    shards = _count(len(report.shards), "shard")
    yield f"{report.tensors} tensors, {decimal(report.bytes)} in {shards}, {_count(len(report.side_files), 'side file')}"
    shares = (f"{share.dtype} {share.tensors} tensors {decimal(share.bytes)}" for share in report.dtypes[:4])
    yield f"dtypes: {'; '.join(shares)}"
    if report.quantisation:
        yield f"quantised: {shown(report.quantisation)}"
    if report.tied is not None:
        head = f"{shown(report.stored_head)} is stored" if report.stored_head else "lm_head is not stored"
        yield f"embeddings: {'tied' if report.tied else 'untied'}, {head}"


def inspect_table(report: InspectReport) -> Table:
    """One row for each run of layers that are alike."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("layers", "qkv", "gate_up", "dtype", "each"):
        table.add_column(heading, overflow="fold")
    for row in report.layers:
        cells = [_form(projection) for projection in row.projections]
        if row.experts:
            cells[-1] = f"{row.experts} experts"
        layers = f"{row.first}-{row.last}" if row.last > row.first else str(row.first)
        table.add_row(layers, *cells, ", ".join(row.dtypes), decimal(row.bytes))
    return table


def _form(projection: ProjectionForm) -> str:
    rows = "+".join(map(str, projection.rows))
    columns = f" x {projection.in_features}" if projection.in_features is not None else ""
    return f"{projection.form} {rows}{columns}".strip()


def inspect_foot(report: InspectReport, *, verbose: bool) -> Iterator[str]:
    """What fuse would do, or why not, and the engines."""
    if report.would_fuse and report.split_groups:
        straddling = f", {len(report.straddling)} of them across shards" if report.straddling else ""
        yield f"fuse: would make {report.split_groups} fused tensors{straddling}"
    elif report.would_fuse:
        yield f"fuse: already fused ({report.fused_tensors} fused tensors), would copy"
    else:
        yield f"fuse: would refuse: {printable(report.reason or '')}"
    for name in report.straddling if verbose else report.straddling[:3]:
        yield f"  across shards: {shown(name)}"
    if len(report.straddling) > 3 and not verbose:
        yield f"  ... {len(report.straddling) - 3} more (-v)"
    for item in report.left_out if verbose else ():
        yield f"left out: {shown(item.path)}: {item.reason}"


def engines_table(report: InspectReport) -> Table:
    """Which engines load a fused folder, and how and when that was found out."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for heading in ("engine", "loads fused", "note", "found"):
        table.add_column(heading, no_wrap=heading == "engine")
    for engine in report.engines:
        table.add_row(engine.name, "yes" if engine.loads else "no", engine.note, f"{engine.evidence} {engine.date}")
    return table


def verify_table(report: VerifyReport) -> Table:
    """Per projection: input -> output size, shard offsets, and each check's verdict."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("layer", "projection", "in -> out", "shard offsets", "loader", "probe", "numeric"):
        table.add_column(heading, no_wrap=heading != "shard offsets")
    for check in report.projections:
        offsets = ", ".join(f"{shard_id} {offset}" for shard_id, offset in check.shard_offsets)
        table.add_row(
            str(check.layer),
            printable(check.tensor.rpartition(".")[0].rpartition(".")[2]),
            f"{check.input_size} -> {check.output_size}",
            offsets,
            _verdict(check.built),
            _verdict(check.probe.verdict),
            _verdict(check.numeric.verdict),
        )
    return table


def verify_lines(report: VerifyReport, *, quiet: bool) -> Iterator[str]:
    """Everything below the table, the verdict last."""
    exact = report.exact
    if not quiet:
        for check in report.projections:
            yield from _measured(check)
        digests = ", digests agree with the manifest" if exact.digests_checked and exact.verdict == "pass" else ""
        yield f"exact    {exact.verdict}: {exact.tensors} tensors, {decimal(exact.bytes)} against {exact.against}{digests}"
        for name in ("probe", "numeric"):
            yield f"{name:8} {_summary(report, name)}"
        if report.device:
            yield f"device   {printable(report.device)}; {printable(report.device_note or '')}; seed {report.seed}"
    for finding in exact.findings[:_FINDINGS_SHOWN]:
        yield f"differs  {finding_text(finding)}"
    if exact.finding_count > _FINDINGS_SHOWN:
        yield f"differs  ... {exact.finding_count - _FINDINGS_SHOWN} more"
    yield f"{report.verdict.replace('_', ' ').upper()}: {shown(report.out)}" + (
        f" (proved: {', '.join(report.proved)})" if report.verdict == "equal" else ""
    )


def bench_table(projection: ProjectionBench) -> Table:
    """One row per size of hidden states: medians, launches, and whether fusing gains beyond the noise."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in (_module(projection), "separate", "fused", "ratio", "noise", "fused is", "launches"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in {"separate", "fused"} else "left")
    for case in projection.cases:
        table.add_row(
            f"{case.phase} {case.batch}" + ("" if case.mode == "eager" else " graph"),
            duration(case.separate.median),
            duration(case.fused.median),
            f"{case.ratio:.2f} x",
            f"{case.noise:.1%}",
            Text(case.outcome, style={"faster": "green", "slower": "yellow"}.get(case.outcome, "dim")),
            f"{case.launches.separate_total} -> {case.launches.fused_total}",
        )
    return table


def _module(projection: ProjectionBench) -> str:
    return printable(projection.tensor.rpartition(".")[0].rpartition(".")[2])


def bench_lines(report: BenchReport, *, quiet: bool, verbose: bool) -> Iterator[str]:
    """Everything below the tables: load time, the device, the result in words."""
    if not quiet:
        yield f"launches are {report.counted}, as torch.profiler counts them"
        reads = (f"{_module(projection)} {len(projection.parts)} -> 1" for projection in report.projections)
        yield f"reads    of the hidden states: {', '.join(reads)}"
        if report.load is not None:
            load = report.load
            yield (
                f"load     {load.split_tensors} split tensors {duration(load.split.median)}, {load.fused_tensors} fused"
                f" {duration(load.fused.median)}: {decimal(load.bytes)}, {_count(load.layers, 'layer')}"
            )
        yield f"device   {printable(report.device)}; {printable(report.device_note)}; {_count(report.threads, 'thread')}"
    for line in report.method if verbose else ():
        yield f"method   {line}"
    for line in report.summary:
        yield f"MEASURED {printable(line)}"


def finding_text(finding: Finding) -> str:
    """One defect in one line: file, tensor, part, row, offset, problem."""
    where = [shown(item) for item in (finding.file, finding.tensor) if item]
    if finding.part:
        where.append(f"part {shown(finding.part)}")
    if finding.row is not None:
        own = f" (row {finding.part_row} of the part)" if finding.part and finding.part_row is not None else ""
        where.append(f"row {finding.row}{own}")
    if finding.offset is not None:
        where.append(f"byte {finding.offset}")
    return f"{', '.join(where)}: {printable(finding.problem)}" if where else printable(finding.problem)


def _measured(check: ProjectionCheck) -> Iterator[str]:
    """What probe and numeric saw of one projection, where it is more than a verdict."""
    probe, numeric, name = check.probe, check.numeric, shown(check.tensor)
    if probe.verdict != "pass":
        place = probe.first_difference
        at = f", first at row {place.row} of {place.part}" if place else ""
        yield f"probe    {probe.verdict}: {name}: {probe.reason}{at}"
    if probe.non_finite or probe.flushed:
        yield f"probe    {name}: {probe.non_finite} values beside NaN or Inf and {probe.flushed} flushed ones not comparable"
    if numeric.verdict != "not run":
        same = (
            "bitwise equal"
            if numeric.bitwise_equal
            else f"max |diff| {numeric.max_abs_diff:.3g}, max ULP {numeric.max_ulp}"
        )
        yield f"numeric  {name}: fused against separate {same}; error / bound {numeric.worst:.3g}"
    else:
        yield f"numeric  not run: {name}: {numeric.reason}"


def _summary(report: VerifyReport, name: str) -> str:
    verdicts = [getattr(check, name).verdict for check in report.projections]
    if not verdicts:
        return "not run"
    worst = next(verdict for verdict in ("fail", "pass", "not run") if verdict in verdicts)
    layers = ", ".join(map(str, report.layers))
    return f"{worst}: {verdicts.count(worst)} of {len(verdicts)} projections of layers {layers}"


def _verdict(verdict: str) -> Text:
    return Text(verdict, style={"pass": "green", "fail": "bold red"}.get(verdict, "dim"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def prepare_streams() -> None:
    """A terminal that cannot show a character gets an escape, not an exception; a closed stream swallows.

    Descriptors 0 to 2 are filled first: an output file that took number 1 would get what is printed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def discard(descriptor: int) -> None:
    """Point stdout or stderr at nothing, so that the interpreter does not complain at exit about a reader that has gone."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)
