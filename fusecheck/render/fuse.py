"""What fuse did, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fusecheck.errors import shown
from fusecheck.render.jobs import traffic_line
from fusecheck.render.words import count, files_line, left_out_lines

if TYPE_CHECKING:
    from fusecheck.operations.fuse import FuseReport


def fuse_lines(report: FuseReport, *, verbose: bool = False) -> Iterator[str]:
    """The summary of a fuse run."""
    what = {
        "fused": "fused",
        "copied": "already fused, copied",
        "already_done": "already done, nothing written:",
        "would_fuse": "would fuse",
    }[report.verdict]
    yield f"{what} {shown(report.source)} -> {shown(report.out)}"
    layers = count(report.layers, "layer")
    made = f"  {layers}: {report.source_tensors} tensors in, {report.output_tensors} out"
    if report.ranks:
        ranks = ", ".join(map(str, report.ranks))
        rest = "" if len(report.ranks) == report.tp else "; those of the other ranks have to stand beside them"
        yield f"  cut for {report.target}, TP {report.tp}: rank{'s' if len(report.ranks) > 1 else ''} {ranks}{rest}"
        yield made
    else:
        before = f", {report.already_fused} of them fused before" if report.already_fused else ""
        yield f"{made} ({report.fused} fused, {report.output_tensors - report.fused} copied{before})"
    yield files_line(report)
    if report.traffic is not None:
        yield from traffic_line(report.traffic)
    yield from left_out_lines(report.left_out, verbose=verbose)
