"""unfuse: a fused checkpoint in, the split one that it was made from out, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusecheck.checkpoint import Checkpoint, open_checkpoint, open_folder
from fusecheck.errors import CheckpointError
from fusecheck.execute import Written
from fusecheck.header import LIBRARY_HEADER_BYTES, MAX_HEADER_BYTES
from fusecheck.hub import resolve
from fusecheck.manifest import Manifest, read_manifest
from fusecheck.original import Original, original_of
from fusecheck.plan import OutputTensor
from fusecheck.produce import Outcome, produce, write_files
from fusecheck.reader import Progress
from fusecheck.record import file_digest
from fusecheck.sidefiles import CHECKSUMS, MANIFEST, LeftOut
from fusecheck.standing import stands
from fusecheck.target import TargetOccupied, check_target

DEFAULT_THREADS = 2


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
    with open_checkpoint(
        found.folder, follow_links=follow_links, max_header_bytes=max_header_bytes, ranked=True
    ) as checkpoint:
        original = original_of(checkpoint, read_manifest(found.folder))
        outcome = produce(
            place,
            found.folder,
            size=original.size,
            force=force,
            dry_run=dry_run,
            write=lambda _, folder: _write(original, folder, threads=threads, on_progress=on_progress),
            stands=lambda: stands(place, original.files, checkpoint.files, original.digests),
        )
        return _report(outcome, found.folder, place, original)


def _write(original: Original, folder: Path, *, threads: int, on_progress: Progress | None) -> list[str]:
    """Write all files below `folder` and check them: against the manifest's digests, and as a checkpoint."""
    written = write_files(original.files, original.checkpoint.files, folder, threads=threads, on_progress=on_progress)
    original.checkpoint.files.check_unchanged()
    _read_back(folder, original)
    if original.manifest is None:
        return []
    for shard, made in zip(original.shards, written, strict=False):
        tensors = [tensor for tensor in shard.tensors for _ in tensor.strips]
        for number, (tensor, digests) in enumerate(zip(tensors, made.strips, strict=True)):
            wanted = original.digests[shard.file.path, number]
            if digests != wanted:
                raise _differs(tensor, ", ".join(digests), ", ".join(wanted))
    made_of = dict(zip((file.path for file in original.files), written, strict=True))
    return list(_side_file_warnings(original.manifest, original.checkpoint, made_of))


def _read_back(folder: Path, original: Original) -> None:
    """What is published can be read by the rules that SRC was read by; a manifest might say anything of its source."""
    with open_folder(folder, max_header_bytes=LIBRARY_HEADER_BYTES) as found:
        if {shard.name for shard in found.shards} != {shard.file.path for shard in original.shards}:
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


def _report(outcome: Outcome, source: Path, out: Path, original: Original) -> UnfuseReport:
    written: Literal["unfused", "copied"] = "unfused" if original.split or original.restored else "copied"
    verdicts: dict[str, Literal["already_done", "would_unfuse"]] = {
        "stands": "already_done",
        "would_write": "would_unfuse",
    }
    names = tuple(shard.file.path for shard in original.shards)
    return UnfuseReport(
        verdict=verdicts.get(outcome.kind, written),
        source=str(source),
        out=str(out),
        by_manifest=original.manifest is not None,
        layers=original.checkpoint.config.num_hidden_layers,
        split=original.split,
        restored=original.restored,
        source_tensors=len(original.checkpoint.tensors),
        output_tensors=sum(len(shard.tensors) for shard in original.shards),
        output_bytes=original.size,
        shards=names,
        identical=original.identical,
        reordered=tuple(name for name in names if original.manifest is not None and name not in original.identical),
        side_files=tuple(side.path for side in original.checkpoint.side_files),
        left_out=tuple(item for item in original.checkpoint.left_out if item.path not in {MANIFEST, CHECKSUMS}),
        warnings=(*original.warnings, *outcome.warnings),
    )
