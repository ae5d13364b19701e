"""How long each axis of a stored tensor is: from rows, in_features, bits, groups and blocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fusecheck.forms import Axis
from fusecheck.quantisation import Quantisation


@dataclass(frozen=True, slots=True)
class Packing32:
    """What the shapes of one layer say of its packing; None where they say nothing."""

    bits: int | None = None
    group: int | None = None


_BITS_FROM: Mapping[tuple[str, str], tuple[int, Literal["r", "i"]]] = {
    ("awq", "qweight"): (1, "r"),
    ("gptq", "qweight"): (0, "i"),
    ("compressed-tensors", "weight_packed"): (1, "i"),
}
"""Where bits can be read off: in a word-packed tensor, which dim is packed and what it packs."""

_GROUP_FROM: Mapping[tuple[str, str], int] = {
    ("awq", "scales"): 0,
    ("gptq", "scales"): 0,
    ("compressed-tensors", "weight_scale"): 1,
    ("modelopt", "weight_scale"): 1,
}
"""Where the group size can be read off: which dim counts groups of in_features."""


def solve(method: str, shapes: Mapping[str, tuple[int, ...]], rows: int, in_features: int) -> Packing32:
    """Bits and group size as the shapes of one stored Linear imply them."""
    bits = group = None
    for suffix, shape in shapes.items():
        packed = _BITS_FROM.get((method, suffix))
        if packed is not None and len(shape) == 2:
            whole = rows if packed[1] == "r" else in_features
            if whole and shape[packed[0]] * 32 % whole == 0 and shape[packed[0]] * 4 <= whole:
                bits = shape[packed[0]] * 32 // whole  # at most 8: bytes of two E2M1 are no words
        at = _GROUP_FROM.get((method, suffix))
        if at is not None and len(shape) == 2 and shape[at]:
            group = -(-in_features // shape[at])
    return Packing32(bits, group)


def length(axis: Axis, rows: int, in_features: int, packing: Packing32, quantisation: Quantisation) -> int | None:
    """Length of one axis, or None where it cannot be: rows that fill no whole words, a block size nobody declared."""
    whole = rows if axis.startswith("r") else in_features
    match axis.partition("/")[2]:
        case "":
            return int(axis) if axis.isdigit() else whole
        case "w":
            bits = packing.bits or quantisation.bits
            return whole * bits // 32 if bits and whole * bits % 32 == 0 else None
        case "2":
            return whole // 2 if whole % 2 == 0 else None
        case "b":
            block = quantisation.block
            return None if block is None else -(-whole // block[0 if axis.startswith("r") else 1])
        case _:
            group = packing.group or quantisation.group
            return -(-whole // group) if group and group > 0 else None
