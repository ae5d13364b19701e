"""The report of verify as a page: verdict first, then what is proved and what is not."""

from __future__ import annotations

from collections.abc import Iterator

from fusecheck.exact import Finding
from fusecheck.html.page import bullets, cell, chip, facts_table, items, page, row, section, stack, text
from fusecheck.html.projection import projection_card
from fusecheck.operations.verify import VerifyReport
from fusecheck.units import size_text
from fusecheck.verdicts import fold

_NUMERIC_LIMITS = "numeric finds wrong rows and broken kernels, not single ULPs; those are for exact"


def verify_html(report: VerifyReport, *, stamp: str | None = None) -> str:
    """The whole proof as a page, verdict first. `stamp` is printed at the end; without it no time is in the bytes."""
    good = report.verdict == "equal"
    return page(
        f"fusecheck verify: {'equal' if good else 'NOT equal'}",
        [
            _head(report, good=good),
            _findings(report),
            _verdict_cards(report),
            _proofs(report),
            bullets("Warnings", report.warnings),
            *_layers(report),
            _where(report),
            _digests(report),
            bullets("Notes", [*report.notes, *_numeric_notes(report)]),
        ],
        stamp,
    )


def _head(report: VerifyReport, *, good: bool) -> str:
    exact = report.exact
    what = "equals the source's" if exact.against == "source bytes" else "has the digest that the manifest records"
    if good:
        line = f"Every byte of {exact.tensors} tensors ({size_text(exact.bytes)}, {exact.fused} of them fused) {what}."
    elif exact.finding_count:
        line = f"{_differences(report)} found, named below."
    else:
        line = "The bytes are equal, but a check of the projections failed; see the layers below."
    against = f" against <code>{text(report.source)}</code>" if report.source is not None else ""
    mark, word, css = ("\u2713", "Equal", "pass") if good else ("\u2717", "NOT equal", "fail")
    return (
        f'<header class="card hero {css}"><h1><span><span aria-hidden="true">{mark}</span> {word}</span></h1>'
        f'<p>{text(line)}</p><p class="path"><code>{text(report.out)}</code>{against}</p></header>'
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
    return f'<section class="card"><h2>{name} {chip(verdict)}</h2><p>{text(words)}</p></section>'


def _proofs(report: VerifyReport) -> str:
    columns = (("Proved", _proved(report)), ("Not proved", _not_proved(report)))
    cards = (f'<section class="card"><h2>{heading}</h2>{items(lines)}</section>' for heading, lines in columns)
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
        if any(check.axis == "columns" and check.numeric.verdict == "pass" for check in report.projections):
            yield f"so does the sum of what all ranks make of o_proj and down_proj, as an all-reduce adds it ({layers})"
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
    return section("Differences", stack(caption, names, body, numbers=("Row", "Byte"), css="stack found"))


def _finding(finding: Finding) -> str:
    where = "" if finding.row is None else f"{finding.row:,}"
    if finding.part is not None and finding.part_row is not None:
        where += f" ({finding.part_row:,} of the part)"
    cells = (
        cell("Tensor", f"<code>{text(finding.tensor)}</code>" if finding.tensor else ""),
        cell("Part", f"<code>{text(finding.part)}</code>" if finding.part else ""),
        cell("Row", where, "n"),
        cell("Byte", "" if finding.offset is None else f"{finding.offset:,}", "n"),
        cell("File", f"<code>{text(finding.file)}</code>" if finding.file else ""),
    )
    return row("Problem", text(finding.problem), cells)


def _where(report: VerifyReport) -> str:
    rows = [
        ("device", f"{report.device}; {report.device_note}" if report.device else "none: probe and numeric not run"),
        ("layers", f"all by exact; {', '.join(map(str, report.layers)) or 'none'} by probe and numeric"),
        ("held against", report.exact.against),
        ("seed", str(report.seed)),
        *report.versions,
    ]
    return facts_table("Where and with what", rows)


def _digests(report: VerifyReport) -> str:
    if not report.digests:
        return ""
    state = "checked against the bytes" if report.exact.digests_checked else "NOT checked against the bytes"
    caption = f"BLAKE3 as the manifest records it, {state}; of a weight file over its tensors' digests"
    body = "".join(
        row("File", f"<code>{text(name)}</code>", [cell("BLAKE3", f"<code>{text(value)}</code>")])
        for name, value in report.digests
    )
    return section("Digests", stack(caption, ("File", "BLAKE3"), body))


def _numeric_notes(report: VerifyReport) -> list[str]:
    return list(dict.fromkeys(note for check in report.projections for note in check.numeric.notes))


def _layers(report: VerifyReport) -> Iterator[str]:
    folded = fold(report.projections)
    for layer in dict.fromkeys(check.layer for check in folded):
        cards = "".join(projection_card(check, report.exact) for check in folded if check.layer == layer)
        yield f"<section><h2>Layer {layer}</h2>{cards}</section>"
