"""Model + grouping -> output files as data: for each, its first bytes and the strips of source files that follow. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring_ascii as quoted
from typing import NamedTuple, TypeAlias, overload

from fusecheck.forms import Join
from fusecheck.group import Group
from fusecheck.header import TensorInfo, canonical_order, encode_header, tensor_bytes
from fusecheck.mapping import LAYOUT, OWN_KEY
from fusecheck.model import Model

FORMAT_KEY = "format"


class Block(NamedTuple):
    """`rows` runs of `row_bytes` bytes in one source file, the first at `offset`, each `stride` bytes after the last."""

    file: str
    offset: int
    rows: int
    row_bytes: int
    stride: int

    @property
    def nbytes(self) -> int:
        """Bytes that the block gives."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Constant:
    """Bytes that stand in no source file."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the constant."""
        return len(self.data)


Strip: TypeAlias = "tuple[Block, ...] | Constant"
"""Blocks of equal height side by side, row by row; one block alone, of stride row_bytes, is a plain range of bytes."""


def strip_bytes(strip: Strip) -> int:
    """Bytes of output that a strip makes."""
    if isinstance(strip, Constant):
        return strip.nbytes
    return sum([block.rows * block.row_bytes for block in strip])


def contiguous(tensor: TensorInfo) -> Block:
    """A whole tensor as one range of bytes: rows of one byte, so that it may be cut anywhere."""
    return Block(tensor.shard, tensor.start, tensor.nbytes, 1, 1)


@dataclass(frozen=True)
class PlannedFile:
    """One output file: `head`, then the strips, one below the other. `path` is POSIX, relative to OUT."""

    path: str
    head: bytes
    strips: Sequence[Strip]
    known_size: int | None = None

    @cached_property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.head) + sum(map(strip_bytes, self.strips)) if self.known_size is None else self.known_size


class OutputTensor(NamedTuple):
    """One tensor of the output: a vertical stack of strips.

    Tensors are row-major: parts joined along dim 0 are strips of one block each, whose bytes follow one another; parts
    joined along dim 1 are one strip of a block for each. Nothing is computed and no dtype can change.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: TensorInfo
    """The tensor itself, the first of several parts, or the whole that this is cut out of."""
    cuts: tuple[Strip, ...] | Callable[[], tuple[Strip, ...]] | None = None
    """Its strips, or what works them out, where they do not follow from `group`, or from `source` alone."""
    group: Group | None = None

    @property
    def strips(self) -> tuple[Strip, ...]:
        """What it is made of. Worked out when asked for: a plan that is only looked at has no need of a million blocks."""
        if self.cuts is not None:
            return self.cuts() if callable(self.cuts) else self.cuts
        return ((contiguous(self.source),),) if self.group is None else _strips(self.group)

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return tensor_bytes(self.dtype, self.shape) or 0


class _Strips(Sequence[Strip]):
    """The strips of some tensors, one below the other."""

    def __init__(self, tensors: tuple[OutputTensor, ...]) -> None:
        self._tensors = tensors

    @cached_property
    def _all(self) -> tuple[Strip, ...]:
        return tuple([strip for tensor in self._tensors for strip in tensor.strips])

    @overload
    def __getitem__(self, index: int) -> Strip: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Strip, ...]: ...
    def __getitem__(self, index: int | slice) -> Strip | tuple[Strip, ...]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._all == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all)


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One output weight file: its tensors in file order, and the file that they become."""

    tensors: tuple[OutputTensor, ...]
    file: PlannedFile


def whole_file(path: str, size: int) -> PlannedFile:
    """A file of the source, byte for byte."""
    strips: tuple[Strip, ...] = ((Block(path, 0, size, 1, 1),),) if size else ()
    return PlannedFile(path, b"", strips)


def output_tensors(tensors: Mapping[str, TensorInfo], model: Model) -> list[OutputTensor]:
    """Every output tensor, in the order of the source; a fused one stands where its first part stood."""
    first = {group.tensors[0].name: group for group in model.split}
    gone = {tensor.name for group in model.split for tensor in group.tensors}
    outputs = []
    for name, tensor in tensors.items():
        group = first.get(name)
        if group is not None:
            outputs.append(OutputTensor(group.fused, group.dtype, group.shape, tensor, None, group))
        elif name not in gone:
            outputs.append(copied(name, tensor))
    return outputs


def copied(name: str, tensor: TensorInfo) -> OutputTensor:
    """All bytes of one tensor, under a name."""
    return OutputTensor(name, tensor.dtype, tensor.shape, tensor)


def _strips(group: Group) -> tuple[Strip, ...]:
    sources = group.tensors
    match group.join:
        case Join.ROWS | Join.STACK:
            return tuple([(contiguous(source),) for source in sources])
        case Join.COLUMNS:
            rows = sources[0].shape[0]
            widths = [source.nbytes // rows for source in sources]
            return (
                tuple(Block(s.shard, s.start, rows, width, width) for s, width in zip(sources, widths, strict=True)),
            )
        case Join.ONCE:
            return ((contiguous(sources[0]),),)
        case Join.SHAPE:
            return (Constant(group.constant or b""),)


def by_source_shard(outputs: Iterable[OutputTensor]) -> list[list[OutputTensor]]:
    """The source's own grouping; a shard that is left empty is dropped."""
    groups: dict[str, list[OutputTensor]] = {}
    for output in outputs:
        groups.setdefault(output.source.shard, []).append(output)
    return list(groups.values())


def plan_shards(groups: Sequence[Sequence[OutputTensor]], metadata: Mapping[str, str]) -> tuple[PlannedShard, ...]:
    """Name the shards as the hub does, order each as safetensors writes it, and lay out the bytes."""
    return tuple(
        plan_shard(shard_name(number, len(groups)), group, metadata) for number, group in enumerate(groups, start=1)
    )


def shard_name(number: int, total: int) -> str:
    """`model.safetensors` for one shard, else the hub's `model-0000i-of-0000N.safetensors`."""
    return "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


def plan_shard(name: str, group: Sequence[OutputTensor], metadata: Mapping[str, str] | None) -> PlannedShard:
    """One shard as safetensors writes it. `metadata` None: it has no `__metadata__`."""
    by_name = {output.name: output for output in group}
    ordered = [by_name[name] for name, _ in canonical_order((output.name, output.dtype) for output in group)]
    head = encode_header(((o.name, o.dtype, o.shape, o.nbytes) for o in ordered), metadata)
    size = len(head) + sum([output.nbytes for output in ordered])
    return PlannedShard(tuple(ordered), PlannedFile(name, head, _Strips(tuple(ordered)), size))


def merge_metadata(
    sources: Sequence[Mapping[str, str] | None], version: str, layout: str = LAYOUT
) -> tuple[dict[str, str], tuple[str, ...]]:
    """`__metadata__` of every output shard, and the keys that were dropped because the sources disagree on them.

    Kept: keys that all source shards have with one value. Added: `format: pt` where there is no format, and our own key,
    which declares the row layout, since the same names and shapes stand for several layouts in the field.
    """
    maps = [dict(source or {}) for source in sources]
    keys = {key for source in maps for key in source} - {OWN_KEY}
    kept = {key: maps[0][key] for key in keys if all(key in m and m[key] == maps[0].get(key) for m in maps)}
    dropped = tuple(sorted(keys - kept.keys()))
    own = json.dumps({"layout": layout, "version": version}, sort_keys=True)
    return {FORMAT_KEY: "pt", **kept, OWN_KEY: own}, dropped


def index_text(shards: Sequence[PlannedShard], metadata: Mapping[str, object] | None) -> bytes:
    """model.safetensors.index.json: the source's metadata with its totals recomputed (bytes, and elements)."""
    totals: dict[str, object] = {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard.tensors)}
    if metadata and "total_parameters" in metadata:
        totals["total_parameters"] = sum(math.prod(t.shape) for shard in shards for t in shard.tensors)
    return recorded_index(shards, {**(metadata or {}), **totals})


def recorded_index(shards: Sequence[PlannedShard], metadata: Mapping[str, object]) -> bytes:
    """model.safetensors.index.json with this very metadata, in the form in which the hub's writers give it."""
    weight_map = {tensor.name: shard.file.path for shard in shards for tensor in shard.tensors}
    index = {"metadata": dict(metadata), "weight_map": {"": ""}}
    around = json.dumps(index, indent=2, sort_keys=True) + "\n"
    # with indent, json takes its slow way through each entry; text in text is the same, whatever the metadata holds
    before, _, after = around.rpartition('    "": ""')
    text, comma = bytearray(before.encode()), ",\n"
    for number, name in enumerate(sorted(weight_map)):
        text += f"{comma if number else ''}    {quoted(name)}: {quoted(weight_map[name])}".encode()
    text += after.encode()
    return bytes(text)
