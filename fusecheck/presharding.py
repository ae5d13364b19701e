"""`--target`: which ranks are asked for, their weight files, and what the manifest says of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import fusecheck
from fusecheck.checkpoint import Checkpoint
from fusecheck.engines.vllm_sharded import LAYOUTS, MAX_TP
from fusecheck.errors import UsageError
from fusecheck.files import same_bytes
from fusecheck.header import TensorInfo
from fusecheck.hub import shard_groups
from fusecheck.manifest import DroppedTensor, RanksEntry
from fusecheck.model import Model
from fusecheck.plan import OutputTensor, PlannedShard, merge_metadata, plan_shard
from fusecheck.ranks import Ranks, check_ranks
from fusecheck.sharding import HEAD, rank_tensors
from fusecheck.splitting import split_view


def wanted_ranks(target: str | None, tp: int | None, numbers: str | None) -> Ranks | None:
    """The ranks that the options ask for; None without a target. UsageError where they contradict each other."""
    if target is None:
        if tp is not None or numbers is not None:
            raise UsageError(
                "--tp and --ranks say how a --target is cut", remedy="add --target vllm-sharded, or drop them"
            )
        return None
    layout = LAYOUTS.get(target)
    if layout is None:
        raise UsageError("--target has no such layout", found=target, wanted=", ".join(LAYOUTS))
    if tp is None or not 1 <= tp <= MAX_TP:
        raise UsageError("--target needs --tp, the number of ranks", found=tp, wanted=f"1 to {MAX_TP}")
    if numbers is None:
        return Ranks(layout, tp, tuple(range(tp)))
    if not re.fullmatch(r"[0-9]{1,5}(,[0-9]{1,5})*", numbers, re.ASCII):
        raise UsageError("--ranks is no list of ranks", found=numbers, wanted="such as 0,1")
    chosen = tuple(sorted({int(number) for number in numbers.split(",")}))
    if chosen[-1] >= tp:
        raise UsageError("--ranks names a rank beyond --tp", found=chosen[-1], wanted=f"0 to {tp - 1}")
    return Ranks(layout, tp, chosen)


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The weight files of all wanted ranks, and what of the source they do not hold."""

    shards: tuple[PlannedShard, ...]
    metadata: dict[str, str]
    lost_keys: tuple[str, ...]
    sources: dict[str, str]
    """Split tensor -> source shard."""
    dropped: dict[str, DroppedTensor]
    left_out: dict[str, str]


def rank_files(checkpoint: Checkpoint, model: Model, ranks: Ranks, max_shard_size: str | None) -> RankFiles:
    """Lay out every wanted rank. CheckpointError where the checkpoint cannot be cut like that."""
    check_ranks(checkpoint.config, ranks)
    view = split_view(checkpoint.tensors, (*model.fused, *model.stacked), checkpoint.config)
    metadata, lost_keys = merge_metadata(
        [shard.metadata for shard in checkpoint.shards], fusecheck.__version__, ranks.declared
    )
    tensors = rank_tensors(view, model, checkpoint.config, ranks)
    dropped, left_out = _spare_head(checkpoint, model)
    return RankFiles(
        tuple(_shards(tensors, ranks, max_shard_size, metadata)),
        metadata,
        lost_keys,
        {name: tensor.shard for name, tensor in view.items() if name not in dropped and name not in left_out},
        dropped,
        left_out,
    )


def _shards(
    tensors: Sequence[Sequence[OutputTensor]], ranks: Ranks, limit: str | None, metadata: dict[str, str]
) -> Iterable[PlannedShard]:
    """Part by part, all ranks of each: they read the same tensors, and are written in turn."""
    sizes = {tensor.name: tensor.nbytes for tensor in tensors[0]}
    groups = [list(sizes)] if limit is None else shard_groups(sizes, limit)
    for part, names in enumerate(groups):
        within = set(names)
        for rank, own in zip(ranks.numbers, tensors, strict=True):
            name = ranks.layout.file.format(rank=rank, part=part)
            yield plan_shard(name, [tensor for tensor in own if tensor.name in within], metadata)


def _spare_head(checkpoint: Checkpoint, model: Model) -> tuple[dict[str, DroppedTensor], dict[str, str]]:
    """A tied head that is stored beside the embedding, of which the layout's one head is made: dropped if it is the same."""
    if not checkpoint.config.tie_word_embeddings or model.head is None or model.embedding is None:
        return {}, {}
    head, twin, files = checkpoint.tensors[model.head], checkpoint.tensors[model.embedding], checkpoint.files
    if head.dtype == twin.dtype and same_bytes(files, _place(head), files, _place(twin), head.nbytes):
        return {head.name: DroppedTensor(head.shard, twin.name)}, {}
    return {}, {head.name: head.shard}


def _place(tensor: TensorInfo) -> tuple[str, int]:
    return tensor.shard, tensor.start


def rank_warnings(files: RankFiles) -> Iterable[str]:
    """What of the source the ranks' files do not hold."""
    for name in files.left_out:
        yield (
            f"{name} differs from the embedding although tie_word_embeddings is true: {HEAD}.weight is made from the "
            "embedding, as the engine ties it, and unfuse cannot restore this one"
        )


def ranks_entry(ranks: Ranks, files: RankFiles, tensors: dict[str, dict[str, tuple[str, ...]]]) -> RanksEntry:
    """What the manifest says; `tensors`: file -> tensor -> digests of its pieces."""
    return RanksEntry(
        engine=ranks.layout.engine,
        versions=ranks.layout.versions,
        tp=ranks.tp,
        numbers=ranks.numbers,
        sources=files.sources,
        tensors=tensors,
        left_out=files.left_out,
    )
