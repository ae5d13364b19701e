"""The Linear family of the engines, small: parameters of the engine's shape, and the `weight_loader` that fills them.

A tensor is loaded as an engine loads it: narrow to this rank's run, then `copy_`. No arithmetic, no dtype change.

TP rank and TP size are arguments, never global state, and nothing here communicates: a `RowParallelLinear` returns
its rank's summand, and the caller adds them up. Names and signatures are those of vLLM and nano-vllm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  # the field's name for it
from torch import Tensor, nn

from fusecheck.errors import CheckpointError, UsageError


class LoadableParameter(nn.Parameter):
    """A parameter that knows how to be filled: `param.weight_loader(param, loaded_weight[, loaded_shard_id])`."""

    weight_loader: Callable[..., None]


@dataclass(frozen=True, slots=True)
class Placed:
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
        self._load(param, loaded_weight, Placed("the tensor", 0, rows, 0, rows))

    def _load(self, param: nn.Parameter, loaded: Tensor, shard: Placed) -> None:
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
        rows = divided(output_size, tp_size, "output_size")
        super().__init__(input_size, rows, bias, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, device=device)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Copy this rank's rows of a whole weight or bias; raises `CheckpointError` for a wrong shape or dtype."""
        rows = self.output_size
        self._load(param, loaded_weight, Placed("the tensor", 0, rows, self.tp_rank * rows, self.tp_size * rows))


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
        columns = divided(input_size, tp_size, "input_size")
        super().__init__(columns, output_size, bias, tp_rank=tp_rank, tp_size=tp_size, dtype=dtype, device=device)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor) -> None:
        """Copy this rank's columns of a whole weight, or a whole bias; raises `CheckpointError` for a wrong one."""
        if param.dim() == 1:
            super().weight_loader(param, loaded_weight)
            return
        columns = self.input_size
        whole = self.tp_size * columns
        self._load(param, loaded_weight, Placed("the tensor", 0, columns, self.tp_rank * columns, whole, dim=1))

    def forward(self, x: Tensor) -> Tensor:
        """One GEMM: x [..., input_size / tp_size] -> this rank's summand [..., output_size]."""
        return F.linear(x, self.weight, self.bias if self.tp_rank == 0 else None)


def _check_rank(tp_rank: int, tp_size: int) -> None:
    if not 0 <= tp_rank < tp_size:
        raise UsageError("no such TP rank", found=f"rank {tp_rank} of {tp_size}", wanted="0 <= rank < size")


def divided(whole: int, pieces: int, what: str, *, by: str = "tp_size") -> int:
    """`whole / pieces`. UsageError where that is no whole number."""
    if pieces < 1 or whole % pieces:
        raise UsageError(f"{what} cannot be divided by {by}", found=f"{whole} / {pieces}", wanted="a whole number")
    return whole // pieces
