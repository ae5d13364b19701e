"""The report of bench as a page: the result in words first, then every case and its samples."""

from __future__ import annotations

from fusecheck.html.page import bullets, cell, chip, facts_table, items, page, percent, row, section, stack, svg, text
from fusecheck.html.row_map import row_map
from fusecheck.measure.values import Case, LoadBench, ProjectionBench, Timing
from fusecheck.operations.bench import BenchReport
from fusecheck.units import duration, size_text

_STRIP = 1.5
"""What the full width of a strip of samples stands for, in larger medians; samples beyond are named, not drawn."""


def bench_html(report: BenchReport, *, stamp: str | None = None) -> str:
    """What was measured as a page, the result in words first."""
    head = (
        '<header class="card hero mute"><h1>Measured: what fusing buys</h1>'
        f'<p class="path"><code>{text(report.out)}</code>, layer {report.layer}, on {text(report.device)}</p>'
        f"{items(report.summary)}</header>"
    )
    sections = [_projection(projection, report.counted) for projection in report.projections]
    rows = [
        ("device", f"{report.device}; {report.device_note}"),
        ("CPU threads", str(report.threads)),
        ("source", report.source or "gone: split weights cut out of the fused ones"),
        ("seed", str(report.seed)),
        *report.versions,
    ]
    load = [_load(report.load)] if report.load is not None else []
    warnings, method = bullets("Warnings", report.warnings), bullets("How it was measured", report.method)
    tail = [method, facts_table("Where and with what", rows), bullets("Notes", report.notes)]
    return page("fusecheck bench: what fusing buys", [head, warnings, *sections, *load, *tail], stamp)


def _projection(projection: ProjectionBench, counted: str) -> str:
    name = projection.tensor.rpartition(".")[0].rpartition(".")[2]
    parts = [(label.removesuffix("_proj"), offset, rows) for label, offset, rows in projection.parts]
    columns = ("Input", "Separate", "Fused", "Fused is", "Launches", "Hidden-state reads", "Samples")
    body = "".join(_case(case) for case in projection.cases)
    caption = f"Per call. Launches: {text(counted)}. "
    caption += "Bars are medians from 0, marks are samples; separate above, fused below."
    return (
        f'<section><h2>{text(name)}</h2><article class="card"><h3 class="mono">{text(projection.tensor)}</h3>'
        f'<p class="size">{projection.input_size:,} inputs, {projection.output_size:,} rows, {text(projection.dtype)}</p>'
        f'{row_map(projection.tensor, parts)}</article><article class="card">'
        f"{stack(caption, columns, body, numbers=('Separate', 'Fused'))}</article></section>"
    )


def _case(case: Case) -> str:
    what = f"{case.phase}, {case.batch} row{'s' if case.batch > 1 else ''}" + (
        "" if case.mode == "eager" else ", CUDA graph"
    )
    reads = f"{size_text(case.hidden_bytes_separate)} \u2192 {size_text(case.hidden_bytes_fused)}"
    cells = (
        cell("Separate", duration(case.separate.median), "n"),
        cell("Fused", duration(case.fused.median), "n"),
        cell("Fused is", _outcome(case)),
        cell("Launches", f"{case.launches.separate_total} \u2192 {case.launches.fused_total}"),
        cell("Hidden-state reads", reads),
        cell("Samples", _strip(what, case.separate, case.fused), "plot"),
    )
    return row("Input", text(what), cells)


def _outcome(measured: Case | LoadBench) -> str:
    noise = f'<span class="small nb">{measured.ratio:.2f} x, noise {measured.noise:.1%}</span>'
    return f"<span>{chip(measured.outcome)} {noise}</span>"


def _strip(what: str, separate: Timing, fused: Timing) -> str:
    """Two bars from 0 to the median, a mark for each sample; both on one scale."""
    full = _STRIP * max(separate.median, fused.median)
    inner, beyond = [], 0
    for y, css, timing in ((1, "p3", separate), (19, "p0", fused)):
        inner.append(f'<rect class="track" y="{y}" width="100%" height="13" rx="2"/>')
        inner.append(f'<rect class="{css}" y="{y}" width="{percent(timing.median / full)}" height="13" rx="2"/>')
        for sample in timing.samples:
            beyond += sample > full
            at = percent(sample / full)
            inner.append(f'<line class="tick" x1="{at}" x2="{at}" y1="{y}" y2="{y + 13}"/>' if sample <= full else "")
    words = f"separate {duration(separate.median)}, fused {duration(fused.median)}; {len(fused.samples)} samples each"
    words += f", {beyond} beyond the edge" if beyond else ""
    return svg("strip", 33, f"Samples of {what}", words, "".join(inner))


def _load(load: LoadBench) -> str:
    cells = (
        cell("Split", f"{duration(load.split.median)}<br>{load.split_tensors} tensors", "n"),
        cell("Fused", f"{duration(load.fused.median)}<br>{load.fused_tensors} tensors", "n"),
        cell("Fused is", _outcome(load)),
        cell("Samples", _strip("loading", load.split, load.fused), "plot"),
    )
    what = f"{load.layers} layer{'s' if load.layers > 1 else ''}, {size_text(load.bytes)}"
    caption = "Files to parameters by safetensors.safe_open and the weight_loaders: split above, fused below."
    columns = ("What", "Split", "Fused", "Fused is", "Samples")
    return section("Load time", stack(caption, columns, row("What", what, cells), numbers=("Split", "Fused")))
