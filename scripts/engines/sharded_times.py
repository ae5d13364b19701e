"""How long real vLLM takes to load the split form, the fused one, and what is written for its ranks, side by side."""

from __future__ import annotations

import datetime as dt
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .models import Check
from .sharded_check import LOADED, SIZES, ShardedSession
from .vllm_check import engine_python, run_engine, say
from .vllm_report import heading

FORMS = {"split": "auto", "fused": "auto", "sharded": LOADED["sharded"]}
"""Form -> load_format."""


def measure(venv: Path, folder: Path | None, release: str) -> dict[str, Any]:
    """Make a checkpoint of a published size and its other forms below `folder`; the document of what was measured."""
    python = engine_python(venv)
    row = Check(release, release)
    with tempfile.TemporaryDirectory(dir=folder, prefix="engine-check-") as work:
        session = ShardedSession(Path(work), [row])
        session.prepare(row, 0)
        document: dict[str, Any] = {"date": dt.datetime.now(dt.UTC).date().isoformat(), "fusecheck": session.version}
        document |= {"checkpoint": release, "not_as_expected": session.findings.wrong, "loads": {}}
        for size in SIZES:
            say(f"TP {size}: loading {', '.join(FORMS)}")
            folders = {**session.folders(row.name, size), "fused": session.folder("fused", row.name)}
            jobs = {form: {"folder": str(folders[form]), "load_format": FORMS[form]} for form in FORMS}
            what, *ran = run_engine(python, jobs, session.work, "run_loads", str(size)) or [{}]
            document |= what
            document["loads"][size] = {
                line["name"]: {source: statistics.median(each) for source, each in line["seconds"].items()} | line
                for line in ran
            }
            if len(ran) != len(jobs):
                document["not_as_expected"].append(f"TP {size}: the engine came to {len(ran)} of {len(jobs)} forms")
    return document


def lines(document: dict[str, Any]) -> Iterator[str]:
    """A table for a README: seconds, and how many times the split form's time over that."""
    yield from heading(document)
    yield (
        f"| {document['checkpoint']} | "
        + " | ".join(f"TP {size}, from the {source}" for size in SIZES for source in ("disk", "cache"))
        + " |"
    )
    yield "|---|" + "---|" * 2 * len(SIZES)
    for form in FORMS:
        cells = [cell(document["loads"][size], form, source) for size in SIZES for source in ("disk", "cache")]
        yield f"| {form} | {' | '.join(cells)} |"
    yield from (f"NOT AS EXPECTED: {text}" for text in document["not_as_expected"])


def cell(loads: dict[str, Any], form: str, source: str) -> str:
    """Seconds and ratio."""
    if form not in loads:
        return "failed"
    seconds = loads[form][source]
    return f"{seconds:.2f} s ({loads['split'][source] / seconds:.2f}x)"
