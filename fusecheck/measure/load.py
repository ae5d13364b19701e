"""Loading fused projections, and the same ones split: files -> parameters, as an engine does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import TypeAlias

import torch
from safetensors import safe_open

from fusecheck.checkpoint import Checkpoint
from fusecheck.fused_linear import MergedColumnParallelLinear, QKVParallelLinear
from fusecheck.linear import LinearBase
from fusecheck.mapping import PACKINGS, QKV, ShardId
from fusecheck.measure.timing import clock_of, compare
from fusecheck.measure.values import LoadBench
from fusecheck.tensors import load_tensor

LOAD_ROUNDS = 11
LOAD_BYTES = 1 << 30
"""As many layers are loaded as fit."""

_Entry: TypeAlias = tuple[str, str, str, ShardId | None]
"""Name of a tensor, its shard, the parameter that it fills, its shard_id (None: the whole fused tensor)."""


def measure_load(
    out: Checkpoint,
    source: Checkpoint | None,
    prefix: str,
    device: torch.device,
    on_step: Callable[[], None],
    notes: list[str],
) -> LoadBench | None:
    """Load as many layers as fit both ways, in turn, each layer into the same parameters."""
    fused, split, size, layers = _entries(out, source, prefix)
    if source is None or not split:
        notes += [] if source is None else ["loading split is not measured: the source has these projections fused"]
        return None
    modules = _modules(out, [name for name, *_ in fused], device)
    found = compare(
        lambda: _fill(source, split, modules),
        lambda: _fill(out, fused, modules),
        clock_of(device),
        calls=1,
        rounds=LOAD_ROUNDS,
        on_round=on_step,
    )
    notes.append("load time: from the page cache, both read once before; what fusing leaves alone is left out")
    return LoadBench(
        layers=layers,
        bytes=size,
        split_tensors=len(split),
        fused_tensors=len(fused),
        split=found.separate,
        fused=found.fused,
        ratio=found.ratio,
        noise=found.noise,
        outcome=found.outcome,
    )


def _entries(out: Checkpoint, source: Checkpoint | None, prefix: str) -> tuple[list[_Entry], list[_Entry], int, int]:
    """What is read fused and split, in bytes and over how many layers; what is not both, or of another dtype, is left out."""
    fused: list[_Entry] = []
    split: list[_Entry] = []
    dtypes: dict[str, str] = {}
    size = layers = 0
    for layer in range(out.config.num_hidden_layers if source is not None else 0):
        before = len(fused)
        for packing, suffix in product(PACKINGS, ("weight", "bias")):
            base, parameter = f"{prefix}layers.{layer}.", f"{packing.fused}.{suffix}"
            whole = out.tensors.get(f"{base}{parameter}")
            parts = (
                [(i, source.tensors.get(f"{base}{module}.{suffix}")) for i, module in packing.parts] if source else []
            )
            found = [(i, part) for i, part in parts if part is not None]
            if whole is None or len(found) < len(parts) or dtypes.setdefault(packing.fused, whole.dtype) != whole.dtype:
                continue
            fused.append((whole.name, whole.shard, parameter, None))
            split += [(part.name, part.shard, parameter, i) for i, part in found]
            size += whole.nbytes
        layers += len(fused) > before
        if size >= LOAD_BYTES:
            break
    return fused, split, size, layers


def _modules(out: Checkpoint, names: Iterable[str], device: torch.device) -> dict[str, LinearBase]:
    """The engine's layers, empty, one of each packing, in the dtype of the first of the named tensors."""
    config, modules = out.config, dict[str, LinearBase]()
    for packing in PACKINGS:
        name = next((name for name in names if name.endswith(f"{packing.fused}.weight")), None)
        if name is None:
            continue
        dtype = load_tensor(out, name).dtype
        bias = f"{name.removesuffix('weight')}bias" in out.tensors
        if packing is QKV:
            heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
            module: LinearBase = QKVParallelLinear(config.hidden_size, *heads, bias, dtype=dtype, device=device)
        else:
            sizes = [rows.shard_size for rows in config.rows(packing)]
            module = MergedColumnParallelLinear(config.hidden_size, sizes, bias, dtype=dtype, device=device)
        modules[packing.fused] = module
    return modules


def _fill(checkpoint: Checkpoint, entries: Sequence[_Entry], modules: Mapping[str, LinearBase]) -> None:
    with ExitStack() as stack:
        files = {
            shard: stack.enter_context(safe_open(checkpoint.folder / shard, framework="pt"))
            for shard in dict.fromkeys(shard for _, shard, _, _ in entries)
        }
        for name, shard, parameter, shard_id in entries:
            module, _, kind = parameter.rpartition(".")
            param = getattr(modules[module], kind)
            param.weight_loader(param, files[shard].get_tensor(name), shard_id)
