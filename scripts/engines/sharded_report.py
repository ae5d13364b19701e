"""The documents of sharded_check and sharded_times for a reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .vllm_report import heading, one_line, verdict


def lines(document: dict[str, Any]) -> Iterator[str]:
    """What ran, a row for each checkpoint and number of ranks, the damaged one, and the verdict."""
    yield from heading(document)
    yield f"{'model':30}{'TP':4}{'state on each rank':36}{'tokens':11}{'logprobs':11}made from"
    for row in document["checks"]:
        for size, found in row["sizes"].items():
            yield f"{row['model']:30}{size:<4}{states(found['states']):36}{outputs(found)}{', '.join(row['made_from'])}"
        error = row["sizes"][1]["errors"]["split"]
        if error is not None:
            yield f"    the engine cannot compute with the split form here: {one_line(error)}"
            yield f"    it needs {row['needs'] or 'nothing that is known'}"
    for row in document["damages"]:
        yield f"{row['damage']} ({row['of']})"
        yield f"    engine    {one_line(str(row['error']))}"
        yield f"    verify    exit {row['verify_exit']}: {row['verify_says']}"
    yield from verdict(document)


def states(ranks: list[dict[str, Any]]) -> str:
    """Whether the loaders gave each rank the same."""
    if any("error" in rank for rank in ranks):
        return "failed"
    sizes = " + ".join(f"{rank['bytes']:,}" for rank in ranks)
    return f"{'DIFFERS' if any(rank['differing'] for rank in ranks) else 'identical'}, {sizes} B"


def outputs(found: dict[str, Any]) -> str:
    """Whether the engine computed the same."""
    if found.get("errors", {"split": "not run"})["split"] is not None:
        return f"{'not computed':22}"
    return "".join(f"{'identical' if found[f'{key}_identical'] else 'DIFFER':11}" for key in ("tokens", "logprobs"))
