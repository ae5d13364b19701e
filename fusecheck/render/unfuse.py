"""What unfuse did, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fusecheck.errors import shown
from fusecheck.render.words import count, files_line, left_out_lines

if TYPE_CHECKING:
    from fusecheck.operations.unfuse import UnfuseReport


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
    layers = count(report.layers, "layer")
    yield f"  {layers}: {report.source_tensors} tensors in, {report.output_tensors} out ({made})"
    yield files_line(report)
    if report.by_manifest:
        yield f"  weight files that are the original's byte for byte: {len(report.identical)} of {len(report.shards)}"
    if report.reordered:
        names = report.reordered if verbose else report.reordered[:3]
        more = " ..." if len(names) < len(report.reordered) else ""
        yield f"  same tensors, but the original was not in canonical form: {', '.join(map(shown, names))}{more}"
    yield from left_out_lines(report.left_out, verbose=verbose)
