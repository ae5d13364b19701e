"""How quantised Linear layers are stored, as data: per method, each tensor's form and how parts of it are joined. Pure.

The axis belongs to the tensor, not to the model: AWQ and GPTQ store qweight [in, out], everybody else [out, in].
Sources: the loaders of vLLM (`quantization/*.py`, parameter classes with input_dim, output_dim, packed_dim) and the formats'
own writers: AutoAWQ, GPTQModel, compressed-tensors, TensorRT Model Optimizer, the FP8 releases of DeepSeek and Qwen.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Literal

from fusecheck.errors import CheckpointError, UnsupportedCheckpoint
from fusecheck.mapping import PACKINGS


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


@dataclass(frozen=True, slots=True)
class Packing32:
    """What the shapes of one layer say of its packing; None where they say nothing."""

    bits: int | None = None
    group: int | None = None


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


_PARTS = {packing.fused: tuple(module for _, module in packing.parts) for packing in PACKINGS}
_GPTQ_ORDER = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What config.json (or hf_quant_config.json) declares. `method` "none": nothing, or the KV cache alone."""

    method: str
    bits: int | None = None
    group: int | None = None
    block: tuple[int, int] | None = None
    """(rows, columns) that share one scale."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: exact names, dotted parts, globs, `re:` patterns."""
    targets: tuple[str, ...] = ()
    """Modules that alone are quantised; empty for all."""
    varies: bool = False
    """Bits or groups may differ from layer to layer."""
    layout: str | None = None
    """GPTQ's `checkpoint_format`: gptq stores zero points less 1, gptq_v2 as they are."""

    def ignores(self, module: str) -> bool:
        """Whether the declaration leaves this module (full dotted name) unquantised."""
        if any(_matches(pattern, module) for pattern in self.ignored):
            return True
        return bool(self.targets) and not any(_matches(pattern, module) for pattern in self.targets)


NONE = Quantisation("none")

MODULES = "modules_in_block_to_quantize"
"""The key under which GPTQ lists what it quantised."""


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


def declared(config: Mapping[str, object], beside: Mapping[str, object] | None, *, file: str) -> Quantisation:
    """What the checkpoint declares; `beside` is hf_quant_config.json. UnsupportedCheckpoint for an unknown method."""
    inside = config.get("quantization_config")
    if inside is None:
        inside = config.get("compression_config")
    if config.get("quantization") is not None and inside is None:
        raise UnsupportedCheckpoint(
            "quantised MLX checkpoints (weight U32, scales, biases) have no fused form here",
            file=file,
            found="quantization",
        )
    own = _declaration(inside, file) if inside is not None else None
    other = _declaration(beside.get("quantization"), "hf_quant_config.json") if beside is not None else None
    if own is not None and other is not None and (own.method, set(own.ignored)) != (other.method, set(other.ignored)):
        raise CheckpointError(
            "hf_quant_config.json disagrees with quantization_config", file=file, found=own.method, wanted=other.method
        )
    return own or other or NONE


def gptq_modules(quantised: Mapping[int, tuple[str, ...]], prefix: str) -> list[list[str]]:
    """GPTQ's `modules_in_block_to_quantize`: one list of blocks for all layers, or full names where layers differ."""
    layers = {layer: _blocks(modules) for layer, modules in quantised.items()}
    first = next(iter(layers.values()), [])
    if all(blocks == first for blocks in layers.values()):
        return first
    return [
        [f"{prefix}layers.{layer}.{name}" for name in block] for layer, blocks in layers.items() for block in blocks
    ]


def _blocks(modules: tuple[str, ...]) -> list[list[str]]:
    """Split names in the order in which GPTQ quantises a block: inputs that are shared stand together."""
    split = {part for module in modules for part in _PARTS.get(module, (module,))}
    known = [[name for name in block if name in split] for block in _GPTQ_ORDER]
    rest = sorted(split - {name for block in _GPTQ_ORDER for name in block})
    return [block for block in known if block] + [[name] for name in rest]


def _declaration(value: object, file: str) -> Quantisation:
    if value is None:
        return NONE
    if not isinstance(value, dict):
        raise CheckpointError("the quantisation is declared by no object", file=file, found=type(value).__name__)
    method = _method(value)
    if method == "none":
        return NONE
    if method not in METHODS:
        raise UnsupportedCheckpoint("quantisation method is not supported", file=file, found=method)
    if method == "awq" and str(value.get("version", "gemm")).lower() != "gemm":
        raise UnsupportedCheckpoint(
            "AWQ layouts other than gemm are not supported", file=file, found=value.get("version")
        )
    layout = value.get("checkpoint_format", "gptq")
    if method == "gptq" and layout not in {"gptq", "gptq_v2"}:
        raise UnsupportedCheckpoint("GPTQ layout is not supported", file=file, found=layout)
    groups = value.get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    first = next((weight for weight in weights if isinstance(weight, dict)), {})
    return Quantisation(
        method=method,
        bits=_number(value.get("bits", first.get("num_bits"))),
        group=_number(value.get("group_size", first.get("group_size"))),
        block=_block(value.get("weight_block_size") or first.get("block_structure"), file),
        ignored=_ignored(value),
        targets=_targets(value, groups),
        varies=bool(value.get("dynamic")) or len(weights) > 1,
        layout=str(layout) if method == "gptq" else None,
    )


def _method(value: Mapping[str, object]) -> str:
    """The method's name; the KV cache alone counts as none."""
    method = value.get("quant_method")
    algorithm = value.get("quant_algo", ...)
    if method is not None and not isinstance(method, str):
        raise CheckpointError("quant_method is no name", found=type(method).__name__)
    if method in {None, "modelopt", "modelopt_fp4"} and algorithm is not ...:
        if algorithm is None:
            return "none"
        return "modelopt" if str(algorithm).upper() in {"FP8", "NVFP4"} else str(algorithm)
    if method == "compressed-tensors" and not value.get("config_groups", True) and value.get("kv_cache_scheme"):
        return "none"
    return str(method)


def _number(value: object) -> int | None:
    return value if type(value) is int else None


def _block(value: object, file: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    raise CheckpointError("weight_block_size is not two positive numbers", file=file, found=value)


def _ignored(value: Mapping[str, object]) -> tuple[str, ...]:
    found: list[str] = []
    for key in ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"):
        found += _strings(value.get(key))
    dynamic = value.get("dynamic")
    if isinstance(dynamic, dict):
        found += [f"re:{pattern[2:]}" for pattern in dynamic if isinstance(pattern, str) and pattern.startswith("-:")]
    return tuple(found)


def _targets(value: Mapping[str, object], groups: object) -> tuple[str, ...]:
    nested = value.get(MODULES)
    if isinstance(nested, list):
        return tuple(
            name for block in nested for name in (_strings(block) if isinstance(block, list) else _strings([block]))
        )
    found: list[str] = []
    for group in groups.values() if isinstance(groups, dict) else ():
        found += _strings(group.get("targets")) if isinstance(group, dict) else []
    return () if "Linear" in found else tuple(found)


def _strings(value: object) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        expression = pattern[3:]
        # a quantified group, or many quantifiers, may take exponential time on a hostile pattern
        if re.search(r"\)[*+{]", expression) or len(re.findall(r"[*+{]", expression)) > 6 or len(expression) > 1000:
            raise UnsupportedCheckpoint("an ignore pattern is too complex to be evaluated safely", found=pattern)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # sets that a later Python may read in another way
                return re.match(expression, module) is not None
        except (re.error, OverflowError, RecursionError) as error:
            raise CheckpointError(f"an ignore pattern is no regular expression: {error}", found=pattern) from None
    if any(character in pattern for character in "*?["):
        return fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."
