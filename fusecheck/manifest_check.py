"""A manifest held against the files that it describes. A manifest that contradicts them is a defect of OUT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusecheck import digest
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import CONFIG
from fusecheck.exact import Finding, Slice, home, join_of
from fusecheck.header import TensorInfo
from fusecheck.manifest import Manifest, TensorEntry
from fusecheck.mapping import LAYOUT
from fusecheck.quantisation import Join
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
    """The places that the manifest gives each part are those of the weight_loaders."""
    method = out.config.quantisation.method
    for name, entry in manifest.tensors.items():
        tensor = out.tensors.get(name)
        if not entry.parts or tensor is None:
            continue
        place = home(entry.parts[0].name)
        if place is None or place.fused != name or place.siblings != tuple(part.name for part in entry.parts):
            yield Finding("the manifest joins it from other parts than the mapping does", MANIFEST, name)
            continue
        join = join_of(method, place.suffix, len(tensor.shape))
        rules = out.config.rows(place.packing)
        if join is None or join.value != entry.join or [p.shard_id for p in entry.parts] != [r.shard_id for r in rules]:
            yield Finding("the manifest joins its parts in another way than the mapping does", MANIFEST, name)
            continue
        if not _tiles(entry, tensor, join) or (
            place.suffix in {"weight", "bias"} and [p.shard_size for p in entry.parts] != [r.shard_size for r in rules]
        ):
            yield Finding("the manifest gives its parts other rows than the weight_loader does", MANIFEST, name)


def _tiles(entry: TensorEntry, tensor: TensorInfo, join: Join) -> bool:
    """Whether the parts follow one another and fill the joined axis, in the shares that the packing's rows have."""
    axis = {Join.ROWS: 0, Join.COLUMNS: 1}.get(join)
    if axis is None:
        return all(part.shard_offset == 0 for part in entry.parts)
    at = 0
    for part in entry.parts:
        if part.shard_offset != at:
            return False
        at += part.shard_size
    return at == tensor.shape[axis]


def _check_tensor_digests(
    manifest: Manifest, out: Checkpoint, found: dict[tuple[str, str], str | None]
) -> Iterator[Finding]:
    for name, entry in manifest.tensors.items():
        tensor = out.tensors.get(name)
        if tensor is None:
            yield Finding("is in the manifest but not in OUT", MANIFEST, name)
            continue
        pairs = [(part.name, part.digest) for part in entry.parts if part.data is None]
        pairs = pairs if entry.parts else [(name, entry.digest)]
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
