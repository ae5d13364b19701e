"""What probe and numeric found, as values; without torch, so that reading a report costs none."""

from __future__ import annotations

from dataclasses import dataclass
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
    """One fused projection of one layer: its sizes, where each part begins, and what each check found."""

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
