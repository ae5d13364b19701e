"""What a device makes of a fused projection: two verdicts without and with arithmetic, `probe` and `numeric`.

Both run F.linear as an engine would, once on the fused weight and split at the offsets. They find wrong rows, wrong
offsets and broken kernels; that every bit is right is for the exact verdict to say. Verdicts are values. Only a device
that is absent or fails raises, `SystemFailure`. Beyond weights and outputs, memory is bounded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812  # the field's name for it
from torch import Tensor

from fusecheck.bounds import DTYPES, Arithmetic, same_bits
from fusecheck.device import pinned
from fusecheck.tally import Tally, Wanted, first_true, hidden_states, notes_on, row_peaks, terms_of, usual_batches
from fusecheck.verdicts import NumericResult, Place, ProbeResult, Verdict

_BLOCK_BYTES = 32 << 20  # one block of probe outputs
_PROBE_ROWS = 256  # more are no faster on any CPU tried


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A fused tensor [sum of rows, in] and its parts [rows, in], in the fused order, on any device; biases or None."""

    name: str
    fused: Tensor
    parts: tuple[tuple[str, Tensor], ...]
    fused_bias: Tensor | None = None
    part_biases: tuple[Tensor, ...] | None = None


def unfit(p: Projection) -> tuple[Verdict, str] | None:
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
    if why := unfit(p):
        return ProbeResult(*why)
    with pinned(device):
        return _probe(p, device)


def _probe(p: Projection, device: torch.device) -> ProbeResult:
    fused = p.fused.to(device)
    rows, columns = fused.shape
    tiny = Arithmetic.of(fused.dtype, device.type, columns, bias=False).tiny
    finite = row_peaks(fused).isfinite()
    pieces, offset = [], 0
    for name, part in p.parts:
        weight, own = part.to(device), slice(offset, offset + part.shape[0])
        # finite on one side only is a difference
        pieces.append((name, weight, own, (finite[own] | row_peaks(weight).isfinite()).unsqueeze(1)))
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
                row = first_true(wrong.any(dim=1))
                place = Place(own.start + row, name, start + first_true(wrong[row]))
                first = place if first is None else min(first, place)
    total, compared = rows * columns, sum(int(comparable.sum()) for *_, comparable in pieces) * columns
    result = ProbeResult("pass", "", compared, total, total - compared, flushed, first)
    if first is not None:
        return replace(result, verdict="fail", reason="a product with the identity is not the weight")
    if compared == flushed:
        return replace(result, verdict="not run", reason="nothing comparable: no row is finite, or all is flushed to 0")
    return result


def _identity_rows(features: slice, columns: int, like: Tensor) -> Tensor:
    block = torch.zeros(features.stop - features.start, columns, dtype=like.dtype, device=like.device)
    block[:, features].fill_diagonal_(1)
    return block


def _below(weight: Tensor, tiny: float) -> Tensor:
    return (weight.abs() < tiny) & (weight != 0)


def numeric(p: Projection, device: torch.device, seed: int, *, batches: tuple[int, ...] | None = None) -> NumericResult:
    """Random hidden states through fused F.linear + split and through separate F.linear, both against float64.

    Pass: every comparable output of both lies within `Arithmetic.bound` of the reference, which is computed from the
    parts. Hidden states are normal, clamped to 4 and scaled by one power of two per projection, the same for the same
    `seed`; `batches` are their numbers of rows, by default 1 and 16, and 512 on CUDA. Whether fused and separate agree
    bit for bit is reported, not judged: another number of columns may well be another kernel. Batch sizes are never
    compared with each other.
    """
    if why := unfit(p):
        return NumericResult(*why)
    batches = batches or usual_batches(device)
    with pinned(device):
        fused, bias = p.fused.to(device), None if p.fused_bias is None else p.fused_bias.to(device)
        biases = [b.to(device) for b in p.part_biases] if p.part_biases else [None] * len(p.parts)
        layers = [(name, w.to(device), b) for (name, w), b in zip(p.parts, biases, strict=True)]
        states = hidden_states([w for _, w, _ in layers], batches, seed)
        out, again = (torch.cat([F.linear(x, fused, bias) for x in states]) for _ in range(2))
        arithmetic = Arithmetic.of(fused.dtype, device.type, fused.shape[1], bias=bias is not None)
        hidden, tally, offset = torch.cat(states).double(), Tally(), 0
        for name, w, b in layers:
            separate = torch.cat([F.linear(x, w, b) for x in states])
            for terms in terms_of(hidden, w, b, arithmetic.tiny):
                limit, comparable = arithmetic.bound(terms.ref, terms.magnitude, terms.flushable)
                wanted = Wanted(terms.ref, limit, limit, comparable)
                start, stop = offset + terms.start, offset + terms.stop
                tally.add(Place(start, name), out[:, start:stop], separate[:, terms.start : terms.stop], wanted)
            offset += len(w)
        same, notes = same_bits(out, again), notes_on(fused, batches)
        return tally.result(batches, total=sum(batches) * offset, deterministic=same, notes=notes)
