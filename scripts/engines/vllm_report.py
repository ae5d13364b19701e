"""The document of vllm_check for a reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def lines(document: dict[str, Any]) -> Iterator[str]:
    """What ran, a row for each checkpoint, what the damaged ones gave, and the verdict."""
    yield from heading(document)
    yield f"{'model':33}{'shards':8}{'straddling':12}{'verify':8}{'tokens':11}{'logprobs':11}load split / fused"
    for row in document["checks"]:
        yield from checked(row)
    for row in document["damages"]:
        yield from damaged(row)
    yield from verdict(document)


def heading(document: dict[str, Any]) -> Iterator[str]:
    """What ran."""
    versions = ", ".join(f"{name} {number}" for name, number in document.get("versions", {}).items())
    yield f"{versions}, CPU {document.get('cpu')}, fusecheck {document['fusecheck']}, {document['date']}"
    if document.get("amx_passed_over"):
        yield f"without AMX, on AVX512-BF16; test for AMX passed over in {', '.join(document['amx_passed_over'])}"
    yield ""


def verdict(document: dict[str, Any]) -> Iterator[str]:
    """Each thing that should have been otherwise."""
    yield ""
    yield from (f"NOT AS EXPECTED: {text}" for text in document["not_as_expected"])
    if not document["not_as_expected"]:
        yield "all as expected"


def checked(row: dict[str, Any]) -> Iterator[str]:
    """One checkpoint; below it what the engine said where it ran not both forms."""
    start = f"{row['model']:33}{row['shards']:<8}{row['straddling']:<12}{row['verify_exit']:<8}"
    split, fused = row["errors"]["split"], row["errors"]["fused"]
    loads = " / ".join("failed" if s is None else f"{s:.1f} s" for s in row["load_seconds"].values())
    if split is None and fused is None:
        tokens, logprobs = ("identical" if row[f"{key}_identical"] else "DIFFER" for key in ("tokens", "logprobs"))
        yield f"{start}{tokens:11}{logprobs:11}{loads}"
    elif split is None:
        yield f"{start}{'only split':22}{loads}"
        yield f"    the engine runs the split form and refuses the fused one: {one_line(fused)}"
    else:
        yield f"{start}{'neither':22}{loads}"
        what = "cannot run it here" if fused == split else "refuses it otherwise"
        yield f"    split: engine cannot run it here: {one_line(split)}"
        yield f"    fused: engine {what}: {one_line(fused or 'no, it runs')}"
        yield f"    it needs {row['needs'] or 'nothing that is known'}"


def damaged(row: dict[str, Any]) -> Iterator[str]:
    """What a damaged checkpoint should give and gives, and what verify says."""
    yield ""
    yield f"{row['damage']} ({row['of']})"
    for form, prompts in (("should be", row["should"]), ("gives", row["tokens"])):
        yield f"  {form:10}{' '.join(map(str, prompts[0][:12])) if prompts else 'nothing'} ..."
    yield f"  engine    {'starts without an error' if row['starts'] else row['error']}"
    yield f"  verify    exit {row['verify_exit']}, without a manifest {row['verify_exit_without_manifest']}"
    yield f"            {row['verify_says']}"


def one_line(error: str) -> str:
    """An engine's error, however many lines it has."""
    return " ".join(error.split())
