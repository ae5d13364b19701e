"""The exact verdict: which bytes of OUT have to be which of its source. Pure; `compare` then reads them.

It shares the mapping table, the header reader and the readers of a folder with `fuse`, never the plan: where a split
tensor has to be is worked out here anew, from names and config.json alone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fusecheck.config import ModelConfig
from fusecheck.forms import METHODS, Join
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.mapping import (
    GATE_UP,
    NEVER_GROUPED_SUFFIXES,
    PREFIXES,
    QKV,
    SHARED_EXPERT,
    Packing,
    expert_packing,
    split_module,
    stacked_packings,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect. `row` counts in the fused (or whole) tensor, `part_row` in the split one, `offset` bytes in its data."""

    problem: str
    file: str | None = None
    tensor: str | None = None
    part: str | None = None
    row: int | None = None
    part_row: int | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes of one tensor of OUT that have to equal bytes of one of the source: `rows` runs, `stride` bytes apart."""

    out: TensorInfo
    start: int
    """Of the first run, absolute, in OUT's shard."""
    rows: int
    row_bytes: int
    stride: int
    part: str | None = None
    """The split tensor's name, where `out` is a fused one."""
    first_row: int = 0
    """Row of the fused tensor at which this part starts; 0 where it is cut by columns, or is no part."""
    source: TensorInfo | None = None
    wanted: bytes | None = None
    """What the bytes have to be, where no tensor of the source holds them."""
    digest: str | None = None
    """BLAKE3 that the manifest gives them."""
    source_start: int = 0
    """Of the first run, in the data of `source`."""
    source_stride: int | None = None
    """Between runs there; None: they follow one another."""
    part_first_row: int = 0
    """Row of `source` at which this begins."""

    @property
    def nbytes(self) -> int:
        """Bytes to compare."""
        return self.rows * self.row_bytes

    @property
    def place(self) -> tuple[str, str | None, int, int, int]:
        """What makes two slices the same bytes."""
        return self.out.name, self.part, self.start, self.rows, self.row_bytes


@dataclass(frozen=True, slots=True)
class Home:
    """Where a split tensor goes: the fused tensor's name, and the names of all its parts in order."""

    fused: str
    siblings: tuple[str, ...]
    suffix: str
    packing: Packing


def home(name: str, stacks: Mapping[str, Packing] | None = None) -> Home | None:
    """The home of a split tensor, or None if it is no part of anything. By dotted component, never by substring.

    `stacks`, module path -> packing, makes it the home in a stack of all experts.
    """
    prefix = next((prefix for prefix in PREFIXES if name.startswith(f"{prefix}layers.")), None)
    if prefix is None:
        return None
    layer, _, path = name.removeprefix(f"{prefix}layers.").partition(".")
    module, suffix = split_module(path)
    packing = _packing_of(module) if stacks is None else stacks.get(module)
    if packing is None or suffix in NEVER_GROUPED_SUFFIXES or not suffix or (stacks is not None and suffix != "weight"):
        return None
    base = f"{prefix}layers.{layer}."
    siblings = tuple(f"{base}{other}.{suffix}" for _, other in packing.parts)
    return Home(f"{base}{packing.fused}{'' if stacks else f'.{suffix}'}", siblings, suffix, packing)


def stacks_of(config: ModelConfig) -> dict[str, Packing]:
    """Module path of every expert's projection -> the stack that it may stand in."""
    return {module: packing for packing in stacked_packings(config.num_experts) for _, module in packing.parts}


def _packing_of(module: str) -> Packing | None:
    scope = module.rpartition(".")[0]
    packing = {"self_attn": QKV, "mlp": GATE_UP, "mlp.shared_expert": SHARED_EXPERT}.get(scope)
    number = scope.removeprefix("mlp.experts.")
    if number != scope and number.isdecimal() and len(number) < 10:
        packing = expert_packing(int(number))
    return packing if packing is not None and any(part == module for _, part in packing.parts) else None


def join_of(method: str, suffix: str, rank: int) -> Join | None:
    """How tensors of this suffix and rank are joined, by the table of forms; None where the table has none."""
    forms = METHODS["none" if suffix in {"weight", "bias"} else method].get(suffix, ())
    return next((form.join for form in forms if len(form.axes) == rank), None)


def join_in(place: Home, config: ModelConfig, rank: int) -> Join | None:
    """How the parts that have this home are joined."""
    if place.packing.size.startswith("stacked"):
        return Join.STACK
    return join_of(config.quantisation.method, place.suffix, rank)


def pair(
    out: Mapping[str, TensorInfo], source: Mapping[str, TensorInfo], config: ModelConfig, same_as: Mapping[str, str]
) -> tuple[list[Slice], list[Finding]]:
    """Find each source tensor's place in OUT. Findings: missing, of another form, or from nowhere.

    `config` is the source's; `same_as` names, for a tensor that was dropped, the one whose bytes serve for both.
    """
    slices: list[Slice] = []
    findings: list[Finding] = []
    whole: set[str] = set()
    joined: set[str] = set()
    stacks = stacks_of(config) if any(name.endswith(".mlp.experts.gate_up_proj") for name in out) else {}
    within: set[str] = set()
    for name, tensor in source.items():
        if name in within:
            continue
        place = home(name)
        if stacks and (place is None or place.fused not in out):
            place = home(name, stacks) or place
        if name in out:
            whole.add(name)
            findings += _whole(out[name], tensor, slices)
            if place is not None and place.fused in out:
                findings.append(Finding(f"is in OUT twice, split and inside {place.fused}", out[name].shard, name))
        elif place is not None and place.fused in out:
            if place.fused not in joined:
                joined.add(place.fused)
                within |= set(place.siblings) if place.packing.size.startswith("stacked") else set()
                findings += _parts(out[place.fused], place, source, config, slices)
        elif same_as.get(name) in out:
            findings += _whole(out[same_as[name]], tensor, slices)
        else:
            wanted = f" (nor the fused {place.fused})" if place else ""
            findings.append(Finding(f"is missing from OUT{wanted}", tensor.shard, name))
    findings += [
        Finding("is in OUT, but nothing in the source belongs there", tensor.shard, name)
        for name, tensor in out.items()
        if name not in whole | joined
    ]
    return slices, findings


def _whole(out: TensorInfo, source: TensorInfo, slices: list[Slice]) -> Iterator[Finding]:
    if (out.dtype, out.shape) != (source.dtype, source.shape):
        yield Finding(f"is {out.form}, the source has {source.form}", out.shard, source.name)
    else:
        slices.append(span(out, source=source))


def span(
    out: TensorInfo,
    part: str | None = None,
    *,
    source: TensorInfo | None = None,
    wanted: bytes | None = None,
    digest: str | None = None,
) -> Slice:
    """The slice that is the whole of a tensor."""
    return Slice(out, out.start, 1, out.nbytes, out.nbytes, part, source=source, wanted=wanted, digest=digest)


def _parts(
    out: TensorInfo, place: Home, source: Mapping[str, TensorInfo], config: ModelConfig, slices: list[Slice]
) -> Iterator[Finding]:
    """Every part of one fused tensor, in the packing's order."""
    absent = [name for name in place.siblings if name not in source]
    if absent:
        yield Finding("is fused in OUT, but the source lacks a part of it", out.shard, out.name, absent[0])
        return
    parts = [source[name] for name in place.siblings]
    join = join_in(place, config, len(parts[0].shape))
    wanted = _wanted_shape(join, parts, place, config)
    if join is None or out.dtype != parts[0].dtype or out.shape != wanted:
        forms = ", ".join(f"{part.name.rpartition('.')[0].rpartition('.')[2]} {part.form}" for part in parts)
        shape = list(wanted) if wanted is not None else "no joined form"
        yield Finding(f"is {out.form}, wanted {parts[0].dtype} {shape}, joined from {forms}", out.shard, out.name)
    elif join is Join.SHAPE:
        total = sum(rows.shard_size for rows in config.rows(place.packing))
        slices.append(span(out, wanted=packed_shape(out, total, config.hidden_size)))
    else:
        at = 0
        for part in parts:
            size = part.shape[1 if join is Join.COLUMNS else 0] if join is not Join.ONCE else 0
            cut = cut_part(out, join, at, size, part.name, part)
            if cut is None:
                yield Finding("has parts that are no whole bytes", out.shard, out.name, part.name)
            else:
                slices.append(cut)
            at += size


def _wanted_shape(
    join: Join | None, parts: list[TensorInfo], place: Home, config: ModelConfig
) -> tuple[int, ...] | None:
    """Shape of the fused tensor, or None where the parts do not fit each other or the config."""
    first = parts[0]
    if any(part.dtype != first.dtype or len(part.shape) != len(first.shape) for part in parts):
        return None
    if join is Join.STACK:
        rules = config.rows(place.packing)
        shapes = [(rule.shard_size, config.stacked_shape(place.packing)[2]) for rule in rules]
        return config.stacked_shape(place.packing) if [part.shape for part in parts] == shapes else None
    axis = {Join.ROWS: 0, Join.COLUMNS: 1}.get(join) if join is not None else None
    if axis is None:
        return first.shape if all(part.shape == first.shape for part in parts) else None
    others = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}
    sizes = [part.shape[axis] for part in parts]
    if place.suffix in {"weight", "bias"} and sizes != [rows.shard_size for rows in config.rows(place.packing)]:
        return None
    return (*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :]) if len(others) == 1 else None


def packed_shape(out: TensorInfo, rows: int, columns: int) -> bytes:
    """The bytes of a weight_shape; empty, which nothing equals, where `out` cannot hold one."""
    code = {"I64": "<2q", "I32": "<2i"}.get(out.dtype)
    return struct.pack(code, rows, columns) if code is not None and max(rows, columns) < 2**31 else b""


def cut_part(
    out: TensorInfo, join: Join, at: int, size: int, part: str, source: TensorInfo | None = None
) -> Slice | None:
    """The slice of `out` that a part fills along the joined axis, from `at` on; None where it is no whole bytes of it."""
    if join is Join.ONCE:
        return span(out, part, source=source)
    axis = 1 if join is Join.COLUMNS else 0
    shape = (math.prod(out.shape[:-1]), *out.shape[-1:]) if join is Join.STACK else out.shape
    if len(shape) <= axis or at + size > shape[axis]:
        return None
    offset, length, stride = (
        tensor_bytes(out.dtype, (length, *shape[axis + 1 :])) for length in (at, size, shape[axis])
    )
    if offset is None or length is None or stride is None:
        return None
    rows = 1 if axis == 0 else out.shape[0]
    return Slice(out, out.start + offset, rows, length, stride, part, 0 if axis else at, source)
