"""What a checkpoint declares of its quantisation, in config.json or hf_quant_config.json. Pure."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property

from fusecheck.errors import CheckpointError, UnsupportedCheckpoint
from fusecheck.forms import METHODS
from fusecheck.mapping import PACKINGS

_PARTS = {packing.fused: tuple(module for _, module in packing.parts) for packing in PACKINGS}
_GPTQ_ORDER = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


class Patterns:
    """Exact names, dotted parts, globs and `re:` patterns, read once: a large model asks for each of its modules."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._names = _names(patterns)
        self._wild = [_compiled(pattern) for pattern in patterns if _is_wild(pattern)]

    def match(self, module: str) -> bool:
        """Whether any pattern names this module (full dotted name). A plain name may stand anywhere between dots."""
        pieces = module.split(".")
        for stop, last in enumerate(pieces, start=1):
            for count, names in self._names.get(last, {}).items():
                if count <= stop and ".".join(pieces[stop - count : stop]) in names:
                    return True
        return any(pattern.match(module) for pattern in self._wild)


@dataclass(frozen=True)
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
        if self._ignored.match(module):
            return True
        return bool(self.targets) and not self._targets.match(module)

    @cached_property
    def _ignored(self) -> Patterns:
        return Patterns(self.ignored)

    @cached_property
    def _targets(self) -> Patterns:
        return Patterns(self.targets)


NONE = Quantisation("none")

MODULES = "modules_in_block_to_quantize"
"""The key under which GPTQ lists what it quantised."""


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


def _names(patterns: tuple[str, ...]) -> dict[str, dict[int, set[str]]]:
    """The patterns that are plain dotted names, by their last component and number of components."""
    found: dict[str, dict[int, set[str]]] = {}
    for pattern in patterns:
        if not _is_wild(pattern):
            pieces = pattern.split(".")
            found.setdefault(pieces[-1], {}).setdefault(len(pieces), set()).add(pattern)
    return found


def _is_wild(pattern: str) -> bool:
    return pattern.startswith("re:") or any(character in pattern for character in "*?[")


def _compiled(pattern: str) -> re.Pattern[str]:
    """A `re:` pattern or a glob."""
    if not pattern.startswith("re:"):
        return re.compile(translate(pattern))
    expression = pattern[3:]
    # a quantified group, or many quantifiers, may take exponential time on a hostile pattern
    if re.search(r"\)[*+{]", expression) or len(re.findall(r"[*+{]", expression)) > 6 or len(expression) > 1000:
        raise UnsupportedCheckpoint("an ignore pattern is too complex to be evaluated safely", found=pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sets that a later Python may read in another way
            return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"an ignore pattern is no regular expression: {error}", found=pattern) from None
