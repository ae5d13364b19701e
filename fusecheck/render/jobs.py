"""What plan, run and finalize did, as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.filesize import decimal

from fusecheck.errors import shown
from fusecheck.render.words import count

if TYPE_CHECKING:
    from fusecheck.operations.finalize import FinalizeReport
    from fusecheck.operations.plan import PlanReport
    from fusecheck.operations.run import RunReport
    from fusecheck.origin import Traffic


def plan_line(report: PlanReport) -> str:
    """What the plan will take, before anything is fetched."""
    estimate = report.estimate
    requests = f"about {count(estimate.requests, 'request')}, " if estimate.requests else ""
    return (
        f"{count(report.objects, 'object')}: {decimal(estimate.bytes_read)} to read, {decimal(estimate.bytes_written)} to "
        f"write, {requests}at most {decimal(estimate.memory)} of memory in each run"
    )


def run_lines(report: RunReport, *, verbose: bool = False) -> Iterator[str]:
    """The summary of a part."""
    yield (
        f"part {report.part}/{report.parts} of {shown(report.out)}: {count(len(report.written), 'object')} written "
        f"({decimal(report.bytes_written)}), {len(report.stood)} stood there already"
    )
    for name in report.written if verbose else ():
        yield f"  written: {shown(name)}"
    yield from traffic_line(report.traffic)


def finalize_lines(report: FinalizeReport) -> Iterator[str]:
    """The summary of a commit."""
    what = "already committed" if report.verdict == "already_done" else "committed"
    yield f"{what}: {shown(report.out)}: {count(report.objects, 'shard')}, {decimal(report.output_bytes)}"
    yield from traffic_line(report.traffic)


def traffic_line(traffic: Traffic) -> Iterator[str]:
    """What a source in a store was asked for, where it was one."""
    if traffic.requests:
        yield (
            f"  read {decimal(traffic.bytes_read)} in {count(traffic.requests, 'request')}, {traffic.retries} of them again"
        )
