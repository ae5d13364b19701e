"""unfuse: a fused checkpoint in, the split one that it was made from out, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from fusecheck.beside import OWN_KEY, check_config, declaration
from fusecheck.checkpoint import Checkpoint, open_checkpoint, open_folder
from fusecheck.config import CONFIG
from fusecheck.digest import digest_of, hasher
from fusecheck.errors import CheckpointError, FusecheckError, UnsupportedCheckpoint
from fusecheck.execute import BLOCK_BYTES, Written
from fusecheck.files import MAX_JSON_BYTES, Files
from fusecheck.group import FusedTensor
from fusecheck.header import LIBRARY_HEADER_BYTES, MAX_HEADER_BYTES, metadata_orders
from fusecheck.hub import resolve
from fusecheck.job import Outcome, Progress, file_digest, holds, produce, side_files, whole_file, write_files
from fusecheck.manifest import Manifest, SourceShard, TensorEntry, read_manifest
from fusecheck.mapping import HEADS, LAYOUT, ShardRows
from fusecheck.model import Model, survey
from fusecheck.plan import (
    Constant,
    OutputTensor,
    PlannedFile,
    PlannedShard,
    Strip,
    by_source_shard,
    copied,
    index_text,
    plan_shard,
    recorded_index,
    split_tensors,
    strip_bytes,
    weight_shape,
)
from fusecheck.quantisation import Join
from fusecheck.shards import INDEX, SHARD_NAME, natural_key
from fusecheck.sidefiles import CHECKSUMS, MANIFEST, LeftOut
from fusecheck.target import TargetOccupied, check_target

DEFAULT_THREADS = 2
MAX_ORDERS = 120
"""Orders of the keys of one `__metadata__` that are tried: all of five keys. safetensors writes them in any order."""

_REMEDY = f"remove {MANIFEST} to split it by names and {CONFIG} alone"


@dataclass(frozen=True, slots=True)
class UnfuseReport:
    """What `unfuse` did, or would do. Counts are tensors; sizes are bytes."""

    verdict: Literal["unfused", "copied", "already_done", "would_unfuse"]
    source: str
    out: str
    by_manifest: bool
    """Whether SRC's manifest said what the original was; else names and config.json alone did."""
    layers: int
    split: int
    """Fused tensors that were taken apart."""
    restored: tuple[str, ...]
    """Tensors that `--drop-tied-lm-head` had dropped."""
    source_tensors: int
    output_tensors: int
    output_bytes: int
    shards: tuple[str, ...]
    identical: tuple[str, ...]
    """Weight files that are the original's byte for byte: their headers carry the recorded digests."""
    reordered: tuple[str, ...]
    """Weight files whose original was not in canonical form: the tensors are equal, the layout of the file is not."""
    side_files: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that is decided before the first byte is written. `files` begins with those of `shards`."""

    checkpoint: Checkpoint
    manifest: Manifest | None
    shards: tuple[PlannedShard, ...]
    files: tuple[PlannedFile, ...]
    digests: Mapping[tuple[str, int], str]
    """(weight file, number of the strip) -> what the manifest records of its bytes."""
    split: int
    restored: tuple[str, ...]
    identical: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def unfuse(
    source: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    dry_run: bool = False,
    force: bool = False,
    follow_links: bool = False,
    max_header_bytes: int = MAX_HEADER_BYTES,
    threads: int = DEFAULT_THREADS,
    on_progress: Progress | None = None,
    on_download: Progress | None = None,
) -> UnfuseReport:
    """Write the split form of the checkpoint `source`, a folder or a hub id, to the folder `out`.

    Where SRC has a manifest, OUT is what that run of `fuse` was given: every tensor, its digest checked on the way, in
    the original's shards, and byte for byte the files of a source in canonical form. What that source held fused
    already stays fused, with a warning. Where there is no manifest, all that is fused is split by names and config.json,
    in SRC's own shards. A checkpoint in which nothing is fused is copied, byte for byte, as rsync would. OUT has no
    manifest: it is the original again. What differs beside the tensors (an edited tokenizer) is kept, with a warning.

    OUT appears complete and durable, or not at all. Raises UsageError (exit 2), CheckpointError (3), SystemFailure (4).
    """
    place = Path(out) if os.fspath(out) else Path()
    with suppress(TargetOccupied):  # before a download of hours; whether it is this very result is seen below
        check_target(place, None, force=force)
    found = resolve(os.fspath(source), revision=revision, on_progress=on_download)
    with open_checkpoint(found.folder, follow_links=follow_links, max_header_bytes=max_header_bytes) as checkpoint:
        job = _decide(checkpoint, read_manifest(found.folder))
        outcome = produce(
            place,
            found.folder,
            size=job.size,
            force=force,
            dry_run=dry_run,
            write=lambda _, folder: _write(job, folder, threads=threads, on_progress=on_progress),
            stands=lambda: _stands(place, job),
        )
        return _report(outcome, found.folder, place, job)


# --- what to write ---


def _decide(checkpoint: Checkpoint, manifest: Manifest | None) -> _Job:
    model = survey(checkpoint.tensors, checkpoint.config, checkpoint.peek, keep_split=True)
    _check_splittable(checkpoint, model)
    if manifest is not None:
        return _by_manifest(checkpoint, model, manifest)
    return _by_names(checkpoint, model)


def _check_splittable(checkpoint: Checkpoint, model: Model) -> None:
    """The declared layout is ours, and nothing that is fused was passed over."""
    for shard in checkpoint.shards:
        own = (shard.metadata or {}).get(OWN_KEY)
        if own is not None and declaration(own).get("layout") != LAYOUT:
            raise UnsupportedCheckpoint("declares another layout", file=shard.name, found=own, wanted=LAYOUT)
    left = {group.fused.rpartition(".")[0]: group.reason for group in model.left_split}
    for name, tensor in checkpoint.tensors.items() if left else ():
        reason = left.get(name.rpartition(".")[0])
        if reason is not None:
            raise UnsupportedCheckpoint(f"is fused and cannot be split: {reason}", file=tensor.shard, tensor=name)
    for whole in model.fused:
        total = sum(rows.shard_size for rows in checkpoint.config.rows(whole.packing))
        if whole.join is Join.SHAPE and checkpoint.peek(whole.tensor) != weight_shape(
            whole.tensor, total, checkpoint.config
        ):
            raise CheckpointError(
                "is not the shape of the fused weight", file=whole.tensor.shard, tensor=whole.tensor.name
            )


def _by_names(checkpoint: Checkpoint, model: Model) -> _Job:
    untouched = not model.fused and not any(OWN_KEY in (shard.metadata or {}) for shard in checkpoint.shards)
    by_name = {shard.name: shard for shard in checkpoint.shards}
    shards = []
    for group in by_source_shard(split_tensors(checkpoint.tensors, model.fused, checkpoint.config)):
        shard = by_name[group[0].source.shard]
        if untouched:
            shards.append(PlannedShard(tuple(group), whole_file(shard.name, shard.size)))
        else:
            metadata = None if shard.metadata is None else {k: v for k, v in shard.metadata.items() if k != OWN_KEY}
            shards.append(plan_shard(shard.name, group, metadata))
    index = None
    if checkpoint.index_metadata is not None and untouched:
        index = checkpoint.files.read(INDEX, MAX_JSON_BYTES)
    elif checkpoint.index_metadata is not None or len(checkpoint.shards) > 1:
        index = index_text(shards, checkpoint.index_metadata)
    return _Job(
        checkpoint=checkpoint,
        manifest=None,
        shards=tuple(shards),
        files=_files(checkpoint, shards, index, checkpoint.config_text),
        digests={},
        split=len(model.fused),
        restored=(),
        identical=(),
        warnings=(*checkpoint.warnings, *model.warnings),
    )


def _files(
    checkpoint: Checkpoint, shards: Sequence[PlannedShard], index: bytes | None, config_text: bytes
) -> tuple[PlannedFile, ...]:
    files = [shard.file for shard in shards]
    if index is not None:
        files.append(PlannedFile(INDEX, index, ()))
    return (*files, PlannedFile(CONFIG, config_text, ()), *side_files(checkpoint))


def _by_manifest(checkpoint: Checkpoint, model: Model, manifest: Manifest) -> _Job:
    """The source of `fuse`, as the manifest records it. The places of the parts are worked out anew, and have to agree."""
    _check_described(manifest, checkpoint)
    wholes = _recorded(manifest, model)
    restored = tuple(_dropped(manifest, checkpoint, model))
    outputs = [*split_tensors(checkpoint.tensors, wholes, checkpoint.config), *restored]
    shards = _original_shards(manifest, outputs)
    origins = _origins(manifest)
    index = None if manifest.source_index is None else recorded_index(shards, manifest.source_index)
    config_text, warnings = _original_config(manifest, checkpoint)
    kept = sum(whole not in wholes for whole in model.fused)
    if kept:
        warnings.append(
            f"{kept} tensors were fused already in the source that {MANIFEST} records, and stay so; "
            "unfuse OUT once more to split them"
        )
    return _Job(
        checkpoint=checkpoint,
        manifest=manifest,
        shards=shards,
        files=_files(checkpoint, shards, index, config_text),
        digests={
            (shard.file.path, number): origins[tensor.name][1]
            for shard in shards
            for number, tensor in enumerate(shard.tensors)
        },
        split=len(wholes),
        restored=tuple(head.name for head in restored),
        identical=tuple(_identical(manifest, shards)),
        warnings=(*checkpoint.warnings, *model.warnings, *warnings),
    )


def _check_described(manifest: Manifest, checkpoint: Checkpoint) -> None:
    """The manifest describes these very weight files: the digests of their headers vouch for dtypes and shapes."""
    if manifest.layout != LAYOUT:
        raise UnsupportedCheckpoint("declares another layout", file=MANIFEST, found=manifest.layout, wanted=LAYOUT)
    described = {name: (file.size, file.header_digest) for name, file in manifest.files.items()}
    for shard in checkpoint.shards:
        if described.pop(shard.name, None) != (shard.size, shard.header_digest):
            raise CheckpointError(f"is not the file that {MANIFEST} describes", file=shard.name, remedy=_REMEDY)
    tensors = checkpoint.tensors
    odd = next(iter(described), None) or next((name for name in manifest.tensors if name not in tensors), None)
    if odd is not None:
        raise CheckpointError(f"names what is not there: {odd}", file=MANIFEST, remedy=_REMEDY)
    new = next((tensor for name, tensor in tensors.items() if name not in manifest.tensors), None)
    if new is not None:
        raise CheckpointError(f"is not in {MANIFEST}", file=new.shard, tensor=new.name, remedy=_REMEDY)


def _recorded(manifest: Manifest, model: Model) -> list[FusedTensor]:
    """What the recorded run fused. CheckpointError where it is not what names and config.json say of the same tensor."""
    wholes = {whole.tensor.name: whole for whole in (*model.fused, *model.stacked)}
    found = []
    for name, entry in manifest.tensors.items():
        if not entry.parts:
            continue
        whole = wholes.get(name)
        if whole is None or (whole.join.value, whole.parts) != (entry.join, _cuts(entry)):
            raise CheckpointError("joins it from other parts than the mapping does", file=MANIFEST, tensor=name)
        found.append(whole)
    return found


def _cuts(entry: TensorEntry) -> tuple[tuple[str, ShardRows], ...]:
    return tuple((part.name, ShardRows(part.shard_id, part.shard_offset, part.shard_size)) for part in entry.parts)


def _dropped(manifest: Manifest, checkpoint: Checkpoint, model: Model) -> Iterator[OutputTensor]:
    """A tied output embedding that was dropped, made from the embedding again."""
    for name, entry in manifest.dropped.items():
        if name not in HEADS or name in checkpoint.tensors or entry.same_as != model.embedding:
            raise CheckpointError("cannot have been dropped", file=MANIFEST, tensor=name, found=entry.same_as)
        yield copied(name, checkpoint.tensors[entry.same_as])


def _origins(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """Tensor of the original -> its shard and the digest of its bytes."""
    origins: dict[str, tuple[str, str]] = {}
    for name, entry in manifest.tensors.items():
        if entry.parts:
            origins |= {part.name: (part.shard, part.digest) for part in entry.parts}
        else:
            origins[name] = (entry.shard or "", entry.digest)
    for name, dropped in manifest.dropped.items():
        origins[name] = (dropped.shard, manifest.tensors[dropped.same_as].digest)
    return origins


def _original_shards(manifest: Manifest, outputs: Iterable[OutputTensor]) -> tuple[PlannedShard, ...]:
    names = sorted(manifest.source_shards, key=natural_key)
    odd = next((name for name in names if not SHARD_NAME.fullmatch(name)), None)
    if odd is not None:
        raise CheckpointError("names a shard that is no plain safetensors file name", file=MANIFEST, found=odd)
    groups: dict[str, list[OutputTensor]] = {name: [] for name in names}
    origins = _origins(manifest)
    for output in outputs:
        shard, _ = origins[output.name]
        if shard not in groups:
            raise CheckpointError("puts it into a shard of no source", file=MANIFEST, tensor=output.name, found=shard)
        groups[shard].append(output)
    recorded = manifest.source_shards
    return tuple(
        _as_recorded(plan_shard(name, groups[name], recorded[name].metadata), recorded[name]) for name in names
    )


def _as_recorded(shard: PlannedShard, recorded: SourceShard) -> PlannedShard:
    """The shard with the very header that the original had, where that was in canonical form; else as it is."""
    heads = metadata_orders(shard.file.head, recorded.metadata or {})
    head = next((head for head in islice(heads, MAX_ORDERS) if digest_of(head) == recorded.header_digest), None)
    return shard if head is None else replace(shard, file=replace(shard.file, head=head))


def _original_config(manifest: Manifest, checkpoint: Checkpoint) -> tuple[bytes, list[str]]:
    """config.json as it was before GPTQ's list of quantised modules; one that was edited since, as it is."""
    if manifest.config_original is not None:
        if any(check_config(checkpoint, None, manifest.config_original)):
            raise CheckpointError(
                f"was edited after it was fused, so the original in {MANIFEST} is not this one",
                file=CONFIG,
                remedy=f"undo the edit, or {_REMEDY}",
            )
        return manifest.config_original.encode(), []
    edited = digest_of(checkpoint.config_text) != manifest.config.digest
    return checkpoint.config_text, [f"{CONFIG} was edited after it was fused; copied as it is"] if edited else []


def _identical(manifest: Manifest, shards: Iterable[PlannedShard]) -> Iterator[str]:
    for shard in shards:
        recorded = manifest.source_shards[shard.file.path]
        if (recorded.size, recorded.header_digest) == (shard.file.size, digest_of(shard.file.head)):
            yield shard.file.path


# --- writing it, and looking at what stands there ---


def _write(job: _Job, folder: Path, *, threads: int, on_progress: Progress | None) -> list[str]:
    """Write all files below `folder` and check them: against the manifest's digests, and as a checkpoint."""
    written = write_files(job.files, job.checkpoint.files, folder, threads=threads, on_progress=on_progress)
    job.checkpoint.files.check_unchanged()
    _read_back(folder, job)
    if job.manifest is None:
        return []
    for shard, made in zip(job.shards, written, strict=False):
        for number, (tensor, digests) in enumerate(zip(shard.tensors, made.strips, strict=True)):
            wanted = job.digests[shard.file.path, number]
            if digests[0] != wanted:
                raise _differs(tensor, digests[0], wanted)
    made_of = dict(zip((file.path for file in job.files), written, strict=True))
    return list(_side_file_warnings(job.manifest, job.checkpoint, made_of))


def _read_back(folder: Path, job: _Job) -> None:
    """What is published can be read by the rules that SRC was read by; a manifest might say anything of its source."""
    with open_folder(folder, max_header_bytes=LIBRARY_HEADER_BYTES) as found:
        if {shard.name for shard in found.shards} != {shard.file.path for shard in job.shards}:
            raise CheckpointError("records shards that hold nothing", file=MANIFEST)


def _differs(tensor: OutputTensor, found: str, wanted: str) -> CheckpointError:
    what = "its bytes are" if tensor.name == tensor.source.name else f"its part {tensor.name} is"
    return CheckpointError(
        f"{what} not what {MANIFEST} records: changed after fusing, or damaged",
        file=tensor.source.shard,
        tensor=tensor.source.name,
        found=found,
        wanted=wanted,
    )


def _side_file_warnings(manifest: Manifest, checkpoint: Checkpoint, made: Mapping[str, Written]) -> Iterator[str]:
    here = [side.path for side in checkpoint.side_files]
    recorded = manifest.side_files
    kinds = {
        "side files that were edited after fusing are copied as they are": [
            path for path in here if path in recorded and recorded[path].digest != file_digest(made[path])
        ],
        "side files that came after fusing are copied too": [path for path in here if path not in recorded],
        "side files of the original are gone": [path for path in recorded if path not in here],
    }
    for kind, paths in kinds.items():
        if paths:
            yield f"{kind}: {', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"


def _stands(out: Path, job: _Job) -> bool:
    """Whether OUT is this very result: names, sizes, first bytes, and the digest of all data."""
    try:
        if not holds(out, job.files):
            return False
        with Files(out) as ours:
            for file in job.files:
                ours.add(file.path)
            return all(_same_data(file, ours, job) for file in job.files)
    except (OSError, FusecheckError):
        return False


def _same_data(file: PlannedFile, ours: Files, job: _Job) -> bool:
    at = len(file.head)
    for number, strip in enumerate(file.strips):
        stop = at + strip_bytes(strip)
        wanted = job.digests.get((file.path, number)) or _digest(strip, job.checkpoint.files)
        if ours.digest(file.path, at, stop) != wanted:
            return False
        at = stop
    return True


def _digest(strip: Strip, files: Files) -> str:
    if isinstance(strip, Constant):
        return digest_of(strip.data)
    (block,) = strip  # parts are cut out one by one
    if block.stride == block.row_bytes:
        return files.digest(block.file, block.offset, block.offset + block.nbytes)
    state, batch = hasher(), max(1, BLOCK_BYTES // block.stride)
    for row in range(0, block.rows, batch):
        count = min(batch, block.rows - row)
        span = memoryview(bytearray((count - 1) * block.stride + block.row_bytes))
        files.read_into(block.file, block.offset + row * block.stride, span)
        for start in range(0, len(span), block.stride):
            state.update(span[start : start + block.row_bytes])
    return state.hexdigest()


def _report(outcome: Outcome, source: Path, out: Path, job: _Job) -> UnfuseReport:
    written: Literal["unfused", "copied"] = "unfused" if job.split or job.restored else "copied"
    verdicts: dict[str, Literal["already_done", "would_unfuse"]] = {
        "stands": "already_done",
        "would_write": "would_unfuse",
    }
    names = tuple(shard.file.path for shard in job.shards)
    return UnfuseReport(
        verdict=verdicts.get(outcome.kind, written),
        source=str(source),
        out=str(out),
        by_manifest=job.manifest is not None,
        layers=job.checkpoint.config.num_hidden_layers,
        split=job.split,
        restored=job.restored,
        source_tensors=len(job.checkpoint.tensors),
        output_tensors=sum(len(shard.tensors) for shard in job.shards),
        output_bytes=job.size,
        shards=names,
        identical=job.identical,
        reordered=tuple(name for name in names if job.manifest is not None and name not in job.identical),
        side_files=tuple(side.path for side in job.checkpoint.side_files),
        left_out=tuple(item for item in job.checkpoint.left_out if item.path not in {MANIFEST, CHECKSUMS}),
        warnings=(*job.warnings, *outcome.warnings),
    )
