"""The projections of a layer, read as an engine reads them and run on a device: split against fused.

Tensors are opened by `safetensors.safe_open`, so that two readers of the format must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

from fusecheck.checkpoint import Checkpoint
from fusecheck.errors import CheckpointError
from fusecheck.linear import build_fused
from fusecheck.manifest import Manifest
from fusecheck.mapping import PACKINGS, QKV, Packing, ShardRows
from fusecheck.model import Model
from fusecheck.numeric import NumericResult, ProbeResult, Projection, Verdict, numeric, probe, same_bits

Load: TypeAlias = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class ProjectionCheck:
    """One fused projection of one layer: its sizes, where each part begins, and what each check found."""

    layer: int
    tensor: str
    input_size: int
    output_size: int
    shard_offsets: tuple[tuple[str, int], ...]
    built: Verdict
    """Built anew by the weight_loaders of QKVParallelLinear / MergedColumnParallelLinear and compared bit for bit."""
    probe: ProbeResult
    numeric: NumericResult


def check_projections(
    out: Checkpoint,
    source: Checkpoint | None,
    manifest: Manifest | None,
    model: Model,
    layers: tuple[int, ...],
    device: torch.device,
    seed: int,
) -> tuple[ProjectionCheck, ...]:
    """Check every fused projection of the given layers, one at a time; at most one projection is in memory."""
    checks = []
    for layer in layers:
        for packing in PACKINGS:
            name = f"{model.prefix}layers.{layer}.{packing.fused}.weight"
            if name in out.tensors:
                split = _split_loader(name, packing, out, source, manifest)
                checks.append(_check(layer, name, packing, out, split, device, seed))
    return tuple(checks)


def _check(
    layer: int,
    name: str,
    packing: Packing,
    out: Checkpoint,
    split: Callable[[str], dict[int | str, Tensor]],
    device: torch.device,
    seed: int,
) -> ProjectionCheck:
    rows = out.config.rows(packing)
    load = _loader(out)
    parts = split("weight")
    fused = load(name)
    bias_name = f"{name.removesuffix('weight')}bias"
    biases = split("bias") if bias_name in out.tensors else None
    fused_bias = load(bias_name) if biases is not None else None
    modules: dict[int | str, str] = {shard_id: module for shard_id, module in packing.parts}
    projection = Projection(
        name,
        fused,
        tuple((modules[shard_id], part) for shard_id, part in parts.items()),
        fused_bias,
        tuple(biases.values()) if biases is not None else None,
    )
    built = _built(fused, parts, packing, out)
    if biases is not None and fused_bias is not None and built == "pass":
        built = _built(fused_bias, biases, packing, out)
    return ProjectionCheck(
        layer=layer,
        tensor=name,
        input_size=fused.shape[-1],
        output_size=fused.shape[0],
        shard_offsets=tuple((str(part.shard_id), part.shard_offset) for part in rows),
        built=built,
        probe=probe(projection, device),
        numeric=numeric(projection, device, seed),
    )


def _built(fused: Tensor, parts: dict[int | str, Tensor], packing: Packing, out: Checkpoint) -> Verdict:
    head_size = out.config.head_dim if packing is QKV else None
    try:
        return "pass" if same_bits(build_fused(parts, head_size=head_size), fused) else "fail"
    except CheckpointError:
        return "fail"


def _loader(checkpoint: Checkpoint) -> Load:
    def load(name: str) -> Tensor:
        path = checkpoint.files.root / checkpoint.tensors[name].shard
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    return load


def _split_loader(
    name: str, packing: Packing, out: Checkpoint, source: Checkpoint | None, manifest: Manifest | None
) -> Callable[[str], dict[int | str, Tensor]]:
    """Loads the split tensors: the source's own, else rows of the fused one (of the source, or of OUT by the manifest)."""
    base = name.removesuffix(f"{packing.fused}.weight")

    def load(suffix: str) -> dict[int | str, Tensor]:
        names = {shard_id: f"{base}{module}.{suffix}" for shard_id, module in packing.parts}
        fused = f"{base}{packing.fused}.{suffix}"
        if source is not None:
            read = _loader(source)
            if all(part in source.tensors for part in names.values()):
                return {shard_id: read(part) for shard_id, part in names.items()}
            return _cut(read(fused), source.config.rows(packing))
        entry = manifest.tensors.get(fused) if manifest is not None else None
        rows = tuple(ShardRows(p.shard_id, p.shard_offset, p.shard_size) for p in entry.parts) if entry else ()
        return _cut(_loader(out)(fused), rows or out.config.rows(packing))

    return load


def _cut(fused: Tensor, rows: tuple[ShardRows, ...]) -> dict[int | str, Tensor]:
    return {part.shard_id: fused[part.shard_offset : part.shard_offset + part.shard_size] for part in rows}
