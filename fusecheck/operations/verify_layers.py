"""verify_layers: one machine's share of a proof, the projections of some layers on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fusecheck.case import opened_case
from fusecheck.errors import SystemFailure, UsageError
from fusecheck.exact import Finding
from fusecheck.on_device import prepare, project
from fusecheck.verdicts import ProjectionCheck, verdicts_of


@dataclass(frozen=True, slots=True)
class LayersReport:
    """What the projections of `layers` came to. `findings` are what makes OUT no sound checkpoint, by its headers.

    `proved` names probe and numeric at most: nothing here has seen the bytes of every tensor.
    """

    verdict: Literal["equal", "not_equal", "not_run"]
    """not_run: nothing could be compared, as each projection says."""
    out: str
    source: str
    proved: tuple[str, ...]
    layers: tuple[int, ...]
    projections: tuple[ProjectionCheck, ...]
    device: str | None
    device_note: str | None
    seed: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def verify_layers(
    out: str | Path,
    layers: Sequence[int] = (),
    *,
    source: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
    all_experts: bool = False,
) -> LayersReport:
    """Read the projections of `layers` (default: first, middle, last) as an engine does, run them, fused against split.

    Only these tensors are read, so that several devices can share a model's layers. It is no proof of the rest: that is
    `verify(out, exact_only=True)`, once, anywhere. Without `source` the one that the manifest records is taken.
    UsageError (exit 2) where there is no source or no such layer, CheckpointError (3) where the source is malformed,
    SystemFailure (4) where torch is missing or the environment fails.
    """
    with opened_case(out, source) as case:
        if case.source is None:
            raise UsageError("layers alone need the source to be there", file=case.place, remedy="pass source")
        lab = prepare(case, tuple(layers), device)
        if lab.device is None:
            raise SystemFailure("probe and numeric need torch, which is missing", remedy="pip install torch")
        projections = project(case, lab, seed, all_experts=all_experts)
        failed, proved = verdicts_of(projections)
        return LayersReport(
            verdict="not_equal" if failed or case.findings else "equal" if proved else "not_run",
            out=case.place,
            source=case.source.files.place,
            proved=proved,
            layers=lab.layers,
            projections=projections,
            device=lab.name,
            device_note=lab.note,
            seed=seed,
            findings=tuple(dict.fromkeys(case.findings)),
            notes=tuple(case.notes),
            warnings=tuple(case.warnings),
        )
