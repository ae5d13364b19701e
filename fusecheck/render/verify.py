"""What verify found, as text and a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fusecheck.errors import printable, shown
from fusecheck.render.words import module_of
from fusecheck.verdicts import ProjectionCheck, fold, ranks_text

if TYPE_CHECKING:
    from fusecheck.exact import Finding
    from fusecheck.operations.verify import VerifyReport

_FINDINGS_SHOWN = 10


def verify_table(report: VerifyReport) -> Table:
    """Per projection: input -> output size, shard offsets, and each check's verdict; ranks alike in one row."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    ranked = any(check.ranks for check in report.projections)
    headings = ("layer", "projection", "ranks", "in -> out", "shard offsets", "loader", "probe", "numeric")
    for heading in headings:
        if heading != "ranks" or ranked:
            table.add_column(heading, no_wrap=heading != "shard offsets")
    for check in fold(report.projections):
        table.add_row(
            str(check.layer),
            module_of(check.tensor),
            *([ranks_text(check.ranks).partition(" ")[2]] if ranked else []),
            f"{check.input_size} -> {check.output_size}",
            _offsets(check),
            _verdict(check.built),
            _verdict(check.probe.verdict),
            _verdict(check.numeric.verdict),
        )
    return table


def _offsets(check: ProjectionCheck) -> str:
    """Where each part begins; of columns, which ranks share evenly, how many each has."""
    offsets = check.shard_offsets
    if check.axis == "rows" or not offsets:
        return ", ".join(f"{shard_id} {offset}" for shard_id, offset in offsets)
    return f"{check.input_size // len(offsets)} columns each"


def verify_lines(report: VerifyReport, *, quiet: bool) -> Iterator[str]:
    """Everything below the table, the verdict last."""
    exact = report.exact
    if not quiet:
        for check in fold(report.projections):
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
    probe, numeric = check.probe, check.numeric
    name = " ".join(filter(None, (ranks_text(check.ranks), shown(check.tensor))))
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
        what = "fused against separate" if check.axis == "rows" else "sum against whole product"
        yield f"numeric  {name}: {what} {same}; error / bound {numeric.worst:.3g}"
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
