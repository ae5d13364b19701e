"""A row-parallel Linear (o_proj, down_proj) cut for ranks: what a device makes of each rank, and of their sum.

Rank r holds columns of the weight and reads the same features of x, so its output is a summand of the layer's, and an
all-reduce adds them up in the output's dtype. Verdicts are values; only a device that is absent or fails raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812  # the field's name for it
from torch import Tensor

from fusecheck.bounds import Arithmetic, same_bits
from fusecheck.device import pinned
from fusecheck.numeric import Projection, probe, unfit
from fusecheck.tally import Tally, Wanted, hidden_states, notes_on, terms_of, usual_batches
from fusecheck.verdicts import NumericResult, Place, ProbeResult


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One rank's weight [out, in / T] and bias, and its one part: columns [start, ...) of the source's whole weight."""

    rank: int
    start: int
    projection: Projection

    @property
    def stop(self) -> int:
        """End of its columns."""
        return self.start + int(self.projection.parts[0][1].shape[1])


def probe_ranks(pieces: Iterable[Piece], device: torch.device) -> ProbeResult:
    """`probe` of every rank: F.linear(I, W_r) must be the source's columns of rank r. Counts are those of all together."""
    found = [_named(piece, probe(piece.projection, device)) for piece in pieces]
    if not found:
        return ProbeResult("not run", "no rank is here")
    return replace(
        min(found, key=lambda result: ("fail", "not run", "pass").index(result.verdict)),
        compared=sum(result.compared for result in found),
        total=sum(result.total for result in found),
        non_finite=sum(result.non_finite for result in found),
        flushed=sum(result.flushed for result in found),
    )


def _named(piece: Piece, result: ProbeResult) -> ProbeResult:
    """Says which rank it is of, and counts columns as the whole weight does."""
    place = result.first_difference
    if place is not None:
        place = replace(place, part=f"rank {piece.rank}", column=piece.start + (place.column or 0))
    reason = f"rank {piece.rank}: {result.reason}" if result.reason else ""
    return replace(result, reason=reason, first_difference=place)


def numeric_sum(
    whole: Tensor,
    bias: Tensor | None,
    pieces: Sequence[Piece],
    device: torch.device,
    seed: int,
    *,
    batches: tuple[int, ...] | None = None,
) -> NumericResult:
    """The sum over all ranks of F.linear(x[:, columns of r], W_r) against the float64 reference of the whole product.

    `whole` [out, in] and `bias` [out] are the source's. The bias is added once, by rank 0. Pass: every comparable output
    lies within `Arithmetic.bound_of_sum` of the reference, and F.linear(x, whole) within `Arithmetic.bound`. `pieces` are
    all ranks in order; hidden states and what is reported but not judged are as in `numeric`.
    """
    if gap := _gap(whole, pieces):
        return NumericResult("fail", gap)
    for piece in pieces:
        if why := unfit(piece.projection):
            return NumericResult(why[0], f"rank {piece.rank}: {why[1]}")
    batches = batches or usual_batches(device)
    with pinned(device):
        w, b = whole.to(device), None if bias is None else bias.to(device)
        states = hidden_states([w], batches, seed)
        separate = torch.cat([F.linear(x, w, b) for x in states])
        out, again = (torch.cat(_summed(states, pieces)) for _ in range(2))
        tally, name = Tally(), f"sum of {len(pieces)} rank{'s' if len(pieces) > 1 else ''}"
        for start, stop, wanted in _wanted(torch.cat(states).double(), w, b, pieces):
            tally.add(Place(start, name), out[:, start:stop], separate[:, start:stop], wanted)
        same, notes = same_bits(out, again), notes_on(pieces[0].projection.fused.to(device), batches)
        return tally.result(batches, total=sum(batches) * len(w), deterministic=same, notes=notes)


def _gap(whole: Tensor, pieces: Sequence[Piece]) -> str:
    """Why the pieces' columns are not the whole's, or nothing."""
    ends = [0, *(piece.stop for piece in pieces)]
    if [piece.start for piece in pieces] != ends[:-1] or ends[-1] != whole.shape[1]:
        return f"the ranks' columns do not follow one another up to {whole.shape[1]}: {ends}"
    return ""


def _summed(states: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """Per batch the ranks' outputs, each rounded to the dtype, added one after another in that dtype."""
    sums: list[Tensor] = []
    for piece in pieces:
        like = states[0]
        weight, bias = piece.projection.fused.to(like.device), piece.projection.fused_bias
        own = None if bias is None else bias.to(like.device)
        outputs = [F.linear(x[:, piece.start : piece.stop].contiguous(), weight, own) for x in states]
        sums = [a + b for a, b in zip(sums, outputs, strict=True)] if sums else outputs
    return sums


def _wanted(
    x: Tensor, whole: Tensor, bias: Tensor | None, pieces: Sequence[Piece]
) -> Iterator[tuple[int, int, Wanted]]:
    """Rows [start, stop) and what they are held to; the reference is the sum of the ranks' references."""
    kind = whole.device.type
    full = Arithmetic.of(whole.dtype, kind, whole.shape[1], bias=bias is not None)
    biases = [bias if number == 0 else None for number in range(len(pieces))]
    own = [
        Arithmetic.of(whole.dtype, kind, piece.stop - piece.start, bias=b is not None)
        for piece, b in zip(pieces, biases, strict=True)
    ]
    chunks = [
        terms_of(x[:, piece.start : piece.stop], whole[:, piece.start : piece.stop], b, full.tiny)
        for piece, b in zip(pieces, biases, strict=True)
    ]
    for found in zip(*chunks, strict=True):
        bounds = [a.bound(t.ref, t.magnitude, t.flushable) for a, t in zip(own, found, strict=True)]
        limit, comparable = full.bound_of_sum([t.ref for t in found], [limit for limit, _ in bounds])
        ref, magnitude, flushable = (
            torch.stack(values).sum(dim=0)
            for values in zip(*((t.ref, t.magnitude, t.flushable) for t in found), strict=True)
        )
        separate_limit, separate_comparable = full.bound(ref, magnitude, flushable)
        for each in (separate_comparable, *(each for _, each in bounds)):
            comparable = comparable & each
        yield found[0].start, found[0].stop, Wanted(ref, limit, separate_limit, comparable)
