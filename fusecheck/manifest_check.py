"""A manifest held against the files that it describes. A manifest that contradicts them is a defect of OUT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusecheck import digest
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import CONFIG
from fusecheck.exact import Finding, Slice
from fusecheck.manifest import Manifest, PartEntry
from fusecheck.mapping import LAYOUT, PACKINGS
from fusecheck.sidefiles import MANIFEST


def check_manifest(
    manifest: Manifest, out: Checkpoint, slices: Sequence[Slice], digests: Sequence[str | None], notes: list[str]
) -> Iterator[Finding]:
    """Findings for every statement of the manifest that OUT's files do not bear out; `digests` are those of the slices."""
    if manifest.layout != LAYOUT:
        yield Finding(f"declares the layout {manifest.layout!r}, wanted {LAYOUT!r}", MANIFEST)
    yield from _check_shards(manifest, out)
    yield from _check_rows(manifest, out)
    if not digest.available():
        return
    found = {(part.out.name, part.name): value for part, value in zip(slices, digests, strict=True)}
    yield from _check_tensor_digests(manifest, out, found)
    yield from _check_file_digests(manifest, out)
    if manifest.config.digest != digest.digest_of(out.config_text):
        yield Finding("differs from the manifest's digest", CONFIG)
    for side in out.side_files:
        entry = manifest.side_files.get(side.path)
        if entry is not None and entry.digest != out.files.digest(side.path):
            yield Finding("side file differs from the manifest's digest", side.path)
    unread = sorted(shard for shard in manifest.source_shards if not manifest.source_shards[shard].size)
    if unread:
        notes.append(f"the manifest gives no size for {', '.join(unread)}")


def _check_shards(manifest: Manifest, out: Checkpoint) -> Iterator[Finding]:
    for shard in out.shards:
        entry = manifest.files.get(shard.name)
        if entry is None:
            yield Finding("is not in the manifest", shard.name)
            continue
        if entry.size != shard.size:
            yield Finding(f"has {shard.size} bytes, the manifest says {entry.size}", shard.name)
        if shard.header_digest is not None and entry.header_digest != shard.header_digest:
            yield Finding("header differs from the manifest's digest", shard.name)
        if dict(shard.metadata or {}) != dict(manifest.metadata):
            yield Finding("__metadata__ differs from the manifest's", shard.name)
    present = {shard.name for shard in out.shards}
    for name in manifest.files:
        if name not in present:
            yield Finding("is in the manifest but not in OUT", name)


def _check_rows(manifest: Manifest, out: Checkpoint) -> Iterator[Finding]:
    """The rows that the manifest gives each part are those of the weight_loaders."""
    rules = {packing.fused: packing for packing in PACKINGS}
    for name, entry in manifest.tensors.items():
        if not entry.parts:
            continue
        module = name.rpartition(".")[0]
        packing = next((rule for fused, rule in rules.items() if module.endswith(f".{fused}")), None)
        if packing is None:
            yield Finding("the manifest calls it fused", MANIFEST, name)
            continue
        base, suffix = module.removesuffix(packing.fused), name.rpartition(".")[2]
        modules = dict(packing.parts)
        wanted = [
            (f"{base}{modules[rows.shard_id]}.{suffix}", rows.shard_id, rows.shard_offset, rows.shard_size)
            for rows in out.config.rows(packing)
        ]
        if [_row(part) for part in entry.parts] != wanted:
            yield Finding("the manifest gives its parts other rows than the weight_loader does", MANIFEST, name)


def _row(part: PartEntry) -> tuple[str, object, int, int]:
    return part.name, part.shard_id, part.shard_offset, part.shard_size


def _check_tensor_digests(
    manifest: Manifest, out: Checkpoint, found: dict[tuple[str, str], str | None]
) -> Iterator[Finding]:
    for name, entry in manifest.tensors.items():
        tensor = out.tensors.get(name)
        if tensor is None:
            yield Finding("is in the manifest but not in OUT", MANIFEST, name)
            continue
        pairs = [(part.name, part.digest) for part in entry.parts] or [(name, entry.digest)]
        for part_name, wanted in pairs:
            if found.get((name, part_name)) not in {None, wanted}:
                part = part_name if entry.parts else None
                yield Finding("differs from the manifest's digest", tensor.shard, name, part)
        if entry.parts and digest.digest_over(part.digest for part in entry.parts) != entry.digest:
            yield Finding("the manifest's digest is not that over its parts' digests", MANIFEST, name)
    for name, tensor in out.tensors.items():
        if name not in manifest.tensors:
            yield Finding("is in OUT but not in the manifest", tensor.shard, name)


def _check_file_digests(manifest: Manifest, out: Checkpoint) -> Iterator[Finding]:
    order: dict[str, list[str]] = {}
    for name, tensor in out.tensors.items():
        if name in manifest.tensors:
            order.setdefault(tensor.shard, []).append(manifest.tensors[name].digest)
    for shard, entry in manifest.files.items():
        if digest.digest_over(order.get(shard, ())) != entry.digest:
            yield Finding("the manifest's digest is not that over its tensors' digests", shard)
