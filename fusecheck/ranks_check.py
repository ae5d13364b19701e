"""OUT's ranks held against a source, a manifest, or both: what `exact_ranks` demands, by file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusecheck.checkpoint import Checkpoint
from fusecheck.config import ModelConfig
from fusecheck.engines.vllm_sharded import VLLM, ShardedLayout, layout_of
from fusecheck.exact import Finding, Slice
from fusecheck.exact_ranks import Demand, constants, held, outside, pair_rank, required, split_names
from fusecheck.files import same_bytes
from fusecheck.header import TensorInfo
from fusecheck.manifest import Manifest, RanksEntry
from fusecheck.mapping import HEADS
from fusecheck.shards import RANK_FILE
from fusecheck.sidefiles import MANIFEST


@dataclass(slots=True)
class RanksCheck:
    """What has to be compared, and what is wrong already."""

    slices: list[Slice] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_ranks(
    out: Checkpoint, config: ModelConfig, manifest: Manifest | None, source: Checkpoint | None
) -> RanksCheck:
    """Every byte of every rank. Without a source the manifest says which split tensors there were."""
    check = RanksCheck()
    entry = manifest.ranks if manifest is not None else None
    by_rank = _by_rank(out, check)
    layout = layout_of(entry.engine, entry.versions) if entry is not None else VLLM
    tp = entry.tp if entry is not None else len(by_rank)
    if layout is None or tp < 1:
        check.findings.append(Finding("the manifest names a layout that is not known", MANIFEST))
        return check
    _check_numbers(by_rank, tp, entry, check)
    view = split_names(source.tensors, source.config) if source is not None else None
    names = list(view) if view is not None else list(entry.sources) if entry is not None else []
    demand = _demand(names, config, layout, tp, manifest, check)
    for rank, own in sorted(by_rank.items()):
        slices, found = pair_rank(rank, own, demand, view)
        check.findings += found
        check.slices += _digested(slices, own, entry, check) if entry is not None else _flat(slices)
    check.findings += _twins(view, source, manifest)
    return check


def _by_rank(out: Checkpoint, check: RanksCheck) -> dict[int, dict[str, TensorInfo]]:
    found: dict[int, dict[str, TensorInfo]] = {}
    for tensor in out.tensors.values():
        match = RANK_FILE.fullmatch(tensor.shard)
        own = found.setdefault(int(match[1]) if match else -1, {})
        if tensor.name in own:
            check.findings.append(Finding(f"is in {own[tensor.name].shard} too", tensor.shard, tensor.name))
        own[tensor.name] = tensor
    return found


def _check_numbers(found: Mapping[int, object], tp: int, entry: RanksEntry | None, check: RanksCheck) -> None:
    wanted = set(entry.numbers) if entry is not None else set(range(tp))
    check.findings += [Finding(f"no file of rank {rank} is there") for rank in sorted(wanted - found.keys())]
    check.findings += [
        Finding(f"files of rank {rank}, which is none of OUT's") for rank in sorted(found.keys() - wanted)
    ]
    if len(wanted) < tp:
        check.notes.append(f"{len(wanted)} of {tp} ranks are here: what the others hold is not proved")


def _demand(
    names: Sequence[str],
    config: ModelConfig,
    layout: ShardedLayout,
    tp: int,
    manifest: Manifest | None,
    check: RanksCheck,
) -> Demand:
    """What every rank must hold, and findings for split tensors that are nowhere in it."""
    within, strangers = held(names, config, layout)
    around = outside(names, config)
    prefix = next((name.removesuffix("norm.weight") for name in (around.get("model.norm.weight"),) if name), "")
    spare = {name for name in names if name in HEADS and config.tie_word_embeddings}
    gone = manifest.dropped if manifest is not None else {}
    untied = (name for name in gone if name not in HEADS or not config.tie_word_embeddings)
    check.findings += [
        Finding("the manifest calls it dropped, and it is no tied head", MANIFEST, name) for name in untied
    ]
    spare |= manifest.ranks.left_out.keys() if manifest is not None and manifest.ranks is not None else set()
    used = {share.name for each in within.values() for share in each.shares} | set(around.values()) | spare
    present = set(names)
    check.findings += [Finding("no rank holds anything of it", None, name) for name in (*strangers, *present - used)]
    missing = (name for name in required(config, prefix) if name not in present)
    check.findings += [Finding("the manifest says nothing of it", MANIFEST, name) for name in missing]
    if "lm_head.weight" not in around:
        check.findings.append(Finding("is made of nothing", MANIFEST, "lm_head.weight"))
    return Demand(config, layout, tp, within, around, constants(config, layout))


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
        places = [(tensor.shard, tensor.start) for tensor in (one, other) if tensor is not None]
        files = source.files
        if one is None or other is None or not same_bytes(files, places[0], files, places[1], one.nbytes):
            yield Finding(f"the manifest calls it equal to {dropped.same_as}, which it is not", MANIFEST, name)
