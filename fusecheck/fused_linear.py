"""The fused members of the Linear family: one parameter for several projections, which stand in it one below the other.

It is built as an engine builds it, one split tensor at a time, so the bytes of the result are the bytes of the parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fusecheck.errors import CheckpointError, UsageError
from fusecheck.linear import LinearBase, Placed, divided

ShardId: TypeAlias = int | str
"""Which part of a fused parameter: "q", "k" or "v"; 0 for gate and 1 for up."""


class _FusedLinear(LinearBase):
    """A parameter made of parts along dim 0. `shards` says where each part goes, by shard_id, in the fused order."""

    shards: Mapping[ShardId, Placed]

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, loaded_shard_id: ShardId | None = None) -> None:
        """Copy this rank's rows of one part (whole, as the checkpoint has it) to the part's shard_offset.

        Without a shard_id the tensor is a fused one: all parts, in order, at TP size 1. Raises `UsageError` for an
        unknown shard_id, `CheckpointError` for a wrong shape or dtype. Works for weight and bias alike.
        """
        if loaded_shard_id is None:
            self._load_fused(param, loaded_weight)
            return
        # True == 1 and 0.0 == 0 as keys, but neither is a shard_id
        if type(loaded_shard_id) not in {int, str} or loaded_shard_id not in self.shards:
            problem = f"unknown shard_id for {type(self).__name__}"
            raise UsageError(problem, found=repr(loaded_shard_id), wanted=list(self.shards))
        self._load(param, loaded_weight, self.shards[loaded_shard_id])

    def _load_fused(self, param: nn.Parameter, loaded: Tensor) -> None:
        wanted = [sum(shard.loaded_size for shard in self.shards.values()), *param.shape[1:]]
        if list(loaded.shape) != wanted:
            problem = f"cannot load a fused tensor into {type(self).__name__}: wrong shape"
            raise CheckpointError(problem, found=list(loaded.shape), wanted=wanted)
        start = 0
        for shard in self.shards.values():
            self._load(param, loaded.narrow(0, start, shard.loaded_size), shard)
            start += shard.loaded_size


class MergedColumnParallelLinear(_FusedLinear):
    """Several projections of one input, one after the other: `gate_up_proj` is [gate; up], shard_ids 0 and 1.

    `output_sizes` are the rows of the whole parts; `weight [sum(output_sizes) / tp_size, input_size]`. Each part is
    divided by itself, so that a rank holds its gate rows and then its up rows.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = False,  # noqa: FBT001, FBT002
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.output_sizes = tuple(output_sizes)
        sizes = [divided(size, tp_size, "an output size") for size in self.output_sizes]
        offsets = accumulate(sizes, initial=0)
        self.shards = {
            number: Placed(f"shard {number}", offset, size, tp_rank * size, tp_size * size)
            for number, (offset, size) in enumerate(zip(offsets, sizes, strict=False))
        }
        super().__init__(input_size, sum(sizes), bias, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, device=device)


class QKVParallelLinear(_FusedLinear):
    """q, k and v of one attention, whole heads, [all q rows; all k rows; all v rows]; shard_ids "q", "k", "v".

    `weight [(H + 2 K) * head_size, hidden_size]` with this rank's H query and K key/value heads. Fewer key/value heads
    than ranks are replicated, whole, as vLLM does: rank r of T holds head r // (T / K).
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = False,  # noqa: FBT001, FBT002
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        total_kv = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        self.head_size, self.total_num_heads, self.total_num_kv_heads = head_size, total_num_heads, total_kv
        self.num_heads = divided(total_num_heads, tp_size, "total_num_heads")
        replicas = 1 if total_kv >= tp_size or total_kv < 1 else divided(tp_size, total_kv, "tp_size")
        self.num_kv_heads = 1 if replicas > 1 else divided(total_kv, tp_size, "total_num_kv_heads")
        q, kv = self.num_heads * head_size, self.num_kv_heads * head_size
        kv_start, kv_loaded = tp_rank // replicas * kv, total_kv * head_size
        self.shards = {
            "q": Placed("shard q", 0, q, tp_rank * q, tp_size * q),
            "k": Placed("shard k", q, kv, kv_start, kv_loaded),
            "v": Placed("shard v", q + kv, kv, kv_start, kv_loaded),
        }
        super().__init__(hidden_size, q + 2 * kv, bias, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, device=device)


def build_fused(parts: Mapping[ShardId, Tensor], *, head_size: int | None = None) -> Tensor:
    """Build a fused tensor as an engine does, each part through the `weight_loader` of an engine's layer.

    `parts`: shard_id -> the whole split weight [rows, in] or bias [rows]; {"q", "k", "v"} makes a `QKVParallelLinear`
    (which needs `head_size`, in rows), {0, ..., n - 1} a `MergedColumnParallelLinear`. Any order. Returns
    [sum of rows, in] or [sum of rows] on the parts' device; costs that much memory and no more. Raises
    `CheckpointError` when the parts do not fit together, `UsageError` for other shard_ids.
    """
    if not parts:
        raise UsageError("no parts to fuse")
    first = next(iter(parts.values()))
    if first.dim() not in {1, 2}:
        raise CheckpointError("a part is neither a weight nor a bias", found=list(first.shape))
    layer = _layer_for(parts, first, head_size)
    param = layer.weight if first.dim() == 2 else layer.bias
    if param is None:
        raise UsageError("a bias was asked of a layer without one")
    for shard_id, part in parts.items():
        param.weight_loader(param, part, shard_id)
    return param.data


def _layer_for(parts: Mapping[ShardId, Tensor], first: Tensor, head_size: int | None) -> _FusedLinear:
    rows = {shard_id: part.shape[0] if part.dim() else 0 for shard_id, part in parts.items()}
    bias = first.dim() == 1
    columns = 0 if bias else first.shape[1]  # of a bias the weight costs nothing
    if set(parts) == set(range(len(parts))):
        sizes = [rows[number] for number in range(len(parts))]
        return MergedColumnParallelLinear(columns, sizes, bias, dtype=first.dtype, device=first.device)
    if set(parts) != {"q", "k", "v"}:
        raise UsageError("unknown shard_ids", found=list(parts), wanted="q, k, v, or 0, 1, ...")
    if head_size is None or head_size < 1:
        raise UsageError("a qkv projection needs its head_size", found=head_size)
    heads = divided(rows["q"], head_size, "the number of q rows", by="head_size")
    kv_heads = divided(rows["k"], head_size, "the number of k rows", by="head_size")
    return QKVParallelLinear(columns, head_size, heads, kv_heads, bias, dtype=first.dtype, device=first.device)
