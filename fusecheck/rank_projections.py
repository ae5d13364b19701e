"""The Linears of an output that is cut for ranks, run on a device: each rank's tensor against its share of the source.

What a rank's share is comes from the `weight_loader`s of the Linear family at its TP rank and TP size, never from how
such an output is planned; names alone come from the engine's layout. A row-parallel Linear is one check of all ranks,
since it is their sum that an engine uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor

from fusecheck.bounds import same_bits
from fusecheck.checkpoint import Checkpoint
from fusecheck.config import ModelConfig
from fusecheck.dequantise import NotRun
from fusecheck.engines.vllm_sharded import VLLM, layout_of
from fusecheck.errors import CheckpointError, UsageError
from fusecheck.fused_linear import MergedColumnParallelLinear, QKVParallelLinear, ShardId
from fusecheck.linear import LinearBase, RowParallelLinear
from fusecheck.manifest import Manifest
from fusecheck.numeric import Projection
from fusecheck.projections import (
    Checks,
    Stored,
    failed,
    is_plain,
    measured,
    not_run,
    sample,
    sample_note,
    weight_of,
    weights_notes,
    with_results,
)
from fusecheck.rank_tensors import RankLinear, Ranks, SplitForm, linears
from fusecheck.row_parallel import Piece, numeric_sum, probe_ranks
from fusecheck.verdicts import NumericResult, ProbeResult, ProjectionCheck, Verdict

Parts: TypeAlias = Mapping[ShardId, Stored]
"""The whole split Linears of which ranks hold shares."""


@dataclass(frozen=True, slots=True)
class _Bench:
    """What is checked, against what, and where."""

    ranks: Ranks
    source: SplitForm
    device: torch.device
    seed: int

    def layer(self, linear: RankLinear, wholes: Mapping[ShardId, Tensor], rank: int, device: str = "cpu") -> LinearBase:
        """The engine's layer of one rank, for whole weights [rows, in] or biases [rows] by shard_id; uninitialised."""
        config, first = self.ranks.checkpoint.config, next(iter(wholes.values()))
        bias, tp = first.dim() == 1, self.ranks.tp
        columns = 0 if bias else first.shape[1]  # of a bias the weight costs nothing
        if linear.kind == "row":
            return RowParallelLinear(
                columns, len(first), bias, tp_rank=rank, tp_size=tp, dtype=first.dtype, device=device
            )
        if linear.kind == "merged":
            sizes = [len(whole) for whole in wholes.values()]
            return MergedColumnParallelLinear(
                columns, sizes, bias, tp_rank=rank, tp_size=tp, dtype=first.dtype, device=device
            )
        heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        return QKVParallelLinear(columns, *heads, bias, tp_rank=rank, tp_size=tp, dtype=first.dtype, device=device)


def check_rank_projections(
    out: Checkpoint,
    source: Checkpoint,
    manifest: Manifest | None,
    layers: tuple[int, ...],
    device: torch.device,
    seed: int,
    *,
    all_experts: bool = False,
) -> Checks:
    """Check the Linears of the given layers on every rank that has to be there; one Linear at a time is in memory.

    Of routed experts the first, the middle and the last of a layer and one drawn by `seed`, unless `all_experts`.
    """
    entry = manifest.ranks if manifest is not None else None
    layout = layout_of(entry.engine, entry.versions) if entry is not None else VLLM
    if layout is None:
        return Checks((), ("probe and numeric not run: the manifest names a layout that is not known",))
    ranks = Ranks.of(out, entry.tp if entry is not None else None, entry.numbers if entry is not None else None)
    bench = _Bench(ranks, SplitForm.of(source), device, seed)
    checks: list[ProjectionCheck] = []
    notes: list[str] = []
    for layer in layers:
        experts = source.config.num_experts if source.config.is_sparse(layer) else 0
        chosen = list(range(experts)) if all_experts else sample(experts, layer, seed)
        if len(chosen) < experts:
            notes.append(sample_note(layer, chosen, experts, seed))
        for linear in linears(layout, bench.source, layer, chosen):
            checks += _check(linear, bench)
    return Checks(tuple(checks), (*notes, *weights_notes(checks)))


def _check(linear: RankLinear, bench: _Bench) -> list[ProjectionCheck]:
    numbers = bench.ranks.numbers
    unknown = ProbeResult("not run"), NumericResult("not run")
    whole = ProjectionCheck(linear.layer, linear.name, 0, 0, (), "not run", *unknown, ranks=numbers)
    each = [whole] if linear.kind == "row" else [replace(whole, ranks=(number,)) for number in numbers]
    try:
        parts = {shard_id: bench.source.load(module) for shard_id, module in linear.parts}
    except SafetensorError as error:
        return [failed(check, f"our reader took the source, safetensors does not: {error}") for check in each]
    suffixes = {tuple(sorted(stored)) for stored in parts.values()}
    if len(suffixes) != 1 or "weight" not in next(iter(suffixes)):
        return [not_run(check, "the source lacks a part of it") for check in each]
    weights = _weights(parts, bench.source.checkpoint.config)
    return [_tried(check, linear, bench, parts, weights) for check in each]


def _tried(
    check: ProjectionCheck, linear: RankLinear, bench: _Bench, parts: Parts, weights: Mapping[ShardId, Tensor] | NotRun
) -> ProjectionCheck:
    """What cannot be a rank's share, or cannot be read, fails."""
    run = _row_parallel if linear.kind == "row" else _column_parallel
    try:
        return run(check, linear, bench, parts, weights)
    except (CheckpointError, UsageError) as error:  # as the weight_loaders say
        return failed(check, str(error))
    except SafetensorError as error:
        return failed(check, f"our reader took it, safetensors does not: {error}")


def _weights(parts: Parts, config: ModelConfig) -> Mapping[ShardId, Tensor] | NotRun:
    """The whole weights that the source's Linears stand for."""
    found = {}
    for shard_id, stored in parts.items():
        if stored["weight"].dim() != 2:
            return NotRun("a weight of the source is no matrix")
        weight = weight_of(stored, config, *stored["weight"].shape)
        if isinstance(weight, NotRun):
            return weight
        found[shard_id] = weight
    return found


def _column_parallel(
    check: ProjectionCheck, linear: RankLinear, bench: _Bench, parts: Parts, weights: Mapping[ShardId, Tensor] | NotRun
) -> ProjectionCheck:
    """qkv_proj and gate_up_proj of one rank: its rows of q, k and v, or of gate and up."""
    (rank,) = check.ranks
    layer = bench.layer(linear, _of(parts, "weight"), rank, "meta")
    if not isinstance(layer, QKVParallelLinear | MergedColumnParallelLinear):
        raise TypeError(linear.kind)
    offsets = tuple((str(shard_id), shard.shard_offset) for shard_id, shard in layer.shards.items())
    check = replace(check, input_size=layer.input_size, output_size=layer.output_size, shard_offsets=offsets)
    held = bench.ranks.load(rank, linear.target, linear.expert)
    _check_like(held, parts, layer)
    check = _with_built(check, linear, bench, {rank: held}, parts)
    if isinstance(weights, NotRun):
        return not_run(check, weights.reason)
    config = bench.ranks.checkpoint.config
    weight = weight_of(held, config, layer.output_size, layer.input_size)
    if isinstance(weight, NotRun):
        return not_run(check, weight.reason)
    cuts = _cuts(layer, parts)
    below = f"layers.{linear.layer}."
    shares = tuple((module.partition(below)[2], weights[i].narrow(0, *cuts[i])) for i, module in linear.parts)
    biases = None
    if "bias" in held:
        biases = tuple(parts[i]["bias"].narrow(0, *cuts[i]).to(weight.dtype) for i, _ in linear.parts)
    found = Projection(check.tensor, weight, shares, _bias(held, weight), biases)
    return measured(check, found, bench.device, bench.seed, plain=is_plain(held), method=config.quantisation.method)


def _cuts(layer: QKVParallelLinear | MergedColumnParallelLinear, parts: Parts) -> Mapping[ShardId, tuple[int, int]]:
    """Which rows of each whole part a rank holds, as its layer's weight_loader takes them: the first, and how many."""
    for shard_id, shard in layer.shards.items():
        rows = len(parts[shard_id]["weight"])
        if rows != shard.loaded_size:
            raise CheckpointError("rows of the source contradict config.json", found=rows, wanted=shard.loaded_size)
    return {shard_id: (shard.start, shard.shard_size) for shard_id, shard in layer.shards.items()}


def _row_parallel(
    check: ProjectionCheck, linear: RankLinear, bench: _Bench, parts: Parts, weights: Mapping[ShardId, Tensor] | NotRun
) -> ProjectionCheck:
    """o_proj and down_proj of all ranks: the columns of each, and the sum of what they make of their features."""
    ranks, config = bench.ranks, bench.ranks.checkpoint.config
    layer = bench.layer(linear, _of(parts, "weight"), 0, "meta")
    rows, columns = parts[0]["weight"].shape
    starts = range(0, columns, layer.input_size)
    offsets = tuple((f"rank {rank}", start) for rank, start in enumerate(starts))
    check = replace(check, input_size=columns, output_size=rows, shard_offsets=offsets, axis="columns")
    held = {rank: ranks.load(rank, linear.target, linear.expert) for rank in ranks.numbers}
    for rank, stored in held.items():
        _check_like(stored, parts, bench.layer(linear, _of(parts, "weight"), rank, "meta"))
    check = _with_built(check, linear, bench, held, parts)
    if isinstance(weights, NotRun):
        return not_run(check, weights.reason)
    whole, bias = weights[0], _bias(parts[0], weights[0])
    pieces = []
    for rank in ranks.numbers:
        weight = weight_of(held[rank], config, layer.output_size, layer.input_size)
        if isinstance(weight, NotRun):
            return not_run(check, f"rank {rank}: {weight.reason}")
        share = whole.narrow(1, starts[rank], layer.input_size)
        own = (_bias(held[rank], weight), (bias,)) if rank == 0 and bias is not None else (None, None)
        pieces.append(Piece(rank, starts[rank], Projection(check.tensor, weight, ((f"rank {rank}", share),), *own)))
    probed = probe_ranks(pieces, bench.device)
    if len(pieces) < ranks.tp:
        why = f"{len(pieces)} of {ranks.tp} ranks are here, and their sum needs all"
        summed = NumericResult("not run", why)
    else:
        summed = numeric_sum(whole, bias, pieces, bench.device, bench.seed)
    plain = all(map(is_plain, held.values()))
    return with_results(check, probed, summed, None if plain else whole.dtype, config.quantisation.method)


def _of(parts: Parts, suffix: str) -> Mapping[ShardId, Tensor]:
    return {shard_id: stored[suffix] for shard_id, stored in parts.items()}


def _bias(stored: Stored, weight: Tensor) -> Tensor | None:
    """In the dtype of a weight that was dequantised; a plain one has it already, or is a contradiction that is found."""
    bias = stored.get("bias")
    return bias if bias is None or is_plain(stored) else bias.to(weight.dtype)


def _check_like(held: Stored, parts: Parts, layer: LinearBase) -> None:
    """CheckpointError where a rank's tensors are not those that the source's make, or of another shape."""
    wanted = set(next(iter(parts.values())))
    rank, lacks, over = layer.tp_rank, sorted(wanted - held.keys()), sorted(held.keys() - wanted)
    if lacks:
        raise CheckpointError(f"rank {rank} lacks its {', '.join(lacks)}")
    if over:
        raise CheckpointError(f"rank {rank} has {', '.join(over)}, which the source has not")
    if held["weight"].shape != layer.weight.shape:
        found, shape = list(held["weight"].shape), list(layer.weight.shape)
        raise CheckpointError(f"a weight that is not rank {rank}'s share", found=found, wanted=shape)
    for suffix in held.keys() - {"weight", "bias"}:
        if held[suffix].dim() != 2:  # one number for a block of rows and columns
            raise CheckpointError(f"rank {rank}'s {suffix} is no matrix", found=list(held[suffix].shape))


def _with_built(
    check: ProjectionCheck, linear: RankLinear, bench: _Bench, held: Mapping[int, Stored], parts: Parts
) -> ProjectionCheck:
    """Weight and bias of each rank, as its weight_loader fills them from the whole ones, against the stored."""
    for rank, stored in held.items():
        for suffix in sorted({"weight", "bias"} & stored.keys()):
            verdict, why = _built(linear, bench, rank, _of(parts, suffix), stored[suffix])
            if verdict == "fail":
                return replace(check, built=verdict, built_reason=f"rank {rank}, {suffix}: {why}")
    return replace(check, built="pass")


def _built(
    linear: RankLinear, bench: _Bench, rank: int, wholes: Mapping[ShardId, Tensor], stored: Tensor
) -> tuple[Verdict, str]:
    try:
        layer = bench.layer(linear, wholes, rank)
        param = layer.weight if layer.bias is None else layer.bias
        for shard_id, whole in wholes.items():
            arguments = () if linear.kind == "row" else (shard_id,)
            param.weight_loader(param, whole, *arguments)
    except (CheckpointError, UsageError) as error:
        return "fail", str(error)
    return ("pass", "") if same_bits(param.data, stored) else ("fail", "other bits than the weight_loader gives")
