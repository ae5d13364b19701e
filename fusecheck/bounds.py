"""How far floating-point results may lie from the truth, and from each other: bounds, bits and ULPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes that F.linear multiplies; of others the verdicts are "not run"."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What is known of a GEMM y = sum_k x_k w_k (+ b): enough to bound its error, too little to predict its bits.

    `terms` n, `unit` u of the accumulator, `tiny` its smallest normal number, `largest` its largest finite one; for the
    output `half_ulp` u_out, `floor` t, `ceiling` its largest finite number; `slack` a factor on B.
    """

    terms: int
    unit: float
    tiny: float
    largest: float
    half_ulp: float
    floor: float
    ceiling: float
    slack: float

    @staticmethod
    def of(dtype: torch.dtype, kind: str, in_features: int, *, bias: bool) -> Arithmetic:
        """Arithmetic of F.linear for weights of `dtype` (one of DTYPES) on a device of `kind` cpu or cuda."""
        out = torch.finfo(dtype)
        double = dtype == torch.float64
        inner = torch.finfo(torch.float64 if double else torch.float32)
        tensor_cores = kind == "cuda" and dtype in {torch.bfloat16, torch.float16}
        return Arithmetic(
            terms=in_features + bias + (-(-in_features // 4) + 8 if tensor_cores else 0),
            unit=inner.eps if tensor_cores else inner.eps / 2,
            tiny=inner.tiny,
            largest=inner.max,
            half_ulp=out.eps / 2,
            floor=2.0**-25 if dtype == torch.float16 else inner.tiny,
            ceiling=out.max,
            slack=2.0 if double else 1.0,
        )

    def bound(self, ref: Tensor, magnitude: Tensor, flushable: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, comparable), both shaped as ref: |output - ref| <= B wherever comparable.

        float64 in: ref = sum x w + b; magnitude S = sum |x||w| + |b|; flushable D = sum of |x||w| over the terms with
        a factor below `tiny`, which a kernel may take for 0.

        - Any order of n products and additions, each with relative error at most u, errs by gamma_n(u) S at most,
          gamma_n(u) = n u / (1 - n u): Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1.
        - Each of the 2 n operations may underflow, gradually or to 0: 2 n tiny more (ibid., section 2.8, where gradual
          underflow alone errs by less), and D for factors taken for 0.
        - The reference is such a sum too, in float64: n 2^-52 S.
          Together A = gamma_n(u) S + n 2^-52 S + 2 n tiny + D.
        - Rounding to the output errs by u_out (|ref| + A), or by t where the output is subnormal or flushed.
          B = A + u_out (|ref| + A) + t.
        - Tensor cores truncate (u = 2^-23) and align a block of products to the largest before adding, as if each
          block of 4 had one more term: n = K + ceil(K/4) + 8. Fasi, Higham, Mikaitis, Pranesh, Numerical behavior of
          NVIDIA tensor cores, PeerJ Computer Science 7:e330 (2021).
        - Of float64 weights the reference is no better than the output: B is doubled.

        Nothing overflows on the way while S + A <= largest, nor at the end while |ref| + B <= ceiling: comparable. A
        non-finite weight makes S non-finite, so its outputs are not.
        """
        n = self.terms
        gamma = n * self.unit / (1 - n * self.unit) if n * self.unit < 1 else float("inf")
        size = ref.abs()
        error = (gamma + n * 2.0**-52) * magnitude + 2 * n * self.tiny + flushable
        limit = self.slack * (error + self.half_ulp * (size + error) + self.floor)
        return limit, (magnitude + error <= self.largest) & (size + limit <= self.ceiling)

    def bound_of_sum(self, refs: Sequence[Tensor], limits: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return (B_T, comparable) for the sum of T partial outputs in the output's dtype, as an all-reduce adds them.

        Partial r lies within limits[r] = B_r of refs[r] = ref_r, its own `bound`, where it is comparable; the sum is
        held to ref = sum ref_r, all shaped alike. Comparable is what this step adds to that of every partial.

        - So |sum y_r - ref| <= sum B_r before anything is rounded, and sum |y_r| <= M = sum (|ref_r| + B_r).
        - T - 1 additions in any order, each with relative error at most u_out, err by gamma_(T-1)(u_out) sum |y_r| at
          most: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2, (4.4). Two roundings,
          to fp32 and then to bf16 or fp16, are no worse than u_out: to nearest the first errs by 2^-24 and the second
          by u_out / (1 + u_out) (Jeannerod, Rump, Math. Comp. 87 (2018), p. 803), which leaves u_out^2 > 2^-24 room.
        - Additions underflow without error if gradually (Higham, section 2.8), but two operands and the result of each
          may be taken for 0: 3 (T-1) t more, which the roundings after it enlarge by 1 + gamma.
        - ref is one order of the float64 sum of all n terms, of which `bound` allows for all but its last T - 1
          additions: (T-1) 2^-52 M.

          B_T = sum B_r + (gamma_(T-1)(u_out) + (T-1) 2^-52) M + 3 (T-1) t (1 + gamma_(T-1)(u_out)); of T = 1, B.

        No sum of some of the partials overflows while M + B_T <= ceiling.
        """
        steps = len(refs) - 1
        gamma = steps * self.half_ulp / (1 - steps * self.half_ulp) if steps * self.half_ulp < 1 else float("inf")
        limit = torch.stack(list(limits)).sum(dim=0)
        size = torch.stack([ref.abs() for ref in refs]).sum(dim=0) + limit
        if steps:
            limit = limit + (gamma + steps * 2.0**-52) * size + 3 * steps * self.floor * (1 + gamma)
        return limit, size + limit <= self.ceiling


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals itself and -0.0 differs from +0.0."""
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """How many floating-point numbers lie between a and b, as int64 of their shape; -0.0 and +0.0 are one number.

    Saturates at 2^63 - 1 (float64 of opposite signs only).
    """
    one, two = (_ordered(bits(t)) for t in (a, b))
    far = ((one >> 1) - (two >> 1)).abs() >= 2**62 - 1
    return torch.where(far, 2**63 - 1, (one - two).abs())


def _ordered(integers: Tensor) -> Tensor:
    """Sign and magnitude as two's complement, so that neighbouring floats are neighbouring integers."""
    lowest = torch.iinfo(integers.dtype).min
    wide = integers.long()
    return torch.where(wide < 0, lowest - wide, wide)
