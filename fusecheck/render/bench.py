"""What bench measured, as text and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fusecheck.errors import printable
from fusecheck.measure.values import ProjectionBench
from fusecheck.render.words import count, module_of
from fusecheck.units import duration

if TYPE_CHECKING:
    from fusecheck.operations.bench import BenchReport


def bench_table(projection: ProjectionBench) -> Table:
    """One row per size of hidden states: medians, launches, and whether fusing gains beyond the noise."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in (module_of(projection.tensor), "separate", "fused", "ratio", "noise", "fused is", "launches"):
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


def bench_lines(report: BenchReport, *, quiet: bool, verbose: bool) -> Iterator[str]:
    """Everything below the tables: load time, the device, the result in words."""
    if not quiet:
        yield f"launches are {report.counted}, as torch.profiler counts them"
        reads = (f"{module_of(projection.tensor)} {len(projection.parts)} -> 1" for projection in report.projections)
        yield f"reads    of the hidden states: {', '.join(reads)}"
        if report.load is not None:
            load = report.load
            yield (
                f"load     {load.split_tensors} split tensors {duration(load.split.median)}, {load.fused_tensors} fused"
                f" {duration(load.fused.median)}: {decimal(load.bytes)}, {count(load.layers, 'layer')}"
            )
        yield f"device   {printable(report.device)}; {printable(report.device_note)}; {count(report.threads, 'thread')}"
    for line in report.method if verbose else ():
        yield f"method   {line}"
    for line in report.summary:
        yield f"MEASURED {printable(line)}"
