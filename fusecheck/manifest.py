"""fusecheck.json: what an output was made from and every digest, as values <-> text. Pure; knows no plan.

Digest = BLAKE3, 64 hex digits. A fused tensor's digest is that over its parts' digests, a file's is that over its
tensors' digests in file order (each digest as its 32 raw bytes), so that each byte is hashed once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from fusecheck.engines.vllm_sharded import MAX_TP
from fusecheck.errors import CheckpointError, SystemFailure
from fusecheck.fields import count, digest, rows, table, text, texts
from fusecheck.json_text import strict_json
from fusecheck.mapping import ShardId
from fusecheck.provenance import Provenance, provenance_fields, read_provenance
from fusecheck.sidefiles import MANIFEST

SCHEMA_VERSION = 1

MAX_MEMBERS = 6_000_000
"""Most members of its JSON: a fused tensor of three parts has about two dozen."""

MAX_BYTES = 256 * 1024 * 1024
"""Largest manifest that is read."""


@dataclass(frozen=True, slots=True)
class SourceShard:
    """A source weight file: bytes, digest of its length prefix and header, its `__metadata__`."""

    size: int
    header_digest: str
    metadata: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class OutputFile:
    """An output weight file: bytes, digest of its length prefix and header, digest over its tensors' digests."""

    size: int
    header_digest: str
    digest: str


@dataclass(frozen=True, slots=True)
class PartEntry:
    """One split tensor inside a fused one: [shard_offset, shard_offset + shard_size) along the joined axis."""

    name: str
    shard: str
    shard_id: ShardId
    shard_offset: int
    shard_size: int
    digest: str
    data: str | None = None
    """Its bytes (hex), where the fused tensor does not hold them."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """An output tensor: copied from `shard`, or fused from `parts` (then `shard` is None)."""

    digest: str
    shard: str | None = None
    parts: tuple[PartEntry, ...] = ()
    join: str = "rows"
    """How the parts are joined: rows, columns, once (one copy for all), shape (computed anew)."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file copied byte for byte: its bytes and their digest."""

    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class DroppedTensor:
    """A source tensor that OUT does not repeat, since its bytes were proven equal to those of `same_as`."""

    shard: str
    same_as: str


@dataclass(frozen=True, slots=True)
class RanksEntry:
    """Where OUT is cut for the ranks of an engine: which, and what each file is made of."""

    engine: str
    versions: str
    """Of the engine: its keys change from one to the next."""
    tp: int
    numbers: tuple[int, ...]
    sources: Mapping[str, str]
    """Split tensor -> the source shard in which its bytes stood."""
    tensors: Mapping[str, Mapping[str, tuple[str, ...]]]
    """File -> tensor -> the digest of each piece that it is made of, in order: shares, padding, constants."""
    left_out: Mapping[str, str]
    """Source tensor without a place in the layout, whose bytes OUT does not hold -> its source shard."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole of fusecheck.json."""

    fusecheck_version: str
    layout: str
    provenance: Provenance
    options: Mapping[str, object]
    source_shards: Mapping[str, SourceShard]
    source_index: Mapping[str, object] | None
    """Metadata of the source's index; None where the source has no index."""
    files: Mapping[str, OutputFile]
    tensors: Mapping[str, TensorEntry]
    dropped: Mapping[str, DroppedTensor]
    left_split: Mapping[str, str]
    """Groups left split: the name that the fused weight would have had -> why."""
    config: FileEntry
    side_files: Mapping[str, FileEntry]
    metadata: Mapping[str, str]
    """`__metadata__` of every output shard."""
    config_original: str | None = None
    """The source's config.json, where OUT's gained GPTQ's list of quantised modules."""
    ranks: RanksEntry | None = None
    """Of `--target`; then `tensors` is empty."""


def to_text(manifest: Manifest) -> bytes:
    """The manifest as JSON: sorted keys, one space of indent, final newline; equal values give equal bytes."""
    value = {
        "schema_version": SCHEMA_VERSION,
        "fusecheck_version": manifest.fusecheck_version,
        "layout": manifest.layout,
        "provenance": provenance_fields(manifest.provenance),
        "options": dict(manifest.options),
        "source_shards": {name: _fields(shard) for name, shard in manifest.source_shards.items()},
        "source_index": manifest.source_index,
        "files": {name: _fields(file) for name, file in manifest.files.items()},
        "tensors": {name: _tensor_fields(entry) for name, entry in manifest.tensors.items()},
        "dropped": {name: _fields(entry) for name, entry in manifest.dropped.items()},
        "left_split": dict(manifest.left_split),
        "config": _fields(manifest.config),
        "side_files": {name: _fields(file) for name, file in manifest.side_files.items()},
        "metadata": dict(manifest.metadata),
        "config_original": manifest.config_original,
        **({} if manifest.ranks is None else {"ranks": _fields(manifest.ranks)}),  # 0.1.0 wrote none, and is read too
    }
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def from_text(blob: bytes) -> Manifest:
    """Read a manifest back. CheckpointError where it is malformed or of another schema."""
    value = strict_json(blob, file=MANIFEST, members=MAX_MEMBERS)
    found = value.get("schema_version") if isinstance(value, dict) else type(value).__name__
    if not isinstance(value, dict) or type(found) is not int or found != SCHEMA_VERSION:
        raise CheckpointError(
            "is no manifest of a known schema", file=MANIFEST, found=found, wanted=f"schema_version {SCHEMA_VERSION}"
        )
    try:
        return _manifest(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"is malformed: {type(error).__name__} {error}", file=MANIFEST) from None


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of an output folder, or None where it has none. CheckpointError where it is malformed."""
    path = folder / MANIFEST
    try:
        if not path.is_file():
            if path.is_symlink() or path.exists():
                raise CheckpointError("is no regular file", file=MANIFEST)
            return None
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError("is too large", file=MANIFEST, found=f"{path.stat().st_size} bytes")
        return from_text(path.read_bytes())
    except OSError as error:
        raise SystemFailure.from_os(error, MANIFEST, "read") from None


def _fields(value: object) -> dict[str, object]:
    names: tuple[str, ...] = type(value).__slots__  # type: ignore[attr-defined]
    return {name: getattr(value, name) for name in names}


def _tensor_fields(entry: TensorEntry) -> dict[str, object]:
    if entry.parts:
        parts = [{key: item for key, item in _fields(part).items() if item is not None} for part in entry.parts]
        return {"digest": entry.digest, "join": entry.join, "parts": parts}
    return {"digest": entry.digest, "shard": entry.shard}


def _manifest(value: dict[str, object]) -> Manifest:
    config = table(value, "config")
    return Manifest(
        fusecheck_version=text(value, "fusecheck_version"),
        layout=text(value, "layout"),
        provenance=read_provenance(table(value, "provenance")),
        options=table(value, "options"),
        source_shards={name: _source_shard(row) for name, row in rows(value, "source_shards")},
        source_index=None if value["source_index"] is None else table(value, "source_index"),
        files={
            name: OutputFile(count(row, "size"), digest(row, "header_digest"), digest(row, "digest"))
            for name, row in rows(value, "files")
        },
        tensors={name: _tensor_entry(row) for name, row in rows(value, "tensors")},
        dropped={name: DroppedTensor(text(row, "shard"), text(row, "same_as")) for name, row in rows(value, "dropped")},
        left_split=texts(table(value, "left_split")),
        config=FileEntry(count(config, "size"), digest(config, "digest")),
        side_files={
            name: FileEntry(count(row, "size"), digest(row, "digest")) for name, row in rows(value, "side_files")
        },
        metadata=texts(table(value, "metadata")),
        config_original=None if value["config_original"] is None else text(value, "config_original"),
        ranks=_ranks_entry(table(value, "ranks")) if "ranks" in value else None,
    )


def _source_shard(row: dict[str, object]) -> SourceShard:
    metadata = None if row["metadata"] is None else texts(table(row, "metadata"))
    return SourceShard(count(row, "size"), digest(row, "header_digest"), metadata)


def _ranks_entry(value: dict[str, object]) -> RanksEntry:
    numbers, tp = value["numbers"], count(value, "tp")
    if not isinstance(numbers, list) or any(type(rank) is not int or not 0 <= rank < tp for rank in numbers):
        raise TypeError("numbers")
    if not 1 <= tp <= MAX_TP:
        raise ValueError(tp)
    return RanksEntry(
        engine=text(value, "engine"),
        versions=text(value, "versions"),
        tp=tp,
        numbers=tuple(numbers),
        sources=texts(table(value, "sources")),
        tensors={file: {name: _digests(row, name) for name in row} for file, row in rows(value, "tensors")},
        left_out=texts(table(value, "left_out")),
    )


def _digests(row: dict[str, object], name: str) -> tuple[str, ...]:
    found = row[name]
    if not isinstance(found, list) or not found:
        raise TypeError(name)
    return tuple(digest({"digest": one}, "digest") for one in found)


def _tensor_entry(row: dict[str, object]) -> TensorEntry:
    if "parts" not in row:
        return TensorEntry(digest(row, "digest"), text(row, "shard"))
    parts = row["parts"]
    if not isinstance(parts, list) or not parts:
        raise TypeError("parts")
    join = text(row, "join")
    if join not in {"rows", "columns", "once", "shape", "stack"}:
        raise ValueError(join)
    return TensorEntry(digest(row, "digest"), None, tuple(_part_entry(part) for part in parts), join)


def _part_entry(part: dict[str, object]) -> PartEntry:
    return PartEntry(
        name=text(part, "name"),
        shard=text(part, "shard"),
        shard_id=_shard_id(part["shard_id"]),
        shard_offset=count(part, "shard_offset"),
        shard_size=count(part, "shard_size"),
        digest=digest(part, "digest"),
        data=bytes.fromhex(text(part, "data")).hex() if "data" in part else None,
    )


def _shard_id(value: object) -> ShardId:
    for known in get_args(ShardId):
        if type(value) is type(known) and value == known:  # True is no 1
            return cast("ShardId", known)
    raise ValueError(value)
