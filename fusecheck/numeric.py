"""What a device makes of a fused projection: two verdicts without and with arithmetic, `probe` and `numeric`.

Both run F.linear as an engine would, once on the fused weight and split at the offsets. They find wrong rows, wrong
offsets and broken kernels; that every bit is right is for the exact verdict to say. Verdicts are values. Only a device
that is absent or fails raises, `SystemFailure`. Beyond weights and outputs, memory is bounded: weights are widened to
float64 a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F  # noqa: N812  # the field's name for it
from torch import Tensor

from fusecheck.bounds import DTYPES, Arithmetic, same_bits, ulp_distance
from fusecheck.device import pinned
from fusecheck.verdicts import NumericResult, Place, ProbeResult, Verdict

_BLOCK_BYTES = 32 << 20  # one block of probe outputs
_CHUNK_ELEMENTS = 1 << 20  # one float64 copy of some rows: 8 MiB
_PROBE_ROWS = 256  # more are no faster on any CPU tried
_LARGEST_X = 4.0  # hidden states are clamped there, before scaling, so that sums can be bounded
_LOWEST_TOP = {torch.float16: 4}
"""Exponent that sums of |x||w| may reach at least, so that the floor t of fp16 does not hide them; elsewhere -64."""
_ULP_EDGES = (0, 1, 2, 4, 16, 256)
_ULP_BUCKETS = ("0", "1", "2", "3-4", "5-16", "17-256", ">256")


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A fused tensor [sum of rows, in] and its parts [rows, in], in the fused order, on any device; biases or None."""

    name: str
    fused: Tensor
    parts: tuple[tuple[str, Tensor], ...]
    fused_bias: Tensor | None = None
    part_biases: tuple[Tensor, ...] | None = None


def _unfit(p: Projection) -> tuple[Verdict, str] | None:
    """Why a projection cannot be checked, or None: a contradiction is a failure, an unsupported thing is not run."""
    weights = [part for _, part in p.parts]
    sizes = [list(w.shape) for w in weights]
    if p.fused.dtype not in DTYPES or p.fused.dim() != 2:
        return "not run", f"no GEMM for {p.fused.dtype} {list(p.fused.shape)}"
    rows, columns = p.fused.shape
    if any(size[1:] != [columns] for size in sizes) or sum(size[0] for size in sizes) != rows:
        return "fail", f"shapes do not fit: fused {[rows, columns]}, parts {sizes}"
    biases = [] if p.fused_bias is None else [p.fused_bias]
    biases += p.part_biases or ()
    wanted = [[rows], *(size[:1] for size in sizes)] if biases else []
    if [list(b.shape) for b in biases] != wanted:
        return "fail", f"biases do not fit: found {[list(b.shape) for b in biases]}, wanted {wanted}"
    dtypes = {t.dtype for t in (p.fused, *weights, *biases)}
    if len(dtypes) != 1:
        return "fail", f"dtypes differ: {', '.join(sorted(map(str, dtypes)))}"
    return None if rows and columns else ("not run", "the tensor is empty")


def probe(p: Projection, device: torch.device) -> ProbeResult:
    """F.linear(I, W_fused), split at the offsets, must be each split weight: no rounding, so no tolerance.

    Each product is w * 1 and every other term 0, so any order of summation gives w. Compared as values (-0.0 == +0.0).
    A row that is non-finite in both tensors spoils its products (0 * inf) and is not compared; a weight below the
    accumulator's smallest normal number may come out as 0 (AVX512-BF16 and AMX flush), counted in `flushed`, if the
    fused tensor has such a weight in the same place too.
    """
    if unfit := _unfit(p):
        return ProbeResult(unfit[0], unfit[1])
    with pinned(device):
        return _probe(p, device)


def _probe(p: Projection, device: torch.device) -> ProbeResult:
    fused = p.fused.to(device)
    rows, columns = fused.shape
    tiny = Arithmetic.of(fused.dtype, device.type, columns, bias=False).tiny
    finite = _row_peaks(fused).isfinite()
    pieces, offset = [], 0
    for name, part in p.parts:
        weight, own = part.to(device), slice(offset, offset + part.shape[0])
        # finite on one side only is a difference
        pieces.append((name, weight, own, (finite[own] | _row_peaks(weight).isfinite()).unsqueeze(1)))
        offset = own.stop
    block = max(1, min(_PROBE_ROWS, _BLOCK_BYTES // (rows * fused.element_size()), columns))
    flushed, first = 0, None
    for start in range(0, columns, block):
        features = slice(start, min(start + block, columns))
        out = F.linear(_identity_rows(features, columns, fused), fused)
        for name, weight, own, comparable in pieces:
            got, want = out[:, own].t(), weight[:, features]
            wrong = (got != want) & comparable
            if not wrong.any():
                continue
            zeroed = wrong & (got == 0) & _below(want, tiny) & _below(fused[own, features], tiny)
            flushed += int(zeroed.sum())
            wrong &= ~zeroed
            if wrong.any():
                row = _first(wrong.any(dim=1))
                place = Place(own.start + row, name, start + _first(wrong[row]))
                first = place if first is None else min(first, place)
    total, compared = rows * columns, sum(int(comparable.sum()) for *_, comparable in pieces) * columns
    result = ProbeResult("pass", "", compared, total, total - compared, flushed, first)
    if first is not None:
        return replace(result, verdict="fail", reason="a product with the identity is not the weight")
    if compared == flushed:
        return replace(result, verdict="not run", reason="nothing comparable: no row is finite, or all is flushed to 0")
    return result


def _row_peaks(weight: Tensor) -> Tensor:
    """The largest |w| of each row [rows], NaN or inf where the row has one; no temporary of the weight's size."""
    return torch.maximum(weight.amax(dim=1), -weight.amin(dim=1))


def _identity_rows(features: slice, columns: int, like: Tensor) -> Tensor:
    block = torch.zeros(features.stop - features.start, columns, dtype=like.dtype, device=like.device)
    block[:, features].fill_diagonal_(1)
    return block


def _below(weight: Tensor, tiny: float) -> Tensor:
    return (weight.abs() < tiny) & (weight != 0)


def _first(flags: Tensor) -> int:
    return int(flags.to(torch.uint8).argmax())  # of equal values argmax gives the first


def numeric(p: Projection, device: torch.device, seed: int, *, batches: tuple[int, ...] | None = None) -> NumericResult:
    """Random hidden states through fused F.linear + split and through separate F.linear, both against float64.

    Pass: every comparable output of both lies within `Arithmetic.bound` of the reference, which is computed from the
    parts. Hidden states are normal, clamped to 4 and scaled by one power of two per projection, the same for the same
    `seed`; `batches` are their numbers of rows, by default 1 and 16, and 512 on CUDA. Whether fused and separate agree
    bit for bit is reported, not judged: another number of columns may well be another kernel. Batch sizes are never
    compared with each other.
    """
    if unfit := _unfit(p):
        return NumericResult(unfit[0], unfit[1])
    batches = batches or ((1, 16, 512) if device.type == "cuda" else (1, 16))
    with pinned(device):
        fused, bias = p.fused.to(device), None if p.fused_bias is None else p.fused_bias.to(device)
        biases = [b.to(device) for b in p.part_biases] if p.part_biases else [None] * len(p.parts)
        layers = [(name, w.to(device), b) for (name, w), b in zip(p.parts, biases, strict=True)]
        states = _hidden_states([w for _, w, _ in layers], batches, seed)
        out, again = (torch.cat([F.linear(x, fused, bias) for x in states]) for _ in range(2))
        arithmetic = Arithmetic.of(fused.dtype, device.type, fused.shape[1], bias=bias is not None)
        hidden, tally, offset = torch.cat(states).double(), _Tally(), 0
        for name, w, b in layers:
            separate = torch.cat([F.linear(x, w, b) for x in states])
            for wanted in _references(hidden, w, b, arithmetic):
                start, stop = offset + wanted.start, offset + wanted.stop
                tally.add(Place(start, name), out[:, start:stop], separate[:, wanted.start : wanted.stop], wanted)
            offset += len(w)
        same, notes = same_bits(out, again), _notes(fused, batches)
        return tally.result(batches, total=sum(batches) * offset, deterministic=same, notes=notes)


def _hidden_states(weights: list[Tensor], batches: tuple[int, ...], seed: int) -> list[Tensor]:
    """[batch, in] in the weights' dtype, scaled so that no sum of |x||w| over a finite row overflows, or drowns."""
    peaks = torch.cat([_row_peaks(w) for w in weights]).double()
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
class _Reference:
    """What rows [start, stop) of one part give: reference, B and comparable, each [batch, stop - start]."""

    start: int
    stop: int
    values: Tensor
    limit: Tensor
    comparable: Tensor


def _references(x: Tensor, weight: Tensor, bias: Tensor | None, arithmetic: Arithmetic) -> Iterator[_Reference]:
    """The float64 reference of all x [batch, in], a few rows of the weight at a time."""
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    size = x.abs()
    small_x = torch.where(size < arithmetic.tiny, size, 0)
    for start in range(0, len(weight), step):
        w = weight[start : start + step].double()
        b = None if bias is None else bias[start : start + step].double()
        ref, w = F.linear(x, w, b), w.abs()
        magnitude = F.linear(size, w, None if b is None else b.abs())
        small_w, flushable = w < arithmetic.tiny, torch.zeros_like(ref)  # zeros too: they add 0
        if small_w.any():
            flushable += F.linear(size, torch.where(small_w, w, 0))
        if small_x.any():
            flushable += F.linear(small_x, w)
        yield _Reference(start, start + len(w), ref, *arithmetic.bound(ref, magnitude, flushable))


@dataclass(slots=True)
class _Tally:
    """What the chunks of one projection add up to."""

    compared: int = 0
    bitwise_equal: bool = True
    max_abs_diff: float = 0.0
    max_ulp: int = 0
    worst: float = 0.0
    ulps: list[int] = field(default_factory=lambda: [0] * len(_ULP_BUCKETS))
    first: Place | None = None

    def add(self, place: Place, fused: Tensor, separate: Tensor, wanted: _Reference) -> None:
        """Outputs [batch, rows] from `place` on, fused and separate, against their reference."""
        error = torch.maximum((fused - wanted.values).abs(), (separate - wanted.values).abs())  # NaN stays NaN
        wrong = wanted.comparable & ~(error <= wanted.limit)
        if self.first is None and wrong.any():
            self.first = replace(place, row=place.row + _first(wrong.any(dim=0)))
        one, two = fused[wanted.comparable], separate[wanted.comparable]
        if not len(one):
            return
        self.compared += len(one)
        self.bitwise_equal &= same_bits(one, two)
        self.worst = max(self.worst, _largest((error / wanted.limit)[wanted.comparable]))
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


def _notes(weight: Tensor, batches: tuple[int, ...]) -> tuple[str, ...]:
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
