"""The exact verdict: an output read as a server would, held against its source byte by byte, or against its manifest.

It shares the mapping table, the header reader and the readers of a folder with `fuse`, never the plan: where a split
tensor has to be is worked out here anew, from names and config.json alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from fusecheck import digest
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import ModelConfig
from fusecheck.header import TensorInfo, tensor_bytes
from fusecheck.manifest import Manifest
from fusecheck.mapping import PACKINGS, PREFIXES, Packing, ShardRows

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
    """Bytes of one tensor of OUT that have to equal one whole tensor of the source."""

    out: TensorInfo
    start: int
    """Absolute, in OUT's shard."""
    stop: int
    source: TensorInfo | None
    """None where only the manifest's digest is there to compare with."""
    name: str
    """The source's tensor."""
    first_row: int
    """Row of the fused tensor at which this part starts; 0 where the tensor is no fused one."""

    @property
    def is_part(self) -> bool:
        """Whether this is one of several parts of a fused tensor."""
        return self.name != self.out.name


def home(name: str, suffixes: Iterable[str] = ("weight", "bias")) -> tuple[str, Packing, int] | None:
    """Where a split tensor goes: (name of the fused tensor, packing, which of its parts), or None if it is no part."""
    for prefix in PREFIXES:
        if name.startswith(f"{prefix}layers."):
            layer, _, path = name.removeprefix(f"{prefix}layers.").partition(".")
            for packing in PACKINGS:
                for number, (_, module) in enumerate(packing.parts):
                    for suffix in suffixes:
                        if path == f"{module}.{suffix}":
                            return f"{prefix}layers.{layer}.{packing.fused}.{suffix}", packing, number
    return None


def pair(
    out: Mapping[str, TensorInfo], source: Mapping[str, TensorInfo], config: ModelConfig
) -> tuple[list[Slice], list[Finding]]:
    """Find each source tensor's place in OUT. Findings: missing, of another form, or from nowhere."""
    slices: list[Slice] = []
    findings: list[Finding] = []
    filled: dict[str, list[ShardRows]] = {}
    for name, tensor in source.items():
        place = home(name)
        if name in out:
            filled[name] = []
            findings += _whole(out[name], tensor, slices)
        elif place is not None and place[0] in out:
            fused, packing, number = place
            rows = config.rows(packing)[number]
            filled.setdefault(fused, []).append(rows)
            findings += _part(out[fused], tensor, rows, config, packing, slices)
        else:
            wanted = f" (nor the fused {place[0]})" if place else ""
            findings.append(Finding(f"is missing from OUT{wanted}", tensor.shard, name))
    for name, tensor in out.items():
        if name not in filled:
            findings.append(Finding("is in OUT, but nothing in the source belongs there", tensor.shard, name))
        elif filled[name] and tensor.shape and sum(rows.shard_size for rows in filled[name]) != tensor.shape[0]:
            findings.append(Finding("has rows that no part of the source fills", tensor.shard, name))
    return slices, findings


def _whole(out: TensorInfo, source: TensorInfo, slices: list[Slice]) -> Iterator[Finding]:
    if (out.dtype, out.shape) != (source.dtype, source.shape):
        yield Finding(f"is {out.form}, the source has {source.form}", out.shard, out.name)
    else:
        slices.append(Slice(out, out.start, out.stop, source, source.name, 0))


def _part(
    out: TensorInfo,
    source: TensorInfo,
    rows: ShardRows,
    config: ModelConfig,
    packing: Packing,
    slices: list[Slice],
) -> Iterator[Finding]:
    total = sum(part.shard_size for part in config.rows(packing))
    shape = (total, *source.shape[1:])
    if (out.dtype, out.shape) != (source.dtype, shape) or source.shape[0] != rows.shard_size:
        yield Finding(
            f"is {out.form}; rows {rows.shard_offset} to {rows.shard_offset + rows.shard_size} of "
            f"{source.dtype} {list(shape)} have to be {source.name}, which is {source.form}",
            out.shard,
            out.name,
            source.name,
        )
        return
    row_bytes = tensor_bytes(out.dtype, out.shape[1:])
    if row_bytes is None:
        yield Finding("has rows that are no whole bytes", out.shard, out.name, source.name)
        return
    start = out.start + rows.shard_offset * row_bytes
    slices.append(Slice(out, start, start + source.nbytes, source, source.name, rows.shard_offset))


def slices_by_manifest(out: Mapping[str, TensorInfo], manifest: Manifest) -> tuple[list[Slice], list[Finding]]:
    """The slices that the manifest names, where there is no source to ask."""
    slices: list[Slice] = []
    findings: list[Finding] = []
    for name, entry in manifest.tensors.items():
        tensor = out.get(name)
        if tensor is None:
            findings.append(Finding("is in the manifest but not in OUT", None, name))
        elif not entry.parts:
            slices.append(Slice(tensor, tensor.start, tensor.stop, None, name, 0))
        else:
            row_bytes = tensor_bytes(tensor.dtype, tensor.shape[1:]) or 0
            for part in entry.parts:
                start = tensor.start + part.shard_offset * row_bytes
                stop = start + part.shard_size * row_bytes
                if stop > tensor.stop:
                    findings.append(Finding("the manifest gives rows beyond its end", tensor.shard, name, part.name))
                else:
                    slices.append(Slice(tensor, start, stop, None, part.name, part.shard_offset))
    findings += [
        Finding("is in OUT but not in the manifest", tensor.shard, name)
        for name, tensor in out.items()
        if name not in manifest.tensors
    ]
    return slices, findings


def compare(
    part: Slice, out: Checkpoint, source: Checkpoint | None, *, hashed: bool, on_bytes: OnBytes
) -> tuple[Finding | None, str | None]:
    """Compare one slice byte for byte with its source, in blocks, and digest OUT's bytes on the way.

    Returns the first difference, if any, and the BLAKE3 of OUT's bytes, if `hashed`.
    """
    state = digest.hasher() if hashed else None
    ours, theirs = bytearray(min(BLOCK_BYTES, part.stop - part.start)), bytearray()
    if source is not None:
        theirs = bytearray(len(ours))
    at, finding = part.start, None
    while at < part.stop:
        if part.stop - at < len(ours):
            del ours[part.stop - at :], theirs[part.stop - at :]
        out.files.read_into(part.out.shard, at, memoryview(ours))
        if source is not None and part.source is not None and finding is None:
            source.files.read_into(part.source.shard, part.source.start + at - part.start, memoryview(theirs))
            if ours != theirs:
                finding = _difference(part, at - part.start + _first_difference(ours, theirs))
        if state is not None:
            state.update(ours)
        elif finding is not None:
            break
        at += len(ours)
        on_bytes(len(ours))
    return finding, state.hexdigest() if state is not None else None


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
    row_bytes = tensor_bytes(tensor.dtype, tensor.shape[1:]) if tensor.shape else None
    part_row = offset // row_bytes if row_bytes else None
    return Finding(
        "differs from the source",
        tensor.shard,
        tensor.name,
        part.name if part.is_part else None,
        part.first_row + part_row if part_row is not None else None,
        part_row,
        part.start - tensor.start + offset,
    )
