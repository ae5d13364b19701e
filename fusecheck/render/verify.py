"""What verify found, as text and a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fusecheck.errors import printable, shown
from fusecheck.render.words import count, module_of
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
            folds = heading == "shard offsets"
            table.add_column(heading, no_wrap=not folds, min_width=12 if folds else None)
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


def verify_lines(report: VerifyReport, *, quiet: bool = False, verbose: bool = False) -> Iterator[str]:
    """Everything below the table, the verdict last. What failed is told always, what was measured beside when `verbose`."""
    exact = report.exact
    for check in fold(report.projections):
        yield from _troubles(check, quiet=quiet)
        if verbose and not quiet:
            yield from _measured(check)
    if not quiet:
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


def _troubles(check: ProjectionCheck, *, quiet: bool) -> Iterator[str]:
    """What failed or did not run, one projection's; when quiet only what failed."""
    name = _name(check)
    if check.built == "fail":
        yield f"loader   fail: {name}: the weight_loaders build another parameter out of the split tensors"
    for what, result in (("probe", check.probe), ("numeric", check.numeric)):
        if result.verdict == "fail" or (result.verdict != "pass" and not quiet):
            place = result.first_difference
            at = f", first at row {place.row} of {place.part}" if place else ""
            yield f"{what:8} {result.verdict}: {name}: {printable(result.reason or '')}{at}"


def _measured(check: ProjectionCheck) -> Iterator[str]:
    """What probe and numeric saw of one projection beside their verdicts."""
    probe, numeric, name = check.probe, check.numeric, _name(check)
    if probe.non_finite or probe.flushed:
        yield f"probe    {name}: not comparable: {probe.non_finite} beside NaN or Inf, {probe.flushed} flushed to 0"
    if numeric.verdict != "not run":
        same = (
            "bitwise equal"
            if numeric.bitwise_equal
            else f"max |diff| {numeric.max_abs_diff:.3g}, max ULP {numeric.max_ulp}"
        )
        what = "fused against separate" if check.axis == "rows" else "sum against whole product"
        yield f"numeric  {name}: {what} {same}; error / bound {numeric.worst:.3g}"


def _name(check: ProjectionCheck) -> str:
    return " ".join(filter(None, (ranks_text(check.ranks), shown(check.tensor))))


def _summary(report: VerifyReport, name: str) -> str:
    verdicts = [getattr(check, name).verdict for check in report.projections]
    if not verdicts:
        return "not run"
    worst = next(verdict for verdict in ("fail", "pass", "not run") if verdict in verdicts)
    layers = f"layer{'s' if len(report.layers) > 1 else ''} {', '.join(map(str, report.layers))}"
    lost = sum(c.probe.non_finite + c.probe.flushed for c in report.projections) if name == "probe" else 0
    rest = f"; {count(lost, 'weight')} not comparable, left to exact (-v)" if lost else ""
    return f"{worst}: {verdicts.count(worst)} of {count(len(verdicts), 'projection')} of {layers}{rest}"


def _verdict(verdict: str) -> Text:
    return Text(verdict, style={"pass": "green", "fail": "bold red"}.get(verdict, "dim"))
