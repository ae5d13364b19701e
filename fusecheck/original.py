"""What a fused checkpoint was made of: as its manifest records it, or as names and config.json alone say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusecheck.beside import declaration
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import CONFIG
from fusecheck.digest import digest_of
from fusecheck.errors import CheckpointError, UnsupportedCheckpoint
from fusecheck.exact_ranks import outside
from fusecheck.files import MAX_JSON_BYTES
from fusecheck.forms import Join
from fusecheck.group import FusedTensor
from fusecheck.manifest import Manifest, TensorEntry
from fusecheck.mapping import HEADS, LAYOUT, OWN_KEY, ShardRows
from fusecheck.model import Model, survey
from fusecheck.plan import (
    OutputTensor,
    PlannedFile,
    PlannedShard,
    by_source_shard,
    copied,
    index_text,
    plan_shard,
    recorded_index,
    whole_file,
)
from fusecheck.produce import side_files
from fusecheck.shards import INDEX
from fusecheck.sidefiles import MANIFEST
from fusecheck.source_files import REMEDY, check_files, identical, recorded_config, recorded_shards, without_own
from fusecheck.splitting import split_tensors, weight_shape
from fusecheck.whole import whole_tensors


@dataclass(frozen=True, slots=True)
class Original:
    """Everything that is decided before the first byte is written. `files` begins with those of `shards`."""

    checkpoint: Checkpoint
    manifest: Manifest | None
    shards: tuple[PlannedShard, ...]
    files: tuple[PlannedFile, ...]
    digests: Mapping[tuple[str, int], tuple[str, ...]]
    """(weight file, number of the strip) -> what the manifest records of the bytes of each block."""
    split: int
    restored: tuple[str, ...]
    identical: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def original_of(checkpoint: Checkpoint, manifest: Manifest | None) -> Original:
    """Survey, and plan the split form. CheckpointError where manifest and folder contradict each other."""
    if checkpoint.ranked:
        return _by_ranks(checkpoint, manifest)
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


def _by_names(checkpoint: Checkpoint, model: Model) -> Original:
    untouched = not model.fused and not any(OWN_KEY in (shard.metadata or {}) for shard in checkpoint.shards)
    by_name = {shard.name: shard for shard in checkpoint.shards}
    shards = []
    for group in by_source_shard(split_tensors(checkpoint.tensors, model.fused, checkpoint.config)):
        shard = by_name[group[0].source.shard]
        if untouched:
            shards.append(PlannedShard(tuple(group), whole_file(shard.name, shard.size)))
        else:
            shards.append(plan_shard(shard.name, group, without_own(shard.metadata)))
    index = None
    if checkpoint.index_metadata is not None and untouched:
        index = checkpoint.files.read(INDEX, MAX_JSON_BYTES)
    elif checkpoint.index_metadata is not None or len(checkpoint.shards) > 1:
        index = index_text(shards, checkpoint.index_metadata)
    return Original(
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


def _by_manifest(checkpoint: Checkpoint, model: Model, manifest: Manifest) -> Original:
    """The source of `fuse`, as the manifest records it. The places of the parts are worked out anew, and have to agree."""
    _check_described(manifest, checkpoint)
    wholes = _recorded(manifest, model)
    restored = tuple(_dropped(manifest, checkpoint, model))
    outputs = [*split_tensors(checkpoint.tensors, wholes, checkpoint.config), *restored]
    origins = _origins(manifest)
    shards = recorded_shards(manifest, outputs, {name: shard for name, (shard, _) in origins.items()})
    digests = {
        (shard.file.path, number): (origins[tensor.name][1],)
        for shard in shards
        for number, tensor in enumerate(shard.tensors)
    }
    heads = tuple(head.name for head in restored)
    made = _as_recorded(checkpoint, manifest, shards, digests, len(wholes), heads, model.warnings)
    kept = sum(whole not in wholes for whole in model.fused)
    if not kept:
        return made
    note = (
        f"{kept} tensors were fused already in the source that {MANIFEST} records, and stay so; "
        "unfuse OUT once more to split them"
    )
    return replace(made, warnings=(*made.warnings, note))


def _as_recorded(
    checkpoint: Checkpoint,
    manifest: Manifest,
    shards: tuple[PlannedShard, ...],
    digests: Mapping[tuple[str, int], tuple[str, ...]],
    split: int,
    restored: tuple[str, ...],
    warnings: tuple[str, ...] = (),
) -> Original:
    """The shards, with index and config.json as the manifest records those."""
    index = None if manifest.source_index is None else recorded_index(shards, manifest.source_index)
    config_text, edits = recorded_config(manifest, checkpoint)
    return Original(
        checkpoint=checkpoint,
        manifest=manifest,
        shards=shards,
        files=_files(checkpoint, shards, index, config_text),
        digests=digests,
        split=split,
        restored=restored,
        identical=tuple(identical(manifest, shards)),
        warnings=(*checkpoint.warnings, *warnings, *edits),
    )


def _by_ranks(checkpoint: Checkpoint, manifest: Manifest | None) -> Original:
    """What was cut for ranks, put together again."""
    if manifest is None or manifest.ranks is None:
        raise UnsupportedCheckpoint(
            f"is cut for ranks, and no {MANIFEST} says out of what", file=checkpoint.shards[0].name
        )
    entry = manifest.ranks
    check_files(manifest, checkpoint)
    if digest_of(checkpoint.config_text) != manifest.config.digest:
        raise CheckpointError(
            "was edited after the ranks were cut by it, so it no longer says what they hold",
            file=CONFIG,
            remedy="undo the edit",
        )
    twin = outside(entry.sources, checkpoint.config).get("lm_head.weight")
    if entry.left_out:
        raise UnsupportedCheckpoint(
            "had no place in the layout, and its bytes are not here", file=MANIFEST, tensor=next(iter(entry.left_out))
        )
    made = whole_tensors(checkpoint, manifest)
    by_name = {tensor.output.name: tensor for tensor in made}
    outputs = [tensor.output for tensor in made]
    for name, dropped in manifest.dropped.items():
        if dropped.same_as not in by_name or name not in HEADS or dropped.same_as != twin:
            raise CheckpointError("cannot have been dropped", file=MANIFEST, tensor=name, found=dropped.same_as)
        same = by_name[dropped.same_as]
        by_name[name] = replace(same, output=same.output._replace(name=name))
        outputs.append(by_name[name].output)
    places = {**entry.sources, **{name: dropped.shard for name, dropped in manifest.dropped.items()}}
    shards = recorded_shards(manifest, outputs, places)
    digests: dict[tuple[str, int], tuple[str, ...]] = {}
    for shard in shards:
        found = [digest for tensor in shard.tensors for digest in by_name[tensor.name].digests]
        digests |= {(shard.file.path, number): strip for number, strip in enumerate(found)}
    split = sum(len(tensor.output.strips) > 1 or len(tensor.digests[0]) > 1 for tensor in made)
    return _as_recorded(checkpoint, manifest, shards, digests, split, tuple(manifest.dropped))


def _check_described(manifest: Manifest, checkpoint: Checkpoint) -> None:
    """The manifest describes these very tensors."""
    if manifest.layout != LAYOUT:
        raise UnsupportedCheckpoint("declares another layout", file=MANIFEST, found=manifest.layout, wanted=LAYOUT)
    check_files(manifest, checkpoint)
    tensors = checkpoint.tensors
    odd = next((name for name in manifest.tensors if name not in tensors), None)
    if odd is not None:
        raise CheckpointError(f"names what is not there: {odd}", file=MANIFEST, remedy=REMEDY)
    new = next((tensor for name, tensor in tensors.items() if name not in manifest.tensors), None)
    if new is not None:
        raise CheckpointError(f"is not in {MANIFEST}", file=new.shard, tensor=new.name, remedy=REMEDY)


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
