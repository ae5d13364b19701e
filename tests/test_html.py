"""The pages: well formed, alone in the world, to scale, the same every time, and nothing foreign is ever markup."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from checkpoints import Spec, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from fusecheck.errors import invisible
from fusecheck.exact import Finding
from fusecheck.html.bench import bench_html
from fusecheck.html.row_map import row_map
from fusecheck.html.verify import verify_html
from fusecheck.measure.values import Case, Launches, LoadBench, ProjectionBench, Timing
from fusecheck.operations.bench import BenchReport
from fusecheck.operations.fuse import fuse
from fusecheck.operations.verify import ExactReport, VerifyReport
from fusecheck.render import to_json
from fusecheck.units import duration, size_text
from fusecheck.verdicts import NumericResult, Place, ProbeResult, ProjectionCheck

RUN = "from fusecheck.cli import main\nmain()\n"
VOID = {"meta"}
HOSTILE = "<script>alert('1')</script>\"><img onerror=x>&amp;\x1b[31m\u202egnp\u200b\x9b\x00"
QKV = "model.layers.0.self_attn.qkv_proj.weight"
ULPS = (("0", 900), ("1", 90), ("2", 9), ("3-4", 1), ("5-16", 0), ("17-256", 0), (">256", 0))


class Page(HTMLParser):
    """Every element with its attributes, every text; fails on an element that is closed wrongly or not at all."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names)
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID and tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self) -> str:
        return "".join(data for tag, data in self.texts if tag != "style")

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def a_check(**changes: object) -> ProjectionCheck:
    numeric = NumericResult(
        "pass", batches=(1, 16), deterministic=True, max_ulp=3, ulps=ULPS, worst=0.5, compared=1000, total=1000
    )
    parts = (("q", 0), ("k", 2048), ("v", 3072))
    check = ProjectionCheck(0, QKV, 1024, 4096, parts, "pass", ProbeResult("pass", compared=9, total=9), numeric)
    return replace(check, **changes)  # type: ignore[arg-type]


def a_report(**changes: object) -> VerifyReport:
    report = VerifyReport(
        verdict="equal",
        out="out",
        source="in",
        proved=("exact", "probe", "numeric"),
        exact=ExactReport("pass", "source bytes", True, 227, 56, 1_503_267_840, (), 0),  # noqa: FBT003
        layers=(0,),
        projections=(a_check(),),
        device="CPU (AVX512)",
        device_note="TF32 off",
        seed=42,
        digests=(("model.safetensors", "ab" * 32),),
        versions=(("fusecheck", "1.2.3"), ("torch", "9.9")),
        notes=("a note",),
        warnings=("a warning",),
    )
    return replace(report, **changes)  # type: ignore[arg-type]


def a_bench(**changes: object) -> BenchReport:
    timings = Timing(2e-3, (1e-3, 2e-3, 9.0)), Timing(1e-3, (1e-3, 1e-3, 1.5e-3))
    launches = Launches((("aten::mm", 3),), (("aten::mm", 1),), 3, 1)
    case = Case("decode", 1, "eager", 7, *timings, 2.0, 0.1, "faster", launches, 6144, 2048)
    parts = (("q_proj", 0, 2048), ("k_proj", 2048, 1024), ("v_proj", 3072, 1024))
    report = BenchReport(
        verdict="measured",
        out="out",
        source=None,
        layer=0,
        seed=0,
        device="a device",
        device_note="a note",
        threads=2,
        counted="GEMM operations",
        projections=(ProjectionBench(QKV, "bfloat16", 1024, 4096, parts, (case, replace(case, mode="cuda graph"))),),
        load=LoadBench(28, 587_202_560, 140, 56, *timings, 2.0, 0.1, "no gain"),
        summary=("qkv_proj: faster",),
        method=("A B A B",),
        versions=(("torch", "9.9"),),
        notes=(),
        warnings=(),
    )
    return replace(report, **changes)  # type: ignore[arg-type]


def a_failure() -> VerifyReport:
    findings = (Finding("differs from the source", "a.safetensors", QKV, "k_proj.weight", 2100, 52, 4_300_802),)
    numeric = NumericResult("fail", "beyond", ulps=ULPS, worst=math.inf, first_difference=Place(7, "k"))
    probe = ProbeResult("fail", "is not the weight", 9, 9, 1, 2, Place(2100, "self_attn.k_proj", 17))
    return a_report(
        verdict="not_equal",
        proved=(),
        exact=ExactReport("fail", "manifest digests", False, 227, 56, 10, findings, 137),  # noqa: FBT003
        projections=(a_check(built="fail", probe=probe, numeric=numeric),),
    )


def hostile_reports() -> list[str]:
    finding = Finding(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    numeric = NumericResult("not run", HOSTILE, notes=(HOSTILE,))
    check = a_check(tensor=HOSTILE, shard_offsets=((HOSTILE, 0),), numeric=numeric)
    exact = replace(a_report().exact, verdict="fail", findings=(finding,), finding_count=1)
    foreign = {"out": HOSTILE, "source": HOSTILE, "device": HOSTILE, "device_note": HOSTILE, "notes": (HOSTILE,)}
    pairs = {"versions": ((HOSTILE, HOSTILE),)}
    verified = a_report(
        exact=exact, projections=(check,), warnings=(HOSTILE,), digests=((HOSTILE, HOSTILE),), **foreign, **pairs
    )
    projection = replace(a_bench().projections[0], tensor=HOSTILE, dtype=HOSTILE, parts=((HOSTILE, 0, 5),))
    measured = a_bench(
        projections=(projection,), counted=HOSTILE, summary=(HOSTILE,), warnings=(HOSTILE,), **foreign, **pairs
    )
    return [verify_html(verified), bench_html(measured)]


PAGES = {
    "equal": verify_html(a_report()),
    "not_equal": verify_html(a_failure()),
    "no_torch": verify_html(
        a_report(projections=(), layers=(), proved=("exact",), device=None, device_note=None, source=None, digests=())
    ),
    "bench": bench_html(a_bench()),
    "bench_bare": bench_html(a_bench(projections=(), load=None)),
    **{f"hostile{number}": page for number, page in enumerate(hostile_reports())},
}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_is_well_formed_and_stands_alone(page: str) -> None:
    parsed = Page(page)
    assert page.startswith("<!DOCTYPE html>\n")
    assert not re.search(r"https?:|url\(|@import|javascript:", page.replace("<script>", ""))
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a", "use", "image"}
    for _, attributes in parsed.elements:
        assert not {name for name in attributes if name in {"src", "href", "srcset", "style"} or name.startswith("on")}


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_a_page_is_accessible(page: str) -> None:
    parsed = Page(page)
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert parsed.all("html") == [{"lang": "en"}]
    assert len(parsed.all("title")) == len(parsed.all("svg")) + 1
    assert len(parsed.all("desc")) == len(parsed.all("svg"))
    assert all(svg["role"] == "img" for svg in parsed.all("svg"))
    assert all(head["scope"] in {"row", "col"} for head in parsed.all("th"))
    assert "prefers-color-scheme:dark" in page
    assert "@media print" in page


@pytest.mark.parametrize("page", hostile_reports(), ids=["verify", "bench"])
def test_foreign_text_is_shown_escaped_and_never_markup(page: str) -> None:
    parsed = Page(page)
    assert "<script" not in page
    assert "onerror" not in {name for _, attributes in parsed.elements for name in attributes}
    assert not [character for character in page if invisible(character) and character != "\n"]
    spelled = "<script>alert('1')</script>\"><img onerror=x>&amp;\\x1b[31m\\u202egnp\\u200b\\x9b\\x00"
    assert parsed.text().count(spelled) >= 8


@given(st.text(max_size=60))
def test_any_name_leaves_a_page_well_formed(name: str) -> None:
    check = a_check(tensor=name, shard_offsets=((name, 0), ("k", 9), ("v", 10)))
    Page(verify_html(a_report(out=name, source=name, notes=(name,), digests=((name, name),), projections=(check,))))


def test_the_same_report_gives_the_same_bytes() -> None:
    assert verify_html(a_report()) == verify_html(a_report())
    assert bench_html(a_bench()) == bench_html(a_bench())
    assert "2026-11-29" not in verify_html(a_report())
    assert "2026-11-29" in verify_html(a_report(), stamp="2026-11-29")
    assert "2026-11-29" in bench_html(a_bench(), stamp="2026-11-29")


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=3))
def test_the_row_map_is_to_scale(sizes: list[int]) -> None:
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    drawn = Page(row_map("t", [(str(n), *rows) for n, rows in enumerate(zip(offsets, sizes, strict=True))])).all("rect")
    for rect, offset, size in zip(drawn, offsets, sizes, strict=True):
        assert float(rect["width"].rstrip("%")) == pytest.approx(100 * size / sum(sizes), abs=1e-3)
        assert float(rect["x"].rstrip("%")) == pytest.approx(100 * offset / sum(sizes), abs=1e-3)


def test_verdicts_stand_first_and_what_is_not_proved_is_said() -> None:
    text = Page(PAGES["equal"]).text()
    assert text.index("Equal") < text.index("exact pass") < text.index("Digests")
    assert "Every byte of 227 tensors (1.5 GB, 56 of them fused) equals the source's." in text
    assert "not single ULPs" in text
    for shown in ("a note", "a warning", "42", "1.2.3", "ab" * 32, "2,048", "0.5 at worst"):
        assert shown in text
    text = Page(PAGES["no_torch"]).text()
    for shown in ("probe: not run", "numeric: not run", "none: probe and numeric not run"):
        assert shown in text


def test_a_failure_names_its_place() -> None:
    text = Page(PAGES["not_equal"]).text()
    assert text.index("NOT equal") < text.index("Differences") < text.index("Layer 0")
    for shown in (
        "137 found, the first 1",
        "2,100 (52 of the part)",
        "4,300,802",
        "a.safetensors",
        "not finite at worst",
    ):
        assert shown in text
    assert text.count("exact fail") == 2  # the card, and this one projection
    assert "NOT checked against the bytes" in text


def test_bars_never_leave_their_drawing() -> None:
    for page in PAGES.values():
        for rect in Page(page).all("rect"):
            assert 0 <= float(rect["width"].rstrip("%")) <= 100
        for line in Page(page).all("line"):
            assert 0 <= float(line["x1"].rstrip("%")) <= 100
    assert "1 beyond the edge" in PAGES["bench"]


def test_units() -> None:
    assert [duration(s) for s in (1.234e-6, 45.6e-6, 7.89e-3, 0.25, 12)] == [
        "1.23 \u00b5s",
        "45.6 \u00b5s",
        "7.89 ms",
        "250 ms",
        "12.0 s",
    ]
    assert [size_text(n) for n in (0, 999, 2048, 1_503_267_840)] == ["0 bytes", "999 bytes", "2.0 kB", "1.5 GB"]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_json_has_no_numbers_that_json_lacks(value: float) -> None:
    check = a_check(numeric=replace(a_check().numeric, worst=value))
    document = json.loads(to_json("equal", a_report(projections=(check,))), parse_constant=pytest.fail)
    assert float(document["projections"][0]["numeric"]["worst"]) == pytest.approx(value, nan_ok=True)


def verify_command(out: Path, *arguments: object, verb: str = "verify") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", RUN, verb, str(out), "--no-progress", "--device", "cpu", *map(str, arguments)]
    return subprocess.run(
        line, capture_output=True, text=True, check=False, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("html")
    write_checkpoint(folder / "in", Spec())
    fuse(folder / "in", folder / "out")
    return folder / "out"


def test_verify_writes_its_report(out: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")
    done = verify_command(out, "--report", page, "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (0, "equal")
    assert "Equal" in Page(page.read_text()).text()
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_written_is_a_failure_though_all_is_equal(out: Path) -> None:
    done = verify_command(out, "--report", "/dev/full")
    assert done.returncode == 4
    assert "error: " in done.stderr
    assert "EQUAL" in done.stdout
    done = verify_command(out, "--report", "/dev/full", "--json")
    assert (done.returncode, json.loads(done.stdout)["verdict"]) == (4, "error")


def test_a_report_that_has_no_place_is_refused_before_the_work(out: Path, tmp_path: Path) -> None:
    for target, problem in ((tmp_path / "absent" / "report.html", "there is no folder"), (tmp_path, "is a folder")):
        for verb in ("verify", "bench"):
            done = verify_command(out, "--report", target, verb=verb)
            assert (done.returncode, done.stdout) == (2, "")
            assert problem in done.stderr


def test_a_difference_stays_one_when_the_report_cannot_be_written(out: Path, tmp_path: Path) -> None:
    broken = tmp_path / "out"
    shutil.copytree(out, broken)
    with (broken / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    arguments = ("--source", out.parent / "in", "--report")
    assert verify_command(broken, *arguments, "/dev/full").returncode == 1
    assert verify_command(broken, *arguments, tmp_path / "bad.html").returncode == 1
    assert "NOT equal" in Page((tmp_path / "bad.html").read_text()).text()
