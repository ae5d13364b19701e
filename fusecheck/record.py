"""What was read and what was written -> the entries of a manifest, and of SHA256SUMS; and a manifest held against a source.

The plan and the manifest do not know each other: they meet here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from fusecheck.checkpoint import Checkpoint
from fusecheck.digest import digest_of, digest_over
from fusecheck.errors import SystemFailure
from fusecheck.execute import Written
from fusecheck.forms import Join
from fusecheck.group import Group
from fusecheck.manifest import Manifest, PartEntry, SourceShard, TensorEntry
from fusecheck.plan import OutputTensor


def source_shards(checkpoint: Checkpoint) -> dict[str, SourceShard]:
    """The weight files that were read: size, header digest, `__metadata__`."""
    return {
        shard.name: SourceShard(shard.size, shard.header_digest or "", shard.metadata) for shard in checkpoint.shards
    }


def file_digest(written: Written) -> str:
    """Of a copied file: its one block, or, for an empty file, its empty head."""
    return written.strips[0][0] if written.strips else written.head


def tensor_entries(
    checkpoint: Checkpoint, tensors: Sequence[OutputTensor], digests: Sequence[tuple[str, ...]]
) -> dict[str, TensorEntry]:
    """What one output shard holds; `digests` are those of its strips, block by block."""
    entries, at = {}, 0
    for tensor in tensors:
        own = [digest for strip in digests[at : at + len(tensor.strips)] for digest in strip]
        at += len(tensor.strips)
        if tensor.group is None:
            entries[tensor.name] = TensorEntry(own[0], tensor.source.shard)
        else:
            parts = _part_entries(checkpoint, tensor.group, own)
            digest = digest_over(part.digest for part in parts)
            entries[tensor.name] = TensorEntry(digest, None, parts, tensor.group.join.value)
    return entries


def piece_digests(tensors: Sequence[OutputTensor], digests: Sequence[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """What each tensor of a rank's file is made of; `digests` as above."""
    entries, at = {}, 0
    for tensor in tensors:
        found = digests[at : at + len(tensor.strips)]
        at += len(tensor.strips)
        entries[tensor.name] = tuple(digest for strip in found for digest in strip)
    return entries


def _part_entries(checkpoint: Checkpoint, group: Group, digests: Sequence[str]) -> tuple[PartEntry, ...]:
    entries = []
    for number, part in enumerate(group.parts):
        data = checkpoint.peek(part.tensor) if group.join is Join.SHAPE else None
        digest = digest_of(data) if data is not None else digests[number if len(digests) > 1 else 0]
        entries.append(
            PartEntry(
                name=part.tensor.name,
                shard=part.tensor.shard,
                shard_id=part.rows.shard_id,
                shard_offset=part.rows.shard_offset,
                shard_size=part.rows.shard_size,
                digest=digest,
                data=None if data is None else data.hex(),
            )
        )
    return tuple(entries)


def checksums_text(folder: Path, paths: Sequence[str]) -> bytes:
    """For `sha256sum -c`; SHA-256 is also what the hub's LFS knows a file by."""
    lines = []
    for path in sorted(paths):
        try:
            with (folder / path).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise SystemFailure.from_os(error, path, "read back") from None
        lines.append(checksum_line(path, digest))
    return "".join(lines).encode()


def checksum_line(path: str, digest: str) -> str:
    """One line for `sha256sum -c`: a backslash before the digest announces the escapes that sha256sum writes and reads."""
    name = path.replace("\\", "\\\\")
    return f"{chr(92) if name != path else ''}{digest}  {name}\n"


def same_weights(manifest: Manifest, checkpoint: Checkpoint) -> bool:
    """Whether every source tensor has the digest that the manifest records."""
    recorded = {name: entry.digest for name, entry in manifest.tensors.items() if not entry.parts}
    recorded |= {part.name: part.digest for entry in manifest.tensors.values() for part in entry.parts}
    recorded |= {name: recorded.get(entry.same_as, "") for name, entry in manifest.dropped.items()}
    tensors = checkpoint.tensors.values()
    return all(recorded.get(t.name) == checkpoint.files.digest(t.shard, t.start, t.stop) for t in tensors)
