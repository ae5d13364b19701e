"""Outputs of a GEMM held to float64: the hidden states that go in, what has to come out, what the comparisons add up to.

Memory is bounded: weights are widened a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F  # noqa: N812  # the field's name for it
from torch import Tensor

from fusecheck.bounds import same_bits, ulp_distance
from fusecheck.verdicts import NumericResult, Place, Verdict

_CHUNK_ELEMENTS = 1 << 20  # one float64 copy of some rows: 8 MiB
_LARGEST_X = 4.0  # hidden states are clamped there, before scaling, so that sums can be bounded
_LOWEST_TOP = {torch.float16: 4}
"""Exponent that sums of |x||w| may reach at least, so that the floor t of fp16 does not hide them; elsewhere -64."""
_ULP_EDGES = (0, 1, 2, 4, 16, 256)
_ULP_BUCKETS = ("0", "1", "2", "3-4", "5-16", "17-256", ">256")


def usual_batches(device: torch.device) -> tuple[int, ...]:
    """How many hidden states go in at once."""
    return (1, 16, 512) if device.type == "cuda" else (1, 16)


def hidden_states(weights: list[Tensor], batches: tuple[int, ...], seed: int) -> list[Tensor]:
    """[batch, in] in the weights' dtype, scaled so that no sum of |x||w| over a finite row overflows, or drowns."""
    peaks = torch.cat([row_peaks(w) for w in weights]).double()
    largest = float(torch.where(peaks.isfinite(), peaks, 0).max())
    like, columns = weights[0], weights[0].shape[1]
    # 2^top is above the largest possible sum: columns * largest x * largest w
    top = math.frexp(largest)[1] + columns.bit_length() + math.frexp(_LARGEST_X)[1]
    high = math.frexp(torch.finfo(like.dtype).max)[1] - 2
    power = min(0, high - top) or min(max(0, _LOWEST_TOP.get(like.dtype, -64) - top), high - 3)
    generator = torch.Generator().manual_seed(seed)
    states = [torch.randn(n, columns, generator=generator, dtype=torch.float64) for n in batches]
    return [(x.clamp_(-_LARGEST_X, _LARGEST_X) * 2.0**power).to(like.dtype).to(like.device) for x in states]


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """What rows [start, stop) of a weight give in float64: the reference, S and D of `Arithmetic.bound`.

    Each [batch, stop - start].
    """

    start: int
    stop: int
    ref: Tensor
    magnitude: Tensor
    flushable: Tensor


def terms_of(x: Tensor, weight: Tensor, bias: Tensor | None, tiny: float) -> Iterator[Terms]:
    """The float64 reference of all x [batch, in], a few rows of the weight at a time."""
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    size = x.abs()
    small_x = torch.where(size < tiny, size, 0)
    for start in range(0, len(weight), step):
        w = weight[start : start + step].double()
        b = None if bias is None else bias[start : start + step].double()
        ref, w = F.linear(x, w, b), w.abs()
        magnitude = F.linear(size, w, None if b is None else b.abs())
        small_w, flushable = w < tiny, torch.zeros_like(ref)  # zeros too: they add 0
        if small_w.any():
            flushable += F.linear(size, torch.where(small_w, w, 0))
        if small_x.any():
            flushable += F.linear(small_x, w)
        yield Terms(start, start + len(w), ref, magnitude, flushable)


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What outputs are held to: reference, how far each form may lie from it, and where that can be said."""

    values: Tensor
    fused_limit: Tensor
    separate_limit: Tensor
    comparable: Tensor


@dataclass(slots=True)
class Tally:
    """What the chunks of one projection add up to."""

    compared: int = 0
    bitwise_equal: bool = True
    max_abs_diff: float = 0.0
    max_ulp: int = 0
    worst: float = 0.0
    ulps: list[int] = field(default_factory=lambda: [0] * len(_ULP_BUCKETS))
    first: Place | None = None

    def add(self, place: Place, fused: Tensor, separate: Tensor, wanted: Wanted) -> None:
        """Outputs [batch, rows] from `place` on, fused and separate, against their reference."""
        share = torch.maximum(
            (fused - wanted.values).abs() / wanted.fused_limit, (separate - wanted.values).abs() / wanted.separate_limit
        )  # NaN stays NaN
        wrong = wanted.comparable & ~(share <= 1)
        if self.first is None and wrong.any():
            self.first = replace(place, row=place.row + first_true(wrong.any(dim=0)))
        one, two = fused[wanted.comparable], separate[wanted.comparable]
        if not len(one):
            return
        self.compared += len(one)
        self.bitwise_equal &= same_bits(one, two)
        self.worst = max(self.worst, _largest(share[wanted.comparable]))
        self.max_abs_diff = max(self.max_abs_diff, _largest((one.double() - two.double()).abs()))
        distance = ulp_distance(one, two)
        self.max_ulp = max(self.max_ulp, int(distance.max()))
        bucket = torch.bucketize(distance, torch.tensor(_ULP_EDGES, device=distance.device))
        counts = torch.bincount(bucket, minlength=len(_ULP_BUCKETS)).tolist()
        self.ulps = [a + b for a, b in zip(self.ulps, counts, strict=True)]

    def result(
        self, batches: tuple[int, ...], *, total: int, deterministic: bool, notes: tuple[str, ...]
    ) -> NumericResult:
        """The verdict on what was added."""
        verdict: Verdict = "pass"
        reason = ""
        if self.first is not None:
            verdict, reason = "fail", f"an output leaves its bound: error / bound = {self.worst:.3g}"
        elif not self.compared:
            verdict, reason = "not run", "nothing comparable: every output is non-finite or might overflow"
        return NumericResult(
            verdict=verdict,
            reason=reason,
            batches=batches,
            bitwise_equal=self.bitwise_equal and self.compared > 0,
            deterministic=deterministic,
            max_abs_diff=self.max_abs_diff,
            max_ulp=self.max_ulp,
            ulps=tuple(zip(_ULP_BUCKETS, self.ulps, strict=True)),
            worst=self.worst,
            compared=self.compared,
            total=total,
            first_difference=self.first,
            notes=notes,
        )


def _largest(values: Tensor) -> float:
    return float(values.nan_to_num(nan=math.inf, posinf=math.inf).max())


def notes_on(weight: Tensor, batches: tuple[int, ...]) -> tuple[str, ...]:
    """What the reader has to know about this numeric verdict."""
    general = ("finds wrong rows and broken kernels, not single ULPs: those are for the exact verdict",)
    if weight.device.type != "cpu":
        return general
    if weight.dtype == torch.float16:
        return (*general, "whether the CPU multiplies fp16 natively or upcast to fp32 is not known")
    if weight.dtype != torch.bfloat16:
        return general
    native = [str(n) for n in batches if _flushes(n, weight.shape[1])]
    if not native:
        return (*general, "CPU bf16 is upcast to fp32 here: the bf16 kernel was not tested")
    upcast = [str(n) for n in batches if str(n) not in native]
    note = f"CPU bf16 kernel: native at batch {', '.join(native)} (it flushes subnormals)"
    return (*general, f"{note}, upcast to fp32 at batch {', '.join(upcast)}" if upcast else note)


def _flushes(batch: int, columns: int) -> bool:
    """Whether F.linear on this CPU flushes subnormal bf16: its dot-product instructions always do, fp32 ones never."""
    weight = torch.full((256, columns), 2.0**-130, dtype=torch.bfloat16)
    x = torch.zeros(batch, columns, dtype=torch.bfloat16)
    x[:, 0] = 1
    return not F.linear(x, weight).any()


def row_peaks(weight: Tensor) -> Tensor:
    """The largest |w| of each row [rows], NaN or inf where the row has one; no temporary of the weight's size."""
    return torch.maximum(weight.amax(dim=1), -weight.amin(dim=1))


def first_true(flags: Tensor) -> int:
    """The place of the first flag that is set."""
    return int(flags.to(torch.uint8).argmax())  # of equal values argmax gives the first
