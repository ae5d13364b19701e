"""What bench measured, as values; without torch, so that reading a report costs none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["faster", "slower", "no gain"]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call: every sample in the order taken, and their median."""

    median: float
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Launches:
    """What one forward launches, as torch.profiler counted it: (name, how often) of GEMM operations, or of GPU kernels."""

    separate: tuple[tuple[str, int], ...]
    fused: tuple[tuple[str, int], ...]
    separate_total: int
    fused_total: int


@dataclass(frozen=True, slots=True)
class Case:
    """One size of hidden states [batch, input size] in one mode; `calls` is how many make a sample."""

    phase: str
    batch: int
    mode: Literal["eager", "cuda graph"]
    calls: int
    separate: Timing
    fused: Timing
    ratio: float
    """Separate / fused: above 1 the fused projection is faster."""
    noise: float
    """The separate projections against themselves, as a share of 1."""
    outcome: Outcome
    launches: Launches
    hidden_bytes_separate: int
    hidden_bytes_fused: int


@dataclass(frozen=True, slots=True)
class ProjectionBench:
    """A fused projection against its parts. `parts`: (name, shard_offset, rows)."""

    tensor: str
    dtype: str
    input_size: int
    output_size: int
    parts: tuple[tuple[str, int, int], ...]
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True)
class LoadBench:
    """Files -> parameters by safetensors.safe_open and the weight_loaders, for the fused projections of some layers."""

    layers: int
    bytes: int
    split_tensors: int
    fused_tensors: int
    split: Timing
    fused: Timing
    ratio: float
    noise: float
    outcome: Outcome
