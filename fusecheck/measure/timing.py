"""Two ways of doing one thing, timed in turn, and whether one gains more than noise."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch

from fusecheck.measure.values import Outcome, Timing

ROUNDS = 31
"""Pairs of samples per case; fewer, yet at least MIN_ROUNDS, where one case would take over CASE_SECONDS."""
MIN_ROUNDS = 21
CASE_SECONDS = 1.5
SAMPLE_SECONDS = 1e-3
"""What one sample lasts at least, so that the clock's own cost vanishes: as many calls as that takes."""

Run: TypeAlias = Callable[[], object]
Mode: TypeAlias = Callable[[Run, int], Run]
"""A call, and how many of them, -> something that runs that many."""
Clock: TypeAlias = Callable[[Run], float]
"""Seconds that a run takes."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Samples of two ways, the split one and the fused one, and what `judge` says of them."""

    separate: Timing
    fused: Timing
    ratio: float
    noise: float
    outcome: Outcome


def compare(
    separate: Run, fused: Run, clock: Clock, *, calls: int, rounds: int, on_round: Callable[[], None] | None = None
) -> Comparison:
    """Time both in turn, after a warm-up; a run of either makes so many `calls`, and a sample is their mean."""
    for run in (separate, fused):
        clock(run)
    taken: list[tuple[float, float]] = []
    for _ in range(rounds):
        taken.append((clock(separate) / calls, clock(fused) / calls))
        if on_round is not None:
            on_round()
    one, two = zip(*taken, strict=True)
    ratio, noise, outcome = judge(one, two)
    return Comparison(Timing(statistics.median(one), one), Timing(statistics.median(two), two), ratio, noise, outcome)


def judge(separate: Sequence[float], fused: Sequence[float]) -> tuple[float, float, Outcome]:
    """(ratio, noise, outcome) of samples taken in turn, separate first.

    Noise is the median of |ln(a / next a)|: half of all steps of the separate projections against themselves are
    larger. For equals separate / fused spreads as those steps do, and a median of n such ratios deviates by about
    1.86 / sqrt(n) noises: a third of the noise at 31 rounds, over half of it at 11. So equals hardly ever leave it.
    """
    ratio = statistics.median(a / b for a, b in zip(separate, fused, strict=True))
    steps = [abs(math.log(a / b)) for a, b in pairwise(separate)]
    noise = math.expm1(statistics.median(steps)) if steps else 0.0
    if abs(math.log(ratio)) <= math.log1p(noise):
        return ratio, noise, "no gain"
    return ratio, noise, "faster" if ratio > 1 else "slower"


def eager(call: Run, calls: int) -> Run:
    """The calls one by one, as Python makes them."""

    def run() -> None:
        for _ in range(calls):
            call()

    return run


def graphed(call: Run, calls: int) -> Run:
    """The same calls captured once into a CUDA graph, so that a replay is free of Python and of single launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def clock_of(device: torch.device) -> Clock:
    """By CUDA events on a GPU, by perf_counter on a CPU."""
    if device.type != "cuda":
        return _seconds

    def events(run: Run) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        began.record()
        run()
        ended.record()
        torch.cuda.synchronize(device)
        return float(began.elapsed_time(ended)) / 1e3

    return events


def _seconds(run: Run) -> float:
    began = time.perf_counter()
    run()
    return max(time.perf_counter() - began, 1e-9)


def calibrate(call: Run, clock: Clock) -> tuple[int, int]:
    """How many calls make a sample, and how many rounds fit."""
    once = min(clock(call) for _ in range(5))
    calls = max(1, min(1000, math.ceil(SAMPLE_SECONDS / once)))
    return calls, max(MIN_ROUNDS, min(ROUNDS, int(CASE_SECONDS / (2 * calls * once))))
