"""What one forward launches, as torch.profiler counts it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from fusecheck.measure.timing import Run
from fusecheck.measure.values import Launches

_GEMMS = frozenset({"mm", "addmm", "mv", "addmv", "bmm", "baddbmm", "dot", "mkldnn_linear", "_addmm_activation"})


def count_launches(separate: Run, fused: Run, device: torch.device) -> Launches:
    """GPU kernels on a GPU, GEMM operations on a CPU, which launches none."""
    counts = [_count(separate, device), _count(fused, device)]
    one, two = (tuple(sorted(count.items())) for count in counts)
    return Launches(one, two, counts[0].total(), counts[1].total())


def _count(call: Run, device: torch.device) -> Counter[str]:
    on_gpu = device.type == "cuda"
    call()  # libraries load their kernels at the first call
    with (
        _hushed(),
        profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler,
    ):
        call()
        if on_gpu:
            torch.cuda.synchronize(device)
    names = []
    for event in profiler.events() or ():
        if on_gpu and event.device_type.name == "CUDA":
            names += [] if event.name.startswith(("Memcpy", "Memset")) else [event.name]
        elif not on_gpu and event.name.rpartition(":")[2] in _GEMMS:
            names.append(event.name)
    return Counter(names)


@contextmanager
def _hushed() -> Iterator[None]:
    """The profiler's library writes trace marks to descriptor 2, whatever its log level; nobody asked for them."""
    try:
        kept = os.dup(2)
    except OSError:
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
