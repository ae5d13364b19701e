"""What was measured, in words: a ratio within its noise is no gain, and much noise means that nothing can be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusecheck.measure.values import Case, LoadBench, Outcome, ProjectionBench

LOUD = 0.2
"""Noise beyond which "no gain" only means that nothing can be told."""


def summarise(projections: Sequence[ProjectionBench], load: LoadBench | None) -> Iterator[str]:
    """A line for each projection and mode, and one for loading."""
    for projection in projections:
        name = projection.tensor.rpartition(".")[0].rpartition(".")[2]
        for mode in dict.fromkeys(case.mode for case in projection.cases):
            cases = [case for case in projection.cases if case.mode == mode]
            yield f"{name}{', CUDA graph' if mode != 'eager' else ''}: {'; '.join(_outcomes(cases))}"
    if load is not None:
        yield f"load: {_in_words(load.outcome, load.ratio, load.noise)}"


def _outcomes(cases: Sequence[Case]) -> Iterator[str]:
    if all(case.outcome == "no gain" for case in cases):
        noise = max(case.noise for case in cases)
        what = "fusing gains nothing here" if noise <= LOUD else "too noisy to tell"
        yield f"{what}, every ratio is within its noise (at most {noise:.1%})"
        return
    for outcome in ("faster", "slower", "no gain"):
        found = [case for case in cases if case.outcome == outcome]
        if not found:
            continue
        rows = ", ".join(str(case.batch) for case in found)
        ratios = [case.ratio for case in found]
        span = f"{min(ratios):.2f} to {max(ratios):.2f} x" if len(found) > 1 else f"{ratios[0]:.2f} x"
        yield f"no gain beyond noise at {rows} rows" if outcome == "no gain" else f"{outcome} at {rows} rows ({span})"


def _in_words(outcome: Outcome, ratio: float, noise: float) -> str:
    if outcome == "no gain":
        what = "fusing gains nothing here" if noise <= LOUD else "too noisy to tell"
        return f"{what} ({ratio:.2f} x, noise {noise:.1%})"
    return f"{outcome} ({ratio:.2f} x, noise {noise:.1%})"
