"""fuse: a split checkpoint in, a complete fused one out, or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import fusecheck
from fusecheck.checkpoint import INDEX, Checkpoint, open_checkpoint
from fusecheck.config import CONFIG
from fusecheck.digest import digest_over
from fusecheck.errors import FusecheckError
from fusecheck.execute import Written, execute
from fusecheck.header import MAX_HEADER_BYTES
from fusecheck.hub import Source, resolve
from fusecheck.manifest import (
    FileEntry,
    Manifest,
    OutputFile,
    PartEntry,
    Provenance,
    SourceShard,
    TensorEntry,
    from_text,
    to_text,
)
from fusecheck.mapping import LAYOUT
from fusecheck.model import Model, survey
from fusecheck.plan import (
    OutputTensor,
    Piece,
    PlannedFile,
    PlannedShard,
    by_source_shard,
    index_text,
    merge_metadata,
    output_tensors,
    plan_shards,
)
from fusecheck.publish import TargetTaken, staging_folder, write_file
from fusecheck.sidefiles import MANIFEST, LeftOut
from fusecheck.target import TargetOccupied, check_target, require_space

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total), from any thread, one call at a time."""

DEFAULT_THREADS = 2


@dataclass(frozen=True, slots=True)
class FuseReport:
    """What `fuse` did, or would do. Counts are tensors; sizes are bytes."""

    verdict: Literal["fused", "copied", "already_done", "would_fuse"]
    source: str
    out: str
    layers: int
    fused: int
    """Fused tensors that were made."""
    already_fused: int
    source_tensors: int
    output_tensors: int
    output_bytes: int
    shards: tuple[str, ...]
    side_files: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that is decided before the first byte is written."""

    checkpoint: Checkpoint
    model: Model
    shards: tuple[PlannedShard, ...]
    metadata: dict[str, str]
    files: tuple[PlannedFile, ...]
    warnings: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def fuse(
    source: str | Path,
    out: str | Path,
    *,
    dry_run: bool = False,
    force: bool = False,
    follow_links: bool = False,
    max_header_bytes: int = MAX_HEADER_BYTES,
    threads: int = DEFAULT_THREADS,
    on_progress: Progress | None = None,
) -> FuseReport:
    """Write the fused form of the checkpoint in `source` to the folder `out`.

    OUT appears complete and durable, or not at all. Raises UsageError (exit 2), CheckpointError (3), SystemFailure (4).
    """
    found = resolve(os.fspath(source))
    target_path = Path(out) if os.fspath(out) else Path()
    occupied: TargetOccupied | None = None
    try:
        target = check_target(target_path, found.folder, force=force)
    except TargetOccupied as error:
        occupied = error
    with open_checkpoint(found.folder, follow_links=follow_links, max_header_bytes=max_header_bytes) as checkpoint:
        job = _decide(checkpoint)
        if occupied is not None:
            if not _is_result(target_path, job):
                raise occupied
            return _report("already_done", found, target_path, job, ())
        if dry_run:
            return _report("would_fuse", found, target_path, job, ())
        with staging_folder(target) as staging:
            require_space(target, job.size)
            written = _write(job, staging.path, threads=threads, on_progress=on_progress)
            checkpoint.files.check_unchanged()
            manifest = _manifest(job, written, found.provenance(target.path))
            write_file(staging.path / MANIFEST, to_text(manifest))
            try:
                staging.commit()
            except TargetTaken:
                if not _is_result(target_path, job):
                    raise
                return _report("already_done", found, target_path, job, ())
        warnings = (*_compare_heads(job, manifest), *staging.warnings)
        return _report("fused" if job.model.split else "copied", found, target_path, job, warnings)


def _decide(checkpoint: Checkpoint) -> _Job:
    model = survey(checkpoint.tensors, checkpoint.config)
    outputs = output_tensors(checkpoint.tensors, model)
    metadata, dropped = merge_metadata([shard.metadata for shard in checkpoint.shards], fusecheck.__version__)
    shards = plan_shards(by_source_shard(outputs), metadata)
    files = [shard.file for shard in shards]
    if len(shards) > 1:
        files.append(PlannedFile(INDEX, index_text(shards, checkpoint.index_metadata), ()))
    files.append(PlannedFile(CONFIG, checkpoint.config_text, ()))
    files += [PlannedFile(side.path, b"", _whole(side.path, side.size)) for side in checkpoint.side_files]
    warnings = [*checkpoint.warnings, *model.warnings]
    if dropped:
        warnings.append(f"__metadata__ keys on which the shards disagree are dropped: {', '.join(dropped)}")
    return _Job(checkpoint, model, shards, metadata, tuple(files), tuple(warnings))


def _whole(path: str, size: int) -> tuple[Piece, ...]:
    return (Piece(path, 0, size),) if size else ()


def _write(job: _Job, folder: Path, *, threads: int, on_progress: Progress | None) -> tuple[Written, ...]:
    total, done = job.size, 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        if on_progress is not None:
            on_progress(done, total)

    return execute(job.files, job.checkpoint.files, folder, threads=threads, on_bytes=on_bytes)


def _manifest(job: _Job, written: Sequence[Written], provenance: Provenance) -> Manifest:
    made = {file.path: (file, digests) for file, digests in zip(job.files, written, strict=True)}
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, OutputFile] = {}
    for shard in job.shards:
        file, digests = made[shard.file.path]
        entries = _tensor_entries(shard.tensors, digests.pieces)
        tensors |= entries
        files[file.path] = OutputFile(file.size, digests.head, digest_over(entry.digest for entry in entries.values()))
    checkpoint = job.checkpoint
    return Manifest(
        fusecheck_version=fusecheck.__version__,
        layout=LAYOUT,
        provenance=provenance,
        options=_options(),
        source_shards=_source_shards(checkpoint),
        source_index=checkpoint.index_metadata,
        files=files,
        tensors=tensors,
        config=FileEntry(len(checkpoint.config_text), made[CONFIG][1].head),
        side_files={
            side.path: FileEntry(side.size, _file_digest(made[side.path][1])) for side in checkpoint.side_files
        },
        metadata=job.metadata,
    )


def _options() -> dict[str, object]:
    return {}


def _source_shards(checkpoint: Checkpoint) -> dict[str, SourceShard]:
    return {
        shard.name: SourceShard(shard.size, shard.header_digest or "", shard.metadata) for shard in checkpoint.shards
    }


def _file_digest(written: Written) -> str:
    """Of a copied file: its one piece, or, for an empty file, its empty head."""
    return written.pieces[0] if written.pieces else written.head


def _tensor_entries(tensors: Sequence[OutputTensor], digests: Sequence[str]) -> dict[str, TensorEntry]:
    entries, at = {}, 0
    for tensor in tensors:
        own = digests[at : at + len(tensor.sources)]
        at += len(own)
        if tensor.group is None:
            entries[tensor.name] = TensorEntry(own[0], tensor.sources[0].shard)
        else:
            parts = tuple(
                PartEntry(
                    name=part.tensor.name,
                    shard=part.tensor.shard,
                    shard_id=part.rows.shard_id,
                    shard_offset=part.rows.shard_offset,
                    shard_size=part.rows.shard_size,
                    digest=digest,
                )
                for part, digest in zip(tensor.group.parts, own, strict=True)
            )
            entries[tensor.name] = TensorEntry(digest_over(own), None, parts)
    return entries


def _compare_heads(job: _Job, manifest: Manifest) -> tuple[str, ...]:
    """A tied model whose stored head differs from its embedding: engines use the one or the other."""
    head, embedding = job.model.head, job.model.embedding
    if head is None or embedding is None or not job.checkpoint.config.tie_word_embeddings:
        return ()
    one, other = job.checkpoint.tensors[head], job.checkpoint.tensors[embedding]
    if (one.dtype, manifest.tensors[head].digest) == (other.dtype, manifest.tensors[embedding].digest):
        return ()
    return (f"{head} differs from {embedding} although tie_word_embeddings is true; both are kept as they are",)


def _is_result(out: Path, job: _Job) -> bool:
    """Whether OUT is the complete result of this source, these options and this version."""
    planned = {file.path: file for file in job.files}
    try:
        found = {path.relative_to(out).as_posix(): path.lstat().st_size for path in out.rglob("*") if not path.is_dir()}
        if found.pop(MANIFEST, None) is None or found != {path: file.size for path, file in planned.items()}:
            return False
        manifest = from_text((out / MANIFEST).read_bytes())
        if any(not _starts_with(out / path, file.head) for path, file in planned.items()):
            return False
    except (OSError, FusecheckError):
        return False
    files = job.checkpoint.files
    return (
        manifest.fusecheck_version == fusecheck.__version__
        and manifest.options == _options()
        and manifest.source_shards == _source_shards(job.checkpoint)
        and manifest.source_index == job.checkpoint.index_metadata
        and {path: entry.digest for path, entry in manifest.side_files.items()}
        == {side.path: files.digest(side.path) for side in job.checkpoint.side_files}
    )


def _starts_with(path: Path, head: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(head)) == head


def _report(
    verdict: Literal["fused", "copied", "already_done", "would_fuse"],
    source: Source,
    out: Path,
    job: _Job,
    warnings: tuple[str, ...],
) -> FuseReport:
    return FuseReport(
        verdict=verdict,
        source=str(source.folder),
        out=str(out),
        layers=job.checkpoint.config.num_hidden_layers,
        fused=len(job.model.split),
        already_fused=len(job.model.fused),
        source_tensors=len(job.checkpoint.tensors),
        output_tensors=sum(len(shard.tensors) for shard in job.shards),
        output_bytes=job.size,
        shards=tuple(shard.file.path for shard in job.shards),
        side_files=tuple(side.path for side in job.checkpoint.side_files),
        left_out=job.checkpoint.left_out,
        warnings=(*job.warnings, *warnings),
    )
