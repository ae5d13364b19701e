"""bench: what fusing buys on this device. Latency, launches as counted, hidden-state reads, load time; nothing assumed.

Only what fusing changes is measured: q, k, v and gate, up of one layer, apart and fused. A ratio is believed only where
it exceeds what the separate projections show against themselves.
"""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fusecheck import __version__, digest
from fusecheck.checkpoint import Checkpoint, open_checkpoint
from fusecheck.errors import FusecheckError, SystemFailure, UsageError
from fusecheck.hub import resolve
from fusecheck.manifest import Manifest, read_manifest
from fusecheck.mapping import PACKINGS
from fusecheck.measure.values import LoadBench, ProjectionBench
from fusecheck.measure.words import summarise
from fusecheck.model import survey
from fusecheck.reader import Progress
from fusecheck.source import is_recorded, recorded_folder, source_in_words

if TYPE_CHECKING:
    import torch


METHOD = (
    "separate and fused in turn, A B A B, after a warm-up; a sample is the mean of back-to-back calls",
    "weights may stay in a cache between calls, which in a whole model they often cannot",
    "ratio: median over the rounds of separate / fused, each round by itself",
    "noise: median step from one sample of the separate projections to their next; a ratio within it is no gain",
    "hidden-state reads: one per GEMM, by construction, not by a counter of the device",
)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All that was measured. `counted` says what a launch is on this device; `summary` is the result in words."""

    verdict: Literal["measured"]
    out: str
    source: str | None
    layer: int
    seed: int
    device: str
    device_note: str
    threads: int
    """Of torch, on the CPU."""
    counted: str
    projections: tuple[ProjectionBench, ...]
    load: LoadBench | None
    summary: tuple[str, ...]
    method: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def bench(
    out: str | Path,
    *,
    source: str | Path | None = None,
    device: str = "auto",
    layer: int = 0,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> BenchReport:
    """Measure what fusing buys for one layer of the fused checkpoint `out` on a device.

    Without the source (given, or recorded in the manifest and still that one) the split weights are cut out of the fused
    ones. UsageError (exit 2) where there is nothing to measure, CheckpointError (3) where OUT or SRC is malformed,
    SystemFailure (4) where torch or the device is missing.
    """
    folder = Path(out)
    if not os.fspath(out) or not folder.is_dir():
        raise UsageError("OUT is no folder", file=str(out), remedy="name what `fusecheck fuse` made")
    if importlib.util.find_spec("torch") is None:
        raise SystemFailure("bench needs torch, which is missing", remedy="pip install torch")
    from fusecheck.device import pick_device, pinned  # noqa: PLC0415 - torch costs seconds and 200 MB
    from fusecheck.measure.load import measure_load  # noqa: PLC0415

    chosen = pick_device(device)
    with ExitStack() as stack:
        opened = stack.enter_context(open_checkpoint(folder, follow_links=True))
        notes: list[str] = []
        origin = _open_source(folder, source, read_manifest(folder), notes)
        if origin is not None:
            stack.enter_context(origin)
        stack.enter_context(pinned(chosen))
        warnings = _busy()
        steps = _Steps(on_progress)
        prefix = survey(opened.tensors, opened.config, opened.peek, keep_split=True).prefix
        projections = _projections(opened, origin, prefix, layer, chosen, seed, steps, notes)
        load = measure_load(opened, origin, prefix, chosen, steps.step, notes)
        for checkpoint in filter(None, (opened, origin)):
            checkpoint.files.check_unchanged()
    return _report(folder, origin, chosen, projections, load, layer=layer, seed=seed, notes=notes, warnings=warnings)


def _report(
    out: Path,
    source: Checkpoint | None,
    device: torch.device,
    projections: tuple[ProjectionBench, ...],
    load: LoadBench | None,
    *,
    layer: int,
    seed: int,
    notes: Sequence[str],
    warnings: Sequence[str],
) -> BenchReport:
    import torch  # noqa: PLC0415

    from fusecheck.device import describe  # noqa: PLC0415

    about = describe(device)
    return BenchReport(
        verdict="measured",
        out=str(out),
        source=source.files.place if source is not None else None,
        layer=layer,
        seed=seed,
        device=about.name,
        device_note=about.note,
        threads=torch.get_num_threads(),
        counted="GPU kernels" if device.type == "cuda" else "GEMM operations (a CPU launches no kernels)",
        projections=projections,
        load=load,
        summary=tuple(summarise(projections, load)),
        method=METHOD,
        versions=_versions(),
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _busy() -> list[str]:
    """On shared cores the threads of a GEMM wait for each other for whole time slices, once per launch."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < cores / 2:
        return []
    return [f"this machine was busy before ({load:.1f} runnable on {cores} cores): gains may be of waiting less"]


class _Steps:
    """Counts what is done; the total is known once the projections are."""

    def __init__(self, on_progress: Progress | None) -> None:
        self._on_progress = on_progress
        self.done = self.total = 0

    def step(self) -> None:
        self.done += 1
        if self._on_progress is not None:
            self._on_progress(self.done, self.total)


def _versions() -> tuple[tuple[str, str], ...]:
    import safetensors  # noqa: PLC0415
    import torch  # noqa: PLC0415

    found = {
        "fusecheck": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "CUDA": torch.version.cuda,
    }
    return tuple((name, version) for name, version in found.items() if version)


def _open_source(
    out: Path, source: str | Path | None, manifest: Manifest | None, notes: list[str]
) -> Checkpoint | None:
    """The source that was named, else the one that the manifest records if it is still that one, else None."""
    if source is not None:
        return open_checkpoint(resolve(os.fspath(source)).folder, follow_links=True)
    gone = "the split weights are cut out of the fused ones, and loading split is not measured"
    if manifest is None:
        notes.append(f"no source is recorded: {gone}")
        return None
    folder = recorded_folder(out, manifest)
    if folder is None:
        notes.append(f"{source_in_words(manifest)} is not there: {gone}")
        return None
    try:
        opened = open_checkpoint(folder, follow_links=True)
    except FusecheckError as error:
        notes.append(f"the recorded source cannot be read ({error}): {gone}")
        return None
    if digest.available() and not is_recorded(opened, manifest):
        opened.files.close()
        notes.append(f"what is at the recorded place is not the recorded source: {gone}")
        return None
    return opened


def _projections(
    out: Checkpoint,
    source: Checkpoint | None,
    prefix: str,
    layer: int,
    device: torch.device,
    seed: int,
    steps: _Steps,
    notes: list[str],
) -> tuple[ProjectionBench, ...]:
    import torch  # noqa: PLC0415

    from fusecheck.measure.load import LOAD_ROUNDS  # noqa: PLC0415
    from fusecheck.measure.projection import CASES, measure_projection, modes_of, read_pair  # noqa: PLC0415

    count = out.config.num_hidden_layers
    if not 0 <= layer < count:
        raise UsageError("--layer is beyond the model", found=layer, wanted=f"0 to {count - 1}")
    prefix = f"{prefix}layers.{layer}."
    packings = [packing for packing in PACKINGS if f"{prefix}{packing.fused}.weight" in out.tensors]
    if not packings:
        problem, remedy = "this layer has no fused projection to measure", "name a layer, or a folder, that is fused"
        raise UsageError(problem, file=out.files.place, found=f"layer {layer}", remedy=remedy)
    steps.total = len(packings) * len(CASES) * len(modes_of(device)) + LOAD_ROUNDS
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()  # events and graphs go there
    with current:
        pairs = (read_pair(prefix, packing, out, source, device, notes) for packing in packings)
        return tuple(measure_projection(pair, seed, steps.step) for pair in pairs)
