"""The projections of a layer, read as an engine reads them and run on a device: split against fused.

Quantised projections run on weights dequantised from both forms, the fused one as a whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor

from fusecheck.bounds import DTYPES, same_bits
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import ModelConfig
from fusecheck.dequantise import NotRun, dequantise
from fusecheck.errors import CheckpointError
from fusecheck.forms import WEIGHTS, Join
from fusecheck.fused_linear import build_fused
from fusecheck.group import FusedTensor
from fusecheck.manifest import Manifest
from fusecheck.mapping import QKV, Packing, ShardId, ShardRows
from fusecheck.model import Model
from fusecheck.numeric import Projection, numeric, probe
from fusecheck.tensors import load_tensor
from fusecheck.verdicts import NumericResult, ProbeResult, ProjectionCheck, Verdict

Stored: TypeAlias = Mapping[str, Tensor]
"""The tensors of one stored Linear by suffix."""


@dataclass(frozen=True, slots=True)
class Checks:
    """What was checked, and what a reader has to know about it."""

    projections: tuple[ProjectionCheck, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Fused:
    """One fused projection of OUT: the packing of one layer, and its tensors by suffix."""

    base: str
    """Prefix of every name, such as `model.layers.0.`."""
    layer: int
    packing: Packing
    tensors: Mapping[str, FusedTensor]

    @property
    def kind(self) -> str:
        """Suffix of its weight."""
        return next(suffix for suffix in WEIGHTS if suffix in self.tensors)

    def name(self, suffix: str) -> str:
        return f"{self.base}{self.packing.fused}.{suffix}"


def check_projections(
    out: Checkpoint,
    source: Checkpoint | None,
    manifest: Manifest | None,
    model: Model,
    layers: tuple[int, ...],
    device: torch.device,
    seed: int,
    *,
    all_experts: bool = False,
) -> Checks:
    """Check every fused projection of the given layers, one at a time; at most one projection is in memory.

    Of per-expert projections the first, the middle and the last of a layer and one drawn by `seed`, unless `all_experts`.
    """
    checks: list[ProjectionCheck] = []
    notes: list[str] = []
    for layer in layers:
        found = _projections(model, layer)
        experts = [one for one in found if one.packing.size == "expert"]
        picked = range(len(experts)) if all_experts else sample(len(experts), layer, seed)
        chosen = [experts[number] for number in picked]
        if len(chosen) < len(experts):
            notes.append(sample_note(layer, [one.packing.fused.split(".")[2] for one in chosen], len(experts), seed))
        taken = [one for one in found if one.packing.size != "expert" or one in chosen]
        checks += [_check(one, out, source, manifest, device, seed) for one in taken]
    return Checks(tuple(checks), (*notes, *weights_notes(checks)))


def weights_notes(checks: Iterable[ProjectionCheck]) -> list[str]:
    """What probe and numeric ran on, where that is not what is stored."""
    used = dict.fromkeys(check.weights for check in checks if check.weights != "stored")
    return [
        f"probe and numeric ran on weights {weights} from both forms, not on a quantised kernel" for weights in used
    ]


def _projections(model: Model, layer: int) -> list[_Fused]:
    base = f"{model.prefix}layers.{layer}."
    found: dict[Packing, dict[str, FusedTensor]] = {}
    for fused in model.fused:
        if fused.layer == layer:
            suffix = fused.tensor.name.removeprefix(f"{base}{fused.packing.fused}.")
            found.setdefault(fused.packing, {})[suffix] = fused
    return [_Fused(base, layer, packing, tensors) for packing, tensors in found.items()]


def sample(experts: int, layer: int, seed: int) -> list[int]:
    """Numbers of the first, the middle and the last expert of a layer, and of one drawn by `seed`."""
    picked = {0, experts // 2, experts - 1} if experts else set()
    rest = [number for number in range(experts) if number not in picked]
    if rest:
        picked.add(random.Random(f"{seed} {layer}").choice(rest))  # noqa: S311 - a sample, no secret
    return sorted(picked)


def sample_note(layer: int, chosen: Iterable[object], experts: int, seed: int) -> str:
    """Which experts were not left out, and why those."""
    return (
        f"layer {layer}: probe and numeric of experts {', '.join(map(str, chosen))} of {experts}: "
        f"first, middle, last and one drawn by seed {seed}; --all-experts takes all"
    )


def _check(
    one: _Fused,
    out: Checkpoint,
    source: Checkpoint | None,
    manifest: Manifest | None,
    device: torch.device,
    seed: int,
) -> ProjectionCheck:
    rows = out.config.rows(one.packing)
    check = ProjectionCheck(
        layer=one.layer,
        tensor=one.name(one.kind),
        input_size=out.config.hidden_size,
        output_size=sum(part.shard_size for part in rows),
        shard_offsets=tuple((str(part.shard_id), part.shard_offset) for part in rows),
        built="not run",
        probe=ProbeResult("not run"),
        numeric=NumericResult("not run"),
    )
    try:
        fused = {suffix: load_tensor(out, one.name(suffix)) for suffix in one.tensors}
        parts = _split(one, out, source, manifest, fused)
    except SafetensorError as error:
        return failed(check, f"our reader took it, safetensors does not: {error}")
    config = source.config if source is not None else out.config
    found = (
        NotRun("the source lacks a part of it") if parts is None else _projection(one, out.config, fused, config, parts)
    )
    built, why = _built(one, fused, parts or {}, out.config)
    check = replace(check, built=built, built_reason=why)
    return measured(check, found, device, seed, plain=is_plain(fused), method=out.config.quantisation.method)


def measured(
    check: ProjectionCheck, found: Projection | NotRun, device: torch.device, seed: int, *, plain: bool, method: str
) -> ProjectionCheck:
    """`check` with what probe and numeric make of the weights, and what weights those were."""
    if isinstance(found, NotRun):
        return not_run(check, found.reason)
    results = probe(found, device), numeric(found, device, seed)
    return with_results(check, *results, None if plain else found.fused.dtype, method)


def not_run(check: ProjectionCheck, why: str) -> ProjectionCheck:
    """`check` where there is nothing to run."""
    return replace(check, probe=ProbeResult("not run", why), numeric=NumericResult("not run", why))


def failed(check: ProjectionCheck, why: str) -> ProjectionCheck:
    """`check` of what does not even read as the projection that it has to be."""
    return replace(
        check,
        built="fail",
        built_reason=why,
        probe=ProbeResult("fail", why),
        numeric=NumericResult("fail", why),
    )


def with_results(
    check: ProjectionCheck, probed: ProbeResult, measured: NumericResult, dequantised: torch.dtype | None, method: str
) -> ProjectionCheck:
    """`check` with its verdicts, and what weights they are of: the stored ones, unless dequantised to some dtype."""
    if dequantised is None:
        return replace(check, probe=probed, numeric=measured)
    weights = f"dequantised to {str(dequantised).removeprefix('torch.')} ({method})"
    measured = replace(measured, notes=(*measured.notes, f"weights {weights} from both forms"))
    return replace(check, probe=probed, numeric=measured, weights=weights)


def _projection(
    one: _Fused, fused_config: ModelConfig, fused: Stored, config: ModelConfig, parts: Mapping[ShardId, Stored]
) -> Projection | NotRun:
    """Weights of both forms, each dequantised by what its own checkpoint declares; biases in the weights' dtype."""
    total = sum(part.shard_size for part in fused_config.rows(one.packing))
    whole = weight_of(fused, fused_config, total, fused_config.hidden_size)
    if isinstance(whole, NotRun):
        return whole
    modules, weights, biases = dict(one.packing.parts), [], []
    for rows in config.rows(one.packing):
        stored = parts[rows.shard_id]
        weight = weight_of(stored, config, rows.shard_size, config.hidden_size)
        if isinstance(weight, NotRun):
            return NotRun(f"{modules[rows.shard_id]}: {weight.reason}")
        weights.append((modules[rows.shard_id], weight))
        if "bias" in stored:
            biases.append(stored["bias"] if is_plain(stored) else stored["bias"].to(weight.dtype))
    bias = fused.get("bias")
    if bias is not None and not is_plain(fused):
        bias = bias.to(whole.dtype)
    return Projection(one.name(one.kind), whole, tuple(weights), bias, tuple(biases) if biases else None)


def is_plain(stored: Stored) -> bool:
    """Whether its weight is what is stored, without scales."""
    return stored.keys() <= {"weight", "bias"}


def weight_of(stored: Stored, config: ModelConfig, rows: int, in_features: int) -> Tensor | NotRun:
    """The weight that a Linear stands for: as it is stored, or dequantised by what its checkpoint declares."""
    if not is_plain(stored):
        return dequantise(stored, config.quantisation, rows, in_features)
    weight = stored["weight"]
    if weight.dtype in DTYPES:
        return weight
    return NotRun(f"{weight.dtype} without scales: no GEMM, and nothing says what it stands for")


def _built(one: _Fused, fused: Stored, parts: Mapping[ShardId, Stored], config: ModelConfig) -> tuple[Verdict, str]:
    """The stored weight and bias, where parts are joined by rows as a weight_loader joins them."""
    if not parts:
        return "not run", "the source lacks a part of it"
    join = one.tensors[one.kind].join
    if join is not Join.ROWS:
        return "not run", f"{one.kind} is joined by {join.value}; a weight_loader's rows say nothing of it"
    head_size = config.head_dim if one.packing == QKV else None
    for suffix in (one.kind, *({"bias"} & fused.keys())):
        try:
            tensor = build_fused({shard: stored[suffix] for shard, stored in parts.items()}, head_size=head_size)
        except CheckpointError:
            return "fail", ""
        if not same_bits(tensor, fused[suffix]):
            return "fail", ""
    return "pass", ""


def _split(
    one: _Fused, out: Checkpoint, source: Checkpoint | None, manifest: Manifest | None, fused: Stored
) -> Mapping[ShardId, Stored] | None:
    """The split tensors: the source's own, else cut from the fused ones (of the source, or of OUT by the manifest)."""
    if source is None:
        return _cut_all(one, fused, manifest, out.config)
    names = {shard_id: {s: f"{one.base}{module}.{s}" for s in fused} for shard_id, module in one.packing.parts}
    if _holds(source, (name for by_suffix in names.values() for name in by_suffix.values())):
        return {
            shard_id: {suffix: load_tensor(source, name) for suffix, name in by_suffix.items()}
            for shard_id, by_suffix in names.items()
        }
    if not _holds(source, map(one.name, fused)):
        return None
    return _cut_all(one, {suffix: load_tensor(source, one.name(suffix)) for suffix in fused}, None, source.config)


def _holds(checkpoint: Checkpoint, names: Iterable[str]) -> bool:
    return all(name in checkpoint.tensors for name in names)


def _cut_all(one: _Fused, fused: Stored, manifest: Manifest | None, config: ModelConfig) -> Mapping[ShardId, Stored]:
    parts: dict[ShardId, dict[str, Tensor]] = {shard_id: {} for shard_id, _ in one.packing.parts}
    whole = {rows.shard_id: rows.shard_size for rows in config.rows(one.packing)}
    for suffix, tensor in fused.items():
        entry = manifest.tensors.get(one.name(suffix)) if manifest is not None else None
        named = tuple(ShardRows(p.shard_id, p.shard_offset, p.shard_size) for p in entry.parts) if entry else ()
        for rows in named or tuple(rows for _, rows in one.tensors[suffix].parts):
            parts[rows.shard_id][suffix] = _cut(tensor, one.tensors[suffix].join, rows, whole[rows.shard_id])
    return parts


def _cut(tensor: Tensor, join: Join, rows: ShardRows, whole: int) -> Tensor:
    """One part of a fused tensor; `whole` is the number of its weight's rows."""
    if join is Join.ONCE:
        return tensor
    if join is Join.SHAPE:
        return torch.tensor([whole, int(tensor[1])], dtype=tensor.dtype)
    span = slice(rows.shard_offset, rows.shard_offset + rows.shard_size)
    return tensor[span] if join is Join.ROWS else tensor[:, span]
