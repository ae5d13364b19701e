"""The exact verdict: an output read as a server would, held against its source byte by byte, or against its manifest.

It shares the mapping table, the header reader and the readers of a folder with `fuse`, never the plan: where a split
tensor has to be is worked out here anew, from names and config.json alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from fusecheck import digest
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import ModelConfig
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.manifest import DroppedTensor, Manifest, PartEntry, TensorEntry
from fusecheck.mapping import (
    GATE_UP,
    NEVER_GROUPED_SUFFIXES,
    PREFIXES,
    QKV,
    SHARED_EXPERT,
    Packing,
    expert_packing,
    split_module,
)
from fusecheck.quantisation import METHODS, Join

BLOCK_BYTES = 1 << 20

OnBytes = Callable[[int], None]


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
    """Bytes of one tensor of OUT that have to equal one whole tensor of the source: `rows` runs, `stride` bytes apart."""

    out: TensorInfo
    start: int
    """Of the first run, absolute, in OUT's shard."""
    rows: int
    row_bytes: int
    stride: int
    source: TensorInfo | None
    """None where there are only digests, or bytes worked out anew, to compare with."""
    name: str
    """The source's tensor."""
    first_row: int = 0
    """Row of the fused tensor at which this part starts; 0 where it is cut by columns, or is no part."""
    wanted: bytes | None = None
    """What the bytes have to be, where no tensor of the source holds them."""

    @property
    def is_part(self) -> bool:
        """Whether this is one of several parts of a fused tensor."""
        return self.name != self.out.name

    @property
    def nbytes(self) -> int:
        """Bytes to compare."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Home:
    """Where a split tensor goes: the fused tensor's name, its part's number and shard_id, and all parts' names in order."""

    fused: str
    number: int
    siblings: tuple[str, ...]
    suffix: str
    packing: Packing


def home(name: str) -> Home | None:
    """The home of a split tensor, or None if it is no part of anything. By dotted component, never by substring."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(f"{prefix}layers.")), None)
    if prefix is None:
        return None
    layer, _, path = name.removeprefix(f"{prefix}layers.").partition(".")
    module, suffix = split_module(path)
    if suffix in NEVER_GROUPED_SUFFIXES or not suffix:
        return None
    scope = module.rpartition(".")[0]
    packing = {"self_attn": QKV, "mlp": GATE_UP, "mlp.shared_expert": SHARED_EXPERT}.get(scope)
    if packing is None and scope.startswith("mlp.experts."):
        packing = expert_packing(int(scope.rpartition(".")[2]))
    for number, (_, part) in enumerate(packing.parts if packing is not None else ()):
        if packing is not None and part == module:
            base = f"{prefix}layers.{layer}."
            siblings = tuple(f"{base}{other}.{suffix}" for _, other in packing.parts)
            return Home(f"{base}{packing.fused}.{suffix}", number, siblings, suffix, packing)
    return None


def join_of(method: str, suffix: str, rank: int) -> Join | None:
    """How tensors of this suffix and rank are joined, by the table of forms; None where the table has none."""
    forms = METHODS["none" if suffix in {"weight", "bias"} else method].get(suffix, ())
    return next((form.join for form in forms if len(form.axes) == rank), None)


def pair(
    out: Mapping[str, TensorInfo],
    source: Mapping[str, TensorInfo],
    config: ModelConfig,
    dropped: Mapping[str, DroppedTensor],
) -> tuple[list[Slice], list[Finding]]:
    """Find each source tensor's place in OUT. Findings: missing, of another form, or from nowhere."""
    slices: list[Slice] = []
    findings: list[Finding] = []
    filled: set[str] = set()
    for name, tensor in source.items():
        place = home(name)
        if name in out:
            filled.add(name)
            findings += _whole(out[name], tensor, slices)
        elif place is not None and place.fused in out:
            if place.fused not in filled:
                filled.add(place.fused)
                findings += _parts(out[place.fused], place, source, config, slices)
        elif name in dropped and dropped[name].same_as in out:
            findings += _whole(out[dropped[name].same_as], tensor, slices)
        else:
            wanted = f" (nor the fused {place.fused})" if place else ""
            findings.append(Finding(f"is missing from OUT{wanted}", tensor.shard, name))
    findings += [
        Finding("is in OUT, but nothing in the source belongs there", tensor.shard, name)
        for name, tensor in out.items()
        if name not in filled
    ]
    return slices, findings


def _whole(out: TensorInfo, source: TensorInfo, slices: list[Slice]) -> Iterator[Finding]:
    if (out.dtype, out.shape) != (source.dtype, source.shape):
        yield Finding(f"is {out.form}, the source has {source.form}", out.shard, out.name)
    else:
        slices.append(_range(out, source, source.name))


def _range(out: TensorInfo, source: TensorInfo | None, name: str) -> Slice:
    return Slice(out, out.start, 1, out.nbytes, out.nbytes, source, name)


def _parts(
    out: TensorInfo, place: Home, source: Mapping[str, TensorInfo], config: ModelConfig, slices: list[Slice]
) -> Iterator[Finding]:
    """Every part of one fused tensor, in the packing's order."""
    parts = [source[name] for name in place.siblings if name in source]
    if len(parts) != len(place.siblings):
        absent = next(name for name in place.siblings if name not in source)
        yield Finding("is fused in OUT, but the source lacks a part of it", out.shard, out.name, absent)
        return
    join = join_of(config.quantisation.method, place.suffix, len(parts[0].shape))
    wanted = _wanted_shape(join, parts, place, config)
    if join is None or out.dtype != parts[0].dtype or out.shape != wanted:
        forms = ", ".join(f"{part.name.rpartition('.')[0].rpartition('.')[2]} {part.form}" for part in parts)
        shape = list(wanted) if wanted is not None else "no joined form"
        yield Finding(f"is {out.form}, wanted {parts[0].dtype} {shape}, joined from {forms}", out.shard, out.name)
        return
    if join is Join.SHAPE:
        code = {8: "<2q", 4: "<2i"}[out.nbytes // 2]
        total = sum(rows.shard_size for rows in config.rows(place.packing))
        data = struct.pack(code, total, config.hidden_size)
        slices.append(Slice(out, out.start, 1, out.nbytes, out.nbytes, None, out.name, wanted=data))
        return
    at = 0
    for part in parts:
        cut = _cut(out, join, at, part.shape, part, part.name)
        if cut is None:
            yield Finding("has rows that are no whole bytes", out.shard, out.name, part.name)
            return
        slices.append(cut)
        at += 0 if join is Join.ONCE else part.shape[0 if join is Join.ROWS else 1]


def _wanted_shape(
    join: Join | None, parts: list[TensorInfo], place: Home, config: ModelConfig
) -> tuple[int, ...] | None:
    """Shape of the fused tensor, or None where the parts do not fit each other or the config."""
    first = parts[0]
    axis = {Join.ROWS: 0, Join.COLUMNS: 1}.get(join) if join is not None else None
    if any(part.dtype != first.dtype or len(part.shape) != len(first.shape) for part in parts):
        return None
    if axis is None:
        return first.shape if all(part.shape == first.shape for part in parts) else None
    others = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}
    sizes = [part.shape[axis] for part in parts]
    if place.suffix in {"weight", "bias"} and sizes != [rows.shard_size for rows in config.rows(place.packing)]:
        return None
    return (*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :]) if len(others) == 1 else None


def _cut(
    out: TensorInfo, join: Join, at: int, shape: tuple[int, ...], source: TensorInfo | None, name: str
) -> Slice | None:
    """The slice of `out` that a part of `shape` fills from `at` on; None where its edges are no whole bytes."""
    if join is Join.ONCE:
        return _range(out, source, name)
    if join is Join.ROWS:
        row_bytes = tensor_bytes(out.dtype, out.shape[1:])
        if row_bytes is None or (at + shape[0]) * row_bytes > out.nbytes:
            return None
        size = shape[0] * row_bytes
        return Slice(out, out.start + at * row_bytes, 1, size, size, source, name, at)
    offset, width = tensor_bytes(out.dtype, (at,)), tensor_bytes(out.dtype, shape[1:])
    stride = tensor_bytes(out.dtype, out.shape[1:])
    if offset is None or width is None or stride is None or offset + width > stride:
        return None
    return Slice(out, out.start + offset, out.shape[0], width, stride, source, name)


def slices_by_manifest(out: Mapping[str, TensorInfo], manifest: Manifest) -> tuple[list[Slice], list[Finding]]:
    """The slices that the manifest names, where there is no source to ask."""
    slices: list[Slice] = []
    findings: list[Finding] = []
    for name, entry in manifest.tensors.items():
        tensor = out.get(name)
        if tensor is None:
            findings.append(Finding("is in the manifest but not in OUT", None, name))
        elif not entry.parts:
            slices.append(_range(tensor, None, name))
        elif entry.join == Join.SHAPE.value:
            slices.append(replace(_range(tensor, None, name), wanted=_summed(entry, tensor)))
        else:
            for part in entry.parts:
                cut = _part_of(tensor, entry, part)
                if cut is None:
                    findings.append(Finding("the manifest gives rows beyond its end", tensor.shard, name, part.name))
                else:
                    slices.append(cut)
    findings += [
        Finding("is in OUT but not in the manifest", tensor.shard, name)
        for name, tensor in out.items()
        if name not in manifest.tensors
    ]
    return slices, findings


def _part_of(tensor: TensorInfo, entry: TensorEntry, part: PartEntry) -> Slice | None:
    join = Join(entry.join)
    axis = {Join.ROWS: 0, Join.COLUMNS: 1}.get(join)
    if axis is not None and len(tensor.shape) <= axis:
        return None
    shape = tensor.shape if axis is None else (*tensor.shape[:axis], part.shard_size, *tensor.shape[axis + 1 :])
    return _cut(tensor, join, part.shard_offset, shape, None, part.name)


def _summed(entry: TensorEntry, tensor: TensorInfo) -> bytes:
    """[rows of all parts, in_features] from the parts' own weight_shape; empty, so never equal, where there is none."""
    code = {8: "<2q", 4: "<2i"}.get(tensor.nbytes // 2)
    datas = [bytes.fromhex(part.data or "") for part in entry.parts]
    if code is None or any(len(data) != tensor.nbytes for data in datas):
        return b""
    pairs = [struct.unpack(code, data) for data in datas]
    total = sum(rows for rows, _ in pairs)
    return struct.pack(code, total, pairs[0][1]) if 0 <= total < 2**31 else b""


def _gathered(reader: Checkpoint, part: Slice, row: int, count: int) -> bytearray:
    """`count` runs of a slice, one after another, by one read."""
    span = bytearray((count - 1) * part.stride + part.row_bytes)
    reader.files.read_into(part.out.shard, part.start + row * part.stride, memoryview(span))
    if part.stride == part.row_bytes or count == 1:
        return span
    joined = bytearray(count * part.row_bytes)
    for number in range(count):
        joined[number * part.row_bytes : (number + 1) * part.row_bytes] = span[
            number * part.stride : number * part.stride + part.row_bytes
        ]
    return joined


def compare(
    part: Slice, out: Checkpoint, source: Checkpoint | None, *, hashed: bool, on_bytes: OnBytes
) -> tuple[Finding | None, str | None]:
    """Compare one slice byte for byte with its source, in blocks, and digest OUT's bytes on the way.

    Returns the first difference, if any, and the BLAKE3 of OUT's bytes, if `hashed`.
    """
    state = digest.hasher() if hashed else None
    finding = None
    for at, ours in _blocks(part, out):
        if finding is None:
            theirs = _theirs(part, source, at, len(ours))
            if theirs is not None and ours != theirs:
                finding = _difference(part, at + _first_difference(ours, theirs))
        if state is not None:
            state.update(ours)
        elif finding is not None:
            break
        on_bytes(len(ours))
    return finding, state.hexdigest() if state is not None else None


def _blocks(part: Slice, out: Checkpoint) -> Iterator[tuple[int, bytearray]]:
    """(offset in the part, bytes) of a slice, about a MiB at a time."""
    if part.rows == 1:
        for at in range(0, part.row_bytes, BLOCK_BYTES):
            block = bytearray(min(BLOCK_BYTES, part.row_bytes - at))
            out.files.read_into(part.out.shard, part.start + at, memoryview(block))
            yield at, block
        return
    batch = max(1, BLOCK_BYTES // part.stride)
    for row in range(0, part.rows, batch):
        yield row * part.row_bytes, _gathered(out, part, row, min(batch, part.rows - row))


def _theirs(part: Slice, source: Checkpoint | None, at: int, size: int) -> bytearray | None:
    if part.wanted is not None:
        return bytearray(part.wanted[at : at + size])
    if source is None or part.source is None:
        return None
    theirs = bytearray(size)
    source.files.read_into(part.source.shard, part.source.start + at, memoryview(theirs))
    return theirs


def _first_difference(ours: bytearray, theirs: bytearray) -> int:
    low, high = 0, len(ours)
    while high - low > 1:
        middle = (low + high) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _difference(part: Slice, offset: int) -> Finding:
    """Name the first differing byte by tensor, part and row."""
    tensor = part.out
    row_bytes = (
        part.row_bytes if part.rows > 1 else tensor_bytes(tensor.dtype, tensor.shape[1:]) if tensor.shape else None
    )
    part_row = offset // row_bytes if row_bytes else None
    within = (
        offset if part.rows == 1 else part_row * part.stride + offset % part.row_bytes if part_row is not None else 0
    )
    return Finding(
        "differs from the source" if part.wanted is None else "is not the shape of the fused weight",
        tensor.shard,
        tensor.name,
        part.name if part.is_part else None,
        part.first_row + part_row if part_row is not None else None,
        part_row,
        part.start - tensor.start + within,
    )
