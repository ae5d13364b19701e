"""The device that a check or a measurement runs on, and the settings of its GEMMs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fusecheck.errors import SystemFailure, UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """A device for people: `name` as the driver gives it (foreign text), `kind` cpu or cuda, `note` what is assumed."""

    name: str
    kind: str
    note: str


def pick_device(requested: str) -> torch.device:
    """Return the device for "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".

    Raises `SystemFailure` (exit 4) when CUDA or its device N is not there, `UsageError` (exit 2) for anything else.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(0|[1-9][0-9]{0,3}))?", requested)
    if match is None:
        raise UsageError("unknown device", found=requested, wanted="auto, cpu, cuda or cuda:N")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver that is too old is said so by the error below
        count = torch.cuda.device_count() if requested != "cpu" and torch.cuda.is_available() else 0
    if requested == "cpu" or (requested == "auto" and not count):
        return torch.device("cpu")
    number = int(match[1] or 0)
    if number >= count:
        raise SystemFailure("no such device", found=f"{count} CUDA devices", wanted=requested)
    return torch.device("cuda", number)


def describe(device: torch.device) -> Device:
    """Name a device and say what the bound assumes of it."""
    pinned = "TF32, reduced-precision reductions and fp16 accumulation pinned off"
    if device.type == "cuda":
        return Device(torch.cuda.get_device_name(device), "cuda", f"{pinned}; bf16 and fp16 bound of tensor cores")
    return Device(f"CPU ({torch.backends.cpu.get_cpu_capability()})", device.type, pinned)


@contextmanager
def pinned(device: torch.device) -> Iterator[None]:
    """Full-precision GEMMs: no TF32, reduced-precision reduction, fp16 accumulation, flush mode, autocast, gradients.

    Everything is set back on the way out. A failure of the device, out of memory above all, becomes `SystemFailure`.
    """
    switches = list(_switches())
    flushes = (torch.full((1,), 2.0**-140) * 1).item() == 0  # there is no getter
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer once its old and new settings disagree
        legacy = "highest"
    try:
        torch.set_flush_denormal(False)
        torch.set_float32_matmul_precision("highest")
        for owner, name, exact, _ in switches:
            setattr(owner, name, exact)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    except RuntimeError as error:
        if not re.search("memory|CUDA|CUBLAS", str(error)):
            raise  # a bug of ours
        first_line = str(error).partition("\n")[0]
        raise SystemFailure(f"the device failed: {first_line}", remedy="free its memory or use --device cpu") from error
    finally:
        torch.set_float32_matmul_precision(legacy)
        for owner, name, _, before in switches:
            setattr(owner, name, before)
        torch.set_flush_denormal(flushes)


def _switches() -> Iterator[tuple[object, str, object, object]]:
    """What this torch has of (owner, attribute, exact value, present value); versions differ."""
    cuda, cpu = torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)
    for owner, name, exact in (
        (cuda, "allow_bf16_reduced_precision_reduction", False),
        (cuda, "allow_fp16_reduced_precision_reduction", False),
        (cuda, "allow_fp16_accumulation", False),
        (cuda, "fp32_precision", "ieee"),
        (cpu, "fp32_precision", "ieee"),
    ):
        if hasattr(owner, name):
            before = getattr(owner, name)
            split_k = getattr(owner, f"{name}_split_k", None)  # set by the same setter, so it has to be put back too
            yield owner, name, exact, before if split_k is None else (before, split_k)
