"""Reports -> one self-contained HTML file each: no script, nothing from elsewhere, the same bytes for the same report.

All foreign text goes through `_text`: made printable, then escaped. Drawings are SVG in percent of the width they get,
so that they need no script to fit a telephone; lengths are to scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from fusecheck import __version__
from fusecheck.errors import printable, shown
from fusecheck.mapping import PACKINGS
from fusecheck.verdicts import NumericResult, ProbeResult, ProjectionCheck

if TYPE_CHECKING:
    from fusecheck.exact import Finding
    from fusecheck.operations.bench import BenchReport, Case, LoadBench, ProjectionBench, Timing
    from fusecheck.operations.verify import VerifyReport

_STYLE = """
:root{color-scheme:light dark;--page:#f4f6f8;--card:#fff;--ink:#1b1f24;--dim:#4f5965;--line:#d5dbe1;--track:#e7ebef;
--good:#116329;--good-bg:#dafbe1;--bad:#a40e26;--bad-bg:#ffe9e7;--warn:#744500;--warn-bg:#fff4c7;--mute-bg:#e9edf1;
--a:#1f5fbf;--b:#0b6e66;--c:#7436d6}
@media (prefers-color-scheme:dark){:root{--page:#0d1117;--card:#161b22;--ink:#e6edf3;--dim:#a3acb6;--line:#30363d;
--track:#262d36;--good:#5fd877;--good-bg:#12301c;--bad:#ff8f88;--bad-bg:#3c1618;--warn:#ecc35c;--warn-bg:#33290f;
--mute-bg:#252b33;--a:#2f6fd0;--b:#12807a;--c:#8450e0}}
@media print{:root{color-scheme:light;--page:#fff;--card:#fff;--ink:#000;--dim:#444;--line:#bbb;--track:#e7ebef;
--good:#116329;--good-bg:#dafbe1;--bad:#a40e26;--bad-bg:#ffe9e7;--warn:#744500;--warn-bg:#fff4c7;--mute-bg:#e9edf1;
--a:#1f5fbf;--b:#0b6e66;--c:#7436d6}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.card,tr,h2,h3{break-inside:avoid}h2,h3{break-after:avoid}main{padding:0!important}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans","DejaVu Sans",sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1080px;margin:0 auto;padding:28px 24px 48px}
h1,h2,h3,p,ul,dl,table{margin:0}
h1{font-size:2rem;line-height:1.2;letter-spacing:-.01em}
h2{font-size:1.25rem;line-height:1.3;margin:36px 0 12px}
h3{font-size:1rem;line-height:1.4;overflow-wrap:anywhere}
code,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.875em;
overflow-wrap:anywhere}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px}
.card+.card{margin-top:14px}
.hero{border-left:8px solid var(--tone);padding:22px 24px}
.hero h1 span{color:var(--tone)}
.hero p{margin-top:8px}.hero .path{color:var(--dim)}
.hero ul{margin-top:10px}
.pass{--tone:var(--good);--tone-bg:var(--good-bg)}.fail{--tone:var(--bad);--tone-bg:var(--bad-bg)}
.warn{--tone:var(--warn);--tone-bg:var(--warn-bg)}.mute{--tone:var(--dim);--tone-bg:var(--mute-bg)}
.chip{display:inline-block;background:var(--tone-bg);color:var(--tone);border-radius:999px;padding:1px 10px;
font-size:.8125rem;font-weight:600;white-space:nowrap}
.trio,.duo{display:grid;gap:14px;margin-top:14px}
.trio{grid-template-columns:repeat(3,minmax(0,1fr))}.duo{grid-template-columns:repeat(2,minmax(0,1fr))}
.trio .card,.duo .card{margin-top:0}
.trio h2,.duo h2{margin:0 0 6px;font-size:1rem;display:flex;justify-content:space-between;align-items:center;gap:8px}
.trio p{font-size:.9375rem;color:var(--dim)}
ul{padding-left:1.15em}li{margin:4px 0;overflow-wrap:anywhere}
.duo ul{font-size:.9375rem}
.head{display:flex;flex-wrap:wrap;gap:6px 14px;justify-content:space-between;align-items:center}
.chips{display:flex;flex-wrap:wrap;gap:6px}
.size{color:var(--dim);font-size:.875rem;margin:2px 0 12px}
svg{display:block;width:100%;overflow:visible}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","DejaVu Sans",sans-serif;fill:var(--dim)}
svg .on{fill:#fff;font-weight:600}svg .fg{fill:var(--ink)}
.p0{fill:var(--a)}.p1{fill:var(--b)}.p2{fill:var(--c)}.p3{fill:var(--dim)}
.map rect{stroke:var(--card);stroke-width:2}
.track{fill:var(--track)}.bar{fill:var(--a)}.bar.worse{fill:var(--bad)}
.limit{stroke:var(--ink);stroke-width:2}.tick{stroke:var(--ink);stroke-width:1;opacity:.5}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;list-style:none;padding:0;margin-top:8px;font-size:.875rem}
.legend li{margin:0;color:var(--dim)}.legend b{color:var(--ink)}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
.legend .p0{background:var(--a)}.legend .p1{background:var(--b)}.legend .p2{background:var(--c)}
.facts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:18px 32px;margin-top:18px;padding-top:16px;
border-top:1px solid var(--line)}
.facts section+section{margin-top:18px}
.facts h4{margin:0 0 8px;font-size:.875rem;display:flex;justify-content:space-between;gap:8px;font-weight:600}
.facts h4 span{font-weight:400;color:var(--dim)}
dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:3px 16px;font-size:.875rem}
dt{color:var(--dim)}dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
table{width:100%;border-collapse:collapse;font-size:.875rem}
caption{text-align:left;color:var(--dim);font-size:.875rem;padding-bottom:8px}
th,td{text-align:left;vertical-align:top;padding:8px 14px 8px 0;border-bottom:1px solid var(--line);
overflow-wrap:anywhere}
thead th{color:var(--dim);font-weight:600;white-space:nowrap}
tbody th{font-weight:600}tbody tr:last-child>*{border-bottom:0}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.plot{width:26%;min-width:160px;vertical-align:middle}
.stack>tbody>tr>th{white-space:nowrap}.nb{white-space:nowrap}
.found{table-layout:fixed}.found .n,.found tbody th{white-space:normal!important}
.found th:nth-child(1){width:20%}.found th:nth-child(2){width:25%}.found th:nth-child(3){width:19%}
.found th:nth-child(4){width:10%}.found th:nth-child(5){width:9%}.found th:nth-child(6){width:17%}
.small{font-size:.875rem;color:var(--dim)}
footer{margin-top:32px;color:var(--dim);font-size:.875rem}
@media (max-width:680px){main{padding:14px 12px 32px}h1{font-size:1.625rem}.card{padding:14px}
.trio,.duo,.facts{grid-template-columns:minmax(0,1fr)}
.stack thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.stack,.stack tbody,.stack tr,.stack caption{display:block}
.stack tr{padding:10px 0;border-bottom:1px solid var(--line)}.stack tr:last-child{border-bottom:0}
.stack th,.stack td{display:grid;grid-template-columns:112px minmax(0,1fr);gap:10px;border:0;padding:2px 0;
text-align:left;white-space:normal!important;width:auto!important}
.stack th::before,.stack td::before{content:attr(data-label);color:var(--dim);font-weight:400}
.stack td:empty{display:none}.plot{width:auto;min-width:0}.stack .plot{margin-top:6px}}
"""

_NUMERIC_LIMITS = "numeric finds wrong rows and broken kernels, not single ULPs; those are for exact"
_WORDS = {
    "pass": "pass",
    "fail": "fail",
    "not run": "mute",
    "see above": "mute",
    "faster": "pass",
    "slower": "warn",
    "no gain": "mute",
}
_GAUGE = 1.25
"""What the full width of the error / bound gauge stands for, so that there is room beyond the bound."""
_STRIP = 1.5
"""What the full width of a strip of samples stands for, in larger medians; samples beyond are named, not drawn."""


def verify_html(report: VerifyReport, *, stamp: str | None = None) -> str:
    """The whole proof as a page, verdict first. `stamp` is printed at the end; without it no time is in the bytes."""
    good = report.verdict == "equal"
    return _page(
        f"fusecheck verify: {'equal' if good else 'NOT equal'}",
        [
            _verify_head(report, good=good),
            _findings(report),
            _verdict_cards(report),
            _proofs(report),
            _list("Warnings", report.warnings),
            *_layers(report),
            _verify_facts(report),
            _digests(report),
            _list("Notes", [*report.notes, *_numeric_notes(report)]),
        ],
        stamp,
    )


def bench_html(report: BenchReport, *, stamp: str | None = None) -> str:
    """What was measured as a page, the result in words first."""
    lines = "".join(f"<li>{_text(line)}</li>" for line in report.summary)
    head = (
        '<header class="card hero mute"><h1>Measured: what fusing buys</h1>'
        f'<p class="path"><code>{_text(report.out)}</code>, layer {report.layer}, on {_text(report.device)}</p>'
        f"<ul>{lines}</ul></header>"
    )
    sections = [_bench_projection(projection, report.counted) for projection in report.projections]
    rows = [
        ("device", f"{report.device}; {report.device_note}"),
        ("CPU threads", str(report.threads)),
        ("source", report.source or "gone: split weights cut out of the fused ones"),
        ("seed", str(report.seed)),
        *report.versions,
    ]
    load = [_bench_load(report.load)] if report.load is not None else []
    warnings, method = _list("Warnings", report.warnings), _list("How it was measured", report.method)
    tail = [method, _table_of("Where and with what", rows), _list("Notes", report.notes)]
    return _page("fusecheck bench: what fusing buys", [head, warnings, *sections, *load, *tail], stamp)


def duration(seconds: float) -> str:
    """Three digits and a unit: 12.3 µs, 4.56 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-6)} µs"


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size_text(count: int) -> str:
    """Bytes in decimal units: 1.5 GB."""
    value, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


# --- pieces ---


def _text(text: object) -> str:
    """Foreign text as HTML: invisible characters spelled out, markup escaped."""
    return escape(printable(str(text)), quote=True)


def _page(title: str, parts: Iterable[str], stamp: str | None) -> str:
    made = f"fusecheck {__version__}" + (f", {stamp}" if stamp is not None else "")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline';"
        " base-uri 'none'; form-action 'none'\">\n"
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<footer><p>{_text(made)}</p></footer>\n</main>\n</body>\n</html>\n"
    )


def _chip(word: str, label: str = "") -> str:
    return f'<span class="chip {_WORDS[word]}">{_text(f"{label} {word}".strip())}</span>'


def _list(heading: str, lines: Iterable[str], css: str = "") -> str:
    items = "".join(f"<li>{_text(line)}</li>" for line in lines)
    return f'<section><h2>{heading}</h2><div class="card {css}"><ul>{items}</ul></div></section>' if items else ""


def _table_of(heading: str, rows: Iterable[tuple[str, str]]) -> str:
    body = "".join(f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>' for name, value in rows)
    return f'<section><h2>{heading}</h2><div class="card"><table><tbody>{body}</tbody></table></div></section>'


def _class(css: str) -> str:
    return f' class="{css}"' if css else ""


def _cell(label: str, inner: str, css: str = "") -> str:
    return f'<td data-label="{label}"{_class(css)}>{inner}</td>'


def _heads(names: Sequence[str], numbers: Sequence[str] = ()) -> str:
    cells = (f'<th scope="col"{_class("n" if name in numbers else "")}>{name}</th>' for name in names)
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _svg(css: str, height: int, title: str, description: str, inner: str) -> str:
    return (
        f'<svg class="{css}" role="img" height="{height}"><title>{_text(title)}</title>'
        f"<desc>{_text(description)}</desc>{inner}</svg>"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.4f}%"


# --- verify: the verdict ---


def _verify_head(report: VerifyReport, *, good: bool) -> str:
    exact = report.exact
    what = "equals the source's" if exact.against == "source bytes" else "has the digest that the manifest records"
    if good:
        line = f"Every byte of {exact.tensors} tensors ({size_text(exact.bytes)}, {exact.fused} of them fused) {what}."
    elif exact.finding_count:
        line = f"{_differences(report)} found, named below."
    else:
        line = "The bytes are equal, but a check of the projections failed; see the layers below."
    against = f" against <code>{_text(report.source)}</code>" if report.source is not None else ""
    mark, word, css = ("\u2713", "Equal", "pass") if good else ("\u2717", "NOT equal", "fail")
    return (
        f'<header class="card hero {css}"><h1><span><span aria-hidden="true">{mark}</span> {word}</span></h1>'
        f'<p>{_text(line)}</p><p class="path"><code>{_text(report.out)}</code>{against}</p></header>'
    )


def _differences(report: VerifyReport) -> str:
    return f"{report.exact.finding_count:,} difference{'s' if report.exact.finding_count > 1 else ''}"


def _verdict_cards(report: VerifyReport) -> str:
    exact = report.exact
    held = f"{exact.tensors} tensors, {size_text(exact.bytes)}, held against {exact.against}."
    held += f" {_differences(report)}." if exact.finding_count else ""
    digests = " Their digests agree with the manifest." if exact.digests_checked and exact.verdict == "pass" else ""
    built = [check.built for check in report.projections]
    card = _card("exact", "fail" if "fail" in built else exact.verdict, held + digests)
    about = {
        "probe": "The identity through each fused projection on the device has to give the split weights, without tolerance.",
        "numeric": "Random hidden states: fused and separate have to lie within a proven bound of a float64 reference.",
    }
    for name, words in about.items():
        verdicts = [getattr(check, name).verdict for check in report.projections]
        verdict = next((word for word in ("fail", "pass", "not run") if word in verdicts), "not run")
        did = {"fail": "Failed", "pass": "Passed", "not run": "Not run"}[verdict]
        count = f" {did} for {verdicts.count(verdict)} of {len(verdicts)} projections." if verdicts else " Not run."
        card += _card(name, verdict, words + count)
    return f'<div class="trio">{card}</div>'


def _card(name: str, verdict: str, words: str) -> str:
    return f'<section class="card"><h2>{name} {_chip(verdict)}</h2><p>{_text(words)}</p></section>'


def _proofs(report: VerifyReport) -> str:
    columns = (("Proved", list(_proved(report))), ("Not proved", list(_not_proved(report))))
    cards = (
        f'<section class="card"><h2>{heading}</h2><ul>{"".join(f"<li>{_text(line)}</li>" for line in lines)}</ul></section>'
        for heading, lines in columns
    )
    return f'<div class="duo">{"".join(cards)}</div>'


def _proved(report: VerifyReport) -> Iterator[str]:
    layers = f"layers {', '.join(map(str, report.layers))}"
    if "exact" in report.proved:
        yield f"every byte of every tensor, of all layers, against {report.exact.against}; names, dtypes, shapes, side files"
        if report.projections:
            yield f"an engine's weight_loader builds the same fused parameters from the split tensors ({layers})"
    if "probe" in report.proved:
        yield f"kernel, shard offsets and weights together give the split projections on {report.device} ({layers})"
    if "numeric" in report.proved:
        yield f"fused and separate outputs lie within their error bounds ({layers})"
    if not report.proved:
        yield "nothing: no check passed"


def _not_proved(report: VerifyReport) -> Iterator[str]:
    exact = report.exact
    if exact.against != "source bytes":
        yield "that the recorded digests are the source's: it was not there to be compared"
    if not exact.digests_checked:
        yield "the manifest's digests, which were not checked"
    for name in ("exact", "probe", "numeric"):
        if name not in report.proved:
            seen = [getattr(check, name).verdict for check in report.projections] if name != "exact" else ["fail"]
            yield f"{name}: {'failed' if 'fail' in seen else 'not run'}"
    if report.projections:
        yield "other layers on the device: for them exact alone speaks"
        yield _NUMERIC_LIMITS
    flushed = sum(check.probe.flushed + check.probe.non_finite for check in report.projections)
    if flushed:
        yield f"{flushed:,} weights that probe could not compare (beside NaN or Inf, or flushed to 0): they are left to exact"
    if report.device is not None and report.device.startswith("CPU"):
        yield "the kernels of a GPU: the device was a CPU"
    yield "that an engine loads this folder, or that the source is what its publisher meant"


def _findings(report: VerifyReport) -> str:
    exact = report.exact
    if not exact.findings:
        return ""
    names = ("Problem", "Tensor", "Part", "Row", "Byte", "File")
    more = exact.finding_count - len(exact.findings)
    caption = f"{exact.finding_count} found" + (f", the first {len(exact.findings)} of them here" if more else "")
    caption += "; rows and bytes count from 0 within the tensor of OUT"
    body = "".join(_finding(finding) for finding in exact.findings)
    return (
        f'<section><h2>Differences</h2><div class="card"><table class="stack found"><caption>{caption}</caption>'
        f"{_heads(names, ('Row', 'Byte'))}<tbody>{body}</tbody></table></div></section>"
    )


def _finding(finding: Finding) -> str:
    row = "" if finding.row is None else f"{finding.row:,}"
    if finding.part is not None and finding.part_row is not None:
        row += f" ({finding.part_row:,} of the part)"
    cells = (
        _cell("Tensor", f"<code>{_text(finding.tensor)}</code>" if finding.tensor else ""),
        _cell("Part", f"<code>{_text(finding.part)}</code>" if finding.part else ""),
        _cell("Row", row, "n"),
        _cell("Byte", "" if finding.offset is None else f"{finding.offset:,}", "n"),
        _cell("File", f"<code>{_text(finding.file)}</code>" if finding.file else ""),
    )
    return f'<tr><th scope="row" data-label="Problem">{_text(finding.problem)}</th>{"".join(cells)}</tr>'


def _verify_facts(report: VerifyReport) -> str:
    rows = [
        ("device", f"{report.device}; {report.device_note}" if report.device else "none: probe and numeric not run"),
        ("layers", f"all by exact; {', '.join(map(str, report.layers)) or 'none'} by probe and numeric"),
        ("held against", report.exact.against),
        ("seed", str(report.seed)),
        *report.versions,
    ]
    return _table_of("Where and with what", rows)


def _digests(report: VerifyReport) -> str:
    if not report.digests:
        return ""
    state = "checked against the bytes" if report.exact.digests_checked else "NOT checked against the bytes"
    caption = f"BLAKE3 as the manifest records it, {state}; of a weight file over its tensors' digests"
    body = "".join(
        f'<tr><th scope="row" data-label="File"><code>{_text(name)}</code></th>'
        f"{_cell('BLAKE3', f'<code>{_text(value)}</code>')}</tr>"
        for name, value in report.digests
    )
    return (
        f'<section><h2>Digests</h2><div class="card"><table class="stack"><caption>{caption}</caption>'
        f"{_heads(('File', 'BLAKE3'))}<tbody>{body}</tbody></table></div></section>"
    )


def _numeric_notes(report: VerifyReport) -> list[str]:
    return list(dict.fromkeys(note for check in report.projections for note in check.numeric.notes))


# --- verify: one projection ---


def _layers(report: VerifyReport) -> Iterator[str]:
    for layer in dict.fromkeys(check.layer for check in report.projections):
        cards = "".join(_projection(check, report) for check in report.projections if check.layer == layer)
        yield f"<section><h2>Layer {layer}</h2>{cards}</section>"


def _projection(check: ProjectionCheck, report: VerifyReport) -> str:
    offsets = [offset for _, offset in check.shard_offsets]
    ends = [*offsets[1:], check.output_size]
    labels = _labels(check.tensor, [shard_id for shard_id, _ in check.shard_offsets])
    parts = [(label, start, end - start) for label, start, end in zip(labels, offsets, ends, strict=True)]
    built = f"{check.built}{f' ({check.built_reason})' if check.built_reason else ''}"
    weights = "" if check.weights == "stored" else f"; probe and numeric on weights {check.weights}"
    chips = _chip(_exact_of(check, report), "exact") + _chip(check.probe.verdict, "probe")
    chips += _chip(check.numeric.verdict, "numeric")
    return (
        f'<article class="card"><div class="head"><h3 class="mono">{_text(check.tensor)}</h3>'
        f'<div class="chips">{chips}</div></div>'
        f'<p class="size">{check.input_size:,} inputs, {check.output_size:,} rows; built by the weight_loaders: '
        f"{_text(built)}{_text(weights)}</p>"
        f'{row_map(check.tensor, parts)}<div class="facts"><div>{_probe(check.probe)}{_gauge(check.numeric)}</div>'
        f"<div>{_numeric(check.numeric)}{_histogram(check.numeric)}</div></div></article>"
    )


def _exact_of(check: ProjectionCheck, report: VerifyReport) -> str:
    """What exact says of this tensor; where the list of findings is cut, only a failure is certain of one."""
    exact = report.exact
    if check.built == "fail" or any(finding.tensor == check.tensor for finding in exact.findings):
        return "fail"
    return "pass" if exact.finding_count == len(exact.findings) else "see above"


def _labels(tensor: str, shard_ids: Sequence[str]) -> list[str]:
    """What people call the parts: q, k, v; gate, up."""
    module = tensor.rpartition(".")[0].rpartition(".")[2]
    for packing in PACKINGS:
        if packing.fused.rpartition(".")[2] == module and len(packing.parts) == len(shard_ids):
            return [part.rpartition(".")[2].removesuffix("_proj") for _, part in packing.parts]
    return list(shard_ids)


def row_map(tensor: str, parts: Sequence[tuple[str, int, int]]) -> str:
    """The rows of a fused tensor to scale, as SVG and in words. `parts`: (label, shard_offset, rows)."""
    total = sum(rows for _, _, rows in parts) or 1
    drawn, shown_at = [], -1.0
    for number, (label, offset, rows) in enumerate(parts):
        share, begin = rows / total, offset / total
        words = f"{shown(label, 16)} \u00b7 {rows}" if share >= 0.2 else shown(label, 16)
        drawn.append(
            f'<rect class="p{min(number, 3)}" x="{_percent(begin)}" y="0" width="{_percent(share)}" height="36" rx="3"/>'
            f'<text class="on" x="{_percent(begin + share / 2)}" y="23" text-anchor="middle">{_text(words)}</text>'
        )
        if begin - shown_at >= 0.12 and begin <= 0.86:
            anchor = "middle" if offset else "start"
            drawn.append(f'<text x="{_percent(begin)}" y="53" text-anchor="{anchor}">{offset}</text>')
            shown_at = begin
    drawn.append(f'<text x="100%" y="53" text-anchor="end">{total}</text>')
    words = "; ".join(f"{label} rows {offset} to {offset + rows - 1}" for label, offset, rows in parts)
    legend = "".join(
        f'<li><i class="p{min(number, 3)}"></i><b>{_text(label)}</b> rows {offset:,} to {offset + rows - 1:,}'
        f", shard_offset {offset:,}</li>"
        for number, (label, offset, rows) in enumerate(parts)
    )
    drawing = _svg("map", 58, f"Row map of {tensor}", f"To scale, first row left: {words}", "".join(drawn))
    return f'{drawing}<ul class="legend">{legend}</ul>'


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{_text(value)}</dd>' for name, value in rows)}</dl>"


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
    return f"<section><h4>probe <span>identity in, split weights out</span></h4>{_facts(rows)}</section>"


def _numeric(numeric: NumericResult) -> str:
    head = "<h4>numeric <span>fused against separate</span></h4>"
    if numeric.verdict == "not run":
        return f"<section>{head}{_facts([('reason', numeric.reason)])}</section>"
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
    return f"<section>{head}{_facts(rows)}</section>"


def _gauge(numeric: NumericResult) -> str:
    if numeric.verdict == "not run":
        return ""
    worst = numeric.worst
    words = f"{worst:.3g}" if math.isfinite(worst) else "not finite"
    share = min(worst, _GAUGE) / _GAUGE if math.isfinite(worst) else 1.0
    limit = _percent(1 / _GAUGE)
    inner = (
        '<rect class="track" y="4" width="100%" height="14" rx="3"/>'
        f'<rect class="bar{" worse" if share > 1 / _GAUGE else ""}" y="4" width="{_percent(share)}" height="14" rx="3"/>'
        f'<line class="limit" x1="{limit}" x2="{limit}" y1="0" y2="22"/>'
        f'<text x="0" y="38">0</text><text x="{limit}" y="38" text-anchor="middle">the bound</text>'
    )
    drawing = _svg("gauge", 42, "Largest error as a share of its bound", f"{words}; 1 is the bound", inner)
    return f"<section><h4>error / bound <span>{words} at worst</span></h4>{drawing}</section>"


def _histogram(numeric: NumericResult) -> str:
    if numeric.verdict == "not run":
        return ""
    most = math.log1p(max([1, *(count for _, count in numeric.ulps)]))
    inner = []
    for number, (bucket, count) in enumerate(numeric.ulps):
        y = 18 * number
        inner.append(
            f'<text x="0" y="{y + 12}">{_text(bucket)}</text>'
            f'<rect class="track" x="56" y="{y + 2}" width="55%" height="12" rx="2"/>'
            + (
                f'<rect class="bar" x="56" y="{y + 2}" width="{55 * math.log1p(count) / most:.4f}%" height="12" rx="2"/>'
                if count
                else ""
            )
            + f'<text class="fg" x="100%" y="{y + 12}" text-anchor="end">{count:,}</text>'
        )
    words = ", ".join(f"{bucket} ULP: {count}" for bucket, count in numeric.ulps)
    drawing = _svg("ulps", 18 * len(numeric.ulps), "ULPs between fused and separate", words, "".join(inner))
    return f"<section><h4>ULPs apart <span>outputs, bars on a log scale</span></h4>{drawing}</section>"


# --- bench ---


def _bench_projection(projection: ProjectionBench, counted: str) -> str:
    name = projection.tensor.rpartition(".")[0].rpartition(".")[2]
    parts = [(label.removesuffix("_proj"), offset, rows) for label, offset, rows in projection.parts]
    columns = ("Input", "Separate", "Fused", "Fused is", "Launches", "Hidden-state reads", "Samples")
    body = "".join(_case(case) for case in projection.cases)
    caption = (
        f"Per call. Launches: {_text(counted)}. Bars are medians from 0, marks are samples; separate above, fused below"
    )
    return (
        f'<section><h2>{_text(name)}</h2><article class="card"><h3 class="mono">{_text(projection.tensor)}</h3>'
        f'<p class="size">{projection.input_size:,} inputs, {projection.output_size:,} rows, {_text(projection.dtype)}</p>'
        f'{row_map(projection.tensor, parts)}</article><article class="card"><table class="stack">'
        f"<caption>{caption}.</caption>{_heads(columns, ('Separate', 'Fused'))}<tbody>{body}</tbody></table>"
        "</article></section>"
    )


def _case(case: Case) -> str:
    what = f"{case.phase}, {case.batch} row{'s' if case.batch > 1 else ''}" + (
        "" if case.mode == "eager" else ", CUDA graph"
    )
    reads = f"{size_text(case.hidden_bytes_separate)} \u2192 {size_text(case.hidden_bytes_fused)}"
    cells = (
        _cell("Separate", duration(case.separate.median), "n"),
        _cell("Fused", duration(case.fused.median), "n"),
        _cell("Fused is", _outcome(case)),
        _cell("Launches", f"{case.launches.separate_total} \u2192 {case.launches.fused_total}"),
        _cell("Hidden-state reads", reads),
        _cell("Samples", _strip(what, case.separate, case.fused), "plot"),
    )
    return f'<tr><th scope="row" data-label="Input">{_text(what)}</th>{"".join(cells)}</tr>'


def _outcome(measured: Case | LoadBench) -> str:
    noise = f'<span class="small nb">{measured.ratio:.2f} x, noise {measured.noise:.1%}</span>'
    return f"<span>{_chip(measured.outcome)} {noise}</span>"


def _strip(what: str, separate: Timing, fused: Timing) -> str:
    """Two bars from 0 to the median, a mark for each sample; both on one scale."""
    full = _STRIP * max(separate.median, fused.median)
    inner, beyond = [], 0
    for y, css, timing in ((1, "p3", separate), (19, "p0", fused)):
        inner.append(f'<rect class="track" y="{y}" width="100%" height="13" rx="2"/>')
        inner.append(f'<rect class="{css}" y="{y}" width="{_percent(timing.median / full)}" height="13" rx="2"/>')
        for sample in timing.samples:
            beyond += sample > full
            at = _percent(sample / full)
            inner.append(f'<line class="tick" x1="{at}" x2="{at}" y1="{y}" y2="{y + 13}"/>' if sample <= full else "")
    words = f"separate {duration(separate.median)}, fused {duration(fused.median)}; {len(fused.samples)} samples each"
    words += f", {beyond} beyond the edge" if beyond else ""
    return _svg("strip", 33, f"Samples of {what}", words, "".join(inner))


def _bench_load(load: LoadBench) -> str:
    rows = (
        _cell("Split", f"{duration(load.split.median)}<br>{load.split_tensors} tensors", "n"),
        _cell("Fused", f"{duration(load.fused.median)}<br>{load.fused_tensors} tensors", "n"),
        _cell("Fused is", _outcome(load)),
        _cell("Samples", _strip("loading", load.split, load.fused), "plot"),
    )
    what = f"{load.layers} layer{'s' if load.layers > 1 else ''}, {size_text(load.bytes)}"
    return (
        '<section><h2>Load time</h2><div class="card"><table class="stack"><caption>Files to parameters by '
        "safetensors.safe_open and the weight_loaders: split above, fused below.</caption>"
        f"{_heads(('What', 'Split', 'Fused', 'Fused is', 'Samples'), ('Split', 'Fused'))}<tbody><tr>"
        f'<th scope="row" data-label="What">{what}</th>{"".join(rows)}</tr></tbody></table></div></section>'
    )
