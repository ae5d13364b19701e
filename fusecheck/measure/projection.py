"""One projection of one layer, apart and fused, on a device: read, multiplied, timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  # the field's name for it
from torch import Tensor

from fusecheck.bounds import DTYPES
from fusecheck.checkpoint import Checkpoint
from fusecheck.errors import CheckpointError, UnsupportedCheckpoint
from fusecheck.mapping import Packing
from fusecheck.measure.launches import count_launches
from fusecheck.measure.timing import Mode, calibrate, clock_of, compare, eager, graphed
from fusecheck.measure.values import Case, Launches, ProjectionBench
from fusecheck.tensors import load_tensor

CASES = (("decode", 1), ("decode", 4), ("decode", 16), ("decode", 64), ("prefill", 512))
"""Phase and rows of the hidden states."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One projection both ways, on the device: (name, weight, bias) of each part in the fused order, and the fused."""

    tensor: str
    parts: tuple[tuple[str, Tensor, Tensor | None], ...]
    weight: Tensor
    bias: Tensor | None

    def separate(self, x: Tensor) -> list[Tensor]:
        """Hidden states [batch, in] through each part."""
        return [F.linear(x, weight, bias) for _, weight, bias in self.parts]

    def fused(self, x: Tensor) -> list[Tensor]:
        """Hidden states [batch, in] through the fused weight; to split the output is a view and costs no launch."""
        out = F.linear(x, self.weight, self.bias)
        return list(torch.split(out, [len(weight) for _, weight, _ in self.parts], dim=-1))


def read_pair(
    prefix: str, packing: Packing, out: Checkpoint, source: Checkpoint | None, device: torch.device, notes: list[str]
) -> Pair:
    """The projection at `prefix` from both checkpoints; without a source its parts are copies of the fused rows."""
    name, bias_name = f"{prefix}{packing.fused}.weight", f"{prefix}{packing.fused}.bias"
    weight = load_tensor(out, name).to(device)
    if weight.dtype not in DTYPES:
        raise UnsupportedCheckpoint("cannot be multiplied by F.linear as it is", tensor=name, found=weight.dtype)
    bias = load_tensor(out, bias_name).to(device) if bias_name in out.tensors else None
    parts = []
    for (_, module), rows in zip(packing.parts, out.config.rows(packing), strict=True):
        own = slice(rows.shard_offset, rows.shard_offset + rows.shard_size)
        split = f"{prefix}{module}"
        if source is not None and f"{split}.weight" in source.tensors:
            part = load_tensor(source, f"{split}.weight").to(device)
            part_bias = load_tensor(source, f"{split}.bias").to(device) if bias is not None else None
            if part.shape != weight[own].shape or part.dtype != weight.dtype:
                raise CheckpointError("is not the source of OUT", tensor=f"{split}.weight", found=list(part.shape))
        else:
            note = "split weights are copies of the fused weight's rows"
            notes += [note] if source is not None and note not in notes else []
            part, part_bias = weight[own].clone(), None if bias is None else bias[own].clone()
        parts.append((module.rpartition(".")[2], part, part_bias))
    return Pair(name, tuple(parts), weight, bias)


def modes_of(device: torch.device) -> tuple[Mode, ...]:
    """Eager, and CUDA graphs where there are any."""
    return (eager, graphed) if device.type == "cuda" else (eager,)


def measure_projection(pair: Pair, seed: int, on_step: Callable[[], None]) -> ProjectionBench:
    """Every case in every mode of its device, a step each; hidden states are drawn by `seed`."""
    rows, columns = pair.weight.shape
    generator = torch.Generator().manual_seed(seed)
    cases: list[Case] = []
    for phase, batch in CASES:
        x = torch.randn(batch, columns, generator=generator).to(pair.weight)
        launches = count_launches(partial(pair.separate, x), partial(pair.fused, x), x.device)
        for mode in modes_of(x.device):
            cases.append(_case(phase, batch, pair, x, launches, mode))
            on_step()
    offset, parts = 0, []
    for name, weight, _ in pair.parts:
        parts.append((name, offset, len(weight)))
        offset += len(weight)
    dtype = str(pair.weight.dtype).removeprefix("torch.")
    return ProjectionBench(pair.tensor, dtype, columns, rows, tuple(parts), tuple(cases))


def _case(phase: str, batch: int, pair: Pair, x: Tensor, launches: Launches, mode: Mode) -> Case:
    clock = clock_of(x.device)
    calls, rounds = calibrate(partial(pair.separate, x), clock)
    separate, fused = mode(partial(pair.separate, x), calls), mode(partial(pair.fused, x), calls)
    found = compare(separate, fused, clock, calls=calls, rounds=rounds)
    read = x.numel() * x.element_size()
    return Case(
        phase=phase,
        batch=batch,
        mode="eager" if mode is eager else "cuda graph",
        calls=calls,
        separate=found.separate,
        fused=found.fused,
        ratio=found.ratio,
        noise=found.noise,
        outcome=found.outcome,
        launches=launches,
        hidden_bytes_separate=read * len(pair.parts),
        hidden_bytes_fused=read,
    )
