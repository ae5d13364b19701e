"""Stored quantised Linears -> the weights that they stand for, [rows, in_features]. Pure; the checks' own arithmetic.

Every element is one code, made a number, less one zero point, times one scale: no sum over elements, so nothing depends
on how many rows a tensor has, and the rows of a fused Linear come out as those of its parts, bit for bit. The result is
float32 (float64 where a scale is): every code of at most 8 bits, FP8 and E2M1 value, and every bf16, fp16 and FP8 scale is
exact in it, so there is one rounding, the product's (and one before it where two scales are joined). bf16 would round
different weights to one value and hide what the checks look for.

Element (r, i) of every format, with the writer or reader that fixes it:

- fp8 `weight_scale_inv`: weight * scale[r // b0, i // b1]; despite its name it multiplies, edge blocks are ragged
  (DeepSeek-V3 `inference/kernel.py`, `weight_dequant`; transformers `integrations/finegrained_fp8.py`).
- fp8, modelopt, compressed-tensors `weight_scale`: [], [1] per tensor, [rows, 1] per channel, [rows, groups] per group,
  [blocks, blocks] per block; it multiplies (compressed-tensors `quantization/lifecycle/forward.py`, `dequantize`).
- E2M1, two to a byte, the lower nibble first, 0 0.5 1 1.5 2 3 4 6 and a sign in bit 3 (compressed-tensors
  `compressors/nvfp4/helpers.py`; Model Optimizer `qtensor/nvfp4_tensor.py`). A second scale per tensor: modelopt's
  `weight_scale_2` multiplies the block's, compressed-tensors' `weight_global_scale` divides it.
- compressed-tensors `weight_packed` I32: a little-endian stream of `bits` per element along a row, each stored plus
  2^(bits-1); `weight_zero_point` packed likewise, along dim 0 (`compressors/pack_quantized/helpers.py`). (q - z) * scale.
  `weight_g_idx` sorts the columns into groups of equal size, -1 in it means unset (`lifecycle/forward_helpers.py`).
- AWQ gemm: nibble n of a word is column 8 w + (0, 2, 4, 6, 1, 3, 5, 7)[n], of qweight [in, out / 8] and qzeros alike
  (AutoAWQ `modules/linear/gemm.py`, `from_linear`). (q - z) * scale.
- GPTQ: the same stream of 2, 3, 4 or 8 bits, down the columns of qweight and along the rows of qzeros; `gptq` stores zero
  points less 1, `gptq_v2` as they are (AutoGPTQ `nn_modules/qlinear/qlinear_cuda.py`, `pack`; GPTQModel
  `utils/model.py`, `convert_gptq_v1_to_v2_format`). (q - z) * scales[g_idx[i]], without g_idx i // group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fusecheck.axes import Packing32, length, solve
from fusecheck.forms import METHODS, Axis
from fusecheck.quantisation import Quantisation

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, of the eight of one word, that each nibble holds, the lowest nibble first."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the sixteen codes."""

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_SCALES = ("weight_scale_inv", "weight_scale", "scales")
_GPTQ_BITS = (2, 3, 4, 8)
_CHUNK_ELEMENTS = 1 << 20  # rows are worked through in chunks, so that no temporary is of the weight's size


@dataclass(frozen=True, slots=True)
class NotRun:
    """Why a Linear cannot be dequantised: nothing is guessed."""

    reason: str


class _Unclear(Exception):
    """What NotRun will say; never leaves this module."""


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """One Linear as the checkpoint stores it: suffix -> tensor."""

    tensors: Mapping[str, Tensor]
    quantisation: Quantisation
    rows: int
    in_features: int

    @property
    def packing(self) -> Packing32:
        shapes = {suffix: tuple(tensor.shape) for suffix, tensor in self.tensors.items()}
        return solve(self.quantisation.method, shapes, self.rows, self.in_features)

    def need(self, suffix: str) -> Tensor:
        if suffix not in self.tensors:
            raise _Unclear(f"{suffix} is absent")
        return self.tensors[suffix]

    def bits(self, allowed: tuple[int, ...]) -> int:
        found = self.packing.bits
        if found not in allowed:
            raise _Unclear(f"{found} bits: how they are packed is not known")
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Codes:
    """[rows, in_features] of small numbers, or, with a table, of places in it."""

    values: Tensor
    table: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """Scales and zero points [a, b] in the working dtype; element (r, i) has those at (row_of[r], column_of[i])."""

    scale: Tensor
    zero: Tensor | None
    row_of: Tensor
    column_of: Tensor


def dequantise(
    tensors: Mapping[str, Tensor], quantisation: Quantisation, rows: int, in_features: int
) -> Tensor | NotRun:
    """The weight [rows, in_features] of one stored Linear (suffix -> tensor, on the CPU), float32 or float64.

    `quantisation` is what the checkpoint declares; bits and groups are taken from the shapes, as fusing takes them.
    """
    try:
        stored = _Stored(tensors, quantisation, rows, in_features)
        codes = _codes(stored)
        return _multiplied(codes, _grid(stored))
    except _Unclear as error:
        return NotRun(str(error))


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [n, w] -> uint8 [n, 32 w // bits]: each row a stream of bits, the lowest of the first word first."""
    stream, mask = words.flatten().view(torch.uint8).view(len(words), 4 * words.shape[1]), 2**bits - 1
    if 8 % bits == 0:
        return torch.stack([stream >> shift & mask for shift in range(0, 8, bits)], dim=-1).flatten(1)
    starts = torch.arange(words.shape[1] * 32 // bits) * bits
    low, shift = starts // 8, (starts % 8).short()
    high = (low + 1).clamp(max=max(0, stream.shape[1] - 1))  # the last element ends in the last byte
    found = torch.empty(len(words), len(starts), dtype=torch.uint8)
    for rows in _chunks(len(words), len(starts)):
        some = stream[rows]
        pair = some.index_select(1, low).short() | some.index_select(1, high).short() << 8
        found[rows] = (pair >> shift & mask).to(torch.uint8)
    return found


def _codes(stored: _Stored) -> _Codes:
    tensors, wanted = stored.tensors, (stored.rows, stored.in_features)
    if "qweight" in tensors:
        codes = _Codes(_awq(stored.need("qweight"), stored) if _is_awq(stored) else _gptq(stored))
    elif "weight_packed" in tensors and tensors["weight_packed"].dtype == torch.int32:
        codes = _Codes(unpack(tensors["weight_packed"], stored.bits(tuple(range(1, 9)))))
    else:
        weight = tensors["weight_packed"] if "weight_packed" in tensors else stored.need("weight")
        codes = _bytes(weight, stored)
    if tuple(codes.values.shape) != wanted:
        raise _Unclear(f"the codes are {list(codes.values.shape)}, wanted {list(wanted)}")
    shape = tensors.get("weight_shape")
    if shape is not None and shape.tolist() != list(wanted):
        raise _Unclear(f"weight_shape says {shape.tolist()}, wanted {list(wanted)}")
    return codes


def _is_awq(stored: _Stored) -> bool:
    return stored.quantisation.method == "awq"


def _awq(words: Tensor, stored: _Stored) -> Tensor:
    """[k, rows / 8] -> [rows, k]."""
    nibbles = unpack(words, stored.bits((4,)))
    at = torch.tensor([AWQ_ORDER.index(column) for column in range(8)])
    return nibbles.view(len(words), -1, 8).index_select(2, at).flatten(1).t()


def _gptq(stored: _Stored) -> Tensor:
    return unpack(stored.need("qweight").t(), stored.bits(_GPTQ_BITS))


def _bytes(weight: Tensor, stored: _Stored) -> _Codes:
    """FP8, INT8, or two E2M1 to a byte."""
    if weight.dtype in (*_FLOAT8, torch.int8):
        if not any(suffix in stored.tensors for suffix in _SCALES):
            raise _Unclear(f"{weight.dtype} without scales: its values are what the engine makes of them")
        return _Codes(weight)
    if weight.dtype != torch.uint8:
        raise _Unclear(f"{weight.dtype} is no quantised weight that is known")
    if weight.dim() != 2 or weight.shape[1] * 2 != stored.in_features:
        raise _Unclear(f"uint8 {list(weight.shape)} is not two E2M1 to a byte")
    return _Codes(torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1), torch.tensor(E2M1))


def _grid(stored: _Stored) -> _Grid:
    found = [suffix for suffix in _SCALES if suffix in stored.tensors]
    if len(found) != 1:
        raise _Unclear(f"scales: found {', '.join(found) or 'none'}, wanted exactly one of {', '.join(_SCALES)}")
    scale = stored.tensors[found[0]]
    if not scale.dtype.is_floating_point:
        raise _Unclear(f"{found[0]} is {scale.dtype}: what number that stands for is not stated")
    work = torch.float64 if torch.float64 in {t.dtype for t in stored.tensors.values()} else torch.float32
    if "qweight" in stored.tensors:
        zeros = _word_zeros(stored)
        return _checked(stored, scale.t().to(work), zeros.to(work), ("r", "i/g"))
    axes = _axes(stored, found[0], scale)
    wide = scale.to(work).reshape(scale.shape if scale.dim() == 2 else (1, 1))
    return _checked(stored, _with_global(stored, wide), _zeros(stored, wide), axes)


def _word_zeros(stored: _Stored) -> Tensor:
    """AWQ's and GPTQ's zero points [rows, groups]."""
    words = stored.need("qzeros")
    if _is_awq(stored):
        return _awq(words, stored)
    zeros = unpack(words, stored.bits(_GPTQ_BITS)).t()
    return zeros if stored.quantisation.layout == "gptq_v2" else zeros.short() + 1


def _zeros(stored: _Stored, scale: Tensor) -> Tensor | None:
    """What is taken from the codes: zero points, and the 2^(bits-1) that packing adds to codes and zero points alike."""
    packed = stored.tensors.get("weight_packed")
    words = packed is not None and packed.dtype == torch.int32
    offset = 2 ** (stored.bits(tuple(range(1, 9))) - 1) if words else 0
    zero = stored.tensors.get("weight_zero_point")
    if zero is None:
        return torch.full_like(scale, offset) if words else None
    if zero.shape == scale.shape:
        return zero.to(scale.dtype) + offset
    if not words or zero.dtype != torch.int32 or zero.dim() != 2:
        raise _Unclear(f"weight_zero_point {zero.dtype} {list(zero.shape)} does not fit scales {list(scale.shape)}")
    return unpack(zero.t(), stored.bits(tuple(range(1, 9)))).t().to(scale.dtype)


def _with_global(stored: _Stored, scale: Tensor) -> Tensor:
    """Block scales joined with the tensor's own: modelopt's multiplies, compressed-tensors' divides."""
    multiplier, divisor = (stored.tensors.get(f"weight_{name}") for name in ("scale_2", "global_scale"))
    kind = stored.tensors.get("weight_packed", stored.tensors.get("weight"))
    four_bits = kind is not None and kind.dtype == torch.uint8
    if (multiplier is None and divisor is None) == four_bits:
        raise _Unclear("E2M1 has a scale per tensor beside the block's, and nothing else has")
    if not four_bits:
        return scale
    both = [one for one in (multiplier, divisor) if one is not None]
    if len(both) == 2 or not both[0].dtype.is_floating_point or both[0].numel() != 1:
        raise _Unclear("the scale per tensor is not one floating-point number")
    own = both[0].reshape(1, 1).to(scale.dtype)
    return scale * own if divisor is None else scale / own


def _axes(stored: _Stored, suffix: str, scale: Tensor) -> tuple[Axis, ...]:
    """What the scale's dims count: the first form of this shape, as fusing chooses it."""
    quantisation = stored.quantisation
    for form in METHODS[quantisation.method].get(suffix, ()):
        sizes = (length(axis, stored.rows, stored.in_features, stored.packing, quantisation) for axis in form.axes)
        if tuple(sizes) == tuple(scale.shape):
            return form.axes
    raise _Unclear(f"{suffix} {list(scale.shape)} has no form of {quantisation.method}")


def _checked(stored: _Stored, scale: Tensor, zero: Tensor | None, axes: tuple[Axis, ...]) -> _Grid:
    if zero is not None and zero.shape != scale.shape:
        raise _Unclear(f"zero points {list(zero.shape)} do not fit scales {list(scale.shape)}")
    block = stored.quantisation.block or (1, 1)
    row_of, column_of = torch.arange(stored.rows), torch.arange(stored.in_features)
    by_row = {"r": row_of, "r/b": row_of // block[0]}
    columns = axes[1] if len(axes) == 2 else "1"
    if columns == "i/g":
        column_of = _groups(stored, scale.shape[1])
    else:
        column_of = column_of // block[1] if columns == "i/b" else torch.zeros_like(column_of)
    return _Grid(scale, zero, by_row.get(axes[0] if axes else "1", torch.zeros_like(row_of)), column_of)


def _groups(stored: _Stored, count: int) -> Tensor:
    """The group of each column: g_idx where it is stored, else groups one after another."""
    declared, in_features = stored.quantisation, stored.in_features
    packed = stored.tensors.get("weight_g_idx")
    index = stored.tensors.get("g_idx", packed)
    if index is not None and not (index is packed and bool((index == -1).any())):
        if index.shape != (in_features,) or int(index.min()) < 0 or int(index.max()) >= count:
            raise _Unclear(f"g_idx does not give each of {in_features} columns one of {count} groups")
        if index is packed and len(set(torch.bincount(index.long(), minlength=count).tolist())) > 1:
            raise _Unclear("weight_g_idx does not fill its groups evenly")
        return index.long()
    group = declared.group if declared.group and declared.group > 0 and not declared.varies else None
    if group is None or -(-in_features // group) != count:
        if in_features % count:
            raise _Unclear(f"{in_features} columns in {count} groups of a size that nobody declares")
        group = in_features // count
    return torch.arange(in_features) // group


def _multiplied(codes: _Codes, grid: _Grid) -> Tensor:
    work = grid.scale.dtype
    found = torch.empty(codes.values.shape, dtype=work)
    table = None if codes.table is None else codes.table.to(work)
    for rows in _chunks(*codes.values.shape):
        values = codes.values[rows]
        numbers = values.to(work) if table is None else table[values.int()]
        at = grid.row_of[rows]
        if grid.zero is not None:
            numbers = numbers - grid.zero[at].index_select(1, grid.column_of)
        torch.mul(numbers, grid.scale[at].index_select(1, grid.column_of), out=found[rows])
    return found


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    return (slice(start, start + step) for start in range(0, rows, step))
