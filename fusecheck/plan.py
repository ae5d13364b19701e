"""Model + grouping -> output files as data: for each, its first bytes and the ranges of source files that follow. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fusecheck.header import TensorInfo, canonical_order, encode_header
from fusecheck.mapping import LAYOUT
from fusecheck.model import Group, Model

FORMAT_KEY = "format"
OWN_KEY = "fusecheck"


@dataclass(frozen=True, slots=True)
class Piece:
    """A half-open range of bytes in one source file, counted from the start of the file; digested on its own."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One output file: `head`, then the pieces, back to back. `path` is POSIX, relative to OUT."""

    path: str
    head: bytes
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.head) + sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the output: a copy of one source tensor, or the rows of a group's parts one after another.

    Tensors are row-major, so rows joined along dim 0 are bytes joined: nothing is computed and no dtype can change.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[TensorInfo, ...]
    group: Group | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return sum(source.nbytes for source in self.sources)


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One output weight file: its tensors in file order, and the file that they become."""

    tensors: tuple[OutputTensor, ...]
    file: PlannedFile


def output_tensors(tensors: Mapping[str, TensorInfo], model: Model) -> list[OutputTensor]:
    """Every output tensor, in the order of the source; a fused one stands where its first part stood."""
    first = {group.parts[0].tensor.name: group for group in model.split}
    gone = {part.tensor.name for group in model.split for part in group.parts}
    outputs = []
    for name, tensor in tensors.items():
        if name in first:
            group = first[name]
            sources = tuple(part.tensor for part in group.parts)
            outputs.append(OutputTensor(group.fused, group.dtype, group.shape, sources, group))
        elif name not in gone:
            outputs.append(OutputTensor(name, tensor.dtype, tensor.shape, (tensor,)))
    return outputs


def by_source_shard(outputs: Iterable[OutputTensor]) -> list[list[OutputTensor]]:
    """The source's own grouping; a shard that is left empty is dropped."""
    groups: dict[str, list[OutputTensor]] = {}
    for output in outputs:
        groups.setdefault(output.sources[0].shard, []).append(output)
    return list(groups.values())


def plan_shards(groups: Sequence[Sequence[OutputTensor]], metadata: Mapping[str, str]) -> tuple[PlannedShard, ...]:
    """Name the shards as the hub does, order each as safetensors writes it, and lay out the bytes."""
    return tuple(
        _shard(shard_name(number, len(groups)), group, metadata) for number, group in enumerate(groups, start=1)
    )


def shard_name(number: int, total: int) -> str:
    """`model.safetensors` for one shard, else the hub's `model-0000i-of-0000N.safetensors`."""
    return "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


def _shard(name: str, group: Sequence[OutputTensor], metadata: Mapping[str, str]) -> PlannedShard:
    by_name = {output.name: output for output in group}
    ordered = [by_name[name] for name, _ in canonical_order((output.name, output.dtype) for output in group)]
    head = encode_header(((o.name, o.dtype, o.shape, o.nbytes) for o in ordered), metadata)
    pieces = tuple(Piece(s.shard, s.start, s.stop) for output in ordered for s in output.sources)
    return PlannedShard(tuple(ordered), PlannedFile(name, head, pieces))


def merge_metadata(sources: Sequence[Mapping[str, str] | None], version: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """`__metadata__` of every output shard, and the keys that were dropped because the sources disagree on them.

    Kept: keys that all source shards have with one value. Added: `format: pt` where there is no format, and our own key,
    which declares the row layout, since the same names and shapes stand for several layouts in the field.
    """
    maps = [dict(source or {}) for source in sources]
    keys = {key for source in maps for key in source} - {OWN_KEY}
    kept = {key: maps[0][key] for key in keys if all(key in m and m[key] == maps[0].get(key) for m in maps)}
    dropped = tuple(sorted(keys - kept.keys()))
    own = json.dumps({"layout": LAYOUT, "version": version}, sort_keys=True)
    return {FORMAT_KEY: "pt", **kept, OWN_KEY: own}, dropped


def index_text(shards: Sequence[PlannedShard], metadata: Mapping[str, object] | None) -> bytes:
    """model.safetensors.index.json: the source's metadata with its totals recomputed (bytes, and elements)."""
    totals: dict[str, object] = {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard.tensors)}
    if metadata and "total_parameters" in metadata:
        totals["total_parameters"] = sum(math.prod(t.shape) for shard in shards for t in shard.tensors)
    weight_map = {tensor.name: shard.file.path for shard in shards for tensor in shard.tensors}
    index = {"metadata": {**(metadata or {}), **totals}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
