"""The Linear family of the engines, small: parameters of the engine's shape, and the `weight_loader` that fills them.

A fused parameter is built here as an engine builds it, one split tensor at a time: narrow to the rows of the shard,
then `copy_`. No arithmetic, no dtype change, so the bytes of the result are the bytes of the parts.

TP rank and TP size are arguments, never global state, and nothing here communicates: a `RowParallelLinear` returns
its rank's summand, and the caller adds them up. Names and signatures are those of vLLM and nano-vllm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812  # the field's name for it
from torch import Tensor, nn

from fusecheck.errors import CheckpointError, UsageError

ShardId: TypeAlias = int | str
"""Which part of a fused parameter: "q", "k" or "v"; 0 for gate and 1 for up."""


class LoadableParameter(nn.Parameter):
    """A parameter that knows how to be filled: `param.weight_loader(param, loaded_weight[, loaded_shard_id])`."""

    weight_loader: Callable[..., None]


@dataclass(frozen=True, slots=True)
class _Shard:
    """Where one loaded tensor goes, in indices along `dim`: its [start, start + shard_size) to shard_offset here."""

    name: str
    shard_offset: int
    shard_size: int
    start: int
    loaded_size: int
    dim: int = 0


class LinearBase(nn.Module):
    """y = x W^T + b with `weight [output_size, input_size]` and `bias [output_size]` or None, uninitialised.

    Sizes are those of this TP rank. `dtype` is any floating dtype of torch (None: torch's default), `device` any
    device. Parameters do not require gradients. Raises `UsageError` for sizes or ranks that cannot be.
    """

    weight: LoadableParameter
    bias: LoadableParameter | None

    def __init__(  # the field's signature, plus what must not be global state
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,  # noqa: FBT001, FBT002  # positional in every engine
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_rank(tp_rank, tp_size)
        self.input_size, self.output_size = input_size, output_size
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.weight = self._parameter((output_size, input_size), dtype, device)
        if bias:
            self.bias = self._parameter((output_size,), dtype, device)
        else:
            self.register_parameter("bias", None)

    def _parameter(
        self, shape: tuple[int, ...], dtype: torch.dtype | None, device: torch.device | str | None
    ) -> LoadableParameter:
        if min(shape) < 0:
            raise UsageError(f"{type(self).__name__} has a negative size", found=list(shape))
        parameter = LoadableParameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
        parameter.weight_loader = self.weight_loader
        return parameter

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Copy a whole tensor of the parameter's own shape and dtype; raises `CheckpointError` for any other."""
        rows = param.shape[0]
        self._load(param, loaded_weight, _Shard("the tensor", 0, rows, 0, rows))

    def _load(self, param: nn.Parameter, loaded: Tensor, shard: _Shard) -> None:
        wanted = list(param.shape)
        wanted[shard.dim] = shard.loaded_size
        if list(loaded.shape) != wanted:
            problem = f"cannot load {shard.name} into {type(self).__name__}: wrong shape"
            raise CheckpointError(problem, found=list(loaded.shape), wanted=wanted)
        if loaded.dtype != param.dtype:  # copy_ would convert without a word
            problem = f"cannot load {shard.name} into {type(self).__name__}: wrong dtype"
            raise CheckpointError(problem, found=loaded.dtype, wanted=param.dtype)
        rows = param.data.narrow(shard.dim, shard.shard_offset, shard.shard_size)
        rows.copy_(loaded.narrow(shard.dim, shard.start, shard.shard_size))

    def forward(self, x: Tensor) -> Tensor:
        """One GEMM: x [..., input_size] -> [..., output_size]; the parts of a fused layer are consecutive columns."""
        return F.linear(x, self.weight, self.bias)


class ReplicatedLinear(LinearBase):
    """The whole matrix on every TP rank."""


class ColumnParallelLinear(LinearBase):
    """`weight [output_size / tp_size, input_size]`: rank r holds rows [r, r + 1) * output_size / tp_size, bias too."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,  # noqa: FBT001, FBT002
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        rows = _divide(output_size, tp_size, "output_size")
        super().__init__(input_size, rows, bias, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, device=device)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Copy this rank's rows of a whole weight or bias; raises `CheckpointError` for a wrong shape or dtype."""
        rows = self.output_size
        self._load(param, loaded_weight, _Shard("the tensor", 0, rows, self.tp_rank * rows, self.tp_size * rows))


class RowParallelLinear(LinearBase):
    """`weight [output_size, input_size / tp_size]`: rank r holds columns; the bias is whole on every rank.

    x holds this rank's input features. The sum of all ranks' outputs is the layer's, so only rank 0 adds the bias.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,  # noqa: FBT001, FBT002
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        columns = _divide(input_size, tp_size, "input_size")
        super().__init__(columns, output_size, bias, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, device=device)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Copy this rank's columns of a whole weight, or a whole bias; raises `CheckpointError` for a wrong one."""
        if param.dim() == 1:
            super().weight_loader(param, loaded_weight)
            return
        columns = self.input_size
        whole = self.tp_size * columns
        self._load(param, loaded_weight, _Shard("the tensor", 0, columns, self.tp_rank * columns, whole, dim=1))

    def forward(self, x: Tensor) -> Tensor:
        """One GEMM: x [..., input_size / tp_size] -> this rank's summand [..., output_size]."""
        return F.linear(x, self.weight, self.bias if self.tp_rank == 0 else None)


class _FusedLinear(LinearBase):
    """A parameter made of parts along dim 0. `shards` says where each part goes, by shard_id, in the fused order."""

    shards: Mapping[ShardId, _Shard]

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
        sizes = [_divide(size, tp_size, "an output size") for size in self.output_sizes]
        offsets = accumulate(sizes, initial=0)
        self.shards = {
            number: _Shard(f"shard {number}", offset, size, tp_rank * size, tp_size * size)
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
        self.num_heads = _divide(total_num_heads, tp_size, "total_num_heads")
        replicas = 1 if total_kv >= tp_size or total_kv < 1 else _divide(tp_size, total_kv, "tp_size")
        self.num_kv_heads = 1 if replicas > 1 else _divide(total_kv, tp_size, "total_num_kv_heads")
        q, kv = self.num_heads * head_size, self.num_kv_heads * head_size
        kv_start, kv_loaded = tp_rank // replicas * kv, total_kv * head_size
        self.shards = {
            "q": _Shard("shard q", 0, q, tp_rank * q, tp_size * q),
            "k": _Shard("shard k", q, kv, kv_start, kv_loaded),
            "v": _Shard("shard v", q + kv, kv, kv_start, kv_loaded),
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
    heads = _divide(rows["q"], head_size, "the number of q rows", by="head_size")
    kv_heads = _divide(rows["k"], head_size, "the number of k rows", by="head_size")
    return QKVParallelLinear(columns, head_size, heads, kv_heads, bias, dtype=first.dtype, device=first.device)


def _check_rank(tp_rank: int, tp_size: int) -> None:
    if not 0 <= tp_rank < tp_size:
        raise UsageError("no such TP rank", found=f"rank {tp_rank} of {tp_size}", wanted="0 <= rank < size")


def _divide(whole: int, pieces: int, what: str, *, by: str = "tp_size") -> int:
    if pieces < 1 or whole % pieces:
        raise UsageError(f"{what} cannot be divided by {by}", found=f"{whole} / {pieces}", wanted="a whole number")
    return whole // pieces
