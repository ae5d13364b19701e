"""OUT's ranks held against a source, a manifest, or both: what `exact_ranks` demands, by file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusecheck.beside import declared_tp
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import CONFIG, ModelConfig
from fusecheck.engines.vllm_sharded import VLLM, ShardedLayout, layout_of
from fusecheck.exact import Finding, Slice
from fusecheck.exact_ranks import Demand, constants, held, outside, pair_rank
from fusecheck.files import same_bytes
from fusecheck.header import TensorInfo
from fusecheck.manifest import Manifest, RanksEntry
from fusecheck.mapping import HEADS
from fusecheck.shards import by_rank
from fusecheck.sidefiles import MANIFEST
from fusecheck.split_form import beyond, prefix_of, required, split_names


@dataclass(slots=True)
class RanksCheck:
    """What has to be compared, and what is wrong already."""

    slices: list[Slice] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tp: int = 1
    """Ranks that the layout is for."""


def check_ranks(
    out: Checkpoint, config: ModelConfig, manifest: Manifest | None, source: Checkpoint | None
) -> RanksCheck:
    """Every byte of every rank. Without a source the manifest says which split tensors there were."""
    check = RanksCheck()
    entry = manifest.ranks if manifest is not None else None
    ranks = _ranks(out, check)
    layout = layout_of(entry.engine, entry.versions) if entry is not None else VLLM
    check.tp = entry.tp if entry is not None else declared_tp(out) or len(ranks)
    view = split_names(source.tensors, source.config) if source is not None else None
    names = set(view) if view is not None else set(entry.sources) if entry is not None else set[str]()
    if layout is None:
        check.findings.append(Finding("the manifest names a layout that is not known", MANIFEST))
    elif names and (odd := beyond(config, names)) is not None:
        check.findings.append(Finding(f"{odd} is larger than the number of tensors", CONFIG))
    elif names:
        _check_numbers(ranks, check.tp, entry, layout, check)
        demand = _demand(names, config, layout, check, against="the manifest" if view is None else "the source")
        _check_spare(demand, names, manifest, check)
        for rank, own in ranks.items():
            slices, found = pair_rank(rank, own, demand, view)
            check.findings += found
            check.slices += _digested(slices, own, entry, check) if entry is not None else _flat(slices)
        check.findings += _twins(view, source, manifest)
    return check


def _ranks(out: Checkpoint, check: RanksCheck) -> dict[int, dict[str, TensorInfo]]:
    found: dict[int, dict[str, TensorInfo]] = {}
    for rank, tensors in by_rank(out.tensors.values()).items():
        own = found.setdefault(rank, {})
        for tensor in tensors:
            if tensor.name in own:
                check.findings.append(Finding(f"is in {own[tensor.name].shard} too", tensor.shard, tensor.name))
            own[tensor.name] = tensor
    return found


def _check_numbers(
    found: Mapping[int, object], tp: int, entry: RanksEntry | None, layout: ShardedLayout, check: RanksCheck
) -> None:
    wanted = set(entry.numbers) if entry is not None else set(range(tp))

    def name(rank: int) -> str:
        return layout.file.format(rank=rank, part="*")

    check.findings += [Finding("is missing", name(rank)) for rank in sorted(wanted - found.keys())]
    check.findings += [
        Finding("is of a rank that OUT does not have", name(rank)) for rank in sorted(found.keys() - wanted)
    ]
    if len(wanted) < tp:
        check.notes.append(f"{len(wanted)} of {tp} ranks are here: what the others hold is not proved")


def _demand(names: set[str], config: ModelConfig, layout: ShardedLayout, check: RanksCheck, *, against: str) -> Demand:
    """What every rank must hold, and findings for split tensors that are too many or too few."""
    around = outside(names, config)
    wanted = set(required(config, prefix_of(names)))
    heads = {name for name in names if name in HEADS and config.tie_word_embeddings}
    check.findings += [
        Finding(f"{against} has it, and such a model does not", None, name)
        for name in sorted(names - wanted - set(around.values()) - heads)
    ]
    check.findings += [Finding(f"{against} lacks it", None, name) for name in sorted(wanted - names)]
    if "lm_head.weight" not in around:
        check.findings.append(Finding(f"{against} has nothing that it is made of", None, "lm_head.weight"))
    within = held(names & wanted, config, layout)
    return Demand(config, layout, check.tp, within, around, constants(config, layout))


def _check_spare(demand: Demand, names: set[str], manifest: Manifest | None, check: RanksCheck) -> None:
    """What the manifest says of a tied head that is not there: nothing else can be absent."""
    if manifest is None or manifest.ranks is None:
        return
    tied, twin = demand.config.tie_word_embeddings, demand.around.get("lm_head.weight")
    for name, same_as in {
        **{name: entry.same_as for name, entry in manifest.dropped.items()},
        **dict.fromkeys(manifest.ranks.left_out, twin),
    }.items():
        if not tied or name not in HEADS or same_as != twin or twin not in names:
            check.findings.append(Finding("the manifest leaves it out, and it is no tied head", MANIFEST, name))


def _flat(slices: Mapping[str, Sequence[Slice]]) -> Iterator[Slice]:
    return (part for parts in slices.values() for part in parts)


def _digested(
    slices: Mapping[str, Sequence[Slice]], own: Mapping[str, TensorInfo], entry: RanksEntry, check: RanksCheck
) -> Iterator[Slice]:
    """With the manifest's digest of each piece."""
    for name, parts in slices.items():
        file = own[name].shard
        digests = entry.tensors.get(file, {}).get(name, ())
        if len(digests) != len(parts):
            check.findings.append(Finding(f"is {len(parts)} pieces, the manifest has {len(digests)}", file, name))
            yield from parts
        else:
            yield from (replace(part, digest=digest) for part, digest in zip(parts, digests, strict=True))


def _twins(
    view: Mapping[str, TensorInfo] | None, source: Checkpoint | None, manifest: Manifest | None
) -> Iterator[Finding]:
    """A stored head that the manifest calls equal to the embedding is."""
    for name, dropped in (manifest.dropped if manifest is not None else {}).items():
        if view is None or source is None:
            continue
        one, other = view.get(name), view.get(dropped.same_as)
        if one is None or other is None:
            continue  # a source that is fused may have dropped it too
        here, there = (one.shard, one.start), (other.shard, other.start)
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        if not alike or not same_bytes(source.files, here, source.files, there, one.nbytes):
            yield Finding(f"the manifest calls it equal to {dropped.same_as}, which it is not", MANIFEST, name)
