"""Rows of a benchmark: whole processes in turn, wall time and peak RSS, as ratios to one of them."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Row:
    """One command on one model: wall seconds of every run, their median over the quieter half, peak RSS in MiB."""

    model: str
    command: str
    median: float
    seconds: tuple[float, ...]
    rss_mib: float
    ratio: float
    """To the yardstick of its group: cp, or cmp, or itself where there is none."""
    yardstick: str = ""
    not_run: str = ""
    """Why there are no figures."""


def make(arguments: list[str], source: Path) -> None:
    """A synthetic checkpoint of published names, shapes and layout."""
    maker = [sys.executable, str(HERE / "make_checkpoint.py"), arguments[0], str(source), *arguments[1:]]
    subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)


def compared(
    model: str, yardstick: str, commands: dict[str, list[str]], runs: int, *, fresh: Path | None, may_fail: bool = False
) -> list[Row]:
    """All runs of some commands in turn; the first round, which warms the cache, does not count.

    A command that fails ends everything, or where it `may_fail`, being another's, becomes a row that says so.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    failed: dict[str, str] = {}
    for number in range(runs + 1 if runs > 1 else 1):
        for name in [name for name in list(commands)[:: -1 if number % 2 else 1] if name not in failed]:
            if fresh is not None:
                shutil.rmtree(fresh, ignore_errors=True)
                os.sync()
            try:
                result = run(commands[name])
            except subprocess.CalledProcessError as error:
                if not may_fail or name == yardstick:
                    sys.exit(f"{error.cmd[:3]}: exit {error.returncode}")
                failed[name] = f"exit {error.returncode} in round {number}"
                del found[name]
                continue
            if number or runs == 1:
                found[name].append(result)
    medians = {name: quieter_half([seconds for seconds, _ in results]) for name, results in found.items()}
    return [
        Row(
            model,
            name,
            round(medians[name], 3),
            tuple(round(seconds, 3) for seconds, _ in results),
            round(max(rss for _, rss in results), 1),
            round(medians[name] / medians[yardstick], 2),
            yardstick,
        )
        for name, results in found.items()
    ] + [Row(model, name, 0, (), 0, 0, not_run=reason) for name, reason in failed.items()]


def run(command: list[str]) -> tuple[float, float]:
    """(wall seconds, peak RSS in MiB) of one command; CalledProcessError where it fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - began, usage.ru_maxrss / 1024


def quieter_half(values: list[float]) -> float:
    """Median of the faster half."""
    return statistics.median(sorted(values)[: (len(values) + 1) // 2])


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| model | command | median s | ratio | peak RSS MiB |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.model} | {r.command} | not run: {r.not_run} | | |"
        if r.not_run
        else f"| {r.model} | {r.command} | {r.median:.2f} | {r.ratio:.2f} | {r.rss_mib:.0f} |"
        for r in rows
    ]
    return "\n".join(lines)
