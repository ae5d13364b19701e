"""How quantised Linear layers are stored, as data: per method, each tensor's form and how parts of it are joined. Pure.

The axis belongs to the tensor, not to the model: AWQ and GPTQ store qweight [in, out], everybody else [out, in].
Sources: the loaders of vLLM (`quantization/*.py`, parameter classes with input_dim, output_dim, packed_dim) and the formats'
own writers: AutoAWQ, GPTQModel, compressed-tensors, TensorRT Model Optimizer, the FP8 releases of DeepSeek and Qwen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Join(Enum):
    """How the parts' tensors become the fused one's."""

    ROWS = "rows"
    """One after another along dim 0; their bytes follow one another."""
    COLUMNS = "columns"
    """Side by side along dim 1."""
    ONCE = "once"
    """One copy, where all parts have the same bytes; else there is no lossless fused form."""
    STACK = "stack"
    """One after another, the whole then seen as one more dimension: all experts of an MLP."""
    SHAPE = "shape"
    """[rows of all parts, in_features], computed anew."""


Axis = Literal["r", "i", "r/w", "i/w", "i/2", "r/b", "i/b", "i/g", "1", "2"]
"""r rows (out_features), i in_features; per /w 32-bit word of `bits`, /2 byte of two, /b block, /g group."""


@dataclass(frozen=True, slots=True)
class Form:
    """One shape that a tensor may have, the dtypes it may have then, and how its parts join."""

    axes: tuple[Axis, ...]
    join: Join
    dtypes: frozenset[str]


FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
PLAIN = FLOATS | FLOAT8 | {"F6_E2M3", "F6_E3M2", "F4"}
"""dtypes that a weight may have without scales."""
_SCALES = FLOATS | FLOAT8 | {"F8_E8M0", "U8"}
_INTEGERS = frozenset({"I32", "I64", "I8", "U8"})

_BIAS = (Form(("r",), Join.ROWS, FLOATS),)
_SCALAR = (Form((), Join.ONCE, _SCALES), Form(("1",), Join.ONCE, _SCALES))
_SCALE = (
    Form(("r/b", "i/b"), Join.ROWS, _SCALES),
    Form(("r", "1"), Join.ROWS, _SCALES),
    Form(("r", "i/g"), Join.ROWS, _SCALES),
    *_SCALAR,
)

METHODS: Mapping[str, Mapping[str, tuple[Form, ...]]] = {
    "none": {"weight": (Form(("r", "i"), Join.ROWS, PLAIN),), "bias": (Form(("r",), Join.ROWS, PLAIN),)},
    "fp8": {
        "weight": (Form(("r", "i"), Join.ROWS, FLOAT8),),
        "weight_scale_inv": (Form(("r/b", "i/b"), Join.ROWS, _SCALES),),
        "weight_scale": _SCALE[1:2] + _SCALAR,
        "input_scale": _SCALAR,
        "bias": _BIAS,
    },
    "modelopt": {
        "weight": (Form(("r", "i"), Join.ROWS, FLOAT8), Form(("r", "i/2"), Join.ROWS, frozenset({"U8"}))),
        "weight_scale": _SCALE[1:],
        "weight_scale_2": _SCALAR,
        "input_scale": _SCALAR,
        "bias": _BIAS,
    },
    "compressed-tensors": {
        "weight": (Form(("r", "i"), Join.ROWS, FLOAT8 | {"I8"}),),
        "weight_packed": (
            Form(("r", "i/w"), Join.ROWS, frozenset({"I32"})),
            Form(("r", "i/2"), Join.ROWS, frozenset({"U8"})),
        ),
        "weight_scale": _SCALE,
        "weight_zero_point": (
            Form(("r/w", "i/g"), Join.ROWS, frozenset({"I32"})),
            Form(("r", "i/g"), Join.ROWS, _INTEGERS),
            Form(("r", "1"), Join.ROWS, _INTEGERS),
        ),
        "weight_shape": (Form(("2",), Join.SHAPE, frozenset({"I64", "I32"})),),
        "weight_g_idx": (Form(("i",), Join.ONCE, _INTEGERS),),
        "weight_global_scale": _SCALAR,
        "input_global_scale": _SCALAR,
        "input_scale": _SCALAR,
        "input_zero_point": (Form((), Join.ONCE, _INTEGERS), Form(("1",), Join.ONCE, _INTEGERS)),
        "bias": _BIAS,
    },
    "awq": {
        "qweight": (Form(("i", "r/w"), Join.COLUMNS, frozenset({"I32"})),),
        "qzeros": (Form(("i/g", "r/w"), Join.COLUMNS, frozenset({"I32"})),),
        "scales": (Form(("i/g", "r"), Join.COLUMNS, FLOATS),),
        "bias": _BIAS,
    },
    "gptq": {
        "qweight": (Form(("i/w", "r"), Join.COLUMNS, frozenset({"I32"})),),
        "qzeros": (Form(("i/g", "r/w"), Join.COLUMNS, frozenset({"I32"})),),
        "scales": (Form(("i/g", "r"), Join.COLUMNS, FLOATS),),
        "g_idx": (Form(("i",), Join.ONCE, frozenset({"I32"})),),
        "bias": _BIAS,
    },
}
"""method -> suffix -> the forms that a tensor of that suffix may have, most specific first."""

REQUIRED: Mapping[str, tuple[frozenset[str], ...]] = {
    "none": (),
    "fp8": (frozenset({"weight_scale_inv", "weight_scale"}),),
    "modelopt": (frozenset({"weight_scale"}),),
    "compressed-tensors": (frozenset({"weight_scale"}),),
    "awq": (frozenset({"qzeros"}), frozenset({"scales"})),
    "gptq": (frozenset({"qzeros"}), frozenset({"scales"})),
}
"""method -> what a stored Linear must have beside its weight, one of each set: engines start without it."""

WEIGHTS = ("weight", "qweight", "weight_packed")
"""Suffixes of which a stored Linear has exactly one."""
