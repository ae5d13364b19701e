"""The files of a source as a manifest records them: shards with their very headers, config.json, what comes out identical."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice

from fusecheck.beside import check_config
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import CONFIG
from fusecheck.digest import digest_of
from fusecheck.errors import CheckpointError
from fusecheck.header import metadata_orders
from fusecheck.manifest import Manifest, SourceShard
from fusecheck.mapping import OWN_KEY
from fusecheck.plan import OutputTensor, PlannedShard, plan_shard
from fusecheck.shards import SHARD_NAME, natural_key
from fusecheck.sidefiles import MANIFEST

MAX_ORDERS = 120
"""Orders of the keys of one `__metadata__` that are tried: all of five keys. safetensors writes them in any order."""

REMEDY = f"remove {MANIFEST} to split it by names and {CONFIG} alone"
"""What to do where OUT is not what its manifest describes."""


def check_files(manifest: Manifest, checkpoint: Checkpoint) -> None:
    """The manifest describes these very weight files: the digests of their headers vouch for dtypes and shapes."""
    described = {name: (file.size, file.header_digest) for name, file in manifest.files.items()}
    for shard in checkpoint.shards:
        if described.pop(shard.name, None) != (shard.size, shard.header_digest):
            raise CheckpointError(f"is not the file that {MANIFEST} describes", file=shard.name, remedy=REMEDY)
    if described:
        raise CheckpointError(f"names what is not there: {next(iter(described))}", file=MANIFEST, remedy=REMEDY)


def recorded_shards(
    manifest: Manifest, outputs: Iterable[OutputTensor], places: Mapping[str, str]
) -> tuple[PlannedShard, ...]:
    """Every weight file of the source. `places`: tensor -> its shard. CheckpointError where that is none of the source."""
    names = sorted(manifest.source_shards, key=natural_key)
    odd = next((name for name in names if not SHARD_NAME.fullmatch(name)), None)
    if odd is not None:
        raise CheckpointError("names a shard that is no plain safetensors file name", file=MANIFEST, found=odd)
    groups: dict[str, list[OutputTensor]] = {name: [] for name in names}
    for output in outputs:
        shard = places.get(output.name, "")
        if shard not in groups:
            raise CheckpointError("puts it into a shard of no source", file=MANIFEST, tensor=output.name, found=shard)
        groups[shard].append(output)
    recorded = manifest.source_shards
    return tuple(
        _as_recorded(plan_shard(name, groups[name], without_own(recorded[name].metadata)), recorded[name])
        for name in names
    )


def without_own(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    """What is written is split, whatever the source was that is recorded."""
    return None if metadata is None else {key: value for key, value in metadata.items() if key != OWN_KEY}


def _as_recorded(shard: PlannedShard, recorded: SourceShard) -> PlannedShard:
    """The shard with the very header that the original had, where that was in canonical form; else as it is."""
    heads = metadata_orders(shard.file.head, recorded.metadata or {})
    head = next((head for head in islice(heads, MAX_ORDERS) if digest_of(head) == recorded.header_digest), None)
    return shard if head is None else replace(shard, file=replace(shard.file, head=head))


def recorded_config(manifest: Manifest, checkpoint: Checkpoint) -> tuple[bytes, list[str]]:
    """config.json as it was before GPTQ's list of quantised modules; one that was edited since, as it is."""
    if manifest.config_original is not None:
        if any(check_config(checkpoint, None, manifest.config_original)):
            raise CheckpointError(
                f"was edited after it was fused, so the original in {MANIFEST} is not this one",
                file=CONFIG,
                remedy=f"undo the edit, or {REMEDY}",
            )
        return manifest.config_original.encode(), []
    edited = digest_of(checkpoint.config_text) != manifest.config.digest
    return checkpoint.config_text, [f"{CONFIG} was edited after it was fused; copied as it is"] if edited else []


def identical(manifest: Manifest, shards: Iterable[PlannedShard]) -> Iterator[str]:
    """Weight files that are to be byte for byte those of the source, as far as sizes and headers say."""
    for shard in shards:
        recorded = manifest.source_shards[shard.file.path]
        if (recorded.size, recorded.header_digest) == (shard.file.size, digest_of(shard.file.head)):
            yield shard.file.path
