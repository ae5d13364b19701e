"""What inspect found, as text and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Table

from fusecheck.errors import printable, shown
from fusecheck.render.words import count

if TYPE_CHECKING:
    from fusecheck.operations.inspect import InspectReport, ProjectionForm


def inspect_head(report: InspectReport) -> Iterator[str]:
    """Model, size, dtypes, shards."""
    architectures = f" ({', '.join(map(shown, report.architectures))})" if report.architectures else ""
    yield f"{shown(report.path)}: {shown(report.model_type or 'no model_type')}{architectures}"
    shards = count(len(report.shards), "shard")
    yield f"{report.tensors} tensors, {decimal(report.bytes)} in {shards}, {count(len(report.side_files), 'side file')}"
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
        table.add_column(heading, no_wrap=True)
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
        table.add_column(heading, no_wrap=heading != "note", min_width=30 if heading == "note" else None)
    for engine in report.engines:
        table.add_row(engine.name, "yes" if engine.loads else "no", engine.note, f"{engine.evidence} {engine.date}")
    return table
