"""The tensors of a split checkpoint out of the files of all ranks that hold their shares."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusecheck.checkpoint import Checkpoint
from fusecheck.config import CONFIG
from fusecheck.engines.vllm_sharded import layout_of
from fusecheck.errors import CheckpointError, UnsupportedCheckpoint
from fusecheck.exact import Slice
from fusecheck.exact_ranks import NORM, Demand, constants, held, outside, pair_rank
from fusecheck.header import tensor_bytes
from fusecheck.manifest import Manifest, RanksEntry
from fusecheck.plan import Block, OutputTensor, Strip
from fusecheck.shards import by_rank
from fusecheck.sidefiles import MANIFEST
from fusecheck.split_form import beyond


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor put together, and the recorded digest of every block of each of its strips."""

    output: OutputTensor
    digests: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class _Share:
    """Bytes of a split tensor that stand in a rank's file."""

    part: Slice
    digest: str


def whole_tensors(checkpoint: Checkpoint, manifest: Manifest) -> list[Whole]:
    """Every split tensor that the manifest names. CheckpointError where ranks are missing or shares do not tile it."""
    entry, config = manifest.ranks, checkpoint.config
    layout = layout_of(entry.engine, entry.versions) if entry is not None else None
    if entry is None or layout is None:
        raise UnsupportedCheckpoint("declares a layout that is not known", file=MANIFEST, found=manifest.layout)
    if set(entry.numbers) != set(range(entry.tp)):
        absent = ", ".join(str(rank) for rank in range(entry.tp) if rank not in entry.numbers)
        raise UnsupportedCheckpoint(
            f"ranks {absent} of {entry.tp} are missing, and with them a part of every projection",
            file=MANIFEST,
            remedy="put the files of all ranks into one folder by one run of fuse",
        )
    if beyond(config, entry.sources) is not None:
        raise CheckpointError("is of another model than the manifest", file=CONFIG)
    within = held(entry.sources, config, layout)
    around = outside(entry.sources, config)
    demand = Demand(config, layout, entry.tp, within, around, constants(config, layout))
    shapes = {share.name: share.shape for each in within.values() for share in each.shares}
    shapes |= {
        name: (config.hidden_size,) if target == NORM else (config.vocab_size, config.hidden_size)
        for target, name in around.items()
    }
    shares = _shares(checkpoint, demand, entry)
    return [_whole(name, shapes.get(name, ()), shares.get(name, {})) for name in entry.sources]


def _shares(checkpoint: Checkpoint, demand: Demand, entry: RanksEntry) -> dict[str, dict[int, _Share]]:
    """Split tensor -> where a share begins in it -> the share, as the first rank that holds it has it."""
    found: dict[str, dict[int, _Share]] = {}
    for rank, tensors in by_rank(checkpoint.tensors.values()).items():
        own = {tensor.name: tensor for tensor in tensors}
        slices, findings = pair_rank(rank, own, demand, None)
        if findings:
            first = findings[0]
            raise CheckpointError(first.problem, file=first.file, tensor=first.tensor)
        for name, parts in slices.items():
            file = own[name].shard
            for part, digest in _zipped(parts, entry.tensors.get(file, {}).get(name, ()), file, name):
                if part.part is not None:
                    found.setdefault(part.part, {}).setdefault(part.source_start, _Share(part, digest))
    return found


def _zipped(parts: list[Slice], digests: tuple[str, ...], file: str, name: str) -> Iterable[tuple[Slice, str]]:
    if len(parts) != len(digests):
        raise CheckpointError(
            "records other pieces than it has",
            file=MANIFEST,
            tensor=name,
            found=len(digests),
            wanted=f"{len(parts)} in {file}",
        )
    return zip(parts, digests, strict=True)


def _whole(name: str, shape: tuple[int, ...], shares: dict[int, _Share]) -> Whole:
    """One below the other, or side by side, as they were cut; all of the tensor."""
    ordered = [shares[start] for start in sorted(shares)]
    first = ordered[0].part if ordered else None
    if first is None:
        raise CheckpointError("no rank holds anything of it", file=MANIFEST, tensor=name)
    beside = first.source_stride is not None and first.source_stride != first.row_bytes
    blocks = [_block(share.part, beside=beside) for share in ordered]
    digests = [share.digest for share in ordered]
    strips: tuple[Strip, ...] = (tuple(blocks),) if beside else tuple((block,) for block in blocks)
    starts, at = [], 0
    for share in ordered:
        starts.append(at)
        at += share.part.row_bytes if beside else share.part.nbytes
    whole = first.source_stride if beside else tensor_bytes(first.out.dtype, shape)
    if starts != sorted(shares) or at != whole:
        raise CheckpointError("its shares do not make it whole", file=MANIFEST, tensor=name)
    output = OutputTensor(name, first.out.dtype, shape, first.out, strips)
    return Whole(output, (tuple(digests),) if beside else tuple((digest,) for digest in digests))


def _block(part: Slice, *, beside: bool) -> Block:
    if not beside:
        return Block(part.out.shard, part.start, part.nbytes, 1, 1)
    return Block(part.out.shard, part.start, part.rows, part.row_bytes, part.stride)
