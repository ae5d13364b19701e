"""One checked projection on verify's page: its rows, its verdicts, and what probe and numeric measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fusecheck.html.page import chip, percent, svg, text
from fusecheck.html.row_map import row_map
from fusecheck.mapping import PACKINGS
from fusecheck.operations.verify import ExactReport
from fusecheck.verdicts import NumericResult, ProbeResult, ProjectionCheck, ranks_text

_DRAWN = 64
"""Most parts that a drawing tells apart; ranks may be more."""
_GAUGE = 1.25
"""What the full width of the error / bound gauge stands for, so that there is room beyond the bound."""


def projection_card(check: ProjectionCheck, exact: ExactReport) -> str:
    """Everything about one projection."""
    parts = _parts(check)
    built = f"{check.built}{f' ({check.built_reason})' if check.built_reason else ''}"
    weights = "" if check.weights == "stored" else f"; probe and numeric on weights {check.weights}"
    chips = chip(_exact_of(check, exact), "exact") + chip(check.probe.verdict, "probe")
    chips += chip(check.numeric.verdict, "numeric")
    name = " ".join(filter(None, (ranks_text(check.ranks), check.tensor)))
    drawn = row_map(check.tensor, parts, check.axis) if 0 < len(parts) <= _DRAWN else ""
    return (
        f'<article class="card"><div class="head"><h3 class="mono">{text(name)}</h3>'
        f'<div class="chips">{chips}</div></div>'
        f'<p class="size">{check.input_size:,} inputs, {check.output_size:,} rows; built by the weight_loaders: '
        f"{text(built)}{text(weights)}</p>"
        f'{drawn}<div class="facts"><div>{_probe(check.probe)}{_gauge(check.numeric)}</div>'
        f"<div>{_numeric(check.numeric, check.axis)}{_histogram(check.numeric)}</div></div></article>"
    )


def _parts(check: ProjectionCheck) -> list[tuple[str, int, int]]:
    """(label, shard_offset, size) of each."""
    offsets = [offset for _, offset in check.shard_offsets]
    ends = [*offsets[1:], check.output_size if check.axis == "rows" else check.input_size]
    labels = _labels(check.tensor, [shard_id for shard_id, _ in check.shard_offsets])
    return [(label, start, end - start) for label, start, end in zip(labels, offsets, ends, strict=False)]


def _exact_of(check: ProjectionCheck, exact: ExactReport) -> str:
    """What exact says of this tensor; where the list of findings is cut, only a failure is certain of one."""
    stored = check.tensor.removesuffix("]").partition("[")[0] if check.ranks else check.tensor  # the whole stack's name
    files = tuple(f"model-rank-{rank}-" for rank in check.ranks)
    found = (finding for finding in exact.findings if finding.tensor == stored)
    if check.built == "fail" or any(not files or (each.file or "").startswith(files) for each in found):
        return "fail"
    return "pass" if exact.finding_count == len(exact.findings) else "see above"


def _labels(tensor: str, shard_ids: Sequence[str]) -> list[str]:
    """What people call the parts: q, k, v; gate, up."""
    module = tensor.rpartition(".")[0].rpartition(".")[2]
    for packing in PACKINGS:
        if packing.fused.rpartition(".")[2] == module and len(packing.parts) == len(shard_ids):
            return [part.rpartition(".")[2].removesuffix("_proj") for _, part in packing.parts]
    return list(shard_ids)


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{text(value)}</dd>' for name, value in rows)}</dl>"


def _probe(probe: ProbeResult) -> str:
    rows = [("compared", f"{probe.compared:,} of {probe.total:,} weights")] if probe.total else []
    if probe.flushed or probe.non_finite:
        rows += [("flushed to 0", f"{probe.flushed:,}"), ("beside NaN, Inf", f"{probe.non_finite:,}")]
    if probe.first_difference is not None:
        place = probe.first_difference
        column = f", input {place.column}" if place.column is not None else ""
        rows.append(("first difference", f"row {place.row}, part {place.part}{column}"))
    if probe.reason:
        rows.append(("reason", probe.reason))
    return f"<section><h4>probe <span>identity in, split weights out</span></h4>{_definitions(rows)}</section>"


def _numeric(numeric: NumericResult, axis: str) -> str:
    what = "fused against separate" if axis == "rows" else "sum of the ranks against the whole product"
    head = f"<h4>numeric <span>{what}</span></h4>"
    if numeric.verdict == "not run":
        return f"<section>{head}{_definitions([('reason', numeric.reason)])}</section>"
    rows = [
        (
            "outputs",
            "bitwise equal" if numeric.bitwise_equal else f"not bitwise equal, {numeric.max_ulp:,} ULP at most",
        ),
        ("max |difference|", f"{numeric.max_abs_diff:.3g}"),
        ("compared", f"{numeric.compared:,} of {numeric.total:,}, batches {', '.join(map(str, numeric.batches))}"),
        ("same GEMM twice", "same bits" if numeric.deterministic else "other bits: not deterministic here"),
    ]
    if numeric.first_difference is not None:
        rows.append(("beyond its bound", f"row {numeric.first_difference.row}, part {numeric.first_difference.part}"))
    if numeric.reason:
        rows.append(("reason", numeric.reason))
    return f"<section>{head}{_definitions(rows)}</section>"


def _gauge(numeric: NumericResult) -> str:
    if numeric.verdict == "not run":
        return ""
    worst = numeric.worst
    words = f"{worst:.3g}" if math.isfinite(worst) else "not finite"
    share = min(worst, _GAUGE) / _GAUGE if math.isfinite(worst) else 1.0
    limit = percent(1 / _GAUGE)
    inner = (
        '<rect class="track" y="4" width="100%" height="14" rx="3"/>'
        f'<rect class="bar{" worse" if share > 1 / _GAUGE else ""}" y="4" width="{percent(share)}" height="14" rx="3"/>'
        f'<line class="limit" x1="{limit}" x2="{limit}" y1="0" y2="22"/>'
        f'<text x="0" y="38">0</text><text x="{limit}" y="38" text-anchor="middle">the bound</text>'
    )
    drawing = svg("gauge", 42, "Largest error as a share of its bound", f"{words}; 1 is the bound", inner)
    return f"<section><h4>numeric: error / bound <span>{words} at worst</span></h4>{drawing}</section>"


def _histogram(numeric: NumericResult) -> str:
    if numeric.verdict == "not run":
        return ""
    most = math.log1p(max([1, *(count for _, count in numeric.ulps)]))
    inner = []
    for number, (bucket, count) in enumerate(numeric.ulps):
        y = 18 * number
        inner.append(
            f'<text x="0" y="{y + 12}">{text(bucket)}</text>'
            f'<rect class="track" x="56" y="{y + 2}" width="55%" height="12" rx="2"/>'
            + (
                f'<rect class="bar" x="56" y="{y + 2}" width="{55 * math.log1p(count) / most:.4f}%" height="12" rx="2"/>'
                if count
                else ""
            )
            + f'<text class="fg" x="100%" y="{y + 12}" text-anchor="end">{count:,}</text>'
        )
    words = ", ".join(f"{bucket} ULP: {count}" for bucket, count in numeric.ulps)
    drawing = svg("ulps", 18 * len(numeric.ulps), "ULPs between fused and separate", words, "".join(inner))
    return f"<section><h4>ULPs apart <span>outputs, bars on a log scale</span></h4>{drawing}</section>"
