"""What probe and numeric found, as values; without torch, so that reading a report costs none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["pass", "fail", "not run"]


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a difference is: `row` in the fused tensor, from 0; `column` is the input feature (None: a whole row)."""

    row: int
    part: str
    column: int | None = None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Counts are elements of the fused weight: total = compared + non_finite; flushed ones are among the compared."""

    verdict: Verdict
    reason: str = ""
    compared: int = 0
    total: int = 0
    non_finite: int = 0
    flushed: int = 0
    first_difference: Place | None = None


@dataclass(frozen=True, slots=True)
class NumericResult:
    """Fused against separate, over the compared outputs of all batches; counts are elements of the output.

    `max_abs_diff`, `max_ulp` and `ulps` (bucket, count) are between fused and separate, `worst` is the largest
    |output - reference| / B of either, inf where an output was not finite.
    """

    verdict: Verdict
    reason: str = ""
    batches: tuple[int, ...] = ()
    bitwise_equal: bool = False
    deterministic: bool = False
    max_abs_diff: float = 0.0
    max_ulp: int = 0
    ulps: tuple[tuple[str, int], ...] = ()
    worst: float = 0.0
    compared: int = 0
    total: int = 0
    first_difference: Place | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProjectionCheck:
    """One projection of one layer: its sizes, where each part begins, and what each check found.

    Of an output that is cut for ranks: one rank's tensor, whose sizes and offsets are that rank's, or a row-parallel
    Linear of all ranks, whose shard_offsets are columns.
    """

    layer: int
    tensor: str
    input_size: int
    output_size: int
    shard_offsets: tuple[tuple[str, int], ...]
    built: Verdict
    """Built anew by the weight_loaders of QKVParallelLinear / MergedColumnParallelLinear and compared bit for bit."""
    probe: ProbeResult
    numeric: NumericResult
    weights: str = "stored"
    """What probe and numeric ran on: the stored weights, or `dequantised to float32 (gptq)`."""
    built_reason: str = ""
    """Why `built` was not run."""
    ranks: tuple[int, ...] = ()
    """Whose tensors these are, where OUT is cut for ranks."""
    axis: Literal["rows", "columns"] = "rows"
    """What shard_offsets count."""


def verdicts_of(checks: Iterable[ProjectionCheck], exact: Verdict = "not run") -> tuple[bool, tuple[str, ...]]:
    """Whether anything failed, and which of exact, probe and numeric passed. What was built is part of `exact`."""
    checks = tuple(checks)
    built = [check.built for check in checks]
    seen: dict[str, list[Verdict]] = {
        "exact": [exact, *built] if exact != "not run" else [],
        "probe": [check.probe.verdict for check in checks],
        "numeric": [check.numeric.verdict for check in checks],
    }
    failed = "fail" in built or any("fail" in verdicts for verdicts in seen.values())
    return failed, tuple(name for name, verdicts in seen.items() if "pass" in verdicts and "fail" not in verdicts)


def fold(checks: Iterable[ProjectionCheck]) -> list[ProjectionCheck]:
    """Ranks of which one tensor has the same sizes and the same verdicts become one line, in the place of the first."""
    found: dict[object, ProjectionCheck] = {}
    for number, check in enumerate(checks):
        alike = (
            check.layer,
            check.tensor,
            check.input_size,
            check.shard_offsets,
            (check.built, check.built_reason, check.weights),
            (check.probe.verdict, check.probe.reason, check.probe.first_difference),
            (check.numeric.verdict, check.numeric.reason, check.numeric.first_difference),
            check.output_size if check.ranks else number,  # what is not cut for ranks stays as it is
        )
        found[alike] = _together(found[alike], check) if alike in found else check
    return list(found.values())


def _together(one: ProjectionCheck, other: ProjectionCheck) -> ProjectionCheck:
    """Counts are added up, of measures the worst is taken."""
    a, b, p, q = one.numeric, other.numeric, one.probe, other.probe
    return replace(
        one,
        ranks=(*one.ranks, *other.ranks),
        probe=replace(
            p,
            compared=p.compared + q.compared,
            total=p.total + q.total,
            non_finite=p.non_finite + q.non_finite,
            flushed=p.flushed + q.flushed,
        ),
        numeric=replace(
            a,
            bitwise_equal=a.bitwise_equal and b.bitwise_equal,
            deterministic=a.deterministic and b.deterministic,
            max_abs_diff=max(a.max_abs_diff, b.max_abs_diff),
            max_ulp=max(a.max_ulp, b.max_ulp),
            ulps=tuple((name, m + n) for (name, m), (_, n) in zip(a.ulps, b.ulps, strict=True)),
            worst=max(a.worst, b.worst),
            compared=a.compared + b.compared,
            total=a.total + b.total,
            notes=tuple(dict.fromkeys((*a.notes, *b.notes))),
        ),
    )


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`rank 0`, `ranks 0-3`, `ranks 1,3`, or nothing where there are none."""
    if len(ranks) < 2:
        return f"rank {ranks[0]}" if ranks else ""
    run = len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}-{ranks[-1]}" if run else f"ranks {','.join(map(str, ranks))}"
